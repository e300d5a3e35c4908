/* Scores with AMX tiles: 16 keys by 16 queries by 32 channels in an instruction, products of bf16
 * added in fp32. Everything else, and a score of few queries, is avx512_bf16's.
 *
 * Compiled a second time by tests/native/kernels/kernels_amx_model.c, on a model of the tiles in
 * software: so the tests of a CPU without them run these very lines. On a CPU with tiles it has not
 * been measured. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((                                                                                \
        target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif

#include "kernels/avx512.h"

#ifndef CXLKV_TILE_MODEL /* which says so, and then defines _tile_loadconfig() and its like */
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The operating system gives tiles only to processes that ask: their registers make each task
 * switch and each signal frame 8 KiB larger. It is asked once; fork() hands its answer on. */
bool amx_is_permitted(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    enum { NOT_ASKED, GRANTED, REFUSED };
    static atomic_int answer;
    if (atomic_load(&answer) == NOT_ASKED) {
        long result = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
        atomic_store(&answer, result == 0 ? GRANTED : REFUSED);
    }
    return atomic_load(&answer) == GRANTED;
}

const kernels kernels_amx;
#define TABLE kernels_amx
#endif

/* From so many queries on: below it half of each tile would be computed for nothing, and loading
 * the configuration costs about as much as the products. By counting cycles, not measured. */
enum { TILE_QUERIES = 8 };

/* Tiles 0 to 3 are logits, one of each sixteen. A tile's number is part of the instruction's text,
 * so that it must be written as a number. */
#define KEYS 4
#define QUERIES 5

/* A step is 32 channels, the width of a tile of keys. */
enum { SIXTEENS = 4, STEP = 32, STEP_BYTES = 64, PALETTE = 1 };

/* As LDTILECFG reads it. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Keys and logits have a row for each token, at most 16. */
static void configure(uint32_t tokens) {
    tile_config config = {.palette = PALETTE};
    for (int i = 0; i <= QUERIES; i++) {
        config.row_bytes[i] = STEP_BYTES;
        config.rows[i] = (uint8_t)(i == QUERIES ? 16 : tokens);
    }
    _tile_loadconfig(&config);
}

/* ---- queries ---- */

/* Behind what avx512_bf16 packs: sixteen queries, a line for each pair of channels, up to a
 * multiple of 16 lines, and in it the pair of each query. */
enum { SIXTEEN = 16, PAIR_BYTES = 4 };

static size_t sixteen_bytes(uint32_t dim) {
    return ((size_t)dim + STEP - 1) / STEP * (STEP / 2) * LINE_BYTES;
}

static const char *sixteen_of(const kernel_queries *queries, uint32_t dim, uint32_t sixteen) {
    return (const char *)queries->packed + avx512_bf16_packed_bytes(dim, queries->total) +
           sixteen * sixteen_bytes(dim);
}

static size_t packed_bytes(uint32_t dim, uint32_t query_count) {
    size_t sixteens = ((size_t)query_count + SIXTEEN - 1) / SIXTEEN;
    return avx512_bf16_packed_bytes(dim, query_count) + sixteens * sixteen_bytes(dim);
}

static bool pack(int dtype, const float *rows, uint32_t dim, uint32_t query_count, void *packed) {
    if (!avx512_bf16_pack(dtype, rows, dim, query_count, packed))
        return false;
    const size_t row_bytes = ((size_t)dim + STEP - 1) / STEP * STEP_BYTES;
    const size_t offset = avx512_bf16_packed_bytes(dim, query_count);
    memset((char *)packed + offset, 0, packed_bytes(dim, query_count) - offset);
    for (size_t j = 0; j < query_count; j++) {
        const char *row = (const char *)packed + j * row_bytes;
        char *sixteen = (char *)packed + offset + j / SIXTEEN * sixteen_bytes(dim) +
                        j % SIXTEEN * PAIR_BYTES;
        for (size_t pair = 0; pair < ((size_t)dim + 1) / 2; pair++)
            memcpy(sixteen + pair * LINE_BYTES, row + pair * PAIR_BYTES, PAIR_BYTES);
    }
    return true;
}

/* ---- scores ---- */

