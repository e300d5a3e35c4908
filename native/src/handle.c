/* Handing sequences over: handles (bytes, valid in any process), publish, match, forget. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define HANDLE_MAGIC 0x48564b43u /* "CKVH" */

/* Then page_count generations (8 bytes each), page_count page ids (4 bytes), a CRC (4 bytes). */
typedef struct handle_header {
    uint32_t magic;
    uint32_t version;
    uint8_t identity[16];
    uint64_t tokens;
    uint32_t page_count;
    uint32_t page_tokens;
} handle_header;
_Static_assert(sizeof(handle_header) == 40, "no holes: it is written as it lies");

static uint64_t handle_bytes(uint64_t page_count) {
    return sizeof(handle_header) + page_count * 12 + 4;
}

/* ---- export ---- */

static int export_layer(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from,
                        uint32_t filled) {
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

/* The open tail, written to a page of its own that only handles name. */
static int export_tail(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t filled = (uint32_t)(tokens % pool->layout.page_tokens);
    if (sequence->export_page != NO_PAGE && sequence->export_tokens == tokens) return 0;
    uint32_t page = NO_PAGE;
    int code = host_lock_with_room(pool, 1);
    if (code < 0) return code;
    if (sequence->export_page != NO_PAGE) pages_drop(pool, 1, &sequence->export_page);
    sequence->export_page = NO_PAGE;
    if (filled) code = pages_take(pool, 1, NO_PAGE, &page);
    host_unlock(pool);
    if (code < 0 || filled == 0) return code;
    sequence->export_page = page;
    sequence->export_tokens = UINT64_MAX;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        code = export_layer(pool, page, layer, sequence->tails[layer], filled);
        if (code < 0) return code;
    }
    record_seal(pool, page, filled, NULL);
    sequence->export_tokens = tokens;
    return 0;
}

static int64_t export_locked(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t capacity) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t tokens = sequence_even_tokens(sequence);
    if (tokens == UINT64_MAX)
        return fail(CXLKV_E_UNEVEN, "layers have different lengths: finish the step before you "
                    "hand the sequence over");
    uint64_t page_tokens = pool->layout.page_tokens;
    uint32_t count = (uint32_t)((tokens + page_tokens - 1) / page_tokens);
    uint64_t size = handle_bytes(count);
    if (!bytes) return (int64_t)size;
    if (capacity < size) return fail(CXLKV_E_ROOM, "the handle needs %lu bytes", size);
    int code = export_tail(sequence, tokens);
    if (code < 0) return code;
    handle_header header = {.magic = HANDLE_MAGIC, .version = 1, .tokens = tokens,
                            .page_count = count, .page_tokens = pool->layout.page_tokens};
    memcpy(header.identity, pool->identity, sizeof(header.identity));
    memcpy(bytes, &header, sizeof(header));
    uint8_t *generations = bytes + sizeof(header), *pages = generations + count * 8ull;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = i < sequence->page_count ? sequence_page(sequence, i)
                                                 : sequence->export_page;
        memcpy(generations + i * 8ull, &pool->pages[page].generation, 8);
        memcpy(pages + i * 4ull, &page, 4);
    }
    uint32_t crc = crc32c(0, bytes, size - 4);
    memcpy(bytes + size - 4, &crc, 4);
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

static int handle_read(const cxlkv_pool *pool, const uint8_t *bytes, uint64_t size,
                       handle_header *header) {
    uint32_t crc;
    if (size < handle_bytes(0))
        return fail(CXLKV_E_STALE, "these %lu bytes are no handle: too short", size);
    memcpy(header, bytes, sizeof(*header));
    memcpy(&crc, bytes + size - 4, 4);
    if (header->magic != HANDLE_MAGIC || header->version != 1 ||
        size != handle_bytes(header->page_count) || crc != crc32c(0, bytes, size - 4))
        return fail(CXLKV_E_STALE, "these bytes are no handle, or were changed");
    if (memcmp(header->identity, pool->identity, sizeof(header->identity)) != 0)
        return fail(CXLKV_E_STALE, "the handle is of another pool");
    uint64_t page_tokens = pool->layout.page_tokens;
    if (header->page_tokens != page_tokens ||
        header->tokens > (uint64_t)header->page_count * page_tokens ||
        header->page_count != (header->tokens + page_tokens - 1) / page_tokens)
        return fail(CXLKV_E_STALE, "the handle's page count does not fit its tokens");
    return 0;
}

