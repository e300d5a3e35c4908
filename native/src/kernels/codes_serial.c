/* Codes in plain C: the reference that the other instruction sets are tested against. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize")
#endif

#include <math.h>
#include <string.h>

#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/kernels.h"

/* ---- where codes lie ---- */

typedef struct place {
    size_t byte;
    uint32_t shift;
} place;

static place place_of(const code_form *form, uint32_t token, uint32_t channel) {
    uint32_t fours = 8 / form->bits, together = 4 * fours, in_block = token % CODE_TOKENS, k;
    size_t line, lane;
    if (form->values) {
        k = in_block % together;
        line = in_block / together * (code_channels(form->dim) / CODE_CHANNELS) +
               channel / CODE_CHANNELS;
        lane = channel % CODE_CHANNELS;
    } else {
        k = channel % together;
        line = channel / together;
        lane = in_block;
    }
    return (place){.byte = token / CODE_TOKENS * code_block_bytes(form) + line * 64 + lane * 4 +
                           k % 4,
                   .shift = k / 4 * 4};
}

static uint32_t get(const code_form *form, const uint8_t *blocks, uint32_t token,
                    uint32_t channel) {
    place at = place_of(form, token, channel);
    return (uint32_t)blocks[at.byte] >> at.shift & ((1u << form->bits) - 1);
}

static void put(const code_form *form, uint8_t *blocks, uint32_t token, uint32_t channel,
                uint32_t code) {
    place at = place_of(form, token, channel);
    uint32_t mask = ((1u << form->bits) - 1) << at.shift;
    blocks[at.byte] = (uint8_t)((blocks[at.byte] & ~mask) | code << at.shift);
}

static float scale_of(code_piece piece, uint32_t token) {
    float scale;
    kernels_serial.to_float(KERNEL_FLOAT16, piece.scales + token, 1, &scale);
    return scale;
}

/* ---- encode ---- */

/* A row before the last step of its rotation, which multiplies each block with its norm. */
typedef struct turned {
    float x[CODE_DIM_MAX], norm[CODE_DIM_MAX];
    float largest; /* of |x * norm|; a NaN if one is */
} turned;

static void turn(turned *row, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d++)
        if (sketch_signs(d / 64) >> d % 64 & 1) row->x[d] = -row->x[d];
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        for (uint32_t half = 1; half < size; half *= 2)
            for (uint32_t i = 0; i < size; i++)
                if (!(i & half)) {
                    float *a = row->x + first + i, *b = a + half, sum = *a + *b;
                    *b = *a - *b;
                    *a = sum;
                }
        for (uint32_t i = 0; i < size; i++) row->norm[first + i] = 1 / sqrtf((float)size);
    }
    row->largest = 0;
    for (uint32_t d = 0; d < dim; d++) {
        float y = fabsf(row->x[d] * row->norm[d]);
        if (y > row->largest || isnan(y)) row->largest = y;
    }
}

static uint16_t scale_bits(float largest, uint32_t bits) {
    float scale = largest / (float)(1u << (bits - 1));
    uint16_t half;
    if (!isfinite(largest)) return 0x7e00;
    if (scale > 65504) scale = 65504;
    kernels_serial.from_float(KERNEL_FLOAT16, &scale, 1, &half);
    return half;
}

/* steps: y / scale. */
static uint32_t code_of(float steps, uint32_t bits) {
    float half = (float)(1u << (bits - 1)), below = floorf(steps);
    if (below < -half) below = -half;
    if (below > half - 1) below = half - 1;
    return (uint32_t)(below + half);
}

