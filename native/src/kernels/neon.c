/* The kernels with AdvSIMD, which every aarch64 has: 4 fp32 lanes. No target pragma is needed.
 *
 * Four tokens by four queries share their loads: 16 sums, 8 vectors of keys and 2 of a query fit
 * the 32 registers, and 16 chains of additions hide the latency of four multipliers. Tried in an
 * emulator only: so nothing here is tuned by measurement.
 *
 * "neon_bf16" differs for bf16 keys and queries that bf16 holds exactly, as those of a bf16 model:
 * BFMLALB and BFMLALT multiply them without widening, and are fused multiply-adds of fp32 like the
 * others. BFDOT and BFMMLA would do two and four times as much at once, but not what kernels.h
 * promises: "uses the non-IEEE 754 Round-to-Odd rounding mode", "flushes denormalized inputs and
 * results to zero" (Arm ARM, DDI 0487, C7.2, BFDOT and BFMMLA, unless FPCR.EBF is 1, which takes
 * FEAT_EBF16). So the order of the additions would not be all that differs, and denormal keys
 * would count as 0: test_denormal_keys_in_scores shows it. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* dtypes and the size of a block are constants at each call of an inlined body, so that its small
 * loops unroll and its arrays become registers. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 4, STEP = 8, QUERY_BLOCK = 4, TOKEN_BLOCK = 4, LINE_BYTES = 64 };

INLINE void prefetch(const char *start, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += LINE_BYTES)
        __builtin_prefetch(start + offset);
}

INLINE size_t element_bytes(int dtype) { return dtype == KERNEL_FLOAT32 ? 4 : 2; }

/* 8 elements. For bf16 the halves interleave with zeros, which is the shift by 16. */
INLINE void load_step(int dtype, const char *source, float32x4_t step[2]) {
    if (dtype == KERNEL_FLOAT32) {
        step[0] = vld1q_f32((const float *)source);
        step[1] = vld1q_f32((const float *)(source + 16));
        return;
    }
    uint16x8_t halves = vld1q_u16((const uint16_t *)source);
    if (dtype == KERNEL_BFLOAT16) {
        step[0] = vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), halves));
        step[1] = vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), halves));
    } else {
        step[0] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(halves)));
        step[1] = vcvt_high_f32_f16(vreinterpretq_f16_u16(halves));
    }
}

/* The first `count` elements, 1 <= count <= 8, and zeros. */
INLINE void load_part(int dtype, const char *source, size_t count, float32x4_t step[2]) {
    _Alignas(16) char elements[STEP * 4] = {0};
    memcpy(elements, source, count * element_bytes(dtype));
    load_step(dtype, elements, step);
}

INLINE void store_part(float *destination, const float32x4_t step[2], size_t count) {
    float lanes[STEP];
    vst1q_f32(lanes, step[0]);
    vst1q_f32(lanes + LANES, step[1]);
    memcpy(destination, lanes, count * sizeof *lanes);
}

/* Sums of four vectors, in order. */
INLINE float32x4_t sums_of(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
    return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}

/* ---- scores ---- */

/* 8 elements of a key or a query: as two vectors of fp32, or as they are when both are bf16. */
typedef struct operand {
    float32x4_t step[2];
    uint16x8_t halves;
} operand;

INLINE operand load_operand(int dtype, bool both_halves, const char *source) {
    operand loaded = {0};
    if (both_halves)
        loaded.halves = vld1q_u16((const uint16_t *)source);
    else
        load_step(dtype, source, loaded.step);
    return loaded;
}

INLINE operand load_operand_part(int dtype, bool both_halves, const char *source, size_t count) {
    _Alignas(16) char elements[STEP * 4] = {0};
    memcpy(elements, source, count * element_bytes(dtype));
    return load_operand(dtype, both_halves, elements);
}

