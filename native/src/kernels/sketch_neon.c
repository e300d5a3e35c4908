/* Sketches with AdvSIMD: 4 tokens in the 4 lanes of a vector, sums of 16 bits widened in time. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/rotate_neon.h"
#include "kernels/sketch.h"

enum { QUERY_BLOCK = 4, VECTORS = SKETCH_TOKENS / LANES };
/* A line adds at most 4 * 2 * 3 * 127 = 3048 to a sum of 16 bits. */
enum { LINES_TOGETHER = 8 };

/* ---- encode ---- */

static void hadamard(float *rotated, uint32_t dim) {
    flip_signs(rotated, dim);
    for (uint32_t first = 0; first < dim;) {
        uint32_t size = 1u << (31 - __builtin_clz(dim - first));
        if (size < LANES) {
            sketch_transform(rotated + first, size);
        } else {
            const float norm = 1 / sqrtf((float)size);
            transform(rotated + first, size);
            for (uint32_t i = first; i < first + size; i += LANES)
                vst1q_f32(rotated + i, vmulq_n_f32(vld1q_f32(rotated + i), norm));
        }
        first += size;
    }
}

/* rotated: dim floats, and zeros to a multiple of 16. Returns the scale. */
INLINE float encode_lanes(const float *rotated, uint32_t dim, uint8_t *codes) {
    static const uint32_t places[LANES] = {1, 4, 16, 64};
    const uint32x4_t place = vld1q_u32(places);
    float32x4_t squares = vdupq_n_f32(0), products = vdupq_n_f32(0);
    for (uint32_t d = 0; d < dim; d += LANES) {
        float32x4_t x = vld1q_f32(rotated + d);
        squares = vfmaq_f32(squares, x, x);
    }
    float length = vaddvq_f32(squares), step = sqrtf(length / (float)dim);
    for (uint32_t d = 0; d < dim; d += SKETCH_CHANNELS) {
        uint32_t packed = 0;
        UNROLL for (uint32_t i = 0; i < SKETCH_CHANNELS / LANES; i++) {
            float32x4_t x = vld1q_f32(rotated + d + i * LANES);
            uint32x4_t high = vcgezq_f32(x);
            float32x4_t border = vbslq_f32(high, vdupq_n_f32(step), vdupq_n_f32(-step));
            uint32x4_t low = vcgeq_f32(x, border);
            /* |code - 1.5| is 1.5 where both bits are equal: times |x|, the product. */
            float32x4_t level = vbslq_f32(veorq_u32(low, high), vdupq_n_f32(0.5f),
                                          vdupq_n_f32(1.5f));
            products = vfmaq_f32(products, vabsq_f32(x), level);
            uint32x4_t code = vaddq_u32(vandq_u32(high, vdupq_n_u32(2)),
                                        vandq_u32(low, vdupq_n_u32(1)));
            packed |= vaddvq_u32(vmulq_u32(code, place)) << 8 * i;
        }
        packed &= sketch_last_channels(dim - d);
        memcpy(codes + d / SKETCH_CHANNELS * SKETCH_LINE_BYTES, &packed, sizeof(packed));
    }
    if (!isfinite(length)) return NAN;
    return length > 0 ? length / vaddvq_f32(products) : 0;
}

void sketch_neon(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                 void *sketch) {
    float rotated[4096];
    uint32_t padded = sketch_dim(dim);
    if (tokens % SKETCH_TOKENS) memset(sketch, 0, sketch_bytes(tokens, dim));
    for (uint32_t t = 0; t < tokens; t++) {
        kernels_neon.to_float(dtype, (const char *)keys + t * stride_bytes, dim, rotated);
        hadamard(rotated, dim);
        memset(rotated + dim, 0, (padded - dim) * sizeof(float));
        uint8_t *block = (uint8_t *)sketch + t / SKETCH_TOKENS * sketch_block_bytes(dim);
        float scale = encode_lanes(rotated, dim, block + t % SKETCH_TOKENS * 4);
        memcpy(block + sketch_block_bytes(dim) - SKETCH_LINE_BYTES +
               t % SKETCH_TOKENS * sizeof(float), &scale, sizeof(scale));
    }
}

/* ---- estimate ---- */

/* Four codes of 4 tokens by the query's four: products of 16 bits, neighbours added. */
INLINE int16x8_t dot_four(uint8x16_t codes, int8x16_t query) {
    int8x16_t signed_codes = vreinterpretq_s8_u8(codes);
    int16x8_t low = vmull_s8(vget_low_s8(signed_codes), vget_low_s8(query));
    int16x8_t high = vmull_high_s8(signed_codes, query);
    return vpaddq_s16(low, high);
}

