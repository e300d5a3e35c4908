/* Goal: log-weights of pages' tokens and those of virtual rows are the same softmax, whatever is
 * left out. Method: the tokens of a sequence come as pages with weights, and as virtual rows with
 * these as their counts; arrays end where they must, for ASan. tests/ndp/test_weighed.py has the
 * shapes and a reference. */
#include <math.h>

#include "check.h"

enum { TOKENS = 61, PAGES = (TOKENS + TEST_PAGE_TOKENS - 1) / TEST_PAGE_TOKENS, ROWS = 3,
       ROOM = PAGES * TEST_PAGE_TOKENS };

typedef struct answer {
    test_rows out[ROWS];
    float lse[ROWS][TEST_HEADS];
} answer;

static answer attend(cxlkv_batch *batch, cxlkv_picked picked, uint32_t rows, int64_t wanted) {
    const int32_t starts[] = {0, (int32_t)rows};
    test_rows queries[ROWS];
    answer got = {0};
    uint64_t state = 7;
    float *at = &queries[0][0][0];
    for (uint32_t i = 0; i < ROWS * TEST_HEADS * TEST_DIM; i++)
        at[i] = (float)random_below(&state, 200) / 100 - 1;
    picked.lists = 1;
    picked.per = CXLKV_PER_SEQUENCE;
    cxlkv_attend_args args = {.q_heads = TEST_HEADS, .queries = test_rows_at(queries),
                              .starts = starts, .picked = picked, .scale = 1e-6f, .softcap = 3,
                              .out = got.out, .lse = &got.lse[0][0]};
    int64_t code = cxlkv_batch_attend(batch, &args);
    CHECK(wanted < 0 ? code == wanted : code >= wanted);
    return got;
}

/* [head][page][token], as fetch has them. */
static void fetch(cxlkv_batch *batch, float *keys, float *values) {
    uint64_t bytes = (uint64_t)TEST_HEADS * ROOM * TEST_DIM * sizeof(float);
    cxlkv_fetch_args args = {.keys = keys, .values = values, .key_capacity_bytes = bytes,
                             .value_capacity_bytes = bytes};
    CHECK(cxlkv_batch_fetch(batch, &args) >= 0);
}

static float *floats(uint64_t count) {
    float *made = malloc(count * sizeof(*made));
    CHECK(made);
    return made;
}

/* Of `share` in 16 tokens; what lies behind the end is left out, too. */
static void draw(uint64_t *state, uint32_t share, float *weights) {
    for (uint32_t i = 0; i < TEST_HEADS * ROOM; i++) {
        bool there = i % ROOM < TOKENS && random_below(state, 16) < share;
        weights[i] = there ? (float)random_below(state, 100) / 25 - 2 : -INFINITY;
    }
}

static void compare(const answer *one, const answer *other) {
    for (uint32_t head = 0; head < TEST_HEADS; head++) {
        CHECK(one->lse[0][head] == other->lse[0][head] ||
              fabsf(one->lse[0][head] - other->lse[0][head]) <= 1e-4f);
        for (uint32_t d = 0; d < TEST_DIM; d++)
            CHECK(fabsf(one->out[0][head][d] - other->out[0][head][d]) <=
                  1e-5f * (1 << 20));
    }
}

int main(void) {
    uint64_t marks[TOKENS], state = 3;
    cxlkv_pool *pool = test_pool(NULL, 64);
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    float *keys = floats(TEST_HEADS * ROOM * TEST_DIM), *weights = floats(TEST_HEADS * ROOM);
    float *values = floats(TEST_HEADS * ROOM * TEST_DIM);
    int32_t pages[TEST_HEADS * PAGES];
    for (int32_t i = 0; i < TEST_HEADS * PAGES; i++) pages[i] = i % PAGES;
    fetch(batch, keys, values);
    cxlkv_picked weighed = {.pages = pages, .k = PAGES, .weight_tokens = TEST_PAGE_TOKENS,
                            .log_weights = weights};
    cxlkv_picked rows = {.pages = pages, .row_count = ROOM, .row_keys = keys,
                         .row_values = values, .row_log_counts = weights}, bad;
    for (uint32_t i = 0; i <= 64; i++) {
        draw(&state, i / 4, weights);
        answer one = attend(batch, weighed, 1, 0), other = attend(batch, rows, 1, 0);
        compare(&one, &other);
        attend(batch, weighed, ROWS, 0); /* which do not see the same tokens */
        attend(batch, rows, ROWS, 0);
    }
    bad = weighed, bad.weight_tokens = 2;
    attend(batch, bad, 1, -CXLKV_E_ARGUMENT);
    bad = weighed, bad.pages = NULL;
    attend(batch, bad, 1, -CXLKV_E_ARGUMENT);
    bad = rows, bad.pages = NULL;
    attend(batch, bad, 1, -CXLKV_E_ARGUMENT);
    weights[TEST_HEADS * ROOM - TEST_PAGE_TOKENS] = NAN;
    attend(batch, weighed, 1, -CXLKV_E_ARGUMENT);
    attend(batch, rows, 1, -CXLKV_E_ARGUMENT);
    free(keys);
    free(values);
    free(weights);
    cxlkv_batch_destroy(&batch);
    cxlkv_sequence_destroy(&sequence);
    test_end(&pool, NULL);
    return 0;
}