/* The intrinsics of BFMLALB could not be inlined into functions that must run without it. */
INLINE float32x4_t add_even_products(float32x4_t sum, uint16x8_t a, uint16x8_t b) {
    __asm__(".arch_extension bf16\n\tbfmlalb %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
}

INLINE float32x4_t add_odd_products(float32x4_t sum, uint16x8_t a, uint16x8_t b) {
    __asm__(".arch_extension bf16\n\tbfmlalt %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b));
    return sum;
}

/* sums[0] and sums[chains - 1] get a half of the products each. */
INLINE void add_products(bool both_halves, operand key, operand query, int chains,
                         float32x4_t sums[2]) {
    float32x4_t *first = sums, *second = sums + chains - 1;
    if (both_halves) {
        *first = add_even_products(*first, key.halves, query.halves);
        *second = add_odd_products(*second, key.halves, query.halves);
    } else {
        *first = vfmaq_f32(*first, key.step[0], query.step[0]);
        *second = vfmaq_f32(*second, key.step[1], query.step[1]);
    }
}

/* The dot products of four keys with `queries_here` (1 to 4) queries, a vector for each query.
 * Queries are fp32, or bf16 like the keys. */
INLINE void dot_block(int dtype, int query_dtype, const char *const keys[TOKEN_BLOCK], uint32_t dim,
                      const char *queries, int queries_here, float32x4_t products[QUERY_BLOCK]) {
    const bool both_halves = query_dtype == KERNEL_BFLOAT16;
    /* Few queries are too few chains of additions to hide the latency: then each half of a step
     * gets its own sum. */
    const int chains = queries_here <= 2 ? 2 : 1;
    float32x4_t sums[QUERY_BLOCK][TOKEN_BLOCK][2];
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
        sums[j][t][0] = sums[j][t][1] = vdupq_n_f32(0);

    size_t bytes = element_bytes(dtype), query_bytes = element_bytes(query_dtype);
    size_t d = 0;
    for (; d + STEP <= dim; d += STEP) {
        operand key[TOKEN_BLOCK];
        UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
            key[t] = load_operand(dtype, both_halves, keys[t] + d * bytes);
        UNROLL for (int j = 0; j < queries_here; j++) {
            operand query = load_operand(query_dtype, both_halves,
                                         queries + ((size_t)j * dim + d) * query_bytes);
            UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
                add_products(both_halves, key[t], query, chains, sums[j][t]);
        }
    }
    if (d < dim) {
        operand key[TOKEN_BLOCK];
        UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
            key[t] = load_operand_part(dtype, both_halves, keys[t] + d * bytes, dim - d);
        UNROLL for (int j = 0; j < queries_here; j++) {
            operand query =
                load_operand_part(query_dtype, both_halves,
                                  queries + ((size_t)j * dim + d) * query_bytes, dim - d);
            UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
                add_products(both_halves, key[t], query, chains, sums[j][t]);
        }
    }

    if (chains == 2)
        UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int t = 0; t < TOKEN_BLOCK; t++)
            sums[j][t][0] = vaddq_f32(sums[j][t][0], sums[j][t][1]);
    UNROLL for (int j = 0; j < queries_here; j++)
        products[j] = sums_of(sums[j][0][0], sums[j][1][0], sums[j][2][0], sums[j][3][0]);
}

/* One block of queries against four tokens; exactly one of logits and maxima is not NULL. */
INLINE void score_block(int dtype, int query_dtype, const char *const keys[TOKEN_BLOCK],
                        uint32_t dim, const char *queries, int queries_here, uint32_t tokens_here,
                        float scale, float *logits, size_t logit_stride, float *maxima) {
    float32x4_t block[QUERY_BLOCK];
    dot_block(dtype, query_dtype, keys, dim, queries, queries_here, block);
    UNROLL for (int j = 0; j < queries_here; j++) {
        float32x4_t logit = vmulq_n_f32(block[j], scale);
        if (maxima) { /* a maximum with a NaN is NaN, here and across lanes */
            float32x2_t largest = vdup_n_f32(vmaxvq_f32(logit));
            maxima[j] = vget_lane_f32(vmax_f32(largest, vdup_n_f32(maxima[j])), 0);
        } else if (tokens_here == TOKEN_BLOCK) {
            vst1q_f32(logits + (size_t)j * logit_stride, logit);
        } else {
            float lanes[TOKEN_BLOCK];
            vst1q_f32(lanes, logit);
            memcpy(logits + (size_t)j * logit_stride, lanes, tokens_here * sizeof *lanes);
        }
    }
}

INLINE void score_as(int dtype, int query_dtype, const char *keys, size_t row_bytes,
                     uint32_t tokens, uint32_t dim, const char *queries, uint32_t query_count,
                     float scale, float *logits, size_t logit_stride, float *maxima,
                     const char *next) {
    for (uint32_t t = 0; t < tokens; t += TOKEN_BLOCK) {
        uint32_t here = tokens - t < TOKEN_BLOCK ? tokens - t : TOKEN_BLOCK;
        const char *rows[TOKEN_BLOCK];
        for (uint32_t i = 0; i < TOKEN_BLOCK; i++) /* the last token stands in for absent ones */
            rows[i] = keys + (t + (i < here ? i : here - 1)) * row_bytes;
        if (next)
            prefetch(next + t * dim * element_bytes(dtype), here * dim * element_bytes(dtype));
        for (uint32_t j = 0; j < query_count; j += QUERY_BLOCK) {
            const char *block = queries + (size_t)j * dim * element_bytes(query_dtype);
            float *to_logits = maxima ? NULL : logits + j * logit_stride + t;
            float *to_maxima = maxima ? maxima + j : NULL;
            switch (query_count - j) {
            case 1:
                score_block(dtype, query_dtype, rows, dim, block, 1, here, scale, to_logits,
                            logit_stride, to_maxima);
                break;
            case 2:
                score_block(dtype, query_dtype, rows, dim, block, 2, here, scale, to_logits,
                            logit_stride, to_maxima);
                break;
            case 3:
                score_block(dtype, query_dtype, rows, dim, block, 3, here, scale, to_logits,
                            logit_stride, to_maxima);
                break;
            default:
                score_block(dtype, query_dtype, rows, dim, block, 4, here, scale, to_logits,
                            logit_stride, to_maxima);
            }
        }
    }
}

/* Not inlined, so that there is one copy of the inner loops. */
static __attribute__((noinline)) void
score_or_maximum(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                 const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                 float *maxima, const void *next) {
    const char *query = (const char *)kernel_rows(queries, dim);
    uint32_t query_count = queries->count;
    switch (dtype) {
    case KERNEL_BFLOAT16:
        score_as(KERNEL_BFLOAT16, KERNEL_FLOAT32, keys, row_bytes, tokens, dim, query, query_count,
                 scale, logits, logit_stride, maxima, next);
        return;
    case KERNEL_FLOAT16:
        score_as(KERNEL_FLOAT16, KERNEL_FLOAT32, keys, row_bytes, tokens, dim, query, query_count,
                 scale, logits, logit_stride, maxima, next);
        return;
    case KERNEL_FLOAT32:
        score_as(KERNEL_FLOAT32, KERNEL_FLOAT32, keys, row_bytes, tokens, dim, query, query_count,
                 scale, logits, logit_stride, maxima, next);
        return;
    }
    assert(!"a dtype");
}

static void score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next) {
    score_or_maximum(dtype, keys, row_bytes, tokens, dim, queries, scale, logits, logit_stride,
                     NULL, next);
}

