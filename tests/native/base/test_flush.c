/* Goal: the seam's copies are right for every place and size, and flushing changes no byte. */
#include "base/flush.h"
#include "check.h"

enum { AREA = 1024, SIZES = 300 };
static _Alignas(FLUSH_LINE_BYTES) uint8_t area[AREA], before[AREA];

static void fill(uint8_t *bytes, size_t count, uint64_t seed) {
    for (size_t i = 0; i < count; i++) bytes[i] = (uint8_t)random_next(&seed);
}

static void test_copies(void) {
    uint8_t from[SIZES], back[SIZES];
    for (size_t at = 0; at < 70; at++)
        for (size_t bytes = 0; bytes < SIZES; bytes++) {
            fill(area, AREA, at);
            memcpy(before, area, AREA);
            fill(from, bytes, at * 1000 + bytes);
            flush_copy_in(area + at, from, bytes);
            flush_fence_stores(FLUSH_LOCAL);
            flush_copy_out(back, area + at, bytes);
            CHECK(memcmp(back, from, bytes) == 0);
            CHECK(memcmp(area, before, at) == 0);
            CHECK(memcmp(area + at + bytes, before + at + bytes, AREA - at - bytes) == 0);
        }
}

static void test_flushing_changes_nothing(void) {
    fill(area, AREA, 3);
    memcpy(before, area, AREA);
    for (size_t at = 0; at < 130; at += 13)
        for (size_t bytes = 0; bytes < SIZES; bytes += 31) {
            flush_write_back(FLUSH_LOCAL, area + at, bytes);
            flush_invalidate(FLUSH_LOCAL, area + at, bytes);
            flush_evict(FLUSH_LOCAL, area + at, bytes);
            flush_fence_all(FLUSH_LOCAL);
        }
    CHECK(memcmp(area, before, AREA) == 0);
}

static void test_lines(void) {
    uint64_t line[8], copy[8];
    fill((uint8_t *)line, sizeof(line), 5);
    memset(area, 0, AREA);
    flush_store_line(area, line, 1);
    flush_store_word(area, line[0]);
    flush_load_line(copy, area);
    CHECK(memcmp(copy, line, sizeof(line)) == 0 && flush_load_word(area + 8) == line[1]);
    CHECK(area[64] == 0);
}

int main(void) {
    fprintf(stderr, "lines are flushed by %s\n", flush_name());
    CHECK(strcmp(flush_name(), "none") == 0 || flush_supported());
    test_copies();
    test_flushing_changes_nothing();
    test_lines();
    return 0;
}
