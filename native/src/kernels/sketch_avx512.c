/* Sketches with AVX-512: 16 tokens in the 16 lanes, so that no sum is ever taken across them. */
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

#include "kernels/kernels.h"
#include "kernels/rotate_avx512.h"
#include "kernels/sketch.h"

enum { QUERY_BLOCK = 4 };

/* ---- encode ---- */

/* All channels, transformed by sixteens. Returns the lengths' squares, which a rotation keeps. */
INLINE __m512 rotate_sixteens(int dtype, encoding *e) {
    __m512 lengths[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (uint32_t first = 0; first < e->dim; first += LANES) {
        __m512 x[LANES];
        load_channels(dtype, e, first, x);
        UNROLL for (int i = 0; i < LANES; i++)
            lengths[i % 2] = _mm512_fmadd_ps(x[i], x[i], lengths[i % 2]);
        transform(x, LANES);
        UNROLL for (int i = 0; i < LANES; i++) e->channels[first + i] = x[i];
    }
    return _mm512_add_ps(lengths[0], lengths[1]);
}

/* The sum of y * (code - 1.5) in parts: of all y, of those whose code has its low bit, its high
 * one. */
typedef struct code_sums {
    __m512 all, low, high;
} code_sums;

/* Adds a channel's codes to words, which have them at the bits of `low` and `high`. */
INLINE void encode_channel(__m512 y, __m512 border, __m512i low, __m512i high, __m512i *words,
                           code_sums *sums) {
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    __m512i its = _mm512_ternarylogic_epi32(_mm512_castps_si512(border), _mm512_castps_si512(y),
                                            sign, 0xf8); /* y < 0 ? -border : border */
    __mmask16 is_low = _mm512_cmp_ps_mask(y, _mm512_castsi512_ps(its), _CMP_GE_OQ);
    __mmask16 is_high = _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_GE_OQ);
    *words = _mm512_mask_or_epi32(*words, is_low, *words, low);
    *words = _mm512_mask_or_epi32(*words, is_high, *words, high);
    sums->low = _mm512_mask_add_ps(sums->low, is_low, sums->low, y);
    sums->high = _mm512_mask_add_ps(sums->high, is_high, sums->high, y);
}

/* Ends the transform of a block: of `parts` channels (a constant) at a time, `distance` apart. Then
 * their codes, to lines. Returns the sum of y * (code - 1.5). */
INLINE __m512 encode_parts(const encoding *e, uint32_t first, uint32_t distance, int parts,
                           __m512 border, uint8_t *lines) {
    const __m512 zero = _mm512_setzero_ps();
    code_sums sums = {zero, zero, zero};
    for (uint32_t line = first; line < first + distance; line += SKETCH_CHANNELS) {
        __m512i words[PARTS_MAX], low = _mm512_set1_epi32(1), high = _mm512_set1_epi32(2);
        UNROLL for (int p = 0; p < parts; p++) words[p] = _mm512_setzero_si512();
        for (uint32_t i = line; i < line + SKETCH_CHANNELS; i++) {
            __m512 y[PARTS_MAX];
            UNROLL for (int p = 0; p < parts; p++) y[p] = e->channels[i + p * distance];
            /* What a transform makes adds up to its first channel, as often as there are any. */
            sums.all = _mm512_add_ps(sums.all, y[0]);
            transform(y, parts);
            UNROLL for (int p = 0; p < parts; p++)
                encode_channel(y[p], border, low, high, &words[p], &sums);
            low = _mm512_slli_epi32(low, 2);
            high = _mm512_slli_epi32(high, 2);
        }
        UNROLL for (int p = 0; p < parts; p++)
            _mm512_store_si512(lines + (line + p * distance) / SKETCH_CHANNELS * SKETCH_LINE_BYTES,
                               words[p]);
    }
    __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(2), sums.high, sums.low);
    return _mm512_fnmadd_ps(_mm512_set1_ps(1.5f * (float)parts), sums.all, sum);
}

/* A block of the transform, `size` channels, which are larger by the root of it than they should
 * be, and so is the border between outer codes and inner ones. */
