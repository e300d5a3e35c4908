/* The page allocator: runs of 16 slots, so that a sequence's neighbouring pages lie side by side.
 *
 * A run is in the list of free runs (all its slots free), in the list of partly free ones, or in
 * none. A sequence takes the slot after its last page if that is free in the same run; else it
 * opens a free run; only when there is none does it fill another's gaps. So runs are kept together
 * without being reserved, and no page is out of reach. Every step is O(1) a page. */
#include <string.h>

#include "base/flush.h"
#include "pool/hooks.h"
#include "pool/peers.h"

static uint16_t full_mask(const cxlkv_pool *pool, uint32_t run) {
    uint32_t slots = min_u32(RUN_SLOTS, pool->host->page_count - run * RUN_SLOTS);
    return (uint16_t)((1u << slots) - 1);
}

static uint32_t *head_for(cxlkv_pool *pool, uint32_t run, uint16_t mask) {
    if (mask == 0) return NULL;
    return mask == full_mask(pool, run) ? &pool->host->free_runs : &pool->host->partial_runs;
}

static void unlink_run(cxlkv_pool *pool, uint32_t run, uint32_t *head) {
    run_info *info = &pool->runs[run];
    if (info->previous == NO_PAGE) *head = info->next;
    else pool->runs[info->previous].next = info->next;
    if (info->next != NO_PAGE) pool->runs[info->next].previous = info->previous;
}

static void link_run(cxlkv_pool *pool, uint32_t run, uint32_t *head) {
    run_info *info = &pool->runs[run];
    info->previous = NO_PAGE;
    info->next = *head;
    if (*head != NO_PAGE) pool->runs[*head].previous = run;
    *head = run;
}

void pages_list(cxlkv_pool *pool, uint32_t run) {
    uint32_t *head = head_for(pool, run, pool->runs[run].free_mask);
    if (head) link_run(pool, run, head);
}

static void set_mask(cxlkv_pool *pool, uint32_t run, uint16_t mask) {
    uint32_t *from = head_for(pool, run, pool->runs[run].free_mask);
    uint32_t *to = head_for(pool, run, mask);
    if (from != to) {
        if (from) unlink_run(pool, run, from);
        if (to) link_run(pool, run, to);
    }
    pool->runs[run].free_mask = mask;
}

void pages_unlist(cxlkv_pool *pool, uint32_t run) {
    pool->host->free_pages -= (uint64_t)__builtin_popcount(pool->runs[run].free_mask);
    set_mask(pool, run, 0);
}

static bool is_free(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].free_mask >> page % RUN_SLOTS & 1;
}

/* The slot right behind `after`, then a run of its own, then any gap. */
static uint32_t choose(const cxlkv_pool *pool, uint32_t after) {
    if (after == IN_A_GAP) {
        uint32_t gap = pool->host->partial_runs;
        if (gap == NO_PAGE) gap = pool->host->free_runs;
        return gap * RUN_SLOTS + (uint32_t)__builtin_ctz(pool->runs[gap].free_mask);
    }
    if (after != NO_PAGE && after % RUN_SLOTS != RUN_SLOTS - 1 &&
        after + 1 < pool->host->page_count && is_free(pool, after + 1))
        return after + 1;
    uint32_t run = pool->host->free_runs;
    if (run == NO_PAGE) run = pool->host->partial_runs;
    return run * RUN_SLOTS + (uint32_t)__builtin_ctz(pool->runs[run].free_mask);
}

int full_error(cxlkv_pool *pool, uint32_t wanted) {
    const char *why = pool->shared ? extents_why() : "";
    const char *begin = why[0] ? ". Other hosts' room could not be had: " : "";
    if (stores_objects(&pool->layout))
        return fail(CXLKV_E_POOL_FULL,
                    "the pool is full: room for %u objects wanted, %lu of %u slots free, %lu "
                    "objects published. Every object takes a slot of %u bytes, the largest size "
                    "that the pool was made for, however small it is. Release leases, forget() "
                    "objects, or create a larger pool, or one of smaller objects. Nothing was "
                    "written%s%s",
                    wanted, pool->host->free_pages, pool->host->page_count,
                    pool->host->published_pages, pool->layout.page_tokens, begin, why);
    return fail(CXLKV_E_POOL_FULL,
                "the pool is full: %u pages wanted, %lu of %u free, %lu published. Release or "
                "truncate sequences, forget() published prefixes, or create a larger pool. "
                "Nothing was written%s%s",
                wanted, pool->host->free_pages, pool->host->page_count,
                pool->host->published_pages, begin, why);
}

void pages_make_room(cxlkv_pool *pool, uint64_t count) {
    if (pool->host->free_pages < count) host_reap(pool);
    if (pool->shared && pool->host->free_pages < count) withdrawn_look(pool);
}

void pages_put_back(cxlkv_pool *pool, uint32_t page) {
    if (!page_scrubbed(pool, page)) return;
    uint32_t run = page / RUN_SLOTS;
    pool->pages[page].shown = 0;
    hotness_freed(pool, page);
    set_mask(pool, run, (uint16_t)(pool->runs[run].free_mask | 1u << page % RUN_SLOTS));
    pool->host->free_pages++;
}

int pages_take(cxlkv_pool *pool, uint32_t count, uint32_t after, uint32_t *pages) {
    pages_make_room(pool, count);
    if (pool->host->free_pages < count) return full_error(pool, count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = choose(pool, after), run = page / RUN_SLOTS;
        set_mask(pool, run, (uint16_t)(pool->runs[run].free_mask & ~(1u << page % RUN_SLOTS)));
        pool->pages[page].holders = 1;
        pool->held[page] = 1;
        pool->host->free_pages--;
        verified_clear(pool, page);
        pages[i] = page;
        if (after != IN_A_GAP) after = page;
    }
    return 0;
}

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

