/* Sketches with AVX2: 8 tokens in the 8 lanes, sums of 16 bits that are widened in time. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/rotate_avx2.h"
#include "kernels/sketch.h"

enum { QUERY_BLOCK = 4 };
/* A line adds at most 4 * 2 * 3 * 127 = 3048 to a sum of 16 bits. */
enum { LINES_TOGETHER = 8 };

/* ---- encode ---- */

INLINE float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* Which lanes have the high bit of their code, and which the low one. */
INLINE void code_masks(__m256 x, __m256 minus, __m256 step, __m256 masks[2]) {
    __m256 high = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ);
    masks[1] = high;
    masks[0] = _mm256_cmp_ps(x, _mm256_blendv_ps(minus, step, high), _CMP_GE_OQ);
}

/* Bit i of the low 16 at bit 2 * i. */
INLINE uint32_t spread(uint32_t bits) {
    bits = (bits | bits << 8) & 0x00ff00ff;
    bits = (bits | bits << 4) & 0x0f0f0f0f;
    bits = (bits | bits << 2) & 0x33333333;
    return (bits | bits << 1) & 0x55555555;
}

/* rotated: dim floats, and zeros to a multiple of 16. Returns the scale. */
INLINE float encode_lanes(const float *rotated, uint32_t dim, uint8_t *codes) {
    __m256 squares = _mm256_setzero_ps(), products = _mm256_setzero_ps();
    for (uint32_t d = 0; d < dim; d += LANES) {
        __m256 x = _mm256_load_ps(rotated + d);
        squares = _mm256_fmadd_ps(x, x, squares);
    }
    float length = sum_of(squares);
    __m256 step = _mm256_set1_ps(sqrtf(length / (float)dim));
    __m256 minus = _mm256_sub_ps(_mm256_setzero_ps(), step);
    const __m256 half = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (uint32_t d = 0; d < dim; d += SKETCH_CHANNELS) {
        uint32_t bits[2] = {0};
        UNROLL for (uint32_t i = 0; i < 2; i++) {
            __m256 x = _mm256_load_ps(rotated + d + i * LANES), masks[2];
            code_masks(x, minus, step, masks);
            UNROLL for (uint32_t b = 0; b < 2; b++)
                bits[b] |= (uint32_t)_mm256_movemask_ps(masks[b]) << i * LANES;
            /* |code - 1.5| is 1.5 where both bits are equal: times |x|, the product. */
            __m256 outer = _mm256_andnot_ps(_mm256_xor_ps(masks[0], masks[1]), one);
            products = _mm256_fmadd_ps(_mm256_andnot_ps(sign, x), _mm256_add_ps(half, outer),
                                       products);
        }
        uint32_t packed = spread(bits[0]) | spread(bits[1]) << 1;
        packed &= sketch_last_channels(dim - d);
        memcpy(codes + d / SKETCH_CHANNELS * SKETCH_LINE_BYTES, &packed, sizeof(packed));
    }
    if (!isfinite(length)) return NAN;
    return length > 0 ? length / sum_of(products) : 0;
}

static void hadamard(float *rotated, uint32_t dim) {
    flip_signs(rotated, dim);
    for (uint32_t first = 0; first < dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(dim - first));
        if (size < LANES) {
            sketch_transform(rotated + first, size);
        } else {
            const __m256 norm = _mm256_set1_ps(1 / sqrtf((float)size));
            transform(rotated + first, size);
            for (uint32_t i = first; i < first + size; i += LANES)
                _mm256_store_ps(rotated + i, _mm256_mul_ps(_mm256_load_ps(rotated + i), norm));
        }
        first += size;
    }
}

void sketch_avx2(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                 void *sketch) {
    _Alignas(64) float rotated[4096];
    uint32_t padded = sketch_dim(dim);
    if (tokens % SKETCH_TOKENS) memset(sketch, 0, sketch_bytes(tokens, dim));
    memset(rotated + dim, 0, (padded - dim) * sizeof(float));
    for (uint32_t t = 0; t < tokens; t++) {
        kernels_avx2.to_float(dtype, (const char *)keys + t * stride_bytes, dim, rotated);
        hadamard(rotated, dim);
        memset(rotated + dim, 0, (padded - dim) * sizeof(float));
        uint8_t *block = (uint8_t *)sketch + t / SKETCH_TOKENS * sketch_block_bytes(dim);
        float scale = encode_lanes(rotated, dim, block + t % SKETCH_TOKENS * 4);
        memcpy(block + sketch_block_bytes(dim) - SKETCH_LINE_BYTES +
               t % SKETCH_TOKENS * sizeof(float), &scale, sizeof(scale));
    }
}

/* ---- estimate ---- */

