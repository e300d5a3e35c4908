/* Goal: pages are chosen by a scorer's summaries of what they hold now, by however many threads and
 * calls at once. Method: a summary is the sum of a page's first channel and the place of its first
 * token, which a reference takes from the marks that tokens were written with; threads select in
 * forks of one text while each of them takes tokens back and writes others. For ASan and TSan. */
#include <math.h>

#include "check.h"

enum { TOKENS = 400, PAGES = TOKENS / TEST_PAGE_TOKENS, WANTED = 20, THREADS = 4, ROUNDS = 6,
       POOL_PAGES = 2000, SCORER = 77 };

typedef struct summary {
    float sum;
    uint32_t first;
} summary;

static atomic_uint made;
static bool summarise_fails, score_fails;

static int summarise(const float *keys, int64_t tokens, int64_t dim, int64_t first,
                     const float *parameters, void *out) {
    float sum = *parameters;
    for (int64_t t = 0; t < tokens; t++) sum += keys[t * dim];
    *(summary *)out = (summary){sum, (uint32_t)first};
    atomic_fetch_add(&made, 1);
    return summarise_fails ? -1 : 0;
}

static int score(const float *queries, int64_t count, int64_t dim, float scale,
                 const void *summaries, int64_t pages, const float *parameters, float *scores) {
    const summary *of = summaries;
    (void)parameters;
    for (int64_t i = 0; i < count; i++)
        for (int64_t p = 0; p < pages; p++)
            scores[i * pages + p] = scale * queries[i * dim] * of[p].sum;
    return score_fails ? -1 : 0;
}

/* What the parameters of layers and heads add: [TEST_LAYERS][TEST_HEADS]. */
static const float added[TEST_LAYERS * TEST_HEADS] = {1, 2, 3, 4};
static const cxlkv_scorer scorer = {.id = SCORER, .name = "sums", .summary_bytes = sizeof(summary),
                                    .read_bytes = sizeof(summary), .summarise = summarise,
                                    .score = score, .parameters = added, .parameter_count = 1};

static int select_lists(cxlkv_sequence *sequence, uint32_t layer, int32_t *pages, float *scores) {
    static const int32_t starts[] = {0, 1};
    test_rows query;
    int32_t counts[TEST_HEADS];
    for (uint32_t h = 0; h < TEST_HEADS; h++)
        for (uint32_t d = 0; d < TEST_DIM; d++) query[h][d] = d == 0 ? 1 : 1e6f;
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = WANTED};
    cxlkv_select_args args = {.layer = layer, .q_heads = TEST_HEADS,
                              .queries = test_rows_at(&query), .starts = starts,
                              .by = {.budgets = &budget, .budget_count = 1,
                                     .method = CXLKV_METHOD_SCORER, .scorer = SCORER},
                              .scale = 0.5f,
                              .capacity = TEST_HEADS * WANTED, .pages = pages, .scores = scores,
                              .counts = counts};
    cxlkv_batch *batch = test_batch(sequence->pool, 1, &sequence);
    int found = cxlkv_batch_select(batch, &args);
    cxlkv_batch_destroy(&batch);
    return found;
}

static void check_lists(cxlkv_sequence *sequence, const uint64_t *marks, uint32_t layer,
                        uint32_t tokens) {
    int32_t pages[TEST_HEADS * WANTED];
    float scores[TEST_HEADS * WANTED];
    CHECK(select_lists(sequence, layer, pages, scores) == WANTED);
    for (uint32_t h = 0; h < TEST_HEADS; h++) {
        float right[PAGES], worst = INFINITY;
        bool chosen[PAGES] = {false};
        for (uint32_t p = 0; p < tokens / TEST_PAGE_TOKENS; p++) {
            right[p] = added[layer * TEST_HEADS + h];
            for (uint32_t t = 0; t < TEST_PAGE_TOKENS; t++)
                right[p] += test_value(marks[p * TEST_PAGE_TOKENS + t], layer, 0, h, 0);
        }
        for (uint32_t i = 0; i < WANTED; i++) {
            uint32_t p = (uint32_t)pages[h * WANTED + i];
            CHECK(scores[h * WANTED + i] == 0.5f * right[p]);
            chosen[p] = true;
            worst = fminf(worst, right[p]);
        }
        for (uint32_t p = 0; p < tokens / TEST_PAGE_TOKENS; p++)
            CHECK(chosen[p] || right[p] <= worst);
    }
}

