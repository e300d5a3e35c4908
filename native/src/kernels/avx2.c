/* The kernels with AVX2, FMA and F16C: 8 fp32 lanes, built to keep up with memory.
 *
 * The cost that counts is of 16-bit keys read once from memory. Two tokens by four queries share
 * their loads: 8 sums, 2 keys and 1 query fit the 16 registers and hide the latency of the FMA. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <assert.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* dtype and the size of a block are constants at each call of an inlined body, so that its small
 * loops unroll and its arrays become registers. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

/* Emits nothing. Without it gcc loads a shared operand again for each use and runs out of registers
 * for the sums, which go to memory and back within the chain of additions (a quarter slower). */
#define KEEP_IN_REGISTER(vector) __asm__("" : "+x"(vector))

enum { LANES = 8, STEP = 16, QUERY_BLOCK = 4, TOKEN_BLOCK = 2, LINE_BYTES = 64 };

enum { PREFETCH_ROWS = 8 };

INLINE size_t element_bytes(int dtype) { return dtype == KERNEL_FLOAT32 ? 4 : 2; }

INLINE void prefetch(const char *start, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += LINE_BYTES)
        _mm_prefetch((const char *)((uintptr_t)start + offset), _MM_HINT_T0);
}

/* 16 elements. For bf16 the halves interleave with zeros, which is the shift by 16; the permutation
 * before makes up for unpack working within 128-bit lanes. */
INLINE void load_step(int dtype, const char *source, __m256 step[2]) {
    if (dtype == KERNEL_BFLOAT16) {
        __m256i halves = _mm256_loadu_si256((const __m256i *)source);
        __m256i ordered = _mm256_permute4x64_epi64(halves, 0xd8);
        step[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(_mm256_setzero_si256(), ordered));
        step[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(_mm256_setzero_si256(), ordered));
    } else if (dtype == KERNEL_FLOAT16) {
        step[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)source));
        step[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + 16)));
    } else {
        step[0] = _mm256_loadu_ps((const float *)source);
        step[1] = _mm256_loadu_ps((const float *)(source + 32));
    }
}

/* All ones in the first `count` lanes, 0 <= count <= 8. */
INLINE __m256i first_lanes(uint32_t count) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane);
}

/* The first `count` elements, 1 <= count <= 8, and zeros. */
INLINE __m256 load_part(int dtype, const char *source, uint32_t count) {
    if (dtype == KERNEL_FLOAT32)
        return _mm256_maskload_ps((const float *)source, first_lanes(count));
    uint16_t halves[LANES] = {0};
    memcpy(halves, source, count * sizeof *halves);
    __m128i packed = _mm_loadu_si128((const __m128i *)halves);
    if (dtype == KERNEL_FLOAT16)
        return _mm256_cvtph_ps(packed);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16));
}

/* Sums of four vectors, in order, in each 128-bit half of the result; the halves are yet to add. */
INLINE __m256 half_sums(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256d even = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    __m256d odd = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    return _mm256_add_ps(_mm256_castpd_ps(even), _mm256_castpd_ps(odd));
}

/* The dot products of two keys with `queries_here` (1 to 4) queries:
 * {first key: query 0..3, second key: query 0..3}, lanes of absent queries 0. */
