/* Goal: bytes_scored of the core's own methods is what they read. Method: the kernels are wrapped;
 * each marks the bytes of the pool that it is given. What select says is compared with the marks:
 * each byte counts once, in each of the three stages of two_stage. Over encodings, dtypes, sizes of
 * pages and heads, 1 and 20 queries of a group. */
#include <math.h>

#include "check.h"

const kernels *__real_kernels_current(void);
const kernels *__wrap_kernels_current(void);
void __real_kernels_score_each(const kernels *table, int dtype, const void *const *keys,
                               uint32_t count, uint32_t dim, const kernel_queries *queries,
                               float scale, float *best);
void __wrap_kernels_score_each(const kernels *table, int dtype, const void *const *keys,
                               uint32_t count, uint32_t dim, const kernel_queries *queries,
                               float scale, float *best);
void __real_code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds);
void __wrap_code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds);

int __real_sketch_sample_task(void *context, uint32_t item);
int __wrap_sketch_sample_task(void *context, uint32_t item);
int __real_sketch_finish_task(void *context, uint32_t item);
int __wrap_sketch_finish_task(void *context, uint32_t item);

static const kernels *own;       /* what is wrapped */
static kernels counting;
static const uint8_t *memory;    /* of the pool; NULL: nothing is marked */
static size_t memory_bytes;
static uint16_t *marks;          /* of each byte: the stage that read it last */
static uint16_t stage;
static uint64_t counted;         /* of a select: bytes, once in each of its stages */
static uint32_t staged;          /* selects in two stages; where they do not pay it is exact */

static void mark(const void *read, size_t bytes) {
    size_t at = (size_t)((const uint8_t *)read - memory);
    if (!memory || (const uint8_t *)read < memory || at >= memory_bytes) return;
    CHECK(at + bytes <= memory_bytes);
    for (size_t i = at; i < at + bytes; i++) {
        counted += marks[i] != stage;
        marks[i] = stage;
    }
}

static void mark_rows(int dtype, const void *rows, size_t row_bytes, uint32_t count, uint32_t dim) {
    size_t bytes = dim * (dtype == KERNEL_FLOAT32 ? 4 : 2);
    for (uint32_t t = 0; t < count; t++) mark((const uint8_t *)rows + t * row_bytes, bytes);
}

static void mark_codes(const code_form *form, code_piece piece, uint32_t first, uint32_t count) {
    uint32_t block = first / CODE_TOKENS, end = code_blocks(first + count);
    mark(piece.blocks + block * code_block_bytes(form), (end - block) * code_block_bytes(form));
    mark(piece.scales + block * CODE_TOKENS, (end - block) * CODE_TOKENS * sizeof(uint16_t));
}

/* ---- kernels ---- */

static void score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t stride,
                  const void *next) {
    mark_rows(dtype, keys, row_bytes, tokens, dim);
    own->score(dtype, keys, row_bytes, tokens, dim, queries, scale, logits, stride, next);
}

static void score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima,
                      const void *next) {
    mark_rows(dtype, keys, row_bytes, tokens, dim);
    own->score_max(dtype, keys, row_bytes, tokens, dim, queries, scale, maxima, next);
}

static bool score_pieces(int dtype, const void *const *pieces, const void *const *next,
                         uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                         const kernel_queries *queries, float scale, float *best) {
    for (uint32_t i = 0; i < count; i++) mark_rows(dtype, pieces[i], row_bytes, tokens, dim);
    return own->score_pieces(dtype, pieces, next, count, row_bytes, tokens, dim, queries, scale,
                             best);
}

static void bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                  float scale, float *bounds, const void *next) {
    mark_rows(dtype, digest, 0, 1, 2 * dim);
    own->bound(dtype, digest, dim, queries, scale, bounds, next);
}

static void to_float(int dtype, const void *source, size_t count, float *destination) {
    mark_rows(dtype, source, 0, 1, (uint32_t)count);
    own->to_float(dtype, source, count, destination);
}

static void estimate(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]) {
    for (uint32_t i = 0; i < run->count; i++) mark(run->blocks[i], sketch_block_bytes(run->dim));
    own->estimate(run, best, uppers);
}

static void code_score(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                       const code_query *queries, uint32_t query_count, float *logits,
                       size_t stride, const void *next) {
    mark_codes(form, piece, first, count);
    own->code_score(form, piece, first, count, queries, query_count, logits, stride, next);
}

