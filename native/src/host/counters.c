/* Counters: a row in the host state for each process, so that others can see what each does. */
#include "base/crc32c.h"
#include "base/guard.h"
#include "coherence/lost_lines.h"
#include "host/counters.h"

/* Where a pool without a host state counts: a closed one, whose last sequences are still let go. */
static counter_row nowhere;

void count_outside(cxlkv_pool *pool, enum counter which, uint64_t amount) {
    pthread_mutex_lock(&pool->locks.list);
    count_add(pool, which, amount);
    pthread_mutex_unlock(&pool->locks.list);
}

void counters_begin(host_state *host, uint32_t slot) {
    counter_row *row = &host->counters[slot], *before = &host->counters_before[slot];
    atomic_store_explicit(&row->sequences, 0, memory_order_relaxed);
    atomic_store_explicit(&row->late_drops, 0, memory_order_relaxed);
    for (uint32_t i = 0; i < COUNT_KINDS; i++)
        atomic_store_explicit(&before->counts[i],
                              atomic_load_explicit(&row->counts[i], memory_order_relaxed),
                              memory_order_relaxed);
}

void counters_bind(cxlkv_pool *pool, uint32_t slot) {
    pthread_mutex_lock(&pool->locks.list);
    pool->counters = &pool->host->counters[slot];
    count_sequences(pool, 0); /* a forked child has its parent's */
    atomic_store_explicit(&pool->counters->late_drops, atomic_load(&pool->late.count),
                          memory_order_relaxed); /* as well */
    pthread_mutex_unlock(&pool->locks.list);
}

void counters_unbind(cxlkv_pool *pool) {
    pthread_mutex_lock(&pool->locks.list);
    pool->counters = &nowhere;
    pthread_mutex_unlock(&pool->locks.list);
}

static void add_row(counter_row *row, uint64_t *sums) {
    for (uint32_t i = 0; i < COUNT_KINDS; i++)
        sums[i] += atomic_load_explicit(&row->counts[i], memory_order_relaxed);
}

void counters_of_slot(host_state *host, uint32_t slot, cxlkv_counters *counters) {
    uint64_t now[COUNT_KINDS] = {0}, before[COUNT_KINDS] = {0};
    add_row(&host->counters[slot], now);
    add_row(&host->counters_before[slot], before);
    for (uint32_t i = 0; i < COUNT_KINDS; i++) now[i] -= before[i];
    memcpy(counters, now, sizeof(*counters));
}

void counters_total(host_state *host, cxlkv_counters *counters) {
    uint64_t sums[COUNT_KINDS] = {0};
    for (uint32_t slot = 0; slot <= PROCESS_MAX; slot++) add_row(&host->counters[slot], sums);
    memcpy(counters, sums, sizeof(*counters));
}

void counters_save(cxlkv_pool *pool) {
    cxlkv_counters total;
    saved_counters saved;
    counters_total(pool->host, &total);
    memset(&saved, 0, sizeof(saved));
    memcpy(saved.counts, &total, sizeof(saved.counts));
    saved.crc = crc32c(0, saved.counts, sizeof(saved.counts));
    uint8_t *to = pool->region.base + SAVED_COUNTERS_OFFSET;
    if (pool->shared) to = hosts_line(&pool->hosts, pool->hosts.self, COUNTER_LINES);
    memcpy(to, &saved, sizeof(saved));
    if (pool->shared) hosts_hand_over(to, sizeof(saved), true);
}

bool counters_load(const uint8_t *from, cxlkv_counters *counters) {
    saved_counters saved;
    memcpy(&saved, from, sizeof(saved));
    memset(counters, 0, sizeof(*counters));
    if (saved.crc != crc32c(0, saved.counts, sizeof(saved.counts))) return false;
    memcpy(counters, saved.counts, sizeof(*counters));
    return true;
}

/* Where they cannot be read they begin at 0, as where nobody has saved any. */
static void counters_try(const uint8_t *from, cxlkv_counters *counters) {
    if (!GUARDED(counters_load(from, counters), false)) memset(counters, 0, sizeof(*counters));
}

void counters_restore(cxlkv_pool *pool) {
    cxlkv_counters counters;
    uint64_t counts[COUNT_KINDS];
    const uint8_t *from = pool->region.base + SAVED_COUNTERS_OFFSET;
    if (pool->shared) {
        from = hosts_line(&pool->hosts, pool->hosts.self, COUNTER_LINES);
        hosts_hand_over(from, sizeof(saved_counters), false);
    }
    counters_try(from, &counters);
    memcpy(counts, &counters, sizeof(counts));
    for (uint32_t i = 0; i < COUNT_KINDS; i++)
        atomic_store_explicit(&pool->host->counters[PROCESS_MAX].counts[i], counts[i],
                              memory_order_relaxed);
}
