/* Counts the uses of the pages that a call has read. */
#include "pool/hotness.h"
#include "sequence/sequence.h"

/* A page's count is asked for so many pages before it is raised. */
enum { AHEAD_PAGES = 32 };

/* -1, and what is no page of the pool (an open tail, pages behind a window): NO_PAGE. */
static uint32_t page_named(const layer_view *view, int32_t named) {
    uint32_t index = (uint32_t)named;
    if (index < view->first || index >= view->complete) return NO_PAGE;
    return sequence_page(view->sequence, view->part, index);
}

/* A scan of the keys has pushed the counts out of the caches: they are asked for ahead. */
static void count_list(counting *c, const layer_view *view, const int32_t *list, uint64_t length) {
    for (uint64_t i = 0; i < length + AHEAD_PAGES; i++) {
        uint32_t next = i < length ? page_named(view, list[i]) : NO_PAGE;
        uint32_t page = i < AHEAD_PAGES ? NO_PAGE : page_named(view, list[i - AHEAD_PAGES]);
        if (next != NO_PAGE) __builtin_prefetch(&c->hotness[next], 1);
        if (page != NO_PAGE) count_page(c, page);
    }
}

/* Every page once that some of `rows` query rows see. */
static void count_seen(counting *c, const layer_view *view, uint64_t rows) {
    uint32_t first = view->first;
    if (view->window && rows) {
        uint64_t low = view_low(view, 0, rows) / view->sequence->pool->layout.page_tokens;
        if (low > first) first = (uint32_t)low;
    }
    for (uint32_t index = first; index < view->complete; index++)
        count_page(c, sequence_page(view->sequence, view->part, index));
}

void hotness_count(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts) {
    cxlkv_pool *pool = batch->pool;
    if (batch->counted_elsewhere || atomic_load_explicit(&pool->hotness_off, memory_order_relaxed))
        return;
    counting c = counting_begin(pool);
    uint64_t list = (uint64_t)pool->layout.kv_heads * picked->k, at = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        layer_view view = view_of(batch->sequences[i], layer);
        uint64_t rows = starts ? (uint64_t)(starts[i + 1] - starts[i]) : 1;
        if (!picked->pages) {
            if (rows) count_seen(&c, &view, starts ? rows : 0);
            continue;
        }
        uint64_t lists = picked->per == CXLKV_PER_QUERY ? rows : 1;
        if (rows) count_list(&c, &view, picked->pages + at, lists * list);
        at += lists * list;
    }
    counting_end(pool, &c);
}
