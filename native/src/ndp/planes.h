/* Pieces in two planes (kernels/code_planes.h), read in all 8 bits or in the upper 4. */
#pragma once
#include "ndp/types.h"

/* Of the first tokens of a block, by its upper plane: the best logit of each over the queries, plus
 * slack * its scale, in uppers[CODE_TOKENS], -infinity where it has none; a NaN stays one. Returns
 * the best of all without slack. next: the upper plane of a block, which is asked for. */
float planes_estimate(const stored *s, code_piece upper, uint32_t tokens,
                      const code_query *queries, uint32_t query_count, float slack, float *uppers,
                      const uint8_t *next);
/* In all 8 bits: to the bit what codes of 8 bits give. Both planes of a block are joined in the
 * cache first; pieces and blocks are given by their upper planes. */
void planes_score(const stored *s, code_piece piece, uint32_t first, uint32_t count,
                  const code_query *queries, uint32_t query_count, float *logits,
                  size_t logit_stride, const void *next);
void planes_score_best(const stored *s, const code_piece *pieces, const void *const *next,
                       uint32_t count, uint32_t tokens, const code_query *queries,
                       uint32_t query_count, float *best);
void planes_accumulate(const stored *s, code_piece piece, uint32_t first, uint32_t count,
                       const float *weights, size_t weight_stride, uint32_t query_count,
                       float *accumulator, const void *next);
void planes_decode(const stored *s, code_piece piece, uint32_t first, uint32_t count, float *rows);
