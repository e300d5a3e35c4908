/* The bounds of encoded keys with AVX-512: the transform has 16 tokens in its 16 lanes, and two
 * channels in each; then a vector is a token, and the least and the largest are taken. */
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

enum { LINE_CHANNELS = 4, GROUP_LINES = 16, GROUP_CHANNELS = 64 };

/* A block, of which `count` tokens are seen: the lanes of the others have the last one's. */
typedef struct seen_block {
    const uint8_t *lines;
    __m512i lanes;
    __m256i scales;              /* as they lie */
    uint32_t count, dim;
    int bits;
} seen_block;

/* Of 64 channels: those whose number % 4 is c, in order, in vector c. */
typedef struct group_bounds {
    __m512 least[LINE_CHANNELS], largest[LINE_CHANNELS];
    __m512 norms;                /* the same of all four vectors */
    __mmask16 flips[LINE_CHANNELS]; /* those that change their sign */
} group_bounds;

INLINE uint32_t size_from(uint32_t dim, uint32_t first) {
    return 1u << (31 - __builtin_clz(dim - first));
}

/* A lane has the four channels of a line. */
INLINE __m512 norms_of(uint32_t dim, uint32_t group) {
    uint32_t first = 0, size = size_from(dim, 0);
    while (first + size <= group * GROUP_CHANNELS) {
        first += size;
        size = size_from(dim, first);
    }
    __m512 norms = _mm512_set1_ps(1 / sqrtf((float)size));
    for (first += size; first < dim && first < (group + 1) * GROUP_CHANNELS; first += size) {
        size = size_from(dim, first);
        uint32_t lane = first % GROUP_CHANNELS / LINE_CHANNELS;
        norms = _mm512_mask_mov_ps(norms, (__mmask16)(0xffffu << lane),
                                   _mm512_set1_ps(1 / sqrtf((float)size)));
    }
    return norms;
}

/* All groups, before any token is seen. */
static void begin_groups(uint32_t dim, group_bounds *bounds) {
    for (uint32_t group = 0; group * GROUP_CHANNELS < dim; group++) {
        const uint64_t signs = sketch_signs(group);
        bounds[group].norms = norms_of(dim, group);
        for (int c = 0; c < LINE_CHANNELS; c++)
            bounds[group].flips[c] = (__mmask16)_pext_u64(signs, 0x1111111111111111ull << c);
    }
}

/* Of some tokens, which are yet to be multiplied with `unit`, norms and signs. */
INLINE void widen_group(const __m512 least[4], const __m512 largest[4], float unit, bool begins,
                        group_bounds *bounds) {
    const __m512 factors = _mm512_mul_ps(bounds->norms, _mm512_set1_ps(unit));
    UNROLL for (int c = 0; c < LINE_CHANNELS; c++) {
        const __m512i sign = _mm512_maskz_set1_epi32(bounds->flips[c], INT32_MIN);
        const __m512 factor = _mm512_xor_ps(factors, _mm512_castsi512_ps(sign));
        __m512 a = _mm512_mul_ps(least[c], factor), b = _mm512_mul_ps(largest[c], factor);
        __m512 low = _mm512_min_ps(a, b), high = _mm512_max_ps(a, b);
        bounds->least[c] = begins ? low : _mm512_min_ps(low, bounds->least[c]);
        bounds->largest[c] = begins ? high : _mm512_max_ps(high, bounds->largest[c]);
    }
}

/* ---- by integers of 16 bits, which most blocks fit ---- */

/* What a token's sums are multiplied with: whole numbers, of which the largest has 15 bits. */
typedef struct weights {
    /* Of two numbers of 16 bits: both as they are, and the second one with the other sign. */
    _Alignas(64) int32_t sums[CODE_TOKENS], differences[CODE_TOKENS];
    float unit;                  /* a scale is weight * unit */
} weights;

/* False if a scale is too small beside the largest one for its bits to be kept. */
INLINE bool weigh(const seen_block *b, weights *made) {
    const __m256i one = _mm256_set1_epi16(1), hidden = _mm256_set1_epi16(0x400);
    __m256i exponents = _mm256_max_epu16(_mm256_srli_epi16(b->scales, 10), one);
    __m256i mantissas = _mm256_and_si256(b->scales, _mm256_set1_epi16(0x3ff));
    __mmask16 normal = _mm256_cmpge_epu16_mask(b->scales, hidden);
    mantissas = _mm256_mask_add_epi16(mantissas, normal, mantissas, hidden);
    __mmask16 some = _mm256_test_epi16_mask(mantissas, mantissas);
    __m512i wide = _mm512_maskz_cvtepi16_epi32(some, exponents);
    int lowest = _mm512_reduce_max_epi32(wide) - 4;
    __m256i shifts = _mm256_sub_epi16(exponents, _mm256_set1_epi16((short)lowest));
    if (_mm256_movepi16_mask(shifts) & some) return false;
    __m512i x = _mm512_cvtepu16_epi32(_mm256_sllv_epi16(mantissas, shifts));
    __m512i upper = _mm512_slli_epi32(x, 16);
    _mm512_store_si512(made->sums, _mm512_or_si512(upper, x));
    _mm512_store_si512(made->differences,
                       _mm512_or_si512(_mm512_sub_epi32(_mm512_setzero_si512(), upper), x));
    made->unit = _mm512_cvtss_f32(
        _mm512_castsi512_ps(_mm512_set1_epi32((lowest - 25 + 127) << 23)));
    return true;
}

