/* Extents are taken from other hosts, and given. Whose they are: extent_owners.c. Which pages of
 * them are free: format/runs.c. */
#pragma once
#include "format/types.h"

bool extents_take(cxlkv_pool *pool, uint64_t page_count); /* under no lock; there was room */
const char *extents_why(void);            /* if not, and if that is an error: its text */
/* So many are wanted for so long; or asked for, for half a lease, unless more is wanted for longer;
 * as many of those came. The first two under the host lock, the third under none. */
void extents_want(cxlkv_pool *pool, uint64_t extents, uint64_t lasts_ns);
void extents_ask(cxlkv_pool *pool, uint64_t extents);
void extents_came(cxlkv_pool *pool, uint32_t count);
uint64_t extents_wanted(const cxlkv_pool *pool);  /* by others */
/* As many as others want and we can spare: with the claims, without the host lock. */
void extents_give(cxlkv_pool *pool, hosts *turn);
void extents_offer(cxlkv_pool *pool);
uint32_t extents_empty(const cxlkv_pool *pool, uint32_t *extents, uint32_t most);
