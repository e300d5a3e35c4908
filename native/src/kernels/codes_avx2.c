/* Codes with AVX2: rows are encoded one by one; then 8 tokens of keys, or 8 channels of values, in
 * the 8 lanes, and products of 16 bits by 16 that are added in pairs. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/kernels.h"
#include "kernels/rotate_avx2.h"

enum { LINE_BYTES = 64, QUERY_BLOCK = 4, QUERY_ROOM = 16 };

/* ---- encode ---- */

/* A row before the last step of its rotation, which multiplies each block with its norm. */
typedef struct turned {
    _Alignas(32) float x[CODE_DIM_MAX];
    _Alignas(32) uint8_t codes[CODE_DIM_MAX];
    float norm[LANES];           /* of the channels behind the last 8 that are together */
    float largest;               /* of |x * norm|: not finite if one is not */
} turned;

INLINE float norm_of(uint32_t size) { return 1 / sqrtf((float)size); }

INLINE uint32_t block_of(uint32_t left) { return 1u << (31 - __builtin_clz(left)); }

/* Blocks of fewer than 8 channels. */
static void transform_few(float *x, uint32_t count, float *norm) {
    for (uint32_t first = 0, size; first < count; first += size) {
        size = block_of(count - first);
        for (uint32_t half = 1; half < size; half *= 2)
            for (uint32_t i = 0; i < size; i++)
                if (!(i & half)) {
                    float a = x[first + i], b = x[first + i + half];
                    x[first + i] = a + b;
                    x[first + i + half] = a - b;
                }
        for (uint32_t i = 0; i < size; i++) norm[first + i] = norm_of(size);
    }
}

INLINE __m256i bits_without_sign(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(INT32_MAX));
}

INLINE float largest_of(__m256i bits) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

/* Of the row in x, which is followed by zeros to a multiple of 16. */
INLINE void rotate(turned *row, uint32_t dim) {
    __m256i largest = _mm256_setzero_si256();
    const uint32_t together = dim / LANES * LANES;
    flip_signs(row->x, dim);
    for (uint32_t first = 0, size; first < together; first += size) {
        __m256i most = _mm256_setzero_si256();
        size = block_of(dim - first);
        transform(row->x + first, size);
        for (uint32_t i = first; i < first + size; i += LANES)
            most = _mm256_max_epi32(most, bits_without_sign(_mm256_load_ps(row->x + i)));
        __m256 y = _mm256_mul_ps(_mm256_castsi256_ps(most), _mm256_set1_ps(norm_of(size)));
        largest = _mm256_max_epi32(largest, _mm256_castps_si256(y));
    }
    memset(row->norm, 0, sizeof(row->norm));
    if (together < dim) {
        transform_few(row->x + together, dim - together, row->norm);
        __m256 y = _mm256_mul_ps(_mm256_load_ps(row->x + together), _mm256_loadu_ps(row->norm));
        largest = _mm256_max_epi32(largest, bits_without_sign(y));
    }
    row->largest = largest_of(largest);
}

static uint16_t scale_of(const code_form *form, float largest) {
    float scale = largest * (form->bits == 8 ? 1 / 128.0f : 1 / 8.0f);
    if (!isfinite(largest)) return 0x7e00;
    return _cvtss_sh(scale < 65504 ? scale : 65504, _MM_FROUND_TO_NEAREST_INT);
}

/* Codes of 8 bits of 8 channels; returns e of each. */
INLINE __m256 encode_eight(int bits, const float *x, __m256 factor, uint8_t *codes) {
    __m256 steps = _mm256_mul_ps(_mm256_load_ps(x), factor);
    __m256 below = _mm256_floor_ps(_mm256_min_ps(steps, _mm256_set1_ps(127)));
    below = _mm256_max_ps(below, _mm256_set1_ps(-128));
    __m256i whole = _mm256_cvtps_epi32(below);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                    _mm256_extracti128_si256(whole, 1));
    __m128i bytes = _mm_xor_si128(_mm_packs_epi16(words, words), _mm_set1_epi8(-128));
    _mm_storel_epi64((__m128i *)codes, bytes);
    const __m256 half = _mm256_set1_ps(0.5f), sixteenth = _mm256_set1_ps(1 / 16.0f);
    if (bits == 8) return _mm256_sub_ps(steps, _mm256_add_ps(below, half));
    below = _mm256_cvtepi32_ps(_mm256_and_si256(whole, _mm256_set1_epi32(~15)));
    return _mm256_fmsub_ps(steps, sixteenth, _mm256_fmadd_ps(below, sixteenth, half));
}

