/* Select in two stages: logits are estimated from sketches, and tokens that may matter are scored
 * by their keys. docs/decisions/0011-sketch.md has the measurements.
 *
 * Here a sample of the pages says, for each list and head, where the worst page that will be chosen
 * lies among estimates at least, and how far estimates are off (root mean square, in units of the
 * token's scale). Tokens whose estimate is more than `errors` of those below the worst page are
 * left alone; of the others the keys are read, token by token (select_scan.c). A page with such
 * tokens has the best of their true scores, one without its best estimate, which is below the
 * others. An estimate that is no number is never trusted. */
#include "ndp/select_sketch.h"

enum { SAMPLE_SCORED = 16, SAMPLE_AHEAD = 6, CANDIDATES_BYTES_MAX = 64 << 20 };
/* Where keys of more pages than this would be read anyway, they are read in order, as fast. */
static const float SHARE_MAX = 0.9f;

/* Is it worth while? Pages of few tokens have much of a sketch's 16 empty. */
static bool sketch_is_for(const select_job *job, const plan *p) {
    const cxlkv_pool *pool = job->batch->pool;
    if (job->args->method != CXLKV_METHOD_TWO_STAGE || p->rows == 0 ||
        2 * pool->geometry.sketch_piece_bytes > piece_data_bytes(&pool->layout, PIECE_KEYS))
        return false;
    window w = window_of(job, p, 0);
    uint32_t first, pages = free_pages(p, &w, &first);
    return pages >= 4 * SAMPLE_PAGES && pages >= job->staged_pages_min && w.k <= pages / 2;
}

/* ---- scratch ---- */

uint64_t sketch_query_floats(const select_job *job, uint64_t query_count) {
    uint64_t codes = align_up(query_count * sketch_dim(job->batch->pool->layout.head_dim), 64);
    return (codes + align_up(query_count * sizeof(sketch_query), 64)) / sizeof(float);
}

/* How many of the sample will be chosen, by and large. */
static uint32_t sample_likely(const plan *p, const window *w) {
    uint32_t first, pages = free_pages(p, w, &first), choices = free_choices(w);
    return (uint32_t)((float)(choices ? choices : 1) / (float)pages * SAMPLE_PAGES) + 1;
}

/* And at most: a chance of 1 in 700 that it is one more. */
static uint32_t sample_share(const plan *p, const window *w) {
    float likely = (float)sample_likely(p, w);
    return min_u32(SAMPLE_PAGES, (uint32_t)(likely + 3 * sqrtf(likely)));
}

static uint64_t chunks_of(const select_job *job) {
    return (kv_heads(job) + HEADS_TOGETHER - 1) / HEADS_TOGETHER;
}

/* The arrays of lists and heads, then counts, then candidates. */
static uint64_t counts_offset(uint64_t lists) {
    return lists * (3 + sizeof(sample) / sizeof(float));
}

static uint64_t sections_of(const select_job *job, const plan *p) {
    return (uint64_t)sketch_segments(p) * chunks_of(job) * p->lists;
}

/* Room for what a segment keeps of a list and some heads: half as much again as on even keys, where
 * some 10 tokens of each page that may be chosen pass; less where there are many lists. */
static uint32_t capacity_of(const select_job *job, const plan *p) {
    uint32_t page_tokens = job->batch->pool->layout.page_tokens, share = 0;
    for (uint64_t list = 0; list < p->lists; list++) {
        window w = window_of(job, p, list);
        uint32_t wanted = sample_share(p, &w);
        if (wanted > share) share = wanted;
    }
    uint32_t heads = min_u32(kv_heads(job), HEADS_TOGETHER), tokens = TASK_PAGES * page_tokens;
    uint32_t kept = heads * min_u32(tokens, tokens * share / SAMPLE_PAGES + TASK_PAGES);
    uint64_t most = CANDIDATES_BYTES_MAX / sizeof(candidate_token) / sections_of(job, p);
    return (uint32_t)min_u64(kept, most);
}

static uint64_t candidates_offset(const select_job *job, const plan *p) {
    return align_up(counts_offset(lists_of(job, p)) + sections_of(job, p), 2);
}

uint64_t sketch_plan_floats(const select_job *job, const plan *p) {
    if (!sketch_is_for(job, p)) return 0;
    uint64_t candidates = sections_of(job, p) * capacity_of(job, p);
    return align_up(candidates_offset(job, p) + 2 * candidates, 16);
}

