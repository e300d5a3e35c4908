/* Extents change hands: this host takes some from those that have too many, and gives some back. */
#include "base/clock.h"
#include "base/guard.h"
#include "coherence/claims.h"
#include "coherence/hosts.h"
#include "coherence/hosts_lock.h"
#include "format/mapping.h"
#include "format/poison.h"
#include "host/locks.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"
#include "sharing/extent_owners.h"
#include "sharing/extents.h"
#include "sharing/shares.h"
#include "sharing/this_host.h"

/* ---- wanting: under the host lock. Each wish ends by itself, as its host may die ---- */

void extents_want(cxlkv_pool *pool, uint64_t extents, uint64_t lasts_ns) {
    pool->host->wanted_extents = extents;
    pool->host->wanted_until_ns = boottime_ns() + lasts_ns;
}

void extents_ask(cxlkv_pool *pool, uint64_t extents) {
    const host_state *host = pool->host;
    const uint64_t lasts_ns = pool->lease_ns / 2, until_ns = boottime_ns() + lasts_ns;
    if (host->wanted_extents && host->wanted_until_ns > until_ns) return; /* one stands */
    extents_want(pool, extents, lasts_ns);
}

static int64_t came(cxlkv_pool *pool, uint32_t count) {
    uint64_t *wanted = &pool->host->wanted_extents;
    if (!*wanted) return 0;
    *wanted -= min_u64(*wanted, count);
    peers_beat(pool, true);
    return 0;
}

void extents_came(cxlkv_pool *pool, uint32_t count) { HOST_LOCKED(pool, came(pool, count)); }

/* ---- taking ---- */

/* How many extents to take for so many pages: some more than that, so that hosts which grow do not
 * come one by one; and no more than are for us to take. */
static uint32_t choose(const cxlkv_pool *pool, const extent_owner *owners, uint64_t page_count,
                       uint32_t takeable, uint32_t *extents) {
    const cxlkv_geometry *g = &pool->geometry;
    uint32_t chosen = 0, most = g->extent_count / (8 * pool->sharing.hosts);
    uint64_t wanted = extents_of(pool, page_count);
    if (wanted < most) wanted = most;
    if (wanted > takeable) wanted = takeable;
    /* First those that nobody used, then what others left behind with their published pages. */
    for (int left_behind = 0; left_behind < 2; left_behind++)
        for (uint32_t e = 0; e < g->extent_count && chosen < wanted; e++)
            if (owners[e].takeable && (owners[e].host != NO_HOST) == left_behind &&
                !page_is_ours(pool, e * g->slab_slots))
                extents[chosen++] = e;
    return chosen;
}

/* Whoever brought a doubt into the world has seen to it, and there was no other. */
static void clear_doubt(cxlkv_pool *pool, uint32_t own) {
    if (__atomic_load_n(&pool->host->owners_sure, __ATOMIC_RELAXED) == own - 1)
        __atomic_store_n(&pool->host->owners_sure, own, __ATOMIC_RELAXED);
}

static int64_t takeable(cxlkv_pool *pool, const extent_owner *owners) {
    shares found;
    return HOST_LOCKED(pool, (shares_look(pool, owners, &found), shares_takeable(&found)));
}

/* With the claims. The owners are read when our turn has come: anything may have changed before. */
static int claim_some(cxlkv_pool *pool, hosts *turn, uint64_t page_count, extent_owner *owners,
                      uint32_t *extents) {
    uint32_t chosen = 0;
    int code = hosts_lock(turn);
    if (code < 0) return code;
    code = hosts_owners(turn, owners);
    if (code == -CXLKV_E_CORRUPT) code = 0;
    int64_t most = code == 0 ? takeable(pool, owners) : code;
    if (most > 0) chosen = choose(pool, owners, page_count, (uint32_t)most, extents);
    if (most < 0) code = (int)most;
    if (code == 0 && chosen) code = hosts_claim(turn, owners, chosen, extents, true);
    hosts_unlock(turn);
    return code < 0 ? code : (int)chosen;
}

static int take_with(cxlkv_pool *pool, hosts *turn, uint64_t page_count, extent_owner *owners) {
    /* A process that died over a claim may have left an extent that is ours: use that one first. */
    if (extents_in_doubt(pool)) return extents_refresh(pool, turn);
    uint32_t *extents = (uint32_t *)(owners + pool->geometry.extent_count);
    uint64_t boot = settled_get(pool);
    int code = settled_set(pool, 0);
    if (code < 0) return code;
    uint32_t doubt = extents_doubt(pool);
    int chosen = claim_some(pool, turn, page_count, owners, extents);
    if (chosen == -CXLKV_E_FENCED) return peers_return(pool, turn);
    /* Whether it counts is not decided. */
    if (chosen == -CXLKV_E_TIMEOUT || chosen == -CXLKV_E_POISON) return chosen;
    code = chosen > 0 ? extents_take_in(pool, extents, (uint32_t)chosen) : chosen;
    if (code < 0 && chosen > 0) return code;
    if (chosen > 0) extents_came(pool, (uint32_t)chosen);
    settled_set(pool, boot);
    clear_doubt(pool, doubt);
    return chosen == 0 ? -EAGAIN : code;
}

/* Takes what may be taken: 0, or -EAGAIN when there is nothing. Under no lock. */
static int take_some(cxlkv_pool *pool, uint64_t page_count) {
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * (sizeof(*owners) + sizeof(uint32_t)));
    if (!owners) return -ENOMEM;
    hosts turn;
    int code = claim_lock(pool, &turn);
    if (code == 0) {
        code = GUARDED(take_with(pool, &turn, page_count, owners),
                       claim_poisoned(pool, &turn, &fault));
        claim_unlock(pool);
    }
    free(owners);
    return code;
}

