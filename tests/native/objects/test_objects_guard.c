/* Goal: memory that fails under a put, a get, a range, a lease or a publish is an error, or a
 * damaged object; the pool and all its other objects live on, and nobody's memory is blamed for
 * another's. Method: a pool's file is cut short under its mapping, at the extents and at the
 * descriptors; the caller's memory is cut likewise. */
#include <sys/mman.h>

#include "object_tests.h"

enum { SMALL = 9000, OBJECTS = 200, MAPPED = 16384 };
static uint64_t seed = 20261122;

typedef struct cut_pool {
    const char *path;
    cxlkv_pool *pool;
    uint64_t whole;              /* how many of the objects are left */
} cut_pool;

static cut_pool filled(bool checksum, uint32_t threads) {
    cut_pool c = {.path = test_path("objects-guard")};
    c.pool = object_pool(c.path, SMALL, checksum, 8 << 20, threads);
    for (uint64_t name = 0; name < OBJECTS; name++)
        CHECK(put(c.pool, name, name, SMALL, &seed) == 1);
    return c;
}

static uint64_t slots(const cut_pool *c) { return c->pool->geometry.slab_slots; }

/* Behind so many extents nothing is left. */
static void cut(cut_pool *c, uint64_t extents) {
    const cxlkv_geometry *g = &c->pool->geometry;
    c->whole = extents * g->slab_slots;
    CHECK(truncate(c->path, (off_t)(g->extents_offset + extents * g->extent_bytes)) == 0);
}

static void end(cut_pool *c) {
    cxlkv_stats stats = test_stats(c->pool);
    CHECK(stats.pages.held == 0 && stats.pages.retired > 0);
    test_remove(&c->pool, c->path);
}

/* A call meets the loss once, as an error or a damaged object; from then on it is known. */
static void expect_lost(cut_pool *c, uint64_t name) {
    int64_t size = get(c->pool, name, name, SMALL, &seed);
    CHECK(size == CXLKV_OBJECT_DAMAGED || size == -CXLKV_E_POISON);
    CHECK(get(c->pool, name, name, SMALL, &seed) == CXLKV_OBJECT_DAMAGED);
}

static void test_reading(bool checksum, uint32_t threads) {
    cut_pool c = filled(checksum, threads);
    const uint8_t *at;
    int64_t size, sizes[3];
    cxlkv_lease *whole = lease_of(c.pool, 0, &size, &at), *other;
    cut(&c, 1);
    CHECK(slots(&c) == c.whole && c.whole + 12 < OBJECTS);
    expect_lost(&c, c.whole);
    uint8_t keys[48], out[3 * SMALL];
    uint64_t names[3] = {0, c.whole + 5, 1}, addresses[3];
    for (uint64_t i = 0; i < 3; i++) test_hashes(keys + 16 * i, names[i], 1);
    const cxlkv_range ranges[3] = {{.bytes = SMALL}, {.object = 1, .bytes = 10, .target = SMALL},
                                   {.object = 2, .bytes = SMALL, .target = 2 * SMALL}};
    for (int turn = 0; turn < 2; turn++) {
        int64_t code = cxlkv_objects_ranges(c.pool, 3, keys, 3, ranges, out, sizeof(out), sizes);
        CHECK(code >= 0 || (turn == 0 && code == -CXLKV_E_POISON));
        if (code < 0) continue;
        CHECK(sizes[0] == SMALL && sizes[1] == CXLKV_OBJECT_DAMAGED && sizes[2] == SMALL);
        CHECK(is_filled(out, 0, SMALL) && is_filled(out + 2 * SMALL, 1, SMALL));
    }
    test_hashes(keys + 16, c.whole + 9, 1);
    for (int turn = 0; turn < 2; turn++) {
        int64_t code = cxlkv_lease_take(c.pool, 3, keys, addresses, sizes, &other);
        CHECK(code == 3 || (turn == 0 && code == -CXLKV_E_POISON));
        if (code < 0) continue;
        CHECK(sizes[1] == CXLKV_OBJECT_DAMAGED && addresses[1] == 0 && addresses[0]);
        cxlkv_lease_destroy(&other);
    }
    CHECK(size_of(c.pool, c.whole + 5) == CXLKV_OBJECT_DAMAGED);
    CHECK(is_filled(at, 0, SMALL));
    cxlkv_lease_destroy(&whole);
    for (uint64_t name = 0; name < c.whole; name++) expect(c.pool, name, name, SMALL, &seed);
    while ((size = forget(c.pool, c.whole + 5)) < 0) CHECK(size == -CXLKV_E_POISON);
    CHECK(size_of(c.pool, c.whole + 5) == CXLKV_OBJECT_ABSENT);
    end(&c);
}