void sketch_begin(const select_job *job, plan *p, float *scratch) {
    p->thresholds = scratch;
    p->candidates_max = capacity_of(job, p);
    memset(stage_of(job, p).counts, 0, sections_of(job, p) * sizeof(uint32_t));
}

stage_scratch stage_of(const select_job *job, const plan *p) {
    uint64_t lists = lists_of(job, p);
    float *at = p->thresholds;
    return (stage_scratch){
        .thresholds = at, .slacks = at + lists, .cuts = at + 2 * lists,
        .samples = (sample *)(at + 3 * lists), .chunks = (uint32_t)chunks_of(job),
        .capacity = p->candidates_max, .counts = (uint32_t *)(at + counts_offset(lists)),
        .candidates = (candidate_token *)(at + candidates_offset(job, p))};
}

void sketch_prepare(select_job *job, float *scratch) {
    uint32_t dim = job->batch->pool->layout.head_dim, count = job->queries.total;
    int8_t *codes = (int8_t *)scratch;
    sketch_query *made = (sketch_query *)(codes + align_up((uint64_t)count * sketch_dim(dim), 64));
    sketch_queries(job->queries.rows, count, dim, job->args->scale, codes, made);
    job->sketch_queries = made;
}

/* ---- the sample ---- */

/* Errors of 16 tokens, or what a page has of them. */
static void sample_errors(const select_job *job, const page_sketch *page, uint32_t head,
                          uint64_t first, uint32_t count, uint32_t first_token,
                          const float *estimates, sample *made) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    const float *scales =
        scales_of(job, block_of(job, page, head, first_token / SKETCH_TOKENS));
    const void *keys[SKETCH_TOKENS];
    float scores[SKETCH_TOKENS];
    uint32_t tokens = min_u32(layout->page_tokens - first_token, SKETCH_TOKENS);
    kernel_queries queries = queries_range(job->queries, first, count);
    for (uint32_t t = 0; t < tokens; t++)
        keys[t] = page->keys.first + head * page->keys.head_bytes +
                  (first_token + t) * page->keys.row_bytes;
    kernels_score_each(job->isa, (int)layout->dtype, keys, tokens, layout->head_dim, &queries,
                       job->args->scale, scores);
    for (uint32_t t = 0; t < tokens; t++) {
        float error = estimates[t] - scores[t];
        made->squares += error * error;
        made->count++;
        if (scales[t] != 0) made->scaled += error / scales[t] * error / scales[t];
    }
}

/* Page i of the sample; behind the last one that. */
static uint32_t sampled(uint32_t start, uint32_t pages, uint32_t i) {
    i = min_u32(i, SAMPLE_PAGES - 1);
    return start + (uint32_t)((2ull * i + 1) * pages / (2 * SAMPLE_PAGES));
}

static int sample_page(select_job *job, const plan *p, uint32_t head, uint64_t first,
                       uint32_t count, uint32_t index, uint32_t next, bool with_errors,
                       sample *made, float *best) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    const float never = INFINITY, none = 0;
    int code = view_verify(&p->view, index);
    if (code < 0) return code;
    page_sketch page = sketch_of(job, p, index), later = sketch_of(job, p, next);
    *best = -INFINITY;
    for (uint32_t t = 0; t < layout->page_tokens; t += SKETCH_TOKENS) {
        uint32_t block = t / SKETCH_TOKENS;
        float estimates[SKETCH_TOKENS];
        sketch_estimate got;
        sketch_blocks blocks = {
            .first = block_of(job, &page, head, block), .count = 1, .dim = layout->head_dim,
            .queries = job->sketch_queries + first, .query_count = count,
            .seen = block_tokens(job, block), .thresholds = &never,
            .slacks = &none, .next = block_of(job, &later, head, block), .maxima = estimates};
        job->isa->estimate(&blocks, &got);
        if (is_better(got.best, *best)) *best = got.best;
        if (with_errors) sample_errors(job, &page, head, first, count, t, estimates, made);
    }
    return 0;
}