/* Of `count` vectors, a constant. */
INLINE void transform_words(__m512i *x, int count) {
    UNROLL for (int half = 1; half < count; half *= 2) UNROLL for (int i = 0; i < count; i++)
        if (!(i & half)) {
            __m512i a = x[i], b = x[i + half];
            x[i] = _mm512_add_epi16(a, b);
            x[i + half] = _mm512_sub_epi16(a, b);
        }
}

INLINE __m512i load_line(const seen_block *b, uint32_t line) {
    __m512i its = _mm512_load_si512(b->lines + (size_t)line * 64);
    return b->count == CODE_TOKENS ? its : _mm512_permutexvar_epi32(b->lanes, its);
}

/* Codes of 16 channels from `first` on: of each four, two vectors of two of them. */
INLINE void load_words(const seen_block *b, uint32_t first, __m512i x[8]) {
    const __m512i byte = _mm512_set1_epi16(255), low = _mm512_set1_epi16(15);
    if (b->bits == 8) {
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i line = load_line(b, first / 4 + i);
            x[2 * i] = _mm512_and_si512(line, byte);
            x[2 * i + 1] = _mm512_srli_epi16(line, 8);
        }
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i line = load_line(b, first / 8 + i);
        x[4 * i] = _mm512_and_si512(line, low);
        x[4 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(line, 8), low);
        x[4 * i + 2] = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
        x[4 * i + 3] = _mm512_srli_epi16(line, 12);
    }
}

INLINE void end_words(__m512i *words, uint32_t distance, int parts) {
    for (uint32_t i = 0; i < distance; i++) {
        __m512i x[PARTS_MAX];
        UNROLL for (int p = 0; p < parts; p++) x[p] = words[i + p * distance];
        transform_words(x, parts);
        UNROLL for (int p = 0; p < parts; p++) words[i + p * distance] = x[p];
    }
}

/* A block of the transform, of which eights are made; what is left is within vectors. Of codes the
 * sums are by 2^(bits - 1) - 0.5 too large in each of them, which only the first channel has. */
INLINE void transform_block(__m512i *words, uint32_t size, int bits) {
    uint32_t vectors = size / 2, distance = 8;
    for (; vectors / distance > PARTS_MAX; distance *= 2)
        for (uint32_t first = 0; first < vectors; first += 2 * distance)
            end_words(words + first, distance, 2);
    switch (vectors / distance) {
    case 1: break;
    case 2: end_words(words, distance, 2); break;
    case 4: end_words(words, distance, 4); break;
    default: end_words(words, distance, 8);
    }
    const uint32_t excess = size / 4 * ((1u << bits) - 1);
    words[0] = _mm512_sub_epi16(words[0], _mm512_set1_epi16((short)excess));
}

