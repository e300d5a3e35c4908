/* Scores and bounds with AVX-512 BF16: bf16 keys meet queries in pairs, nothing is converted.
 *
 * Queries are packed twice: as rows, for bounds, and by fours, 8 channels of each in a line. As
 * many channels of a key, loaded to all places of a vector, meet them in one instruction, and 4
 * sums are left to add at the end. Rows against rows, as in kernels_avx512.c, is slower than
 * memory: 16 keys and 4 queries of 128 channels took 93 ns, reading the keys 105; with a four 50.
 *
 * A key that is loaded meets one, two or four fours, so that 16 sums are under way: 16 keys and 16
 * queries of 128 channels take 290 ns, what the products alone take. */
#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                                      \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))),        \
    apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#include <math.h>

#include "kernels/avx512.h"

enum { STEP = 32 }; /* elements of a line */

/* A row is made up with zeros to whole lines. */
static size_t packed_row_bytes(uint32_t dim) {
    return ((size_t)dim + STEP - 1) / STEP * LINE_BYTES;
}

/* Four queries, a line for each 8 channels: 16 bytes of each. */
enum { FOUR = 4, EIGHT = 8, EIGHT_BYTES = 16 };
static size_t four_bytes(uint32_t dim) { return ((size_t)dim + EIGHT - 1) / EIGHT * LINE_BYTES; }

/* Fours are counted over all queries of the call; the last one is made up with zeros. */
static size_t fours_offset(uint32_t dim, uint32_t query_count) {
    return query_count * packed_row_bytes(dim);
}

static const char *four_of(const kernel_queries *queries, uint32_t dim, uint32_t four) {
    return (const char *)queries->packed + fours_offset(dim, queries->total) +
           four * four_bytes(dim);
}

size_t avx512_bf16_packed_bytes(uint32_t dim, uint32_t query_count) {
    return fours_offset(dim, query_count) +
           ((size_t)query_count + FOUR - 1) / FOUR * four_bytes(dim);
}

/* The lanes that bf16 holds without loss, that are neither infinite nor NaN nor so small that the
 * instruction takes them for 0: then only a key can be too small for it. */
INLINE __mmask16 exact_lanes(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    enum { QUIET_NAN = 1, INFINITE = 0x18, DENORMAL = 0x20, SIGNALING_NAN = 0x80 };
    return (__mmask16)(_mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0xffff)) &
                       ~_mm512_fpclass_ps_mask(values,
                                               QUIET_NAN | INFINITE | DENORMAL | SIGNALING_NAN));
}

bool avx512_bf16_pack(int dtype, const float *rows, uint32_t dim, uint32_t query_count,
                      void *packed) {
    if (dtype != KERNEL_BFLOAT16)
        return false;
    char *fours = (char *)packed + fours_offset(dim, query_count);
    memset(packed, 0, avx512_bf16_packed_bytes(dim, query_count));
    for (size_t j = 0; j < query_count; j++) {
        char *row = (char *)packed + j * packed_row_bytes(dim);
        char *four = fours + j / FOUR * four_bytes(dim) + j % FOUR * EIGHT_BYTES;
        for (uint32_t d = 0; d < dim; d += LANES) {
            __m512 part = _mm512_maskz_loadu_ps(first_lanes(dim - d), rows + j * dim + d);
            if (exact_lanes(part) != 0xffff)
                return false;
            __m512i high = _mm512_srli_epi32(_mm512_castps_si512(part), 16);
            _mm256_storeu_si256((__m256i *)(row + (size_t)d * 2), _mm512_cvtepi32_epi16(high));
        }
        for (size_t eight = 0; eight < ((size_t)dim + EIGHT - 1) / EIGHT; eight++)
            memcpy(four + eight * LINE_BYTES, row + eight * EIGHT_BYTES, EIGHT_BYTES);
    }
    return true;
}

INLINE __m512 add_products(__m512 sum, __m512i left, __m512i right) {
    return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
}

/* ---- scores ---- */

INLINE __m512i load_line(const char *key, uint32_t elements_left) {
    if (elements_left >= STEP)
        return _mm512_loadu_si512(key);
    return _mm512_maskz_loadu_epi16((1u << elements_left) - 1, key);
}

