/* Fetch: copy chosen pages, or all, to one contiguous buffer, verified on the way. */
#include <stdlib.h>
#include <string.h>

#include "flush.h"
#include "internal.h"

/* Above this the copy would only push other data out of the caches. */
enum { STREAM_BYTES = 16 << 20, PREFETCH_LINES = 8 };

typedef struct fetch_job {
    cxlkv_batch *batch;
    cxlkv_fetch_args *args;
    uint32_t *sequence_of_list;
    uint32_t k;
    bool stream;
    near_reads reads;
} fetch_job;

static int copy_piece(const fetch_job *job, const layer_view *view, uint32_t index, uint32_t head,
                      uint32_t kind, uint8_t *to) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_layout *layout = &pool->layout;
    uint32_t dim = kind == PIECE_KEYS ? layout->head_dim : layout->value_head_dim;
    size_t size = piece_data_bytes(layout, kind), row = dim * dtype_bytes(layout->dtype);
    size_t written = view_filled(view, index) * row;
    page_rows rows = view_rows(view, index, kind);
    const uint8_t *from = rows.first + head * rows.head_bytes;
    bool prefix = kind == PIECE_VALUES && values_are_keys(layout);
    if (index >= view->complete || prefix) {
        for (size_t t = 0; t * row < written; t++)
            memcpy(to + t * row, from + t * rows.row_bytes, row);
        memset(to + written, 0, size - written);
        return 0;
    }
    if (job->stream && (uintptr_t)to % LINE_BYTES == 0)
        kernels_current()->store_rows(to, from, size, 1, size);
    else
        memcpy(to, from, size);
    /* Values that are keys were verified with these, a copy when it was made. */
    if (!layout->checksum || rows.near) return 0;
    /* The CRC of the source while it is in the cache; a copy of it is what the caller gets. */
    return piece_verify(pool, sequence_page(view->sequence, view->part, index), view->layer, head,
                        kind, from);
}

/* Page at place j of a list: -1 is padding. */
static int64_t page_at(const fetch_job *job, uint32_t item, uint32_t j) {
    const cxlkv_picked *picked = &job->args->picked;
    return picked->pages ? picked->pages[(uint64_t)item * job->k + j] : (int64_t)j;
}

/* Before a byte is copied: every page of the list exists and is what its header says. */
static int check_list(const fetch_job *job, const layer_view *view, uint32_t item) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_layout *layout = &pool->layout;
    const int32_t *own = job->args->picked.pages;
    uint32_t head = item % layout->kv_heads;
    /* A list like head 0's is checked with that one, in the same call. */
    if (head > 0 && (!own || memcmp(own + (uint64_t)item * job->k,
                                    own + (uint64_t)(item - head) * job->k,
                                    job->k * sizeof(*own)) == 0))
        return 0;
    uint32_t last_layer = pool->parts[view->part].last_layer;
    uint64_t sealed = view->sequence->layer_tokens[last_layer] / layout->page_tokens;
    for (uint32_t j = 0; j < job->k; j++) {
        int64_t index = page_at(job, item, j);
        if (job->args->picked.pages && (index < -1 || index >= view->pages))
            return fail(CXLKV_E_ARGUMENT, "fetch: page %ld, the sequence has %u", index,
                        view->pages);
        if (index >= 0 && index < view->first)
            return fail(CXLKV_E_ARGUMENT,
                        "fetch: page %ld lies behind the window of %u tokens and was given back",
                        index, view->window);
        if (index < 0 || (uint64_t)index >= sealed) continue;
        uint32_t page = sequence_page(view->sequence, view->part, (uint32_t)index);
        if (view->near && near_find(pool, view->near, page, view->layer)) continue; /* as good */
        uint64_t generation = pool->pages[page].generation;
        int code = record_check_unlocked(pool, page, generation, layout->page_tokens);
        if (code < 0) return code;
    }
    return 0;
}

/* The first lines of what is copied next: hardware prefetch does not cross into a new piece. */
static void prefetch_piece(const layer_view *view, int64_t index, uint32_t head, uint32_t kind) {
    if (index < view->first || index >= view->pages) return;
    page_rows rows = view_rows(view, (uint32_t)index, kind);
    const uint8_t *piece = rows.first + head * rows.head_bytes;
    for (uint32_t line = 0; line < PREFETCH_LINES; line++)
        __builtin_prefetch(piece + line * LINE_BYTES);
}

