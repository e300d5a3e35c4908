/* Goal: the format holds what it promises, and no damaged or hostile bytes pass for a pool. Method:
 * geometries of random layouts, a flipped bit in each byte of each checked line and piece, and
 * superblocks whose numbers lie while their CRC is right. */
#include "base/crc32c.h"
#include "check.h"
#include "format/records.h"
#include "format/superblock.h"

/* ---- geometry ---- */

static int geometry_for(const cxlkv_layout *layout, uint32_t hosts_count, uint64_t capacity,
                        cxlkv_geometry *g) {
    cxlkv_sharing sharing = {.kind = hosts_count > 1 ? CXLKV_SHARING_SOFTWARE : CXLKV_SHARING_HOST,
                             .hosts = hosts_count};
    return geometry_make(layout, &sharing, capacity, g);
}

static void check_geometry(const cxlkv_layout *layout, uint32_t hosts_count, uint64_t capacity) {
    cxlkv_geometry g;
    if (geometry_for(layout, hosts_count, capacity, &g) < 0) return;
    uint64_t slots = g.slab_slots, heads = layout->kv_heads;
    CHECK(slots >= 1 && slots <= 64 && (slots & (slots - 1)) == 0);
    CHECK(g.page_count == g.extent_count * g.slab_slots && g.page_count > 0);
    CHECK(g.region_bytes <= capacity);
    CHECK(g.region_bytes == g.extents_offset + g.extent_count * g.extent_bytes);
    CHECK(g.hosts_offset == SUPERBLOCK_BYTES && g.descriptors_bytes >= slots * sizeof(descriptor));
    uint64_t blocks = hosts_count > 1 ? hosts_count * g.host_block_bytes : 0;
    CHECK(g.descriptors_offset == g.hosts_offset + blocks);
    CHECK(g.descriptors_offset + g.extent_count * g.descriptors_bytes <= g.extents_offset);
    if (hosts_count > 1) CHECK(slots >= RUN_SLOTS && g.descriptors_bytes % 4096 == 0);
    CHECK(g.extents_offset % AREA_ALIGNMENT == 0);
    CHECK(slots * sizeof(record_header) <= g.checksums_offset);
    CHECK(g.checksums_offset + slots * g.checksum_bytes <= g.layers_offset);
    CHECK(slots * heads * g.digest_piece_bytes <= g.sketches_offset);
    CHECK(g.sketches_offset + slots * heads * g.sketch_piece_bytes <= g.keys_offset);
    CHECK(g.keys_offset + slots * heads * g.key_piece_bytes <= g.values_offset);
    CHECK(g.values_offset + slots * heads * g.value_piece_bytes <= g.layer_bytes);
    CHECK(g.layers_offset + layout->layers * g.layer_bytes <= g.extent_bytes);
    CHECK(g.digest_piece_bytes % LINE_BYTES == 0 && g.key_piece_bytes % LINE_BYTES == 0);
    CHECK(g.value_piece_bytes % LINE_BYTES == 0 && g.checksum_bytes % LINE_BYTES == 0);
    CHECK(g.key_piece_bytes >= piece_data_bytes(layout, PIECE_KEYS));
    CHECK(g.value_piece_bytes >= piece_data_bytes(layout, PIECE_VALUES));
    CHECK(g.digest_piece_bytes >= piece_data_bytes(layout, PIECE_DIGEST));
    CHECK(g.sketch_piece_bytes == (layout->sketch ? piece_data_bytes(layout, PIECE_SKETCH) : 0));
}