INLINE __m256 dot_block(int dtype, const char *const keys[TOKEN_BLOCK], uint32_t dim,
                        const float *queries, int queries_here) {
    /* Few queries are too few chains of additions to hide the latency: then each half of a step
     * gets its own sum. */
    const int chains = queries_here <= 2 ? 2 : 1;
    __m256 sums[TOKEN_BLOCK][QUERY_BLOCK][2];
    UNROLL for (int t = 0; t < TOKEN_BLOCK; t++) UNROLL for (int j = 0; j < QUERY_BLOCK; j++)
        sums[t][j][0] = sums[t][j][1] = _mm256_setzero_ps();

    size_t bytes = element_bytes(dtype);
    uint32_t d = 0;
    for (; d + STEP <= dim; d += STEP) {
        __m256 steps[TOKEN_BLOCK][2];
        UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
            load_step(dtype, keys[t] + d * bytes, steps[t]);
        UNROLL for (int half = 0; half < 2; half++) UNROLL for (int j = 0; j < queries_here; j++) {
            __m256 query = _mm256_loadu_ps(queries + (size_t)j * dim + d + half * LANES);
            KEEP_IN_REGISTER(query);
            UNROLL for (int t = 0; t < TOKEN_BLOCK; t++) {
                __m256 *sum = &sums[t][j][half % chains];
                *sum = _mm256_fmadd_ps(steps[t][half], query, *sum);
            }
        }
    }
    for (; d < dim; d += LANES) {
        uint32_t here = dim - d < LANES ? dim - d : LANES;
        UNROLL for (int t = 0; t < TOKEN_BLOCK; t++) {
            __m256 part = load_part(dtype, keys[t] + d * bytes, here);
            UNROLL for (int j = 0; j < queries_here; j++) {
                __m256 query = _mm256_maskload_ps(queries + (size_t)j * dim + d, first_lanes(here));
                sums[t][j][0] = _mm256_fmadd_ps(part, query, sums[t][j][0]);
            }
        }
    }

    if (chains == 2)
        UNROLL for (int t = 0; t < TOKEN_BLOCK; t++) UNROLL for (int j = 0; j < queries_here; j++)
            sums[t][j][0] = _mm256_add_ps(sums[t][j][0], sums[t][j][1]);
    __m256 first = half_sums(sums[0][0][0], sums[0][1][0], sums[0][2][0], sums[0][3][0]);
    __m256 second = half_sums(sums[1][0][0], sums[1][1][0], sums[1][2][0], sums[1][3][0]);
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                         _mm256_permute2f128_ps(first, second, 0x31));
}

/* A block of logits as dot_block leaves it, to the rows of its queries. */
INLINE void store_logits(__m256 block, float *logits, size_t logit_stride, int queries_here,
                         uint32_t tokens_here) {
    __m128 first = _mm256_castps256_ps128(block), second = _mm256_extractf128_ps(block, 1);
    if (tokens_here == TOKEN_BLOCK) {
        __m128 pairs[2] = {_mm_unpacklo_ps(first, second), _mm_unpackhi_ps(first, second)};
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m64 *row = (__m64 *)(logits + (size_t)j * logit_stride);
            if (j % 2)
                _mm_storeh_pi(row, pairs[j / 2]);
            else
                _mm_storel_pi(row, pairs[j / 2]);
        }
    } else {
        float lanes[QUERY_BLOCK];
        _mm_storeu_ps(lanes, first);
        UNROLL for (int j = 0; j < queries_here; j++) logits[(size_t)j * logit_stride] = lanes[j];
    }
}

/* max takes its second operand when one is NaN: an old NaN stays, and a new one is or-ed in. */
INLINE __m128 max_with_nan(__m128 candidate, __m128 old) {
    return _mm_or_ps(_mm_max_ps(candidate, old), _mm_cmpunord_ps(candidate, candidate));
}

INLINE void raise_maxima(__m256 block, float *maxima, int queries_here) {
    __m128 pair = max_with_nan(_mm256_castps256_ps128(block), _mm256_extractf128_ps(block, 1));
    __m128i mask = _mm256_castsi256_si128(first_lanes((uint32_t)queries_here));
    if (queries_here == QUERY_BLOCK)
        _mm_storeu_ps(maxima, max_with_nan(pair, _mm_loadu_ps(maxima)));
    else
        _mm_maskstore_ps(maxima, mask, max_with_nan(pair, _mm_maskload_ps(maxima, mask)));
}

