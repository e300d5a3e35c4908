/* A whole page of a layer, written from rows of K and V: head by head, past the caches. Its digest,
 * sketch and checksums are made of rows that were just read, while the stores drain and the next
 * page's rows come from memory. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "format/mapping.h"
#include "format/records.h"
#include "format/scorers.h"
#include "kernels/fp8.h"
#include "kernels/sketch.h"
#include "pages/pages.h"
#include "sequence/page_write.h"

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
    tail *from; /* in place of the rows: a tail that has the form of a page */
    uint8_t *gathered; /* room for a piece of K or V, as they came */
    uint8_t *sketch;
    uint8_t *codes; /* for a piece that is encoded, not yet in planes */
    uint8_t *planes; /* and for its planes */
    float *decoded; /* for 16 keys */
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

/* Where they lie, if elements and rows do so in order; else gathered. */
static head_rows rows_of_head(const page_write *w, uint32_t head, uint32_t kind) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    const cxlkv_rows *rows = kind == PIECE_KEYS ? &w->rows->keys : &w->rows->values;
    size_t element = dtype_bytes(rows->dtype), row_bytes = kind_dim(layout, kind) * element;
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
    size_t row_bytes = kind_dim(layout_of(w->pool, w->layer), kind) * dtype_bytes(rows->dtype);
    for (uint32_t t = tokens * half / 2; t < tokens * (half + 1) / 2; t++)
        for (size_t at = 0; at < row_bytes; at += LINE_BYTES)
            __builtin_prefetch(row_at(rows, t, head) + at, 0, 2);
}

static void store_piece(const page_write *w, uint32_t head, uint32_t kind, head_rows rows,
                        uint32_t count) {
    uint64_t stride = shape_of(w->pool, w->layer)->strides[kind];
    uint8_t *to = pieces_of(w->pool, w->page, w->layer, kind) + head * stride;
    kernels_current()->store_rows(to, rows.data, rows.stride_bytes, count, rows.row_bytes);
}

static void checksum_piece(const page_write *w, uint32_t head, uint32_t kind, head_rows rows,
                           uint32_t count) {
    if (w->pool->layout.checksum)
        *checksum_of(w->pool, w->page, w->layer, head, kind) =
            crc32c_rows(rows.data, rows.stride_bytes, count, rows.row_bytes);
}

/* A piece that was made in memory of ours. */
static void write_made(const page_write *w, uint32_t head, uint32_t kind, const uint8_t *made) {
    size_t bytes = piece_data_bytes(layout_of(w->pool, w->layer), kind);
    store_piece(w, head, kind, (head_rows){made, bytes, bytes}, 1);
    checksum_piece(w, head, kind, (head_rows){made, bytes, bytes}, 1);
}

static void write_digest(const page_write *w, uint32_t head, head_rows keys) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    _Alignas(LINE_BYTES) uint8_t digest[2 * 4096 * 4];
    kernels_current()->digest((int)layout->dtype, keys.data, keys.stride_bytes, w->tokens,
                              layout->head_dim, digest);
    write_made(w, head, PIECE_DIGEST, digest);
}

static void write_sketch(const page_write *w, uint32_t head, head_rows keys) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
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
    if (values_are_keys(layout_of(w->pool, w->layer))) return;
    expect_rows(w, head, PIECE_VALUES, 0);
    head_rows values = rows_of_head(w, head, PIECE_VALUES);
    store_piece(w, head, PIECE_VALUES, values, count);
    expect_rows(w, head, PIECE_VALUES, 1);
    checksum_piece(w, head, PIECE_VALUES, values, count);
}

/* ---- encoded ---- */

static code_piece piece_of(const code_form *form, const cxlkv_layout *layout,
                           const uint8_t *piece) {
    size_t scales = code_scales_offset(form, layout->page_tokens);
    return (code_piece){piece, (const uint16_t *)(const void *)(piece + scales)};
}

/* Codes in two planes: each block is joined, has its tokens, and is split again. */
static void encode_planes(const cxlkv_layout *layout, uint32_t kind, const void *rows,
                          size_t stride_bytes, uint32_t at, uint32_t count, uint8_t *piece) {
    _Alignas(LINE_BYTES) uint8_t room[CODE_TOKENS * CODE_DIM_MAX];
    const kernels *isa = kernels_current();
    const code_form form = form_of(layout, kind);
    const size_t bytes = code_block_bytes(&form) / 2, lower = lower_offset(layout, kind);
    for (uint32_t done = 0, here; done < count; done += here) {
        uint32_t block = (at + done) / CODE_TOKENS, low = (at + done) % CODE_TOKENS;
        uint8_t *upper = piece + block * bytes;
        here = min_u32(CODE_TOKENS - low, count - done);
        if (here < CODE_TOKENS) isa->code_join(&form, upper, upper + lower, room);
        code_rows_encode(&form, (int)layout->dtype, (const uint8_t *)rows + done * stride_bytes,
                         stride_bytes, low, here, room,
                         (uint16_t *)(void *)(piece + scales_offset(layout, kind)) +
                             block * CODE_TOKENS);
        isa->code_split(&form, room, upper, upper + lower);
    }
}

