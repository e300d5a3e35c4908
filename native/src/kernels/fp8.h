/* Numbers in a byte, float8_e4m3fn (OCP 8-bit floating point): a sign, 4 bits of exponent with bias
 * 7, 3 of mantissa. It has zeros, 2^-9 to 448 in both signs, and NaN (0x7f, 0xff); no infinity.
 *
 * A number becomes the byte that vLLM's CPU backend stores for --kv-cache-dtype fp8 with the scale
 * 1, to the bit: what is beyond 448 is 448, of its sign; what a byte has no room for is dropped,
 * toward zero, and a small negative number becomes -0 (0x80); -0 becomes 0; a NaN becomes 448.
 * Below 2^-6 a float32 is first rounded to a multiple of 2^-29, to the even of two, as its product
 * with 2^-120 is there; no bfloat16 or float16 of a byte's size is so fine. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* What each instruction set has; all of them give the same bits, NaN's own aside.
 *
 * encode: `count` numbers of dtype to bytes.
 * decode: bytes to bfloat16, which has all of their numbers. `next`: as many bytes that some later
 *     call will decode, which are asked for in the meantime; NULL: nothing. */
#define FP8_FUNCTIONS(isa)                                                                       \
    void fp8_encode_##isa(int dtype, const void *source, size_t count, uint8_t *bytes);          \
    void fp8_decode_##isa(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next)
FP8_FUNCTIONS(serial);
#if defined(__x86_64__)
FP8_FUNCTIONS(avx2);
FP8_FUNCTIONS(avx512);
#elif defined(__aarch64__)
FP8_FUNCTIONS(neon);
#endif

/* Above them, in the bits of a float32: 448, and 2^-6, the smallest that has an exponent of its
 * own. From there on the payload is the float32's exponent and mantissa, cut off, less 120 of the
 * exponent; below, the number in units of 2^-9. */
#define FP8_MOST_BITS 0x43e00000u
#define FP8_NORMAL_BITS 0x3c800000u
#define FP8_BIAS_BITS 0x3c000000u
enum { FP8_MOST = 0x7e, FP8_NAN = 0x7f };

/* Of bfloat16, by payload: these are below 2^-6. From 8 on it is (payload << 4) + FP8_BF16_BIAS. */
#define FP8_SMALL {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60}
enum { FP8_BF16_BIAS = 0x3c00, FP8_BF16_NAN = 0x7fc0 };
/* The same in bytes, for vectors: the upper one is (payload >> 4) + 0x3c, the lower one payload <<
 * 4; or by the lower four bits of a payload below 8, or of NaN, in these tables. Those are what
 * payload - 8 is above FP8_LAST for. */
#define FP8_UPPER {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0x7f}
#define FP8_LOWER {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0xc0}
enum { FP8_UPPER_BIAS = 0x3c, FP8_LAST = FP8_MOST - 8 };
