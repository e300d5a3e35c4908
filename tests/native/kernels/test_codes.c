/* Goal: codes of 8 and 4 bits are what codes.h says, and each instruction set makes and reads them
 * as the serial one does, to the bit: of odd sizes, any part of a piece, numbers that are none, and
 * without touching what is beside.
 * Method: the serial one against a model in double precision, the others against the serial one;
 * random rows, pieces full of rubbish, memory that ends at a page that cannot be read. */
#include "kernel_tests.h"

enum { TOKENS_MAX = 40, QUERIES_MAX = 20, ROWS_FLOATS = TOKENS_MAX * (CODE_DIM_MAX + 8) };

static void fill(void *memory, size_t bytes, uint64_t *seed) {
    for (size_t i = 0; i < bytes; i++) ((uint8_t *)memory)[i] = (uint8_t)random_next(seed);
}

/* As bits, but that a NaN is like any other. */
static void check_same(const float *want, const float *got, size_t count) {
    for (size_t i = 0; i < count; i++)
        CHECK((isnan(want[i]) && isnan(got[i])) || !memcmp(want + i, got + i, sizeof(float)));
}

/* ---- rows, queries and pieces of one form ---- */

typedef struct memory {
    uint8_t *blocks;
    uint16_t *scales;
} memory;

typedef struct sample {
    code_form form;
    int dtype;
    uint32_t tokens, query_count;
    size_t stride_bytes, row_bytes, block_bytes, scale_bytes;
    uint8_t *rows;
    float *queries, *weights;
    memory want, got;
    int8_t *room;
    code_query prepared[QUERIES_MAX];
} sample;

static memory memory_make(const sample *s) {
    return (memory){guarded(s->block_bytes), guarded(s->scale_bytes)};
}

static void memory_free(const sample *s, memory *m) {
    guarded_free(m->blocks, s->block_bytes);
    guarded_free(m->scales, s->scale_bytes);
}

static code_piece piece_of(memory m) { return (code_piece){m.blocks, m.scales}; }

/* Rubbish that is the same on both sides. */
static void sample_spoil(sample *s, uint64_t *seed) {
    fill(s->want.blocks, s->block_bytes, seed);
    fill(s->want.scales, s->scale_bytes, seed);
    memcpy(s->got.blocks, s->want.blocks, s->block_bytes);
    memcpy(s->got.scales, s->want.scales, s->scale_bytes);
}

/* Gives row t these numbers. */
static void sample_row(sample *s, uint32_t t, const float *numbers) {
    reference->from_float(s->dtype, numbers, s->form.dim, s->rows + t * s->stride_bytes);
}

static void sample_queries(sample *s, float scale) {
    code_queries(s->queries, s->query_count, s->form.dim, scale, s->room, s->prepared);
}

static void sample_make(sample *s, code_form form, int dtype, uint32_t tokens, uint64_t *seed) {
    static float numbers[CODE_DIM_MAX];
    uint32_t dim = form.dim;
    *s = (sample){.form = form, .dtype = dtype, .tokens = tokens};
    s->query_count = 1 + random_below(seed, QUERIES_MAX);
    s->stride_bytes = (dim + random_below(seed, 3) * random_below(seed, 9)) * element_bytes(dtype);
    s->row_bytes = (tokens - 1) * s->stride_bytes + dim * element_bytes(dtype);
    s->block_bytes = code_scales_offset(&form, tokens);
    s->scale_bytes = code_bytes(&form, tokens) - s->block_bytes;
    s->rows = guarded(s->row_bytes);
    s->queries = guarded(s->query_count * dim * sizeof(float));
    s->weights = guarded((size_t)s->query_count * tokens * sizeof(float));
    s->want = memory_make(s);
    s->got = memory_make(s);
    s->room = aligned_alloc(64, align_up((uint64_t)s->query_count * 2 * code_channels(dim), 64));
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t d = 0; d < dim; d++) numbers[d] = normal(seed);
        sample_row(s, t, numbers);
    }
    for (uint32_t i = 0; i < s->query_count * dim; i++) s->queries[i] = normal(seed);
    for (uint32_t i = 0; i < s->query_count * tokens; i++)
        s->weights[i] = random_below(seed, 5) ? expf(3 * normal(seed)) : 0;
    sample_queries(s, 0.3f);
    sample_spoil(s, seed);
}