/* Rows of keys as x86 addresses them: every fourth one, and one, two or three strides from it. Left
 * alone gcc keeps a register for each row, of which it has too few, and loads them from memory. */
typedef struct key_rows {
    const char *fourth[4];
    size_t stride;
} key_rows;

INLINE key_rows rows_from(const char *keys, size_t row_bytes, int tokens_here) {
    key_rows rows = {.stride = row_bytes};
    for (int i = 0; i < tokens_here / 4; i++)
        rows.fourth[i] = keys + (size_t)i * 4 * row_bytes;
    return rows;
}

INLINE const char *row_of(const key_rows *rows, int t) {
    return rows->fourth[t / 4] + (size_t)(t % 4) * rows->stride;
}

INLINE void advance(key_rows *rows, int tokens_here, size_t bytes) {
    UNROLL for (int i = 0; i < tokens_here / 4; i++) {
        rows->fourth[i] += bytes;
        __asm__("" : "+r"(rows->fourth[i])); /* emits nothing */
    }
}

/* `tokens_here` (4 or 16) keys against a four: sums[token], four partial sums of each query in its
 * quarter. */
INLINE void dot_four(const char *keys, size_t row_bytes, uint32_t dim, const char *four,
                     int tokens_here, const char *next, __m512 *sums) {
    UNROLL for (int t = 0; t < tokens_here; t++) sums[t] = _mm512_setzero_ps();
    key_rows rows = rows_from(keys, row_bytes, tokens_here);
    uint32_t d = 0;
    for (; d + EIGHT <= dim; d += EIGHT, four += LINE_BYTES) {
        __m512i query = _mm512_load_si512(four);
        prefetch(next + (size_t)d * 2 * tokens_here, (size_t)EIGHT_BYTES * tokens_here);
        UNROLL for (int t = 0; t < tokens_here; t++) {
            __m128i eight = _mm_loadu_si128((const __m128i *)row_of(&rows, t));
            sums[t] = add_products(sums[t], query, _mm512_broadcast_i32x4(eight));
        }
        advance(&rows, tokens_here, EIGHT_BYTES);
    }
    if (d < dim)
        UNROLL for (int t = 0; t < tokens_here; t++) {
            __m128i last = _mm_maskz_loadu_epi16((__mmask8)((1u << (dim - d)) - 1),
                                                 row_of(&rows, t));
            sums[t] = add_products(sums[t], _mm512_load_si512(four), _mm512_broadcast_i32x4(last));
        }
}

/* The largest of some vectors, lane by lane. NaN is noted apart: a maximum that keeps it would wait
 * for three instructions at each step, one that drops it for one. */
typedef struct extreme {
    __m512 largest;
    __mmask16 broken;
} extreme;

INLINE void raise_extreme(extreme *to, const __m512 *vectors, int count) {
    __m512 tree[LANES];
    UNROLL for (int i = 0; i < count; i++) {
        to->broken |= _mm512_cmp_ps_mask(vectors[i], vectors[i], _CMP_UNORD_Q);
        tree[i] = vectors[i];
    }
    UNROLL for (int half = count / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) tree[i] = _mm512_max_ps(tree[i], tree[i + half]);
    to->largest = _mm512_max_ps(to->largest, tree[0]);
}

INLINE __m512 extreme_of(const extreme *from) {
    return _mm512_mask_mov_ps(from->largest, from->broken, _mm512_set1_ps(NAN));
}

/* A four of queries, of which those from `low` to `high` are meant: the first is part->query. */
typedef struct four_part {
    const char *four;
    uint32_t low, high;
} four_part;

/* Logits of `used` (at most 4) tokens from a block with a quarter for each query. */
INLINE void store_four(__m512 block, const four_part *meant, float *logits, size_t logit_stride,
                       uint32_t used) {
    float lanes[LANES];
    _mm512_storeu_ps(lanes, block);
    for (uint32_t j = meant->low; j < meant->high; j++, logits += logit_stride) {
        if (used == FOUR)
            memcpy(logits, lanes + FOUR * j, FOUR * sizeof *logits);
        else
            memcpy(logits, lanes + FOUR * j, used * sizeof *logits);
    }
}

