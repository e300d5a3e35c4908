/* Handles: a sequence as bytes, which any process with the pool open may adopt. */
#include "base/crc32c.h"
#include "base/guard.h"
#include "format/records.h"
#include "host/counters.h"
#include "host/locks.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pool/alloc.h"
#include "prefix/handle.h"
#include "sequence/page_write.h"
#include "sequence/sequence.h"

#define HANDLE_MAGIC 0x48564b43u /* "CKVH" */

enum { HANDLE_VERSION = 2, ENTRY_BYTES = 12 };
/* In `tokens`: the sequence has pages that a key of content found. */
#define HANDLE_APPROXIMATE (1ull << 63)

/* Then, by part, the first page that is not behind its window (4 bytes each); part after part an
 * entry {generation: 8, page: 4} for each page from that one on; a CRC (4 bytes). */
typedef struct handle_header {
    uint32_t magic;
    uint32_t version;
    uint8_t identity[16];
    uint64_t tokens;
    uint32_t page_count;
    uint32_t page_tokens;
} handle_header;
_Static_assert(sizeof(handle_header) == 40, "no holes: it is written as it lies");

static uint64_t handle_bytes(const cxlkv_pool *pool, uint64_t entries) {
    return sizeof(handle_header) + pool->geometry.part_count * 4 + entries * ENTRY_BYTES + 4;
}

/* ---- export ---- */

int export_layer(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t filled) {
    tail *whole = tail_copy(pool, layer, from, filled);
    if (!whole) return fail(ENOMEM, "no memory for a tail");
    /* Behind its filled tokens a tail holds whatever the allocator gave: none of it goes out. */
    size_t row = tail_row_bytes(layout_of(pool, layer), PIECE_KEYS);
    if (!is_encoded(&pool->layout))
        memset(whole->data + filled * row, 0, (pool->layout.page_tokens - filled) * row);
    int code = GUARDED(page_write_tail(pool, page, layer, whole, filled),
                       poison_error(pool, &fault));
    tail_drop(pool, whole);
    return code;
}

/* The open tails, written to a page of each part that only handles name. */
static int export_tail(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t filled = (uint32_t)(tokens % pool->layout.page_tokens);
    uint32_t parts = pool->geometry.part_count;
    if (sequence->exported && sequence->export_tokens == tokens) return 0;
    int code = host_lock_with_room(pool, filled ? parts : 0);
    if (code < 0) return code;
    if (sequence->exported) pages_drop(pool, parts, sequence->export_pages);
    sequence->exported = false;
    if (filled) code = pages_take(pool, parts, NO_PAGE, sequence->export_pages);
    if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
    host_unlock(pool);
    if (code < 0 || filled == 0) return code;
    sequence->exported = true;
    sequence->export_tokens = UINT64_MAX;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        uint32_t page = sequence->export_pages[pool->layers.part_of[layer]];
        code = export_layer(pool, page, layer, sequence->tails[layer], filled);
        if (code < 0) return code;
    }
    for (uint32_t part = 0; part < parts; part++)
        record_seal(pool, sequence->export_pages[part], part, filled, NULL);
    sequence->export_tokens = tokens;
    return 0;
}

static uint8_t *write_entries(const cxlkv_sequence *sequence, uint32_t part, uint32_t count,
                              uint8_t *to) {
    const cxlkv_pool *pool = sequence->pool;
    for (uint32_t i = sequence->tables[part].first; i < count; i++, to += ENTRY_BYTES) {
        uint32_t page = i < sequence->page_count ? sequence_page(sequence, part, i)
                                                 : sequence->export_pages[part];
        memcpy(to, &pool->pages[page].generation, 8);
        memcpy(to + 8, &page, 4);
    }
    return to;
}

/* Others may know these pages from now on: when they are freed, pins are looked at. */
static int show_pages(const cxlkv_sequence *sequence, uint32_t count) {
    cxlkv_pool *pool = sequence->pool;
    int code = pool->shared ? host_lock(pool) : 0;
    if (code < 0 || !pool->shared) return code;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++)
        for (uint32_t i = sequence->tables[part].first; i < count; i++)
            pool->pages[i < sequence->page_count ? sequence_page(sequence, part, i)
                                                 : sequence->export_pages[part]].shown = 1;
    host_unlock(pool);
    return 0;
}

