/* Free pages: runs of 16 slots, so that a sequence's neighbouring pages lie side by side.
 *
 * A run is in the list of free runs (all its slots free), in the list of partly free ones, or in
 * none. A sequence takes the slot after its last page if that is free in the same run; else it
 * opens a free run; only when there is none does it fill another's gaps. So runs are kept together
 * without being reserved, and no page is out of reach. Every step is O(1) a page. */
#include "format/runs.h"

/* All slots of a run free; the last run of a pool may have fewer. */
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

void run_list(cxlkv_pool *pool, uint32_t run) {
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

void run_unlist(cxlkv_pool *pool, uint32_t run) {
    pool->host->free_pages -= (uint64_t)__builtin_popcount(pool->runs[run].free_mask);
    set_mask(pool, run, 0);
}

void run_take(cxlkv_pool *pool, uint32_t page) {
    uint32_t run = page / RUN_SLOTS;
    set_mask(pool, run, (uint16_t)(pool->runs[run].free_mask & ~(1u << page % RUN_SLOTS)));
    pool->host->free_pages--;
}

void run_put(cxlkv_pool *pool, uint32_t page) {
    uint32_t run = page / RUN_SLOTS;
    set_mask(pool, run, (uint16_t)(pool->runs[run].free_mask | 1u << page % RUN_SLOTS));
    pool->host->free_pages++;
}

uint32_t run_choose(const cxlkv_pool *pool, uint32_t after) {
    if (after == IN_A_GAP) {
        uint32_t gap = pool->host->partial_runs;
        if (gap == NO_PAGE) gap = pool->host->free_runs;
        return gap * RUN_SLOTS + (uint32_t)__builtin_ctz(pool->runs[gap].free_mask);
    }
    if (after != NO_PAGE && after % RUN_SLOTS != RUN_SLOTS - 1 &&
        after + 1 < pool->host->page_count && page_is_free(pool, after + 1))
        return after + 1;
    uint32_t run = pool->host->free_runs;
    if (run == NO_PAGE) run = pool->host->partial_runs;
    return run * RUN_SLOTS + (uint32_t)__builtin_ctz(pool->runs[run].free_mask);
}

uint64_t page_retire(cxlkv_pool *pool, uint32_t page) {
    if (page_is_free(pool, page)) run_take(pool, page);
    uint64_t first_time = !pool->pages[page].retired;
    pool->pages[page].retired = 1;
    return first_time;
}
