/* Fetch: copy chosen pages, or all, to one contiguous buffer, verified on the way. */
#include <stdlib.h>
#include <string.h>

#include "flush.h"
#include "internal.h"

/* Above this the copy would only push other data out of the caches. */
enum { STREAM_BYTES = 16 << 20, PREFETCH_LINES = 12 };

typedef struct fetch_job {
    cxlkv_batch *batch;
    cxlkv_fetch_args *args;
    uint32_t *sequence_of_list;
    uint32_t k;
    bool stream;
} fetch_job;

static int copy_piece(const fetch_job *job, const layer_view *view, uint32_t index, uint32_t head,
                      uint32_t kind, uint8_t *to) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_layout *layout = &pool->layout;
    uint32_t dim = kind == PIECE_KEYS ? layout->head_dim : layout->value_head_dim;
    size_t size = piece_data_bytes(layout, kind);
    size_t written = (size_t)view_filled(view, index) * dim * dtype_bytes(layout->dtype);
    uint64_t stride;
    const uint8_t *from = view_pieces(view, index, kind, &stride) + head * stride;
    if (job->stream && written == size && (uintptr_t)to % LINE_BYTES == 0)
        kernels_current()->store_rows(to, from, size, 1, size);
    else
        memcpy(to, from, written);
    if (written < size) memset(to + written, 0, size - written);
    if (index >= view->complete || !layout->checksum) return 0;
    /* The CRC of the source while it is in the cache; a copy of it is what the caller gets. */
    return piece_verify(pool, sequence_page(view->sequence, index), view->layer, head, kind, from);
}

static int copy_page(const fetch_job *job, const layer_view *view, uint32_t index, uint32_t head,
                     uint64_t place) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_layout *layout = &pool->layout;
    uint8_t *keys = (uint8_t *)job->args->keys + place * piece_data_bytes(layout, PIECE_KEYS);
    uint8_t *values =
        (uint8_t *)job->args->values + place * piece_data_bytes(layout, PIECE_VALUES);
    uint64_t sealed = view->sequence->layer_tokens[layout->layers - 1] / layout->page_tokens;
    if (index >= view->pages) {
        memset(keys, 0, piece_data_bytes(layout, PIECE_KEYS));
        memset(values, 0, piece_data_bytes(layout, PIECE_VALUES));
        return 0;
    }
    int code = 0;
    if (index < sealed) {
        uint32_t page = sequence_page(view->sequence, index);
        code = record_check(pool, page, pool->pages[page].generation, layout->page_tokens);
    }
    if (code == 0) code = copy_piece(job, view, index, head, PIECE_KEYS, keys);
    if (code == 0) code = copy_piece(job, view, index, head, PIECE_VALUES, values);
    return code;
}

/* The first lines of what is copied next: hardware prefetch does not cross into a new piece. */
static void prefetch_piece(const layer_view *view, int64_t index, uint32_t head) {
    if (index < 0 || index >= view->pages) return;
    for (uint32_t kind = PIECE_KEYS; kind <= PIECE_VALUES; kind++) {
        uint64_t stride;
        const uint8_t *piece = view_pieces(view, (uint32_t)index, kind, &stride) + head * stride;
        for (uint32_t line = 0; line < PREFETCH_LINES; line++)
            __builtin_prefetch(piece + line * LINE_BYTES);
    }
}

/* One list of one head. */
static int fetch_task(void *context, uint32_t item) {
    const fetch_job *job = context;
    const cxlkv_picked *picked = &job->args->picked;
    uint32_t heads = job->batch->pool->layout.kv_heads, list = item / heads, head = item % heads;
    layer_view view =
        view_of(job->batch->sequences[job->sequence_of_list[list]], job->args->layer);
    for (uint32_t j = 0; j < job->k; j++) {
        uint64_t place = (uint64_t)item * job->k + j;
        int64_t index = picked->pages ? picked->pages[place] : (int64_t)j;
        if (picked->pages && (index < -1 || index >= view.pages))
            return fail(CXLKV_E_ARGUMENT, "fetch: page %ld, the sequence has %u", index,
                        view.pages);
        if (j + 1 < job->k)
            prefetch_piece(&view, picked->pages ? picked->pages[place + 1] : (int64_t)j + 1, head);
        int code = copy_page(job, &view, index < 0 ? UINT32_MAX : (uint32_t)index, head, place);
        if (code < 0) return code;
    }
    store_fence();
    return 0;
}

static int lists_make(fetch_job *job, uint32_t *lists) {
    const cxlkv_batch *batch = job->batch;
    const cxlkv_picked *picked = &job->args->picked;
    bool per_query = picked->pages && picked->per == CXLKV_PER_QUERY;
    *lists = batch->count;
    if (per_query) {
        int code = batch_starts(batch, job->args->starts, lists);
        if (code < 0) return code;
    }
    if (picked->pages && picked->lists != *lists)
        return fail(CXLKV_E_ARGUMENT, "fetch: %u lists of pages, %u wanted", picked->lists, *lists);
    job->sequence_of_list = malloc((*lists + 1) * sizeof(uint32_t));
    if (!job->sequence_of_list) return fail(ENOMEM, "no memory for %u lists", *lists);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (!per_query) job->sequence_of_list[i] = i;
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
    uint64_t pieces = (uint64_t)lists * layout->kv_heads * job->k;
    uint64_t key_bytes = pieces * piece_data_bytes(layout, PIECE_KEYS);
    uint64_t value_bytes = pieces * piece_data_bytes(layout, PIECE_VALUES);
    if (key_bytes > args->key_capacity_bytes || value_bytes > args->value_capacity_bytes)
        return fail(CXLKV_E_ROOM, "fetch: %lu bytes of keys wanted, room for %lu", key_bytes,
                    args->key_capacity_bytes);
    if (pieces / layout->kv_heads > UINT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "fetch: too many pages at once");
    job->stream = key_bytes + value_bytes > STREAM_BYTES;
    code = run_tasks(job->batch->pool, lists * layout->kv_heads, fetch_task, job);
    if (code < 0) return code;
    atomic_fetch_add_explicit(&job->batch->pool->fetched_bytes, key_bytes + value_bytes,
                              memory_order_relaxed);
    return (int64_t)(key_bytes + value_bytes);
}

int64_t cxlkv_batch_fetch(cxlkv_batch *batch, cxlkv_fetch_args *args) {
    fetch_job job = {.batch = batch, .args = args};
    int64_t code = batch_lock(batch, false);
    if (code < 0) return code;
    code = fetch_locked(&job);
    batch_unlock(batch);
    free(job.sequence_of_list);
    return code;
}
