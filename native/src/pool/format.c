/* The pool's format: superblock, descriptors, record headers, checksums; written and checked. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/crc32c.h"
#include "base/flush.h"
#include "pool/peers.h"

static const uint8_t MAGIC[8] = {'C', 'X', 'L', 'K', 'V', 'P', 'O', 'L'};

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

/* Limits keep every product below within 64 bits: 1024 * 1024 * 8192 * 1024 * 4 < 2^46. */
int layout_check(const cxlkv_layout *layout) {
    bool objects = stores_objects(layout);
    const struct { const char *name; uint32_t value, limit; } fields[] = {
        {"layers", layout->layers, 1024},
        {"kv_heads", layout->kv_heads, 1024},
        {"head_dim", layout->head_dim, 4096},
        {"value_head_dim", layout->value_head_dim, 4096},
        {objects ? "object_bytes" : "page_tokens", layout->page_tokens,
         objects ? OBJECT_BYTES_MAX : 1024},
        {"group_count", layout->group_count, CXLKV_GROUPS_MAX},
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
    if (layout->checksum > 1)
        return fail(CXLKV_E_GEOMETRY, "layout: checksum is %u, not 0 or 1", layout->checksum);
    if (memchr(layout->model_id, 0, sizeof(layout->model_id)) == NULL)
        return fail(CXLKV_E_GEOMETRY, "layout: model_id is longer than 255 bytes");
    if (layout->values > CXLKV_VALUES_OBJECT ||
        (values_are_keys(layout) && layout->value_head_dim > layout->head_dim))
        return fail(CXLKV_E_GEOMETRY,
                    "layout: values code %u with %u channels: a prefix of keys of %u has no more",
                    layout->values, layout->value_head_dim, layout->head_dim);
    return groups_check(layout);
}

static uint32_t part_count_of(const cxlkv_layout *layout, uint32_t record_layers) {
    uint32_t sizes[CXLKV_GROUPS_MAX] = {0}, parts = 0;
    for (uint32_t layer = 0; layer < layout->layers; layer++) sizes[layout->group_of[layer]]++;
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

int parts_make(cxlkv_pool *pool) {
    const cxlkv_layout *layout = &pool->layout;
    uint32_t rows = pool->geometry.record_layers, part_index = 0;
    pool->parts = calloc(pool->geometry.part_count, sizeof(*pool->parts));
    if (!pool->parts) return fail(ENOMEM, "no memory for the table of layers");
    for (uint32_t group = 0; group < layout->group_count; group++) {
        uint32_t seen = 0;
        pool->windowed |= layout->windows[group] != 0;
        for (uint32_t layer = 0; layer < layout->layers; layer++) {
            if (layout->group_of[layer] != group) continue;
            if (seen > 0 && seen % rows == 0) part_index++;
            part *made = &pool->parts[part_index];
            if (seen % rows == 0)
                *made = (part){.window = layout->windows[group], .first_layer = layer};
            made->last_layer = layer;
            made->layers++;
            pool->part_of[layer] = (uint16_t)part_index;
            pool->row_of[layer] = (uint16_t)(seen++ % rows);
        }
        part_index++;
    }
    return 0;
}

/* Offsets for extents of slab_slots records; everything but page_count and extent_count. */
static void extent_layout(const cxlkv_layout *layout, uint32_t slab_slots, cxlkv_geometry *g) {
    uint64_t heads = layout->kv_heads, slots = slab_slots;
    g->slab_slots = slab_slots;
    g->digest_piece_bytes = align_up(piece_data_bytes(layout, PIECE_DIGEST), LINE_BYTES);
    g->sketch_piece_bytes = layout->sketch ? piece_data_bytes(layout, PIECE_SKETCH) : 0;
    g->key_piece_bytes = align_up(piece_data_bytes(layout, PIECE_KEYS), LINE_BYTES);
    g->value_piece_bytes =
        values_are_keys(layout) ? 0 : align_up(piece_data_bytes(layout, PIECE_VALUES), LINE_BYTES);
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
    uint64_t bytes = g->layers_offset + g->record_layers * g->layer_bytes;
    /* Poison is reported, and read-only mappings are made, by 2 MiB: an extent that loses at most
     * a sixteenth to it begins on such a border (decision 0001). */
    g->extent_bytes = align_up(bytes, bytes >= 16 * AREA_ALIGNMENT ? AREA_ALIGNMENT : 4096);
    uint64_t pieces = 0;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) pieces += piece_stride(g, kind);
    g->record_bytes = sizeof(descriptor) + sizeof(record_header) + g->checksum_bytes +
                      g->record_layers * heads * pieces;
}

/* Everything that depends on how many extents there are. */
static void place_extents(const cxlkv_sharing *sharing, uint64_t extents, cxlkv_geometry *g) {
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

static int sharing_check(const cxlkv_sharing *sharing) {
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

void superblock_write(cxlkv_pool *pool) {
    superblock *block = (superblock *)pool->region.base;
    const cxlkv_layout *layout = &pool->layout;
    memset(pool->region.base, 0, SUPERBLOCK_BYTES);
    memcpy(block->magic, MAGIC, sizeof(MAGIC));
    block->version = FORMAT_VERSION;
    block->line_bytes = LINE_BYTES;
    memcpy(block->identity, pool->identity, sizeof(block->identity));
    block->page_tokens = layout->page_tokens;
    block->checksum = layout->checksum;
    block->sharing = pool->sharing.kind;
    block->durable = pool->sharing.durable;
    block->host_count = pool->sharing.hosts;
    block->log_records = pool->sharing.log_records;
    memcpy(block->shard, layout->shard, sizeof(block->shard));
    memcpy(block->model_id, layout->model_id, sizeof(block->model_id));
    block->geometry = pool->geometry;
    block->group_count = layout->group_count;
    block->sketch = layout->sketch;
    for (uint32_t group = 0; group < layout->group_count; group++)
        block->groups[group] =
            (group_row){.kv_heads = layout->kv_heads, .head_dim = layout->head_dim,
                        .value_head_dim = layout->value_head_dim, .dtype = layout->dtype,
                        .values = layout->values, .window = layout->windows[group]};
    for (uint32_t layer = 0; layer < layout->layers; layer++)
        block->groups[layout->group_of[layer]].layers++;
    memcpy(block->group_of, layout->group_of, sizeof(block->group_of));
    block->build = CXLKV_BUILD;
    if (pool->in_place)
        memcpy(pool->region.base + IN_PLACE_OFFSET, IN_PLACE_MARK, sizeof(IN_PLACE_MARK));
    block->crc = crc32c(0, block, offsetof(superblock, crc));
}

/* In memory, and where that is a file's page in its file, before anything that follows. */
static void upgrade_store(uint8_t *to, const void *from, size_t bytes, uint8_t *base) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, (const uint8_t *)from + at, sizeof(word));
        flush_store_word(to + at, word);
    }
    if (flush_supported()) flush_evict(FLUSH_NONE, to, bytes);
    flush_fence_all(FLUSH_NONE);
    msync(base, SUPERBLOCK_BYTES, MS_SYNC); /* of a device: refused, and not needed */
}

