/* Goal: threads of one process may use a pool together, through one handle or through two mappings
 * of one file; leases end under use; close waits, and then everything says "closed". Method: four
 * threads do random work on sequences of their own and on forks of a common one, each checking its
 * tokens; a fifth looks on, and replaces the pool's threads. Then one writes to a sequence that the
 * others read, through one batch. For TSan, and for ASan's use after free. */
#include "check.h"

#ifdef __SANITIZE_THREAD__
enum { ROUNDS = 400 }; /* some fifteen times slower there */
#else
enum { ROUNDS = 1500 };
#endif
enum { THREADS = 4, COMMON_TOKENS = 10, TOKENS_MAX = 64, POOL_PAGES = 64 };

static cxlkv_pool *pools[2];
static cxlkv_sequence *common;
static uint64_t common_marks[COMMON_TOKENS];
static atomic_uint finished, full, hits, adopted, stale, operations;
static atomic_bool closing;

static bool expected_error(int64_t code) {
    if (code == -CXLKV_E_POOL_FULL) atomic_fetch_add(&full, 1);
    return code == -CXLKV_E_POOL_FULL || (code == -CXLKV_E_CLOSED && atomic_load(&closing));
}

/* Gets a sequence of its own or a fork of the common one, and makes it longer. */
static cxlkv_sequence *grow(cxlkv_pool *pool, uint64_t *seed, uint64_t *marks, uint32_t *tokens) {
    cxlkv_sequence *made;
    bool forked = pool == pools[0] && random_below(seed, 2);
    int64_t code = forked ? cxlkv_sequence_fork(common, &made) : cxlkv_sequence_create(pool, &made);
    if (code < 0) {
        CHECK(expected_error(code));
        return NULL;
    }
    *tokens = forked ? COMMON_TOKENS : 0;
    memcpy(marks, common_marks, sizeof(common_marks));
    uint32_t more = 1 + random_below(seed, TOKENS_MAX - COMMON_TOKENS);
    uint64_t first = random_next(seed) >> 8;
    test_marks(marks + *tokens, first, more);
    code = test_append_all(made, marks + *tokens, more);
    if (code < 0) {
        CHECK(expected_error(code));
        cxlkv_sequence_destroy(&made);
        return NULL;
    }
    *tokens += more;
    return made;
}

static void verify(cxlkv_sequence *sequence, const uint64_t *marks, uint32_t tokens) {
    int64_t code = test_verify_all(sequence, marks, tokens);
    CHECK(code == 0 || expected_error(code));
}

/* Publishes, finds it again through either handle, and takes it out. */
static void publish_and_match(cxlkv_pool *pool, cxlkv_sequence *mine, uint64_t *seed,
                              const uint64_t *marks, uint32_t tokens) {
    uint8_t hashes[TOKENS_MAX / TEST_PAGE_TOKENS * 16];
    uint32_t pages = tokens / TEST_PAGE_TOKENS;
    cxlkv_sequence *hit;
    test_hashes(hashes, marks[tokens - 1] ^ random_next(seed), pages);
    int64_t code = cxlkv_publish(mine, pages, TEST_PAGE_TOKENS, hashes, 0);
    if (code < 0) {
        CHECK(expected_error(code));
        return;
    }
    double lease_s = random_below(seed, 2) ? 100 : 1e-6;
    code = test_match(pool, pages, hashes, lease_s, &hit);
    if (code >= 0) {
        uint32_t found = (uint32_t)code;
        CHECK(found <= pages * TEST_PAGE_TOKENS);
        code = test_verify_all(hit, marks, found);
        if (code == -CXLKV_E_STALE && lease_s < 1) atomic_fetch_add(&stale, 1);
        else CHECK(code == 0 || expected_error(code));
        atomic_fetch_add(&hits, found > 0);
        cxlkv_sequence_destroy(&hit);
    }
    code = cxlkv_forget(pools[0], pages, hashes, NULL);
    CHECK(code >= 0 || expected_error(code));
}

