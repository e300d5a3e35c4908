/* The kernels with AVX-512 F, BW, DQ and VL: 16 fp32 lanes, masks for whatever is no multiple.
 *
 * The cost that counts is of 16-bit keys read once from memory. Four tokens by
 * four queries share their loads, and 16 sums end in one vector of logits. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))),                   \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include <assert.h>
#include <math.h>

#include "kernels/avx512.h"

INLINE size_t element_bytes(int dtype) { return dtype == KERNEL_FLOAT32 ? 4 : 2; }

INLINE __m512 floats_of_halves(int dtype, __m256i halves) {
    if (dtype == KERNEL_FLOAT16)
        return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* 16 elements. */
INLINE __m512 load(int dtype, const char *source) {
    if (dtype == KERNEL_FLOAT32)
        return _mm512_loadu_ps(source);
    return floats_of_halves(dtype, _mm256_loadu_si256((const __m256i *)source));
}

/* The elements of `mask`, and zeros. */
INLINE __m512 load_part(int dtype, __mmask16 mask, const char *source) {
    if (dtype == KERNEL_FLOAT32)
        return _mm512_maskz_loadu_ps(mask, source);
    return floats_of_halves(dtype, _mm256_maskz_loadu_epi16(mask, source));
}

/* ---- scores ---- */

/* A few keys at a time, along their rows, as many as there are queries: reads in the order of the
 * addresses are those that the hardware's prefetchers follow. 16 keys at a time with one query came
 * to 0.6 of a plain read. */
INLINE __m512 dot_floats(int dtype, const char *const *keys, uint32_t dim, const char *queries,
                         size_t query_bytes, int queries_here, const char *next) {
    const int tokens_here = LANES / queries_here, group = queries_here;
    __m512 sums[LANES];
    size_t bytes = element_bytes(dtype);
    UNROLL for (int t = 0; t < tokens_here; t += group) {
        UNROLL for (int i = 0; i < group; i++) UNROLL for (int j = 0; j < queries_here; j++)
            sums[j * tokens_here + t + i] = _mm512_setzero_ps();
        uint32_t d = 0;
        for (; d + LANES <= dim; d += LANES) {
            __m512 key[4];
            if (next)
                prefetch(next + ((size_t)t * dim + group * d) * bytes, group * LANES * bytes);
            UNROLL for (int i = 0; i < group; i++) key[i] = load(dtype, keys[t + i] + d * bytes);
            UNROLL for (int j = 0; j < queries_here; j++) {
                __m512 query =
                    _mm512_loadu_ps(queries + (size_t)j * query_bytes + d * sizeof(float));
                UNROLL for (int i = 0; i < group; i++) {
                    __m512 *sum = &sums[j * tokens_here + t + i];
                    *sum = _mm512_fmadd_ps(key[i], query, *sum);
                }
            }
        }
        for (__mmask16 mask = first_lanes(dim - d); d < dim; d += LANES)
            UNROLL for (int i = 0; i < group; i++) {
                __m512 key = load_part(dtype, mask, keys[t + i] + d * bytes);
                UNROLL for (int j = 0; j < queries_here; j++) {
                    __m512 *sum = &sums[j * tokens_here + t + i];
                    *sum = _mm512_fmadd_ps(
                        key,
                        _mm512_maskz_loadu_ps(
                            mask, queries + (size_t)j * query_bytes + d * sizeof(float)),
                        *sum);
                }
            }
    }
    return sums_of(sums);
}

/* The dtype as a constant, too. */
INLINE void score_as(const score_call *call, const score_part *part, int queries_here) {
    switch (call->dtype) {
    case KERNEL_BFLOAT16:
        score_chunk(KERNEL_BFLOAT16, dot_floats, call, part, queries_here);
        return;
    case KERNEL_FLOAT16:
        score_chunk(KERNEL_FLOAT16, dot_floats, call, part, queries_here);
        return;
    case KERNEL_FLOAT32:
        score_chunk(KERNEL_FLOAT32, dot_floats, call, part, queries_here);
        return;
    }
    assert(!"a dtype");
}

/* Functions of their own: gcc runs out of registers for addresses when their loops are inlined side
 * by side. */
static __attribute__((noinline)) void score_four(const score_call *call, const score_part *part) {
    score_as(call, part, 4);
}

static __attribute__((noinline)) void score_two(const score_call *call, const score_part *part) {
    score_as(call, part, 2);
}

static __attribute__((noinline)) void score_one(const score_call *call, const score_part *part) {
    score_as(call, part, 1);
}

