/* Goal: every instruction set computes what kernels.h promises, for any size. Method: each table is
 * forced in turn and compared with loops in double precision, within the promised error, exactly
 * where the numbers are whole; inputs end at an unmapped page, so that a read too far is a fault;
 * outputs lie between guard bytes and start as NaN, so that a stray or a missing write shows. */
#include <float.h>
#include <math.h>
#include <sys/mman.h>

#include "check.h"

static const uint32_t dims[] = {1, 3, 16, 31, 64, 80, 96, 128, 192, 256};
static const uint32_t token_counts[] = {1, 5, 16, 17, 64};
static const uint32_t query_counts[] = {1, 2, 3, 4, 9, 17, 35};
static const int dtypes[] = {KERNEL_BFLOAT16, KERNEL_FLOAT16, KERNEL_FLOAT32};
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define EPS 0x1p-24

enum { MAX_DIM = 300, MAX_TOKENS = 64, MAX_QUERIES = 35, STRIDE = 70, MAP_PAGE = 4096 };

static uint64_t seed = 20240607;

static uint64_t random_word(void) { return random_next(&seed); }

static float random_float(void) { /* about normal, standard deviation 1 */
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)(random_word() >> 40) * 0x1p-24f - 0.5f;
    return sum * 1.7320508f;
}

static float random_whole(void) { return (float)((int)(random_word() % 17) - 8); }

static float random_sign(void) { return random_word() % 2 ? 1.5f : -1.5f; }

static float random_positive(void) { return 1 + (float)(random_word() % 4); }

static float random_tiny(void) { /* of bf16: 0, denormal, or just above */
    return random_whole() * 0x1p-130f;
}

static size_t element_bytes(int dtype) { return dtype == KERNEL_FLOAT32 ? 4 : 2; }

/* ---- buffers that notice a step too far ---- */

typedef struct buffer {
    char *map;
    size_t map_bytes, bytes;
    char *data; /* its end is the end of the last accessible page, or nearly so when aligned */
} buffer;

/* Bytes before and after the data hold GUARD; `alignment` is a power of two. */
enum { GUARD = 0xa5 };

