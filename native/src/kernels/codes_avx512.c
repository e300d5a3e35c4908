/* Codes with AVX-512 and VNNI: 16 tokens of keys, or 16 channels of values, in the 16 lanes. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,bmi2"))),       \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c,bmi2")
#endif

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/kernels.h"
#include "kernels/rotate_avx512.h"

enum { LINE_BYTES = 64, QUERY_BLOCK = 4 };

/* Tokens of one block of 16. */
typedef struct tokens {
    uint32_t block;              /* the first of the block */
    uint32_t low, count;         /* in the block */
    __mmask16 there;
} tokens;

/* Those of [first, end) that lie in the block of `at`. */
INLINE tokens tokens_of(uint32_t at, uint32_t end) {
    tokens made = {.block = at / CODE_TOKENS * CODE_TOKENS, .low = at % CODE_TOKENS};
    uint32_t left = end - at, room = CODE_TOKENS - made.low;
    made.count = left < room ? left : room;
    made.there = (__mmask16)(((1u << made.count) - 1) << made.low);
    return made;
}

/* Unrolled, as the loop itself would be most of its instructions. */
INLINE void ask_for(const void *next, size_t bytes) {
    const char *line = next, *end = line + bytes;
    if (!line) return;
    if (atomic_load_explicit(&kernels_ask_second_cache, memory_order_relaxed))
        UNROLL for (; line < end; line += LINE_BYTES) _mm_prefetch(line, _MM_HINT_T1);
    else
        UNROLL for (; line < end; line += LINE_BYTES) _mm_prefetch(line, _MM_HINT_T0);
}

/* What is asked for line by line, while something is computed: a CPU waits for few lines at once,
 * and what it is asked beyond them holds up all else. */
typedef struct asked {
    const char *at;
    bool second;                 /* into the second cache */
} asked;

/* `from` may be NULL: then what is in the cache already, at `own`, is asked for. */
INLINE asked asked_of(const void *from, const void *own) {
    bool second = atomic_load_explicit(&kernels_ask_second_cache, memory_order_relaxed);
    return (asked){.at = from ? from : own, .second = second};
}

INLINE void ask_lines(asked *a, uint32_t count, size_t apart) {
    if (a->second)
        UNROLL for (uint32_t i = 0; i < count; i++) _mm_prefetch(a->at + i * apart, _MM_HINT_T1);
    else
        UNROLL for (uint32_t i = 0; i < count; i++) _mm_prefetch(a->at + i * apart, _MM_HINT_T0);
}

/* ---- encode ---- */

/* Of 16 rows, in the lanes. */
typedef struct scaling {
    __m512 scale;                /* of a code of 8 bits; of zeros, 1 */
    __mmask16 alive;             /* neither broken nor zeros */
    __mmask16 finite, huge;      /* huge: the scale is the largest that there is */
    __m512 sums[8];              /* of squared errors, by the channel's number % 8 */
} scaling;

INLINE __m512i bits_without_sign(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(INT32_MAX));
}

/* The larger |channel| of two that are the sum and the difference of two others, as bits. Where one
 * of them is a NaN, the other one is a NaN or infinite, and so is what this returns. */
INLINE __m512i larger_bits(__m512 sum, __m512 difference) {
    return _mm512_castps_si512(_mm512_range_ps(sum, difference, 0x0b));
}

/* Ends the transform of a block: of `parts` channels (a constant) at a time, `distance` apart.
 * Returns the largest |channel|, as bits. */
INLINE __m512i end_transform(__m512 *channels, uint32_t distance, int parts) {
    const int pairs = parts / 2;
    __m512i largest[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (uint32_t i = 0; i < distance; i++) {
        __m512 x[PARTS_MAX];
        UNROLL for (int p = 0; p < parts; p++) x[p] = channels[i + p * distance];
        transform(x, parts);
        UNROLL for (int p = 0; p < parts; p++) channels[i + p * distance] = x[p];
        UNROLL for (int p = 0; p < pairs; p++)
            largest[p % 2] = _mm512_max_epu32(largest[p % 2], larger_bits(x[p], x[p + pairs]));
        if (pairs == 0) largest[0] = _mm512_max_epu32(largest[0], bits_without_sign(x[0]));
    }
    __m512i all = _mm512_max_epu32(largest[0], largest[1]);
    return bits_without_sign(_mm512_castsi512_ps(all));
}

static __m512i rotate_block(__m512 *channels, uint32_t size) {
    uint32_t distance = transform_far(channels, size);
    switch (size / distance) {
    case 1: return end_transform(channels, distance, 1);
    case 2: return end_transform(channels, distance, 2);
    case 4: return end_transform(channels, distance, 4);
    default: return end_transform(channels, distance, 8);
    }
}

INLINE float norm_of(uint32_t size) { return 1 / sqrtf((float)size); }

/* Returns the largest |channel| of each row, as bits. */
INLINE __m512i rotate(int dtype, encoding *e) {
    __m512i largest = _mm512_setzero_si512();
    for (uint32_t first = 0; first < e->dim; first += LANES) {
        __m512 x[LANES];
        load_channels(dtype, e, first, x);
        transform(x, LANES);
        UNROLL for (int i = 0; i < LANES; i++) e->channels[first + i] = x[i];
    }
    for (uint32_t first = 0, size; first < e->dim; first += size) {
        size = 1u << (31 - __builtin_clz(e->dim - first));
        __m512 x = _mm512_castsi512_ps(rotate_block(e->channels + first, size));
        x = _mm512_mul_ps(x, _mm512_set1_ps(norm_of(size)));
        largest = _mm512_max_epi32(largest, _mm512_castps_si512(x));
    }
    return largest;
}

/* Writes the scales of the rows that are there. */
INLINE void scale_rows(const code_form *form, __m512i largest_bits, __mmask16 there,
                       uint16_t *scales, scaling *s) {
    const __m512 zero = _mm512_setzero_ps(), largest = _mm512_castsi512_ps(largest_bits);
    __m512 scale = _mm512_mul_ps(largest, _mm512_set1_ps(form->bits == 8 ? 1 / 128.0f : 1 / 8.0f));
    s->finite = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    scale = _mm512_min_ps(scale, _mm512_set1_ps(65504)); /* of a NaN: 65504 */
    __m256i half = _mm512_cvtps_ph(scale, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    half = _mm256_mask_mov_epi16(_mm256_set1_epi16(0x7e00), s->finite, half);
    _mm256_mask_storeu_epi16(scales, there, half);
    scale = _mm512_cvtph_ps(half);
    s->alive = _mm512_mask_cmp_ps_mask(s->finite, scale, zero, _CMP_GT_OQ);
    s->huge = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(65504), _CMP_EQ_OQ);
    s->scale = _mm512_mask_mov_ps(_mm512_set1_ps(1), s->alive, scale);
    UNROLL for (int i = 0; i < 8; i++) s->sums[i] = zero;
}

/* Codes of 8 bits of 4 channels: in each 4 lanes, 4 tokens of the first channel, of the second ...
 * A code of 4 bits is the upper half. */
INLINE __m512i encode_four(int bits, bool with_errors, const __m512 *x, __m512 factor, int first,
                           scaling *s) {
    const __m512i lowest = _mm512_set1_epi32(-128);
    __m512i n[4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512 steps = _mm512_mul_ps(x[i], factor), whole = steps;
        /* What is too large for a whole number would be the smallest one. */
        if (with_errors) whole = _mm512_min_ps(steps, _mm512_set1_ps(127));
        n[i] = _mm512_mask_cvt_roundps_epi32(lowest, s->alive, whole,
                                             _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        if (!with_errors) continue;
        __m512i code = _mm512_max_epi32(n[i], lowest);
        __m512 *sum = &s->sums[(first + i) % 8], e;
        if (bits == 8) {
            whole = _mm512_cvtepi32_ps(code);
            e = _mm512_sub_ps(steps, _mm512_maskz_add_ps(s->alive, whole, _mm512_set1_ps(0.5f)));
        } else {
            const __m512 sixteenth = _mm512_set1_ps(1 / 16.0f);
            whole = _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32(~15)));
            whole = _mm512_maskz_fmadd_ps(s->alive, whole, sixteenth, _mm512_set1_ps(0.5f));
            e = _mm512_fmsub_ps(steps, sixteenth, whole);
        }
        *sum = _mm512_fmadd_ps(e, e, *sum);
    }
    __m512i low = _mm512_packs_epi32(n[0], n[1]), high = _mm512_packs_epi32(n[2], n[3]);
    return _mm512_xor_si512(_mm512_packs_epi16(low, high), _mm512_set1_epi8(-128));
}

