/* Goal: what was forgotten of a host that does not run is found by nobody, for as long as it does
 * not run; and what it publishes later is. Method: three hosts of a pool of objects in one process;
 * one makes no call and its keeper sleeps, as if it were dead. Its objects are forgotten by
 * another, whose log is then written over many times; a third is there, or comes late. Wishes that
 * a log has no room for are counted. And two hosts put one object at the same time: one reads past
 * the other's record of it, so that each has a copy. */
#include "coherence/host_log.h"
#include "object_tests.h"
#include "pages/published.h"

enum { WISHES, DEAD, OTHER, HOSTS };
enum { OBJECT_BYTES = 8192, LOG_RECORDS = 64, FEW = 20, MANY = 80, LAPS = 4 };
#define LEASE_S 3600 /* keepers work twenty times a lease */
static uint64_t seed = 20261122;

static void write_log_over(cxlkv_pool *pool) {
    for (uint64_t i = 0; i < LAPS * LOG_RECORDS / 2; i++) {
        CHECK(put(pool, 9000, i, OBJECT_BYTES, &seed) == 1);
        CHECK(forget(pool, 9000) == 1);
    }
}

static uint64_t count_found(cxlkv_pool *pool, uint64_t objects) {
    uint64_t found = 0;
    for (uint64_t i = 0; i < objects; i++) found += size_of(pool, i) >= 0;
    return found;
}

static cxlkv_pool *make(const char *path) {
    return test_shared(path, object_layout(OBJECT_BYTES, true),
                       (cxlkv_sharing){.hosts = HOSTS, .log_records = LOG_RECORDS}, 8 << 20,
                       LEASE_S);
}

static void test_wishes(uint64_t objects) {
    const char *path = test_path("forgotten");
    cxlkv_pool *pools[HOSTS] = {make(path)};
    pools[DEAD] = test_open_host(path, DEAD, LEASE_S);
    pools[OTHER] = test_open_host(path, OTHER, LEASE_S);
    for (uint64_t i = 0; i < objects; i++)
        CHECK(put(pools[DEAD], i, i, OBJECT_BYTES, &seed) == 1);
    CHECK(count_found(pools[OTHER], objects) == objects);
    for (uint64_t i = 0; i < objects; i++) CHECK(forget(pools[WISHES], i) == 1);
    CHECK(put(pools[WISHES], 0, 77, 100, &seed) == 1);
    if (objects <= LOG_RECORDS / 2) CHECK(count_found(pools[OTHER], objects) == 1);
    cxlkv_pool_destroy(&pools[OTHER]);
    write_log_over(pools[WISHES]);
    pools[OTHER] = test_open_host(path, OTHER, LEASE_S);
    uint64_t lost = test_stats(pools[WISHES]).all.lost_forgets;
    uint64_t found = count_found(pools[OTHER], objects);
    printf("%lu wishes: %lu lost, %lu found again\n", objects, lost, found - 1);
    CHECK(found - 1 <= lost && (objects > LOG_RECORDS / 2) == (lost > 0));
    expect(pools[OTHER], 0, 77, 100, &seed);
    /* It runs again: what it reads in the logs it carries out, and it may say something new. */
    CHECK(forget(pools[DEAD], 1) == 0 || lost);
    CHECK(put(pools[DEAD], 1, 5, OBJECT_BYTES, &seed) == 1 || lost);
    if (!lost) expect(pools[OTHER], 1, 5, OBJECT_BYTES, &seed);
    for (uint32_t i = 0; i < HOSTS; i++) cxlkv_pool_destroy(&pools[i]);
    CHECK(cxlkv_pool_remove(path) == 0);
}

static void test_two_copies(void) {
    const char *path = test_path("copies");
    cxlkv_pool *one = make(path), *two = test_open_host(path, 1, LEASE_S);
    for (uint64_t evicts = 0; evicts < 2; evicts++) {
        uint64_t hash[2];
        page_hash(key_of(evicts).bytes, 0, 0, 0, hash);
        CHECK(put(one, evicts, 7, OBJECT_BYTES, &seed) == 1);
        hosts_skip_log(&two->hosts, 0, &two->host->views[0].log);
        CHECK(put(two, evicts, 7, OBJECT_BYTES, &seed) == 1);
        expect(one, evicts, 7, OBJECT_BYTES, &seed);
        uint32_t page = index_find(two, hash);
        uint64_t generation = two->pages[page].generation;
        int32_t code;
        if (evicts) CHECK(cxlkv_forget_pages(two, 1, &page, &generation, 1, &code) == 1);
        else CHECK(forget(two, 0) == 1);
        CHECK(size_of(one, evicts) == (evicts ? OBJECT_BYTES : CXLKV_OBJECT_ABSENT));
        CHECK(size_of(two, evicts) == CXLKV_OBJECT_ABSENT);
    }
    CHECK(put(two, 0, 8, OBJECT_BYTES, &seed) == 1); /* what was forgotten does not go twice */
    expect(one, 0, 8, OBJECT_BYTES, &seed);
    expect(two, 0, 8, OBJECT_BYTES, &seed);
    cxlkv_pool_destroy(&one);
    test_remove(&two, path);
}

int main(void) {
    test_two_copies();
    test_wishes(FEW);
    test_wishes(MANY);
    return 0;
}
