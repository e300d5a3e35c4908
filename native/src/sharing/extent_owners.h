/* Which extents are ours (run_info.ours in format/types.h). */
#pragma once
#include "format/types.h"

/* Look which are ours, from what all hosts claim. The caller has the claims; it takes the host
 * lock. */
int extents_refresh(cxlkv_pool *pool, const hosts *turn);
/* Claimed ones become ours to use: likewise. One is ours no more: the caller has both locks. */
int extents_take_in(cxlkv_pool *pool, const uint32_t *extents, uint32_t count);
void extent_leave(cxlkv_pool *pool, uint32_t extent);
/* Which boot of which machine has dropped what its caches held of all our extents; 0 while some are
 * on their way to us, or it is not known whether they came. */
int settled_set(const cxlkv_pool *pool, uint64_t boot);
uint64_t settled_get(const cxlkv_pool *pool);