INLINE void start_maxima(float *maxima, uint32_t query_count) {
    for (uint32_t j = 0; j < query_count; j++)
        maxima[j] = -INFINITY;
}

static void score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima, const void *next) {
    start_maxima(maxima, queries->count);
    score_or_maximum(dtype, keys, row_bytes, tokens, dim, queries, scale, NULL, 0, maxima, next);
}

static size_t packed_bytes(uint32_t dim, uint32_t query_count) {
    return (size_t)dim * query_count * sizeof(uint16_t);
}

/* The queries as bf16, when that is exact for all of them. */
static bool pack(int dtype, const float *rows, uint32_t dim, uint32_t query_count, void *packed) {
    uint16_t *narrow = packed;
    size_t count = (size_t)query_count * dim, i = 0;
    uint16x8_t lost = vdupq_n_u16(0);
    if (dtype != KERNEL_BFLOAT16)
        return false;
    for (; i + STEP <= count; i += STEP) {
        uint16x8_t low = vreinterpretq_u16_f32(vld1q_f32(rows + i));
        uint16x8_t high = vreinterpretq_u16_f32(vld1q_f32(rows + i + LANES));
        lost = vorrq_u16(lost, vuzp1q_u16(low, high));
        vst1q_u16(narrow + i, vuzp2q_u16(low, high));
    }
    uint16_t lost_bits = vmaxvq_u16(lost);
    for (; i < count; i++) {
        uint16_t parts[2]; /* the lower half first */
        memcpy(parts, rows + i, sizeof parts);
        lost_bits |= parts[0];
        narrow[i] = parts[1];
    }
    return lost_bits == 0;
}

