/* Numbers in a byte with AdvSIMD: 8 are encoded, 16 decoded at once, the rest by the serial one. */
#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/fp8.h"
#include "kernels/kernels.h"

#define INLINE static inline __attribute__((always_inline))

INLINE float32x4_t load4(int dtype, const void *source, size_t at) {
    if (dtype == KERNEL_FLOAT32) return vld1q_f32((const float *)source + at);
    uint16x4_t halves = vld1_u16((const uint16_t *)source + at);
    if (dtype == KERNEL_FLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
}

INLINE uint16x4_t bytes_of(float32x4_t numbers) {
    uint32x4_t bits = vreinterpretq_u32_f32(numbers);
    uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
    uint32x4_t normal = vsubq_u32(magnitude, vdupq_n_u32(FP8_BIAS_BITS));
    uint32x4_t small = vcltq_u32(magnitude, vdupq_n_u32(FP8_NORMAL_BITS));
    float32x4_t units = vmulq_n_f32(vreinterpretq_f32_u32(magnitude), 0x1p29f);
    uint32x4_t payload = vbslq_u32(small, vcvtnq_u32_f32(units), normal);
    payload = vminq_u32(vshrq_n_u32(payload, 20), vdupq_n_u32(FP8_MOST));
    uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
    uint32x4_t kept = vandq_u32(vtstq_u32(magnitude, magnitude), vceqq_f32(numbers, numbers));
    return vmovn_u32(vorrq_u32(payload, vandq_u32(sign, kept)));
}

INLINE void encode_as(int dtype, const void *source, size_t count, uint8_t *bytes) {
    size_t at = 0, element = dtype == KERNEL_FLOAT32 ? 4 : 2;
    for (; at + 8 <= count; at += 8) {
        uint16x4_t low = bytes_of(load4(dtype, source, at));
        vst1_u8(bytes + at, vmovn_u16(vcombine_u16(low, bytes_of(load4(dtype, source, at + 4)))));
    }
    fp8_encode_serial(dtype, (const char *)source + at * element, count - at, bytes + at);
}

void fp8_encode_neon(int dtype, const void *source, size_t count, uint8_t *bytes) {
    if (dtype == KERNEL_BFLOAT16) encode_as(KERNEL_BFLOAT16, source, count, bytes);
    else if (dtype == KERNEL_FLOAT16) encode_as(KERNEL_FLOAT16, source, count, bytes);
    else encode_as(KERNEL_FLOAT32, source, count, bytes);
}

/* The two bytes of each number side by side: of all but the specials by a shift, of those by a
 * table. */
INLINE uint8x16x2_t numbers_of(uint8x16_t bytes) {
    static const uint8_t upper_table[16] = FP8_UPPER, lower_table[16] = FP8_LOWER;
    uint8x16_t payload = vandq_u8(bytes, vdupq_n_u8(0x7f));
    uint8x16_t special = vcgtq_u8(vsubq_u8(payload, vdupq_n_u8(8)), vdupq_n_u8(FP8_LAST));
    uint8x16_t place = vandq_u8(payload, vdupq_n_u8(15));
    uint8x16_t high = vaddq_u8(vshrq_n_u8(payload, 4), vdupq_n_u8(FP8_UPPER_BIAS));
    uint8x16_t low = vshlq_n_u8(bytes, 4);
    high = vbslq_u8(special, vqtbl1q_u8(vld1q_u8(upper_table), place), high);
    low = vbslq_u8(special, vqtbl1q_u8(vld1q_u8(lower_table), place), low);
    return vzipq_u8(low, vorrq_u8(high, vandq_u8(bytes, vdupq_n_u8(0x80))));
}

void fp8_decode_neon(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    size_t at = 0;
    for (; at + 16 <= count; at += 16) {
        if (next && at % 64 == 0) __builtin_prefetch((const char *)next + at);
        uint8x16x2_t made = numbers_of(vld1q_u8(bytes + at));
        vst1q_u16(numbers + at, vreinterpretq_u16_u8(made.val[0]));
        vst1q_u16(numbers + at + 8, vreinterpretq_u16_u8(made.val[1]));
    }
    fp8_decode_serial(bytes + at, count - at, numbers + at, NULL);
}

#else
/* A translation unit may not be empty. */
typedef int fp8_neon_is_for_aarch64_only;
#endif
