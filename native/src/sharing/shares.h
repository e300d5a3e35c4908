/* What each host has of the extents, and what it wants: who is to give some, and who may take. */
#pragma once
#include "format/types.h"

enum { GIVE_MAX = 64 };

/* Of hosts that are silent nothing counts. One that has and wants nothing has no share.
 *   sum of owned + takeable <= the pool's extents
 *   share = (sum of owned + takeable) / hosts that have or want some, at least 1 */
typedef struct shares {
    uint32_t host_count, self;
    uint32_t owned[HOSTS_MAX];
    uint32_t wanted[HOSTS_MAX];  /* at most GIVE_MAX */
    uint32_t takeable;           /* nobody's, or left behind */
    uint32_t share;
} shares;

/* Under the host lock; owners is what hosts_owners() said. */
void shares_look(cxlkv_pool *pool, const extent_owner *owners, shares *found);
/* Up to its share a host may take what there is; beyond, what those that have fewer do not want. */
uint32_t shares_takeable(const shares *s);
/* How many it is to empty for others. A host with more than its share owes those that want and have
 * less than theirs. What a host wants beyond its share it is owed by whoever of the others has
 * most: one that waits for room itself, and has fewer, owes nothing, so that they come in turn. */
uint32_t shares_owed(const shares *s);
