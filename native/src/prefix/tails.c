/* A last page that is not full, published and found: so a text that goes on loses no token.
 *
 * It is a copy of what a sequence has behind its last full page, in a page of each part, under a
 * key that names its tokens and how many they are. A match copies it back to local memory. */
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "pool/alloc.h"
#include "prefix/handle.h"
#include "prefix/keys.h"
#include "prefix/publish.h"
#include "prefix/tails.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

/* ---- publish ---- */

typedef struct tail_copy_of {
    cxlkv_sequence *sequence;
    uint64_t index;              /* of the page in the sequence */
    uint32_t filled;
    uint32_t *pages;             /* by part: where it goes */
} tail_copy_of;

/* Out of a page that has more tokens. */
static int read_layer(const tail_copy_of *copy, uint32_t layer, tail **out) {
    cxlkv_sequence *sequence = copy->sequence;
    cxlkv_pool *pool = sequence->pool;
    uint32_t page = sequence_page(sequence, pool->layers.part_of[layer], (uint32_t)copy->index);
    return GUARDED(tail_from_page(pool, page, layer, copy->filled, out),
                   poison_error(pool, &fault));
}

/* The tokens lie in the layer's tail, or in a page. */
static int write_layer(const tail_copy_of *copy, uint32_t layer) {
    cxlkv_sequence *sequence = copy->sequence;
    cxlkv_pool *pool = sequence->pool;
    uint32_t part = pool->layers.part_of[layer], page_tokens = pool->layout.page_tokens;
    tail *from = sequence->tails[layer], *made = NULL;
    int code = 0;
    if (sequence->layer_tokens[layer] >= (copy->index + 1) * page_tokens) {
        code = read_layer(copy, layer, &made);
        from = made;
    }
    if (code == 0) code = export_layer(pool, copy->pages[part], layer, from, copy->filled);
    tail_drop(pool, made);
    return code;
}

static int write_layers(const tail_copy_of *copy) {
    int code = 0;
    for (uint32_t layer = 0; code == 0 && layer < copy->sequence->pool->layout.layers; layer++)
        code = write_layer(copy, layer);
    return code;
}

/* Is all that a match walks before it there, and is the page itself not yet? */
static bool is_wanted(const cxlkv_sequence *sequence, uint64_t index, const uint8_t *before,
                      const uint8_t *key) {
    const cxlkv_pool *pool = sequence->pool;
    bool wanted = false;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint64_t hash[2];
        if (index < sequence->tables[part].first) return false; /* given back: behind a window */
        page_hash(before, 0, 0, part, hash);
        if (index && pool->layers.parts[part].window == 0 && index_find(pool, hash) == NO_PAGE)
            return false;
        page_hash(key, 0, 0, part, hash);
        wanted |= index_find(pool, hash) == NO_PAGE;
    }
    return wanted;
}

static int64_t publish_copy(cxlkv_pool *pool, const tail_copy_of *copy, const uint8_t *before,
                            const uint8_t *key) {
    int64_t published = 0;
    uint64_t hash[2];
    if (pool->shared) peers_follow(pool);
    page_hash(before, 0, 0, 0, hash);
    uint32_t parent = copy->index ? index_find(pool, hash) : NO_PAGE;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        page_key made = {.ordinal = (uint32_t)copy->index};
        page_hash(key, 0, 0, part, made.hash);
        bool added = publish_page(pool, copy->pages[part], part, copy->filled, &made);
        if (added) hotness_published(pool, copy->pages[part], part, parent);
        if (part == 0) parent = index_find(pool, made.hash);
        published += added;
    }
    return published;
}

/* Under the host lock. 1; 0: there is nothing to publish. */
static int take_wanted(const tail_copy_of *copy, const uint8_t *before, const uint8_t *key) {
    cxlkv_pool *pool = copy->sequence->pool;
    if (pool->shared) peers_follow(pool);
    if (!is_wanted(copy->sequence, copy->index, before, key)) return 0;
    int code = pages_take(pool, pool->geometry.part_count, IN_A_GAP, copy->pages);
    return code < 0 ? code : 1;
}

/* The copy is held while it is written: a process that dies here leaves pages without a holder. */
static int64_t publish_pages(const tail_copy_of *copy, const uint8_t *before, const uint8_t *key) {
    cxlkv_pool *pool = copy->sequence->pool;
    int taken = TAKING_PAGES(pool, pool->geometry.part_count, take_wanted(copy, before, key));
    if (taken <= 0) return taken;
    /* The page that it is copied from may be another host's, and ours no more to read. */
    int64_t published = peers_verify(pool, write_layers(copy));
    int code = host_lock(pool);
    if (code < 0) {
        pages_drop_later(pool, pool->geometry.part_count, copy->pages);
        return code;
    }
    if (published == 0)
        published = GUARDED(publish_copy(pool, copy, before, key),
                            poison_error_locked(pool, &fault));
    pages_drop(pool, pool->geometry.part_count, copy->pages);
    host_unlock(pool);
    return published;
}

