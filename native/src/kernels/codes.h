/* Keys and values as codes of 8 or 4 bits: what pages of encoded pools hold, and what is computed
 * from them as they lie. docs/decisions/0034-encodings.md has why.
 *
 * A row (of one token and head) is rotated first, as sketch.h says, so that no channel is larger
 * than others. Its scale is the largest |channel| / 2^(bits - 1), rounded to float16; channel y has
 * the code floor(y / scale) + 2^(bits - 1), within 0 to 2^bits - 1, which stands for
 * (code + 0.5 - 2^(bits - 1)) * scale. A scale above 65504 is 65504, and the codes are at their
 * ends; one that rounds to 0 makes all codes 0, and the row stands for zeros. A row that has an
 * infinity or a NaN once it is rotated has the scale NaN (0x7e00) and codes 0. The upper 4 of 8
 * bits are the code of 4 bits.
 *
 * To the bit: butterflies of distance 1 first, then 2, 4 ...; y = x * norm, where x is what they
 * make, and norm = 1 / root of the block's size; y / scale is x * (norm / scale).
 *
 * A piece is blocks of 16 tokens, then a float16 scale for each of their tokens; those that are not
 * there have the scale 0. Channels are filled up to a multiple of 16, with codes 0. Lines of 64
 * bytes, from the block's start:
 *   keys, 8 bits     line i has channels 4i to 4i + 3: 4 bytes a token, token after token
 *   keys, 4 bits     line i has channels 8i to 8i + 7: likewise, the first four in the low nibbles
 *   values, 8 bits   line [t][c] (c fastest) has tokens 4t to 4t + 3 of channels 16c to 16c + 15:
 *                    4 bytes a channel, channel after channel
 *   values, 4 bits   line [t][c] has tokens 8t to 8t + 7: likewise, the first four in low nibbles
 * so that a lane of 4 bytes is a token (a channel), and nothing is summed across lanes. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CODE_TOKENS = 16, CODE_CHANNELS = 16, CODE_DIM_MAX = 1024 };

typedef struct code_form {
    uint32_t bits;               /* 8 or 4 */
    uint32_t dim;                /* 1 to CODE_DIM_MAX */
    bool values;                 /* else keys */
} code_form;

static inline uint32_t code_channels(uint32_t dim) {
    return (dim + CODE_CHANNELS - 1) / CODE_CHANNELS * CODE_CHANNELS;
}
static inline size_t code_block_bytes(const code_form *form) {
    return (size_t)code_channels(form->dim) * CODE_TOKENS * form->bits / 8;
}
static inline uint32_t code_blocks(uint32_t tokens) {
    return (tokens + CODE_TOKENS - 1) / CODE_TOKENS;
}
/* Where the scales are: behind the blocks. */
static inline size_t code_scales_offset(const code_form *form, uint32_t tokens) {
    return code_blocks(tokens) * code_block_bytes(form);
}
static inline size_t code_bytes(const code_form *form, uint32_t tokens) {
    return code_scales_offset(form, tokens) + code_blocks(tokens) * CODE_TOKENS * sizeof(uint16_t);
}

/* A piece: its first block, which begins on a line, and its scales. */
typedef struct code_piece {
    const uint8_t *blocks;
    const uint16_t *scales;
} code_piece;

/* A rotated query in 14 bits: channel d of it is about (128 * high[d] + low[d]) * factor, where
 * -64 < high <= 64 and -64 <= low < 64, so that a sum of two products with a byte fits 16 bits. */
typedef struct code_query {
    const int8_t *high, *low;    /* [code_channels(dim)] each: low, and the next one, behind high */
    int32_t sum;                 /* of 128 * high + low over all channels */
    float factor;                /* scale * largest |channel| / 8127; NaN if the query has one */
} code_query;

/* ---- codes.c ---- */
/* Rotates `count` queries, [dim] each, and makes codes of them; room: count * 2 *
 * code_channels(dim) bytes, 64-byte aligned. A query of zeros, or below 1e-30, has codes 0. */
void code_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *room,
                  code_query *prepared);
/* In place, `count` rows of `dim` floats, into the rotated space, and back. */
void code_rotate(float *rows, uint32_t count, uint32_t dim);
void code_unrotate(float *rows, uint32_t count, uint32_t dim);

