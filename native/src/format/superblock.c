/* The superblock: written, checked, upgraded; and the line that names the host state of a pool. */
#include <sys/mman.h>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/flush.h"
#include "base/guard.h"
#include "coherence/lost_lines.h"
#include "format/geometry.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/superblock.h"
#include "region/stripes.h"

static const uint8_t MAGIC[8] = {'C', 'X', 'L', 'K', 'V', 'P', 'O', 'L'};

static bool has_rotary(const cxlkv_layout *layout) {
    uint32_t pairs = 0;
    for (uint32_t group = 0; group < CXLKV_GROUPS_MAX; group++)
        pairs |= layout->rotary.pairs[group];
    return pairs != 0;
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
    for (uint32_t group = 0; group < layout->group_count; group++) {
        const cxlkv_layout own = group_layout(layout, group);
        block->groups[group] =
            (group_row){.kv_heads = own.kv_heads, .head_dim = own.head_dim,
                        .value_head_dim = own.value_head_dim, .dtype = own.dtype,
                        .values = own.values, .window = layout->windows[group]};
    }
    for (uint32_t layer = 0; layer < layout->layers; layer++)
        block->groups[layout->group_of[layer]].layers++;
    memcpy(block->group_of, layout->group_of, sizeof(block->group_of));
    block->build = CXLKV_BUILD;
    if (is_encoded(layout)) block->features[FEATURES_INCOMPATIBLE] |= FEATURE_ENCODINGS;
    block->k_encoding = layout->k_encoding;
    block->v_encoding = layout->v_encoding;
    if (has_states(layout)) block->features[FEATURES_INCOMPATIBLE] |= FEATURE_STATES;
    block->state_bytes = layout->state_bytes;
    block->state_digest = layout->state_digest;
    if (has_object_pages(layout)) block->features[FEATURES_INCOMPATIBLE] |= FEATURE_OBJECT_PAGES;
    block->object_bytes = (uint32_t)layout->object_bytes;
    if (has_shapes(layout)) block->features[FEATURES_INCOMPATIBLE] |= FEATURE_SHAPES;
    if (has_rotary(layout)) {
        rotary_table *table = (rotary_table *)(pool->region.base + ROTARY_OFFSET);
        block->features[FEATURES_COMPATIBLE] |= FEATURE_ROTARY;
        table->rotary = layout->rotary;
        table->crc = crc32c(0, table, offsetof(rotary_table, crc));
    }
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
    made.k_encoding = made.v_encoding = made.state_digest = made.object_bytes = 0;
    made.state_bytes = 0;
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
        if (unknown == 0 || (word == FEATURES_READERS && purpose == SUPERBLOCK_INSPECT)) continue;
        return fail(CXLKV_E_VERSION,
                    "%s has feature %d of the %s ones, which this build, %s, does not know: it was "
                    "made by a newer cxlkv, %u.%u.%u or later. Use that one%s",
                    path, __builtin_ctzll(unknown), names[word], cxlkv_version(),
                    block->build / 10000, block->build / 100 % 100, block->build % 100,
                    word == FEATURES_READERS ? "; this one may only look (cxlkv pool list)" : "");
    }
    return 0;
}