/* The upper halves of two: those of the first become lower ones. */
INLINE __m512i join_halves(__m512i first, __m512i second) {
    const __m512i low = _mm512_set1_epi8(15);
    return _mm512_ternarylogic_epi64(low, _mm512_srli_epi16(first, 4), second, 0xca);
}

/* Lines of keys: 4 or 2, of 16 channels. */
INLINE void store_keys(int bits, const __m512i codes[4], __mmask16 there, uint8_t *lines) {
    const __m512i turn = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i turned[4];
    UNROLL for (int i = 0; i < 4; i++) turned[i] = _mm512_shuffle_epi8(codes[i], turn);
    if (bits == 8) {
        UNROLL for (int i = 0; i < 4; i++)
            _mm512_mask_store_epi32(lines + i * LINE_BYTES, there, turned[i]);
        return;
    }
    _mm512_mask_store_epi32(lines, there, join_halves(turned[0], turned[1]));
    _mm512_mask_store_epi32(lines + LINE_BYTES, there, join_halves(turned[2], turned[3]));
}

/* Of 4 bits, which stand for tokens, each one 16 times. */
INLINE __mmask64 by_channels(uint32_t tokens) { return (tokens & 15) * 0x1111111111111111ull; }

/* Lines of values: 4 or 2, of 16 tokens, `apart` bytes from one another. */
INLINE void store_values(int bits, const __m512i codes[4], __mmask16 there, uint8_t *lines,
                         size_t apart) {
    __m512i a = _mm512_shuffle_i32x4(codes[0], codes[1], 0x44);
    __m512i b = _mm512_shuffle_i32x4(codes[2], codes[3], 0x44);
    __m512i c = _mm512_shuffle_i32x4(codes[0], codes[1], 0xee);
    __m512i d = _mm512_shuffle_i32x4(codes[2], codes[3], 0xee);
    const __m512i fours[4] = {
        _mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
        _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
    if (bits == 8) {
        UNROLL for (int t = 0; t < 4; t++)
            _mm512_mask_storeu_epi8(lines + t * apart, by_channels(there >> 4 * t), fours[t]);
        return;
    }
    UNROLL for (int t = 0; t < 2; t++) { /* a byte has two tokens, of which one may stay */
        const __m512i low = _mm512_set1_epi8(15);
        __m512i low_there = _mm512_maskz_mov_epi8(by_channels(there >> 8 * t), low);
        __m512i high_there = _mm512_maskz_mov_epi8(by_channels(there >> (8 * t + 4)),
                                                   _mm512_set1_epi8(-16));
        __m512i changes = _mm512_or_si512(low_there, high_there);
        __m512i old = _mm512_load_si512(lines + t * apart);
        __m512i codes_here = join_halves(fours[2 * t], fours[2 * t + 1]);
        _mm512_store_si512(lines + t * apart,
                           _mm512_ternarylogic_epi64(changes, codes_here, old, 0xca));
    }
}

/* Codes of 16 channels, as they lie in memory. */
INLINE void encode_sixteen(int bits, bool values, bool with_errors, const encoding *e,
                           uint32_t first, __m512 factor, __mmask16 there, uint8_t *block,
                           scaling *s) {
    __m512i codes[4];
    UNROLL for (int i = 0; i < 4; i++)
        codes[i] = encode_four(bits, with_errors, e->channels + first + 4 * i, factor, 4 * i, s);
    if (values)
        store_values(bits, codes, there, block + (size_t)first * 4,
                     (size_t)e->dim * 4);
    else
        store_keys(bits, codes, there, block + (size_t)first * 2 * bits);
}

INLINE void encode_channels(int bits, bool values, bool with_errors, const encoding *e,
                            __mmask16 there, uint8_t *block, scaling *s) {
    for (uint32_t first = 0, size; first < e->dim; first += size) {
        size = 1u << (31 - __builtin_clz(e->dim - first));
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(norm_of(size)), s->scale);
        if (bits == 4) factor = _mm512_mul_ps(factor, _mm512_set1_ps(16));
        for (uint32_t i = first; i < first + size; i += LANES)
            encode_sixteen(bits, values, with_errors, e, i, factor, there, block, s);
    }
}

/* In the lanes of the tokens. */
INLINE __m512 errors_of(const scaling *s) {
    const __m512 *a = s->sums;
    __m512 even = _mm512_add_ps(_mm512_add_ps(a[0], a[4]), _mm512_add_ps(a[2], a[6]));
    __m512 odd = _mm512_add_ps(_mm512_add_ps(a[1], a[5]), _mm512_add_ps(a[3], a[7]));
    __m512 length = _mm512_sqrt_ps(_mm512_add_ps(even, odd));
    return _mm512_maskz_mul_ps(s->finite, length, s->scale);
}

/* Channels that are far beyond the last code become smaller, so that they fit a whole number. With
 * a smaller scale none is twice as far out as that one. */
static __attribute__((noinline)) void limit_channels(encoding *e) {
    const __m512 limit = _mm512_set1_ps(65504 * 10000.0f);
    for (uint32_t d = 0; d < e->dim; d++) e->channels[d] = _mm512_min_ps(e->channels[d], limit);
}

INLINE void encode_form(int bits, bool values, encoding *e, tokens here, uint8_t *block,
                        scaling *s, float *errors) {
    if (errors) {
        encode_channels(bits, values, true, e, here.there, block, s);
        _mm512_mask_storeu_ps(errors, (__mmask16)((1u << here.count) - 1),
                              _mm512_maskz_compress_ps(here.there, errors_of(s)));
    } else {
        if (s->huge) limit_channels(e);
        encode_channels(bits, values, false, e, here.there, block, s);
    }
}

