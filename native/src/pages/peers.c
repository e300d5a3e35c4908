/* This host among the others of a pool: it beats, sees silent hosts, learns that it is fenced. */
#include <sched.h>
#include <time.h>

#include "base/clock.h"
#include "base/flush.h"
#include "coherence/fences.h"
#include "coherence/hosts.h"
#include "format/geometry.h"
#include "format/mapping.h"
#include "format/superblock.h"
#include "pages/peers.h"

enum { YIELDS = 64 };
#define LONGEST_LEASE_NS (3600 * 1000000000ull) /* whatever a line says */

void peers_look_around(cxlkv_pool *pool) {
    uint64_t beats[HOSTS_MAX], wanted[HOSTS_MAX], now = boottime_ns();
    uint64_t lost = hosts_look_beats(&pool->hosts, beats, wanted);
    for (uint32_t host = 0; host < pool->sharing.hosts; host++) {
        host_view *view = &pool->host->views[host];
        if (lost >> host & 1 && view->since_ns) continue; /* who cannot be read is silent */
        view->wanted_extents = wanted[host];
        uint64_t promised_ns = hosts_promised(&pool->hosts, host), lease_ns = view->lease_ns;
        if (promised_ns) lease_ns = min_u64(promised_ns, LONGEST_LEASE_NS); /* 0: as before */
        if (lease_ns < pool->lease_ns) lease_ns = pool->lease_ns;
        __atomic_store_n(&view->lease_ns, lease_ns, __ATOMIC_RELAXED);
        if (view->beats == beats[host] && view->since_ns != 0) continue;
        if (view->since_ns != 0) view->seen = 1;
        view->beats = beats[host];
        view->since_ns = now;
    }
}

void peers_beat(cxlkv_pool *pool, bool now) {
    host_state *host = pool->host;
    uint64_t time_ns = boottime_ns();
    if (!now && time_ns - host->beat_ns < pool->lease_ns / BEATS_A_LEASE) return;
    if (time_ns >= host->wanted_until_ns) host->wanted_extents = 0;
    hosts_promise(&pool->hosts, pool->lease_ns);
    if (hosts_beat(&pool->hosts, ++host->beats, host->wanted_extents))
        __atomic_store_n(&host->beat_ns, time_ns, __ATOMIC_RELAXED);
    peers_look_around(pool);
}

/* We were not fenced when we looked after this beat: until now nobody can have said that we are
 * off, for nobody does within a lease of a beat that they saw. peers_verify() relies on it. */
void peers_set_safe(cxlkv_pool *pool, uint64_t beat_ns) {
    __atomic_store_n(&pool->host->safe_ns, beat_ns, __ATOMIC_RELEASE);
}

/* First others of this machine run, then we sleep, since nothing wakes us from another host. */
void peers_rest(uint32_t pauses) {
    struct timespec nap = {.tv_nsec = 50000};
    if (pauses < YIELDS) sched_yield();
    else nanosleep(&nap, NULL);
}

/* With the host lock, between two looks at a name that may be half written: a bounded
 * number of times. Nothing that waits for what another host does has the host lock. */
static void pause_between_looks(void *context) {
    cxlkv_pool *pool = context;
    if (pool->host) peers_beat(pool, false);
    peers_rest(pool->waits.pauses++);
}

/* Looks anew before it says so: this host may have been stopped since its last look. */
bool peers_is_silent(void *context, uint32_t host) {
    cxlkv_pool *pool = context;
    if (!pool->host || host == pool->hosts.self) return false;
    const host_view *view = &pool->host->views[host];
    if (view->since_ns == 0 || boottime_ns() - view->since_ns <= view->lease_ns) return false;
    peers_look_around(pool);
    return boottime_ns() - view->since_ns > view->lease_ns;
}

static void count_lost(void *context, uint32_t host) {
    cxlkv_pool *pool = context;
    (void)host;
    count_add(pool, COUNT_LOST_LINES, 1);
}

