/* Descriptors, record headers and checksums: written, read and checked. */
#include <sched.h>

#include "base/crc32c.h"
#include "coherence/lines.h"
#include "format/records.h"
#include "format/scorers.h"

descriptor *descriptor_of(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return (descriptor *)(pool->region.base + g->descriptors_offset +
                          page / g->slab_slots * g->descriptors_bytes) + page % g->slab_slots;
}

static record_header *header_of(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return (record_header *)(pool->region.base + g->extents_offset +
                             page / g->slab_slots * g->extent_bytes) +
           page % g->slab_slots;
}

static uint8_t *checksum_table(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes +
           g->checksums_offset + page % g->slab_slots * g->checksum_bytes;
}

bool descriptor_is_first(const cxlkv_pool *pool, const descriptor *line) {
    return !has_object_pages(&pool->layout) ||
           listed_part(&pool->layout, line->part, line->ordinal) == 0;
}

void record_header_wipe(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    memset(header_of(pool, page), 0, sizeof(record_header));
    memset(checksum_table(pool, page), 0, g->checksum_bytes);
    if (pool->mode == VISIBILITY_COHERENT) return;
    flush_write_back(FLUSH_PUBLISH_HEADER, header_of(pool, page), sizeof(record_header));
    flush_write_back(FLUSH_PUBLISH_HEADER, checksum_table(pool, page), g->checksum_bytes);
}

uint32_t *checksum_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head,
                      uint32_t kind) {
    uint64_t row = pool->layers.row_of[layer];
    uint64_t entry = (row * layout_of(pool, layer)->kv_heads + kv_head) * PIECE_KINDS + kind;
    return (uint32_t *)checksum_table(pool, page) + entry;
}

/* Lines are read while they may be written: word by word, and the CRC tells a torn copy. It covers
 * the version: a reader between the two stores sees a wrong CRC, not a torn line. */
static descriptor descriptor_make(const cxlkv_pool *pool, uint32_t page, uint64_t generation,
                                  uint32_t state, uint32_t tokens, const page_key *key) {
    descriptor line = {.version = generation << 8 | state, .tokens = tokens, .page = page};
    if (key) {
        memcpy(line.hash, key->hash, sizeof(line.hash));
        line.ordinal = key->ordinal;
        memcpy(line.object, key->object, sizeof(line.object));
        if (pool->shared) line.publication = ++pool->host->publications & 0xffffff;
    }
    if (state != PAGE_FREE) {
        line.table_crc = header_of(pool, page)->table_crc;
        line.part = header_of(pool, page)->part;
    }
    line.crc = crc32c(0, &line, offsetof(descriptor, crc));
    return line;
}

void descriptor_write(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t state,
                      uint32_t tokens, const page_key *key) {
    descriptor line = descriptor_make(pool, page, generation, state, tokens, key);
    descriptor_restore(pool, page, &line);
}

void descriptor_restore(cxlkv_pool *pool, uint32_t page, const descriptor *line) {
    publish_item item = {.descriptor_line = descriptor_of(pool, page), .descriptor = line};
    visibility_free(&item, 1, pool->mode);
}

void descriptor_drop(const cxlkv_pool *pool, uint32_t page) {
    flush_fence_all(FLUSH_ACQUIRE_BEGIN_FENCE);
    line_drop(FLUSH_ACQUIRE_DESCRIPTOR, descriptor_of(pool, page), pool->mode);
    flush_fence_all(FLUSH_ACQUIRE_DESCRIPTOR_FENCE);
}

/* A holder writes its page's descriptor without the host lock, and may be preempted half way. What
 * another host is writing just now is told by its log; else nobody writes. */
int descriptor_read(const cxlkv_pool *pool, uint32_t page, descriptor *copy) {
    descriptor *at = descriptor_of(pool, page);
    int attempts = !page_is_ours(pool, page) ? 8 : pool->pages[page].holders ? 200 : 1;
    for (int attempt = 0; attempt < attempts; attempt++) {
        uint64_t version =
            atomic_load_explicit((_Atomic uint64_t *)&at->version, memory_order_acquire);
        flush_load_line(copy, at);
        copy->version = version;
        if (copy->crc == crc32c(0, copy, offsetof(descriptor, crc)) && copy->page == page &&
            copy->tokens <= pool->layout.page_tokens && (version & 255) <= PAGE_PUBLISHED &&
            copy->part < stored_parts(pool))
            return 0;
        if (attempt > 50) sched_yield();
    }
    return fail(CXLKV_E_CORRUPT,
                "the descriptor of page %u is damaged: its CRC is wrong. The page is set aside; "
                "recompute what it held",
                page);
}