/* One block of queries against a pair of tokens; exactly one of logits and maxima is not NULL. */
INLINE void score_block(int dtype, const char *const keys[TOKEN_BLOCK], uint32_t dim,
                        const float *queries, int queries_here, uint32_t tokens_here, float scale,
                        float *logits, size_t logit_stride, float *maxima) {
    __m256 block = dot_block(dtype, keys, dim, queries, queries_here);
    block = _mm256_mul_ps(block, _mm256_set1_ps(scale));
    if (maxima)
        raise_maxima(block, maxima, queries_here);
    else
        store_logits(block, logits, logit_stride, queries_here, tokens_here);
}

INLINE void score_as(int dtype, const char *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                     const float *queries, uint32_t query_count, float scale, float *logits,
                     size_t logit_stride, float *maxima, const char *next) {
    for (uint32_t t = 0; t < tokens; t += TOKEN_BLOCK) {
        const char *row = keys + t * row_bytes;
        uint32_t here = tokens - t < TOKEN_BLOCK ? tokens - t : TOKEN_BLOCK;
        /* An odd last token is paired with itself. */
        const char *const pair[TOKEN_BLOCK] = {row, here == TOKEN_BLOCK ? row + row_bytes : row};
        if (next)
            prefetch(next + t * dim * element_bytes(dtype), here * dim * element_bytes(dtype));
        for (uint32_t j = 0; j < query_count; j += QUERY_BLOCK) {
            const float *block = queries + (size_t)j * dim;
            float *to_logits = maxima ? NULL : logits + j * logit_stride + t;
            float *to_maxima = maxima ? maxima + j : NULL;
            switch (query_count - j) {
            case 1:
                score_block(dtype, pair, dim, block, 1, here, scale, to_logits, logit_stride,
                            to_maxima);
                break;
            case 2:
                score_block(dtype, pair, dim, block, 2, here, scale, to_logits, logit_stride,
                            to_maxima);
                break;
            case 3:
                score_block(dtype, pair, dim, block, 3, here, scale, to_logits, logit_stride,
                            to_maxima);
                break;
            default:
                score_block(dtype, pair, dim, block, 4, here, scale, to_logits, logit_stride,
                            to_maxima);
            }
        }
    }
}

/* Not inlined, so that there is one copy of the inner loops. */
static __attribute__((noinline)) void
score_or_maximum(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                 const float *queries, uint32_t query_count, float scale, float *logits,
                 size_t logit_stride, float *maxima, const void *next) {
    switch (dtype) {
    case KERNEL_BFLOAT16:
        score_as(KERNEL_BFLOAT16, keys, row_bytes, tokens, dim, queries, query_count, scale, logits,
                 logit_stride, maxima, next);
        return;
    case KERNEL_FLOAT16:
        score_as(KERNEL_FLOAT16, keys, row_bytes, tokens, dim, queries, query_count, scale, logits,
                 logit_stride, maxima, next);
        return;
    case KERNEL_FLOAT32:
        score_as(KERNEL_FLOAT32, keys, row_bytes, tokens, dim, queries, query_count, scale, logits,
                 logit_stride, maxima, next);
        return;
    }
    assert(!"a dtype");
}

static void score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next) {
    score_or_maximum(dtype, keys, row_bytes, tokens, dim, kernel_rows(queries, dim), queries->count,
                     scale, logits, logit_stride, NULL, next);
}

static void score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima, const void *next) {
    for (uint32_t j = 0; j < queries->count; j++)
        maxima[j] = -INFINITY;
    score_or_maximum(dtype, keys, row_bytes, tokens, dim, kernel_rows(queries, dim), queries->count,
                     scale, NULL, 0, maxima, next);
}