static int64_t export_locked(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t capacity) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t tokens = sequence_even_tokens(sequence), entries = 0;
    if (tokens == UINT64_MAX)
        return fail(CXLKV_E_UNEVEN, "layers have different lengths: finish the step before you "
                    "hand the sequence over");
    uint64_t page_tokens = pool->layout.page_tokens;
    uint32_t count = (uint32_t)((tokens + page_tokens - 1) / page_tokens);
    for (uint32_t part = 0; part < pool->geometry.part_count; part++)
        entries += count - sequence->tables[part].first;
    uint64_t size = handle_bytes(pool, entries);
    if (capacity < size) return (int64_t)size;
    int code = export_tail(sequence, tokens);
    if (code == 0) code = show_pages(sequence, count);
    if (code < 0) return code;
    handle_header header = {.magic = HANDLE_MAGIC, .version = HANDLE_VERSION, .tokens = tokens,
                            .page_count = count, .page_tokens = pool->layout.page_tokens};
    if (sequence->approximate) header.tokens |= HANDLE_APPROXIMATE;
    memcpy(header.identity, pool->identity, sizeof(header.identity));
    memcpy(bytes, &header, sizeof(header));
    uint8_t *at = bytes + sizeof(header);
    for (uint32_t part = 0; part < pool->geometry.part_count; part++, at += 4)
        memcpy(at, &sequence->tables[part].first, 4);
    for (uint32_t part = 0; part < pool->geometry.part_count; part++)
        at = write_entries(sequence, part, count, at);
    uint32_t crc = crc32c(0, bytes, size - 4);
    memcpy(at, &crc, 4);
    return (int64_t)size;
}

int64_t cxlkv_sequence_export(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t capacity) {
    return IN_SEQUENCE(sequence, true, GUARDED(export_locked(sequence, bytes, capacity),
                                               poison_error(sequence->pool, &fault)));
}

/* ---- adopt ---- */

static uint32_t handle_first(const uint8_t *bytes, uint32_t part) {
    uint32_t first;
    memcpy(&first, bytes + sizeof(handle_header) + part * 4ull, 4);
    return first;
}

static int handle_read(const cxlkv_pool *pool, const uint8_t *bytes, uint64_t size,
                       handle_header *header, bool *approximate) {
    uint32_t crc;
    if (size < handle_bytes(pool, 0))
        return fail(CXLKV_E_STALE, "these %lu bytes are no handle: too short", size);
    memcpy(header, bytes, sizeof(*header));
    memcpy(&crc, bytes + size - 4, 4);
    if (header->magic != HANDLE_MAGIC || crc != crc32c(0, bytes, size - 4))
        return fail(CXLKV_E_STALE, "these bytes are no handle, or were changed");
    if (header->version != HANDLE_VERSION)
        return fail(CXLKV_E_STALE, "the handle has version %u, this build reads %d: both sides "
                    "want the same release of cxlkv", header->version, HANDLE_VERSION);
    if (memcmp(header->identity, pool->identity, sizeof(header->identity)) != 0)
        return fail(CXLKV_E_STALE, "the handle is of another pool");
    *approximate = (header->tokens & HANDLE_APPROXIMATE) != 0;
    header->tokens &= ~HANDLE_APPROXIMATE;
    uint64_t page_tokens = pool->layout.page_tokens;
    if (header->page_tokens != page_tokens ||
        header->tokens > (uint64_t)header->page_count * page_tokens ||
        header->page_count != (header->tokens + page_tokens - 1) / page_tokens)
        return fail(CXLKV_E_STALE, "the handle's page count does not fit its tokens");
    uint64_t entries = 0;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint32_t first = handle_first(bytes, part);
        if (first > window_page(pool, part, header->tokens))
            return fail(CXLKV_E_STALE, "the handle lacks pages that its next token sees");
        entries += header->page_count - first;
    }
    if (size != handle_bytes(pool, entries))
        return fail(CXLKV_E_STALE, "the handle's size does not fit its pages");
    return 0;
}

/* A page of another host, which its handle need not say to be published. */
static int adopt_foreign(cxlkv_pool *pool, uint32_t page, uint32_t part, uint64_t generation,
                         uint32_t tokens) {
    bool published = pool->pages[page].published; /* as far as we have heard */
    borrowing item = {.page = page, .generation = generation, .code = -CXLKV_E_STALE};
    /* Its owner may publish or forget it between two looks. */
    for (int look = 0; look < 3 && item.code == -CXLKV_E_STALE; look++) {
        item.state = published == (look % 2 == 0) ? PAGE_PUBLISHED : PAGE_SEALED;
        borrow(pool, &item, 1);
    }
    if (item.code == -ENOMEM) return fail(ENOMEM, "no memory to adopt a page");
    if (item.code == -CXLKV_E_POISON) return item.code; /* borrow() says what is lost */
    if (item.code < 0)
        return fail(CXLKV_E_STALE,
                    "stale handle: page %u of another host was freed since. Whoever made the "
                    "handle must keep its sequence or hit until it is adopted", page);
    int code = record_check(pool, page, generation, tokens);
    if (code == 0 && record_part(pool, page) != part)
        code = fail(CXLKV_E_STALE, "stale handle: page %u holds other layers", page);
    if (code < 0 && pool->pages[page].holders == 0) borrow_end(pool, page, 1);
    return code;
}

