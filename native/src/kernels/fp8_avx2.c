/* Numbers in a byte with AVX2: 8 are encoded, 32 decoded at once, the rest by the serial one. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include <immintrin.h>

#include "kernels/fp8.h"
#include "kernels/kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m256 load8(int dtype, const void *source, size_t at) {
    if (dtype == KERNEL_FLOAT32) return _mm256_loadu_ps((const float *)source + at);
    __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)source + at));
    if (dtype == KERNEL_FLOAT16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* In the low bytes of the lanes. */
INLINE __m256i bytes_of(__m256 numbers) {
    __m256i bits = _mm256_castps_si256(numbers), none = _mm256_setzero_si256();
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i normal = _mm256_sub_epi32(magnitude, _mm256_set1_epi32(FP8_BIAS_BITS));
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(FP8_NORMAL_BITS), magnitude);
    __m256 units = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p29f));
    __m256i payload = _mm256_blendv_epi8(normal, _mm256_cvtps_epi32(units), small);
    payload = _mm256_min_epi32(_mm256_srli_epi32(payload, 20), _mm256_set1_epi32(FP8_MOST));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    __m256i zero = _mm256_cmpeq_epi32(magnitude, none);
    __m256i broken = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
    return _mm256_or_si256(payload, _mm256_andnot_si256(_mm256_or_si256(zero, broken), sign));
}

INLINE void encode_as(int dtype, const void *source, size_t count, uint8_t *bytes) {
    size_t at = 0, element = dtype == KERNEL_FLOAT32 ? 4 : 2;
    for (; at + 8 <= count; at += 8) {
        __m256i words = bytes_of(load8(dtype, source, at));
        __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words),
                                          _mm256_extracti128_si256(words, 1));
        _mm_storel_epi64((__m128i *)(bytes + at), _mm_packus_epi16(halves, halves));
    }
    fp8_encode_serial(dtype, (const char *)source + at * element, count - at, bytes + at);
}

void fp8_encode_avx2(int dtype, const void *source, size_t count, uint8_t *bytes) {
    if (dtype == KERNEL_BFLOAT16) encode_as(KERNEL_BFLOAT16, source, count, bytes);
    else if (dtype == KERNEL_FLOAT16) encode_as(KERNEL_FLOAT16, source, count, bytes);
    else encode_as(KERNEL_FLOAT32, source, count, bytes);
}

INLINE __m256i by_table(const uint8_t table[16], __m256i places) {
    __m128i loaded = _mm_loadu_si128((const __m128i *)table);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(loaded), places);
}

/* The two bytes of each number apart: of all but the specials by a shift, of those by a table. */
INLINE void halves_of(__m256i bytes, __m256i *upper, __m256i *lower) {
    static const uint8_t upper_table[16] = FP8_UPPER, lower_table[16] = FP8_LOWER;
    __m256i payload = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    /* payload - 8 > FP8_LAST, of bytes without a sign */
    __m256i special = _mm256_cmpgt_epi8(_mm256_add_epi8(payload, _mm256_set1_epi8(0x78)),
                                        _mm256_set1_epi8(FP8_LAST - 0x80));
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(payload, 4), _mm256_set1_epi8(7));
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(bytes, 4), _mm256_set1_epi8((char)0xf0));
    __m256i sign = _mm256_and_si256(bytes, _mm256_set1_epi8((char)0x80));
    high = _mm256_add_epi8(high, _mm256_set1_epi8(FP8_UPPER_BIAS));
    high = _mm256_blendv_epi8(high, by_table(upper_table, payload), special);
    *upper = _mm256_or_si256(high, sign);
    *lower = _mm256_blendv_epi8(low, by_table(lower_table, payload), special);
}

void fp8_decode_avx2(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    size_t at = 0;
    for (; at + 32 <= count; at += 32) {
        if (next && at % 64 == 0) _mm_prefetch((const char *)next + at, _MM_HINT_T0);
        __m256i some = _mm256_loadu_si256((const __m256i *)(bytes + at)), upper, lower;
        /* Bytes are interleaved in each half of a vector. */
        halves_of(_mm256_permute4x64_epi64(some, 0xd8), &upper, &lower);
        _mm256_storeu_si256((__m256i *)(numbers + at), _mm256_unpacklo_epi8(lower, upper));
        _mm256_storeu_si256((__m256i *)(numbers + at + 16), _mm256_unpackhi_epi8(lower, upper));
    }
    fp8_decode_serial(bytes + at, count - at, numbers + at, NULL);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
/* A translation unit may not be empty. */
typedef int fp8_avx2_is_for_x86_64_only;
#endif
