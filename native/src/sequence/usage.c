/* Counts the uses of the pages that a call has read: one each, or by the attention they got. */
#include "host/hotness.h"
#include "sequence/batch.h"
#include "sequence/usage.h"

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
        if (page != NO_PAGE) count_page(c, page, 1);
    }
}

/* The first page that one of `rows` query rows sees. */
static uint32_t first_seen(const layer_view *view, uint64_t rows) {
    if (!view->window || !rows) return view->first;
    uint64_t low = view_low(view, 0, rows) / view->sequence->pool->layout.page_tokens;
    return low > view->first ? (uint32_t)low : view->first;
}

/* Every page once that some of `rows` query rows see. */
static void count_seen(counting *c, const layer_view *view, uint64_t rows) {
    for (uint32_t index = first_seen(view, rows); index < view->complete; index++)
        count_page(c, sequence_page(view->sequence, view->part, index), 1);
}

/* Rows [kv_heads, stride] of an attend that are of one list, or of all pages of a sequence. */
typedef struct weights {
    const float *mass;
    uint64_t rows, heads, stride, row_stride;
} weights;

/* Shares of places from one on, summed over rows and heads; `sums` is room for them. */
enum { TILE = 64 };
static const float *sum_tile(const weights *w, uint64_t first, uint64_t count, float sums[TILE]) {
    if (w->rows == 1 && w->heads == 1) return w->mass + first;
    memcpy(sums, w->mass + first, count * sizeof(*sums));
    for (uint64_t i = 1; i < w->rows * w->heads; i++) {
        const float *from =
            w->mass + i / w->heads * w->row_stride + i % w->heads * w->stride + first;
        for (uint64_t at = 0; at < count; at++) sums[at] += from[at];
    }
    return sums;
}

/* Places [first, end): a list's, or NULL: pages. Each has its mean share of `pages` as its uses. */
static void weigh(counting *c, const layer_view *view, const int32_t *list, uint64_t first,
                  uint64_t end, uint64_t pages, const weights *w) {
    float sums[TILE], factor = (float)pages / (float)(w->rows * w->heads);
    for (uint64_t at = first; at < end; at += TILE) {
        uint64_t count = min_u64(TILE, end - at);
        const float *shares = sum_tile(w, at, count, sums);
        for (uint64_t i = 0; i < count; i++) {
            float uses = shares[i] * factor + 0.5f;
            if (!(uses >= 1)) continue; /* nor of a NaN */
            uint32_t page = page_named(view, list ? list[at + i] : (int32_t)(at + i));
            if (page != NO_PAGE)
                count_page(c, page, uses < HOTNESS_MAX ? (uint32_t)uses : HOTNESS_MAX);
        }
    }
}

/* Of one list and head. */
static void weigh_list(counting *c, const layer_view *view, const int32_t *list, uint64_t k,
                       const weights *w) {
    uint64_t pages = 0;
    for (uint64_t i = 0; i < k; i++) pages += list[i] >= 0;
    weigh(c, view, list, 0, k, pages, w);
}

static void weigh_seen(counting *c, const layer_view *view, const weights *w) {
    uint32_t first = first_seen(view, w->rows);
    weigh(c, view, NULL, first, view->complete, view->pages - first, w);
}

static bool counts(const cxlkv_batch *batch) {
    return !batch->counted_elsewhere &&
           !atomic_load_explicit(&batch->pool->counts.off, memory_order_relaxed);
}

bool hotness_weighs(const cxlkv_batch *batch) {
    return atomic_load_explicit(&batch->pool->counts.by_mass, memory_order_relaxed) &&
           counts(batch);
}

void hotness_weigh(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts, const float *mass, uint64_t mass_k) {
    if (!counts(batch)) return;
    counting c = counting_begin(batch->pool);
    uint64_t heads = layout_of(batch->pool, layer)->kv_heads;
    const int32_t *list = picked->pages;
    for (uint32_t i = 0; i < batch->count; i++) {
        layer_view view = view_of(batch->sequences[i], layer);
        weights w = {.mass = mass, .rows = (uint64_t)(starts[i + 1] - starts[i]), .heads = heads,
                     .stride = mass_k, .row_stride = heads * mass_k};
        uint64_t lists = list && picked->per == CXLKV_PER_QUERY ? w.rows : 1;
        mass += w.rows * w.row_stride;
        if (!list && w.rows) weigh_seen(&c, &view, &w);
        if (!list) continue;
        w.rows /= lists ? lists : 1;
        w.heads = 1;
        for (uint64_t n = 0; n < lists * heads; n++, list += picked->k, w.mass += mass_k)
            if (w.rows) weigh_list(&c, &view, list, picked->k, &w);
    }
    counting_end(batch->pool, &c);
}

void hotness_count(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts) {
    cxlkv_pool *pool = batch->pool;
    if (!counts(batch)) return;
    counting c = counting_begin(pool);
    uint64_t list = (uint64_t)layout_of(pool, layer)->kv_heads * picked->k, at = 0;
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