static void score_all(const score_call *call, uint32_t query_count) {
    score_part part;
    for (uint32_t t = 0; t < call->tokens; t += TOKEN_CHUNK) {
        place_rows(call, t, &part);
        for (part.query = 0; part.query < query_count; part.query += part.queries_used) {
            uint32_t left = query_count - part.query;
            part.queries_used = left >= 4 ? 4 : left >= 2 ? 2 : 1;
            if (part.queries_used == 4)
                score_four(call, &part);
            else if (part.queries_used == 2)
                score_two(call, &part);
            else
                score_one(call, &part);
        }
    }
}

void avx512_score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next) {
    const char *rows = (const char *)kernel_rows(queries, dim);
    score_call call = {dtype, dim, keys, row_bytes, tokens, rows,
                       dim * sizeof(float), scale, logits, logit_stride, NULL, next};
    score_all(&call, queries->count);
}

void avx512_score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima, const void *next) {
    const char *rows = (const char *)kernel_rows(queries, dim);
    score_call call = {dtype, dim, keys, row_bytes, tokens, rows,
                       dim * sizeof(float), scale, NULL, 0, maxima, next};
    score_all(&call, queries->count);
}

/* ---- accumulation ---- */

/* Values: `tokens` rows of each piece. */
typedef struct value_rows {
    const char *const *pieces, *const *next;
    uint32_t count, tokens;
    size_t row_bytes;
} value_rows;

/* `vectors` (1, 2 or 4) times 16 columns of the accumulator, in registers over all rows; of the
 * last vector only those in `mask`. The columns begin `offset` bytes behind the rows. As many lines
 * of the next pieces as a row has here are asked for with it, if `asks`: in one burst before the
 * rows they made attention 1.25 to 1.45 times as slow. */
INLINE void accumulate_columns(int dtype, int vectors, __mmask16 mask, const value_rows *rows,
                               size_t offset, const float *weights, size_t weight_stride,
                               int queries_here, float *accumulator, uint32_t dim, bool asks) {
    size_t share = vectors * LANES * element_bytes(dtype);
    __m512 sums[4][4];
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        sums[j][v] = _mm512_maskz_loadu_ps(v + 1 < vectors ? (__mmask16)0xffff : mask,
                                           accumulator + (size_t)j * dim + v * LANES);
    for (uint32_t i = 0; i < rows->count; i++, weights += rows->tokens) {
        const char *next = asks && rows->next[i] ? rows->next[i] + rows->tokens * offset : NULL;
        for (size_t t = 0; t < rows->tokens; t++) {
            if (next) prefetch(next + t * share, share);
            const char *source = rows->pieces[i] + offset + t * rows->row_bytes;
            __m512 row[4];
            UNROLL for (int v = 0; v + 1 < vectors; v++)
                row[v] = load(dtype, source + (size_t)v * LANES * element_bytes(dtype));
            row[vectors - 1] = load_part(
                dtype, mask, source + (size_t)(vectors - 1) * LANES * element_bytes(dtype));
            UNROLL for (int j = 0; j < queries_here; j++) {
                __m512 weight = _mm512_set1_ps(weights[(size_t)j * weight_stride + t]);
                UNROLL for (int v = 0; v < vectors; v++) sums[j][v] =
                    _mm512_fmadd_ps(row[v], weight, sums[j][v]);
            }
        }
    }
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        _mm512_mask_storeu_ps(accumulator + (size_t)j * dim + v * LANES,
                              v + 1 < vectors ? (__mmask16)0xffff : mask, sums[j][v]);
}

INLINE void accumulate_block(int dtype, const value_rows *rows, const float *weights,
                             size_t weight_stride, int queries_here, float *accumulator,
                             uint32_t dim, bool asks) {
    size_t bytes = element_bytes(dtype);
    uint32_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        accumulate_columns(dtype, 4, 0xffff, rows, d * bytes, weights, weight_stride, queries_here,
                           accumulator + d, dim, asks);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        accumulate_columns(dtype, 2, 0xffff, rows, d * bytes, weights, weight_stride, queries_here,
                           accumulator + d, dim, asks);
    for (; d < dim; d += LANES)
        accumulate_columns(dtype, 1, first_lanes(dim - d), rows, d * bytes, weights, weight_stride,
                           queries_here, accumulator + d, dim, asks);
}