void superblock_upgrade(uint8_t *base) {
    superblock made;
    for (size_t at = 0; at < sizeof(made); at += LINE_BYTES)
        flush_load_line((uint8_t *)&made + at, base + at);
    made.version = FORMAT_VERSION;
    made.build = CXLKV_BUILD;
    memset(made.features, 0, sizeof(made.features));
    memset(made.reserved, 0, sizeof(made.reserved));
    made.crc = crc32c(0, &made, offsetof(superblock, crc));
    uint8_t *line = base + offsetof(superblock, crc_before);
    upgrade_store(line, &made.crc_before, LINE_BYTES, base);
    upgrade_store(base + offsetof(superblock, version), &made.version, sizeof(uint64_t), base);
}

static const uint64_t KNOWN[FEATURE_WORDS] = FEATURES_KNOWN;

uint32_t features_told(void) { return (uint32_t)KNOWN[FEATURES_INCOMPATIBLE]; }

/* Names the first bit that is not known, so that whoever asks for help can say what it was. */
static int features_check(const superblock *block, enum superblock_purpose purpose,
                          const char *path) {
    static const char *const names[FEATURE_WORDS] = {"compatible", "read-only compatible",
                                                     "incompatible"};
    for (int word = FEATURES_INCOMPATIBLE; word > FEATURES_COMPATIBLE; word--) {
        uint64_t unknown = block->features[word] & ~KNOWN[word];
        if (unknown == 0 || (word == FEATURES_READERS && purpose == SUPERBLOCK_LOOK)) continue;
        return fail(CXLKV_E_VERSION,
                    "%s has feature %d of the %s ones, which this build, %s, does not know: it was "
                    "made by a newer cxlkv, %u.%u.%u or later. Use that one%s",
                    path, __builtin_ctzll(unknown), names[word], cxlkv_version(),
                    block->build / 10000, block->build / 100 % 100, block->build % 100,
                    word == FEATURES_READERS ? "; this one may only look (cxlkv pool list)" : "");
    }
    return 0;
}