/* The page stays what it is while other hosts read it: they may also hand it on. */
static void withdraw(cxlkv_pool *pool, uint32_t page) {
    pool->host->withdrawn_pages += !pool->pages[page].withdrawn;
    pool->pages[page].withdrawn = 1;
}

/* {generation + 1, free}. True when `before` is what it said until then. */
static bool descriptor_free(cxlkv_pool *pool, uint32_t page, descriptor *before) {
    page_info *info = &pool->pages[page];
    guard fault;
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
    guard fault;
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
    guard fault;
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
    /* V6: who has pinned one since then may have seen it before: then it is what it was. */
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
           !is_free(pool, page);
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

uint64_t page_retire(cxlkv_pool *pool, uint32_t page) {
    uint32_t run = page / RUN_SLOTS;
    if (is_free(pool, page)) {
        set_mask(pool, run, (uint16_t)(pool->runs[run].free_mask & ~(1u << page % RUN_SLOTS)));
        pool->host->free_pages--;
    }
    uint64_t first_time = !pool->pages[page].retired;
    pool->pages[page].retired = 1;
    return first_time;
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
        atomic_fetch_add_explicit(&pool->late[pages[i]], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&pool->counters->late_drops, count, memory_order_relaxed);
    count_add(pool, COUNT_QUEUED_DROPS, count);
    atomic_fetch_add_explicit(&pool->late_count, count, memory_order_release);
}

/* What comes while we look is found now, or by the next one: its count says so. */
void pages_drop_late(cxlkv_pool *pool) {
    dropping d = {.pool = pool, .held = pool->held};
    uint64_t found = 0;
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        uint32_t references = atomic_exchange_explicit(&pool->late[page], 0, memory_order_relaxed);
        if (references) drop(&d, page, references);
        found += references;
    }
    pages_settle(pool, d.count, d.over);
    atomic_fetch_sub_explicit(&pool->late_count, found, memory_order_relaxed);
    atomic_fetch_sub_explicit(&pool->counters->late_drops, found, memory_order_relaxed);
}

void pages_drop_slot(cxlkv_pool *pool, uint32_t slot) {
    dropping d = {.pool = pool, .held = held_of(pool, slot)};
    for (uint32_t page = 0; page < pool->host->page_count; page++)
        if (d.held[page]) drop(&d, page, d.held[page]);
    pages_settle(pool, d.count, d.over);
}

static void set_loose(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++)
        atomic_fetch_or(&pool->loose[pages[i] / 64], 1ull << pages[i] % 64);
}

/* False: it was not. */
static bool clear_loose(cxlkv_pool *pool, uint32_t page) {
    uint64_t bit = 1ull << page % 64;
    return atomic_fetch_and(&pool->loose[page / 64], ~bit) & bit;
}

void pieces_write_back(const cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
        flush_write_back(FLUSH_PUBLISH_HEADER, pieces_of(pool, page, layer, kind),
                         pool->layout.kv_heads * piece_stride(&pool->geometry, kind));
}

/* ---- with room for pages ---- */

/* Under the host lock: what the dead held, and what other hosts have pinned until now. */
static void make_room(cxlkv_pool *pool, uint64_t page_count) {
    guard fault;
    GUARD_BEGIN(fault) {
        pages_make_room(pool, page_count);
    } GUARD_END(fault, poison_error_locked(pool, &fault))
}

int host_lock_with_room(cxlkv_pool *pool, uint64_t page_count) {
    int code = host_lock(pool);
    if (code < 0 || pool->host->free_pages >= page_count) return code;
    host_unlock(pool); /* a sequence is locked before the host state */
    hooks.sequences_expire(pool);
    hooks.worker_give_back(pool); /* it may hold what our tables do not have any more */
    code = host_lock(pool);
    if (code < 0 || !pool->shared) return code;
    make_room(pool, page_count);
    /* Nobody waits for other hosts with the lock; so what was got for us may be taken by others. */
    for (int attempt = 0; pool->host->free_pages < page_count && attempt < 8; attempt++) {
        host_unlock(pool);
        bool got = extents_take(pool, page_count);
        code = host_lock(pool);
        if (code < 0 || !got) return code;
    }
    return 0;
}

int64_t cxlkv_pages_alloc(cxlkv_pool *pool, uint32_t count, uint32_t *pages) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = host_lock_with_room(pool, count);
    if (code == 0) {
        code = pages_take(pool, count, NO_PAGE, pages);
        if (code == 0) set_loose(pool, count, pages);
        if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)count;
}

void pages_unclaim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) verified_clear(pool, pages[i]); /* they may be rewritten */
    set_loose(pool, count, pages);
}

/* A sequence's page is not loose: it goes when the sequence does. */
int pages_claim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) {
        if (pages[i] < pool->host->page_count && clear_loose(pool, pages[i])) continue;
        set_loose(pool, i, pages);
        return fail(CXLKV_E_ARGUMENT,
                    "page %u of %u was not taken by alloc() in this process, was freed or attached "
                    "already, or stands here twice. Nothing was changed",
                    pages[i], pool->host->page_count);
    }
    return 0;
}

int64_t cxlkv_pages_free(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    int code = pool_enter_to_release(pool);
    if (code < 0) return code;
    code = host_lock(pool);
    if (code == 0) {
        code = pages_claim(pool, count, pages);
        if (code == 0) pages_drop(pool, count, pages);
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)count;
}
