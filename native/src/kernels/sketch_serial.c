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

static sketch_estimate estimate_one(const sketch_blocks *blocks, uint32_t at) {
    const uint8_t *block = blocks->first + at * blocks->stride_bytes;
    const sketch_query *queries = blocks->queries + at * blocks->query_stride;
    const uint32_t query_count = blocks->query_count, seen = blocks->seen;
    const float threshold = blocks->thresholds[at], slack = blocks->slacks[at];
    const uint32_t dim = blocks->dim;
    const float *scales = (const float *)(block + sketch_block_bytes(dim) - SKETCH_LINE_BYTES);
    sketch_estimate made = {.best = -INFINITY};
    for (uint32_t t = 0; t < SKETCH_TOKENS; t++) {
        float unscaled = estimate_token(block, dim, queries, query_count, t);
        float value = unscaled * scales[t];
        if (blocks->maxima) blocks->maxima[16 * (size_t)at + t] = value;
        if (!(seen >> t & 1)) continue;
        if (value > made.best || isnan(value)) made.best = value;
        if (!((unscaled + slack) * scales[t] < threshold)) made.passing |= 1u << t;
    }
    return made;
}

void estimate_serial(const sketch_blocks *blocks, sketch_estimate *made) {
    for (uint32_t i = 0; i < blocks->count; i++)
        made[i] = estimate_one(blocks, i);
}
