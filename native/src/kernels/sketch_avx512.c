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
#include "kernels/sketch.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { LANES = 16, QUERY_BLOCK = 4 };

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
    const __m512 signs = _mm512_mask_mov_ps(_mm512_set1_ps(1), upper, _mm512_set1_ps(-1));
    return _mm512_fmadd_ps(x, signs, other);
}

/* All blocks of `vectors` * 16 channels, in registers when `vectors` is a constant; yet to be
 * divided by the root of their number. */
INLINE void transform(__m512 *x, uint32_t vectors) {
    UNROLL for (uint32_t half = 1; half < vectors; half *= 2)
        UNROLL for (uint32_t i = 0; i < vectors; i++)
            if (!(i & half)) {
                __m512 a = x[i], b = x[i + half];
                x[i] = _mm512_add_ps(a, b);
                x[i + half] = _mm512_sub_ps(a, b);
            }
    UNROLL for (uint32_t i = 0; i < vectors; i++)
        x[i] = butterfly(butterfly(butterfly(butterfly(x[i], 1), 2), 4), 8);
}

/* Sizes that are no constants, and what is left below 16 channels. */
static void transform_rest(float *rotated, uint32_t dim) {
    for (uint32_t first = 0; first < dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(dim - first));
        sketch_transform(rotated + first, size);
        first += size;
    }
}

/* Codes and scale of one token, whose channels are 1 / norm too large; those from dim on are
 * zeros. */
INLINE void encode_token(const __m512 *x, uint32_t vectors, uint32_t dim, float norm,
                         uint8_t *block, uint32_t token) {
    __m512 squares = _mm512_setzero_ps(), products = _mm512_setzero_ps();
    UNROLL for (uint32_t i = 0; i < vectors; i++) squares = _mm512_fmadd_ps(x[i], x[i], squares);
    float length = _mm512_reduce_add_ps(squares);
    /* r itself belongs to [r, inf), -r to [-r, 0): with few channels that happens. */
    const __m512 mean = _mm512_set1_ps(length / (float)dim);
    const __m512 above = _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(mean), _mm512_set1_epi32(1)));
    UNROLL for (uint32_t i = 0; i < vectors; i++) {
        __mmask16 high = _mm512_cmp_ps_mask(x[i], _mm512_setzero_ps(), _CMP_GE_OQ);
        __m512 border = _mm512_mask_mov_ps(above, high, mean);
        __mmask16 outer = _mm512_cmp_ps_mask(_mm512_mul_ps(x[i], x[i]), border, _CMP_GE_OQ);
        __mmask16 low = _kxnor_mask16(outer, high);
        __m512 level = _mm512_mask_mov_ps(_mm512_set1_ps(0.5f), outer, _mm512_set1_ps(1.5f));
        products = _mm512_fmadd_ps(_mm512_abs_ps(x[i]), level, products);
        uint32_t packed = _pdep_u32(low, 0x55555555) | _pdep_u32(high, 0xaaaaaaaa);
        packed &= sketch_last_channels(dim - i * LANES);
        memcpy(block + i * SKETCH_LINE_BYTES + token * sizeof(packed), &packed, sizeof(packed));
    }
    float scale = length > 0 ? norm * length / _mm512_reduce_add_ps(products) : 0;
    if (!isfinite(length)) scale = NAN;
    memcpy(block + vectors * SKETCH_LINE_BYTES + token * sizeof(scale), &scale, sizeof(scale));
}

INLINE __m512 flip(__m512 x, const uint16_t *flips) {
    return _mm512_castsi512_ps(_mm512_mask_xor_epi32(_mm512_castps_si512(x), *flips,
                                                     _mm512_castps_si512(x),
                                                     _mm512_set1_epi32((int)0x80000000)));
}

enum { FLIPS = 4096 / LANES };

/* A dim of `vectors` * 16, a power of two and a constant. */
INLINE void encode_in_registers(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                                uint32_t vectors, const uint16_t *flips, uint8_t *sketch) {
    const size_t lane_bytes = dtype == KERNEL_FLOAT32 ? 64 : 32;
    const float norm = 1 / sqrtf((float)(vectors * LANES));
    for (uint32_t t = 0; t < tokens; t++) {
        __m512 x[16];
        UNROLL for (uint32_t i = 0; i < vectors; i++)
            x[i] = flip(load_lanes(dtype, keys + t * stride_bytes + i * lane_bytes), flips + i);
        transform(x, vectors);
        encode_token(x, vectors, vectors * LANES, norm,
                     sketch + t / SKETCH_TOKENS * sketch_block_bytes(vectors * LANES),
                     t % SKETCH_TOKENS);
    }
}

static void encode_any(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                       uint32_t dim, const uint16_t *flips, uint8_t *sketch) {
    _Alignas(64) float rotated[4096];
    uint32_t padded = sketch_dim(dim);
    for (uint32_t t = 0; t < tokens; t++) {
        kernels_serial.to_float(dtype, keys + t * stride_bytes, dim, rotated);
        memset(rotated + dim, 0, (padded - dim) * sizeof(float));
        for (uint32_t i = 0; i < padded / LANES; i++)
            _mm512_store_ps(rotated + i * LANES,
                            flip(_mm512_load_ps(rotated + i * LANES), flips + i));
        transform_rest(rotated, dim);
        encode_token((const __m512 *)rotated, padded / LANES, dim, 1,
                     sketch + t / SKETCH_TOKENS * sketch_block_bytes(dim), t % SKETCH_TOKENS);
    }
}

INLINE void encode_as(int dtype, const char *keys, size_t stride_bytes, uint32_t tokens,
                      uint32_t dim, uint8_t *sketch) {
    uint16_t flips[FLIPS];
    for (uint32_t i = 0; i < sketch_dim(dim) / LANES; i++)
        flips[i] = (uint16_t)(sketch_signs(i * LANES / 64) >> i * LANES % 64);
    switch (dim) {
    case 32: encode_in_registers(dtype, keys, stride_bytes, tokens, 2, flips, sketch); break;
    case 64: encode_in_registers(dtype, keys, stride_bytes, tokens, 4, flips, sketch); break;
    case 128: encode_in_registers(dtype, keys, stride_bytes, tokens, 8, flips, sketch); break;
    case 256: encode_in_registers(dtype, keys, stride_bytes, tokens, 16, flips, sketch); break;
    default: encode_any(dtype, keys, stride_bytes, tokens, dim, flips, sketch);
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