static void test_geometry(void) {
    uint64_t seed = 42;
    for (int i = 0; i < 20000; i++) {
        cxlkv_layout layout = test_layout();
        layout.sketch = random_below(&seed, 2);
        layout.layers = 1 + random_below(&seed, i % 2 ? 1024 : 80);
        layout.kv_heads = 1 + random_below(&seed, i % 2 ? 1024 : 16);
        layout.head_dim = 1 + random_below(&seed, i % 2 ? 4096 : 256);
        layout.value_head_dim = 1 + random_below(&seed, i % 3 ? 4096 : 256);
        layout.page_tokens = 1 + random_below(&seed, 1024);
        layout.dtype = random_below(&seed, 3);
        check_geometry(&layout, i % 4 ? 1 : 1 + random_below(&seed, HOSTS_MAX),
                       random_next(&seed) >> random_below(&seed, 50));
    }
    cxlkv_layout layout = test_layout();
    check_geometry(&layout, 1, UINT64_MAX);
    check_geometry(&layout, HOSTS_MAX, UINT64_MAX);
    cxlkv_geometry g;
    CHECK(geometry_for(&layout, 1, 0, &g) == -CXLKV_E_GEOMETRY);
    CHECK(geometry_for(&layout, 1, 2 << 20, &g) == -CXLKV_E_GEOMETRY);
    layout.kv_heads = 0;
    CHECK(geometry_for(&layout, 1, 1 << 30, &g) == -CXLKV_E_GEOMETRY);
    layout.kv_heads = UINT32_MAX;
    CHECK(geometry_for(&layout, 1, 1 << 30, &g) == -CXLKV_E_GEOMETRY);
    layout = test_layout();
    layout.dtype = 3;
    CHECK(geometry_for(&layout, 1, 1 << 30, &g) == -CXLKV_E_GEOMETRY);
    layout = test_layout();
    memset(layout.model_id, 'x', sizeof(layout.model_id));
    CHECK(geometry_for(&layout, 1, 1 << 30, &g) == -CXLKV_E_GEOMETRY);
}

/* ---- superblock ---- */

static int read_back(const superblock *block, uint64_t file_bytes) {
    uint8_t bytes[SUPERBLOCK_BYTES] = {0};
    pool_facts facts;
    memcpy(bytes, block, sizeof(*block));
    return superblock_read(SUPERBLOCK_USE, bytes, file_bytes, "block", &facts);
}

static int read_sealed(superblock block, uint64_t file_bytes) {
    block.crc = crc32c(0, &block, offsetof(superblock, crc));
    return read_back(&block, file_bytes);
}

static void test_superblock(cxlkv_pool *pool) {
    const superblock good = *(const superblock *)pool->region.base;
    uint64_t bytes = pool->geometry.region_bytes;
    CHECK(read_back(&good, bytes) == 0);
    CHECK(read_back(&good, bytes - 1) == -CXLKV_E_TRUNCATED);
    for (size_t i = 0; i < offsetof(superblock, crc) + 4; i++) {
        superblock flipped = good;
        ((uint8_t *)&flipped)[i] ^= (uint8_t)(1 << i % 8);
        int wanted = i < 8 ? -CXLKV_E_NOT_A_POOL : i < 12 ? -CXLKV_E_VERSION : -CXLKV_E_CORRUPT;
        CHECK(read_back(&flipped, bytes) == wanted);
    }
}

#define REFUSED(change)                                                     \
    do {                                                                    \
        superblock bad = good;                                              \
        change;                                                             \
        CHECK(read_sealed(bad, UINT64_MAX) == -CXLKV_E_GEOMETRY);           \
    } while (0)

