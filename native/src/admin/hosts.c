/* What an operator sees of a pool's hosts, and how a dead one is declared so. */
#include <time.h>

#include "base/clock.h"
#include "coherence/claims.h"
#include "coherence/fences.h"
#include "coherence/hosts.h"
#include "format/mapping.h"
#include "host/locks.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"

static int need_shared(const cxlkv_pool *pool) {
    if (pool->shared) return 0;
    return fail(CXLKV_E_ARGUMENT,
                "one host only uses this pool (sharing=host): there are no others");
}

/* ---- looking ---- */

static void fill_row(cxlkv_pool *pool, uint32_t number, cxlkv_host_row *row) {
    host_name name;
    host_fence fence;
    const host_view *view = &pool->host->views[number];
    *row = (cxlkv_host_row){.number = number, .is_self = number == pool->hosts.self};
    if (!hosts_name(&pool->hosts, number, &name)) {
        row->status = CXLKV_HOST_DAMAGED;
        return;
    }
    row->status = (uint32_t)name.status;
    row->epoch = name.epoch;
    row->build = name.build;
    if (name.status == HOST_UNUSED) return;
    row->silent = pool->hosts.silent(pool->hosts.context, number);
    if (!row->is_self) row->silent_ns = boottime_ns() - view->since_ns;
    row->seen = row->is_self || view->seen;
    if (hosts_fence_now(&pool->hosts, number, name.epoch, &fence) < 0) return;
    row->fenced = fence.fenced; /* what is not decided is not so yet */
    row->off = fence.off;
}

/* Under no lock: it waits while a host is being fenced. */
static int count_extents(cxlkv_pool *pool, cxlkv_host_row *rows, uint32_t capacity) {
    const hosts turn = hosts_outside(pool);
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * sizeof(*owners));
    if (!owners) return fail(ENOMEM, "no memory for a table of %u extents", count);
    hosts_owners(&turn, owners); /* what is damaged is nobody's */
    for (uint32_t extent = 0; extent < count; extent++)
        if (owners[extent].host < capacity) rows[owners[extent].host].extents++;
    free(owners);
    return 0;
}

int64_t cxlkv_pool_hosts(cxlkv_pool *pool, cxlkv_host_row *rows, uint32_t capacity) {
    int code = need(capacity, "rows", rows, NULL);
    if (code < 0) return code;
    code = pool_enter(pool);
    if (code < 0) return code;
    code = need_shared(pool);
    if (code == 0) code = host_lock(pool);
    if (code == 0) {
        bool fenced;
        peers_beat(pool, true);
        code = peers_look(pool, &fenced); /* another machine may have become this host */
        capacity = min_u32(capacity, pool->sharing.hosts);
        for (uint32_t i = 0; i < capacity; i++) fill_row(pool, i, &rows[i]);
        host_unlock(pool);
        if (code == 0) code = count_extents(pool, rows, capacity);
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)pool->sharing.hosts;
}

/* ---- a host is declared dead ---- */

/* Waits, without the host lock in between, until the host has been silent for a lease. */
static int wait_for_silence(cxlkv_pool *pool, uint32_t host) {
    const struct timespec nap = {.tv_nsec = 2000000};
    uint64_t first = 0, now = 0;
    for (bool silent = false; !silent; nanosleep(&nap, NULL)) {
        int code = host_lock(pool);
        if (code < 0) return code;
        peers_beat(pool, true);
        now = pool->host->views[host].since_ns;
        silent = pool->hosts.silent(pool->hosts.context, host);
        host_unlock(pool);
        if (first == 0) first = now;
        if (now != first)
            return fail(CXLKV_E_BUSY, "host %u beats: it runs, and is not fenced. Stop it there "
                        "first", host);
    }
    return 0;
}

static int fence_locked(cxlkv_pool *pool, uint32_t host, bool off) {
    host_name name;
    if (!hosts_name(&pool->hosts, host, &name)) {
        if (!off)
            return fail(CXLKV_E_CORRUPT, "the name line of host %u is damaged: only a host that is "
                        "confirmed to be off can be fenced then", host);
        extents_open_block(pool, host, true);
        int code = hosts_name_again(&pool->hosts, host, &name);
        extents_open_block(pool, host, false);
        if (code < 0) return code;
    }
    if (name.status != HOST_LIVE)
        return fail(CXLKV_E_ARGUMENT, "host %u is not there: %s", host,
                    name.status ? "it left in order, and others may take what it had"
                                : "it never was");
    return hosts_fence(&pool->hosts, host, name.epoch, off);
}

/* -EAGAIN: somebody is fencing this host just now. It goes on when it has come back: in between,
 * others have the lock. */
static int fence_host(cxlkv_pool *pool, uint32_t host, bool off) {
    int code;
    for (;; peers_pause(pool)) {
        code = host_lock(pool);
        if (code < 0) return code;
        code = fence_locked(pool, host, off);
        host_unlock(pool);
        if (code != -EAGAIN) return code;
    }
}

int cxlkv_pool_fence(cxlkv_pool *pool, uint32_t host, uint32_t confirmed_off) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = need_shared(pool);
    if (code == 0 && (host >= pool->sharing.hosts || host == pool->hosts.self))
        code = fail(CXLKV_E_ARGUMENT, "host %u: another one of 0 to %u", host,
                    pool->sharing.hosts - 1);
    if (code == 0) code = wait_for_silence(pool, host);
    if (code == 0) code = fence_host(pool, host, confirmed_off != 0);
    pool_leave(pool);
    return code;
}