static __attribute__((noinline)) void
score_or_maximum_bf16(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *logits,
                      size_t logit_stride, float *maxima, const void *next) {
    if (!queries->packed) {
        score_or_maximum(dtype, keys, row_bytes, tokens, dim, queries, scale, logits, logit_stride,
                         maxima, next);
        return;
    }
    const char *narrow = (const char *)queries->packed + packed_bytes(dim, queries->first);
    score_as(KERNEL_BFLOAT16, KERNEL_BFLOAT16, keys, row_bytes, tokens, dim, narrow, queries->count,
             scale, logits, logit_stride, maxima, next);
}

static void score_bf16(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                       const kernel_queries *queries, float scale, float *logits,
                       size_t logit_stride, const void *next) {
    score_or_maximum_bf16(dtype, keys, row_bytes, tokens, dim, queries, scale, logits, logit_stride,
                          NULL, next);
}

static void score_max_bf16(int dtype, const void *keys, size_t row_bytes, uint32_t tokens,
                           uint32_t dim, const kernel_queries *queries, float scale,
                           float *maxima, const void *next) {
    start_maxima(maxima, queries->count);
    score_or_maximum_bf16(dtype, keys, row_bytes, tokens, dim, queries, scale, NULL, 0, maxima,
                          next);
}

/* ---- weighted sums of values ---- */

/* `steps` (1, 2 or 4) times 8 columns of the accumulator, in registers over the chunk's tokens. */
INLINE void accumulate_steps(int dtype, int steps, const char *values, size_t row_bytes,
                             uint32_t tokens, const float *weights, size_t weight_stride,
                             int queries_here, float *accumulator, uint32_t dim) {
    const int vectors = 2 * steps;
    float32x4_t sums[QUERY_BLOCK][8];
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        sums[j][v] = vld1q_f32(accumulator + (size_t)j * dim + v * LANES);
    for (size_t t = 0; t < tokens; t++) {
        float32x4_t row[8];
        UNROLL for (int i = 0; i < steps; i++)
            load_step(dtype, values + t * row_bytes + i * STEP * element_bytes(dtype), row + 2 * i);
        UNROLL for (int j = 0; j < queries_here; j++) {
            float32x4_t weight = vld1q_dup_f32(weights + (size_t)j * weight_stride + t);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[j][v] = vfmaq_f32(sums[j][v], row[v], weight);
        }
    }
    UNROLL for (int j = 0; j < queries_here; j++) UNROLL for (int v = 0; v < vectors; v++)
        vst1q_f32(accumulator + (size_t)j * dim + v * LANES, sums[j][v]);
}

/* The last columns of an odd dim, fewer than 8. */
INLINE void accumulate_part(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                            const float *weights, float *accumulator, size_t columns) {
    float32x4_t sums[2], part[2];
    load_part(KERNEL_FLOAT32, (const char *)accumulator, columns, sums);
    for (size_t t = 0; t < tokens; t++) {
        load_part(dtype, values + t * row_bytes, columns, part);
        sums[0] = vfmaq_n_f32(sums[0], part[0], weights[t]);
        sums[1] = vfmaq_n_f32(sums[1], part[1], weights[t]);
    }
    store_part(accumulator, sums, columns);
}

INLINE void accumulate_block(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                             const float *weights, size_t weight_stride, int queries_here,
                             float *accumulator, uint32_t dim) {
    size_t bytes = element_bytes(dtype), d = 0;
    /* With few queries a wider strip, for as many chains of additions as hide their latency. */
    const int wide = queries_here <= 2 ? 4 : 2;
    for (; d + wide * STEP <= dim; d += wide * STEP)
        accumulate_steps(dtype, wide, values + d * bytes, row_bytes, tokens, weights, weight_stride,
                         queries_here, accumulator + d, dim);
    for (; d + STEP <= dim; d += STEP)
        accumulate_steps(dtype, 1, values + d * bytes, row_bytes, tokens, weights, weight_stride,
                         queries_here, accumulator + d, dim);
    if (d == dim)
        return;
    for (size_t j = 0; j < (size_t)queries_here; j++)
        accumulate_part(dtype, values + d * bytes, row_bytes, tokens, weights + j * weight_stride,
                        accumulator + j * dim + d, dim - d);
}

