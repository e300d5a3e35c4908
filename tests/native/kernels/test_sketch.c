/* Goal: each instruction set makes the sketches that the serial one makes, and estimates from them
 * what it does, also of odd sizes, of numbers that are none, and without reading past its arrays.
 * Method: random keys and queries of many dims; memory that ends at a page that cannot be read. */
#include "kernel_tests.h"

enum { TOKENS_MAX = 40, DIM_MAX = 1100, QUERIES = 7 };

typedef struct sample {
    int dtype;
    uint32_t tokens, dim;
    size_t key_bytes, bytes;
    uint8_t *keys, *want, *got;
    float rows[QUERIES * DIM_MAX];
    int8_t *codes;
    sketch_query queries[QUERIES];
} sample;

static void sample_make(sample *s, int dtype, uint32_t tokens, uint32_t dim, uint64_t *seed) {
    static float rows[TOKENS_MAX * DIM_MAX];
    *s = (sample){.dtype = dtype, .tokens = tokens, .dim = dim};
    for (uint32_t i = 0; i < tokens * dim; i++) rows[i] = normal(seed);
    for (uint32_t i = 0; i < QUERIES * dim; i++) s->rows[i] = normal(seed);
    s->key_bytes = tokens * dim * element_bytes(dtype);
    s->bytes = sketch_bytes(tokens, dim);
    s->keys = guarded(s->key_bytes);
    s->want = guarded(s->bytes);
    s->got = guarded(s->bytes);
    s->codes = aligned_alloc(64, align_up(QUERIES * sketch_dim(dim), 64));
    reference->from_float(dtype, rows, tokens * dim, s->keys);
    memset(s->got, 0x55, s->bytes);
    sketch_queries(s->rows, QUERIES, dim, 0.5f, s->codes, s->queries);
}

static void sample_free(sample *s) {
    guarded_free(s->keys, s->key_bytes);
    guarded_free(s->want, s->bytes);
    guarded_free(s->got, s->bytes);
    free(s->codes);
}

static void encode(const kernels *isa, const sample *s, uint8_t *to) {
    isa->sketch(s->dtype, s->keys, s->key_bytes / s->tokens, s->tokens, s->dim, to);
}

static const float *scales_of(const uint8_t *sketch, uint32_t dim, uint32_t block) {
    uint64_t bytes = sketch_block_bytes(dim);
    return (const float *)(sketch + (block + 1) * bytes - SKETCH_LINE_BYTES);
}

/* A channel on a border may come out on either side of it: rarely, and then by one code. */
static void check_encoded(const sample *s) {
    uint64_t block_bytes = sketch_block_bytes(s->dim), differ = 0;
    for (uint64_t i = 0; i < s->bytes; i++)
        differ += i % block_bytes < block_bytes - SKETCH_LINE_BYTES && s->want[i] != s->got[i];
    CHECK(differ <= 1 + s->tokens * s->dim / 2000);
    for (uint32_t t = 0; t < s->bytes / block_bytes * SKETCH_TOKENS; t++) {
        float want = scales_of(s->want, s->dim, t / 16)[t % 16];
        float got = scales_of(s->got, s->dim, t / 16)[t % 16];
        float error = differ ? 1 : 1e-3f; /* of few channels, one code more is much */
        CHECK(t < s->tokens ? fabsf(got - want) <= error * want : got == 0);
    }
}

typedef struct estimated {
    float best, uppers[SKETCH_TOKENS];
} estimated;

static estimated estimate_one(const kernels *isa, const uint8_t *block, uint32_t dim,
                              const sketch_query *queries, uint32_t count, uint32_t seen,
                              float slack) {
    estimated made;
    const uint8_t *next = NULL;
    sketch_run run = {.blocks = &block, .next = &next, .count = 1, .dim = dim, .queries = queries,
                      .query_count = count, .seen = seen, .slack = slack};
    isa->estimate(&run, &made.best, &made.uppers);
    return made;
}

/* Several at once, in any order, are as one by one. */
static void check_together(const kernels *isa, const sample *s, uint64_t *seed) {
    enum { BLOCKS = 5 };
    const uint8_t *blocks[BLOCKS], *next[BLOCKS];
    float best[BLOCKS], uppers[BLOCKS][SKETCH_TOKENS];
    sketch_run run = {.blocks = blocks, .next = next, .count = BLOCKS, .dim = s->dim,
                      .queries = s->queries, .query_count = 1 + random_below(seed, QUERIES),
                      .seen = 0xfff7, .slack = normal(seed)};
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint64_t at = random_below(seed, (s->tokens + 15) / 16);
        blocks[i] = s->want + at * sketch_block_bytes(s->dim);
        next[i] = random_below(seed, 2) ? s->want : NULL;
    }
    isa->estimate(&run, best, uppers);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        estimated want =
            estimate_one(isa, blocks[i], s->dim, s->queries, run.query_count, run.seen, run.slack);
        CHECK(best[i] == want.best && !memcmp(uppers[i], want.uppers, sizeof(want.uppers)));
    }
}

