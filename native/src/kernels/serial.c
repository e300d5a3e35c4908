/* The kernels in plain C: the reference that the others are tested against, and every CPU's last
 * resort. The compiler must not vectorise it, else a speed-up over "serial" would mean nothing. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-vectorize")
#endif

#include <assert.h>
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

/* The dtype is a constant at each call of an inlined body, so its test leaves the loops. */
#define INLINE static inline __attribute__((always_inline))

static float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of_bfloat16(uint16_t half) { return float_of_bits((uint32_t)half << 16); }

static uint16_t bfloat16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    if (isnan(value))
        return (uint16_t)(bits >> 16 | 0x40); /* quiet, and still NaN if the payload was low */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float float_of_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t exponent = half >> 10 & 0x1f;
    uint32_t fraction = half & 0x3ff;
    if (exponent == 0x1f) {
        uint32_t quiet = fraction ? 0x400000 : 0;
        return float_of_bits(sign | 0x7f800000 | quiet | fraction << 13);
    }
    if (exponent)
        return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f; /* denormal here, normal in fp32 */
    return sign ? -magnitude : magnitude;
}

static uint16_t float16_of_float(float value) {
    uint32_t bits = bits_of_float(value);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) /* 65520: rounds past the largest, 65504 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) { /* 2^-14: normal in fp16 */
        uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return (uint16_t)(sign | ((rounded >> 13) - (112 << 10)));
    }
    /* A denormal is a whole number of 2^-24. Near 0.5 the fp32 numbers lie 2^-24 apart, so that
     * adding 0.5 rounds to nearest even there and leaves the count in the low bits. */
    uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f);
    return (uint16_t)(sign | (rounded - 0x3f000000));
}

INLINE float load(int dtype, const void *elements, size_t index) {
    if (dtype == KERNEL_FLOAT32) {
        float value;
        memcpy(&value, (const char *)elements + index * 4, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, (const char *)elements + index * 2, 2);
    return dtype == KERNEL_BFLOAT16 ? float_of_bfloat16(half) : float_of_float16(half);
}

INLINE void store(int dtype, void *elements, size_t index, float value) {
    if (dtype == KERNEL_FLOAT32) {
        memcpy((char *)elements + index * 4, &value, 4);
        return;
    }
    uint16_t half = dtype == KERNEL_BFLOAT16 ? bfloat16_of_float(value) : float16_of_float(value);
    memcpy((char *)elements + index * 2, &half, 2);
}

INLINE float logit(int dtype, const char *key, uint32_t dim, const float *query, float scale) {
    float sum = 0;
    for (uint32_t d = 0; d < dim; d++)
        sum += query[d] * load(dtype, key, d);
    return scale * sum;
}

INLINE void score_as(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                     const float *queries, uint32_t query_count, float scale, float *logits,
                     size_t logit_stride) {
    for (uint32_t t = 0; t < tokens; t++)
        for (size_t j = 0; j < query_count; j++)
            logits[j * logit_stride + t] =
                logit(dtype, (const char *)keys + t * row_bytes, dim, queries + j * dim, scale);
}

static void score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits,
                  size_t logit_stride, const void *next) {
    (void)next;
    const float *rows = kernel_rows(queries, dim);
    switch (dtype) {
    case KERNEL_BFLOAT16:
        score_as(KERNEL_BFLOAT16, keys, row_bytes, tokens, dim, rows, queries->count, scale, logits,
                 logit_stride);
        return;
    case KERNEL_FLOAT16:
        score_as(KERNEL_FLOAT16, keys, row_bytes, tokens, dim, rows, queries->count, scale, logits,
                 logit_stride);
        return;
    case KERNEL_FLOAT32:
        score_as(KERNEL_FLOAT32, keys, row_bytes, tokens, dim, rows, queries->count, scale, logits,
                 logit_stride);
        return;
    }
    assert(!"a dtype");
}

INLINE void score_max_as(int dtype, const void *keys, size_t row_bytes, uint32_t tokens,
                         uint32_t dim, const float *queries, uint32_t query_count, float scale,
                         float *maxima) {
    for (size_t j = 0; j < query_count; j++) {
        float maximum = -INFINITY;
        for (uint32_t t = 0; t < tokens; t++) {
            float value =
                logit(dtype, (const char *)keys + t * row_bytes, dim, queries + j * dim, scale);
            if (value > maximum || isnan(value)) /* nothing is greater than a NaN: it stays */
                maximum = value;
        }
        maxima[j] = maximum;
    }
}