/* One list of one head: all its K, then all its V. */
static int fetch_task(void *context, uint32_t item) {
    fetch_job *job = context;
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint32_t list = item / layout->kv_heads, head = item % layout->kv_heads;
    layer_view view =
        view_of(job->batch->sequences[job->sequence_of_list[list]], job->args->layer);
    view.near = job->batch->pool->near;
    int code = check_list(job, &view, item);
    if (code == 0 && view.near && job->args->picked.pages)
        near_count_reads(&view, job->args->picked.pages + (uint64_t)item * job->k, job->k,
                         &job->reads);
    for (uint32_t kind = PIECE_KEYS; code == 0 && kind <= PIECE_VALUES; kind++) {
        size_t size = piece_data_bytes(layout, kind);
        uint8_t *to = kind == PIECE_KEYS ? job->args->keys : job->args->values;
        to += (uint64_t)item * job->k * size;
        for (uint32_t j = 0; code == 0 && j < job->k; j++, to += size) {
            int64_t index = page_at(job, item, j);
            if (j + 1 < job->k) prefetch_piece(&view, page_at(job, item, j + 1), head, kind);
            if (index < view.first || index >= view.pages) memset(to, 0, size);
            else code = copy_piece(job, &view, (uint32_t)index, head, kind, to);
        }
    }
    store_fence();
    return code;
}

static bool per_query(const cxlkv_fetch_args *args) {
    return args->picked.pages && args->picked.per == CXLKV_PER_QUERY;
}

static int lists_make(fetch_job *job, uint32_t *lists) {
    const cxlkv_batch *batch = job->batch;
    const cxlkv_picked *picked = &job->args->picked;
    *lists = batch->count;
    if (per_query(job->args)) {
        int code = batch_starts(batch, job->args->starts, lists);
        if (code < 0) return code;
    }
    if (picked->pages && picked->lists != *lists)
        return fail(CXLKV_E_ARGUMENT, "fetch: %u lists of pages, %u wanted", picked->lists, *lists);
    job->sequence_of_list = malloc((*lists + 1) * sizeof(uint32_t));
    if (!job->sequence_of_list) return fail(ENOMEM, "no memory for %u lists", *lists);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (!per_query(job->args)) job->sequence_of_list[i] = i;
        else
            for (int32_t row = job->args->starts[i]; row < job->args->starts[i + 1]; row++)
                job->sequence_of_list[row] = i;
    }
    return 0;
}

static int64_t fetch_locked(fetch_job *job) {
    cxlkv_fetch_args *args = job->args;
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint32_t lists;
    if (args->layer >= layout->layers)
        return fail(CXLKV_E_ARGUMENT, "layer %u: the pool has %u", args->layer, layout->layers);
    uint32_t window = job->batch->pool->parts[job->batch->pool->part_of[args->layer]].window;
    if (window && !args->picked.pages)
        return fail(CXLKV_E_ARGUMENT,
                    "fetch: layer %u has a window of %u tokens: name the pages, as select() does",
                    args->layer, window);
    int code = lists_make(job, &lists);
    if (code < 0) return code;
    job->k = args->picked.k;
    if (!args->picked.pages) {
        job->k = 0;
        for (uint32_t i = 0; i < job->batch->count; i++) {
            uint32_t pages = view_of(job->batch->sequences[i], args->layer).pages;
            if (pages > job->k) job->k = pages;
        }
    }
    args->k = job->k;
    uint64_t items = (uint64_t)lists * layout->kv_heads, pieces;
    /* A piece has less than 2^24 bytes: below this limit no size overflows. */
    if (items > INT32_MAX || __builtin_mul_overflow(items, job->k, &pieces) || pieces >> 38)
        return fail(CXLKV_E_ARGUMENT, "fetch: %u lists of %u pages are too many at once", lists,
                    job->k);
    uint64_t key_bytes = pieces * piece_data_bytes(layout, PIECE_KEYS);
    uint64_t value_bytes = pieces * piece_data_bytes(layout, PIECE_VALUES);
    if (key_bytes > args->key_capacity_bytes || value_bytes > args->value_capacity_bytes)
        return fail(CXLKV_E_ROOM, "fetch: %lu bytes of keys wanted, room for %lu", key_bytes,
                    args->key_capacity_bytes);
    job->stream = key_bytes + value_bytes > STREAM_BYTES;
    code = run_tasks(job->batch->pool, lists * layout->kv_heads, fetch_task, job);
    if (code < 0) return code;
    count_add(job->batch->pool, COUNT_FETCHED_BYTES, key_bytes + value_bytes);
    hotness_count(job->batch, args->layer, &args->picked, per_query(args) ? args->starts : NULL);
    return (int64_t)(key_bytes + value_bytes);
}

int64_t cxlkv_batch_fetch(cxlkv_batch *batch, cxlkv_fetch_args *args) {
    fetch_job job = {.batch = batch, .args = args};
    int64_t code = batch_lock(batch, false);
    if (code < 0) return code;
    near_enter(batch->pool);
    code = fetch_locked(&job);
    near_leave(batch->pool, &job.reads);
    code = peers_verify(batch->pool, code);
    batch_unlock(batch);
    free(job.sequence_of_list);
    return code;
}