static void test_hostile_numbers(cxlkv_pool *pool) {
    const superblock good = *(const superblock *)pool->region.base;
    CHECK(read_sealed(good, pool->geometry.region_bytes) == 0);
    REFUSED(bad.group_count = 0);
    REFUSED(bad.group_count = 2);
    REFUSED(bad.groups[0].kind = 1);
    REFUSED(bad.groups[0].window = UINT32_MAX);
    REFUSED(bad.groups[0].values = 2);
    REFUSED(bad.group_of[1] = 1);
    REFUSED(bad.group_of[TEST_LAYERS] = 1);
    REFUSED(bad.group_count = CXLKV_GROUPS_MAX + 1);
    REFUSED((bad.group_count = 2, bad.groups[1] = bad.groups[0], bad.group_of[1] = 1));
    REFUSED(bad.geometry.record_layers = 1);
    REFUSED(bad.geometry.part_count = 2);
    REFUSED(bad.groups[0].layers = 0);
    REFUSED(bad.groups[0].layers = UINT32_MAX);
    REFUSED(bad.groups[0].kv_heads = UINT32_MAX);
    REFUSED(bad.groups[0].dtype = 9);
    REFUSED(bad.line_bytes = 128);
    REFUSED(bad.sharing = 2);
    REFUSED(bad.page_tokens = 0);
    REFUSED(bad.page_tokens = 1 << 20);
    REFUSED(bad.checksum = 2);
    REFUSED(bad.geometry.slab_slots = 0);
    REFUSED(bad.geometry.slab_slots = 3);
    REFUSED(bad.geometry.slab_slots = 128);
    REFUSED(bad.geometry.extent_count = 0);
    REFUSED(bad.geometry.extent_count = UINT32_MAX);
    REFUSED(bad.geometry.page_count++);
    REFUSED(bad.geometry.region_bytes += 4096);
    REFUSED(bad.geometry.extents_offset = UINT64_MAX - 4095);
    REFUSED(bad.geometry.key_piece_bytes = 0);
    REFUSED(bad.geometry.layer_bytes -= 4096);
    REFUSED(memset(bad.model_id, 'x', sizeof(bad.model_id)));
}

/* An unknown feature is refused before anything is stored, by name, but where it is one that may be
 * unknown; and who only looks may lack those of writers. */
static void test_unknown_features(cxlkv_pool *pool) {
    const superblock good = *(const superblock *)pool->region.base;
    pool_facts facts;
    for (int word = 0; word < FEATURE_WORDS; word++)
        for (int bit = 0; bit < 64; bit++) {
            static const uint64_t known[FEATURE_WORDS] = FEATURES_KNOWN;
            superblock bad = good;
            uint8_t bytes[SUPERBLOCK_BYTES] = {0};
            char named[64];
            if (known[word] >> bit & 1) continue;
            bad.features[word] |= 1ull << bit;
            bad.crc = crc32c(0, &bad, offsetof(superblock, crc));
            memcpy(bytes, &bad, sizeof(bad));
            snprintf(named, sizeof(named), "has feature %d of the ", bit);
            for (int purpose = SUPERBLOCK_USE; purpose <= SUPERBLOCK_UPGRADE; purpose++) {
                bool lets = word == FEATURES_COMPATIBLE ||
                            (word == FEATURES_READERS && purpose == SUPERBLOCK_INSPECT);
                int code = superblock_read((enum superblock_purpose)purpose, bytes, UINT64_MAX,
                                           "block", &facts);
                CHECK(code == (lets ? 0 : -CXLKV_E_VERSION));
                if (code < 0) CHECK(strstr(cxlkv_error_text(), named) != NULL);
            }
        }
}

/* So many extents that the size of the region wraps round and seems to fit into the file. */
static void test_sizes_that_wrap(cxlkv_pool *pool) {
    superblock bad = *(const superblock *)pool->region.base;
    cxlkv_layout layout = {.layers = 1024, .kv_heads = 1024, .head_dim = 4096,
                           .value_head_dim = 4096, .page_tokens = 1024, .dtype = CXLKV_FLOAT32,
                           .checksum = 1, .shard = {0, 1, 0, 1}, .group_count = 1};
    CHECK(geometry_for(&layout, 1, 1ull << 62, &bad.geometry) == 0);
    bad.groups[0] = (group_row){.layers = 1024, .kv_heads = 1024, .head_dim = 4096,
                                .value_head_dim = 4096, .dtype = CXLKV_FLOAT32};
    bad.page_tokens = 1024;
    cxlkv_geometry *g = &bad.geometry;
    for (uint32_t extents = 1 << 8; extents <= (1u << 30) / g->slab_slots; extents *= 2) {
        g->extent_count = extents;
        g->page_count = extents * g->slab_slots;
        g->extents_offset = align_up(
            SUPERBLOCK_BYTES + (uint64_t)g->page_count * sizeof(descriptor), AREA_ALIGNMENT);
        g->region_bytes = g->extents_offset + extents * g->extent_bytes;
        bool wraps = __builtin_mul_overflow((uint64_t)extents, g->extent_bytes, &(uint64_t){0});
        if (wraps) CHECK(read_sealed(bad, UINT64_MAX) == -CXLKV_E_GEOMETRY);
    }
}

