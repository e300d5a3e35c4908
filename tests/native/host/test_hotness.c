/* Goal: counts halve, stop at their largest value and survive what other threads do to them; a
 * priority is a page's as long as it is published; a death in the middle of a change leaves rows
 * whose parents are pages that can be found. Method: heat set by hand, then used; threads that use
 * the same pages at once (for TSan); children that die inside the lock, some with random bytes
 * where the records of reuse were. */
#include "check.h"
#include "host/locks.h"
#include "pages/published.h"

enum { PAGES = 8, TOKENS = PAGES * TEST_PAGE_TOKENS, THREADS = 3, DEATHS = 40 };
#ifdef __SANITIZE_THREAD__
enum { ROUNDS = 300 };
#else
enum { ROUNDS = 2000 };
#endif

static cxlkv_sequence *written(cxlkv_pool *pool, uint64_t mark) {
    uint64_t marks[TOKENS];
    return test_written(pool, marks, mark, TOKENS);
}

static void fetch_all(cxlkv_sequence *sequence) {
    float k[TEST_HEADS * TOKENS * TEST_DIM], v[TEST_HEADS * TOKENS * TEST_DIM];
    cxlkv_fetch_args args = {.keys = k, .values = v, .key_capacity_bytes = sizeof(k),
                             .value_capacity_bytes = sizeof(v)};
    cxlkv_batch *batch = test_batch(sequence->pool, 1, &sequence);
    CHECK(cxlkv_batch_fetch(batch, &args) > 0);
    cxlkv_batch_destroy(&batch);
}

static void select_one(cxlkv_sequence *sequence) {
    float q[TEST_HEADS * TEST_DIM] = {1}, scores[TEST_HEADS];
    int32_t starts[2] = {0, 1}, pages[TEST_HEADS], counts[TEST_HEADS];
    cxlkv_budget budget = {.pages = 1};
    cxlkv_select_args args = {
        .q_heads = TEST_HEADS, .starts = starts, .by.budgets = &budget, .by.budget_count = 1,
        .scale = 1, .capacity = TEST_HEADS, .pages = pages, .scores = scores, .counts = counts,
        .queries = test_rows_at(q)};
    cxlkv_batch *batch = test_batch(sequence->pool, 1, &sequence);
    CHECK(cxlkv_batch_select(batch, &args) == 1);
    cxlkv_batch_destroy(&batch);
}

static uint32_t read_one(cxlkv_pool *pool, uint32_t page, uint32_t *epoch) {
    uint32_t count, seen;
    int64_t now = cxlkv_hotness_read(pool, page, 1, &count, &seen);
    CHECK(now >= 0);
    if (epoch) *epoch = seen;
    return count;
}

static void set_epoch(cxlkv_pool *pool, uint64_t epoch) {
    atomic_store(&pool->host->hotness_uses, 0);
    atomic_store(&pool->host->hotness_advances, epoch);
}

/* {epoch of the count, count, epoch now, what is read, what one use makes of it, and its epoch} */
static void test_one_count(void) {
    const uint32_t cases[][6] = {
        {0, 0, 0, 0, 1, 0},             {0, 1, 0, 1, 2, 0},
        {0, 8, 1, 4, 5, 1},             {0, 65534, 0, 65534, 65535, 0},
        {0, 65535, 0, 65535, 65535, 0}, {0, 65535, 15, 1, 2, 15},
        {0, 65535, 16, 0, 1, 16},       {0, 65535, 60000, 0, 1, 60000},
        {65535, 9, 0x10000, 4, 5, 0},   {0xffff, 12, 0x30001, 3, 4, 1},
        /* Counted by a thread that came later. */
        {7, 5, 6, 5, 6, 7},             {300, 5, 45, 5, 6, 300},
        {300, 0, 45, 0, 1, 45}};
    cxlkv_pool *pool = test_pool(NULL, 16);
    cxlkv_sequence *sequence = written(pool, 1);
    uint32_t page = sequence_page(sequence, 0, 0), epoch;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        const uint32_t *c = cases[i];
        set_epoch(pool, c[2]);
        atomic_store(&pool->hotness[page], c[0] << 16 | c[1]);
        CHECK(read_one(pool, page, NULL) == c[3]);
        fetch_all(sequence);
        CHECK(atomic_load(&pool->hotness[page]) == (c[5] << 16 | c[4]));
        CHECK(read_one(pool, page, &epoch) == c[4]);
        CHECK(epoch == c[2]); /* whole: more than the 16 bits that are kept */
    }
    uint32_t counts[1], epochs[1], pages = pool->host->page_count;
    CHECK(cxlkv_hotness_read(pool, pages, 0, counts, epochs) >= 0);
    CHECK(cxlkv_hotness_read(pool, pages, 1, counts, epochs) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_hotness_read(pool, 1, UINT32_MAX, counts, epochs) == -CXLKV_E_ARGUMENT);
    test_end(&pool, &sequence, NULL);
}