static int version_check(const superblock *block, enum superblock_purpose purpose,
                         const char *path) {
    uint32_t version = block->version;
    if (version == FORMAT_VERSION || (version == FORMAT_BEFORE && purpose == SUPERBLOCK_UPGRADE))
        return 0;
    if (version == FORMAT_BEFORE)
        return fail(CXLKV_E_VERSION,
                    "%s has format version %u, this build reads %d. `cxlkv pool upgrade %s` makes "
                    "it that, and keeps all that it holds", path, version, FORMAT_VERSION, path);
    return fail(CXLKV_E_VERSION, "%s has format version %u, this build reads %d: it was made by "
                "%s cxlkv. Open it with the release that made it, or create it anew",
                path, version, FORMAT_VERSION, version > FORMAT_VERSION ? "a newer" : "an older");
}

static bool crc_is_right(const superblock *block) {
    if (block->version == FORMAT_BEFORE)
        return block->crc_before == crc32c(0, block, offsetof(superblock, crc_before));
    return block->crc == crc32c(0, block, offsetof(superblock, crc));
}

/* The layout that the group table says; false when its groups differ in more than the window. */
static bool groups_read(const superblock *block, cxlkv_layout *layout) {
    const group_row *first = &block->groups[0];
    memset(layout, 0, sizeof(*layout));
    *layout = (cxlkv_layout){.kv_heads = first->kv_heads, .head_dim = first->head_dim,
                             .value_head_dim = first->value_head_dim, .dtype = first->dtype,
                             .values = first->values, .page_tokens = block->page_tokens,
                             .checksum = block->checksum, .sketch = block->sketch,
                             .group_count = block->group_count};
    memcpy(layout->shard, block->shard, sizeof(layout->shard));
    memcpy(layout->model_id, block->model_id, sizeof(layout->model_id));
    memcpy(layout->group_of, block->group_of, sizeof(layout->group_of));
    if (block->group_count > CXLKV_GROUPS_MAX) return false;
    for (uint32_t group = 0; group < block->group_count; group++) {
        group_row row = block->groups[group];
        layout->windows[group] = row.window;
        if (row.layers > CXLKV_LAYERS_MAX) return false;
        layout->layers += row.layers;
        row.window = first->window;
        row.layers = first->layers;
        if (row.kind != 0 || memcmp(&row, first, sizeof(row)) != 0) return false;
    }
    return true;
}

int superblock_read(enum superblock_purpose purpose, const uint8_t *bytes, uint64_t file_bytes,
                    const char *path, cxlkv_layout *layout, cxlkv_sharing *sharing,
                    cxlkv_geometry *geometry, uint8_t *identity) {
    static const uint8_t nothing[SUPERBLOCK_BYTES];
    superblock block;
    memcpy(&block, bytes, sizeof(block));
    if (memcmp(bytes, nothing, sizeof(nothing)) == 0)
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool: its first %d bytes are zeros, as "
                    "before one is made, when its making was cut short, and after its removal",
                    path, SUPERBLOCK_BYTES);
    if (stripes_is_label(bytes))
        return fail(CXLKV_E_NOT_A_POOL, "%s is a part of a striped pool: open all of its parts "
                    "together, dax:A+B", path);
    if (memcmp(block.magic, MAGIC, sizeof(MAGIC)) != 0)
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool: its magic is missing", path);
    int code = version_check(&block, purpose, path);
    if (code < 0) return code;
    if (!crc_is_right(&block))
        return fail(CXLKV_E_CORRUPT,
                    "%s: the superblock's CRC is wrong: its bytes were changed. Nothing in the "
                    "pool can be trusted: create it anew",
                    path);
    if (block.version == FORMAT_VERSION) code = features_check(&block, purpose, path);
    if (code < 0) return code;
    *sharing = (cxlkv_sharing){.kind = block.sharing, .durable = block.durable,
                               .hosts = block.host_count, .log_records = block.log_records};
    if (block.line_bytes != LINE_BYTES || !groups_read(&block, layout))
        return fail(CXLKV_E_GEOMETRY, "%s uses a feature that this build does not have", path);
    code = layout_check(layout);
    if (code == 0) code = sharing_check(sharing);
    if (code < 0) return code;
    /* The CRC may be right and the numbers hostile: derive them again and compare. */
    cxlkv_geometry derived;
    memset(&derived, 0, sizeof(derived));
    uint32_t slots = block.geometry.slab_slots;
    if (slots == 0 || slots > 64 || (slots & (slots - 1)) ||
        (sharing->kind != CXLKV_SHARING_HOST && slots < RUN_SLOTS))
        return fail(CXLKV_E_GEOMETRY, "%s: %u slots in a slab", path, slots);
    extent_layout(layout, slots, &derived);
    uint64_t extents = block.geometry.extent_count, pages = extents * slots;
    if (extents == 0 || pages > 1u << 30 || extents > (INT64_MAX >> 1) / derived.extent_bytes)
        return fail(CXLKV_E_GEOMETRY, "%s: %lu extents of %lu bytes are more than a file can hold",
                    path, extents, derived.extent_bytes);
    place_extents(sharing, extents, &derived);
    if (memcmp(&derived, &block.geometry, sizeof(derived)) != 0)
        return fail(CXLKV_E_GEOMETRY, "%s: its offsets do not follow from its layout", path);
    if (file_bytes < derived.region_bytes)
        return fail(CXLKV_E_TRUNCATED,
                    "%s is truncated: %lu bytes of %lu. The pages beyond are lost: create it anew",
                    path, file_bytes, derived.region_bytes);
    *geometry = derived;
    memcpy(identity, block.identity, sizeof(block.identity));
    return 0;
}

