/* Rows are written to a page, as the pool stores them. */
#pragma once
#include "sequence/types.h"

/* K and V of a page, from its first row on; no values where they are a prefix of the keys. */
typedef struct kv_rows {
    cxlkv_rows keys, values;
} kv_rows;
const uint8_t *row_at(const cxlkv_rows *rows, uint32_t row, uint32_t head);
/* dim elements that lie `stride` bytes apart. */
void row_copy(void *to, const uint8_t *from, int64_t stride, uint32_t dim, size_t element);
/* `count` rows of a head, of the layout's dtype or as they are stored (CXLKV_BYTES), into its piece
 * in memory, from token `at` on. */
void piece_encode(const cxlkv_layout *layout, uint32_t kind, uint32_t dtype, const void *rows,
                  size_t stride_bytes, uint32_t at, uint32_t count, uint8_t *piece);
/* A piece in planes as one of 8 bits, anywhere in memory: blocks, then scales, without the scale of
 * its digest. */
void piece_join(const cxlkv_layout *layout, uint32_t kind, const uint8_t *planes, uint8_t *piece);
/* Writes one (page, layer) from page_tokens rows, of which `tokens` count. `next`: what is written
 * next, or NULL; it is asked for in the meantime. The caller fences. */
int page_write_rows(cxlkv_pool *pool, uint32_t page, uint32_t layer, const kv_rows *rows,
                    const kv_rows *next, uint32_t tokens);
/* Writes one (page, layer) from a tail with `tokens` filled, the others zero. */
int page_write_tail(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t tokens);
