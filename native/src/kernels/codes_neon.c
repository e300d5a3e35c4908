/* Codes with AdvSIMD: rows are encoded one by one; then 4 tokens of keys, or 4 channels of values,
 * in the 4 lanes, by SDOT where the CPU has it. */
#if defined(__aarch64__)

#include <arm_neon.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/cpu.h"
#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/kernels.h"
#include "kernels/rotate_neon.h"

enum { LINE_BYTES = 64, VECTORS = CODE_TOKENS / LANES, QUERY_ROOM = 16 };

/* ---- encode ---- */

/* A row before the last step of its rotation, which multiplies each block with its norm. */
typedef struct turned {
    float x[CODE_DIM_MAX], norm[CODE_DIM_MAX];
    uint8_t codes[CODE_DIM_MAX];
    float largest;               /* of |x * norm|: not finite if one is not */
} turned;

/* Blocks of 2 channels, or of one. */
static void transform_few(float *x, uint32_t size) {
    float a = x[0], b = x[size - 1];
    if (size == 1) return;
    x[0] = a + b;
    x[1] = a - b;
}

/* Of the row in x, which is followed by zeros to a multiple of 16. */
static void rotate(turned *row, uint32_t dim) {
    uint32x4_t largest = vdupq_n_u32(0);
    flip_signs(row->x, dim);
    memset(row->norm, 0, code_channels(dim) * sizeof(float));
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        if (size < LANES) transform_few(row->x + first, size);
        else transform(row->x + first, size);
        for (uint32_t i = first; i < first + size; i++) row->norm[i] = 1 / sqrtf((float)size);
    }
    for (uint32_t d = 0; d < dim; d += LANES) {
        float32x4_t y = vmulq_f32(vld1q_f32(row->x + d), vld1q_f32(row->norm + d));
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(y)));
    }
    uint32_t most = vmaxvq_u32(largest);
    memcpy(&row->largest, &most, sizeof(most));
}

static uint16_t scale_of(const code_form *form, float largest) {
    float scale = largest * (form->bits == 8 ? 1 / 128.0f : 1 / 8.0f);
    uint16_t half;
    if (!isfinite(largest)) return 0x7e00;
    if (scale > 65504) scale = 65504;
    kernels_neon.from_float(KERNEL_FLOAT16, &scale, 1, &half);
    return half;
}

static float float_of(uint16_t half) {
    float value;
    kernels_neon.to_float(KERNEL_FLOAT16, &half, 1, &value);
    return value;
}

/* Codes of 8 bits of 4 channels, to words of 16; returns e of each. */
INLINE float32x4_t encode_four(int bits, float32x4_t steps, int16x4_t *codes) {
    float32x4_t below = vrndmq_f32(vminq_f32(steps, vdupq_n_f32(127)));
    int32x4_t whole = vcvtq_s32_f32(vmaxq_f32(below, vdupq_n_f32(-128)));
    const float32x4_t half = vdupq_n_f32(0.5f), sixteenth = vdupq_n_f32(1 / 16.0f);
    *codes = vmovn_s32(whole);
    if (bits == 8) return vsubq_f32(steps, vaddq_f32(vcvtq_f32_s32(whole), half));
    below = vcvtq_f32_s32(vandq_s32(whole, vdupq_n_s32(~15)));
    return vsubq_f32(vmulq_f32(steps, sixteenth), vfmaq_f32(half, below, sixteenth));
}

