/* Pages are held and given up. Nobody needs one any more: it is scrubbed, gets its next generation
 * and is free, or it is withdrawn while another host reads it. */
#include "base/flush.h"
#include "base/guard.h"
#include "format/records.h"
#include "format/runs.h"
#include "pages/borrow.h"
#include "pages/pages.h"

void pages_hold(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = pages[i];
        if (pool->held[page]++ == 0) {
            pool->pages[page].holders++;
            pool->host->withdrawn_pages -= pool->pages[page].withdrawn;
            pool->pages[page].withdrawn = 0;
            verified_clear(pool, page);
        }
    }
}

/* ---- scrubbing: bytes that are not to outlive their page. The mark is in the host state. ---- */

/* Layers of other parts lie in the same rows: each row of each shape once. */
static bool is_first_of_row(const cxlkv_pool *pool, uint32_t layer) {
    for (uint32_t before = 0; before < layer; before++)
        if (pool->layers.row_of[before] == pool->layers.row_of[layer] &&
            shape_of(pool, before) == shape_of(pool, layer))
            return false;
    return true;
}

/* Of all heads of (page, layer). */
static uint64_t kind_bytes(const cxlkv_pool *pool, uint32_t layer, uint32_t kind) {
    return layout_of(pool, layer)->kv_heads * shape_of(pool, layer)->strides[kind];
}

static void wipe(cxlkv_pool *pool, uint32_t page) {
    record_header_wipe(pool, page);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        if (!is_first_of_row(pool, layer)) continue;
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
            uint8_t *pieces = pieces_of(pool, page, layer, kind);
            uint64_t bytes = kind_bytes(pool, layer, kind);
            memset(pieces, 0, bytes);
            if (pool->mode != VISIBILITY_COHERENT)
                flush_write_back(FLUSH_PUBLISH_HEADER, pieces, bytes);
        }
    }
}

bool page_scrubbed(cxlkv_pool *pool, uint32_t page) {
    page_info *info = &pool->pages[page];
    if (!info->scrub) return true;
    GUARD_BEGIN(fault) {
        wipe(pool, page);
    } GUARD_END(fault, page_retire(pool, page))
    if (info->retired) return false; /* what could not be written keeps its mark */
    info->scrub = 0; /* last: after a death before it, the repair of the host's state does it */
    return true;
}

/* ---- free ---- */

void pages_put_back(cxlkv_pool *pool, uint32_t page) {
    if (!page_scrubbed(pool, page)) return;
    pool->pages[page].shown = 0;
    hotness_freed(pool, page);
    run_put(pool, page);
}

void pieces_write_back(const cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
        flush_write_back(FLUSH_PUBLISH_HEADER, pieces_of(pool, page, layer, kind),
                         kind_bytes(pool, layer, kind));
}

/* The page stays what it is while other hosts read it: they may also hand it on. */
static void withdraw(cxlkv_pool *pool, uint32_t page) {
    pool->host->withdrawn_pages += !pool->pages[page].withdrawn;
    pool->pages[page].withdrawn = 1;
}

/* {generation + 1, free}. True when `before` is what it said until then. */
static bool descriptor_free(cxlkv_pool *pool, uint32_t page, descriptor *before) {
    page_info *info = &pool->pages[page];
    volatile bool known = false;
    rewrite_begin(pool, page);
    GUARD_BEGIN(fault) {
        known = pool->shared && info->shown && descriptor_read(pool, page, before) == 0;
        descriptor_write(pool, page, info->generation + 1, PAGE_FREE, 0, NULL);
        info->generation++;
    } GUARD_END(fault, page_retire(pool, page))
    rewrite_end(pool);
    return known;
}

static void descriptor_revert(cxlkv_pool *pool, uint32_t page, const descriptor *before) {
    rewrite_begin(pool, page);
    GUARD_BEGIN(fault) {
        descriptor_restore(pool, page, before);
        pool->pages[page].generation--;
    } GUARD_END(fault, page_retire(pool, page))
    rewrite_end(pool);
}

#define FOR_BITS(bits, i) \
    for (uint64_t left_ = (bits), i; left_ && (i = (uint64_t)__builtin_ctzll(left_), true); \
         left_ &= left_ - 1)

/* V8: a page that was never sealed may have been written by plain stores (a reservation that was
 * not published, or whose process died). A host that leaves writes back headers only, and what its
 * caches evict later must not land on the next owner's data. */
static void clean_unsealed(cxlkv_pool *pool, uint32_t page) {
    GUARD_BEGIN(fault) {
        uint64_t version = flush_load_word(&descriptor_of(pool, page)->version);
        for (uint32_t layer = 0; (version & 255) == PAGE_FREE && layer < pool->layout.layers;
             layer++)
            pieces_write_back(pool, page, layer);
    } GUARD_END(fault, page_retire(pool, page))
}