/* `steps` (1 or 2) times 16 columns of the accumulator, in registers over the chunk's tokens. */
INLINE void accumulate_steps(int dtype, int steps, const char *values, size_t row_bytes,
                             uint32_t tokens, const float *weights, size_t weight_stride,
                             int queries_here, float *accumulator, uint32_t dim) {
    const int vectors = 2 * steps;
    __m256 sums[QUERY_BLOCK][4];
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        sums[j][v] = _mm256_loadu_ps(accumulator + (size_t)j * dim + v * LANES);
    for (size_t t = 0; t < tokens; t++) {
        __m256 row[4];
        UNROLL for (int i = 0; i < steps; i++)
            load_step(dtype, values + t * row_bytes + i * STEP * element_bytes(dtype), row + 2 * i);
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m256 weight = _mm256_broadcast_ss(weights + (size_t)j * weight_stride + t);
            UNROLL for (int v = 0; v < vectors; v++) sums[j][v] =
                _mm256_fmadd_ps(row[v], weight, sums[j][v]);
        }
    }
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        _mm256_storeu_ps(accumulator + (size_t)j * dim + v * LANES, sums[j][v]);
}

/* The last columns of an odd dim, at most 8 at a time. */
INLINE void accumulate_part(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                            const float *weights, float *accumulator, uint32_t columns) {
    __m256i mask = first_lanes(columns);
    __m256 sum = _mm256_maskload_ps(accumulator, mask);
    for (size_t t = 0; t < tokens; t++) {
        __m256 part = load_part(dtype, values + t * row_bytes, columns);
        sum = _mm256_fmadd_ps(part, _mm256_broadcast_ss(weights + t), sum);
    }
    _mm256_maskstore_ps(accumulator, mask, sum);
}

INLINE void accumulate_block(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                             const float *weights, size_t weight_stride, int queries_here,
                             float *accumulator, uint32_t dim, const char *next) {
    size_t bytes = element_bytes(dtype);
    uint32_t d = 0;
    /* With few queries a wider strip, for as many chains of additions as hide their latency. */
    const int wide = queries_here <= 2 ? 2 : 1;
    for (; d + wide * STEP <= dim; d += wide * STEP) {
        if (next)
            prefetch(next + tokens * d * bytes, tokens * wide * STEP * bytes);
        accumulate_steps(dtype, wide, values + d * bytes, row_bytes, tokens, weights, weight_stride,
                         queries_here, accumulator + d, dim);
    }
    for (; d + STEP <= dim; d += STEP)
        accumulate_steps(dtype, 1, values + d * bytes, row_bytes, tokens, weights, weight_stride,
                         queries_here, accumulator + d, dim);
    for (; d < dim; d += LANES) {
        uint32_t here = dim - d < LANES ? dim - d : LANES;
        for (size_t j = 0; j < (size_t)queries_here; j++)
            accumulate_part(dtype, values + d * bytes, row_bytes, tokens,
                            weights + j * weight_stride, accumulator + j * dim + d, here);
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
        const char *rows = values + t * row_bytes;
        uint32_t here = tokens - t < chunk ? tokens - t : chunk;
        /* What comes next is asked for, one share with each strip of columns of this chunk. */
        const char *ahead = next ? next + t * bytes : NULL;
        for (uint32_t j = 0; j < query_count; j += QUERY_BLOCK) {
            const float *block = weights + j * weight_stride + t;
            float *sums = accumulator + (size_t)j * dim;
            switch (query_count - j) {
            case 1:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 1, sums, dim,
                                 j == 0 ? ahead : NULL);
                break;
            case 2:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 2, sums, dim,
                                 j == 0 ? ahead : NULL);
                break;
            case 3:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 3, sums, dim,
                                 j == 0 ? ahead : NULL);
                break;
            default:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 4, sums, dim,
                                 j == 0 ? ahead : NULL);
            }
        }
    }
}

