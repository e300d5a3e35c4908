/* Goal: a sequence of an encoded pool is the same to the bit however its tokens came; nothing is
 * read or written outside of its pieces. Method: random appends, forks, truncations and hand-overs
 * beside marks, for odd shapes; after each, all that can be asked is compared with a sequence of
 * the same marks that was appended at once. For ASan; tests/test_encodings.py has the numbers. */
#include "check.h"

enum { HEADS = 2, TOKENS_MAX = 90, LIVE = 4, STEPS = 18, QUERIES = 3, PAGES_MAX = 90 };

typedef struct shape {
    uint32_t dim, value_dim, page_tokens, dtype;
} shape;

typedef struct model {
    cxlkv_sequence *sequence;
    uint32_t tokens;
    uint64_t marks[TOKENS_MAX];
} model;

static uint64_t seed, next_mark;
static cxlkv_pool *pool;
static model live[LIVE];

static size_t element_of(const cxlkv_layout *layout) { return dtype_bytes(layout->dtype); }

/* Rows of marks, exactly as long as they are: [tokens][HEADS][dim]. */
static void *rows_of(const uint64_t *marks, uint32_t count, uint32_t kind) {
    const cxlkv_layout *layout = &pool->layout;
    uint32_t dim = kind_dim(layout, kind);
    size_t element = element_of(layout);
    uint8_t *made = malloc(count * HEADS * dim * element + !count), *to = made;
    CHECK(made);
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t d = 0; d < dim; d++, to += element) {
                float value = test_value(marks[t], 0, kind, h, d) / (1 << 19) - 1;
                kernels_current()->from_float((int)layout->dtype, &value, 1, to);
            }
    return made;
}

static cxlkv_rows described(const void *data, uint32_t heads, uint32_t dim, uint32_t dtype) {
    int64_t element = (int64_t)dtype_bytes(dtype);
    return (cxlkv_rows){.data = data, .dtype = dtype,
                        .stride_bytes = {heads * dim * element, dim * element, element}};
}

static void append(cxlkv_sequence *sequence, const uint64_t *marks, uint32_t count) {
    const cxlkv_layout *layout = &pool->layout;
    void *k = rows_of(marks, count, PIECE_KEYS), *v = rows_of(marks, count, PIECE_VALUES);
    int32_t starts[2] = {0, (int32_t)count};
    cxlkv_rows keys = described(k, HEADS, layout->head_dim, layout->dtype);
    cxlkv_rows values = described(v, HEADS, layout->value_head_dim, layout->dtype);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    CHECK(cxlkv_batch_append(batch, 0, &keys, &values, starts, -1) == (int64_t)count);
    cxlkv_batch_destroy(&batch);
    free(k);
    free(v);
}

/* Everything that is asked of a sequence, one behind the other. */
typedef struct answers {
    uint64_t bytes;
    uint8_t *data;
} answers;

static void *room(answers *a, uint64_t bytes) {
    a->data = realloc(a->data, a->bytes + bytes);
    CHECK(a->data);
    memset(a->data + a->bytes, 0, bytes);
    a->bytes += bytes;
    return a->data + a->bytes - bytes;
}

/* Of a page and head, as rows or, of what is encoded, as it is kept. */
static uint64_t fetched_bytes(uint32_t kind, bool as_kept) {
    const cxlkv_layout *layout = &pool->layout;
    if (!as_kept) return rows_bytes(layout, kind);
    if (!has_codes(layout, kind)) return layout->page_tokens * stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind);
    return code_bytes(&form, layout->page_tokens);
}

static void ask_fetch(cxlkv_batch *batch, uint32_t tokens, bool as_kept, answers *a) {
    const cxlkv_layout *layout = &pool->layout;
    uint64_t pages = (tokens + layout->page_tokens - 1) / layout->page_tokens;
    cxlkv_fetch_args args = {
        .key_capacity_bytes = pages * HEADS * fetched_bytes(PIECE_KEYS, as_kept),
        .value_capacity_bytes = pages * HEADS * fetched_bytes(PIECE_VALUES, as_kept),
        .as_kept = as_kept};
    uint8_t *keys = malloc(args.key_capacity_bytes), *values = malloc(args.value_capacity_bytes);
    args.keys = keys;
    args.values = values;
    CHECK(keys && values && cxlkv_batch_fetch(batch, &args) >= 0 && args.k == pages);
    memcpy(room(a, args.key_capacity_bytes), keys, args.key_capacity_bytes);
    memcpy(room(a, args.value_capacity_bytes), values, args.value_capacity_bytes);
    free(keys);
    free(values);
}

static void ask_scores(cxlkv_batch *batch, uint32_t rows, const cxlkv_rows *queries, answers *a) {
    static const uint32_t methods[] = {CXLKV_METHOD_EXACT, CXLKV_METHOD_DIGEST,
                                       CXLKV_METHOD_TWO_STAGE, CXLKV_METHOD_ATTENTION};
    int32_t pages[QUERIES * HEADS * PAGES_MAX], counts[QUERIES * HEADS];
    int32_t starts[2] = {0, (int32_t)rows};
    float scores[QUERIES * HEADS * PAGES_MAX];
    cxlkv_budget budget = {.pages = 2};
    for (uint32_t i = 0; i < 4; i++) {
        cxlkv_select_args args = {.q_heads = 2 * HEADS, .queries = *queries, .starts = starts,
                                  .by = {.budgets = &budget, .budget_count = 1,
                                         .method = methods[i], .errors = 3},
                                  .scale = 0.3f,
                                  .capacity = QUERIES * HEADS * PAGES_MAX,
                                  .pages = pages, .scores = scores, .counts = counts};
        CHECK(cxlkv_batch_select(batch, &args) >= 0);
        uint64_t bytes = rows * HEADS * args.k * sizeof(float);
        memcpy(room(a, bytes), pages, bytes);
        memcpy(room(a, bytes), scores, bytes);
    }
}

