/* This process's mapping: extents that are not ours are read-only. */
#pragma once
#include "format/types.h"

/* Before a page that was taken in an earlier call is written: 0, or an error when its extent is not
 * ours any more, for then its memory can only be read. */
int page_stays_ours(const cxlkv_pool *pool, uint32_t page);
void extents_protect(cxlkv_pool *pool);   /* this process's mapping: what is not ours, read-only */
/* V8 for all descriptors: written back, if any was stored here, and dropped from the caches. */
void descriptors_hand_over(const cxlkv_pool *pool, bool gives);
void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable); /* another host's */