static void sample_free(sample *s) {
    guarded_free(s->rows, s->row_bytes);
    guarded_free(s->queries, s->query_count * s->form.dim * sizeof(float));
    guarded_free(s->weights, (size_t)s->query_count * s->tokens * sizeof(float));
    memory_free(s, &s->want);
    memory_free(s, &s->got);
    free(s->room);
}

static void encode_part(const kernels *isa, const sample *s, uint32_t at, uint32_t count, memory to,
                        float *errors) {
    isa->code_encode(&s->form, s->dtype, s->rows + at * s->stride_bytes, s->stride_bytes, at,
                     count, to.blocks, to.scales, errors);
}

static void check_pieces(const sample *s) {
    CHECK(!memcmp(s->want.blocks, s->got.blocks, s->block_bytes));
    CHECK(!memcmp(s->want.scales, s->got.scales, s->scale_bytes));
}

/* ---- the serial one, against a model ---- */

static void model_rotate(const float *row, uint32_t dim, double *rotated) {
    for (uint32_t d = 0; d < dim; d++)
        rotated[d] = sketch_signs(d / 64) >> d % 64 & 1 ? -row[d] : row[d];
    model_transform(rotated, dim);
}

static float scale_of(memory m, uint32_t token) {
    float scale;
    reference->to_float(KERNEL_FLOAT16, m.scales + token, 1, &scale);
    return scale;
}

static double length_of(const double *x, uint32_t dim) {
    double squares = 0;
    for (uint32_t d = 0; d < dim; d++) squares += x[d] * x[d];
    return sqrt(squares);
}

/* A row stands for itself within half a step, and a little more at the ends, where the scale's own
 * rounding is seen. The way back gives the row, within its error. */
static void check_row(const sample *s, uint32_t t, const float *decoded, float error) {
    static float row[CODE_DIM_MAX], back[CODE_DIM_MAX];
    static double rotated[CODE_DIM_MAX], missed[CODE_DIM_MAX];
    uint32_t dim = s->form.dim;
    double half = s->form.bits == 8 ? 128 : 8, largest = 0, scale = scale_of(s->want, t);
    reference->to_float(s->dtype, s->rows + t * s->stride_bytes, dim, row);
    model_rotate(row, dim, rotated);
    for (uint32_t d = 0; d < dim; d++) largest = fmax(largest, fabs(rotated[d]));
    CHECK(fabs(scale - largest / half) <= scale * (1 / 2048.0 + 1e-5));
    for (uint32_t d = 0; d < dim; d++) {
        CHECK(fabs(decoded[d] - rotated[d]) <= scale * (0.5 + half / 2048 + 1e-3));
        missed[d] = decoded[d] - rotated[d];
    }
    CHECK(fabs(length_of(missed, dim) - error) <= 1e-3 * error + 1e-4 * scale);
    memcpy(back, decoded, dim * sizeof(float));
    code_unrotate(back, 1, dim);
    for (uint32_t d = 0; d < dim; d++) missed[d] = back[d] - row[d];
    CHECK(fabs(length_of(missed, dim) - error) <= 1e-3 * error + 1e-3 * scale);
}

static void check_logits(const sample *s, const float *decoded) {
    static float logits[QUERIES_MAX * TOKENS_MAX];
    static double rotated[CODE_DIM_MAX];
    uint32_t dim = s->form.dim;
    reference->code_score(&s->form, piece_of(s->want), 0, s->tokens, s->prepared, s->query_count,
                          logits, TOKENS_MAX, NULL);
    for (uint32_t j = 0; j < s->query_count; j++) {
        double largest = 0;
        model_rotate(s->queries + j * dim, dim, rotated);
        for (uint32_t d = 0; d < dim; d++) largest = fmax(largest, fabs(rotated[d]));
        for (uint32_t t = 0; t < s->tokens; t++) {
            double logit = 0, sizes = 0, products = 0;
            for (uint32_t d = 0; d < dim; d++) {
                double value = decoded[t * dim + d];
                logit += 0.3 * value * rotated[d];
                sizes += fabs(value);
                products += fabs(0.3 * value * rotated[d]);
            }
            double bound = 0.3 * largest / 8127 * sizes * 0.501 + 1e-6 * products;
            CHECK(fabs(logits[j * TOKENS_MAX + t] - logit) <= bound);
        }
    }
}

