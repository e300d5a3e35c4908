/* The memory of what decode keeps, a choice for each layer of a sequence. */
#include "sequence/kept_choice.h"

kept_choice *kept_take(cxlkv_sequence *sequence, uint32_t layer) {
    const cxlkv_layout *layout = layout_of(sequence->pool, layer);
    if (atomic_exchange_explicit(&sequence->kept_taken, true, memory_order_acquire)) return NULL;
    if (!sequence->kept) sequence->kept = calloc(layout->layers, sizeof(*sequence->kept));
    kept_choice **at = sequence->kept ? &sequence->kept[layer] : NULL;
    if (at && !*at) *at = calloc(1, sizeof(**at) + layout->kv_heads * sizeof((*at)->heads[0]));
    if (!at || !*at) {
        kept_give_back(sequence);
        return NULL;
    }
    return *at;
}

void kept_give_back(cxlkv_sequence *sequence) {
    atomic_store_explicit(&sequence->kept_taken, false, memory_order_release);
}

void kept_free(cxlkv_sequence *sequence) {
    const cxlkv_pool *pool = sequence->pool;
    for (uint32_t layer = 0; sequence->kept && layer < pool->layout.layers; layer++) {
        kept_choice *kept = sequence->kept[layer];
        for (uint32_t head = 0; kept && head < layout_of(pool, layer)->kv_heads; head++)
            free(kept->heads[head].pages);
        free(kept);
    }
    free(sequence->kept);
}
