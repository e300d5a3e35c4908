/* Sequences are handed over by a handle. */
#pragma once
#include "sequence/types.h"

/* Under the host lock. Is the page what a handle says, and still alive? */
int page_acquire_check(cxlkv_pool *pool, uint32_t page, uint32_t part, uint64_t generation,
                       uint32_t tokens);
/* Writes the first `filled` tokens of a tail to a (page, layer). */
int export_layer(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t filled);
/* A last page that is not full, pushed as if it were, becomes an open tail of this process. */
int reopen_tail(cxlkv_sequence *sequence, uint64_t tokens);
/* Complete pages of one part behind those that it has, held under adopt()'s rules; entries are as
 * in a handle. On an error some of them are held: destroy it. */
int sequence_hold(cxlkv_sequence *sequence, uint32_t part, const uint8_t *entries, uint32_t count);
