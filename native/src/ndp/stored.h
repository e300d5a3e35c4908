/* Keys and values as a pool keeps them, scored and summed as they lie: numbers, numbers in a byte,
 * or codes. */
#pragma once
#include "format/layout.h"
#include "ndp/planes.h"
#include "ndp/stored_fp8.h"

static inline stored stored_of(const cxlkv_layout *layout, const kernels *isa, uint32_t kind) {
    stored s = {.isa = isa, .dtype = (int)kernel_dtype(layout, kind),
                .dim = kind_dim(layout, kind), .fp8 = has_fp8(layout, kind),
                .encoded = has_codes(layout, kind)};
    if (!s.encoded) return s;
    s.form = form_of(layout, kind);
    s.upper = code_upper(&s.form);
    s.scales_offset = scales_offset(layout, kind);
    s.planes = has_planes(layout, kind);
    s.lower_offset = s.planes ? lower_offset(layout, kind) : 0;
    return s;
}

static inline code_piece stored_codes(const stored *s, const uint8_t *piece) {
    return (code_piece){piece, (const uint16_t *)(const void *)(piece + s->scales_offset)};
}
static inline const code_query *stored_queries(const kernel_queries *queries) {
    return (const code_query *)queries->packed + queries->first;
}

/* Of pieces of codes, or blocks: the best logit of each over all queries and its first `tokens`
 * tokens, NaN if one is. */
static inline void stored_score_best(const stored *s, const code_piece *blocks,
                                     const void *const *next, uint32_t count, uint32_t tokens,
                                     const kernel_queries *queries, float *best) {
    if (s->planes)
        planes_score_best(s, blocks, next, count, tokens, stored_queries(queries), queries->count,
                          best);
    else
        s->isa->code_score_best(&s->form, blocks, next, count, tokens, stored_queries(queries),
                                queries->count, best);
}

/* Logits of the tokens [first, first + count) of a head's rows, or piece. Those of codes have the
 * scale from queries_pack() on. */
static inline void stored_score(const stored *s, const uint8_t *rows, size_t row_bytes,
                                uint32_t first, uint32_t count, const kernel_queries *queries,
                                float scale, float *logits, size_t logit_stride,
                                const void *next) {
    if (s->planes)
        planes_score(s, stored_codes(s, rows), first, count, stored_queries(queries),
                     queries->count, logits, logit_stride, next);
    else if (__builtin_expect(s->encoded, 0))
        s->isa->code_score(&s->form, stored_codes(s, rows), first, count, stored_queries(queries),
                           queries->count, logits, logit_stride, next);
    else if (__builtin_expect(s->fp8, 0))
        fp8_score(s, rows + first * row_bytes, count, queries, scale, logits, logit_stride, next);
    else
        s->isa->score(s->dtype, rows + first * row_bytes, row_bytes, count, s->dim, queries, scale,
                      logits, logit_stride, next);
}

/* The largest of them for each query, NaN if one is: nothing is greater than a NaN. */
static inline void stored_score_max(const stored *s, const uint8_t *rows, size_t row_bytes,
                                    uint32_t first, uint32_t count, const kernel_queries *queries,
                                    float scale, float *maxima, const void *next) {
    enum { QUERIES = 16 };
    float logits[QUERIES * CODE_TOKENS];
    if (s->fp8) {
        fp8_score_max(s, rows + first * row_bytes, count, queries, scale, maxima, next);
        return;
    }
    if (!s->encoded) {
        s->isa->score_max(s->dtype, rows + first * row_bytes, row_bytes, count, s->dim, queries,
                          scale, maxima, next);
        return;
    }
    for (uint32_t j = 0; j < queries->count; j += QUERIES) {
        kernel_queries some = *queries;
        some.first += j;
        some.count = min_u32(QUERIES, queries->count - j);
        for (uint32_t t = first; t < first + count; t += CODE_TOKENS) {
            uint32_t here = min_u32(CODE_TOKENS, first + count - t);
            stored_score(s, rows, row_bytes, t, here, &some, scale, logits, here,
                         t == first && j == 0 ? next : NULL);
            for (uint32_t i = 0; i < some.count; i++) {
                float best = kernels_largest(logits + i * here, here), *to = maxima + j + i;
                if (t == first || best > *to || best != best) *to = best; /* a NaN stays */
            }
        }
    }
}

/* Of single keys that are not codes: kernels_score_each(). */
static inline void stored_score_each(const stored *s, const void *const *keys, uint32_t count,
                                     const kernel_queries *queries, float scale, float *best) {
    if (s->fp8) fp8_score_each(s, keys, count, queries, scale, best);
    else kernels_score_each(s->isa, s->dtype, keys, count, s->dim, queries, scale, best);
}

/* accumulator[j][dim] += weights of the tokens [first, first + count) times their values; those of
 * codes in the rotated space. */
static inline void stored_accumulate(const stored *s, const uint8_t *rows, size_t row_bytes,
                                     uint32_t first, uint32_t count, const float *weights,
                                     size_t weight_stride, uint32_t query_count,
                                     float *accumulator, const void *next) {
    if (s->planes)
        planes_accumulate(s, stored_codes(s, rows), first, count, weights, weight_stride,
                          query_count, accumulator, next);
    else if (__builtin_expect(s->encoded, 0))
        s->isa->code_accumulate(&s->form, stored_codes(s, rows), first, count, weights,
                                weight_stride, query_count, accumulator, next);
    else if (__builtin_expect(s->fp8, 0))
        fp8_accumulate(s, rows + first * row_bytes, count, weights, weight_stride, query_count,
                       accumulator, next);
    else
        s->isa->accumulate(s->dtype, rows + first * row_bytes, row_bytes, count, s->dim, weights,
                           weight_stride, query_count, accumulator, next);
}

/* What codes of the tokens [first, first + count) stand for, in the rotated space: [count][dim]. */
static inline void stored_decode(const stored *s, const uint8_t *piece, uint32_t first,
                                 uint32_t count, float *rows) {
    if (s->planes) planes_decode(s, stored_codes(s, piece), first, count, rows);
    else s->isa->code_decode(&s->form, stored_codes(s, piece), first, count, rows);
}
