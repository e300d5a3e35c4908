/* Goal: a process can write what its host owns and nothing else of a shared pool, as far as the
 * mapping can be protected. Method: the kernel's own list of mappings, after extents were taken;
 * once in pages of 4 KiB, once in units of 2 MiB as a dax device has them. */
#include <sys/mman.h>

#include "check.h"
#include "format/mapping.h"
#include "format/records.h"
#include "host/locks.h"

/* Fills in which of the pool's pages may be written, and returns how many may not. Each unit is one
 * or the other as a whole. How many mappings a list has for that is not the pool's: Linux shows
 * neighbours of one mode as one mapping, qemu-user 10 keeps them apart. */
static uint64_t look_at_mappings(const cxlkv_pool *pool, uint8_t *writable) {
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512], mode[8];
    uint64_t pages = pool->region.mapped_bytes / 4096, unit_pages = pool->region.unit_bytes / 4096;
    uint64_t listed = 0, read_only = 0;
    CHECK(file);
    while (fgets(line, sizeof(line), file)) {
        uint64_t first, end, base = (uintptr_t)pool->region.base;
        CHECK(sscanf(line, "%lx-%lx %7s", &first, &end, mode) == 3);
        if (first < base || first >= base + pool->region.mapped_bytes) continue;
        CHECK(end <= base + pool->region.mapped_bytes);
        memset(writable + (first - base) / 4096, mode[1] == 'w', (end - first) / 4096);
        listed += (end - first) / 4096;
    }
    fclose(file);
    CHECK(listed == pages);
    for (uint64_t page = 0; page < pages; page++) {
        CHECK(writable[page] == writable[page - page % unit_pages]);
        read_only += !writable[page];
    }
    return read_only;
}

static bool is_writable(const cxlkv_pool *pool, const uint8_t *writable, const void *first,
                        uint64_t bytes) {
    uint64_t at = (uint64_t)((const uint8_t *)first - pool->region.base);
    for (uint64_t page = at / 4096; page * 4096 < at + bytes; page++)
        if (!writable[page]) return false;
    return true;
}

static void check_mappings(const cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    uint8_t *writable = calloc(1, pool->region.mapped_bytes / 4096);
    bool by_pages = pool->region.unit_bytes == 4096;
    CHECK(writable && look_at_mappings(pool, writable) > 0);
    CHECK(is_writable(pool, writable, hosts_line(&pool->hosts, 1, 0), g->host_block_bytes));
    CHECK(!by_pages || !is_writable(pool, writable, hosts_line(&pool->hosts, 0, 0), 4096));
    CHECK(!by_pages || !is_writable(pool, writable, pool->region.base, 4096));
    for (uint32_t extent = 0; extent < g->extent_count; extent++) {
        const uint8_t *at = pool->region.base + g->extents_offset + extent * g->extent_bytes;
        bool ours = page_is_ours(pool, extent * g->slab_slots);
        bool all = is_writable(pool, writable, at, g->extent_bytes) &&
                   is_writable(pool, writable, descriptor_of(pool, extent * g->slab_slots),
                               g->descriptors_bytes);
        CHECK(by_pages ? all == ours : all || !ours);
    }
    free(writable);
}

static uint32_t owned_extents(const cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    uint32_t owned = 0;
    for (uint32_t extent = 0; extent < g->extent_count; extent++)
        owned += page_is_ours(pool, extent * g->slab_slots);
    return owned;
}

static cxlkv_pool *shared_pool(const char *path) {
    cxlkv_layout layout = test_layout();
    cxlkv_sharing sharing = {.kind = CXLKV_SHARING_SOFTWARE, .hosts = 2};
    cxlkv_host host = {.number = 1, .lease_s = 10};
    cxlkv_pool *pool;
    CHECK(cxlkv_pool_create(path, &layout, &sharing, 24 << 20, 0, &host, 0, &pool) == 0);
    return pool;
}

static void test_units(uint64_t unit_bytes) {
    const char *path = test_path("extents");
    cxlkv_pool *pool = shared_pool(path);
    uint32_t pages[64];
    CHECK(pool->region.unit_bytes == 4096);
    CHECK(host_lock(pool) == 0);
    pool->region.unit_bytes = unit_bytes;
    CHECK(mprotect(pool->region.base, pool->region.mapped_bytes, PROT_READ | PROT_WRITE) == 0);
    extents_protect(pool); /* as if it had been like this from the start */
    host_unlock(pool);
    while (owned_extents(pool) < pool->geometry.extent_count / 2) {
        CHECK(cxlkv_pages_alloc(pool, 64, pages) == 64);
        check_mappings(pool);
    }
    test_remove(&pool, path);
}

/* What the machine is known to have dropped from its caches, in the host's own line. */
static uint64_t *settled_word(const cxlkv_pool *pool) {
    return (uint64_t *)hosts_line(&pool->hosts, pool->hosts.self, COMMIT_LINE) + 1;
}

static void test_a_return_on_the_same_boot_is_known(void) {
    const char *path = test_path("settled");
    cxlkv_pool *pool = shared_pool(path);
    uint32_t pages[64];
    uint64_t boot = *settled_word(pool);
    CHECK(boot != 0);
    CHECK(cxlkv_pages_alloc(pool, 64, pages) == 64 && *settled_word(pool) == boot);
    *settled_word(pool) = 7; /* another machine had this number, or a take was cut short */
    cxlkv_pool_destroy(&pool);
    pool = test_open_host(path, 1, 10);
    CHECK(*settled_word(pool) == boot && owned_extents(pool) > 0);
    test_remove(&pool, path);
}

int main(void) {
    test_a_return_on_the_same_boot_is_known();
    test_units(4096);
    test_units(AREA_ALIGNMENT);
    return 0;
}
