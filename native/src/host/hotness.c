/* How much pages are used, their hotness, and when published ones were asked for (reuse).
 *
 * Both are advice for whoever moves or evicts pages. Hotness is counted by any thread, without the
 * host lock: a load and a store, so that two which count one page at one time may lose a count.
 * Reuse is written under the host lock. Whatever a death leaves in either is a value that they may
 * have: a parent, and a priority, is checked when it is read. */
#include "host/hooks.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/processes.h"
#include "pages/borrow.h"

/* ---- reuse: all under the host lock ---- */

void hotness_follows(cxlkv_pool *pool, uint32_t page, uint32_t parent) {
    reuse_record *record = &pool->reuse[page];
    record->parent_plus_one = parent + 1; /* NO_PAGE: 0 */
    record->parent_born = parent < PARENT_LOST ? (uint16_t)pool->reuse[parent].born : 0;
}

void hotness_published(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t parent) {
    uint32_t now = (uint32_t)++pool->host->clock;
    pool->reuse[page] = (reuse_record){.used = now, .born = now};
    hotness_found(pool, page, part);
    hotness_follows(pool, page, parent);
}

void hotness_asked(cxlkv_pool *pool, uint32_t page) {
    reuse_record *record = &pool->reuse[page];
    record->used = (uint32_t)++pool->host->clock;
    record->hits += record->hits < UINT16_MAX;
    if (atomic_load_explicit(&pool->counts.off, memory_order_relaxed)) return;
    counting c = counting_begin(pool);
    count_page(&c, page, 1);
    counting_end(pool, &c);
}

void hotness_matched(cxlkv_pool *pool, const uint32_t *found, uint32_t part, uint32_t first,
                     uint32_t count) {
    uint64_t parts = pool->geometry.part_count;
    bool counts = !atomic_load_explicit(&pool->counts.off, memory_order_relaxed);
    counting c = counting_begin(pool);
    for (uint64_t place = first; place < count; place++) {
        uint32_t page = found[place * parts + part], parent = NO_PAGE;
        if (part) parent = found[place * parts];
        else if (place) parent = found[(place - 1) * parts];
        reuse_record *record = &pool->reuse[page];
        record->used = (uint32_t)++pool->host->clock;
        record->hits += record->hits < UINT16_MAX;
        hotness_follows(pool, page, parent); /* which may be another copy than when it was born */
        if (counts) count_page(&c, page, 1);
    }
    counting_end(pool, &c);
}

static bool is_listed(const cxlkv_pool *pool, uint32_t page) {
    return pool->pages[page].published && page_is_ours(pool, page);
}

static bool is_after(uint32_t time, uint32_t other) { return (int32_t)(time - other) > 0; }

/* The page before it, if it is still that one: published since then, it has another text. Keys of
 * prefixes hash what is before them. Users say what is before an object, in a ring perhaps: so one
 * follows older ones only. */
static uint32_t parent_of(const cxlkv_pool *pool, const reuse_record *record) {
    uint32_t parent = record->parent_plus_one - 1;
    if (parent == NO_PAGE || parent == PARENT_LOST) return parent;
    bool objects = stores_objects(&pool->layout);
    if (parent >= pool->host->page_count || !is_listed(pool, parent) ||
        (uint16_t)pool->reuse[parent].born != record->parent_born ||
        (objects && !is_after(record->born, pool->reuse[parent].born)))
        return objects ? PARENT_LOST : NO_PAGE;
    return parent;
}

/* ---- texts of objects ---- */

/* One that is older than what comes before it is taken as published now. */
void hotness_chained(cxlkv_pool *pool, uint32_t page, uint32_t parent) {
    reuse_record *record = &pool->reuse[page];
    if (parent_of(pool, record) == parent) return;
    if (parent < PARENT_LOST && !is_after(record->born, pool->reuse[parent].born))
        record->born = (uint32_t)++pool->host->clock;
    hotness_follows(pool, page, parent);
}

void hotness_reached(cxlkv_pool *pool, uint32_t page, uint32_t since) {
    while (page < PARENT_LOST && !is_after(pool->reuse[page].used, since)) {
        hotness_asked(pool, page);
        page = page_is_ours(pool, page) ? parent_of(pool, &pool->reuse[page]) : NO_PAGE;
    }
}

