/* Pages are taken: from those that are free, from the dead, from ended leases, from other hosts. */
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "host/processes.h"
#include "pages/pages.h"
#include "pool/alloc.h"
#include "sharing/extents.h"

int full_error(cxlkv_pool *pool, uint32_t wanted) {
    const char *why = pool->shared ? extents_why() : "";
    const char *begin = why[0] ? ". Other hosts' room could not be had: " : "";
    if (has_object_pages(&pool->layout))
        return fail(CXLKV_E_POOL_FULL,
                    "the pool is full: %u slots of %u bytes wanted, %lu of %u free, %lu published. "
                    "Release leases, forget() objects, or create a larger pool. Nothing was "
                    "written%s%s",
                    wanted, pool->layout.page_tokens, pool->host->free_pages,
                    pool->host->page_count, pool->host->published_pages, begin, why);
    if (stores_objects(&pool->layout))
        return fail(CXLKV_E_POOL_FULL,
                    "the pool is full: room for %u objects wanted, %lu of %u slots free, %lu "
                    "objects published. Every object takes a slot of %u bytes, the largest size "
                    "that the pool was made for, however small it is. Release leases, forget() "
                    "objects, or create a larger pool, or one with KVLayout.objects(slot=). "
                    "Nothing was written%s%s",
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

int pages_take(cxlkv_pool *pool, uint32_t count, uint32_t after, uint32_t *pages) {
    pages_make_room(pool, count);
    if (pool->host->free_pages < count) return full_error(pool, count);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t page = run_choose(pool, after);
        run_take(pool, page);
        pool->pages[page].holders = 1;
        pool->held[page] = 1;
        verified_clear(pool, page);
        pages[i] = page;
        if (after != IN_A_GAP) after = page;
    }
    return 0;
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

int host_lock_with_room(cxlkv_pool *pool, uint64_t page_count) {
    int code = host_lock(pool);
    if (code < 0 || pool->host->free_pages >= page_count) return code;
    host_unlock(pool); /* a sequence is locked before it: types.h */
    hooks.sequences_expire(pool);
    hooks.worker_give_back(pool); /* it may hold what our tables do not have any more */
    code = host_lock(pool);
    if (code < 0 || !pool->shared) return code;
    GUARDED((pages_make_room(pool, page_count), 0), poison_error_locked(pool, &fault));
    /* Nobody waits for other hosts with the lock; so what was got for us may be taken by others. */
    for (int attempt = 0; pool->host->free_pages < page_count && attempt < 8; attempt++) {
        host_unlock(pool);
        bool got = extents_take(pool, page_count);
        code = host_lock(pool);
        if (code < 0 || !got) return code;
    }
    return 0;
}

static int64_t take_loose(cxlkv_pool *pool, uint32_t count, uint32_t *pages) {
    int code = pages_take(pool, count, NO_PAGE, pages);
    if (code == 0) set_loose(pool, count, pages);
    if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
    return code < 0 ? code : (int64_t)count;
}

int64_t cxlkv_pages_alloc(cxlkv_pool *pool, uint32_t count, uint32_t *pages) {
    int code = need(count, "pages", pages, NULL);
    if (code < 0) return code;
    return IN_POOL(pool, HOST_LOCKED_BY(host_lock_with_room(pool, count), pool,
                                        take_loose(pool, count, pages)));
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
    int code = need(count, "pages", pages, NULL);
    if (code == 0) code = pool_enter_to_release(pool);
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
