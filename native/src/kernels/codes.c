/* What all instruction sets share of codes: queries in 14 bits, and the way back from the rotated
 * space. */
#include "kernels/codes.h"

#include <math.h>
#include <string.h>

#include "kernels/sketch.h"

/* The largest |channel|, infinite or a NaN where one is: bits of numbers without their signs are in
 * the order of the numbers, and those of NaN behind them. */
static float largest_of(const float *vector, uint32_t dim) {
    int32_t most = 0;
    for (uint32_t d = 0; d < dim; d++) {
        int32_t bits;
        memcpy(&bits, vector + d, sizeof(bits));
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof(largest));
    return largest;
}

/* The two bytes of each channel of a rotated query; returns the sum of all. A number below 2^22 is
 * rounded to a whole one where so much is added and taken off again. */
static int32_t split(const float *rotated, uint32_t dim, float unit, int8_t *high, int8_t *low) {
    const float to_whole = 12582912; /* 1.5 * 2^23 */
    int32_t sum = 0;
    for (uint32_t d = 0; d < dim; d++) {
        int32_t whole = (int32_t)((rotated[d] * unit + to_whole) - to_whole);
        int32_t upper = (whole + 64) >> 7;
        high[d] = (int8_t)upper;
        low[d] = (int8_t)(whole - 128 * upper);
        sum += whole;
    }
    return sum;
}

void code_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *room,
                  code_query *prepared) {
    uint32_t channels = code_channels(dim);
    float rotated[CODE_DIM_MAX];
    for (uint32_t q = 0; q < count; q++) {
        int8_t *high = room + (size_t)q * 2 * channels, *low = high + channels;
        memcpy(rotated, queries + (size_t)q * dim, dim * sizeof(float));
        sketch_hadamard(rotated, dim);
        float largest = largest_of(rotated, dim);
        memset(high, 0, (size_t)2 * channels);
        bool some = isfinite(largest) && largest > 1e-30f;
        int32_t sum = some ? split(rotated, dim, 8127 / largest, high, low) : 0;
        prepared[q] = (code_query){.high = high, .low = low, .sum = sum,
                                   .factor = isfinite(largest) ? scale * largest / 8127 : NAN};
    }
}

void code_unrotate(float *rows, uint32_t count, uint32_t dim) {
    for (uint32_t i = 0; i < count; i++) {
        float *row = rows + (size_t)i * dim;
        for (uint32_t first = 0, size; first < dim; first += size) {
            size = 1u << (31 - __builtin_clz(dim - first));
            sketch_transform(row + first, size);
        }
        for (uint32_t d = 0; d < dim; d++)
            if (sketch_signs(d / 64) >> d % 64 & 1) row[d] = -row[d];
    }
}
