/* Goal: a checkpoint of any size, behind any token, is read as it was published; one that was not
 * published to its end is none, and another takes its place; threads that publish, forget and match
 * one text see whole ones only.
 * Method: sizes about the ends of pages; a process that is killed by its own hand after each store
 * of a line in turn (flush_store_line() and flush_store_word() are wrapped), in a pool of this host
 * and as another host; threads. */
#include <signal.h>
#include <sys/mman.h>

#include "base/flush.h"
#include "host/locks.h"
#include "pages/published.h"
#include "state_tests.h"

static cxlkv_pool *pool_of(const char *path, uint64_t state_bytes) {
    cxlkv_layout layout = state_layout(state_bytes);
    cxlkv_pool *pool;
    CHECK(cxlkv_pool_create(path, &layout, NULL, 4 << 20, 0, NULL, 0, &pool) == 0);
    return pool;
}

/* ---- sizes ---- */

static uint64_t payload_bytes(void) {
    cxlkv_pool *pool = pool_of(NULL, 1);
    uint64_t bytes = packing_of(pool, pool->geometry.part_count)->payload_bytes;
    CHECK(state_pages(pool) == 1);
    cxlkv_pool_destroy(&pool);
    return bytes;
}

static void one_size(uint64_t bytes, uint32_t pages) {
    cxlkv_pool *pool = pool_of(NULL, bytes);
    uint64_t number;
    CHECK(state_pages(pool) == pages);
    for (uint32_t tokens = 1; tokens <= 2 * TEST_PAGE_TOKENS + 1; tokens++) {
        state_text text = text_of(100, tokens), more = text_of(100, 3 * TEST_PAGE_TOKENS);
        CHECK(publish_text(pool, &text, tokens) == pages);
        CHECK(publish_text(pool, &text, 99) == 0);
        CHECK(find_text(pool, &text, &number) == tokens);
        CHECK(bytes < 8 || number == tokens);
        CHECK(find_text(pool, &more, &number) == tokens);
    }
    for (uint32_t tokens = 2 * TEST_PAGE_TOKENS + 1; tokens > 0; tokens--) {
        state_text text = text_of(100, tokens);
        forget_text(pool, &text);
    }
    CHECK(test_stats(pool).pages.free == test_stats(pool).pages.total);
    test_end(&pool, NULL);
}

/* The table of up to 16 pages is a line, of 17 two. */
static void sizes(void) {
    uint64_t page = payload_bytes();
    one_size(1, 1);
    one_size(page - 65, 1);
    one_size(page - 64, 1);
    one_size(page - 63, 2);
    one_size(2 * page - 64, 2);
    one_size(2 * page - 63, 3);
    one_size(16 * page - 64, 16);
    one_size(16 * page - 63, 17);
    one_size(17 * page - 128, 17);
    one_size(17 * page - 127, 18);
}