INLINE void accumulate_rows(int dtype, const value_rows *rows, uint32_t dim, const float *weights,
                            size_t weight_stride, uint32_t query_count, float *accumulator) {
    for (uint32_t j = 0; j < query_count; j += 4) {
        const float *block = weights + j * weight_stride;
        float *sums = accumulator + (size_t)j * dim;
        switch (query_count - j) {
        case 1:
            accumulate_block(dtype, rows, block, weight_stride, 1, sums, dim, j == 0);
            break;
        case 2:
            accumulate_block(dtype, rows, block, weight_stride, 2, sums, dim, j == 0);
            break;
        case 3:
            accumulate_block(dtype, rows, block, weight_stride, 3, sums, dim, j == 0);
            break;
        default:
            accumulate_block(dtype, rows, block, weight_stride, 4, sums, dim, j == 0);
        }
    }
}

INLINE void accumulate_as(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                          uint32_t dim, const float *weights, size_t weight_stride,
                          uint32_t query_count, float *accumulator, const char *next) {
    size_t bytes = dim * element_bytes(dtype);
    /* A chunk and the next one must stay in the first cache while the columns are walked. */
    enum { CHUNK_BYTES = 8192 };
    uint32_t chunk = bytes < CHUNK_BYTES ? (uint32_t)(CHUNK_BYTES / bytes) : 1;
    for (uint32_t t = 0; t < tokens; t += chunk) {
        const char *piece = values + t * row_bytes, *ahead = next ? next + t * bytes : NULL;
        value_rows rows = {.pieces = &piece, .next = &ahead, .count = 1, .row_bytes = row_bytes,
                           .tokens = tokens - t < chunk ? tokens - t : chunk};
        accumulate_rows(dtype, &rows, dim, weights + t, weight_stride, query_count, accumulator);
    }
}

void avx512_accumulate(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
                       uint32_t dim, const float *weights, size_t weight_stride,
                       uint32_t query_count, float *accumulator, const void *next) {
    switch (dtype) {
    case KERNEL_BFLOAT16:
        accumulate_as(KERNEL_BFLOAT16, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator, next);
        return;
    case KERNEL_FLOAT16:
        accumulate_as(KERNEL_FLOAT16, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator, next);
        return;
    case KERNEL_FLOAT32:
        accumulate_as(KERNEL_FLOAT32, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator, next);
        return;
    }
    assert(!"a dtype");
}

void avx512_accumulate_pieces(int dtype, const void *const *values, const void *const *next,
                              uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                              const float *weights, size_t weight_stride, uint32_t query_count,
                              float *accumulator) {
    value_rows rows = {.pieces = (const char *const *)values, .next = (const char *const *)next,
                       .count = count, .tokens = tokens, .row_bytes = row_bytes};
    switch (dtype) {
    case KERNEL_BFLOAT16:
        accumulate_rows(KERNEL_BFLOAT16, &rows, dim, weights, weight_stride, query_count,
                        accumulator);
        return;
    case KERNEL_FLOAT16:
        accumulate_rows(KERNEL_FLOAT16, &rows, dim, weights, weight_stride, query_count,
                        accumulator);
        return;
    case KERNEL_FLOAT32:
        accumulate_rows(KERNEL_FLOAT32, &rows, dim, weights, weight_stride, query_count,
                        accumulator);
        return;
    }
    assert(!"a dtype");
}

/* ---- bounds ---- */

/* query * (query < 0 ? minimum : maximum), added to the sum. */
INLINE __m512 add_larger_product(__m512 query, __m512 minimum, __m512 maximum, __m512 sum) {
    __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(query));
    return _mm512_fmadd_ps(query, _mm512_mask_blend_ps(is_negative, maximum, minimum), sum);
}

INLINE void bound_block(int dtype, const char *digest, uint32_t dim, const float *rows,
                        int queries_here, float scale, float *bounds) {
    const char *maxima = digest + dim * element_bytes(dtype);
    size_t bytes = element_bytes(dtype);
    __m512 sums[4];
    UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_ps();
    uint32_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        __m512 minimum = load(dtype, digest + d * bytes);
        __m512 maximum = load(dtype, maxima + d * bytes);
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m512 query = _mm512_loadu_ps(rows + (size_t)j * dim + d);
            sums[j] = add_larger_product(query, minimum, maximum, sums[j]);
        }
    }
    if (d < dim) {
        __mmask16 mask = first_lanes(dim - d);
        __m512 minimum = load_part(dtype, mask, digest + d * bytes);
        __m512 maximum = load_part(dtype, mask, maxima + d * bytes);
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m512 query = _mm512_maskz_loadu_ps(mask, rows + (size_t)j * dim + d);
            sums[j] = add_larger_product(query, minimum, maximum, sums[j]);
        }
    }
    store_bounds(lane_sums(sums[0], sums[1], sums[2], sums[3]), queries_here, scale, bounds);
}