/* ---- several threads, the same pages ---- */

static void *use(void *argument) {
    for (uint32_t i = 0; i < ROUNDS; i++) {
        fetch_all(argument);
        select_one(argument);
    }
    return NULL;
}

static void test_threads(void) {
    cxlkv_pool *pool = test_pool(NULL, 16);
    cxlkv_sequence *sequence = written(pool, 1);
    uint8_t hashes[PAGES * 16];
    pthread_t threads[THREADS];
    test_hashes(hashes, 3, PAGES);
    CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, use, sequence));
    for (uint32_t i = 0; i < ROUNDS / 4; i++) {
        cxlkv_published rows[PAGES];
        uint64_t clock;
        test_hit(pool, PAGES, hashes, NULL);
        CHECK(cxlkv_pool_published(pool, rows, PAGES, &clock) == PAGES);
        CHECK(clock == PAGES * (i + 2));
        for (uint32_t row = 0; row < PAGES; row++) CHECK(rows[row].hits == i + 1);
    }
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    /* The uses are all counted, as they decide when an epoch ends; of the counts some are lost. */
    uint64_t uses = atomic_load(&pool->host->hotness_uses);
    CHECK(uses == (uint64_t)THREADS * ROUNDS * (PAGES + TEST_HEADS) + ROUNDS / 4 * PAGES);
    CHECK(read_one(pool, sequence_page(sequence, 0, 0), NULL) > 0);
    test_end(&pool, &sequence, NULL);
}

/* ---- priorities ---- */

static void check_priorities(cxlkv_pool *pool, const uint32_t *wanted) {
    cxlkv_published rows[PAGES];
    uint64_t clock;
    CHECK(cxlkv_pool_published(pool, rows, PAGES, &clock) == PAGES);
    for (uint32_t i = 0; i < PAGES; i++) CHECK(rows[i].priority == wanted[i]);
}

static void test_priorities(void) {
    enum { AT_LEAST = CXLKV_MARK_PRIORITY_AT_LEAST };
    cxlkv_pool *pool = test_pool(NULL, 16);
    cxlkv_sequence *sequence = written(pool, 1);
    uint8_t hashes[(PAGES + 1) * 16];
    test_hashes(hashes, 3, PAGES + 1);
    CHECK(cxlkv_mark(pool, PAGES, hashes, AT_LEAST, 1) == 0);
    CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    check_priorities(pool, (uint32_t[PAGES]){0});
    CHECK(cxlkv_mark(pool, 4, hashes, AT_LEAST, 2) == 4);
    CHECK(cxlkv_mark(pool, 2, hashes, AT_LEAST, 1) == 2); /* the higher stays */
    CHECK(cxlkv_mark(pool, 1, hashes, AT_LEAST, CXLKV_PRIORITY_MAX) == 1);
    CHECK(cxlkv_mark(pool, 2, hashes + 48, AT_LEAST, 7) == 2);
    check_priorities(pool, (uint32_t[PAGES]){CXLKV_PRIORITY_MAX, 2, 2, 7, 7});
    CHECK(cxlkv_mark(pool, 4, hashes, CXLKV_MARK_PRIORITY, 1) == 4);
    check_priorities(pool, (uint32_t[PAGES]){1, 1, 1, 1, 7});
    CHECK(cxlkv_mark(pool, 1, hashes, CXLKV_MARK_PRIORITY, CXLKV_PRIORITY_MAX + 1) ==
          -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_mark(pool, 1, hashes, AT_LEAST, UINT32_MAX) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_mark(pool, PAGES + 1, hashes, AT_LEAST, 0) == PAGES); /* one is not there */
    check_priorities(pool, (uint32_t[PAGES]){1, 1, 1, 1, 7});
    /* It goes with the page, and another text in the same page has none. */
    CHECK(cxlkv_forget(pool, PAGES, hashes, NULL) == PAGES);
    CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    check_priorities(pool, (uint32_t[PAGES]){0});
    test_end(&pool, &sequence, NULL);
}

