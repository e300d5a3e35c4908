/* Select in two stages: logits are estimated from sketches, or from the upper planes of keys, and
 * tokens that may matter are scored by their keys. docs/decisions/0011-sketch.md has the
 * measurements.
 *
 * Here a sample of the pages says, for each list and head, how far estimates are off (root mean
 * square, in units of the token's scale). With the estimates of all pages the worst one that will
 * be chosen is known. Tokens whose estimate is more than `errors` of those below it are left alone;
 * of the others the keys are read, token by token (select_scan.c). A page with such tokens has the
 * best of their true scores, one without its best estimate, which is below the others. An estimate
 * that is no number is never trusted. */
#include <math.h>

#include "kernels/sketch.h"
#include "ndp/planes.h"
#include "ndp/select_choose.h"
#include "ndp/select_score.h"
#include "ndp/select_sketch.h"
#include "ndp/stored.h"
#include "sequence/batch.h"

enum { TOKENS_MIN = 1024, STAGE_BYTES_MAX = 64 << 20 };

/* ---- scratch ---- */

uint64_t sketch_query_floats(const select_job *job, uint64_t query_count) {
    if (!job->layout->sketch) return 0;
    uint64_t codes = align_up(query_count * sketch_dim(job->layout->head_dim), 64);
    return (codes + align_up(query_count * sizeof(sketch_query), 64)) / sizeof(float);
}

/* The uppers, then the arrays of lists and heads. */
static uint64_t uppers_of(const select_job *job, const plan *p) {
    return lists_of(job, p) * blocks_of(job) * p->view.pages;
}

/* Pages of few tokens have much of a sketch's 16 empty. */
bool sketch_pays(const layer_shape *shape, uint32_t pages) {
    const cxlkv_layout *layout = &shape->layout;
    bool many = pages >= SAMPLES && (uint64_t)pages * layout->page_tokens >= TOKENS_MIN;
    if (!layout->sketch) return many && has_planes(layout, PIECE_KEYS);
    return many && 2 * shape->strides[PIECE_SKETCH] <= piece_data_bytes(layout, PIECE_KEYS);
}

static bool sketch_is_for(const select_job *job, const plan *p) {
    if (!is_estimated(job) || !is_scored(p) || is_by_mass(job, p) || p->narrow) return false;
    if (job->args->by.method == CXLKV_METHOD_SKETCH) return true;
    window w = window_of(job, p, 0);
    uint32_t first, pages = free_pages(p, &w, &first);
    return sketch_pays(shape_of(job->batch->pool, p->view.layer), pages) && w.k <= pages / 2 &&
           uppers_of(job, p) * SKETCH_LINE_BYTES <= STAGE_BYTES_MAX;
}

uint64_t sketch_plan_floats(const select_job *job, const plan *p) {
    if (!sketch_is_for(job, p)) return 0;
    if (job->args->by.method == CXLKV_METHOD_SKETCH) return 16; /* not NULL is all it is */
    uint64_t each = lists_of(job, p) * (2 + sizeof(sample) / sizeof(float));
    return uppers_of(job, p) * SKETCH_TOKENS + align_up(each, 16);
}

stage_scratch stage_of(const select_job *job, const plan *p) {
    uint64_t lists = lists_of(job, p);
    float *at = p->stage + uppers_of(job, p) * SKETCH_TOKENS;
    return (stage_scratch){.slacks = at, .cuts = at + lists, .samples = (sample *)(at + 2 * lists),
                           .uppers = (float (*)[SKETCH_TOKENS])p->stage};
}

void sketch_prepare(select_job *job, float *scratch) {
    uint32_t dim = job->layout->head_dim, count = job->queries.total;
    if (!job->layout->sketch) return;
    int8_t *codes = (int8_t *)scratch;
    sketch_query *made = (sketch_query *)(codes + align_up((uint64_t)count * sketch_dim(dim), 64));
    sketch_queries(job->queries.rows, count, dim, job->args->scale, codes, made);
    job->sketch_queries = made;
}

/* ---- estimates ---- */

/* Block `block` of a head, of a page whose pieces begin at `page`. */
static const uint8_t *sketch_at(const select_job *job, const uint8_t *page, uint32_t head,
                                uint32_t block) {
    return page + head * job->strides[PIECE_SKETCH] +
           block * sketch_block_bytes(job->layout->head_dim);
}

