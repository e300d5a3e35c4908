/* A layout's geometry: how large extents are, where each piece lies in them, how many fit. */
#include <math.h>

#include "coherence/hosts.h"
#include "format/geometry.h"
#include "format/records.h"

/* Every group has a layer, and what is not used is 0, so that equal layouts have equal bytes. */
static int groups_check(const cxlkv_layout *layout) {
    bool used[CXLKV_GROUPS_MAX] = {false};
    for (uint32_t layer = 0; layer < CXLKV_LAYERS_MAX; layer++) {
        uint32_t group = layout->group_of[layer];
        if (group >= layout->group_count || (layer >= layout->layers && group != 0))
            return fail(CXLKV_E_GEOMETRY, "layout: layer %u is of group %u of %u", layer, group,
                        layout->group_count);
        if (layer < layout->layers) used[group] = true;
    }
    for (uint32_t group = 0; group < CXLKV_GROUPS_MAX; group++)
        if (used[group] != (group < layout->group_count) ||
            (!used[group] && layout->windows[group] != 0) || layout->windows[group] > INT32_MAX)
            return fail(CXLKV_E_GEOMETRY, "layout: group %u has no layers, or a window of %u",
                        group, layout->windows[group]);
    return 0;
}

static int encodings_check(const cxlkv_layout *layout) {
    if (!is_encoded(layout)) return 0;
    if (layout->k_encoding > ENCODING_LAST || layout->v_encoding > ENCODING_LAST)
        return fail(CXLKV_E_GEOMETRY, "layout: encoding code %u of keys, %u of values: unknown",
                    layout->k_encoding, layout->v_encoding);
    if (layout->values != CXLKV_VALUES_OWN)
        return fail(CXLKV_E_GEOMETRY, "layout: an encoding is for keys and values that are both "
                    "stored: values that are a prefix of the keys would be read by token and by "
                    "channel, and objects are bytes");
    if (layout->head_dim > CODE_DIM_MAX || layout->value_head_dim > CODE_DIM_MAX)
        return fail(CXLKV_E_GEOMETRY, "layout: %u and %u channels: encoded heads have up to %d",
                    layout->head_dim, layout->value_head_dim, CODE_DIM_MAX);
    return 0;
}

static int rotary_check(const cxlkv_layout *layout) {
    uint64_t pairs = 0;
    for (uint32_t group = 0; group < CXLKV_GROUPS_MAX; group++) {
        uint64_t own = layout->rotary.pairs[group];
        uint32_t channels = group_layout(layout, group).head_dim;
        if (own && (group >= layout->group_count || 2 * own > channels))
            return fail(CXLKV_E_GEOMETRY, "layout: group %u turns %lu pairs of %u channels", group,
                        own, channels);
        pairs += own;
    }
    if (pairs > CXLKV_ROTARY_PAIRS_MAX || layout->rotary.neighbours >> CXLKV_GROUPS_MAX)
        return fail(CXLKV_E_GEOMETRY, "layout: a rotary embedding of %lu pairs, %d at most", pairs,
                    CXLKV_ROTARY_PAIRS_MAX);
    for (uint64_t i = 0; i < pairs; i++)
        if (!isfinite(layout->rotary.frequencies[i]))
            return fail(CXLKV_E_GEOMETRY, "layout: a rotary frequency is not finite");
    return 0;
}

/* Of the layout as one group has it. */
static int shape_check(const cxlkv_layout *layout) {
    bool objects = stores_objects(layout);
    /* Limits keep every product within 64 bits: 1024 * 1024 * 8192 * 1024 * 4 < 2^46. */
    const struct { const char *name; uint32_t value, limit; } fields[] = {
        {"layers", layout->layers, 1024},
        {"kv_heads", layout->kv_heads, 1024},
        {"head_dim", layout->head_dim, 4096},
        {"value_head_dim", layout->value_head_dim, 4096},
        {objects ? "object_bytes" : "page_tokens", layout->page_tokens,
         objects ? OBJECT_BYTES_MAX : 1024},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].value == 0 || fields[i].value > fields[i].limit)
            return fail(CXLKV_E_GEOMETRY, "layout: %s is %u, outside 1 to %u", fields[i].name,
                        fields[i].value, fields[i].limit);
    if (layout->dtype >= DTYPE_COUNT && layout->dtype != CXLKV_BYTES)
        return fail(CXLKV_E_GEOMETRY, "layout: dtype code %u is unknown", layout->dtype);
    bool one = layout->layers == 1 && layout->kv_heads == 1 && layout->head_dim == 1 &&
               layout->value_head_dim == 1 && layout->sketch == 0 && layout->windows[0] == 0;
    if (objects != (layout->dtype == CXLKV_BYTES) || (objects && !one))
        return fail(CXLKV_E_GEOMETRY, "layout: objects are bytes, in one layer of one head");
    if (layout->values > CXLKV_VALUES_OBJECT ||
        (values_are_keys(layout) && layout->value_head_dim > layout->head_dim))
        return fail(CXLKV_E_GEOMETRY,
                    "layout: values code %u with %u channels: a prefix of keys of %u has no more",
                    layout->values, layout->value_head_dim, layout->head_dim);
    return encodings_check(layout);
}