static host_line *host_line_of(const cxlkv_pool *pool) {
    return (host_line *)(pool->region.base + SUPERBLOCK_BYTES - LINE_BYTES);
}

int host_line_write(cxlkv_pool *pool, uint64_t nonce) {
    host_line *line = host_line_of(pool);
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        line->nonce = nonce;
        line->build = CXLKV_BUILD;
        line->features = features_told();
        line->crc = crc32c(0, line, offsetof(host_line, crc));
    } GUARD_END(fault, code = poison_error_locked(pool, &fault))
    return code;
}

uint64_t host_line_read(const cxlkv_pool *pool) {
    guard fault;
    volatile uint64_t nonce = 0;
    GUARD_BEGIN(fault) {
        nonce = host_line_nonce(pool->region.base);
    } GUARD_END(fault, (void)fault)
    return nonce;
}

uint64_t host_line_nonce(const uint8_t *superblock_page) {
    host_line line;
    memcpy(&line, superblock_page + SUPERBLOCK_BYTES - LINE_BYTES, sizeof(line));
    return line.crc == crc32c(0, &line, offsetof(host_line, crc)) ? line.nonce : 0;
}

descriptor *descriptor_of(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return (descriptor *)(pool->region.base + g->descriptors_offset +
                          page / g->slab_slots * g->descriptors_bytes) + page % g->slab_slots;
}

static record_header *header_of(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return (record_header *)(pool->region.base + g->extents_offset +
                             page / g->slab_slots * g->extent_bytes) +
           page % g->slab_slots;
}

static uint8_t *checksum_table(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    return pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes +
           g->checksums_offset + page % g->slab_slots * g->checksum_bytes;
}

void record_header_wipe(const cxlkv_pool *pool, uint32_t page) {
    const cxlkv_geometry *g = &pool->geometry;
    memset(header_of(pool, page), 0, sizeof(record_header));
    memset(checksum_table(pool, page), 0, g->checksum_bytes);
    if (pool->mode == VISIBILITY_COHERENT) return;
    flush_write_back(FLUSH_PUBLISH_HEADER, header_of(pool, page), sizeof(record_header));
    flush_write_back(FLUSH_PUBLISH_HEADER, checksum_table(pool, page), g->checksum_bytes);
}

uint32_t *checksum_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head,
                      uint32_t kind) {
    uint64_t row = pool->row_of[layer];
    uint64_t entry = (row * pool->layout.kv_heads + kv_head) * PIECE_KINDS + kind;
    return (uint32_t *)checksum_table(pool, page) + entry;
}

/* Lines are read while they may be written: word by word, and the CRC tells a torn copy. It covers
 * the version: a reader between the two stores sees a wrong CRC, not a torn line. */
static descriptor descriptor_make(const cxlkv_pool *pool, uint32_t page, uint64_t generation,
                                  uint32_t state, uint32_t tokens, const page_key *key) {
    descriptor line = {.version = generation << 8 | state, .tokens = tokens, .page = page};
    if (key) {
        memcpy(line.hash, key->hash, sizeof(line.hash));
        line.ordinal = key->ordinal;
        if (pool->shared) line.publication = ++pool->host->publications & 0xffffff;
    }
    if (state != PAGE_FREE) {
        line.table_crc = header_of(pool, page)->table_crc;
        line.part = header_of(pool, page)->part;
    }
    line.crc = crc32c(0, &line, offsetof(descriptor, crc));
    return line;
}