static void check_estimates(const kernels *isa, const sample *s, uint64_t *seed) {
    for (uint32_t block = 0; block * SKETCH_TOKENS < s->tokens; block++) {
        const uint8_t *at = s->want + block * sketch_block_bytes(s->dim);
        uint32_t count = 1 + random_below(seed, QUERIES);
        uint32_t seen = (uint32_t)random_next(seed) & 0xffff;
        float slack = normal(seed), best = -INFINITY;
        estimated want = estimate_one(reference, at, s->dim, s->queries, count, seen, slack);
        estimated made = estimate_one(isa, at, s->dim, s->queries, count, seen, slack);
        estimated bare = estimate_one(isa, at, s->dim, s->queries, count, seen, 0);
        for (uint32_t t = 0; t < 16; t++) {
            if (!(seen >> t & 1)) {
                CHECK(made.uppers[t] == -INFINITY);
                continue;
            }
            float error = 1e-5f * (1 + fabsf(want.uppers[t]));
            float wide = bare.uppers[t] + slack * scales_of(s->want, s->dim, block)[t];
            CHECK(fabsf(made.uppers[t] - want.uppers[t]) <= error);
            CHECK(fabsf(made.uppers[t] - wide) <= error);
            if (bare.uppers[t] > best) best = bare.uppers[t];
        }
        CHECK(made.best == best && bare.best == best);
    }
}

/* Which values are not below the limit: of any, an infinity or a NaN among them. */
static void test_above(const kernels *isa, uint64_t *seed) {
    enum { COUNT = 9 };
    const float odd[] = {NAN, INFINITY, -INFINITY, 0, -0.0f};
    for (uint32_t round = 0; round < 200; round++) {
        float values[COUNT][SKETCH_TOKENS], limit = round % 7 ? normal(seed) : odd[round % 5];
        uint16_t got[COUNT + 1] = {[COUNT] = 0x5a5a};
        for (uint32_t i = 0; i < COUNT * SKETCH_TOKENS; i++)
            values[i / SKETCH_TOKENS][i % SKETCH_TOKENS] =
                random_below(seed, 9) ? normal(seed) : odd[random_below(seed, 5)];
        values[1][3] = limit;
        isa->above((const float (*)[SKETCH_TOKENS])values, COUNT, limit, got);
        for (uint32_t i = 0; i < COUNT; i++)
            for (uint32_t t = 0; t < SKETCH_TOKENS; t++)
                CHECK((got[i] >> t & 1) == !(values[i][t] < limit));
        CHECK(got[COUNT] == 0x5a5a);
    }
}

/* An estimate is near the logit, and along the key itself it is right. */
static void check_meaning(const sample *s) {
    static float row[DIM_MAX];
    double error = 0, size = 0;
    for (uint32_t t = 0; t < s->tokens; t++) {
        float logit = 0, own = 0, query = 0;
        reference->to_float(s->dtype, s->keys + t * s->key_bytes / s->tokens, s->dim, row);
        for (uint32_t d = 0; d < s->dim; d++) {
            logit += 0.5f * row[d] * s->rows[d];
            own += row[d] * row[d];
            query += s->rows[d] * s->rows[d];
        }
        const uint8_t *at = s->want + t / 16 * sketch_block_bytes(s->dim);
        estimated made = estimate_one(reference, at, s->dim, s->queries, 1, 0xffff, 0);
        error += (made.uppers[t % 16] - logit) * (made.uppers[t % 16] - logit);
        size += 0.25 * own * query / s->dim; /* what a logit is by and large */
        sketch_query self;
        _Alignas(64) int8_t codes[DIM_MAX + 64];
        sketch_queries(row, 1, s->dim, 1, codes, &self);
        made = estimate_one(reference, at, s->dim, &self, 1, 0xffff, 0);
        CHECK(fabsf(made.uppers[t % 16] - own) <= 0.02f * own);
    }
    CHECK(s->tokens < 16 || s->dim < 16 || sqrt(error / size) < 0.6);
}

/* A key that is no number, or a query, gives an estimate that is none; zeros give zeros. */
static void test_odd_numbers(const kernels *isa, uint64_t *seed) {
    const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, 0, 1e-42f};
    for (uint32_t kind = 0; kind < 6; kind++)
        for (uint32_t whole = 0; whole < 2; whole++) {
            sample s;
            sample_make(&s, KERNEL_FLOAT32, 16, 48, seed);
            for (uint32_t d = 0; d < (whole || kind > 2 ? 48 : 1); d++)
                ((float *)s.keys)[3 * 48 + d] = odd[kind];
            encode(isa, &s, s.got);
            estimated made = estimate_one(isa, s.got, 48, s.queries, QUERIES, 0xffff, 0);
            if (kind < 4) CHECK(isnan(made.uppers[3]) && isnan(made.best));
            else CHECK(fabsf(made.uppers[3]) < 1e-30f && isfinite(made.best));
            CHECK(isfinite(made.uppers[2]));
            made = estimate_one(isa, s.got, 48, s.queries, QUERIES, 0xffff & ~(1 << 3), 0);
            CHECK(isfinite(made.best) && made.uppers[3] == -INFINITY);
            s.rows[5] = odd[kind];
            sketch_queries(s.rows, QUERIES, 48, 0.5f, s.codes, s.queries);
            made = estimate_one(isa, s.got, 48, s.queries, QUERIES, 1, 0);
            CHECK(isnan(made.best) == (kind < 3) && isnan(made.uppers[0]) == (kind < 3));
            sample_free(&s);
        }
}