static buffer make_buffer(size_t bytes, size_t alignment) {
    buffer made = {.bytes = bytes};
    size_t pages = (bytes + 2 * 64 + MAP_PAGE - 1) / MAP_PAGE;
    made.map_bytes = (pages + 1) * MAP_PAGE;
    made.map =
        mmap(NULL, made.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(made.map != MAP_FAILED);
    char *end = made.map + pages * MAP_PAGE;
    CHECK(!mprotect(end, MAP_PAGE, PROT_NONE));
    memset(made.map, GUARD, pages * MAP_PAGE);
    made.data = end - (bytes + alignment - 1) / alignment * alignment;
    return made;
}

static void free_buffer(buffer *held) {
    for (char *byte = held->map; byte < held->data; byte++)
        CHECK((uint8_t)*byte == GUARD);
    char *end = held->map + held->map_bytes - MAP_PAGE;
    for (char *byte = held->data + held->bytes; byte < end; byte++)
        CHECK((uint8_t)*byte == GUARD);
    munmap(held->map, held->map_bytes);
}

static void fill(float *values, size_t count, float value) {
    for (size_t i = 0; i < count; i++)
        values[i] = value;
}

/* For results: a number that is not written stays none. */
static buffer make_outputs(size_t count) {
    buffer made = make_buffer(count * sizeof(float), sizeof(float));
    fill((float *)made.data, count, NAN);
    return made;
}

/* `count` random elements of dtype at the end of the buffer; their values as fp32 in `exact`. */
static buffer make_elements(int dtype, size_t count, float (*next)(void), float *exact) {
    buffer made = make_buffer(count * element_bytes(dtype), element_bytes(dtype));
    for (size_t i = 0; i < count; i++)
        exact[i] = next();
    kernels_serial.from_float(dtype, exact, count, made.data);
    kernels_serial.to_float(dtype, made.data, count, exact);
    return made;
}

static buffer make_floats(size_t count, float (*next)(void)) {
    buffer made = make_buffer(count * sizeof(float), sizeof(float));
    for (size_t i = 0; i < count; i++)
        ((float *)made.data)[i] = next();
    return made;
}

static void assert_close(double value, double expected, double bound) {
    if (fabs(value - expected) <= bound)
        return;
    printf("%.9g, expected %.9g within %.3g\n", value, expected, bound);
    CHECK(false);
}

/* ---- queries, as rows and in the table's own form ---- */

typedef struct asked {
    buffer rows, packed;
    kernel_queries queries;
    const float *row; /* the first one that is meant */
} asked;

/* `count` queries between some others. With `form`, those of bf16 numbers, which are packed too if
 * the table has a form for them. */
static asked make_queries(const kernels *table, int dtype, uint32_t dim, uint32_t count,
                          float (*next)(void), bool form) {
    uint32_t first = (uint32_t)(random_word() % 6);
    uint32_t all = first + count + (uint32_t)(random_word() % 6);
    asked made = {.rows = make_floats((size_t)all * dim, next)};
    float *rows = (float *)made.rows.data;
    if (form) {
        uint16_t *halves = malloc((size_t)all * dim * sizeof *halves);
        kernels_serial.from_float(KERNEL_BFLOAT16, rows, (size_t)all * dim, halves);
        kernels_serial.to_float(KERNEL_BFLOAT16, halves, (size_t)all * dim, rows);
        free(halves);
    }
    made.queries = (kernel_queries){.rows = rows, .total = all, .first = first, .count = count};
    made.row = rows + (size_t)first * dim;
    if (!form || !table->pack)
        return made;
    made.packed = make_buffer(table->packed_bytes(dim, all), 64);
    bool is_packed = table->pack(dtype, rows, dim, all, made.packed.data);
    CHECK(is_packed == (dtype == KERNEL_BFLOAT16)); /* so it is in each table that has a form */
    made.queries.packed = is_packed ? made.packed.data : NULL;
    return made;
}

static void free_queries(asked *held) {
    free_buffer(&held->rows);
    if (held->packed.map)
        free_buffer(&held->packed);
}

/* ---- scores, accumulation and bounds against double precision ---- */

/* One size: `is_whole` numbers must come out exactly, others within the promised error. A table
 * with packed queries may take keys that are denormal for 0, but nothing larger. */
typedef struct size {
    int dtype;
    uint32_t dim, tokens, queries;
    bool is_whole, is_packed, has_tiny_keys;
} size;

static float (*source_of(size now))(void) { return now.is_whole ? random_whole : random_float; }

static float scale_of(size now) {
    return now.is_whole ? 0.5f : now.has_tiny_keys ? 2 : 0.0883883f;
}

/* The same rows, in some sizes with a gap behind each, as a token-major tail has them. */
static buffer spread_rows(size now, const buffer *rows, size_t *row_bytes) {
    size_t used = rows->bytes / now.tokens;
    *row_bytes = used * (1 + now.dim % 3);
    buffer made = make_buffer(now.tokens * *row_bytes, element_bytes(now.dtype));
    for (uint32_t t = 0; t < now.tokens; t++)
        memcpy((char *)made.data + t * *row_bytes, (char *)rows->data + t * used, used);
    return made;
}

/* What is asked for ahead is never read: sometimes nothing, sometimes where nobody may read. */
static const void *next_of(size now, const void *near) {
    return now.tokens % 3 == 0 ? NULL : now.tokens % 3 == 1 ? near : (const void *)(uintptr_t)4096;
}

/* Keys one by one, in another order, are as good as those of a page. */
static void check_each(const kernels *table, size now, const char *keys, size_t row_bytes,
                       const kernel_queries *queries, float scale, const float *logits) {
    const void *rows[MAX_TOKENS];
    float best[MAX_TOKENS];
    for (uint32_t t = 0; t < now.tokens; t++)
        rows[t] = keys + (t * 7 % now.tokens) * row_bytes;
    kernels_score_each(table, now.dtype, rows, now.tokens, now.dim, queries, scale, best);
    for (uint32_t t = 0; t < now.tokens; t++) {
        float largest = -INFINITY;
        for (uint32_t j = 0; j < now.queries; j++)
            largest = fmaxf(largest, logits[j * STRIDE + t * 7 % now.tokens]);
        CHECK(best[t] == largest);
    }
}

/* Of several pieces with one call: the largest of what score_max writes of each. */
static void check_pieces(const kernels *table, size now, const char *keys, size_t row_bytes,
                         const kernel_queries *queries, float scale, float largest) {
    enum { PIECES = 3 };
    const void *pieces[PIECES] = {keys, keys, keys}, *next[PIECES] = {keys, NULL, keys};
    float best[PIECES + 1] = {7, 7, 7, 7};
    bool done = table->score_pieces &&
                table->score_pieces(now.dtype, pieces, next, PIECES, row_bytes, now.tokens, now.dim,
                                    queries, scale, best);
    for (int i = 0; i < PIECES; i++) CHECK(best[i] == (done ? largest : 7));
    CHECK(best[PIECES] == 7);
}

static void check_scores(const kernels *table, size now) {
    static float exact[MAX_TOKENS * MAX_DIM];
    float scale = scale_of(now);
    buffer keys = make_elements(now.dtype, now.tokens * now.dim,
                                now.has_tiny_keys ? random_tiny : source_of(now), exact);
    asked queries =
        make_queries(table, now.dtype, now.dim, now.queries, source_of(now), now.is_packed);
    buffer logits = make_outputs((now.queries - 1) * STRIDE + now.tokens);
    buffer maxima = make_outputs(now.queries);
    const float *query = queries.row, *logit = (float *)logits.data;

    size_t row_bytes;
    buffer spread = spread_rows(now, &keys, &row_bytes);
    table->score(now.dtype, spread.data, row_bytes, now.tokens, now.dim, &queries.queries,
                 scale, (float *)logits.data, STRIDE, next_of(now, keys.data));
    table->score_max(now.dtype, spread.data, row_bytes, now.tokens, now.dim,
                     &queries.queries, scale, (float *)maxima.data, next_of(now, keys.data));
    check_each(table, now, spread.data, row_bytes, &queries.queries, scale, logit);

    float largest_of_all = -INFINITY;
    for (uint32_t j = 0; j < now.queries; j++)
        largest_of_all = fmaxf(largest_of_all, ((float *)maxima.data)[j]);
    check_pieces(table, now, spread.data, row_bytes, &queries.queries, scale, largest_of_all);
    for (uint32_t j = 0; j < now.queries; j++) {
        float largest = -INFINITY;
        for (uint32_t t = 0; t < now.tokens; t++) {
            double sum = 0, magnitude = 0, flushed = now.has_tiny_keys ? 2 * now.dim : 0;
            for (uint32_t d = 0; d < now.dim; d++) {
                double factor = query[j * now.dim + d], product = factor * exact[t * now.dim + d];
                sum += product;
                magnitude += fabs(product);
                flushed += now.has_tiny_keys ? fabs(factor) : 0;
            }
            float found = logit[j * STRIDE + t];
            double bound = now.is_whole ? 0
                                        : scale * ((now.dim + 2) * EPS * magnitude +
                                                   0x1p-126 * flushed);
            assert_close(found, scale * sum, bound);
            largest = found > largest ? found : largest;
        }
        CHECK(((float *)maxima.data)[j] == largest); /* the same numbers, not merely close ones */
        for (uint32_t t = now.tokens; t < STRIDE && j + 1 < now.queries; t++)
            CHECK(isnan(logit[j * STRIDE + t])); /* between the rows nothing is written */
    }
    free_buffer(&keys), free_queries(&queries), free_buffer(&logits), free_buffer(&maxima);
    free_buffer(&spread);
}

/* Of several pieces with one call: bit for bit what one after the other gives. */
static void check_accumulate_pieces(const kernels *table, size now, const char *values,
                                    size_t row_bytes, const float *before) {
    enum { PIECES = 3 };
    const void *pieces[PIECES] = {values, values, values}, *next[PIECES] = {NULL, values, NULL};
    size_t columns = (size_t)PIECES * now.tokens;
    buffer weights = make_floats(now.queries * columns, source_of(now));
    buffer sums = make_outputs(now.queries * now.dim), wanted = make_outputs(now.queries * now.dim);
    memcpy(sums.data, before, sums.bytes);
    memcpy(wanted.data, before, wanted.bytes);
    for (uint32_t i = 0; i < PIECES; i++)
        table->accumulate(now.dtype, values, row_bytes, now.tokens, now.dim,
                          (float *)weights.data + i * now.tokens, columns, now.queries,
                          (float *)wanted.data, NULL);
    if (table->accumulate_pieces) {
        table->accumulate_pieces(now.dtype, pieces, next, PIECES, row_bytes, now.tokens, now.dim,
                                 (float *)weights.data, columns, now.queries, (float *)sums.data);
        CHECK(!memcmp(sums.data, wanted.data, sums.bytes));
    }
    free_buffer(&weights), free_buffer(&sums), free_buffer(&wanted);
}

static void check_accumulate(const kernels *table, size now) {
    static float exact[MAX_TOKENS * MAX_DIM], before[MAX_QUERIES * MAX_DIM];
    buffer values = make_elements(now.dtype, now.tokens * now.dim, source_of(now), exact);
    buffer weights = make_floats((now.queries - 1) * STRIDE + now.tokens, source_of(now));
    buffer sums = make_floats(now.queries * now.dim, source_of(now));
    float *sum = (float *)sums.data;
    const float *weight = (float *)weights.data;
    memcpy(before, sum, sums.bytes);

    size_t row_bytes;
    buffer spread = spread_rows(now, &values, &row_bytes);
    table->accumulate(now.dtype, spread.data, row_bytes, now.tokens, now.dim, weight, STRIDE,
                      now.queries, sum, next_of(now, values.data));

    for (uint32_t j = 0; j < now.queries; j++)
        for (uint32_t d = 0; d < now.dim; d++) {
            double expected = before[j * now.dim + d], magnitude = fabs(expected);
            for (uint32_t t = 0; t < now.tokens; t++) {
                double product = (double)weight[j * STRIDE + t] * exact[t * now.dim + d];
                expected += product;
                magnitude += fabs(product);
            }
            double bound = now.is_whole ? 0 : (now.tokens + 1) * EPS * magnitude;
            assert_close(sum[j * now.dim + d], expected, bound);
        }
    check_accumulate_pieces(table, now, spread.data, row_bytes, before);
    free_buffer(&values), free_buffer(&weights), free_buffer(&sums), free_buffer(&spread);
}

/* The digest is exact, and its bound is at least every score, up to rounding. */
static void check_digest_and_bound(const kernels *table, size now) {
    static float exact[MAX_TOKENS * MAX_DIM], low_high[2 * MAX_DIM];
    float scale = scale_of(now);
    buffer keys = make_elements(now.dtype, now.tokens * now.dim, source_of(now), exact);
    buffer digest = make_buffer(2 * now.dim * element_bytes(now.dtype), element_bytes(now.dtype));
    asked queries =
        make_queries(table, now.dtype, now.dim, now.queries, source_of(now), now.is_packed);
    buffer bounds = make_outputs(now.queries);
    const float *query = queries.row;
    float *found = (float *)bounds.data;

    size_t row_bytes;
    buffer spread = spread_rows(now, &keys, &row_bytes);
    table->digest(now.dtype, spread.data, row_bytes, now.tokens, now.dim, digest.data);
    kernels_serial.to_float(now.dtype, digest.data, 2 * now.dim, low_high);
    for (uint32_t d = 0; d < now.dim; d++) {
        float low = exact[d], high = exact[d];
        for (uint32_t t = 0; t < now.tokens; t++) {
            low = fminf(low, exact[t * now.dim + d]);
            high = fmaxf(high, exact[t * now.dim + d]);
        }
        CHECK(low_high[d] == low && low_high[now.dim + d] == high);
    }

    table->bound(now.dtype, digest.data, now.dim, &queries.queries, scale, found, NULL);
    for (uint32_t j = 0; j < now.queries; j++) {
        double expected = 0, magnitude = 0;
        for (uint32_t d = 0; d < now.dim; d++) {
            double at_low = (double)query[j * now.dim + d] * low_high[d];
            double at_high = (double)query[j * now.dim + d] * low_high[now.dim + d];
            expected += fmax(at_low, at_high);
            magnitude += fabs(fmax(at_low, at_high));
        }
        double error = now.is_whole ? 0 : (now.dim + 2) * EPS * scale * magnitude;
        assert_close(found[j], scale * expected, error);
        for (uint32_t t = 0; t < now.tokens; t++) {
            double logit = 0;
            for (uint32_t d = 0; d < now.dim; d++)
                logit += (double)query[j * now.dim + d] * exact[t * now.dim + d];
            CHECK(scale * logit <= found[j] + error + fabs(scale * logit) * 1e-12);
        }
    }
    free_buffer(&keys), free_buffer(&digest), free_queries(&queries), free_buffer(&bounds);
    free_buffer(&spread);
}

/* Random and whole numbers; those of bf16 also with packed queries, which others never have. */
static void check_size(const kernels *table, int dtype, uint32_t dim, uint32_t tokens,
                       uint32_t queries) {
    for (int kind = 0; kind < (dtype == KERNEL_BFLOAT16 ? 4 : 2); kind++) {
        size now = {.dtype = dtype, .dim = dim, .tokens = tokens, .queries = queries,
                    .is_whole = kind % 2, .is_packed = kind / 2};
        check_scores(table, now);
        check_accumulate(table, now);
        check_digest_and_bound(table, now);
    }
}

static void test_all_sizes(const kernels *table) {
    for (size_t i = 0; i < COUNT(dtypes); i++)
        for (size_t d = 0; d < COUNT(dims); d++)
            for (size_t t = 0; t < COUNT(token_counts); t++)
                for (size_t j = 0; j < COUNT(query_counts); j++)
                    check_size(table, dtypes[i], dims[d], token_counts[t], query_counts[j]);
}

/* Every dim up to 300 of bf16 and every third one of the others, with some other sizes each. */
static void test_all_dims(const kernels *table) {
    for (uint32_t dim = 1; dim <= MAX_DIM; dim++)
        for (size_t i = 0; i < COUNT(dtypes); i++)
            if (dtypes[i] == KERNEL_BFLOAT16 || dim % 3 == 0)
                check_size(table, dtypes[i], dim, 1 + random_below(&seed, 37),
                           1 + random_below(&seed, MAX_QUERIES));
}

/* ---- special values ---- */

static void test_denormal_keys(const kernels *table) {
    for (int form = 0; form < 2; form++)
        check_scores(table, (size){.dtype = KERNEL_BFLOAT16, .dim = 75, .tokens = 21,
                                   .queries = 19, .is_packed = form, .has_tiny_keys = true});
}

/* Queries that have no packed form: the rows decide, for all queries of the call. */
static void test_special_queries(const kernels *table) {
    enum { TOKENS = 17, DIM = 40, QUERIES = 18 };
    static const float odd[] = {NAN, INFINITY, -INFINITY, 0x1p-130f, 1 + 0x1p-20f};
    for (size_t i = 0; i < COUNT(odd) * QUERIES; i++) {
        float special = odd[i / QUERIES], exact[TOKENS * DIM], logits[QUERIES * TOKENS];
        uint32_t place = (uint32_t)(i % QUERIES * DIM + random_word() % DIM);
        buffer keys = make_elements(KERNEL_BFLOAT16, TOKENS * DIM, random_positive, exact);
        asked queries = make_queries(table, KERNEL_BFLOAT16, DIM, QUERIES, random_whole, true);
        float *rows = (float *)queries.rows.data;
        rows[queries.queries.first * DIM + place] = special;
        /* Those of arm64 take what bf16 holds exactly, whatever it is. */
        bool takes = table->pack && table->pack(KERNEL_BFLOAT16, rows, DIM, queries.queries.total,
                                                queries.packed.data);
        CHECK(!takes || (!strncmp(table->name, "neon", 4) && special != 1 + 0x1p-20f));
        queries.queries.packed = takes ? queries.packed.data : NULL;
        table->score(KERNEL_BFLOAT16, keys.data, DIM * 2, TOKENS, DIM, &queries.queries, 1, logits,
                     TOKENS, NULL);
        for (uint32_t k = 0; k < QUERIES * TOKENS; k++) {
            if (k / TOKENS == place / DIM && isnan(special))
                CHECK(isnan(logits[k]));
            else if (k / TOKENS == place / DIM && isinf(special))
                CHECK(logits[k] == special);
            else
                CHECK(isfinite(logits[k]));
        }
        free_buffer(&keys), free_queries(&queries);
    }
}

/* One odd value at each place of a page, seen by the logit of its token and by the maximum. */
static void test_special_values_in_scores(const kernels *table) {
    enum { TOKENS = 17, DIM = 35, QUERIES = 5 };
    static const float odd[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT(dtypes) * COUNT(odd); i++) {
        int dtype = dtypes[i % COUNT(dtypes)];
        float special = odd[i / COUNT(dtypes)];
        for (uint32_t place = 0; place < TOKENS * DIM; place++) {
            float keys[TOKENS * DIM], logits[QUERIES * TOKENS], maxima[QUERIES];
            char elements[sizeof keys];
            for (size_t k = 0; k < COUNT(keys); k++)
                keys[k] = k == place ? special : random_whole();
            asked queries = make_queries(table, dtype, DIM, QUERIES, random_positive, place % 2);
            kernels_serial.from_float(dtype, keys, COUNT(keys), elements);
            table->score(dtype, elements, DIM * element_bytes(dtype), TOKENS, DIM, &queries.queries,
                         0.5f, logits, TOKENS, NULL);
            table->score_max(dtype, elements, DIM * element_bytes(dtype), TOKENS, DIM,
                             &queries.queries, 0.5f, maxima, NULL);
            free_queries(&queries);
            for (int j = 0; j < QUERIES; j++) {
                float largest = -INFINITY;
                for (uint32_t t = 0; t < TOKENS; t++) {
                    float logit = logits[j * TOKENS + t];
                    if (t != place / DIM)
                        CHECK(isfinite(logit));
                    else
                        CHECK(isnan(special) ? isnan(logit) : logit == special);
                    largest = logit > largest ? logit : largest;
                }
                CHECK(isnan(special) ? isnan(maxima[j]) : maxima[j] == largest);
            }
        }
    }
}

/* Infinity times zero, and a page of which every logit is -infinity. */
static void test_scores_that_are_not_numbers(const kernels *table) {
    float keys[2 * 16], rows[16] = {0}, maximum;
    kernel_queries query = {.rows = rows, .count = 1};
    fill(keys, COUNT(keys), INFINITY);
    table->score_max(KERNEL_FLOAT32, keys, 64, 2, 16, &query, 1, &maximum, NULL);
    CHECK(isnan(maximum));
    const void *each[] = {keys, keys + 16};
    float best[2];
    kernels_score_each(table, KERNEL_FLOAT32, each, 2, 16, &query, 1, best);
    CHECK(isnan(best[0]) && isnan(best[1]));
    fill(rows, COUNT(rows), -1);
    table->score_max(KERNEL_FLOAT32, keys, 64, 2, 16, &query, 1, &maximum, NULL);
    CHECK(maximum == -INFINITY);
    fill(keys, COUNT(keys), -3e38f); /* finite keys whose score is too large for fp32 */
    table->score_max(KERNEL_FLOAT32, keys, 64, 2, 16, &query, 1, &maximum, NULL);
    CHECK(maximum == INFINITY);
}

/* Every pair and triple of odd values, in a column at each kind of place. */
static void test_special_values_in_digests(const kernels *table) {
    static const float odd[] = {0.0f,     -0.0f,     1.0f, -1.0f,    65504.0f, -65504.0f,
                                INFINITY, -INFINITY, NAN,  0x1p-24f, -0x1p-24f};
    enum { TOKENS = 3, DIM = 75 }; /* whole strips, whole vectors and a rest in each dtype */
    size_t kinds = COUNT(odd);
    for (size_t i = 0; i < COUNT(dtypes); i++)
        for (size_t choice = 0; choice < kinds * kinds * kinds; choice++) {
            int dtype = dtypes[i];
            float keys[TOKENS * DIM], found[2 * DIM];
            char elements[sizeof keys], digest[sizeof found];
            for (int d = 0; d < DIM; d++) { /* columns see different triples */
                size_t triple = (choice + (size_t)d * 17) % (kinds * kinds * kinds);
                keys[d] = odd[triple % kinds];
                keys[DIM + d] = odd[triple / kinds % kinds];
                keys[2 * DIM + d] = odd[triple / kinds / kinds];
            }
            kernels_serial.from_float(dtype, keys, COUNT(keys), elements);
            kernels_serial.to_float(dtype, elements, COUNT(keys), keys);
            table->digest(dtype, elements, DIM * element_bytes(dtype), TOKENS, DIM, digest);
            kernels_serial.to_float(dtype, digest, COUNT(found), found);
            for (int d = 0; d < DIM; d++) {
                float low = keys[d], high = keys[d];
                bool has_nan = false;
                for (int t = 0; t < TOKENS; t++) {
                    float key = keys[t * DIM + d];
                    has_nan |= isnan(key);
                    if (key < low || (key == low && signbit(key)))
                        low = key;
                    if (key > high || (key == high && !signbit(key)))
                        high = key;
                }
                if (has_nan) {
                    CHECK(isnan(found[d]) && isnan(found[DIM + d]));
                    continue;
                }
                CHECK(found[d] == low && !signbit(found[d]) == !signbit(low));
                CHECK(found[DIM + d] == high && !signbit(found[DIM + d]) == !signbit(high));
            }
        }
}

/* Every 16-bit pattern against two neighbours in its column, so that no bit pattern is mistaken. */
static void test_every_half_in_digests(const kernels *table) {
    for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT16; dtype++)
        for (uint32_t first = 0; first < 65536; first += 64) {
            uint16_t keys[2][64], digest[2][64], expected[2][64];
            for (uint32_t d = 0; d < 64; d++) {
                keys[0][d] = (uint16_t)(first + d);
                keys[1][d] = (uint16_t)random_word();
            }
            table->digest(dtype, keys, sizeof *keys, 2, 64, digest);
            kernels_serial.digest(dtype, keys, sizeof *keys, 2, 64, expected);
            float found_values[128], expected_values[128];
            kernels_serial.to_float(dtype, digest, 128, found_values);
            kernels_serial.to_float(dtype, expected, 128, expected_values);
            for (int i = 0; i < 128; i++)
                CHECK(isnan(expected_values[i])
                           ? isnan(found_values[i])
                           : ((uint16_t *)digest)[i] == ((uint16_t *)expected)[i]);
        }
}

