/* What the host state derives from primary records: built anew after a death, and recounted. */
#include "base/flush.h"
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hotness.h"
#include "host/rebuild.h"
#include "pages/borrow.h"
#include "pages/log_writer.h"
#include "pages/pages.h"
#include "pages/published.h"

/* A death inside rewrite_begin .. rewrite_end may have torn the record's lines. Only whole, sealed
 * pages are rewritten, so it is made one again; the rebuild frees it if nobody holds it. */
void rewrite_repair(cxlkv_pool *pool) {
    uint32_t page = pool->host->rewriting;
    pool->host->rewriting = NO_PAGE;
    if (page >= pool->host->page_count) return;
    GUARD_BEGIN(fault) {
        record_seal(pool, page, record_part(pool, page), record_tokens(pool, page), NULL);
    } GUARD_END(fault, pool->pages[page].retired = 1)
}

/* Two hosts may have published one text; each finds its own copy, so that it can give that up. */
static bool index_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page) {
    uint32_t other = index_find(pool, hash);
    if (other == page) return true;
    if (other != NO_PAGE) {
        if (page_is_ours(pool, other) || !page_is_ours(pool, page)) return false;
        index_erase(pool, hash);
        page_unpublish(pool, other);
    }
    return index_insert(pool, hash, page);
}

/* Slots of the processes that are registered: few of all. */
typedef struct registered {
    uint32_t count, slots[PROCESS_MAX];
} registered;

static registered registered_slots(const host_state *host) {
    registered all = {0};
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
        if (host->processes[slot].state) all.slots[all.count++] = slot;
    return all;
}

/* The region's descriptors say what is published; all else that nobody holds is free, or will be
 * when its descriptor says so: then the answer is true. */
static bool rebuild_page(cxlkv_pool *pool, uint32_t page, const registered *processes) {
    page_info *info = &pool->pages[page];
    descriptor line;
    info->holders = 0;
    for (uint32_t i = 0; i < processes->count; i++)
        info->holders += held_of(pool, processes->slots[i])[page] != 0;
    bool ours = page_is_ours(pool, page);
    info->published = info->quarantined = 0;
    if (descriptor_read(pool, page, &line) < 0) {
        /* A holder may be writing it just now, or died so: then the page is settled when reaped. */
        info->quarantined = ours && info->holders == 0;
        return false;
    }
    uint64_t generation = line.version >> 8, state = line.version & 255;
    if (!ours && info->holders && generation != info->generation) return false; /* as pinned */
    if (generation > info->generation || !ours) info->generation = generation;
    bool forgotten = state == PAGE_PUBLISHED && is_forgotten(pool, &line);
    if (state == PAGE_PUBLISHED && !forgotten && index_page(pool, line.hash, page)) {
        info->published = 1;
        hotness_found(pool, page, listed_part(&pool->layout, line.part, line.ordinal));
        pool->host->published_pages++;
    } else if (ours && state == PAGE_PUBLISHED && !info->retired) {
        descriptor_write(pool, page, info->generation, PAGE_SEALED, line.tokens, NULL);
    }
    if (!info->published) info->pinned = 0;
    return state != PAGE_FREE;
}

static bool rebuild_page_guarded(cxlkv_pool *pool, uint32_t page, const registered *processes) {
    return GUARDED(rebuild_page(pool, page, processes), (pool->pages[page].retired = 1, false));
}

/* Where the index will be looked at, for all descriptors of a word: these are misses otherwise. */
static void expect_index(cxlkv_pool *pool, uint32_t first, uint32_t end) {
    GUARD_BEGIN(fault) {
        for (uint32_t page = first; page < end; page++) {
            const descriptor *line = descriptor_of(pool, page);
            uint64_t hash[2] = {flush_load_word(&line->hash[0]), flush_load_word(&line->hash[1])};
            index_expect(pool, hash);
        }
    } GUARD_END(fault, (void)fault) /* its page is found below */
}

/* What a page is now that its descriptor was read. True: it is to be freed. */
static bool rebuild_state(cxlkv_pool *pool, uint32_t page, bool sealed, bool pinned) {
    run_info *run = &pool->runs[page / RUN_SLOTS];
    page_info *info = &pool->pages[page];
    pool->host->withdrawn_pages -= info->withdrawn;
    info->withdrawn = 0;
    if (!run->ours || info->holders || info->published || info->retired || info->quarantined)
        return false;
    if (sealed) return true;
    info->withdrawn = pinned;
    pool->host->withdrawn_pages += pinned;
    if (pinned || !page_scrubbed(pool, page)) return false;
    run->free_mask |= (uint16_t)(1u << page % RUN_SLOTS);
    pool->host->free_pages++;
    hotness_freed(pool, page);
    return false;
}

