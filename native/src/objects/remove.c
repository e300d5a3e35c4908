/* Objects are removed, unless somebody reads them, or has a lease. */
#include "format/records.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "host/processes.h"
#include "objects/objects.h"
#include "objects/whole.h"
#include "pages/borrow.h"
#include "pages/published.h"
#include "sharing/log_reader.h"

/* Of another host's page only its other readers are seen. */
static bool is_held(const cxlkv_pool *pool, uint32_t page) {
    return pool->pages[page].holders ||
           (pool->shared && pinned_elsewhere(pool, page / 64 * 64) >> page % 64 & 1);
}

static int32_t remove_one(cxlkv_pool *pool, const uint64_t first[2]) {
    uint32_t page = index_find(pool, first);
    if (page == NO_PAGE) return CXLKV_OBJECT_ABSENT;
    for (uint32_t i = 0; page != NO_PAGE; i++) {
        uint64_t hash[2];
        if (is_held(pool, page)) return CXLKV_OBJECT_HELD;
        if (!has_object_pages(&pool->layout)) break;
        whole_hash(first, i + 1, hash);
        page = index_find(pool, hash);
    }
    whole_forget(pool, first);
    return 0;
}

static int64_t remove_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, int32_t *codes) {
    int64_t removed = 0;
    host_reap(pool); /* the dead hold nothing */
    if (pool->shared) peers_follow(pool);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t first[2];
        key_hash(keys, i, 0, first);
        codes[i] = remove_one(pool, first);
        removed += codes[i] == 0;
    }
    return removed;
}

/* Is it found by its key? What cannot be read is taken for that. */
static bool is_first(const cxlkv_pool *pool, uint32_t page) {
    descriptor line;
    return descriptor_read(pool, page, &line) < 0 || descriptor_is_first(pool, &line);
}

/* The index changes while its pages go: so they are listed first. */
static int64_t remove_all(cxlkv_pool *pool) {
    uint64_t (*hashes)[2] = malloc(((uint64_t)pool->host->page_count + 1) * sizeof(*hashes));
    int64_t removed = 0;
    uint32_t count = 0;
    if (!hashes) return fail(ENOMEM, "no memory for a list of %u pages", pool->host->page_count);
    host_reap(pool);
    if (pool->shared) peers_follow(pool);
    for (uint32_t at = 0; at < pool->host->index_capacity; at++) {
        const index_entry *entry = &pool->index[at];
        uint32_t page = entry->page_plus_one - 1; /* of an empty one NO_PAGE */
        if (page < pool->host->page_count && count < pool->host->page_count &&
            is_first(pool, page))
            memcpy(hashes[count++], entry->hash, sizeof(*hashes));
    }
    for (uint32_t i = 0; i < count; i++) removed += remove_one(pool, hashes[i]) == 0;
    if (has_object_pages(&pool->layout)) whole_sweep(pool);
    free(hashes);
    return removed;
}

int64_t cxlkv_objects_remove(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                             int32_t *codes) {
    int64_t code = objects_check(pool);
    if (code == 0 && keys) code = need(count, "codes", codes, NULL);
    if (code < 0) return code;
    return IN_POOL(pool, (hooks.worker_give_back(pool),
                          HOST_LOCKED(pool, keys ? remove_keys(pool, count, keys, codes)
                                                 : remove_all(pool))));
}
