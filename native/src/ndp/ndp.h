/* What selecting, attending and fetching share: a layer of a sequence as they read it. */
#ifndef CXLKV_NDP_H
#define CXLKV_NDP_H

#include "sequence/sequence.h"
#include "tiers/local_tier.h"

/* A layer of one sequence as the scoring loops see it: complete pages, then the open tail. */
typedef struct layer_view {
    cxlkv_sequence *sequence;
    uint64_t tokens;
    uint32_t first;              /* pages before it are gone */
    uint32_t pages;              /* with the tail */
    uint32_t complete;           /* without it */
    uint32_t layer, part;
    uint32_t window;             /* 0: none */
    const near_tier *near;       /* whose copies are read instead; NULL: none. Scoring has none */
} layer_view;
layer_view view_of(cxlkv_sequence *sequence, uint32_t layer);
/* K or V of one page, all heads: where head 0, token 0 is, and how far the next ones are. */
typedef struct page_rows {
    const uint8_t *first;
    uint64_t head_bytes;
    size_t row_bytes;
    bool near;                   /* of a copy, which was verified when it was made */
} page_rows;
/* These two in near.c. Counts the pages of a list, as near or far, and by unit; the view has a
 * tier. */
void near_count_reads(const layer_view *view, const int32_t *pages, uint32_t count,
                      near_reads *reads);
/* K or V in the page's copy, or NULL. No inline: most pools have no tier. */
const uint8_t *view_copy(const layer_view *view, uint32_t page, bool keys);
static inline __attribute__((always_inline)) page_rows
view_rows(const layer_view *view, uint32_t index, uint32_t kind) {
    cxlkv_pool *pool = view->sequence->pool;
    const cxlkv_geometry *g = &pool->geometry;
    bool keys = kind == PIECE_KEYS || values_are_keys(&pool->layout);
    size_t dim = keys ? pool->layout.head_dim : pool->layout.value_head_dim;
    page_rows rows = {.row_bytes = dim * dtype_bytes(pool->layout.dtype)};
    if (index < view->complete) {
        uint32_t page = sequence_page(view->sequence, view->part, index);
        rows.first = pieces_of(pool, page, view->layer, kind);
        rows.head_bytes = keys ? g->key_piece_bytes : g->value_piece_bytes;
        bool looks = __builtin_expect(view->near != NULL, 0);
        const uint8_t *copy = looks ? view_copy(view, page, keys) : NULL;
        if (copy) {
            rows.first = copy;
            rows.near = true;
        }
    } else {
        rows.first = tail_at(pool, view->sequence->tails[view->layer], kind, 0);
        rows.head_bytes = rows.row_bytes;
        rows.row_bytes = tail_row_bytes(pool);
    }
    return rows;
}
/* Tokens that page `index` holds. */
static inline uint32_t view_filled(const layer_view *view, uint32_t index) {
    uint64_t page_tokens = view->sequence->pool->layout.page_tokens;
    return (uint32_t)min_u64(page_tokens, view->tokens - index * page_tokens);
}
/* Of those, the ones that query row `row` of `rows` may see: it is token tokens - (rows - row). */
static inline uint32_t view_visible(const layer_view *view, uint32_t index, uint64_t row,
                                    uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t seen = view->tokens - rows + row + 1;
    return seen <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), seen - first);
}
/* The first token that query row `row` of `rows` may see. */
static inline uint64_t view_low(const layer_view *view, uint64_t row, uint64_t rows) {
    uint64_t position = view->tokens - rows + row;
    return view->window && position >= view->window ? position - view->window + 1 : 0;
}
/* Tokens at the start of page `index` that lie behind that row's window. */
static inline uint32_t view_hidden(const layer_view *view, uint32_t index, uint64_t row,
                                   uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t low = view_low(view, row, rows);
    return low <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), low - first);
}
/* Do `count` rows from `row` on see all that page `index` holds? */
static inline bool view_whole(const layer_view *view, uint32_t index, uint64_t row, uint64_t count,
                              uint64_t rows) {
    return view_visible(view, index, row, rows) == view_filled(view, index) &&
           view_hidden(view, index, row + count - 1, rows) == 0;
}
/* How many of the rows from `row` on, at most `limit`, see all of page `index`: they go together.
 * 1 when that row sees a part of it only. */
static inline uint64_t view_together(const layer_view *view, uint32_t index, uint64_t row,
                                     uint64_t rows, uint64_t limit) {
    if (view_visible(view, index, row, rows) < view_filled(view, index)) return 1;
    return view_hidden(view, index, row + limit - 1, rows) ? 1 : limit;
}
/* Verifies page `index` on its first reading here; the tail needs none. */
int view_verify(const layer_view *view, uint32_t index);

/* ---- attend.c ---- */
/* Into how many ranges the pages of each row are cut, under the locks of the batch: together with
 * the call's rows it decides the last bits of the output. */
uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args);
/* cxlkv_batch_attend in this process, by arguments that were checked; parts 0: chosen. */
int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts);

/* ---- select.c ---- */
/* What a select chose, as fetch and attend take it. */
static inline cxlkv_picked select_chosen(const cxlkv_select_args *args) {
    return (cxlkv_picked){.pages = args->pages, .k = args->k, .per = args->per};
}

#endif
