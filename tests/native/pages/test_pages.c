/* Goal: no page is lost, given twice or scattered without need. Method: random alloc and free,
 * first mostly taking and then mostly giving back, against a map of who has what; each free slot of
 * the map holds a sentinel, each taken one the id of its batch (after TigerBeetle's node_pool).
 * Wrong frees are tests/test_bad_input.py's. */
#include "check.h"

enum { BATCHES_MAX = 512, STEPS = 4000, SENTINEL = 0 };

typedef struct owned {
    uint32_t id, count, *pages;
} owned;

static void take(cxlkv_pool *pool, uint32_t *map, owned *batch, uint32_t id, uint32_t count) {
    cxlkv_stats before = test_stats(pool);
    batch->pages = malloc((count + 1) * sizeof(uint32_t));
    CHECK(batch->pages);
    int64_t got = cxlkv_pages_alloc(pool, count, batch->pages);
    if (count > before.pages.free) {
        CHECK(got == -CXLKV_E_POOL_FULL);
        CHECK(test_stats(pool).pages.free == before.pages.free);
        free(batch->pages);
        batch->id = 0;
        return;
    }
    CHECK(got == count);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(batch->pages[i] < before.pages.total);
        CHECK(map[batch->pages[i]] == SENTINEL);
        map[batch->pages[i]] = id;
    }
    batch->id = id;
    batch->count = count;
}

static void give(cxlkv_pool *pool, uint32_t *map, owned *batch) {
    for (uint32_t i = 0; i < batch->count; i++) {
        CHECK(map[batch->pages[i]] == batch->id);
        map[batch->pages[i]] = SENTINEL;
    }
    CHECK(cxlkv_pages_free(pool, batch->count, batch->pages) == batch->count);
    free(batch->pages);
    batch->id = 0;
}

static void test_against_a_map(void) {
    uint64_t seed = 20261121;
    cxlkv_pool *pool = test_pool(NULL, 300);
    cxlkv_stats start = test_stats(pool);
    uint32_t *map = calloc(start.pages.total, sizeof(*map)), refused = 0, taken = 0;
    static owned batches[BATCHES_MAX];
    CHECK(map && start.pages.free == start.pages.total);
    for (uint32_t step = 1; step <= STEPS; step++) {
        uint32_t percent = step < STEPS / 2 ? 65 : 35;
        owned *batch = &batches[random_below(&seed, BATCHES_MAX)];
        if (batch->id) {
            if (random_below(&seed, 100) < percent) continue;
            give(pool, map, batch);
        } else if (random_below(&seed, 100) < percent) {
            take(pool, map, batch, step, random_below(&seed, 24));
            taken += batch->id != 0;
            refused += batch->id == 0;
        }
    }
    CHECK(taken > STEPS / 20 && refused > 10);
    for (uint32_t i = 0; i < BATCHES_MAX; i++)
        if (batches[i].id) give(pool, map, &batches[i]);
    CHECK(test_stats(pool).pages.free == start.pages.total);
    test_end(&pool, NULL);
    free(map);
}

/* Two sequences that grow by turns get runs of their own, each page behind the one before. */
static void test_runs_stay_together(void) {
    cxlkv_pool *pool = test_pool(NULL, 300);
    cxlkv_sequence *sequences[2];
    uint64_t marks[RUN_SLOTS * TEST_PAGE_TOKENS];
    test_marks(marks, 1, RUN_SLOTS * TEST_PAGE_TOKENS);
    for (int i = 0; i < 2; i++) CHECK(cxlkv_sequence_create(pool, &sequences[i]) == 0);
    for (uint32_t page = 0; page < RUN_SLOTS; page++)
        for (int i = 0; i < 2; i++)
            CHECK(test_append_all(sequences[i], marks, TEST_PAGE_TOKENS) >= 0);
    for (int i = 0; i < 2; i++) {
        uint32_t pages[RUN_SLOTS];
        CHECK(cxlkv_sequence_pages(sequences[i], pages, RUN_SLOTS) == RUN_SLOTS);
        for (uint32_t page = 0; page < RUN_SLOTS; page++) CHECK(pages[page] == pages[0] + page);
        CHECK(pages[0] % RUN_SLOTS == 0);
        cxlkv_sequence_destroy(&sequences[i]);
    }
    cxlkv_pool_destroy(&pool);
}

/* ---- where two hosts share the pool: pages that the other one reads in place stay ---- */

enum { SHARED_PAGES = 96, PINNED_PAGES = 40 };

