/* Goal: what is put under a key is what is got, in every way to read it, or there is an error that
 * says why; all objects of a call have room or none; what is held stays. Method: sizes about every
 * border, buffers that begin anywhere, each kind of damage, threads on the same keys, on one host
 * and on two that share the pool. */
#include "base/crc32c.h"
#include "format/records.h"
#include "object_tests.h"

enum { BIG = 700 << 10, SMALL = 3000, NAMES = 12, THREADS = 4 };
static uint64_t seed;

/* ---- one thread ---- */

static void test_sizes(bool checksum, uint32_t threads) {
    static const uint32_t sizes[] = {1, 63, 64, 65, 4095, 16384, 16385, (256 << 10) - 1,
                                     (256 << 10) + 1, 512 << 10, BIG - 1, BIG};
    cxlkv_pool *pool = object_pool(NULL, BIG, checksum, 64 << 20, threads);
    for (uint64_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        CHECK(size_of(pool, i) == CXLKV_OBJECT_ABSENT);
        CHECK(put(pool, i, i, sizes[i], &seed) == 1);
        CHECK(put(pool, i, i + 100, SMALL, &seed) == 0);
        expect(pool, i, i, sizes[i], &seed);
        CHECK(get(pool, i, i, sizes[i], &seed) == sizes[i]);
        CHECK(get(pool, i, i, sizes[i] - 1, &seed) == -CXLKV_E_ARGUMENT);
    }
    CHECK(put(pool, 50, 1, BIG + 1, &seed) == -CXLKV_E_ARGUMENT);
    CHECK(put(pool, 50, 1, 0, &seed) == -CXLKV_E_ARGUMENT);
    uint64_t huge[2] = {UINT64_MAX - 1, 3}, anywhere[2] = {64, 64}, starts[2] = {0, 2};
    cxlkv_buffers wrap = {.addresses = anywhere, .sizes = huge, .starts = starts};
    int32_t code;
    CHECK(cxlkv_objects_put(pool, 1, key_of(50).bytes, &wrap, 0, &code) == -CXLKV_E_ARGUMENT);
    CHECK(size_of(pool, 50) == CXLKV_OBJECT_ABSENT);
    test_end(&pool, NULL);
}

/* Objects of one call, each of one buffer. */
typedef struct many {
    uint8_t *bytes, *keys;
    uint64_t *addresses, *sizes;
    int64_t *found;
    int32_t *codes;
    cxlkv_buffers buffers;
} many;

static many many_of(uint32_t count, uint32_t bytes_each, const uint64_t *names) {
    many m = {malloc((uint64_t)count * bytes_each), malloc(16ull * count), malloc(8ull * count),
              malloc(8ull * count), malloc(8ull * count), malloc(4ull * count), {0}};
    CHECK(m.bytes && m.keys && m.addresses && m.sizes && m.found && m.codes);
    for (uint64_t i = 0; i < count; i++) {
        m.addresses[i] = (uintptr_t)m.bytes + i * bytes_each;
        m.sizes[i] = bytes_each;
        test_hashes(m.keys + 16 * i, names ? names[i] : i, 1);
        fill(m.bytes + i * bytes_each, i, bytes_each);
    }
    m.buffers = (cxlkv_buffers){.addresses = m.addresses, .sizes = m.sizes};
    return m;
}

static void many_free(many *m) {
    free(m->bytes);
    free(m->keys);
    free(m->addresses);
    free(m->sizes);
    free(m->found);
    free(m->codes);
}

/* In a full pool of `count` objects, of which one goes: a key needs room once. */
static void twins_in_what_is_left(cxlkv_pool *pool, const many *of, uint32_t count) {
    static const uint64_t names[4] = {9, 9, 2, 9}; /* 2 is there */
    many twins = many_of(4, SMALL, names);
    CHECK(cxlkv_forget(pool, 1, of->keys + 16ull * (count - 1), NULL) == 1);
    CHECK(cxlkv_objects_put(pool, 4, twins.keys, &twins.buffers, 0, twins.codes) == 1);
    CHECK(twins.codes[0] == 0 && test_stats(pool).pages.free == 0);
    for (int i = 1; i < 4; i++) CHECK(twins.codes[i] == CXLKV_RECORD_PRESENT);
    CHECK(cxlkv_forget(pool, 1, twins.keys, NULL) == 1);
    CHECK(cxlkv_objects_put(pool, 1, of->keys + 16ull * (count - 1), &of->buffers, 0,
                            of->codes) == 1);
    many_free(&twins);
}

