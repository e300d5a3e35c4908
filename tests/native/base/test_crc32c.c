/* Goal: all ways to compute CRC32C agree with the published vectors and with each other. Method:
 * known answers, all small lengths at all alignments against the definition, long random data, and
 * random splits, since a CRC of parts must be that of the whole. */
#include "base/crc32c.h"
#include "check.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

static uint64_t seed = 20240607;

static void fill_random(uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)random_next(&seed);
}

/* A bit at a time, from the polynomial. */
static uint32_t crc_by_bits(uint32_t crc, const uint8_t *bytes, size_t count) {
    crc = ~crc;
    for (size_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0x82f63b78 : crc >> 1;
    }
    return ~crc;
}

/* From RFC 3720, B.4, and the customary check value. */
static void test_known_answers(void) {
    uint8_t zeros[32] = {0}, ones[32], up[32], down[32];
    for (int i = 0; i < 32; i++) {
        ones[i] = 0xff;
        up[i] = (uint8_t)i;
        down[i] = (uint8_t)(31 - i);
    }
    CHECK(crc32c(0, "123456789", 9) == 0xe3069283);
    CHECK(crc32c(0, zeros, 32) == 0x8a9136aa);
    CHECK(crc32c(0, ones, 32) == 0x62a8ab43);
    CHECK(crc32c(0, up, 32) == 0x46dd794e);
    CHECK(crc32c(0, down, 32) == 0x113fdb5c);
    CHECK(crc32c(0, zeros, 0) == 0);
    CHECK(crc32c(0xe3069283, zeros, 0) == 0xe3069283);
}

/* Each length has its own allocation, so that a read past it is an error under ASan. */
static void test_small_lengths_at_all_alignments(void) {
    for (size_t bytes = 0; bytes <= 2600; bytes += bytes < 300 ? 1 : 1 + bytes % 17)
        for (size_t offset = 0; offset < 16; offset++) {
            uint8_t *block = malloc(offset + bytes + !(offset + bytes));
            CHECK(block);
            fill_random(block, offset + bytes);
            uint32_t start = (uint32_t)random_next(&seed);
            uint32_t expected = crc_by_bits(start, block + offset, bytes);
            CHECK(crc32c_serial(start, block + offset, bytes) == expected);
            CHECK(crc32c(start, block + offset, bytes) == expected);
            free(block);
        }
}

static void test_large_lengths(void) {
    static const size_t lengths[] = {1007,  1008,  1009,  4079,   4080,   4081,   4095,
                                     4096,  4097,  8160,  8192,   16384,  65536,  100003,
                                     32768, 40800, 49152, 262144, 999983, 1048576};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint8_t *block = malloc(lengths[i]);
        CHECK(block);
        fill_random(block, lengths[i]);
        CHECK(crc32c(0, block, lengths[i]) == crc32c_serial(0, block, lengths[i]));
        free(block);
    }
}

static void test_random_splits(void) {
    enum { BYTES = 20000 };
    static uint8_t block[BYTES];
    fill_random(block, BYTES);
    for (int round = 0; round < 1000; round++) {
        size_t bytes = random_next(&seed) % BYTES, at = 0;
        uint32_t crc = 0;
        while (at < bytes) {
            size_t part = 1 + random_next(&seed) % (round % 2 ? 5000 : 300);
            part = part < bytes - at ? part : bytes - at;
            crc = crc32c(crc, block + at, part);
            at += part;
        }
        CHECK(crc == crc32c(0, block, bytes));
    }
}

/* Rows that lie apart have the CRC of the same rows side by side, and nothing behind the last one
 * is read: ASan would see it, as each round has its own allocation. */
static void test_rows_apart(void) {
    static const size_t sizes[] = {1, 32, 63, 64, 96, 128, 160, 192, 200, 256, 320, 512, 5000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t count = 1; count <= 17; count++) {
            size_t row = sizes[i], stride = row + random_next(&seed) % 3 * (row / 2 + 7);
            uint8_t *apart = malloc(stride * (count - 1) + row), *together = malloc(row * count);
            CHECK(apart && together);
            fill_random(apart, stride * (count - 1) + row);
            for (size_t j = 0; j < count; j++) memcpy(together + j * row, apart + j * stride, row);
            uint32_t wanted = crc32c_serial(0, together, row * count);
            CHECK(crc32c_rows(apart, stride, count, row) == wanted);
            free(apart);
            free(together);
        }
}

/* What a check is for: any flipped bit must show, whichever stripe it falls in. */
static void test_each_flipped_bit_shows(void) {
    enum { BYTES = 4200 };
    static uint8_t block[BYTES];
    fill_random(block, BYTES);
    uint32_t whole = crc32c(0, block, BYTES);
    for (size_t bit = 0; bit < BYTES * 8; bit += 7) {
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(crc32c(0, block, BYTES) != whole);
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void *use_while_forced(void *argument) {
    (void)argument;
    for (int i = 0; i < 2000; i++)
        CHECK(crc32c(0, "123456789", 9) == 0xe3069283);
    return NULL;
}

/* The instructions are there when the kernel says so, whatever CPU the build was made for. */
static void test_arm64_is_asked(void) {
#if defined(__aarch64__)
    CHECK(crc32c_force("hardware") == (getauxval(AT_HWCAP) & HWCAP_CRC32 ? 0 : -ENOTSUP));
    CHECK(!crc32c_force("auto"));
#endif
}

static void test_all(void) {
    test_known_answers();
    test_small_lengths_at_all_alignments();
    test_large_lengths();
    test_random_splits();
    test_rows_apart();
    test_each_flipped_bit_shows();
}

int main(int argument_count, char **arguments) {
    static const struct {
        const char *name;
        uint32_t (*crc)(uint32_t crc, const void *bytes, size_t count);
    } ways[] = {{"serial", crc32c_serial}, {"hardware", crc32c_hardware},
                {"avx512", crc32c_avx512}};
    if (argument_count > 1)
        seed = strtoull(arguments[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed);
    test_all(); /* the choice made at first use */
    test_arm64_is_asked();
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (crc32c_force(ways[i].name)) {
            CHECK(crc32c_force(ways[i].name) == -ENOTSUP);
            printf("skipped: %s: not on this CPU\n", ways[i].name);
            continue;
        }
        CHECK(ways[i].crc(0, "123456789", 9) == 0xe3069283);
        test_all();
        printf("%s: right\n", ways[i].name);
    }
    CHECK(crc32c_force("slow") == -EINVAL);
    test_while_forced(use_while_forced, crc32c_force);
    return 0;
}
