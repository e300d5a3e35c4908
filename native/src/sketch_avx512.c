/* Sketches with AVX-512: 16 tokens in the 16 lanes, so that no sum is ever taken across them. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))),            \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c")
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "sketch.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 16, QUERY_BLOCK = 4, PREFETCH_BYTES = 4096 };

/* ---- encode ---- */

INLINE __m512 load_lanes(int dtype, const char *source) {
    if (dtype == KERNEL_FLOAT32) return _mm512_loadu_ps(source);
    __m256i halves = _mm256_loadu_si256((const __m256i *)source);
    if (dtype == KERNEL_FLOAT16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Neighbours at distance half, within 16 lanes: sums to the lower, differences to the upper. */
INLINE __m512 butterfly(__m512 x, int half) {
    __m512 other;
    if (half == 1) other = _mm512_permute_ps(x, 0xb1);
    else if (half == 2) other = _mm512_permute_ps(x, 0x4e);
    else if (half == 4) other = _mm512_shuffle_f32x4(x, x, 0xb1);
    else other = _mm512_shuffle_f32x4(x, x, 0x4e);
    const __mmask16 upper = half == 1 ? 0xaaaa : half == 2 ? 0xcccc : half == 4 ? 0xf0f0 : 0xff00;
    return _mm512_mask_sub_ps(_mm512_add_ps(x, other), upper, other, x);
}

INLINE void transform(float *vector, uint32_t size) {
    __m512 norm = _mm512_set1_ps(1 / sqrtf((float)size));
    for (uint32_t half = LANES; half < size; half *= 2)
        for (uint32_t first = 0; first < size; first += 2 * half)
            for (uint32_t i = first; i < first + half; i += LANES) {
                __m512 a = _mm512_load_ps(vector + i), b = _mm512_load_ps(vector + i + half);
                _mm512_store_ps(vector + i, _mm512_add_ps(a, b));
                _mm512_store_ps(vector + i + half, _mm512_sub_ps(a, b));
            }
    for (uint32_t i = 0; i < size; i += LANES) {
        __m512 x = _mm512_load_ps(vector + i);
        x = butterfly(butterfly(butterfly(butterfly(x, 1), 2), 4), 8);
        _mm512_store_ps(vector + i, _mm512_mul_ps(x, norm));
    }
}

/* Byte j of the result: the codes of channels j, 4 + j, 8 + j, 12 + j. */
INLINE uint32_t pack_codes(__m512i codes) {
    const __m512i shifts = _mm512_set_epi32(6, 6, 6, 6, 4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0);
    codes = _mm512_sllv_epi32(codes, shifts);
    __m256i pair = _mm256_or_si256(_mm512_castsi512_si256(codes),
                                   _mm512_extracti64x4_epi64(codes, 1));
    __m128i quad = _mm_or_si128(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
    return (uint32_t)_mm_cvtsi128_si32(_mm_cvtepi32_epi8(quad));
}

/* dim floats, and zeros to a multiple of 16. */
INLINE float encode_lanes(const float *turned, uint32_t dim, uint8_t *codes) {
    __m512 squares = _mm512_setzero_ps(), products = _mm512_setzero_ps();
    for (uint32_t d = 0; d < dim; d += LANES) {
        __m512 x = _mm512_load_ps(turned + d);
        squares = _mm512_fmadd_ps(x, x, squares);
    }
    float length = _mm512_reduce_add_ps(squares);
    __m512 step = _mm512_set1_ps(sqrtf(length / (float)dim));
    __m512 minus = _mm512_sub_ps(_mm512_setzero_ps(), step);
    const __m512i one = _mm512_set1_epi32(1);
    for (uint32_t d = 0; d < dim; d += LANES) {
        __m512 x = _mm512_load_ps(turned + d);
        __m512i code = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(x, minus, _CMP_GE_OQ), one);
        code = _mm512_mask_add_epi32(
            code, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), code, one);
        code = _mm512_mask_add_epi32(code, _mm512_cmp_ps_mask(x, step, _CMP_GE_OQ), code, one);
        __m512 level = _mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(1.5f));
        products = _mm512_fmadd_ps(x, level, products);
        uint32_t packed = pack_codes(code);
        if (dim - d < LANES) packed &= sketch_last_channels(dim - d);
        memcpy(codes + d / LANES * SKETCH_LINE_BYTES, &packed, sizeof(packed));
    }
    if (!isfinite(length)) return NAN;
    return length > 0 ? length / _mm512_reduce_add_ps(products) : 0;
}