void descriptor_write(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t state,
                      uint32_t tokens, const page_key *key) {
    descriptor line = descriptor_make(pool, page, generation, state, tokens, key);
    publish_item item = {.descriptor_line = descriptor_of(pool, page), .descriptor = &line};
    visibility_free(&item, 1, pool->mode);
}

void descriptor_restore(cxlkv_pool *pool, uint32_t page, const descriptor *line) {
    publish_item item = {.descriptor_line = descriptor_of(pool, page), .descriptor = line};
    visibility_free(&item, 1, pool->mode);
}

/* A holder writes its page's descriptor without the host lock, and may be preempted half way. What
 * another host is writing just now is told by its log; else nobody writes. */
static int attempts_for(const cxlkv_pool *pool, uint32_t page) {
    if (!page_is_ours(pool, page)) return 8;
    return pool->pages[page].holders ? 200 : 1;
}

int descriptor_read(const cxlkv_pool *pool, uint32_t page, descriptor *copy) {
    descriptor *at = descriptor_of(pool, page);
    for (int attempt = 0, last = attempts_for(pool, page); attempt < last; attempt++) {
        uint64_t version =
            atomic_load_explicit((_Atomic uint64_t *)&at->version, memory_order_acquire);
        flush_load_line(copy, at);
        copy->version = version;
        if (copy->crc == crc32c(0, copy, offsetof(descriptor, crc)) && copy->page == page &&
            copy->tokens <= pool->layout.page_tokens && (version & 255) <= PAGE_PUBLISHED &&
            copy->part < pool->geometry.part_count)
            return 0;
        if (attempt > 50) sched_yield();
    }
    return fail(CXLKV_E_CORRUPT,
                "the descriptor of page %u is damaged: its CRC is wrong. The page is set aside; "
                "recompute what it held",
                page);
}

int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy) {
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        code = descriptor_read(pool, page, copy);
    } GUARD_END(fault, code = poison_error_locked(pool, &fault))
    return code;
}

uint32_t record_part(const cxlkv_pool *pool, uint32_t page) {
    return min_u32(header_of(pool, page)->part, pool->geometry.part_count - 1);
}

uint32_t record_tokens(const cxlkv_pool *pool, uint32_t page) {
    return min_u32(header_of(pool, page)->tokens, pool->layout.page_tokens);
}

void record_expect(const cxlkv_pool *pool, uint32_t page) {
    __builtin_prefetch(descriptor_of(pool, page));
    __builtin_prefetch(header_of(pool, page));
}

void record_seal(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                 const page_key *key) {
    record_header header = {.magic = RECORD_MAGIC, .page = page, .tokens = tokens, .part = part,
                            .generation = pool->pages[page].generation};
    if (key) {
        memcpy(header.hash, key->hash, sizeof(header.hash));
        header.ordinal = key->ordinal;
    }
    if (pool->layout.checksum)
        header.table_crc = crc32c(0, checksum_table(pool, page), pool->geometry.checksum_bytes);
    header.crc = crc32c(0, &header, offsetof(record_header, crc));
    descriptor line = descriptor_make(pool, page, header.generation,
                                      key ? PAGE_PUBLISHED : PAGE_SEALED, tokens, key);
    line.table_crc = header.table_crc;
    line.part = part;
    line.crc = crc32c(0, &line, offsetof(descriptor, crc));
    if (pool->mode != VISIBILITY_COHERENT) /* V1; the pieces went past the caches */
        flush_write_back(FLUSH_PUBLISH_HEADER, checksum_table(pool, page),
                         pool->geometry.checksum_bytes);
    publish_item item = {.header_line = header_of(pool, page), .header = &header,
                         .descriptor_line = descriptor_of(pool, page), .descriptor = &line};
    visibility_publish(&item, 1, pool->mode);
}

/* publish() rewrites a header to add its hash: a reader in between tries again. */
bool record_header_read(const cxlkv_pool *pool, uint32_t page, record_header *header) {
    for (int attempt = 0; attempt < 200; attempt++) {
        flush_load_line(header, header_of(pool, page));
        if (header->crc == crc32c(0, header, offsetof(record_header, crc)) &&
            header->magic == RECORD_MAGIC)
            return true;
        if (attempt > 50) sched_yield();
    }
    return false;
}