static void code_score_best(const code_form *form, const code_piece *pieces,
                            const void *const *next, uint32_t count, uint32_t tokens,
                            const code_query *queries, uint32_t query_count, float *best) {
    for (uint32_t i = 0; i < count; i++) mark_codes(form, pieces[i], 0, tokens);
    own->code_score_best(form, pieces, next, count, tokens, queries, query_count, best);
}

static void code_decode(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                        float *rows) {
    mark_codes(form, piece, first, count);
    own->code_decode(form, piece, first, count, rows);
}

static void code_join(const code_form *form, const uint8_t *upper, const uint8_t *lower,
                      uint8_t *block) {
    mark(upper, code_block_bytes(form) / 2);
    mark(lower, code_block_bytes(form) / 2);
    own->code_join(form, upper, lower, block);
}

static void fp8_decode(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    mark(bytes, count);
    own->fp8_decode(bytes, count, numbers, next);
}

void __wrap_kernels_score_each(const kernels *table, int dtype, const void *const *keys,
                               uint32_t count, uint32_t dim, const kernel_queries *queries,
                               float scale, float *best) {
    for (uint32_t i = 0; i < count; i++) mark_rows(dtype, keys[i], 0, 1, dim);
    __real_kernels_score_each(table, dtype, keys, count, dim, queries, scale, best);
}

void __wrap_code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds) {
    mark(codes, 2 * dim);
    __real_code_bounds_decode(codes, scale, dim, bounds);
}

const kernels *__wrap_kernels_current(void) { return own ? &counting : __real_kernels_current(); }

static void wrap(const kernels *table) {
    counting = *table;
    counting.score = score;
    counting.score_max = score_max;
    if (table->score_pieces) counting.score_pieces = score_pieces;
    counting.bound = bound;
    counting.to_float = to_float;
    counting.estimate = estimate;
    counting.code_score = code_score;
    counting.code_score_best = code_score_best;
    counting.code_decode = code_decode;
    counting.code_join = code_join;
    counting.fp8_decode = fp8_decode;
    own = table;
}

/* ---- select ---- */

/* Items of one stage read different bytes. */
static int in_a_stage(int (*task)(void *context, uint32_t item), void *context, uint32_t item) {
    stage++;
    int code = task(context, item);
    stage++;
    return code;
}

int __wrap_sketch_sample_task(void *context, uint32_t item) {
    return in_a_stage(__real_sketch_sample_task, context, item);
}

int __wrap_sketch_finish_task(void *context, uint32_t item) {
    return in_a_stage(__real_sketch_finish_task, context, item);
}

enum { HEADS = 2, GROUP_MAX = 20, TOKENS = 2400 + 3 }; /* 3 in an open page */

typedef struct form {
    uint32_t dim, page_tokens, dtype, encoding, sketch;
} form;

static float normal(uint64_t *state) { /* of about that shape */
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += (float)random_below(state, 1 << 20) / (1 << 20) - 0.5f;
    return sum;
}

static cxlkv_sequence *filled(cxlkv_pool *pool, uint32_t dim, uint64_t *state) {
    cxlkv_sequence *sequence = test_empty(pool);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    size_t count = (size_t)TOKENS * HEADS * dim;
    float *rows = malloc(count * sizeof(*rows)), *stored = malloc(count * sizeof(*stored));
    CHECK(rows && stored);
    for (size_t i = 0; i < count; i++) rows[i] = normal(state);
    uint32_t dtype = pool->layout.dtype, bytes = dtype == CXLKV_FLOAT32 ? 4 : 2;
    own->from_float((int)dtype, rows, count, stored);
    cxlkv_rows keys = {.data = stored, .dtype = dtype,
                       .stride_bytes = {HEADS * dim * bytes, dim * bytes, bytes}};
    int32_t starts[2] = {0, TOKENS};
    CHECK(cxlkv_batch_append(batch, 0, &keys, &keys, starts, -1) >= 0);
    cxlkv_batch_destroy(&batch);
    free(rows);
    free(stored);
    return sequence;
}

static const char *const names[] = {[CXLKV_METHOD_EXACT] = "exact",
                                    [CXLKV_METHOD_DIGEST] = "digest",
                                    [CXLKV_METHOD_ATTENTION] = "attention",
                                    [CXLKV_METHOD_TWO_STAGE] = "two_stage"};

