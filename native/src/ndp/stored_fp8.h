/* Rows of float8_e4m3, one behind another, scored and summed; else as kernels.h says. */
#pragma once
#include "ndp/types.h"

void fp8_score(const stored *s, const uint8_t *rows, uint32_t count, const kernel_queries *queries,
               float scale, float *logits, size_t logit_stride, const uint8_t *next);
void fp8_score_max(const stored *s, const uint8_t *rows, uint32_t count,
                   const kernel_queries *queries, float scale, float *maxima, const uint8_t *next);
void fp8_score_each(const stored *s, const void *const *keys, uint32_t count,
                    const kernel_queries *queries, float scale, float *best);
/* A digest of them is bytes, too. */
void fp8_bound(const stored *s, const uint8_t *digest, const kernel_queries *queries, float scale,
               float *bounds, const uint8_t *next);
void fp8_accumulate(const stored *s, const uint8_t *rows, uint32_t count, const float *weights,
                    size_t weight_stride, uint32_t query_count, float *accumulator,
                    const uint8_t *next);
/* As numbers of dtype. */
void fp8_fetch(const stored *s, int dtype, const uint8_t *rows, uint32_t count, uint8_t *to);