INLINE void bound_as(int dtype, const char *digest, uint32_t dim, const float *rows,
                     uint32_t query_count, float scale, float *bounds, const char *next) {
    if (next)
        prefetch(next, 2 * dim * element_bytes(dtype));
    for (uint32_t j = 0; j < query_count; j += 4) {
        const float *block = rows + (size_t)j * dim;
        switch (query_count - j) {
        case 1:
            bound_block(dtype, digest, dim, block, 1, scale, bounds + j);
            break;
        case 2:
            bound_block(dtype, digest, dim, block, 2, scale, bounds + j);
            break;
        case 3:
            bound_block(dtype, digest, dim, block, 3, scale, bounds + j);
            break;
        default:
            bound_block(dtype, digest, dim, block, 4, scale, bounds + j);
        }
    }
}

void avx512_bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                  float scale, float *bounds, const void *next) {
    const float *rows = kernel_rows(queries, dim);
    switch (dtype) {
    case KERNEL_BFLOAT16:
        bound_as(KERNEL_BFLOAT16, digest, dim, rows, queries->count, scale, bounds, next);
        return;
    case KERNEL_FLOAT16:
        bound_as(KERNEL_FLOAT16, digest, dim, rows, queries->count, scale, bounds, next);
        return;
    case KERNEL_FLOAT32:
        bound_as(KERNEL_FLOAT32, digest, dim, rows, queries->count, scale, bounds, next);
        return;
    }
    assert(!"a dtype");
}

/* ---- digests: kernels_avx2.c explains the three comparisons ---- */

typedef struct extremes {
    __m512i max_signed, max_unsigned, min_unsigned;
} extremes;

INLINE extremes extend(int dtype, extremes old, __m512i bits) {
    if (dtype == KERNEL_FLOAT32)
        return (extremes){_mm512_max_epi32(old.max_signed, bits),
                          _mm512_max_epu32(old.max_unsigned, bits),
                          _mm512_min_epu32(old.min_unsigned, bits)};
    return (extremes){_mm512_max_epi16(old.max_signed, bits),
                      _mm512_max_epu16(old.max_unsigned, bits),
                      _mm512_min_epu16(old.min_unsigned, bits)};
}

/* The floats' bits from the extremes, NaN where any element was. */
INLINE void resolve(int dtype, extremes found, __m512i *minimum, __m512i *maximum) {
    if (dtype == KERNEL_FLOAT32) {
        __mmask16 has_negative = _mm512_movepi32_mask(found.max_unsigned);
        __mmask16 has_positive = (__mmask16)~_mm512_movepi32_mask(found.max_signed);
        __mmask16 is_nan = (__mmask16)(
            _mm512_cmpgt_epi32_mask(found.max_signed, _mm512_set1_epi32(0x7f800000)) |
            _mm512_cmpgt_epu32_mask(found.max_unsigned, _mm512_set1_epi32((int)0xff800000)));
        __m512i nan = _mm512_set1_epi32(0x7fc00000);
        *minimum = _mm512_mask_mov_epi32(found.min_unsigned, has_negative, found.max_unsigned);
        *maximum = _mm512_mask_mov_epi32(found.min_unsigned, has_positive, found.max_signed);
        *minimum = _mm512_mask_mov_epi32(*minimum, is_nan, nan);
        *maximum = _mm512_mask_mov_epi32(*maximum, is_nan, nan);
        return;
    }
    short infinity = dtype == KERNEL_BFLOAT16 ? 0x7f80 : 0x7c00;
    __mmask32 has_negative = _mm512_movepi16_mask(found.max_unsigned);
    __mmask32 has_positive = ~_mm512_movepi16_mask(found.max_signed);
    __mmask32 is_nan =
        _mm512_cmpgt_epi16_mask(found.max_signed, _mm512_set1_epi16(infinity)) |
        _mm512_cmpgt_epu16_mask(found.max_unsigned, _mm512_set1_epi16((short)(infinity | 0x8000)));
    __m512i nan = _mm512_set1_epi16(dtype == KERNEL_BFLOAT16 ? 0x7fc0 : 0x7e00);
    *minimum = _mm512_mask_mov_epi16(found.min_unsigned, has_negative, found.max_unsigned);
    *maximum = _mm512_mask_mov_epi16(found.min_unsigned, has_positive, found.max_signed);
    *minimum = _mm512_mask_mov_epi16(*minimum, is_nan, nan);
    *maximum = _mm512_mask_mov_epi16(*maximum, is_nan, nan);
}

