/* Free pages are taken; when there are none, room is made.
 *
 * The caller has the host lock, but for pages_unclaim() and host_lock_with_room(). */
#pragma once
#include "host/locks.h"

/* Tries to have so many free pages: dead processes', withdrawn ones. See host_lock_with_room(). */
void pages_make_room(cxlkv_pool *pool, uint64_t count);
/* Takes count pages, neighbours of `after` first; all or nothing: 0 or -CXLKV_E_POOL_FULL. */
int pages_take(cxlkv_pool *pool, uint32_t count, uint32_t after, uint32_t *pages);
/* Pages of cxlkv_pages_alloc() are the caller's to free no more, and are again; all or none. */
int pages_claim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_unclaim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
int full_error(cxlkv_pool *pool, uint32_t wanted);
/* host_lock(); when fewer pages are free, ended leases give up theirs first, and other hosts. */
int host_lock_with_room(cxlkv_pool *pool, uint64_t page_count);
/* The value of `work`, which takes pages, under the host lock; when the pool is full, once more
 * with `room` of them free, if that can be had: none is made for what is there already. */
#define TAKING_PAGES(pool, room, work)                                                \
    __extension__({                                                                   \
        int64_t taking = HOST_LOCKED(pool, work);                                     \
        if (taking == -CXLKV_E_POOL_FULL)                                             \
            taking = HOST_LOCKED_BY(host_lock_with_room(pool, room), pool, work);     \
        if (taking == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);        \
        taking;                                                                       \
    })