/* One shape, or one of each group, which differ; what is not used is 0. */
static int shapes_check(const cxlkv_layout *layout) {
    static const cxlkv_shape none;
    uint32_t others = 0, used = has_shapes(layout) ? layout->group_count : 0;
    for (uint32_t group = 0; group < CXLKV_GROUPS_MAX; group++) {
        const cxlkv_shape *shape = &layout->shapes[group];
        bool right = group < used ? shape->kv_heads != 0 && shape->values != CXLKV_VALUES_OBJECT
                                  : memcmp(shape, &none, sizeof(none)) == 0;
        if (!right)
            return fail(CXLKV_E_GEOMETRY, "layout: the shape of group %u is of %u kv heads, with "
                        "values code %u", group, shape->kv_heads, shape->values);
        if (group < used) others += memcmp(shape, layout->shapes, sizeof(none)) != 0;
    }
    if (!has_shapes(layout)) return shape_check(layout);
    if (layout->head_dim || layout->value_head_dim || layout->dtype || layout->values || !others)
        return fail(CXLKV_E_GEOMETRY, "layout: shapes of groups are given where they differ, and "
                    "then no other one");
    for (uint32_t group = 0; group < used; group++) {
        const cxlkv_layout own = group_layout(layout, group);
        int code = shape_check(&own);
        if (code < 0) return code;
    }
    return 0;
}

int layout_check(const cxlkv_layout *layout) {
    bool objects = stores_objects(layout);
    if (layout->group_count == 0 || layout->group_count > CXLKV_GROUPS_MAX)
        return fail(CXLKV_E_GEOMETRY, "layout: group_count is %u, outside 1 to %d",
                    layout->group_count, CXLKV_GROUPS_MAX);
    int code = shapes_check(layout);
    if (code == 0) code = rotary_check(layout);
    if (code < 0) return code;
    if (layout->checksum > 1)
        return fail(CXLKV_E_GEOMETRY, "layout: checksum is %u, not 0 or 1", layout->checksum);
    if (memchr(layout->model_id, 0, sizeof(layout->model_id)) == NULL)
        return fail(CXLKV_E_GEOMETRY, "layout: model_id is longer than 255 bytes");
    if (has_states(layout) && (objects || !layout->checksum))
        return fail(CXLKV_E_GEOMETRY, "layout: states are kept beside K and V, with checksums");
    if (has_object_pages(layout) &&
        (!objects || layout->object_bytes <= layout->page_tokens ||
         layout->object_bytes > OBJECT_BYTES_MAX ||
         object_pages(layout, layout->object_bytes) > min_u32(OBJECT_PAGES_MAX,
                                                              layout->page_tokens)))
        return fail(CXLKV_E_GEOMETRY, "layout: objects of %lu bytes in slots of %u: they "
                    "are larger than a slot, and of up to %d slots, and of no more than a slot has "
                    "bytes",
                    layout->object_bytes, layout->page_tokens, OBJECT_PAGES_MAX);
    if (layout->state_bytes > (uint64_t)STATE_PAGES_MAX << 20)
        return fail(CXLKV_E_GEOMETRY, "layout: state checkpoints of %lu bytes, up to %lu are kept",
                    layout->state_bytes, (uint64_t)STATE_PAGES_MAX << 20);
    return groups_check(layout);
}

static void layers_by_group(const cxlkv_layout *layout, uint32_t layers[CXLKV_GROUPS_MAX]) {
    memset(layers, 0, CXLKV_GROUPS_MAX * sizeof(*layers));
    for (uint32_t layer = 0; layer < layout->layers; layer++) layers[layout->group_of[layer]]++;
}