/* `tokens_here` (4 or 16) keys against a four, `used` of which count. */
INLINE void score_four_block(const score_call *call, const char *keys, size_t row_bytes,
                             const four_part *meant, int tokens_here, uint32_t used,
                             const char *next, float *logits, extreme *found) {
    __m512 sums[LANES], scale = _mm512_set1_ps(call->scale);
    dot_four(keys, row_bytes, call->dim, meant->four, tokens_here, next, sums);
    __m512 blocks[FOUR];
    UNROLL for (int t = 0; t < tokens_here; t += FOUR) {
        __m512 block = lane_sums(sums[t], sums[t + 1], sums[t + 2], sums[t + 3]);
        blocks[t / FOUR] = _mm512_mul_ps(block, scale);
        if (call->logits)
            store_four(blocks[t / FOUR], meant, logits + t, call->logit_stride,
                       used < FOUR ? used : FOUR);
    }
    if (!call->logits)
        raise_extreme(found, blocks, tokens_here / FOUR);
}

/* The largest of each quarter. */
INLINE void raise_four(__m512 largest, const four_part *meant, float *maxima, bool is_new) {
    float found[FOUR];
    largest = max_with_nan(_mm512_permute_ps(largest, 0xb1), largest);
    largest = max_with_nan(_mm512_permute_ps(largest, 0x4e), largest);
    __m512i firsts = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    _mm_storeu_ps(found, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, largest)));
    for (uint32_t j = meant->low; j < meant->high; j++, maxima++)
        *maxima = is_new ? found[j] : max_of_two(found[j], *maxima);
}

/* LANES / `fours` keys against that many fours (2 or 4), each key loaded once for all of them.
 * sums: of all keys with the first four, then with the next. */
INLINE void dot_fours(const char *keys, size_t row_bytes, uint32_t dim, const char *first,
                      int fours, const char *next, __m512 *sums) {
    const int tokens_here = LANES / fours;
    const size_t stride = four_bytes(dim);
    UNROLL for (int i = 0; i < LANES; i++) sums[i] = _mm512_setzero_ps();
    key_rows rows = rows_from(keys, row_bytes, tokens_here);
    for (uint32_t d = 0; d < dim; d += EIGHT, first += LINE_BYTES) {
        __m512i queries[FOUR];
        UNROLL for (int i = 0; i < fours; i++) queries[i] =
            _mm512_load_si512(first + (size_t)i * stride);
        prefetch(next + (size_t)d * 2 * tokens_here, (size_t)EIGHT_BYTES * tokens_here);
        UNROLL for (int t = 0; t < tokens_here; t++) {
            __m512i key = _mm512_broadcast_i32x4(
                _mm_loadu_si128((const __m128i *)row_of(&rows, t)));
            UNROLL for (int i = 0; i < fours; i++) sums[i * tokens_here + t] =
                add_products(sums[i * tokens_here + t], queries[i], key);
        }
        advance(&rows, tokens_here, EIGHT_BYTES);
    }
}