INLINE __m256 encode_channels(int bits, turned *row, uint32_t dim, float scale) {
    const uint32_t together = dim / LANES * LANES;
    const float more = bits == 4 ? 16 : 1;
    __m256 sums = _mm256_setzero_ps(), e;
    for (uint32_t first = 0, size; first < together; first += size) {
        size = block_of(dim - first);
        const __m256 factor = _mm256_set1_ps(norm_of(size) / scale * more);
        for (uint32_t i = first; i < first + size; i += LANES) {
            e = encode_eight(bits, row->x + i, factor, row->codes + i);
            sums = _mm256_fmadd_ps(e, e, sums);
        }
    }
    if (together < dim) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256 there = _mm256_castsi256_ps(
            _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(dim - together)), lane));
        __m256 factor = _mm256_div_ps(_mm256_loadu_ps(row->norm), _mm256_set1_ps(scale));
        factor = _mm256_mul_ps(factor, _mm256_set1_ps(more));
        e = encode_eight(bits, row->x + together, factor, row->codes + together);
        e = _mm256_and_ps(e, there);
        sums = _mm256_fmadd_ps(e, e, sums);
    }
    memset(row->codes + dim, 0, code_channels(dim) - dim);
    return sums;
}

/* A row that stands for zeros. */
static __m256 zero_channels(turned *row, uint32_t dim) {
    const uint32_t together = dim / LANES * LANES;
    __m256 sums = _mm256_setzero_ps(), y;
    memset(row->codes, 0, code_channels(dim));
    for (uint32_t first = 0, size; first < together; first += size) {
        size = block_of(dim - first);
        for (uint32_t i = first; i < first + size; i += LANES) {
            y = _mm256_mul_ps(_mm256_load_ps(row->x + i), _mm256_set1_ps(norm_of(size)));
            sums = _mm256_fmadd_ps(y, y, sums);
        }
    }
    if (together == dim) return sums;
    y = _mm256_mul_ps(_mm256_load_ps(row->x + together), _mm256_loadu_ps(row->norm));
    return _mm256_fmadd_ps(y, y, sums);
}

INLINE float sum_of(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

void code_encode_avx2(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                      uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales,
                      float *errors) {
    turned row;
    for (uint32_t i = 0, t = at; i < count; i++, t++) {
        __m256 sums;
        kernels_avx2.to_float(dtype, (const char *)rows + i * stride_bytes, form->dim, row.x);
        memset(row.x + form->dim, 0, (code_channels(form->dim) - form->dim) * sizeof(float));
        rotate(&row, form->dim);
        scales[t] = scale_of(form, row.largest);
        float scale = _cvtsh_ss(scales[t]);
        if (!(scale > 0)) sums = zero_channels(&row, form->dim);
        else if (form->bits == 8) sums = encode_channels(8, &row, form->dim, scale);
        else sums = encode_channels(4, &row, form->dim, scale);
        code_place(form, row.codes, t % CODE_TOKENS,
                   blocks + t / CODE_TOKENS * code_block_bytes(form));
        if (errors)
            errors[i] = isnan(scale) ? 0 : sqrtf(sum_of(sums)) * (scale > 0 ? scale : 1);
    }
}

/* ---- decode ---- */

void code_decode_avx2(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                      float *rows) {
    const float middle = 0.5f - (float)(1u << (form->bits - 1));
    uint8_t codes[CODE_DIM_MAX];
    for (uint32_t t = first; t < first + count; t++, rows += form->dim) {
        const float scale = _cvtsh_ss(piece.scales[t]);
        uint32_t d = 0;
        code_take(form, piece.blocks + t / CODE_TOKENS * code_block_bytes(form), t % CODE_TOKENS,
                  codes);
        for (; d + LANES <= form->dim; d += LANES) {
            __m128i eight = _mm_loadl_epi64((const __m128i *)(codes + d));
            __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
            x = _mm256_add_ps(x, _mm256_set1_ps(middle));
            _mm256_storeu_ps(rows + d, _mm256_mul_ps(x, _mm256_set1_ps(scale)));
        }
        for (; d < form->dim; d++) {
            float centred = (float)codes[d] + middle;
            rows[d] = centred * scale;
        }
    }
}

INLINE uint32_t at_most(uint32_t count, uint32_t limit) { return count < limit ? count : limit; }

/* Mostly all of a block, which takes a few instructions, where a call takes long. */
INLINE void copy_tokens(float *to, const float *from, uint32_t count) {
    if (count == CODE_TOKENS) memcpy(to, from, CODE_TOKENS * sizeof(float));
    else memcpy(to, from, count * sizeof(float));
}

/* ---- score ---- */

/* Words 128 * high + low of each 4 channels d: of d and d + 2, of d + 1 and d + 3. */
typedef int16_t query_words[CODE_DIM_MAX / 4][2][2];

static void make_words(const code_query *query, uint32_t channels, query_words words) {
    for (uint32_t d = 0; d < channels; d += 16) {
        __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(query->high + d)));
        __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(query->low + d)));
        __m256i x = _mm256_add_epi16(_mm256_slli_epi16(high, 7), low);
        /* Within 4 words: 0 2 1 3. */
        const __m256i order = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
        _mm256_storeu_si256((__m256i *)words[d / 4], _mm256_shuffle_epi8(x, order));
    }
}

