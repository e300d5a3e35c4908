/* Numbers in a byte in plain C: the reference of the other instruction sets. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize")
#endif

#include <math.h>
#include <string.h>

#include "kernels/fp8.h"
#include "kernels/kernels.h"

static uint8_t byte_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof(bits));
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (isnan(number)) return FP8_MOST;
    if (magnitude >= FP8_MOST_BITS) return (uint8_t)(sign | FP8_MOST);
    if (magnitude >= FP8_NORMAL_BITS) return (uint8_t)(sign | (magnitude - FP8_BIAS_BITS) >> 20);
    if (magnitude == 0) return 0;
    return (uint8_t)(sign | (uint32_t)rintf(fabsf(number) * 0x1p29f) >> 20);
}

void fp8_encode_serial(int dtype, const void *source, size_t count, uint8_t *bytes) {
    size_t element = dtype == KERNEL_FLOAT32 ? 4 : 2;
    for (size_t i = 0; i < count; i++) {
        float number;
        kernels_serial.to_float(dtype, (const char *)source + i * element, 1, &number);
        bytes[i] = byte_of(number);
    }
}

void fp8_decode_serial(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    static const uint16_t small[] = FP8_SMALL;
    (void)next;
    for (size_t i = 0; i < count; i++) {
        uint32_t sign = (uint32_t)(bytes[i] & 0x80) << 8, payload = bytes[i] & 0x7f;
        uint32_t number = payload < 8 ? small[payload] : (payload << 4) + FP8_BF16_BIAS;
        if (payload == FP8_NAN) number = FP8_BF16_NAN;
        numbers[i] = (uint16_t)(sign | number);
    }
}