static uint32_t part_count_of(const cxlkv_layout *layout, uint32_t record_layers) {
    uint32_t sizes[CXLKV_GROUPS_MAX], parts = 0;
    layers_by_group(layout, sizes);
    for (uint32_t group = 0; group < layout->group_count; group++)
        parts += (sizes[group] + record_layers - 1) / record_layers;
    return parts;
}

/* Layers of a page. The groups' sizes differ, a page is one size for all: little of it should stay
 * empty, and few pages stand for a token. One page more is worth a quarter of a layer. */
static uint32_t record_layers_of(const cxlkv_layout *layout) {
    uint32_t best = layout->layers;
    uint64_t least = UINT64_MAX;
    if (layout->group_count == 1) return best;
    for (uint32_t count = layout->layers; count >= 1; count--) {
        uint64_t parts = part_count_of(layout, count), cost = 4 * parts * count + parts;
        if (cost < least) best = count;
        if (cost < least) least = cost;
    }
    return best;
}

/* ---- groups of unlike shapes: pages of the same bytes, with unlike numbers of layers ---- */

static void strides_of(const cxlkv_layout *one, uint64_t strides[PIECE_KINDS]) {
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
        strides[kind] = align_up(piece_data_bytes(one, kind), LINE_BYTES);
    strides[PIECE_SKETCH] = one->sketch ? piece_data_bytes(one, PIECE_SKETCH) : 0;
    if (values_are_keys(one)) strides[PIECE_VALUES] = 0;
}

/* The pieces of one layer of a page, from one layer to the next. */
static uint64_t shape_place(const cxlkv_layout *one, layer_shape *shape) {
    uint64_t at = 0;
    strides_of(one, shape->strides);
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        shape->offsets[kind] = at;
        at = align_up(at + one->kv_heads * shape->strides[kind], LINE_BYTES);
    }
    return at;
}

/* What a page takes of each group: as many layers as fit, of those that there are. */
typedef struct shared_page {
    uint32_t layers[CXLKV_GROUPS_MAX], rows[CXLKV_GROUPS_MAX], parts;
    uint64_t row_bytes[CXLKV_GROUPS_MAX], bytes;
} shared_page;

static void page_fill(const cxlkv_layout *layout, shared_page *page) {
    page->parts = 0;
    for (uint32_t group = 0; group < layout->group_count; group++) {
        uint64_t fit = page->bytes / page->row_bytes[group];
        page->rows[group] = (uint32_t)min_u64(fit, page->layers[group]);
        page->parts += (page->layers[group] + page->rows[group] - 1) / page->rows[group];
    }
}

static void page_begin(const cxlkv_layout *layout, shared_page *page) {
    layers_by_group(layout, page->layers);
    for (uint32_t group = 0; group < layout->group_count; group++) {
        const cxlkv_layout own = group_layout(layout, group);
        layer_shape shape;
        page->row_bytes[group] = shape_place(&own, &shape);
    }
}

/* As record_layers_of(): a page as large as some layers of one of the groups. */
static void page_choose(const cxlkv_layout *layout, shared_page *page) {
    uint64_t most = 0, least = UINT64_MAX, best = 0;
    page_begin(layout, page);
    for (uint32_t group = 0; group < layout->group_count; group++)
        if (page->row_bytes[group] > most) most = page->row_bytes[group];
    for (uint32_t group = 0; group < layout->group_count; group++)
        for (uint32_t count = 1; count <= page->layers[group]; count++) {
            page->bytes = count * page->row_bytes[group];
            if (page->bytes < most) continue;
            page_fill(layout, page);
            uint64_t cost = page->parts * (4 * page->bytes + most);
            if (cost < least || (cost == least && page->bytes > best)) best = page->bytes;
            if (cost < least) least = cost;
        }
    page->bytes = best;
    page_fill(layout, page);
}

static void shared_layout(const cxlkv_layout *layout, cxlkv_geometry *g) {
    shared_page page;
    uint64_t slots = g->slab_slots, entries = 0;
    page_choose(layout, &page);
    for (uint32_t group = 0; group < layout->group_count; group++) {
        uint64_t own = (uint64_t)page.rows[group] * group_layout(layout, group).kv_heads;
        if (own > entries) entries = own;
        if (page.rows[group] > g->record_layers) g->record_layers = page.rows[group];
        const cxlkv_layout one = group_layout(layout, group);
        uint64_t strides[PIECE_KINDS];
        strides_of(&one, strides);
        if (strides[PIECE_SKETCH] > g->sketch_piece_bytes)
            g->sketch_piece_bytes = strides[PIECE_SKETCH];
    }
    g->part_count = page.parts;
    g->layer_bytes = page.bytes;
    g->checksum_bytes = align_up(entries * PIECE_KINDS * sizeof(uint32_t), LINE_BYTES);
    g->checksums_offset = slots * sizeof(record_header);
    g->layers_offset = align_up(g->checksums_offset + slots * g->checksum_bytes, 4096);
    g->record_bytes =
        sizeof(descriptor) + sizeof(record_header) + g->checksum_bytes + g->layer_bytes;
}

