/* Lost memory: which pages a bus error has hit. They are retired. */
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"

/* Slots of one slab (piece run of run_bytes a slot) that overlap [start, end) within the slab. */
static uint64_t slab_mask(const cxlkv_geometry *g, uint64_t slab, uint64_t run_bytes,
                          uint64_t start, uint64_t end) {
    uint64_t mask = 0;
    for (uint32_t slot = 0; slot < g->slab_slots; slot++) {
        uint64_t first = slab + slot * run_bytes;
        if (run_bytes && first < end && first + run_bytes > start) mask |= 1ull << slot;
    }
    return mask;
}

/* Bit i: slot i of an extent has a byte in [start, stop) of that extent. */
static uint64_t slots_hit(const cxlkv_pool *pool, uint64_t start, uint64_t stop) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t heads = pool->layout.kv_heads;
    uint64_t mask = slab_mask(g, 0, sizeof(record_header), start, stop) |
                    slab_mask(g, g->checksums_offset, g->checksum_bytes, start, stop);
    if (has_shapes(&pool->layout)) /* page behind page */
        return mask | slab_mask(g, g->layers_offset, g->layer_bytes, start, stop);
    for (uint32_t row = 0; row < g->record_layers; row++) {
        uint64_t at = g->layers_offset + row * g->layer_bytes;
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
            mask |= slab_mask(g, at + slab_offset(g, kind), heads * piece_stride(g, kind), start,
                              stop);
    }
    return mask;
}

/* Retires the pages with a byte in the aligned granule at `address`. Returns how many. */
static uint64_t retire_range(cxlkv_pool *pool, uintptr_t address, size_t bytes) {
    const cxlkv_geometry *g = &pool->geometry;
    uintptr_t base = (uintptr_t)pool->region.base, first = address / bytes * bytes;
    if (first + bytes <= base || first >= base + g->region_bytes) return 0;
    uint64_t start = first > base ? first - base : 0, retired = 0;
    uint64_t stop = min_u64(first + bytes - base, g->region_bytes);
    for (uint32_t page = 0; page < g->page_count; page++) {
        uint64_t line = (uint64_t)((uint8_t *)descriptor_of(pool, page) - pool->region.base);
        if (line < stop && line + sizeof(descriptor) > start) retired += page_retire(pool, page);
    }
    for (uint64_t extent = 0; extent < g->extent_count; extent++) {
        uint64_t at = g->extents_offset + extent * g->extent_bytes;
        if (at >= stop || at + g->extent_bytes <= start) continue;
        uint64_t mask = slots_hit(pool, start > at ? start - at : 0, stop - at);
        for (uint32_t slot = 0; slot < g->slab_slots; slot++)
            if (mask >> slot & 1)
                retired += page_retire(pool, (uint32_t)(extent * g->slab_slots + slot));
    }
    return retired;
}

int poison_error_locked(cxlkv_pool *pool, const guard *fault) {
    uint64_t offset = fault->address - (uintptr_t)pool->region.base;
    rewrite_end(pool); /* of a page that is retired now, or is as it was */
    if (offset >= pool->geometry.region_bytes)
        return fail(EFAULT, "bus error in the caller's own array: was the file behind it cut?");
    uint64_t retired = retire_range(pool, fault->address, fault->granularity_bytes);
    return fail(CXLKV_E_POISON,
                "bus error in the pool's memory at offset %lu (poisoned, or the file was "
                "truncated): %lu pages were retired. Release the sequence and recompute it",
                offset, retired);
}

int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy) {
    return GUARDED(descriptor_read(pool, page, copy), poison_error_locked(pool, &fault));
}
