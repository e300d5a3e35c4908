/* Matching: the longest prefix that is published under a list of keys becomes a sequence. */
#include "base/clock.h"
#include "coherence/lines.h"
#include "format/records.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "prefix/boundary.h"
#include "prefix/found.h"
#include "prefix/handle.h"
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

/* Pins of what was taken into view and is not held after all. */
static void end_unused(cxlkv_pool *pool, const found *f, uint64_t count) {
    for (uint64_t i = 0; i < count * pool->geometry.part_count; i++) {
        uint32_t page = f->pages[i];
        if (page != NO_PAGE && !page_is_ours(pool, page) && pool->pages[page].holders == 0)
            borrow_end(pool, page, 1);
    }
}

static found_prefix full_prefix(const cxlkv_pool *pool, uint32_t count) {
    return (found_prefix){.count = count, .tokens = (uint64_t)count * pool->layout.page_tokens};
}

/* Holds the longest prefix of whole pages. */
static int hold_longest(cxlkv_pool *pool, found *f, cxlkv_sequence *sequence, uint64_t *tokens) {
    uint32_t pages = 0, before = UINT32_MAX;
    /* One part's shorter prefix may show a gap in another's window: until none of them shrinks. */
    while (pages != before) {
        before = pages;
        pages = longest_prefix(pool, f);
        f->count = pages;
        if (pool->shared && pages == before && !found_borrow(pool, f, full_prefix(pool, pages)))
            before = UINT32_MAX;
    }
    *tokens = full_prefix(pool, pages).tokens;
    return found_hold(pool, f, full_prefix(pool, pages), sequence);
}

/* Under the host lock, on a sequence that nobody else knows yet. tokens: those that it may have,
 * the last page having fewer than a page. */
static int match_keys(cxlkv_pool *pool, const cxlkv_match_args *args, found *f,
                      cxlkv_sequence *sequence, uint64_t *tokens) {
    uint64_t next[CXLKV_LAYERS_MAX] = {0};
    if (pool->shared) {
        peers_follow(pool);
        look_at_candidates(pool, args);
    }
    int code = find_pages(pool, args, next, f);
    uint64_t looked_at = f->count;
    if (code < 0) return code;
    count_add(pool, COUNT_MATCH_KEYS_ASKED, args->count);
    /* Of a text that parts from others behind it, a checkpoint there would serve the next one. */
    if (args->known_tokens)
        *args->known_tokens = full_prefix(pool, longest_prefix(pool, f)).tokens;
    code = has_states(&pool->layout) ? match_boundary(pool, args, f, sequence, tokens)
                                     : hold_longest(pool, f, sequence, tokens);
    uint64_t held = min_u64(sequence->page_count, looked_at);
    if (held) count_add(pool, COUNT_MATCH_KEYS_HIT, f->keys[held - 1]);
    if (pool->shared) end_unused(pool, f, min_u64(f->capacity, looked_at + 1));
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

/* The tokens of a last page that is not full come to local memory; returns those of the hit. */
static int64_t match_rest(cxlkv_sequence *made, const cxlkv_match_args *args, uint64_t tokens) {
    int64_t rest = 0;
    if (!has_states(&made->pool->layout)) rest = args->ids ? match_tail(made, args) : 0;
    else if (tokens % made->pool->layout.page_tokens) rest = reopen_tail(made, tokens);
    return rest < 0 ? rest : (int64_t)tokens + rest;
}

/* found: how many tokens the pages have that it held, the tail among them may be damaged. */
static int64_t match_once(cxlkv_pool *pool, const cxlkv_match_args *args, cxlkv_sequence **out,
                          uint64_t *found_tokens) {
    cxlkv_sequence *made = NULL;
    int64_t tokens = pool_enter(pool);
    *found_tokens = 0;
    if (tokens < 0) return tokens;
    sequences_expire(pool);
    found *f = calloc(1, sizeof(*f)); /* not on the stack: a bus error jumps back over it */
    int code = f ? sequence_make(pool, &made) : fail(ENOMEM, "no memory for a match");
    if (code == 0) code = HOST_LOCKED(pool, match_keys(pool, args, f, made, found_tokens));
    if (f) free(f->pages);
    if (f) free(f->keys);
    free(f);
    pool_leave(pool);
    tokens = code;
    if (code == 0) {
        made->approximate = args->content;
        tokens = match_rest(made, args, *found_tokens);
        if (tokens >= 0) tokens = lease_begin(made, (uint64_t)tokens, args->lease_s);
    }
    if (tokens < 0) cxlkv_sequence_destroy(&made);
    else *out = made;
    return tokens;
}

static bool is_damage(int64_t code) {
    return code == -CXLKV_E_CORRUPT || code == -CXLKV_E_POISON || code == -CXLKV_E_STALE;
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
    if (code < 0) return code;
    cxlkv_match_args rest = *args;
    uint64_t end;
    int64_t tokens = match_once(pool, &rest, out, &end);
    /* Behind a damaged tail no checkpoint can be gone on from; before it one may. */
    while (is_damage(tokens) && has_states(&pool->layout) && end) {
        rest.id_count = end - 1;
        rest.count = rest.ids ? (uint32_t)min_u64(rest.count, rest.id_count /
                                                  pool->layout.page_tokens) : 0;
        tokens = match_once(pool, &rest, out, &end);
    }
    return tokens;
}