/* The bound never hides a NaN channel, wherever it lies; an infinite one bounds by infinity. */
static void test_special_values_in_bounds(const kernels *table) {
    enum { DIM = 35, QUERIES = 5 };
    for (size_t i = 0; i < COUNT(dtypes); i++)
        for (int place = 0; place < DIM; place++)
            for (int is_infinite = 0; is_infinite < 2; is_infinite++) {
                float digest[2 * DIM], bounds[QUERIES];
                char elements[sizeof digest];
                for (int d = 0; d < DIM; d++) {
                    bool is_odd = d == place;
                    digest[d] = is_odd ? (is_infinite ? -INFINITY : NAN) : -2;
                    digest[DIM + d] = is_odd ? (is_infinite ? INFINITY : NAN) : 3;
                }
                asked queries =
                    make_queries(table, dtypes[i], DIM, QUERIES, random_sign, place % 2);
                kernels_serial.from_float(dtypes[i], digest, COUNT(digest), elements);
                table->bound(dtypes[i], elements, DIM, &queries.queries, 0.5f, bounds, NULL);
                free_queries(&queries);
                for (int j = 0; j < QUERIES; j++)
                    CHECK(is_infinite ? bounds[j] == INFINITY : isnan(bounds[j]));
            }
}

/* ---- exponentials ---- */

