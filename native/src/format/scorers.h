/* Scorers that this process gave a pool, and the summaries that they have of its pages. */
#pragma once
#include "format/types.h"

typedef struct pool_scorer {
    cxlkv_scorer scorer;
    uint64_t bytes;
    uint8_t *summaries;          /* [record_layers][kv_heads, the most of any][page]; memory where
                                  * it was touched */
    atomic_ulong *made;          /* bit page * record_layers + row: its summaries are right */
    pthread_mutex_t making;      /* held to make some */
    struct pool_scorer *next;
} pool_scorer;

static inline void bits_clear(atomic_ulong *words, uint64_t first, uint64_t count) {
    for (uint64_t end = first + count, stop; first < end; first = stop) {
        stop = min_u64(end, (first / 64 + 1) * 64);
        uint64_t ones = stop - first == 64 ? UINT64_MAX : (1ull << (stop - first)) - 1;
        atomic_fetch_and_explicit(&words[first / 64], ~(ones << first % 64), memory_order_relaxed);
    }
}

/* What a caller gave. */
int scorer_valid(const cxlkv_scorer *scorer);
/* Under the pool's list lock. */
int scorer_add(cxlkv_pool *pool, const cxlkv_scorer *scorer);
/* NULL: it has none of that id. */
pool_scorer *scorer_find(const cxlkv_pool *pool, uint32_t id);
bool summary_is_made(const cxlkv_pool *pool, const pool_scorer *s, uint32_t page, uint32_t layer);
void summary_set_made(const cxlkv_pool *pool, pool_scorer *s, uint32_t page, uint32_t layer);

static inline uint8_t *summary_of(const cxlkv_pool *pool, const pool_scorer *s, uint32_t page,
                                  uint32_t layer, uint32_t head) {
    uint64_t row = (uint64_t)pool->layers.row_of[layer] * pool->layers.kv_heads + head;
    return s->summaries + (row * pool->geometry.page_count + page) * s->scorer.summary_bytes;
}

static inline const float *scorer_parameters(const cxlkv_pool *pool, const pool_scorer *s,
                                             uint32_t layer, uint32_t head) {
    uint64_t place = (uint64_t)layer * pool->layers.kv_heads + head;
    return s->scorer.parameters ? s->scorer.parameters + place * s->scorer.parameter_count : NULL;
}

/* A page, or its record of a layer, gets other keys. */
void summaries_forget(cxlkv_pool *pool, uint32_t page);
void summary_forget(cxlkv_pool *pool, uint32_t page, uint32_t layer);
void scorers_free(cxlkv_pool *pool);
void scorers_forked(cxlkv_pool *pool); /* in the child, which has a copy of all summaries */
