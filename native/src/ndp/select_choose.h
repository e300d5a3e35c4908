/* The best pages of a list, by the scores of all. */
#pragma once
#include <math.h>

#include "ndp/types.h"

/* List `list` of a plan, one query row or all rows of the sequence: what it sees, and how many
 * pages it may have. */
window window_of(const select_job *job, const plan *p, uint64_t list);

/* Order-preserving: larger score, larger number; NaN above all; -0 equals 0. */
static inline uint32_t rank_of(float score) {
    if (isnan(score)) return UINT32_MAX;
    float canonical = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &canonical, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static inline float value_of_rank(uint32_t rank) {
    uint32_t bits = rank & 0x80000000u ? rank & 0x7fffffffu : ~rank;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
/* How many of a list are chosen beside the forced ones. */
static inline uint32_t free_choices(const window *w) {
    uint32_t forced = w->sinks - w->low + w->pages - w->recent;
    return w->k > forced ? w->k - forced : 0;
}
/* The wanted-th best of `count` scores (radix select); *equal says how many of that very rank are
 * among the wanted. ranks: room for all scores. */
float kth_largest(const float *scores, uint32_t count, uint32_t wanted, uint32_t *ranks,
                  uint32_t *equal);
/* Writes the best pages of a list, and their scores, to a row of what the caller gets. ranks and
 * chosen: room for each page. */
int choose_pages(const select_job *job, const plan *p, const window *w, uint64_t row,
                 const float *scores, uint32_t *ranks, uint8_t *chosen);

/* The `wanted` best free pages, ascending; returns how many there are. */
uint32_t best_pages(const window *w, uint32_t wanted, const float *scores, uint32_t *ranks,
                    int32_t *pages);