static void refusals(void) {
    cxlkv_pool *pool = pool_of(NULL, 500), *plain = test_pool(NULL, 64);
    state_text text = text_of(1, 6);
    uint8_t bytes[500] = {0};
    cxlkv_sequence *sequence = test_sequence(pool, text.marks, 6), *hit;
    cxlkv_sequence *other = test_sequence(plain, text.marks, 6);
    const uint8_t *key = last_key(&text);
    CHECK(cxlkv_publish_states(sequence, 6, key, bytes, 499) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_publish_states(sequence, 6, key, bytes, 501) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_publish_states(sequence, 0, key, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_publish_states(sequence, 7, key, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_publish_states(sequence, 6, NULL, bytes, 500) < 0);
    CHECK(cxlkv_publish_states(sequence, 6, key, NULL, 500) < 0);
    CHECK(cxlkv_publish_states(other, 6, key, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_read_states(sequence, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(match_text(pool, &text, &hit) == 0);
    CHECK(cxlkv_read_states(hit, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_read_states(hit, NULL, 500) < 0);
    cxlkv_sequence_destroy(&hit);
    cxlkv_sequence_destroy(&other);
    CHECK(test_append(sequence, 0, text.marks, 1) >= 0); /* not in the last layer yet */
    CHECK(cxlkv_publish_states(sequence, 7, key, bytes, 500) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_publish_states(sequence, 6, key, bytes, 500) == 1); /* K and V are not */
    CHECK(match_text(pool, &text, &hit) == 0);
    cxlkv_sequence_destroy(&hit);
    test_end(&pool, &sequence, NULL);
    test_end(&plain, NULL);
}

/* Never more than there is room for. */
static void places(void) {
    cxlkv_pool *pool = pool_of(NULL, 5000);
    state_text text = text_of(1, 6);
    uint32_t pages[3] = {7, 7, 7};
    uint64_t generations[3] = {7, 7, 7}, fetched = test_stats(pool).own.fetched_bytes;
    uint8_t names[16];
    cxlkv_sequence *hit, *plain = test_sequence(pool, text.marks, 6);
    CHECK(publish_text(pool, &text, 3) == state_pages(pool) && state_pages(pool) > 2);
    CHECK(match_text(pool, &text, &hit) == 6);
    CHECK(cxlkv_state_places(plain, pages, generations, 2) == 0);
    CHECK(pages[0] == 7 && generations[0] == 7);
    CHECK(cxlkv_state_places(hit, pages, generations, 2) == state_pages(pool));
    CHECK(pages[1] == hit->states[1] && generations[1] == pool->pages[pages[1]].generation);
    CHECK(pages[2] == 7 && generations[2] == 7);
    CHECK(cxlkv_state_places(hit, NULL, NULL, 0) == state_pages(pool));
    CHECK(cxlkv_state_places(hit, NULL, generations, 1) < 0);
    CHECK(cxlkv_state_names(pool, 1, NULL, 1, names) < 0);
    CHECK(cxlkv_state_names(pool, 1, text.keys, 1, NULL) < 0);
    CHECK(read_number(pool, hit) == 3);
    CHECK(test_stats(pool).own.fetched_bytes == fetched + pool->layout.state_bytes);
    test_end(&pool, &plain, &hit, NULL);
}

/* ---- lost memory ---- */

/* From a process that ends then. A load, or a store, of the page's keys raises SIGBUS. */
static void lose(cxlkv_pool *pool, uint32_t page, int nothing) {
    uintptr_t at = (uintptr_t)pieces_of(pool, page, 0, PIECE_KEYS) / 4096 * 4096;
    CHECK(mmap((void *)at, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, nothing, 0) ==
          (void *)at);
}

/* Errors, or less than there was, and what is published then is whole. */
static void use_lost(uint32_t place, int nothing) {
    cxlkv_pool *pool = pool_of(NULL, 5000);
    state_text text = text_of(100, 7);
    cxlkv_sequence *hit, *other;
    uint64_t number;
    uint8_t bytes[5000];
    CHECK(publish_text(pool, &text, 1) > 0);
    CHECK(match_text(pool, &text, &hit) == 7);
    lose(pool, hit->states[place], nothing);
    CHECK(match_text(pool, &text, &other) < 8);
    cxlkv_sequence_destroy(&other);
    CHECK(cxlkv_read_states(hit, bytes, sizeof(bytes)) == -CXLKV_E_POISON);
    text = text_of(200, 8);
    cxlkv_sequence *sequence = test_sequence(pool, text.marks, 8);
    uint32_t next = 0;
    while (!page_is_free(pool, next)) next++;
    lose(pool, next + place, nothing);
    CHECK(cxlkv_publish_states(sequence, 8, last_key(&text), bytes, 5000) == -CXLKV_E_POISON);
    CHECK(publish_text(pool, &text, 2) == state_pages(pool));
    CHECK(find_text(pool, &text, &number) == 8 && number == 2);
}

static void lost(void) {
    int nothing = memfd_create("nothing", 0);
    CHECK(nothing >= 0);
    for (uint32_t place = 0; place < 3; place++) {
        pid_t child = test_fork();
        if (child == 0) {
            use_lost(place, nothing);
            _exit(0);
        }
        test_ended(child, 0);
    }
    close(nothing);
}

/* ---- killed after each store ---- */

static int stores_left; /* then this process dies; 0: it does not */

static void stored(void) {
    if (stores_left && --stores_left == 0) kill(getpid(), SIGKILL);
}

void __real_flush_store_word(void *word, uint64_t value);
void __wrap_flush_store_word(void *word, uint64_t value) {
    __real_flush_store_word(word, value);
    stored();
}

void __real_flush_store_line(void *line, const void *from, uint32_t first_word);
void __wrap_flush_store_line(void *line, const void *from, uint32_t first_word) {
    __real_flush_store_line(line, from, first_word);
    stored();
}

#ifndef __SANITIZE_THREAD__ /* it dies of threads that are made after a fork */
/* Forgets the text, and publishes it anew. True: it was killed on its way, in publishing or not. */
static bool publish_dying(const char *path, uint32_t host, const state_text *text, int store,
                          uint64_t number, bool *publishing) {
    bool *said = mmap(NULL, sizeof(*said), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                      -1, 0);
    CHECK(said != MAP_FAILED);
    int status;
    pid_t child = test_fork();
    if (child == 0) {
        cxlkv_pool *pool = test_open_host(path, host, 0.05);
        stores_left = store;
        forget_text(pool, text);
        *said = true;
        CHECK(publish_text(pool, text, number) > 0);
        stores_left = 0;
        cxlkv_pool_destroy(&pool);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    *publishing = *said;
    CHECK(munmap(said, sizeof(*said)) == 0);
    return status != 0;
}

/* Of the checkpoint the host's own pages are all there, or none is. */
static void look_at_pages(cxlkv_pool *pool, const state_text *text) {
    uint32_t there = 0;
    CHECK(host_lock(pool) == 0);
    for (uint32_t i = 0; i < state_pages(pool); i++) {
        uint64_t hash[2];
        page_hash(last_key(text), 0, i, pool->geometry.part_count, hash);
        uint32_t page = index_find(pool, hash);
        there += page != NO_PAGE && page_is_ours(pool, page);
    }
    host_unlock(pool);
    CHECK(there == 0 || there == state_pages(pool));
}

/* What is found after a death: this text, with one of these checkpoints, or less of it. */
static void look(cxlkv_pool *pool, const state_text *text, uint64_t number) {
    uint64_t found;
    int64_t tokens = find_text(pool, text, &found);
    CHECK(tokens == 0 || (tokens == text->tokens && (found == number || found == number - 1)));
}

static void dies_at_each_store(uint32_t host) {
    const char *path = test_path("states");
    cxlkv_pool *pool;
    uint64_t number = 2, found;
    state_text text = text_of(100, 7);
    if (host) pool = test_shared(path, state_layout(5000), (cxlkv_sharing){.hosts = 2}, 8 << 20, 9);
    else pool = pool_of(path, 5000);
    bool died = true, publishing;
    int store = 1;
    for (; died; store++, number += 2) {
        CHECK(publish_text(pool, &text, number - 1) > 0);
        died = publish_dying(path, host, &text, store, number, &publishing);
        look(pool, &text, number);
        cxlkv_pool *its = host ? test_open_host(path, host, 0.05) : pool;
        if (publishing) look_at_pages(its, &text);
        if (host) cxlkv_pool_destroy(&its);
        test_clean(pool);
        forget_text(pool, &text);
        CHECK(publish_text(pool, &text, number) > 0);
        CHECK(find_text(pool, &text, &found) == 7 && found == number);
        forget_text(pool, &text);
    }
    printf("host %u: killed after each of %d stores\n", host, store - 2);
    CHECK(store > 10);
    test_clean(pool);
    cxlkv_pool_destroy(&pool);
    for (uint32_t number_of = 0; host && number_of < 2; number_of++) {
        pool = test_open_host(path, number_of, 0.05);
        cxlkv_pool_destroy(&pool);
    }
    CHECK(cxlkv_pool_remove(path) == 0);
}
#endif

/* ---- threads ---- */

enum { THREADS = 2, ROUNDS = 150 };

typedef struct worker_of {
    cxlkv_pool *pool;
    uint64_t first;
    uint64_t hits;
} worker_of;

static void *publish_often(void *context) {
    worker_of *own = context;
    state_text text = text_of(100, 7);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        CHECK(publish_text(own->pool, &text, own->first + i) >= 0);
        if (i % 3 == 0) forget_text(own->pool, &text);
    }
    return NULL;
}

static void *match_often(void *context) {
    worker_of *own = context;
    state_text text = text_of(100, 7);
    uint64_t number;
    for (uint64_t i = 0; i < ROUNDS; i++) {
        int64_t tokens = find_text(own->pool, &text, &number);
        CHECK(tokens == 0 || (tokens == 7 && number / 1000 >= 1 && number / 1000 <= THREADS));
        own->hits += tokens > 0;
    }
    return NULL;
}

static void threads_publish_and_match(void) {
    cxlkv_pool *pool = pool_of(NULL, 5000);
    state_text text = text_of(100, 7);
    pthread_t threads[2 * THREADS];
    worker_of workers[2 * THREADS];
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, 2) == 0);
    for (uint64_t i = 0; i < 2 * THREADS; i++) {
        workers[i] = (worker_of){.pool = pool, .first = 1000 * (i / 2 + 1)};
        CHECK(pthread_create(&threads[i], NULL, i % 2 ? match_often : publish_often,
                             &workers[i]) == 0);
    }
    for (int i = 0; i < 2 * THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    printf("%lu hits\n", workers[1].hits + workers[3].hits);
    forget_text(pool, &text);
    CHECK(test_stats(pool).pages.free == test_stats(pool).pages.total);
    test_end(&pool, NULL);
}

/* Of two who publish a text at once, one does. */
static void *publish_once(void *context) {
    worker_of *own = context;
    state_text text = text_of(100, 7);
    int64_t published = publish_text(own->pool, &text, own->first);
    CHECK(published >= 0);
    own->hits = (uint64_t)published;
    return NULL;
}

static void threads_publish_one_text(void) {
    cxlkv_pool *pool = pool_of(NULL, 60000);
    state_text text = text_of(100, 7);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        pthread_t threads[THREADS];
        worker_of workers[THREADS];
        for (uint64_t i = 0; i < THREADS; i++) {
            workers[i] = (worker_of){.pool = pool, .first = i};
            CHECK(pthread_create(&threads[i], NULL, publish_once, &workers[i]) == 0);
        }
        for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(workers[0].hits + workers[1].hits == state_pages(pool));
        forget_text(pool, &text);
    }
    CHECK(test_stats(pool).pages.free == test_stats(pool).pages.total);
    test_end(&pool, NULL);
}

int main(void) {
    sizes();
    refusals();
    places();
#ifndef __SANITIZE_THREAD__
    lost();
    dies_at_each_store(0);
    dies_at_each_store(1);
#endif
    threads_publish_and_match();
    threads_publish_one_text();
    return 0;
}
