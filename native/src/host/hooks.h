/* Hooks: the pool calls folders above it through this table, and so do sequence/, prefix/ and
 * tiers/. native/src/hooks/hooks.c fills it, with one function for each hook. */
#ifndef CXLKV_HOST_HOOKS_H
#define CXLKV_HOST_HOOKS_H

#include "format/types.h"

typedef struct pool_hooks {
    /* sequence/: ended leases give up their pages; all sequences after a fork, and when the pool is
     * being closed; spare tails are freed, at its end */
    void (*sequences_expire)(cxlkv_pool *pool);
    void (*sequences_forked)(cxlkv_pool *pool);
    void (*sequences_release)(cxlkv_pool *pool);
    void (*tails_discard)(cxlkv_pool *pool);
    /* tiers/: the local tier, at close, under the write lock; in a forked child its copies are its
     * parent's */
    void (*local_drop_all)(cxlkv_pool *pool);
    void (*local_forked)(cxlkv_pool *pool);
    /* worker/: all that the worker holds for this process; what it has of a sequence from
     * page_count on, before these pages are dropped here */
    void (*worker_give_back)(cxlkv_pool *pool);
    void (*worker_keep)(cxlkv_sequence *sequence, uint32_t page_count);
    void (*worker_forked)(cxlkv_pool *pool);      /* in the child: the slot is its parent's */
    void (*worker_leave)(cxlkv_pool *pool);       /* the pool is being closed */
    void (*worker_client_drop)(cxlkv_pool *pool); /* frees it */
} pool_hooks;

extern const pool_hooks hooks;

#endif
