/* A host without room tells the others, and they find out which of their published pages stand in
 * the way. What is evicted is for the programs of a host to say: nothing here frees a page. */
#include "coherence/claims.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"
#include "sharing/extents.h"
#include "sharing/shares.h"
#include "sharing/wants.h"

/* ---- shares ---- */

/* Under no lock: it waits while a host is being fenced. */
static int64_t look(cxlkv_pool *pool, shares *found) {
    const hosts turn = hosts_outside(pool);
    extent_owner *owners = malloc(pool->geometry.extent_count * sizeof(*owners));
    if (!owners) return fail(ENOMEM, "no memory for %u extents", pool->geometry.extent_count);
    int64_t code = hosts_owners(&turn, owners);
    if (code == -CXLKV_E_CORRUPT) code = 0; /* what is damaged is nobody's; check() tells */
    if (code == 0) code = HOST_LOCKED(pool, (shares_look(pool, owners, found), 0));
    free(owners);
    return code;
}

/* What it may take is wanted, too: nobody else is to have that meanwhile. */
static uint64_t wanted_of(const shares *s, uint64_t missing, bool within_share) {
    uint64_t extents = missing + shares_takeable(s), own = s->owned[s->self];
    if (!within_share) return extents;
    if (extents < own) extents = own;
    return min_u64(extents, s->share - min_u64(own, s->share));
}

static int64_t say(cxlkv_pool *pool, const shares *s, uint64_t page_count, bool within_share) {
    const uint64_t missing = extents_of(pool, page_count);
    extents_want(pool, missing ? wanted_of(s, missing, within_share) : 0, 2 * pool->lease_ns);
    peers_beat(pool, true);
    return 0;
}

static int64_t want_pages(cxlkv_pool *pool, uint64_t page_count, bool within_share) {
    shares found;
    int64_t code = page_count ? look(pool, &found) : 0;
    return code < 0 ? code : HOST_LOCKED(pool, say(pool, &found, page_count, within_share));
}

int64_t cxlkv_pages_want(cxlkv_pool *pool, uint64_t page_count, uint32_t within_share) {
    if (!pool->shared) return 0;
    return IN_POOL(pool, want_pages(pool, page_count, within_share));
}

static int64_t owed(cxlkv_pool *pool) {
    shares found;
    int64_t code = HOST_LOCKED(pool, (int64_t)extents_wanted(pool));
    if (code > 0) code = look(pool, &found);
    else return code;
    return code < 0 ? code : shares_owed(&found);
}

static int64_t takeable(cxlkv_pool *pool) {
    shares found;
    int64_t code = look(pool, &found);
    return code < 0 ? code : shares_takeable(&found);
}

int64_t cxlkv_extents_due(cxlkv_pool *pool, uint32_t takes) {
    if (!pool->shared) return 0;
    return IN_POOL(pool, takes ? takeable(pool) : owed(pool));
}

/* ---- giving ---- */

bool page_is_evictable(const cxlkv_pool *pool, uint32_t page) {
    const page_info *info = &pool->pages[page];
    return info->published && !info->holders && !info->pinned && !info->retired &&
           page_is_ours(pool, page);
}

/* The greater, the sooner it goes: first by its priority, which the lowest go before, then by how
 * long ago it was asked for, in pages asked for since. */
static uint64_t turn_of(const cxlkv_pool *pool, const reuse_record *record) {
    uint64_t below = CXLKV_PRIORITY_MAX - min_u32(record->priority, CXLKV_PRIORITY_MAX);
    return below << 33 | (1 + (uint64_t)(uint32_t)((uint32_t)pool->host->clock - record->used));
}

/* Of the page in it that goes last; 0: it is not ours, or not all that is in it may go. Empty ones
 * are the first of all. */
static uint64_t extent_turn(const cxlkv_pool *pool, uint32_t extent) {
    uint32_t slots = pool->geometry.slab_slots, first = extent * slots;
    uint64_t turn = UINT64_MAX;
    for (uint32_t page = first; page < first + slots; page++) {
        if (page_is_ours(pool, page) && page_is_free(pool, page)) continue;
        if (!page_is_evictable(pool, page)) return 0;
        turn = min_u64(turn, turn_of(pool, &pool->reuse[page]));
    }
    return turn;
}

static uint32_t first_of(const uint64_t *turns, uint32_t count) {
    uint32_t found = 0;
    for (uint32_t extent = 1; extent < count; extent++)
        if (turns[extent] > turns[found]) found = extent;
    return found;
}

/* One that is empty stays with us: extents_offer(). */
static int64_t choose(const cxlkv_pool *pool, int64_t owed, uint64_t *turns, uint32_t *pages) {
    uint32_t count = pool->geometry.extent_count, slots = pool->geometry.slab_slots;
    int64_t chosen = 0;
    for (uint32_t extent = 0; extent < count; extent++) turns[extent] = extent_turn(pool, extent);
    for (int64_t left = owed + 1; left; left--) {
        uint32_t extent = first_of(turns, count);
        if (turns[extent] == 0) break;
        turns[extent] = 0;
        for (uint32_t page = extent * slots; page < (extent + 1) * slots; page++)
            if (page_is_evictable(pool, page)) pages[chosen++] = page;
    }
    return chosen;
}

static int64_t choose_owed(cxlkv_pool *pool, uint64_t *turns, uint32_t *pages) {
    hooks.sequences_expire(pool);
    int64_t count = owed(pool);
    return count > 0 ? HOST_LOCKED(pool, choose(pool, count, turns, pages)) : count;
}

int64_t cxlkv_pages_wanted(cxlkv_pool *pool, uint32_t *pages, uint64_t capacity) {
    if (capacity < pool->geometry.page_count)
        return fail(CXLKV_E_ROOM, "room for %u pages is wanted", pool->geometry.page_count);
    int code = need(capacity, "pages", pages, NULL);
    if (code < 0 || !pool->shared) return code;
    uint64_t *turns = malloc(pool->geometry.extent_count * sizeof(*turns));
    if (!turns) return fail(ENOMEM, "no memory for %u extents", pool->geometry.extent_count);
    int64_t found = IN_POOL(pool, choose_owed(pool, turns, pages));
    free(turns);
    return found;
}
