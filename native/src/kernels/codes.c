/* What all instruction sets share of codes: queries in 14 bits, the way back from the rotated
 * space, and where the codes of a token lie. */
#include "kernels/codes.h"

#include <math.h>
#include <string.h>

#include "kernels/sketch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* ---- the rotation of queries ---- */

/* What every CPU of these two architectures can do: 4 numbers at once. */
typedef float four __attribute__((vector_size(16)));

static inline four load(const float *from) {
    four x;
    memcpy(&x, from, sizeof(x));
    return x;
}

static inline void store(float *to, four x) { memcpy(to, &x, sizeof(x)); }

static inline void transpose(four x[4]) {
#if defined(__x86_64__)
    _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
#elif defined(__aarch64__)
    float32x4_t a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
    float32x4_t c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
    x[0] = vcombine_f32(vget_low_f32(a), vget_low_f32(c));
    x[1] = vcombine_f32(vget_low_f32(b), vget_low_f32(d));
    x[2] = vcombine_f32(vget_high_f32(a), vget_high_f32(c));
    x[3] = vcombine_f32(vget_high_f32(b), vget_high_f32(d));
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float other = x[i][j];
            x[i][j] = x[j][i];
            x[j][i] = other;
        }
#endif
}

static inline void transform_four(four x[4]) {
    four a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
    x[0] = a + c;
    x[1] = b + d;
    x[2] = a - c;
    x[3] = b - d;
}

/* Four vectors that are `distance` apart, of each 4 * distance: two steps of the transform. */
static void transform_far(float *vector, uint32_t size, uint32_t distance) {
    for (uint32_t first = 0; first < size; first += 4 * distance)
        for (uint32_t i = first; i < first + distance; i += 4) {
            four x[4];
            for (uint32_t k = 0; k < 4; k++) x[k] = load(vector + i + k * distance);
            transform_four(x);
            for (uint32_t k = 0; k < 4; k++) store(vector + i + k * distance, x[k]);
        }
}

/* As sketch_transform(), of another order: within sixteens, then, while these lie transposed,
 * between them. */
static void transform(float *vector, uint32_t size) {
    if (size < 16) {
        sketch_transform(vector, size);
        return;
    }
    for (uint32_t i = 0; i < size; i += 16) {
        four x[4];
        for (uint32_t k = 0; k < 4; k++) x[k] = load(vector + i + 4 * k);
        transform_four(x);
        transpose(x);
        transform_four(x);
        for (uint32_t k = 0; k < 4; k++) store(vector + i + 4 * k, x[k]);
    }
    uint32_t distance = 16;
    for (; distance * 4 <= size; distance *= 4) transform_far(vector, size, distance);
    const float norm = 1 / sqrtf((float)size);
    const uint32_t half = distance < size ? size / 2 : 0;
    for (uint32_t i = 0; i < (half ? half : size); i += 16) {
        four x[4], y[4];
        for (uint32_t k = 0; k < 4; k++) {
            four a = load(vector + i + 4 * k), b = load(vector + half + i + 4 * k);
            x[k] = (half ? a + b : a) * norm;
            y[k] = (a - b) * norm;
        }
        transpose(x);
        transpose(y);
        for (uint32_t k = 0; k < 4; k++) {
            store(vector + i + 4 * k, x[k]);
            if (half) store(vector + half + i + 4 * k, y[k]);
        }
    }
}

static void transform_blocks(float *vector, uint32_t dim) {
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        transform(vector + first, size);
    }
}

/* The signs that change, as bits to xor a float's with. */
static void flips_of(uint32_t dim, uint32_t *flips) {
    for (uint32_t block = 0; block < dim; block += 64) {
        uint64_t signs = sketch_signs(block / 64);
        for (uint32_t d = block; d < dim && d < block + 64; d++, signs >>= 1)
            flips[d] = (uint32_t)(signs & 1) << 31;
    }
}

static void flip(const float *from, uint32_t dim, const uint32_t *flips, float *to) {
    for (uint32_t d = 0; d < dim; d++) {
        uint32_t bits;
        memcpy(&bits, from + d, sizeof(bits));
        bits ^= flips[d];
        memcpy(to + d, &bits, sizeof(bits));
    }
}

/* ---- queries ---- */

/* The two bytes of each channel of a rotated query; returns the sum of all. A number below 2^22 is
 * rounded to a whole one where so much is added and taken off again. */