/* Returns the sum of e * e. */
INLINE float encode_channels(int bits, turned *row, uint32_t dim, float scale) {
    float32x4_t sums[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (uint32_t d = 0; d < dim; d += 2 * LANES) {
        int16x4_t codes[2];
        UNROLL for (uint32_t i = 0; i < 2; i++) {
            const uint32_t at = d + i * LANES;
            float32x4_t factor = vdivq_f32(vld1q_f32(row->norm + at), vdupq_n_f32(scale));
            if (bits == 4) factor = vmulq_n_f32(factor, 16);
            float32x4_t steps = vmulq_f32(vld1q_f32(row->x + at), factor);
            float32x4_t e = encode_four(bits, steps, &codes[i]);
            static const uint32_t lanes[LANES] = {0, 1, 2, 3};
            uint32x4_t lane = vaddq_u32(vld1q_u32(lanes), vdupq_n_u32(at));
            uint32x4_t there = vcltq_u32(lane, vdupq_n_u32(dim));
            e = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(e), there));
            sums[i] = vfmaq_f32(sums[i], e, e);
        }
        uint8x8_t bytes = vreinterpret_u8_s8(vmovn_s16(vcombine_s16(codes[0], codes[1])));
        vst1_u8(row->codes + d, veor_u8(bytes, vdup_n_u8(128)));
    }
    memset(row->codes + dim, 0, code_channels(dim) - dim);
    float32x4_t sum = vaddq_f32(sums[0], sums[1]);
    return (vgetq_lane_f32(sum, 0) + vgetq_lane_f32(sum, 2)) +
           (vgetq_lane_f32(sum, 1) + vgetq_lane_f32(sum, 3));
}

/* Of a row that stands for zeros. */
static float zero_channels(turned *row, uint32_t dim) {
    float32x4_t sums[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};
    for (uint32_t d = 0; d < code_channels(dim); d += LANES) {
        float32x4_t y = vmulq_f32(vld1q_f32(row->x + d), vld1q_f32(row->norm + d));
        sums[d / LANES % 2] = vfmaq_f32(sums[d / LANES % 2], y, y);
    }
    memset(row->codes, 0, code_channels(dim));
    float32x4_t sum = vaddq_f32(sums[0], sums[1]);
    return (vgetq_lane_f32(sum, 0) + vgetq_lane_f32(sum, 2)) +
           (vgetq_lane_f32(sum, 1) + vgetq_lane_f32(sum, 3));
}

void code_encode_neon(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                      uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales,
                      float *errors) {
    turned row;
    for (uint32_t i = 0, t = at; i < count; i++, t++) {
        kernels_neon.to_float(dtype, (const char *)rows + i * stride_bytes, form->dim, row.x);
        memset(row.x + form->dim, 0, (code_channels(form->dim) - form->dim) * sizeof(float));
        rotate(&row, form->dim);
        scales[t] = scale_of(form, row.largest);
        float scale = float_of(scales[t]), sum;
        if (!(scale > 0)) sum = zero_channels(&row, form->dim);
        else if (form->bits == 8) sum = encode_channels(8, &row, form->dim, scale);
        else sum = encode_channels(4, &row, form->dim, scale);
        code_place(form, row.codes, t % CODE_TOKENS,
                   blocks + t / CODE_TOKENS * code_block_bytes(form));
        if (errors) errors[i] = isnan(scale) ? 0 : sqrtf(sum) * (scale > 0 ? scale : 1);
    }
}

/* ---- decode ---- */

void code_decode_neon(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                      float *rows) {
    const float middle = 0.5f - (float)(1u << (form->bits - 1));
    uint8_t codes[CODE_DIM_MAX];
    for (uint32_t t = first; t < first + count; t++, rows += form->dim) {
        const float scale = float_of(piece.scales[t]);
        uint32_t d = 0;
        code_take(form, piece.blocks + t / CODE_TOKENS * code_block_bytes(form), t % CODE_TOKENS,
                  codes);
        for (; d + 8 <= form->dim; d += 8) {
            uint16x8_t eight = vmovl_u8(vld1_u8(codes + d));
            float32x4_t low = vcvtq_f32_u32(vmovl_u16(vget_low_u16(eight)));
            float32x4_t high = vcvtq_f32_u32(vmovl_high_u16(eight));
            low = vaddq_f32(low, vdupq_n_f32(middle));
            high = vaddq_f32(high, vdupq_n_f32(middle));
            vst1q_f32(rows + d, vmulq_n_f32(low, scale));
            vst1q_f32(rows + d + LANES, vmulq_n_f32(high, scale));
        }
        for (; d < form->dim; d++) {
            float centred = (float)codes[d] + middle;
            rows[d] = centred * scale;
        }
    }
}