typedef struct job {
    cxlkv_sequence *sequence;
    uint64_t marks[TOKENS];
    uint64_t state;
} job;

static void *work(void *context) {
    job *j = context;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t layer = 0; layer < TEST_LAYERS; layer++)
            check_lists(j->sequence, j->marks, layer, TOKENS);
        uint32_t kept = TOKENS / 2 + (uint32_t)random_below(&j->state, TOKENS / 2);
        CHECK(cxlkv_sequence_truncate(j->sequence, kept) >= 0);
        test_marks(j->marks + kept, random_below(&j->state, 1000), TOKENS - kept);
        CHECK(test_append_all(j->sequence, j->marks + kept, TOKENS - kept) >= 0);
    }
    return NULL;
}

/* A summary that failed is made again by the next select. */
static void check_failures(cxlkv_sequence *text) {
    int32_t pages[TEST_HEADS * WANTED];
    float scores[TEST_HEADS * WANTED];
    for (int round = 0; round < 2; round++) {
        summarise_fails = round == 0, score_fails = round == 1;
        CHECK(select_lists(text, 0, pages, scores) == -CXLKV_E_ARGUMENT);
        CHECK(strstr(cxlkv_error_text(), round == 0 ? "'sums': summarise()" : "'sums': score()"));
    }
    score_fails = false;
    CHECK(select_lists(text, 0, pages, scores) == WANTED);
}

static void check_refused(cxlkv_pool *pool) {
    cxlkv_scorer wrong = scorer;
    CHECK(cxlkv_pool_add_scorer(pool, &scorer) == -CXLKV_E_ARGUMENT); /* it is there */
    wrong.id = 0;
    CHECK(cxlkv_pool_add_scorer(pool, &wrong) == -CXLKV_E_ARGUMENT);
    wrong.id = 1, wrong.summary_bytes = 12;
    CHECK(cxlkv_pool_add_scorer(pool, &wrong) == -CXLKV_E_ARGUMENT);
    wrong.summary_bytes = CXLKV_SUMMARY_BYTES_MAX + 8;
    CHECK(cxlkv_pool_add_scorer(pool, &wrong) == -CXLKV_E_ARGUMENT);
    wrong.summary_bytes = 8, wrong.read_bytes = 9;
    CHECK(cxlkv_pool_add_scorer(pool, &wrong) == -CXLKV_E_ARGUMENT);
    wrong.read_bytes = 8;
    for (uint32_t i = 1; i < CXLKV_SCORERS_MAX; i++, wrong.id++)
        CHECK(cxlkv_pool_add_scorer(pool, &wrong) == 0);
    wrong.id = 1000;
    CHECK(cxlkv_pool_add_scorer(pool, &wrong) == -CXLKV_E_ARGUMENT);
}

int main(void) {
    static job jobs[THREADS];
    cxlkv_pool *pool = test_pool(NULL, POOL_PAGES);
    uint64_t marks[TOKENS], seed = test_seed();
    cxlkv_sequence *text = test_written(pool, marks, 1, TOKENS);
    CHECK(cxlkv_pool_add_scorer(pool, &scorer) == 0);
    check_failures(text);
    atomic_store(&made, 0);
    check_lists(text, marks, 1, TOKENS);
    uint32_t first = atomic_load(&made);
    check_lists(text, marks, 1, TOKENS);
    CHECK(first == PAGES * TEST_HEADS && atomic_load(&made) == first);
    char report[4096]; /* a deep check reads pages again, which changes nothing in them */
    CHECK(cxlkv_pool_check(pool, CXLKV_CHECK_DEEP, report, sizeof(report)) == 0);
    check_lists(text, marks, 1, TOKENS);
    CHECK(atomic_load(&made) == first);
    for (uint32_t threads = 1; threads <= 2; threads++) {
        pthread_t running[THREADS];
        CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, threads) == 0);
        for (uint32_t i = 0; i < THREADS; i++) {
            memcpy(jobs[i].marks, marks, sizeof(marks));
            jobs[i].state = seed + i;
            CHECK(cxlkv_sequence_fork(text, &jobs[i].sequence) == 0);
            CHECK(pthread_create(&running[i], NULL, work, &jobs[i]) == 0);
        }
        for (uint32_t i = 0; i < THREADS; i++) {
            CHECK(pthread_join(running[i], NULL) == 0);
            cxlkv_sequence_destroy(&jobs[i].sequence);
        }
    }
    check_refused(pool);
    cxlkv_sequence_destroy(&text);
    test_end(&pool, NULL);
    return 0;
}