static void accumulate(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
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

/* query * (query < 0 ? minimum : maximum), added to the sum. */
INLINE __m256 add_larger_product(__m256 query, __m256 minimum, __m256 maximum, __m256 sum) {
    return _mm256_fmadd_ps(query, _mm256_blendv_ps(maximum, minimum, query), sum);
}

INLINE void bound_block(int dtype, const char *digest, uint32_t dim, const float *queries,
                        int queries_here, float scale, float *bounds) {
    const char *maxima = digest + dim * element_bytes(dtype);
    size_t bytes = element_bytes(dtype);
    __m256 sums[QUERY_BLOCK][2];
    UNROLL for (int j = 0; j < QUERY_BLOCK; j++) sums[j][0] = sums[j][1] = _mm256_setzero_ps();
    uint32_t d = 0;
    for (; d + STEP <= dim; d += STEP) {
        __m256 minimum[2], maximum[2];
        load_step(dtype, digest + d * bytes, minimum);
        load_step(dtype, maxima + d * bytes, maximum);
        UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int half = 0; half < 2; half++) {
            __m256 query = _mm256_loadu_ps(queries + (size_t)j * dim + d + half * LANES);
            sums[j][half] = add_larger_product(query, minimum[half], maximum[half], sums[j][half]);
        }
    }
    for (; d < dim; d += LANES) {
        uint32_t here = dim - d < LANES ? dim - d : LANES;
        __m256 minimum = load_part(dtype, digest + d * bytes, here);
        __m256 maximum = load_part(dtype, maxima + d * bytes, here);
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m256 query = _mm256_maskload_ps(queries + (size_t)j * dim + d, first_lanes(here));
            sums[j][0] = add_larger_product(query, minimum, maximum, sums[j][0]);
        }
    }
    UNROLL for (int j = 0; j < QUERY_BLOCK; j++) sums[j][0] = _mm256_add_ps(sums[j][0], sums[j][1]);
    __m256 halves = half_sums(sums[0][0], sums[1][0], sums[2][0], sums[3][0]);
    __m128 total = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    _mm_maskstore_ps(bounds, _mm256_castsi256_si128(first_lanes((uint32_t)queries_here)),
                     _mm_mul_ps(total, _mm_set1_ps(scale)));
}