static const double LEAST = 1.2e-38; /* below it 0 will do */

static void check_exponential(float value, double expected) {
    if (expected >= LEAST || value != 0)
        assert_close(value, expected, 4e-7 * expected + 0x1p-149);
}

static void check_exponentials(const kernels *table, const float *inputs, uint32_t count,
                               float shift) {
    buffer values = make_buffer(count * 4, 4);
    float *value = (float *)values.data;
    memcpy(value, inputs, values.bytes);
    float sum = table->exp_sum(value, count, shift);
    double expected_sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        double expected = exp((double)(float)(inputs[i] - shift));
        if (expected > 3.4028235e38 * (1 + 1e-7))
            CHECK(value[i] == INFINITY || value[i] > 3.4028e38f);
        else
            check_exponential(value[i], expected);
        expected_sum += expected;
    }
    if (expected_sum < 1e38)
        assert_close(sum, expected_sum,
                     ((count + 1) * EPS + 4e-7) * expected_sum + count * LEAST);
    free_buffer(&values);
}

static void test_exp_sum(const kernels *table) {
    enum { LARGEST = 300 };
    float inputs[LARGEST];
    for (uint32_t count = 1; count <= LARGEST; count += 1 + count / 20) {
        for (uint32_t i = 0; i < count; i++)
            inputs[i] = 8 * random_float();
        check_exponentials(table, inputs, count, 3.25f);
        for (uint32_t i = 0; i < count; i++)
            inputs[i] = -110 * (float)(random_word() >> 40) * 0x1p-24f;
        inputs[count / 2] = -INFINITY;
        check_exponentials(table, inputs, count, 0);
    }
    for (float start = -106; start < 90; start += 1) { /* the range, denormals and overflow too */
        for (uint32_t i = 0; i < LARGEST; i++)
            inputs[i] = start + (float)i / LARGEST;
        check_exponentials(table, inputs, LARGEST, 0);
    }
}

