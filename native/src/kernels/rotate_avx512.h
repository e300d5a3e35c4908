/* Rotations with AVX-512, as sketches and codes begin: a lane is a token, and a vector a channel of
 * 16 of them, so that the transform only adds vectors. To be included where the target is raised.
 */
#pragma once

#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/sketch.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { LANES = 16, CHANNELS_MAX = 1024, PARTS_MAX = 8 };

typedef struct encoding {
    const char *rows[LANES];     /* a key each; where there are fewer, the last one again */
    uint32_t dim;
    __m512 channels[CHANNELS_MAX];
} encoding;

/* 8 words of 4 bytes of each row, 32 bytes that begin at `at`, as vectors of the same word of all.
 * Signs change where `flips`, of one row, has bits. */
INLINE void turn_words(const encoding *e, size_t at, __m256i flips, __m512i words[8]) {
    const __m512i twice = _mm512_broadcast_i64x4(flips);
    __m512i x[8], pairs[8], fours[8];
    UNROLL for (int i = 0; i < 8; i++) {
        const char *const *row = e->rows + i % 4 + i / 4 * 8;
        __m256i low = _mm256_loadu_si256((const __m256i *)(row[0] + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(row[4] + at));
        x[i] = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), twice);
    }
    UNROLL for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
        fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        words[i] = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0x88);
        words[4 + i] = _mm512_shuffle_i32x4(fours[i], fours[4 + i], 0xdd);
    }
}

/* The lower half of each word. */
INLINE __m512 low_half(int dtype, __m512i words) {
    if (dtype == KERNEL_FLOAT16) return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

INLINE __m512 high_half(int dtype, __m512i words) {
    if (dtype == KERNEL_FLOAT16) return low_half(dtype, _mm512_srli_epi32(words, 16));
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}

/* Channels from a multiple of 16 on, 16 of them. */
INLINE void load_channels(int dtype, const encoding *e, uint32_t first, __m512 x[LANES]) {
    const __mmask16 flips = (__mmask16)(sketch_signs(first / 64) >> first % 64);
    __m512i words[8];
    if (dtype == KERNEL_FLOAT32) {
        UNROLL for (int half = 0; half < 2; half++) {
            __mmask8 here = (__mmask8)(flips >> 8 * half);
            turn_words(e, (first + 8 * half) * sizeof(float),
                       _mm256_maskz_set1_epi32(here, INT32_MIN), words);
            UNROLL for (int i = 0; i < 8; i++) x[8 * half + i] = _mm512_castsi512_ps(words[i]);
        }
        return;
    }
    turn_words(e, first * sizeof(uint16_t), _mm256_maskz_set1_epi16(flips, INT16_MIN), words);
    UNROLL for (int i = 0; i < 8; i++) {
        x[2 * i] = low_half(dtype, words[i]);
        x[2 * i + 1] = high_half(dtype, words[i]);
    }
}

/* Of `count` vectors, a constant; yet to be divided by the root of their number. */
INLINE void transform(__m512 *x, int count) {
    UNROLL for (int half = 1; half < count; half *= 2) UNROLL for (int i = 0; i < count; i++)
        if (!(i & half)) {
            __m512 a = x[i], b = x[i + half];
            x[i] = _mm512_add_ps(a, b);
            x[i + half] = _mm512_sub_ps(a, b);
        }
}

/* By memory, until no more than PARTS_MAX channels are left to add; returns their distance. */
static inline uint32_t transform_far(__m512 *channels, uint32_t size) {
    uint32_t distance = LANES;
    for (; size / distance > PARTS_MAX; distance *= 2)
        for (uint32_t first = 0; first < size; first += 2 * distance)
            for (uint32_t i = first; i < first + distance; i++) {
                __m512 a = channels[i], b = channels[i + distance];
                channels[i] = _mm512_add_ps(a, b);
                channels[i + distance] = _mm512_sub_ps(a, b);
            }
    return distance;
}
