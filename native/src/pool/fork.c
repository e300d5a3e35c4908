/* Pools over a fork: the child gets a slot of its own, with the references that it inherits. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/guard.h"
#include "format/scorers.h"
#include "format/state_folder.h"
#include "host/counters.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "host/processes.h"
#include "pool/fork.h"
#include "region/alive.h"
#include "region/region.h"
#include "sharing/keeper.h"

/* All that were opened and have references left: a closed one has locks, too, which the child of a
 * fork must find free. */
static pthread_mutex_t pools_mutex = PTHREAD_MUTEX_INITIALIZER;
static cxlkv_pool *pools;

void pools_lock(void) { pthread_mutex_lock(&pools_mutex); }

void pools_unlock(void) { pthread_mutex_unlock(&pools_mutex); }

void pools_remove(const cxlkv_pool *pool) {
    pools_lock();
    cxlkv_pool **at = &pools;
    while (*at && *at != pool) at = &(*at)->handle.next;
    if (*at) *at = pool->handle.next;
    pools_unlock();
}

/* The child's references, in a slot that waits for it: host_reap() gives it back if the fork fails,
 * or if the child dies before it comes for it. */
static void fork_slot_make(cxlkv_pool *pool) {
    if (host_lock(pool) < 0) return;
    host_reap(pool);
    if (host_register(pool, 2, &pool->fork.slot) == 0) {
        pool->fork.nonce = pool->host->processes[pool->fork.slot].nonce;
        pool->fork.state_fd = open_again(pool->host_fd, LIVE_BYTE + pool->fork.slot);
        if (pool->path) pool->fork.region_fd = open_again(pool->region.fd, USE_BYTE);
        uint32_t *child = held_of(pool, pool->fork.slot);
        for (uint32_t page = 0; page < pool->host->page_count; page++) {
            child[page] = pool->held[page];
            pool->pages[page].holders += child[page] > 0;
        }
    }
    host_unlock(pool);
}

/* The write lock waits until no thread is inside an operation: the child sees whole structures. */
static void fork_prepare(void) {
    pools_lock();
    for (cxlkv_pool *pool = pools; pool; pool = pool->handle.next) {
        pool->fork.slot = UINT32_MAX;
        pthread_rwlock_wrlock(&pool->locks.operations);
        pthread_mutex_lock(&pool->locks.list);
        pthread_mutex_lock(&pool->locks.spare);
        if (!pool->handle.closed) fork_slot_make(pool);
    }
    alive_fork_prepare();
}

static void fork_files_close(cxlkv_pool *pool) {
    if (pool->fork.state_fd >= 0) close(pool->fork.state_fd);
    if (pool->fork.region_fd >= 0) close(pool->fork.region_fd);
    pool->fork.state_fd = pool->fork.region_fd = -1;
}

static void fork_parent(void) {
    alive_fork_parent();
    for (cxlkv_pool *pool = pools; pool; pool = pool->handle.next) {
        fork_files_close(pool);
        pthread_mutex_unlock(&pool->locks.spare);
        pthread_mutex_unlock(&pool->locks.list);
        pthread_rwlock_unlock(&pool->locks.operations);
    }
    pools_unlock();
}

/* The byte locks belong to the open file, which the fork shares: the child has one of its own, so
 * that what it locks and unlocks later does not touch its parent's locks. The parent made it: when
 * that closes the pool before the child is here, the pool is still in use. */
static bool take_region_file(cxlkv_pool *pool) {
    return !pool->path || dup3(pool->fork.region_fd, pool->region.fd, O_CLOEXEC) >= 0;
}

static bool claim_fork_slot(cxlkv_pool *pool) {
    pool->held = NULL;
    alive_end(pool->alive); /* the parent's, closed already */
    pool->alive = NULL;
    if (pool->fork.slot == UINT32_MAX) return false;
    pool->slot = pool->fork.slot;
    if (host_lock(pool) < 0) return false;
    process_slot *slot = &pool->host->processes[pool->slot];
    bool claimed = slot->state == 2 && slot->nonce == pool->fork.nonce &&
                   pool->fork.state_fd >= 0;
    if (claimed) claimed = (pool->alive = alive_keep(pool->fork.state_fd)) != NULL;
    if (claimed) {
        pool->fork.state_fd = -1;
        process_identify(slot);
        slot->state = 1;
        pool->held = held_of(pool, pool->slot);
        counters_bind(pool, pool->slot);
    }
    host_unlock(pool);
    return claimed;
}

/* When there is no slot for the child, or no lock, its copy is closed and says so when used; the
 * parent's locks and references stay as they are. */
static void leave_to_parent(cxlkv_pool *pool) {
    if (pool->held && host_lock(pool) == 0) {
        host_unregister(pool, pool->slot);
        host_unlock(pool);
    }
    counters_unbind(pool);
    alive_end(pool->alive);
    pool->alive = NULL;
    munmap(pool->host, pool->host->bytes);
    region_unmap(&pool->region);
    close(pool->host_fd);
    close(pool->region.fd);
    state_place_close(&pool->state);
    pool->host = NULL;
    pool->held = NULL;
    pool->handle.closed = true;
}

/* Threads and held locks do not cross a fork: all that can be locked is made anew. */
static void fork_child(void) {
    alive_fork_child();
    for (cxlkv_pool *pool = pools; pool; pool = pool->handle.next) {
        pthread_mutex_init(&pool->locks.list, NULL);
        pthread_mutex_init(&pool->locks.spare, NULL);
        rwlock_init(&pool->locks.operations);
        pool->threads.helpers = NULL;
        pool->keeper = NULL; /* its thread is the parent's, and what it was about to log */
        pool->log.count = 0;
        scorers_forked(pool);
        for (uint32_t i = OWNER_COUNT; i-- > 0;)
            if (owners[i].forked) owners[i].forked(pool);
        if (pool->handle.closed) continue;
        if (!claim_fork_slot(pool) || !take_region_file(pool) ||
            (pool->shared && keeper_start(pool) < 0))
            leave_to_parent(pool);
        fork_files_close(pool);
    }
    pthread_mutex_init(&pools_mutex, NULL);
    guard_forked();
}

void pools_add(cxlkv_pool *pool) {
    pools_lock();
    pool->handle.next = pools;
    pools = pool;
    pools_unlock();
}

void fork_register(void) { pthread_atfork(fork_prepare, fork_parent, fork_child); }