/* Rows that become tokens of one block. */
static void encode_block(const code_form *form, int dtype, encoding *e, tokens here,
                         uint8_t *block, uint16_t *scales, float *errors) {
    __m512i largest;
    scaling s;
    switch (dtype) {
    case KERNEL_BFLOAT16: largest = rotate(KERNEL_BFLOAT16, e); break;
    case KERNEL_FLOAT16: largest = rotate(KERNEL_FLOAT16, e); break;
    default: largest = rotate(KERNEL_FLOAT32, e);
    }
    scale_rows(form, largest, here.there, scales, &s);
    if (form->bits == 8 && form->values) encode_form(8, true, e, here, block, &s, errors);
    else if (form->bits == 8) encode_form(8, false, e, here, block, &s, errors);
    else if (form->values) encode_form(4, true, e, here, block, &s, errors);
    else encode_form(4, false, e, here, block, &s, errors);
}

/* So many rows of a block are sooner encoded one by one. */
enum { FEW_ROWS = 2 };

void code_encode_avx512(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                        uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales,
                        float *errors) {
    encoding e;
    e.dim = form->dim;
    for (uint32_t t = at; t < at + count;) {
        const tokens here = tokens_of(t, at + count);
        const char *first = (const char *)rows + (t - at) * stride_bytes;
        float *their_errors = errors ? errors + (t - at) : NULL;
        if (here.count <= FEW_ROWS || form->dim % LANES) {
            code_encode_avx2(form, dtype, first, stride_bytes, t, here.count, blocks, scales,
                             their_errors);
        } else {
            for (uint32_t i = 0; i < LANES; i++) {
                uint32_t row = i < here.low ? 0 : i - here.low;
                if (row >= here.count) row = here.count - 1;
                e.rows[i] = first + row * stride_bytes;
            }
            encode_block(form, dtype, &e, here,
                         blocks + here.block / CODE_TOKENS * code_block_bytes(form),
                         scales + here.block, their_errors);
        }
        t += here.count;
    }
}

/* Those of a whole piece, the lines of which are asked for one by one. */
INLINE void ask_for_scales(const void *piece, const code_form *form, uint32_t tokens_used) {
    const size_t at = code_scales_offset(form, tokens_used);
    if (piece) ask_for((const char *)piece + at, code_bytes(form, tokens_used) - at);
}

/* ---- score ---- */

/* Four codes of each token by the same four channels of a query. gcc would load them to a register
 * first: as many instructions again, which is what limits the loop. */
INLINE __m512i add_products(__m512i sums, __m512i codes, const int8_t *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(codes), "m"(*(const int8_t(*)[4])four));
    return sums;
}

/* The next 16 channels. A pointer each: with an index in its address the product is two operations
 * to the CPU, which then takes 1.5 times as long. */
INLINE const int8_t *step(const int8_t *at) {
    at += CODE_CHANNELS;
    __asm__("" : "+r"(at));
    return at;
}

/* Codes of 16 channels: 4 of each token, and again. Of 4 bits every second vector is 16 times as
 * large. */
INLINE void load_keys(int bits, const uint8_t *lines, __m512i codes[4]) {
    if (bits == 8) {
        UNROLL for (int i = 0; i < 4; i++) codes[i] = _mm512_load_si512(lines + i * LINE_BYTES);
        return;
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m512i both = _mm512_load_si512(lines + i * LINE_BYTES);
        codes[2 * i] = _mm512_and_si512(both, _mm512_set1_epi8(15));
        codes[2 * i + 1] = _mm512_and_si512(both, _mm512_set1_epi8(-16));
    }
}

/* 2 * (128 * high + low) + (1 - 2^bits) * sum, which fits, whatever its parts do. */
INLINE __m512 sums_of_planes(__m512i high, __m512i low, int bits, int32_t sum) {
    const uint32_t middle = (uint32_t)sum * (1 - (1u << bits));
    high = _mm512_add_epi32(_mm512_slli_epi32(high, 8), _mm512_set1_epi32((int32_t)middle));
    return _mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_slli_epi32(low, 1)));
}

/* Logits of 16 tokens, by 1 to 4 queries, before the products with scale and factor: twice as
 * large. `each` lines are asked for with 16 channels. Few queries have several sums each, which do
 * not wait for one another. */
INLINE void score_queries(int bits, const uint8_t *block, uint32_t channels,
                          const code_query *queries, int queries_here, asked *next, uint32_t each,
                          __m512 sums[QUERY_BLOCK]) {
    const int sums_each = queries_here > 2 ? 2 : 4;
    __m512i high[QUERY_BLOCK][4], low[QUERY_BLOCK][4];
    UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < sums_each; i++)
        high[q][i] = low[q][i] = _mm512_setzero_si512();
    const int8_t *high_at[QUERY_BLOCK], *low_at[QUERY_BLOCK];
    UNROLL for (int q = 0; q < queries_here; q++)
        high_at[q] = queries[q].high, low_at[q] = queries[q].low;
    const uint8_t *end = block + (size_t)channels * 2 * bits;
    for (; block < end; block += CODE_CHANNELS * 2 * bits) {
        __m512i codes[4];
        load_keys(bits, block, codes);
        ask_lines(next, each, LINE_BYTES);
        next->at += each * LINE_BYTES;
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < queries_here; q++) {
            __m512i *h = &high[q][i % sums_each], *l = &low[q][i % sums_each];
            *h = add_products(*h, codes[i], high_at[q] + 4 * i);
            *l = add_products(*l, codes[i], low_at[q] + 4 * i);
        }
        UNROLL for (int q = 0; q < queries_here; q++) {
            high_at[q] = step(high_at[q]);
            low_at[q] = step(low_at[q]);
        }
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        const int shift = bits == 8 ? 0 : 4;
        __m512i h = high[q][1], l = low[q][1];
        if (sums_each == 4) {
            high[q][0] = _mm512_add_epi32(high[q][0], high[q][2]);
            low[q][0] = _mm512_add_epi32(low[q][0], low[q][2]);
            h = _mm512_add_epi32(h, high[q][3]);
            l = _mm512_add_epi32(l, low[q][3]);
        }
        h = _mm512_add_epi32(high[q][0], _mm512_srai_epi32(h, shift));
        l = _mm512_add_epi32(low[q][0], _mm512_srai_epi32(l, shift));
        sums[q] = sums_of_planes(h, l, bits, queries[q].sum);
    }
}

enum { MANY_QUERIES = 8 };

/* As score_queries(), of codes of 4 bits and 8 queries that lie one behind the other: codes are
 * taken apart half as often. `channels` is a constant, as is all that is added to an address, so
 * that none has an index. */
