/* Goal: a number becomes the byte that fp8.h says, and a byte the number that it stands for, by all
 * instruction sets, without touching what is beside.
 * Method: the serial one against a model in double precision, the others against the serial one;
 * all bytes, all bfloat16 and float16, random float32, memory that ends at a page that cannot be
 * read. */
#include "kernel_tests.h"

enum { COUNT_MAX = 200, HALVES = 1 << 16 };

/* ---- the model ---- */

static double number_of(uint8_t byte) {
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    double magnitude = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    if ((byte & 0x7f) == 0x7f) return NAN;
    return byte & 0x80 ? -magnitude : magnitude;
}

/* Of the numbers that are no larger, the largest. */
static uint8_t byte_of(float number) {
    double magnitude = fabs((double)number);
    uint8_t byte = 0;
    if (isnan(number)) return 0x7e;
    if (magnitude < 0x1p-6) magnitude = rint(magnitude * 0x1p29) * 0x1p-29;
    while (byte < 0x7e && number_of((uint8_t)(byte + 1)) <= magnitude) byte++;
    return number < 0 ? byte | 0x80 : byte;
}

static void check_model(uint64_t seed) {
    for (uint32_t i = 0; i < 300000; i++) {
        uint32_t bits = (uint32_t)random_next(&seed);
        float number;
        if (i % 2) bits = (bits & 0x807fffff) | (0x70 + random_below(&seed, 0x1b)) << 23;
        memcpy(&number, &bits, sizeof(number));
        if (i % 16 == 1) { /* beside one that has a byte */
            number = (float)number_of((uint8_t)random_below(&seed, 0x7f));
            number = nextafterf(number, random_below(&seed, 2) ? INFINITY : -INFINITY);
        }
        uint8_t byte;
        fp8_encode_serial(KERNEL_FLOAT32, &number, 1, &byte);
        CHECK(byte == byte_of(number));
    }
    const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 448, -448, 449, 3e38f, 0, -0.0f, -1e-30f,
                         0x1p-9f, 0x1.fffffep-10f, 0x1p-149f, -0x1p-9f};
    const uint8_t wanted[] = {0x7e, 0x7e, 0x7e, 0xfe, 0x7e, 0xfe, 0x7e, 0x7e, 0, 0, 0x80, 1, 1, 0,
                              0x81};
    uint8_t found[sizeof(wanted)];
    fp8_encode_serial(KERNEL_FLOAT32, odd, sizeof(wanted), found);
    CHECK(!memcmp(found, wanted, sizeof(wanted)));
    for (uint32_t i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        uint16_t half;
        float number;
        fp8_decode_serial(&byte, 1, &half, NULL);
        kernels_serial.to_float(KERNEL_BFLOAT16, &half, 1, &number);
        CHECK(isnan(number) ? isnan(number_of(byte)) : number == number_of(byte));
        CHECK(!signbit(number) == !(byte & 0x80));
        if (i == 0x80 || isnan(number)) continue;
        fp8_encode_serial(KERNEL_BFLOAT16, &half, 1, &byte);
        CHECK(byte == i);
    }
}

/* ---- the others ---- */

static void check_all(const kernels *isa) {
    static uint16_t halves[HALVES], wanted_halves[256], found_halves[256];
    static uint8_t wanted[HALVES], found[HALVES], bytes[256];
    for (uint32_t i = 0; i < HALVES; i++) halves[i] = (uint16_t)i;
    for (uint32_t i = 0; i < 256; i++) bytes[i] = (uint8_t)i;
    for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT16; dtype++) {
        fp8_encode_serial(dtype, halves, HALVES, wanted);
        isa->fp8_encode(dtype, halves, HALVES, found);
        CHECK(!memcmp(wanted, found, HALVES));
    }
    fp8_decode_serial(bytes, 256, wanted_halves, NULL);
    isa->fp8_decode(bytes, 256, found_halves, NULL);
    for (uint32_t i = 0; i < 256; i++)
        if ((i & 0x7f) != 0x7f) CHECK(wanted_halves[i] == found_halves[i]);
        else CHECK((found_halves[i] & 0x7fff) > 0x7f80);
}

static void check_part(const kernels *isa, size_t count, uint64_t *seed) {
    static uint8_t want[COUNT_MAX];
    static uint16_t want_halves[COUNT_MAX];
    for (int dtype = KERNEL_BFLOAT16; dtype <= KERNEL_FLOAT32; dtype++) {
        size_t element = element_bytes(dtype);
        uint8_t *numbers = guarded(count * element), *bytes = guarded(count);
        uint16_t *halves = guarded(count * sizeof(*halves));
        for (size_t i = 0; i < count; i++) {
            float number = (float)random_below(seed, 2001) / 1000 - 1;
            number *= ldexpf(1, (int)random_below(seed, 24) - 14);
            uint32_t any = (uint32_t)random_next(seed);
            if (random_below(seed, 4)) kernels_serial.from_float(dtype, &number, 1,
                                                                 numbers + i * element);
            else memcpy(numbers + i * element, &any, element);
        }
        fp8_encode_serial(dtype, numbers, count, want);
        isa->fp8_encode(dtype, numbers, count, bytes);
        CHECK(!memcmp(want, bytes, count));
        fp8_decode_serial(bytes, count, want_halves, NULL);
        isa->fp8_decode(bytes, count, halves, random_below(seed, 2) ? bytes : NULL);
        CHECK(!memcmp(want_halves, halves, count * sizeof(*halves)));
        guarded_free(numbers, count * element);
        guarded_free(bytes, count);
        guarded_free(halves, count * sizeof(*halves));
    }
}

static void test_isa(const kernels *isa, uint64_t *seed) {
    check_all(isa);
    for (size_t count = 1; count <= COUNT_MAX; count++) check_part(isa, count, seed);
}

int main(void) {
    static const char *const names[] = {"serial", "avx2", "avx512", "neon", NULL};
    uint64_t seed = test_seed_or(1);
    check_model(seed);
    test_each_isa(test_isa, seed, names);
    return 0;
}