/* Raises the maxima of 4 tokens by 1 to 4 queries, before their scales. */
INLINE float32x4_t estimate_part(const uint8_t *part, uint32_t lines, const sketch_query *queries,
                                 int queries_here, float32x4_t maxima) {
    const uint8x16_t three = vdupq_n_u8(3);
    int32x4_t sums[QUERY_BLOCK];
    UNROLL for (int q = 0; q < queries_here; q++) sums[q] = vdupq_n_s32(0);
    for (uint32_t first = 0; first < lines; first += LINES_TOGETHER) {
        uint32_t end = lines - first < LINES_TOGETHER ? lines : first + LINES_TOGETHER;
        int16x8_t shorts[QUERY_BLOCK];
        UNROLL for (int q = 0; q < queries_here; q++) shorts[q] = vdupq_n_s16(0);
        for (uint32_t line = first; line < end; line++) {
            uint8x16_t packed = vld1q_u8(part + line * SKETCH_LINE_BYTES), codes[4];
            codes[0] = vandq_u8(packed, three);
            codes[1] = vandq_u8(vshrq_n_u8(packed, 2), three);
            codes[2] = vandq_u8(vshrq_n_u8(packed, 4), three);
            codes[3] = vshrq_n_u8(packed, 6);
            UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int i = 0; i < 4; i++) {
                int32_t four;
                memcpy(&four, queries[q].codes + line * SKETCH_CHANNELS + 4 * i, sizeof(four));
                int8x16_t query = vreinterpretq_s8_s32(vdupq_n_s32(four));
                shorts[q] = vaddq_s16(shorts[q], dot_four(codes[i], query));
            }
        }
        UNROLL for (int q = 0; q < queries_here; q++) sums[q] = vpadalq_s16(sums[q], shorts[q]);
    }
    UNROLL for (int q = 0; q < queries_here; q++) {
        float32x4_t sum = vsubq_f32(vcvtq_f32_s32(sums[q]), vdupq_n_f32(queries[q].offset));
        maxima = vmaxq_f32(maxima, vmulq_n_f32(sum, queries[q].factor)); /* of NaN: NaN */
    }
    return maxima;
}

INLINE float32x4_t estimate_four(const uint8_t *part, uint32_t lines, const sketch_query *queries,
                                 uint32_t query_count) {
    float32x4_t best = vdupq_n_f32(-INFINITY);
    for (uint32_t q = 0; q < query_count; q += QUERY_BLOCK) switch (query_count - q) {
        case 1: best = estimate_part(part, lines, queries + q, 1, best); break;
        case 2: best = estimate_part(part, lines, queries + q, 2, best); break;
        case 3: best = estimate_part(part, lines, queries + q, 3, best); break;
        default: best = estimate_part(part, lines, queries + q, 4, best);
        }
    return best;
}

static const uint32_t lane_bits[LANES] = {1, 2, 4, 8};

static float estimate_one(const sketch_run *run, const uint8_t *block,
                          float uppers[SKETCH_TOKENS]) {
    const uint32_t lines = sketch_dim(run->dim) / SKETCH_CHANNELS;
    const float *scales = (const float *)(block + lines * SKETCH_LINE_BYTES);
    const uint32x4_t bit = vld1q_u32(lane_bits);
    const float32x4_t never = vdupq_n_f32(-INFINITY);
    float32x4_t top = never;
    for (uint32_t i = 0; i < VECTORS; i++) {
        uint32x4_t seen = vtstq_u32(vdupq_n_u32(run->seen >> i * LANES), bit);
        float32x4_t scale = vld1q_f32(scales + i * LANES);
        float32x4_t best = estimate_four(block + i * 16, lines, run->queries, run->query_count);
        float32x4_t upper = vmulq_f32(vaddq_f32(best, vdupq_n_f32(run->slack)), scale);
        vst1q_f32(uppers + i * LANES, vbslq_f32(seen, upper, never));
        top = vmaxq_f32(top, vbslq_f32(seen, vmulq_f32(best, scale), never));
    }
    return vmaxvq_f32(top);
}

void estimate_neon(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]) {
    const uint64_t bytes = sketch_block_bytes(run->dim);
    for (uint32_t i = 0; i < run->count; i++) {
        for (uint64_t at = 0; run->next[i] && at < bytes; at += SKETCH_LINE_BYTES)
            __builtin_prefetch(run->next[i] + at);
        best[i] = estimate_one(run, run->blocks[i], uppers[i]);
    }
}

void above_neon(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,
                uint16_t *bits) {
    const uint32x4_t bit = vld1q_u32(lane_bits);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t below = 0;
        for (uint32_t at = 0; at < SKETCH_TOKENS; at += LANES) {
            uint32x4_t lower = vcltq_f32(vld1q_f32(values[i] + at), vdupq_n_f32(limit));
            below |= vaddvq_u32(vandq_u32(lower, bit)) << at; /* never so of a NaN */
        }
        bits[i] = (uint16_t)~below;
    }
}
#else
typedef int sketch_neon_is_of_aarch64;
#endif