/* ---- which layer lies where ---- */

static void packing_make(layer_shape *shape) {
    packing *p = &shape->packing;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        if (shape->strides[kind] == 0) continue;
        p->offsets[kind] = p->layer_bytes;
        p->sizes[kind] = piece_data_bytes(&shape->layout, kind);
        p->layer_bytes += p->sizes[kind] * shape->layout.kv_heads;
    }
    p->payload_bytes = p->layer_bytes * shape->rows;
}

/* Of group 0 where all groups have one shape. */
static void shape_make(const cxlkv_pool *pool, uint32_t group, layer_shape *shape) {
    const cxlkv_geometry *g = &pool->geometry;
    shape->layout = group_layout(&pool->layout, group);
    shape->row_bytes = shape_place(&shape->layout, shape);
    shape->rows = g->record_layers;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        if (has_shapes(&pool->layout)) {
            shape->offsets[kind] += g->layers_offset;
            shape->slot_bytes[kind] = g->layer_bytes;
            continue;
        }
        shape->strides[kind] = piece_stride(g, kind);
        shape->offsets[kind] = g->layers_offset + slab_offset(g, kind);
        shape->slot_bytes[kind] = pool->layout.kv_heads * shape->strides[kind];
    }
    uint32_t layers[CXLKV_GROUPS_MAX];
    layers_by_group(&pool->layout, layers);
    if (has_shapes(&pool->layout))
        shape->rows = (uint32_t)min_u64(g->layer_bytes / shape->row_bytes, layers[group]);
    else shape->row_bytes = g->layer_bytes;
    packing_make(shape);
}

static int shapes_make(cxlkv_pool *pool) {
    const cxlkv_layout *layout = &pool->layout;
    uint32_t count = has_shapes(layout) ? layout->group_count : 1;
    pool->layers.shapes = calloc(count, sizeof(*pool->layers.shapes));
    if (!pool->layers.shapes) return fail(ENOMEM, "no memory for the shapes of layers");
    for (uint32_t group = 0; group < count; group++) {
        shape_make(pool, group, &pool->layers.shapes[group]);
        uint32_t heads = pool->layers.shapes[group].layout.kv_heads;
        if (heads > pool->layers.kv_heads) pool->layers.kv_heads = heads;
    }
    for (uint32_t layer = 0; layer < layout->layers; layer++)
        pool->layers.shape_of[layer] =
            &pool->layers.shapes[count == 1 ? 0 : layout->group_of[layer]];
    return 0;
}

/* The part of state checkpoints has the shape that holds most bytes. */
static int state_part_make(cxlkv_pool *pool) {
    const uint32_t index = pool->geometry.part_count;
    uint32_t rows = pool->geometry.record_layers, widest = 0;
    uint64_t most = 0;
    for (uint32_t other = 0; other < index; other++) {
        const layer_shape *shape = shape_of(pool, layer_at(pool, other, 0));
        bool full = pool->layers.parts[other].layers == shape->rows;
        if (!full || shape->packing.payload_bytes <= most) continue;
        most = shape->packing.payload_bytes;
        widest = other;
    }
    const layer_shape *shape = shape_of(pool, layer_at(pool, widest, 0));
    pool->layers.parts[index] = (part){.layers = shape->rows};
    for (uint32_t row = 0; row < shape->rows; row++)
        pool->layers.layer_at[index * rows + row] = pool->layers.layer_at[widest * rows + row];
    if (has_states(&pool->layout) && state_pages(pool) > STATE_PAGES_MAX)
        return fail(CXLKV_E_GEOMETRY, "layout: a state checkpoint of %lu bytes takes more than %d "
                    "pages: pages of more tokens, or layers, are larger", pool->layout.state_bytes,
                    STATE_PAGES_MAX);
    return 0;
}

