/* Sketches of keys: 2 bits a channel, and a scale for each token, from which logits are estimated
 * at an eighth of the bytes. What is sealed into a page; docs/decisions/0011-sketch.md has why.
 *
 * A key is rotated first: signs by channel, then a Walsh-Hadamard transform, in blocks of powers of
 * two that make up dim, so that no channel is larger than others (QuaRot, arXiv 2404.00456; RaBitQ,
 * arXiv 2405.12497). Channel y of the rotated key has code 0 to 3, the interval of (-inf, -r), [-r,
 * 0), [0, r), [r, inf) that it lies in, r being the root of the mean square over its channels; it
 * stands for code - 1.5. The token's scale is |y|^2 / sum of y * (code - 1.5): along the key itself
 * the estimate is right. A key of zeros has scale 0, one with an infinity or a NaN a NaN.
 *
 * In memory, for each 16 tokens: for each 16 channels (the last ones zeros) 16 words of 4 bytes,
 * one for each token, with the codes of these channels from the low bits on; then 16 scales, fp32.
 * Tokens that are not there have codes 0 and scale 0. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { SKETCH_TOKENS = 16, SKETCH_CHANNELS = 16, SKETCH_LINE_BYTES = 64 };

static inline uint32_t sketch_dim(uint32_t dim) {
    return (dim + SKETCH_CHANNELS - 1) / SKETCH_CHANNELS * SKETCH_CHANNELS;
}
/* Of 16 tokens: their codes and their scales. */
static inline uint64_t sketch_block_bytes(uint32_t dim) {
    return (uint64_t)(sketch_dim(dim) / SKETCH_CHANNELS + 1) * SKETCH_LINE_BYTES;
}
static inline uint64_t sketch_bytes(uint32_t tokens, uint32_t dim) {
    return (tokens + SKETCH_TOKENS - 1) / SKETCH_TOKENS * sketch_block_bytes(dim);
}

/* Of a token's word for the last 16 channels, the bits of the first `count` ones. */
static inline uint32_t sketch_last_channels(uint32_t count) {
    return count < SKETCH_CHANNELS ? (1u << 2 * count) - 1 : ~0u;
}

/* A rotated query in 8 bits: channel d of it is about code * factor. A word of 16 codes, shifted by
 * 2 * i, has those of channels i, 4 + i, 8 + i, 12 + i at the low ends of its bytes: in this order,
 * for i from 0 to 3, the query's lie side by side. */
typedef struct sketch_query {
    const int8_t *codes;         /* [sketch_dim(dim)], -127 to 127 */
    float factor;                /* scale * largest |channel| / 127; NaN if the query has one */
    float offset;                /* 1.5 * sum of the codes */
} sketch_query;

/* Where channel d of a query lies among its codes. */
static inline uint32_t sketch_place(uint32_t d) {
    uint32_t channel = d % SKETCH_CHANNELS;
    return d - channel + channel % 4 * 4 + channel / 4;
}
/* Turns `count` queries, [dim] each; codes: count * sketch_dim(dim) bytes, 64-byte aligned. */
void sketch_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *codes,
                    sketch_query *prepared);
/* In place: signs and transforms of `dim` floats; keeps lengths and inner products. */
void sketch_hadamard(float *vector, uint32_t dim);
/* Which of the 64 channels from 64 * block on change their sign: a bit each (splitmix64). */
uint64_t sketch_signs(uint32_t block);
/* The largest |channel|; infinite or a NaN where one is. */
float sketch_largest(const float *vector, uint32_t dim);
/* The transform of one block, whose size is a power of two. */
void sketch_transform(float *vector, uint32_t size);

/* Blocks of one head, and the queries of it. */
typedef struct sketch_run {
    const uint8_t *const *blocks; /* [count] */
    const uint8_t *const *next;   /* [count]: what is wanted soon, NULL where nothing is */
    uint32_t count;
    uint32_t dim;
    const sketch_query *queries;
    uint32_t query_count;
    uint32_t seen;                /* bit t: token t of each block counts */
    float slack;
} sketch_run;

/* What each instruction set has. sketch: writes sketch_bytes(tokens, dim) to 64-byte aligned
 * memory. estimate: of token t, the largest over the queries of (sum of code * query code - offset)
 * * factor * scale of t, NaN where one is. best[i] is the largest of the tokens of block i that are
 * seen, NaN if one is; uppers[i][t] is the estimate of token t + slack * scale of t, as errors grow
 * with the scale, -infinity where it is not seen. above: bit t of bits[i] says that values[i][t] is
 * not below the limit; that of a NaN is not.
 * Sums are whole numbers below 2^24 (dim * 3 * 127), so instruction sets agree but for the order of
 * two multiplications; codes may differ where a channel lies on a border. */
#define SKETCH_FUNCTIONS(isa)                                                                 \
    void sketch_##isa(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens,      \
                      uint32_t dim, void *sketch);                                            \
    void estimate_##isa(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]);  \
    void above_##isa(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,       \
                     uint16_t *bits)
SKETCH_FUNCTIONS(serial);
#if defined(__x86_64__)
SKETCH_FUNCTIONS(avx2);
SKETCH_FUNCTIONS(avx512);
#elif defined(__aarch64__)
SKETCH_FUNCTIONS(neon);
#endif