static float sum_of(const float sums[8]) {
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
           ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/* Returns the error. */
static float encode_row(const code_form *form, const turned *row, uint32_t token, uint8_t *blocks,
                        uint16_t *scales) {
    float sums[8] = {0}, scale;
    for (uint32_t d = 0; d < code_channels(form->dim); d++) put(form, blocks, token, d, 0);
    scales[token] = scale_bits(row->largest, form->bits);
    scale = scale_of((code_piece){blocks, scales}, token);
    if (isnan(scale)) return 0;
    for (uint32_t d = 0; d < form->dim; d++) {
        float e = row->x[d] * row->norm[d];
        if (scale > 0) {
            float steps = row->x[d] * (row->norm[d] / scale);
            uint32_t code = code_of(steps, form->bits);
            put(form, blocks, token, d, code);
            e = steps - ((float)code + 0.5f - (float)(1u << (form->bits - 1)));
        }
        sums[d % 8] = fmaf(e, e, sums[d % 8]);
    }
    return sqrtf(sum_of(sums)) * (scale > 0 ? scale : 1);
}

void code_encode_serial(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                        uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales,
                        float *errors) {
    for (uint32_t i = 0; i < count; i++) {
        turned row;
        kernels_serial.to_float(dtype, (const char *)rows + i * stride_bytes, form->dim, row.x);
        turn(&row, form->dim);
        float error = encode_row(form, &row, at + i, blocks, scales);
        if (errors) errors[i] = error;
    }
}

/* ---- what is computed from codes ---- */

void code_decode_serial(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                        float *rows) {
    const float middle = 0.5f - (float)(1u << (form->bits - 1));
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t d = 0; d < form->dim; d++)
            rows[(size_t)t * form->dim + d] =
                ((float)get(form, piece.blocks, first + t, d) + middle) *
                scale_of(piece, first + t);
}

static float logit(const code_form *form, code_piece piece, uint32_t token,
                   const code_query *query) {
    int64_t twice = 0;
    for (uint32_t d = 0; d < form->dim; d++) {
        int32_t code = (int32_t)get(form, piece.blocks, token, d);
        twice += (int64_t)(128 * query->high[d] + query->low[d]) *
                 (2 * code + 1 - (1 << form->bits));
    }
    float sum = (float)twice * 0.5f;
    float product = sum * scale_of(piece, token);
    return product * query->factor;
}

void code_score_serial(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                       const code_query *queries, uint32_t query_count, float *logits,
                       size_t logit_stride, const void *next) {
    (void)next;
    for (uint32_t j = 0; j < query_count; j++)
        for (uint32_t t = 0; t < count; t++)
            logits[j * logit_stride + t] = logit(form, piece, first + t, queries + j);
}

void code_score_best_serial(const code_form *form, const code_piece *pieces,
                            const void *const *next, uint32_t count, uint32_t tokens,
                            const code_query *queries, uint32_t query_count, float *best) {
    (void)next;
    for (uint32_t i = 0; i < count; i++) {
        float most = -INFINITY;
        for (uint32_t t = 0; t < tokens; t++)
            for (uint32_t j = 0; j < query_count; j++) {
                float value = logit(form, pieces[i], t, queries + j);
                if (value > most || isnan(value)) most = value;
            }
        best[i] = most + 0.0f;
    }
}

/* What weights become in one block, of `count` tokens. */
typedef struct rounded {
    int32_t weights[CODE_TOKENS];
    float unit;
} rounded;

static rounded round_weights(code_piece piece, uint32_t first, uint32_t count,
                             const float *weights) {
    rounded made = {.weights = {0}};
    float products[CODE_TOKENS], largest = 0;
    for (uint32_t t = 0; t < count; t++) {
        products[t] = weights[t] * scale_of(piece, first + t);
        if (!isfinite(products[t])) largest = NAN;
        if (fabsf(products[t]) > largest) largest = fabsf(products[t]);
    }
    if (isnan(largest)) made.unit = NAN;
    if (largest >= 1e-30f) {
        float inverse = 16256 / largest;
        made.unit = largest / 16256;
        for (uint32_t t = 0; t < count; t++) {
            float product = products[t] * inverse;
            made.weights[t] = (int32_t)rintf(product);
        }
    }
    return made;
}

void code_accumulate_serial(const code_form *form, code_piece piece, uint32_t first,
                            uint32_t count, const float *weights, size_t weight_stride,
                            uint32_t query_count, float *accumulator, const void *next) {
    (void)next;
    for (uint32_t j = 0; j < query_count; j++)
        for (uint32_t t = first, here; t < first + count; t += here) {
            uint32_t block_end = (t / CODE_TOKENS + 1) * CODE_TOKENS;
            here = (block_end < first + count ? block_end : first + count) - t;
            rounded made = round_weights(piece, t, here, weights + j * weight_stride + t - first);
            for (uint32_t d = 0; d < form->dim; d++) {
                int32_t twice = 0;
                for (uint32_t i = 0; i < here; i++)
                    twice += made.weights[i] * (2 * (int32_t)get(form, piece.blocks, t + i, d) +
                                                1 - (1 << form->bits));
                float *sum = accumulator + (size_t)j * form->dim + d;
                *sum = fmaf((float)twice * 0.5f, made.unit, *sum);
            }
        }
}

/* ---- planes ---- */

CODE_PLANES_OF(serial)