bool record_table_is_whole(const cxlkv_pool *pool, uint32_t page, const record_header *header) {
    return header->table_crc ==
           crc32c(0, checksum_table(pool, page), pool->geometry.checksum_bytes);
}

int record_check(const cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens) {
    record_header header;
    if (!record_header_read(pool, page, &header))
        return fail(CXLKV_E_CORRUPT,
                    "the record header of page %u is damaged: its CRC is wrong. Release the "
                    "sequence and recompute it; `cxlkv pool check --deep` lists what else is hurt",
                    page);
    if (header.page != page || header.generation != generation || header.tokens != tokens)
        return fail(CXLKV_E_STALE,
                    "page %u holds generation %lu with %u tokens, wanted %lu with %u: it was "
                    "reused. Match or recompute the sequence",
                    page, header.generation, header.tokens, generation, tokens);
    return 0;
}

/* Whoever dies while publishing leaves a torn header; the next owner of the lock mends it. */
int record_check_unlocked(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens) {
    int code = record_check(pool, page, generation, tokens);
    if (code != -CXLKV_E_CORRUPT || host_lock(pool) < 0) return code;
    host_unlock(pool);
    return record_check(pool, page, generation, tokens);
}

static atomic_ulong *verified_word(const cxlkv_pool *pool, uint32_t page, uint32_t layer,
                                   uint64_t *bit) {
    uint64_t index = (uint64_t)page * pool->geometry.record_layers + pool->row_of[layer];
    *bit = 1ull << index % 64;
    return &pool->verified[index / 64];
}

void verified_set(cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    uint64_t bit;
    atomic_ulong *word = verified_word(pool, page, layer, &bit);
    atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
}

void verified_clear(cxlkv_pool *pool, uint32_t page) {
    uint64_t rows = pool->geometry.record_layers, first = page * rows, end = first + rows;
    while (first < end) {
        uint64_t stop = min_u64(end, (first / 64 + 1) * 64), count = stop - first;
        uint64_t ones = count == 64 ? UINT64_MAX : (1ull << count) - 1;
        atomic_fetch_and_explicit(&pool->verified[first / 64], ~(ones << first % 64),
                                  memory_order_relaxed);
        first = stop;
    }
}

size_t piece_used_bytes(const cxlkv_pool *pool, uint32_t page, uint32_t kind) {
    size_t bytes = piece_data_bytes(&pool->layout, kind);
    return stores_objects(&pool->layout) ? min_u64(bytes, record_tokens(pool, page)) : bytes;
}

int piece_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head, uint32_t kind,
                 const void *bytes) {
    static const char *const names[PIECE_KINDS] = {"digest", "sketch", "K", "V"};
    uint32_t crc = crc32c(0, bytes, piece_used_bytes(pool, page, kind));
    if (crc == *checksum_of(pool, page, layer, kv_head, kind)) return 0;
    count_add(pool, COUNT_CORRUPT_PIECES, 1);
    return fail(CXLKV_E_CORRUPT,
                "page %u, layer %u, kv head %u: the CRC of its %s is wrong, the bytes were "
                "changed. Release the sequence and recompute it; `cxlkv pool check --deep` lists "
                "what else is hurt",
                page, layer, kv_head, names[kind]);
}

int pieces_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    const cxlkv_geometry *g = &pool->geometry;
    if (!pool->layout.checksum) return 0;
    uint64_t bit;
    atomic_ulong *word = verified_word(pool, page, layer, &bit);
    if (atomic_load_explicit(word, memory_order_relaxed) & bit) return 0;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        uint64_t stride = piece_stride(g, kind);
        if (stride == 0) continue;
        const uint8_t *pieces = pieces_of(pool, page, layer, kind);
        for (uint32_t head = 0; head < pool->layout.kv_heads; head++) {
            int code = piece_verify(pool, page, layer, head, kind, pieces + head * stride);
            if (code < 0) return code;
        }
    }
    verified_set(pool, page, layer);
    return 0;
}

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
    for (uint32_t row = 0; row < g->record_layers; row++) {
        uint64_t at = g->layers_offset + row * g->layer_bytes;
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
            mask |= slab_mask(g, at + slab_offset(g, kind), heads * piece_stride(g, kind), start,
                              stop);
    }
    return mask;
}

uint64_t retire_range(cxlkv_pool *pool, uintptr_t address, size_t bytes) {
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
