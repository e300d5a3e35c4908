/* Sketches in plain C: the reference that the other instruction sets are tested against. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize")
#endif

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/sketch.h"

static uint32_t code_of(float value, float step) {
    return (uint32_t)(value >= -step) + (uint32_t)(value >= 0) + (uint32_t)(value >= step);
}

/* One token of a block of 16. */
static void encode_token(const float *rotated, uint32_t dim, uint32_t token, uint8_t *block) {
    float squares = 0, products = 0;
    for (uint32_t d = 0; d < dim; d++) squares += rotated[d] * rotated[d];
    float step = sqrtf(squares / (float)dim);
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t code = code_of(rotated[d], step), channel = d % SKETCH_CHANNELS;
        products += rotated[d] * ((float)code - 1.5f);
        block[d / SKETCH_CHANNELS * SKETCH_LINE_BYTES + token * 4 + channel / 4] |=
            (uint8_t)(code << channel % 4 * 2);
    }
    float scale = squares > 0 ? squares / products : 0;
    if (!isfinite(squares)) scale = NAN;
    memcpy(block + sketch_block_bytes(dim) - SKETCH_LINE_BYTES + token * sizeof(float), &scale,
           sizeof(float));
}

void sketch_serial(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *sketch) {
    memset(sketch, 0, sketch_bytes(tokens, dim));
    for (uint32_t t = 0; t < tokens; t++) {
        float rotated[4096];
        kernels_serial.to_float(dtype, (const uint8_t *)keys + t * stride_bytes, dim, rotated);
        sketch_hadamard(rotated, dim);
        encode_token(rotated, dim, t % SKETCH_TOKENS,
                     (uint8_t *)sketch + t / SKETCH_TOKENS * sketch_block_bytes(dim));
    }
}

static int32_t dot(const uint8_t *block, uint32_t dim, uint32_t token, const int8_t *query) {
    int32_t sum = 0;
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t channel = d % SKETCH_CHANNELS;
        uint8_t byte = block[d / SKETCH_CHANNELS * SKETCH_LINE_BYTES + token * 4 + channel / 4];
        sum += (byte >> channel % 4 * 2 & 3) * query[sketch_place(d)];
    }
    return sum;
}

static float estimate_token(const uint8_t *block, uint32_t dim, const sketch_query *queries,
                            uint32_t query_count, uint32_t token) {
    float maximum = -INFINITY;
    for (uint32_t q = 0; q < query_count; q++) {
        float sum = (float)dot(block, dim, token, queries[q].codes);
        float value = (sum - queries[q].offset) * queries[q].factor;
        if (value > maximum || isnan(value)) maximum = value;
    }
    return maximum;
}

void estimate_serial(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]) {
    for (uint32_t i = 0; i < run->count; i++) {
        const uint8_t *block = run->blocks[i];
        const float *scales =
            (const float *)(block + sketch_block_bytes(run->dim) - SKETCH_LINE_BYTES);
        best[i] = -INFINITY;
        for (uint32_t t = 0; t < SKETCH_TOKENS; t++) {
            bool seen = run->seen >> t & 1;
            float maximum = estimate_token(block, run->dim, run->queries, run->query_count, t);
            float value = maximum * scales[t];
            if (seen && (value > best[i] || isnan(value))) best[i] = value;
            uppers[i][t] = seen ? (maximum + run->slack) * scales[t] : -INFINITY;
        }
    }
}

void above_serial(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,
                  uint16_t *bits) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t found = 0;
        for (uint32_t t = 0; t < SKETCH_TOKENS; t++)
            found |= (uint32_t)!(values[i][t] < limit) << t;
        bits[i] = (uint16_t)found;
    }
}