/* Rows of 16 words of 4 bytes to columns. */
INLINE void turn_sixteen(__m512i x[LANES]) {
    __m512i a[LANES], b[LANES];
    UNROLL for (int i = 0; i < LANES; i += 2) {
        a[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
        b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i c = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        __m512i d = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        __m512i e = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        __m512i f = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        x[i] = _mm512_shuffle_i32x4(c, d, 0x88);
        x[4 + i] = _mm512_shuffle_i32x4(e, f, 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
        x[12 + i] = _mm512_shuffle_i32x4(e, f, 0xdd);
    }
}

/* The last step of the transform, and the product with the weights, at once. */
INLINE void bound_words(const __m512i *words, const weights *w, __m512 least[2],
                        __m512 largest[2]) {
    __m512i x[LANES], low[2], high[2];
    UNROLL for (int i = 0; i < LANES; i++) x[i] = words[2 * i];
    turn_sixteen(x);
    UNROLL for (int t = 0; t < LANES; t++) {
        const __m512i y[2] = {_mm512_madd_epi16(x[t], _mm512_set1_epi32(w->sums[t])),
                              _mm512_madd_epi16(x[t], _mm512_set1_epi32(w->differences[t]))};
        UNROLL for (int i = 0; i < 2; i++) {
            low[i] = t ? _mm512_min_epi32(low[i], y[i]) : y[i];
            high[i] = t ? _mm512_max_epi32(high[i], y[i]) : y[i];
        }
    }
    UNROLL for (int i = 0; i < 2; i++) {
        least[i] = _mm512_cvtepi32_ps(low[i]);
        largest[i] = _mm512_cvtepi32_ps(high[i]);
    }
}

INLINE void bound_by_words(int bits, const seen_block *b, const weights *w, bool begins,
                           group_bounds *bounds) {
    __m512i words[(CODE_DIM_MAX + GROUP_CHANNELS) / 2];
    for (uint32_t first = 0; first < b->dim; first += LANES) {
        load_words(b, first, words + first / 2);
        transform_words(words + first / 2, 8);
    }
    for (uint32_t first = 0, size; first < b->dim; first += size) {
        size = size_from(b->dim, first);
        transform_block(words + first / 2, size, bits);
    }
    for (uint32_t i = b->dim / 2; i % (GROUP_CHANNELS / 2); i++)
        words[i] = _mm512_setzero_si512();
    for (uint32_t group = 0; group * GROUP_CHANNELS < b->dim; group++) {
        const __m512i *its = words + group * GROUP_CHANNELS / 2;
        __m512 least[LINE_CHANNELS], largest[LINE_CHANNELS], low[2], high[2];
        UNROLL for (int odd = 0; odd < 2; odd++) {
            bound_words(its + odd, w, low, high);
            UNROLL for (int i = 0; i < 2; i++) {
                least[odd + 2 * i] = low[i];
                largest[odd + 2 * i] = high[i];
            }
        }
        widen_group(least, largest, w->unit, begins, bounds + group);
    }
}

/* ---- by floats, for all others ---- */

/* 2 * code + 1 - 2^bits, of byte `byte` of each lane, or its low or high nibble. */
INLINE __m512 whole(__m512i line, int shift, int mask) {
    __m512i code = _mm512_and_si512(_mm512_srli_epi32(line, shift), _mm512_set1_epi32(mask));
    code = _mm512_add_epi32(_mm512_slli_epi32(code, 1), _mm512_set1_epi32(-mask));
    return _mm512_cvtepi32_ps(code);
}

/* 16 channels from `first` on, a multiple of 16. */
INLINE void load_sixteen(const seen_block *b, uint32_t first, __m512 x[LANES]) {
    if (b->bits == 8) {
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i line = load_line(b, first / 4 + i);
            UNROLL for (int k = 0; k < 4; k++) x[4 * i + k] = whole(line, 8 * k, 255);
        }
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i line = load_line(b, first / 8 + i);
        UNROLL for (int k = 0; k < 4; k++) {
            x[8 * i + k] = whole(line, 8 * k, 15);
            x[8 * i + 4 + k] = whole(line, 8 * k + 4, 15);
        }
    }
}

static void transform_from(__m512 *channels, uint32_t size, uint32_t distance) {
    for (; distance < size; distance *= 2)
        for (uint32_t first = 0; first < size; first += 2 * distance)
            for (uint32_t i = first; i < first + distance; i++) {
                __m512 a = channels[i], b = channels[i + distance];
                channels[i] = _mm512_add_ps(a, b);
                channels[i + distance] = _mm512_sub_ps(a, b);
            }
}

/* All products are with half a scale, of its own lane. */
static void bound_by_floats(const seen_block *b, bool begins, group_bounds *bounds) {
    __m512 channels[CODE_DIM_MAX + GROUP_CHANNELS];
    const __m512 half_scale = _mm512_mul_ps(_mm512_cvtph_ps(b->scales), _mm512_set1_ps(0.5f));
    for (uint32_t first = 0; first < b->dim; first += LANES) {
        __m512 x[LANES];
        load_sixteen(b, first, x);
        transform(x, LANES);
        UNROLL for (int i = 0; i < LANES; i++) channels[first + i] = x[i];
    }
    for (uint32_t first = 0, size; first < b->dim; first += size) {
        size = size_from(b->dim, first);
        transform_from(channels + first, size, LANES);
    }
    for (uint32_t d = b->dim; d % GROUP_CHANNELS; d++) channels[d] = _mm512_setzero_ps();
    for (uint32_t group = 0; group * GROUP_CHANNELS < b->dim; group++) {
        __m512 least[LINE_CHANNELS], largest[LINE_CHANNELS];
        for (uint32_t c = 0; c < LINE_CHANNELS; c++) {
            __m512i x[LANES];
            for (uint32_t i = 0; i < LANES; i++) {
                __m512 its = channels[group * GROUP_CHANNELS + c + LINE_CHANNELS * i];
                x[i] = _mm512_castps_si512(_mm512_mul_ps(its, half_scale));
            }
            turn_sixteen(x);
            least[c] = largest[c] = _mm512_castsi512_ps(x[0]);
            for (uint32_t t = 1; t < LANES; t++) {
                least[c] = _mm512_min_ps(least[c], _mm512_castsi512_ps(x[t]));
                largest[c] = _mm512_max_ps(largest[c], _mm512_castsi512_ps(x[t]));
            }
        }
        widen_group(least, largest, 1, begins, bounds + group);
    }
}

/* ---- digests ---- */

/* As code_bounds_encode(), of a group: a code is a byte of its line's lane. */
INLINE __m512i encode_group(const __m512 bounds[LINE_CHANNELS], float inverse, bool upward) {
    __m512i codes = _mm512_setzero_si512();
    UNROLL for (int c = LINE_CHANNELS - 1; c >= 0; c--) {
        const __m512 margin = _mm512_set1_ps(upward ? CODE_BOUNDS_MARGIN : -CODE_BOUNDS_MARGIN);
        __m512 x = _mm512_mul_ps(bounds[c], _mm512_set1_ps(inverse));
        x = _mm512_add_ps(x, margin);
        __m512i code = upward ? _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_POS_INF |
                                                                _MM_FROUND_NO_EXC)
                              : _mm512_cvt_roundps_epi32(x, _MM_FROUND_TO_NEG_INF |
                                                                _MM_FROUND_NO_EXC);
        codes = _mm512_ternarylogic_epi32(_mm512_slli_epi32(codes, 8), code,
                                          _mm512_set1_epi32(255), 0xf8); /* a | (b & c) */
    }
    return codes;
}