INLINE void score_eight(const uint8_t *block, uint32_t channels, const code_query *queries,
                        asked *next, uint32_t each, __m512 sums[MANY_QUERIES]) {
    const int8_t *at = queries[0].high;
    __m512i high[MANY_QUERIES], low[MANY_QUERIES];
    UNROLL for (int q = 0; q < MANY_QUERIES; q++) high[q] = low[q] = _mm512_setzero_si512();
    const uint8_t *end = block + (size_t)channels * 8;
    for (; block < end; block += CODE_CHANNELS * 8, at = step(at)) {
        __m512i codes[4];
        load_keys(4, block, codes);
        UNROLL for (int i = 1; i < 4; i += 2) /* as small as the others: all have one sum */
            codes[i] = _mm512_and_si512(_mm512_srli_epi16(codes[i], 4), _mm512_set1_epi8(15));
        ask_lines(next, each, LINE_BYTES);
        next->at += each * LINE_BYTES;
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < MANY_QUERIES; q++) {
            const int8_t *four = at + (size_t)q * 2 * channels + 4 * i;
            high[q] = add_products(high[q], codes[i], four);
            low[q] = add_products(low[q], codes[i], four + channels);
        }
    }
    UNROLL for (int q = 0; q < MANY_QUERIES; q++)
        sums[q] = sums_of_planes(high[q], low[q], 4, queries[q].sum);
}

typedef void eight_scorer(const uint8_t *block, const code_query *queries, asked *next,
                          uint32_t each, __m512 sums[MANY_QUERIES]);

#define EIGHT_SCORER(channels)                                                                   \
    static __attribute__((noinline)) void score_eight_##channels(                                \
        const uint8_t *block, const code_query *queries, asked *next, uint32_t each,             \
        __m512 sums[MANY_QUERIES]) {                                                             \
        score_eight(block, channels, queries, next, each, sums);                                 \
    }
EIGHT_SCORER(64)
EIGHT_SCORER(128)

/* NULL: there is none. */
INLINE eight_scorer *eight_scorer_of(int bits, uint32_t channels, uint32_t query_count) {
    if (bits == 8 || query_count % MANY_QUERIES) return NULL;
    return channels == 128 ? score_eight_128 : channels == 64 ? score_eight_64 : NULL;
}

/* Lines of the next block that 8 of the queries ask for with 16 channels. */
INLINE uint32_t lines_of_eight(uint32_t query_count, uint32_t q) {
    if (query_count < 2 * MANY_QUERIES) return 2;
    return q < 2 * MANY_QUERIES;
}

INLINE __m512 halved_scale(const uint16_t *scales) {
    __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
    return _mm512_mul_ps(scale, _mm512_set1_ps(0.5f));
}

/* Logits of 16 tokens. */
INLINE void score_block(int bits, const uint8_t *block, uint32_t channels,
                        const uint16_t *scales, const code_query *queries, int queries_here,
                        asked *next, uint32_t each, __m512 logits[QUERY_BLOCK]) {
    const __m512 scale = halved_scale(scales);
    score_queries(bits, block, channels, queries, queries_here, next, each, logits);
    UNROLL for (int q = 0; q < queries_here; q++)
        logits[q] = _mm512_mul_ps(_mm512_mul_ps(logits[q], scale),
                                  _mm512_set1_ps(queries[q].factor));
}

/* One call of score, for 1 to 4 of the queries. */
typedef struct score_part {
    const uint8_t *block;
    const uint16_t *scales;
    tokens here;
    float *logits;
    size_t logit_stride;
} score_part;

INLINE void score_tokens(int bits, uint32_t channels, const score_part *part,
                         const code_query *queries, int queries_here, asked *next, uint32_t each) {
    __m512 logits[QUERY_BLOCK];
    score_block(bits, part->block, channels, part->scales, queries, queries_here, next, each,
                logits);
    const __mmask16 first = (__mmask16)((1u << part->here.count) - 1);
    UNROLL for (int q = 0; q < queries_here; q++)
        _mm512_mask_storeu_ps(part->logits + q * part->logit_stride, first,
                              _mm512_maskz_compress_ps(part->here.there, logits[q]));
}

INLINE void score_eight_tokens(eight_scorer *eight, const score_part *part,
                               const code_query *queries, asked *next, uint32_t each) {
    const __mmask16 first = (__mmask16)((1u << part->here.count) - 1);
    const __m512 scale = halved_scale(part->scales);
    __m512 sums[MANY_QUERIES];
    eight(part->block, queries, next, each, sums);
    for (int q = 0; q < MANY_QUERIES; q++) {
        const __m512 factor = _mm512_set1_ps(queries[q].factor);
        const __m512 logits = _mm512_mul_ps(_mm512_mul_ps(sums[q], scale), factor);
        _mm512_mask_storeu_ps(part->logits + q * part->logit_stride, first,
                              _mm512_maskz_compress_ps(part->here.there, logits));
    }
}

/* Lines of the next block that block `part` of the queries asks for with 16 channels. */
INLINE uint32_t lines_each(int bits, uint32_t query_count, uint32_t part) {
    const uint32_t lines = (uint32_t)bits / 2;
    if (query_count <= QUERY_BLOCK) return lines;
    if (query_count <= 3 * QUERY_BLOCK) return part < 2 ? lines / 2 : 0;
    return part < 4 && (bits == 8 || part % 2 == 0);
}

INLINE void score_form(int bits, uint32_t channels, score_part part, const code_query *queries,
                       uint32_t query_count, asked *next) {
    const uint32_t lines = (uint32_t)bits / 2;
    switch (query_count) {
    case 1: score_tokens(bits, channels, &part, queries, 1, next, lines); return;
    case 2: score_tokens(bits, channels, &part, queries, 2, next, lines); return;
    case 3: score_tokens(bits, channels, &part, queries, 3, next, lines); return;
    case 4: score_tokens(bits, channels, &part, queries, 4, next, lines); return;
    }
    eight_scorer *eight = eight_scorer_of(bits, channels, query_count);
    uint32_t q = 0;
    for (; eight && q < query_count; q += MANY_QUERIES) {
        score_eight_tokens(eight, &part, queries + q, next, lines_of_eight(query_count, q));
        part.logits += MANY_QUERIES * part.logit_stride;
    }
    for (; q < query_count; q += QUERY_BLOCK) {
        const uint32_t each = lines_each(bits, query_count, q / QUERY_BLOCK);
        switch (query_count - q) {
        case 1: score_tokens(bits, channels, &part, queries + q, 1, next, each); break;
        case 2: score_tokens(bits, channels, &part, queries + q, 2, next, each); break;
        case 3: score_tokens(bits, channels, &part, queries + q, 3, next, each); break;
        default: score_tokens(bits, channels, &part, queries + q, 4, next, each);
        }
        part.logits += QUERY_BLOCK * part.logit_stride;
    }
}

void code_score_avx512(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                       const code_query *queries, uint32_t query_count, float *logits,
                       size_t logit_stride, const void *next) {
    const uint32_t channels = code_channels(form->dim);
    asked ahead = asked_of(next, piece.blocks);
    ask_for_scales(next, form, count);
    for (uint32_t t = first; t < first + count;) {
        tokens here = tokens_of(t, first + count);
        const score_part part = {
            .block = piece.blocks + here.block / CODE_TOKENS * code_block_bytes(form),
            .scales = piece.scales + here.block,
            .here = here,
            .logits = logits + (t - first),
            .logit_stride = logit_stride};
        if (form->bits == 8 && channels == 128)
            score_form(8, 128, part, queries, query_count, &ahead);
        else if (form->bits == 8)
            score_form(8, channels, part, queries, query_count, &ahead);
        else if (channels == 128)
            score_form(4, 128, part, queries, query_count, &ahead);
        else
            score_form(4, channels, part, queries, query_count, &ahead);
        t += here.count;
    }
}

