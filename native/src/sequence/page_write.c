/* A whole page of a layer, written from rows of K and V: head by head, past the caches. Its digest,
 * sketch and checksums are made of rows that were just read, while the stores drain and the next
 * page's rows come from memory. */
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/flush.h"
#include "pool/pages.h"
#include "pool/peers.h"
#include "sequence/sequence.h"

/* The rows of a head, `row_bytes` each. */
typedef struct head_rows {
    const uint8_t *data;
    size_t stride_bytes, row_bytes;
} head_rows;

typedef struct page_write {
    cxlkv_pool *pool;
    uint32_t page, layer;
    uint32_t tokens; /* that count, of page_tokens rows */
    const kv_rows *rows;
    const kv_rows *next; /* of the page that is written after this one, or NULL */
    uint8_t *gathered; /* room for a piece of K or V */
    uint8_t *sketch;
} page_write;

const uint8_t *row_at(const cxlkv_rows *rows, uint32_t row, uint32_t head) {
    return (const uint8_t *)rows->data + (int64_t)row * rows->stride_bytes[0] +
           (int64_t)head * rows->stride_bytes[1];
}

void row_copy(void *to, const uint8_t *from, int64_t stride, uint32_t dim, size_t element) {
    if (stride == (int64_t)element) {
        memcpy(to, from, dim * element);
        return;
    }
    for (uint32_t d = 0; d < dim; d++)
        memcpy((uint8_t *)to + d * element, from + d * stride, element);
}

static size_t row_bytes_of(const cxlkv_layout *layout, uint32_t kind) {
    return (kind == PIECE_KEYS ? layout->head_dim : layout->value_head_dim) *
           dtype_bytes(layout->dtype);
}

/* Where they lie, if elements and rows do so in order; else gathered. */
static head_rows rows_of_head(const page_write *w, uint32_t head, uint32_t kind) {
    const cxlkv_layout *layout = &w->pool->layout;
    const cxlkv_rows *rows = kind == PIECE_KEYS ? &w->rows->keys : &w->rows->values;
    size_t element = dtype_bytes(layout->dtype), row_bytes = row_bytes_of(layout, kind);
    if (rows->stride_bytes[2] == (int64_t)element && rows->stride_bytes[0] > 0)
        return (head_rows){row_at(rows, 0, head), (size_t)rows->stride_bytes[0], row_bytes};
    for (uint32_t t = 0; t < layout->page_tokens; t++)
        row_copy(w->gathered + t * row_bytes, row_at(rows, t, head), rows->stride_bytes[2],
                 (uint32_t)(row_bytes / element), element);
    return (head_rows){w->gathered, row_bytes, row_bytes};
}

/* Asks for the first or the second half of a head's rows of the next page: few lines at a time,
 * since a CPU waits for few at once. It is inlined, as gcc leaves out calls that only prefetch. */
static inline __attribute__((always_inline)) void expect_rows(const page_write *w, uint32_t head,
                                                              uint32_t kind, uint32_t half) {
    if (!w->next) return;
    const cxlkv_rows *rows = kind == PIECE_KEYS ? &w->next->keys : &w->next->values;
    uint32_t tokens = w->pool->layout.page_tokens;
    size_t row_bytes = row_bytes_of(&w->pool->layout, kind);
    for (uint32_t t = tokens * half / 2; t < tokens * (half + 1) / 2; t++)
        for (size_t at = 0; at < row_bytes; at += LINE_BYTES)
            __builtin_prefetch(row_at(rows, t, head) + at, 0, 2);
}

static void store_piece(const page_write *w, uint32_t head, uint32_t kind, head_rows rows,
                        uint32_t count) {
    uint8_t *to =
        pieces_of(w->pool, w->page, w->layer, kind) + head * piece_stride(&w->pool->geometry, kind);
    kernels_current()->store_rows(to, rows.data, rows.stride_bytes, count, rows.row_bytes);
}

static void checksum_piece(const page_write *w, uint32_t head, uint32_t kind, head_rows rows,
                           uint32_t count) {
    if (w->pool->layout.checksum)
        *checksum_of(w->pool, w->page, w->layer, head, kind) =
            crc32c_rows(rows.data, rows.stride_bytes, count, rows.row_bytes);
}