static code_piece upper_at(const select_job *job, const uint8_t *page, uint32_t head,
                           uint32_t block) {
    const stored *keys = &job->keys;
    code_piece piece =
        stored_codes(keys, page + head * job->strides[PIECE_KEYS]);
    piece.blocks += block * code_block_bytes(&keys->upper);
    piece.scales += (size_t)block * CODE_TOKENS;
    return piece;
}

void estimate_scales(const select_job *job, const uint8_t *page, uint32_t head, uint32_t block,
                     float *scales) {
    if (!job->layout->sketch) {
        code_piece piece = upper_at(job, page, head, block);
        job->isa->to_float(CXLKV_FLOAT16, piece.scales, CODE_TOKENS, scales);
        return;
    }
    uint64_t codes = sketch_block_bytes(job->layout->head_dim) - SKETCH_LINE_BYTES;
    memcpy(scales, sketch_at(job, page, head, block) + codes, SKETCH_LINE_BYTES);
}

static void estimate_sketches(const select_job *job, const estimated_blocks *b, float *best,
                              float (*uppers)[SKETCH_TOKENS]) {
    const uint8_t *blocks[RUN_PAGES], *next[RUN_PAGES];
    for (uint32_t i = 0; i < b->count; i++) {
        blocks[i] = sketch_at(job, b->pages[i], b->head, b->block);
        next[i] = b->later[i] ? sketch_at(job, b->later[i], b->head, b->block) : NULL;
    }
    sketch_run run = {.blocks = blocks, .next = next, .count = b->count,
                      .dim = job->layout->head_dim,
                      .queries = job->sketch_queries + b->first_query,
                      .query_count = b->query_count, .seen = block_tokens(job, b->block),
                      .slack = b->slack};
    job->isa->estimate(&run, best, uppers);
}

void estimate_blocks(const select_job *job, const estimated_blocks *b, float *best,
                     float (*uppers)[SKETCH_TOKENS]) {
    if (job->layout->sketch) {
        estimate_sketches(job, b, best, uppers);
        return;
    }
    uint32_t tokens = (uint32_t)__builtin_popcount(block_tokens(job, b->block));
    kernel_queries queries = queries_range(job->queries, b->first_query, b->query_count);
    for (uint32_t i = 0; i < b->count; i++) {
        const uint8_t *next = NULL;
        if (b->later[i]) next = upper_at(job, b->later[i], b->head, b->block).blocks;
        best[i] = planes_estimate(&job->keys, upper_at(job, b->pages[i], b->head, b->block), tokens,
                                  stored_queries(&queries), b->query_count, b->slack, uppers[i],
                                  next);
    }
}

/* ---- the sample ---- */

/* The best logit over the queries of each of some neighbours. */
static void score_block_tokens(const select_job *job, const uint8_t *rows, size_t row_bytes,
                               uint32_t first, uint32_t tokens, const kernel_queries *queries,
                               float *best) {
    enum { QUERIES = 16 };
    const void *keys[SKETCH_TOKENS];
    float logits[QUERIES][SKETCH_TOKENS];
    for (uint32_t t = 0; t < tokens; t++) keys[t] = rows + (first + t) * row_bytes;
    if (!job->keys.encoded) {
        stored_score_each(&job->keys, keys, tokens, queries, job->args->scale, best);
        return;
    }
    for (uint32_t j = 0; j < queries->count; j += QUERIES) {
        kernel_queries some = *queries;
        some.first += j;
        some.count = min_u32(QUERIES, queries->count - j);
        stored_score(&job->keys, rows, row_bytes, first, tokens, &some, job->args->scale,
                     logits[0], SKETCH_TOKENS, NULL);
        for (uint32_t i = 0; i < some.count; i++)
            for (uint32_t t = 0; t < tokens; t++)
                if ((i == 0 && j == 0) || is_better(logits[i][t], best[t])) best[t] = logits[i][t];
    }
}