/* Raises the largest logits of 16 tokens; returns which of them are a NaN. */
INLINE __mmask16 raise_best(int bits, const uint8_t *block, uint32_t channels,
                            const uint16_t *scales, const code_query *queries, int queries_here,
                            asked *next, uint32_t each, __m512 *best) {
    __m512 logits[QUERY_BLOCK];
    __mmask16 broken = 0;
    score_block(bits, block, channels, scales, queries, queries_here, next, each, logits);
    UNROLL for (int q = 0; q < queries_here; q++) {
        broken |= _mm512_cmp_ps_mask(logits[q], logits[q], _CMP_UNORD_Q);
        *best = _mm512_max_ps(logits[q], *best);
    }
    return broken;
}

/* As raise_best(), of 8 queries. */
INLINE __mmask16 raise_eight(eight_scorer *eight, const uint8_t *block, const uint16_t *scales,
                             const code_query *queries, asked *next, uint32_t each,
                             __m512 *best) {
    const __m512 scale = halved_scale(scales);
    __mmask16 broken = 0;
    __m512 sums[MANY_QUERIES];
    eight(block, queries, next, each, sums);
    UNROLL for (int q = 0; q < MANY_QUERIES; q++) {
        const __m512 factor = _mm512_set1_ps(queries[q].factor);
        const __m512 logits = _mm512_mul_ps(_mm512_mul_ps(sums[q], scale), factor);
        broken |= _mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q);
        *best = _mm512_max_ps(logits, *best);
    }
    return broken;
}

/* The best of all queries with 16 tokens. */
INLINE __mmask16 raise_all(int bits, const uint8_t *block, uint32_t channels,
                           const uint16_t *scales, const code_query *from, uint32_t query_count,
                           asked *next, __m512 *best) {
    const uint32_t lines = (uint32_t)bits / 2;
    __mmask16 bad = 0;
    switch (query_count) {
    case 1: return raise_best(bits, block, channels, scales, from, 1, next, lines, best);
    case 2: return raise_best(bits, block, channels, scales, from, 2, next, lines, best);
    case 3: return raise_best(bits, block, channels, scales, from, 3, next, lines, best);
    case 4: return raise_best(bits, block, channels, scales, from, 4, next, lines, best);
    }
    eight_scorer *eight = eight_scorer_of(bits, channels, query_count);
    uint32_t q = 0;
    for (; eight && q < query_count; q += MANY_QUERIES, from += MANY_QUERIES)
        bad |= raise_eight(eight, block, scales, from, next, lines_of_eight(query_count, q), best);
    for (; q < query_count; q += QUERY_BLOCK, from += QUERY_BLOCK) {
        const uint32_t each = lines_each(bits, query_count, q / QUERY_BLOCK);
        switch (query_count - q) {
        case 1: bad |= raise_best(bits, block, channels, scales, from, 1, next, each, best); break;
        case 2: bad |= raise_best(bits, block, channels, scales, from, 2, next, each, best); break;
        case 3: bad |= raise_best(bits, block, channels, scales, from, 3, next, each, best); break;
        default: bad |= raise_best(bits, block, channels, scales, from, 4, next, each, best);
        }
    }
    return bad;
}

INLINE float best_of_piece(int bits, uint32_t channels, code_piece piece, uint32_t tokens_used,
                           const code_query *queries, uint32_t query_count, asked *next) {
    __m512 most = _mm512_set1_ps(-INFINITY);
    __mmask16 broken = 0;
    for (uint32_t t = 0; t < tokens_used; t += LANES) {
        const __mmask16 there = tokens_of(t, tokens_used).there;
        __m512 best = most;
        broken |= there & raise_all(bits, piece.blocks, channels, piece.scales + t, queries,
                                    query_count, next, &best);
        most = _mm512_mask_mov_ps(most, there, best);
        piece.blocks += (size_t)channels * 2 * bits;
    }
    return broken ? NAN : _mm512_reduce_max_ps(most) + 0.0f;
}

/* Four channels of a query, in all lanes: loaded once for two blocks. */
INLINE __m512i four_channels(const int8_t *four) {
    __m512i made;
    __asm__("vpbroadcastd %1, %0" : "=v"(made) : "m"(*(const int8_t(*)[4])four));
    return made;
}

/* In its place: gcc would write the intrinsic's sums to other registers, and move them back. */
INLINE __m512i add_four(__m512i sums, __m512i codes, __m512i four) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(four));
    return sums;
}

/* As score_queries(), of codes of 8 bits, 4 queries that lie one behind the other, and two blocks:
 * twice as much is computed until the lines that are asked for have to be there. */
INLINE void score_pair(const uint8_t *const blocks[2], uint32_t channels,
                       const code_query *queries, asked next[2], uint32_t each,
                       __m512 sums[2][QUERY_BLOCK]) {
    const int8_t *at = queries[0].high;
    const uint8_t *block = blocks[0], *end = block + (size_t)channels * 16;
    const ptrdiff_t other = blocks[1] - blocks[0];
    __m512i high[2][QUERY_BLOCK], low[2][QUERY_BLOCK];
    UNROLL for (int q = 0; q < QUERY_BLOCK; q++) UNROLL for (int b = 0; b < 2; b++)
        high[b][q] = low[b][q] = _mm512_setzero_si512();
    for (; block < end; block += CODE_CHANNELS * 16, at = step(at)) {
        __m512i codes[2][4];
        load_keys(8, block, codes[0]);
        load_keys(8, block + other, codes[1]);
        UNROLL for (int b = 0; b < 2; b++) {
            ask_lines(&next[b], each, LINE_BYTES);
            next[b].at += each * LINE_BYTES;
        }
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < QUERY_BLOCK; q++) {
            const int8_t *four = at + (size_t)q * 2 * channels + 4 * i;
            __m512i h = four_channels(four), l = four_channels(four + channels);
            UNROLL for (int b = 0; b < 2; b++) {
                high[b][q] = add_four(high[b][q], codes[b][i], h);
                low[b][q] = add_four(low[b][q], codes[b][i], l);
            }
        }
    }
    UNROLL for (int q = 0; q < QUERY_BLOCK; q++) UNROLL for (int b = 0; b < 2; b++)
        sums[b][q] = sums_of_planes(high[b][q], low[b][q], 8, queries[q].sum);
}

