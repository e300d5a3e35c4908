/* Which pages may be evicted for what a call wants. */
#pragma once
#include "format/types.h"

/* Published here, and held, pinned or leased by nobody. */
bool page_is_evictable(const cxlkv_pool *pool, uint32_t page);