INLINE void accumulate_as(int dtype, const char *values, size_t row_bytes, uint32_t tokens,
                          uint32_t dim, const float *weights, size_t weight_stride,
                          uint32_t query_count, float *accumulator, const char *next) {
    size_t bytes = dim * element_bytes(dtype);
    /* A chunk must stay in the first cache while its columns are walked. */
    enum { CHUNK_BYTES = 8192 };
    uint32_t chunk = bytes < CHUNK_BYTES ? (uint32_t)(CHUNK_BYTES / bytes) : 1;
    for (uint32_t t = 0; t < tokens; t += chunk) {
        const char *rows = values + t * row_bytes;
        uint32_t here = tokens - t < chunk ? tokens - t : chunk;
        if (next)
            prefetch(next + t * bytes, here * bytes);
        for (uint32_t j = 0; j < query_count; j += QUERY_BLOCK) {
            const float *block = weights + j * weight_stride + t;
            float *sums = accumulator + (size_t)j * dim;
            switch (query_count - j) {
            case 1:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 1, sums, dim);
                break;
            case 2:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 2, sums, dim);
                break;
            case 3:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 3, sums, dim);
                break;
            default:
                accumulate_block(dtype, rows, row_bytes, here, block, weight_stride, 4, sums, dim);
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

/* ---- bounds ---- */

/* query * (query < 0 ? minimum : maximum), added to the sum. */
INLINE float32x4_t add_larger_product(float32x4_t query, float32x4_t minimum, float32x4_t maximum,
                                      float32x4_t sum) {
    int32x4_t sign = vshrq_n_s32(vreinterpretq_s32_f32(query), 31);
    return vfmaq_f32(sum, query, vbslq_f32(vreinterpretq_u32_s32(sign), minimum, maximum));
}

INLINE void bound_block(int dtype, const char *digest, uint32_t dim, const float *queries,
                        int queries_here, float scale, float *bounds) {
    const char *maxima = digest + dim * element_bytes(dtype);
    size_t bytes = element_bytes(dtype), d = 0;
    float32x4_t sums[QUERY_BLOCK][2], minimum[2], maximum[2], query[2];
    UNROLL for (int j = 0; j < QUERY_BLOCK; j++) sums[j][0] = sums[j][1] = vdupq_n_f32(0);
    for (; d + STEP <= dim; d += STEP) {
        load_step(dtype, digest + d * bytes, minimum);
        load_step(dtype, maxima + d * bytes, maximum);
        UNROLL for (int j = 0; j < queries_here; j++) {
            load_step(KERNEL_FLOAT32, (const char *)(queries + (size_t)j * dim + d), query);
            UNROLL for (int i = 0; i < 2; i++)
                sums[j][i] = add_larger_product(query[i], minimum[i], maximum[i], sums[j][i]);
        }
    }
    if (d < dim) {
        load_part(dtype, digest + d * bytes, dim - d, minimum);
        load_part(dtype, maxima + d * bytes, dim - d, maximum);
        UNROLL for (int j = 0; j < queries_here; j++) {
            load_part(KERNEL_FLOAT32, (const char *)(queries + (size_t)j * dim + d), dim - d,
                      query);
            UNROLL for (int i = 0; i < 2; i++)
                sums[j][i] = add_larger_product(query[i], minimum[i], maximum[i], sums[j][i]);
        }
    }
    UNROLL for (int j = 0; j < QUERY_BLOCK; j++) sums[j][0] = vaddq_f32(sums[j][0], sums[j][1]);
    float lanes[QUERY_BLOCK];
    vst1q_f32(lanes, vmulq_n_f32(sums_of(sums[0][0], sums[1][0], sums[2][0], sums[3][0]), scale));
    memcpy(bounds, lanes, (size_t)queries_here * sizeof *lanes);
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

/* ---- digests ---- */

/* fp32 has a minimum and a maximum that keep a NaN and put -0 below +0. 16-bit floats are compared
 * as the integers of their bits, with no conversion. As signed numbers the non-negative floats come
 * in order above all negative ones; as unsigned numbers the negative floats come in reverse order
 * above all non-negative ones. So, with S signed and U unsigned:
 *   minimum = a negative one exists (max U is negative) ? max U : min U
 *   maximum = a non-negative one exists (max S is not negative) ? max S : min U
 * and a NaN, beyond infinity in both orders, shows as max S or max U beyond it. */
typedef struct extremes {
    float32x4_t minimum, maximum;                      /* of fp32 */
    uint16x8_t max_signed, max_unsigned, min_unsigned; /* of 16-bit floats */
} extremes;

INLINE extremes no_extremes(void) {
    return (extremes){
        .minimum = vdupq_n_f32(INFINITY),
        .maximum = vdupq_n_f32(-INFINITY),
        .max_signed = vdupq_n_u16(0x8000),
        .max_unsigned = vdupq_n_u16(0),
        .min_unsigned = vdupq_n_u16(0xffff),
    };
}

INLINE void extend(int dtype, extremes *found, uint16x8_t bits) {
    if (dtype == KERNEL_FLOAT32) {
        found->minimum = vminq_f32(found->minimum, vreinterpretq_f32_u16(bits));
        found->maximum = vmaxq_f32(found->maximum, vreinterpretq_f32_u16(bits));
        return;
    }
    int16x8_t max_signed =
        vmaxq_s16(vreinterpretq_s16_u16(found->max_signed), vreinterpretq_s16_u16(bits));
    found->max_signed = vreinterpretq_u16_s16(max_signed);
    found->max_unsigned = vmaxq_u16(found->max_unsigned, bits);
    found->min_unsigned = vminq_u16(found->min_unsigned, bits);
}

/* The floats' bits from the extremes, NaN where any element was. */
INLINE void resolve(int dtype, extremes found, uint16x8_t *minimum, uint16x8_t *maximum) {
    if (dtype == KERNEL_FLOAT32) {
        *minimum = vreinterpretq_u16_f32(found.minimum);
        *maximum = vreinterpretq_u16_f32(found.maximum);
        return;
    }
    uint16_t infinity = dtype == KERNEL_BFLOAT16 ? 0x7f80 : 0x7c00;
    uint16x8_t has_negative = vcgeq_u16(found.max_unsigned, vdupq_n_u16(0x8000));
    uint16x8_t has_positive = vcltq_u16(found.max_signed, vdupq_n_u16(0x8000));
    uint16x8_t positive_nan =
        vandq_u16(has_positive, vcgtq_u16(found.max_signed, vdupq_n_u16(infinity)));
    uint16x8_t negative_nan = vcgtq_u16(found.max_unsigned, vdupq_n_u16(infinity | 0x8000));
    uint16x8_t is_nan = vorrq_u16(positive_nan, negative_nan);
    uint16x8_t nan = vdupq_n_u16(dtype == KERNEL_BFLOAT16 ? 0x7fc0 : 0x7e00);
    uint16x8_t low = vbslq_u16(has_negative, found.max_unsigned, found.min_unsigned);
    uint16x8_t high = vbslq_u16(has_positive, found.max_signed, found.min_unsigned);
    *minimum = vbslq_u16(is_nan, nan, low);
    *maximum = vbslq_u16(is_nan, nan, high);
}

enum { VECTOR_BYTES = 16, STRIP = 4 };

INLINE uint16x8_t load_bits(const char *source) {
    return vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)source));
}