static void encode_fp8(uint32_t dim, uint32_t dtype, const void *rows, size_t stride_bytes,
                       uint32_t count, uint8_t *to) {
    const kernels *isa = kernels_current();
    for (uint32_t i = 0; i < count; i++, to += dim) {
        const uint8_t *row = (const uint8_t *)rows + i * stride_bytes;
        if (dtype == CXLKV_BYTES) memcpy(to, row, dim);
        else isa->fp8_encode((int)dtype, row, dim, to);
    }
}

void piece_encode(const cxlkv_layout *layout, uint32_t kind, uint32_t dtype, const void *rows,
                  size_t stride_bytes, uint32_t at, uint32_t count, uint8_t *piece) {
    const uint32_t dim = kind_dim(layout, kind);
    const code_form form = form_of(layout, kind);
    if (has_fp8(layout, kind))
        encode_fp8(dim, dtype, rows, stride_bytes, count, piece + (size_t)at * dim);
    else if (has_planes(layout, kind))
        encode_planes(layout, kind, rows, stride_bytes, at, count, piece);
    else
        code_rows_encode(&form, (int)layout->dtype, rows, stride_bytes, at, count, piece,
                         (uint16_t *)(void *)(piece + scales_offset(layout, kind)));
}

void piece_join(const cxlkv_layout *layout, uint32_t kind, const uint8_t *planes, uint8_t *piece) {
    const code_form form = form_of(layout, kind);
    const size_t bytes = code_block_bytes(&form), lower = lower_offset(layout, kind);
    const uint32_t blocks = code_blocks(layout->page_tokens);
    for (uint32_t i = 0; i < blocks; i++)
        kernels_current()->code_join(&form, planes + i * bytes / 2, planes + lower + i * bytes / 2,
                                     piece + i * bytes);
    memcpy(piece + blocks * bytes, planes + scales_offset(layout, kind),
           blocks * CODE_TOKENS * sizeof(uint16_t));
}

/* Scales and the scale of a digest come with it; what fills up a line is zeros. */
static void piece_split(const cxlkv_layout *layout, uint32_t kind, const uint8_t *piece,
                        uint8_t *planes) {
    const code_form form = form_of(layout, kind);
    const size_t bytes = code_block_bytes(&form), lower = lower_offset(layout, kind);
    const uint32_t blocks = code_blocks(layout->page_tokens);
    const size_t scales = blocks * CODE_TOKENS * sizeof(uint16_t);
    for (uint32_t i = 0; i < blocks; i++)
        kernels_current()->code_split(&form, piece + i * bytes, planes + i * bytes / 2,
                                      planes + lower + i * bytes / 2);
    uint8_t *behind = planes + scales_offset(layout, kind);
    memset(behind, 0, lower - scales_offset(layout, kind));
    memcpy(behind, piece + blocks * bytes, scales + (kind == PIECE_KEYS ? sizeof(float) : 0));
}

/* Digest and sketch are made of what the codes stand for: they are the same however the tokens
 * came, one by one or together, and a digest bounds the keys that are scored. */
static void write_digest_of_codes(const page_write *w, uint32_t head, uint8_t *keys) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    code_form form = form_of(layout, PIECE_KEYS);
    _Alignas(LINE_BYTES) int8_t digest[2 * CODE_DIM_MAX];
    float scale = kernels_current()->code_digest(&form, piece_of(&form, layout, keys), w->tokens,
                                                 digest);
    memcpy(keys + code_bytes(&form, layout->page_tokens), &scale, sizeof(scale));
    write_made(w, head, PIECE_DIGEST, (const uint8_t *)digest);
}

static void write_sketch_of_codes(const page_write *w, uint32_t head, const uint8_t *keys) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    const kernels *isa = kernels_current();
    code_form form = form_of(layout, PIECE_KEYS);
    if (!layout->sketch) return;
    for (uint32_t first = 0; first < layout->page_tokens; first += CODE_TOKENS) {
        uint32_t count = min_u32(CODE_TOKENS, layout->page_tokens - first);
        isa->code_decode(&form, piece_of(&form, layout, keys), first, count, w->decoded);
        code_unrotate(w->decoded, count, form.dim);
        isa->sketch(CXLKV_FLOAT32, w->decoded, form.dim * sizeof(float), count, form.dim,
                    w->sketch + first / SKETCH_TOKENS * sketch_block_bytes(form.dim));
    }
    write_made(w, head, PIECE_SKETCH, w->sketch);
}