void pages_free_word(cxlkv_pool *pool, uint32_t first, uint64_t pages) {
    if (pool->shared && pool->mode != VISIBILITY_COHERENT)
        FOR_BITS(pages, i) clean_unsealed(pool, first + (uint32_t)i);
    descriptor before[64];
    uint64_t shown = 0, pinned = 0, known = 0, late = 0;
    FOR_BITS(pages, i) shown |= (uint64_t)(pool->shared && pool->pages[first + i].shown) << i;
    if (shown) pinned = pinned_elsewhere(pool, first) & shown;
    /* First the new generation, then a page may be given away: no old handle fits it. */
    FOR_BITS(pages & ~pinned, i)
        known |= (uint64_t)descriptor_free(pool, first + (uint32_t)i, &before[i]) << i;
    /* V6: a host that has pinned one since may have seen it before: then it is what it was. */
    if (shown & ~pinned) late = pinned_elsewhere(pool, first) & shown & ~pinned;
    FOR_BITS(pages, i) {
        uint32_t page = first + (uint32_t)i;
        if ((late & known) >> i & 1 && !pool->pages[page].retired)
            descriptor_revert(pool, page, &before[i]);
        if (pool->pages[page].retired) continue;
        if ((pinned | late) >> i & 1) withdraw(pool, page);
        else pages_put_back(pool, page);
    }
}

/* Nothing on this host needs it any more. */
static bool is_over(const cxlkv_pool *pool, uint32_t page) {
    const page_info *info = &pool->pages[page];
    return !info->holders && !info->published && !info->retired && !info->quarantined &&
           !page_is_free(pool, page);
}

/* A host that may not go on writes nothing any more: others have its lines, or its pages. */
static void leave_unsettled(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++)
        if (page_is_ours(pool, pages[i]) && is_over(pool, pages[i])) page_retire(pool, pages[i]);
}

void pages_settle(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    if (pool->host->stopped) {
        leave_unsettled(pool, count, pages);
        return;
    }
    for (uint32_t i = 0; i < count;) {
        uint32_t first = pages[i] / 64 * 64;
        uint64_t borrowed = 0, over = 0;
        for (; i < count && pages[i] / 64 * 64 == first; i++) {
            uint64_t bit = 1ull << pages[i] % 64;
            if (page_is_ours(pool, pages[i])) over |= is_over(pool, pages[i]) ? bit : 0;
            else if (!pool->pages[pages[i]].holders) borrowed |= bit;
        }
        if (borrowed) borrow_end(pool, first, borrowed);
        if (over) pages_free_word(pool, first, over);
    }
}

void withdrawn_look(cxlkv_pool *pool) {
    uint32_t pages[64], count = 0;
    for (uint32_t page = 0; pool->host->withdrawn_pages && page < pool->host->page_count; page++) {
        page_info *info = &pool->pages[page];
        if (!info->withdrawn) continue;
        info->withdrawn = 0;
        pool->host->withdrawn_pages--;
        pages[count++] = page;
        if (count == 64) pages_settle(pool, count, pages);
        if (count == 64) count = 0;
    }
    pages_settle(pool, count, pages);
}

/* Pages whose last reference goes wait in `over`, so that neighbours are settled together. */
typedef struct dropping {
    cxlkv_pool *pool;
    uint32_t *held;
    uint32_t count, over[64];
} dropping;

static void drop(dropping *d, uint32_t page, uint32_t references) {
    d->held[page] -= references;
    if (d->held[page]) return;
    d->pool->pages[page].holders--;
    d->over[d->count++] = page;
    if (d->count < 64) return;
    pages_settle(d->pool, d->count, d->over);
    d->count = 0;
}

void pages_drop(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    dropping d = {.pool = pool, .held = pool->held};
    for (uint32_t i = 0; i < count; i++) drop(&d, pages[i], 1);
    pages_settle(pool, d.count, d.over);
}

/* ---- references that could not be given back ---- */

void pages_drop_later(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++)
        atomic_fetch_add_explicit(&pool->late.references[pages[i]], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->counters->late_drops, count, memory_order_relaxed);
    count_add(pool, COUNT_QUEUED_DROPS, count);
    atomic_fetch_add_explicit(&pool->late.count, count, memory_order_release);
}

/* What comes while we look is found now, or by the next one: its count says so. */
void pages_drop_late(cxlkv_pool *pool) {
    dropping d = {.pool = pool, .held = pool->held};
    uint64_t found = 0;
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        uint32_t references = atomic_exchange_explicit(&pool->late.references[page], 0,
                                                       memory_order_relaxed);
        if (references) drop(&d, page, references);
        found += references;
    }
    pages_settle(pool, d.count, d.over);
    atomic_fetch_sub_explicit(&pool->late.count, found, memory_order_relaxed);
    atomic_fetch_sub_explicit(&pool->counters->late_drops, found, memory_order_relaxed);
}

void pages_drop_slot(cxlkv_pool *pool, uint32_t slot) {
    dropping d = {.pool = pool, .held = held_of(pool, slot)};
    for (uint32_t page = 0; page < pool->host->page_count; page++)
        if (d.held[page]) drop(&d, page, d.held[page]);
    pages_settle(pool, d.count, d.over);
}