/* rows[token], one query in each lane, to lanes[query][token]. */
static void turn(const __m512 rows[TOKEN_CHUNK], float lanes[SIXTEEN][TOKEN_CHUNK]) {
    for (uint32_t t = 0; t < TOKEN_CHUNK; t += 4) {
        __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[t], rows[t + 1]));
        __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[t], rows[t + 1]));
        __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(rows[t + 2], rows[t + 3]));
        __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(rows[t + 2], rows[t + 3]));
        double four[4][8]; /* [query % 4][query / 4 * 2]: four tokens */
        _mm512_storeu_pd(four[0], _mm512_unpacklo_pd(low01, low23));
        _mm512_storeu_pd(four[1], _mm512_unpackhi_pd(low01, low23));
        _mm512_storeu_pd(four[2], _mm512_unpacklo_pd(high01, high23));
        _mm512_storeu_pd(four[3], _mm512_unpackhi_pd(high01, high23));
        for (uint32_t j = 0; j < SIXTEEN; j++)
            memcpy(lanes[j] + t, &four[j % 4][j / 4 * 2], 4 * sizeof *lanes[j]);
    }
}

/* The last channels of each key, fewer than a step, made up with zeros. */
static void copy_rest(const char *keys, size_t row_bytes, uint32_t tokens, size_t rest_bytes,
                      char rest[TOKEN_CHUNK][STEP_BYTES]) {
    memset(rest, 0, (size_t)TOKEN_CHUNK * STEP_BYTES);
    for (uint32_t t = 0; t < tokens; t++)
        memcpy(rest[t], keys + t * row_bytes, rest_bytes);
}

/* Up to four sixteens, from `first` on, against the tile of keys: one step of each logit. */
INLINE void add_step(const char *first, size_t sixteen_stride, uint32_t sixteens) {
    enum { ROW_BYTES = LINE_BYTES };
    _tile_loadd(QUERIES, first, ROW_BYTES);
    _tile_dpbf16ps(0, KEYS, QUERIES);
    if (sixteens > 1) {
        _tile_loadd(QUERIES, first + sixteen_stride, ROW_BYTES);
        _tile_dpbf16ps(1, KEYS, QUERIES);
    }
    if (sixteens > 2) {
        _tile_loadd(QUERIES, first + 2 * sixteen_stride, ROW_BYTES);
        _tile_dpbf16ps(2, KEYS, QUERIES);
    }
    if (sixteens > 3) {
        _tile_loadd(QUERIES, first + 3 * sixteen_stride, ROW_BYTES);
        _tile_dpbf16ps(3, KEYS, QUERIES);
    }
}

/* sums[sixteen][token][query], yet to scale. */
static void dot_tiles(const char *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const char *sixteen, uint32_t sixteens, const char *next,
                      float sums[SIXTEENS][TOKEN_CHUNK][SIXTEEN]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    uint32_t d = 0;
    for (; d + STEP <= dim; d += STEP) {
        if (next)
            prefetch(next + (size_t)d * 2 * tokens, (size_t)STEP_BYTES * tokens);
        _tile_loadd(KEYS, keys + (size_t)d * 2, row_bytes);
        add_step(sixteen + (size_t)d * 2 * SIXTEEN, sixteen_bytes(dim), sixteens);
    }
    if (d < dim) {
        char rest[TOKEN_CHUNK][STEP_BYTES];
        copy_rest(keys + (size_t)d * 2, row_bytes, tokens, (size_t)(dim - d) * 2, rest);
        _tile_loadd(KEYS, rest, STEP_BYTES);
        add_step(sixteen + (size_t)d * 2 * SIXTEEN, sixteen_bytes(dim), sixteens);
    }
    _tile_stored(0, sums[0], STEP_BYTES);
    _tile_stored(1, sums[1], STEP_BYTES);
    _tile_stored(2, sums[2], STEP_BYTES);
    _tile_stored(3, sums[3], STEP_BYTES);
}

/* The logits of one sixteen to those of its queries that are meant: places first to first + count
 * of the call, of which `sixteen` starts with place `start`. */
static void deliver(const score_call *call, const kernel_queries *queries, uint32_t token,
                    uint32_t tokens, uint32_t start, float sums[TOKEN_CHUNK][SIXTEEN]) {
    __m512 rows[LANES], largest = _mm512_set1_ps(-INFINITY);
    float lanes[SIXTEEN][TOKEN_CHUNK];
    for (uint32_t t = 0; t < tokens; t++) {
        rows[t] = _mm512_mul_ps(_mm512_loadu_ps(sums[t]), _mm512_set1_ps(call->scale));
        largest = max_with_nan(rows[t], largest);
    }
    for (uint32_t t = tokens; t < LANES; t++)
        rows[t] = _mm512_setzero_ps();
    if (call->maxima)
        _mm512_storeu_ps(lanes[0], largest);
    else
        turn(rows, lanes);
    for (uint32_t lane = 0; lane < SIXTEEN; lane++) {
        uint32_t j = start + lane - queries->first; /* wraps when before the first */
        if (j >= queries->count)
            continue;
        if (call->maxima)
            call->maxima[j] = token ? max_of_two(lanes[0][lane], call->maxima[j]) : lanes[0][lane];
        else
            memcpy(call->logits + j * call->logit_stride + token, lanes[lane],
                   tokens * sizeof *call->logits);
    }
}

