/* What all instruction sets share of sketches: the Hadamard transform, and queries in 8 bits. */
#include "kernels/sketch.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { DIM_MAX = 4096 }; /* of a pool's heads */

uint64_t sketch_signs(uint32_t block) {
    uint64_t z = (block + 1ull) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

void sketch_transform(float *vector, uint32_t size) {
    for (uint32_t half = 1; half < size; half *= 2)
        for (uint32_t first = 0; first < size; first += 2 * half)
            for (uint32_t i = first; i < first + half; i++) {
                float a = vector[i], b = vector[i + half];
                vector[i] = a + b;
                vector[i + half] = a - b;
            }
    float norm = 1 / sqrtf((float)size);
    for (uint32_t i = 0; i < size; i++) vector[i] *= norm;
}

/* The signs that change, as bits to xor a float's with. */
static void flips_of(uint32_t dim, uint32_t *flips) {
    for (uint32_t block = 0; block < dim; block += 64) {
        uint64_t signs = sketch_signs(block / 64);
        for (uint32_t d = block; d < dim && d < block + 64; d++, signs >>= 1)
            flips[d] = (uint32_t)(signs & 1) << 31;
    }
}

static void rotate(float *vector, uint32_t dim, const uint32_t *flips) {
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t bits;
        memcpy(&bits, vector + d, sizeof(bits));
        bits ^= flips[d];
        memcpy(vector + d, &bits, sizeof(bits));
    }
    for (uint32_t first = 0; first < dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(dim - first));
        sketch_transform(vector + first, size);
        first += size;
    }
}

void sketch_hadamard(float *vector, uint32_t dim) {
    uint32_t flips[DIM_MAX];
    flips_of(dim, flips);
    rotate(vector, dim, flips);
}

/* Bits of numbers without their signs are in the order of the numbers, and those of NaN behind
 * them. */
float sketch_largest(const float *vector, uint32_t dim) {
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

/* Codes of a rotated query; returns their sum. A number below 2^22 is rounded to a whole one, to
 * the even of two that are as near, where so much is added and taken off again. */
static int32_t quantize(const float *rotated, uint32_t dim, float unit, int8_t *codes) {
    const float to_whole = 12582912; /* 1.5 * 2^23 */
    int32_t sum = 0;
    int8_t whole[DIM_MAX];
    for (uint32_t d = 0; d < dim; d++) {
        int32_t code = (int32_t)((rotated[d] * unit + to_whole) - to_whole);
        whole[d] = (int8_t)code;
        sum += code;
    }
    uint32_t d = 0;
    for (; d + SKETCH_CHANNELS <= dim; d += SKETCH_CHANNELS)
        for (uint32_t i = 0; i < SKETCH_CHANNELS; i++) codes[d + sketch_place(i)] = whole[d + i];
    for (; d < dim; d++) codes[sketch_place(d)] = whole[d];
    return sum;
}

void sketch_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *codes,
                    sketch_query *prepared) {
    uint32_t padded = sketch_dim(dim), flips[DIM_MAX];
    float rotated[DIM_MAX];
    flips_of(dim, flips);
    for (uint32_t q = 0; q < count; q++, codes += padded) {
        memcpy(rotated, queries + (uint64_t)q * dim, dim * sizeof(float));
        rotate(rotated, dim, flips);
        float largest = sketch_largest(rotated, dim);
        memset(codes, 0, padded);
        /* A query that small is 0: below it 127 / largest is infinite. */
        bool some = isfinite(largest) && largest > 1e-30f;
        int32_t sum = some ? quantize(rotated, dim, 127 / largest, codes) : 0;
        prepared[q] = (sketch_query){.codes = codes, .offset = 1.5f * (float)sum,
                                     .factor = isfinite(largest) ? scale * largest / 127 : NAN};
    }
}
