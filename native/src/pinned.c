/* Published pages that a user pinned: eviction leaves them alone. The mark is in the host state, so
 * it is of this host only, and goes with the last process that has the pool open. */
#include "internal.h"

static int64_t pin_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, bool pinned) {
    int64_t found = 0;
    for (uint64_t key = 0; key < count; key++)
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            for (uint64_t place = 0;; place++) {
                uint64_t hash[2];
                page_hash(hashes, key, place, part, hash);
                uint32_t page = index_find(pool, hash);
                if (page == NO_PAGE) break;
                if (!page_is_ours(pool, page)) continue; /* its owner evicts it, or does not */
                pool->pages[page].pinned = pinned;
                found++;
            }
    return found;
}

int64_t cxlkv_pin(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t pinned) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    code = host_lock(pool);
    if (code == 0) {
        guard fault;
        volatile int64_t found = 0;
        GUARD_BEGIN(fault) {
            if (pool->shared) peers_follow(pool);
            found = pin_keys(pool, count, hashes, pinned != 0);
        } GUARD_END(fault, found = poison_error_locked(pool, &fault))
        code = found;
        host_unlock(pool);
    }
    pool_leave(pool);
    return code;
}

int64_t cxlkv_evictable(cxlkv_pool *pool, uint8_t *flags, uint64_t capacity) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    if (capacity < pool->geometry.page_count)
        code = fail(CXLKV_E_ROOM, "flags for %u pages are wanted", pool->geometry.page_count);
    if (code == 0) code = host_lock(pool);
    if (code == 0) {
        for (uint32_t page = 0; page < pool->host->page_count; page++) {
            const page_info *info = &pool->pages[page];
            flags[page] = info->published && !info->holders && !info->pinned && !info->retired &&
                          page_is_ours(pool, page);
            code += flags[page];
        }
        host_unlock(pool);
    }
    pool_leave(pool);
    return code;
}