/* Keys that are rows of several heads make the sketch that they make side by side. */
static void test_rows_apart(const kernels *isa, uint64_t *seed) {
    for (uint32_t dim = 16; dim <= 144; dim += 16)
        for (int dtype = 0; dtype < 3; dtype++) {
            sample s;
            sample_make(&s, dtype, 20, dim, seed);
            size_t row = s.key_bytes / s.tokens, bytes = s.tokens * 3 * row - 2 * row;
            uint8_t *apart = guarded(bytes);
            for (uint32_t t = 0; t < s.tokens; t++)
                memcpy(apart + t * 3 * row, s.keys + t * row, row);
            encode(isa, &s, s.want);
            isa->sketch(dtype, apart, 3 * row, s.tokens, dim, s.got);
            CHECK(!memcmp(s.want, s.got, s.bytes));
            guarded_free(apart, bytes);
            sample_free(&s);
        }
}

/* A key with one channel has all of them on a border once it is rotated: whatever their codes,
 * along the key itself the estimate is right. */
static void test_borders(const kernels *isa, uint64_t *seed) {
    for (uint32_t dim = 16; dim <= 1024; dim *= 2) {
        sample s;
        sketch_query query;
        sample_make(&s, KERNEL_FLOAT32, 16, dim, seed);
        float *key = (float *)s.keys + 5 * dim;
        for (uint32_t d = 0; d < dim; d++) key[d] = d == 3 ? 1.7f : 0;
        encode(isa, &s, s.got);
        sketch_queries(key, 1, dim, 1, s.codes, &query);
        estimated made = estimate_one(reference, s.got, dim, &query, 1, 0xffff, 0);
        CHECK(fabsf(made.uppers[5] - 1.7f * 1.7f) < 0.05f);
        sample_free(&s);
    }
}

/* The largest sums there are: none overflows. */
static void test_largest(const kernels *isa) {
    for (uint32_t dim = 16; dim <= 4096; dim *= 2)
        for (int sign = -1; sign <= 1; sign += 2) {
            uint8_t *block = aligned_alloc(64, sketch_block_bytes(dim));
            int8_t *codes = aligned_alloc(64, dim < 64 ? 64 : dim);
            float want = (float)sign * 381 * (float)dim;
            memset(block, 0xff, sketch_block_bytes(dim));
            memset(codes, sign * 127, dim);
            for (int t = 0; t < 16; t++) ((float *)scales_of(block, dim, 0))[t] = 1;
            sketch_query query = {.codes = codes, .factor = 1};
            estimated made = estimate_one(isa, block, dim, &query, 1, 0xffff, 1);
            CHECK(made.uppers[0] == want + 1 && made.uppers[15] == want + 1 && made.best == want);
            free(block);
            free(codes);
        }
}

static void test_dim(const kernels *isa, uint32_t dim, uint64_t *seed) {
    for (int dtype = 0; dtype < 3; dtype++) {
        sample s;
        uint32_t tokens = dim % 3 ? 1 + random_below(seed, TOKENS_MAX) : 16;
        sample_make(&s, dtype, tokens, dim, seed);
        encode(reference, &s, s.want);
        encode(isa, &s, s.got);
        check_encoded(&s);
        check_together(isa, &s, seed);
        check_estimates(isa, &s, seed);
        if (isa == reference) check_meaning(&s);
        sample_free(&s);
    }
}

static void test_isa(const kernels *isa, uint64_t *seed) {
    static const uint32_t dims[] = {80, 96, 112, 128, 160, 192, 240, 256, 512, 576, 1024, 1040};
    for (uint32_t dim = 1; dim <= 700; dim += dim < 70 ? 1 : 37) test_dim(isa, dim, seed);
    for (size_t i = 0; i < sizeof(dims) / sizeof(dims[0]); i++) test_dim(isa, dims[i], seed);
    test_above(isa, seed);
    test_odd_numbers(isa, seed);
    test_rows_apart(isa, seed);
    test_borders(isa, seed);
    test_largest(isa);
}

int main(void) {
    static const char *const names[] = {"serial", "avx2", "avx512_bf16", "neon", NULL};
    test_each_isa(test_isa, test_seed_or(1), names);
    return 0;
}