/* ---- products of bytes ---- */

/* Of functions that use SDOT: the assembler of gcc knows it in newer architectures only. */
#if defined(__ARM_FEATURE_DOTPROD)
#define WITH_SDOT
#elif defined(__clang__)
#define WITH_SDOT __attribute__((target("dotprod")))
#else
#define WITH_SDOT __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

static bool has_dot_products(void) {
    static _Atomic(int) known; /* 1: no, 2: yes */
    int now = atomic_load_explicit(&known, memory_order_relaxed);
    if (now == 0) {
        now = cpu_has_dot_products() ? 2 : 1;
        atomic_store_explicit(&known, now, memory_order_relaxed);
    }
    return now == 2;
}

/* Adds 4 products to each lane. Without SDOT two of them have to fit 16 bits: -128 * -64 twice, or
 * -128 * 127 twice. */
INLINE int32x4_t add_products(bool sdot, int32x4_t sums, int8x16_t a, int8x16_t b) {
    if (sdot) {
        __asm__("sdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(a), "w"(b));
        return sums;
    }
    int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
}

INLINE int8x16_t four_times(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof(word));
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

/* A line of 4 vectors: codes less 128; or two groups of 4 bits, as they are, low ones first. */
INLINE void load_line(int bits, const uint8_t *line, int8x16_t codes[2][VECTORS]) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        uint8x16_t x = vld1q_u8(line + 16 * v);
        if (bits == 8) {
            codes[0][v] = vreinterpretq_s8_u8(veorq_u8(x, vdupq_n_u8(128)));
        } else {
            codes[0][v] = vreinterpretq_s8_u8(vandq_u8(x, vdupq_n_u8(15)));
            codes[1][v] = vreinterpretq_s8_u8(vshrq_n_u8(x, 4));
        }
    }
}

/* What 2 * (code + 0.5 - 2^(bits - 1)) is more than 2 * the code that load_line() gives. */
INLINE int32_t twice_more(uint32_t bits) { return bits == 8 ? 1 : -15; }

/* ---- score ---- */

/* Logits of 16 tokens by one or two queries, to rows of 16. */
INLINE void score_queries(bool sdot, int bits, const uint8_t *block, uint32_t channels,
                          const uint16_t *scales, const code_query *queries, int queries_here,
                          float (*logits)[CODE_TOKENS]) {
    const uint32_t groups = bits == 8 ? 1 : 2;
    int32x4_t high[2][VECTORS], low[2][VECTORS];
    UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int v = 0; v < VECTORS; v++)
        high[q][v] = low[q][v] = vdupq_n_s32(0);
    for (uint32_t d = 0; d < channels; d += 4 * groups, block += LINE_BYTES) {
        int8x16_t codes[2][VECTORS];
        load_line(bits, block, codes);
        UNROLL for (uint32_t g = 0; g < groups; g++) UNROLL for (int q = 0; q < queries_here; q++) {
            int8x16_t h = four_times(queries[q].high + d + 4 * g);
            int8x16_t l = four_times(queries[q].low + d + 4 * g);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                high[q][v] = add_products(sdot, high[q][v], codes[g][v], h);
                low[q][v] = add_products(sdot, low[q][v], codes[g][v], l);
            }
        }
    }
    UNROLL for (int q = 0; q < queries_here; q++) UNROLL for (int v = 0; v < VECTORS; v++) {
        int32_t middle = (int32_t)((uint32_t)queries[q].sum * (uint32_t)twice_more(bits));
        int32x4_t sum = vaddq_s32(vshlq_n_s32(high[q][v], 8), vshlq_n_s32(low[q][v], 1));
        float32x4_t x = vcvtq_f32_s32(vaddq_s32(sum, vdupq_n_s32(middle)));
        float16x4_t half = vreinterpret_f16_u16(vld1_u16(scales + v * LANES));
        x = vmulq_f32(vmulq_n_f32(x, 0.5f), vcvt_f32_f16(half));
        vst1q_f32(logits[q] + v * LANES, vmulq_n_f32(x, queries[q].factor));
    }
}

