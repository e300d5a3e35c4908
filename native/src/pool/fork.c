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
    while (*at && *at != pool) at = &(*at)->next;
    if (*at) *at = pool->next;
    pools_unlock();
}

/* The child's references, in a slot that waits for it: host_reap() gives it back if the fork fails,
 * or if the child dies before it comes for it. */
static void fork_slot_make(cxlkv_pool *pool) {
    if (host_lock(pool) < 0) return;
    host_reap(pool);
    if (host_register(pool, 2, &pool->fork_slot) == 0) {
        pool->fork_nonce = pool->host->processes[pool->fork_slot].nonce;
        pool->fork_state_fd = open_again(pool->host_fd, LIVE_BYTE + pool->fork_slot);
        if (pool->path) pool->fork_region_fd = open_again(pool->region.fd, USE_BYTE);
        uint32_t *child = held_of(pool, pool->fork_slot);
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
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        pool->fork_slot = UINT32_MAX;
        pthread_rwlock_wrlock(&pool->operations);
        pthread_mutex_lock(&pool->list_lock);
        pthread_mutex_lock(&pool->spare_lock);
        if (!pool->closed) fork_slot_make(pool);
    }
    alive_fork_prepare();
}

static void fork_files_close(cxlkv_pool *pool) {
    if (pool->fork_state_fd >= 0) close(pool->fork_state_fd);
    if (pool->fork_region_fd >= 0) close(pool->fork_region_fd);
    pool->fork_state_fd = pool->fork_region_fd = -1;
}

static void fork_parent(void) {
    alive_fork_parent();
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        fork_files_close(pool);
        pthread_mutex_unlock(&pool->spare_lock);
        pthread_mutex_unlock(&pool->list_lock);
        pthread_rwlock_unlock(&pool->operations);
    }
    pools_unlock();
}

/* The byte locks belong to the open file, which the fork shares: the child has one of its own, so
 * that what it locks and unlocks later does not touch its parent's locks. The parent made it: when
 * that closes the pool before the child is here, the pool is still in use. */
static bool take_region_file(cxlkv_pool *pool) {
    return !pool->path || dup3(pool->fork_region_fd, pool->region.fd, O_CLOEXEC) >= 0;
}

static bool claim_fork_slot(cxlkv_pool *pool) {
    pool->held = NULL;
    alive_end(pool->alive); /* the parent's, closed already */
    pool->alive = NULL;
    if (pool->fork_slot == UINT32_MAX) return false;
    pool->slot = pool->fork_slot;
    if (host_lock(pool) < 0) return false;
    process_slot *slot = &pool->host->processes[pool->slot];
    bool claimed = slot->state == 2 && slot->nonce == pool->fork_nonce &&
                   pool->fork_state_fd >= 0;
    if (claimed) claimed = (pool->alive = alive_keep(pool->fork_state_fd)) != NULL;
    if (claimed) {
        pool->fork_state_fd = -1;
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
    pool->closed = true;
}

/* Threads and held locks do not cross a fork: all that can be locked is made anew. */
static void fork_child(void) {
    alive_fork_child();
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        pthread_mutex_init(&pool->list_lock, NULL);
        pthread_mutex_init(&pool->spare_lock, NULL);
        rwlock_init(&pool->operations);
        pool->threads = NULL;
        pool->keeper = NULL; /* its thread is the parent's, and what it was about to log */
        pool->log_count = 0;
        scorers_forked(pool);
        for (uint32_t i = OWNER_COUNT; i-- > 0;)
            if (owners[i].forked) owners[i].forked(pool);
        if (pool->closed) continue;
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
    pool->next = pools;
    pools = pool;
    pools_unlock();
}

void fork_register(void) { pthread_atfork(fork_prepare, fork_parent, fork_child); }
