/* What a scan will read soon: pieces of one kind, head by head and page by page. Kernels ask for it
 * while they work on what is here, since neighbours in a sequence are no neighbours in memory. */
#pragma once
#include "ndp/types.h"

/* So much is on the way at once. One line of each page of memory is asked for twice as early, for
 * its address to be translated by then: in a virtual machine with pages of 4 KiB that alone took a
 * scan from 0.65 to 0.85 of a plain read. */
enum { AHEAD_BYTES = 8192, AHEAD_PAGE_BYTES = 4096 };

/* A place in the scan. */
typedef struct ahead_place {
    uint32_t at;                 /* position of the page */
    uint32_t head;
    page_rows rows;              /* .first NULL: behind the end */
} ahead_place;

typedef struct ahead {
    const layer_view *view;
    const int32_t *pages;        /* a list of indices, not checked yet; NULL: a range */
    uint32_t kind;
    uint32_t end;                /* of the positions */
    uint32_t head_first, head_end;
    uint64_t unit_bytes;         /* read together: one head's piece, or all of a page's */
    ahead_place near, far;
} ahead;

static inline page_rows ahead_rows(const ahead *a, uint32_t index) {
    const cxlkv_pool *pool = a->view->sequence->pool;
    if (a->kind == PIECE_KEYS || a->kind == PIECE_VALUES) return view_rows(a->view, index, a->kind);
    if (index >= a->view->complete) return (page_rows){0};
    uint32_t page = sequence_page(a->view->sequence, a->view->part, index);
    return (page_rows){.first = pieces_of(pool, page, a->view->layer, a->kind),
                       .head_bytes = shape_of(pool, a->view->layer)->strides[a->kind]};
}

/* The page at place->at, or the next one of the list that there is. */
static inline void ahead_load(const ahead *a, ahead_place *place) {
    place->head = a->head_first;
    place->rows = (page_rows){0};
    for (; place->at < a->end && !place->rows.first; place->at++) {
        int64_t index = a->pages ? a->pages[place->at] : (int64_t)place->at;
        if (index < a->view->first || index >= a->view->pages) continue;
        place->rows = ahead_rows(a, (uint32_t)index);
        if (place->rows.first) break;
    }
}

/* What is at the place, NULL behind the end; the place moves on. */
static inline const uint8_t *ahead_take(const ahead *a, ahead_place *place) {
    if (!place->rows.first) return NULL;
    const uint8_t *taken = place->rows.first + place->head * place->rows.head_bytes;
    if (++place->head >= a->head_end) {
        place->at++;
        ahead_load(a, place);
    }
    return taken;
}

/* From position `first` on; heads [head_first, head_end), or all of a page at once when `together`
 * is set. */
static inline ahead ahead_begin(const layer_view *view, uint32_t kind, const int32_t *pages,
                                uint32_t first, uint32_t end, uint32_t head_first,
                                uint32_t head_end, bool together) {
    const layer_shape *shape = shape_of(view->sequence->pool, view->layer);
    ahead a = {.view = view, .pages = pages, .kind = kind, .end = end, .head_first = head_first,
               .head_end = together ? head_first + 1 : head_end};
    if (kind == PIECE_VALUES && values_are_keys(&shape->layout)) a.kind = PIECE_KEYS;
    a.unit_bytes = shape->strides[a.kind] * (together ? head_end - head_first : 1);
    a.near.at = first;
    ahead_load(&a, &a.near);
    uint32_t units = (uint32_t)((AHEAD_BYTES + a.unit_bytes - 1) / a.unit_bytes);
    for (uint32_t i = 0; i < units; i++) ahead_take(&a, &a.near);
    a.far = a.near;
    for (uint32_t i = 0; i < units; i++) ahead_take(&a, &a.far);
    return a;
}

/* Once for each unit, in their order: the one that is to be asked for now, or NULL. */
static inline const uint8_t *ahead_next(ahead *a) {
    const uint8_t *far = ahead_take(a, &a->far);
    for (uint64_t offset = 0; far && offset < a->unit_bytes; offset += AHEAD_PAGE_BYTES)
        __builtin_prefetch(far + offset, 0, 2);
    return ahead_take(a, &a->near);
}
