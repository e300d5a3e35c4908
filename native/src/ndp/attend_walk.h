/* A span's pages are walked block by block, under one online softmax. */
#pragma once
#include "ndp/types.h"

/* K or V of page i of a block and a head, NULL behind its end. */
static inline const uint8_t *piece_at(const page_block *block, const page_rows *rows, uint32_t i,
                                      uint32_t head) {
    return i < block->count ? rows[i].first + head * rows[i].head_bytes : NULL;
}

/* The next pages, none at the end. Nothing of them is read yet. */
int block_take(span_walk *w, page_block *block);
int block_verify(const span_walk *w, const page_block *block);
/* Pages of a block: enough tokens for a vector or four, not more bytes than a cache holds twice. */
uint32_t block_pages(const attend_job *job, const span *s);
/* The log weights of a block's tokens, one page behind the other, to w->weights. */
int block_weigh(const span_walk *w, const page_block *block);
/* Logits [count][tokens] under args->softcap. */
void cap_logits(const attend_job *job, float *logits, uint64_t count);
/* logits [count][tokens] to weights; raises the queries' maxima, and rescales all else. */
void online_softmax(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                    const softmax_state *state);
