/* Layouts are checked, and a geometry is made of one: where each byte of a pool lies. */
#pragma once
#include "format/types.h"

int layout_check(const cxlkv_layout *layout);
int sharing_check(const cxlkv_sharing *sharing);
int parts_make(cxlkv_pool *pool);         /* pool->layers, from layout and geometry */
void parts_free(cxlkv_pool *pool);
/* Fills in sharing->log_records when that is 0. */
int geometry_make(const cxlkv_layout *layout, cxlkv_sharing *sharing, uint64_t capacity_bytes,
                  cxlkv_geometry *geometry);
/* Its two steps: extents of slab_slots records; what depends on how many of them there are. */
void extent_layout(const cxlkv_layout *layout, uint32_t slab_slots, cxlkv_geometry *g);
void place_extents(const cxlkv_sharing *sharing, uint64_t extents, cxlkv_geometry *g);
hosts_area hosts_area_of(uint8_t *base, const cxlkv_sharing *sharing, const cxlkv_geometry *g);
