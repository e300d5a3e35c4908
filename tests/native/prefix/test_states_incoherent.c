/* Goal: a checkpoint, and the text before it, that one host publishes is found and read by another
 * whose caches do not see the first one's; in pages that had something else before, too.
 * Method: two hosts of one process on private caches (private_caches.h), the whole core above them;
 * copies that go past the caches, and copies that do not; one thread, and two. */
#include "pages/pages.h"
#include "pages/published.h"
#include "private_caches.h"
#include "state_tests.h"

typedef struct scene {
    const char *path;
    cxlkv_pool *hosts[2];
} scene;

/* K, V and digests are made as this CPU makes them best, and copied as private_caches.h does. */
static void kernels_make(bool streams) {
    void (*copies)(void *, const void *, size_t, uint32_t, size_t) = private_kernels.store_rows;
    CHECK(kernels_force("auto") == 0);
    private_kernels = *kernels_current();
    private_kernels.name = "serial";
    private_kernels.streams = streams;
    private_kernels.store_rows = copies;
    CHECK(kernels_force("serial") == 0);
}

static scene begin(uint64_t state_bytes, bool streams, uint32_t threads) {
    scene s = {.path = test_path("state-caches")};
    kernels_make(streams);
    cxlkv_pool *made = test_shared(s.path, state_layout(state_bytes),
                                   (cxlkv_sharing){.hosts = 2}, 8 << 20, 60);
    cxlkv_pool_destroy(&made);
    for (uint32_t i = 0; i < 2; i++) {
        s.hosts[i] = test_open_host(s.path, i, 60);
        CHECK(cxlkv_pool_set(s.hosts[i], CXLKV_SET_THREADS, threads) == 0);
        cache_begin(s.hosts[i]);
    }
    return s;
}

static void end(scene *s) {
    for (uint32_t i = 0; i < 2; i++) test_end(&s->hosts[i], NULL);
    caches_end();
    CHECK(cxlkv_pool_remove(s->path) == 0);
}

static void expect(cxlkv_pool *pool, const state_text *text, int64_t tokens, uint64_t number) {
    uint64_t found;
    CHECK(find_text(pool, text, &found) == tokens);
    CHECK(tokens == 0 || found == number);
}

/* Of tails of all lengths: the reader has looked for each before, and has its lines. */
static void test_found(scene *s) {
    for (uint64_t turn = 0; turn < 40; turn++) {
        cxlkv_pool *writer = s->hosts[turn % 2], *reader = s->hosts[1 - turn % 2];
        state_text text = text_of(100, (uint32_t)(1 + turn % 11));
        state_text more = text_of(100, text.tokens + 5);
        expect(reader, &more, 0, 0);
        CHECK(publish_text(writer, &text, turn) > 0);
        expect(reader, &more, text.tokens, turn);
        CHECK(publish_text(reader, &text, 99) == 0);
        expect(writer, &text, text.tokens, turn);
        forget_text(turn % 3 ? writer : reader, &text);
        expect(s->hosts[turn % 2], &text, 0, 0);
        expect(s->hosts[1 - turn % 2], &text, 0, 0);
    }
}

/* None of their pages is held, or pinned by the other one. */
static void expect_no_pins(scene *s) {
    for (int i = 0; i < 2; i++) {
        CHECK(host_lock(s->hosts[i]) == 0);
        withdrawn_look(s->hosts[i]);
        host_unlock(s->hosts[i]);
        cxlkv_stats stats = test_stats(s->hosts[i]);
        CHECK(stats.pages.withdrawn == 0 && stats.pages.held == 0);
        CHECK(stats.pages.published_only == 0);
    }
}

/* The tail before it is gone: a look at the checkpoint leaves no pin of it, and none
 * less where it is held. */
