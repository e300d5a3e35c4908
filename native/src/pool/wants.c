/* A host without room tells the others, and they find out which of their published pages stand in
 * the way. What is evicted is for the programs of a host to say: nothing here frees a page. */
#include <stdlib.h>

#include "pool/hooks.h"
#include "pool/pages.h"
#include "pool/peers.h"

enum { WANT_BEATS = 2 * BEATS_A_LEASE };

static int64_t want(cxlkv_pool *pool, uint64_t page_count) {
    uint64_t slots = pool->geometry.slab_slots;
    pool->host->wanted_extents = (page_count + slots - 1) / slots;
    pool->host->wanted_beats = page_count ? WANT_BEATS : 0;
    peers_beat(pool, true);
    return 0;
}

int64_t cxlkv_pages_want(cxlkv_pool *pool, uint64_t page_count) {
    if (!pool->shared) return 0;
    return IN_POOL(pool, HOST_LOCKED(pool, want(pool, page_count)));
}

int64_t cxlkv_extents_wanted(cxlkv_pool *pool) {
    if (!pool->shared) return 0;
    return IN_POOL(pool, HOST_LOCKED(pool, (int64_t)extents_wanted(pool)));
}

bool page_is_evictable(const cxlkv_pool *pool, uint32_t page) {
    const page_info *info = &pool->pages[page];
    return info->published && !info->holders && !info->pinned && !info->retired &&
           page_is_ours(pool, page);
}

/* For how long nobody has asked for any page of it, in pages asked for; 0: it is not ours, or not
 * all that is in it may go. Empty ones are the oldest of all. */
static uint64_t age_of(const cxlkv_pool *pool, uint32_t extent) {
    uint32_t slots = pool->geometry.slab_slots, first = extent * slots;
    uint64_t age = UINT64_MAX;
    for (uint32_t page = first; page < first + slots; page++) {
        if (page_is_ours(pool, page) && page_is_free(pool, page)) continue;
        if (!page_is_evictable(pool, page)) return 0;
        age = min_u64(age, 1 + (uint32_t)((uint32_t)pool->host->clock - pool->reuse[page].used));
    }
    return age;
}

static uint32_t oldest(const uint64_t *ages, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t extent = 1; extent < count; extent++)
        if (ages[extent] > ages[found]) found = extent;
    return found;
}

/* One that is empty stays with us: extents_offer(). */
static int64_t choose(const cxlkv_pool *pool, uint64_t *ages, uint32_t *pages) {
    uint32_t count = pool->geometry.extent_count, slots = pool->geometry.slab_slots;
    int64_t chosen = 0;
    uint64_t wanted = extents_wanted(pool);
    if (wanted == 0) return 0;
    for (uint32_t extent = 0; extent < count; extent++) ages[extent] = age_of(pool, extent);
    for (uint64_t left = wanted + 1; left; left--) {
        uint32_t extent = oldest(ages, count);
        if (ages[extent] == 0) break;
        ages[extent] = 0;
        for (uint32_t page = extent * slots; page < (extent + 1) * slots; page++)
            if (page_is_evictable(pool, page)) pages[chosen++] = page;
    }
    return chosen;
}

int64_t cxlkv_pages_wanted(cxlkv_pool *pool, uint32_t *pages, uint64_t capacity) {
    if (capacity < pool->geometry.page_count)
        return fail(CXLKV_E_ROOM, "room for %u pages is wanted", pool->geometry.page_count);
    if (!pool->shared) return 0;
    uint64_t *ages = malloc(pool->geometry.extent_count * sizeof(*ages));
    if (!ages) return fail(ENOMEM, "no memory for %u extents", pool->geometry.extent_count);
    int64_t found = IN_POOL(pool, (hooks.sequences_expire(pool),
                                   HOST_LOCKED(pool, choose(pool, ages, pages))));
    free(ages);
    return found;
}