static int sample_list(select_job *job, const plan *p, uint64_t list, uint32_t head) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    sample *made = stage_of(job, p).samples + list * layout->kv_heads + head;
    window w = window_of(job, p, list);
    uint32_t start, count, pages = free_pages(p, &w, &start);
    uint64_t first = queries_of_list(job, p, list, head, &count);
    made->squares = made->scaled = made->count = 0;
    for (uint32_t i = 0; i < SAMPLE_PAGES; i++) {
        int code = sample_page(job, p, head, first, count, sampled(start, pages, i),
                               sampled(start, pages, i + SAMPLE_AHEAD),
                               i % (SAMPLE_PAGES / SAMPLE_SCORED) == 0, made, &made->maxima[i]);
        if (code < 0) return code;
    }
    uint64_t sketched = SAMPLE_PAGES * job->batch->pool->geometry.sketch_piece_bytes;
    uint64_t scored = (uint64_t)SAMPLE_SCORED * layout->page_tokens * layout->head_dim *
                      dtype_bytes(layout->dtype);
    atomic_fetch_add_explicit(&job->bytes_scored, sketched + scored, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, sketched, memory_order_relaxed);
    return 0;
}

int sketch_sample_task(void *context, uint32_t item) {
    select_job *job = context;
    const plan *p = &job->plans[item / kv_heads(job)];
    if (!p->thresholds) return 0;
    for (uint64_t list = 0; list < p->lists; list++) {
        int code = sample_list(job, p, list, item % kv_heads(job));
        if (code < 0) return code;
    }
    return 0;
}

/* The `wanted` best of the sample, best first; none are when one is no number. */
static void best_in_order(const float *values, uint32_t wanted, float *best) {
    uint32_t count = 0;
    bool broken = false;
    for (uint32_t i = 0; i < SAMPLE_PAGES; i++) {
        broken |= isnan(values[i]);
        if (count == wanted && values[i] <= best[count - 1]) continue;
        uint32_t at = count < wanted ? count++ : count - 1;
        for (; at > 0 && best[at - 1] < values[i]; at--) best[at] = best[at - 1];
        best[at] = values[i];
    }
    for (uint32_t i = 0; broken && i < wanted; i++) best[i] = -INFINITY;
}

/* A head that spares little: nearly all pages have a token that passes, so some two of each. */
static bool is_flat(const select_job *job, const sample *own, float worst, float error) {
    uint32_t passing = 0;
    for (uint32_t i = 0; i < SAMPLE_PAGES; i++)
        passing += !(own->maxima[i] < worst - job->args->errors * error);
    return isfinite(job->args->errors) && (float)passing > SHARE_MAX * SAMPLE_PAGES;
}

/* Returns how many of its heads spare little. */
static uint32_t cut_list(select_job *job, const plan *p, uint64_t list) {
    uint32_t heads = kv_heads(job);
    window w = window_of(job, p, list);
    stage_scratch stage = stage_of(job, p);
    sample *own = stage.samples + list * heads;
    uint32_t likely = sample_likely(p, &w), wanted = sample_share(p, &w), flat = 0;
    bool layer = job->args->union_over == CXLKV_UNION_LAYER;
    for (uint32_t head = 1; layer && head < heads; head++)
        for (uint32_t i = 0; i < SAMPLE_PAGES; i++)
            if (is_better(own[head].maxima[i], own[0].maxima[i]))
                own[0].maxima[i] = own[head].maxima[i];
    for (uint32_t head = 0; head < heads; head++) {
        float best[SAMPLE_PAGES], error = sqrtf(own[head].squares / own[head].count);
        float slack = job->args->errors * sqrtf(own[head].scaled / own[head].count);
        best_in_order(own[layer ? 0 : head].maxima, wanted, best);
        bool known = isfinite(best[wanted - 1]) && isfinite(slack);
        stage.thresholds[list * heads + head] = known ? best[wanted - 1] : -INFINITY;
        stage.slacks[list * heads + head] = known ? slack : 0;
        flat += is_flat(job, &own[head], best[likely - 1], error);
        job->args->mean_error += error;
    }
    return flat;
}

void sketch_cut_all(select_job *job) {
    for (uint32_t i = 0; i < job->batch->count; i++) {
        plan *p = &job->plans[i];
        uint64_t flat = 0, lists = p->thresholds ? lists_of(job, p) : 0;
        float before = job->args->mean_error;
        for (uint64_t list = 0; p->thresholds && list < p->lists; list++)
            flat += cut_list(job, p, list);
        if (2 * flat <= lists) {
            job->args->lists_staged += (uint32_t)lists;
        } else {
            p->thresholds = NULL;
            job->args->mean_error = before;
        }
    }
    if (job->args->lists_staged) job->args->mean_error /= (float)job->args->lists_staged;
}