static void check_sums(const sample *s, const float *decoded) {
    static float sums[QUERIES_MAX * CODE_DIM_MAX];
    uint32_t dim = s->form.dim;
    for (uint32_t i = 0; i < s->query_count * dim; i++) sums[i] = 1;
    reference->code_accumulate(&s->form, piece_of(s->want), 0, s->tokens, s->weights, s->tokens,
                               s->query_count, sums, NULL);
    for (uint32_t j = 0; j < s->query_count; j++)
        for (uint32_t d = 0; d < dim; d++) {
            double sum = 1, bound = 0, largest = 0, sizes = 1;
            for (uint32_t t = 0; t < s->tokens; t++) {
                float weight = s->weights[j * s->tokens + t], scale = scale_of(s->want, t);
                double value = decoded[t * dim + d];
                if (t % CODE_TOKENS == 0) largest = 0;
                for (uint32_t i = t; t % CODE_TOKENS == 0 && i < t + 16 && i < s->tokens; i++)
                    largest = fmax(largest, s->weights[j * s->tokens + i] * scale_of(s->want, i));
                sum += weight * value;
                sizes += fabs(weight * value);
                bound += fabs(value / scale) * largest / 16256 * 0.501;
            }
            CHECK(fabs(sums[j * dim + d] - sum) <= bound + 1e-6 * sizes);
        }
}

static void check_meaning(const sample *s) {
    static float decoded[TOKENS_MAX * CODE_DIM_MAX], errors[TOKENS_MAX];
    encode_part(reference, s, 0, s->tokens, s->want, errors);
    reference->code_decode(&s->form, piece_of(s->want), 0, s->tokens, decoded);
    for (uint32_t t = 0; t < s->tokens; t++)
        check_row(s, t, decoded + t * s->form.dim, errors[t]);
    if (s->form.values) check_sums(s, decoded);
    else check_logits(s, decoded);
}

/* Of many rows, the error is what 0034-encodings.md says. */
static void test_errors(uint64_t *seed) {
    for (uint32_t bits = 4; bits <= 8; bits += 4) {
        double error = 0, size = 0;
        for (uint32_t round = 0; round < 20; round++) {
            static float errors[TOKENS_MAX], row[128];
            sample s;
            sample_make(&s, (code_form){bits, 128, round % 2}, KERNEL_FLOAT32, TOKENS_MAX, seed);
            encode_part(reference, &s, 0, s.tokens, s.want, errors);
            for (uint32_t t = 0; t < s.tokens; t++) {
                memcpy(row, s.rows + t * s.stride_bytes, sizeof(row));
                for (uint32_t d = 0; d < 128; d++) size += row[d] * row[d];
                error += errors[t] * errors[t];
            }
            sample_free(&s);
        }
        CHECK(fabs(error / size / (bits == 4 ? 0.0108 : 4.2e-5) - 1) < 0.05);
    }
}

