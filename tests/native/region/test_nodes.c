/* Goal: a pool's pages lie on the nodes that were asked for, whoever opens it can read that back,
 * and a wish that the kernel does not grant leaves nothing behind.
 * Method: node 0, which every machine has; a node that is nowhere; counts against the mapping. Two
 * nodes are tests/support/numa_guest.py's. */
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"
#include "region/nodes.h"

enum { SKIPPED = 77, CAPACITY_BYTES = 8 << 20 };

static cxlkv_pool *make(const char *path, uint64_t nodes, int *code) {
    cxlkv_layout layout = test_layout();
    cxlkv_pool *pool = NULL;
    *code = cxlkv_pool_create(path, &layout, NULL, CAPACITY_BYTES, 0, NULL, nodes, &pool);
    return pool;
}

static void check_bound(cxlkv_pool *pool) {
    cxlkv_placed placed;
    uint64_t pages = pool->region.mapped_bytes / pool->region.unit_bytes;
    CHECK(cxlkv_pool_placed(pool, 0, &placed) == 0);
    CHECK(placed.policy == CXLKV_POLICY_BIND && placed.wanted_nodes == 1);
    CHECK(placed.page_bytes == pool->region.unit_bytes && placed.pages_seen == pages);
    CHECK(placed.pages_on[0] == pages && placed.pages_unseen == 0 && placed.pages_elsewhere == 0);
    for (uint64_t most = 1; most <= pages; most = most * 7 + 1) {
        CHECK(cxlkv_pool_placed(pool, most, &placed) == 0);
        CHECK(placed.pages_seen == most && placed.pages_on[0] == most);
    }
}

static void test_bound(void) {
    const char *path = test_path("place");
    int code;
    cxlkv_pool *pool = make(path, 1, &code), *other;
    CHECK(code == 0);
    check_bound(pool);
    CHECK(cxlkv_pool_open(path, NULL, &other) == 0); /* it was told nothing of nodes */
    check_bound(other);
    cxlkv_pool_destroy(&other);
    test_remove(&pool, path);
    pool = make(NULL, 1, &code);
    CHECK(code == 0);
    check_bound(pool);
    cxlkv_pool_destroy(&pool);
}

/* Pages that nobody used are not taken by looking. */
static void test_no_wish(void) {
    int code;
    cxlkv_placed placed, again;
    cxlkv_pool *pool = make(NULL, 0, &code);
    CHECK(code == 0 && cxlkv_pool_placed(pool, 0, &placed) == 0);
    CHECK(placed.policy == CXLKV_POLICY_DEFAULT && placed.wanted_nodes == 0);
    uint64_t pages = pool->region.mapped_bytes / pool->region.unit_bytes;
    CHECK(placed.pages_seen + placed.pages_unseen == pages && placed.pages_elsewhere == 0);
    CHECK(pool->region.unit_bytes != 4096 || placed.pages_unseen > pages / 2);
    CHECK(cxlkv_pool_placed(pool, 0, &again) == 0);
    CHECK(memcmp(&placed, &again, sizeof(placed)) == 0);
    cxlkv_pool_close(pool, 0);
    CHECK(cxlkv_pool_placed(pool, 0, &placed) == -CXLKV_E_CLOSED);
    cxlkv_pool_destroy(&pool);
}

static bool has_node(int node) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof(path), "/sys/devices/system/node/node%d", node);
    return stat(path, &status) == 0;
}

static void test_refused(void) {
    const char *path = test_path("place-refused");
    struct stat status;
    int code;
    for (int node = 62; node < CXLKV_NODES_MAX && !has_node(62) && !has_node(63); node++)
        for (int several = 0; several < 2; several++) {
            uint64_t nodes = 1ull << node | (several ? 1ull << 62 | 1ull << 63 : 0);
            CHECK(make(path, nodes, &code) == NULL && code == -EINVAL);
            CHECK(strstr(cxlkv_error_text(), "cannot bind memory to the nodes of mask 0x"));
            CHECK(strstr(cxlkv_error_text(), "has no memory"));
            CHECK(stat(path, &status) < 0 && errno == ENOENT);
            CHECK(make(NULL, nodes, &code) == NULL && code == -EINVAL);
        }
}

/* In the pool's file, whole or not at all: the policy and the pages are what open() sees. */
static void test_a_file_without_policy(void) {
    const char *path = test_path("place-none");
    cxlkv_placed placed;
    int code;
    cxlkv_pool *pool = make(path, 0, &code);
    CHECK(code == 0 && cxlkv_pool_placed(pool, 16, &placed) == 0);
    CHECK(placed.wanted_nodes == 0 && placed.pages_seen + placed.pages_unseen == 16);
    pool->region.nodes = 1;
    CHECK(nodes_verify(&pool->region) == -ENOTSUP);
    CHECK(strstr(cxlkv_error_text(), "the kernel did not bind the pool"));
    test_remove(&pool, path);
}

int main(void) {
    int policy;
    if (syscall(SYS_get_mempolicy, &policy, NULL, 0ul, NULL, 0) < 0) {
        fprintf(stderr, "get_mempolicy: %s: a container or an emulator forbids it\n",
                strerror(errno));
        return SKIPPED;
    }
    test_bound();
    test_no_wish();
    test_refused();
    test_a_file_without_policy();
    return 0;
}
