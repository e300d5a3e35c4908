/* The arithmetic on pages, one table of functions for each instruction set.
 *
 * Everywhere: rows are contiguous and hold `dim` elements of `dtype`; any dim >= 1 and tokens >= 1
 * works, and dims that are multiples of 16 are fast. Keys, values and digests need the alignment of
 * one element only. Nothing is read or written outside the arrays, prefetches aside, which cannot
 * fault. Queries, weights, logits and accumulators are fp32.
 *
 * Each function says its accumulator and its error, with eps = 2^-24 and short of overflow and
 * underflow. Two instruction sets differ in the order of the additions only, so whole numbers that
 * fp32 holds exactly come out equal. Which NaN a NaN is (sign, payload) is not promised.
 *
 * Denormals count, with one exception: score, score_max and bound of packed queries may take keys,
 * products and sums below 2^-126 for 0. That adds at most |scale| * 2^-126 * (sum of |query| +
 * 2 * dim) to their error. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/code_bounds.h"
#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/fp8.h"
#include "kernels/sketch.h"

/* Equal to the public CXLKV_BFLOAT16 ...; they stand in the pool's format. */
enum { KERNEL_BFLOAT16 = 0, KERNEL_FLOAT16 = 1, KERNEL_FLOAT32 = 2 };

/* Some of the queries of one call of select or attend. */
typedef struct kernel_queries {
    const float *rows;     /* those of the whole call, [][dim] */
    const void *packed;    /* what `pack` of the same table made of them, or NULL */
    uint32_t total;        /* how many `pack` was given */
    uint32_t first, count; /* the ones that are meant */
} kernel_queries;

static inline const float *kernel_rows(const kernel_queries *queries, uint32_t dim) {
    return queries->rows + (size_t)queries->first * dim;
}

/* Multiply-adds a ns of one core, from the first cache. */
typedef struct kernel_rates {
    float score[3];        /* by dtype */
    float accumulate;
    float estimate;        /* of sketches */
    float code_score, code_accumulate;
} kernel_rates;