/* Rows at a page's end; one that has the maximum already, one that raises it, one that is new. */
static void test_online_softmax(const kernels *table) {
    enum { TOKENS = 70, ROWS = 4 };
    if (!table->online_softmax)
        return;
    for (uint32_t size = 0; size < TOKENS * ROWS; size++) {
        uint32_t tokens = size % TOKENS + 1, count = size / TOKENS + 1;
        buffer logits = make_buffer(tokens * count * 4, 4);
        float *rows = (float *)logits.data, factors[ROWS];
        float states[ROWS][2] = {{100, 2}, {-100, 2}, {-INFINITY, 0}, {1, 0.5f}}, before[ROWS][2];
        double weights[ROWS][TOKENS];
        memcpy(before, states, sizeof states);
        for (uint32_t i = 0; i < tokens * count; i++)
            rows[i] = i % 7 == 3 ? -INFINITY : 8 * random_float();
        for (uint32_t j = 0; j < count; j++) {
            rows[j * tokens] = 2; /* one at least counts */
            float largest = before[j][0];
            for (uint32_t t = 0; t < tokens; t++)
                largest = fmaxf(largest, rows[j * tokens + t]);
            for (uint32_t t = 0; t < tokens; t++)
                weights[j][t] = exp((double)(rows[j * tokens + t] - largest));
            before[j][0] = largest;
        }
        CHECK(table->online_softmax(rows, tokens, count, states, factors));
        for (uint32_t j = 0; j < count; j++) {
            const float olds[ROWS] = {100, -100, -INFINITY, 1};
            double factor = exp((double)(olds[j] - before[j][0])), sum = before[j][1] * factor;
            CHECK(states[j][0] == before[j][0]);
            check_exponential(factors[j], factor);
            CHECK(olds[j] < before[j][0] || factors[j] == 1);
            for (uint32_t t = 0; t < tokens; t++) {
                float weight = rows[j * tokens + t];
                check_exponential(weight, weights[j][t]);
                CHECK(weight == 0 || !(weight < FLT_MIN)); /* denormals are slow */
                sum += weights[j][t];
            }
            assert_close(states[j][1], sum, 8e-6 * sum);
        }
        free_buffer(&logits);
    }
}