static void score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima, const void *next) {
    (void)next;
    const float *rows = kernel_rows(queries, dim);
    switch (dtype) {
    case KERNEL_BFLOAT16:
        score_max_as(KERNEL_BFLOAT16, keys, row_bytes, tokens, dim, rows, queries->count, scale,
                     maxima);
        return;
    case KERNEL_FLOAT16:
        score_max_as(KERNEL_FLOAT16, keys, row_bytes, tokens, dim, rows, queries->count, scale,
                     maxima);
        return;
    case KERNEL_FLOAT32:
        score_max_as(KERNEL_FLOAT32, keys, row_bytes, tokens, dim, rows, queries->count, scale,
                     maxima);
        return;
    }
    assert(!"a dtype");
}

INLINE void accumulate_as(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
                          uint32_t dim, const float *weights, size_t weight_stride,
                          uint32_t query_count, float *accumulator) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t j = 0; j < query_count; j++)
            for (uint32_t d = 0; d < dim; d++)
                accumulator[j * dim + d] += weights[j * weight_stride + t] *
                                            load(dtype, (const char *)values + t * row_bytes, d);
}

static void accumulate(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
                       uint32_t dim, const float *weights, size_t weight_stride,
                       uint32_t query_count, float *accumulator, const void *next) {
    (void)next;
    switch (dtype) {
    case KERNEL_BFLOAT16:
        accumulate_as(KERNEL_BFLOAT16, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator);
        return;
    case KERNEL_FLOAT16:
        accumulate_as(KERNEL_FLOAT16, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator);
        return;
    case KERNEL_FLOAT32:
        accumulate_as(KERNEL_FLOAT32, values, row_bytes, tokens, dim, weights, weight_stride,
                      query_count, accumulator);
        return;
    }
    assert(!"a dtype");
}

static void bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                  float scale, float *bounds, const void *next) {
    (void)next;
    const float *rows = kernel_rows(queries, dim);
    for (size_t j = 0; j < queries->count; j++) {
        float sum = 0;
        for (uint32_t d = 0; d < dim; d++) {
            float element = rows[j * dim + d];
            /* A negative query is largest at the minimum. */
            size_t row = signbit(element) ? 0 : dim;
            sum += element * load(dtype, digest, row + d);
        }
        bounds[j] = scale * sum;
    }
}

/* Below by value, and -0 below +0. */
static bool is_below(float left, float right) {
    return left < right || (left == right && signbit(left) && !signbit(right));
}

static void digest(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *digest) {
    for (uint32_t d = 0; d < dim; d++) {
        float minimum = INFINITY, maximum = -INFINITY;
        for (size_t t = 0; t < tokens; t++) {
            float value = load(dtype, (const char *)keys + t * stride_bytes, d);
            if (isnan(value)) {
                minimum = maximum = NAN;
                break;
            }
            if (is_below(value, minimum))
                minimum = value;
            if (is_below(maximum, value))
                maximum = value;
        }
        store(dtype, digest, d, minimum);
        store(dtype, digest, (size_t)dim + d, maximum);
    }
}

static float exp_sum(float *values, uint32_t count, float shift) {
    if (shift == -INFINITY) {
        memset(values, 0, count * sizeof *values);
        return 0;
    }
    float sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        values[i] = expf(values[i] - shift);
        sum += values[i];
    }
    return sum;
}

static void store_rows(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                       size_t row_bytes) {
    assert((uintptr_t)destination % 64 == 0);
    for (size_t row = 0; row < rows; row++)
        memcpy((char *)destination + row * row_bytes, (const char *)source + row * stride_bytes,
               row_bytes);
}

static void to_float(int dtype, const void *source, size_t count, float *destination) {
    for (size_t i = 0; i < count; i++)
        destination[i] = load(dtype, source, i);
}

static void from_float(int dtype, const float *source, size_t count, void *destination) {
    for (size_t i = 0; i < count; i++)
        store(dtype, destination, i, source[i]);
}

const kernels kernels_serial = {
    .name = "serial",
    .rates = {{1.5f, 0.7f, 1.5f}, 1.8f, 0.7f, 0.3f, 0.3f},
    .score = score,
    .score_max = score_max,
    .accumulate = accumulate,
    .bound = bound,
    .digest = digest,
    .exp_sum = exp_sum,
    .store_rows = store_rows,
    .to_float = to_float,
    .from_float = from_float,
    .sketch = sketch_serial,
    .estimate = estimate_serial,
    .above = above_serial,
    .code_digest = code_digest_serial,
    .code_encode = code_encode_serial,
    .code_decode = code_decode_serial,
    .code_split = code_split_serial,
    .code_join = code_join_serial,
    .code_raise = code_raise_serial,
    .code_score = code_score_serial,
    .code_score_best = code_score_best_serial,
    .code_accumulate = code_accumulate_serial,
    .fp8_encode = fp8_encode_serial,
    .fp8_decode = fp8_decode_serial,
};
