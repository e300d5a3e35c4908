/* This host in the pool: it arrives, is fenced and returns, leaves. */
#include <time.h>

#include "base/clock.h"
#include "coherence/fences.h"
#include "coherence/host_log.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"
#include "coherence/membership.h"
#include "format/mapping.h"
#include "host/locks.h"
#include "pages/log_writer.h"
#include "pages/peers.h"
#include "sharing/extent_owners.h"
#include "sharing/this_host.h"

/* Another machine that has our number beats: it must not be us as well. */
static int watch_number(cxlkv_pool *pool) {
    uint64_t first[HOSTS_MAX], now[HOSTS_MAX], wanted[HOSTS_MAX];
    uint64_t nonce = peers_nonce(pool), since_ns = boottime_ns();
    uint32_t self = pool->hosts.self;
    if (hosts_look_beats(&pool->hosts, first, wanted) >> self & 1)
        return fail(CXLKV_E_POISON,
                    "bus error in the lines of host %u: whether another machine has this number "
                    "cannot be seen. Open the pool as another host=, or create it anew", self);
    while (nonce != 0 && boottime_ns() - since_ns < pool->lease_ns + pool->lease_ns / 4) {
        hosts_look_beats(&pool->hosts, now, wanted);
        if (now[self] != first[self] || peers_nonce(pool) != nonce)
            return fail(CXLKV_E_HOST,
                        "two hosts with one number: host %u is in use by another machine, or by a "
                        "container with another /dev/shm. Give each its own host=", self);
        struct timespec nap = {.tv_nsec = 1000000};
        nanosleep(&nap, NULL);
    }
    return 0;
}

/* Where each log ends now: what lies before is found by its descriptor. */
static void follow_from_here(cxlkv_pool *pool) {
    for (uint32_t host = 0; host < pool->sharing.hosts; host++) {
        host_name name;
        bool unused = hosts_name(&pool->hosts, host, &name) && name.status == HOST_UNUSED;
        uint64_t next = unused ? 1 : hosts_log_end(&pool->hosts, host);
        pool->host->views[host].log = (log_place){.next = next};
    }
    pool->host->log_next = pool->host->views[pool->hosts.self].log.next;
}

int peers_arrive(cxlkv_pool *pool) {
    host_state *host = pool->host;
    int code = watch_number(pool);
    if (code < 0) return code;
    peers_look_around(pool);
    code = hosts_attach(&pool->hosts, host->nonce);
    if (code < 0) return code;
    host->host_epoch = pool->hosts.epoch;
    host->beats = boottime_ns(); /* not a number that the last one of us used */
    peers_beat(pool, true);
    peers_set_safe(pool, host->beat_ns);
    follow_from_here(pool);
    descriptors_hand_over(pool, false);
    return extents_refresh(pool, &pool->hosts);
}

/* V8 for all that we own: others may take it as soon as the name says that we left. Nobody else of
 * this host is left, so nobody has the claims. */
void peers_leave(cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    if (pool->host->stopped || peers_number_is_taken(pool)) return;
    log_write(pool);
    for (uint32_t extent = 0; extent < g->extent_count; extent++) {
        if (!page_is_ours(pool, extent * g->slab_slots)) continue;
        hosts_hand_over(pool->region.base + g->descriptors_offset + extent * g->descriptors_bytes,
                        g->descriptors_bytes, true);
        hosts_hand_over(pool->region.base + g->extents_offset + extent * g->extent_bytes,
                        g->layers_offset, true); /* what lies behind was stored past the caches */
    }
    hosts_leave(&pool->hosts, pool->host->nonce);
}

/* When our epoch has ended and nobody said that this machine is off, what we own is still ours. */
int peers_return(cxlkv_pool *pool, hosts *turn) {
    host_fence fence;
    int code = hosts_fence_of(turn, turn->self, turn->epoch, &fence);
    if (code < 0 || !fence.fenced) return code;
    code = host_lock(pool);
    if (code < 0) return code;
    bool again = false;
    code = peers_look(pool, &again);
    if (code == 0) code = hosts_return(turn, pool->host->nonce, &fence);
    if (code == 0) {
        __atomic_store_n(&pool->host->host_epoch, turn->epoch, __ATOMIC_RELAXED);
        pool->hosts.epoch = turn->epoch;
        pool->host->log_next = hosts_log_end(turn, turn->self); /* it may be mended */
        peers_beat(pool, true);
        peers_set_safe(pool, pool->host->beat_ns);
    }
    host_unlock(pool);
    return code < 0 ? code : extents_refresh(pool, turn);
}

/* A host that was not seen unfenced for half its lease asks whether it is. A fenced host that is
 * not off still has its pages and pins: its keeper returns. So this waits for nobody. */
static int look_for_fence(cxlkv_pool *pool) {
    uint64_t safe_ns = __atomic_load_n(&pool->host->safe_ns, __ATOMIC_ACQUIRE);
    bool fenced;
    if (boottime_ns() - safe_ns <= pool->lease_ns / 2) return 0;
    int code = host_lock(pool);
    if (code < 0) return code;
    peers_beat(pool, true);
    code = peers_look(pool, &fenced);
    host_unlock(pool);
    return code;
}

int64_t peers_verify(cxlkv_pool *pool, int64_t code) {
    /* Bytes that are not what their CRC says may be another record's by now. */
    if (!pool->shared || (code < 0 && code != -CXLKV_E_CORRUPT)) return code;
    int fenced = look_for_fence(pool);
    return fenced < 0 ? fenced : code;
}