uint32_t record_part(const cxlkv_pool *pool, uint32_t page) {
    return min_u32(header_of(pool, page)->part, stored_parts(pool) - 1);
}

uint32_t record_tokens(const cxlkv_pool *pool, uint32_t page) {
    return min_u32(header_of(pool, page)->tokens, pool->layout.page_tokens);
}

void record_expect(const cxlkv_pool *pool, uint32_t page) {
    __builtin_prefetch(descriptor_of(pool, page));
    __builtin_prefetch(header_of(pool, page));
}

void record_seal(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                 const page_key *key) {
    record_header header = {.magic = CXLKV_RECORD_MAGIC, .page = page, .tokens = tokens,
                            .part = part, .generation = pool->pages[page].generation};
    if (key) {
        memcpy(header.hash, key->hash, sizeof(header.hash));
        header.ordinal = key->ordinal;
        memcpy(header.object, key->object, sizeof(header.object));
    }
    if (pool->layout.checksum)
        header.table_crc = crc32c(0, checksum_table(pool, page), pool->geometry.checksum_bytes);
    header.crc = crc32c(0, &header, offsetof(record_header, crc));
    descriptor line = descriptor_make(pool, page, header.generation,
                                      key ? PAGE_PUBLISHED : PAGE_SEALED, tokens, key);
    line.table_crc = header.table_crc;
    line.part = part;
    line.crc = crc32c(0, &line, offsetof(descriptor, crc));
    if (pool->mode != VISIBILITY_COHERENT) /* V1; the pieces went past the caches */
        flush_write_back(FLUSH_PUBLISH_HEADER, checksum_table(pool, page),
                         pool->geometry.checksum_bytes);
    publish_item item = {.header_line = header_of(pool, page), .header = &header,
                         .descriptor_line = descriptor_of(pool, page), .descriptor = &line};
    visibility_publish(&item, 1, pool->mode);
}

/* publish() rewrites a header to add its hash: a reader in between tries again. */
bool record_header_read(const cxlkv_pool *pool, uint32_t page, record_header *header) {
    for (int attempt = 0; attempt < 200; attempt++) {
        flush_load_line(header, header_of(pool, page));
        if (header->crc == crc32c(0, header, offsetof(record_header, crc)) &&
            header->magic == CXLKV_RECORD_MAGIC)
            return true;
        if (attempt > 50) sched_yield();
    }
    return false;
}

bool record_table_is_whole(const cxlkv_pool *pool, uint32_t page, const record_header *header) {
    return header->table_crc ==
           crc32c(0, checksum_table(pool, page), pool->geometry.checksum_bytes);
}

int record_check(const cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens) {
    record_header header;
    if (!record_header_read(pool, page, &header))
        return fail(CXLKV_E_CORRUPT,
                    "the record header of page %u is damaged: its CRC is wrong. Release the "
                    "sequence and recompute it; `cxlkv pool check --deep` lists what else is hurt",
                    page);
    if (header.page != page || header.generation != generation || header.tokens != tokens)
        return fail(CXLKV_E_STALE,
                    "page %u holds generation %lu with %u tokens, wanted %lu with %u: it was "
                    "reused. Match or recompute the sequence",
                    page, header.generation, header.tokens, generation, tokens);
    return 0;
}

static atomic_ulong *verified_word(const cxlkv_pool *pool, uint32_t page, uint32_t layer,
                                   uint64_t *bit) {
    uint64_t index = (uint64_t)page * pool->geometry.record_layers + pool->layers.row_of[layer];
    *bit = 1ull << index % 64;
    return &pool->verified[index / 64];
}

void verified_set(cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    uint64_t bit;
    atomic_ulong *word = verified_word(pool, page, layer, &bit);
    atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
}

void verified_clear(cxlkv_pool *pool, uint32_t page) {
    uint64_t rows = pool->geometry.record_layers;
    bits_clear(pool->verified, page * rows, rows);
    summaries_forget(pool, page);
}