INLINE void store_bits(char *destination, uint16x8_t bits) {
    vst1q_u8((uint8_t *)destination, vreinterpretq_u8_u16(bits));
}

/* `vectors` (constant) vectors of channels, over all rows. */
INLINE void digest_columns(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                           int vectors, char *minima, char *maxima) {
    extremes found[STRIP];
    UNROLL for (int v = 0; v < vectors; v++) found[v] = no_extremes();
    for (uint32_t t = 0; t < tokens; t++, keys += stride_bytes)
        UNROLL for (int v = 0; v < vectors; v++)
            extend(dtype, &found[v], load_bits(keys + v * VECTOR_BYTES));
    UNROLL for (int v = 0; v < vectors; v++) {
        uint16x8_t minimum, maximum;
        resolve(dtype, found[v], &minimum, &maximum);
        store_bits(minima + v * VECTOR_BYTES, minimum);
        store_bits(maxima + v * VECTOR_BYTES, maximum);
    }
}

/* The last channels of an odd dim, fewer than a vector. */
INLINE void digest_part(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                        size_t bytes, char *minima, char *maxima) {
    char part[VECTOR_BYTES] = {0};
    extremes found = no_extremes();
    for (uint32_t t = 0; t < tokens; t++, keys += stride_bytes) {
        memcpy(part, keys, bytes);
        extend(dtype, &found, load_bits(part));
    }
    uint16x8_t minimum, maximum;
    resolve(dtype, found, &minimum, &maximum);
    store_bits(part, minimum);
    memcpy(minima, part, bytes);
    store_bits(part, maximum);
    memcpy(maxima, part, bytes);
}