static answers ask(cxlkv_sequence *sequence, uint32_t tokens) {
    const cxlkv_layout *layout = &pool->layout;
    answers a = {0, NULL};
    if (!tokens) return a;
    uint32_t rows = tokens < QUERIES ? tokens : QUERIES;
    int32_t starts[2] = {0, (int32_t)rows};
    uint64_t state = 5, numbers = rows * 2 * HEADS;
    float *q = malloc(numbers * layout->head_dim * sizeof(float));
    float *out = malloc(numbers * layout->value_head_dim * sizeof(float));
    float lse[QUERIES * 2 * HEADS];
    CHECK(q && out);
    for (uint64_t i = 0; i < numbers * layout->head_dim; i++)
        q[i] = (float)random_below(&state, 200) / 100 - 1;
    cxlkv_rows queries = described(q, 2 * HEADS, layout->head_dim, CXLKV_FLOAT32);
    cxlkv_attend_args args = {.q_heads = 2 * HEADS, .queries = queries, .starts = starts,
                              .scale = 0.3f, .out = out, .lse = lse};
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    for (; args.error < 0.1f; args.error += 0.04f) { /* in all bits, and in fewer */
        CHECK(cxlkv_batch_attend(batch, &args) >= 0);
        memcpy(room(&a, numbers * layout->value_head_dim * sizeof(float)), out,
               numbers * layout->value_head_dim * sizeof(float));
        memcpy(room(&a, numbers * sizeof(float)), lse, numbers * sizeof(float));
    }
    ask_fetch(batch, tokens, false, &a);
    ask_fetch(batch, tokens, true, &a);
    ask_scores(batch, rows, &queries, &a);
    cxlkv_batch_destroy(&batch);
    free(q);
    free(out);
    return a;
}

static void verify(const model *m) {
    cxlkv_sequence *whole = test_empty(pool);
    append(whole, m->marks, m->tokens);
    answers got = ask(m->sequence, m->tokens), wanted = ask(whole, m->tokens);
    CHECK(got.bytes == wanted.bytes);
    CHECK(!got.bytes || memcmp(got.data, wanted.data, got.bytes) == 0);
    free(got.data);
    free(wanted.data);
    cxlkv_sequence_destroy(&whole);
}

/* ---- steps ---- */

static void grow(model *m) {
    uint32_t count = random_below(&seed, random_below(&seed, 3) ? 4 : 50);
    if (m->tokens + count > TOKENS_MAX) return;
    test_marks(m->marks + m->tokens, next_mark, count);
    next_mark += count;
    append(m->sequence, m->marks + m->tokens, count);
    m->tokens += count;
}

/* A child, or the same by a handle, takes the place of another one. */
static void replace(const model *m, model *to) {
    uint8_t bytes[4096];
    cxlkv_sequence *made;
    if (random_below(&seed, 2)) {
        CHECK(cxlkv_sequence_fork(m->sequence, &made) == 0);
    } else {
        int64_t size = cxlkv_sequence_export(m->sequence, bytes, sizeof(bytes));
        CHECK(size > 0 && cxlkv_sequence_adopt(pool, bytes, (uint64_t)size, &made) == 0);
    }
    cxlkv_sequence_destroy(&to->sequence);
    *to = *m;
    to->sequence = made;
}

static void step(void) {
    model *m = &live[random_below(&seed, LIVE)], *other = &live[random_below(&seed, LIVE)];
    uint32_t dice = random_below(&seed, 10);
    if (dice < 6) {
        grow(m);
    } else if (dice < 8) {
        m->tokens = random_below(&seed, m->tokens + 1);
        CHECK(cxlkv_sequence_truncate(m->sequence, m->tokens) == 0);
    } else if (m != other) {
        replace(m, other);
        m = other;
    }
    verify(m);
}

static void walk(shape s, uint32_t k_encoding, uint32_t v_encoding) {
    cxlkv_layout layout = {.layers = 1, .kv_heads = HEADS, .head_dim = s.dim,
                           .value_head_dim = s.value_dim, .page_tokens = s.page_tokens,
                           .dtype = s.dtype, .checksum = 1, .shard = {0, 1, 0, 1},
                           .sketch = k_encoding != CXLKV_ENCODING_PROGRESSIVE,
                           .group_count = 1, .k_encoding = k_encoding, .v_encoding = v_encoding};
    CHECK(cxlkv_pool_create(NULL, &layout, NULL, 16 << 20, 0, NULL, 0, &pool) == 0);
    for (uint32_t i = 0; i < LIVE; i++)
        live[i] = (model){.sequence = test_empty(pool), .tokens = 0};
    for (uint32_t i = 0; i < STEPS; i++) step();
    for (uint32_t i = 0; i < LIVE; i++) {
        verify(&live[i]);
        cxlkv_sequence_destroy(&live[i].sequence);
    }
    test_end(&pool, NULL);
}

int main(void) {
    static const shape shapes[] = {{16, 16, 16, CXLKV_BFLOAT16},
                                   {1, 3, 1, CXLKV_FLOAT32},
                                   {80, 36, 7, CXLKV_FLOAT16},
                                   {100, 17, 20, CXLKV_FLOAT32},
                                   {33, 64, 33, CXLKV_BFLOAT16}};
    seed = test_seed();
    next_mark = 1;
    for (uint32_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (uint32_t k = 0; k <= CXLKV_ENCODING_PROGRESSIVE; k++)
            for (uint32_t v = 0; v <= CXLKV_ENCODING_PROGRESSIVE; v++) walk(shapes[i], k, v);
    return 0;
}