/* ---- code_rows.c ---- */
/* As encode below, of any rows, also of numbers whose sums float32 does not have. */
void code_rows_encode(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                      uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales);

/* For instruction sets that have no faster way: codes of one token of a block, [code_channels(dim)]
 * bytes. place takes codes of 8 bits, of which 4 bits are the upper half; what else is in the block
 * stays. take gives codes of as many bits as the form has. */
void code_place(const code_form *form, const uint8_t *codes, uint32_t token, uint8_t *block);
void code_take(const code_form *form, const uint8_t *block, uint32_t token, uint8_t *codes);

/* What each instruction set has. All of them give the same bits, NaN's own aside.
 *
 * encode: rows [count] of dtype, stride_bytes apart, into the places [at, at + count) of a piece in
 *     memory; what else is in it stays. errors[i], unless errors is NULL: the length of what row i
 *     stands for less the row, 0 where the scale is NaN. It is scale * root of the sum of e * e,
 *     e = x * (norm / scale) - (code + 0.5 - 2^(bits - 1)); a row that stands for zeros has e = x *
 *     norm, and no scale. The sum: eight of fused multiply-adds, of the channels with the same d %
 *     8, in order; then ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).
 * decode: tokens [first, first + count) as float32 [count][dim], in the rotated space.
 * score: logits[j * logit_stride + t - first] = factor * scale of t * sum over d of
 *     (128 * high + low)[d] * (code of t and d + 0.5 - 2^(bits - 1)), for tokens t in [first, first
 *     + count): the sum is exact (whole numbers and a half, rounded once to float32), then two
 *     products in that order, scale of t first.
 * score_best: best[i] = the largest logit of all queries over the tokens [0, tokens) of piece i,
 *     NaN if one is; a zero is +0. next[i], unless NULL, is prefetched: the bytes of a piece.
 * accumulate: accumulator[j * dim + d] += sum over t in [first, first + count) of weights[j *
 *     weight_stride + t - first] * value of t and d, in the rotated space. By blocks of 16 tokens:
 *     products p of weight and scale are rounded to P = p * (16256 / largest |p| of the query's
 *     block), whole numbers to the nearest even, which are 128 * a + b of bytes with -64 <= b < 64;
 *     the block adds (exact sum of P * (code + 0.5 - 2^(bits - 1)), rounded once) * (largest |p| /
 *     16256), as a fused multiply-add. A block whose largest |p| is below 1e-30 adds 0. A NaN or an
 *     infinity among the products makes the query's accumulators NaN. */
#define CODE_FUNCTIONS(isa)                                                                      \
    void code_encode_##isa(const code_form *form, int dtype, const void *rows,                   \
                           size_t stride_bytes, uint32_t at, uint32_t count, uint8_t *blocks,    \
                           uint16_t *scales, float *errors);                                     \
    void code_decode_##isa(const code_form *form, code_piece piece, uint32_t first,              \
                           uint32_t count, float *rows);                                         \
    void code_score_##isa(const code_form *form, code_piece piece, uint32_t first,               \
                          uint32_t count, const code_query *queries, uint32_t query_count,       \
                          float *logits, size_t logit_stride, const void *next);                 \
    void code_score_best_##isa(const code_form *form, const code_piece *pieces,                  \
                               const void *const *next, uint32_t count, uint32_t tokens,         \
                               const code_query *queries, uint32_t query_count, float *best);    \
    void code_accumulate_##isa(const code_form *form, code_piece piece, uint32_t first,          \
                               uint32_t count, const float *weights, size_t weight_stride,       \
                               uint32_t query_count, float *accumulator, const void *next)
CODE_FUNCTIONS(serial);
#if defined(__x86_64__)
CODE_FUNCTIONS(avx2);
CODE_FUNCTIONS(avx512);
/* Of the first `tokens` tokens of several pieces, bit for bit what accumulate does of one after the
 * other: piece i has the weights in the columns [i * tokens, (i + 1) * tokens). Accumulators of
 * many queries are read and written once for some pieces. next[i] is prefetched, unless NULL. */
void code_accumulate_pieces_avx512(const code_form *form, const code_piece *pieces,
                                   const void *const *next, uint32_t count, uint32_t tokens,
                                   const float *weights, size_t weight_stride,
                                   uint32_t query_count, float *accumulator);
#elif defined(__aarch64__)
CODE_FUNCTIONS(neon);
#endif
