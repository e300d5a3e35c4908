/* Goal: objects that one host puts, or writes in place, are read by another whose caches do not see
 * the first one's; what is held stays, and what a host leaves behind in its caches hurts nobody.
 * Method: two hosts of one process on private caches (private_caches.h), the whole core above them;
 * copies that go past the caches, and copies that do not; one thread, and two.
 *
 * `make mutants` leaves the write-backs out one by one: then this test must fail. */
#include "format/records.h"
#include "object_tests.h"
#include "pages/pages.h"
#include "private_caches.h"

enum { OBJECT_BYTES = 300 << 10, SLOT_BYTES = 4096, SMALL = 5000, TWINS = 40, MODES = 8 };
static uint64_t seed = 20261122;

/* What a run of the test differs in. */
typedef struct variant {
    bool streams, certified;
    uint32_t threads;
    bool slots;                  /* objects of several pages */
} variant;

typedef struct scene {
    const char *path;
    cxlkv_pool *hosts[2];
} scene;

static cxlkv_pool *open_host(const char *path, uint32_t number, const variant *v) {
    cxlkv_host host = {.number = number, .certified = v->certified, .lease_s = 60};
    cxlkv_pool *pool = test_open(path, &host);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, v->threads) == 0);
    return pool;
}

static scene begin(const variant *v) {
    scene s = {.path = test_path("private")};
    private_kernels.streams = v->streams;
    CHECK(kernels_force("serial") == 0);
    cxlkv_layout layout = object_layout(v->slots ? SLOT_BYTES : OBJECT_BYTES, true);
    layout.object_bytes = v->slots ? OBJECT_BYTES : 0;
    cxlkv_pool *made = test_shared(s.path, layout, (cxlkv_sharing){.hosts = 2}, 16 << 20, 60);
    cxlkv_pool_destroy(&made);
    for (uint32_t i = 0; i < 2; i++) {
        s.hosts[i] = open_host(s.path, i, v);
        cache_begin(s.hosts[i]);
    }
    return s;
}

static void end(scene *s) {
    for (uint32_t i = 0; i < 2; i++)
        if (s->hosts[i]) test_end(&s->hosts[i], NULL);
    caches_end();
    CHECK(cxlkv_pool_remove(s->path) == 0);
}

/* ---- what is seen by the other host ---- */