/* A line at a time, as codes.h has them; and the upper half of 8 bits is the code of 4. */
static void check_layout(uint64_t *seed) {
    enum { DIM = 48, TOKENS = 16 };
    for (uint32_t values = 0; values < 2; values++) {
        sample eight, four;
        sample_make(&eight, (code_form){8, DIM, values}, KERNEL_FLOAT32, TOKENS, seed);
        sample_make(&four, (code_form){4, DIM, values}, KERNEL_FLOAT32, TOKENS, seed);
        for (uint32_t t = 0; t < TOKENS; t++)
            sample_row(&four, t, (const float *)(eight.rows + t * eight.stride_bytes));
        encode_part(reference, &eight, 0, TOKENS, eight.want, NULL);
        encode_part(reference, &four, 0, TOKENS, four.want, NULL);
        for (uint32_t t = 0; t < TOKENS; t++) {
            float decoded[DIM], scale = scale_of(eight.want, t);
            reference->code_decode(&eight.form, piece_of(eight.want), t, 1, decoded);
            CHECK(scale_of(four.want, t) == 16 * scale);
            for (uint32_t d = 0; d < DIM; d++) {
                uint32_t at8 = d / 4 * 64 + t * 4 + d % 4, at4 = d / 8 * 64 + t * 4 + d % 4;
                uint32_t shift = d % 8 / 4 * 4;
                if (values) {
                    at8 = (t / 4 * (DIM / 16) + d / 16) * 64 + d % 16 * 4 + t % 4;
                    at4 = (t / 8 * (DIM / 16) + d / 16) * 64 + d % 16 * 4 + t % 4;
                    shift = t % 8 / 4 * 4;
                }
                int code = eight.want.blocks[at8];
                CHECK(decoded[d] == ((float)code - 127.5f) * scale);
                CHECK((four.want.blocks[at4] >> shift & 15) == code >> 4);
            }
        }
        sample_free(&eight);
        sample_free(&four);
    }
}

static void test_queries(uint64_t *seed) {
    static float query[CODE_DIM_MAX];
    static double rotated[CODE_DIM_MAX];
    for (uint32_t dim = 1; dim <= CODE_DIM_MAX; dim += dim < 40 ? 1 : 41) {
        uint32_t channels = code_channels(dim);
        int8_t *room = aligned_alloc(64, align_up(2 * channels, 64));
        for (uint32_t d = 0; d < dim; d++) query[d] = normal(seed) * 1e4f;
        code_query made;
        code_queries(query, 1, dim, 0.7f, room, &made);
        model_rotate(query, dim, rotated);
        double largest = 0;
        int32_t sum = 0;
        for (uint32_t d = 0; d < dim; d++) largest = fmax(largest, fabs(rotated[d]));
        CHECK(fabs(made.factor * 8127 / 0.7 / largest - 1) < 1e-5);
        for (uint32_t d = 0; d < channels; d++) {
            int32_t whole = 128 * made.high[d] + made.low[d];
            CHECK(made.high[d] > -64 && made.high[d] <= 64);
            CHECK(made.low[d] >= -64 && made.low[d] < 64);
            CHECK(d < dim || whole == 0);
            CHECK(d >= dim || fabs(whole - rotated[d] / largest * 8127) <= 0.51);
            sum += whole;
        }
        CHECK(made.sum == sum);
        const float odd[] = {NAN, INFINITY, -INFINITY, 0, 1e-31f, 1e-42f};
        for (uint32_t kind = 0; kind < 6; kind++) {
            for (uint32_t d = 0; d < dim && kind > 2; d++) query[d] = odd[kind] / 64;
            query[dim / 2] = odd[kind];
            code_queries(query, 1, dim, 0.7f, room, &made);
            CHECK(isnan(made.factor) == (kind < 3) && (kind < 3 || made.factor < 1e-30f));
            for (uint32_t d = 0; d < channels; d++) CHECK(made.high[d] == 0 && made.low[d] == 0);
            CHECK(made.sum == 0);
        }
        free(room);
    }
}

/* ---- the others, against the serial one ---- */

static void check_encoded(const kernels *isa, sample *s, uint64_t *seed) {
    float want[TOKENS_MAX], got[TOKENS_MAX];
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t at = round ? random_below(seed, s->tokens) : 0;
        uint32_t count = round ? 1 + random_below(seed, s->tokens - at) : s->tokens;
        encode_part(reference, s, at, count, s->want, want);
        encode_part(isa, s, at, count, s->got, round == 1 ? NULL : got);
        check_pieces(s);
        if (round != 1) check_same(want, got, count);
    }
}

