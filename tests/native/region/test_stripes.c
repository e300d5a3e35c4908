/* Goal: several files as one region hold each byte once and in turn, and labels that are wrong in
 * any way are refused before a byte is believed.
 * Method: files of a fixed size stand for devices; labels with bits turned. True devices are
 * `make test-drivers`; what a user sees is tests/machine/test_stripes.py's. */
#include <fcntl.h>

#include "base/crc32c.h"
#include "check.h"
#include "pool/create.h"

enum { MEMBERS = 3, MEMBER_BYTES = 8 << 20, STRIPE_BYTES = 2 << 20, CAPACITY_BYTES = 14 << 20 };

static char names[MEMBERS][96], where[512];

static void make_members(void) {
    size_t at = (size_t)snprintf(where, sizeof(where), "dax:");
    for (int i = 0; i < MEMBERS; i++) {
        snprintf(names[i], sizeof(names[i]), "/dev/shm/cxlkv-test-part-%d-%d", (int)getpid(), i);
        int fd = open(names[i], O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        CHECK(fd >= 0 && ftruncate(fd, MEMBER_BYTES) == 0);
        close(fd);
        at += (size_t)snprintf(where + at, sizeof(where) - at, "%s%s", i ? "+" : "", names[i]);
    }
}

static cxlkv_pool *create(uint64_t bytes, uint32_t flags, int *code) {
    cxlkv_layout layout = test_layout();
    cxlkv_pool *pool = NULL;
    *code = cxlkv_pool_create(where, &layout, NULL, bytes, flags, NULL, 0, &pool);
    return pool;
}

static uint64_t word_in(int member, uint64_t offset) {
    uint64_t word = 0;
    int fd = open(names[member], O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && pread(fd, &word, sizeof(word), (off_t)offset) == sizeof(word));
    close(fd);
    return word;
}

/* As cxlkv_inspect() reads it: over every seam between two stripes, and not beyond the end. */
static void check_reading(const cxlkv_pool *pool) {
    enum { BESIDE_BYTES = 100 };
    uint8_t bytes[2 * BESIDE_BYTES];
    members *all;
    CHECK(striped_inspect(where, &all) == 0);
    uint64_t size = stripes_bytes(all);
    CHECK(size >= pool->geometry.region_bytes);
    for (uint64_t seam = STRIPE_BYTES; seam < pool->region.mapped_bytes; seam += STRIPE_BYTES) {
        CHECK(stripes_read(all, seam - BESIDE_BYTES, bytes, sizeof(bytes)));
        CHECK(memcmp(bytes, pool->region.base + seam - BESIDE_BYTES, sizeof(bytes)) == 0);
    }
    CHECK(!stripes_read(all, size - BESIDE_BYTES, bytes, sizeof(bytes)));
    stripes_close(all);
    for (uint32_t i = 0; i < MEMBERS; i++) {
        cxlkv_stripe part;
        CHECK(cxlkv_stripe_inspect(names[i], &part) == 0 && part.index == i &&
              part.count == MEMBERS);
        CHECK(memcmp(part.identity, pool->identity, sizeof(part.identity)) == 0);
    }
    CHECK(cxlkv_stripe_inspect("/dev/null", &(cxlkv_stripe){0}) == -CXLKV_E_NOT_A_POOL);
}

/* A word at the start and one at the end of each stripe, looked for in the files. */
static void test_bytes_in_turn(void) {
    int code;
    cxlkv_pool *pool = create(CAPACITY_BYTES, 0, &code), *other;
    CHECK(code == 0);
    uint64_t stripes = pool->region.mapped_bytes / STRIPE_BYTES;
    CHECK(stripes >= MEMBERS && pool->geometry.region_bytes > 4 * STRIPE_BYTES);
    for (uint64_t i = 1; i < stripes; i++)
        for (int end = 0; end < 2; end++) {
            uint64_t at = i * STRIPE_BYTES + (end ? STRIPE_BYTES - 8 : 0);
            uint64_t before, word = 1000 + 2 * i + (uint64_t)end;
            memcpy(&before, pool->region.base + at, 8);
            memcpy(pool->region.base + at, &word, 8);
            uint64_t offset = STRIPE_BYTES + i / MEMBERS * STRIPE_BYTES + at % STRIPE_BYTES;
            CHECK(word_in((int)(i % MEMBERS), offset) == word);
            if (end) memcpy(pool->region.base + at, &before, 8);
        }
    check_reading(pool);
    CHECK(cxlkv_pool_open(where, NULL, &other) == 0);
    cxlkv_pool_destroy(&other);
    CHECK(cxlkv_pool_remove(where) == -CXLKV_E_BUSY);
    CHECK(create(CAPACITY_BYTES, CXLKV_CREATE_FORCE, &code) == NULL && code == -CXLKV_E_BUSY);
    cxlkv_pool_destroy(&pool);
}

static void put(int member, const uint8_t *bytes, size_t count) {
    int fd = open(names[member], O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, bytes, count, 0) == (ssize_t)count);
    close(fd);
}

