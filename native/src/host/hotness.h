/* How much pages are used, their hotness, and when published ones were asked for (reuse). */
#pragma once
#include "format/types.h"

/* An epoch ends when each page could have been used so often. */
enum { EPOCH_USES_PER_PAGE = 4 };
enum { HOTNESS_BITS = 16, HOTNESS_MAX = (1 << HOTNESS_BITS) - 1 };
/* A record this many epochs ahead was written by a thread that came later, and is no old one. */
enum { AHEAD_EPOCHS = 256 };

static inline uint32_t epoch_now(const host_state *host) {
    uint64_t uses = atomic_load_explicit(&host->hotness_uses, memory_order_relaxed);
    uint64_t advances = atomic_load_explicit(&host->hotness_advances, memory_order_relaxed);
    return (uint32_t)(advances + uses / ((uint64_t)EPOCH_USES_PER_PAGE * host->page_count));
}

/* ---- hotness: epoch of the last use (16 bits), then the count (16), halved with each epoch since.
 * After 65,280 epochs without a use a count seems new again, for the next 256 of them. ---- */

static inline uint32_t epochs_since(uint32_t hotness, uint32_t epoch) {
    uint32_t passed = (epoch - (hotness >> HOTNESS_BITS)) & HOTNESS_MAX;
    return passed > HOTNESS_MAX - AHEAD_EPOCHS ? 0 : passed;
}

static inline uint32_t decayed(uint32_t hotness, uint32_t epoch) {
    uint32_t passed = epochs_since(hotness, epoch);
    return passed >= HOTNESS_BITS ? 0 : (hotness & HOTNESS_MAX) >> passed;
}

/* Some uses more. Threads that meet here may lose some: it is a hint. */
static inline void hotness_raise(atomic_uint *hotness, uint32_t epoch, uint32_t uses) {
    uint32_t before = atomic_load_explicit(hotness, memory_order_relaxed);
    uint32_t count = decayed(before, epoch);
    if (count && epochs_since(before, epoch) == 0) epoch = before >> HOTNESS_BITS;
    count += min_u32(uses, HOTNESS_MAX - count);
    atomic_store_explicit(hotness, epoch << HOTNESS_BITS | count, memory_order_relaxed);
}

/* One call's: all of it in the epoch in which it began to count. */
typedef struct counting {
    atomic_uint *hotness;
    uint32_t epoch;
    uint64_t uses;
} counting;

static inline counting counting_begin(const cxlkv_pool *pool) {
    return (counting){.hotness = pool->hotness, .epoch = epoch_now(pool->host)};
}

static inline void counting_end(cxlkv_pool *pool, const counting *c) {
    if (c->uses)
        atomic_fetch_add_explicit(&pool->host->hotness_uses, c->uses, memory_order_relaxed);
}

static inline void count_page(counting *c, uint32_t page, uint32_t uses) {
    hotness_raise(&c->hotness[page], c->epoch, uses);
    c->uses += uses;
}

/* ---- reuse: all under the host lock ---- */
/* By its descriptor. */
static inline void hotness_found(cxlkv_pool *pool, uint32_t page, uint32_t part) {
    pool->reuse[page].part = (uint16_t)min_u32(part, UINT16_MAX);
}

/* ---- hotness.c ---- */

int64_t hotness_advance(cxlkv_pool *pool);    /* begins an epoch; returns its number */
/* Whether this process's uses are counted; by_mass: whether by the attention that pages got. */
void hotness_set(cxlkv_pool *pool, bool by_mass, bool on);
/* parent: the page before it, or NO_PAGE. */
void hotness_published(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t parent);
void hotness_follows(cxlkv_pool *pool, uint32_t page, uint32_t parent);
/* Of objects: the one before it in its text, PARENT_LOST: that one is not there. */
#define PARENT_LOST (NO_PAGE - 1)
void hotness_chained(cxlkv_pool *pool, uint32_t page, uint32_t parent);
/* An object is found, and with it all before it; each once since a clock. */
void hotness_reached(cxlkv_pool *pool, uint32_t page, uint32_t since);
void hotness_asked(cxlkv_pool *pool, uint32_t page);  /* the last page of a hit, not full */
/* Pages [first, count) of a part are a hit's; found is [count][part_count]. */
void hotness_matched(cxlkv_pool *pool, const uint32_t *found, uint32_t part, uint32_t first,
                     uint32_t count);