INLINE void encode_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, uint8_t *sketch) {
    _Alignas(64) float turned[4096];
    const size_t element = dtype == KERNEL_FLOAT32 ? 4 : 2;
    uint32_t whole = dim / LANES * LANES, padded = sketch_dim(dim);
    for (uint32_t t = 0; t < tokens; t++) {
        const char *key = keys + t * stride_bytes;
        for (uint32_t d = 0; d < whole; d += LANES) {
            __mmask16 flips = (__mmask16)(sketch_signs(d / 64) >> d % 64);
            __m512i x = _mm512_castps_si512(load_lanes(dtype, key + d * element));
            x = _mm512_mask_xor_epi32(x, flips, x, _mm512_set1_epi32((int)0x80000000));
            _mm512_store_ps(turned + d, _mm512_castsi512_ps(x));
        }
        if (whole < padded) {
            memset(turned + whole, 0, LANES * sizeof(float));
            kernels_serial.to_float(dtype, key + whole * element, dim - whole, turned + whole);
            for (uint32_t d = whole; d < dim; d++)
                if (sketch_signs(d / 64) >> d % 64 & 1) turned[d] = -turned[d];
        }
        for (uint32_t first = 0; first < dim;) {
            uint32_t size = 1u << (31 - __builtin_clz(dim - first));
            if (size >= LANES) transform(turned + first, size);
            else sketch_transform(turned + first, size);
            first += size;
        }
        uint8_t *block = sketch + t / SKETCH_TOKENS * sketch_block_bytes(dim);
        float scale = encode_lanes(turned, dim, block + t % SKETCH_TOKENS * 4);
        memcpy(block + sketch_block_bytes(dim) - SKETCH_LINE_BYTES +
               t % SKETCH_TOKENS * sizeof(float), &scale, sizeof(scale));
    }
}

void sketch_avx512(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *sketch) {
    if (tokens % SKETCH_TOKENS) memset(sketch, 0, sketch_bytes(tokens, dim));
    if (dtype == KERNEL_BFLOAT16)
        encode_as(KERNEL_BFLOAT16, keys, stride_bytes, tokens, dim, sketch);
    else if (dtype == KERNEL_FLOAT16)
        encode_as(KERNEL_FLOAT16, keys, stride_bytes, tokens, dim, sketch);
    else
        encode_as(KERNEL_FLOAT32, keys, stride_bytes, tokens, dim, sketch);
}

/* ---- estimate ---- */

/* Raises the maxima of 16 tokens by 1 to 4 queries, before their scales. */
INLINE __m512 estimate_block(const uint8_t *block, uint32_t lines, const sketch_query *queries,
                             int queries_here, __m512 maxima) {
    const __m512i low = _mm512_set1_epi8(3);
    __m512i sums[QUERY_BLOCK][2];
    UNROLL for (int q = 0; q < queries_here; q++) sums[q][0] = sums[q][1] = _mm512_setzero_si512();
    for (uint32_t line = 0; line < lines; line++) {
        __m512i packed = _mm512_load_si512(block + line * SKETCH_LINE_BYTES), codes[4];
        codes[0] = _mm512_and_si512(packed, low);
        codes[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 2), low);
        codes[2] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
        codes[3] = _mm512_and_si512(_mm512_srli_epi16(packed, 6), low);
        UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < 4; i++) {
            int32_t four;
            memcpy(&four, queries[q].codes + line * SKETCH_CHANNELS + 4 * i, sizeof(four));
            sums[q][i % 2] =
                _mm512_dpbusd_epi32(sums[q][i % 2], codes[i], _mm512_set1_epi32(four));
        }
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sums[q][0], sums[q][1]));
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(sum, _mm512_set1_ps(queries[q].offset)),
                                     _mm512_set1_ps(queries[q].factor));
        /* max gives its second operand when one is NaN, so an old NaN stays; a new one is set. */
        __mmask16 broken = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        maxima = _mm512_mask_mov_ps(_mm512_max_ps(value, maxima), broken, value);
    }
    return maxima;
}

sketch_estimate estimate_avx512(const void *block, uint32_t dim, const sketch_query *queries,
                                uint32_t query_count, uint32_t seen, float threshold,
                                float maxima[16]) {
    uint32_t lines = sketch_dim(dim) / SKETCH_CHANNELS;
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (uint32_t line = 0; line <= lines; line++)
        _mm_prefetch((const char *)((uintptr_t)block + PREFETCH_BYTES + line * SKETCH_LINE_BYTES),
                     _MM_HINT_T0);
    for (uint32_t q = 0; q < query_count; q += QUERY_BLOCK) switch (query_count - q) {
        case 1: best = estimate_block(block, lines, queries + q, 1, best); break;
        case 2: best = estimate_block(block, lines, queries + q, 2, best); break;
        case 3: best = estimate_block(block, lines, queries + q, 3, best); break;
        default: best = estimate_block(block, lines, queries + q, 4, best);
        }
    best = _mm512_mul_ps(best, _mm512_load_ps((const uint8_t *)block + lines * SKETCH_LINE_BYTES));
    _mm512_storeu_ps(maxima, best);
    __mmask16 broken = _mm512_cmp_ps_mask(best, best, _CMP_UNORD_Q) & (__mmask16)seen;
    sketch_estimate made = {.best = _mm512_mask_reduce_max_ps((__mmask16)seen, best)};
    if (broken) made.best = NAN;
    made.passing = _mm512_mask_cmp_ps_mask((__mmask16)seen, best, _mm512_set1_ps(threshold),
                                           _CMP_NLT_UQ);
    return made;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int sketch_avx512_is_of_x86_64;
#endif