static float encode_groups(const group_bounds *bounds, uint32_t dim, int8_t *codes) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 largest = zero;
    for (uint32_t group = 0; group * GROUP_CHANNELS < dim; group++)
        UNROLL for (int c = 0; c < LINE_CHANNELS; c++) {
            largest = _mm512_max_ps(largest, bounds[group].largest[c]);
            largest = _mm512_max_ps(largest, _mm512_sub_ps(zero, bounds[group].least[c]));
        }
    float step = code_bounds_step(_mm512_reduce_max_ps(largest)), inverse = 1 / step;
    for (uint32_t first = 0; first < dim; first += GROUP_CHANNELS) {
        const group_bounds *its = bounds + first / GROUP_CHANNELS;
        __mmask64 there = dim - first < GROUP_CHANNELS ? (1ull << (dim - first)) - 1 : ~0ull;
        _mm512_mask_storeu_epi8(codes + first, there, encode_group(its->least, inverse, false));
        _mm512_mask_storeu_epi8(codes + dim + first, there,
                                encode_group(its->largest, inverse, true));
    }
    return step;
}

/* Sums of codes, without the excess in one, stay within 16 bits. */
INLINE bool fits_words(const code_form *form) { return form->bits == 4 || form->dim < 1024; }

static void bound_block(const code_form *form, const seen_block *b, bool begins,
                        group_bounds *bounds) {
    weights w;
    if (!fits_words(form) || !weigh(b, &w)) bound_by_floats(b, begins, bounds);
    else if (form->bits == 8) bound_by_words(8, b, &w, begins, bounds);
    else bound_by_words(4, b, &w, begins, bounds);
}

float code_digest_avx512(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes) {
    const __m512i numbers =
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    seen_block b = {.dim = form->dim, .bits = (int)form->bits};
    group_bounds bounds[CODE_DIM_MAX / GROUP_CHANNELS];
    if (form->dim % LANES) return code_digest_serial(form, piece, tokens, codes);
    begin_groups(form->dim, bounds);
    for (uint32_t first = 0; first < tokens; first += CODE_TOKENS) {
        b.count = tokens - first < CODE_TOKENS ? tokens - first : CODE_TOKENS;
        b.lanes = _mm512_min_epi32(numbers, _mm512_set1_epi32((int)b.count - 1));
        b.scales = _mm256_permutexvar_epi16(
            _mm512_cvtepi32_epi16(b.lanes),
            _mm256_loadu_si256((const __m256i *)(piece.scales + first)));
        b.lines = piece.blocks + first / CODE_TOKENS * code_block_bytes(form);
        if (_mm256_cmpgt_epi16_mask(b.scales, _mm256_set1_epi16(0x7c00))) {
            memset(codes, 0, 2 * form->dim);
            return NAN;
        }
        bound_block(form, &b, first == 0, bounds);
    }
    return encode_groups(bounds, form->dim, codes);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int code_bounds_avx512_is_of_x86_64;
#endif