/* 16 tokens against 2 or 4 fours; dim is a multiple of 8. `high` queries of the last are meant. */
INLINE void score_fours(const score_call *call, const score_part *part, const char *first,
                        int fours, uint32_t high) {
    const int tokens_here = LANES / fours, blocks_here = tokens_here / FOUR;
    const char *keys = part->rows[0], *next = part->query ? keys : part->next;
    float *logits = call->logits + part->query * call->logit_stride + part->token;
    __m512 scale = _mm512_set1_ps(call->scale);
    extreme found[FOUR];
    UNROLL for (int i = 0; i < fours; i++) found[i] = (extreme){_mm512_set1_ps(-INFINITY), 0};
    for (int t = 0; t < TOKEN_CHUNK; t += tokens_here) {
        __m512 sums[LANES], blocks[FOUR];
        dot_fours(keys + (size_t)t * call->row_bytes, call->row_bytes, call->dim, first, fours,
                  next + (size_t)t * key_bytes(call), sums);
        UNROLL for (int b = 0; b < FOUR; b++) {
            __m512 *from = sums + b * FOUR;
            const int i = b / blocks_here;
            const size_t token = (size_t)(t + b % blocks_here * FOUR);
            const four_part meant = {NULL, 0, i == fours - 1 ? high : FOUR};
            blocks[b] = _mm512_mul_ps(lane_sums(from[0], from[1], from[2], from[3]), scale);
            if (call->logits)
                store_four(blocks[b], &meant,
                           logits + (size_t)i * FOUR * call->logit_stride + token,
                           call->logit_stride, FOUR);
        }
        if (!call->logits)
            UNROLL for (int i = 0; i < fours; i++)
                raise_extreme(&found[i], blocks + i * blocks_here, blocks_here);
    }
    for (int i = 0; call->maxima && i < fours; i++) {
        const four_part meant = {NULL, 0, i == fours - 1 ? high : FOUR};
        raise_four(extreme_of(&found[i]), &meant, call->maxima + part->query + i * FOUR,
                   part->token == 0);
    }
}

static __attribute__((noinline)) void score_two_fours(const score_call *call,
                                                      const score_part *part, const char *first,
                                                      uint32_t high) {
    score_fours(call, part, first, 2, high);
}

static __attribute__((noinline)) void score_four_fours(const score_call *call,
                                                       const score_part *part, const char *first,
                                                       uint32_t high) {
    score_fours(call, part, first, 4, high);
}

/* At most 16 tokens. Fewer go by fours, the last four once more; fewer than four one by one, each
 * as if it were four. */
static __attribute__((noinline)) void score_four(const score_call *call, const score_part *part,
                                                 const four_part *meant) {
    const char *keys = part->rows[0], *next = part->query ? keys : part->next;
    const uint32_t tokens = part->tokens_used;
    float *logits = call->logits + part->query * call->logit_stride + part->token;
    extreme found = {_mm512_set1_ps(-INFINITY), 0};
    if (tokens == TOKEN_CHUNK)
        score_four_block(call, keys, call->row_bytes, meant, TOKEN_CHUNK, TOKEN_CHUNK, next,
                         logits, &found);
    else
        for (uint32_t t = 0, taken = tokens < 4 ? 1 : 4; t < tokens; t += taken) {
            if (t + taken > tokens)
                t = tokens - taken;
            score_four_block(call, keys + t * call->row_bytes, taken == 1 ? 0 : call->row_bytes,
                             meant, 4, taken, next + t * key_bytes(call), logits + t, &found);
        }
    if (call->maxima)
        raise_four(extreme_of(&found), meant, call->maxima + part->query, part->token == 0);
}

/* The other rows are where the stride says. */
INLINE void place_first(const score_call *call, uint32_t token, score_part *part) {
    part->token = token;
    part->tokens_used = call->tokens - token < TOKEN_CHUNK ? call->tokens - token : TOKEN_CHUNK;
    part->rows[0] = call->keys + token * call->row_bytes;
    part->next = call->next ? call->next + token * key_bytes(call) : part->rows[0];
}

/* How many fours of what is left are scored together, of 16 tokens. */
static uint32_t fours_together(const score_call *call, const score_part *part, uint32_t place,
                               uint32_t left) {
    if (place % FOUR || part->tokens_used != TOKEN_CHUNK || call->dim % EIGHT || left <= FOUR)
        return 1;
    return left > 3 * FOUR ? 4 : 2;
}

/* A query's logit has the same bits whatever is scored beside it. */
static void score_all(const score_call *call, const kernel_queries *queries) {
    score_part part;
    for (uint32_t t = 0; t < call->tokens; t += TOKEN_CHUNK) {
        place_first(call, t, &part);
        for (part.query = 0; part.query < queries->count; part.query += part.queries_used) {
            uint32_t left = queries->count - part.query, place = queries->first + part.query;
            uint32_t fours = fours_together(call, &part, place, left);
            const char *first = four_of(queries, call->dim, place / FOUR);
            if (fours > 1) {
                part.queries_used = left < fours * FOUR ? left : fours * FOUR;
                uint32_t high = part.queries_used - (fours - 1) * FOUR;
                (fours == 2 ? score_two_fours : score_four_fours)(call, &part, first, high);
                continue;
            }
            four_part meant = {.four = first, .low = place % FOUR};
            meant.high = left < FOUR - meant.low ? meant.low + left : FOUR;
            part.queries_used = meant.high - meant.low;
            score_four(call, &part, &meant);
        }
    }
}