size_t piece_used_bytes(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kind) {
    size_t bytes = piece_data_bytes(layout_of(pool, layer), kind);
    return stores_objects(&pool->layout) ? min_u64(bytes, record_tokens(pool, page)) : bytes;
}

int piece_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head, uint32_t kind,
                 const void *bytes) {
    static const char *const names[PIECE_KINDS] = {"digest", "sketch", "K", "V"};
    uint32_t crc = crc32c(0, bytes, piece_used_bytes(pool, page, layer, kind));
    if (crc == *checksum_of(pool, page, layer, kv_head, kind)) return 0;
    count_add(pool, COUNT_CORRUPT_PIECES, 1);
    return fail(CXLKV_E_CORRUPT,
                "page %u, layer %u, kv head %u: the CRC of its %s is wrong, the bytes were "
                "changed. Release the sequence and recompute it; `cxlkv pool check --deep` lists "
                "what else is hurt",
                page, layer, kv_head, names[kind]);
}

int pieces_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    const layer_shape *shape = shape_of(pool, layer);
    if (!pool->layout.checksum) return 0;
    uint64_t bit;
    atomic_ulong *word = verified_word(pool, page, layer, &bit);
    if (atomic_load_explicit(word, memory_order_relaxed) & bit) return 0;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        uint64_t stride = shape->strides[kind];
        if (stride == 0) continue;
        const uint8_t *pieces = pieces_of(pool, page, layer, kind);
        for (uint32_t head = 0; head < shape->layout.kv_heads; head++) {
            int code = piece_verify(pool, page, layer, head, kind, pieces + head * stride);
            if (code < 0) return code;
        }
    }
    verified_set(pool, page, layer);
    return 0;
}

/* ---- outside of the pool ---- */

uint64_t record_packed_bytes(const cxlkv_pool *pool) {
    uint64_t most = 0, payload;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        payload = packing_of(pool, part)->payload_bytes;
        if (payload > most) most = payload;
    }
    return align_up(sizeof(cxlkv_packed_header) + pool->geometry.checksum_bytes + most, LINE_BYTES);
}

uint32_t state_pages(const cxlkv_pool *pool) {
    uint64_t page_bytes = packing_of(pool, pool->geometry.part_count)->payload_bytes, pages = 1;
    while (pages * page_bytes < state_table_bytes((uint32_t)pages) + pool->layout.state_bytes)
        pages += (state_table_bytes((uint32_t)pages) + pool->layout.state_bytes -
                  pages * page_bytes + page_bytes - 1) / page_bytes;
    return (uint32_t)min_u64(pages, STATE_PAGES_MAX + 1);
}

uint32_t layout_crc(const cxlkv_pool *pool) {
    cxlkv_layout layout = pool->layout;
    size_t length = strnlen(layout.model_id, sizeof(layout.model_id));
    memset(layout.model_id + length, 0, sizeof(layout.model_id) - length);
    layout.checksum = 0; /* outside of a pool every piece has one */
    /* Records of pools without an encoding are as they were before there were any. */
    uint32_t crc = crc32c(0, &layout, is_encoded(&layout) ? offsetof(cxlkv_layout, rotary)
                                                          : offsetof(cxlkv_layout, k_encoding));
    size_t states = offsetof(cxlkv_layout, state_digest);
    if (has_states(&layout))
        crc = crc32c(crc, &layout.state_digest, offsetof(cxlkv_layout, object_bytes) - states);
    if (has_shapes(&layout)) crc = crc32c(crc, layout.shapes, sizeof(layout.shapes));
    if (has_object_pages(&layout))
        crc = crc32c(crc, &layout.object_bytes, sizeof(layout.object_bytes));
    return crc;
}
_Static_assert(offsetof(cxlkv_layout, rotary) == 13 * 4 + 256 + 4 + 16 * 4 + 1024 + 8 &&
               offsetof(cxlkv_layout, state_bytes) == offsetof(cxlkv_layout, state_digest) + 4 &&
               offsetof(cxlkv_layout, shapes) == offsetof(cxlkv_layout, state_bytes) + 16 &&
               sizeof(cxlkv_layout) == offsetof(cxlkv_layout, shapes) + 16 * 20, "no holes");