/* The same key twice: the first one's bytes. All have room or none. */
static void test_batches(uint32_t threads) {
    static const uint64_t names[5] = {1, 2, 1, 3, 1};
    cxlkv_pool *pool = object_pool(NULL, SMALL, true, 4 << 20, threads);
    many twins = many_of(5, SMALL, names);
    CHECK(cxlkv_objects_put(pool, 5, twins.keys, &twins.buffers, 0, twins.codes) == 3);
    CHECK(twins.codes[0] == 0 && twins.codes[1] == 0 && twins.codes[3] == 0);
    CHECK(twins.codes[2] == CXLKV_RECORD_PRESENT && twins.codes[4] == CXLKV_RECORD_PRESENT);
    CHECK(cxlkv_objects_get(pool, 5, twins.keys, &twins.buffers, twins.found) == 5 * SMALL);
    for (uint64_t i = 0; i < 5; i++)
        CHECK(is_filled(twins.bytes + i * SMALL, i % 2 ? i : 0, SMALL));
    cxlkv_stats before = test_stats(pool);
    CHECK(before.pages.published_only == 3 && before.pages.held == 0);
    uint32_t count = (uint32_t)before.pages.free + 1;
    many all = many_of(count, SMALL, NULL);
    for (uint64_t i = 0; i < count; i++) test_hashes(all.keys + 16 * i, 100 + i, 1);
    CHECK(cxlkv_objects_put(pool, count, all.keys, &all.buffers, 0, all.codes) ==
          -CXLKV_E_POOL_FULL);
    CHECK(test_stats(pool).pages.free == before.pages.free);
    CHECK(cxlkv_objects_get(pool, count, all.keys, NULL, all.found) == 0);
    test_hashes(all.keys, 2, 1); /* one that is there needs no room */
    CHECK(cxlkv_objects_put(pool, count, all.keys, &all.buffers, 0, all.codes) == count - 1);
    CHECK(all.codes[0] == CXLKV_RECORD_PRESENT && test_stats(pool).pages.free == 0);
    twins_in_what_is_left(pool, &all, count);
    all.sizes[count - 1]--; /* one that does not fit: nothing is copied */
    memset(all.bytes, 7, (uint64_t)count * SMALL);
    CHECK(cxlkv_objects_get(pool, count, all.keys, &all.buffers, all.found) ==
          -CXLKV_E_ARGUMENT);
    for (uint64_t i = 0; i < (uint64_t)count * SMALL; i++) CHECK(all.bytes[i] == 7);
    test_clean(pool);
    many_free(&twins);
    many_free(&all);
    cxlkv_pool_destroy(&pool);
}

