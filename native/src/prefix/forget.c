/* Published pages by their keys: forgotten, scrubbed, pinned, prioritized. */
#include "format/records.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "host/processes.h"
#include "pages/published.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"
#include "sharing/wants.h"

typedef void page_function(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context);

/* `each` of the page at one place of a key; false: there is none. */
static bool page_of_key(cxlkv_pool *pool, const uint8_t *hashes, uint64_t key, uint64_t place,
                        uint32_t part, page_function *each, void *context) {
    uint64_t hash[2];
    page_hash(hashes, key, place, part, hash);
    uint32_t page = index_find(pool, hash);
    if (page != NO_PAGE) each(pool, page, hash, context);
    return page != NO_PAGE;
}

/* `each` of every page that is published under these keys, places and parts of each; under the host
 * lock. reaps: what the dead hold is given back before. */
static int pages_of_keys(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, bool reaps,
                         page_function *each, void *context) {
    if (reaps) host_reap(pool);
    if (pool->shared) peers_follow(pool);
    uint64_t states = has_states(&pool->layout) ? state_pages(pool) : 0;
    for (uint64_t key = 0; key < count; key++) {
        uint64_t place = 0;
        for (uint32_t part = 0; part < stored_parts(pool); part++)
            for (place = 0; page_of_key(pool, hashes, key, place, part, each, context);) place++;
        /* The first pages of a checkpoint may be gone: it is evicted so, and published from its
         * last one on. Any may, when some were evicted by number: no byte outlives a scrubbing. */
        for (uint64_t end = states; end > place; end--)
            if (!page_of_key(pool, hashes, key, end - 1, stored_parts(pool) - 1, each, context) &&
                !reaps)
                break;
    }
    return 0;
}

/* A whole call. reaps: what the worker holds is given back as well. */
static int keys_call(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, bool reaps,
                     page_function *each, void *context) {
    int code = need(count, "hashes", hashes, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    sequences_expire(pool);
    if (reaps) hooks.worker_give_back(pool); /* it may hold what our tables do not have any more */
    code = HOST_LOCKED(pool, pages_of_keys(pool, count, hashes, reaps, each, context));
    pool_leave(pool);
    return code;
}

/* An object in several pages counts once. */
static bool counts(const cxlkv_pool *pool, uint32_t page) {
    descriptor line;
    return !has_object_pages(&pool->layout) || descriptor_read(pool, page, &line) < 0 ||
           descriptor_is_first(pool, &line);
}

static void forget_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *forgotten) {
    bool counted = counts(pool, page);
    *(int64_t *)forgotten += page_forget(pool, hash, true) && counted;
}

/* ---- forgotten, and overwritten when the last holder drops it ---- */

static void scrub_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context) {
    cxlkv_scrubbed *scrubbed = context;
    if (!page_is_ours(pool, page)) {
        scrubbed->elsewhere++;
        return;
    }
    pool->pages[page].scrub = 1;
    page_forget(pool, hash, true);
    if (pool->pages[page].scrub) scrubbed->held++;
    else scrubbed->pages++;
}

int64_t cxlkv_forget(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                     cxlkv_scrubbed *scrubbed) {
    int64_t forgotten = 0;
    int code;
    if (scrubbed) {
        *scrubbed = (cxlkv_scrubbed){0};
        code = keys_call(pool, count, hashes, true, scrub_one, scrubbed);
        forgotten = (int64_t)(scrubbed->pages + scrubbed->held);
    } else {
        code = keys_call(pool, count, hashes, false, forget_one, &forgotten);
    }
    return code < 0 ? code : forgotten;
}

/* ---- pinned by a user: eviction leaves them alone. The mark is in the host state, so it is of
 * this host only, and goes with the last process that has the pool open. ---- */

typedef struct pinning {
    bool pinned;
    int64_t found;
} pinning;

static void pin_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context) {
    (void)hash;
    pinning *p = context;
    if (!page_is_ours(pool, page)) return; /* its owner evicts it, or does not */
    pool->pages[page].pinned = p->pinned;
    p->found += counts(pool, page);
}

/* ---- prioritized: they make room later than others. Of this host, as a pin is. ---- */

typedef struct prioritizing {
    uint16_t priority;
    bool lowers;
    int64_t found;
} prioritizing;

static void prioritize_one(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context) {
    (void)hash;
    prioritizing *p = context;
    if (!page_is_ours(pool, page)) return;
    uint16_t *priority = &pool->reuse[page].priority;
    if (p->lowers || *priority < p->priority) *priority = p->priority;
    p->found += counts(pool, page);
}

int64_t cxlkv_mark(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t mark,
                   uint32_t value) {
    pinning pins = {.pinned = value != 0};
    prioritizing priorities = {.priority = (uint16_t)value, .lowers = mark == CXLKV_MARK_PRIORITY};
    bool by_pin = mark == CXLKV_MARK_PIN;
    if (!by_pin && value > CXLKV_PRIORITY_MAX)
        return fail(CXLKV_E_ARGUMENT, "priority %u: outside 0 to %d", value, CXLKV_PRIORITY_MAX);
    int code = by_pin ? keys_call(pool, count, hashes, false, pin_one, &pins)
                      : keys_call(pool, count, hashes, false, prioritize_one, &priorities);
    return code < 0 ? code : by_pin ? pins.found : priorities.found;
}

static int64_t list_evictable(const cxlkv_pool *pool, uint8_t *flags) {
    int64_t count = 0;
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        flags[page] = page_is_evictable(pool, page);
        count += flags[page];
    }
    return count;
}

int64_t cxlkv_evictable(cxlkv_pool *pool, uint8_t *flags, uint64_t capacity) {
    if (capacity < pool->geometry.page_count)
        return fail(CXLKV_E_ROOM, "flags for %u pages are wanted", pool->geometry.page_count);
    int code = need(capacity, "flags", flags, NULL);
    if (code < 0) return code;
    return IN_POOL(pool, (sequences_expire(pool), HOST_LOCKED(pool, list_evictable(pool, flags))));
}