/* `vectors` (constant) vectors of channels over all rows; of the last one only the bytes in mask,
 * the other ones are taken for 0. */
INLINE void digest_columns(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                           int vectors, __mmask64 mask, char *minima, char *maxima) {
    __m512i lowest =
        dtype == KERNEL_FLOAT32 ? _mm512_set1_epi32(INT32_MIN) : _mm512_set1_epi16(INT16_MIN);
    extremes found[4];
    UNROLL for (int v = 0; v < vectors; v++) found[v] =
        (extremes){lowest, _mm512_setzero_si512(), _mm512_set1_epi8(-1)};
    for (uint32_t t = 0; t < tokens; t++, keys += stride_bytes)
        UNROLL for (int v = 0; v < vectors; v++) {
            const char *source = keys + v * LINE_BYTES;
            __m512i bits = v + 1 < vectors ? _mm512_loadu_si512(source)
                                           : _mm512_maskz_loadu_epi8(mask, source);
            found[v] = extend(dtype, found[v], bits);
        }
    UNROLL for (int v = 0; v < vectors; v++) {
        __m512i minimum, maximum;
        __mmask64 wanted = v + 1 < vectors ? ~(__mmask64)0 : mask;
        resolve(dtype, found[v], &minimum, &maximum);
        _mm512_mask_storeu_epi8(minima + v * LINE_BYTES, wanted, minimum);
        _mm512_mask_storeu_epi8(maxima + v * LINE_BYTES, wanted, maximum);
    }
}

INLINE void digest_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, char *minima) {
    const __mmask64 all = ~(__mmask64)0;
    size_t bytes = dim * element_bytes(dtype), at = 0;
    char *maxima = minima + bytes;
    for (; at + 4 * LINE_BYTES <= bytes; at += 4 * LINE_BYTES)
        digest_columns(dtype, keys + at, stride_bytes, tokens, 4, all, minima + at, maxima + at);
    for (; at + LINE_BYTES <= bytes; at += LINE_BYTES)
        digest_columns(dtype, keys + at, stride_bytes, tokens, 1, all, minima + at, maxima + at);
    if (at < bytes)
        digest_columns(dtype, keys + at, stride_bytes, tokens, 1,
                       ((__mmask64)1 << (bytes - at)) - 1, minima + at, maxima + at);
}

void avx512_digest(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *digest) {
    switch (dtype) {
    case KERNEL_BFLOAT16:
        digest_as(KERNEL_BFLOAT16, keys, stride_bytes, tokens, dim, digest);
        return;
    case KERNEL_FLOAT16:
        digest_as(KERNEL_FLOAT16, keys, stride_bytes, tokens, dim, digest);
        return;
    case KERNEL_FLOAT32:
        digest_as(KERNEL_FLOAT32, keys, stride_bytes, tokens, dim, digest);
        return;
    }
    assert(!"a dtype");
}

/* ---- stores ---- */

enum { PREFETCH_ROWS = 8 };

/* Whole lines, whose bytes may be of two rows: a CPU has room for so many stores that wait for
 * memory, however wide they are. */
void avx512_store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                       size_t row_bytes) {
    if (row_bytes < LINE_BYTES || rows * row_bytes % LINE_BYTES) {
        avx2_store_rows(destination, source, stride_bytes, rows, row_bytes);
        return;
    }
    assert((uintptr_t)destination % LINE_BYTES == 0);
    char *to = destination;
    size_t at = 0; /* in this row */
    for (size_t row = 0; row < rows; row++) {
        const char *from = (const char *)source + row * stride_bytes, *next = from + stride_bytes;
        if (rows - row > PREFETCH_ROWS)
            prefetch(from + PREFETCH_ROWS * stride_bytes, row_bytes);
        for (; at + LINE_BYTES <= row_bytes; at += LINE_BYTES, to += LINE_BYTES)
            _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from + at));
        size_t left = row_bytes - at;
        at = 0;
        if (left == 0) continue;
        const __mmask64 ours = ((__mmask64)1 << left) - 1;
        __m512i line = _mm512_maskz_loadu_epi8(ours, from + row_bytes - left);
        line = _mm512_mask_loadu_epi8(line, ~ours, next - left);
        _mm512_stream_si512((__m512i *)to, line);
        to += LINE_BYTES;
        at = LINE_BYTES - left;
    }
}

/* ---- exponentials ---- */

/* As in avx2.c; scalef applies 2^n with one rounding, to infinity. What would be denormal is 0: it
 * takes far longer, as does all that is multiplied by it. A NaN passes. */