INLINE void digest_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, char *minima) {
    size_t bytes = dim * element_bytes(dtype), at = 0;
    char *maxima = minima + bytes;
    for (; at + STRIP * VECTOR_BYTES <= bytes; at += STRIP * VECTOR_BYTES)
        digest_columns(dtype, keys + at, stride_bytes, tokens, STRIP, minima + at, maxima + at);
    for (; at + VECTOR_BYTES <= bytes; at += VECTOR_BYTES)
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

/* ---- exponentials ---- */

/* 2^n for -126 <= n <= 127, from the exponent's bits. */
INLINE float32x4_t power_of_two(int32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

/* exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2, exp(r) by its Taylor series to the 7th power (the
 * rest is below 6e-9). 2^n is applied in two halves, so that results below 2^-126 round once into a
 * denormal and results above the range become infinite. A NaN passes the minimum and maximum. */
INLINE float32x4_t exponential(float32x4_t x) {
    x = vmaxq_f32(x, vdupq_n_f32(-105.0f)); /* exp(-104) already rounds to 0 */
    x = vminq_f32(x, vdupq_n_f32(89.0f));   /* already infinite */
    float32x4_t n = vrndnq_f32(vmulq_n_f32(x, 0x1.715476p+0f));
    /* ln(2) in two parts, the first short enough that n times it is exact. */
    float32x4_t r = vfmsq_n_f32(x, n, 0x1.62e4p-1f);
    r = vfmsq_n_f32(r, n, 0x1.7f7d1cp-20f);
    static const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    float32x4_t sum = vdupq_n_f32(1.0f / 5040);
    UNROLL for (int i = 0; i < 7; i++) sum = vfmaq_f32(vdupq_n_f32(terms[i]), sum, r);
    int32x4_t whole = vcvtq_s32_f32(n);
    int32x4_t half = vshrq_n_s32(whole, 1);
    sum = vmulq_f32(sum, power_of_two(half));
    return vmulq_f32(sum, power_of_two(vsubq_s32(whole, half)));
}

static float exp_sum(float *values, uint32_t count, float shift) {
    if (shift == -INFINITY) { /* -inf - -inf would be NaN */
        memset(values, 0, count * sizeof *values);
        return 0;
    }
    float32x4_t shifts = vdupq_n_f32(shift), sum = vdupq_n_f32(0);
    uint32_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        float32x4_t result = exponential(vsubq_f32(vld1q_f32(values + i), shifts));
        vst1q_f32(values + i, result);
        sum = vaddq_f32(sum, result);
    }
    if (i < count) {
        float lanes[LANES] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}; /* they give 0 */
        memcpy(lanes, values + i, (count - i) * sizeof *lanes);
        float32x4_t result = exponential(vsubq_f32(vld1q_f32(lanes), shifts));
        vst1q_f32(lanes, result);
        memcpy(values + i, lanes, (count - i) * sizeof *lanes);
        sum = vaddq_f32(sum, result);
    }
    return vaddvq_f32(sum);
}

/* ---- copies and conversions ---- */

/* Pairs of registers by a store that asks not to be cached. It may be cached nevertheless: so
 * `streams` is false, and the caller writes the lines back where others do not see the caches. */
INLINE void store_line(char *line, const char *source) {
    typedef struct { char bytes[LINE_BYTES]; } whole;
    const uint8_t *from = (const uint8_t *)source;
    uint8x16_t a = vld1q_u8(from), b = vld1q_u8(from + 16);
    uint8x16_t c = vld1q_u8(from + 32), d = vld1q_u8(from + 48);
    __asm__("stnp %q1, %q2, [%5]\n\tstnp %q3, %q4, [%5, 32]"
            : "=m"(*(whole *)line)
            : "w"(a), "w"(b), "w"(c), "w"(d), "r"(line));
}

