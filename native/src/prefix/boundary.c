/* The common restore boundary: the last token of a text behind which every layer can go on, by its
 * pages and by a state checkpoint.
 *
 * A checkpoint may lie behind any token. Its key names the text up to there: that of the last page,
 * or that of the tokens behind it. So all keys of tails are tried, from the end of what was found
 * on; K and V of a tail lie in a copy of it, or in the page that it has become since. */
#include "format/records.h"
#include "host/hotness.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "prefix/boundary.h"
#include "prefix/handle.h"
#include "prefix/keys.h"
#include "prefix/states.h"
#include "sequence/sequence.h"

/* A match, and the checkpoint that is looked at. */
typedef struct search {
    cxlkv_pool *pool;
    found *f;
    uint32_t *states;
    cxlkv_sequence *sequence;
    uint64_t tokens;             /* of the hit, when there is one */
    bool is_copy[CXLKV_LAYERS_MAX]; /* by part: add_tail() added its last page */
} search;

static bool has_page(const search *s, uint32_t part, uint64_t page) {
    return page < s->f->capacity &&
           s->f->pages[page * s->pool->geometry.part_count + part] != NO_PAGE;
}

/* Takes back what add_tail() added: no other checkpoint may have it as whole pages. */
static void drop_tail(search *s, uint32_t index) {
    cxlkv_pool *pool = s->pool;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        bool added = s->is_copy[part] && has_page(s, part, index);
        s->is_copy[part] = false;
        if (!added) continue;
        uint32_t *page = &s->f->pages[(uint64_t)index * pool->geometry.part_count + part];
        if (!page_is_ours(pool, *page) && pool->pages[*page].holders == 0)
            borrow_end(pool, *page, 1);
        *page = NO_PAGE;
    }
}

/* Where a part has no whole page, its copy of the tail becomes the last that was found. */
static bool add_tail(search *s, const uint8_t *key, uint32_t index, uint32_t filled) {
    cxlkv_pool *pool = s->pool;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint64_t hash[2];
        uint32_t page, ordinal;
        if (has_page(s, part, index)) continue;
        page_hash(key, 0, 0, part, hash);
        page = index_find(pool, hash);
        if (page == NO_PAGE) return false;
        if (!page_is_ours(pool, page)) descriptor_drop(pool, page);
        if (!match_page(pool, hash, part, filled, &page, &ordinal) || ordinal != index ||
            found_add(pool, s->f, part, index, page) < 0)
            return false;
        s->is_copy[part] = true;
        if (page_acquire_check(pool, page, part, pool->pages[page].generation, filled) < 0)
            return false;
    }
    return true;
}

/* Does every part have what the token at `tokens` sees? From the end on, where gaps are. */
static bool has_pages(search *s, const uint8_t *key, uint64_t tokens) {
    const cxlkv_pool *pool = s->pool;
    uint64_t whole = tokens / pool->layout.page_tokens;
    uint32_t filled = (uint32_t)(tokens % pool->layout.page_tokens);
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        uint64_t first = window_page(pool, part, tokens);
        for (uint64_t page = whole; page > first; page--)
            if (!has_page(s, part, page - 1)) return false;
    }
    return filled == 0 || add_tail(s, key, (uint32_t)whole, filled);
}

static int hold(search *s, found_prefix prefix) {
    int code = found_hold(s->pool, s->f, prefix, s->sequence);
    if (code < 0) return code;
    pages_hold(s->pool, state_pages(s->pool), s->states);
    for (uint32_t i = 0; i < state_pages(s->pool); i++) hotness_asked(s->pool, s->states[i]);
    s->sequence->states = s->states;
    s->states = NULL;
    s->tokens = prefix.tokens;
    return 1;
}

/* Holds the checkpoint under a key, and the pages before it. 1; 0: there is no way on from it. */
static int take(search *s, const uint8_t *key, uint64_t most) {
    cxlkv_pool *pool = s->pool;
    uint32_t page_tokens = pool->layout.page_tokens;
    found_prefix prefix;
    if (!states_find(pool, key, s->states, &prefix.tokens)) return 0;
    prefix.count = (uint32_t)((prefix.tokens + page_tokens - 1) / page_tokens);
    bool all = prefix.tokens <= most && has_pages(s, key, prefix.tokens) &&
               (!pool->shared || found_borrow(pool, s->f, prefix));
    if (all) return hold(s, prefix);
    drop_tail(s, prefix.count - 1);
    states_let_go(pool, s->states);
    return 0;
}

/* Tails of the page `page` of the ids, the longest first. */
static int take_tail(search *s, const cxlkv_match_args *args, uint32_t page, uint8_t *keys) {
    uint64_t page_tokens = s->pool->layout.page_tokens, first = page * page_tokens;
    if (!args->ids || args->id_count <= first) return 0;
    uint32_t rest = (uint32_t)min_u64(args->id_count - first, page_tokens - 1);
    const uint8_t *before = page ? args->hashes + 16ull * (page - 1) : args->root;
    tail_keys(args->ids + first, rest, before, keys);
    for (uint32_t i = 0; i < rest; i++) {
        uint64_t hash[2];
        page_hash(keys, i, 0, s->pool->geometry.part_count, hash);
        index_expect(s->pool, hash);
    }
    for (uint32_t filled = rest; filled > 0; filled--) {
        const uint8_t *key = keys + 16ull * (filled - 1);
        int code = states_expected(s->pool, key) ? take(s, key, first + filled) : 0;
        if (code) return code;
    }
    return 0;
}

static int search_down(search *s, const cxlkv_match_args *args, uint8_t *keys) {
    uint32_t names = s->f->count ? s->f->keys[s->f->count - 1] : 0;
    uint64_t most = s->f->count * s->pool->layout.page_tokens;
    for (uint32_t key = names;; key--) {
        int code = take_tail(s, args, key, keys);
        if (code || key == 0) return code;
        code = take(s, args->hashes + 16ull * (key - 1), most);
        if (code) return code;
    }
}

int match_boundary(cxlkv_pool *pool, const cxlkv_match_args *args, found *f,
                   cxlkv_sequence *sequence, uint64_t *tokens) {
    search s = {.pool = pool, .f = f, .sequence = sequence};
    uint8_t *keys = malloc(16ull * pool->layout.page_tokens);
    s.states = malloc(state_pages(pool) * sizeof(*s.states));
    int code = keys && s.states ? search_down(&s, args, keys)
                                : fail(ENOMEM, "no memory to match a state checkpoint");
    *tokens = s.tokens;
    free(keys);
    free(s.states);
    return code < 0 ? code : 0;
}
