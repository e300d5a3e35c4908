/* Matching: the longest prefix that is published under a list of keys becomes a sequence. */
#include "base/clock.h"
#include "coherence/lines.h"
#include "format/records.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "prefix/tails.h"
#include "sequence/deadlines.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"

/* A page that is missing ends the search, as each key stands for one and no window hides it. */
static bool ends_search(const cxlkv_pool *pool, const cxlkv_match_args *args, uint32_t part) {
    return args->single && pool->layers.parts[part].window == 0;
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

/* What a key far ahead will touch, each of it a miss. */
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
        page_expect(pool, hash);
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
                bool full = pool->layers.parts[part].window == 0;
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
 * freed meanwhile, or are damaged, and are no longer among those that were found. */
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
    pthread_mutex_lock(&pool->locks.list);
    int code = deadlines_add(&sequences_of(pool)->deadlines, made);
    pthread_mutex_unlock(&pool->locks.list);
    return code < 0 ? code : (int64_t)tokens;
}

int64_t cxlkv_match(cxlkv_pool *pool, const cxlkv_match_args *args, cxlkv_sequence **out) {
    if (!(args->lease_s > 0 && args->lease_s < 1e9))
        return fail(CXLKV_E_ARGUMENT, "a lease of %g s: it must be positive and end",
                    args->lease_s);
    if (args->ids && args->id_count / pool->layout.page_tokens < args->count)
        return fail(CXLKV_E_ARGUMENT, "match: %u keys of %lu token ids", args->count,
                    args->id_count);
    int code = need(args->count, "hashes", args->hashes, NULL);
    if (code == 0) code = need(args->ids ? args->id_count : 0, "root", args->root, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    cxlkv_sequence *made = NULL;
    found *f = calloc(1, sizeof(*f)); /* not on the stack: a bus error jumps back over it */
    code = f ? sequence_make(pool, &made) : fail(ENOMEM, "no memory for a match");
    if (code == 0) code = HOST_LOCKED(pool, match_keys(pool, args, f, made));
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
    if (tokens < 0) cxlkv_sequence_destroy(&made);
    else *out = made;
    return tokens;
}