static void hand_over(cxlkv_pool *to, cxlkv_sequence *mine, const uint64_t *marks,
                      uint32_t tokens) {
    uint8_t bytes[1024];
    cxlkv_sequence *got;
    int64_t code = cxlkv_sequence_export(mine, bytes, sizeof(bytes));
    if (code > 0) code = cxlkv_sequence_adopt(to, bytes, (uint64_t)code, &got);
    if (code < 0) { /* a close in between frees the pages that the handle names */
        CHECK(expected_error(code) || (code == -CXLKV_E_STALE && atomic_load(&closing)));
        return;
    }
    atomic_fetch_add(&adopted, 1);
    verify(got, marks, tokens);
    cxlkv_sequence_destroy(&got);
}

static void round_of_work(uint64_t *seed) {
    cxlkv_pool *pool = pools[random_below(seed, 2)];
    uint64_t marks[TOKENS_MAX + COMMON_TOKENS];
    uint32_t tokens;
    cxlkv_sequence *mine = grow(pool, seed, marks, &tokens);
    if (!mine) return;
    verify(mine, marks, tokens);
    uint32_t dice = random_below(seed, 4);
    if (dice == 0) publish_and_match(pools[random_below(seed, 2)], mine, seed, marks, tokens);
    if (dice == 1) hand_over(pools[random_below(seed, 2)], mine, marks, tokens);
    if (dice == 2) {
        uint32_t kept = random_below(seed, tokens + 1);
        int code = cxlkv_sequence_truncate(mine, kept);
        CHECK(code == 0 || expected_error(code));
        if (code == 0) tokens = kept;
    }
    verify(mine, marks, tokens);
    atomic_fetch_add(&operations, 1);
    cxlkv_sequence_destroy(&mine);
}

static void *work(void *argument) {
    uint64_t seed = 1000 + (uintptr_t)argument;
    uint32_t rounds = atomic_load(&closing) ? UINT32_MAX : ROUNDS;
    for (uint32_t i = 0; i < rounds; i++) {
        round_of_work(&seed);
        cxlkv_stats stats;
        if (atomic_load(&closing) && cxlkv_pool_stats(pools[0], &stats) == -CXLKV_E_CLOSED &&
            cxlkv_pool_stats(pools[1], &stats) == -CXLKV_E_CLOSED)
            break;
    }
    atomic_fetch_add(&finished, 1);
    return NULL;
}

static void *look_on(void *argument) {
    char text[4096];
    (void)argument;
    for (uint32_t round = 0; atomic_load(&finished) < THREADS; round++) {
        for (int i = 0; i < 2; i++) {
            cxlkv_stats stats;
            int64_t code = cxlkv_pool_set(pools[i], CXLKV_SET_THREADS, 1 + round % 3);
            CHECK(code == 0 || expected_error(code));
            code = cxlkv_pool_stats(pools[i], &stats);
            CHECK(code == 0 || expected_error(code));
            code = cxlkv_pool_check(pools[i], 0, text, sizeof(text));
            if (code > 0) fprintf(stderr, "%s", text);
            CHECK(code == 0 || expected_error(code));
        }
        sched_yield();
    }
    return NULL;
}

static void *write_shared(void *argument) {
    cxlkv_batch *batch = argument;
    uint64_t seed = 77, marks[TOKENS_MAX];
    for (uint32_t i = 0; i < ROUNDS; i++) {
        test_marks(marks, random_next(&seed) >> 8, TOKENS_MAX);
        uint32_t cut = 1 + random_below(&seed, TOKENS_MAX);
        CHECK(test_append_all(batch->sequences[0], marks, cut) >= 0);
        CHECK(cxlkv_sequence_truncate(batch->sequences[0], 1 + random_below(&seed, cut)) == 0);
    }
    atomic_store(&finished, 1);
    return NULL;
}