/* Is the page what a handle says, and still alive? Under the host lock. */
static int page_acquire_check(cxlkv_pool *pool, uint32_t page, uint64_t generation,
                              uint32_t tokens) {
    descriptor line;
    if (page >= pool->host->page_count)
        return fail(CXLKV_E_STALE, "the handle names page %u of %u", page, pool->host->page_count);
    const page_info *info = &pool->pages[page];
    if (info->retired) return fail(CXLKV_E_POISON, "page %u was retired: its memory is bad", page);
    if (info->generation != generation || (!info->holders && !info->published))
        return fail(CXLKV_E_STALE,
                    "stale handle: page %u was freed (generation %lu, now %lu). Whoever made the "
                    "handle must keep its sequence or hit until it is adopted",
                    page, generation, info->generation);
    int code = descriptor_read(pool, page, &line);
    if (code < 0) return code;
    if ((line.version & 255) == PAGE_FREE || line.version >> 8 != generation)
        return fail(CXLKV_E_STALE, "stale handle: page %u is not complete", page);
    return record_check(pool, page, generation, tokens);
}

static uint32_t tokens_of_page(const cxlkv_pool *pool, uint64_t tokens, uint32_t index) {
    uint64_t page_tokens = pool->layout.page_tokens;
    return (uint32_t)min_u64(page_tokens, tokens - index * page_tokens);
}

static int adopt_pages(cxlkv_pool *pool, const uint8_t *bytes, const handle_header *header,
                       cxlkv_sequence *sequence) {
    const uint8_t *generations = bytes + sizeof(*header);
    const uint8_t *ids = generations + header->page_count * 8ull;
    for (uint32_t i = 0; i < header->page_count; i++) {
        uint64_t generation;
        uint32_t page;
        memcpy(&generation, generations + i * 8ull, 8);
        memcpy(&page, ids + i * 4ull, 4);
        int code = page_acquire_check(pool, page, generation,
                                      tokens_of_page(pool, header->tokens, i));
        if (code < 0) return code;
        pages_hold(pool, 1, &page);
        sequence_push(sequence, page);
    }
    return 0;
}

/* A last page that is not full goes back to being an open tail of this process. */
static int reopen_tail(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        sequence->layer_tokens[layer] = (uint64_t)sequence->page_count * pool->layout.page_tokens;
    return cxlkv_sequence_truncate(sequence, tokens);
}

int cxlkv_sequence_adopt(cxlkv_pool *pool, const uint8_t *bytes, uint64_t size,
                         cxlkv_sequence **out) {
    handle_header header;
    int code = pool_enter(pool);
    if (code < 0) return code;
    cxlkv_sequence *made = NULL;
    code = handle_read(pool, bytes, size, &header);
    if (code == 0) code = sequence_make(pool, &made);
    if (code == 0) code = sequence_reserve(made, header.page_count);
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
        if (code == -CXLKV_E_STALE) atomic_fetch_add(&pool->stale_handles, 1);
        cxlkv_sequence_destroy(made); /* drops what was held so far */
        return code;
    }
    *out = made;
    return 0;
}

/* ---- publish, match, forget ----
 *
 * Key i stands for tokens [0, (i + 1) * tokens_per_key) of a sequence. A page is published under
 * the first key that covers all of it; pages that share a key are told apart by their place. The
 * ordinal in the descriptor makes a chain with a gap end at the gap. */

static void hash_of(const uint8_t *hashes, uint64_t key, uint64_t place, uint64_t hash[2]) {
    memcpy(hash, hashes + key * 16, 16);
    hash[0] ^= (place + 1) * 0x9e3779b97f4a7c15u; /* 2^64 / golden ratio: odd, so one to one */
}

/* A page that is published already, or whose hash is, stays as it is: the first copy serves all. */
static bool publish_page(cxlkv_pool *pool, uint32_t page, const page_key *key) {
    page_info *info = &pool->pages[page];
    if (info->published || info->retired || index_find(pool, key->hash) != NO_PAGE) return false;
    rewrite_begin(pool, page);
    record_seal(pool, page, pool->layout.page_tokens, key);
    rewrite_end(pool);
    index_insert(pool, key->hash, page);
    info->published = 1;
    pool->host->published_pages++;
    return true;
}