/* Selects: what it says, against what it read of the pool and of the open page beside it. */
static void check_bytes(cxlkv_sequence *sequence, uint32_t method, uint32_t group, uint32_t pages,
                        uint64_t *state) {
    static const int32_t starts[] = {0, 1};
    static int32_t chosen[HEADS * TOKENS], counts[HEADS];
    static float scores[HEADS * TOKENS], queries[HEADS * GROUP_MAX * 128];
    uint32_t dim = sequence->pool->layout.head_dim;
    for (uint32_t i = 0; i < HEADS * group * dim; i++) queries[i] = normal(state);
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = pages};
    cxlkv_select_args args = {
        .q_heads = HEADS * group, .starts = starts, .by.budgets = &budget, .by.budget_count = 1,
        .queries = {.data = queries, .dtype = CXLKV_FLOAT32,
                    .stride_bytes = {HEADS * group * dim * 4, dim * 4, 4}},
        .by.method = method, .by.errors = 2, .scale = 1 / sqrtf((float)dim),
        .capacity = HEADS * TOKENS, .pages = chosen, .scores = scores, .counts = counts};
    cxlkv_batch *batch = test_batch(sequence->pool, 1, &sequence);
    const cxlkv_layout *layout = &sequence->pool->layout;
    uint64_t open = HEADS * kind_token_bytes(layout, PIECE_KEYS) * (TOKENS % layout->page_tokens);
    counted = 0, stage++;
    memory = sequence->pool->region.base;
    CHECK(cxlkv_batch_select(batch, &args) >= 0);
    memory = NULL;
    cxlkv_batch_destroy(&batch);
    printf("%s, group %u, %u pages: says %lu, reads %lu and %lu\n", names[method], group, pages,
           args.found.bytes_scored, counted, open);
    CHECK(args.found.bytes_scored == counted + open);
    staged += args.found.lists_staged == HEADS;
}

static void check_form(form f, uint64_t *state) {
    cxlkv_layout layout = {.layers = 1, .kv_heads = HEADS, .head_dim = f.dim,
                           .value_head_dim = f.dim, .page_tokens = f.page_tokens,
                           .dtype = f.dtype, .shard = {0, 1, 0, 1}, .sketch = f.sketch,
                           .group_count = 1, .k_encoding = f.encoding, .v_encoding = f.encoding};
    static const uint32_t methods[] = {CXLKV_METHOD_EXACT, CXLKV_METHOD_DIGEST,
                                       CXLKV_METHOD_ATTENTION, CXLKV_METHOD_TWO_STAGE};
    cxlkv_pool *pool;
    CHECK(cxlkv_pool_create(NULL, &layout, NULL, 16 << 20, 0, NULL, 0, &pool) == 0);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, 1) == 0);
    memory_bytes = pool->geometry.region_bytes;
    marks = calloc(memory_bytes, sizeof(*marks));
    CHECK(marks);
    printf("dim %u, pages of %u, dtype %u, encoding %u, sketch %u\n", f.dim, f.page_tokens, f.dtype,
           f.encoding, f.sketch);
    cxlkv_sequence *sequence = filled(pool, f.dim, state);
    bool estimates = f.sketch || f.encoding == CXLKV_ENCODING_PROGRESSIVE;
    for (uint32_t m = 0; m < 3u + estimates; m++)
        for (uint32_t group = 1; group <= GROUP_MAX; group += GROUP_MAX - 1)
            for (uint32_t pages = 4; pages <= 34; pages += 30)
                check_bytes(sequence, methods[m], group, pages, state);
    free(marks);
    cxlkv_sequence_destroy(&sequence);
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    uint64_t state = test_seed();
    static const uint32_t encodings[] = {CXLKV_ENCODING_NONE, CXLKV_ENCODING_INT8,
                                         CXLKV_ENCODING_INT4, CXLKV_ENCODING_FP8_E4M3,
                                         CXLKV_ENCODING_PROGRESSIVE};
    wrap(__real_kernels_current());
    for (uint32_t e = 0; e < 5; e++)
        for (uint32_t sketch = 0; sketch < 2; sketch++) {
            check_form((form){64, 16, CXLKV_BFLOAT16, encodings[e], sketch}, &state);
            check_form((form){128, 32, CXLKV_FLOAT16, encodings[e], sketch}, &state);
            check_form((form){80, 16, CXLKV_FLOAT32, encodings[e], sketch}, &state);
        }
    CHECK(staged > 40);
    return 0;
}
