/* What a pool tells of itself: its pages and what was counted. */
#include <string.h>

#include "pool/hooks.h"
#include "pool/peers.h"

static void count_pages(const cxlkv_pool *pool, cxlkv_stats *stats) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        const page_info *info = &pool->pages[page];
        stats->pages_published += info->published;
        stats->pages_pinned += info->pinned;
        if (!page_is_ours(pool, page)) {
            stats->pages_elsewhere++;
            stats->pages_borrowed += info->holders != 0;
        } else if (info->withdrawn) stats->pages_withdrawn++;
        else if (info->retired) stats->pages_retired++;
        else if (info->quarantined) stats->pages_quarantined++;
        else if (info->holders) stats->pages_held++;
        else if (info->published) stats->pages_published_only++;
    }
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
        stats->processes += pool->host->processes[slot].state != 0;
}

int cxlkv_pool_stats(cxlkv_pool *pool, cxlkv_stats *stats) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    hooks.sequences_expire(pool);
    memset(stats, 0, sizeof(*stats));
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        stats->pages_total = pool->host->page_count;
        stats->pages_free = pool->host->free_pages;
        count_pages(pool, stats);
        cxlkv_counters all;
        counters_total(pool->host, &all);
        stats->reaped_processes = all.reaped_processes;
        stats->rebuilds = all.rebuilds;
        stats->lost_lines = all.lost_lines;
        stats->log_rescans = all.log_rescans;
        stats->lost_forgets = all.lost_forgets;
        host_unlock(pool);
    }
    pthread_mutex_lock(&pool->list_lock);
    stats->sequences = pool->sequence_count;
    pthread_mutex_unlock(&pool->list_lock);
    cxlkv_counters own;
    counters_of_slot(pool->host, pool->slot, &own);
    stats->appended_bytes = own.appended_bytes;
    stats->scored_bytes = own.scored_bytes;
    stats->fetched_bytes = own.fetched_bytes;
    stats->attended_bytes = own.attended_bytes;
    stats->corrupt_pieces = own.corrupt_pieces;
    stats->stale_handles = own.stale_handles;
    stats->window_pages_freed = own.window_pages_freed;
    stats->window_pages_skipped = own.window_pages_skipped;
    stats->queued_drops = own.queued_drops;
    stats->lock_waits = own.lock_waits;
    pool_leave(pool);
    return code;
}

/* A share of 1 is 2^32: four thousand million audits fit, and threads can add without a lock. */
int cxlkv_pool_count_audit(cxlkv_pool *pool, double recall, double mass) {
    if (!(recall >= 0 && recall <= 1) || !(mass >= 0 && mass <= 1))
        return fail(CXLKV_E_ARGUMENT, "an audit's recall %g and mass %g must lie in 0 to 1", recall,
                    mass);
    int code = pool_enter(pool);
    if (code < 0) return code;
    count_add(pool, COUNT_AUDITED_RECALL, (uint64_t)(recall * 4294967296.0));
    count_add(pool, COUNT_AUDITED_MASS, (uint64_t)(mass * 4294967296.0));
    count_add(pool, COUNT_AUDITED_SELECTS, 1);
    pool_leave(pool);
    return 0;
}