static void store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                       size_t row_bytes) {
    assert((uintptr_t)destination % LINE_BYTES == 0);
    char *to = destination;
    for (size_t row = 0; row < rows; row++) {
        const char *from = (const char *)source + row * stride_bytes;
        size_t left = row_bytes;
        for (; left >= LINE_BYTES; left -= LINE_BYTES, from += LINE_BYTES, to += LINE_BYTES)
            store_line(to, from);
        memcpy(to, from, left);
        to += left;
    }
}

INLINE void to_float_as(int dtype, const char *source, size_t count, float *destination) {
    float32x4_t step[2];
    size_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        load_step(dtype, source + i * element_bytes(dtype), step);
        vst1q_f32(destination + i, step[0]);
        vst1q_f32(destination + i + LANES, step[1]);
    }
    if (i < count) {
        load_part(dtype, source + i * element_bytes(dtype), count - i, step);
        store_part(destination + i, step, count - i);
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

INLINE uint16x4_t halves_of(int dtype, float32x4_t values) {
    if (dtype == KERNEL_FLOAT16)
        return vreinterpret_u16_f16(vcvt_f16_f32(values));
    uint32x4_t bits = vreinterpretq_u32_f32(values);
    uint32x4_t high = vshrq_n_u32(bits, 16);
    /* Adding 0x7fff, and 1 more when the kept part is odd, carries exactly when rounding is up. */
    uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
    uint32x4_t carried = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    uint32x4_t quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    uint32x4_t is_number = vceqq_f32(values, values);
    return vmovn_u32(vbslq_u32(is_number, vshrq_n_u32(carried, 16), quiet));
}

INLINE void from_float_as(int dtype, const float *source, size_t count, uint16_t *destination) {
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        vst1_u16(destination + i, halves_of(dtype, vld1q_f32(source + i)));
    if (i < count) {
        float lanes[LANES] = {0};
        uint16_t halves[LANES];
        memcpy(lanes, source + i, (count - i) * sizeof *lanes);
        vst1_u16(halves, halves_of(dtype, vld1q_f32(lanes)));
        memcpy(destination + i, halves, (count - i) * sizeof *halves);
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

const kernels kernels_neon = {
    .name = "neon",
    .rates = {{12, 12, 12}, 15, 30, 30, 20},
    .score = score,
    .score_max = score_max,
    .accumulate = accumulate,
    .bound = bound,
    .digest = digest,
    .exp_sum = exp_sum,
    .store_rows = store_rows,
    .to_float = to_float,
    .from_float = from_float,
    .sketch = sketch_neon,
    .estimate = estimate_neon,
    .above = above_neon,
    .code_digest = code_digest_serial,
    .code_encode = code_encode_neon,
    .code_decode = code_decode_neon,
    .code_split = code_split_neon,
    .code_join = code_join_neon,
    .code_raise = code_raise_neon,
    .code_score = code_score_neon,
    .code_score_best = code_score_best_neon,
    .code_accumulate = code_accumulate_neon,
    .fp8_encode = fp8_encode_neon,
    .fp8_decode = fp8_decode_neon,
};

const kernels kernels_neon_bf16 = {
    .name = "neon_bf16",
    .rates = {{24, 12, 12}, 15, 30, 30, 20},
    .packed_bytes = packed_bytes,
    .pack = pack,
    .score = score_bf16,
    .score_max = score_max_bf16,
    .accumulate = accumulate,
    .bound = bound,
    .digest = digest,
    .exp_sum = exp_sum,
    .store_rows = store_rows,
    .to_float = to_float,
    .from_float = from_float,
    .sketch = sketch_neon,
    .estimate = estimate_neon,
    .above = above_neon,
    .code_digest = code_digest_serial,
    .code_encode = code_encode_neon,
    .code_decode = code_decode_neon,
    .code_split = code_split_neon,
    .code_join = code_join_neon,
    .code_raise = code_raise_neon,
    .code_score = code_score_neon,
    .code_score_best = code_score_best_neon,
    .code_accumulate = code_accumulate_neon,
    .fp8_encode = fp8_encode_neon,
    .fp8_decode = fp8_decode_neon,
};

#else
/* A translation unit may not be empty. */
typedef int kernels_neon_is_for_aarch64_only;
#endif