void host_rebuild_runs(cxlkv_pool *pool, uint32_t first_run, uint32_t count) {
    registered processes = registered_slots(pool->host);
    uint32_t first = first_run * RUN_SLOTS, word = first / 64 * 64;
    uint32_t end = min_u32(pool->host->page_count, first + count * RUN_SLOTS);
    uint64_t pinned = 0, over = 0;
    bool some_ours = false;
    for (uint32_t run = first_run; run * RUN_SLOTS < end; run++) {
        run_info *info = &pool->runs[run];
        info->free_mask = 0; /* `ours` stays: the holder of the claims may be reading it */
        info->next = info->previous = NO_PAGE;
        some_ours |= info->ours;
    }
    /* V6: a page that is free may still be read on another host. */
    if (pool->shared && some_ours) pinned = pinned_elsewhere(pool, first);
    expect_index(pool, first, end);
    for (uint32_t page = first; page < end; page++) {
        uint64_t bit = 1ull << page % 64;
        bool sealed = rebuild_page_guarded(pool, page, &processes);
        if (rebuild_state(pool, page, sealed, (pinned & bit) != 0)) over |= bit;
    }
    for (uint32_t run = (end + RUN_SLOTS - 1) / RUN_SLOTS; run-- > first_run;)
        run_list(pool, run);
    if (over) pages_free_word(pool, word, over);
}

/* From the end, so that the first runs are the first to be taken. */
void host_rebuild(cxlkv_pool *pool) {
    host_state *host = pool->host;
    uint32_t runs = 64 / RUN_SLOTS;
    index_clear(pool);
    forgotten_read(pool);
    host->free_pages = host->published_pages = 0;
    host->free_runs = host->partial_runs = NO_PAGE;
    for (uint32_t word = (host->run_count + runs - 1) / runs; word-- > 0;)
        host_rebuild_runs(pool, word * runs, runs);
    forgotten_drop(pool);
}

void log_again(cxlkv_pool *pool) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        descriptor line;
        if (!page_is_ours(pool, page) || !pool->pages[page].published) continue;
        if (descriptor_try(pool, page, &line) == 0)
            log_add(pool, LOG_PUBLISH, page, line.version >> 8, line.hash);
    }
}

/* ---- what must hold, recounted ---- */

#define PROBLEM(...)                                                                       \
    do {                                                                                   \
        problems++;                                                                        \
        if (used < text_bytes) {                                                           \
            int wrote = snprintf(text + used, text_bytes - used, __VA_ARGS__);             \
            used = wrote > 0 ? min_u64(used + (size_t)wrote, text_bytes) : used;           \
        }                                                                                  \
    } while (0)

int host_recount(cxlkv_pool *pool, char *text, size_t text_bytes) {
    const host_state *host = pool->host;
    uint64_t free_pages = 0, published = 0, listed = 0, used = 0;
    int problems = 0;
    if (text_bytes) text[0] = 0;
    for (uint32_t page = 0; page < host->page_count; page++) {
        const page_info *info = &pool->pages[page];
        bool is_free = pool->runs[page / RUN_SLOTS].free_mask >> page % RUN_SLOTS & 1;
        uint32_t holders = 0;
        for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
            if (host->processes[slot].state && held_of(pool, slot)[page]) holders++;
        if (holders != info->holders)
            PROBLEM("page %u: %u processes hold it, %u counted\n", page, holders, info->holders);
        bool wanted = holders || info->published || info->retired || info->quarantined ||
                      info->withdrawn || !page_is_ours(pool, page);
        if (is_free == wanted)
            PROBLEM("page %u: %s\n", page, is_free ? "free but in use" : "neither in use nor free");
        free_pages += is_free;
        published += info->published;
    }
    const uint32_t heads[2] = {host->free_runs, host->partial_runs};
    for (int list = 0; list < 2; list++)
        for (uint32_t run = heads[list], steps = 0; run != NO_PAGE; run = pool->runs[run].next) {
            if (run >= host->run_count || steps++ > host->run_count) {
                PROBLEM("the list of %s runs is broken\n", list ? "partly free" : "free");
                break;
            }
            listed += (uint64_t)__builtin_popcount(pool->runs[run].free_mask);
        }
    if (free_pages != host->free_pages || listed != free_pages)
        PROBLEM("%lu pages are free, %lu are counted, %lu are listed\n", free_pages,
                host->free_pages, listed);
    if (published != host->published_pages)
        PROBLEM("%lu pages are published, %lu are counted\n", published, host->published_pages);
    return problems;
}

#if CXLKV_DEBUG >= 2
void host_assert(cxlkv_pool *pool) {
    char text[512];
    if (host_recount(pool, text, sizeof(text)) == 0) return;
    fprintf(stderr, "cxlkv: the allocator's counts do not add up:\n%s", text);
    abort();
}
#endif