INLINE __m512 exponential_below(__m512 x) { /* 89, where it is infinite already */
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33f), _CMP_NLT_UQ);
    x = _mm512_max_ps(_mm512_set1_ps(-105.0f), x); /* of -infinity r would be NaN */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    static const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    __m512 sum = _mm512_set1_ps(1.0f / 5040);
    UNROLL for (int i = 0; i < 7; i++) sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(terms[i]));
    return _mm512_maskz_scalef_ps(normal, sum, n);
}

INLINE __m512 exponential(__m512 x) {
    return exponential_below(_mm512_min_ps(_mm512_set1_ps(89.0f), x));
}

float avx512_exp_sum(float *values, uint32_t count, float shift) {
    if (shift == -INFINITY) { /* -inf - -inf would be NaN */
        memset(values, 0, count * sizeof *values);
        return 0;
    }
    __m512 sum = _mm512_setzero_ps();
    for (uint32_t i = 0; i < count; i += LANES) {
        __mmask16 mask = first_lanes(count - i);
        __m512 value = _mm512_maskz_loadu_ps(mask, values + i);
        __m512 result = exponential(_mm512_sub_ps(value, _mm512_set1_ps(shift)));
        _mm512_mask_storeu_ps(values + i, mask, result);
        sum = _mm512_mask_add_ps(sum, mask, sum, result);
    }
    return _mm512_reduce_add_ps(sum);
}

/* The largest of each of four vectors: {a, b, c, d} in each quarter. */
INLINE __m512 largest_of_four(const __m512 rows[4]) {
    __m512 ab = _mm512_max_ps(_mm512_unpacklo_ps(rows[0], rows[1]),
                              _mm512_unpackhi_ps(rows[0], rows[1]));
    __m512 cd = _mm512_max_ps(_mm512_unpacklo_ps(rows[2], rows[3]),
                              _mm512_unpackhi_ps(rows[2], rows[3]));
    __m512d even = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d odd = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 quarters = _mm512_max_ps(_mm512_castpd_ps(even), _mm512_castpd_ps(odd));
    __m512 halves = _mm512_max_ps(quarters, _mm512_shuffle_f32x4(quarters, quarters, 0x4e));
    return _mm512_max_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1));
}

/* Sums of four vectors, {a, b, c, d}. */
INLINE __m128 sums_of_four(const __m512 rows[4]) {
    __m512 quarters = lane_sums(rows[0], rows[1], rows[2], rows[3]);
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters),
                                  _mm512_extractf32x8_ps(quarters, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* What four states become, {largest, sum} each, by the largest logits and sums of their rows. */
INLINE void store_states(__m128 old, __m128 sum, __m128 largest, const __m512 rows[4],
                         uint32_t count, float (*states)[2], float *factors) {
    __m512 change = _mm512_castps128_ps512(_mm_sub_ps(old, largest));
    __m128 factor = _mm512_castps512_ps128(exponential_below(change));
    sum = _mm_fmadd_ps(sum, factor, sums_of_four(rows));
    __m256 state = _mm256_set_m128(_mm_unpackhi_ps(largest, sum), _mm_unpacklo_ps(largest, sum));
    _mm256_mask_storeu_ps(states[0], (__mmask8)((1 << 2 * count) - 1), state);
    _mm_mask_storeu_ps(factors, (__mmask8)((1 << count) - 1), factor);
}

/* The largest logits and the sums of up to four states. */
INLINE void load_states(float (*states)[2], uint32_t count, __m128 *largest, __m128 *sum) {
    __m256 state = _mm256_maskz_loadu_ps((__mmask8)((1 << 2 * count) - 1), states[0]);
    __m256 parted = _mm256_permutevar8x32_ps(state, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    *largest = _mm256_castps256_ps128(parted);
    *sum = _mm256_extractf128_ps(parted, 1);
}

INLINE bool all_above(__m128 largest, uint32_t count) {
    const __mmask8 used = (__mmask8)((1 << count) - 1);
    return !(_mm_cmp_ps_mask(largest, _mm_set1_ps(-INFINITY), _CMP_EQ_OQ) & used);
}

/* At most four rows of at most 16 logits. */
INLINE bool softmax_four(float *logits, uint32_t tokens, uint32_t count, float (*states)[2],
                         float *factors) {
    const __mmask16 mask = first_lanes(tokens);
    __m512 rows[4];
    __m128 old, sum;
    __mmask16 broken = 0;
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        rows[j] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask,
                                       logits + (j < count ? j : 0) * (size_t)tokens);
        broken |= _mm512_cmp_ps_mask(rows[j], rows[j], _CMP_UNORD_Q);
    }
    load_states(states, count, &old, &sum);
    __m128 largest = _mm_max_ps(_mm512_castps512_ps128(largest_of_four(rows)), old);
    if (broken || !all_above(largest, count))
        return false;
    __m512 shifts = _mm512_broadcast_f32x4(largest);
    rows[0] = exponential_below(_mm512_sub_ps(rows[0], _mm512_permute_ps(shifts, 0x00)));
    rows[1] = exponential_below(_mm512_sub_ps(rows[1], _mm512_permute_ps(shifts, 0x55)));
    rows[2] = exponential_below(_mm512_sub_ps(rows[2], _mm512_permute_ps(shifts, 0xaa)));
    rows[3] = exponential_below(_mm512_sub_ps(rows[3], _mm512_permute_ps(shifts, 0xff)));
    UNROLL for (uint32_t j = 0; j < 4; j++)
        if (j < count)
            _mm512_mask_storeu_ps(logits + j * (size_t)tokens, mask, rows[j]);
    store_states(old, sum, largest, rows, count, states, factors);
    return true;
}

