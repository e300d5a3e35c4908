/* Records and descriptors: sealed, read, verified. geometry.c lays them out. */
#pragma once
#include "format/types.h"

descriptor *descriptor_of(const cxlkv_pool *pool, uint32_t page);
void descriptor_write(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t state,
                      uint32_t tokens, const page_key *key);
void descriptor_restore(cxlkv_pool *pool, uint32_t page, const descriptor *line);
/* Another host's: what is read next comes from memory. */
void descriptor_drop(const cxlkv_pool *pool, uint32_t page);
/* Copies the line and verifies the copy; 0 or -CXLKV_E_CORRUPT. */
int descriptor_read(const cxlkv_pool *pool, uint32_t page, descriptor *copy);
void record_seal(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                 const page_key *key);
/* Is it the page by which a key is found? An object in several pages has others. */
bool descriptor_is_first(const cxlkv_pool *pool, const descriptor *line);
void record_header_wipe(const cxlkv_pool *pool, uint32_t page); /* and its checksum table */
bool record_header_read(const cxlkv_pool *pool, uint32_t page, record_header *header);
bool record_table_is_whole(const cxlkv_pool *pool, uint32_t page, const record_header *header);
/* As its header says, even one whose rewriting was broken off: that does not change them. */
uint32_t record_part(const cxlkv_pool *pool, uint32_t page);
uint32_t record_tokens(const cxlkv_pool *pool, uint32_t page);
void record_expect(const cxlkv_pool *pool, uint32_t page);     /* it is checked soon */
/* Verifies header against page, generation and tokens. */
int record_check(const cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens);
uint32_t *checksum_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head,
                      uint32_t kind);
/* Verifies all pieces of (page, layer), once per acquisition of the page by this process. */
int pieces_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer);
int piece_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head, uint32_t kind,
                 const void *bytes);
/* Of a piece the bytes that its CRC covers: all, but of an object that does not fill its page. */
size_t piece_used_bytes(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kind);
void verified_set(cxlkv_pool *pool, uint32_t page, uint32_t layer);
void verified_clear(cxlkv_pool *pool, uint32_t page);

/* ---- outside of the pool ---- */

/* Records of parts whose payload is smaller than others' end in zeros. */
static inline const packing *packing_of(const cxlkv_pool *pool, uint32_t part) {
    return &shape_of(pool, layer_at(pool, part, 0))->packing;
}
uint64_t record_packed_bytes(const cxlkv_pool *pool); /* of a record, whichever its part */
/* How many pages a state checkpoint takes: for its bytes, behind a table of 4 bytes for each page,
 * which ends on a line. */
uint32_t state_pages(const cxlkv_pool *pool);
static inline uint64_t state_table_bytes(uint32_t pages) {
    return align_up(4ull * pages, LINE_BYTES);
}
/* Of everything that two pools must agree in, so that a record of one fits the other. */
uint32_t layout_crc(const cxlkv_pool *pool);