/* Of all rows as they are numbers, which takes no more room than the rows as they came. */
static const uint16_t *decoded_fp8(const page_write *w, const uint8_t *keys) {
    uint16_t *numbers = (uint16_t *)(void *)w->gathered;
    size_t count = (size_t)w->pool->layout.page_tokens * layout_of(w->pool, w->layer)->head_dim;
    kernels_current()->fp8_decode(keys, count, numbers, NULL);
    return numbers;
}

/* Least and largest numbers are those of a byte, too; a NaN is one that encoding does not make. */
static void write_digest_of_fp8(const page_write *w, uint32_t head, const uint16_t *keys) {
    uint32_t dim = layout_of(w->pool, w->layer)->head_dim;
    const kernels *isa = kernels_current();
    uint16_t numbers[2 * CODE_DIM_MAX];
    _Alignas(LINE_BYTES) uint8_t digest[2 * CODE_DIM_MAX];
    isa->digest(CXLKV_BFLOAT16, keys, dim * sizeof(*keys), w->tokens, dim, numbers);
    isa->fp8_encode(CXLKV_BFLOAT16, numbers, 2 * dim, digest);
    for (uint32_t i = 0; i < 2 * dim; i++)
        if ((numbers[i] & 0x7fff) > 0x7f80) digest[i] = FP8_NAN;
    write_made(w, head, PIECE_DIGEST, digest);
}

static void write_sketch_of_fp8(const page_write *w, uint32_t head, const uint16_t *keys) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    if (!layout->sketch) return;
    kernels_current()->sketch(CXLKV_BFLOAT16, keys, layout->head_dim * sizeof(*keys),
                              layout->page_tokens, layout->head_dim, w->sketch);
    write_made(w, head, PIECE_SKETCH, w->sketch);
}

/* K or V of a head in memory of ours: bytes of fp8, or codes, which are not in planes yet; zeros to
 * the end of the page, or of the last block. */
static uint8_t *codes_of(const page_write *w, uint32_t head, uint32_t kind) {
    static const float nothing[CODE_DIM_MAX];
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    const code_form form = form_of(layout, kind);
    uint16_t *scales =
        (uint16_t *)(void *)(w->codes + code_scales_offset(&form, layout->page_tokens));
    uint32_t end = code_blocks(layout->page_tokens) * CODE_TOKENS;
    if (w->from && has_planes(layout, kind)) {
        piece_join(layout, kind, tail_at(layout, w->from, kind, head), w->codes);
    } else if (w->from) {
        memcpy(w->codes, tail_at(layout, w->from, kind, head), piece_data_bytes(layout, kind));
    } else {
        head_rows rows = rows_of_head(w, head, kind);
        if (has_fp8(layout, kind))
            encode_fp8(form.dim, kind == PIECE_KEYS ? w->rows->keys.dtype : w->rows->values.dtype,
                       rows.data, rows.stride_bytes, layout->page_tokens, w->codes);
        else
            code_rows_encode(&form, (int)layout->dtype, rows.data, rows.stride_bytes, 0,
                             layout->page_tokens, w->codes, scales);
    }
    if (has_fp8(layout, kind))
        memset(w->codes + (size_t)w->tokens * form.dim, 0,
               (size_t)(layout->page_tokens - w->tokens) * form.dim);
    else if (w->tokens < end)
        code_rows_encode(&form, (int)layout->dtype, nothing, 0, w->tokens, end - w->tokens,
                         w->codes, scales);
    return w->codes;
}

/* Of a kind that is kept as it came: rows, or a piece of a tail that has them side by side. */
static head_rows plain_rows(const page_write *w, uint32_t head, uint32_t kind) {
    if (!w->from) return rows_of_head(w, head, kind);
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    size_t row = stored_row_bytes(layout, kind);
    memset(w->gathered, 0, rows_bytes(layout, kind));
    memcpy(w->gathered, tail_at(layout, w->from, kind, head), w->tokens * row);
    return (head_rows){w->gathered, row, row};
}

