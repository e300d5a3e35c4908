/* The keeper: a thread of each process, so that a host beats while its programs are busy elsewhere,
 * follows what others publish, and gives what others ask for. */
#include <stdlib.h>
#include <time.h>

#include "internal.h"

struct keeper {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wakes;
    bool ends;
    cxlkv_pool *pool;
};

static void work_for_others(cxlkv_pool *pool) {
    if (pool->host->owners_unsure && extents_refresh(pool) == 0) pool->host->owners_unsure = 0;
    peers_follow(pool);
    withdrawn_look(pool);
    extents_give(pool);
}

/* Whoever holds the host lock beats in its stead when it takes long. */
static void keep(cxlkv_pool *pool) {
    if (host_trylock(pool) < 0) return;
    guard fault;
    if (pool->host->stopped == 0) {
        GUARD_BEGIN(fault) {
            extents_offer(pool);
            hosts_idle(&pool->hosts);
            peers_beat(pool, false);
            peers_return(pool);
            if (pool->host->stopped == 0) work_for_others(pool);
        } GUARD_END(fault, poison_error_locked(pool, &fault))
    }
    host_unlock(pool);
}

static void *run(void *context) {
    struct keeper *own = context;
    uint64_t interval_ns = own->pool->lease_ns / 20;
    pthread_mutex_lock(&own->lock);
    while (!own->ends) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        uint64_t at = (uint64_t)until.tv_nsec + interval_ns;
        until.tv_sec += (time_t)(at / 1000000000u);
        until.tv_nsec = (long)(at % 1000000000u);
        pthread_cond_timedwait(&own->wakes, &own->lock, &until);
        if (own->ends) break;
        pthread_mutex_unlock(&own->lock);
        keep(own->pool);
        pthread_mutex_lock(&own->lock);
    }
    pthread_mutex_unlock(&own->lock);
    return NULL;
}

int keeper_start(cxlkv_pool *pool) {
    struct keeper *own = calloc(1, sizeof(*own));
    if (!own) return fail(ENOMEM, "no memory for the keeper");
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&own->wakes, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&own->lock, NULL);
    own->pool = pool;
    int code = pthread_create(&own->thread, NULL, run, own);
    if (code != 0) {
        free(own);
        return fail(code, "cannot start the pool's keeper thread");
    }
    pool->keeper = own;
    return 0;
}

void keeper_stop(cxlkv_pool *pool) {
    struct keeper *own = pool->keeper;
    if (!own) return;
    pthread_mutex_lock(&own->lock);
    own->ends = true;
    pthread_cond_signal(&own->wakes);
    pthread_mutex_unlock(&own->lock);
    pthread_join(own->thread, NULL);
    pthread_cond_destroy(&own->wakes);
    pthread_mutex_destroy(&own->lock);
    free(own);
    pool->keeper = NULL;
}
