/* Where select, attend and decode of a process enter: by the worker, if one answers, else here. A
 * decode is a layer of a step in one call; the chosen pages stay in the core. */
#include "ndp/attend.h"
#include "ndp/cost.h"
#include "ndp/door.h"
#include "ndp/select.h"

/* NULL until a pool of this process uses a worker. */
static _Atomic(const door_worker *) answering;

void door_answers(const door_worker *worker) { atomic_store(&answering, worker); }

int64_t cxlkv_batch_select(cxlkv_batch *batch, cxlkv_select_args *args) {
    int64_t code = select_check(batch, args);
    if (code == 0 && args->asks) {
        args->found.method = cheapest_method(batch, args, true);
        return 0;
    }
    if (code == 0) code = need(args->capacity, "pages", args->pages, "scores", args->scores, NULL);
    if (code == 0) code = need(batch->count, "counts", args->counts, NULL);
    if (code < 0) return code;
    if (args->by.method == CXLKV_METHOD_AUTO) args->by.method = cheapest_method(batch, args, false);
    const door_worker *worker = atomic_load(&answering);
    code = worker ? worker->select(batch, args) : NOT_BY_WORKER;
    return code == NOT_BY_WORKER ? select_here(batch, args) : code;
}

int64_t cxlkv_batch_attend(cxlkv_batch *batch, cxlkv_attend_args *args) {
    int64_t code = attend_check(batch, args);
    if (code < 0) return code;
    const door_worker *worker = atomic_load(&answering);
    code = worker ? worker->attend(batch, args) : NOT_BY_WORKER;
    return code == NOT_BY_WORKER ? attend_here(batch, args, 0) : code;
}

/* ---- decode ---- */

/* The lists of a decode. */
typedef struct chosen_lists {
    uint64_t lists; /* and heads */
    uint32_t k; /* pages of the longest */
    int32_t *pages;
    float *scores;
    int32_t *counts;
} chosen_lists;

static void chosen_free(chosen_lists *chosen) {
    free(chosen->pages);
    free(chosen->scores);
    free(chosen->counts);
}

static int chosen_reserve(chosen_lists *chosen, uint64_t pages) {
    chosen_free(chosen);
    chosen->pages = malloc((chosen->lists * pages + 1) * sizeof(*chosen->pages));
    chosen->scores = malloc((chosen->lists * pages + 1) * sizeof(*chosen->scores));
    chosen->counts = malloc((chosen->lists + 1) * sizeof(*chosen->counts));
    return chosen->pages && chosen->scores && chosen->counts
               ? 0
               : fail(ENOMEM, "no memory for %lu lists of %lu pages", chosen->lists, pages);
}

static int64_t choose(cxlkv_batch *batch, cxlkv_select_args *select, chosen_lists *chosen) {
    /* A step later a list is a page longer at most. */
    uint64_t pages = atomic_load_explicit(&batch->chosen_pages, memory_order_relaxed) + 1ull;
    int64_t code;
    do {
        code = chosen_reserve(chosen, pages);
        if (code < 0) return code;
        select->capacity = chosen->lists * pages;
        select->pages = chosen->pages;
        select->scores = chosen->scores;
        select->counts = chosen->counts;
        code = cxlkv_batch_select(batch, select);
        pages = select->k;
    } while (code == -CXLKV_E_ROOM);
    if (code < 0) return code;
    chosen->k = select->k;
    atomic_store_explicit(&batch->chosen_pages, select->k, memory_order_relaxed);
    return 0;
}

/* Chooses and attends. Returns the bytes of K and V that were read. */
static int64_t attend_to_chosen(cxlkv_batch *batch, cxlkv_decode_args *args,
                                cxlkv_select_args *select, cxlkv_attend_args *attend) {
    uint32_t rows = (uint32_t)args->starts[batch->count];
    uint32_t lists = args->by.per == CXLKV_PER_QUERY ? rows : batch->count;
    uint64_t heads = layout_of(batch->pool, args->layer)->kv_heads;
    chosen_lists chosen = {.lists = lists * heads};
    int64_t code = 0;
    uint32_t method = args->by.budget_count ? args->by.method : CXLKV_METHOD_ALL;
    if (method == CXLKV_METHOD_AUTO) method = cheapest_method(batch, select, true);
    select->by.method = select->found.method = method;
    if (method != CXLKV_METHOD_ALL) {
        code = choose(batch, select, &chosen);
        attend->picked = (cxlkv_picked){
            .pages = chosen.pages, .lists = lists, .k = chosen.k, .per = args->by.per};
    }
    args->found = select->found;
    if (code >= 0) code = cxlkv_batch_attend(batch, attend);
    chosen_free(&chosen);
    return code;
}

int64_t cxlkv_batch_decode(cxlkv_batch *batch, cxlkv_decode_args *args) {
    cxlkv_select_args select = {.layer = args->layer, .q_heads = args->q_heads,
                                .queries = args->queries, .starts = args->starts, .by = args->by,
                                .scale = args->scale};
    cxlkv_attend_args attend = {
        .layer = args->layer, .q_heads = args->q_heads, .queries = args->queries,
        .starts = args->starts, .scale = args->scale, .softcap = args->softcap,
        .error = args->error, .out = args->out, .lse = args->lse};
    args->found = (cxlkv_scored){0};
    args->appended = 0;
    args->bytes_attended = 0;
    int64_t code = attend_check(batch, &attend);
    if (code == 0 && args->by.budget_count) code = select_check(batch, &select);
    if (code < 0) return code;
    const cxlkv_rows *values = args->values.data ? &args->values : NULL;
    code = cxlkv_batch_append(batch, args->layer, &args->keys, values, args->starts, args->rewind);
    if (code < 0) return code;
    args->appended = 1;
    code = attend_to_chosen(batch, args, &select, &attend);
    if (code >= 0) args->bytes_attended = (uint64_t)code;
    return code;
}