/* Some queries of a call. */
typedef struct query_room {
    uint32_t count;
    int32_t middle[QUERY_ROOM];  /* (1 - 2^bits) * sum */
    float factor[QUERY_ROOM];
    query_words words[QUERY_ROOM];
} query_room;

static void make_room(const code_form *form, const code_query *queries, uint32_t count,
                      query_room *room) {
    room->count = at_most(count, QUERY_ROOM);
    for (uint32_t q = 0; q < room->count; q++) {
        room->middle[q] = (int32_t)((uint32_t)queries[q].sum * (1 - (1u << form->bits)));
        room->factor[q] = queries[q].factor;
        make_words(queries + q, code_channels(form->dim), room->words[q]);
    }
}

INLINE __m256i pair_of(const int16_t pair[2]) {
    int32_t both;
    memcpy(&both, pair, sizeof(both));
    return _mm256_set1_epi32(both);
}

/* Codes of 8 tokens, of a line: in words, two of each token at a time, in the order of words. */
INLINE int load_line(int bits, const uint8_t *half_line, __m256i codes[4]) {
    const __m256i all = _mm256_loadu_si256((const __m256i *)half_line);
    const __m256i byte = _mm256_set1_epi16(255), low = _mm256_set1_epi16(15);
    if (bits == 8) {
        codes[0] = _mm256_and_si256(all, byte);
        codes[1] = _mm256_srli_epi16(all, 8);
        return 2;
    }
    codes[0] = _mm256_and_si256(all, low);
    codes[1] = _mm256_and_si256(_mm256_srli_epi16(all, 8), low);
    codes[2] = _mm256_and_si256(_mm256_srli_epi16(all, 4), low);
    codes[3] = _mm256_srli_epi16(all, 12);
    return 4;
}

/* Logits of 8 tokens by 1 to 4 queries. As many lines as half a block has are asked for from `next`
 * on, unless it is NULL: a CPU waits for few at once. */
INLINE void score_half(int bits, const uint8_t *half, uint32_t channels, const query_room *room,
                       uint32_t first, int queries_here, __m256 scale, const uint8_t *next,
                       __m256 logits[QUERY_BLOCK]) {
    const uint32_t groups = (uint32_t)(bits == 8 ? 1 : 2), lines = channels / 4 / groups;
    __m256i sums[QUERY_BLOCK];
    UNROLL for (int q = 0; q < queries_here; q++) sums[q] = _mm256_setzero_si256();
    for (uint32_t line = 0; line < lines; line++) {
        __m256i codes[4];
        const int vectors = load_line(bits, half + line * LINE_BYTES, codes);
        if (next && line % 2 == 0) _mm_prefetch(next + line * (LINE_BYTES / 2), _MM_HINT_T0);
        UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < vectors; i++) {
            const int16_t *pair = room->words[first + q][line * groups + i / 2][i % 2];
            sums[q] = _mm256_add_epi32(sums[q], _mm256_madd_epi16(codes[i], pair_of(pair)));
        }
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        __m256i middle = _mm256_set1_epi32(room->middle[first + q]);
        __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(sums[q], 1), middle));
        x = _mm256_mul_ps(_mm256_mul_ps(x, _mm256_set1_ps(0.5f)), scale);
        logits[q] = _mm256_mul_ps(x, _mm256_set1_ps(room->factor[first + q]));
    }
}