INLINE void bound_as(int dtype, const char *digest, uint32_t dim, const float *queries,
                     uint32_t query_count, float scale, float *bounds, const char *next) {
    if (next)
        prefetch(next, 2 * dim * element_bytes(dtype));
    for (uint32_t j = 0; j < query_count; j += QUERY_BLOCK) {
        const float *block = queries + (size_t)j * dim;
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

static void bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
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

/* Minimum and maximum of floats by integer comparisons of their bits, three for each vector of
 * whole elements, with no conversion. As signed numbers the non-negative floats come in order above
 * all negative ones; as unsigned numbers the negative floats come in reverse order above all
 * non-negative ones. So, with S signed and U unsigned:
 *   minimum = a negative one exists (max U is negative) ? max U : min U
 *   maximum = a non-negative one exists (max S is not negative) ? max S : min U
 * and a NaN, beyond infinity in both orders, shows as max S or max U beyond it. */
typedef struct extremes {
    __m256i max_signed, max_unsigned, min_unsigned;
} extremes;

INLINE extremes no_extremes(int dtype) {
    __m256i lowest =
        dtype == KERNEL_FLOAT32 ? _mm256_set1_epi32(INT32_MIN) : _mm256_set1_epi16(INT16_MIN);
    return (extremes){lowest, _mm256_setzero_si256(), _mm256_set1_epi8(-1)};
}

INLINE extremes extend(int dtype, extremes old, __m256i bits) {
    if (dtype == KERNEL_FLOAT32)
        return (extremes){_mm256_max_epi32(old.max_signed, bits),
                          _mm256_max_epu32(old.max_unsigned, bits),
                          _mm256_min_epu32(old.min_unsigned, bits)};
    return (extremes){_mm256_max_epi16(old.max_signed, bits),
                      _mm256_max_epu16(old.max_unsigned, bits),
                      _mm256_min_epu16(old.min_unsigned, bits)};
}

/* The floats' bits from the extremes, NaN where any element was. */
INLINE void resolve(int dtype, extremes found, __m256i *minimum, __m256i *maximum) {
    __m256i zero = _mm256_setzero_si256(), has_negative, has_positive, is_nan, nan;
    if (dtype == KERNEL_FLOAT32) {
        __m256i infinity = _mm256_set1_epi32(0x7f800000);
        __m256i negative_infinity = _mm256_set1_epi32((int)0xff800000);
        has_negative = _mm256_cmpgt_epi32(zero, found.max_unsigned);
        has_positive = _mm256_cmpgt_epi32(found.max_signed, _mm256_set1_epi32(-1));
        /* Among negative numbers the signed order is the unsigned one. */
        is_nan =
            _mm256_or_si256(_mm256_cmpgt_epi32(found.max_signed, infinity),
                            _mm256_and_si256(has_negative, _mm256_cmpgt_epi32(found.max_unsigned,
                                                                              negative_infinity)));
        nan = _mm256_set1_epi32(0x7fc00000);
    } else {
        short infinity_bits = dtype == KERNEL_BFLOAT16 ? 0x7f80 : 0x7c00;
        __m256i infinity = _mm256_set1_epi16(infinity_bits);
        __m256i negative_infinity = _mm256_set1_epi16((short)(infinity_bits | 0x8000));
        has_negative = _mm256_cmpgt_epi16(zero, found.max_unsigned);
        has_positive = _mm256_cmpgt_epi16(found.max_signed, _mm256_set1_epi16(-1));
        is_nan =
            _mm256_or_si256(_mm256_cmpgt_epi16(found.max_signed, infinity),
                            _mm256_and_si256(has_negative, _mm256_cmpgt_epi16(found.max_unsigned,
                                                                              negative_infinity)));
        nan = _mm256_set1_epi16(dtype == KERNEL_BFLOAT16 ? 0x7fc0 : 0x7e00);
    }
    __m256i low = _mm256_blendv_epi8(found.min_unsigned, found.max_unsigned, has_negative);
    __m256i high = _mm256_blendv_epi8(found.min_unsigned, found.max_signed, has_positive);
    *minimum = _mm256_blendv_epi8(low, nan, is_nan);
    *maximum = _mm256_blendv_epi8(high, nan, is_nan);
}

/* `vectors` (constant) vectors of channels, over all rows. */
INLINE void digest_columns(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                           int vectors, char *minima, char *maxima) {
    extremes found[4];
    UNROLL for (int v = 0; v < vectors; v++) found[v] = no_extremes(dtype);
    for (uint32_t t = 0; t < tokens; t++, keys += stride_bytes)
        UNROLL for (int v = 0; v < vectors; v++) {
            __m256i bits = _mm256_loadu_si256((const __m256i *)keys + v);
            found[v] = extend(dtype, found[v], bits);
            KEEP_IN_REGISTER(found[v].max_signed);
            KEEP_IN_REGISTER(found[v].max_unsigned);
            KEEP_IN_REGISTER(found[v].min_unsigned);
        }
    UNROLL for (int v = 0; v < vectors; v++) {
        __m256i minimum, maximum;
        resolve(dtype, found[v], &minimum, &maximum);
        _mm256_storeu_si256((__m256i *)minima + v, minimum);
        _mm256_storeu_si256((__m256i *)maxima + v, maximum);
    }
}

/* The last channels of an odd dim, fewer than a vector. */
INLINE void digest_part(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                        size_t bytes, char *minima, char *maxima) {
    char part[32] = {0};
    extremes found = no_extremes(dtype);
    for (uint32_t t = 0; t < tokens; t++, keys += stride_bytes) {
        memcpy(part, keys, bytes);
        found = extend(dtype, found, _mm256_loadu_si256((const __m256i *)part));
    }
    __m256i minimum, maximum;
    resolve(dtype, found, &minimum, &maximum);
    _mm256_storeu_si256((__m256i *)part, minimum);
    memcpy(minima, part, bytes);
    _mm256_storeu_si256((__m256i *)part, maximum);
    memcpy(maxima, part, bytes);
}

INLINE void digest_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, char *minima) {
    size_t bytes = dim * element_bytes(dtype), at = 0;
    char *maxima = minima + bytes;
    for (; at + 128 <= bytes; at += 128)
        digest_columns(dtype, keys + at, stride_bytes, tokens, 4, minima + at, maxima + at);
    for (; at + 32 <= bytes; at += 32)
        digest_columns(dtype, keys + at, stride_bytes, tokens, 1, minima + at, maxima + at);
    if (at < bytes)
        digest_part(dtype, keys + at, stride_bytes, tokens, bytes - at, minima + at, maxima + at);
}

static void digest(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
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

/* 2^n for -126 <= n <= 127, from the exponent's bits. */
INLINE __m256 power_of_two(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2, exp(r) by its Taylor series to the 7th power (the
 * rest is below 6e-9). 2^n is applied in two halves, so that results below 2^-126 round once into a
 * denormal and results above the range become infinite. A NaN passes: min and max return their
 * second operand then. */
INLINE __m256 exponential(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-105.0f), x); /* exp(-104) already rounds to 0 */
    x = _mm256_min_ps(_mm256_set1_ps(89.0f), x);   /* already infinite */
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* ln(2) in two parts, the first short enough that n times it is exact. */
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
    static const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    __m256 sum = _mm256_set1_ps(1.0f / 5040);
    UNROLL for (int i = 0; i < 7; i++) sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(terms[i]));
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    sum = _mm256_mul_ps(sum, power_of_two(half));
    return _mm256_mul_ps(sum, power_of_two(_mm256_sub_epi32(whole, half)));
}

