/* What the AVX-512 tables have in common: kernels_avx512.c, kernels_avx512_bf16.c, kernels_amx.c.
 * To be included where the target is raised. */
#pragma once

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* dtype and the sizes of a block are constants at each call of an inlined body, so that its small
 * loops unroll and its arrays become registers. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { LANES = 16, LINE_BYTES = 64, TOKEN_CHUNK = 16 };

INLINE void prefetch(const char *start, size_t bytes) {
    const char *from = (const char *)((uintptr_t)start);
    if (atomic_load_explicit(&kernels_ask_second_cache, memory_order_relaxed))
        for (size_t at = 0; at < bytes; at += LINE_BYTES) _mm_prefetch(from + at, _MM_HINT_T1);
    else
        for (size_t at = 0; at < bytes; at += LINE_BYTES) _mm_prefetch(from + at, _MM_HINT_T0);
}

/* The first `count` lanes, 0 <= count; 16 and more are all. */
INLINE __mmask16 first_lanes(size_t count) {
    return count >= LANES ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

/* Sums of four vectors, in order, in each 128-bit lane; the lanes are yet to add. */
INLINE __m512 lane_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d even = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d odd = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    return _mm512_add_ps(_mm512_castpd_ps(even), _mm512_castpd_ps(odd));
}

/* Four bounds, from sums that are yet to add over the 128-bit lanes. */
INLINE void store_bounds(__m512 lanes, int queries_here, float scale, float *bounds) {
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps(lanes, 1));
    __m128 total = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    _mm_mask_storeu_ps(bounds, (__mmask8)((1 << queries_here) - 1),
                       _mm_mul_ps(total, _mm_set1_ps(scale)));
}

/* max takes its second operand when one is NaN: an old NaN stays, and a new one is put in. */
INLINE __m512 max_with_nan(__m512 candidate, __m512 old) {
    __mmask16 is_nan = _mm512_cmp_ps_mask(candidate, candidate, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(_mm512_max_ps(candidate, old), is_nan, candidate);
}

INLINE float max_of_two(float candidate, float old) {
    return candidate > old || candidate != candidate ? candidate : old;
}

/* ---- scores, whatever multiplies ---- */

/* One block of 16 logits, yet to scale: 16 / queries_here keys by `queries_here` (1, 2 or 4)
 * queries; lane = query * (16 / queries_here) + key. Also asks for the keys at `next`, if it is not
 * NULL. */
typedef __m512 dot_block(int dtype, const char *const *keys, uint32_t dim, const char *queries,
                         size_t query_bytes, int queries_here, const char *next);

/* One call of score or score_max: exactly one of logits and maxima is not NULL. It is made once and
 * handed down by address. A copy would be read in larger pieces than it was written in, which waits
 * until the writes have left the core: 40 ns a page. */
typedef struct score_call {
    int dtype;
    uint32_t dim;
    const char *keys;
    size_t row_bytes;
    uint32_t tokens;
    const char *queries; /* the first that is meant; they lie query_bytes apart */
    size_t query_bytes;
    float scale;
    float *logits;
    size_t logit_stride;
    float *maxima;
    const char *next;
} score_call;

/* At most 16 tokens by at most 4 queries. */
typedef struct score_part {
    const char *rows[TOKEN_CHUNK]; /* what is beyond the last token repeats that one */
    uint32_t token, tokens_used;
    uint32_t query, queries_used;
    const char *next;
} score_part;

/* Bytes of a row without a gap behind it. */
INLINE size_t key_bytes(const score_call *call) {
    return call->dim * (call->dtype == KERNEL_FLOAT32 ? (size_t)4 : 2);
}

/* The sums of 16 vectors, in order. */
INLINE __m512 sums_of(const __m512 vectors[LANES]) {
    __m512 quarters[4];
    UNROLL for (int i = 0; i < 4; i++) quarters[i] = lane_sums(
        vectors[4 * i], vectors[4 * i + 1], vectors[4 * i + 2], vectors[4 * i + 3]);
    __m512 halves[2];
    UNROLL for (int i = 0; i < 2; i++) {
        __m512 even = _mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0x88);
        __m512 odd = _mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0xdd);
        halves[i] = _mm512_add_ps(even, odd);
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
}

/* `tokens_used` logits of each query, of a block. */
INLINE void store_block(__m512 block, float *logits, size_t logit_stride, int queries_here,
                        uint32_t queries_used, uint32_t tokens_used) {
    float lanes[LANES];
    if (queries_here == 1) {
        _mm512_mask_storeu_ps(logits, first_lanes(tokens_used), block);
        return;
    }
    _mm512_storeu_ps(lanes, block);
    for (uint32_t j = 0; j < queries_used; j++)
        memcpy(logits + j * logit_stride, lanes + j * (LANES / (uint32_t)queries_here),
               tokens_used * sizeof *logits);
}