/* As best_of_piece(), of two pieces of 8 bits and a multiple of 4 queries. */
INLINE void best_of_pair(uint32_t channels, const code_piece pieces[2],
                         uint32_t tokens_used, const code_query *queries, uint32_t query_count,
                         asked next[2], float *best) {
    __m512 most[2] = {_mm512_set1_ps(-INFINITY), _mm512_set1_ps(-INFINITY)};
    __mmask16 broken[2] = {0, 0};
    for (uint32_t t = 0; t < tokens_used; t += LANES) {
        const __mmask16 there = tokens_of(t, tokens_used).there;
        const size_t at = (size_t)t / CODE_TOKENS * channels * 16;
        const uint8_t *const blocks[2] = {pieces[0].blocks + at, pieces[1].blocks + at};
        __m512 scales[2], largest[2];
        UNROLL for (int b = 0; b < 2; b++) {
            scales[b] = halved_scale(pieces[b].scales + t);
            largest[b] = _mm512_set1_ps(-INFINITY);
        }
        for (uint32_t q = 0; q < query_count; q += QUERY_BLOCK) {
            __m512 sums[2][QUERY_BLOCK];
            score_pair(blocks, channels, queries + q, next,
                       lines_each(8, query_count, q / QUERY_BLOCK), sums);
            UNROLL for (int i = 0; i < QUERY_BLOCK; i++) UNROLL for (int b = 0; b < 2; b++) {
                const __m512 factor = _mm512_set1_ps(queries[q + i].factor);
                __m512 logits = _mm512_mul_ps(_mm512_mul_ps(sums[b][i], scales[b]), factor);
                broken[b] |= there & _mm512_cmp_ps_mask(logits, logits, _CMP_UNORD_Q);
                largest[b] = _mm512_max_ps(logits, largest[b]);
            }
        }
        UNROLL for (int b = 0; b < 2; b++)
            most[b] = _mm512_mask_max_ps(most[b], there, most[b], largest[b]);
    }
    UNROLL for (int b = 0; b < 2; b++)
        best[b] = broken[b] ? NAN : _mm512_reduce_max_ps(most[b]) + 0.0f;
}

INLINE void best_of_pieces(int bits, uint32_t channels, const code_piece *pieces,
                           const void *const *next, uint32_t count, uint32_t tokens_used,
                           const code_query *queries, uint32_t query_count, float *best) {
    const code_form form = {.bits = (uint32_t)bits, .dim = channels};
    uint32_t i = 0;
    const bool pairs = bits == 8 && query_count > QUERY_BLOCK && query_count % QUERY_BLOCK == 0;
    for (; pairs && i + 2 <= count; i += 2) {
        asked ahead[2];
        UNROLL for (uint32_t b = 0; b < 2; b++) {
            const void *its_next = next ? next[i + b] : NULL;
            ahead[b] = asked_of(its_next, pieces[i + b].blocks);
            ask_for_scales(its_next, &form, tokens_used);
        }
        best_of_pair(channels, pieces + i, tokens_used, queries, query_count, ahead, best + i);
    }
    for (; i < count; i++) {
        const void *its_next = next ? next[i] : NULL;
        asked ahead = asked_of(its_next, pieces[i].blocks);
        ask_for_scales(its_next, &form, tokens_used);
        best[i] = best_of_piece(bits, channels, pieces[i], tokens_used, queries, query_count,
                                &ahead);
    }
}

void code_score_best_avx512(const code_form *form, const code_piece *pieces,
                            const void *const *next, uint32_t count, uint32_t tokens_used,
                            const code_query *queries, uint32_t query_count, float *best) {
    const uint32_t channels = code_channels(form->dim);
    if (form->bits == 8 && channels == 128)
        best_of_pieces(8, 128, pieces, next, count, tokens_used, queries, query_count, best);
    else if (form->bits == 8)
        best_of_pieces(8, channels, pieces, next, count, tokens_used, queries, query_count, best);
    else if (channels == 128)
        best_of_pieces(4, 128, pieces, next, count, tokens_used, queries, query_count, best);
    else
        best_of_pieces(4, channels, pieces, next, count, tokens_used, queries, query_count, best);
}

/* ---- accumulate ---- */

enum { SUM_BLOCK = 8 };

/* Weights of 16 tokens, of the queries of a block. */
typedef struct rounded {
    /* Of two queries and each 4 tokens t: 2 * P of t and t + 2, of t + 1 and t + 3. */
    int16_t pairs[SUM_BLOCK / 2][4][2][2][2];
    int32_t middle[SUM_BLOCK];   /* what the sum begins with: (1 - 2^bits) * sum of P */
    float half_unit[SUM_BLOCK];
} rounded;

/* The largest of the 16 lanes of each of 4 vectors: in order, in each four lanes. */
INLINE __m512i largest_of(const __m512i x[4]) {
    __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(x[0], x[1]),
                                  _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(x[2], x[3]),
                                  _mm512_unpackhi_epi32(x[2], x[3]));
    __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    all = _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    return _mm512_max_epi32(all, _mm512_shuffle_i32x4(all, all, 0xb1));
}

/* The sums of pairs of 4 queries, in order. */
INLINE __m128i sums_of_pairs(const __m512i pairs[2]) {
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi16(1);
    __m512 a = _mm512_castsi512_ps(_mm512_dpwssd_epi32(zero, pairs[0], one));
    __m512 b = _mm512_castsi512_ps(_mm512_dpwssd_epi32(zero, pairs[1], one));
    __m512i all = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                   _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all),
                                    _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Weights of the tokens, in their lanes. */
INLINE __m512 load_weights(const float *row, tokens here) {
    __m512 w = _mm512_maskz_loadu_ps((__mmask16)((1u << here.count) - 1), row);
    return here.low ? _mm512_maskz_expand_ps(here.there, w) : w;
}

/* Of 1 to 4 queries, to `made` from `at` on. */
INLINE void round_weights(int bits, __m512 scale, tokens here, const float *weights,
                          size_t weight_stride, uint32_t queries_here, uint32_t at,
                          rounded *made) {
    const __m128 whole = _mm_set1_ps(16256), half = _mm_set1_ps(0.5f);
    const __m512i order = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512 products[4];
    __m512i x[4], pairs[2];
    UNROLL for (uint32_t q = 0; q < 4; q++) {
        __m512 w = load_weights(weights + (q < queries_here ? q : 0) * weight_stride, here);
        products[q] = _mm512_maskz_mul_ps(here.there, w, scale);
        x[q] = bits_without_sign(products[q]);
    }
    __m128 largest = _mm_castsi128_ps(_mm512_castsi512_si128(largest_of(x)));
    __m128 some = _mm_cmp_ps(largest, _mm_set1_ps(1e-30f), _CMP_NLT_UQ);
    __m512 inverse = _mm512_broadcast_f32x4(_mm_and_ps(_mm_div_ps(whole, largest), some));
    __m128 finite = _mm_cmp_ps(largest, _mm_set1_ps(INFINITY), _CMP_LT_OQ);
    __m128 unit = _mm_mul_ps(_mm_div_ps(largest, whole), half);
    unit = _mm_blendv_ps(_mm_set1_ps(NAN), unit, finite);
    _mm_store_ps(made->half_unit + at, _mm_and_ps(unit, some));
    x[0] = _mm512_cvtps_epi32(_mm512_mul_ps(products[0], _mm512_permute_ps(inverse, 0x00)));
    x[1] = _mm512_cvtps_epi32(_mm512_mul_ps(products[1], _mm512_permute_ps(inverse, 0x55)));
    x[2] = _mm512_cvtps_epi32(_mm512_mul_ps(products[2], _mm512_permute_ps(inverse, 0xaa)));
    x[3] = _mm512_cvtps_epi32(_mm512_mul_ps(products[3], _mm512_permute_ps(inverse, 0xff)));
    UNROLL for (int i = 0; i < 2; i++) {
        pairs[i] = _mm512_slli_epi16(_mm512_packs_epi32(x[2 * i], x[2 * i + 1]), 1);
        pairs[i] = _mm512_shuffle_epi8(pairs[i], order);
        _mm512_store_si512(made->pairs[at / 2 + i], pairs[i]);
    }
    __m128i sums = sums_of_pairs(pairs); /* twice the sum of P */
    _mm_store_si128((__m128i *)(made->middle + at),
                    _mm_sub_epi32(_mm_srai_epi32(sums, 1), _mm_slli_epi32(sums, bits - 1)));
}