INLINE void score_form(bool sdot, int bits, const uint8_t *block, uint32_t channels,
                       const uint16_t *scales, const code_query *queries, uint32_t count,
                       float (*logits)[CODE_TOKENS]) {
    uint32_t q = 0;
    for (; q + 2 <= count; q += 2)
        score_queries(sdot, bits, block, channels, scales, queries + q, 2, logits + q);
    if (q < count)
        score_queries(sdot, bits, block, channels, scales, queries + q, 1, logits + q);
}

INLINE void score_bits(bool sdot, uint32_t bits, const uint8_t *block, uint32_t channels,
                       const uint16_t *scales, const code_query *queries, uint32_t count,
                       float (*logits)[CODE_TOKENS]) {
    if (bits == 8) score_form(sdot, 8, block, channels, scales, queries, count, logits);
    else score_form(sdot, 4, block, channels, scales, queries, count, logits);
}

WITH_SDOT static void score_sdot(uint32_t bits, const uint8_t *block, uint32_t channels,
                                 const uint16_t *scales, const code_query *queries,
                                 uint32_t count, float (*logits)[CODE_TOKENS]) {
    score_bits(true, bits, block, channels, scales, queries, count, logits);
}

static void score_plain(uint32_t bits, const uint8_t *block, uint32_t channels,
                        const uint16_t *scales, const code_query *queries, uint32_t count,
                        float (*logits)[CODE_TOKENS]) {
    score_bits(false, bits, block, channels, scales, queries, count, logits);
}

/* Of the block that has this token, by at most QUERY_ROOM queries. */
static void score_block(const code_form *form, code_piece piece, uint32_t token,
                        const code_query *queries, uint32_t count, float (*logits)[CODE_TOKENS]) {
    const uint32_t number = token / CODE_TOKENS;
    (has_dot_products() ? score_sdot : score_plain)(
        form->bits, piece.blocks + number * code_block_bytes(form), code_channels(form->dim),
        piece.scales + number * CODE_TOKENS, queries, count, logits);
}

static void ask_for(const void *next, size_t bytes) {
    for (size_t at = 0; next && at < bytes; at += LINE_BYTES)
        __builtin_prefetch((const char *)next + at);
}

INLINE uint32_t at_most(uint32_t count, uint32_t limit) { return count < limit ? count : limit; }

/* Mostly all of a block, which takes a few instructions, where a call takes long. */
INLINE void copy_tokens(float *to, const float *from, uint32_t count) {
    if (count == CODE_TOKENS) memcpy(to, from, CODE_TOKENS * sizeof(float));
    else memcpy(to, from, count * sizeof(float));
}

void code_score_neon(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                     const code_query *queries, uint32_t query_count, float *logits,
                     size_t logit_stride, const void *next) {
    ask_for(next, code_bytes(form, count));
    for (uint32_t t = first, here; t < first + count; t += here) {
        here = at_most(CODE_TOKENS - t % CODE_TOKENS, first + count - t);
        for (uint32_t q = 0; q < query_count; q += QUERY_ROOM) {
            float made[QUERY_ROOM][CODE_TOKENS];
            const uint32_t queries_here = at_most(query_count - q, QUERY_ROOM);
            score_block(form, piece, t, queries + q, queries_here, made);
            for (uint32_t j = 0; j < queries_here; j++)
                copy_tokens(logits + (q + j) * logit_stride + (t - first),
                            made[j] + t % CODE_TOKENS, here);
        }
    }
}