/* What it does not do it leaves as it was. */
static void test_online_softmax_refuses(const kernels *table) {
    enum { LONG = 40 };
    float rows[LONG * 5], before[LONG * 5], states[5][2], factors[5] = {7, 7, 7, 7, 7};
    if (!table->online_softmax)
        return;
    for (int kind = 0; kind < 6; kind++) { /* NaN, nothing but -infinity, too many; twice */
        uint32_t tokens = kind < 3 ? 16 : LONG, count = kind % 3 == 2 ? 5 : 4;
        for (uint32_t i = 0; i < LONG * 5; i++)
            rows[i] = kind % 3 == 1 && i / tokens == 1 ? -INFINITY : 1;
        for (int j = 0; j < 5; j++)
            states[j][0] = -INFINITY, states[j][1] = 0;
        if (kind % 3 == 0)
            rows[2 * tokens + 3] = NAN;
        memcpy(before, rows, sizeof rows);
        CHECK(!table->online_softmax(rows, tokens, count, states, factors));
        CHECK(!memcmp(before, rows, sizeof rows) && factors[0] == 7);
        CHECK(states[0][0] == -INFINITY && states[3][1] == 0);
    }
}

/* Rows at a page's end; what is between the rows of sums stays as it was. */
static void test_part_sums(const kernels *table) {
    enum { PARTS = 9, STRIDE = PARTS + 2, ROWS = 5 };
    const uint32_t sizes[] = {16, 32, 80, 128};
    float sums[ROWS * STRIDE];
    if (!table->part_sums)
        return;
    for (uint32_t i = 0; i < PARTS * ROWS * 4; i++) {
        uint32_t tokens = sizes[i % 4], parts = i / 4 % PARTS + 1, count = i / 4 / PARTS + 1;
        buffer weights = make_buffer((size_t)tokens * parts * count * 4, 4);
        float *rows = (float *)weights.data;
        for (uint32_t j = 0; j < tokens * parts * count; j++)
            rows[j] = fabsf(random_float());
        fill(sums, ROWS * STRIDE, -1);
        CHECK(table->part_sums(rows, parts, tokens, count, sums, STRIDE));
        for (uint32_t j = 0; j < ROWS * STRIDE; j++) {
            double sum = 0;
            bool is_sum = j / STRIDE < count && j % STRIDE < parts;
            for (uint32_t t = 0; t < tokens && is_sum; t++)
                sum += (double)rows[(j / STRIDE * parts + j % STRIDE) * tokens + t];
            assert_close(sums[j], is_sum ? sum : -1, tokens * 0x1p-24 * sum);
        }
        free_buffer(&weights);
    }
    fill(sums, STRIDE, -1);
    CHECK(!table->part_sums(sums, 1, 0, 1, sums, 1) && !table->part_sums(sums, 1, 5, 1, sums, 1));
    CHECK(sums[0] == -1);
}

