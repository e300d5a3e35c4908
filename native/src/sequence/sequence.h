/* Sequences are made, entered, grown and cut; their tails. */
#pragma once
#include "sequence/types.h"

int sequence_make(cxlkv_pool *pool, cxlkv_sequence **sequence);
int sequence_usable(const cxlkv_sequence *sequence);     /* under its lock */
/* pool_enter(), its lock, and that it is usable; on an error nothing of this is held. */
int sequence_enter(cxlkv_sequence *sequence, bool write);
void sequence_leave(cxlkv_sequence *sequence);
/* The value of `work` between the two, or the error of the first. */
#define IN_SEQUENCE(sequence, write, work)                   \
    __extension__({                                          \
        int64_t entered = sequence_enter(sequence, write);   \
        if (entered == 0) {                                  \
            entered = (work);                                \
            sequence_leave(sequence);                        \
        }                                                    \
        entered;                                             \
    })
uint64_t sequence_even_tokens(const cxlkv_sequence *sequence);  /* UINT64_MAX when layers differ */
void sequences_expire(cxlkv_pool *pool);
/* OWNER_SEQUENCES: a pool has no sequence yet; a forked child; all are released; it ends. */
int sequences_begin(cxlkv_pool *pool);
void sequences_forked(cxlkv_pool *pool);
void sequences_release(cxlkv_pool *pool);
void sequences_free(cxlkv_pool *pool);
/* Room for pages [page_count, page_count + count) of a part; then sequence_push() cannot fail. */
int sequence_reserve(cxlkv_sequence *sequence, uint32_t part, uint32_t count);
void sequence_push(cxlkv_sequence *sequence, uint32_t part, uint32_t index, uint32_t page);
/* Takes back the pages from page_count on, which this call pushed: nobody shares them, so it cannot
 * fail. */
void sequence_pull(cxlkv_sequence *sequence, uint32_t page_count);
/* Gives back a part's pages before `first`; under the host lock. */
int sequence_advance(cxlkv_sequence *sequence, uint32_t part, uint32_t first);
/* The first page of a part that the token at `position` sees. */
uint32_t window_page(const cxlkv_pool *pool, uint32_t part, uint64_t position);
int sequence_cut(cxlkv_sequence *sequence, uint32_t page_count);
/* The first `filled` tokens of a complete page; on an error *out may be one, to be dropped. */
int tail_from_page(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t filled, tail **out);
tail *tail_make(cxlkv_pool *pool);
tail *tail_copy(cxlkv_pool *pool, uint32_t layer, tail *from,
                uint32_t filled); /* its first tokens */
void tail_drop(cxlkv_pool *pool, tail *tail);