/* Logits of 16 tokens by 1 to 4 queries, to rows of 16. */
INLINE void score_block_as(int bits, const uint8_t *block, uint32_t channels,
                           const uint16_t *scales, const query_room *room, uint32_t first,
                           int queries_here, const uint8_t *next, float (*logits)[CODE_TOKENS]) {
    const size_t half_bytes = (size_t)channels * (size_t)bits;
    UNROLL for (int half = 0; half < 2; half++) {
        const uint8_t *asked = next && first == 0 ? next + half * half_bytes : NULL;
        __m256 made[QUERY_BLOCK];
        __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + half * LANES)));
        score_half(bits, block + half * 32, channels, room, first, queries_here, scale, asked,
                   made);
        UNROLL for (int q = 0; q < queries_here; q++)
            _mm256_storeu_ps(logits[q] + half * LANES, made[q]);
    }
}

INLINE void score_block(int bits, const uint8_t *block, uint32_t channels, const uint16_t *scales,
                        const query_room *room, const uint8_t *next,
                        float (*logits)[CODE_TOKENS]) {
    for (uint32_t q = 0; q < room->count; q += QUERY_BLOCK, logits += QUERY_BLOCK)
        switch (room->count - q) {
        case 1: score_block_as(bits, block, channels, scales, room, q, 1, next, logits); break;
        case 2: score_block_as(bits, block, channels, scales, room, q, 2, next, logits); break;
        case 3: score_block_as(bits, block, channels, scales, room, q, 3, next, logits); break;
        default: score_block_as(bits, block, channels, scales, room, q, 4, next, logits);
        }
}

/* Of the block that has this token; the same one of the piece `next` is asked for. */
static void score_any(const code_form *form, code_piece piece, uint32_t token,
                      const query_room *room, const uint8_t *next,
                      float (*logits)[CODE_TOKENS]) {
    const uint32_t block = token / CODE_TOKENS, channels = code_channels(form->dim);
    const size_t at = block * code_block_bytes(form);
    const uint16_t *scales = piece.scales + block * CODE_TOKENS;
    if (next) next += at;
    if (form->bits == 8) score_block(8, piece.blocks + at, channels, scales, room, next, logits);
    else score_block(4, piece.blocks + at, channels, scales, room, next, logits);
}

static void ask_for(const void *next, size_t bytes) {
    for (size_t at = 0; next && at < bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)next + at, _MM_HINT_T0);
}

/* The scales of a piece, whose lines are asked for one by one; or nothing. */
static void ask_for_scales(const uint8_t *piece, const code_form *form, uint32_t tokens) {
    const size_t at = code_scales_offset(form, tokens);
    if (piece) ask_for(piece + at, code_bytes(form, tokens) - at);
}

void code_score_avx2(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                     const code_query *queries, uint32_t query_count, float *logits,
                     size_t logit_stride, const void *next) {
    query_room room;
    ask_for_scales(next, form, count);
    for (uint32_t q = 0; q < query_count; q += QUERY_ROOM) {
        make_room(form, queries + q, query_count - q, &room);
        for (uint32_t t = first, here; t < first + count; t += here) {
            float made[QUERY_ROOM][CODE_TOKENS];
            here = at_most(CODE_TOKENS - t % CODE_TOKENS, first + count - t);
            score_any(form, piece, t, &room, q == 0 ? next : NULL, made);
            for (uint32_t j = 0; j < room.count; j++)
                copy_tokens(logits + (q + j) * logit_stride + (t - first),
                            made[j] + t % CODE_TOKENS, here);
        }
    }
}

