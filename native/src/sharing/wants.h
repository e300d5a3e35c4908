/* Which pages may be evicted for what a call wants. */
#ifndef CXLKV_SHARING_WANTS_H
#define CXLKV_SHARING_WANTS_H
#include "format/types.h"

/* Published here, and held, pinned or leased by nobody. */
bool page_is_evictable(const cxlkv_pool *pool, uint32_t page);
#endif