static int64_t publish_tail(cxlkv_sequence *sequence, uint64_t tokens, const uint8_t *before,
                            const uint8_t *key) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t there = sequence->layer_tokens[pool->layout.layers - 1];
    uint32_t filled = (uint32_t)(tokens % pool->layout.page_tokens);
    if (filled == 0 || tokens > there)
        return fail(CXLKV_E_ARGUMENT,
                    "publish: a tail of %u tokens that ends at %lu, the sequence has %lu in all "
                    "layers", filled, tokens, there);
    tail_copy_of copy = {.sequence = sequence, .index = tokens / pool->layout.page_tokens,
                         .filled = filled};
    copy.pages = malloc(pool->geometry.part_count * sizeof(*copy.pages));
    if (!copy.pages) return fail(ENOMEM, "no memory to publish a tail");
    int64_t published = publish_pages(&copy, before, key);
    free(copy.pages);
    return published;
}

int64_t cxlkv_publish_tail(cxlkv_sequence *sequence, uint64_t tokens, const uint8_t *before,
                           const uint8_t *key) {
    int code = need(1, "key", key, NULL);
    if (code == 0) code = publish_check(sequence);
    if (code < 0) return code;
    return IN_SEQUENCE(sequence, false, publish_tail(sequence, tokens, before, key));
}

/* ---- match ---- */

/* Holds and adds one part's page under a key; false: there is none. */
static bool add_page(cxlkv_sequence *sequence, const uint8_t *key, uint32_t part,
                     uint32_t filled) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t hash[2];
    uint32_t page, ordinal;
    page_hash(key, 0, 0, part, hash);
    page = index_find(pool, hash);
    if (page == NO_PAGE) return false;
    if (!page_is_ours(pool, page)) descriptor_drop(pool, page);
    if (!match_page(pool, hash, part, filled, &page, &ordinal) ||
        ordinal != sequence->page_count ||
        page_acquire_check(pool, page, part, pool->pages[page].generation, filled) < 0)
        return false;
    pages_hold(pool, 1, &page);
    sequence_push(sequence, part, sequence->page_count, page);
    return true;
}

/* Takes back what add_page() added to the first `parts`. */
static void drop_added(cxlkv_sequence *sequence, uint32_t parts) {
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t index = sequence->page_count;
        chunk *last = sequence->tables[part].chunks[index / CHUNK_PAGES];
        last->count--;
        pages_drop(sequence->pool, 1, &last->pages[last->count]);
    }
}

/* The longest first. */
static uint32_t add_longest(cxlkv_sequence *sequence, const uint8_t *keys, uint32_t count) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t parts = pool->geometry.part_count;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash[2];
        page_hash(keys, i, 0, 0, hash);
        index_expect(pool, hash);
    }
    for (uint32_t filled = count; filled > 0; filled--) {
        const uint8_t *key = keys + 16ull * (filled - 1);
        uint32_t part = 0;
        while (part < parts && add_page(sequence, key, part, filled)) part++;
        if (part < parts) {
            drop_added(sequence, part);
            continue;
        }
        for (part = 0; part < parts; part++)
            hotness_asked(pool, sequence_page(sequence, part, sequence->page_count));
        return filled;
    }
    return 0;
}

/* On an error, too, the sequence names all that is held for it. */
static int64_t find_longest(cxlkv_sequence *sequence, const uint8_t *keys, uint32_t count) {
    cxlkv_pool *pool = sequence->pool;
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    for (uint32_t part = 0; code == 0 && part < pool->geometry.part_count; part++)
        code = sequence_reserve(sequence, part, 1);
    if (code == 0) code = HOST_LOCKED(pool, (int64_t)add_longest(sequence, keys, count));
    pool_leave(pool);
    return code;
}

/* The page goes again when its tokens are here. One that is damaged is none: a miss. */
static int64_t copy_here(cxlkv_sequence *sequence, uint32_t filled) {
    uint64_t tokens = (uint64_t)sequence->page_count * sequence->pool->layout.page_tokens;
    sequence->page_count++;
    if (reopen_tail(sequence, tokens + filled) == 0) return filled;
    return cxlkv_sequence_truncate(sequence, tokens);
}

int64_t match_tail(cxlkv_sequence *sequence, const cxlkv_match_args *args) {
    uint64_t page_tokens = sequence->pool->layout.page_tokens, pages = sequence->page_count;
    uint32_t rest = (uint32_t)min_u64(args->id_count - pages * page_tokens, page_tokens - 1);
    const uint8_t *before = pages ? args->hashes + 16 * (pages - 1) : args->root;
    uint8_t *keys = malloc(16ull * rest + 1);
    if (!keys) return fail(ENOMEM, "no memory for the keys of %u tokens", rest);
    tail_keys(args->ids + pages * page_tokens, rest, before, keys);
    int64_t filled = rest ? find_longest(sequence, keys, rest) : 0;
    free(keys);
    return filled <= 0 ? filled : copy_here(sequence, (uint32_t)filled);
}
