/* For a GPU, which reads pages past the core: where they lie, and that they are whole. */
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "sequence/batch.h"
#include "sequence/places.h"
#include "sequence/sequence.h"
#include "sequence/usage.h"
#include "sharing/this_host.h"

int64_t cxlkv_pool_memory(cxlkv_pool *pool, uint64_t *address) {
    return IN_POOL(pool, (*address = (uintptr_t)pool->region.base,
                          (int64_t)pool->geometry.region_bytes));
}

int64_t cxlkv_sequence_places(cxlkv_sequence *sequence, uint32_t layer, uint64_t first,
                              uint64_t capacity, int64_t *key_offsets, int64_t *value_offsets,
                              int64_t *descriptor_offsets, uint32_t *pages,
                              uint64_t *generations) {
    cxlkv_pool *pool = sequence->pool;
    if (layer_check(pool, layer) < 0) return -CXLKV_E_ARGUMENT;
    int code = need(capacity, "key_offsets", key_offsets, "value_offsets", value_offsets,
                    "descriptor_offsets", descriptor_offsets, "pages", pages, "generations",
                    generations, NULL);
    if (code == 0) code = sequence_enter(sequence, false);
    if (code < 0) return code;
    layer_view view = view_of(sequence, layer);
    uint64_t sealed = view_sealed(&view);
    uint64_t count = first < view.complete ? view.complete - first : 0;
    const uint8_t *base = pool->region.base;
    for (uint64_t i = 0; i < min_u64(count, capacity); i++) {
        uint32_t index = (uint32_t)(first + i);
        key_offsets[i] = value_offsets[i] = descriptor_offsets[i] = -1;
        pages[i] = NO_PAGE;
        generations[i] = 0;
        if (index < view.first) continue; /* behind the window */
        pages[i] = sequence_page(sequence, view.part, index);
        key_offsets[i] = pieces_of(pool, pages[i], layer, PIECE_KEYS) - base;
        value_offsets[i] = pieces_of(pool, pages[i], layer, PIECE_VALUES) - base;
        if (index < sealed) descriptor_offsets[i] = (uint8_t *)descriptor_of(pool, pages[i]) - base;
        generations[i] = pool->pages[pages[i]].generation;
    }
    sequence_leave(sequence);
    return (int64_t)count;
}

/* ---- that chosen pages are what was written, before a device reads them ---- */

typedef struct verify_job {
    cxlkv_batch *batch;
    uint32_t layer;
    const cxlkv_picked *picked; /* a list for each sequence */
} verify_job;

/* All lists of one sequence; a page of which this process has verified the layer costs a look at a
 * bit. */
static int verify_task(void *context, uint32_t item) {
    const verify_job *job = context;
    cxlkv_pool *pool = job->batch->pool;
    layer_view view = view_of(job->batch->sequences[item], job->layer);
    uint64_t count = (uint64_t)layout_of(pool, job->layer)->kv_heads * job->picked->k;
    const int32_t *pages = job->picked->pages + item * count;
    for (uint64_t i = 0; i < count; i++) {
        if (pages[i] < -1 || pages[i] >= (int64_t)view.pages)
            return fail(CXLKV_E_ARGUMENT, "verify: page %d, the sequence has %u", pages[i],
                        view.pages);
        if (pages[i] >= 0 && (uint32_t)pages[i] < view.first)
            return fail(CXLKV_E_ARGUMENT,
                        "verify: page %d lies behind the window of %u tokens and was given back",
                        pages[i], view.window);
        int code = pages[i] < 0 ? 0 : view_verify(&view, (uint32_t)pages[i]);
        if (code < 0) return code;
    }
    return 0;
}

static int64_t verify_locked(verify_job *job) {
    cxlkv_batch *batch = job->batch;
    int64_t code = layer_check(batch->pool, job->layer);
    if (code < 0) return code;
    if (!job->picked->pages || job->picked->per != CXLKV_PER_SEQUENCE ||
        job->picked->lists != batch->count)
        return fail(CXLKV_E_ARGUMENT, "verify: %u lists of pages, one for each of %u sequences "
                    "is wanted", job->picked->lists, batch->count);
    code = run_tasks(batch->pool, batch->count, verify_task, job);
    if (code == 0) hotness_count(batch, job->layer, job->picked, NULL);
    return code;
}

int chosen_verify(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked) {
    verify_job job = {.batch = batch, .layer = layer, .picked = picked};
    return IN_BATCH(batch, false, peers_verify(batch->pool, verify_locked(&job)));
}