static const cxlkv_host test_hosts[2] = {{.number = 0, .certified = 1, .lease_s = 0.05},
                                         {.number = 1, .certified = 0, .lease_s = 0.05}};

/* A sequence of SHARED_PAGES pages, whose first PINNED_PAGES the other host adopts. */
static cxlkv_sequence *show_some(cxlkv_pool *owner, cxlkv_pool *reader, const uint64_t *marks,
                                 cxlkv_sequence **sequence) {
    cxlkv_sequence *child, *adopted;
    uint8_t handle[8192];
    *sequence = test_sequence(owner, marks, SHARED_PAGES * TEST_PAGE_TOKENS);
    CHECK(cxlkv_sequence_fork(*sequence, &child) == 0);
    CHECK(cxlkv_sequence_export(*sequence, handle, sizeof(handle)) > 0); /* all are shown */
    CHECK(cxlkv_sequence_truncate(child, PINNED_PAGES * TEST_PAGE_TOKENS) == 0);
    int64_t bytes = cxlkv_sequence_export(child, handle, sizeof(handle));
    CHECK(bytes > 0 && cxlkv_sequence_adopt(reader, handle, (uint64_t)bytes, &adopted) == 0);
    cxlkv_sequence_destroy(&child);
    return adopted;
}

static void check_reads(cxlkv_sequence *adopted, const uint64_t *marks) {
    CHECK(test_verify_all(adopted, marks, PINNED_PAGES * TEST_PAGE_TOKENS) == 0);
}

/* It was never given up: whoever reads it may hand it on, to its owner as well. */
static void hand_back(cxlkv_pool *owner, cxlkv_sequence *adopted, const uint64_t *marks) {
    uint8_t handle[8192];
    cxlkv_sequence *again;
    int64_t bytes = cxlkv_sequence_export(adopted, handle, sizeof(handle));
    CHECK(bytes > 0 && cxlkv_sequence_adopt(owner, handle, (uint64_t)bytes, &again) == 0);
    check_reads(again, marks);
    CHECK(test_stats(owner).pages.withdrawn == 0);
    cxlkv_sequence_destroy(&again);
    CHECK(test_stats(owner).pages.withdrawn == PINNED_PAGES);
}

static void test_what_others_read_is_withdrawn(void) {
    static uint64_t marks[SHARED_PAGES * TEST_PAGE_TOKENS];
    const char *path = test_path("shared");
    cxlkv_layout layout = test_layout();
    cxlkv_sharing sharing = {.kind = CXLKV_SHARING_SOFTWARE, .durable = CXLKV_DURABLE_HOST,
                             .hosts = 2};
    cxlkv_pool *owner, *reader;
    cxlkv_sequence *sequence;
    test_marks(marks, 1, SHARED_PAGES * TEST_PAGE_TOKENS);
    CHECK(cxlkv_pool_create(path, &layout, &sharing, 16 << 20, 0, &test_hosts[0], 0, &owner) == 0);
    reader = test_open(path, &test_hosts[1]);
    cxlkv_sequence *adopted = show_some(owner, reader, marks, &sequence);
    cxlkv_stats held = test_stats(owner);
    cxlkv_sequence_destroy(&sequence);
    cxlkv_stats dropped = test_stats(owner);
    CHECK(dropped.pages.withdrawn == PINNED_PAGES && dropped.pages.held == 0);
    CHECK(dropped.pages.free == held.pages.free + SHARED_PAGES - PINNED_PAGES);
    check_reads(adopted, marks);
    hand_back(owner, adopted, marks);
    test_clean(owner);
    cxlkv_pool_destroy(&owner); /* who comes back finds the same */
    owner = test_open(path, &test_hosts[0]);
    cxlkv_stats again = test_stats(owner);
    CHECK(again.pages.withdrawn == PINNED_PAGES && again.pages.free == dropped.pages.free);
    check_reads(adopted, marks);
    cxlkv_sequence_destroy(&adopted);
    CHECK(test_stats(reader).pages.borrowed == 0);
    uint32_t *pages = malloc(again.pages.total * sizeof(*pages)), all = (uint32_t)held.pages.total;
    CHECK(pages && cxlkv_pages_alloc(owner, all, pages) == all); /* looks at the pins again */
    CHECK(test_stats(owner).pages.withdrawn == 0);
    CHECK(cxlkv_pages_free(owner, all, pages) == all);
    test_clean(owner);
    free(pages);
    cxlkv_pool_destroy(&reader);
    test_remove(&owner, path);
}

int main(void) {
    test_what_others_read_is_withdrawn();
    test_against_a_map();
    test_runs_stay_together();
    return 0;
}