/* The largest of each query's lanes, to its maximum; is_new: that one is not set yet. */
INLINE void raise_maxima(__m512 block, float *maxima, int queries_here, uint32_t queries_used,
                         bool is_new) {
    const int step = LANES / queries_here;
    block = max_with_nan(_mm512_permute_ps(block, 0xb1), block);
    block = max_with_nan(_mm512_permute_ps(block, 0x4e), block);
    if (queries_here <= 2)
        block = max_with_nan(_mm512_shuffle_f32x4(block, block, 0xb1), block);
    if (queries_here == 1)
        block = max_with_nan(_mm512_shuffle_f32x4(block, block, 0x4e), block);
    float found[4];
    __m512i firsts = _mm512_castsi128_si512(_mm_setr_epi32(0, step, 2 * step, 3 * step));
    __m128 first = _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, block));
    if (is_new && queries_used == 4) {
        _mm_storeu_ps(maxima, first);
        return;
    }
    _mm_storeu_ps(found, first);
    for (uint32_t j = 0; j < queries_used; j++)
        maxima[j] = is_new ? found[j] : max_of_two(found[j], maxima[j]);
}

INLINE void score_chunk(int dtype, dot_block *dot, const score_call *call, const score_part *part,
                        int queries_here) {
    const uint32_t step = LANES / (uint32_t)queries_here;
    const bool asks = part->query == 0;
    const size_t next_bytes = key_bytes(call);
    const char *queries = call->queries + part->query * call->query_bytes;
    __m512 largest = _mm512_set1_ps(-INFINITY);
    for (uint32_t t = 0; t < part->tokens_used; t += step) {
        const char *next = asks ? part->next + t * next_bytes : NULL;
        __m512 block = dot(dtype, part->rows + t, call->dim, queries, call->query_bytes,
                           queries_here, next);
        block = _mm512_mul_ps(block, _mm512_set1_ps(call->scale));
        if (call->maxima)
            largest = max_with_nan(block, largest);
        else
            store_block(block, call->logits + part->query * call->logit_stride + part->token + t,
                        call->logit_stride, queries_here, part->queries_used,
                        part->tokens_used - t < step ? part->tokens_used - t : step);
    }
    if (call->maxima)
        raise_maxima(largest, call->maxima + part->query, queries_here, part->queries_used,
                     part->token == 0);
}

INLINE void place_rows(const score_call *call, uint32_t token, score_part *part) {
    part->token = token;
    part->tokens_used = call->tokens - token < TOKEN_CHUNK ? call->tokens - token : TOKEN_CHUNK;
    const char *first = call->keys + token * call->row_bytes;
    part->next = call->next ? call->next + token * key_bytes(call) : first; /* which is here */
    UNROLL for (uint32_t t = 0; t < TOKEN_CHUNK; t++) part->rows[t] =
        first + (t < part->tokens_used ? t : part->tokens_used - 1) * call->row_bytes;
}

/* ---- from kernels_avx512.c, for the other two ---- */

void avx512_score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next);
void avx512_score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima,
                      const void *next);
void avx512_accumulate(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
                       uint32_t dim, const float *weights, size_t weight_stride,
                       uint32_t query_count, float *accumulator, const void *next);
void avx512_accumulate_pieces(int dtype, const void *const *values, const void *const *next,
                              uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                              const float *weights, size_t weight_stride, uint32_t query_count,
                              float *accumulator);
void avx512_bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                  float scale, float *bounds, const void *next);
void avx512_digest(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *digest);
float avx512_exp_sum(float *values, uint32_t count, float shift);
bool avx512_online_softmax(float *logits, uint32_t tokens, uint32_t count, float (*states)[2],
                           float *factors);
bool avx512_part_sums(const float *weights, uint32_t parts, uint32_t tokens, uint32_t count,
                      float *sums, size_t stride);
void avx512_to_float(int dtype, const void *source, size_t count, float *destination);
void avx512_from_float(int dtype, const float *source, size_t count, void *destination);

/* ---- from kernels_avx512_bf16.c, for kernels_amx.c ---- */

size_t avx512_bf16_packed_bytes(uint32_t dim, uint32_t query_count);
bool avx512_bf16_pack(int dtype, const float *rows, uint32_t dim, uint32_t query_count,
                      void *packed);
void avx512_bf16_score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                       const kernel_queries *queries, float scale, float *logits,
                       size_t logit_stride, const void *next);
bool avx512_bf16_score_pieces(int dtype, const void *const *pieces, const void *const *next,
                              uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                              const kernel_queries *queries, float scale, float *best);
void avx512_bf16_score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens,
                           uint32_t dim, const kernel_queries *queries, float scale,
                           float *maxima, const void *next);
void avx512_bf16_bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                       float scale, float *bounds, const void *next);

void avx512_store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                       size_t row_bytes);

/* From kernels_avx2.c. */
void avx2_store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                     size_t row_bytes);
