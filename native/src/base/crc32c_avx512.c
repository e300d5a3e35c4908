/* CRC32C by carry-less products of 512 bits: 256 bytes a step, whose remainder is folded over the
 * next ones, and in the end to 16 bytes (Gopal et al., "Fast CRC Computation Using PCLMULQDQ",
 * Intel 2009). */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,vpclmulqdq,pclmul"))),        \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,vpclmulqdq,pclmul")
#endif

#include <immintrin.h>

#include "base/crc32c.h"

/* What moves a lane of 128 bits over the D that follow it: its first half, of the higher degrees,
 * times x^(D + 64) modulo the polynomial, its second times x^D. Reflected, a product has one x
 * more: so these are x^(D + 63) and x^(D - 1), reflected, in the upper halves of words. */
static const uint64_t over_512[2] = {0x1c19243b00000000, 0x75bba45b00000000};
static const uint64_t over_1024[2] = {0x6577b24500000000, 0x7417153f00000000};
static const uint64_t over_1536[2] = {0x7ccbbbf200000000, 0x31c9460800000000};
static const uint64_t over_2048[2] = {0xe9a5d8be00000000, 0x1426a81500000000};
static const uint64_t over_384_256_128[8] = {0xa46ef4aa00000000, 0x6051243f00000000,
                                             0x33ccbbbc00000000, 0xa2158b3400000000,
                                             0x3743f7bd00000000, 0x3171d43000000000};

/* Lanes times factors, each by its own, added to others. */
static inline __m512i add_moved(__m512i lanes, __m512i factors, __m512i to) {
    __m512i first = _mm512_clmulepi64_epi128(lanes, factors, 0x00);
    __m512i second = _mm512_clmulepi64_epi128(lanes, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, second, to, 0x96); /* xor of all three */
}

static inline __m512i fold(__m512i lanes, const uint64_t over[2], __m512i next) {
    __m128i factors = _mm_loadu_si128((const __m128i *)over);
    return add_moved(lanes, _mm512_broadcast_i32x4(factors), next);
}

/* The remainder of all four lanes. */
static inline __m128i join(__m512i lanes) {
    __m512i factors = _mm512_loadu_si512(over_384_256_128);
    __m512i sum = add_moved(lanes, factors, _mm512_maskz_mov_epi64(0xc0, lanes));
    __m256i half = _mm256_xor_si256(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Goes through rows by lines of 64 bytes, which may be of two rows. */
typedef struct lines {
    const uint8_t *at, *end; /* the end of this row */
    size_t row_bytes, stride_bytes;
} lines;

/* What is left of this row, or of the next one if nothing is. */
static inline size_t left_of(lines *l) {
    if (l->at == l->end) {
        l->end += l->stride_bytes;
        l->at = l->end - l->row_bytes;
    }
    return (size_t)(l->end - l->at);
}

static inline __m512i take_line(lines *l) {
    size_t left = left_of(l);
    if (left >= 64) {
        __m512i line = _mm512_loadu_si512(l->at);
        l->at += 64;
        return line;
    }
    const uint8_t *next = l->end - l->row_bytes + l->stride_bytes;
    const __mmask64 ours = ((__mmask64)1 << left) - 1;
    __m512i line = _mm512_maskz_loadu_epi8(ours, l->at);
    line = _mm512_mask_loadu_epi8(line, ~ours, next - left);
    l->at = next + 64 - left;
    l->end += l->stride_bytes;
    return line;
}

static inline void fold_lines(__m512i lanes[4], lines *from) {
    if (left_of(from) < 256) {
        for (int i = 0; i < 4; i++) lanes[i] = fold(lanes[i], over_2048, take_line(from));
        return;
    }
    for (int i = 0; i < 4; i++)
        lanes[i] = fold(lanes[i], over_2048, _mm512_loadu_si512(from->at + 64 * i));
    from->at += 256;
}

void crc32c_fold(uint32_t crc, const uint8_t *rows, size_t stride_bytes, size_t count,
                 size_t row_bytes, uint8_t left[16]) {
    lines from = {
        .at = rows, .end = rows + row_bytes, .row_bytes = row_bytes, .stride_bytes = stride_bytes};
    size_t line_count = count * row_bytes / 64;
    __m512i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = take_line(&from);
    lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (line_count -= 4; line_count >= 4; line_count -= 4) fold_lines(lanes, &from);
    __m512i sum = fold(lanes[2], over_512, lanes[3]);
    sum = fold(lanes[1], over_1024, sum);
    sum = fold(lanes[0], over_1536, sum);
    for (; line_count; line_count--) sum = fold(sum, over_512, take_line(&from));
    _mm_storeu_si128((__m128i *)left, join(sum));
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#else
typedef int crc32c_avx512_is_of_x86_64;
#endif
