/* What must hold in a host state, recounted. */
#include <stdio.h>
#include <stdlib.h>

#include "pool/peers.h"

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
            PROBLEM("page %u: %s\n", page, is_free ? "free but in use" : "lost: in use by nobody");
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