static void test_special_values_in_exp_sum(const kernels *table) {
    for (uint32_t count = 1; count <= 20; count++) {
        float values[20];
        fill(values, count, -INFINITY);
        CHECK(table->exp_sum(values, count, 2.0f) == 0); /* a masked row under another's shift */
        for (uint32_t i = 0; i < count; i++)
            CHECK(values[i] == 0);
        fill(values, count, -INFINITY);
        CHECK(table->exp_sum(values, count, -INFINITY) == 0); /* nothing but masked rows */
        for (uint32_t i = 0; i < count; i++)
            CHECK(values[i] == 0);
        for (uint32_t place = 0; place < count; place++) {
            fill(values, count, 1);
            values[place] = NAN;
            CHECK(isnan(table->exp_sum(values, count, 1.0f)));
            for (uint32_t i = 0; i < count; i++)
                CHECK(i == place ? isnan(values[i]) : values[i] == 1);
        }
        fill(values, count, 0);
        values[0] = INFINITY;
        CHECK(table->exp_sum(values, count, 0) == INFINITY && values[0] == INFINITY);
    }
}

/* ---- conversions ---- */

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The value from the fields of the format: sign, exponent, fraction. */
static double value_of_half(int dtype, uint16_t half) {
    int fraction_bits = dtype == KERNEL_BFLOAT16 ? 7 : 10;
    int bias = dtype == KERNEL_BFLOAT16 ? 127 : 15;
    int exponent = (half & 0x7fff) >> fraction_bits, fraction = half & ((1 << fraction_bits) - 1);
    double sign = half & 0x8000 ? -1 : 1;
    if (exponent == (0x7fff >> fraction_bits))
        return fraction ? NAN : sign * INFINITY;
    if (exponent)
        return sign * ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
    return sign * ldexp(fraction, 1 - bias - fraction_bits);
}

/* All patterns there and back: the same bits, and for a NaN its quiet form. */
static void test_every_half_there_and_back(const kernels *table) {
    static uint16_t halves[65536], back[65536];
    static float values[65536];
    for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT16; dtype++) {
        uint16_t quiet = dtype == KERNEL_BFLOAT16 ? 0x40 : 0x200;
        for (uint32_t i = 0; i < 65536; i++)
            halves[i] = (uint16_t)i;
        table->to_float(dtype, halves, 65536, values);
        table->from_float(dtype, values, 65536, back);
        for (uint32_t i = 0; i < 65536; i++) {
            double expected = value_of_half(dtype, halves[i]);
            if (isnan(expected)) {
                CHECK(isnan(values[i]) && back[i] == (halves[i] | quiet));
                continue;
            }
            CHECK(values[i] == expected && !signbit(values[i]) == !signbit(expected));
            CHECK(back[i] == halves[i]);
        }
    }
}

/* Numbers on, beside and half way between the neighbours in each format go to the nearest, ties to
 * the even one, past the last to infinity. */
static void test_rounding(const kernels *table) {
    for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT16; dtype++) {
        uint16_t infinity = dtype == KERNEL_BFLOAT16 ? 0x7f80 : 0x7c00;
        for (uint32_t half = 0; half < infinity; half++) {
            double low = value_of_half(dtype, (uint16_t)half);
            /* The one after the last would be a step further, had the format one more exponent. */
            double high = half + 1 < infinity
                              ? value_of_half(dtype, (uint16_t)(half + 1))
                              : 2 * low - value_of_half(dtype, (uint16_t)(half - 1));
            float middle = (float)((low + high) / 2); /* exact in fp32 */
            float inputs[6] = {nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
            uint16_t expected[6] = {(uint16_t)half, (uint16_t)(half + (half & 1)),
                                    (uint16_t)(half + 1)};
            uint16_t found[6];
            for (int i = 0; i < 3; i++) {
                inputs[3 + i] = -inputs[i];
                expected[3 + i] = expected[i] | 0x8000;
            }
            table->from_float(dtype, inputs, 6, found);
            CHECK(!memcmp(found, expected, sizeof found));
        }
    }
}

static void test_random_floats_like_serial(const kernels *table) {
    for (int round = 0; round < 20000; round++) {
        float inputs[37];
        uint16_t found[37], expected[37];
        for (int i = 0; i < 37; i++)
            inputs[i] = float_of_bits((uint32_t)random_word());
        for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT16; dtype++) {
            table->from_float(dtype, inputs, 37, found);
            kernels_serial.from_float(dtype, inputs, 37, expected);
            CHECK(!memcmp(found, expected, sizeof found));
        }
    }
}

static void test_conversions_of_all_lengths(const kernels *table) {
    for (size_t i = 0; i < COUNT(dtypes); i++)
        for (size_t count = 1; count <= 70; count++) {
            float exact[70];
            buffer elements = make_elements(dtypes[i], count, random_float, exact);
            buffer floats = make_outputs(count);
            buffer back = make_buffer(elements.bytes, element_bytes(dtypes[i]));
            float *value = (float *)floats.data;
            table->to_float(dtypes[i], elements.data, count, value);
            CHECK(!memcmp(value, exact, floats.bytes));
            table->from_float(dtypes[i], value, count, back.data);
            CHECK(!memcmp(back.data, elements.data, elements.bytes));
            free_buffer(&elements), free_buffer(&floats), free_buffer(&back);
        }
}

/* ---- copies ---- */