/* ---- descriptor, header, checksums, pieces ---- */

static void test_flipped_lines(cxlkv_pool *pool, uint32_t page) {
    descriptor copy, *line = descriptor_of(pool, page);
    uint64_t generation = pool->pages[page].generation;
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t offset = g->extents_offset + page / g->slab_slots * g->extent_bytes;
    uint8_t *header =
        pool->region.base + offset + page % g->slab_slots * sizeof(record_header);
    CHECK(descriptor_read(pool, page, &copy) == 0 && (copy.version & 255) == PAGE_SEALED);
    CHECK(record_check(pool, page, generation, TEST_PAGE_TOKENS) == 0);
    for (uint32_t bit = 0; bit < LINE_BYTES * 8; bit++) {
        ((uint8_t *)line)[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(descriptor_read(pool, page, &copy) == -CXLKV_E_CORRUPT);
        ((uint8_t *)line)[bit / 8] ^= (uint8_t)(1 << bit % 8);
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(record_check(pool, page, generation, TEST_PAGE_TOKENS) == -CXLKV_E_CORRUPT);
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    CHECK(record_check(pool, page, generation + 1, TEST_PAGE_TOKENS) == -CXLKV_E_STALE);
    CHECK(record_check(pool, page, generation, TEST_PAGE_TOKENS - 1) == -CXLKV_E_STALE);
    /* A whole line of another page is as wrong as a broken one. */
    descriptor kept = *line;
    *line = *descriptor_of(pool, page + 1);
    CHECK(descriptor_read(pool, page, &copy) == -CXLKV_E_CORRUPT);
    *line = kept;
    CHECK(descriptor_read(pool, page, &copy) == 0);
}

static void test_flipped_pieces(cxlkv_pool *pool, uint32_t page, cxlkv_sequence *sequence,
                                const uint64_t *marks) {
    uint64_t found = 0;
    for (uint32_t layer = 0; layer < TEST_LAYERS; layer++)
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
            for (uint32_t head = 0; head < TEST_HEADS; head++) {
                uint8_t *piece = pieces_of(pool, page, layer, kind) +
                                 head * piece_stride(&pool->geometry, kind);
                for (size_t i = 0; i < piece_data_bytes(&pool->layout, kind); i++) {
                    piece[i] ^= (uint8_t)(1 << i % 8);
                    verified_clear(pool, page);
                    CHECK(pieces_verify(pool, page, layer) == -CXLKV_E_CORRUPT);
                    if (kind >= PIECE_KEYS)
                        CHECK(test_verify(sequence, layer, marks, TEST_PAGE_TOKENS) ==
                              -CXLKV_E_CORRUPT);
                    piece[i] ^= (uint8_t)(1 << i % 8);
                    found++;
                }
                *checksum_of(pool, page, layer, head, kind) ^= 0x40;
                CHECK(pieces_verify(pool, page, layer) == -CXLKV_E_CORRUPT);
                *checksum_of(pool, page, layer, head, kind) ^= 0x40;
                CHECK(pieces_verify(pool, page, layer) == 0);
            }
    CHECK(found > 1000 && test_stats(pool).own.corrupt_pieces > found);
    CHECK(test_verify(sequence, 0, marks, TEST_PAGE_TOKENS) == 0);
}

int main(void) {
    test_geometry();
    cxlkv_pool *pool = test_pool(NULL, 64);
    test_superblock(pool);
    test_hostile_numbers(pool);
    test_sizes_that_wrap(pool);
    test_unknown_features(pool);
    uint64_t marks[TEST_PAGE_TOKENS];
    uint32_t page;
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TEST_PAGE_TOKENS);
    CHECK(cxlkv_sequence_pages(sequence, &page, 1) == 1);
    test_flipped_lines(pool, page);
    test_flipped_pieces(pool, page, sequence, marks);
    test_end(&pool, &sequence, NULL);
    return 0;
}
