/* Published pages and their index: shown, found again by their hashes, forgotten; under the host
 * lock. */
#include "base/guard.h"
#include "format/records.h"
#include "format/runs.h"
#include "pages/log_writer.h"
#include "pages/pages.h"
#include "pages/published.h"

/* ---- the index: open addressing in the host state, linear probing ---- */

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

uint32_t page_expect(const cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE || !page_is_ours(pool, page)) return NO_PAGE;
    record_expect(pool, page);
    __builtin_prefetch(&pool->pages[page], 1);
    __builtin_prefetch(&pool->held[page], 1);
    return page;
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

/* ---- what it names ---- */

void page_hash(const uint8_t *hashes, uint64_t key, uint64_t place, uint32_t part,
               uint64_t hash[2]) {
    memcpy(hash, hashes + key * 16, 16);
    hash[0] ^= (place + 1) * 0x9e3779b97f4a7c15u; /* 2^64 / golden ratio: odd, so one to one */
    hash[1] ^= part * 0xd1b54a32d192ed03u;        /* another odd number */
}

bool publish_page(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                  const page_key *key) {
    page_info *info = &pool->pages[page];
    if (info->published || info->retired || index_find(pool, key->hash) != NO_PAGE ||
        !page_is_ours(pool, page))
        return false;
    rewrite_begin(pool, page);
    record_seal(pool, page, part, tokens, key);
    rewrite_end(pool);
    index_insert(pool, key->hash, page);
    info->published = 1;
    info->shown = 1;
    pool->host->published_pages++;
    log_add(pool, LOG_PUBLISH, page, info->generation, key->hash);
    return true;
}

static void drop_from_index(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2]) {
    index_erase(pool, hash);
    page_unpublish(pool, page);
}

bool match_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t part, uint32_t tokens,
                uint32_t *page, uint32_t *ordinal) {
    descriptor line;
    *page = index_find(pool, hash);
    if (*page == NO_PAGE) return false;
    bool ours = page_is_ours(pool, *page);
    bool right = !pool->pages[*page].retired && descriptor_read(pool, *page, &line) == 0 &&
                 memcmp(line.hash, hash, sizeof(line.hash)) == 0 && line.part == part;
    if (right && line.tokens != tokens) return false;
    if (right && ours)
        right = record_check(pool, *page, pool->pages[*page].generation, tokens) == 0;
    *ordinal = right ? line.ordinal : 0;
    if (!ours) { /* its descriptor is looked at again, under a pin */
        right = right && (line.version & 255) == PAGE_PUBLISHED;
        if (right && !pool->pages[*page].holders)
            pool->pages[*page].generation = line.version >> 8;
        if (!right) drop_from_index(pool, *page, hash);
    } else if (!right) {
        count_add(pool, COUNT_CORRUPT_PIECES, 1);
    }
    return right;
}

/* Published no more. */
static void seal_again(cxlkv_pool *pool, uint32_t page) {
    rewrite_begin(pool, page);
    GUARD_BEGIN(fault) {
        descriptor_write(pool, page, pool->pages[page].generation, PAGE_SEALED,
                         record_tokens(pool, page), NULL);
    } GUARD_END(fault, page_retire(pool, page))
    rewrite_end(pool);
}

bool page_forget(cxlkv_pool *pool, const uint64_t hash[2], bool everywhere) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE) return false;
    page_info *info = &pool->pages[page];
    bool ours = page_is_ours(pool, page);
    drop_from_index(pool, page, hash);
    /* Another host's page is its owner's to forget: it reads that in our log, and so do others. */
    log_record *told = log_add(pool, ours ? LOG_FREE : LOG_FORGET, page, info->generation, hash);
    if (told) told->publication = ours ? everywhere : publication_of(pool, page);
    if (!ours) return true;
    /* Others may hold it as well: it is no longer found, and stays what it is for them. */
    if ((info->holders || pool->shared) && !info->retired) seal_again(pool, page);
    pages_settle(pool, 1, &page);
    return true;
}

void page_displace(cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE) return;
    if (page_is_ours(pool, page)) page_forget(pool, hash, false);
    else drop_from_index(pool, page, hash);
}

/* ---- a checkpoint is published as a whole, or not at all ---- */

void unfinished_begin(cxlkv_pool *pool, const uint8_t key[16], uint32_t pages) {
    memcpy(pool->host->unfinished_key, key, sizeof(pool->host->unfinished_key));
    atomic_signal_fence(memory_order_seq_cst); /* a death is seen in program order: no CPU fence */
    pool->host->unfinished = pages;
    atomic_signal_fence(memory_order_seq_cst);
}

void unfinished_end(cxlkv_pool *pool) {
    atomic_signal_fence(memory_order_seq_cst);
    pool->host->unfinished = 0;
}

void unfinished_forget(cxlkv_pool *pool) {
    for (uint32_t i = 0; i < pool->host->unfinished; i++) {
        uint64_t hash[2];
        page_hash(pool->host->unfinished_key, 0, i, pool->geometry.part_count, hash);
        uint32_t page = index_find(pool, hash);
        if (page != NO_PAGE && page_is_ours(pool, page)) page_forget(pool, hash, false);
    }
    unfinished_end(pool);
}