/* What a feature brings is there with it only. */
static int fields_check(const superblock *block, const char *path) {
    uint64_t features = block->features[FEATURES_INCOMPATIBLE];
    if ((block->k_encoding || block->v_encoding) && !(features & FEATURE_ENCODINGS))
        return fail(CXLKV_E_GEOMETRY, "%s has an encoding without the feature that says so", path);
    if ((block->state_bytes != 0) != !!(features & FEATURE_STATES))
        return fail(CXLKV_E_GEOMETRY, "%s has states without the feature that says so, or the "
                    "feature without states", path);
    if ((block->object_bytes != 0) != !!(features & FEATURE_OBJECT_PAGES))
        return fail(CXLKV_E_GEOMETRY, "%s has objects of several pages without the feature that "
                    "says so, or the feature without them", path);
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

static bool row_read(const group_row *row, uint32_t group, cxlkv_layout *layout) {
    layout->windows[group] = row->window;
    layout->shapes[group] = (cxlkv_shape){.kv_heads = row->kv_heads, .head_dim = row->head_dim,
                                          .value_head_dim = row->value_head_dim,
                                          .dtype = row->dtype, .values = row->values};
    layout->layers += row->layers <= CXLKV_LAYERS_MAX ? row->layers : 0;
    return row->kind == 0 && row->layers <= CXLKV_LAYERS_MAX;
}

/* The layout that the group table says; false when its groups differ in more than the window, and
 * no feature says that they may. */
static bool groups_read(const superblock *block, cxlkv_layout *layout) {
    memset(layout, 0, sizeof(*layout));
    *layout = (cxlkv_layout){.page_tokens = block->page_tokens,
                             .checksum = block->checksum, .sketch = block->sketch,
                             .group_count = block->group_count};
    if (block->version == FORMAT_VERSION &&
        block->features[FEATURES_INCOMPATIBLE] & FEATURE_ENCODINGS) {
        layout->k_encoding = block->k_encoding;
        layout->v_encoding = block->v_encoding;
    }
    if (block->version == FORMAT_VERSION &&
        block->features[FEATURES_INCOMPATIBLE] & FEATURE_STATES) {
        layout->state_bytes = block->state_bytes;
        layout->state_digest = block->state_digest;
    }
    if (block->version == FORMAT_VERSION &&
        block->features[FEATURES_INCOMPATIBLE] & FEATURE_OBJECT_PAGES)
        layout->object_bytes = block->object_bytes;
    memcpy(layout->shard, block->shard, sizeof(layout->shard));
    memcpy(layout->model_id, block->model_id, sizeof(layout->model_id));
    memcpy(layout->group_of, block->group_of, sizeof(layout->group_of));
    if (block->group_count > CXLKV_GROUPS_MAX) return false;
    for (uint32_t group = 0; group < block->group_count; group++)
        if (!row_read(&block->groups[group], group, layout)) return false;
    if (block->version == FORMAT_VERSION &&
        block->features[FEATURES_INCOMPATIBLE] & FEATURE_SHAPES)
        return true; /* layout_check() looks whether they differ */
    for (uint32_t group = 1; group < block->group_count; group++)
        if (memcmp(&layout->shapes[group], &layout->shapes[0], sizeof(cxlkv_shape)) != 0)
            return false;
    cxlkv_layout one = group_layout(layout, 0);
    memset(one.shapes, 0, sizeof(one.shapes));
    *layout = one;
    return true;
}

/* False where its CRC is wrong; layout_check() looks at what it says. */
static bool rotary_read(const superblock *block, const uint8_t *page, cxlkv_layout *layout) {
    rotary_table table;
    if (!(block->features[FEATURES_COMPATIBLE] & FEATURE_ROTARY)) return true;
    memcpy(&table, page + ROTARY_OFFSET, sizeof(table));
    layout->rotary = table.rotary;
    return table.crc == crc32c(0, &table, offsetof(rotary_table, crc));
}

int superblock_read(enum superblock_purpose purpose, const uint8_t *bytes, uint64_t file_bytes,
                    const char *path, pool_facts *facts) {
    cxlkv_layout *layout = &facts->layout;
    cxlkv_sharing *sharing = &facts->sharing;
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
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool: it does not begin as a pool does",
                    path);
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
    if (block.version == FORMAT_VERSION) code = fields_check(&block, path);
    if (code < 0) return code;
    if (block.line_bytes != LINE_BYTES || !groups_read(&block, layout))
        return fail(CXLKV_E_GEOMETRY, "%s uses a feature that this build does not have", path);
    if (block.version == FORMAT_VERSION && !rotary_read(&block, bytes, layout))
        return fail(CXLKV_E_CORRUPT, "%s: the CRC of its rotary embedding is wrong: its bytes were "
                    "changed. Create the pool anew", path);
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
    facts->geometry = derived;
    memcpy(facts->identity, block.identity, sizeof(block.identity));
    return 0;
}

void pool_learn(cxlkv_pool *pool, const pool_facts *facts) {
    pool->layout = facts->layout;
    pool->sharing = facts->sharing;
    pool->geometry = facts->geometry;
    memcpy(pool->identity, facts->identity, sizeof(pool->identity));
}

int host_line_write(cxlkv_pool *pool, uint64_t nonce) {
    host_line *line = (host_line *)(pool->region.base + SUPERBLOCK_BYTES - LINE_BYTES);
    GUARD_BEGIN(fault) {
        line->nonce = nonce;
        line->build = CXLKV_BUILD;
        line->features = features_told();
        line->crc = crc32c(0, line, offsetof(host_line, crc));
    } GUARD_END(fault, return poison_error_locked(pool, &fault))
    return 0;
}

uint64_t host_line_read(const cxlkv_pool *pool) {
    return GUARDED(host_line_nonce(pool->region.base), 0);
}

uint64_t host_line_nonce(const uint8_t *superblock_page) {
    host_line line;
    memcpy(&line, superblock_page + SUPERBLOCK_BYTES - LINE_BYTES, sizeof(line));
    return line.crc == crc32c(0, &line, offsetof(host_line, crc)) ? line.nonce : 0;
}

int pool_format(cxlkv_pool *pool) {
    for (size_t at = 0; at < 16; at += 8) {
        uint64_t half = random_u64();
        memcpy(pool->identity + at, &half, 8);
    }
    GUARD_BEGIN(fault) {
        memset(pool->region.base + pool->geometry.hosts_offset, 0,
               pool->geometry.descriptors_offset - pool->geometry.hosts_offset);
        for (uint32_t page = 0; page < pool->geometry.page_count; page++)
            descriptor_write(pool, page, 1, PAGE_FREE, 0, NULL);
        if (pool->shared) hosts_hand_over(pool->region.base, pool->geometry.extents_offset, true);
        store_fence();
        superblock_write(pool); /* last: on a device, until here there is no pool */
        if (pool->shared) hosts_hand_over(pool->region.base, SUPERBLOCK_BYTES, true);
    } GUARD_END(fault, return fail(CXLKV_E_POISON, "bus error while the pool was formatted: its "
                                   "file system ran out of memory"))
    return 0;
}
