/* The bounds of encoded keys: 8 bits a channel and one scale, never inside of the true ones. */
#include "kernels/code_bounds.h"

#include <math.h>
#include <stdbool.h>

void code_bounds_merge(float *bounds, const float *more, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++) {
        float *low = bounds + d, *high = bounds + dim + d;
        if (!(*low <= more[d])) *low = isnan(*low) ? *low : more[d];
        if (!(*high >= more[dim + d])) *high = isnan(*high) ? *high : more[dim + d];
    }
}

/* The largest of them, as a number; infinite or a NaN where one is. */
static float largest_of(const float *bounds, uint32_t count) {
    float largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (isnan(bounds[i])) return NAN;
        if (fabsf(bounds[i]) > largest) largest = fabsf(bounds[i]);
    }
    return largest;
}

float code_bounds_encode(const float *bounds, uint32_t dim, int8_t *codes) {
    float largest = largest_of(bounds, 2 * dim);
    /* A little more than is needed: 127 steps of it are not below the largest. */
    float scale = isfinite(largest) ? largest * 1.0000005f / 127 : NAN;
    bool some = isfinite(largest) && scale >= 0x1p-126f;
    for (uint32_t d = 0; d < dim; d++) {
        float low = some ? floorf(bounds[d] / scale) : 0;
        float high = some ? ceilf(bounds[dim + d] / scale) : 0;
        if (some && low * scale > bounds[d]) low--;
        if (some && high * scale < bounds[dim + d]) high++;
        codes[d] = (int8_t)(low < -128 ? -128 : low);
        codes[dim + d] = (int8_t)(high > 127 ? 127 : high);
    }
    if (isfinite(largest) && !some && largest > 0) { /* too small for steps of their own */
        for (uint32_t d = 0; d < dim; d++) codes[d] = -1, codes[dim + d] = 1;
        return 0x1p-119f;
    }
    return scale;
}

void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds) {
    for (uint32_t i = 0; i < 2 * dim; i++) bounds[i] = (float)codes[i] * scale;
}
