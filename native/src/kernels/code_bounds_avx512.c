/* The bounds of encoded keys with AVX-512: 16 tokens in the 16 lanes, the least and the largest of
 * which are taken at the end only. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c,bmi2"))),       \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,bmi2")
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/code_bounds.h"
#include "kernels/rotate_avx512.h"

/* A block, of which `count` tokens are seen: the lanes of the others have the last one's. */
typedef struct seen_block {
    const uint8_t *lines;
    __m512i lanes;
    __m512 scale;
    float middle;
    int bits;
} seen_block;

/* Byte `byte` of each lane, or its low or high nibble. */
INLINE __m512 decoded(const seen_block *b, __m512i line, int shift, int mask) {
    __m512i code = _mm512_and_si512(_mm512_srli_epi32(line, shift), _mm512_set1_epi32(mask));
    __m512 step = _mm512_add_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(b->middle));
    return _mm512_mul_ps(step, b->scale);
}

/* 16 channels from `first` on, a multiple of 16. */
INLINE void decode_sixteen(const seen_block *b, uint32_t first, __m512 x[LANES]) {
    if (b->bits == 8) {
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i line = _mm512_load_si512(b->lines + (first / 4 + i) * 64);
            line = _mm512_permutexvar_epi32(b->lanes, line);
            UNROLL for (int k = 0; k < 4; k++) x[4 * i + k] = decoded(b, line, 8 * k, 255);
        }
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i line = _mm512_load_si512(b->lines + (first / 8 + i) * 64);
        line = _mm512_permutexvar_epi32(b->lanes, line);
        UNROLL for (int k = 0; k < 4; k++) {
            x[8 * i + k] = decoded(b, line, 8 * k, 15);
            x[8 * i + 4 + k] = decoded(b, line, 8 * k + 4, 15);
        }
    }
}

/* Lane i of the result: the least, or the largest, of the lanes of x[i]. */
#define ACROSS_LANES(name, better)                                                            \
    INLINE __m512 name(const __m512 x[LANES]) {                                               \
        __m512 two[8], four[4], eight[2];                                                     \
        UNROLL for (int i = 0; i < 8; i++)                                                    \
            two[i] = better(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]),                       \
                            _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));                      \
        UNROLL for (int i = 0; i < 4; i++) {                                                  \
            __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);   \
            four[i] = better(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),                      \
                             _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));                     \
        }                                                                                     \
        UNROLL for (int i = 0; i < 2; i++)                                                    \
            eight[i] = better(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),       \
                              _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));      \
        return better(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),                         \
                      _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));                        \
    }
ACROSS_LANES(least_of, _mm512_min_ps)
ACROSS_LANES(largest_of, _mm512_max_ps)

/* Of 16 channels, transformed but for their norm and signs: neither changes which is the least. */
INLINE void widen_sixteen(const __m512 *channels, uint32_t first, uint32_t dim, float norm,
                          bool begins, float *bounds) {
    const __mmask16 flips = (__mmask16)(sketch_signs(first / 64) >> first % 64);
    const __m512i sign = _mm512_maskz_set1_epi32(flips, INT32_MIN);
    const __m512 factor = _mm512_xor_ps(_mm512_set1_ps(norm), _mm512_castsi512_ps(sign));
    __m512 x[LANES];
    UNROLL for (int i = 0; i < LANES; i++) x[i] = channels[first + i];
    __m512 least = _mm512_mul_ps(least_of(x), factor);
    __m512 largest = _mm512_mul_ps(largest_of(x), factor);
    __m512 low = _mm512_min_ps(least, largest), high = _mm512_max_ps(least, largest);
    if (!begins) {
        low = _mm512_min_ps(low, _mm512_loadu_ps(bounds + first));
        high = _mm512_max_ps(high, _mm512_loadu_ps(bounds + dim + first));
    }
    _mm512_storeu_ps(bounds + first, low);
    _mm512_storeu_ps(bounds + dim + first, high);
}

