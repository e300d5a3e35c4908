/* Dealing with other hosts: one thread of a host at a time has the host's claims, and waits for
 * other hosts with these alone. The host lock stays free meanwhile: readers of what is ours do not
 * notice. See host_state for what each of the two guards. */
#include "base/clock.h"
#include "base/guard.h"
#include "coherence/membership.h"
#include "format/poison.h"
#include "host/locks.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"

/* ---- how the holder of the claims waits: as the host, not as this thread ---- */

/* Beats go on. Their line is the host lock's to write, also for the holder of the claims. */
void peers_pause(cxlkv_pool *pool) {
    uint64_t beat_ns = __atomic_load_n(&pool->host->beat_ns, __ATOMIC_RELAXED);
    if (boottime_ns() - beat_ns >= pool->lease_ns / BEATS_A_LEASE && host_lock(pool) == 0) {
        peers_beat(pool, false);
        host_unlock(pool);
    }
    peers_rest(atomic_fetch_add_explicit(&pool->waits.claim_pauses, 1, memory_order_relaxed));
}

static void pause_outside(void *context) {
    peers_pause(context);
}

static bool silent_outside(void *context, uint32_t host) {
    if (host_lock(context) < 0) return false;
    bool silent = peers_is_silent(context, host);
    host_unlock(context);
    return silent;
}

static bool fencing_outside(void *context, bool begins) {
    cxlkv_pool *pool = context;
    if (begins) return host_lock(pool) == 0;
    host_unlock(pool);
    return true;
}

hosts hosts_outside(cxlkv_pool *pool) {
    hosts turn = {.area = pool->hosts.area, .self = pool->hosts.self, .mode = pool->hosts.mode,
                  .features = pool->hosts.features, .context = pool, .pause = pause_outside,
                  .silent = silent_outside, .fencing = fencing_outside, .lost = pool->hosts.lost};
    turn.epoch = __atomic_load_n(&pool->host->host_epoch, __ATOMIC_RELAXED);
    return turn;
}

/* ---- the claims ---- */

/* Of a holder that died, or was interrupted. */
static void claim_repair(cxlkv_pool *pool, const hosts *turn) {
    extents_doubt(pool);
    GUARD_BEGIN(fault) {
        hosts_recover_claims(turn);
    } GUARD_END(fault, (void)fault) /* our own lines are gone: others find us silent */
}

static void begin(cxlkv_pool *pool, hosts *turn, bool owner_died) {
    __atomic_store_n(&pool->host->claimer, pool->slot, __ATOMIC_RELAXED);
    *turn = hosts_outside(pool);
    atomic_store_explicit(&pool->waits.claim_pauses, 0, memory_order_relaxed);
    if (!owner_died) return;
    claim_repair(pool, turn);
    pthread_mutex_consistent(&pool->host->claims);
}

/* They are had for as long as other hosts take, which a lease bounds. */
static uint64_t longest_wait_ns(const cxlkv_pool *pool) {
    uint64_t lease_ns = pool->lease_ns;
    for (uint32_t host = 0; host < pool->sharing.hosts; host++) {
        uint64_t theirs = __atomic_load_n(&pool->host->views[host].lease_ns, __ATOMIC_RELAXED);
        if (theirs > lease_ns) lease_ns = theirs;
    }
    return pool->waits.lock_ns + 2 * lease_ns;
}

int claim_lock(cxlkv_pool *pool, hosts *turn) {
    uint64_t wait_ns = longest_wait_ns(pool);
    int code = pthread_mutex_trylock(&pool->host->claims);
    if (code == EBUSY) code = mutex_lock_until(&pool->host->claims, monotonic_ns() + wait_ns);
    if (code != 0 && code != EOWNERDEAD) {
        uint32_t slot = __atomic_load_n(&pool->host->claimer, __ATOMIC_RELAXED);
        return fail(CXLKV_E_TIMEOUT, "process %d of this host has been dealing with other hosts "
                    "for %g s: it is stopped, or one of them is",
                    slot < PROCESS_MAX ? pool->host->processes[slot].pid : 0,
                    (double)wait_ns * 1e-9);
    }
    begin(pool, turn, code == EOWNERDEAD);
    return 0;
}

int claim_trylock(cxlkv_pool *pool, hosts *turn) {
    int code = pthread_mutex_trylock(&pool->host->claims);
    if (code != 0 && code != EOWNERDEAD) return -CXLKV_E_TIMEOUT;
    begin(pool, turn, code == EOWNERDEAD);
    return 0;
}

void claim_unlock(cxlkv_pool *pool) { pthread_mutex_unlock(&pool->host->claims); }

int claim_poisoned(cxlkv_pool *pool, const hosts *turn, const guard *fault) {
    bool locked = pthread_equal(__atomic_load_n(&pool->waits.lock_thread, __ATOMIC_RELAXED),
                                pthread_self());
    int code = locked ? poison_error_locked(pool, fault) : poison_error(pool, fault);
    if (locked) host_unlock(pool);
    claim_repair(pool, turn);
    return code;
}