/* Two codes of each channel by the same two weights. */
INLINE __m512i add_pairs(__m512i sums, __m512i codes, const int16_t pair[2]) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(codes), "m"(*(const int16_t(*)[2])pair));
    return sums;
}

/* Codes of 16 tokens by 16 channels, two of each channel at a time, in the order of pairs. `lines`
 * are `apart` bytes from one another. */
INLINE void load_values(int bits, const uint8_t *lines, size_t apart, __m512i codes[8]) {
    const __m512i byte = _mm512_set1_epi16(255), low = _mm512_set1_epi16(15);
    if (bits == 8) {
        UNROLL for (int t = 0; t < 4; t++) {
            __m512i both = _mm512_load_si512(lines + t * apart);
            codes[2 * t] = _mm512_and_si512(both, byte);
            codes[2 * t + 1] = _mm512_srli_epi16(both, 8);
        }
        return;
    }
    UNROLL for (int t = 0; t < 2; t++) {
        __m512i all = _mm512_load_si512(lines + t * apart);
        codes[4 * t] = _mm512_and_si512(all, low);
        codes[4 * t + 1] = _mm512_and_si512(_mm512_srli_epi16(all, 8), low);
        codes[4 * t + 2] = _mm512_and_si512(_mm512_srli_epi16(all, 4), low);
        codes[4 * t + 3] = _mm512_srli_epi16(all, 12);
    }
}

/* A block of 16 tokens by 16 channels, of which `count` are there. A store under a mask would hold
 * up the next load of what it wrote. */
INLINE void add_channels(int bits, uint32_t dim, const uint8_t *lines, uint32_t count,
                         const rounded *made, int queries_here, float *accumulator) {
    __m512i codes[8], sums[SUM_BLOCK];
    load_values(bits, lines, (size_t)code_channels(dim) * 4, codes);
    UNROLL for (int q = 0; q < queries_here; q++) sums[q] = _mm512_set1_epi32(made->middle[q]);
    UNROLL for (int i = 0; i < 8; i++) UNROLL for (int q = 0; q < queries_here; q++)
        sums[q] = add_pairs(sums[q], codes[i], made->pairs[q / 2][i / 2][q % 2][i % 2]);
    UNROLL for (int q = 0; q < queries_here; q++) {
        const __m512 unit = _mm512_set1_ps(made->half_unit[q]), sum = _mm512_cvtepi32_ps(sums[q]);
        float *to = accumulator + (size_t)q * dim;
        if (count == LANES) {
            _mm512_storeu_ps(to, _mm512_fmadd_ps(sum, unit, _mm512_loadu_ps(to)));
        } else {
            const __mmask16 there = (__mmask16)((1u << count) - 1);
            __m512 old = _mm512_maskz_loadu_ps(there, to);
            _mm512_mask_storeu_ps(to, there, _mm512_fmadd_ps(sum, unit, old));
        }
    }
}

/* `next` has the form of `block`. */
INLINE void add_block(int bits, uint32_t dim, const uint8_t *block, const rounded *made,
                      int queries_here, float *accumulator, asked next) {
    const float *end = accumulator + dim / LANES * LANES;
    for (; accumulator < end; accumulator += LANES, block += LINE_BYTES, next.at += LINE_BYTES) {
        /* No index in an address, as above, and none made before the loop: gcc would keep all. */
        __asm__("" : "+r"(block), "+r"(accumulator), "+r"(made), "+r"(next.at));
        ask_lines(&next, (uint32_t)bits / 2, (size_t)code_channels(dim) * 4);
        add_channels(bits, dim, block, LANES, made, queries_here, accumulator);
    }
    if (dim % LANES)
        add_channels(bits, dim, block, dim % LANES, made, queries_here, accumulator);
}

typedef void block_adder(uint32_t dim, const uint8_t *block, const rounded *made,
                         float *accumulator, asked next);

/* Functions of their own, as each of them is long. */
#define BLOCK_ADDER(bits, queries)                                                               \
    static __attribute__((noinline)) void add_##bits##_bits_##queries(                           \
        uint32_t dim, const uint8_t *block, const rounded *made, float *accumulator,             \
        asked next) {                                                                            \
        if (dim == 128) add_block(bits, 128, block, made, queries, accumulator, next);           \
        else add_block(bits, dim, block, made, queries, accumulator, next);                      \
    }
BLOCK_ADDER(8, 1)
BLOCK_ADDER(8, 2)
BLOCK_ADDER(8, 3)
BLOCK_ADDER(8, 4)
BLOCK_ADDER(8, 8)
BLOCK_ADDER(4, 1)
BLOCK_ADDER(4, 2)
BLOCK_ADDER(4, 3)
BLOCK_ADDER(4, 4)
BLOCK_ADDER(4, 8)

static block_adder *const adders[2][SUM_BLOCK + 1] = {
    {NULL, add_8_bits_1, add_8_bits_2, add_8_bits_3, add_8_bits_4, NULL, NULL, NULL, add_8_bits_8},
    {NULL, add_4_bits_1, add_4_bits_2, add_4_bits_3, add_4_bits_4, NULL, NULL, NULL, add_4_bits_8},
};

/* Tokens of one block; what lies at the same place from `next` on is asked for. */
INLINE void accumulate_tokens(int bits, const code_form *form, code_piece piece, tokens here,
                              const float *weights, size_t weight_stride, uint32_t query_count,
                              float *accumulator, const uint8_t *next) {
    const size_t at = here.block / CODE_TOKENS * code_block_bytes(form);
    const uint8_t *block = piece.blocks + at;
    const __m512 scale =
        _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(piece.scales + here.block)));
    for (uint32_t q = 0, queries_here; q < query_count; q += queries_here) {
        _Alignas(64) rounded made;
        const float *row = weights + q * weight_stride;
        queries_here = query_count - q >= 8 ? 8 : query_count - q > 4 ? 4 : query_count - q;
        round_weights(bits, scale, here, row, weight_stride, queries_here, 0, &made);
        if (queries_here == 8)
            round_weights(bits, scale, here, row + 4 * weight_stride, weight_stride, 4, 4, &made);
        adders[bits == 4][queries_here](form->dim, block, &made,
                                        accumulator + (size_t)q * form->dim,
                                        asked_of(next && q == 0 ? next + at : NULL, block));
    }
}