/* Raises the maxima of 8 tokens by 1 to 4 queries, before their scales. */
INLINE __m256 estimate_half(const uint8_t *half, uint32_t lines, const sketch_query *queries,
                            int queries_here, __m256 maxima) {
    const __m256i low = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
    __m256i sums[QUERY_BLOCK];
    UNROLL for (int q = 0; q < queries_here; q++) sums[q] = _mm256_setzero_si256();
    for (uint32_t first = 0; first < lines; first += LINES_TOGETHER) {
        uint32_t end = lines - first < LINES_TOGETHER ? lines : first + LINES_TOGETHER;
        __m256i shorts[QUERY_BLOCK];
        UNROLL for (int q = 0; q < queries_here; q++) shorts[q] = _mm256_setzero_si256();
        for (uint32_t line = first; line < end; line++) {
            __m256i packed =
                _mm256_load_si256((const __m256i *)(half + line * SKETCH_LINE_BYTES)), codes[4];
            codes[0] = _mm256_and_si256(packed, low);
            codes[1] = _mm256_and_si256(_mm256_srli_epi16(packed, 2), low);
            codes[2] = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
            codes[3] = _mm256_and_si256(_mm256_srli_epi16(packed, 6), low);
            UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < 4; i++) {
                int32_t four;
                memcpy(&four, queries[q].codes + line * SKETCH_CHANNELS + 4 * i, sizeof(four));
                shorts[q] = _mm256_add_epi16(
                    shorts[q], _mm256_maddubs_epi16(codes[i], _mm256_set1_epi32(four)));
            }
        }
        UNROLL for (int q = 0; q < queries_here; q++)
            sums[q] = _mm256_add_epi32(sums[q], _mm256_madd_epi16(shorts[q], ones));
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        __m256 sum = _mm256_cvtepi32_ps(sums[q]);
        __m256 value = _mm256_mul_ps(_mm256_sub_ps(sum, _mm256_set1_ps(queries[q].offset)),
                                     _mm256_set1_ps(queries[q].factor));
        /* max gives its second operand when one is NaN, so an old NaN stays; a new one is set. */
        __m256 broken = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
        maxima = _mm256_blendv_ps(_mm256_max_ps(value, maxima), value, broken);
    }
    return maxima;
}

/* Lanes of `half` that are not seen become -infinity. */
INLINE __m256 only_seen(__m256 half, uint32_t seen) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i chosen = _mm256_and_si256(_mm256_set1_epi32((int)seen), bits);
    __m256 mask = _mm256_castsi256_ps(_mm256_cmpeq_epi32(chosen, bits));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), half, mask);
}

INLINE __m256 estimate_eight(const uint8_t *half, uint32_t lines, const sketch_query *queries,
                             uint32_t query_count) {
    __m256 best = _mm256_set1_ps(-INFINITY);
    for (uint32_t q = 0; q < query_count; q += QUERY_BLOCK) switch (query_count - q) {
        case 1: best = estimate_half(half, lines, queries + q, 1, best); break;
        case 2: best = estimate_half(half, lines, queries + q, 2, best); break;
        case 3: best = estimate_half(half, lines, queries + q, 3, best); break;
        default: best = estimate_half(half, lines, queries + q, 4, best);
        }
    return best;
}

static float estimate_one(const sketch_run *run, const uint8_t *block,
                          float uppers[SKETCH_TOKENS]) {
    const uint32_t lines = sketch_dim(run->dim) / SKETCH_CHANNELS;
    const float *scales = (const float *)(block + lines * SKETCH_LINE_BYTES);
    __m256 best[2];
    UNROLL for (uint32_t i = 0; i < 2; i++) {
        __m256 value = estimate_eight(block + i * LANES * sizeof(float), lines, run->queries,
                                      run->query_count);
        __m256 scale = _mm256_load_ps(scales + i * LANES);
        __m256 upper = _mm256_mul_ps(_mm256_add_ps(value, _mm256_set1_ps(run->slack)), scale);
        _mm256_storeu_ps(uppers + i * LANES, only_seen(upper, run->seen >> i * LANES));
        best[i] = only_seen(_mm256_mul_ps(value, scale), run->seen >> i * LANES);
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(best[0], best[1], _CMP_UNORD_Q))) return NAN;
    __m256 top = _mm256_max_ps(best[0], best[1]);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

void estimate_avx2(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]) {
    const uint64_t bytes = sketch_block_bytes(run->dim);
    for (uint32_t i = 0; i < run->count; i++) {
        const char *next = (const char *)run->next[i];
        for (uint64_t at = 0; next && at < bytes; at += SKETCH_LINE_BYTES)
            _mm_prefetch(next + at, _MM_HINT_T0);
        best[i] = estimate_one(run, run->blocks[i], uppers[i]);
    }
}

void above_avx2(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,
                uint16_t *bits) {
    const __m256 border = _mm256_set1_ps(limit);
    for (uint32_t i = 0; i < count; i++) {
        __m256 low = _mm256_loadu_ps(values[i]), high = _mm256_loadu_ps(values[i] + LANES);
        int found = _mm256_movemask_ps(_mm256_cmp_ps(low, border, _CMP_NLT_UQ)) |
                    _mm256_movemask_ps(_mm256_cmp_ps(high, border, _CMP_NLT_UQ)) << LANES;
        bits[i] = (uint16_t)found;
    }
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int sketch_avx2_is_of_x86_64;
#endif
