/* What all instruction sets share of sketches: the Hadamard transform, and queries in 8 bits. */
#include "kernels/sketch.h"

#include <math.h>
#include <string.h>

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

void sketch_hadamard(float *vector, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++)
        if (sketch_signs(d / 64) >> d % 64 & 1) vector[d] = -vector[d];
    for (uint32_t first = 0; first < dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(dim - first));
        sketch_transform(vector + first, size);
        first += size;
    }
}

void sketch_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *codes,
                    sketch_query *prepared) {
    uint32_t padded = sketch_dim(dim);
    for (uint32_t q = 0; q < count; q++, codes += padded) {
        float rotated[4096], largest = 0;
        int32_t sum = 0;
        memcpy(rotated, queries + (uint64_t)q * dim, dim * sizeof(float));
        sketch_hadamard(rotated, dim);
        for (uint32_t d = 0; d < dim && isfinite(largest); d++)
            if (!(fabsf(rotated[d]) <= largest)) largest = fabsf(rotated[d]); /* or NaN */
        memset(codes, 0, padded);
        /* A query that small is 0: below it 127 / largest is infinite. */
        float unit = isfinite(largest) && largest > 1e-30f ? 127 / largest : 0;
        for (uint32_t d = 0; d < dim && unit > 0; d++) {
            int32_t code = (int32_t)lrintf(rotated[d] * unit);
            codes[sketch_place(d)] = (int8_t)code;
            sum += code;
        }
        prepared[q] = (sketch_query){.codes = codes, .offset = 1.5f * (float)sum,
                                     .factor = isfinite(largest) ? scale * largest / 127 : NAN};
    }
}