/* One by one, in any order, they make the same piece. */
static void check_order(const kernels *isa, sample *s, uint64_t *seed) {
    uint32_t order[TOKENS_MAX];
    float want[TOKENS_MAX], got[TOKENS_MAX];
    sample_spoil(s, seed);
    for (uint32_t t = 0; t < s->tokens; t++) {
        uint32_t other = random_below(seed, t + 1);
        order[t] = order[other];
        order[other] = t;
    }
    encode_part(isa, s, 0, s->tokens, s->want, want);
    for (uint32_t t = 0; t < s->tokens; t++)
        encode_part(isa, s, order[t], 1, s->got, got + order[t]);
    check_pieces(s);
    check_same(want, got, s->tokens);
}

static void check_decoded(const kernels *isa, const sample *s, uint64_t *seed) {
    uint32_t first = random_below(seed, s->tokens), dim = s->form.dim;
    uint32_t count = 1 + random_below(seed, s->tokens - first);
    size_t bytes = (size_t)count * dim * sizeof(float);
    float *want = malloc(bytes), *got = guarded(bytes);
    reference->code_decode(&s->form, piece_of(s->want), first, count, want);
    isa->code_decode(&s->form, piece_of(s->want), first, count, got);
    check_same(want, got, (size_t)count * dim);
    free(want);
    guarded_free(got, bytes);
}

static void check_scores(const kernels *isa, const sample *s, uint64_t *seed) {
    uint32_t first = random_below(seed, s->tokens), stride, queries;
    uint32_t count = 1 + random_below(seed, s->tokens - first);
    if (random_below(seed, 3) == 0) first = 0, count = s->tokens;
    stride = count + random_below(seed, 4);
    queries = 1 + random_below(seed, s->query_count);
    size_t floats = (size_t)stride * (queries - 1) + count;
    float *want = malloc(floats * sizeof(float)), *got = guarded(floats * sizeof(float));
    for (size_t i = 0; i < floats; i++) want[i] = got[i] = 77;
    const void *next = random_below(seed, 2) ? s->got.blocks : NULL;
    reference->code_score(&s->form, piece_of(s->want), first, count, s->prepared, queries, want,
                          stride, NULL);
    isa->code_score(&s->form, piece_of(s->want), first, count, s->prepared, queries, got, stride,
                    next);
    check_same(want, got, floats);
    free(want);
    guarded_free(got, floats * sizeof(float));
}

static void check_best(const kernels *isa, const sample *s, uint64_t *seed) {
    enum { PIECES = 3 };
    uint32_t tokens = 1 + random_below(seed, s->tokens), blocks = code_blocks(tokens);
    uint32_t queries = 1 + random_below(seed, s->query_count);
    code_piece pieces[PIECES];
    const void *next[PIECES];
    float want[PIECES], got[PIECES + 1] = {[PIECES] = 77};
    for (uint32_t i = 0; i < PIECES; i++) {
        uint32_t skipped = random_below(seed, code_blocks(s->tokens) - blocks + 1);
        pieces[i] = (code_piece){s->want.blocks + skipped * code_block_bytes(&s->form),
                                 s->want.scales + skipped * CODE_TOKENS};
        next[i] = random_below(seed, 2) ? s->got.blocks : NULL;
    }
    reference->code_score_best(&s->form, pieces, next, PIECES, tokens, s->prepared, queries, want);
    isa->code_score_best(&s->form, pieces, next, PIECES, tokens, s->prepared, queries, got);
    check_same(want, got, PIECES);
    CHECK(got[PIECES] == 77);
}

static void check_accumulated(const kernels *isa, const sample *s, uint64_t *seed) {
    uint32_t first = random_below(seed, s->tokens), dim = s->form.dim;
    uint32_t count = 1 + random_below(seed, s->tokens - first);
    if (random_below(seed, 3) == 0) first = 0, count = s->tokens;
    uint32_t queries = 1 + random_below(seed, s->query_count);
    size_t floats = (size_t)queries * dim;
    /* The last row of weights ends where the array does. */
    const float *weights = s->weights + (s->tokens - count);
    float *want = malloc(floats * sizeof(float)), *got = guarded(floats * sizeof(float));
    for (size_t i = 0; i < floats; i++) want[i] = got[i] = normal(seed);
    const void *next = random_below(seed, 2) ? s->got.blocks : NULL;
    reference->code_accumulate(&s->form, piece_of(s->want), first, count, weights, s->tokens,
                               queries, want, NULL);
    isa->code_accumulate(&s->form, piece_of(s->want), first, count, weights, s->tokens, queries,
                         got, next);
    check_same(want, got, floats);
    free(want);
    guarded_free(got, floats * sizeof(float));
}

