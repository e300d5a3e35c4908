/* What selecting, attending and fetching share: a layer of a sequence as they read it. */
#ifndef CXLKV_NDP_H
#define CXLKV_NDP_H

#include "tiers/local_tier.h"

/* K or V of one page, all heads: where head 0, token 0 is, and how far the next ones are. Of a kind
 * that is encoded, where the pieces are. */
typedef struct page_rows {
    const uint8_t *first;
    uint64_t head_bytes;
    size_t row_bytes;
    bool local;                   /* of a copy, which was verified when it was made */
} page_rows;
static inline __attribute__((always_inline)) page_rows
view_rows(const layer_view *view, uint32_t index, uint32_t kind) {
    cxlkv_pool *pool = view->sequence->pool;
    const cxlkv_geometry *g = &pool->geometry;
    bool keys = kind == PIECE_KEYS || values_are_keys(&pool->layout);
    uint32_t own = keys ? PIECE_KEYS : PIECE_VALUES;
    page_rows rows = {.row_bytes = stored_row_bytes(&pool->layout, own)};
    if (index < view->complete) {
        uint32_t page = sequence_page(view->sequence, view->part, index);
        rows.first = pieces_of(pool, page, view->layer, kind);
        rows.head_bytes = keys ? g->key_piece_bytes : g->value_piece_bytes;
        bool looks = __builtin_expect(view->local != NULL, 0);
        const uint8_t *copy = looks ? view_copy(view, page, keys) : NULL;
        if (copy) {
            rows.first = copy;
            rows.local = true;
        }
    } else {
        rows.first = tail_at(pool, view->sequence->tails[view->layer], kind, 0);
        rows.head_bytes =
            is_encoded(&pool->layout) ? tail_piece_bytes(pool, own) : rows.row_bytes;
        rows.row_bytes = tail_row_bytes(pool, own);
    }
    return rows;
}

/* ---- attend.c ---- */
/* Into how many ranges the pages of each row are cut, under the locks of the batch: together with
 * the call's rows it decides the last bits of the output. */
uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args);
/* What is to be said of the numbers of an attend, whoever asks: a caller of this process, or a
 * request to the worker. Pages and weights themselves are looked at when they are used. */
int attend_bounds(const cxlkv_layout *layout, const cxlkv_attend_args *args, uint32_t rows,
                  uint32_t sequences);
int attend_check(const cxlkv_batch *batch, const cxlkv_attend_args *args);
/* cxlkv_batch_attend in this process, by arguments that were checked; parts 0: chosen. */
int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts);

/* ---- cost.c ---- */
/* CXLKV_METHOD_EXACT or _TWO_STAGE; where all pages may be attended to instead, also _ALL. */
uint32_t cheapest_method(cxlkv_batch *batch, const cxlkv_select_args *args, bool may_skip);

/* ---- select.c ---- */
/* As attend_bounds(), of numbers and budgets. */
int select_bounds(const cxlkv_layout *layout, const cxlkv_select_args *args, uint32_t rows,
                  uint32_t sequences);
int select_check(const cxlkv_batch *batch, const cxlkv_select_args *args);
/* In this process, by arguments that were checked and a method that is not AUTO. */
int64_t select_here(cxlkv_batch *batch, cxlkv_select_args *args);
/* Whether so many pages are worth it. */
bool sketch_pays(const cxlkv_pool *pool, uint32_t pages);
/* What a select chose, as fetch and attend take it. */
static inline cxlkv_picked select_chosen(const cxlkv_select_args *args) {
    return (cxlkv_picked){.pages = args->pages, .k = args->k, .per = args->by.per};
}

#endif
