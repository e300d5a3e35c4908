/* Rotations with AVX2, of one row, as sketches and codes begin. To be included where the target is
 * raised. */
#pragma once

#include <immintrin.h>
#include <math.h>

#include "kernels/sketch.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 8 };

/* Neighbours at distance half, within 8 lanes: sums to the lower ones, differences to the upper. */
INLINE __m256 butterfly(__m256 x, int half) {
    __m256 other;
    if (half == 1) other = _mm256_permute_ps(x, 0xb1);
    else if (half == 2) other = _mm256_permute_ps(x, 0x4e);
    else other = _mm256_permute2f128_ps(x, x, 1);
    __m256 sum = _mm256_add_ps(x, other), difference = _mm256_sub_ps(other, x);
    if (half == 1) return _mm256_blend_ps(sum, difference, 0xaa);
    if (half == 2) return _mm256_blend_ps(sum, difference, 0xcc);
    return _mm256_blend_ps(sum, difference, 0xf0);
}

/* Of a block of at least 8 numbers; yet to be multiplied with its norm. */
INLINE void transform(float *vector, uint32_t size) {
    for (uint32_t i = 0; i < size; i += LANES) {
        __m256 x = _mm256_load_ps(vector + i);
        _mm256_store_ps(vector + i, butterfly(butterfly(butterfly(x, 1), 2), 4));
    }
    for (uint32_t half = LANES; half < size; half *= 2)
        for (uint32_t first = 0; first < size; first += 2 * half)
            for (uint32_t i = first; i < first + half; i += LANES) {
                __m256 a = _mm256_load_ps(vector + i), b = _mm256_load_ps(vector + i + half);
                _mm256_store_ps(vector + i, _mm256_add_ps(a, b));
                _mm256_store_ps(vector + i + half, _mm256_sub_ps(a, b));
            }
}

/* The vector has room to a multiple of 8. */
INLINE void flip_signs(float *vector, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d += LANES) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i flips = _mm256_set1_epi32((int)(sketch_signs(d / 64) >> d % 64));
        flips = _mm256_slli_epi32(_mm256_srlv_epi32(flips, lane), 31);
        __m256 x = _mm256_load_ps(vector + d);
        _mm256_store_ps(vector + d, _mm256_xor_ps(x, _mm256_castsi256_ps(flips)));
    }
}