/* Several pieces at once, as many as are taken together and more, against one after the other. */
static void check_accumulated_pieces(const kernels *isa, const sample *s, uint64_t *seed) {
    enum { PIECES_MAX = 11 };
    uint32_t tokens = 1 + random_below(seed, s->tokens), blocks = code_blocks(tokens);
    uint32_t queries = 1 + random_below(seed, s->query_count), dim = s->form.dim;
    uint32_t count = 1 + random_below(seed, PIECES_MAX), columns = count * tokens;
    size_t floats = (size_t)queries * dim, weight_bytes = queries * columns * sizeof(float);
    code_piece pieces[PIECES_MAX];
    const void *next[PIECES_MAX];
    float *want = malloc(floats * sizeof(float)), *got = guarded(floats * sizeof(float));
    float *weights = guarded(weight_bytes);
    if (!isa->code_accumulate_pieces) count = 0;
    for (size_t i = 0; i < floats; i++) want[i] = got[i] = normal(seed);
    for (uint32_t i = 0; i < queries * columns; i++)
        weights[i] = random_below(seed, 5) ? expf(3 * normal(seed)) : 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t skipped = random_below(seed, code_blocks(s->tokens) - blocks + 1);
        pieces[i] = (code_piece){s->want.blocks + skipped * code_block_bytes(&s->form),
                                 s->want.scales + skipped * CODE_TOKENS};
        next[i] = random_below(seed, 2) ? s->got.blocks : NULL;
        reference->code_accumulate(&s->form, pieces[i], 0, tokens, weights + i * tokens, columns,
                                   queries, want, NULL);
    }
    if (count)
        isa->code_accumulate_pieces(&s->form, pieces, next, count, tokens, weights, columns,
                                    queries, got);
    check_same(want, got, floats);
    free(want);
    guarded_free(got, floats * sizeof(float));
    guarded_free(weights, weight_bytes);
}

static void check_read(const kernels *isa, const sample *s, uint64_t *seed) {
    check_decoded(isa, s, seed);
    if (s->form.values) {
        check_accumulated(isa, s, seed);
        check_accumulated_pieces(isa, s, seed);
    } else {
        check_scores(isa, s, seed);
        check_best(isa, s, seed);
    }
}

/* Rows and queries of every kind that is not plain, and weights. */
static void sample_harm(sample *s, uint64_t *seed) {
    static const float odd[] = {NAN,   INFINITY, -INFINITY, 3e38f, 1e30f, 1e4f, 6e4f, 9e6f,
                                -1e7f, 1e-5f,    3e-6f,     1e-7f, 1e-42f, 0,   -0.0f};
    static float numbers[CODE_DIM_MAX];
    const uint32_t kinds = sizeof(odd) / sizeof(odd[0]), dim = s->form.dim;
    for (uint32_t t = 0; t < s->tokens; t++) {
        float one = odd[random_below(seed, kinds)], all = odd[random_below(seed, kinds)];
        switch (random_below(seed, 4)) {
        case 0: continue;
        case 1: /* one channel */
            for (uint32_t d = 0; d < dim; d++) numbers[d] = normal(seed);
            numbers[random_below(seed, dim)] = one;
            break;
        case 2: /* all, of that size */
            for (uint32_t d = 0; d < dim; d++) numbers[d] = normal(seed) * all;
            break;
        default:
            for (uint32_t d = 0; d < dim; d++) numbers[d] = all;
        }
        sample_row(s, t, numbers);
    }
    for (uint32_t j = 0; j < s->query_count; j++)
        if (random_below(seed, 8) == 0)
            s->queries[j * dim + random_below(seed, dim)] = odd[random_below(seed, kinds)];
    sample_queries(s, 0.3f);
    for (uint32_t j = 0; j < s->query_count; j++) {
        float *row = s->weights + j * s->tokens, size = fabsf(odd[random_below(seed, kinds)]);
        for (uint32_t t = 0; t < s->tokens && random_below(seed, 2); t++)
            row[t] = fabsf(normal(seed)) * size;
    }
}

