/* CRC32C by carry-less products of 512 bits: 256 bytes a step, whose remainder is folded over the
 * next ones (Gopal et al., "Fast CRC Computation Using PCLMULQDQ", Intel 2009). */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                  \
    __attribute__((target("avx512f,vpclmulqdq,pclmul"))), apply_to = function)
#else
#pragma GCC target("avx512f,vpclmulqdq,pclmul")
#endif

#include <immintrin.h>

#include "base/crc32c.h"

/* A lane of 128 bits, moved over the 2048 that follow it: its first half, of the higher degrees,
 * times x^(2048 + 64) modulo the polynomial, its second times x^2048. Reflected, a product has one
 * x more: so these are x^2111 and x^2047, reflected, in the upper half of a word. */
static inline __m512i fold(__m512i lanes, __m512i next) {
    const __m512i factors = _mm512_set4_epi64(0x1426a81500000000, (long long)0xe9a5d8be00000000,
                                              0x1426a81500000000, (long long)0xe9a5d8be00000000);
    __m512i first = _mm512_clmulepi64_epi128(lanes, factors, 0x00);
    __m512i second = _mm512_clmulepi64_epi128(lanes, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, second, next, 0x96); /* xor of all three */
}

size_t crc32c_fold(uint32_t crc, const uint8_t *byte, size_t bytes, uint8_t left[256]) {
    const uint8_t *first = byte;
    __m512i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = _mm512_loadu_si512(byte + 64 * i);
    lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (byte += 256, bytes -= 256; bytes >= 256; byte += 256, bytes -= 256)
        for (int i = 0; i < 4; i++)
            lanes[i] = fold(lanes[i], _mm512_loadu_si512(byte + 64 * i));
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(left + 64 * i, lanes[i]);
    return (size_t)(byte - first);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int crc32c_avx512_is_of_x86_64;
#endif
