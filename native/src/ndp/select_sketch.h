/* What the first of two stages of select has: where estimates come from, and what a plan's scratch
 * holds. Method "sketch" has no second stage, and nothing in its scratch. */
#pragma once
#include <math.h>

#include "ndp/types.h"

enum { SAMPLES = 8 };

/* Of a list and head: the best estimates of some blocks of 16 tokens, then of all of them. */
typedef struct sample {
    float best[SAMPLES];
    float squares, scaled, count; /* of errors, as they are and over the scale */
} sample;

/* A plan's scratch; slacks, cuts and samples: [list][head]. */
typedef struct stage_scratch {
    float *slacks; /* how far estimates may be short, in units of a token's scale */
    float *cuts; /* tokens below it are left alone */
    sample *samples;
    float (*uppers)[SKETCH_TOKENS]; /* [list][head][block of a page][page] */
} stage_scratch;

stage_scratch stage_of(const select_job *job, const plan *p);

static inline bool is_estimated(const select_job *job) {
    uint32_t method = job->args->by.method;
    return method == CXLKV_METHOD_TWO_STAGE || method == CXLKV_METHOD_SKETCH;
}

static inline uint32_t kv_heads(const select_job *job) {
    return job->layout->kv_heads;
}

static inline uint64_t lists_of(const select_job *job, const plan *p) {
    return p->lists * kv_heads(job);
}

/* Blocks of 16 tokens that a page has. */
static inline uint32_t blocks_of(const select_job *job) {
    return (job->layout->page_tokens + SKETCH_TOKENS - 1) / SKETCH_TOKENS;
}

/* The pages of a list that are neither forced in nor incomplete: those it may leave out. */
static inline uint32_t free_pages(const plan *p, const window *w, uint32_t *first) {
    uint32_t last = min_u32(w->recent, p->view.complete);
    *first = w->sinks;
    return last > w->sinks ? last - w->sinks : 0;
}

/* The queries that list `list` of a plan has in a head. */
static inline uint64_t queries_of_list(const select_job *job, const plan *p, uint64_t list,
                                       uint32_t head, uint32_t *count) {
    bool one_list = job->args->by.per == CXLKV_PER_SEQUENCE;
    *count = (uint32_t)(one_list ? p->rows : 1) * job->group;
    return p->first_query + head * p->block + (one_list ? 0 : list * job->group);
}

/* What estimates are made of: sketches, or the upper planes of keys. */
static inline uint32_t estimated_kind(const cxlkv_pool *pool) {
    return pool->layout.sketch ? PIECE_SKETCH : PIECE_KEYS;
}

/* Bytes of it that are read of a head of a page. */
static inline uint64_t estimated_bytes(const select_job *job) {
    const cxlkv_pool *pool = job->batch->pool;
    return pool->layout.sketch ? pool->geometry.sketch_piece_bytes
                               : code_bytes(&job->keys.upper, pool->layout.page_tokens);
}

/* Block `block` of a head of some pages, by where their pieces of estimated_kind() begin. */
typedef struct estimated_blocks {
    const uint8_t *const *pages, *const *later; /* later: to be prefetched; entries may be NULL */
    uint32_t count, head, block;
    uint64_t first_query;
    uint32_t query_count;
    float slack;
} estimated_blocks;

/* best[i]: the best estimate of page i, uppers: of each token with the slack of its scale, as
 * sketch.h has them. */
void estimate_blocks(const select_job *job, const estimated_blocks *b, float *best,
                     float (*uppers)[SKETCH_TOKENS]);
/* The scales of the 16 tokens of a block, in which slacks are. */
void estimate_scales(const select_job *job, const uint8_t *page, uint32_t head, uint32_t block,
                     float *scales);

/* A bit for each of the 16 tokens of a block that a page has. */
static inline uint32_t block_tokens(const select_job *job, uint32_t block) {
    uint32_t left = job->layout->page_tokens - block * SKETCH_TOKENS;
    return left >= SKETCH_TOKENS ? 0xffff : (1u << left) - 1;
}

/* Larger, and NaN above all. */
static inline bool is_better(float value, float than) {
    return value > than || (isnan(value) && !isnan(than));
}

/* Whether so many pages are worth it. */
bool sketch_pays(const layer_shape *shape, uint32_t pages);
/* Floats of scratch for all queries, and for a plan. */
uint64_t sketch_query_floats(const select_job *job, uint64_t query_count);
uint64_t sketch_plan_floats(const select_job *job, const plan *p);
/* The queries of the job, from job->queries. */
void sketch_prepare(select_job *job, float *scratch);
/* For batch->count * kv_heads items, then sketch_errors_all(): how far off estimates are. */
int sketch_sample_task(void *context, uint32_t item);
void sketch_errors_all(select_job *job);