static void test_form(const kernels *isa, code_form form, uint64_t *seed) {
    sample s;
    uint32_t tokens = form.dim % 3 ? 1 + random_below(seed, TOKENS_MAX) : 16;
    sample_make(&s, form, (int)random_below(seed, 3), tokens, seed);
    if (isa == reference) check_meaning(&s);
    check_read(isa, &s, seed); /* of rubbish */
    check_encoded(isa, &s, seed);
    check_order(isa, &s, seed);
    check_read(isa, &s, seed);
    sample_harm(&s, seed);
    sample_spoil(&s, seed);
    check_encoded(isa, &s, seed);
    check_order(isa, &s, seed);
    check_read(isa, &s, seed);
    sample_free(&s);
}

/* Rows with an infinity or a NaN are seen in what is computed from them, in no other row's. */
static void test_odd_numbers(const kernels *isa, uint64_t *seed) {
    const float odd[] = {NAN, INFINITY, -INFINITY, 3e38f, 0, 1e-42f};
    for (uint32_t kind = 0; kind < 6; kind++)
        for (uint32_t form = 0; form < 4; form++) {
            enum { DIM = 48 };
            float row[DIM], errors[16], logits[16], sums[DIM] = {0}, best;
            sample s;
            sample_make(&s, (code_form){form % 2 ? 8 : 4, DIM, form / 2}, KERNEL_FLOAT32, 16, seed);
            for (uint32_t d = 0; d < DIM; d++) row[d] = kind < 3 && d ? 1 : odd[kind];
            sample_row(&s, 3, row);
            encode_part(isa, &s, 0, 16, s.got, errors);
            CHECK(kind < 4 ? s.got.scales[3] == 0x7e00 : s.got.scales[3] == 0);
            CHECK(kind < 4 ? errors[3] == 0 : errors[3] <= 1e-40f);
            code_piece piece = piece_of(s.got);
            if (s.form.values) {
                isa->code_accumulate(&s.form, piece, 0, 16, s.weights, 16, 1, sums, NULL);
                for (uint32_t d = 0; d < DIM; d++) CHECK(isnan(sums[d]) == (kind < 4));
            } else {
                isa->code_score(&s.form, piece, 0, 16, s.prepared, 1, logits, 16, NULL);
                CHECK(kind < 4 ? isnan(logits[3]) : logits[3] == 0);
                CHECK(isfinite(logits[2]) && logits[2] != 0);
                isa->code_score_best(&s.form, &piece, (const void *[]){NULL}, 1, 16, s.prepared,
                                     1, &best);
                CHECK(isnan(best) == (kind < 4));
            }
            sample_free(&s);
        }
}

/* The largest sums there are: none overflows. */
static void test_largest(const kernels *isa) {
    for (uint32_t dim = 16; dim <= CODE_DIM_MAX; dim *= 2)
        for (uint32_t i = 0; i < 8; i++) {
            uint32_t bits = i & 1 ? 8 : 4, sign = i & 2, end = i & 4;
            code_form form = {.bits = bits, .dim = dim};
            size_t bytes = code_scales_offset(&form, 16);
            uint8_t *blocks = aligned_alloc(64, bytes);
            int8_t *high = malloc(dim), *low = malloc(dim);
            uint16_t scales[16];
            float logits[16], sums[CODE_DIM_MAX] = {0}, weights[16], best;
            double code = (end ? 0.5 : -0.5) * ((1 << bits) - 1);
            memset(blocks, end ? 255 : 0, bytes);
            memset(high, sign ? -63 : 63, dim);
            memset(low, sign ? -63 : 63, dim);
            for (int t = 0; t < 16; t++) scales[t] = 0x3c00, weights[t] = 16256;
            code_query query = {high, low, (sign ? -8127 : 8127) * (int32_t)dim, 1};
            code_piece piece = {blocks, scales};
            float want = (float)((sign ? -8127 : 8127) * code * dim);
            isa->code_score(&form, piece, 0, 16, &query, 1, logits, 16, NULL);
            CHECK(logits[0] == want && logits[15] == want);
            isa->code_score_best(&form, &piece, (const void *[]){NULL}, 1, 16, &query, 1, &best);
            CHECK(best == want);
            form.values = true;
            isa->code_accumulate(&form, piece, 0, 16, weights, 16, 1, sums, NULL);
            want = (float)(16 * 16256 * code);
            for (uint32_t d = 0; d < dim; d++) CHECK(sums[d] == want);
            free(blocks);
            free(high);
            free(low);
        }
}

