/* The bounds of encoded keys: 8 bits a channel and one scale, never inside of the true ones. */
#include "kernels/code_bounds.h"

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

#define INLINE static inline __attribute__((always_inline))

/* A channel of all tokens of a block; the compiler cuts it into what the CPU has. */
typedef int32_t lanes __attribute__((vector_size(4 * CODE_TOKENS)));
typedef uint32_t words __attribute__((vector_size(4 * CODE_TOKENS)));
typedef float numbers __attribute__((vector_size(4 * CODE_TOKENS)));

/* Halves of them; those that are not seen repeat the last one. False: one is a NaN. */
static bool load_scales(const uint16_t *scales, uint32_t count, numbers *half_scales) {
    float made[CODE_TOKENS];
    kernels_serial.to_float(KERNEL_FLOAT16, scales, count, made);
    for (uint32_t t = 0; t < count; t++)
        if (isnan(made[t])) return false;
    for (uint32_t t = count; t < CODE_TOKENS; t++) made[t] = made[count - 1];
    memcpy(half_scales, made, sizeof(made));
    *half_scales *= 0.5f;
    return true;
}

static void repeat_last(uint32_t dim, uint32_t count, lanes *turned) {
    for (uint32_t d = 0; d < dim; d++)
        for (uint32_t t = count; t < CODE_TOKENS; t++) turned[d][t] = turned[d][count - 1];
}

/* 2 * code + 1 - 2^bits of the tokens of a block. */
INLINE void load_block(const code_form *form, const uint8_t *block, lanes *turned) {
    const uint32_t together = 32 / form->bits, mask = (1u << form->bits) - 1;
    for (uint32_t d = 0; d < form->dim; d++) {
        const uint32_t shift = d % 4 * 8 + d % together / 4 * 4;
        words line;
        memcpy(&line, block + d / together * sizeof(line), sizeof(line));
        turned[d] = (lanes)(2 * (line >> shift & mask) - mask);
    }
}

/* What codes stand for, over half a token's scale and the norms of blocks, as it is out of the
 * rotated space but for the signs: whole numbers below 2^18, which are exact. */
INLINE void turn_back(uint32_t dim, lanes *turned) {
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        for (uint32_t half = 1; half < size; half *= 2)
            for (uint32_t from = first; from < first + size; from += 2 * half)
                for (uint32_t d = from; d < from + half; d++) {
                    lanes a = turned[d], b = turned[d + half];
                    turned[d] = a + b;
                    turned[d + half] = a - b;
                }
    }
}

INLINE float smaller(float a, float b) { return a < b ? a : b; }
INLINE float larger(float a, float b) { return a > b ? a : b; }

/* The least and the largest of a channel, four tokens at a time. */
INLINE void widen(float *low, float *high, const lanes *turned, const numbers *half_scales) {
    const numbers all = __builtin_convertvector(*turned, numbers) * *half_scales;
    float x[CODE_TOKENS], least[4], most[4];
    memcpy(x, &all, sizeof(x));
    for (uint32_t k = 0; k < 4; k++) least[k] = most[k] = x[k];
    for (uint32_t t = 4; t < CODE_TOKENS; t += 4)
        for (uint32_t k = 0; k < 4; k++) {
            least[k] = smaller(x[t + k], least[k]);
            most[k] = larger(x[t + k], most[k]);
        }
    *low = smaller(smaller(smaller(least[0], least[1]), smaller(least[2], least[3])), *low);
    *high = larger(larger(larger(most[0], most[1]), larger(most[2], most[3])), *high);
}

/* Multiplies with the norms and signs. */
INLINE void end_bounds(float *bounds, uint32_t dim) {
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        const float norm = 1 / sqrtf((float)size);
        for (uint32_t d = first; d < first + size; d++) {
            bounds[d] *= norm;
            bounds[dim + d] *= norm;
        }
    }
    for (uint32_t d = 0; d < dim; d += 64) {
        uint64_t flips = sketch_signs(d / 64);
        for (uint32_t i = d; i < dim && i < d + 64; i++, flips >>= 1)
            if (flips & 1) {
                float low = bounds[i];
                bounds[i] = -bounds[dim + i];
                bounds[dim + i] = -low;
            }
    }
}

/* A step is a normal number: keys of smaller ones are as good as zeros. */
float code_bounds_step(float largest) {
    float step = largest * 1.000002f / 127;
    return step < 0x1p-100f ? 0x1p-100f : step;
}

/* A whole number that is not above x, without a call; |x| < 2^31. */
INLINE float floor_of(float x) {
    float whole = (float)(int32_t)x;
    return whole > x ? whole - 1 : whole;
}

/* A bound is at most 127 steps, and had up to four roundings to a float; there are four more until
 * its code is read. Each of them may be a 2^24th: together less than the margin. */
INLINE void encode(const float *bounds, uint32_t dim, float step, int8_t *codes) {
    const float inverse = 1 / step;
    for (uint32_t d = 0; d < dim; d++) {
        float low = bounds[d] * inverse, high = bounds[dim + d] * inverse;
        codes[d] = (int8_t)floor_of(low - CODE_BOUNDS_MARGIN);
        codes[dim + d] = (int8_t)-floor_of(-CODE_BOUNDS_MARGIN - high);
    }
}

void code_bounds_encode(const float *bounds, uint32_t dim, float step, int8_t *codes) {
    encode(bounds, dim, step, codes);
}

INLINE float digest(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes) {
    uint32_t dim = form->dim;
    float bounds[2 * CODE_DIM_MAX], largest = 0;
    for (uint32_t d = 0; d < dim; d++) {
        bounds[d] = INFINITY;
        bounds[dim + d] = -INFINITY;
    }
    for (uint32_t first = 0; first < tokens; first += CODE_TOKENS) {
        lanes turned[CODE_DIM_MAX];
        numbers half_scales;
        uint32_t count = tokens - first < CODE_TOKENS ? tokens - first : CODE_TOKENS;
        if (!load_scales(piece.scales + first, count, &half_scales)) {
            memset(codes, 0, 2 * dim);
            return NAN;
        }
        load_block(form, piece.blocks + first / CODE_TOKENS * code_block_bytes(form), turned);
        if (count < CODE_TOKENS) repeat_last(dim, count, turned);
        turn_back(dim, turned);
        for (uint32_t d = 0; d < dim; d++)
            widen(bounds + d, bounds + dim + d, turned + d, &half_scales);
    }
    end_bounds(bounds, dim);
    for (uint32_t i = 0; i < 2 * dim; i++) {
        float size = fabsf(bounds[i]);
        largest = size > largest ? size : largest;
    }
    float step = code_bounds_step(largest);
    encode(bounds, dim, step, codes);
    return step;
}

float code_digest_serial(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes) {
    return digest(form, piece, tokens, codes);
}

#if defined(__x86_64__)
/* What the compiler makes of it with vectors of 8. */
__attribute__((target("avx2"))) float code_digest_avx2(const code_form *form, code_piece piece,
                                                       uint32_t tokens, int8_t *codes) {
    return digest(form, piece, tokens, codes);
}
#endif

void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds) {
    for (uint32_t i = 0; i < 2 * dim; i++) bounds[i] = (float)codes[i] * scale;
}