static void write_stored(const page_write *w, uint32_t head, uint32_t kind) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    if (!encoding_of(layout, kind)) {
        head_rows rows = plain_rows(w, head, kind);
        store_piece(w, head, kind, rows, layout->page_tokens);
        checksum_piece(w, head, kind, rows, layout->page_tokens);
        if (kind == PIECE_VALUES) return;
        write_digest(w, head, rows);
        write_sketch(w, head, rows);
        return;
    }
    uint8_t *codes = codes_of(w, head, kind);
    if (kind == PIECE_KEYS && has_fp8(layout, kind)) {
        const uint16_t *numbers = decoded_fp8(w, codes);
        write_digest_of_fp8(w, head, numbers);
        write_sketch_of_fp8(w, head, numbers);
    } else if (kind == PIECE_KEYS) {
        write_digest_of_codes(w, head, codes);
        write_sketch_of_codes(w, head, codes);
    }
    if (has_planes(layout, kind)) piece_split(layout, kind, codes, w->planes);
    write_made(w, head, kind, has_planes(layout, kind) ? w->planes : codes);
}

static void write_head_encoded(const page_write *w, uint32_t head) {
    expect_rows(w, head, PIECE_KEYS, 0);
    write_stored(w, head, PIECE_KEYS);
    expect_rows(w, head, PIECE_KEYS, 1);
    expect_rows(w, head, PIECE_VALUES, 0);
    write_stored(w, head, PIECE_VALUES);
    expect_rows(w, head, PIECE_VALUES, 1);
}

/* ---- both ---- */

/* What a write needs beside the pool: rows that are gathered, a sketch, a piece, decoded keys. */
static size_t place_buffers(page_write *w, uint8_t *at) {
    const cxlkv_layout *layout = layout_of(w->pool, w->layer);
    const uint64_t *strides = shape_of(w->pool, w->layer)->strides;
    size_t keys = rows_bytes(layout, PIECE_KEYS), values = rows_bytes(layout, PIECE_VALUES);
    size_t gathered = align_up(keys > values ? keys : values, LINE_BYTES);
    size_t sketch = align_up(strides[PIECE_SKETCH], LINE_BYTES), codes = 0, decoded = 0;
    if (is_encoded(layout)) {
        codes = strides[PIECE_KEYS] > strides[PIECE_VALUES] ? strides[PIECE_KEYS]
                                                            : strides[PIECE_VALUES];
        decoded = align_up(CODE_TOKENS * layout->head_dim * sizeof(float), LINE_BYTES);
    }
    if (at) {
        w->gathered = at;
        w->sketch = at + gathered;
        w->codes = w->sketch + sketch;
        w->planes = w->codes + codes;
        w->decoded = (float *)(void *)(w->planes + codes);
    }
    return gathered + sketch + 2 * codes + decoded;
}

static int page_write_all(page_write *w) {
    cxlkv_pool *pool = w->pool;
    _Alignas(LINE_BYTES) uint8_t small[20480];
    uint8_t *buffer = small;
    size_t bytes = place_buffers(w, NULL);
    int code = page_stays_ours(pool, w->page);
    if (code < 0) return code;
    if (bytes > sizeof(small) && !(buffer = aligned_alloc(LINE_BYTES, bytes)))
        return fail(ENOMEM, "no memory to gather a piece of %zu bytes", bytes);
    place_buffers(w, buffer);
    summary_forget(pool, w->page, w->layer);
    for (uint32_t head = 0; head < layout_of(pool, w->layer)->kv_heads; head++) {
        if (is_encoded(&pool->layout)) write_head_encoded(w, head);
        else write_head(w, head);
    }
    if (buffer != small) free(buffer);
    if (pool->mode != VISIBILITY_COHERENT && !kernels_current()->streams)
        pieces_write_back(pool, w->page, w->layer);
    verified_set(pool, w->page, w->layer);
    return 0;
}

int page_write_rows(cxlkv_pool *pool, uint32_t page, uint32_t layer, const kv_rows *rows,
                    const kv_rows *next, uint32_t tokens) {
    page_write w = {.pool = pool, .page = page, .layer = layer, .tokens = tokens, .rows = rows,
                    .next = next};
    return page_write_all(&w);
}

int page_write_tail(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t tokens) {
    const cxlkv_layout *layout = layout_of(pool, layer);
    int64_t element = (int64_t)dtype_bytes(layout->dtype);
    int64_t row = (int64_t)tail_row_bytes(layout, PIECE_KEYS);
    const uint32_t dtype = layout->dtype;
    kv_rows rows = {.keys = {.data = tail_at(layout, from, PIECE_KEYS, 0), .dtype = dtype,
                             .stride_bytes = {row, layout->head_dim * element, element}},
                    .values = {.data = tail_at(layout, from, PIECE_VALUES, 0), .dtype = dtype,
                               .stride_bytes = {row, layout->value_head_dim * element, element}}};
    page_write w = {.pool = pool, .page = page, .layer = layer, .tokens = tokens, .rows = &rows,
                    .from = is_encoded(layout) ? from : NULL};
    int code = page_write_all(&w);
    store_fence(); /* of this thread's own non-temporal stores */
    return code;
}