static int64_t publish_keys(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                            const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t page_tokens = pool->layout.page_tokens, page = 0;
    int64_t published = 0;
    for (uint64_t key = 0; key < count; key++) {
        uint64_t end = (key + 1) * tokens_per_key;
        for (uint64_t place = 0; (page + 1) * page_tokens <= end; place++, page++) {
            page_key made = {.ordinal = (uint32_t)page};
            hash_of(hashes, key, place, made.hash);
            published += publish_page(pool, sequence_page(sequence, (uint32_t)page), &made);
            /* Published under other keys, or retired: the chain ends here, as nothing behind a gap
             * could be matched, or forgotten. */
            if (index_find(pool, made.hash) == NO_PAGE) return published;
        }
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
        published = publish_keys(sequence, count, tokens_per_key, hashes);
    } GUARD_END(fault, published = poison_error_locked(pool, &fault))
    rewrite_end(pool);
    host_unlock(pool);
    return published;
}

int64_t cxlkv_publish(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
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

/* A damaged or foreign page ends the match: a miss, never a wrong hit. */
static bool match_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t ordinal,
                       uint32_t *page) {
    descriptor line;
    *page = index_find(pool, hash);
    if (*page == NO_PAGE) return false;
    if (pool->pages[*page].retired || descriptor_read(pool, *page, &line) < 0 ||
        memcmp(line.hash, hash, sizeof(line.hash)) != 0 ||
        record_check(pool, *page, pool->pages[*page].generation, pool->layout.page_tokens) < 0) {
        atomic_fetch_add(&pool->corrupt_pieces, 1);
        return false;
    }
    return line.ordinal == ordinal;
}

/* Under the host lock, on a sequence that nobody else knows yet. */
static int match_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                      cxlkv_sequence *sequence) {
    for (uint64_t key = 0; key < count; key++)
        for (uint64_t place = 0;; place++) {
            uint64_t hash[2];
            uint32_t page;
            hash_of(hashes, key, place, hash);
            if (!match_page(pool, hash, sequence->page_count, &page)) break;
            int code = sequence_reserve(sequence, 1); /* own chunks: takes no lock */
            if (code < 0) return code;
            pages_hold(pool, 1, &page);
            sequence_push(sequence, page);
        }
    return 0;
}

int64_t cxlkv_match(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, double lease_s,
                    cxlkv_sequence **out) {
    if (!(lease_s > 0 && lease_s < 1e9))
        return fail(CXLKV_E_ARGUMENT, "a lease of %g s: it must be positive and end", lease_s);
    int code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    cxlkv_sequence *made = NULL;
    code = sequence_make(pool, &made);
    if (code == 0) code = host_lock(pool);
    if (code == 0) {
        guard fault;
        volatile int outcome = 0;
        GUARD_BEGIN(fault) {
            outcome = match_keys(pool, count, hashes, made);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        code = outcome;
        host_unlock(pool);
    }
    uint64_t tokens = 0;
    if (code == 0) {
        /* From here on sequences_expire() may end it in another thread. */
        pthread_rwlock_wrlock(&made->lock);
        tokens = (uint64_t)made->page_count * pool->layout.page_tokens;
        for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
            made->layer_tokens[layer] = tokens;
        made->lease_deadline_ns = boottime_ns() + (uint64_t)(lease_s * 1e9);
        pthread_rwlock_unlock(&made->lock);
    }
    pool_leave(pool);
    if (code < 0) {
        cxlkv_sequence_destroy(made);
        return code;
    }
    *out = made;
    return (int64_t)tokens;
}

static bool forget_page(cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE) return false;
    page_info *info = &pool->pages[page];
    index_erase(pool, hash);
    info->published = 0;
    pool->host->published_pages--;
    if (info->holders && !info->retired) {
        rewrite_begin(pool, page);
        descriptor_write(pool, page, info->generation, PAGE_SEALED, pool->layout.page_tokens, NULL);
        rewrite_end(pool);
    }
    page_settle(pool, page);
    return true;
}

static int64_t forget_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes) {
    int64_t forgotten = 0;
    for (uint64_t key = 0; key < count; key++)
        for (uint64_t place = 0;; place++) {
            uint64_t hash[2];
            hash_of(hashes, key, place, hash);
            if (!forget_page(pool, hash)) break;
            forgotten++;
        }
    return forgotten;
}

int64_t cxlkv_forget(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    code = host_lock(pool);
    volatile int64_t forgotten = code;
    if (code == 0) {
        guard fault;
        GUARD_BEGIN(fault) {
            forgotten = forget_keys(pool, count, hashes);
        } GUARD_END(fault, forgotten = poison_error_locked(pool, &fault))
        rewrite_end(pool);
        host_unlock(pool);
    }
    pool_leave(pool);
    return forgotten;
}