int peers_prepare(cxlkv_pool *pool, const cxlkv_host *host) {
    const cxlkv_sharing *sharing = &pool->sharing;
    pool->shared = sharing->kind != CXLKV_SHARING_HOST;
    pool->mode = sharing->durable == CXLKV_DURABLE_HOST ? VISIBILITY_FAST : VISIBILITY_COHERENT;
    if (sharing->kind == CXLKV_SHARING_SOFTWARE)
        pool->mode = host && host->certified ? VISIBILITY_FAST : VISIBILITY_STRICT;
    if (pool->mode != VISIBILITY_COHERENT && !flush_supported())
        return fail(ENOTSUP, "this CPU's caches cannot be written back by a program: only "
                    "sharing=host and durable=process are possible");
    if (!pool->shared) return 0;
    if (!host)
        return fail(CXLKV_E_ARGUMENT,
                    "%u hosts share this pool: say which one this is, host=0 to host=%u, on no two "
                    "machines the same", sharing->hosts, sharing->hosts - 1);
    if (host->number >= sharing->hosts)
        return fail(CXLKV_E_ARGUMENT, "host %u: the pool has hosts 0 to %u", host->number,
                    sharing->hosts - 1);
    if (!(host->lease_s >= 0.01 && host->lease_s <= 3600))
        return fail(CXLKV_E_ARGUMENT, "a lease of %g s: outside 0.01 to 3600", host->lease_s);
    pool->lease_ns = (uint64_t)(host->lease_s * 1e9);
    pool->hosts = (hosts){.area = hosts_area_of(pool->region.base, sharing, &pool->geometry),
                          .self = host->number, .mode = pool->mode, .features = features_told(),
                          .context = pool, .pause = pause_between_looks,
                          .silent = peers_is_silent, .lost = count_lost};
    return 0;
}

uint64_t peers_nonce(const cxlkv_pool *pool) {
    host_name name;
    if (!hosts_name(&pool->hosts, pool->hosts.self, &name) || name.status != HOST_LIVE) return 0;
    return name.nonce;
}

bool peers_is_off(cxlkv_pool *pool) {
    host_fence fence;
    uint32_t epoch = pool->host->host_epoch;
    pool->hosts.epoch = epoch;
    return hosts_fence_now(&pool->hosts, pool->hosts.self, epoch, &fence) >= 0 && fence.off;
}

bool peers_number_is_taken(const cxlkv_pool *pool) {
    host_name name;
    return hosts_name(&pool->hosts, pool->hosts.self, &name) &&
           (name.status != HOST_LIVE || name.nonce != pool->host->nonce);
}

void peers_sync(cxlkv_pool *pool) {
    pool->waits.pauses = 0;
    pool->hosts.epoch = pool->host->host_epoch;
    if (pool->mapped_version != pool->host->extents_version) extents_protect(pool);
}

static int stop(cxlkv_pool *pool, int code) {
    __atomic_store_n(&pool->host->stopped, (uint32_t)code, __ATOMIC_RELEASE);
    return peers_check(pool);
}

int peers_check(cxlkv_pool *pool) {
    switch (__atomic_load_n(&pool->host->stopped, __ATOMIC_ACQUIRE)) {
    case 0: return 0;
    case CXLKV_E_HOST:
        return fail(CXLKV_E_HOST,
                    "two hosts with one number: another machine has become host %u. Close the pool "
                    "in all processes here and open it with another host=", pool->hosts.self);
    default:
        return fail(CXLKV_E_FENCED,
                    "this host was declared off while it ran: others may have its pages. Close the "
                    "pool in all processes here and open it anew");
    }
}

int peers_look(cxlkv_pool *pool, bool *fenced) {
    host_fence fence;
    uint64_t beat_ns = pool->host->beat_ns;
    if (peers_number_is_taken(pool)) return stop(pool, CXLKV_E_HOST);
    int code = hosts_fence_now(&pool->hosts, pool->hosts.self, pool->hosts.epoch, &fence);
    if (code < 0) return code; /* somebody may have said that we are off */
    if (fence.off) return stop(pool, CXLKV_E_FENCED);
    *fenced = fence.fenced || code > 0;
    if (!*fenced) peers_set_safe(pool, beat_ns);
    return 0;
}
