/* Published pages by the hash of their chain: open addressing in the host state, linear probing. */
#include <string.h>

#include "pool/pages.h"

static uint32_t home_of(const cxlkv_pool *pool, const uint64_t hash[2]) {
    return (uint32_t)(hash[0] ^ hash[1] >> 32) & (pool->host->index_capacity - 1);
}

void index_expect(const cxlkv_pool *pool, const uint64_t hash[2]) {
    __builtin_prefetch(&pool->index[home_of(pool, hash)]);
}

/* The entry with this hash, or the empty one where it would go. Capacity is twice the pages. */
static uint32_t probe(const cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t mask = pool->host->index_capacity - 1, at = home_of(pool, hash);
    while (pool->index[at].page_plus_one && memcmp(pool->index[at].hash, hash, 16) != 0)
        at = (at + 1) & mask;
    return at;
}

uint32_t index_find(const cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t stored = pool->index[probe(pool, hash)].page_plus_one;
    return stored && stored <= pool->host->page_count ? stored - 1 : NO_PAGE;
}

bool index_insert(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page) {
    index_entry *entry = &pool->index[probe(pool, hash)];
    if (entry->page_plus_one) return false;
    memcpy(entry->hash, hash, sizeof(entry->hash));
    entry->page_plus_one = page + 1;
    return true;
}

/* Backward shift: no tombstones, so that a probe never gets longer with age. */
void index_erase(cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t mask = pool->host->index_capacity - 1, hole = probe(pool, hash);
    if (!pool->index[hole].page_plus_one) return;
    for (uint32_t at = (hole + 1) & mask; pool->index[at].page_plus_one; at = (at + 1) & mask) {
        uint32_t home = home_of(pool, pool->index[at].hash);
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            pool->index[hole] = pool->index[at];
            hole = at;
        }
    }
    memset(&pool->index[hole], 0, sizeof(index_entry));
}

void index_erase_page(cxlkv_pool *pool, uint32_t page) {
    for (uint32_t at = 0; at < pool->host->index_capacity; at++) {
        if (pool->index[at].page_plus_one != page + 1) continue;
        uint64_t hash[2];
        memcpy(hash, pool->index[at].hash, sizeof(hash));
        index_erase(pool, hash);
        return;
    }
}

void index_clear(cxlkv_pool *pool) {
    memset(pool->index, 0, pool->host->index_capacity * sizeof(index_entry));
}
