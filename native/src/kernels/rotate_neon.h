/* Rotations with AdvSIMD, of one row, as sketches and codes begin. */
#pragma once

#include <arm_neon.h>
#include <math.h>

#include "kernels/sketch.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 4 };

/* Of a block of at least 4 numbers; yet to be multiplied with its norm. */
INLINE void transform(float *vector, uint32_t size) {
    for (uint32_t i = 0; i < size; i += LANES) {
        float32x4_t x = vld1q_f32(vector + i), swapped = vrev64q_f32(x);
        float32x4_t sum = vaddq_f32(x, swapped), difference = vsubq_f32(swapped, x);
        x = vtrn2q_f32(sum, difference); /* a + b, a - b, c + d, c - d */
        swapped = vextq_f32(x, x, 2);
        sum = vaddq_f32(x, swapped), difference = vsubq_f32(swapped, x);
        vst1q_f32(vector + i, vcombine_f32(vget_low_f32(sum), vget_high_f32(difference)));
    }
    for (uint32_t half = LANES; half < size; half *= 2)
        for (uint32_t first = 0; first < size; first += 2 * half)
            for (uint32_t i = first; i < first + half; i += LANES) {
                float32x4_t a = vld1q_f32(vector + i), b = vld1q_f32(vector + i + half);
                vst1q_f32(vector + i, vaddq_f32(a, b));
                vst1q_f32(vector + i + half, vsubq_f32(a, b));
            }
}

INLINE void flip_signs(float *vector, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++)
        if (sketch_signs(d / 64) >> d % 64 & 1) vector[d] = -vector[d];
}
