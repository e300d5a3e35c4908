/* The bounds of encoded keys: 8 bits a channel and one scale, never inside of the true ones. */
#include "kernels/code_bounds.h"

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* What a token's codes stand for, over half its scale and the norms of its blocks, as it is out of
 * the rotated space but for the signs: whole numbers below 2^18, which are exact. */
static void turn_back(const code_form *form, code_piece piece, uint32_t token, int32_t *turned) {
    uint8_t codes[CODE_DIM_MAX + CODE_CHANNELS];
    const int32_t middle = 1 - (1 << form->bits);
    code_take(form, piece.blocks + token / CODE_TOKENS * code_block_bytes(form),
              token % CODE_TOKENS, codes);
    for (uint32_t d = 0; d < form->dim; d++) turned[d] = 2 * codes[d] + middle;
    for (uint32_t first = 0, size; first < form->dim; first += size) {
        size = 1u << (31 - __builtin_clz(form->dim - first));
        for (uint32_t half = 1; half < size; half *= 2)
            for (uint32_t from = first; from < first + size; from += 2 * half)
                for (uint32_t d = from; d < from + half; d++) {
                    int32_t a = turned[d], b = turned[d + half];
                    turned[d] = a + b;
                    turned[d + half] = a - b;
                }
    }
}

static void widen(float *bounds, const int32_t *turned, float half_scale, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++) {
        float x = (float)turned[d] * half_scale;
        bounds[d] = x < bounds[d] ? x : bounds[d];
        bounds[dim + d] = x > bounds[dim + d] ? x : bounds[dim + d];
    }
}

/* Multiplies with the norms and signs. */
static void end_bounds(float *bounds, uint32_t dim) {
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        for (uint32_t d = first; d < first + size; d++) {
            bool flips = sketch_signs(d / 64) >> d % 64 & 1;
            float norm = 1 / sqrtf((float)size);
            float low = bounds[d] * norm, high = bounds[dim + d] * norm;
            bounds[d] = flips ? -high : low;
            bounds[dim + d] = flips ? -low : high;
        }
    }
}

/* A step is a normal number: keys of smaller ones are as good as zeros. */
float code_bounds_step(float largest) {
    float step = largest * 1.000002f / 127;
    return step < 0x1p-100f ? 0x1p-100f : step;
}

/* A bound is at most 127 steps, and had up to four roundings to a float; there are three more until
 * its code is read. Each of them may be a 2^24th: together less than the margin. */
void code_bounds_encode(const float *bounds, uint32_t dim, float step, int8_t *codes) {
    const float inverse = 1 / step;
    for (uint32_t d = 0; d < dim; d++) {
        codes[d] = (int8_t)floorf(fmaf(bounds[d], inverse, -CODE_BOUNDS_MARGIN));
        codes[dim + d] = (int8_t)ceilf(fmaf(bounds[dim + d], inverse, CODE_BOUNDS_MARGIN));
    }
}

float code_digest_serial(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes) {
    uint32_t dim = form->dim;
    float bounds[2 * CODE_DIM_MAX], largest = 0;
    for (uint32_t d = 0; d < dim; d++) {
        bounds[d] = INFINITY;
        bounds[dim + d] = -INFINITY;
    }
    for (uint32_t t = 0; t < tokens; t++) {
        int32_t turned[CODE_DIM_MAX];
        float scale;
        kernels_serial.to_float(KERNEL_FLOAT16, piece.scales + t, 1, &scale);
        if (isnan(scale)) {
            memset(codes, 0, 2 * dim);
            return NAN;
        }
        turn_back(form, piece, t, turned);
        widen(bounds, turned, scale * 0.5f, dim);
    }
    end_bounds(bounds, dim);
    for (uint32_t i = 0; i < 2 * dim; i++) largest = fmaxf(largest, fabsf(bounds[i]));
    float step = code_bounds_step(largest);
    code_bounds_encode(bounds, dim, step, codes);
    return step;
}

void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds) {
    for (uint32_t i = 0; i < 2 * dim; i++) bounds[i] = (float)codes[i] * scale;
}
