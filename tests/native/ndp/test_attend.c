/* Goal: sequences that share pages get from one attend what they would get of pages of their own,
 * and each number of threads gives the same bits. Method: forks of one text, and of each other,
 * beside twins whose pages nobody shares; the bytes that are read tell that sharing was seen.
 * tests/ndp/test_shared_attend.py has the shapes. For ASan and TSan. */
#include <math.h>

#include "check.h"

enum { COUNT = 6, COMMON = 310, TOKENS_MAX = 480, ROWS = COUNT + 2, POOL_PAGES = 900 };

typedef struct answer {
    test_rows out[ROWS];
    float lse[ROWS][TEST_HEADS];
    int64_t bytes;
} answer;

static cxlkv_sequence *forks[COUNT], *twins[COUNT];

/* forks[3] goes on from forks[2], the others from one text that ends inside a page. */
static void make(cxlkv_pool *pool) {
    uint64_t common[COMMON], marks[TOKENS_MAX], marks_of_2[TOKENS_MAX];
    cxlkv_sequence *text = test_written(pool, common, 1, COMMON);
    for (uint32_t i = 0; i < COUNT; i++) {
        bool second = i == 3;
        uint32_t before = second ? COMMON + 64 : COMMON, own = second ? 9 : 32 * i;
        memcpy(marks, second ? marks_of_2 : common, before * sizeof(*marks));
        test_marks(marks + before, 1000ull * (i + 1), own);
        CHECK(cxlkv_sequence_fork(second ? forks[2] : text, &forks[i]) == 0);
        if (own) CHECK(test_append_all(forks[i], marks + before, own) >= 0);
        twins[i] = test_sequence(pool, marks, before + own);
        if (i == 2) memcpy(marks_of_2, marks, sizeof(marks));
    }
    cxlkv_sequence_destroy(&text);
}

static answer attend(cxlkv_pool *pool, cxlkv_sequence **sequences) {
    static const int32_t starts[COUNT + 1] = {0, 1, 2, 5, 6, 7, ROWS};
    uint64_t state = 7;
    test_rows queries[ROWS];
    answer got;
    float *at = &queries[0][0][0];
    for (uint32_t i = 0; i < ROWS * TEST_HEADS * TEST_DIM; i++)
        at[i] = (float)random_below(&state, 200) / 100 - 1;
    cxlkv_attend_args args = {.layer = 1, .q_heads = TEST_HEADS, .queries = test_rows_at(queries),
                              .starts = starts, .scale = 1e-6f, .out = got.out,
                              .lse = &got.lse[0][0]};
    cxlkv_batch *batch = test_batch(pool, COUNT, sequences);
    got.bytes = cxlkv_batch_attend(batch, &args);
    CHECK(got.bytes >= 0);
    cxlkv_batch_destroy(&batch);
    return got;
}

static void compare(const answer *shared, const answer *alone) {
    const float *x = &shared->out[0][0][0], *y = &alone->out[0][0][0];
    for (uint32_t i = 0; i < ROWS * TEST_HEADS * TEST_DIM; i++)
        CHECK(fabsf(x[i] - y[i]) <= 1e-5f * (1 << 20));
    for (uint32_t i = 0; i < ROWS * TEST_HEADS; i++)
        CHECK(fabsf(shared->lse[i / TEST_HEADS][i % TEST_HEADS] -
                    alone->lse[i / TEST_HEADS][i % TEST_HEADS]) <= 1e-4f);
    CHECK(shared->bytes * 2 < alone->bytes);
}

int main(void) {
    cxlkv_pool *pool = test_pool(NULL, POOL_PAGES);
    make(pool);
    answer alone = attend(pool, twins), first = attend(pool, forks);
    compare(&first, &alone);
    for (uint32_t threads = 2; threads <= 4; threads++) {
        CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, threads) == 0);
        answer again = attend(pool, forks), twin = attend(pool, twins);
        CHECK(memcmp(&again, &first, sizeof(first)) == 0);
        CHECK(memcmp(&twin, &alone, sizeof(alone)) == 0);
    }
    for (uint32_t i = 0; i < COUNT; i++) {
        cxlkv_sequence_destroy(&forks[i]);
        cxlkv_sequence_destroy(&twins[i]);
    }
    test_end(&pool, NULL);
    return 0;
}