void avx512_bf16_score(int dtype, const void *keys, size_t row_bytes, uint32_t tokens, uint32_t dim,
                       const kernel_queries *queries, float scale, float *logits,
                       size_t logit_stride, const void *next) {
    if (!queries->packed) {
        avx512_score(dtype, keys, row_bytes, tokens, dim, queries, scale, logits, logit_stride,
                     next);
        return;
    }
    score_call call = {.dtype = dtype, .dim = dim, .keys = keys, .row_bytes = row_bytes,
                       .tokens = tokens, .scale = scale, .logits = logits,
                       .logit_stride = logit_stride, .next = next};
    score_all(&call, queries);
}

void avx512_bf16_score_max(int dtype, const void *keys, size_t row_bytes, uint32_t tokens,
                           uint32_t dim, const kernel_queries *queries, float scale,
                           float *maxima, const void *next) {
    if (!queries->packed) {
        avx512_score_max(dtype, keys, row_bytes, tokens, dim, queries, scale, maxima, next);
        return;
    }
    score_call call = {.dtype = dtype, .dim = dim, .keys = keys, .row_bytes = row_bytes,
                       .tokens = tokens, .scale = scale, .maxima = maxima, .next = next};
    score_all(&call, queries);
}

/* The largest lane of those in `lanes`, NaN if one is. */
INLINE float largest_lane(const extreme *from, __mmask16 lanes) {
    float largest = _mm512_mask_reduce_max_ps(lanes, from->largest);
    return from->broken & lanes ? NAN : largest;
}

/* A call of score_pieces: of its queries in four i those of the lanes lanes[i] are meant. */
typedef struct pieces_call {
    const void *const *pieces, *const *next;
    size_t row_bytes;
    uint32_t count, tokens, dim;
    const char *first;
    __mmask16 lanes[FOUR];
    float scale;
} pieces_call;

INLINE float best_of_piece(const pieces_call *call, uint32_t piece, int fours) {
    const int tokens_here = LANES / fours, blocks_here = tokens_here / FOUR;
    const char *keys = call->pieces[piece];
    const char *next = call->next[piece] ? call->next[piece] : call->pieces[piece];
    extreme found[FOUR];
    UNROLL for (int i = 0; i < fours; i++) found[i] = (extreme){_mm512_set1_ps(-INFINITY), 0};
    for (size_t t = 0; t < call->tokens; t += (size_t)tokens_here) {
        const char *from = keys + t * call->row_bytes, *later = next + t * call->dim * 2;
        __m512 sums[LANES], blocks[FOUR];
        if (fours == 1)
            dot_four(from, call->row_bytes, call->dim, call->first, LANES, later, sums);
        else
            dot_fours(from, call->row_bytes, call->dim, call->first, fours, later, sums);
        UNROLL for (int b = 0; b < FOUR; b++) blocks[b] =
            lane_sums(sums[4 * b], sums[4 * b + 1], sums[4 * b + 2], sums[4 * b + 3]);
        UNROLL for (int i = 0; i < fours; i++)
            raise_extreme(&found[i], blocks + i * blocks_here, blocks_here);
    }
    float best = largest_lane(&found[0], call->lanes[0]);
    UNROLL for (int i = 1; i < fours; i++) best =
        max_of_two(largest_lane(&found[i], call->lanes[i]), best);
    return call->scale * best; /* rounding keeps the order */
}

static __attribute__((noinline)) void pieces_by_one(const pieces_call *call, float *best) {
    for (uint32_t i = 0; i < call->count; i++) best[i] = best_of_piece(call, i, 1);
}

static __attribute__((noinline)) void pieces_by_two(const pieces_call *call, float *best) {
    for (uint32_t i = 0; i < call->count; i++) best[i] = best_of_piece(call, i, 2);
}