/* Numbers with a right CRC that no writer would make, and every bit that is turned. */
static void test_labels(void) {
    uint8_t whole[64], changed[64];
    cxlkv_pool *pool;
    int fd = open(names[1], O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && read(fd, whole, sizeof(whole)) == sizeof(whole));
    close(fd);
    for (uint32_t bit = 0; bit < 60 * 8; bit++) {
        memcpy(changed, whole, sizeof(whole));
        changed[bit / 8] ^= (uint8_t)(1 << bit % 8);
        put(1, changed, sizeof(changed));
        CHECK(cxlkv_pool_open(where, NULL, &pool) < 0);
    }
    static const uint64_t hostile[] = {0, 1, 4096, 3 << 20, 1ull << 41, UINT64_MAX, 1ull << 63};
    for (size_t i = 0; i < sizeof(hostile) / sizeof(*hostile); i++)
        for (size_t at = 24; at <= 32; at += 8) { /* stripe_bytes, data_offset: in all labels */
            for (int member = 0; member < MEMBERS; member++) {
                memcpy(changed, whole, sizeof(whole));
                memcpy(changed + at, &hostile[i], 8);
                memcpy(changed + 12, &member, 4);
                uint32_t crc = crc32c(0, changed, 56);
                memcpy(changed + 56, &crc, 4);
                put(member, changed, sizeof(changed));
            }
            CHECK(cxlkv_pool_open(where, NULL, &pool) == -CXLKV_E_CORRUPT);
        }
    CHECK(cxlkv_pool_remove(where) == 0); /* damaged ones may go */
    CHECK(cxlkv_pool_open(where, NULL, &pool) == -CXLKV_E_NOT_A_POOL);
}

static void test_refused(void) {
    int code;
    cxlkv_pool *pool;
    static const char *const wrong[] = {"dax:", "dax:+", "dax:/dev/null+/dev/zero", "dax:a",
                                        "dax:/dev/shm/cxlkv-nowhere+/dev/shm/cxlkv-nowhere"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++)
        CHECK(cxlkv_pool_open(wrong[i], NULL, &pool) < 0);
    char twice[256];
    snprintf(twice, sizeof(twice), "dax:%s+%s", names[0], names[0]);
    CHECK(cxlkv_pool_open(twice, NULL, &pool) == -CXLKV_E_ARGUMENT);
    CHECK(truncate(names[2], 100) == 0);
    CHECK(cxlkv_pool_open(where, NULL, &pool) == -CXLKV_E_NOT_A_POOL);
    CHECK(create(CAPACITY_BYTES, CXLKV_CREATE_FORCE, &code) == NULL && code < 0);
}

int main(void) {
    make_members();
    test_bytes_in_turn();
    test_labels();
    test_refused();
    for (int i = 0; i < MEMBERS; i++) unlink(names[i]);
    return 0;
}
