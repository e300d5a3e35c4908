/* Published pages, by the hashes of the index: shown, found again, forgotten, and overwritten with
 * zeros where somebody asked for that. All under the host lock. */
#include <string.h>

#include "pool/pages.h"
#include "pool/peers.h"

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