static __m512 encode_block(encoding *e, __m512 length, uint32_t first, uint32_t size,
                           uint8_t *lines) {
    __m512 share = _mm512_set1_ps((float)size / (float)e->dim);
    __m512 border = _mm512_sqrt_ps(_mm512_mul_ps(length, share)), sum;
    uint32_t distance = transform_far(e->channels + first, size);
    switch (size / distance) {
    case 1: sum = encode_parts(e, first, distance, 1, border, lines); break;
    case 2: sum = encode_parts(e, first, distance, 2, border, lines); break;
    case 4: sum = encode_parts(e, first, distance, 4, border, lines); break;
    default: sum = encode_parts(e, first, distance, 8, border, lines);
    }
    return _mm512_mul_ps(sum, _mm512_set1_ps(1 / sqrtf((float)size)));
}

/* The scales of keys, zeros where the key is or where there is none. */
INLINE __m512 scales_of(__m512 length, __m512 products, __mmask16 there) {
    __mmask16 some = _mm512_cmp_ps_mask(length, _mm512_setzero_ps(), _CMP_NEQ_UQ) & there;
    __mmask16 finite = _mm512_cmp_ps_mask(length, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_maskz_div_ps(some, length, products), some & ~finite,
                              _mm512_set1_ps(NAN));
}

/* Up to 16 keys, those of one block of the sketch. */
INLINE void encode_lanes(int dtype, encoding *e, uint32_t tokens, uint8_t *block) {
    const __mmask16 there = (__mmask16)((1u << tokens) - 1);
    __m512 products = _mm512_setzero_ps();
    __m512 length = rotate_sixteens(dtype, e);
    for (uint32_t first = 0; first < e->dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(e->dim - first));
        products = _mm512_add_ps(products, encode_block(e, length, first, size, block));
        first += size;
    }
    uint8_t *last = block + sketch_block_bytes(e->dim) - SKETCH_LINE_BYTES;
    _mm512_store_ps(last, scales_of(length, products, there));
    for (uint8_t *line = block; tokens < LANES && line < last; line += SKETCH_LINE_BYTES)
        _mm512_store_si512(line, _mm512_maskz_load_epi32(there, line));
}

INLINE void encode_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, uint8_t *sketch) {
    encoding e;
    e.dim = dim;
    for (uint32_t t = 0; t < tokens; t += LANES, sketch += sketch_block_bytes(dim)) {
        uint32_t here = tokens - t < LANES ? tokens - t : LANES;
        for (uint32_t i = 0; i < LANES; i++)
            e.rows[i] = keys + (t + (i < here ? i : here - 1)) * stride_bytes;
        encode_lanes(dtype, &e, here, sketch);
    }
}

void sketch_avx512(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *sketch) {
    if (dim % LANES || dim > CHANNELS_MAX)
        sketch_avx2(dtype, keys, stride_bytes, tokens, dim, sketch);
    else if (dtype == KERNEL_BFLOAT16)
        encode_as(KERNEL_BFLOAT16, keys, stride_bytes, tokens, dim, sketch);
    else if (dtype == KERNEL_FLOAT16)
        encode_as(KERNEL_FLOAT16, keys, stride_bytes, tokens, dim, sketch);
    else
        encode_as(KERNEL_FLOAT32, keys, stride_bytes, tokens, dim, sketch);
}

/* ---- estimate ---- */

/* Four codes of each token by the same four of a query. gcc would load them to a register first: as
 * many instructions again, which is what limits the loop. */
INLINE __m512i add_products(__m512i sums, __m512i codes, const int8_t *four) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(codes), "m"(*(const int8_t(*)[4])four));
    return sums;
}

/* Raises the maxima of 16 tokens by 1 to 4 queries, before their scales. Few queries have several
 * sums each, which do not wait for one another. */
