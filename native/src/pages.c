/* The page allocator: runs of 16 slots, so that a sequence's neighbouring pages lie side by side.
 *
 * A run is in the list of free runs (all its slots free), in the list of partly free ones, or in
 * none. A sequence takes the slot after its last page if that is free in the same run; else it
 * opens a free run; only when there is none does it fill another's gaps. So runs are kept together
 * without being reserved, and no page is out of reach. Every step is O(1) a page. */
#include <string.h>

#include "internal.h"

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
    if (after != NO_PAGE && after % RUN_SLOTS != RUN_SLOTS - 1 &&
        after + 1 < pool->host->page_count && is_free(pool, after + 1))
        return after + 1;
    uint32_t run = pool->host->free_runs;
    if (run == NO_PAGE) run = pool->host->partial_runs;
    return run * RUN_SLOTS + (uint32_t)__builtin_ctz(pool->runs[run].free_mask);
}

int full_error(cxlkv_pool *pool, uint32_t wanted) {
    return fail(CXLKV_E_POOL_FULL,
                "the pool is full: %u pages wanted, %lu of %u free, %lu published. Release or "
                "truncate sequences, forget() published prefixes, or create a larger pool. "
                "Nothing was written",
                wanted, pool->host->free_pages, pool->host->page_count,
                pool->host->published_pages);
}

void pages_make_room(cxlkv_pool *pool, uint64_t count) {
    if (pool->host->free_pages < count) host_reap(pool);
    if (!pool->shared || pool->host->free_pages >= count) return;
    withdrawn_look(pool);
    if (pool->host->free_pages < count) extents_take(pool, count);
}

void pages_put_back(cxlkv_pool *pool, uint32_t page) {
    uint32_t run = page / RUN_SLOTS;
    pool->pages[page].shown = 0;
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
        pages[i] = after = page;
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

/* {generation + 1, free}. False: another host had taken the page into view before (V6), and has it
 * still: then it is what it was. */
static bool descriptor_free(cxlkv_pool *pool, uint32_t page) {
    page_info *info = &pool->pages[page];
    descriptor before;
    bool may_revert = pool->shared && info->shown && descriptor_read(pool, page, &before) == 0;
    descriptor_write(pool, page, info->generation + 1, PAGE_FREE, 0, NULL);
    if (pool->shared && info->shown && pinned_elsewhere(pool, page) >> page % 64 & 1) {
        if (may_revert) descriptor_restore(pool, page, &before);
        else info->generation++;
        return false;
    }
    info->generation++;
    return true;
}

void page_settle(cxlkv_pool *pool, uint32_t page) {
    page_info *info = &pool->pages[page];
    if (info->holders == 0) borrow_forgive(pool, page);
    if (!page_is_ours(pool, page)) {
        if (info->holders == 0) borrow_end(pool, page);
        return;
    }
    if (info->holders || info->published || info->retired || info->quarantined) return;
    if (is_free(pool, page)) return;
    if (pool->shared && info->shown && pinned_elsewhere(pool, page) >> page % 64 & 1) {
        withdraw(pool, page);
        return;
    }
    /* First the new generation, then the page may be given away: no old handle fits it. */
    guard fault;
    volatile bool freed = true;
    rewrite_begin(pool, page);
    GUARD_BEGIN(fault) {
        freed = descriptor_free(pool, page);
    } GUARD_END(fault, page_retire(pool, page))
    rewrite_end(pool);
    if (info->retired) return;
    if (freed) pages_put_back(pool, page);
    else withdraw(pool, page);
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

void pages_drop_slot(cxlkv_pool *pool, uint32_t slot, uint32_t page, uint32_t references) {
    uint32_t *held = held_of(pool, slot);
    held[page] -= references;
    if (held[page] == 0) {
        pool->pages[page].holders--;
        page_settle(pool, page);
    }
}

void pages_drop(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) pages_drop_slot(pool, pool->slot, pages[i], 1);
}

static bool is_loose(const cxlkv_pool *pool, uint32_t page) {
    return pool->loose[page / 64] >> page % 64 & 1;
}

static void flip_loose(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) pool->loose[pages[i] / 64] ^= 1ull << pages[i] % 64;
}

int64_t cxlkv_pages_alloc(cxlkv_pool *pool, uint32_t count, uint32_t *pages) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = host_lock(pool);
    if (code == 0) {
        code = pages_take(pool, count, NO_PAGE, pages);
        if (code == 0) flip_loose(pool, count, pages);
        if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)count;
}

/* All or nothing. A sequence's page is not loose: it goes when the sequence does. */
static int free_pages(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    for (uint32_t i = 0; i < count; i++) {
        if (pages[i] < pool->host->page_count && is_loose(pool, pages[i])) {
            flip_loose(pool, 1, &pages[i]);
            continue;
        }
        flip_loose(pool, i, pages);
        return fail(CXLKV_E_ARGUMENT,
                    "page %u of %u was not taken by alloc() in this process, or was freed already. "
                    "No page was freed",
                    pages[i], pool->host->page_count);
    }
    pages_drop(pool, count, pages);
    return 0;
}

int64_t cxlkv_pages_free(cxlkv_pool *pool, uint32_t count, const uint32_t *pages) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = host_lock(pool);
    if (code == 0) {
        code = free_pages(pool, count, pages);
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)count;
}