void code_accumulate_avx512(const code_form *form, code_piece piece, uint32_t first,
                            uint32_t count, const float *weights, size_t weight_stride,
                            uint32_t query_count, float *accumulator, const void *next) {
    ask_for_scales(next, form, count);
    for (uint32_t t = first; t < first + count;) {
        const tokens here = tokens_of(t, first + count);
        const float *row = weights + (t - first);
        if (form->bits == 8)
            accumulate_tokens(8, form, piece, here, row, weight_stride, query_count, accumulator,
                              next);
        else
            accumulate_tokens(4, form, piece, here, row, weight_stride, query_count, accumulator,
                              next);
        t += here.count;
    }
}

/* ---- accumulate, several pieces ---- */

enum { RUN_BLOCKS = 8 };

/* Blocks whose sums are added up before the next ones' are. */
typedef struct block_run {
    uint32_t count;
    const uint8_t *blocks[RUN_BLOCKS];
    const uint8_t *next[RUN_BLOCKS];      /* asked for; or the same */
    bool second;
    const uint16_t *scales[RUN_BLOCKS];
    const float *weights[RUN_BLOCKS];     /* of the first query */
    tokens here[RUN_BLOCKS];
} block_run;

/* 16 channels of all blocks, of 8 queries. */
INLINE void add_run_channels(int bits, uint32_t dim, const block_run *run, uint32_t channel,
                             const rounded *made, bool asks, float *accumulator) {
    const size_t apart = (size_t)code_channels(dim) * 4;
    __m512 totals[SUM_BLOCK];
    UNROLL for (int q = 0; q < SUM_BLOCK; q++)
        totals[q] = _mm512_loadu_ps(accumulator + (size_t)q * dim);
    for (uint32_t i = 0; i < run->count; i++, made++) {
        const uint8_t *lines = run->blocks[i] + channel * 4;
        __m512i codes[8], sums[SUM_BLOCK];
        __asm__("" : "+r"(lines), "+r"(made)); /* as above */
        if (asks) {
            asked next = {(const char *)run->next[i] + channel * 4, run->second};
            ask_lines(&next, (uint32_t)bits / 2, apart);
        }
        load_values(bits, lines, apart, codes);
        UNROLL for (int q = 0; q < SUM_BLOCK; q++) sums[q] = _mm512_set1_epi32(made->middle[q]);
        UNROLL for (int k = 0; k < 8; k++) UNROLL for (int q = 0; q < SUM_BLOCK; q++)
            sums[q] = add_pairs(sums[q], codes[k], made->pairs[q / 2][k / 2][q % 2][k % 2]);
        UNROLL for (int q = 0; q < SUM_BLOCK; q++)
            totals[q] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[q]),
                                        _mm512_set1_ps(made->half_unit[q]), totals[q]);
    }
    UNROLL for (int q = 0; q < SUM_BLOCK; q++)
        _mm512_storeu_ps(accumulator + (size_t)q * dim, totals[q]);
}

/* 8 queries. */
INLINE void add_run(int bits, uint32_t dim, const block_run *run, const float *weights,
                    size_t weight_stride, bool asks, float *accumulator) {
    _Alignas(64) rounded made[RUN_BLOCKS];
    for (uint32_t i = 0; i < run->count; i++) {
        const float *row = run->weights[i] + (weights - run->weights[0]);
        const __m256i halves = _mm256_loadu_si256((const __m256i *)run->scales[i]);
        const __m512 scale = _mm512_cvtph_ps(halves);
        UNROLL for (uint32_t q = 0; q < SUM_BLOCK; q += 4)
            round_weights(bits, scale, run->here[i], row + q * weight_stride, weight_stride, 4, q,
                          made + i);
    }
    for (uint32_t d = 0; d < dim; d += LANES)
        add_run_channels(bits, dim, run, d, made, asks, accumulator + d);
}

/* All queries, of one run; `piece` of each block is needed for those behind the last eight. */
INLINE void accumulate_run(int bits, const code_form *form, const block_run *run,
                           const code_piece *pieces, size_t weight_stride, uint32_t query_count,
                           float *accumulator) {
    uint32_t q = 0;
    for (; q + SUM_BLOCK <= query_count; q += SUM_BLOCK) {
        const float *weights = run->weights[0] + q * weight_stride;
        float *to = accumulator + (size_t)q * form->dim;
        if (form->dim == 128) add_run(bits, 128, run, weights, weight_stride, q == 0, to);
        else add_run(bits, form->dim, run, weights, weight_stride, q == 0, to);
    }
    for (uint32_t i = 0; q < query_count && i < run->count; i++)
        accumulate_tokens(bits, form, pieces[i], run->here[i],
                          run->weights[i] + q * weight_stride, weight_stride, query_count - q,
                          accumulator + (size_t)q * form->dim, NULL);
}

void code_accumulate_pieces_avx512(const code_form *form, const code_piece *pieces,
                                   const void *const *next, uint32_t count, uint32_t tokens_used,
                                   const float *weights, size_t weight_stride,
                                   uint32_t query_count, float *accumulator) {
    const size_t block_bytes = code_block_bytes(form);
    const bool together = form->dim % LANES == 0 && query_count >= SUM_BLOCK;
    block_run run = {.count = 0, .second = asked_of(NULL, NULL).second};
    code_piece of_blocks[RUN_BLOCKS];
    for (uint32_t i = 0; i < count; i++, weights += tokens_used) {
        const uint8_t *ahead = next[i];
        if (!together) {
            code_accumulate_avx512(form, pieces[i], 0, tokens_used, weights, weight_stride,
                                   query_count, accumulator, ahead);
            continue;
        }
        ask_for_scales(ahead, form, tokens_used);
        for (uint32_t t = 0; t < tokens_used; t += CODE_TOKENS) {
            const size_t at = t / CODE_TOKENS * block_bytes;
            const uint32_t to = run.count++;
            of_blocks[to] = pieces[i];
            run.blocks[to] = pieces[i].blocks + at;
            run.next[to] = (ahead ? ahead : pieces[i].blocks) + at;
            run.scales[to] = pieces[i].scales + t;
            run.weights[to] = weights + t;
            run.here[to] = tokens_of(t, tokens_used);
            if (run.count < RUN_BLOCKS && (i + 1 < count || t + CODE_TOKENS < tokens_used))
                continue;
            if (form->bits == 8)
                accumulate_run(8, form, &run, of_blocks, weight_stride, query_count, accumulator);
            else
                accumulate_run(4, form, &run, of_blocks, weight_stride, query_count, accumulator);
            run.count = 0;
        }
    }
}

void code_decode_avx512(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                        float *rows) {
    code_decode_avx2(form, piece, first, count, rows);
}

/* ---- planes ---- */

CODE_PLANES_OF(avx512)

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int codes_avx512_is_of_x86_64;
#endif