typedef struct kernels {
    const char *name;      /* as kernels_force() takes it */
    /* On an AMD Zen 4 at 3.7 GHz, of codes on an Intel Xeon at 2.9, with 4 queries; of amx and neon
     * a guess, no such CPU was at hand. Only what is cheaper follows from them. */
    kernel_rates rates;

    /* NULL, or: queries in a form of this table's own, made once per call of select or attend and
     * read by each score, score_max and bound of it. `packed` has packed_bytes() bytes, which may
     * be 0, and starts on a 64-byte line. False when these queries or keys have no such form; then
     * the rows are all that there is. With and without it the same error is promised. */
    size_t (*packed_bytes)(uint32_t dim, uint32_t query_count);
    bool (*pack)(int dtype, const float *rows, uint32_t dim, uint32_t query_count, void *packed);

    /* `next`, below: what some later call will read, as many bytes as this one, without gaps. It is
     * asked for in the meantime, since hardware cannot guess the next piece; NULL: nothing. */

    /* logits[j * logit_stride + t] =
     *     scale * sum over d of q[j][d] * keys[t * dim + d].
     * fp32 accumulators; |error| <= (dim + 2) * eps * |scale| * sum of |query * key|. */
    void (*score)(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next);

    /* maxima[j] = the largest logit of query j over the tokens, the same numbers as `score` would
     * write, without writing them. One NaN logit makes the maximum NaN: a broken key is chosen and
     * seen, never hidden. */
    void (*score_max)(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima,
                      const void *next);

    /* NULL, or of several pieces: best[i] = the largest logit of all queries over the tokens of the
     * piece at pieces[i], the largest of what `score_max` would write, NaN if one is. next[i] is
     * asked for with it, as above. False, and nothing is done, when it has no fast way for them. */
    bool (*score_pieces)(int dtype, const void *const *pieces, const void *const *next,
                         uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                         const kernel_queries *queries, float scale, float *best);

    /* accumulator[j * dim + d] +=
     *     sum over t of weights[j * weight_stride + t] * values[t * dim + d].
     * fp32 accumulators; |error| <= (tokens + 1) * eps * (|accumulator| + sum of |weight * value|).
     * A weight of 0 does not mask a value that is infinite or NaN. */
    void (*accumulate)(int dtype, const void *values, size_t row_bytes, uint32_t tokens,
                       uint32_t dim, const float *weights, size_t weight_stride,
                       uint32_t query_count, float *accumulator, const void *next);

    /* NULL, or the same of several pieces, one after the other and bit for bit: `tokens` rows at
     * each of values[], whose weights are the columns [i * tokens, (i + 1) * tokens). Accumulators
     * of many queries are read and written once for all of them. next[i] is asked for, or NULL. */
    void (*accumulate_pieces)(int dtype, const void *const *values, const void *const *next,
                              uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                              const float *weights, size_t weight_stride, uint32_t query_count,
                              float *accumulator);

    /* bounds[j] = scale * sum over d of max(q[d] * minimum[d], q[d] * maximum[d]), scale > 0: no
     * key under this digest scores more, rounding aside. The larger product is picked by the sign
     * of q[d], which is the same while minimum <= maximum. `digest` is [2][dim], minima first.
     * fp32 accumulators; |error| <= (dim + 2) * eps * scale * sum of |product|: a caller who prunes
     * by the bound leaves that much room. A NaN channel makes the bound NaN. */
    void (*bound)(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                  float scale, float *bounds, const void *next);

    /* The minimum and maximum of each channel over rows that lie stride_bytes apart, to `digest`
     * [2][dim]. Exact: no arithmetic, -0 is below +0. A channel with a NaN becomes NaN in both. */
    void (*digest)(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *digest);

    /* values[i] = exp(values[i] - shift); returns their sum. Relative error <= 4e-7 against the
     * exponential of the fp32 difference (plus half a denormal; below 1.2e-38 it may be 0), and
     * (count + 1) * eps more in the sum. -inf gives 0. A shift of -inf (every value is -inf) gives
     * all 0 and the sum 0. */
    float (*exp_sum)(float *values, uint32_t count, float shift);

    /* NULL, or online softmax of `count` rows of `tokens` logits, one behind the other. Of row j:
     * states[j][0], the largest logit so far, is raised; factors[j] = exp(old - new), 1 where it
     * stays and 0 where it was -infinity; logits become weights exp(logit - largest); states[j][1]
     * = states[j][1] * factors[j] + their sum. Errors as of exp_sum. False, and nothing is done,
     * for rows that it has no fast way for: NaN among them, nothing but -infinity, too many. */
    bool (*online_softmax)(float *logits, uint32_t tokens, uint32_t count, float (*states)[2],
                           float *factors);

    /* NULL, or of each of `count` rows of parts * tokens weights, one behind the other, the sums of
     * its parts: sums[row * stride + part], |error| <= tokens * eps of the sum of |weights|. False,
     * and nothing is done, for parts that it has no fast way for. */
    bool (*part_sums)(const float *weights, uint32_t parts, uint32_t tokens, uint32_t count,
                      float *sums, size_t stride);

    bool streams;                /* store_rows() goes past the caches, to the last byte */
    /* Copies rows of row_bytes, stride_bytes apart at the source, into one contiguous piece that
     * starts on a 64-byte line. The caller fences. */
    void (*store_rows)(void *destination, const void *source, size_t stride_bytes, uint32_t rows,
                       size_t row_bytes);

    /* dtype to fp32: exact. */
    void (*to_float)(int dtype, const void *source, size_t count, float *destination);

    /* fp32 to dtype, round to nearest even, overflow to infinity; a NaN stays a (quiet) NaN. */
    void (*from_float)(int dtype, const float *source, size_t count, void *destination);

    /* sketch.h has them. */
    void (*sketch)(int dtype, const void *keys, size_t stride_bytes, uint32_t tokens, uint32_t dim,
                   void *sketch);
    void (*estimate)(const sketch_run *run, float *best, float (*uppers)[SKETCH_TOKENS]);
    void (*above)(const float (*values)[SKETCH_TOKENS], uint32_t count, float limit,
                  uint16_t *bits);

    /* code_bounds.h has it. */
    float (*code_digest)(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes);
    /* codes.h has them. */
    void (*code_encode)(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                        uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales,
                        float *errors);
    void (*code_decode)(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                        float *rows);
    void (*code_score)(const code_form *form, code_piece piece, uint32_t first, uint32_t count,
                       const code_query *queries, uint32_t query_count, float *logits,
                       size_t logit_stride, const void *next);
    void (*code_score_best)(const code_form *form, const code_piece *pieces,
                            const void *const *next, uint32_t count, uint32_t tokens,
                            const code_query *queries, uint32_t query_count, float *best);
    void (*code_accumulate)(const code_form *form, code_piece piece, uint32_t first,
                            uint32_t count, const float *weights, size_t weight_stride,
                            uint32_t query_count, float *accumulator, const void *next);
    void (*code_accumulate_pieces)(const code_form *form, const code_piece *pieces,
                                   const void *const *next, uint32_t count, uint32_t tokens,
                                   const float *weights, size_t weight_stride,
                                   uint32_t query_count, float *accumulator); /* or NULL */
    /* code_planes.h has them. */
    void (*code_split)(const code_form *form, const uint8_t *block, uint8_t *upper,
                       uint8_t *lower);
    void (*code_join)(const code_form *form, const uint8_t *upper, const uint8_t *lower,
                      uint8_t *block);
    void (*code_raise)(const float *rows, uint32_t count, float *most);
    /* fp8.h has them. */
    void (*fp8_encode)(int dtype, const void *source, size_t count, uint8_t *bytes);
    void (*fp8_decode)(const uint8_t *bytes, size_t count, uint16_t *numbers, const void *next);
} kernels;