/* ---- deaths ---- */

static void die_inside(const char *path, uint64_t *seed, bool scribbles) {
    pid_t child = test_fork();
    if (child != 0) {
        test_ended(child, 0);
        return;
    }
    cxlkv_pool *pool = test_open(path, NULL);
    CHECK(host_lock(pool) == 0);
    for (uint32_t page = 0; scribbles && page < pool->host->page_count; page++) {
        uint64_t words[3] = {random_next(seed), random_next(seed), random_next(seed)};
        memcpy(&pool->reuse[page], words, sizeof(pool->reuse[page]));
        /* Half of them near to what is right. */
        if (words[2] & 1) pool->reuse[page].parent_plus_one %= pool->host->page_count + 2;
    }
    _exit(0); /* with the lock */
}

static void check_rows(cxlkv_pool *pool, int64_t wanted) {
    cxlkv_published rows[64];
    uint64_t clock;
    CHECK(cxlkv_pool_published(pool, rows, 64, &clock) == wanted);
    for (int64_t i = 0; i < wanted; i++) {
        bool found = rows[i].parent == NO_PAGE;
        for (int64_t j = 0; j < wanted; j++) found |= rows[j].page == rows[i].parent;
        CHECK(found);
        CHECK(rows[i].page < pool->host->page_count && rows[i].hotness <= UINT16_MAX);
        CHECK(i == 0 || rows[i].page > rows[i - 1].page);
        CHECK(index_find(pool, rows[i].hash) == rows[i].page);
        CHECK(rows[i].part == 0 && rows[i].hits <= UINT16_MAX);
        CHECK(rows[i].priority <= CXLKV_PRIORITY_MAX);
    }
}

static void test_deaths(void) {
    const char *path = test_path("hotness");
    cxlkv_pool *pool = test_pool(path, 32);
    cxlkv_sequence *sequence = written(pool, 1);
    uint8_t hashes[PAGES * 16];
    uint64_t seed = 7;
    test_hashes(hashes, 3, PAGES);
    CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    die_inside(path, &seed, false); /* what was known is still known */
    cxlkv_published rows[64];
    uint64_t clock;
    CHECK(cxlkv_pool_published(pool, rows, 64, &clock) == PAGES && clock == PAGES);
    CHECK(test_stats(pool).all.rebuilds == 1);
    for (uint32_t i = 0; i < PAGES; i++)
        CHECK(rows[i].born == i + 1 && rows[i].parent == (i ? rows[i - 1].page : NO_PAGE));
    for (uint32_t i = 0; i < DEATHS; i++) {
        seed += 1000;
        die_inside(path, &seed, true);
        check_rows(pool, PAGES);
        test_hit(pool, PAGES, hashes, NULL);
        CHECK(cxlkv_pool_published(pool, rows, 64, &clock) == PAGES);
        for (uint32_t row = 1; row < PAGES; row++) CHECK(rows[row].parent == rows[row - 1].page);
        test_clean(pool);
    }
    /* Hits stop at the largest number, too. */
    pool->reuse[sequence_page(sequence, 0, 0)].hits = UINT16_MAX - 1;
    for (uint32_t i = 0; i < 2; i++) {
        test_hit(pool, PAGES, hashes, NULL);
        CHECK(cxlkv_pool_published(pool, rows, 64, &clock) == PAGES);
        CHECK(rows[0].hits == UINT16_MAX);
    }
    /* Fewer rows than pages: it says how many there are, and writes no more. */
    memset(rows, 0xaa, sizeof(rows));
    CHECK(cxlkv_pool_published(pool, rows, 3, &clock) == PAGES);
    CHECK(rows[2].page < pool->host->page_count && rows[3].page == 0xaaaaaaaa);
    CHECK(cxlkv_forget(pool, 1, hashes, NULL) == 1);
    const reuse_record *reuse = &pool->reuse[sequence_page(sequence, 0, 0)];
    CHECK(!reuse->used && !reuse->born && !reuse->parent_plus_one && !reuse->hits);
    cxlkv_sequence_destroy(&sequence);
    test_remove(&pool, path);
}

int main(void) {
    test_one_count();
    test_priorities();
    test_deaths();
    test_threads();
    return 0;
}
