/* Goal: all ways to compute CRC32C agree with the published vectors and with each other. Method:
 * known answers, the table from its definition, all small lengths at all alignments, long random
 * data, and random splits, since a CRC of parts must be that of the whole. */
#undef NDEBUG
#include "base/crc32c.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

static uint64_t seed = 20240607;

static uint64_t random_word(void) { /* splitmix64 */
    uint64_t word = seed += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

static void fill_random(uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)random_word();
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
    assert(crc32c(0, "123456789", 9) == 0xe3069283);
    assert(crc32c(0, zeros, 32) == 0x8a9136aa);
    assert(crc32c(0, ones, 32) == 0x62a8ab43);
    assert(crc32c(0, up, 32) == 0x46dd794e);
    assert(crc32c(0, down, 32) == 0x113fdb5c);
    assert(crc32c(0, zeros, 0) == 0);
    assert(crc32c(0xe3069283, zeros, 0) == 0xe3069283);
}

static void test_table(void) {
    for (int byte = 0; byte < 256; byte++) {
        uint8_t data = (uint8_t)byte;
        assert(crc32c_serial(0, &data, 1) == crc_by_bits(0, &data, 1));
    }
}

/* Each length has its own allocation, so that a read past it is an error under ASan. */
static void test_small_lengths_at_all_alignments(void) {
    for (size_t bytes = 0; bytes <= 2600; bytes += bytes < 300 ? 1 : 1 + bytes % 17)
        for (size_t offset = 0; offset < 16; offset++) {
            uint8_t *block = malloc(offset + bytes + !(offset + bytes));
            assert(block);
            fill_random(block, offset + bytes);
            uint32_t start = (uint32_t)random_word();
            uint32_t expected = crc_by_bits(start, block + offset, bytes);
            assert(crc32c_serial(start, block + offset, bytes) == expected);
            assert(crc32c(start, block + offset, bytes) == expected);
            free(block);
        }
}

static void test_large_lengths(void) {
    static const size_t lengths[] = {1007,  1008,  1009,  4079,   4080,   4081,   4095,
                                     4096,  4097,  8160,  8192,   16384,  65536,  100003,
                                     32768, 40800, 49152, 262144, 999983, 1048576};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint8_t *block = malloc(lengths[i]);
        assert(block);
        fill_random(block, lengths[i]);
        assert(crc32c(0, block, lengths[i]) == crc32c_serial(0, block, lengths[i]));
        free(block);
    }
}

static void test_random_splits(void) {
    enum { BYTES = 20000 };
    static uint8_t block[BYTES];
    fill_random(block, BYTES);
    for (int round = 0; round < 1000; round++) {
        size_t bytes = random_word() % BYTES, at = 0;
        uint32_t crc = 0;
        while (at < bytes) {
            size_t part = 1 + random_word() % (round % 2 ? 5000 : 300);
            part = part < bytes - at ? part : bytes - at;
            crc = crc32c(crc, block + at, part);
            at += part;
        }
        assert(crc == crc32c(0, block, bytes));
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
        assert(crc32c(0, block, BYTES) != whole);
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

static void *use_while_forced(void *argument) {
    (void)argument;
    for (int i = 0; i < 2000; i++)
        assert(crc32c(0, "123456789", 9) == 0xe3069283);
    return NULL;
}

static void test_force(void) {
    assert(crc32c_force("slow") == -EINVAL);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert(!pthread_create(&threads[i], NULL, use_while_forced, NULL));
    for (int i = 0; i < 500; i++)
        assert(!crc32c_force(i % 2 ? "auto" : "serial"));
    for (int i = 0; i < 4; i++)
        assert(!pthread_join(threads[i], NULL));
}

/* The instructions are there when the kernel says so, whatever CPU the build was made for. */
static void test_arm64_is_asked(void) {
#if defined(__aarch64__)
    assert(crc32c_force("hardware") == (getauxval(AT_HWCAP) & HWCAP_CRC32 ? 0 : -ENOTSUP));
    assert(!crc32c_force("auto"));
#endif
}

static void test_all(void) {
    test_known_answers();
    test_small_lengths_at_all_alignments();
    test_large_lengths();
    test_random_splits();
    test_each_flipped_bit_shows();
}

int main(int argument_count, char **arguments) {
    if (argument_count > 1)
        seed = strtoull(arguments[1], NULL, 10);
    printf("seed %llu\n", (unsigned long long)seed);
    test_table();
    test_all(); /* the choice made at first use */
    test_arm64_is_asked();
    assert(!crc32c_force("serial"));
    test_all();
    if (crc32c_force("hardware")) {
        assert(crc32c_force("hardware") == -ENOTSUP);
        printf("this CPU has no CRC instruction: only the table was tested\n");
    } else {
        assert(crc32c_hardware(0, "123456789", 9) == 0xe3069283);
        test_all();
        printf("by table and by instruction\n");
    }
    if (crc32c_force("avx512")) {
        printf("this CPU has no products of 512 bits\n");
    } else {
        assert(crc32c_avx512(0, "123456789", 9) == 0xe3069283);
        test_all();
        printf("and by products of 512 bits\n");
    }
    test_force();
    return 0;
}
