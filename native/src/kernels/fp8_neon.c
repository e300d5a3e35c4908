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

INLINE uint16x8_t numbers_of(uint8x8_t bytes) {
    static const uint16_t table[8] = FP8_SMALL;
    uint16x8_t wide = vmovl_u8(bytes), low = vdupq_n_u16(0x7f), payload = vandq_u16(wide, low);
    uint16x8_t sign = vshlq_n_u16(vbicq_u16(wide, low), 8);
    uint16x8_t number = vaddq_u16(vshlq_n_u16(payload, 4), vdupq_n_u16(FP8_BF16_BIAS));
    /* A word of the table is the bytes 2 * payload and the next one. */
    uint16x8_t places = vaddq_u16(vmulq_n_u16(payload, 0x0202), vdupq_n_u16(0x0100));
    uint8x16_t smalls = vreinterpretq_u8_u16(vld1q_u16(table));
    uint16x8_t found = vreinterpretq_u16_u8(vqtbl1q_u8(smalls, vreinterpretq_u8_u16(places)));
    number = vbslq_u16(vcltq_u16(payload, vdupq_n_u16(8)), found, number);
    number = vbslq_u16(vceqq_u16(payload, low), vdupq_n_u16(FP8_BF16_NAN), number);
    return vorrq_u16(number, sign);
}

void fp8_decode_neon(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next) {
    size_t at = 0;
    for (; at + 16 <= count; at += 16) {
        uint8x16_t some = vld1q_u8(bytes + at);
        if (next && at % 64 == 0) __builtin_prefetch((const char *)next + at);
        vst1q_u16(numbers + at, numbers_of(vget_low_u8(some)));
        vst1q_u16(numbers + at + 8, numbers_of(vget_high_u8(some)));
    }
    fp8_decode_serial(bytes + at, count - at, numbers + at, NULL);
}

#else
/* A translation unit may not be empty. */
typedef int fp8_neon_is_for_aarch64_only;
#endif