/* A block of a page: how far its estimates are off. Returns the best one. */
static float sample_block(const select_job *job, const plan *p, uint64_t list, uint32_t head,
                          uint32_t index, uint32_t block, sample *made) {
    const cxlkv_pool *pool = job->batch->pool;
    const uint8_t *next = NULL, *page = pieces_of(pool, page_of(p, index), p->view.layer,
                                                  estimated_kind(pool));
    float best, estimates[1][SKETCH_TOKENS], scores[SKETCH_TOKENS], scales[SKETCH_TOKENS];
    page_rows rows = view_rows(&p->view, index, PIECE_KEYS);
    estimated_blocks asked = {.pages = &page, .later = &next, .count = 1, .head = head,
                              .block = block};
    asked.first_query = queries_of_list(job, p, list, head, &asked.query_count);
    kernel_queries queries = queries_range(job->queries, asked.first_query, asked.query_count);
    uint32_t tokens = (uint32_t)__builtin_popcount(block_tokens(job, block));
    estimate_blocks(job, &asked, &best, estimates);
    estimate_scales(job, page, head, block, scales);
    score_block_tokens(job, rows.first + head * rows.head_bytes, rows.row_bytes,
                       block * SKETCH_TOKENS, tokens, &queries, scores);
    for (uint32_t t = 0; t < tokens; t++) {
        float error = estimates[0][t] - scores[t];
        made->squares += error * error;
        made->count++;
        if (scales[t] != 0) made->scaled += error / scales[t] * error / scales[t];
    }
    return best;
}

static int sample_list(select_job *job, const plan *p, uint64_t list, uint32_t head) {
    const cxlkv_layout *layout = job->layout;
    sample *made = stage_of(job, p).samples + list * layout->kv_heads + head;
    window w = window_of(job, p, list);
    uint32_t start, pages = free_pages(p, &w, &start);
    made->squares = made->scaled = made->count = 0;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint32_t index = start + (2 * i + 1) * pages / (2 * SAMPLES);
        int code = view_verify(&p->view, index);
        if (code < 0) return code;
        made->best[i] = sample_block(job, p, list, head, index, i % blocks_of(job), made);
    }
    uint64_t sketched = SAMPLES * estimated_bytes(job) / blocks_of(job);
    uint64_t scored = (uint64_t)made->count * kind_token_bytes(layout, PIECE_KEYS);
    if (!layout->sketch) scored -= sketched; /* upper planes are of these keys */
    atomic_fetch_add_explicit(&job->bytes_scored, sketched + scored, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, sketched, memory_order_relaxed);
    return 0;
}

int sketch_sample_task(void *context, uint32_t item) {
    select_job *job = context;
    const plan *p = &job->plans[item / kv_heads(job)];
    if (!p->stage) return 0;
    for (uint64_t list = 0; list < p->lists; list++) {
        int code = sample_list(job, p, list, item % kv_heads(job));
        if (code < 0) return code;
    }
    return 0;
}

/* A head whose keys are too much alike for estimates to tell them apart. */
static bool is_flat(const select_job *job, const sample *own, float error) {
    float lowest = own->best[0], highest = own->best[0];
    for (uint32_t i = 1; i < SAMPLES; i++) {
        lowest = fminf(lowest, own->best[i]);
        highest = fmaxf(highest, own->best[i]);
    }
    float margin = job->args->by.errors * error;
    return isfinite(margin) && highest - lowest <= margin / 2;
}

/* Returns how many of its heads are flat. */
static uint32_t errors_of_list(select_job *job, const plan *p, uint64_t list) {
    uint32_t heads = kv_heads(job), flat = 0;
    stage_scratch stage = stage_of(job, p);
    sample *own = stage.samples + list * heads;
    for (uint32_t head = 0; head < heads; head++) {
        float error = sqrtf(own[head].squares / own[head].count);
        stage.slacks[list * heads + head] =
            job->args->by.errors * sqrtf(own[head].scaled / own[head].count);
        flat += is_flat(job, &own[head], error);
        job->args->found.mean_error += error;
    }
    return flat;
}

void sketch_errors_all(select_job *job) {
    cxlkv_scored *found = &job->args->found;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        plan *p = &job->plans[i];
        uint64_t flat = 0, lists = p->stage ? lists_of(job, p) : 0;
        float before = found->mean_error;
        for (uint64_t list = 0; p->stage && list < p->lists; list++)
            flat += errors_of_list(job, p, list);
        if (2 * flat <= lists) {
            found->lists_staged += (uint32_t)lists;
        } else {
            p->stage = NULL;
            found->mean_error = before;
        }
    }
    if (found->lists_staged) found->mean_error /= (float)found->lists_staged;
}