/* The largest of `count` logits of each query and `most`, NaN if one is. */
static float largest_logit(float (*logits)[CODE_TOKENS], uint32_t query_count, uint32_t count,
                           float most) {
    static const uint32_t lanes[LANES] = {0, 1, 2, 3};
    float32x4_t best = vdupq_n_f32(most);
    for (uint32_t at = 0; at < count; at += LANES) {
        uint32x4_t there = vcltq_u32(vld1q_u32(lanes), vdupq_n_u32(count - at));
        for (uint32_t q = 0; q < query_count; q++) {
            float32x4_t x = vld1q_f32(logits[q] + at);
            best = vmaxq_f32(best, vbslq_f32(there, x, vdupq_n_f32(-INFINITY))); /* of NaN: NaN */
        }
    }
    return vmaxvq_f32(best);
}

void code_score_best_neon(const code_form *form, const code_piece *pieces,
                          const void *const *next, uint32_t count, uint32_t tokens,
                          const code_query *queries, uint32_t query_count, float *best) {
    for (uint32_t i = 0; i < count; i++) {
        float most = -INFINITY;
        if (next) ask_for(next[i], code_bytes(form, tokens));
        for (uint32_t t = 0; t < tokens; t += CODE_TOKENS)
            for (uint32_t q = 0; q < query_count; q += QUERY_ROOM) {
                float made[QUERY_ROOM][CODE_TOKENS];
                const uint32_t queries_here = at_most(query_count - q, QUERY_ROOM);
                score_block(form, pieces[i], t, queries + q, queries_here, made);
                most = largest_logit(made, queries_here, at_most(tokens - t, CODE_TOKENS), most);
            }
        best[i] = most + 0.0f;
    }
}

/* ---- accumulate ---- */

/* Weights of 16 tokens, of one query. */
typedef struct rounded {
    int8_t high[CODE_TOKENS], low[CODE_TOKENS]; /* P is 128 * high + low */
    int32_t middle;              /* of the sum that is twice as large */
    float half_unit;
} rounded;

static void round_weights(uint32_t bits, const uint16_t *scales, uint32_t low, uint32_t count,
                          const float *weights, rounded *made) {
    float row[CODE_TOKENS] = {0};
    uint16_t halves[CODE_TOKENS] = {0};
    float32x4_t products[VECTORS];
    uint32x4_t most = vdupq_n_u32(0);
    copy_tokens(row + low, weights, count);
    if (count == CODE_TOKENS) memcpy(halves, scales, sizeof(halves));
    else memcpy(halves + low, scales + low, count * sizeof(uint16_t));
    UNROLL for (int v = 0; v < VECTORS; v++) {
        float16x4_t half = vreinterpret_f16_u16(vld1_u16(halves + v * LANES));
        products[v] = vmulq_f32(vld1q_f32(row + v * LANES), vcvt_f32_f16(half));
        most = vmaxq_u32(most, vreinterpretq_u32_f32(vabsq_f32(products[v])));
    }
    float largest, inverse = 0;
    uint32_t largest_bits = vmaxvq_u32(most);
    memcpy(&largest, &largest_bits, sizeof(largest));
    made->half_unit = 0;
    if (!isfinite(largest)) {
        made->half_unit = NAN;
    } else if (largest >= 1e-30f) {
        inverse = 16256 / largest;
        made->half_unit = largest / 16256 * 0.5f;
    }
    int16x4_t upper[VECTORS], lower[VECTORS];
    int32x4_t sums = vdupq_n_s32(0);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        int32x4_t whole = vcvtnq_s32_f32(vmulq_n_f32(products[v], inverse));
        int32x4_t high = vshrq_n_s32(vaddq_s32(whole, vdupq_n_s32(64)), 7);
        sums = vaddq_s32(sums, whole);
        upper[v] = vmovn_s32(high);
        lower[v] = vmovn_s32(vsubq_s32(whole, vshlq_n_s32(high, 7)));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        vst1_s8(made->high + 8 * i, vmovn_s16(vcombine_s16(upper[2 * i], upper[2 * i + 1])));
        vst1_s8(made->low + 8 * i, vmovn_s16(vcombine_s16(lower[2 * i], lower[2 * i + 1])));
    }
    made->middle = (int32_t)((uint32_t)vaddvq_s32(sums) * (uint32_t)twice_more(bits));
}