static __attribute__((noinline)) void pieces_by_four(const pieces_call *call, float *best) {
    for (uint32_t i = 0; i < call->count; i++) best[i] = best_of_piece(call, i, 4);
}

bool avx512_bf16_score_pieces(int dtype, const void *const *pieces, const void *const *next,
                              uint32_t count, size_t row_bytes, uint32_t tokens, uint32_t dim,
                              const kernel_queries *queries, float scale, float *best) {
    uint32_t low = queries->first % FOUR, high = low + queries->count;
    uint32_t fours = (high + FOUR - 1) / FOUR;
    if (dtype != KERNEL_BFLOAT16 || !queries->packed || fours > FOUR || fours == 3 ||
        tokens % TOKEN_CHUNK || dim % EIGHT)
        return false;
    pieces_call call = {.pieces = pieces, .next = next, .row_bytes = row_bytes, .count = count,
                        .tokens = tokens, .dim = dim, .scale = scale,
                        .first = four_of(queries, dim, queries->first / FOUR)};
    for (uint32_t i = 0; i < fours; i++) call.lanes[i] = 0xffff;
    call.lanes[0] &= (__mmask16)(0xffff << FOUR * low);
    call.lanes[fours - 1] &= (__mmask16)(0xffff >> FOUR * (FOUR * fours - high));
    (fours == 1 ? pieces_by_one : fours == 2 ? pieces_by_two : pieces_by_four)(&call, best);
    return true;
}

/* ---- bounds ---- */

/* Of each channel the maximum, where the query's element is negative the minimum, times it. */
INLINE __m512 add_larger_products(__m512 sum, __m512i query, __m512i minimum, __m512i maximum) {
    __mmask32 is_negative = _mm512_movepi16_mask(query);
    return add_products(sum, query, _mm512_mask_blend_epi16(is_negative, maximum, minimum));
}

INLINE void bound_pairs(const char *minima, const char *maxima, uint32_t dim, const char *queries,
                        size_t query_bytes, int queries_here, float scale, float *bounds) {
    __m512 sums[4];
    UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm512_setzero_ps();
    for (uint32_t d = 0; d < dim; d += STEP) {
        __m512i minimum = load_line(minima + (size_t)d * 2, dim - d);
        __m512i maximum = load_line(maxima + (size_t)d * 2, dim - d);
        UNROLL for (int j = 0; j < queries_here; j++) {
            __m512i query = _mm512_load_si512(queries + (size_t)j * query_bytes + (size_t)d * 2);
            sums[j] = add_larger_products(sums[j], query, minimum, maximum);
        }
    }
    store_bounds(lane_sums(sums[0], sums[1], sums[2], sums[3]), queries_here, scale, bounds);
}

void avx512_bf16_bound(int dtype, const void *digest, uint32_t dim, const kernel_queries *queries,
                       float scale, float *bounds, const void *next) {
    if (!queries->packed) {
        avx512_bound(dtype, digest, dim, queries, scale, bounds, next);
        return;
    }
    const char *minima = digest, *maxima = minima + (size_t)dim * 2;
    if (next)
        prefetch(next, (size_t)dim * 4);
    size_t query_bytes = packed_row_bytes(dim);
    const char *rows = (const char *)queries->packed + queries->first * query_bytes;
    uint32_t j = 0;
    for (; j + 4 <= queries->count; j += 4)
        bound_pairs(minima, maxima, dim, rows + j * query_bytes, query_bytes, 4, scale, bounds + j);
    for (; j < queries->count; j++)
        bound_pairs(minima, maxima, dim, rows + j * query_bytes, query_bytes, 1, scale, bounds + j);
}

const kernels kernels_avx512_bf16 = {
    .name = "avx512_bf16",
    .rates = {{110, 39, 38}, 51, 200, 126, 70},
    .packed_bytes = avx512_bf16_packed_bytes,
    .pack = avx512_bf16_pack,
    .score = avx512_bf16_score,
    .score_max = avx512_bf16_score_max,
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
typedef int kernels_avx512_bf16_is_for_x86_64_only;
#endif