static int32_t split(const float *rotated, uint32_t dim, float unit, int8_t *high, int8_t *low) {
    const float to_whole = 12582912; /* 1.5 * 2^23 */
    int32_t sum = 0;
    int16_t whole[CODE_DIM_MAX];
    for (uint32_t d = 0; d < dim; d++) {
        int32_t its = (int32_t)((rotated[d] * unit + to_whole) - to_whole);
        whole[d] = (int16_t)its;
        sum += its;
    }
    for (uint32_t d = 0; d < dim; d++) {
        int16_t upper = (int16_t)((int16_t)(whole[d] + 64) >> 7);
        high[d] = (int8_t)upper;
        low[d] = (int8_t)(whole[d] - (int16_t)(upper * 128));
    }
    return sum;
}

void code_queries(const float *queries, uint32_t count, uint32_t dim, float scale, int8_t *room,
                  code_query *prepared) {
    uint32_t channels = code_channels(dim);
    float rotated[CODE_DIM_MAX];
    uint32_t flips[CODE_DIM_MAX];
    flips_of(dim, flips);
    for (uint32_t q = 0; q < count; q++) {
        int8_t *high = room + (size_t)q * 2 * channels, *low = high + channels;
        flip(queries + (size_t)q * dim, dim, flips, rotated);
        transform_blocks(rotated, dim);
        float largest = sketch_largest(rotated, dim);
        memset(high, 0, (size_t)2 * channels);
        bool some = isfinite(largest) && largest > 1e-30f;
        int32_t sum = some ? split(rotated, dim, 8127 / largest, high, low) : 0;
        prepared[q] = (code_query){.high = high, .low = low, .sum = sum,
                                   .factor = isfinite(largest) ? scale * largest / 8127 : NAN};
    }
}

void code_rotate(float *rows, uint32_t count, uint32_t dim) {
    uint32_t flips[CODE_DIM_MAX];
    flips_of(dim, flips);
    for (uint32_t i = 0; i < count; i++, rows += dim) {
        flip(rows, dim, flips, rows);
        transform_blocks(rows, dim);
    }
}

void code_unrotate(float *rows, uint32_t count, uint32_t dim) {
    uint32_t flips[CODE_DIM_MAX];
    flips_of(dim, flips);
    for (uint32_t i = 0; i < count; i++, rows += dim) {
        transform_blocks(rows, dim);
        flip(rows, dim, flips, rows);
    }
}

/* ---- codes of one token ---- */

enum { LINE_BYTES = 64 };

static uint32_t load_word(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, sizeof(word));
    return word;
}

static void store_word(uint8_t *to, uint32_t word) { memcpy(to, &word, sizeof(word)); }

void code_place(const code_form *form, const uint8_t *codes, uint32_t token, uint8_t *block) {
    const uint32_t channels = code_channels(form->dim), groups = channels / CODE_CHANNELS;
    if (form->values && form->bits == 8) {
        block += (size_t)token / 4 * groups * LINE_BYTES + token % 4;
        for (uint32_t d = 0; d < channels; d++) block[4 * d] = codes[d];
    } else if (form->values) {
        const uint32_t shift = token % 8 / 4 * 4;
        block += (size_t)token / 8 * groups * LINE_BYTES + token % 4;
        for (uint32_t d = 0; d < channels; d++)
            block[4 * d] = (uint8_t)((block[4 * d] & 0xf0 >> shift) | codes[d] >> 4 << shift);
    } else if (form->bits == 8) {
        for (uint32_t d = 0; d < channels; d += 4)
            store_word(block + (size_t)d * 16 + token * 4, load_word(codes + d));
    } else {
        for (uint32_t d = 0; d < channels; d += 8) {
            uint32_t low = load_word(codes + d) >> 4 & 0x0f0f0f0f;
            uint32_t high = load_word(codes + d + 4) & 0xf0f0f0f0;
            store_word(block + (size_t)d * 8 + token * 4, low | high);
        }
    }
}

void code_take(const code_form *form, const uint8_t *block, uint32_t token, uint8_t *codes) {
    const uint32_t channels = code_channels(form->dim), groups = channels / CODE_CHANNELS;
    if (form->values && form->bits == 8) {
        block += (size_t)token / 4 * groups * LINE_BYTES + token % 4;
        for (uint32_t d = 0; d < channels; d++) codes[d] = block[4 * d];
    } else if (form->values) {
        const uint32_t shift = token % 8 / 4 * 4;
        block += (size_t)token / 8 * groups * LINE_BYTES + token % 4;
        for (uint32_t d = 0; d < channels; d++) codes[d] = block[4 * d] >> shift & 15;
    } else if (form->bits == 8) {
        for (uint32_t d = 0; d < channels; d += 4)
            store_word(codes + d, load_word(block + (size_t)d * 16 + token * 4));
    } else {
        for (uint32_t d = 0; d < channels; d += 8) {
            uint32_t both = load_word(block + (size_t)d * 8 + token * 4);
            store_word(codes + d, both & 0x0f0f0f0f);
            store_word(codes + d + 4, both >> 4 & 0x0f0f0f0f);
        }
    }
}