int parts_make(cxlkv_pool *pool) {
    const cxlkv_layout *layout = &pool->layout;
    uint32_t most = pool->geometry.record_layers, stored = stored_parts(pool), part_index = 0;
    int code = shapes_make(pool);
    if (code < 0) return code;
    pool->layers.parts = calloc(stored, sizeof(*pool->layers.parts));
    pool->layers.layer_at = malloc(stored * most * sizeof(*pool->layers.layer_at));
    if (!pool->layers.parts || !pool->layers.layer_at)
        return fail(ENOMEM, "no memory for the table of layers");
    memset(pool->layers.layer_at, 0xff, stored * most * sizeof(*pool->layers.layer_at));
    for (uint32_t group = 0; group < layout->group_count; group++) {
        uint32_t seen = 0;
        pool->layers.windowed |= layout->windows[group] != 0;
        for (uint32_t layer = 0; layer < layout->layers; layer++) {
            if (layout->group_of[layer] != group) continue;
            uint32_t rows = shape_of(pool, layer)->rows;
            if (seen > 0 && seen % rows == 0) part_index++;
            part *made = &pool->layers.parts[part_index];
            if (seen % rows == 0)
                *made = (part){.window = layout->windows[group], .first_layer = layer};
            made->last_layer = layer;
            made->layers++;
            pool->layers.part_of[layer] = (uint16_t)part_index;
            pool->layers.layer_at[part_index * most + seen % rows] = (uint16_t)layer;
            pool->layers.row_of[layer] = (uint16_t)(seen++ % rows);
        }
        part_index++;
    }
    return stored == pool->geometry.part_count ? 0 : state_part_make(pool);
}

void parts_free(cxlkv_pool *pool) {
    free(pool->layers.parts);
    free(pool->layers.layer_at);
    free(pool->layers.shapes);
}

static void extent_end(uint64_t bytes, cxlkv_geometry *g) {
    /* Poison is reported, and read-only mappings are made, by 2 MiB: an extent that loses at most
     * a sixteenth to it begins on such a border (decision 0001). */
    g->extent_bytes = align_up(bytes, bytes >= 16 * AREA_ALIGNMENT ? AREA_ALIGNMENT : 4096);
}

void extent_layout(const cxlkv_layout *layout, uint32_t slab_slots, cxlkv_geometry *g) {
    uint64_t heads = layout->kv_heads, slots = slab_slots, strides[PIECE_KINDS], pieces = 0;
    g->slab_slots = slab_slots;
    if (has_shapes(layout)) {
        shared_layout(layout, g);
        extent_end(g->layers_offset + slots * g->layer_bytes, g);
        return;
    }
    strides_of(layout, strides);
    g->digest_piece_bytes = strides[PIECE_DIGEST];
    g->sketch_piece_bytes = strides[PIECE_SKETCH];
    g->key_piece_bytes = strides[PIECE_KEYS];
    g->value_piece_bytes = strides[PIECE_VALUES];
    g->record_layers = record_layers_of(layout);
    g->part_count = part_count_of(layout, g->record_layers);
    g->checksum_bytes =
        align_up(g->record_layers * heads * PIECE_KINDS * sizeof(uint32_t), LINE_BYTES);
    g->checksums_offset = slots * sizeof(record_header);
    g->layers_offset = align_up(g->checksums_offset + slots * g->checksum_bytes, 4096);
    g->sketches_offset = align_up(slots * heads * g->digest_piece_bytes, 4096);
    g->keys_offset = align_up(g->sketches_offset + slots * heads * g->sketch_piece_bytes, 4096);
    g->values_offset = align_up(g->keys_offset + slots * heads * g->key_piece_bytes, 4096);
    g->layer_bytes = align_up(g->values_offset + slots * heads * g->value_piece_bytes, 4096);
    extent_end(g->layers_offset + g->record_layers * g->layer_bytes, g);
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) pieces += piece_stride(g, kind);
    g->record_bytes = sizeof(descriptor) + sizeof(record_header) + g->checksum_bytes +
                      g->record_layers * heads * pieces;
}

void place_extents(const cxlkv_sharing *sharing, uint64_t extents, cxlkv_geometry *g) {
    bool shared = sharing->kind != CXLKV_SHARING_HOST;
    g->extent_count = (uint32_t)extents;
    g->page_count = (uint32_t)(extents * g->slab_slots);
    g->hosts_offset = SUPERBLOCK_BYTES;
    hosts_area area = hosts_area_of(NULL, sharing, g);
    g->host_block_bytes = area.block_bytes;
    g->descriptors_offset = SUPERBLOCK_BYTES + area.host_count * area.block_bytes;
    g->descriptors_bytes = g->slab_slots * sizeof(descriptor);
    if (shared) g->descriptors_bytes = align_up(g->descriptors_bytes, 4096);
    g->extents_offset =
        align_up(g->descriptors_offset + extents * g->descriptors_bytes, AREA_ALIGNMENT);
    g->region_bytes = g->extents_offset + extents * g->extent_bytes;
}

