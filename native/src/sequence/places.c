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

typedef struct place {
    int64_t keys, values, descriptor;
    uint32_t page;
    uint64_t generation;
} place;

static place place_of(const layer_view *view, uint32_t index, uint64_t sealed) {
    const cxlkv_pool *pool = view->sequence->pool;
    if (index < view->first) return (place){-1, -1, -1, NO_PAGE, 0};
    uint32_t page = sequence_page(view->sequence, view->part, index);
    const uint8_t *line = (const uint8_t *)descriptor_of(pool, page);
    return (place){
        .keys = pieces_of(pool, page, view->layer, PIECE_KEYS) - pool->region.base,
        .values = pieces_of(pool, page, view->layer, PIECE_VALUES) - pool->region.base,
        .descriptor = index < sealed ? line - pool->region.base : -1,
        .page = page,
        .generation = pool->pages[page].generation,
    };
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
    for (uint64_t i = 0; i < min_u64(count, capacity); i++) {
        place at = place_of(&view, (uint32_t)(first + i), sealed);
        key_offsets[i] = at.keys;
        value_offsets[i] = at.values;
        descriptor_offsets[i] = at.descriptor;
        pages[i] = at.page;
        generations[i] = at.generation;
    }
    sequence_leave(sequence);
    return (int64_t)count;
}
