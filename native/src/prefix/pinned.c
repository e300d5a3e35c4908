/* Published pages that a user pinned: eviction leaves them alone. The mark is in the host state, so
 * it is of this host only, and goes with the last process that has the pool open. */
#include "pool/peers.h"
#include "prefix/prefix.h"

typedef struct pinning {
    bool pinned;
    int64_t found;
} pinning;

static void pin_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context) {
    (void)hash;
    pinning *p = context;
    if (!page_is_ours(pool, page)) return; /* its owner evicts it, or does not */
    pool->pages[page].pinned = p->pinned;
    p->found++;
}

int64_t cxlkv_pin(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t pinned) {
    pinning p = {.pinned = pinned != 0};
    int code = keys_call(pool, count, hashes, false, pin_one, &p);
    return code < 0 ? code : p.found;
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