/* The largest of `count` logits of each query and `most`, NaN if one is. */
static float largest_logit(float (*logits)[CODE_TOKENS], uint32_t query_count, uint32_t count,
                           float most) {
    __m256 best = _mm256_set1_ps(most), broken = _mm256_cmp_ps(best, best, _CMP_UNORD_Q);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (uint32_t half = 0; half < count; half += LANES) {
        __m256 there = _mm256_castsi256_ps(
            _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(count - half)), lane));
        for (uint32_t q = 0; q < query_count; q++) {
            __m256 x = _mm256_loadu_ps(logits[q] + half);
            x = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, there);
            broken = _mm256_or_ps(broken, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
            best = _mm256_max_ps(x, best);
        }
    }
    if (_mm256_movemask_ps(broken)) return NAN;
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(best), _mm256_extractf128_ps(best, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

void code_score_best_avx2(const code_form *form, const code_piece *pieces,
                          const void *const *next, uint32_t count, uint32_t tokens,
                          const code_query *queries, uint32_t query_count, float *best) {
    query_room room;
    for (uint32_t i = 0; i < count; i++) best[i] = -INFINITY;
    for (uint32_t q = 0; q < query_count; q += QUERY_ROOM) {
        make_room(form, queries + q, query_count - q, &room);
        for (uint32_t i = 0; i < count; i++) {
            const uint8_t *ahead = q == 0 && next ? next[i] : NULL;
            ask_for_scales(ahead, form, tokens);
            for (uint32_t t = 0; t < tokens; t += CODE_TOKENS) {
                float made[QUERY_ROOM][CODE_TOKENS];
                score_any(form, pieces[i], t, &room, ahead, made);
                best[i] = largest_logit(made, room.count, at_most(tokens - t, CODE_TOKENS),
                                        best[i]);
            }
        }
    }
    for (uint32_t i = 0; i < count; i++) best[i] += 0.0f;
}

/* ---- accumulate ---- */

/* Weights of 16 tokens, of one query. */
typedef struct rounded {
    /* Of 4 tokens t: 2 * P of t and t + 2, of t + 1 and t + 3, for each lane: a product can take
     * them from memory, but not have them repeated. */
    __m256i pairs[8];
    int32_t middle;              /* what the sum begins with: (1 - 2^bits) * sum of P */
    float half_unit;
} rounded;

INLINE __m256 products_of(const uint16_t *scales, const float *weights) {
    __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
    return _mm256_mul_ps(_mm256_loadu_ps(weights), scale);
}

/* Of the tokens of a block; where some are not there, their weights become 0. */
INLINE void multiply_weights(const uint16_t *scales, uint32_t low, uint32_t count,
                             const float *weights, __m256 products[2]) {
    float row[CODE_TOKENS] = {0};
    uint16_t halves[CODE_TOKENS] = {0};
    if (count == CODE_TOKENS) {
        products[0] = products_of(scales, weights);
        products[1] = products_of(scales + LANES, weights + LANES);
        return;
    }
    memcpy(row + low, weights, count * sizeof(float));
    memcpy(halves + low, scales + low, count * sizeof(uint16_t));
    products[0] = products_of(halves, row);
    products[1] = products_of(halves + LANES, row + LANES);
}

/* The largest of 8 lanes, in all of them. */
INLINE __m256i largest_lane(__m256i bits) {
    bits = _mm256_max_epi32(bits, _mm256_permute2x128_si256(bits, bits, 1));
    bits = _mm256_max_epi32(bits, _mm256_shuffle_epi32(bits, 0x4e));
    return _mm256_max_epi32(bits, _mm256_shuffle_epi32(bits, 0xb1));
}

INLINE void round_weights(int bits, const uint16_t *scales, uint32_t low, uint32_t count,
                          const float *weights, rounded *made) {
    const __m256 whole = _mm256_set1_ps(16256), none = _mm256_set1_ps(INFINITY);
    __m256 products[2];
    multiply_weights(scales, low, count, weights, products);
    const __m256 largest = _mm256_castsi256_ps(largest_lane(
        _mm256_max_epi32(bits_without_sign(products[0]), bits_without_sign(products[1]))));
    const __m256 some = _mm256_cmp_ps(largest, _mm256_set1_ps(1e-30f), _CMP_NLT_UQ);
    const __m256 finite = _mm256_cmp_ps(largest, none, _CMP_LT_OQ);
    const __m256 inverse = _mm256_and_ps(_mm256_div_ps(whole, largest), some);
    __m128 unit = _mm_div_ss(_mm256_castps256_ps128(largest), _mm256_castps256_ps128(whole));
    unit = _mm_and_ps(_mm_mul_ss(unit, _mm_set_ss(0.5f)), _mm256_castps256_ps128(some));
    unit = _mm_blendv_ps(_mm_set_ss(NAN), unit, _mm256_castps256_ps128(finite));
    made->half_unit = _mm_cvtss_f32(unit);
    __m256i sums = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 2; i++) {
        __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(products[i], inverse));
        __m256i twice = _mm256_slli_epi32(rounded, 1);
        __m256i second = _mm256_slli_epi32(_mm256_shuffle_epi32(twice, 0xee), 16);
        __m256i pairs = _mm256_blend_epi16(twice, second, 0xaa);
        __m256i lower = _mm256_permute4x64_epi64(pairs, 0x00);
        __m256i upper = _mm256_permute4x64_epi64(pairs, 0xaa);
        sums = _mm256_add_epi32(sums, rounded);
        made->pairs[4 * i] = _mm256_shuffle_epi32(lower, 0x00);
        made->pairs[4 * i + 1] = _mm256_shuffle_epi32(lower, 0x55);
        made->pairs[4 * i + 2] = _mm256_shuffle_epi32(upper, 0x00);
        made->pairs[4 * i + 3] = _mm256_shuffle_epi32(upper, 0x55);
    }
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    uint32_t sum = (uint32_t)_mm_cvtsi128_si32(four);
    made->middle = (int32_t)(sum - (sum << bits));
}

