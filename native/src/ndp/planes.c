/* Pieces in two planes, in all 8 bits: block by block, joined in the first cache. */
#include "ndp/planes.h"

#include <math.h>

/* A block of 16 tokens. */
enum { BLOCK_BYTES_MAX = CODE_TOKENS * CODE_DIM_MAX };

/* Tokens of one block, as a piece of 8 bits that has no other. */
typedef struct joined {
    uint32_t low, count;
    code_piece piece;
} joined;

/* Those of [at, end) in the block of `at`. */
static joined join_block(const stored *s, code_piece piece, uint32_t at, uint32_t end,
                         uint8_t *room) {
    uint32_t block = at / CODE_TOKENS;
    const uint8_t *upper = piece.blocks + block * code_block_bytes(&s->upper);
    joined made = {.low = at % CODE_TOKENS,
                   .piece = {room, piece.scales + (size_t)block * CODE_TOKENS}};
    made.count = min_u32(end - at, CODE_TOKENS - made.low);
    s->isa->code_join(&s->form, upper, upper + s->lower_offset, room);
    return made;
}

/* Both planes of some blocks, and their scales. */
static void ask_for(const stored *s, const uint8_t *next, uint32_t tokens) {
    size_t bytes = code_blocks(tokens) * code_block_bytes(&s->upper);
    if (!next) return;
    for (size_t at = 0; at < bytes; at += LINE_BYTES) {
        __builtin_prefetch(next + at);
        __builtin_prefetch(next + s->lower_offset + at);
    }
    __builtin_prefetch(next + s->scales_offset);
}

float planes_estimate(const stored *s, code_piece upper, uint32_t tokens,
                      const code_query *queries, uint32_t query_count, float slack, float *uppers,
                      const uint8_t *next) {
    enum { QUERIES = 16 };
    float logits[QUERIES][CODE_TOKENS], scales[CODE_TOKENS], most[CODE_TOKENS];
    for (size_t at = 0; next && at < code_block_bytes(&s->upper); at += LINE_BYTES)
        __builtin_prefetch(next + at);
    s->isa->to_float(CXLKV_FLOAT16, upper.scales, CODE_TOKENS, scales);
    for (uint32_t t = 0; t < CODE_TOKENS; t++) most[t] = -INFINITY;
    for (uint32_t q = 0, here; q < query_count; q += here) {
        here = min_u32(QUERIES, query_count - q);
        s->isa->code_score(&s->upper, upper, 0, CODE_TOKENS, queries + q, here, logits[0],
                           CODE_TOKENS, NULL);
        s->isa->code_raise(logits[0], here, most);
    }
    for (uint32_t t = 0; t < CODE_TOKENS; t++)
        uppers[t] = most[t] * CODE_UPPER_STEP + slack * scales[t];
    for (uint32_t t = tokens; t < CODE_TOKENS; t++) uppers[t] = -INFINITY;
    return kernels_largest(most, tokens) * CODE_UPPER_STEP;
}

void planes_score(const stored *s, code_piece piece, uint32_t first, uint32_t count,
                  const code_query *queries, uint32_t query_count, float *logits,
                  size_t logit_stride, const void *next) {
    _Alignas(LINE_BYTES) uint8_t room[BLOCK_BYTES_MAX];
    ask_for(s, next, count);
    for (uint32_t t = first, end = first + count; t < end;) {
        joined block = join_block(s, piece, t, end, room);
        s->isa->code_score(&s->form, block.piece, block.low, block.count, queries, query_count,
                           logits + (t - first), logit_stride, NULL);
        t += block.count;
    }
}

void planes_score_best(const stored *s, const code_piece *pieces, const void *const *next,
                       uint32_t count, uint32_t tokens, const code_query *queries,
                       uint32_t query_count, float *best) {
    _Alignas(LINE_BYTES) uint8_t room[BLOCK_BYTES_MAX];
    const void *nothing[1] = {NULL};
    for (uint32_t i = 0; i < count; i++) {
        ask_for(s, next[i], tokens);
        for (uint32_t t = 0; t < tokens;) {
            joined block = join_block(s, pieces[i], t, tokens, room);
            float most;
            s->isa->code_score_best(&s->form, &block.piece, nothing, 1, block.count, queries,
                                    query_count, &most);
            if (t == 0 || most > best[i] || isnan(most)) best[i] = most; /* a NaN stays */
            t += block.count;
        }
    }
}

void planes_accumulate(const stored *s, code_piece piece, uint32_t first, uint32_t count,
                       const float *weights, size_t weight_stride, uint32_t query_count,
                       float *accumulator, const void *next) {
    _Alignas(LINE_BYTES) uint8_t room[BLOCK_BYTES_MAX];
    ask_for(s, next, count);
    for (uint32_t t = first, end = first + count; t < end;) {
        joined block = join_block(s, piece, t, end, room);
        s->isa->code_accumulate(&s->form, block.piece, block.low, block.count,
                                weights + (t - first), weight_stride, query_count, accumulator,
                                NULL);
        t += block.count;
    }
}

void planes_decode(const stored *s, code_piece piece, uint32_t first, uint32_t count,
                   float *rows) {
    _Alignas(LINE_BYTES) uint8_t room[BLOCK_BYTES_MAX];
    for (uint32_t t = first, end = first + count; t < end;) {
        joined block = join_block(s, piece, t, end, room);
        s->isa->code_decode(&s->form, block.piece, block.low, block.count,
                            rows + (size_t)(t - first) * s->dim);
        t += block.count;
    }
}
