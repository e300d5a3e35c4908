/* Rows of float8_e4m3, scored and summed: a tile of them becomes bfloat16, which is exact and stays
 * in the caches, and the kernels of that read it. */
#include "ndp/stored_fp8.h"

enum { TILE_NUMBERS = 8192, TILE_ROWS_MIN = TILE_NUMBERS / CODE_DIM_MAX, QUERIES = 16 };

typedef struct tile {
    _Alignas(LINE_BYTES) uint16_t numbers[TILE_NUMBERS];
} tile;

static uint32_t tile_rows(const stored *s) { return TILE_NUMBERS / s->dim; }

/* Rows [at, at + count), and asks for as many of `next`. */
static void tile_fill(tile *made, const stored *s, const uint8_t *rows, uint32_t at,
                      uint32_t count, const uint8_t *next) {
    size_t offset = (size_t)at * s->dim;
    s->isa->fp8_decode(rows + offset, (size_t)count * s->dim, made->numbers,
                       next ? next + offset : NULL);
}

void fp8_score(const stored *s, const uint8_t *rows, uint32_t count, const kernel_queries *queries,
               float scale, float *logits, size_t logit_stride, const uint8_t *next) {
    tile made;
    for (uint32_t at = 0, here; at < count; at += here) {
        here = min_u32(tile_rows(s), count - at);
        tile_fill(&made, s, rows, at, here, next);
        s->isa->score(s->dtype, made.numbers, 2 * s->dim, here, s->dim, queries, scale, logits + at,
                      logit_stride, NULL);
    }
}

void fp8_score_max(const stored *s, const uint8_t *rows, uint32_t count,
                   const kernel_queries *queries, float scale, float *maxima,
                   const uint8_t *next) {
    tile made;
    for (uint32_t at = 0, here; at < count; at += here) {
        here = min_u32(tile_rows(s), count - at);
        tile_fill(&made, s, rows, at, here, next);
        for (uint32_t j = 0; j < queries->count; j += QUERIES) {
            kernel_queries some = *queries;
            float best[QUERIES];
            some.first += j;
            some.count = min_u32(QUERIES, queries->count - j);
            s->isa->score_max(s->dtype, made.numbers, 2 * s->dim, here, s->dim, &some, scale, best,
                              NULL);
            for (uint32_t i = 0; i < some.count; i++) {
                float *to = maxima + j + i;
                if (at == 0 || best[i] > *to || best[i] != best[i]) *to = best[i];
            }
        }
    }
}

void fp8_score_each(const stored *s, const void *const *keys, uint32_t count,
                    const kernel_queries *queries, float scale, float *best) {
    const void *decoded[TILE_ROWS_MIN];
    tile made;
    for (uint32_t at = 0, here; at < count; at += here) {
        here = min_u32(TILE_ROWS_MIN, count - at);
        for (uint32_t i = 0; i < here; i++) {
            uint16_t *to = made.numbers + (size_t)i * s->dim;
            s->isa->fp8_decode(keys[at + i], s->dim, to, NULL);
            decoded[i] = to;
        }
        kernels_score_each(s->isa, s->dtype, decoded, here, s->dim, queries, scale, best + at);
    }
}

void fp8_bound(const stored *s, const uint8_t *digest, const kernel_queries *queries, float scale,
               float *bounds, const uint8_t *next) {
    tile made;
    tile_fill(&made, s, digest, 0, 2, next);
    s->isa->bound(s->dtype, made.numbers, s->dim, queries, scale, bounds, NULL);
}

void fp8_accumulate(const stored *s, const uint8_t *rows, uint32_t count, const float *weights,
                    size_t weight_stride, uint32_t query_count, float *accumulator,
                    const uint8_t *next) {
    tile made;
    for (uint32_t at = 0, here; at < count; at += here) {
        here = min_u32(tile_rows(s), count - at);
        tile_fill(&made, s, rows, at, here, next);
        s->isa->accumulate(s->dtype, made.numbers, 2 * s->dim, here, s->dim, weights + at,
                           weight_stride, query_count, accumulator, NULL);
    }
}

void fp8_fetch(const stored *s, int dtype, const uint8_t *rows, uint32_t count, uint8_t *to) {
    tile made;
    float numbers[TILE_NUMBERS];
    size_t all = (size_t)count * s->dim, element = dtype_bytes((uint32_t)dtype);
    for (size_t at = 0, here; at < all; at += here) {
        here = min_u64(TILE_NUMBERS, all - at);
        s->isa->fp8_decode(rows + at, here, made.numbers, NULL);
        if (dtype == s->dtype) {
            memcpy(to + at * element, made.numbers, here * element);
            continue;
        }
        s->isa->to_float(s->dtype, made.numbers, here, numbers);
        s->isa->from_float(dtype, numbers, here, to + at * element);
    }
}