INLINE __m512 estimate_queries(const uint8_t *block, uint32_t lines, const sketch_query *queries,
                               int queries_here, __m512 maxima) {
    const __m512i low = _mm512_set1_epi8(3);
    const int sums_each = queries_here > 2 ? 2 : 4;
    __m512i sums[QUERY_BLOCK][4];
    UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < sums_each; i++)
        sums[q][i] = _mm512_setzero_si512();
    for (uint32_t line = 0; line < lines; line++) {
        __m512i packed = _mm512_load_si512(block + line * SKETCH_LINE_BYTES), codes[4];
        codes[0] = _mm512_and_si512(packed, low);
        codes[1] = _mm512_and_si512(_mm512_srli_epi16(packed, 2), low);
        codes[2] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), low);
        codes[3] = _mm512_and_si512(_mm512_srli_epi16(packed, 6), low);
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int q = 0; q < queries_here; q++) {
            const int8_t *four = queries[q].codes + line * SKETCH_CHANNELS + 4 * i;
            __m512i *sum = &sums[q][i % sums_each];
            *sum = add_products(*sum, codes[i], four);
        }
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        __m512i sum = _mm512_add_epi32(sums[q][0], sums[q][1]);
        if (sums_each == 4)
            sum = _mm512_add_epi32(sum, _mm512_add_epi32(sums[q][2], sums[q][3]));
        __m512 centred = _mm512_sub_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(queries[q].offset));
        __m512 value = _mm512_mul_ps(centred, _mm512_set1_ps(queries[q].factor));
        maxima = _mm512_max_ps(value, maxima); /* of a NaN: the other one */
    }
    return maxima;
}

INLINE __m512 estimate_block(const uint8_t *block, uint32_t lines, const sketch_query *queries,
                             uint32_t query_count) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    for (uint32_t q = 0; q < query_count; q += QUERY_BLOCK) switch (query_count - q) {
        case 1: best = estimate_queries(block, lines, queries + q, 1, best); break;
        case 2: best = estimate_queries(block, lines, queries + q, 2, best); break;
        case 3: best = estimate_queries(block, lines, queries + q, 3, best); break;
        default: best = estimate_queries(block, lines, queries + q, 4, best);
        }
    return best;
}

/* `lines` may be a constant. */
INLINE void estimate_lines(const sketch_run *run, uint32_t lines, float *best,
                           float (*uppers)[SKETCH_TOKENS]) {
    const __mmask16 seen = (__mmask16)run->seen;
    const __m512 never = _mm512_set1_ps(-INFINITY), slack = _mm512_set1_ps(run->slack);
    bool broken = false;
    for (uint32_t q = 0; q < run->query_count; q++) broken |= isnan(run->queries[q].factor);
    for (uint32_t i = 0; i < run->count; i++) {
        const uint8_t *block = run->blocks[i], *next = run->next[i];
        for (uint32_t line = 0; next && line <= lines; line++)
            _mm_prefetch((const char *)next + line * SKETCH_LINE_BYTES, _MM_HINT_T0);
        __m512 value = estimate_block(block, lines, run->queries, run->query_count);
        __m512 scales = _mm512_load_ps(block + lines * SKETCH_LINE_BYTES);
        if (broken) value = _mm512_set1_ps(NAN);
        __m512 upper = _mm512_mul_ps(_mm512_add_ps(value, slack), scales);
        value = _mm512_mul_ps(value, scales);
        _mm512_storeu_ps(uppers[i], _mm512_mask_mov_ps(never, seen, upper));
        best[i] = _mm512_mask_cmp_ps_mask(seen, value, value, _CMP_UNORD_Q)
                      ? NAN
                      : _mm512_mask_reduce_max_ps(seen, value);
    }
}

void estimate_avx512(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]) {
    const uint32_t lines = sketch_dim(run->dim) / SKETCH_CHANNELS;
    switch (lines) {
    case 4: estimate_lines(run, 4, best, uppers); break;
    case 8: estimate_lines(run, 8, best, uppers); break;
    default: estimate_lines(run, lines, best, uppers);
    }
}

void above_avx512(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,
                  uint16_t *bits) {
    const __m512 border = _mm512_set1_ps(limit);
    for (uint32_t i = 0; i < count; i++)
        bits[i] = _mm512_cmp_ps_mask(_mm512_loadu_ps(values[i]), border, _CMP_NLT_UQ);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int sketch_avx512_is_of_x86_64;
#endif