/* The same of more logits, whose rows are read twice. */
INLINE bool softmax_long(float *logits, uint32_t tokens, uint32_t count, float (*states)[2],
                         float *factors) {
    __m512 rows[4];
    __m128 old, sum;
    __mmask16 broken = 0;
    float shifts[4];
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        const float *row = logits + (j < count ? j : 0) * (size_t)tokens;
        rows[j] = _mm512_set1_ps(-INFINITY);
        for (uint32_t t = 0; t < tokens; t += LANES) {
            __m512 part = _mm512_mask_loadu_ps(rows[j], first_lanes(tokens - t), row + t);
            broken |= _mm512_cmp_ps_mask(part, part, _CMP_UNORD_Q);
            rows[j] = _mm512_max_ps(part, rows[j]);
        }
    }
    load_states(states, count, &old, &sum);
    __m128 largest = _mm_max_ps(_mm512_castps512_ps128(largest_of_four(rows)), old);
    if (broken || !all_above(largest, count))
        return false;
    _mm_storeu_ps(shifts, largest);
    UNROLL for (uint32_t j = 0; j < 4; j++) rows[j] = _mm512_setzero_ps();
    for (uint32_t t = 0; t < tokens; t += LANES) {
        const __mmask16 mask = first_lanes(tokens - t);
        UNROLL for (uint32_t j = 0; j < 4; j++) {
            if (j >= count) continue;
            float *at = logits + j * (size_t)tokens + t;
            __m512 part = _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, at), _mm512_set1_ps(shifts[j]));
            part = exponential_below(part);
            _mm512_mask_storeu_ps(at, mask, part);
            rows[j] = _mm512_mask_add_ps(rows[j], mask, rows[j], part);
        }
    }
    store_states(old, sum, largest, rows, count, states, factors);
    return true;
}

bool avx512_online_softmax(float *logits, uint32_t tokens, uint32_t count, float (*states)[2],
                           float *factors) {
    if (count > 4)
        return false;
    if (tokens > LANES)
        return softmax_long(logits, tokens, count, states, factors);
    return softmax_four(logits, tokens, count, states, factors);
}

/* As sums_of_four(), of rows in memory; half of it for the port that does not shuffle. */
INLINE __m128 four_part_sums(const float *weights, uint32_t tokens, uint32_t parts) {
    __m512 rows[4];
    UNROLL for (uint32_t j = 0; j < 4; j++) {
        const float *at = weights + (j < parts ? j : 0) * (size_t)tokens;
        rows[j] = _mm512_loadu_ps(at);
        for (uint32_t t = LANES; t < tokens; t += LANES)
            rows[j] = _mm512_add_ps(rows[j], _mm512_loadu_ps(at + t));
    }
    __m512 ab = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, rows[0], rows[1]),
                              _mm512_shuffle_ps(rows[0], rows[1], 0x4e));
    __m512 cd = _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, rows[2], rows[3]),
                              _mm512_shuffle_ps(rows[2], rows[3], 0x4e));
    __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88),
                                    _mm512_shuffle_ps(ab, cd, 0xdd));
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters),
                                  _mm512_extractf32x8_ps(quarters, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

bool avx512_part_sums(const float *weights, uint32_t parts, uint32_t tokens, uint32_t count,
                      float *sums, size_t stride) {
    if (tokens == 0 || tokens % LANES)
        return false;
    if (tokens == LANES && parts == 4) { /* a block of pages of the usual size */
        for (uint32_t row = 0; row < count; row++, weights += 4 * LANES, sums += stride)
            _mm_storeu_ps(sums, four_part_sums(weights, LANES, 4));
        return true;
    }
    for (uint32_t row = 0; row < count; row++, sums += stride)
        for (uint32_t part = 0; part < parts; part += 4) {
            const uint32_t here = parts - part < 4 ? parts - part : 4;
            _mm_mask_storeu_ps(sums + part, (__mmask8)((1 << here) - 1),
                               four_part_sums(weights, tokens, here));
            weights += here * (size_t)tokens;
        }
    return true;
}

/* ---- conversions ---- */

INLINE void to_float_as(int dtype, const char *source, size_t count, float *destination) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        _mm512_storeu_ps(destination + i, load(dtype, source + i * element_bytes(dtype)));
    if (i < count) {
        __mmask16 mask = first_lanes(count - i);
        __m512 part = load_part(dtype, mask, source + i * element_bytes(dtype));
        _mm512_mask_storeu_ps(destination + i, mask, part);
    }
}

