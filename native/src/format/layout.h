/* What follows from a layout: dtypes, encodings, bytes of pieces. geometry.c places them. */
#pragma once
#include "format/format.h"
#include "kernels/code_planes.h"
#include "kernels/sketch.h"

static inline size_t dtype_bytes(uint32_t dtype) {
    if (dtype == CXLKV_BYTES) return 1;
    return dtype == CXLKV_FLOAT32 ? 4 : 2;
}

static inline bool values_are_keys(const cxlkv_layout *layout) {
    return layout->values == CXLKV_VALUES_KEY_PREFIX;
}
/* A pool of objects, each the bytes of one page; a "token" is a byte then. */
static inline bool stores_objects(const cxlkv_layout *layout) {
    return layout->values == CXLKV_VALUES_OBJECT;
}
/* Channels stored of one token and head. */
static inline uint64_t row_channels(const cxlkv_layout *layout) {
    return layout->head_dim + (values_are_keys(layout) ? 0 : layout->value_head_dim);
}

static inline uint32_t encoding_of(const cxlkv_layout *layout, uint32_t kind) {
    return kind == PIECE_VALUES ? layout->v_encoding : layout->k_encoding;
}
static inline bool is_encoded(const cxlkv_layout *layout) {
    return layout->k_encoding || layout->v_encoding;
}
/* Objects larger than a page take several: layout_check() has the limits. */
static inline bool has_object_pages(const cxlkv_layout *layout) {
    return layout->object_bytes != 0;
}
static inline uint64_t object_bytes_max(const cxlkv_layout *layout) {
    return has_object_pages(layout) ? layout->object_bytes : layout->page_tokens;
}
static inline uint32_t object_pages(const cxlkv_layout *layout, uint64_t bytes) {
    return (uint32_t)((bytes + layout->page_tokens - 1) / layout->page_tokens);
}
/* Of a page by its descriptor, as it is listed: of objects in several pages 0 is the first. */
static inline uint32_t listed_part(const cxlkv_layout *layout, uint32_t part, uint32_t ordinal) {
    return has_object_pages(layout) ? ordinal > 0 && ordinal <= layout->page_tokens : part;
}
/* Groups of layers that differ in shape: group_layout() has each. */
static inline bool has_shapes(const cxlkv_layout *layout) { return layout->kv_heads == 0; }
static inline cxlkv_layout group_layout(const cxlkv_layout *layout, uint32_t group) {
    cxlkv_layout one = *layout;
    const cxlkv_shape *shape = &layout->shapes[group];
    if (!has_shapes(layout)) return one;
    one.kv_heads = shape->kv_heads;
    one.head_dim = shape->head_dim;
    one.value_head_dim = shape->value_head_dim;
    one.dtype = shape->dtype;
    one.values = shape->values;
    return one;
}
static inline bool has_states(const cxlkv_layout *layout) { return layout->state_bytes != 0; }
static inline uint32_t kind_dim(const cxlkv_layout *layout, uint32_t kind) {
    return kind == PIECE_VALUES ? layout->value_head_dim : layout->head_dim;
}
/* Rows of numbers in a byte each: their kernels read bfloat16, which has all of these numbers. */
static inline bool has_fp8(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) == CXLKV_ENCODING_FP8_E4M3;
}
static inline bool has_codes(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) && !has_fp8(layout, kind);
}
static inline uint32_t kernel_dtype(const cxlkv_layout *layout, uint32_t kind) {
    return has_fp8(layout, kind) ? CXLKV_BFLOAT16 : layout->dtype;
}
/* Of a row of K or V as it is stored, where it is a row. */
static inline size_t stored_row_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return kind_dim(layout, kind) * (has_fp8(layout, kind) ? 1 : dtype_bytes(layout->dtype));
}
/* Whether rows of this dtype are taken and given: of the layout's, or bytes as they are stored. */
static inline bool is_given(const cxlkv_layout *layout, uint32_t kind, uint32_t dtype) {
    return dtype == layout->dtype || (dtype == CXLKV_BYTES && has_fp8(layout, kind));
}
/* Of keys or values that are codes. */
static inline code_form form_of(const cxlkv_layout *layout, uint32_t kind) {
    return (code_form){.bits = encoding_of(layout, kind) == CXLKV_ENCODING_INT4 ? 4 : 8,
                       .dim = kind_dim(layout, kind), .values = kind == PIECE_VALUES};
}