/* The last steps of a block: of `parts` channels (a constant) at a time, `distance` apart. */
INLINE void end_parts(__m512 *channels, uint32_t distance, int parts) {
    for (uint32_t i = 0; i < distance; i++) {
        __m512 x[PARTS_MAX];
        UNROLL for (int p = 0; p < parts; p++) x[p] = channels[i + p * distance];
        transform(x, parts);
        UNROLL for (int p = 0; p < parts; p++) channels[i + p * distance] = x[p];
    }
}

static void end_transform(__m512 *channels, uint32_t size) {
    uint32_t distance = transform_far(channels, size);
    switch (size / distance) {
    case 1: break;
    case 2: end_parts(channels, distance, 2); break;
    case 4: end_parts(channels, distance, 4); break;
    default: end_parts(channels, distance, 8);
    }
}

static void block_bounds(const seen_block *b, uint32_t dim, bool begins, float *bounds) {
    __m512 channels[CHANNELS_MAX];
    for (uint32_t first = 0; first < dim; first += LANES) {
        __m512 x[LANES];
        decode_sixteen(b, first, x);
        transform(x, LANES);
        UNROLL for (int i = 0; i < LANES; i++) channels[first + i] = x[i];
    }
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        end_transform(channels + first, size);
        for (uint32_t at = first; at < first + size; at += LANES)
            widen_sixteen(channels, at, dim, 1 / sqrtf((float)size), begins, bounds);
    }
}

/* As code_bounds_encode(). */
INLINE void encode_bounds(const float *bounds, uint32_t dim, float step, int8_t *codes) {
    const __m512 steps = _mm512_set1_ps(step), one = _mm512_set1_ps(1);
    for (uint32_t d = 0; d < dim; d += LANES) {
        __m512 low = _mm512_loadu_ps(bounds + d), high = _mm512_loadu_ps(bounds + dim + d);
        __m512 below = _mm512_roundscale_ps(_mm512_div_ps(low, steps), _MM_FROUND_TO_NEG_INF);
        __m512 above = _mm512_roundscale_ps(_mm512_div_ps(high, steps), _MM_FROUND_TO_POS_INF);
        __mmask16 less = _mm512_cmp_ps_mask(_mm512_mul_ps(below, steps), low, _CMP_GT_OQ);
        __mmask16 more = _mm512_cmp_ps_mask(_mm512_mul_ps(above, steps), high, _CMP_LT_OQ);
        below = _mm512_mask_sub_ps(below, less, below, one);
        above = _mm512_mask_add_ps(above, more, above, one);
        _mm_storeu_si128((__m128i *)(codes + d),
                         _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(below)));
        _mm_storeu_si128((__m128i *)(codes + dim + d),
                         _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(above)));
    }
}

float code_digest_avx512(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes) {
    const __m512i numbers =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    seen_block b = {.middle = 0.5f - (float)(1u << (form->bits - 1)), .bits = (int)form->bits};
    float bounds[2 * CODE_DIM_MAX];
    if (form->dim % LANES) return code_digest_serial(form, piece, tokens, codes);
    for (uint32_t first = 0; first < tokens; first += CODE_TOKENS) {
        uint32_t count = tokens - first < CODE_TOKENS ? tokens - first : CODE_TOKENS;
        __m256i halves = _mm256_loadu_si256((const __m256i *)(piece.scales + first));
        b.lanes = _mm512_min_epi32(numbers, _mm512_set1_epi32((int)count - 1));
        b.scale = _mm512_permutexvar_ps(b.lanes, _mm512_cvtph_ps(halves));
        b.lines = piece.blocks + first / CODE_TOKENS * code_block_bytes(form);
        if (_mm512_cmp_ps_mask(b.scale, b.scale, _CMP_UNORD_Q)) {
            memset(codes, 0, 2 * form->dim);
            return NAN;
        }
        block_bounds(&b, form->dim, first == 0, bounds);
    }
    __m512 largest = _mm512_setzero_ps();
    for (uint32_t i = 0; i < 2 * form->dim; i += LANES)
        largest = _mm512_max_ps(largest, _mm512_abs_ps(_mm512_loadu_ps(bounds + i)));
    float step = code_bounds_step(_mm512_reduce_max_ps(largest));
    encode_bounds(bounds, form->dim, step, codes);
    return step;
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int code_bounds_avx512_is_of_x86_64;
#endif