static bool somebody_offers(const cxlkv_pool *pool) {
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && hosts_offered(&pool->hosts, host) &&
            !pool->hosts.silent(pool->hosts.context, host))
            return true;
    return false;
}

/* How many pages are still missing. With `asks` the other hosts are told so in a beat, if one of
 * them offers some; if none does, *ends. */
static uint64_t look_for_room(cxlkv_pool *pool, uint64_t page_count, bool asks, bool *ends) {
    *ends = host_lock(pool) < 0;
    if (*ends) return page_count;
    const uint64_t missing = page_count - min_u64(page_count, pool->host->free_pages);
    if (asks && missing) {
        GUARD_BEGIN(fault) {
            peers_beat(pool, true);
            *ends = !somebody_offers(pool);
            extents_ask(pool, *ends ? 0 : extents_of(pool, missing));
            if (!*ends) peers_beat(pool, true);
        } GUARD_END(fault, (*ends = true, poison_error_locked(pool, &fault)))
    }
    host_unlock(pool);
    return missing;
}

/* Why this thread's last extents_take() failed, for the error of a full pool; or "". */
static _Thread_local char why[256];

const char *extents_why(void) { return why; }

/* When others have room and nobody's is left, they are asked, and waited for a quarter of a lease:
 * about two of their beats. */
bool extents_take(cxlkv_pool *pool, uint64_t page_count) {
    uint64_t until_ns = 0, missing;
    bool ends = false;
    why[0] = 0;
    while ((missing = look_for_room(pool, page_count, false, &ends)) && !ends) {
        int code = take_some(pool, missing);
        if (code == 0) continue; /* what others left behind may be full of published pages */
        if (code != -EAGAIN) snprintf(why, sizeof(why), "%s", cxlkv_error_text());
        if (code != -EAGAIN || (until_ns && boottime_ns() > until_ns)) break;
        missing = look_for_room(pool, page_count, true, &ends);
        if (missing == 0 || ends) break;
        if (!until_ns) until_ns = boottime_ns() + pool->lease_ns / 4;
        peers_pause(pool);
    }
    if (until_ns && host_lock(pool) == 0) { /* we ask no other host for room any more */
        extents_ask(pool, 0);
        host_unlock(pool);
    }
    return missing == 0;
}

/* ---- giving ---- */

static bool is_empty(const cxlkv_pool *pool, uint32_t extent) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS, first = first_run_of(pool, extent);
    if (!pool->runs[first].ours) return false;
    for (uint32_t i = 0; i < runs; i++)
        if (pool->runs[first + i].free_mask != (1u << RUN_SLOTS) - 1) return false;
    return true;
}

uint32_t extents_empty(const cxlkv_pool *pool, uint32_t *extents, uint32_t most) {
    uint32_t count = 0;
    for (uint32_t e = 0; e < pool->geometry.extent_count && count < most; e++)
        if (is_empty(pool, e)) extents[count++] = e;
    return count;
}

/* One stays with us: a host that just became idle would ask for it back at once. */
void extents_offer(cxlkv_pool *pool) {
    uint32_t extents[GIVE_MAX], count = extents_empty(pool, extents, GIVE_MAX);
    hosts_offer(&pool->hosts, count ? count - 1 : 0);
}

uint64_t extents_wanted(const cxlkv_pool *pool) {
    uint64_t wanted = 0;
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && !pool->hosts.silent(pool->hosts.context, host))
            wanted += min_u64(pool->host->views[host].wanted_extents, GIVE_MAX);
    return wanted;
}

/* Under the host lock: what is marked as no more ours before it is claimed away. */
static uint32_t leave_some(cxlkv_pool *pool, uint32_t *extents) {
    volatile uint32_t left = 0;
    if (host_lock(pool) < 0) return 0;
    GUARD_BEGIN(fault) {
        uint32_t count = extents_empty(pool, extents, GIVE_MAX);
        count = min_u32(count ? count - 1 : 0,
                        (uint32_t)min_u64(extents_wanted(pool), GIVE_MAX));
        while (left < count) extent_leave(pool, extents[left++]);
        if (count) extents_protect(pool);
    } GUARD_END(fault, (left = 0, extents_doubt(pool), poison_error_locked(pool, &fault)))
    host_unlock(pool);
    return left;
}

static int claim_away(hosts *turn, extent_owner *owners, const uint32_t *extents, uint32_t count) {
    int code = hosts_lock(turn);
    if (code < 0) return code;
    code = hosts_owners(turn, owners);
    if (code == 0) code = hosts_claim(turn, owners, count, extents, false);
    hosts_unlock(turn);
    return code;
}

/* What was not given after all is ours again: the doubt is there before it is marked, for whoever
 * has the claims next, whatever becomes of us. */
void extents_give(cxlkv_pool *pool, hosts *turn) {
    uint32_t extents[GIVE_MAX], count;
    extent_owner *owners = malloc(pool->geometry.extent_count * sizeof(*owners));
    if (!owners) return; /* they ask again */
    uint32_t doubt = extents_doubt(pool);
    count = leave_some(pool, extents);
    int code = count ? claim_away(turn, owners, extents, count) : 0;
    free(owners);
    if (code == 0) clear_doubt(pool, doubt);
    if (code == -CXLKV_E_FENCED) peers_return(pool, turn);
    else if (code < 0) extents_refresh(pool, turn);
}