static void score_all(const score_call *call, const kernel_queries *queries) {
    float sums[SIXTEENS][TOKEN_CHUNK][SIXTEEN];
    const uint32_t first = queries->first / SIXTEEN;
    const uint32_t end = (queries->first + queries->count - 1) / SIXTEEN + 1;
    uint32_t configured = 0;
    for (uint32_t t = 0; t < call->tokens; t += TOKEN_CHUNK) {
        const char *keys = call->keys + t * call->row_bytes;
        uint32_t tokens = call->tokens - t < TOKEN_CHUNK ? call->tokens - t : TOKEN_CHUNK;
        if (tokens != configured)
            configure(tokens);
        configured = tokens;
        const char *next = call->next ? call->next + t * key_bytes(call) : NULL;
        for (uint32_t sixteen = first, taken; sixteen < end; sixteen += taken) {
            taken = end - sixteen < SIXTEENS ? end - sixteen : SIXTEENS;
            dot_tiles(keys, call->row_bytes, tokens, call->dim,
                      sixteen_of(queries, call->dim, sixteen), taken,
                      sixteen == first ? next : NULL,
                      sums);
            for (uint32_t i = 0; i < taken; i++)
                deliver(call, queries, t, tokens, (sixteen + i) * SIXTEEN, sums[i]);
        }
    }
    _tile_release(); /* another library of this thread may use tiles, and task switches get cheap */
}

static void score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                  const kernel_queries *queries, float scale, float *logits, size_t logit_stride,
                  const void *next) {
    if (!queries->packed || queries->count < TILE_QUERIES) {
        avx512_bf16_score(dtype, keys, row_bytes, tokens, dim, queries, scale, logits,
                          logit_stride, next);
        return;
    }
    score_call call = {.dtype = dtype, .dim = dim, .keys = keys, .row_bytes = row_bytes,
                       .tokens = tokens,
                       .scale = scale, .logits = logits, .logit_stride = logit_stride,
                       .next = next};
    score_all(&call, queries);
}

static void score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                      const kernel_queries *queries, float scale, float *maxima, const void *next) {
    if (!queries->packed || queries->count < TILE_QUERIES) {
        avx512_bf16_score_max(dtype, keys, row_bytes, tokens, dim, queries, scale, maxima, next);
        return;
    }
    score_call call = {.dtype = dtype, .dim = dim, .keys = keys, .row_bytes = row_bytes,
                       .tokens = tokens,
                       .scale = scale, .maxima = maxima, .next = next};
    score_all(&call, queries);
}

const kernels TABLE = {
    .name = "amx",
    .rates = {{200, 39, 38}, 51, 200, 126, 70},
    .packed_bytes = packed_bytes,
    .pack = pack,
    .score = score,
    .score_max = score_max,
    .score_pieces = avx512_bf16_score_pieces,
    .accumulate = avx512_accumulate,
    .accumulate_pieces = avx512_accumulate_pieces,
    .bound = avx512_bf16_bound,
    .digest = avx512_digest,
    .exp_sum = avx512_exp_sum,
    .online_softmax = avx512_online_softmax,
    .part_sums = avx512_part_sums,
    .streams = true,
    .store_rows = avx512_store_rows,
    .to_float = avx512_to_float,
    .from_float = avx512_from_float,
    .sketch = sketch_avx512,
    .estimate = estimate_avx512,
    .above = above_avx512,
    .code_digest = code_digest_avx512,
    .code_encode = code_encode_avx512,
    .code_decode = code_decode_avx512,
    .code_split = code_split_avx512,
    .code_join = code_join_avx512,
    .code_raise = code_raise_avx512,
    .code_score = code_score_avx512,
    .code_score_best = code_score_best_avx512,
    .code_accumulate = code_accumulate_avx512,
    .code_accumulate_pieces = code_accumulate_pieces_avx512,
    .fp8_encode = fp8_encode_avx512,
    .fp8_decode = fp8_decode_avx512,
};

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else
/* A translation unit may not be empty. */
typedef int kernels_amx_is_for_x86_64_only;
#endif