static void check_store(const kernels *table, uint32_t rows, size_t row_bytes, size_t gap_bytes) {
    size_t stride = row_bytes + gap_bytes, source_bytes = (rows - 1) * stride + row_bytes;
    buffer source = make_buffer(source_bytes, 1);
    buffer destination = make_buffer(rows * row_bytes, 64);
    for (size_t i = 0; i < source_bytes; i++)
        source.data[i] = (char)random_word();
    table->store_rows(destination.data, source.data, stride, rows, row_bytes);
    /* No fence: a thread sees its own stores in order, whatever kind they are. */
    for (uint32_t row = 0; row < rows; row++)
        CHECK(!memcmp(destination.data + row * row_bytes, source.data + row * stride, row_bytes));
    free_buffer(&source), free_buffer(&destination);
}

static void test_store_rows(const kernels *table) {
    for (uint32_t rows = 1; rows <= 17; rows += rows < 4 ? 1 : 4)
        for (size_t row_bytes = 1; row_bytes <= 300; row_bytes += row_bytes < 140 ? 1 : 13)
            check_store(table, rows, row_bytes, row_bytes % 3 * 7);
    check_store(table, 16, 256, 0);
    check_store(table, 16, 256, 7 * 256);
    check_store(table, 64, 512, 512);
    check_store(table, 64, 1152, 0); /* MLA: 576 elements */
}

/* ---- odd alignment, dispatch ---- */

/* Queries and outputs of fp32 may lie anywhere that fp32 may; keys at any 2-byte address. The
 * buffers above end at a page's end; here they start at each 2-byte offset from a line. */
static void test_alignments(const kernels *table) {
    enum { TOKENS = 5, DIM = 80, QUERIES = 3 };
    static float exact[TOKENS * DIM];
    buffer keys = make_elements(KERNEL_BFLOAT16, TOKENS * DIM, random_whole, exact);
    asked queries = make_queries(table, KERNEL_BFLOAT16, DIM, QUERIES, random_whole, true);
    kernel_queries rows = queries.queries;
    rows.packed = NULL;
    float expected[QUERIES], found[QUERIES];
    kernels_serial.score_max(KERNEL_BFLOAT16, keys.data, 2 * DIM, TOKENS, DIM, &rows, 1, expected,
                             NULL);
    for (size_t offset = 0; offset < 64; offset += 2) {
        buffer moved = make_buffer(keys.bytes + 64, 64);
        memcpy(moved.data + offset, keys.data, keys.bytes);
        for (int form = 0; form < 2; form++) {
            table->score_max(KERNEL_BFLOAT16, moved.data + offset, 2 * DIM, TOKENS, DIM,
                             form ? &queries.queries : &rows, 1, found, NULL);
            CHECK(!memcmp(found, expected, sizeof found));
        }
        free_buffer(&moved);
    }
    free_buffer(&keys), free_queries(&queries);
}

static void *ask_while_forced(void *argument) {
    (void)argument;
    for (int i = 0; i < 10000; i++) {
        float key = 3, row = 2, maximum;
        kernel_queries query = {.rows = &row, .count = 1};
        kernels_current()->score_max(KERNEL_FLOAT32, &key, 4, 1, 1, &query, 1, &maximum, NULL);
        CHECK(maximum == 6);
    }
    return NULL;
}

static void test_table(const kernels *table) {
    test_all_sizes(table);
    test_all_dims(table);
    test_denormal_keys(table);
    test_special_queries(table);
    test_special_values_in_scores(table);
    test_scores_that_are_not_numbers(table);
    test_special_values_in_digests(table);
    test_every_half_in_digests(table);
    test_special_values_in_bounds(table);
    test_exp_sum(table);
    test_special_values_in_exp_sum(table);
    test_online_softmax(table);
    test_part_sums(table);
    test_online_softmax_refuses(table);
    test_every_half_there_and_back(table);
    test_rounding(table);
    test_random_floats_like_serial(table);
    test_conversions_of_all_lengths(table);
    test_store_rows(table);
    test_alignments(table);
}

/* What this CPU lacks of AMX are the tiles; the other instructions of its table it may have. */
static void test_model_of_amx(void) {
#if defined(__x86_64__)
    extern const kernels kernels_amx_model;
    if (!kernels_force("avx512_bf16")) {
        test_table(&kernels_amx_model);
        printf("skipped: amx: this CPU has none; its source was tested on a model of the tiles\n");
        return;
    }
#endif
    printf("skipped: amx: this CPU has none, nor AVX-512 BF16 for a test on a model\n");
}

/* Each instruction set in a process of its own, so that all CPUs of a machine have some. */
static pid_t begin_table(const char *name) {
    pid_t child = test_fork();
    if (child != 0) return child;
    CHECK(!kernels_force(name) && !strcmp(kernels_current()->name, name));
    test_table(kernels_current());
    printf("%s: right\n", name);
    exit(0);
}

int main(int argument_count, char **arguments) {
    if (argument_count > 1)
        seed = strtoull(arguments[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed);
    test_while_forced(ask_while_forced, kernels_force); /* so that the first use is a race */
    CHECK(kernels_force("sse9") == -EINVAL);
    CHECK(!kernels_force("auto"));
    const kernels *best = kernels_current();
    static const char *const names[] = {"serial", "avx2", "avx512", "avx512_bf16", "amx", "neon",
                                        "neon_bf16"};
    pid_t children[COUNT(names)];
    size_t begun = 0;
    bool has_amx = false;
    for (size_t i = 0; i < COUNT(names); i++) {
        bool is_amx = !strcmp(names[i], "amx"); /* of which more is said below */
        int result = kernels_force(names[i]);
        CHECK(!result || result == -ENOTSUP);
        if (!result) children[begun++] = begin_table(names[i]);
        else if (!is_amx) printf("skipped: %s: not on this CPU\n", names[i]);
        has_amx |= is_amx && !result;
    }
    if (!has_amx)
        test_model_of_amx();
    for (size_t i = 0; i < begun; i++) test_ended(children[i], 0);
    CHECK(!kernels_force("auto") && kernels_current() == best);
    return 0;
}
