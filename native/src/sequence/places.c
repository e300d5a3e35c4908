/* Where pages lie in the region, for who reads them past the core: a GPU. */
#include "sequence/sequence.h"

int64_t cxlkv_pool_memory(cxlkv_pool *pool, uint64_t *address) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    *address = (uint64_t)(uintptr_t)pool->region.base;
    int64_t bytes = (int64_t)pool->geometry.region_bytes;
    pool_leave(pool);
    return bytes;
}

int64_t cxlkv_sequence_places(cxlkv_sequence *sequence, uint32_t layer, uint64_t first,
                              uint64_t capacity, int64_t *key_offsets, int64_t *value_offsets,
                              int64_t *descriptor_offsets, uint32_t *pages,
                              uint64_t *generations) {
    cxlkv_pool *pool = sequence->pool;
    if (layer >= pool->layout.layers)
        return fail(CXLKV_E_ARGUMENT, "layer %u: the pool has %u", layer, pool->layout.layers);
    int code = sequence_enter(sequence, false);
    if (code < 0) return code;
    layer_view view = view_of(sequence, layer);
    uint32_t last_layer = pool->parts[view.part].last_layer;
    uint64_t sealed = sequence->layer_tokens[last_layer] / pool->layout.page_tokens;
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