extern const kernels kernels_serial; /* the reference, on every CPU */
#if defined(__x86_64__)
extern const kernels kernels_avx2;        /* needs AVX2, FMA and F16C */
extern const kernels kernels_avx512;      /* and AVX-512 F, BW, DQ and VL */
extern const kernels kernels_avx512_bf16; /* and AVX-512 BF16 */
extern const kernels kernels_amx;         /* and AMX tiles and BF16, and amx_is_permitted() */
bool amx_is_permitted(void);
#elif defined(__aarch64__)
extern const kernels kernels_neon;      /* on every such CPU */
extern const kernels kernels_neon_bf16; /* needs FEAT_BF16 */
#endif

/* The largest value, -infinity of none; NaN if one is. */
float kernels_largest(const float *values, uint32_t count);

/* best[i] = the largest logit of the key at keys[i] over the queries, NaN if one is: the same
 * numbers as the table's `score` of 64 queries at a time. Keys lie anywhere. */
void kernels_score_each(const kernels *table, int dtype, const void *const *keys, uint32_t count,
                        uint32_t dim, const kernel_queries *queries, float scale, float *best);

/* Whether what comes next is asked for into the second cache, not the first, because this CPU's
 * first cache waits for few lines at once: an AMD Zen 4 read keys of 128 channels 1.4 times as fast
 * so. */
extern atomic_bool kernels_ask_second_cache;

/* The best table for this CPU, or the forced one. Thread safe; costs one load. */
const kernels *kernels_current(void);

/* "serial", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16", or "auto" for the best.
 * Returns 0, -ENOTSUP when the CPU, this build or the operating system lacks the instruction set,
 * -EINVAL for an unknown name. Calls already running finish on the table they began with. */
int kernels_force(const char *name);