int page_acquire_check(cxlkv_pool *pool, uint32_t page, uint32_t part, uint64_t generation,
                       uint32_t tokens) {
    descriptor line;
    if (page >= pool->host->page_count)
        return fail(CXLKV_E_STALE, "the handle names page %u of %u", page, pool->host->page_count);
    const page_info *info = &pool->pages[page];
    if (info->retired) return fail(CXLKV_E_POISON, "page %u was retired: its memory is bad", page);
    if (!page_is_ours(pool, page)) return adopt_foreign(pool, page, part, generation, tokens);
    if (info->generation != generation ||
        (!info->holders && !info->published && !info->withdrawn))
        return fail(CXLKV_E_STALE,
                    "stale handle: page %u was freed (generation %lu, now %lu). Whoever made the "
                    "handle must keep its sequence or hit until it is adopted",
                    page, generation, info->generation);
    int code = descriptor_read(pool, page, &line);
    if (code < 0) return code;
    if ((line.version & 255) == PAGE_FREE || line.version >> 8 != generation || line.part != part)
        return fail(CXLKV_E_STALE, "stale handle: page %u is not complete", page);
    return record_check(pool, page, generation, tokens);
}

static int adopt_pages(cxlkv_pool *pool, const uint8_t *bytes, const handle_header *header,
                       cxlkv_sequence *sequence) {
    const uint8_t *entry = bytes + handle_bytes(pool, 0) - 4;
    uint64_t page_tokens = pool->layout.page_tokens;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint32_t first = handle_first(bytes, part);
        int code = sequence_reserve(sequence, part, header->page_count);
        for (uint32_t i = first; code == 0 && i < header->page_count; i++, entry += ENTRY_BYTES) {
            uint64_t generation;
            uint32_t page;
            memcpy(&generation, entry, 8);
            memcpy(&page, entry + 8, 4);
            uint64_t filled = min_u64(page_tokens, header->tokens - i * page_tokens);
            code = page_acquire_check(pool, page, part, generation, (uint32_t)filled);
            if (code < 0) break;
            pages_hold(pool, 1, &page);
            sequence_push(sequence, part, i, page);
        }
        if (code < 0) return code;
        sequence->tables[part].first = first;
    }
    sequence->page_count = header->page_count;
    return 0;
}

/* A page that is being written: some process of this host holds it, and its record is not complete,
 * as in the middle of a step. Other layers of it may be read. */
static bool page_is_open(const cxlkv_pool *pool, uint32_t page, uint64_t generation) {
    descriptor line;
    if (page >= pool->host->page_count || !page_is_ours(pool, page)) return false;
    const page_info *info = &pool->pages[page];
    return info->generation == generation && info->holders && !info->retired &&
           descriptor_read(pool, page, &line) == 0 &&
           line.version == (generation << 8 | PAGE_FREE);
}

static int hold_entries(cxlkv_sequence *sequence, uint32_t part, const uint8_t *entry,
                        uint32_t count) {
    cxlkv_pool *pool = sequence->pool;
    int code = sequence_reserve(sequence, part, count);
    for (uint32_t i = 0; code == 0 && i < count; i++, entry += ENTRY_BYTES) {
        uint64_t generation;
        uint32_t page;
        memcpy(&generation, entry, 8);
        memcpy(&page, entry + 8, 4);
        if (!page_is_open(pool, page, generation))
            code = page_acquire_check(pool, page, part, generation, pool->layout.page_tokens);
        if (code < 0) break;
        pages_hold(pool, 1, &page);
        sequence_push(sequence, part, sequence->page_count++, page);
    }
    return code;
}

int sequence_hold(cxlkv_sequence *sequence, uint32_t part, const uint8_t *entries,
                  uint32_t count) {
    cxlkv_pool *pool = sequence->pool;
    return IN_POOL(pool, HOST_LOCKED(pool, hold_entries(sequence, part, entries, count)));
}

int reopen_tail(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        sequence->layer_tokens[layer] = (uint64_t)sequence->page_count * pool->layout.page_tokens;
    return cxlkv_sequence_truncate(sequence, tokens);
}

int cxlkv_sequence_adopt(cxlkv_pool *pool, const uint8_t *bytes, uint64_t size,
                         cxlkv_sequence **out) {
    handle_header header;
    bool approximate = false;
    int code = need(size, "bytes", bytes, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    cxlkv_sequence *made = NULL;
    code = handle_read(pool, bytes, size, &header, &approximate);
    if (code == 0) code = sequence_make(pool, &made);
    if (code == 0) made->approximate = approximate;
    if (code == 0) code = HOST_LOCKED(pool, adopt_pages(pool, bytes, &header, made));
    pool_leave(pool);
    if (code == 0) code = reopen_tail(made, header.tokens);
    if (code < 0) {
        if (code == -CXLKV_E_STALE) count_outside(pool, COUNT_STALE_HANDLES, 1);
        cxlkv_sequence_destroy(&made); /* drops what was held so far */
        return code;
    }
    *out = made;
    return 0;
}