static float exp_sum(float *values, uint32_t count, float shift) {
    if (shift == -INFINITY) { /* -inf - -inf would be NaN */
        memset(values, 0, count * sizeof *values);
        return 0;
    }
    __m256 shifts = _mm256_set1_ps(shift), sum = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        __m256 result = exponential(_mm256_sub_ps(_mm256_loadu_ps(values + i), shifts));
        _mm256_storeu_ps(values + i, result);
        sum = _mm256_add_ps(sum, result);
    }
    if (i < count) {
        __m256i mask = first_lanes(count - i);
        __m256 part = _mm256_sub_ps(_mm256_maskload_ps(values + i, mask), shifts);
        __m256 result = _mm256_and_ps(exponential(part), _mm256_castsi256_ps(mask));
        _mm256_maskstore_ps(values + i, mask, result);
        sum = _mm256_add_ps(sum, result);
    }
    __m256 zero = _mm256_setzero_ps();
    __m256 halves = half_sums(sum, zero, zero, zero);
    return _mm_cvtss_f32(
        _mm_add_ss(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

/* Both halves of a line one after the other, so that the line leaves its write buffer whole. */
INLINE void stream_line(char *line, const char *source) {
    __m256i low = _mm256_loadu_si256((const __m256i *)source);
    __m256i high = _mm256_loadu_si256((const __m256i *)(source + 32));
    _mm256_stream_si256((__m256i *)line, low);
    _mm256_stream_si256((__m256i *)(line + 32), high);
}

/* The last part of a piece, fewer bytes than a line. What is less than 4 bytes goes by a store with
 * a byte mask, slow but past the caches like the rest; its 16 bytes lie within the line. */
static void stream_part(char *line, const char *source, size_t bytes) {
    size_t at = 0;
    for (; at + 4 <= bytes; at += 4) {
        int word;
        memcpy(&word, source + at, 4);
        _mm_stream_si32((int *)(line + at), word);
    }
    if (at == bytes)
        return;
    char lanes[16] = {0}, mask[16] = {0};
    size_t lane = at % 16;
    memcpy(lanes + lane, source + at, bytes - at);
    memset(mask + lane, 0x80, bytes - at);
    _mm_maskmoveu_si128(_mm_loadu_si128((const __m128i *)lanes),
                        _mm_loadu_si128((const __m128i *)mask), line + (at - lane));
}

/* Also in the tables of kernels_avx512.h, which declares it. */
void avx2_store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                     size_t row_bytes);
void avx2_store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                     size_t row_bytes) {
    assert((uintptr_t)destination % LINE_BYTES == 0);
    char *to = destination;
    char line[LINE_BYTES]; /* bytes of rows that have not filled a line yet */
    size_t waiting = 0;
    for (size_t row = 0; row < rows; row++) {
        const char *from = (const char *)source + row * stride_bytes;
        if (rows - row > PREFETCH_ROWS)
            prefetch(from + PREFETCH_ROWS * stride_bytes, row_bytes);
        size_t left = row_bytes;
        if (waiting) {
            size_t taken = LINE_BYTES - waiting < left ? LINE_BYTES - waiting : left;
            memcpy(line + waiting, from, taken);
            waiting += taken, from += taken, left -= taken;
            if (waiting == LINE_BYTES) {
                stream_line(to, line);
                to += LINE_BYTES;
                waiting = 0;
            }
        }
        for (; left >= LINE_BYTES; left -= LINE_BYTES, from += LINE_BYTES, to += LINE_BYTES)
            stream_line(to, from);
        if (left) {
            memcpy(line + waiting, from, left);
            waiting += left;
        }
    }
    stream_part(to, line, waiting);
}