/* A digest or a sketch, which was made in memory of ours. */
static void write_made(const page_write *w, uint32_t head, uint32_t kind, const uint8_t *made) {
    size_t bytes = piece_data_bytes(&w->pool->layout, kind);
    store_piece(w, head, kind, (head_rows){made, bytes, bytes}, 1);
    checksum_piece(w, head, kind, (head_rows){made, bytes, bytes}, 1);
}

static void write_digest(const page_write *w, uint32_t head, head_rows keys) {
    const cxlkv_layout *layout = &w->pool->layout;
    _Alignas(LINE_BYTES) uint8_t digest[2 * 4096 * 4];
    kernels_current()->digest((int)layout->dtype, keys.data, keys.stride_bytes, w->tokens,
                              layout->head_dim, digest);
    write_made(w, head, PIECE_DIGEST, digest);
}

static void write_sketch(const page_write *w, uint32_t head, head_rows keys) {
    const cxlkv_layout *layout = &w->pool->layout;
    if (!layout->sketch) return;
    kernels_current()->sketch((int)layout->dtype, keys.data, keys.stride_bytes, layout->page_tokens,
                              layout->head_dim, w->sketch);
    write_made(w, head, PIECE_SKETCH, w->sketch);
}

static void write_head(const page_write *w, uint32_t head) {
    uint32_t count = w->pool->layout.page_tokens;
    head_rows keys = rows_of_head(w, head, PIECE_KEYS);
    store_piece(w, head, PIECE_KEYS, keys, count);
    expect_rows(w, head, PIECE_KEYS, 0);
    checksum_piece(w, head, PIECE_KEYS, keys, count);
    write_digest(w, head, keys);
    expect_rows(w, head, PIECE_KEYS, 1);
    write_sketch(w, head, keys);
    if (values_are_keys(&w->pool->layout)) return;
    expect_rows(w, head, PIECE_VALUES, 0);
    head_rows values = rows_of_head(w, head, PIECE_VALUES);
    store_piece(w, head, PIECE_VALUES, values, count);
    expect_rows(w, head, PIECE_VALUES, 1);
    checksum_piece(w, head, PIECE_VALUES, values, count);
}

int page_write_rows(cxlkv_pool *pool, uint32_t page, uint32_t layer, const kv_rows *rows,
                    const kv_rows *next, uint32_t tokens) {
    const cxlkv_geometry *g = &pool->geometry;
    size_t piece =
        g->key_piece_bytes > g->value_piece_bytes ? g->key_piece_bytes : g->value_piece_bytes;
    size_t bytes = align_up(piece + g->sketch_piece_bytes, LINE_BYTES);
    _Alignas(LINE_BYTES) uint8_t small[16384];
    uint8_t *buffer = small;
    int code = page_stays_ours(pool, page);
    if (code < 0) return code;
    if (bytes > sizeof(small) && !(buffer = aligned_alloc(LINE_BYTES, bytes)))
        return fail(ENOMEM, "no memory to gather a piece of %zu bytes", bytes);
    page_write w = {.pool = pool,
                    .page = page,
                    .layer = layer,
                    .tokens = tokens,
                    .rows = rows,
                    .next = next,
                    .gathered = buffer,
                    .sketch = buffer + piece};
    for (uint32_t head = 0; head < pool->layout.kv_heads; head++) write_head(&w, head);
    if (buffer != small) free(buffer);
    if (pool->mode != VISIBILITY_COHERENT && !kernels_current()->streams)
        pieces_write_back(pool, page, layer);
    verified_set(pool, page, layer);
    return 0;
}

int page_write_tail(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t tokens) {
    const cxlkv_layout *layout = &pool->layout;
    int64_t element = (int64_t)dtype_bytes(layout->dtype);
    int64_t row = (int64_t)tail_row_bytes(pool);
    kv_rows rows = {.keys = {.data = tail_at(pool, from, PIECE_KEYS, 0),
                             .stride_bytes = {row, layout->head_dim * element, element}},
                    .values = {.data = tail_at(pool, from, PIECE_VALUES, 0),
                               .stride_bytes = {row, layout->value_head_dim * element, element}}};
    int code = page_write_rows(pool, page, layer, &rows, NULL, tokens);
    store_fence(); /* of this thread's own non-temporal stores */
    return code;
}
