/* Numbers in a byte with AVX-512: 16 are encoded, 64 decoded at once. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif

#include <immintrin.h>

#include "kernels/fp8.h"
#include "kernels/kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE __m512 load16(int dtype, const void *source, size_t at, __mmask16 there) {
    if (dtype == KERNEL_FLOAT32) return _mm512_maskz_loadu_ps(there, (const float *)source + at);
    __m256i halves = _mm256_maskz_loadu_epi16(there, (const uint16_t *)source + at);
    if (dtype == KERNEL_FLOAT16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m128i bytes_of(__m512 numbers) {
    __m512i bits = _mm512_castps_si512(numbers), all = _mm512_set1_epi32(0x7fffffff);
    __m512i magnitude = _mm512_and_si512(bits, all);
    __m512i normal = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(FP8_BIAS_BITS));
    __m512 units = _mm512_mul_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p29f));
    __mmask16 small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(FP8_NORMAL_BITS));
    __mmask16 broken = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    __mmask16 signs = _mm512_movepi32_mask(bits) & (__mmask16)~broken &
                      _mm512_test_epi32_mask(magnitude, magnitude);
    __m512i payload = _mm512_mask_cvtps_epi32(normal, small, units);
    payload = _mm512_min_epi32(_mm512_srli_epi32(payload, 20), _mm512_set1_epi32(FP8_MOST));
    return _mm512_cvtepi32_epi8(_mm512_mask_or_epi32(payload, signs, payload,
                                                     _mm512_set1_epi32(0x80)));
}

INLINE void encode_as(int dtype, const void *source, size_t count, uint8_t *bytes) {
    for (size_t at = 0; at < count; at += 16) {
        __mmask16 there = (__mmask16)(count - at < 16 ? (1u << (count - at)) - 1 : 0xffff);
        _mm_mask_storeu_epi8(bytes + at, there, bytes_of(load16(dtype, source, at, there)));
    }
}

void fp8_encode_avx512(int dtype, const void *source, size_t count, uint8_t *bytes) {
    if (dtype == KERNEL_BFLOAT16) encode_as(KERNEL_BFLOAT16, source, count, bytes);
    else if (dtype == KERNEL_FLOAT16) encode_as(KERNEL_FLOAT16, source, count, bytes);
    else encode_as(KERNEL_FLOAT32, source, count, bytes);
}

/* The two bytes of each number apart: of all but the specials by a shift, of those by a table. */
INLINE void halves_of(__m512i bytes, __m512i *upper, __m512i *lower) {
    static const uint8_t upper_table[16] = FP8_UPPER, lower_table[16] = FP8_LOWER;
    __m512i payload = _mm512_and_si512(bytes, _mm512_set1_epi8(0x7f));
    __mmask64 special = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(payload, _mm512_set1_epi8(8)),
                                               _mm512_set1_epi8(FP8_LAST));
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(payload, 4), _mm512_set1_epi8(7));
    __m512i low = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi8((char)0xf0));
    high = _mm512_add_epi8(high, _mm512_set1_epi8(FP8_UPPER_BIAS));
    high = _mm512_mask_shuffle_epi8(
        high, special, _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)upper_table)),
        payload);
    *lower = _mm512_mask_shuffle_epi8(
        low, special, _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)lower_table)),
        payload);
    /* high | (bytes & 0x80) */
    *upper = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8((char)0x80), 0xf8);
}

/* Of 64 bytes: numbers 0 to 31, then the others. */
INLINE void numbers_of(__m512i bytes, __m512i numbers[2]) {
    /* Bytes are interleaved in each quarter of a vector. */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i upper, lower;
    halves_of(_mm512_permutexvar_epi64(order, bytes), &upper, &lower);
    numbers[0] = _mm512_unpacklo_epi8(lower, upper);
    numbers[1] = _mm512_unpackhi_epi8(lower, upper);
}

void fp8_decode_avx512(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    size_t at = 0;
    __m512i made[2];
    for (; at + 64 <= count; at += 64) {
        if (next) _mm_prefetch((const char *)next + at, _MM_HINT_T0);
        numbers_of(_mm512_loadu_si512(bytes + at), made);
        _mm512_storeu_si512(numbers + at, made[0]);
        _mm512_storeu_si512(numbers + at + 32, made[1]);
    }
    if (at == count) return;
    if (next) _mm_prefetch((const char *)next + at, _MM_HINT_T0);
    __mmask64 there = ~0ull >> (64 - (count - at));
    numbers_of(_mm512_maskz_loadu_epi8(there, bytes + at), made);
    _mm512_mask_storeu_epi16(numbers + at, (__mmask32)there, made[0]);
    _mm512_mask_storeu_epi16(numbers + at + 32, (__mmask32)(there >> 32), made[1]);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
/* A translation unit may not be empty. */
typedef int fp8_avx512_is_for_x86_64_only;
#endif