static cxlkv_published row_of(const cxlkv_pool *pool, uint32_t page, uint32_t epoch, bool pinned) {
    const page_info *info = &pool->pages[page];
    const reuse_record *record = &pool->reuse[page];
    uint32_t hotness = atomic_load_explicit(&pool->hotness[page], memory_order_relaxed);
    uint32_t parent = parent_of(pool, record);
    return (cxlkv_published){.generation = info->generation, .page = page, .used = record->used,
                             .born = record->born,
                             .parent = parent == PARENT_LOST ? NO_PAGE : parent,
                             .hits = record->hits, .hotness = decayed(hotness, epoch),
                             .part = record->part,
                             .priority = min_u32(record->priority, CXLKV_PRIORITY_MAX),
                             .flags = (info->holders || pinned ? CXLKV_PUBLISHED_HELD : 0) |
                                      (info->pinned ? CXLKV_PUBLISHED_PINNED : 0) |
                                      (parent == PARENT_LOST ? CXLKV_PUBLISHED_LOST : 0)};
}

/* By page; `places` says of each listed page which row is its. Returns how many are listed. */
static int64_t list_pages(const cxlkv_pool *pool, cxlkv_published *rows, uint32_t capacity,
                          uint32_t *places) {
    uint32_t epoch = epoch_now(pool->host), count = 0, looked = NO_PAGE;
    uint64_t pinned = 0;
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        if (!is_listed(pool, page)) continue;
        if (pool->shared && capacity && page / 64 != looked) {
            looked = page / 64;
            pinned = pinned_elsewhere(pool, looked * 64);
        }
        places[page] = count++;
        if (places[page] < capacity)
            rows[places[page]] = row_of(pool, page, epoch, pinned >> page % 64 & 1);
    }
    return count;
}

static void list_hashes(const cxlkv_pool *pool, cxlkv_published *rows, uint32_t capacity,
                        const uint32_t *places) {
    for (uint32_t at = 0; capacity && at < pool->host->index_capacity; at++) {
        const index_entry *entry = &pool->index[at];
        uint32_t page = entry->page_plus_one - 1; /* of an empty one NO_PAGE */
        if (page < pool->host->page_count && is_listed(pool, page) && places[page] < capacity)
            memcpy(rows[places[page]].hash, entry->hash, sizeof(entry->hash));
    }
}

static int64_t list_locked(cxlkv_pool *pool, cxlkv_published *rows, uint32_t capacity,
                           uint32_t *places, uint64_t *clock) {
    host_reap(pool); /* the dead hold nothing */
    int64_t count = list_pages(pool, rows, capacity, places);
    list_hashes(pool, rows, capacity, places);
    *clock = pool->host->clock;
    return count;
}

/* ---- the interface ---- */

int64_t cxlkv_pool_published(cxlkv_pool *pool, cxlkv_published *rows, uint32_t capacity,
                             uint64_t *clock) {
    int64_t code = need(capacity, "rows", rows, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    hooks.sequences_expire(pool);
    uint32_t *places = malloc(pool->geometry.page_count * sizeof(*places));
    code = places ? HOST_LOCKED(pool, list_locked(pool, rows, capacity, places, clock))
                  : fail(ENOMEM, "no memory to list published pages");
    free(places);
    pool_leave(pool);
    return code;
}

int64_t cxlkv_hotness_read(cxlkv_pool *pool, uint32_t first, uint32_t count, uint32_t *counts,
                           uint32_t *epochs) {
    int code = need(count, "counts", counts, "epochs", epochs, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    uint32_t pages = pool->geometry.page_count, epoch = epoch_now(pool->host);
    if (first > pages || count > pages - first)
        code = fail(CXLKV_E_ARGUMENT, "pages %u to %lu: the pool has %u", first,
                    (uint64_t)first + count, pages);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        uint32_t hotness = atomic_load_explicit(&pool->hotness[first + i], memory_order_relaxed);
        counts[i] = decayed(hotness, epoch);
        epochs[i] = hotness ? epoch - epochs_since(hotness, epoch) : 0;
    }
    pool_leave(pool);
    return code < 0 ? code : (int64_t)epoch;
}

int64_t hotness_advance(cxlkv_pool *pool) {
    return IN_POOL(pool, (atomic_fetch_add_explicit(&pool->host->hotness_advances, 1,
                                                    memory_order_relaxed),
                          (int64_t)epoch_now(pool->host)));
}

void hotness_set(cxlkv_pool *pool, bool by_mass, bool on) {
    if (by_mass) atomic_store_explicit(&pool->counts.by_mass, on, memory_order_relaxed);
    else atomic_store_explicit(&pool->counts.off, !on, memory_order_relaxed);
}
