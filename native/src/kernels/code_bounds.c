/* The bounds of encoded keys: 8 bits a channel and one scale, never inside of the true ones. */
#include "kernels/code_bounds.h"

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

static void decode_row(const code_form *form, code_piece piece, uint32_t token, float *row) {
    uint8_t codes[CODE_DIM_MAX + CODE_CHANNELS];
    float scale, middle = 0.5f - (float)(1u << (form->bits - 1));
    kernels_serial.to_float(KERNEL_FLOAT16, piece.scales + token, 1, &scale);
    code_take(form, piece.blocks + token / CODE_TOKENS * code_block_bytes(form),
              token % CODE_TOKENS, codes);
    for (uint32_t d = 0; d < form->dim; d++) row[d] = ((float)codes[d] + middle) * scale;
}

static void widen(float *bounds, const float *row, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++) {
        if (row[d] < bounds[d]) bounds[d] = row[d];
        if (row[d] > bounds[dim + d]) bounds[dim + d] = row[d];
    }
}

/* Bounds are smaller than the steps of 127 by more than a rounding, and a step is a normal number:
 * keys of smaller ones are as good as zeros. */
float code_bounds_step(float largest) {
    float step = largest * 1.0000005f / 127;
    return step < 0x1p-100f ? 0x1p-100f : step;
}

void code_bounds_encode(const float *bounds, uint32_t dim, float step, int8_t *codes) {
    for (uint32_t d = 0; d < dim; d++) {
        float low = floorf(bounds[d] / step), high = ceilf(bounds[dim + d] / step);
        if (low * step > bounds[d]) low--;
        if (high * step < bounds[dim + d]) high++;
        codes[d] = (int8_t)low;
        codes[dim + d] = (int8_t)high;
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
        float row[CODE_DIM_MAX];
        decode_row(form, piece, t, row);
        if (isnan(row[0])) {
            memset(codes, 0, 2 * dim);
            return NAN;
        }
        code_unrotate(row, 1, dim);
        widen(bounds, row, dim);
    }
    for (uint32_t i = 0; i < 2 * dim; i++) largest = fmaxf(largest, fabsf(bounds[i]));
    float step = code_bounds_step(largest);
    code_bounds_encode(bounds, dim, step, codes);
    return step;
}

void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds) {
    for (uint32_t i = 0; i < 2 * dim; i++) bounds[i] = (float)codes[i] * scale;
}