/* What they see is checked in tests/test_threads.py; here, that they see it without a race. */
static void *read_shared(void *argument) {
    const cxlkv_batch *shared = argument;
    cxlkv_batch *batch = test_batch(pools[0], 1, shared->sequences); /* what is kept is contended */
    enum { LISTS = TEST_HEADS, K = 3 };
    float q[TEST_HEADS][TEST_DIM] = {{1}, {-1}}, out[TEST_HEADS][TEST_DIM], lse[TEST_HEADS];
    float scores[LISTS * K];
    int32_t pages[LISTS * K], counts[LISTS], starts[2] = {0, 1};
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = K};
    cxlkv_rows queries = test_rows_at(q);
    for (uint32_t layer = 0; !atomic_load(&finished); layer = (layer + 1) % TEST_LAYERS) {
        cxlkv_select_args select = {.layer = layer, .q_heads = TEST_HEADS, .queries = queries,
                                    .starts = starts,
                                    .by = {.budgets = &budget, .budget_count = 1, .refresh = 4},
                                    .scale = 1, .capacity = LISTS * K, .pages = pages,
                                    .scores = scores, .counts = counts};
        CHECK(cxlkv_batch_select(batch, &select) >= 0);
        CHECK(select.k >= 1 && pages[0] >= 0);
        cxlkv_attend_args attend = {.layer = layer, .q_heads = TEST_HEADS, .queries = queries,
                                    .starts = starts, .scale = 1, .out = out, .lse = lse};
        CHECK(cxlkv_batch_attend(batch, &attend) >= 0);
        CHECK(out[0][0] >= 0 && out[0][0] < 1 << 20); /* a mean of what test_value() gives */
    }
    cxlkv_batch_destroy(&batch);
    return NULL;
}

static void share_one_sequence(void) {
    pthread_t threads[THREADS];
    uint64_t first = 5;
    cxlkv_sequence *shared = test_sequence(pools[0], &first, 1);
    cxlkv_batch *batch = test_batch(pools[0], 1, &shared);
    atomic_store(&finished, 0);
    for (uint32_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, i ? read_shared : write_shared, batch) == 0);
    for (uint32_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    cxlkv_batch_destroy(&batch);
    cxlkv_sequence_destroy(&shared);
}

static void run(bool close_meanwhile) {
    pthread_t threads[THREADS + 1];
    atomic_store(&finished, 0);
    atomic_store(&operations, 0);
    atomic_store(&closing, close_meanwhile);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 10 * close_meanwhile)) == 0);
    CHECK(pthread_create(&threads[THREADS], NULL, look_on, NULL) == 0);
    if (close_meanwhile) {
        while (atomic_load(&operations) < 20) sched_yield();
        CHECK(cxlkv_pool_close(pools[1], 0) == 0);
        CHECK(cxlkv_pool_close(pools[0], 0) == 0);
    }
    for (int i = 0; i <= THREADS; i++) pthread_join(threads[i], NULL);
}

int main(void) {
    const char *path = test_path("threads");
    pools[0] = test_pool(path, POOL_PAGES);
    CHECK(cxlkv_pool_open(path, NULL, &pools[1]) == 0);
    CHECK(pools[0]->region.base != pools[1]->region.base && pools[0]->slot != pools[1]->slot);
    for (int i = 0; i < 2; i++) CHECK(cxlkv_pool_set(pools[i], CXLKV_SET_THREADS, 2) == 0);
    common = test_written(pools[0], common_marks, 1, COMMON_TOKENS);
    run(false);
    CHECK(test_verify_all(common, common_marks, COMMON_TOKENS) == 0);
    fprintf(stderr, "full %u, hits %u, adopted %u, leases that ended %u\n", atomic_load(&full),
            atomic_load(&hits), atomic_load(&adopted), atomic_load(&stale));
    CHECK(atomic_load(&hits) > 10 && atomic_load(&adopted) > 10 && atomic_load(&stale) > 0);
    test_clean(pools[0]);
    cxlkv_stats stats = test_stats(pools[0]);
    CHECK(stats.pages.published == 0 && stats.processes == 2);
    CHECK(stats.pages.held == COMMON_TOKENS / TEST_PAGE_TOKENS);
    share_one_sequence();
    test_clean(pools[0]);
    run(true);
    cxlkv_sequence_destroy(&common); /* after the close: its pages are not ours any more */
    for (int i = 0; i < 2; i++) cxlkv_pool_destroy(&pools[i]);
    CHECK(cxlkv_pool_open(path, NULL, &pools[0]) == 0);
    test_clean(pools[0]);
    stats = test_stats(pools[0]);
    CHECK(stats.pages.free + stats.pages.published_only == stats.pages.total);
    test_remove(&pools[0], path);
    return 0;
}