static void test_ranges(bool checksum, uint32_t threads) {
    enum { RANGES = 300, OBJECTS = 6, LENGTH = 5000 };
    cxlkv_pool *pool = object_pool(NULL, BIG, checksum, 64 << 20, threads);
    many of = many_of(OBJECTS, BIG, NULL);
    static cxlkv_range ranges[RANGES];
    static int64_t found[RANGES];
    static uint8_t out[RANGES * LENGTH];
    CHECK(cxlkv_objects_put(pool, OBJECTS - 1, of.keys, &of.buffers, 0, of.codes) == OBJECTS - 1);
    for (uint64_t i = 0; i < RANGES; i++)
        ranges[i] = (cxlkv_range){.object = random_below(&seed, OBJECTS),
                                  .offset = random_below(&seed, BIG - LENGTH),
                                  .bytes = random_below(&seed, LENGTH), .target = i * LENGTH};
    CHECK(cxlkv_objects_ranges(pool, OBJECTS, of.keys, RANGES, ranges, out, sizeof(out), found) >
          0);
    for (uint64_t i = 0; i < RANGES; i++) {
        const cxlkv_range *r = &ranges[i];
        CHECK(found[i] == (r->object == OBJECTS - 1 ? CXLKV_OBJECT_ABSENT : (int64_t)r->bytes));
        if (found[i] < 0) continue;
        CHECK(memcmp(out + r->target, of.bytes + r->object * BIG + r->offset, r->bytes) == 0);
    }
    const cxlkv_range wrong[] = {{.offset = BIG, .bytes = 1}, {.offset = UINT64_MAX, .bytes = 2},
                                 {.bytes = UINT64_MAX, .offset = 1}, {.object = OBJECTS},
                                 {.object = UINT64_MAX}, {.bytes = 2, .target = sizeof(out) - 1},
                                 {.bytes = 2, .target = UINT64_MAX}};
    for (uint64_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
        CHECK(cxlkv_objects_ranges(pool, OBJECTS, of.keys, 1, &wrong[i], out, sizeof(out),
                                   found) == -CXLKV_E_ARGUMENT);
    CHECK(test_stats(pool).pages.held == 0);
    many_free(&of);
    cxlkv_pool_destroy(&pool);
}

/* Objects that come one by one lie together: what a host does not need can be another's. */
static void test_close_together(void) {
    cxlkv_pool *pool = object_pool(NULL, SMALL, true, 8 << 20, 1);
    uint64_t slots = pool->geometry.slab_slots, count = test_stats(pool).pages.total;
    CHECK(count > 3 * slots);
    for (uint64_t name = 0; name < count; name++)
        CHECK(put(pool, name, name, SMALL, &seed) == 1);
    for (uint64_t name = 0; name < count; name++) CHECK(forget(pool, name) == 1);
    for (uint64_t name = 0; name < slots; name++)
        CHECK(put(pool, name, name, SMALL, &seed) == 1);
    uint64_t used = 0;
    for (uint64_t extent = 0; extent < pool->geometry.extent_count; extent++)
        for (uint64_t slot = 0; slot < slots; slot++)
            if (pool->pages[extent * slots + slot].published) {
                used++;
                break;
            }
    CHECK(used == 1);
    cxlkv_pool_destroy(&pool);
}

/* ---- texts ---- */

enum { CHAINED = 8 };

/* The pool's row of an object. */
static cxlkv_published row_of(cxlkv_pool *pool, uint64_t name) {
    cxlkv_published rows[CHAINED];
    uint64_t clock, generation;
    uint32_t page = page_of(pool, name, &generation);
    int64_t count = cxlkv_pool_published(pool, rows, CHAINED, &clock);
    for (int64_t i = 0; i < count; i++)
        if (rows[i].page == page) return rows[i];
    CHECK(false);
    return rows[0];
}

static int64_t chain(cxlkv_pool *pool, uint32_t count, const uint64_t *names) {
    uint8_t keys[16 * CHAINED];
    for (uint32_t i = 0; i < count; i++) test_hashes(keys + 16 * i, names[i], 1);
    return cxlkv_objects_chain(pool, count, keys);
}

static bool follows(cxlkv_pool *pool, uint64_t name, uint64_t before) {
    uint64_t generation;
    return row_of(pool, name).parent == page_of(pool, before, &generation);
}

static bool is_lost(cxlkv_pool *pool, uint64_t name) {
    cxlkv_published row = row_of(pool, name);
    CHECK(!(row.flags & CXLKV_PUBLISHED_LOST) || row.parent == UINT32_MAX);
    return row.flags & CXLKV_PUBLISHED_LOST;
}

static void put_some(cxlkv_pool *pool, uint64_t first, uint64_t end) {
    for (; first < end; first++) CHECK(put(pool, first, first, SMALL, &seed) == 1);
}

/* Told in any order, and in rings: each object follows an older one, so no ring is ever made. */
static void test_chain(void) {
    cxlkv_pool *pool = object_pool(NULL, SMALL, true, 4 << 20, 1);
    put_some(pool, 0, 4);
    CHECK(chain(pool, 5, (uint64_t[]){0, 1, 2, 3, 9}) == 4 && chain(pool, 0, NULL) == 0);
    CHECK(row_of(pool, 0).parent == UINT32_MAX && !is_lost(pool, 0));
    for (uint64_t name = 1; name < 4; name++) CHECK(follows(pool, name, name - 1));
    expect(pool, 2, 2, SMALL, &seed); /* all before it are found as often */
    for (uint64_t name = 0; name < 4; name++) CHECK(row_of(pool, name).hits == (name < 3 ? 2 : 0));
    put_some(pool, 4, 5);
    CHECK(chain(pool, 3, (uint64_t[]){1, 9, 4}) == 2 && is_lost(pool, 4)); /* behind a gap */
    CHECK(chain(pool, 2, (uint64_t[]){1, 4}) == 2 && follows(pool, 4, 1) && follows(pool, 2, 1));
    CHECK(forget(pool, 0) == 1 && is_lost(pool, 1) && follows(pool, 2, 1));
    put_some(pool, 0, 1);
    CHECK(is_lost(pool, 1)); /* another one of its name, until that is told */
    CHECK(chain(pool, 4, (uint64_t[]){0, 1, 2, 3}) == 4);
    for (uint64_t name = 1; name < 4; name++) CHECK(follows(pool, name, name - 1));
    CHECK(chain(pool, 3, (uint64_t[]){3, 0, 3}) == 3);
    CHECK(chain(pool, 6, (uint64_t[]){4, 3, 2, 1, 0, 0}) == 6);
    for (uint32_t round = 0; round < 500; round++) {
        uint64_t names[CHAINED];
        for (uint32_t i = 0; i < CHAINED; i++) names[i] = random_below(&seed, 5);
        CHECK(chain(pool, CHAINED, names) == CHAINED);
        for (uint64_t name = 0; name < 5; name++) {
            uint32_t steps = 0, page = row_of(pool, name).parent;
            cxlkv_published rows[CHAINED];
            uint64_t clock;
            CHECK(cxlkv_pool_published(pool, rows, CHAINED, &clock) == 5);
            for (; page != UINT32_MAX; steps++)
                for (uint32_t i = 0; i < 5; i++)
                    if (rows[i].page == page) {
                        page = rows[i].parent;
                        break;
                    }
            CHECK(steps < 5);
        }
    }
    test_clean(pool);
    cxlkv_pool_destroy(&pool);
}

/* ---- leases and reservations ---- */

static void test_lease(void) {
    cxlkv_pool *pool = object_pool(NULL, SMALL, true, 4 << 20, 1);
    const uint8_t *at, *again;
    int64_t size;
    CHECK(put(pool, 1, 1, SMALL, &seed) == 1);
    cxlkv_lease *lease = lease_of(pool, 1, &size, &at);
    cxlkv_lease *second = lease_of(pool, 1, &size, &again);
    CHECK(at == again && test_stats(pool).pages.held == 1);
    CHECK(cxlkv_pool_close(pool, 0) == -CXLKV_E_BUSY && cxlkv_pool_close(pool, 1) == -CXLKV_E_BUSY);
    CHECK(cxlkv_mark(pool, 1, key_of(1).bytes, CXLKV_MARK_PIN, 1) == 1); /* against eviction only */
    CHECK(forget(pool, 1) == 1 && forget(pool, 1) == 0);
    CHECK(size_of(pool, 1) == CXLKV_OBJECT_ABSENT);
    for (uint64_t mark = 0; put(pool, 100 + mark, 9, SMALL, &seed) == 1; mark++) continue;
    CHECK(is_filled(at, 1, SMALL)); /* whoever needed room did not get this */
    const uint32_t first = 0, none = 1;
    CHECK(cxlkv_lease_release(lease, 1, &first) == 0);
    CHECK(cxlkv_lease_release(lease, 1, &first) == 0 && cxlkv_lease_release(lease, 0, NULL) == 0);
    CHECK(cxlkv_lease_release(lease, 1, &none) == -CXLKV_E_ARGUMENT);
    CHECK(is_filled(at, 1, SMALL) && test_stats(pool).pages.free == 0);
    cxlkv_lease_destroy(&second);
    CHECK(test_stats(pool).pages.free == 1 && cxlkv_pool_close(pool, 1) == 0);
    CHECK(cxlkv_lease_publish(lease, 0, &first, key_of(1).bytes, NULL) == -CXLKV_E_ARGUMENT);
    test_clean(pool);
    CHECK(cxlkv_pool_close(pool, 0) == 0);
    CHECK(cxlkv_lease_release(lease, 0, NULL) == -CXLKV_E_CLOSED);
    cxlkv_lease_destroy(&lease); /* it outlives its pool */
    cxlkv_pool_destroy(&pool);
}

static void test_reserve(bool checksum, uint32_t threads) {
    cxlkv_pool *pool = object_pool(NULL, BIG, checksum, 64 << 20, threads);
    const uint64_t sizes[4] = {BIG, 1, SMALL, SMALL};
    const uint32_t places[4] = {0, 1, 2, 2}, beyond = 4;
    uint64_t addresses[4], too_many[3] = {1, 0, BIG + 1};
    uint8_t keys[64];
    int32_t codes[4];
    cxlkv_lease *r;
    for (uint64_t i = 0; i < 4; i++) test_hashes(keys + 16 * i, i, 1);
    for (uint32_t i = 1; i < 3; i++)
        CHECK(cxlkv_lease_reserve(pool, 1, too_many + i, addresses, &r) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_lease_reserve(pool, 4, sizes, addresses, &r) == 4);
    for (uint64_t i = 0; i < 4; i++) fill((uint8_t *)addresses[i], i, sizes[i]);
    CHECK(cxlkv_lease_publish(r, 1, &beyond, keys, codes) == -CXLKV_E_RELEASED);
    for (uint64_t i = 0; i < 4; i++) CHECK(size_of(pool, i) == CXLKV_OBJECT_ABSENT);
    CHECK(put(pool, 1, 50, SMALL, &seed) == 1); /* somebody was faster */
    CHECK(cxlkv_lease_publish(r, 4, places, keys, codes) == 2);
    CHECK(codes[0] == 0 && codes[1] == CXLKV_RECORD_PRESENT && codes[2] == 0);
    CHECK(codes[3] == CXLKV_RECORD_PRESENT); /* a place becomes one object */
    expect(pool, 0, 0, BIG, &seed);
    expect(pool, 1, 50, SMALL, &seed);
    expect(pool, 2, 2, SMALL, &seed);
    test_hashes(keys, 7, 1);
    CHECK(cxlkv_lease_publish(r, 1, places + 1, keys, codes) == 1); /* under another name */
    expect(pool, 7, 1, 1, &seed);
    CHECK(cxlkv_lease_publish(r, 1, places, keys, codes) == 0);
    const uint32_t last = 3;
    CHECK(cxlkv_lease_release(r, 1, &last) == 0);
    CHECK(cxlkv_lease_publish(r, 1, &last, keys + 48, codes) == -CXLKV_E_RELEASED);
    CHECK(test_stats(pool).pages.held == 3);
    cxlkv_lease_destroy(&r);
    CHECK(test_stats(pool).pages.held == 0 && test_stats(pool).pages.published_only == 4);
    uint64_t free_pages = test_stats(pool).pages.free, wanted = free_pages + 1;
    uint64_t *all = malloc(wanted * 16);
    CHECK(all);
    for (uint64_t i = 0; i < wanted; i++) all[i] = 1;
    CHECK(cxlkv_lease_reserve(pool, (uint32_t)wanted, all, all + wanted, &r) ==
          -CXLKV_E_POOL_FULL);
    CHECK(cxlkv_lease_reserve(pool, (uint32_t)free_pages, all, all + wanted, &r) > 0);
    cxlkv_lease_destroy(&r);
    free(all);
    test_end(&pool, NULL);
}

/* What is not objects' is refused, and the other way round. */
static void test_other_pools(void) {
    cxlkv_pool *kv = test_pool(NULL, 64), *objects = object_pool(NULL, SMALL, true, 4 << 20, 1);
    const uint64_t one = 1;
    uint64_t address;
    int64_t size;
    cxlkv_lease *lease;
    cxlkv_sequence *sequence;
    const object_key one_key = key_of(1);
    const uint8_t *key = one_key.bytes;
    CHECK(put(kv, 1, 1, 1, &seed) == -CXLKV_E_ARGUMENT);
    CHECK(get(kv, 1, 1, 1, &seed) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_objects_get(kv, 1, key, NULL, &size) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_objects_ranges(kv, 1, key, 0, NULL, NULL, 0, &size) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_lease_take(kv, 1, key, &address, &size, &lease) == -CXLKV_E_ARGUMENT && !lease);
    CHECK(cxlkv_lease_reserve(kv, 1, &one, &address, &lease) == -CXLKV_E_ARGUMENT && !lease);
    CHECK(cxlkv_sequence_create(objects, &sequence) == -CXLKV_E_ARGUMENT);
    CHECK(test_match(objects, 1, key, 1, &sequence) == -CXLKV_E_ARGUMENT);
    cxlkv_pool_destroy(&kv);
    cxlkv_pool_destroy(&objects);
}

/* ---- damage ---- */

enum { OF_DESCRIPTOR, OF_HEADER, OF_TABLE, OF_FIRST_BYTE, OF_LAST_BYTE, BEHIND, PLACES };

static uint8_t *place_of(cxlkv_pool *pool, uint32_t page, int where) {
    const cxlkv_geometry *g = &pool->geometry;
    uint8_t *extent =
        pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes;
    switch (where) {
    case OF_DESCRIPTOR: return (uint8_t *)descriptor_of(pool, page) + 20;
    case OF_HEADER: return extent + page % g->slab_slots * sizeof(record_header) + 20;
    case OF_TABLE: return (uint8_t *)checksum_of(pool, page, 0, 0, PIECE_KEYS) + 1;
    case OF_FIRST_BYTE: return pieces_of(pool, page, 0, PIECE_KEYS);
    case OF_LAST_BYTE: return pieces_of(pool, page, 0, PIECE_KEYS) + SMALL - 1;
    default: return pieces_of(pool, page, 0, PIECE_KEYS) + SMALL;
    }
}

/* It is told by every way of reading, by a check, and ended by a forget. */
static void test_damage(int where, bool repair) {
    const char *path = test_path("objects");
    cxlkv_pool *pool = object_pool(path, BIG, true, 64 << 20, 2), *other;
    char text[4096];
    for (uint64_t name = 0; name < 3; name++)
        CHECK(put(pool, name, name, SMALL, &seed) == 1);
    CHECK(cxlkv_pool_open(path, NULL, &other) == 0); /* that has not verified it before */
    uint64_t generation;
    uint8_t *at = place_of(pool, page_of(pool, 1, &generation), where);
    *at ^= 4;
    int64_t found = where == BEHIND ? SMALL : CXLKV_OBJECT_DAMAGED;
    for (uint64_t name = 0; name < 3; name++)
        expect(other, name, name, name == 1 ? found : SMALL, &seed);
    CHECK(get(pool, 1, 1, BIG, &seed) == found);
    CHECK(put(pool, 1, 1, SMALL, &seed) == 0);
    CHECK((cxlkv_pool_check(pool, CXLKV_CHECK_DEEP, text, sizeof(text)) > 0) == (found < 0));
    CHECK((other->counters->counts[COUNT_CORRUPT_PIECES] > 0) == (found < 0));
    if (repair) {
        CHECK(cxlkv_pool_check(pool, CXLKV_CHECK_DEEP | CXLKV_CHECK_REPAIR, text, sizeof(text)) ==
              0);
        /* Its header and its bytes are right where only the descriptor was not. */
        found = where == OF_DESCRIPTOR || where == BEHIND ? SMALL : CXLKV_OBJECT_ABSENT;
        expect(other, 1, 1, found, &seed);
        expect(pool, 1, 1, found, &seed);
    }
    CHECK(forget(pool, 1) == (found != CXLKV_OBJECT_ABSENT));
    CHECK(put(pool, 1, 77, SMALL - 5, &seed) == 1);
    expect(other, 1, 77, SMALL - 5, &seed);
    cxlkv_pool_destroy(&other);
    test_clean(pool);
    CHECK(test_stats(pool).pages.held == 0);
    test_remove(&pool, path);
}

/* A superblock whose CRC is right and whose words no pool of objects has. */
static void test_hostile_layouts(void) {
    const char *path = test_path("objects");
    cxlkv_pool *pool = object_pool(path, SMALL, true, 4 << 20, 1);
    const superblock whole = *(superblock *)pool->region.base;
    cxlkv_pool_destroy(&pool);
    for (int i = 0; i < 15; i++) {
        superblock wrong = whole;
        group_row *group = &wrong.groups[0];
        switch (i) {
        case 0: group->layers = 2; break;
        case 1: group->kv_heads = 2; break;
        case 2: group->head_dim = 2; break;
        case 3: group->value_head_dim = 2; break;
        case 4: group->dtype = CXLKV_FLOAT32; break;
        case 5: group->dtype = 4; break;
        case 6: group->values = CXLKV_VALUES_OWN; break;
        case 7: group->values = 3; break;
        case 8: group->window = 1; break;
        case 9: wrong.sketch = 1; break;
        case 10: wrong.page_tokens = 0; break;
        case 11: wrong.page_tokens = OBJECT_BYTES_MAX + 1; break;
        case 12: wrong.page_tokens = SMALL + 64; break; /* its offsets do not follow */
        case 13: wrong.group_count = 2; break;
        default: group->kind = 1;
        }
        wrong.crc = crc32c(0, &wrong, offsetof(superblock, crc));
        FILE *file = fopen(path, "r+b");
        CHECK(file && fwrite(&wrong, sizeof(wrong), 1, file) == 1 && fclose(file) == 0);
        int code = cxlkv_pool_open(path, NULL, &pool);
        if (code != -CXLKV_E_GEOMETRY) printf("layout %d: %d\n", i, code);
        CHECK(code == -CXLKV_E_GEOMETRY);
    }
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* ---- threads and hosts on the same keys ---- */

typedef struct worker {
    cxlkv_pool *pool;
    uint64_t seed;
    uint32_t rounds, puts, gets, leases;
} worker;

/* Every version of an object says which one it is: its first word is its mark. */
static void check_version(const uint8_t *bytes, int64_t size) {
    uint64_t mark;
    memcpy(&mark, bytes, sizeof(mark));
    CHECK(size == SMALL - (int64_t)(mark % 7) && mark > 0 && mark <= UINT32_MAX);
    CHECK(is_filled(bytes + 8, mark, (uint64_t)size - 8));
}

static void put_version(worker *w, uint64_t name) {
    static atomic_uint marks;
    uint64_t mark = atomic_fetch_add(&marks, 1) + 1, size = SMALL - mark % 7;
    uint64_t address, reserved_size = size;
    uint8_t bytes[SMALL];
    const object_key key = key_of(name);
    int32_t code;
    int64_t new;
    const uint32_t place = 0;
    memcpy(bytes, &mark, 8);
    fill(bytes + 8, mark, size - 8);
    if (random_below(&w->seed, 2)) {
        cxlkv_lease *r;
        new = cxlkv_lease_reserve(w->pool, 1, &reserved_size, &address, &r);
        if (new == 1) {
            memcpy((void *)(uintptr_t)address, bytes, size);
            new = cxlkv_lease_publish(r, 1, &place, key.bytes, &code);
            cxlkv_lease_destroy(&r);
        }
    } else {
        address = (uintptr_t)bytes;
        cxlkv_buffers from = {.addresses = &address, .sizes = &size};
        new = cxlkv_objects_put(w->pool, 1, key.bytes, &from, 0, &code);
    }
    CHECK(new >= 0 || new == -CXLKV_E_POOL_FULL);
    w->puts += new == 1;
}

static void get_version(worker *w, uint64_t name) {
    uint8_t bytes[SMALL];
    uint64_t address = (uintptr_t)bytes, room = SMALL;
    cxlkv_buffers to = {.addresses = &address, .sizes = &room};
    int64_t size;
    CHECK(cxlkv_objects_get(w->pool, 1, key_of(name).bytes, &to, &size) >= 0);
    CHECK(size >= 0 || size == CXLKV_OBJECT_ABSENT);
    if (size >= 0) check_version(bytes, size);
    w->gets += size >= 0;
}

/* Several, some of them twice; held over other threads' forgets and puts. */
static void lease_versions(worker *w) {
    uint8_t keys[NAMES * 16];
    uint64_t addresses[NAMES];
    int64_t sizes[NAMES];
    cxlkv_lease *lease;
    for (uint64_t i = 0; i < NAMES; i++)
        test_hashes(keys + 16 * i, random_below(&w->seed, NAMES), 1);
    CHECK(cxlkv_lease_take(w->pool, NAMES, keys, addresses, sizes, &lease) == NAMES);
    for (int turn = 0; turn < 3; turn++) {
        for (uint32_t i = 0; i < NAMES; i++) {
            CHECK(sizes[i] >= 0 || sizes[i] == CXLKV_OBJECT_ABSENT);
            if (sizes[i] >= 0 && addresses[i])
                check_version((const uint8_t *)(uintptr_t)addresses[i], sizes[i]);
            w->leases += sizes[i] >= 0;
        }
        sched_yield();
        const uint32_t one = random_below(&w->seed, NAMES);
        CHECK(cxlkv_lease_release(lease, 1, &one) == 0);
        addresses[one] = 0;
    }
    cxlkv_lease_destroy(&lease);
}

static void *work(void *context) {
    worker *w = context;
    for (uint32_t round = 0; round < w->rounds; round++) {
        uint64_t name = random_below(&w->seed, NAMES);
        switch (random_below(&w->seed, 8)) {
        case 0: case 1: put_version(w, name); break;
        case 2: CHECK(forget(w->pool, name) >= 0); break;
        case 3: lease_versions(w); break;
        case 4: CHECK(size_of(w->pool, name) >= CXLKV_OBJECT_ABSENT); break;
        default: get_version(w, name);
        }
    }
    return NULL;
}

static void forget_all(cxlkv_pool *pool) {
    for (uint64_t name = 0; name < NAMES; name++) CHECK(forget(pool, name) >= 0);
}

static void test_storm(uint32_t kind, bool checksum) {
    const char *path = test_path("objects");
    uint32_t hosts = kind == CXLKV_SHARING_HOST ? 1 : 2;
    cxlkv_sharing sharing = {.kind = kind, .hosts = hosts};
    cxlkv_layout layout = object_layout(SMALL, checksum);
    cxlkv_pool *pools[2];
    worker workers[THREADS];
    pthread_t threads[THREADS];
    cxlkv_host host = {.lease_s = 5};
    uint32_t puts = 0, gets = 0, leases = 0;
    CHECK(cxlkv_pool_create(path, &layout, &sharing, 4 << 20, 0, &host, 0, &pools[0]) == 0);
    host.number = 1;
    if (hosts == 2) CHECK(cxlkv_pool_open(path, &host, &pools[1]) == 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){.pool = pools[i % hosts], .seed = seed + i, .rounds = 400};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        puts += workers[i].puts, gets += workers[i].gets, leases += workers[i].leases;
    }
    test_comes_back(pools, hosts, forget_all);
    printf("%u hosts: %u new, %u got, %u looked at in place\n", hosts, puts, gets, leases);
    CHECK(puts && gets && leases);
    for (uint32_t i = 0; i < hosts; i++) test_end(&pools[i], NULL);
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* One thread publishes what another gives back: each page is an object, or free. */
static cxlkv_lease *contended;

static void *give_back(void *context) {
    (void)context;
    for (uint32_t place = 0; place < NAMES; place++) {
        CHECK(cxlkv_lease_release(contended, 1, &place) == 0);
        sched_yield();
    }
    return NULL;
}

static void test_publish_and_release(void) {
    cxlkv_pool *pool = object_pool(NULL, SMALL, true, 4 << 20, 2);
    uint64_t sizes[NAMES], addresses[NAMES];
    uint32_t published = 0, refused = 0;
    for (uint32_t turn = 0; turn < 200; turn++) {
        pthread_t thread;
        for (uint32_t i = 0; i < NAMES; i++) sizes[i] = SMALL;
        CHECK(cxlkv_lease_reserve(pool, NAMES, sizes, addresses, &contended) == NAMES);
        for (uint32_t i = 0; i < NAMES; i++)
            fill((uint8_t *)(uintptr_t)addresses[i], i, SMALL);
        CHECK(pthread_create(&thread, NULL, give_back, NULL) == 0);
        for (uint32_t place = NAMES; place-- > 0;) {
            int32_t code;
            int64_t new =
                cxlkv_lease_publish(contended, 1, &place, key_of(place).bytes, &code);
            CHECK(new == 1 || new == -CXLKV_E_RELEASED);
            published += new == 1;
            refused += new < 0;
        }
        pthread_join(thread, NULL);
        cxlkv_lease_destroy(&contended);
        CHECK(test_stats(pool).pages.held == 0);
        for (uint64_t name = 0; name < NAMES; name++)
            if (size_of(pool, name) >= 0) expect(pool, name, name, SMALL, &seed);
        forget_all(pool);
    }
    printf("%u published, %u given back before\n", published, refused);
    CHECK(published && test_stats(pool).pages.free == test_stats(pool).pages.total);
    test_end(&pool, NULL);
}

int main(void) {
    seed = test_seed();
    for (uint32_t i = 0; i < 4; i++) {
        test_sizes(i & 1, 1 + i / 2);
        test_ranges(i & 1, 1 + i / 2);
        test_reserve(i & 1, 1 + i / 2);
    }
    test_batches(1);
    test_batches(2);
    test_close_together();
    test_chain();
    test_lease();
    test_other_pools();
    for (int where = 0; where < 2 * PLACES; where++) test_damage(where / 2, where % 2);
    test_hostile_layouts();
    test_storm(CXLKV_SHARING_HOST, false);
    test_storm(CXLKV_SHARING_HOST, true);
    test_storm(CXLKV_SHARING_HW_COHERENT, false);
    test_storm(CXLKV_SHARING_SOFTWARE, true);
    test_publish_and_release();
    return 0;
}
