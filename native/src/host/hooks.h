/* What the pool calls of folders above it: hooks, which sequence/, prefix/ and tiers/ use, too, and
 * the owners of state that a pool keeps for them. native/src/hooks/hooks.c fills both tables. */
#pragma once
#include "format/types.h"

typedef struct pool_hooks {
    void (*sequences_expire)(cxlkv_pool *pool); /* ended leases give up their pages */
    /* All that the worker holds for this process; what it has of a sequence from page_count on,
     * before these pages are dropped here. */
    void (*worker_give_back)(cxlkv_pool *pool);
    void (*worker_keep)(cxlkv_sequence *sequence, uint32_t page_count);
} pool_hooks;

extern const pool_hooks hooks;

/* NULL: it has nothing to do then. */
typedef struct owner_calls {
    int (*begin)(cxlkv_pool *pool);    /* before the pool is used */
    int (*busy)(const cxlkv_pool *pool); /* 0, or an error that says why it cannot be closed */
    void (*forked)(cxlkv_pool *pool);  /* in the child, in turn from the last owner to the first */
    void (*closing)(cxlkv_pool *pool); /* in the order of enum pool_owner, no operation runs */
    void (*free)(cxlkv_pool *pool);    /* likewise, with the handle; its slot is not NULL */
} owner_calls;

extern const owner_calls owners[OWNER_COUNT];