/* Codes of 16 tokens by 8 channels: in words, in the order of pairs. */
INLINE void load_values(int bits, const uint8_t *half_line, size_t apart, __m256i codes[8]) {
    const int lines = bits == 8 ? 4 : 2;
    UNROLL for (int t = 0; t < lines; t++)
        (void)load_line(bits, half_line + t * apart, codes + t * 8 / lines);
}

INLINE __m256 sum_channels(const __m256i codes[8], const rounded *made, __m256 old) {
    __m256i sums[2] = {_mm256_set1_epi32(made->middle), _mm256_setzero_si256()};
    UNROLL for (int i = 0; i < 8; i++)
        sums[i % 2] = _mm256_add_epi32(sums[i % 2], _mm256_madd_epi16(codes[i], made->pairs[i]));
    __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[0], sums[1]));
    return _mm256_fmadd_ps(sum, _mm256_set1_ps(made->half_unit), old);
}

/* `next`, unless NULL, is asked for as the block is read: a CPU waits for few lines at once. */
INLINE void add_block(int bits, uint32_t dim, const uint8_t *block, const rounded *made,
                      uint32_t query_count, float *accumulator, const uint8_t *next) {
    const size_t apart = (size_t)code_channels(dim) * 4;
    for (uint32_t d = 0; d < dim; d += LANES) {
        __m256i codes[8];
        if (next && d % CODE_CHANNELS == 0)
            UNROLL for (int t = 0; t < bits / 2; t++)
                _mm_prefetch(next + t * apart + (size_t)d * 4, _MM_HINT_T0);
        load_values(bits, block + (size_t)d * 4, apart, codes);
        for (uint32_t q = 0; q < query_count; q++) {
            float *to = accumulator + (size_t)q * dim + d;
            if (dim - d >= LANES) {
                _mm256_storeu_ps(to, sum_channels(codes, made + q, _mm256_loadu_ps(to)));
            } else {
                float last[LANES] = {0};
                memcpy(last, to, (dim - d) * sizeof(float));
                _mm256_storeu_ps(last, sum_channels(codes, made + q, _mm256_loadu_ps(last)));
                memcpy(to, last, (dim - d) * sizeof(float));
            }
        }
    }
}

void code_accumulate_avx2(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                          const float *weights, size_t weight_stride, uint32_t query_count,
                          float *accumulator, const void *next) {
    rounded made[QUERY_ROOM];
    ask_for_scales(next, form, count);
    for (uint32_t q = 0; q < query_count; q += QUERY_ROOM)
        for (uint32_t t = first, here; t < first + count; t += here) {
            const uint32_t low = t % CODE_TOKENS, block = t / CODE_TOKENS;
            const uint32_t queries_here = at_most(query_count - q, QUERY_ROOM);
            const uint8_t *codes = piece.blocks + block * code_block_bytes(form);
            const uint8_t *ahead = next && q == 0 ? (const uint8_t *)next + (codes - piece.blocks)
                                                  : NULL;
            here = at_most(CODE_TOKENS - low, first + count - t);
            for (uint32_t j = 0; j < queries_here; j++)
                round_weights((int)form->bits, piece.scales + block * CODE_TOKENS, low, here,
                              weights + (q + j) * weight_stride + (t - first), made + j);
            float *to = accumulator + (size_t)q * form->dim;
            if (form->bits == 8) add_block(8, form->dim, codes, made, queries_here, to, ahead);
            else add_block(4, form->dim, codes, made, queries_here, to, ahead);
        }
}

/* ---- planes ---- */

CODE_PLANES_OF(avx2)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int codes_avx2_is_of_x86_64;
#endif