hosts_area hosts_area_of(uint8_t *base, const cxlkv_sharing *sharing, const cxlkv_geometry *g) {
    hosts_area area = {.base = base ? base + g->hosts_offset : NULL,
                       .extent_count = g->extent_count, .page_count = g->page_count,
                       .log_records = sharing->log_records};
    if (sharing->kind == CXLKV_SHARING_HOST) return area;
    area.host_count = sharing->hosts;
    hosts_area_make(&area);
    return area;
}

static uint64_t extents_that_fit(uint64_t capacity_bytes, const cxlkv_sharing *sharing,
                                 const cxlkv_geometry *g) {
    cxlkv_geometry placed = *g;
    capacity_bytes = min_u64(capacity_bytes, INT64_MAX); /* no sum below wraps */
    uint64_t most = min_u64(capacity_bytes / g->extent_bytes, (1u << 30) / g->slab_slots);
    uint64_t least = 0;
    while (least < most) { /* the largest number whose region is not larger than the capacity */
        uint64_t middle = (least + most + 1) / 2;
        place_extents(sharing, middle, &placed);
        if (placed.region_bytes <= capacity_bytes) least = middle;
        else most = middle - 1;
    }
    return least;
}

int sharing_check(const cxlkv_sharing *sharing) {
    bool one = sharing->kind == CXLKV_SHARING_HOST;
    if (sharing->kind > CXLKV_SHARING_SOFTWARE || sharing->durable > CXLKV_DURABLE_HOST)
        return fail(CXLKV_E_GEOMETRY, "sharing code %u, durable code %u: unknown", sharing->kind,
                    sharing->durable);
    if (sharing->hosts == 0 || sharing->hosts > (one ? 1 : HOSTS_MAX))
        return fail(CXLKV_E_GEOMETRY, "a pool of %u hosts: outside 1 to %d", sharing->hosts,
                    one ? 1 : HOSTS_MAX);
    uint32_t records = sharing->log_records;
    if (!one && (records < 8 || records > 1u << 20 || (records & (records - 1))))
        return fail(CXLKV_E_GEOMETRY, "logs of %u records: a power of two, 8 to 1048576", records);
    return 0;
}

/* A log that holds a publish of every 64 KiB of the pool, within limits. */
static uint32_t log_records_for(uint64_t capacity_bytes) {
    uint32_t records = 64;
    while (records < 4096 && (uint64_t)records << 16 < capacity_bytes) records *= 2;
    return records;
}

int geometry_make(const cxlkv_layout *layout, cxlkv_sharing *sharing, uint64_t capacity_bytes,
                  cxlkv_geometry *geometry) {
    bool shared = sharing->kind != CXLKV_SHARING_HOST;
    int code = layout_check(layout);
    if (shared && sharing->log_records == 0)
        sharing->log_records = log_records_for(capacity_bytes);
    if (code == 0) code = sharing_check(sharing);
    if (code == 0 && sharing->kind == CXLKV_SHARING_SOFTWARE && !layout->checksum)
        code = fail(CXLKV_E_GEOMETRY, "sharing=software needs checksums: hosts verify by them what "
                    "others have written");
    if (code < 0) return code;
    memset(geometry, 0, sizeof(*geometry));
    /* Slabs as long as they go, while what does not fill an extent stays under 1/8 of the pool and
     * each host finds extents. They change hands whole: none is shorter than a run then. */
    uint64_t extents = 0, wanted = shared ? 4 * sharing->hosts : 8;
    for (uint32_t slots = 64; slots >= (shared ? RUN_SLOTS : 1); slots /= 2) {
        extent_layout(layout, slots, geometry);
        extents = extents_that_fit(capacity_bytes, sharing, geometry);
        if (extents >= wanted) break;
    }
    if (extents == 0)
        return fail(CXLKV_E_GEOMETRY,
                    "capacity of %lu bytes holds no page: one record is %lu bytes, and 2 MiB are "
                    "for alignment. Ask for %lu MiB or more",
                    capacity_bytes, geometry->record_bytes,
                    (4 * AREA_ALIGNMENT + 8 * geometry->extent_bytes) >> 20);
    place_extents(sharing, extents, geometry);
    return 0;
}