void avx512_to_float(int dtype, const void *source, size_t count, float *destination) {
    switch (dtype) {
    case KERNEL_BFLOAT16:
        to_float_as(KERNEL_BFLOAT16, source, count, destination);
        return;
    case KERNEL_FLOAT16:
        to_float_as(KERNEL_FLOAT16, source, count, destination);
        return;
    case KERNEL_FLOAT32:
        memcpy(destination, source, count * sizeof *destination);
        return;
    }
    assert(!"a dtype");
}

/* The instruction that rounds to bf16 takes denormals for 0, so that this is done by hand. */
INLINE __m256i halves_of(int dtype, __m512 values) {
    if (dtype == KERNEL_FLOAT16)
        return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i bits = _mm512_castps_si512(values);
    __m512i high = _mm512_srli_epi32(bits, 16);
    /* Adding 0x7fff, and 1 more when the kept part is odd, carries exactly when rounding is up. */
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i carried = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i rounded = _mm512_srli_epi32(carried, 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)); /* quiet */
    return _mm512_cvtepi32_epi16(rounded);
}

INLINE void from_float_as(int dtype, const float *source, size_t count, char *destination) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        _mm256_storeu_si256((__m256i *)(destination + i * 2),
                            halves_of(dtype, _mm512_loadu_ps(source + i)));
    if (i < count) {
        __mmask16 mask = first_lanes(count - i);
        _mm256_mask_storeu_epi16(destination + i * 2, mask,
                                 halves_of(dtype, _mm512_maskz_loadu_ps(mask, source + i)));
    }
}

void avx512_from_float(int dtype, const float *source, size_t count, void *destination) {
    switch (dtype) {
    case KERNEL_BFLOAT16:
        from_float_as(KERNEL_BFLOAT16, source, count, destination);
        return;
    case KERNEL_FLOAT16:
        from_float_as(KERNEL_FLOAT16, source, count, destination);
        return;
    case KERNEL_FLOAT32:
        memcpy(destination, source, count * sizeof *source);
        return;
    }
    assert(!"a dtype");
}

const kernels kernels_avx512 = {
    .name = "avx512",
    .rates = {{39, 39, 38}, 51, 110, 32, 26},
    .score = avx512_score,
    .score_max = avx512_score_max,
    .accumulate = avx512_accumulate,
    .accumulate_pieces = avx512_accumulate_pieces,
    .bound = avx512_bound,
    .digest = avx512_digest,
    .exp_sum = avx512_exp_sum,
    .online_softmax = avx512_online_softmax,
    .part_sums = avx512_part_sums,
    .streams = true,
    .store_rows = avx512_store_rows,
    .to_float = avx512_to_float,
    .from_float = avx512_from_float,
    .sketch = sketch_avx2, /* AVX-512 without VNNI is no faster at them */
    .estimate = estimate_avx2,
    .above = above_avx2,
    .code_digest = code_digest_avx512,
    .code_encode = code_encode_avx2,
    .code_decode = code_decode_avx2,
    .code_split = code_split_avx2,
    .code_join = code_join_avx2,
    .code_raise = code_raise_avx2,
    .code_score = code_score_avx2,
    .code_score_best = code_score_best_avx2,
    .code_accumulate = code_accumulate_avx2,
    .fp8_encode = fp8_encode_avx512,
    .fp8_decode = fp8_decode_avx512,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
/* A translation unit may not be empty. */
typedef int kernels_avx512_is_for_x86_64_only;
#endif
