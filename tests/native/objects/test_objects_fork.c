/* Goal: a child has references of its own to the leases and reservations that it inherits; they go
 * with it, however it ends. Method: a real child that outlives what its parent gave back, and ends
 * by itself or by SIGKILL. */
#include <signal.h>

#include "object_tests.h"

enum { SMALL = 3000 };
static uint64_t seed;

static void test_child(bool killed) {
    const char *path = test_path("objects");
    cxlkv_pool *pool = object_pool(path, SMALL, true, 4 << 20, 2);
    const uint64_t sizes[2] = {SMALL, SMALL};
    const uint32_t places[2] = {0, 1};
    uint64_t addresses[2];
    uint8_t keys[32], byte;
    const uint8_t *at;
    int64_t size;
    int32_t codes[2];
    int to_child[2], to_parent[2];
    cxlkv_lease *reserved;
    CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
    CHECK(put(pool, 1, 1, SMALL, &seed) == 1);
    cxlkv_lease *lease = lease_of(pool, 1, &size, &at);
    CHECK(cxlkv_lease_reserve(pool, 2, sizes, addresses, &reserved) == 2);
    pid_t child = test_fork();
    /* Who waits for a process that died at a failed check then reads the end of its pipe. */
    close(to_child[child == 0]);
    close(to_parent[child != 0]);
    if (child == 0) {
        CHECK(read(to_child[0], &byte, 1) == 1); /* the parent has given all back */
        CHECK(is_filled(at, 1, SMALL));
        CHECK(cxlkv_pool_close(pool, 0) == -CXLKV_E_BUSY);
        for (uint64_t i = 0; i < 2; i++) {
            fill((uint8_t *)(uintptr_t)addresses[i], 10 + i, SMALL);
            test_hashes(keys + 16 * i, 10 + i, 1);
        }
        CHECK(cxlkv_lease_publish(reserved, 1, places, keys, codes) == 1);
        if (killed) {
            CHECK(write(to_parent[1], &byte, 1) == 1);
            for (;;) pause();
        }
        CHECK(cxlkv_lease_publish(reserved, 1, places + 1, keys + 16, codes) == 1);
        cxlkv_lease_destroy(&lease);
        cxlkv_lease_destroy(&reserved);
        CHECK(cxlkv_pool_close(pool, 0) == 0);
        CHECK(write(to_parent[1], &byte, 1) == 1);
        _exit(0);
    }
    cxlkv_lease_destroy(&lease);
    cxlkv_lease_destroy(&reserved);
    CHECK(cxlkv_pool_close(pool, 1) == 0);
    CHECK(forget(pool, 1) == 1 && test_stats(pool).pages.held == 3);
    while (put(pool, 1000 + (uint64_t)size++, 5, SMALL, &seed) == 1) continue;
    CHECK(write(to_child[1], "x", 1) == 1 && read(to_parent[0], &byte, 1) == 1);
    if (killed) CHECK(kill(child, SIGKILL) == 0);
    test_ended(child, killed ? SIGKILL : 0);
    CHECK(test_stats(pool).pages.held == 0);
    expect(pool, 10, 10, SMALL, &seed);
    expect(pool, 11, 11, killed ? CXLKV_OBJECT_ABSENT : SMALL, &seed);
    CHECK(test_stats(pool).pages.free == (killed ? 2u : 1u));
    test_clean(pool);
    test_remove(&pool, path);
    close(to_child[1]);
    close(to_parent[0]);
}

int main(void) {
    NOT_UNDER_TSAN("TSan dies of threads that are made after a fork");
    seed = test_seed();
    test_child(false);
    test_child(true);
    return 0;
}
