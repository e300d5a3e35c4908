/* A superblock of any bytes is refused, or says what fits into its file. What an upgrade accepts it
 * makes a superblock that is read. The CRC is set right first, as a fuzzer cannot guess it. */
#include "base/crc32c.h"
#include "format/geometry.h"
#include "format/superblock.h"
#include "fuzz.h"

static uint8_t page[SUPERBLOCK_BYTES];

static void seal(void) {
    superblock *block = (superblock *)page;
    block->crc_before = crc32c(0, block, offsetof(superblock, crc_before));
    block->crc = crc32c(0, block, offsetof(superblock, crc));
}

static void walk(const pool_facts *facts, uint64_t file_bytes) {
    const cxlkv_geometry *g = &facts->geometry;
    demand(layout_check(&facts->layout) == 0, "layout");
    demand(sharing_check(&facts->sharing) == 0, "sharing");
    demand(g->region_bytes <= file_bytes, "size");
    demand(g->extent_count && g->slab_slots && g->page_count, "count");
    demand((uint64_t)g->extent_count * g->slab_slots >= g->page_count, "page count");
    demand(g->extents_offset <= g->region_bytes &&
           g->extent_count <= (g->region_bytes - g->extents_offset) / g->extent_bytes, "extents");
    demand(g->hosts_offset <= g->region_bytes && g->descriptors_offset <= g->extents_offset,
           "offset");
    demand(memchr(facts->layout.model_id, 0, sizeof(facts->layout.model_id)), "name");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length) {
    static const uint64_t sizes[] = {4 << 20, 1ull << 46};
    accepted = 0;
    for (int sealed = 0; sealed < 2; sealed++)
        for (int i = 0; i < 2; i++) {
            pool_facts facts;
            memset(page, 0, sizeof(page));
            memcpy(page, bytes, length < sizeof(page) ? length : sizeof(page));
            if (sealed) seal();
            for (int purpose = SUPERBLOCK_USE; purpose <= SUPERBLOCK_UPGRADE; purpose++) {
                if (superblock_read(purpose, page, sizes[i], "fuzz", &facts) < 0) continue;
                walk(&facts, sizes[i]);
                accepted++;
            }
            if (superblock_read(SUPERBLOCK_UPGRADE, page, sizes[i], "fuzz", &facts) < 0 ||
                ((const superblock *)page)->version == FORMAT_VERSION)
                continue;
            superblock_upgrade(page);
            demand(superblock_read(SUPERBLOCK_USE, page, sizes[i], "fuzz", &facts) == 0, "upgrade");
        }
    return 0;
}