INLINE void to_float_as(int dtype, const char *source, size_t count, float *destination) {
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        __m256 step[2];
        load_step(dtype, source + i * element_bytes(dtype), step);
        _mm256_storeu_ps(destination + i, step[0]);
        _mm256_storeu_ps(destination + i + LANES, step[1]);
    }
    for (; i < count; i += LANES) {
        uint32_t here = count - i < LANES ? (uint32_t)(count - i) : LANES;
        __m256 part = load_part(dtype, source + i * element_bytes(dtype), here);
        _mm256_maskstore_ps(destination + i, first_lanes(here), part);
    }
}

static void to_float(int dtype, const void *source, size_t count, float *destination) {
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

INLINE __m128i halves_of(int dtype, __m256 values) {
    if (dtype == KERNEL_FLOAT16)
        return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i bits = _mm256_castps_si256(values);
    __m256i high = _mm256_srli_epi32(bits, 16);
    /* Adding 0x7fff, and 1 more when the kept part is odd, carries exactly when rounding is up. */
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i carried = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i rounded = _mm256_srli_epi32(carried, 16);
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    __m256i chosen = _mm256_blendv_epi8(rounded, quiet, is_nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}

INLINE void from_float_as(int dtype, const float *source, size_t count, char *destination) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        _mm_storeu_si128((__m128i *)(destination + i * 2),
                         halves_of(dtype, _mm256_loadu_ps(source + i)));
    if (i < count) {
        uint16_t halves[LANES];
        __m256 part = _mm256_maskload_ps(source + i, first_lanes((uint32_t)(count - i)));
        _mm_storeu_si128((__m128i *)halves, halves_of(dtype, part));
        memcpy(destination + i * 2, halves, (count - i) * 2);
    }
}

static void from_float(int dtype, const float *source, size_t count, void *destination) {
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

const kernels kernels_avx2 = {
    .name = "avx2",
    .rates = {{41, 43, 43}, 51, 110, 32, 26},
    .score = score,
    .score_max = score_max,
    .accumulate = accumulate,
    .bound = bound,
    .digest = digest,
    .exp_sum = exp_sum,
    .streams = true,
    .store_rows = avx2_store_rows,
    .to_float = to_float,
    .from_float = from_float,
    .sketch = sketch_avx2,
    .estimate = estimate_avx2,
    .above = above_avx2,
    .code_digest = code_digest_avx2,
    .code_encode = code_encode_avx2,
    .code_decode = code_decode_avx2,
    .code_split = code_split_avx2,
    .code_join = code_join_avx2,
    .code_raise = code_raise_avx2,
    .code_score = code_score_avx2,
    .code_score_best = code_score_best_avx2,
    .code_accumulate = code_accumulate_avx2,
    .fp8_encode = fp8_encode_avx2,
    .fp8_decode = fp8_decode_avx2,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
/* A translation unit may not be empty. */
typedef int kernels_avx2_is_for_x86_64_only;
#endif