/* 16 channels of one query. */
INLINE void add_sums(bool sdot, int8x16_t codes[4][VECTORS], const rounded *made, float *to) {
    int32x4_t high[VECTORS], low[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) high[v] = low[v] = vdupq_n_s32(0);
    UNROLL for (int t = 0; t < 4; t++) {
        int8x16_t h = four_times(made->high + 4 * t), l = four_times(made->low + 4 * t);
        UNROLL for (int v = 0; v < VECTORS; v++) {
            high[v] = add_products(sdot, high[v], codes[t][v], h);
            low[v] = add_products(sdot, low[v], codes[t][v], l);
        }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) {
        int32x4_t sum = vaddq_s32(vshlq_n_s32(high[v], 8), vshlq_n_s32(low[v], 1));
        float32x4_t x = vcvtq_f32_s32(vaddq_s32(sum, vdupq_n_s32(made->middle)));
        float32x4_t old = vld1q_f32(to + v * LANES);
        vst1q_f32(to + v * LANES, vfmaq_f32(old, x, vdupq_n_f32(made->half_unit)));
    }
}

INLINE void add_block(bool sdot, int bits, uint32_t dim, const uint8_t *block,
                      const rounded *made, uint32_t query_count, float *accumulator) {
    const size_t apart = (size_t)code_channels(dim) * 4;
    for (uint32_t d = 0; d < dim; d += CODE_CHANNELS) {
        int8x16_t codes[4][VECTORS];
        const int lines = bits == 8 ? 4 : 2;
        UNROLL for (int t = 0; t < lines; t++)
            load_line(bits, block + (size_t)d * 4 + t * apart, codes + t * 4 / lines);
        for (uint32_t q = 0; q < query_count; q++) {
            float *to = accumulator + (size_t)q * dim + d;
            if (dim - d >= CODE_CHANNELS) {
                add_sums(sdot, codes, made + q, to);
            } else {
                float last[CODE_CHANNELS] = {0};
                memcpy(last, to, (dim - d) * sizeof(float));
                add_sums(sdot, codes, made + q, last);
                memcpy(to, last, (dim - d) * sizeof(float));
            }
        }
    }
}

WITH_SDOT static void add_sdot(const code_form *form, const uint8_t *block, const rounded *made,
                               uint32_t query_count, float *accumulator) {
    if (form->bits == 8) add_block(true, 8, form->dim, block, made, query_count, accumulator);
    else add_block(true, 4, form->dim, block, made, query_count, accumulator);
}

static void add_plain(const code_form *form, const uint8_t *block, const rounded *made,
                      uint32_t query_count, float *accumulator) {
    if (form->bits == 8) add_block(false, 8, form->dim, block, made, query_count, accumulator);
    else add_block(false, 4, form->dim, block, made, query_count, accumulator);
}

void code_accumulate_neon(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                          const float *weights, size_t weight_stride, uint32_t query_count,
                          float *accumulator, const void *next) {
    rounded made[QUERY_ROOM];
    ask_for(next, code_bytes(form, count));
    for (uint32_t q = 0; q < query_count; q += QUERY_ROOM)
        for (uint32_t t = first, here; t < first + count; t += here) {
            const uint32_t low = t % CODE_TOKENS, block = t / CODE_TOKENS;
            const uint32_t queries_here = at_most(query_count - q, QUERY_ROOM);
            here = at_most(CODE_TOKENS - low, first + count - t);
            for (uint32_t j = 0; j < queries_here; j++)
                round_weights(form->bits, piece.scales + block * CODE_TOKENS, low, here,
                              weights + (q + j) * weight_stride + (t - first), made + j);
            (has_dot_products() ? add_sdot : add_plain)(
                form, piece.blocks + block * code_block_bytes(form), made, queries_here,
                accumulator + (size_t)q * form->dim);
        }
}

/* ---- planes ---- */

CODE_PLANES_OF(neon)
#else
typedef int codes_neon_is_of_aarch64;
#endif