/* Codes of 8 bits in two planes of 4, each as codes of 4 bits lie; and back. */
static void test_planes(const kernels *isa, uint32_t dim, uint64_t *seed) {
    for (int values = 0; values < 2; values++) {
        code_form form = {.bits = 8, .dim = dim, .values = values}, upper = code_upper(&form);
        size_t bytes = code_block_bytes(&form);
        uint8_t *block = guarded(bytes), *joined = guarded(bytes), *planes[2];
        uint8_t codes[CODE_DIM_MAX], halves[CODE_DIM_MAX];
        for (int i = 0; i < 2; i++) planes[i] = guarded(bytes / 2);
        fill(block, bytes, seed);
        isa->code_split(&form, block, planes[0], planes[1]);
        for (uint32_t t = 0; t < CODE_TOKENS; t++) {
            code_take(&form, block, t, codes);
            code_take(&upper, planes[0], t, halves);
            for (uint32_t d = 0; d < code_channels(dim); d++) CHECK(halves[d] == codes[d] >> 4);
            code_take(&upper, planes[1], t, halves);
            for (uint32_t d = 0; d < code_channels(dim); d++) CHECK(halves[d] == (codes[d] & 15));
        }
        isa->code_join(&form, planes[0], planes[1], joined);
        CHECK(memcmp(joined, block, bytes) == 0);
        guarded_free(block, bytes);
        guarded_free(joined, bytes);
        for (int i = 0; i < 2; i++) guarded_free(planes[i], bytes / 2);
    }
}

static void test_raise(const kernels *isa) {
    float rows[3][CODE_TOKENS], most[CODE_TOKENS];
    for (int t = 0; t < CODE_TOKENS; t++) {
        most[t] = -INFINITY;
        for (int j = 0; j < 3; j++) rows[j][t] = (float)((t * 7 + j * 5) % 11) - 5;
    }
    rows[0][3] = rows[1][4] = rows[2][5] = NAN;
    isa->code_raise(rows[0], 3, most);
    for (int t = 0; t < CODE_TOKENS; t++) {
        float want = fmaxf(fmaxf(rows[0][t], rows[1][t]), rows[2][t]);
        CHECK(t >= 3 && t <= 5 ? isnan(most[t]) : most[t] == want);
    }
}

static void test_isa(const kernels *isa, uint64_t *seed) {
    for (uint32_t dim = 1; dim <= CODE_DIM_MAX; dim += dim < 200 ? 1 : 8)
        for (uint32_t form = 0; form < 4; form++) {
            if (dim > 200 && dim != 256 && dim != 576 && dim != 1024) continue;
            test_form(isa, (code_form){form % 2 ? 8 : 4, dim, form / 2}, seed);
            if (form == 0) test_planes(isa, dim, seed);
        }
    test_raise(isa);
    test_odd_numbers(isa, seed);
    test_largest(isa);
}

int main(void) {
    static const char *const names[] = {"serial", "avx2", "avx512_bf16", "neon", NULL};
    uint64_t seed = test_seed_or(1);
    check_layout(&seed);
    test_errors(&seed);
    test_queries(&seed);
    test_each_isa(test_isa, seed, names);
    return 0;
}
