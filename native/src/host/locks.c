/* The locks of a pool: the host lock, which mends what a death inside it left; operations. */
#include <time.h>

#include "base/clock.h"
#include "base/guard.h"
#include "coherence/host_log.h"
#include "coherence/membership.h"
#include "format/mapping.h"
#include "format/poison.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/processes.h"
#include "host/rebuild.h"
#include "pages/borrow.h"
#include "pages/log_writer.h"
#include "pages/pages.h"
#include "pages/peers.h"
#include "pages/published.h"

/* Its holder died in the middle of a change: derive all that is derived anew. */
static void repair(cxlkv_pool *pool) {
    if (pool->shared) {
        peers_sync(pool);
        hosts_recover(&pool->hosts);
        pool->host->log_next = hosts_log_end(&pool->hosts, pool->hosts.self);
        pool->host->wanted_extents = 0; /* whoever waited for them is dead */
        /* It may have marked some runs of an extent only, which is ours in any case: what changes
         * hands is marked after it came, and before it goes. The claims' holder looks again. */
        extents_doubt(pool);
        /* V5: a page that it had begun to free is free for others, too, before it is used again. */
        descriptors_hand_over(pool, true);
    }
    rewrite_repair(pool);
    host_rebuild(pool);
    if (pool->shared) borrow_recover(pool);
    host_reap(pool);
    unfinished_forget(pool);
    host_count(pool->host, COUNT_REBUILDS);
    if (pool->shared) log_again(pool);
    pthread_mutex_consistent(&pool->host->mutex);
}

/* What must be done first, by whoever has got it. */
static void locked(cxlkv_pool *pool, bool owner_died) {
    __atomic_store_n(&pool->host->holder, pool->slot, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->waits.lock_thread, pthread_self(), __ATOMIC_RELAXED);
    if (owner_died) repair(pool);
    else if (pool->shared) peers_sync(pool);
    bool late = atomic_load_explicit(&pool->late.count, memory_order_acquire) != 0;
    if (__builtin_expect(late, 0) && pool->held) pages_drop_late(pool);
}

int host_trylock(cxlkv_pool *pool) {
    int code = pthread_mutex_trylock(&pool->host->mutex);
    if (code != 0 && code != EOWNERDEAD) return -CXLKV_E_TIMEOUT;
    locked(pool, code == EOWNERDEAD);
    return 0;
}

/* glibc has it from 2.30 on; a build for an older one finds it where it runs. */
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
    __attribute__((weak));

#if defined(__SANITIZE_THREAD__) /* of gcc 12 does not know that it locks */
#define WAITS_BY_CLOCK false
#else
#define WAITS_BY_CLOCK (pthread_mutex_clocklock != NULL)
#endif

/* By a clock that nobody sets: else a step of the machine's time would be taken for a wait. */
int mutex_lock_until(pthread_mutex_t *mutex, uint64_t until_ns) {
    const struct timespec until = timespec_of(until_ns);
    if (WAITS_BY_CLOCK) return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
    struct timespec nap = {.tv_nsec = 20000};
    int code;
    while ((code = pthread_mutex_trylock(mutex)) == EBUSY && monotonic_ns() < until_ns) {
        nanosleep(&nap, NULL);
        nap.tv_nsec += nap.tv_nsec < 1000000 ? nap.tv_nsec / 4 : 0;
    }
    return code == EBUSY ? ETIMEDOUT : code;
}

/* Names the last holder of the lock, if that can be read without it. */
static int lock_error(cxlkv_pool *pool) {
    uint32_t holder = __atomic_load_n(&pool->host->holder, __ATOMIC_RELAXED);
    double waited_s = (double)pool->waits.lock_ns * 1e-9;
    process_view seen;
    int32_t pid = holder < PROCESS_MAX ? pool->host->processes[holder].pid : 0;
    if (pid <= 0 || !process_look(pid, &seen))
        return fail(CXLKV_E_TIMEOUT, "the pool's lock was not free for %g s, and who has it is not "
                    "known: a process that opens the pool, or one of another container", waited_s);
    bool stopped = seen.state == 'T' || seen.state == 't';
    return fail(CXLKV_E_TIMEOUT, "the pool's lock was not free for %g s: process %d has it, %s",
                waited_s, pid,
                stopped ? "and is stopped. Let it go on (kill -CONT), or end it"
                        : "which runs. If it makes no progress, end it");
}

/* Waits are counted from 1 ms on: a reader of own pages should never see one. */
static int lock_slowly(cxlkv_pool *pool) {
    uint64_t began_ns = monotonic_ns();
    int code = mutex_lock_until(&pool->host->mutex, began_ns + pool->waits.lock_ns);
    if (monotonic_ns() - began_ns > 1000000) count_add(pool, COUNT_LOCK_WAITS, 1);
    return code;
}

int host_lock(cxlkv_pool *pool) {
    int code = pthread_mutex_trylock(&pool->host->mutex);
    if (code == EBUSY) code = lock_slowly(pool);
    if (code != 0 && code != EOWNERDEAD) return lock_error(pool);
    locked(pool, code == EOWNERDEAD);
    return 0;
}

void host_unlock(cxlkv_pool *pool) {
    if (pool->log.count) log_write(pool);
    host_assert(pool);
    __atomic_store_n(&pool->waits.lock_thread, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&pool->host->mutex);
}

int poison_error(cxlkv_pool *pool, const guard *fault) {
    if (host_lock(pool) < 0) return -CXLKV_E_TIMEOUT;
    int code = poison_error_locked(pool, fault);
    host_unlock(pool);
    return code;
}

/* Whoever dies while publishing leaves a torn header; the next owner of the lock mends it. */
int record_check_unlocked(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens) {
    int code = record_check(pool, page, generation, tokens);
    if (code != -CXLKV_E_CORRUPT || host_lock(pool) < 0) return code;
    host_unlock(pool);
    return record_check(pool, page, generation, tokens);
}

/* ---- operations ---- */

void rwlock_init(pthread_rwlock_t *lock) {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
}

int pool_enter_to_release(cxlkv_pool *pool) {
    pthread_rwlock_rdlock(&pool->locks.operations);
    if (!pool->handle.closed) return 0;
    pthread_rwlock_unlock(&pool->locks.operations);
    return fail(CXLKV_E_CLOSED, "the pool is closed: open it again");
}

int pool_enter(cxlkv_pool *pool) {
    int code = pool_enter_to_release(pool);
    if (code < 0 || !pool->shared) return code;
    code = peers_check(pool);
    if (code < 0) pool_leave(pool);
    return code;
}

void pool_leave(cxlkv_pool *pool) { pthread_rwlock_unlock(&pool->locks.operations); }
