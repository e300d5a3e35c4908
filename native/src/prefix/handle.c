/* Handing sequences over: handles (bytes, valid in any process), publish, match, forget. */
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/flush.h"
#include "coherence/lines.h"
#include "pool/peers.h"
#include "prefix/prefix.h"
#include "worker/worker.h"

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
    guard fault;
    volatile int code = 0;
    tail *whole = tail_copy(pool, from, filled);
    if (!whole) return fail(ENOMEM, "no memory for a tail");
    /* Behind its filled tokens a tail holds whatever the allocator gave: none of it goes out. */
    memset(whole->data + filled * tail_row_bytes(pool), 0,
           (pool->layout.page_tokens - filled) * tail_row_bytes(pool));
    GUARD_BEGIN(fault) {
        code = page_write_tail(pool, page, layer, whole, filled);
    } GUARD_END(fault, code = poison_error(pool, &fault))
    tail_drop(pool, whole);
    return code;
}

static void export_forget(cxlkv_sequence *sequence) {
    if (sequence->exported)
        pages_drop(sequence->pool, sequence->pool->geometry.part_count, sequence->export_pages);
    sequence->exported = false;
}

/* The open tails, written to a page of each part that only handles name. */
static int export_tail(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t filled = (uint32_t)(tokens % pool->layout.page_tokens);
    uint32_t parts = pool->geometry.part_count;
    if (sequence->exported && sequence->export_tokens == tokens) return 0;
    int code = host_lock_with_room(pool, filled ? parts : 0);
    if (code < 0) return code;
    export_forget(sequence);
    if (filled) code = pages_take(pool, parts, NO_PAGE, sequence->export_pages);
    if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
    host_unlock(pool);
    if (code < 0 || filled == 0) return code;
    sequence->exported = true;
    sequence->export_tokens = UINT64_MAX;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        uint32_t page = sequence->export_pages[pool->part_of[layer]];
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
    if (!bytes) return (int64_t)size;
    if (capacity < size) return fail(CXLKV_E_ROOM, "the handle needs %lu bytes", size);
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
    cxlkv_pool *pool = sequence->pool;
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    guard fault;
    pthread_rwlock_wrlock(&sequence->lock);
    volatile int64_t size = sequence_usable(sequence);
    if (size == 0) {
        GUARD_BEGIN(fault) {
            size = export_locked(sequence, bytes, capacity);
        } GUARD_END(fault, size = poison_error(pool, &fault))
    }
    pthread_rwlock_unlock(&sequence->lock);
    pool_leave(pool);
    return size;
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

static uint32_t tokens_of_page(const cxlkv_pool *pool, uint64_t tokens, uint32_t index) {
    uint64_t page_tokens = pool->layout.page_tokens;
    return (uint32_t)min_u64(page_tokens, tokens - index * page_tokens);
}

static int adopt_pages(cxlkv_pool *pool, const uint8_t *bytes, const handle_header *header,
                       cxlkv_sequence *sequence) {
    const uint8_t *entry = bytes + handle_bytes(pool, 0) - 4;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint32_t first = handle_first(bytes, part);
        int code = sequence_reserve(sequence, part, header->page_count);
        for (uint32_t i = first; code == 0 && i < header->page_count; i++, entry += ENTRY_BYTES) {
            uint64_t generation;
            uint32_t page;
            memcpy(&generation, entry, 8);
            memcpy(&page, entry + 8, 4);
            code = page_acquire_check(pool, page, part, generation,
                                      tokens_of_page(pool, header->tokens, i));
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
    guard fault;
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = host_lock(pool);
    if (code == 0) {
        volatile int outcome = 0;
        GUARD_BEGIN(fault) {
            outcome = hold_entries(sequence, part, entries, count);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        code = outcome;
        host_unlock(pool);
    }
    pool_leave(pool);
    return code;
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
    int code = pool_enter(pool);
    if (code < 0) return code;
    cxlkv_sequence *made = NULL;
    code = handle_read(pool, bytes, size, &header, &approximate);
    if (code == 0) code = sequence_make(pool, &made);
    if (code == 0) made->approximate = approximate;
    if (code == 0) code = host_lock(pool);
    if (code == 0) {
        guard fault;
        volatile int outcome = 0;
        GUARD_BEGIN(fault) {
            outcome = adopt_pages(pool, bytes, &header, made);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        code = outcome;
        host_unlock(pool);
    }
    pool_leave(pool);
    if (code == 0) code = reopen_tail(made, header.tokens);
    if (code < 0) {
        if (code == -CXLKV_E_STALE) count_outside(pool, COUNT_STALE_HANDLES, 1);
        cxlkv_sequence_destroy(made); /* drops what was held so far */
        return code;
    }
    *out = made;
    return 0;
}

/* ---- publish, match, forget ----
 *
 * Key i stands for tokens [0, (i + 1) * tokens_per_key) of a sequence. A page is published under
 * the first key that covers all of it; pages that share a key are told apart by their place and
 * part. The ordinal in the descriptor makes a chain with a gap end at the gap. A part with a window
 * has gaps by right: it matches up to where all that the next token sees is there. */

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

/* The page of part 0 at a place of a key, or NO_PAGE. */
static uint32_t find_first_part(const cxlkv_pool *pool, const uint8_t *hashes, uint64_t key,
                                uint64_t place) {
    uint64_t hash[2];
    page_hash(hashes, key, place, 0, hash);
    return index_find(pool, hash);
}

/* The pages that one key stands for. */
typedef struct key_pages {
    uint64_t key, first, end;
    uint32_t before;             /* the page of part 0 before the first, or NO_PAGE */
} key_pages;

/* Publishes the pages of one key in one part; false when the chain ends there. What stands behind
 * a gap could not be matched, or forgotten: a key has its pages from its first on. */
static bool publish_key(cxlkv_sequence *sequence, const uint8_t *hashes, key_pages of,
                        uint32_t part, int64_t *published) {
    cxlkv_pool *pool = sequence->pool;
    if (of.first < sequence->tables[part].first) return true;
    uint32_t parent = of.before;
    for (uint64_t page = of.first; page < of.end; page++) {
        page_key made = {.ordinal = (uint32_t)page};
        page_hash(hashes, of.key, page - of.first, part, made.hash);
        bool added = publish_page(pool, sequence_page(sequence, part, (uint32_t)page), part,
                                  pool->layout.page_tokens, &made);
        uint32_t found = index_find(pool, made.hash);
        /* Published under other keys, or retired. */
        if (found == NO_PAGE) return pool->parts[part].window != 0;
        if (part) parent = find_first_part(pool, hashes, of.key, page - of.first);
        if (added) hotness_published(pool, found, part, parent);
        else hotness_follows(pool, found, parent);
        *published += added;
        if (!part) parent = found;
    }
    return true;
}

static int64_t publish_keys(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                            const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    key_pages of = {.before = NO_PAGE};
    int64_t published = 0;
    for (; of.key < count; of.key++, of.first = of.end) {
        of.end = (of.key + 1) * tokens_per_key / pool->layout.page_tokens;
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            if (!publish_key(sequence, hashes, of, part, &published)) return published;
        if (of.end > of.first)
            of.before = find_first_part(pool, hashes, of.key, of.end - of.first - 1);
    }
    return published;
}

static int64_t publish_locked(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                              const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t tokens = sequence->layer_tokens[pool->layout.layers - 1];
    if (tokens_per_key == 0 || count > tokens / tokens_per_key)
        return fail(CXLKV_E_ARGUMENT,
                    "publish: %u keys of %lu tokens, the sequence has %lu in all layers", count,
                    tokens_per_key, tokens);
    int code = host_lock(pool);
    if (code < 0) return code;
    guard fault;
    volatile int64_t published = 0;
    GUARD_BEGIN(fault) {
        if (pool->shared) peers_follow(pool); /* what others forgot is not published any more */
        published = publish_keys(sequence, count, tokens_per_key, hashes);
    } GUARD_END(fault, published = poison_error_locked(pool, &fault))
    rewrite_end(pool);
    host_unlock(pool);
    return published;
}

int64_t cxlkv_publish_content(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                              const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    pthread_rwlock_rdlock(&sequence->lock);
    code = sequence_usable(sequence);
    if (code == 0) code = publish_locked(sequence, count, tokens_per_key, hashes);
    pthread_rwlock_unlock(&sequence->lock);
    pool_leave(pool);
    return code;
}

int publish_check(const cxlkv_sequence *sequence) {
    if (!sequence->approximate) return 0;
    return fail(CXLKV_E_ARGUMENT,
                "the sequence has pages that were computed behind other text: publish it with "
                "strict=False, or compute it anew");
}

int64_t cxlkv_publish(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                      const uint8_t *hashes) {
    int code = publish_check(sequence);
    return code < 0 ? code : cxlkv_publish_content(sequence, count, tokens_per_key, hashes);
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

/* A page that is missing ends the search, as each key stands for one and no window hides it. */
static bool ends_search(const cxlkv_pool *pool, const cxlkv_match_args *args, uint32_t part) {
    return args->single && pool->parts[part].window == 0;
}

/* The descriptors of other hosts' pages that match() is about to read, from memory. */
static void look_at_candidates(cxlkv_pool *pool, const cxlkv_match_args *args) {
    bool ends = false;
    flush_fence_all(FLUSH_ACQUIRE_BEGIN_FENCE);
    for (uint64_t key = 0; key < args->count && !ends; key++)
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            for (uint64_t place = 0; place < (args->single ? 1 : UINT64_MAX); place++) {
                uint64_t hash[2];
                page_hash(args->hashes, key, place, part, hash);
                uint32_t page = index_find(pool, hash);
                ends |= page == NO_PAGE && ends_search(pool, args, part);
                if (page == NO_PAGE) break;
                if (!page_is_ours(pool, page))
                    line_drop(FLUSH_ACQUIRE_DESCRIPTOR, descriptor_of(pool, page), pool->mode);
            }
    flush_fence_all(FLUSH_ACQUIRE_DESCRIPTOR_FENCE);
}

/* What a key far ahead will touch: index, descriptor, header and counts are each a miss. */
static void expect_key(const cxlkv_pool *pool, const cxlkv_match_args *args, uint64_t key) {
    enum { AHEAD = 16 };
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint64_t hash[2];
        if (key + 2 * AHEAD < args->count) {
            page_hash(args->hashes, key + 2 * AHEAD, 0, part, hash);
            index_expect(pool, hash);
        }
        if (key + AHEAD >= args->count) continue;
        page_hash(args->hashes, key + AHEAD, 0, part, hash);
        uint32_t page = index_find(pool, hash);
        if (page == NO_PAGE || !page_is_ours(pool, page)) continue;
        record_expect(pool, page);
        __builtin_prefetch(&pool->pages[page], 1);
        __builtin_prefetch(&pool->held[page], 1);
    }
}

/* What a match found: by part and place in the chain a page, or NO_PAGE. */
typedef struct found {
    uint32_t *pages;             /* [capacity][part_count] */
    uint32_t *keys;              /* [capacity]: how many keys there are up to that page's */
    uint64_t count, capacity;
} found;

static int found_add(cxlkv_pool *pool, found *f, uint32_t part, uint32_t ordinal, uint32_t page) {
    uint64_t parts = pool->geometry.part_count;
    while (ordinal >= f->capacity) {
        uint64_t capacity = f->capacity ? 2 * f->capacity : 64;
        uint32_t *keys = realloc(f->keys, capacity * sizeof(*keys));
        if (keys) f->keys = keys;
        uint32_t *pages = keys ? realloc(f->pages, capacity * parts * sizeof(*pages)) : NULL;
        if (!pages) return fail(ENOMEM, "no memory for a match of %lu pages", capacity);
        memset(pages + f->capacity * parts, 0xff,
               (capacity - f->capacity) * parts * sizeof(*pages));
        f->pages = pages;
        f->capacity = capacity;
    }
    f->pages[ordinal * parts + part] = page;
    if (ordinal >= f->count) f->count = ordinal + 1;
    return 0;
}

/* Looks up every key until a part without a window has a gap; places of a key until it has none.
 * Ordinals rise along the keys, and a part without a window has them all. */
static int find_pages(cxlkv_pool *pool, const cxlkv_match_args *args, uint64_t *next, found *f) {
    uint32_t parts = pool->geometry.part_count, page, ordinal;
    for (uint64_t key = 0; key < args->count; key++) {
        expect_key(pool, args, key);
        for (uint64_t place = 0, any = 1; any; place++) {
            any = 0;
            for (uint32_t part = 0; part < parts; part++) {
                uint64_t hash[2];
                bool full = pool->parts[part].window == 0;
                page_hash(args->hashes, key, place, part, hash);
                bool there = match_page(pool, hash, part, pool->layout.page_tokens, &page,
                                        &ordinal) &&
                             ordinal < pool->host->page_count &&
                             (full ? ordinal == next[part] : ordinal >= next[part]);
                if (!there && ends_search(pool, args, part)) return 0;
                if (!there) continue;
                int code = found_add(pool, f, part, ordinal, page);
                if (code < 0) return code;
                next[part] = ordinal + 1ull;
                f->keys[ordinal] = (uint32_t)key + 1;
                any = !args->single;
            }
        }
    }
    return 0;
}

/* The longest prefix, in pages, of which every part has all that the token behind it sees. */
static uint32_t longest_prefix(const cxlkv_pool *pool, const found *f) {
    uint64_t parts = pool->geometry.part_count;
    uint64_t best = f->count;
    for (uint32_t part = 0; part < parts; part++) {
        /* Walks down: `best` falls until [the window's first page, best) has no gap. */
        for (uint64_t page = best, low = 0; page > 0; page--) {
            if (page == best) low = window_page(pool, part, best * pool->layout.page_tokens);
            if (page <= low) break;
            if (f->pages[(page - 1) * parts + part] != NO_PAGE) continue;
            best = page - 1;
        }
    }
    return (uint32_t)best;
}

static int hold_found(cxlkv_pool *pool, const found *f, uint32_t count, cxlkv_sequence *sequence) {
    uint32_t parts = pool->geometry.part_count;
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t first = window_page(pool, part, (uint64_t)count * pool->layout.page_tokens);
        int code = sequence_reserve(sequence, part, count); /* own chunks */
        if (code < 0) return code;
        for (uint32_t i = first; i < count; i++) {
            pages_hold(pool, 1, &f->pages[(uint64_t)i * parts + part]);
            sequence_push(sequence, part, i, f->pages[(uint64_t)i * parts + part]);
        }
        sequence->tables[part].first = first;
        hotness_matched(pool, f->pages, part, first, count);
    }
    sequence->page_count = count;
    return 0;
}

/* Another host's page that a hit of `count` pages holds: one behind its part's window is not. */
static bool is_borrowed(const cxlkv_pool *pool, const found *f, uint64_t i, uint32_t count) {
    uint64_t parts = pool->geometry.part_count, tokens = count * (uint64_t)pool->layout.page_tokens;
    return f->pages[i] != NO_PAGE && !page_is_ours(pool, f->pages[i]) &&
           i / parts >= window_page(pool, (uint32_t)(i % parts), tokens);
}

/* Takes the other hosts' pages among the first `count` of the chain into view. False: some were
 * freed meanwhile, or are damaged, and are none of the found any more. */
static bool borrow_found(cxlkv_pool *pool, found *f, uint32_t count) {
    uint64_t parts = pool->geometry.part_count, used = 0;
    bool all = true;
    borrowing *items = malloc((parts * count + 1) * sizeof(*items));
    for (uint64_t i = 0; i < parts * count; i++) {
        uint32_t page = f->pages[i];
        if (!is_borrowed(pool, f, i, count)) continue;
        if (!items) f->pages[i] = NO_PAGE;
        else items[used++] = (borrowing){.page = page, .state = PAGE_PUBLISHED,
                                         .generation = pool->pages[page].generation};
        all &= items != NULL;
    }
    if (items) borrow(pool, items, (uint32_t)used);
    used = 0;
    for (uint64_t i = 0; items && i < parts * count; i++) {
        uint32_t page = f->pages[i];
        if (!is_borrowed(pool, f, i, count)) continue;
        int code = items[used++].code;
        if (code == 0 && record_check(pool, page, pool->pages[page].generation,
                                      pool->layout.page_tokens) < 0) {
            count_add(pool, COUNT_CORRUPT_PIECES, 1);
            code = -CXLKV_E_CORRUPT;
        }
        if (code == 0) continue;
        f->pages[i] = NO_PAGE;
        all = false;
    }
    free(items);
    return all;
}

/* Pins of what was taken into view and is not held after all. */
static void end_unused(cxlkv_pool *pool, const found *f, uint64_t count) {
    for (uint64_t i = 0; i < count * pool->geometry.part_count; i++) {
        uint32_t page = f->pages[i];
        if (page != NO_PAGE && !page_is_ours(pool, page) && pool->pages[page].holders == 0)
            borrow_end(pool, page, 1);
    }
}

/* Under the host lock, on a sequence that nobody else knows yet. */
static int match_keys(cxlkv_pool *pool, const cxlkv_match_args *args, found *f,
                      cxlkv_sequence *sequence) {
    uint64_t next[CXLKV_LAYERS_MAX] = {0};
    if (pool->shared) {
        peers_follow(pool);
        look_at_candidates(pool, args);
    }
    int code = find_pages(pool, args, next, f);
    uint32_t pages = 0, before = UINT32_MAX;
    uint64_t looked_at = f->count;
    /* One part's shorter prefix may show a gap in another's window: until none of them shrinks. */
    while (code == 0 && pages != before) {
        before = pages;
        pages = longest_prefix(pool, f);
        f->count = pages;
        if (pool->shared && pages == before && !borrow_found(pool, f, pages)) before = UINT32_MAX;
    }
    if (code < 0) return code;
    count_add(pool, COUNT_MATCH_KEYS_ASKED, args->count);
    if (pages) count_add(pool, COUNT_MATCH_KEYS_HIT, f->keys[pages - 1]);
    code = hold_found(pool, f, pages, sequence);
    if (pool->shared) end_unused(pool, f, looked_at);
    return code;
}

/* From here on sequences_expire() may end it in another thread. */
static int64_t lease_begin(cxlkv_sequence *made, uint64_t tokens, double lease_s) {
    cxlkv_pool *pool = made->pool;
    pthread_rwlock_wrlock(&made->lock);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        made->layer_tokens[layer] = tokens;
    made->lease_deadline_ns = boottime_ns() + (uint64_t)(lease_s * 1e9);
    pthread_rwlock_unlock(&made->lock);
    pthread_mutex_lock(&pool->list_lock);
    int code = deadlines_add(&pool->deadlines, made);
    pthread_mutex_unlock(&pool->list_lock);
    return code < 0 ? code : (int64_t)tokens;
}

int64_t cxlkv_match_with(cxlkv_pool *pool, const cxlkv_match_args *args, cxlkv_sequence **out) {
    if (!(args->lease_s > 0 && args->lease_s < 1e9))
        return fail(CXLKV_E_ARGUMENT, "a lease of %g s: it must be positive and end",
                    args->lease_s);
    if (args->ids && args->id_count / pool->layout.page_tokens < args->count)
        return fail(CXLKV_E_ARGUMENT, "match: %u keys of %lu token ids", args->count,
                    args->id_count);
    int code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    cxlkv_sequence *made = NULL;
    found *f = calloc(1, sizeof(*f)); /* not on the stack: a bus error jumps back over it */
    code = f ? sequence_make(pool, &made) : fail(ENOMEM, "no memory for a match");
    if (code == 0) code = host_lock(pool);
    if (code == 0) {
        guard fault;
        volatile int outcome = 0;
        GUARD_BEGIN(fault) {
            outcome = match_keys(pool, args, f, made);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        code = outcome;
        host_unlock(pool);
    }
    if (f) free(f->pages);
    if (f) free(f->keys);
    free(f);
    pool_leave(pool);
    int64_t tokens = code;
    if (code == 0) {
        made->approximate = args->content;
        tokens = (int64_t)((uint64_t)made->page_count * pool->layout.page_tokens);
        int64_t rest = args->ids ? match_tail(made, args) : 0;
        tokens = rest < 0 ? rest : lease_begin(made, (uint64_t)(tokens + rest), args->lease_s);
    }
    if (tokens < 0) cxlkv_sequence_destroy(made);
    else *out = made;
    return tokens;
}

int64_t cxlkv_match(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, double lease_s,
                    cxlkv_sequence **out) {
    const cxlkv_match_args args = {.hashes = hashes, .count = count, .lease_s = lease_s};
    return cxlkv_match_with(pool, &args, out);
}

/* Published no more. */
static void seal_again(cxlkv_pool *pool, uint32_t page) {
    guard fault;
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
    drop_from_index(pool, page, hash);
    /* Another host's page is its owner's to forget: it reads that in our log, and so do others. */
    if (!page_is_ours(pool, page)) {
        log_forget(pool, page, info->generation, hash);
        return true;
    }
    log_free(pool, page, info->generation, hash, everywhere);
    /* Others may hold it as well: it is no longer found, and stays what it is for them. */
    if ((info->holders || pool->shared) && !info->retired) seal_again(pool, page);
    pages_settle(pool, 1, &page);
    return true;
}

/* Every page that is published under these keys, places and parts of each. */
static void pages_of_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                          page_function *each, void *context) {
    for (uint64_t key = 0; key < count; key++)
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            for (uint64_t place = 0;; place++) {
                uint64_t hash[2];
                page_hash(hashes, key, place, part, hash);
                uint32_t page = index_find(pool, hash);
                if (page == NO_PAGE) break;
                each(pool, page, hash, context);
            }
}

int keys_call(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, bool reaps,
              page_function *each, void *context) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    if (reaps) worker_give_back(pool); /* it may hold what our tables do not have any more */
    volatile int outcome = host_lock(pool);
    if (outcome == 0) {
        guard fault;
        GUARD_BEGIN(fault) {
            if (reaps) host_reap(pool); /* what the dead held is nobody's */
            if (pool->shared) peers_follow(pool);
            pages_of_keys(pool, count, hashes, each, context);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        rewrite_end(pool);
        host_unlock(pool);
    }
    pool_leave(pool);
    return outcome;
}

static void forget_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *forgotten) {
    (void)page;
    *(int64_t *)forgotten += page_forget(pool, hash, true);
}

int64_t cxlkv_forget(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes) {
    int64_t forgotten = 0;
    int code = keys_call(pool, count, hashes, false, forget_one, &forgotten);
    return code < 0 ? code : forgotten;
}