/* K or V of a head, as a caller sees them. */
static inline size_t rows_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return (size_t)layout->page_tokens * kind_dim(layout, kind) * dtype_bytes(layout->dtype);
}

/* They are in two planes of 4 bits, the lower one from lower_offset() on. */
static inline bool has_planes(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) == CXLKV_ENCODING_PROGRESSIVE;
}
/* Of a piece of codes: where its scales are, and, of keys, that of their digest. */
static inline size_t scales_offset(const cxlkv_layout *layout, uint32_t kind) {
    code_form form = form_of(layout, kind), upper = code_upper(&form);
    return code_scales_offset(has_planes(layout, kind) ? &upper : &form, layout->page_tokens);
}
static inline size_t digest_scale_offset(const cxlkv_layout *layout) {
    return scales_offset(layout, PIECE_KEYS) +
           code_blocks(layout->page_tokens) * CODE_TOKENS * sizeof(uint16_t);
}
static inline size_t lower_offset(const cxlkv_layout *layout, uint32_t kind) {
    size_t scales = code_blocks(layout->page_tokens) * CODE_TOKENS * sizeof(uint16_t);
    return align_up(scales_offset(layout, kind) + scales + (kind == PIECE_KEYS ? sizeof(float) : 0),
                    LINE_BYTES);
}

/* As they are stored; values that are a prefix of the keys have no piece of their own. A digest of
 * encoded keys has 8 bits a channel: of codes, its scale, a float, lies behind the keys' piece. */
static inline size_t piece_data_bytes(const cxlkv_layout *layout, uint32_t kind) {
    if (stores_objects(layout)) return kind == PIECE_KEYS ? layout->page_tokens : 0;
    if (kind == PIECE_DIGEST)
        return 2 * layout->head_dim * (layout->k_encoding ? 1 : dtype_bytes(layout->dtype));
    if (kind == PIECE_SKETCH) return sketch_bytes(layout->page_tokens, layout->head_dim);
    if (!has_codes(layout, kind)) return layout->page_tokens * stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind), upper = code_upper(&form);
    if (has_planes(layout, kind))
        return lower_offset(layout, kind) + code_scales_offset(&upper, layout->page_tokens);
    return code_bytes(&form, layout->page_tokens) + (kind == PIECE_KEYS ? sizeof(float) : 0);
}

/* What is read of K or V for a token and a head. */
static inline size_t kind_token_bytes(const cxlkv_layout *layout, uint32_t kind) {
    if (kind == PIECE_VALUES && values_are_keys(layout)) return 0;
    if (!has_codes(layout, kind)) return stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind);
    return code_block_bytes(&form) / CODE_TOKENS + sizeof(uint16_t);
}
static inline size_t token_bytes(const cxlkv_layout *layout) {
    return kind_token_bytes(layout, PIECE_KEYS) + kind_token_bytes(layout, PIECE_VALUES);
}

/* From one head's piece to the next one's; 0: this pool has none of this kind. */
static inline uint64_t piece_stride(const cxlkv_geometry *g, uint32_t kind) {
    const uint64_t strides[PIECE_KINDS] = {g->digest_piece_bytes, g->sketch_piece_bytes,
                                           g->key_piece_bytes, g->value_piece_bytes};
    return strides[kind];
}
/* Of a kind's slab, from the layer's start. */
static inline uint64_t slab_offset(const cxlkv_geometry *g, uint32_t kind) {
    const uint64_t offsets[PIECE_KINDS] = {0, g->sketches_offset, g->keys_offset,
                                           g->values_offset};
    return offsets[kind];
}