static void test_put(scene *s) {
    static const uint64_t sizes[] = {1, 63, 64, 65, 4097, SMALL, OBJECT_BYTES - 1,
                                     OBJECT_BYTES};
    for (uint64_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        cxlkv_pool *writer = s->hosts[i % 2], *reader = s->hosts[1 - i % 2];
        expect(reader, i, 0, CXLKV_OBJECT_ABSENT, &seed);
        CHECK(put(writer, i, i, sizes[i], &seed) == 1);
        expect(reader, i, i, (int64_t)sizes[i], &seed);
        CHECK(put(reader, i, 99, SMALL, &seed) == 0); /* the first one stays */
        expect(writer, i, i, (int64_t)sizes[i], &seed);
    }
    for (uint64_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        CHECK(forget(s->hosts[i % 2], i) == 1);
}

/* A page that is put again is another object for who had the old one in its cache. */
static void test_again(scene *s) {
    for (uint64_t turn = 0; turn < 6; turn++) {
        CHECK(put(s->hosts[0], 20, 30 + turn, SMALL + turn, &seed) == 1);
        expect(s->hosts[1], 20, 30 + turn, (int64_t)(SMALL + turn), &seed);
        CHECK(forget(s->hosts[turn % 2], 20) == 1); /* its owner's, or the other's word */
        expect(s->hosts[turn % 2], 20, 0, CXLKV_OBJECT_ABSENT, &seed);
        for (uint64_t look = 0; turn % 2 == 1 && look < 2; look++) /* the owner reads of it */
            expect(s->hosts[0], 20, 0, CXLKV_OBJECT_ABSENT, &seed);
    }
}

/* Another object in place of one, by either host; then all go, but what the other host reads. */
static void test_replaced(scene *s) {
    for (uint64_t turn = 0; turn < 6; turn++) {
        cxlkv_pool *writer = s->hosts[turn % 3 == 2], *reader = s->hosts[turn % 3 != 2];
        uint64_t size = turn % 2 ? SMALL : OBJECT_BYTES - turn;
        CHECK(put_as(writer, 25, 50 + turn, size, 1, &seed) == 1);
        expect(writer, 25, 50 + turn, (int64_t)size, &seed);
        for (int look = 0; look < 2; look++) /* and the owner of the old one reads of it */
            expect(reader, 25, 50 + turn, (int64_t)size, &seed);
    }
    CHECK(cxlkv_objects_remove(s->hosts[0], 0, NULL, NULL) == 1);
    for (int look = 0; look < 2; look++)
        for (int host = 0; host < 2; host++)
            expect(s->hosts[host], 25, 0, CXLKV_OBJECT_ABSENT, &seed);
}

/* By plain stores. */
static void test_in_place(scene *s) {
    const uint64_t sizes[3] = {SMALL, OBJECT_BYTES, 77};
    const uint32_t places[3] = {0, 1, 2};
    uint64_t addresses[3];
    uint8_t keys[48];
    int32_t codes[3];
    cxlkv_lease *reserved;
    for (uint64_t i = 0; i < 3; i++) test_hashes(keys + 16 * i, 40 + i, 1);
    CHECK(cxlkv_lease_reserve(s->hosts[0], 3, sizes, addresses, &reserved) == 3);
    for (uint64_t i = 0; i < 3; i++) fill((uint8_t *)addresses[i], 40 + i, sizes[i]);
    for (uint64_t i = 0; i < 3; i++) expect(s->hosts[1], 40 + i, 0, CXLKV_OBJECT_ABSENT, &seed);
    CHECK(cxlkv_lease_publish(reserved, 3, places, keys, codes) == 3);
    for (uint64_t i = 0; i < 3; i++) expect(s->hosts[1], 40 + i, 40 + i, (int64_t)sizes[i], &seed);
    CHECK(cxlkv_lease_publish(reserved, 3, places, keys, codes) == 0);
    cxlkv_lease_destroy(&reserved);
    for (uint64_t i = 0; i < 3; i++) expect(s->hosts[1], 40 + i, 40 + i, (int64_t)sizes[i], &seed);
    for (uint64_t i = 0; i < 3; i++) CHECK(forget(s->hosts[0], 40 + i) == 1);
}

/* As a cold tier keeps it, by the host that has not put it. */
static void test_restored(scene *s) {
    cxlkv_pool *putter = s->hosts[0], *restorer = s->hosts[1];
    uint64_t bytes = record_packed_bytes(putter), generation;
    uint8_t *record = malloc(bytes);
    int32_t code;
    CHECK(record && put(putter, 45, 45, SMALL, &seed) == 1);
    uint32_t page = page_of(putter, 45, &generation);
    CHECK(cxlkv_records_read(putter, 1, &page, &generation, record, &code) == 1);
    CHECK(forget(putter, 45) == 1);
    CHECK(cxlkv_records_write(restorer, 1, record, NULL, &code) == 1 && code == 0);
    expect(putter, 45, 45, SMALL, &seed);
    expect(restorer, 45, 45, SMALL, &seed);
    CHECK(forget(restorer, 45) == 1);
    free(record);
}

/* ---- what is held ---- */

static cxlkv_pool *forgetting;
static uint32_t pins_seen;

/* Between two batches of pins, if there are two. */
static bool forget_between(enum flush_site site) {
    pins_seen += site == FLUSH_PIN;
    if (pins_seen < 2) return false;
    CHECK(forget(forgetting, 50) == 1);
    return true;
}

/* More twins than are pinned together; the owner forgets, and writes all its other pages. */
static void test_pinned(scene *s) {
    cxlkv_pool *owner = s->hosts[0], *reader = s->hosts[1];
    uint8_t keys[TWINS * 16];
    uint64_t addresses[TWINS], used = 0;
    int64_t sizes[TWINS];
    cxlkv_lease *lease;
    CHECK(put(owner, 50, 50, SMALL, &seed) == 1);
    for (uint64_t i = 0; i < TWINS; i++) test_hashes(keys + 16 * i, 50, 1);
    forgetting = owner;
    pins_seen = 0;
    meanwhile = forget_between;
    CHECK(cxlkv_lease_take(reader, TWINS, keys, addresses, sizes, &lease) == TWINS);
    if (meanwhile) CHECK(forget(owner, 50) == 1);
    meanwhile = NULL;
    for (uint32_t i = 0; i < TWINS; i++)
        CHECK(sizes[i] == SMALL ? addresses[i] == addresses[0] : addresses[i] == 0);
    const uint32_t last = TWINS - 1;
    CHECK(sizes[0] == SMALL && cxlkv_lease_release(lease, 1, &last) == 0); /* one of many */
    CHECK(test_stats(owner).pages.withdrawn == 1);
    while (put(owner, 1000 + used, 1000 + used, SMALL, &seed) == 1) used++;
    cache_evict(0);
    flush_invalidate(FLUSH_NONE, (void *)addresses[0], SMALL); /* whatever memory has now */
    CHECK(used > 0 && is_filled((uint8_t *)addresses[0], 50, SMALL));
    expect(reader, 50, 0, CXLKV_OBJECT_ABSENT, &seed);
    cxlkv_lease_destroy(&lease);
    CHECK(put(owner, 1000 + used, 1000 + used, SMALL, &seed) == 1); /* now there is room for it */
    CHECK(test_stats(owner).pages.withdrawn == 0);
    for (uint64_t i = 0; i <= used; i++) expect(reader, 1000 + i, 1000 + i, SMALL, &seed);
    for (uint64_t i = 0; i <= used; i++) CHECK(forget(owner, 1000 + i) == 1);
}

/* Memory that another host's object lies in is changed by nobody's put. */
static void test_damaged(scene *s) {
    cxlkv_pool *owner = s->hosts[0], *reader = s->hosts[1];
    const uint8_t *mapped;
    int64_t size;
    CHECK(put(owner, 60, 60, SMALL, &seed) == 1);
    cxlkv_lease *lease = lease_of(owner, 60, &size, &mapped);
    uint8_t *at = caches[0].memory + (mapped - caches[0].base);
    at[SMALL / 2] ^= 1;
    expect(reader, 60, 0, CXLKV_OBJECT_DAMAGED, &seed);
    at[SMALL / 2] ^= 1;
    expect(reader, 60, 60, SMALL, &seed);
    cxlkv_lease_destroy(&lease);
    CHECK(forget(owner, 60) == 1);
}

/* ---- what a host leaves behind ---- */

static bool memory_has(const cxlkv_pool *pool, const void *address, uint64_t bytes) {
    uint64_t at = (uint64_t)((const uint8_t *)address - pool->region.base);
    for (uint64_t i = 0; i < bytes; i++)
        if (caches[0].memory[at + i]) return true;
    return false;
}

/* Nothing of it is in memory, also not what a reader on another host kept for a while. */
static void test_scrubbed(scene *s) {
    cxlkv_pool *owner = s->hosts[0], *reader = s->hosts[1];
    for (uint64_t kept = 0; kept < 2; kept++) {
        const object_key key = key_of(65 + kept);
        uint64_t generation;
        int64_t size;
        const uint8_t *held = NULL;
        cxlkv_lease *lease = NULL;
        cxlkv_scrubbed scrubbed;
        CHECK(put(owner, 65 + kept, 65, SMALL, &seed) == 1);
        uint32_t page = page_of(owner, 65 + kept, &generation);
        const uint8_t *at = pieces_of(owner, page, 0, PIECE_KEYS);
        CHECK(memory_has(owner, at, SMALL));
        CHECK(memory_has(owner, checksum_of(owner, page, 0, 0, 0), 64));
        if (kept) lease = lease_of(reader, 65 + kept, &size, &held);
        CHECK(cxlkv_forget(reader, 1, key.bytes, &scrubbed) == 0 && scrubbed.elsewhere == 1);
        CHECK(cxlkv_forget(owner, 1, key.bytes, &scrubbed) == 1);
        CHECK(scrubbed.pages == 1 - kept && scrubbed.held == kept && scrubbed.elsewhere == 0);
        if (kept) {
            CHECK(size == SMALL && is_filled(held, 65, SMALL));
            cxlkv_lease_destroy(&lease);
            CHECK(host_lock(owner) == 0);
            withdrawn_look(owner);
            host_unlock(owner);
        }
        CHECK(!memory_has(owner, at, SMALL));
        CHECK(!memory_has(owner, checksum_of(owner, page, 0, 0, 0), 64));
        expect(reader, 65 + kept, 65, CXLKV_OBJECT_ABSENT, &seed);
    }
}

/* It wrote in place, did not publish, and leaves; its cache writes the lines back much later. */
static void test_left(scene *s, const variant *v) {
    uint64_t total = test_stats(s->hosts[1]).pages.total, count = 0, before = lines_evicted;
    cxlkv_stats mine = test_stats(s->hosts[0]);
    uint64_t own = mine.pages.total - mine.pages.elsewhere;
    uint64_t *sizes = malloc(own * 8), *addresses = malloc(own * 8);
    cxlkv_lease *reserved;
    CHECK(own && sizes && addresses);
    for (uint64_t i = 0; i < own; i++) sizes[i] = OBJECT_BYTES;
    CHECK(cxlkv_lease_reserve(s->hosts[0], (uint32_t)own, sizes, addresses, &reserved) >= 0);
    for (uint64_t i = 0; i < own; i++) fill((uint8_t *)addresses[i], 70, OBJECT_BYTES);
    if (v->certified) cxlkv_lease_destroy(&reserved); /* else the pool's end gives them back */
    cxlkv_pool_destroy(&s->hosts[0]);
    if (!v->certified) cxlkv_lease_destroy(&reserved);
    s->hosts[0] = NULL;
    while (put(s->hosts[1], 100 + count, 100 + count, OBJECT_BYTES, &seed) == 1) count++;
    CHECK(count == total);
    cache_evict(0);
    for (uint64_t i = 0; i < count; i++)
        expect(s->hosts[1], 100 + i, 100 + i, OBJECT_BYTES, &seed);
    cache_evict(1);
    for (uint32_t page = 0; page < total; page++) { /* as it stands in memory */
        const cxlkv_pool *other = s->hosts[1];
        uint64_t at = (uint64_t)(pieces_of(other, page, 0, PIECE_KEYS) - other->region.base);
        CHECK(memcmp(caches[1].memory + at, caches[1].lines + at, OBJECT_BYTES) == 0);
    }
    printf("%lu lines of a host that had left\n", lines_evicted - before);
    free(sizes);
    free(addresses);
}

int main(void) {
    for (uint32_t i = 0; i < MODES; i++) {
        variant v = {.streams = i & 1, .certified = (i & 2) != 0, .threads = 1 + (i >> 2)};
        variant in_slots = {v.streams, v.certified, v.threads, true};
        scene s = begin(&in_slots);
        test_put(&s);
        test_again(&s);
        test_replaced(&s);
        end(&s);
        s = begin(&v);
        test_put(&s);
        test_again(&s);
        test_in_place(&s);
        test_restored(&s);
        test_pinned(&s);
        test_damaged(&s);
        test_scrubbed(&s);
        test_left(&s, &v);
        end(&s);
    }
    return 0;
}
