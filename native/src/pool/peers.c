/* This host among the others of a pool: arriving, beating, being silent, coming back, leaving. */
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/flush.h"
#include "pool/peers.h"

enum { BEATS_A_LEASE = 10, YIELDS = 64 };
#define LONGEST_LEASE_NS (3600 * 1000000000ull) /* whatever a line says */

static void look_around(cxlkv_pool *pool) {
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
        view->beats = beats[host];
        view->since_ns = now;
    }
}

void peers_beat(cxlkv_pool *pool, bool now) {
    host_state *host = pool->host;
    uint64_t time_ns = boottime_ns();
    if (!now && time_ns - host->beat_ns < pool->lease_ns / BEATS_A_LEASE) return;
    hosts_promise(&pool->hosts, pool->lease_ns);
    if (hosts_beat(&pool->hosts, ++host->beats, host->wanted_extents))
        __atomic_store_n(&host->beat_ns, time_ns, __ATOMIC_RELAXED);
    look_around(pool);
}

/* We were not fenced when we looked after this beat: until now nobody can have said that we are
 * off, for nobody does within a lease of a beat that they saw. peers_verify() relies on it. */
static void set_safe(cxlkv_pool *pool, uint64_t beat_ns) {
    __atomic_store_n(&pool->host->safe_ns, beat_ns, __ATOMIC_RELEASE);
}

/* First others of this machine run, then we sleep, since nothing wakes us from another host. */
static void rest(uint32_t pauses) {
    struct timespec nap = {.tv_nsec = 50000};
    if (pauses < YIELDS) sched_yield();
    else nanosleep(&nap, NULL);
}

/* With the host lock, between two looks at a name that may be half written: a bounded
 * number of times. Nothing that waits for what another host does has the host lock. */
static void pause_between_looks(void *context) {
    cxlkv_pool *pool = context;
    if (pool->host) peers_beat(pool, false);
    rest(pool->pauses++);
}

/* Beats go on. Their line is the host lock's to write, also for who has the claims. */
void peers_pause(cxlkv_pool *pool) {
    uint64_t beat_ns = __atomic_load_n(&pool->host->beat_ns, __ATOMIC_RELAXED);
    if (boottime_ns() - beat_ns >= pool->lease_ns / BEATS_A_LEASE && host_lock(pool) == 0) {
        peers_beat(pool, false);
        host_unlock(pool);
    }
    rest(atomic_fetch_add_explicit(&pool->claim_pauses, 1, memory_order_relaxed));
}

/* Looks anew before it says so: this host may have been stopped since its last look. */
static bool is_silent(void *context, uint32_t host) {
    cxlkv_pool *pool = context;
    if (!pool->host || host == pool->hosts.self) return false;
    const host_view *view = &pool->host->views[host];
    if (view->since_ns == 0 || boottime_ns() - view->since_ns <= view->lease_ns) return false;
    look_around(pool);
    return boottime_ns() - view->since_ns > view->lease_ns;
}

bool peers_silent(cxlkv_pool *pool, uint32_t host) {
    if (host_lock(pool) < 0) return false;
    bool silent = is_silent(pool, host);
    host_unlock(pool);
    return silent;
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
                          .context = pool,
                          .pause = pause_between_looks, .silent = is_silent, .lost = count_lost};
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
    look_around(pool);
    code = hosts_attach(&pool->hosts, host->nonce);
    if (code < 0) return code;
    host->host_epoch = pool->hosts.epoch;
    host->beats = boottime_ns(); /* not a number that the last one of us used */
    peers_beat(pool, true);
    set_safe(pool, host->beat_ns);
    follow_from_here(pool);
    descriptors_hand_over(pool, false);
    return extents_refresh(pool, &pool->hosts);
}

static bool number_is_taken(const cxlkv_pool *pool) {
    host_name name;
    return hosts_name(&pool->hosts, pool->hosts.self, &name) &&
           (name.status != HOST_LIVE || name.nonce != pool->host->nonce);
}

/* V8 for all that we own: others may take it as soon as the name says that we left. Nobody else of
 * this host is left, so nobody has the claims. */
void peers_leave(cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    if (pool->host->stopped || number_is_taken(pool)) return;
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

void peers_sync(cxlkv_pool *pool) {
    pool->pauses = 0;
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
    if (number_is_taken(pool)) return stop(pool, CXLKV_E_HOST);
    int code = hosts_fence_now(&pool->hosts, pool->hosts.self, pool->hosts.epoch, &fence);
    if (code < 0) return code; /* somebody may have said that we are off */
    if (fence.off) return stop(pool, CXLKV_E_FENCED);
    *fenced = fence.fenced || code > 0;
    if (!*fenced) set_safe(pool, beat_ns);
    return 0;
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
        set_safe(pool, pool->host->beat_ns);
    }
    host_unlock(pool);
    return code < 0 ? code : extents_refresh(pool, turn);
}

/* A host that was not seen unfenced for half its lease asks whether it is. Who was fenced and is
 * not off has its pages and pins still: its keeper returns. So this does not wait for anybody. */
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
