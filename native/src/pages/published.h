/* The index of published pages, then what it names, under the host lock. */
#pragma once
#include "format/types.h"

void index_expect(const cxlkv_pool *pool, const uint64_t hash[2]);  /* it is asked for soon */
/* Its page, if it is ours, is checked and held soon: that page, or NO_PAGE. */
uint32_t page_expect(const cxlkv_pool *pool, const uint64_t hash[2]);
uint32_t index_find(const cxlkv_pool *pool, const uint64_t hash[2]);
bool index_insert(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page);
void index_erase(cxlkv_pool *pool, const uint64_t hash[2]);
void index_erase_page(cxlkv_pool *pool, uint32_t page); /* the page's entry; walks the index */
void index_clear(cxlkv_pool *pool);
/* The index's hash of one page of a key: its place among the key's pages, and its part. */
void page_hash(const uint8_t *hashes, uint64_t key, uint64_t place, uint32_t part,
               uint64_t hash[2]);
/* A page that is published already, or whose hash is, stays as it is: the first copy serves all. */
bool publish_page(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                  const page_key *key);
/* The page of one part under a hash, and which of its chain it is; false: none. A damaged page, or
 * one of another number of tokens, is none either: a miss, never a wrong hit. */
bool match_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t part, uint32_t tokens,
                uint32_t *page, uint32_t *ordinal);
/* everywhere: the copies that other hosts may have published under this hash, too. */
bool page_forget(cxlkv_pool *pool, const uint64_t hash[2], bool everywhere);
/* Makes room under a hash for a page of ours. Another host's page stays what it is for others. */
void page_displace(cxlkv_pool *pool, const uint64_t hash[2]);
/* Round the publishing of a state checkpoint's pages: what a death, or a fault, leaves of ours is
 * forgotten. Without one between, nothing is. */
void unfinished_begin(cxlkv_pool *pool, const uint8_t key[16], uint32_t pages);
void unfinished_end(cxlkv_pool *pool);    /* they are all published */
void unfinished_forget(cxlkv_pool *pool);
