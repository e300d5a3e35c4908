/* The mapping of a shared pool: what is not this host's can only be read. */
#include <sys/mman.h>

#include "coherence/lost_lines.h"
#include "format/mapping.h"

/* What lies from `end` of the last one on, up to `first`, goes with it. */
typedef struct stretch {
    uint64_t first, end;
    bool writable;
} stretch;

/* In whole units, as nothing else can be protected (a huge page, 2 MiB of a device): one that has
 * anything of ours stays writable. Never first one and then the other: other threads write. */
static void protect(const cxlkv_pool *pool, const stretch *s) {
    uint64_t unit_bytes = pool->region.unit_bytes, first = s->first, end = s->end;
    if (s->writable) {
        first -= first % unit_bytes;
        end = min_u64(align_up(end, unit_bytes), pool->region.mapped_bytes);
    } else {
        first = align_up(first, unit_bytes);
        end -= end % unit_bytes;
    }
    if (first < end)
        (void)mprotect(pool->region.base + first, end - first, /* refused: it stays as it was */
                       s->writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

static void add(const cxlkv_pool *pool, stretch *s, uint64_t first, uint64_t bytes,
                bool writable) {
    if (s->writable != writable) {
        protect(pool, s);
        *s = (stretch){.first = first, .writable = writable};
    }
    s->end = first + bytes;
}

static void add_extents(const cxlkv_pool *pool, stretch *s, uint64_t first, uint64_t bytes_each) {
    const cxlkv_geometry *g = &pool->geometry;
    for (uint32_t extent = 0; extent < g->extent_count; extent++)
        add(pool, s, first + extent * bytes_each, bytes_each,
            page_is_ours(pool, extent * g->slab_slots));
}

void extents_protect(cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t block = (uint64_t)(hosts_line(&pool->hosts, pool->hosts.self, 0) - pool->region.base);
    uint64_t end = block + g->host_block_bytes;
    stretch s = {.end = block};
    add(pool, &s, block, g->host_block_bytes, true);
    add(pool, &s, end, g->descriptors_offset - end, false);
    add_extents(pool, &s, g->descriptors_offset, g->descriptors_bytes);
    add_extents(pool, &s, g->extents_offset, g->extent_bytes);
    protect(pool, &s);
    pool->mapped_version = pool->host->extents_version;
}

void descriptors_hand_over(const cxlkv_pool *pool, bool gives) {
    const cxlkv_geometry *g = &pool->geometry;
    hosts_hand_over(pool->region.base + g->descriptors_offset,
                    g->extent_count * g->descriptors_bytes, gives);
}

void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable) {
    uint64_t first = (uint64_t)(hosts_line(&pool->hosts, host, 0) - pool->region.base);
    stretch s = {.first = first, .end = first + pool->geometry.host_block_bytes, .writable = true};
    if (writable) protect(pool, &s);
    else extents_protect(pool);
}

int page_stays_ours(const cxlkv_pool *pool, uint32_t page) {
    if (page_is_ours(pool, page)) return 0;
    return fail(CXLKV_E_CORRUPT,
                "page %u is not this host's any more: its claim of that extent was lost in the "
                "pool's memory, or damaged. Nothing was written. Release what holds the page and "
                "recompute it", page);
}
