/* The keeper: a thread of each process, so that a host beats while its programs are busy elsewhere,
 * follows what others publish, and gives what others ask for. */
#include <time.h>

#include "base/clock.h"
#include "base/guard.h"
#include "coherence/fences.h"
#include "coherence/hosts_lock.h"
#include "format/poison.h"
#include "host/locks.h"
#include "pages/pages.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"
#include "sharing/extent_owners.h"
#include "sharing/extents.h"
#include "sharing/keeper.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

struct keeper {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wakes;
    bool ends;
    cxlkv_pool *pool;
};

/* Under the host lock. What is only begun of a fence is damage: it is made under this lock. */
static void look_round(cxlkv_pool *pool, bool *fenced) {
    extents_offer(pool);
    hosts_open_fences(&pool->hosts);
    peers_beat(pool, false);
    if (peers_look(pool, fenced) < 0) return;
    peers_follow(pool);
    withdrawn_look(pool);
}

/* With the claims. A place in the queue is damage: nobody of ours stands there. */
static void deal(cxlkv_pool *pool, hosts *turn, bool fenced, bool gives) {
    hosts_unlock(turn);
    if (fenced && peers_return(pool, turn) < 0) return;
    if (extents_in_doubt(pool)) extents_refresh(pool, turn);
    if (gives) extents_give(pool, turn);
}

/* Whoever holds the host lock beats in its stead when it takes long. */
static void keep(cxlkv_pool *pool) {
    if (host_trylock(pool) < 0) return;
    bool fenced = false;
    volatile bool gives = false, goes_on = pool->host->stopped == 0;
    if (goes_on) {
        GUARD_BEGIN(fault) {
            look_round(pool, &fenced);
            gives = extents_wanted(pool) != 0;
        } GUARD_END(fault, poison_error_locked(pool, &fault))
        goes_on = pool->host->stopped == 0;
    }
    host_unlock(pool);
    hosts turn;
    if (!goes_on || claim_trylock(pool, &turn) < 0) return;
    GUARD_BEGIN(fault) {
        deal(pool, &turn, fenced, gives);
    } GUARD_END(fault, claim_poisoned(pool, &turn, &fault))
    claim_unlock(pool);
}

static void *run(void *context) {
    struct keeper *own = context;
    uint64_t interval_ns = own->pool->lease_ns / 20;
    pthread_mutex_lock(&own->lock);
    while (!own->ends) {
        const struct timespec until = timespec_of(monotonic_ns() + interval_ns);
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