static void test_alone(scene *s) {
    for (int held = 0; held < 2; held++) {
        state_text text = text_of(400, 7), other = text_of(500, 7);
        cxlkv_sequence *hit = NULL;
        uint64_t hash[2];
        CHECK(publish_text(s->hosts[0], &text, 1) > 0);
        expect(s->hosts[1], &text, 7, 1);
        if (held) CHECK(match_text(s->hosts[1], &text, &hit) == 7);
        page_hash(last_key(&text), 0, 0, 0, hash);
        CHECK(host_lock(s->hosts[0]) == 0);
        CHECK(page_forget(s->hosts[0], hash, true));
        host_unlock(s->hosts[0]);
        expect(s->hosts[1], &text, 0, 0);
        forget_text(s->hosts[0], &text);
        CHECK(publish_text(s->hosts[0], &other, 2) > 0);
        if (hit) CHECK(test_stats(s->hosts[0]).pages.withdrawn >= state_pages(s->hosts[0]));
        if (hit) CHECK(read_number(s->hosts[1], hit) == 1);
        cxlkv_sequence_destroy(&hit);
        forget_text(s->hosts[0], &other);
        expect(s->hosts[1], &other, 0, 0);
        expect_no_pins(s);
    }
}

/* Text and tail of one host, checkpoint of the other. What is left of the first one's keeps the
 * second one's from it, until it publishes its own; nobody takes the other one's away. */
static void test_of_two(scene *s) {
    state_text text = text_of(200, 7);
    CHECK(publish_text(s->hosts[0], &text, 1) > 0);
    expect(s->hosts[1], &text, 7, 1);
    uint64_t hash[2];
    page_hash(last_key(&text), 0, 0, s->hosts[0]->geometry.part_count, hash);
    CHECK(host_lock(s->hosts[0]) == 0);
    CHECK(page_forget(s->hosts[0], hash, true));
    host_unlock(s->hosts[0]);
    expect(s->hosts[1], &text, 0, 0);
    CHECK(publish_text(s->hosts[1], &text, 2) > 0);
    bool is_one = state_pages(s->hosts[0]) == 1;
    for (int look = 0; look < 3; look++) {
        expect(s->hosts[0], &text, is_one ? 7 : 0, 2);
        expect(s->hosts[1], &text, 7, 2);
    }
    CHECK(publish_text(s->hosts[0], &text, 3) == (is_one ? 0 : state_pages(s->hosts[0])));
    for (int look = 0; look < 3; look++) {
        expect(s->hosts[0], &text, 7, is_one ? 2 : 3);
        expect(s->hosts[1], &text, 7, 2);
    }
    for (int i = 0; i < 2; i++) forget_text(s->hosts[i], &text);
    for (int i = 0; i < 2; i++) expect(s->hosts[i], &text, 0, 0);
}

/* What a reader holds stays, whatever its owner writes meanwhile. */
static void test_held(scene *s) {
    state_text text = text_of(300, 6);
    cxlkv_pool *owner = s->hosts[0], *reader = s->hosts[1];
    cxlkv_sequence *hit;
    CHECK(publish_text(owner, &text, 5) > 0);
    CHECK(match_text(reader, &text, &hit) == 6);
    forget_text(owner, &text);
    CHECK(test_stats(owner).pages.withdrawn > 0);
    for (uint64_t turn = 0; turn < 8; turn++) {
        CHECK(publish_text(owner, &text, 6 + turn) > 0);
        expect(owner, &text, 6, 6 + turn);
        cache_evict(0);
        CHECK(read_number(reader, hit) == 5);
        forget_text(owner, &text);
    }
    cxlkv_sequence_destroy(&hit);
    CHECK(publish_text(owner, &text, 50) > 0);
    expect(reader, &text, 6, 50);
    forget_text(owner, &text);
    expect(reader, &text, 0, 0);
    expect(owner, &text, 0, 0);
    expect_no_pins(s);
}

int main(void) {
    CHECK(kernels_force("auto") == 0);
    if (kernels_current() == &private_kernels) return puts("skipped: no vectors here"), 77;
    const uint64_t sizes[] = {300, 1792, 9000};
    for (uint32_t i = 0; i < 6; i++) {
        scene s = begin(sizes[i / 2], i % 2 == 0, 1 + (i + i / 2) % 2);
        test_found(&s);
        test_alone(&s);
        test_of_two(&s);
        test_held(&s);
        end(&s);
    }
    return 0;
}