/* Pages that are gone are met one by one, and set aside; those that are there serve on. */
static void test_writing(bool checksum, uint32_t threads) {
    cut_pool c = filled(checksum, threads);
    uint64_t lost = 0, left = test_stats(c.pool).pages.free, address;
    const uint64_t size = SMALL;
    const uint32_t place = 0;
    int32_t code;
    int64_t new;
    cxlkv_lease *r;
    CHECK(cxlkv_lease_reserve(c.pool, 1, &size, &address, &r) == 1);
    fill((uint8_t *)(uintptr_t)address, 500, SMALL);
    cut(&c, 1);
    CHECK(cxlkv_lease_publish(r, 1, &place, key_of(500).bytes, &code) == -CXLKV_E_POISON);
    cxlkv_lease_destroy(&r);
    while ((new = put(c.pool, 600, 600, SMALL, &seed)) == -CXLKV_E_POISON) {
        CHECK(++lost <= left && test_stats(c.pool).pages.held == 0);
        CHECK(size_of(c.pool, 600) == CXLKV_OBJECT_ABSENT);
    }
    CHECK(new == -CXLKV_E_POOL_FULL && lost > 0 && test_stats(c.pool).pages.free == 0);
    CHECK(forget(c.pool, 3) == 1);
    CHECK(put(c.pool, 600, 600, SMALL, &seed) == 1);
    expect(c.pool, 600, 600, SMALL, &seed);
    CHECK(size_of(c.pool, 500) == CXLKV_OBJECT_ABSENT);
    end(&c);
}

/* What cannot be overwritten is not said to be; it is set aside, and its object found no more. */
static void test_scrubbing(void) {
    cut_pool c = filled(true, 1);
    uint8_t keys[32];
    cxlkv_scrubbed scrubbed;
    cut(&c, 1);
    test_hashes(keys, 0, 1);
    test_hashes(keys + 16, c.whole + 5, 1);
    CHECK(cxlkv_forget(c.pool, 2, keys, &scrubbed) == 2);
    CHECK(scrubbed.pages == 1 && scrubbed.held == 1 && scrubbed.elsewhere == 0);
    CHECK(test_stats(c.pool).pages.retired == 1);
    CHECK(size_of(c.pool, 0) == CXLKV_OBJECT_ABSENT);
    CHECK(size_of(c.pool, c.whole + 5) == CXLKV_OBJECT_ABSENT);
    for (uint64_t name = 1; name < c.whole; name++) expect(c.pool, name, name, SMALL, &seed);
    end(&c);
}

/* The descriptors themselves are gone. */
static void test_descriptors(void) {
    cut_pool c = filled(true, 2);
    int64_t size;
    const uint8_t *at;
    cxlkv_lease *lease = lease_of(c.pool, 1, &size, &at);
    CHECK(truncate(c.path, SUPERBLOCK_BYTES) == 0);
    for (uint64_t name = 0; name < OBJECTS; name++) expect_lost(&c, name);
    size = size_of(c.pool, 3);
    CHECK(size == CXLKV_OBJECT_DAMAGED);
    int64_t code = put(c.pool, 700, 700, SMALL, &seed);
    CHECK(code == -CXLKV_E_POISON || code == -CXLKV_E_POOL_FULL);
    CHECK(put(c.pool, 4, 4, SMALL, &seed) == 0);
    cxlkv_lease_destroy(&lease);
    end(&c);
}

/* The caller's memory fails: an error of the call, and no page is blamed. */
static void test_callers_memory(bool checksum, uint32_t threads) {
    cxlkv_pool *pool = object_pool(NULL, MAPPED, checksum, 8 << 20, threads);
    int fd = memfd_create("caller", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, MAPPED) == 0);
    uint8_t *memory = mmap(NULL, MAPPED, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), keys[32];
    CHECK(memory != MAP_FAILED);
    uint64_t addresses[2] = {(uintptr_t)memory, (uintptr_t)memory}, sizes[2] = {MAPPED, MAPPED};
    cxlkv_buffers buffers = {.addresses = addresses, .sizes = sizes};
    int32_t codes[2];
    int64_t found[2];
    const cxlkv_range range = {.bytes = MAPPED};
    fill(memory, 1, MAPPED);
    for (uint64_t i = 0; i < 2; i++) test_hashes(keys + 16 * i, i, 1);
    CHECK(cxlkv_objects_put(pool, 1, keys, &buffers, 0, codes) == 1);
    CHECK(ftruncate(fd, MAPPED / 2) == 0);
    CHECK(cxlkv_objects_put(pool, 2, keys, &buffers, 0, codes) == -EFAULT);
    CHECK(size_of(pool, 1) == CXLKV_OBJECT_ABSENT);
    CHECK(cxlkv_objects_get(pool, 1, keys, &buffers, found) == -EFAULT);
    CHECK(cxlkv_objects_ranges(pool, 1, keys, 1, &range, memory, MAPPED, found) == -EFAULT);
    uint32_t page = 0;
    *pieces_of(pool, page, 0, PIECE_KEYS) ^= 1; /* what is damaged is to be zeros, there, too */
    if (checksum) CHECK(cxlkv_objects_get(pool, 1, keys, &buffers, found) == -EFAULT);
    *pieces_of(pool, page, 0, PIECE_KEYS) ^= 1;
    expect(pool, 0, 1, MAPPED, &seed);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.pages.retired == 0 && stats.pages.held == 0 && stats.pages.published_only == 1);
    test_end(&pool, NULL);
    munmap(memory, MAPPED);
    close(fd);
}

int main(void) {
    NOT_UNDER_TSAN("TSan runs handlers with all signals blocked, so that the second jump kills");
    for (uint32_t i = 0; i < 4; i++) {
        test_reading(i & 1, 1 + i / 2);
        test_writing(i & 1, 1 + i / 2);
        test_callers_memory(i & 1, 1 + i / 2);
    }
    test_scrubbing();
    test_descriptors();
    return 0;
}
