/* Select in two stages: logits are estimated from sketches, and tokens that may matter are scored
 * by their keys. docs/decisions/0011-sketch.md has the measurements.
 *
 * A sample of the pages says, for each list and head, where the worst page that will be chosen lies
 * among estimates, and how far estimates are off (root mean square, in units of the token's scale).
 * Tokens whose estimate is more than `errors` of those below that page are left alone; of the
 * others the keys are read, token by token. A page with such tokens has the best of their true
 * scores, one without its best estimate, which is below the others. An estimate that is no number
 * is never trusted. */
#include <math.h>

#include "select.h"

/* Tokens wait until many are found, while their keys are on the way: each lies in a page of memory
 * of its own, and most of the time goes by until it is there. */
enum {
    SAMPLE_PAGES = 256,
    SAMPLE_SCORED = 32,
    SAMPLE_AHEAD = 6,
    HEADS_TOGETHER = 16,
    WAITING_MAX = 96
};
/* Where more of the sample than this would be read anyway, keys are read in order, as fast. */
static const float SHARE_MAX = 0.8f;

/* Of a list and head: the best estimate of each page of the sample, then squares and count. */
typedef struct sample {
    float maxima[SAMPLE_PAGES];
    float squares, scaled, count; /* of errors, as they are and over the scale */
} sample;

static uint32_t kv_heads(const select_job *job) { return job->batch->pool->layout.kv_heads; }
static uint64_t lists_of(const select_job *job, const plan *p) { return p->lists * kv_heads(job); }

/* The pages of a list that are neither forced in nor incomplete: those it may leave out. */
static uint32_t free_pages(const plan *p, const window *w, uint32_t *first) {
    uint32_t last = min_u32(w->recent, p->view.complete);
    *first = w->sinks;
    return last > w->sinks ? last - w->sinks : 0;
}

/* Pages of few tokens have much of a sketch's 16 empty. */
bool sketch_is_for(const select_job *job, const plan *p) {
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

uint64_t sketch_plan_floats(const select_job *job, const plan *p) {
    uint64_t floats = 2 + sizeof(sample) / sizeof(float);
    return sketch_is_for(job, p) ? align_up(lists_of(job, p) * floats, 16) : 0;
}

static float *slacks_of(const select_job *job, const plan *p) {
    return p->thresholds + lists_of(job, p);
}

static sample *samples_of(const select_job *job, const plan *p) {
    return (sample *)(p->thresholds + 2 * lists_of(job, p));
}

void sketch_prepare(select_job *job, float *scratch) {
    uint32_t dim = job->batch->pool->layout.head_dim, count = job->queries.total;
    int8_t *codes = (int8_t *)scratch;
    sketch_query *made = (sketch_query *)(codes + align_up((uint64_t)count * sketch_dim(dim), 64));
    sketch_queries(job->queries.rows, count, dim, job->args->scale, codes, made);
    job->sketch_queries = made;
}

/* ---- estimates ---- */

typedef struct page_sketch {
    const uint8_t *blocks;       /* of head 0 */
    page_rows keys;
} page_sketch;

static page_sketch sketch_of(const select_job *job, const plan *p, uint32_t index) {
    uint32_t page = sequence_page(p->view.sequence, p->view.part, index);
    return (page_sketch){pieces_of(job->batch->pool, page, p->view.layer, PIECE_SKETCH),
                         view_rows(&p->view, index, PIECE_KEYS)};
}

static const uint8_t *block_of(const select_job *job, const page_sketch *page, uint32_t head,
                               uint32_t block) {
    const cxlkv_pool *pool = job->batch->pool;
    return page->blocks + head * pool->geometry.sketch_piece_bytes +
           block * sketch_block_bytes(pool->layout.head_dim);
}

static const float *scales_of(const select_job *job, const page_sketch *page, uint32_t head,
                              uint32_t block) {
    uint64_t bytes = sketch_block_bytes(job->batch->pool->layout.head_dim) - SKETCH_LINE_BYTES;
    return (const float *)(block_of(job, page, head, block) + bytes);
}

/* Of the 16 tokens from 16 * block on, those in [first, last). */
static uint32_t seen_bits(uint32_t block, uint32_t first, uint32_t last) {
    uint32_t at = block * SKETCH_TOKENS;
    uint32_t low = first > at ? min_u32(first - at, 16) : 0;
    uint32_t high = last > at ? min_u32(last - at, 16) : 0;
    return high > low ? ((1u << (high - low)) - 1) << low : 0;
}

/* Larger, and NaN above all. */
static bool is_better(float value, float than) {
    return value > than || (isnan(value) && !isnan(than));
}

/* ---- the sample ---- */

/* Which queries list `list` of a plan has in a head. */
static uint64_t queries_of_list(const select_job *job, const plan *p, uint64_t list, uint32_t head,
                                uint32_t *count) {
    bool one_list = job->args->per == CXLKV_PER_SEQUENCE;
    *count = (uint32_t)(one_list ? p->rows : 1) * job->group;
    return p->first_query + ((uint64_t)head * p->rows + (one_list ? 0 : list)) * job->group;
}

/* Errors of 16 tokens, or what a page has of them. */
static void sample_errors(const select_job *job, const page_sketch *page, uint32_t head,
                          uint64_t first, uint32_t count, uint32_t first_token,
                          const float *estimates, sample *made) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    const float *scales = scales_of(job, page, head, first_token / SKETCH_TOKENS);
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
            .seen = seen_bits(block, 0, layout->page_tokens), .thresholds = &never,
            .slacks = &none, .next = block_of(job, &later, head, block), .maxima = estimates};
        job->isa->estimate(&blocks, &got);
        if (is_better(got.best, *best)) *best = got.best;
        if (with_errors) sample_errors(job, &page, head, first, count, t, estimates, made);
    }
    return 0;
}

static int sample_list(select_job *job, const plan *p, uint64_t list, uint32_t head) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    sample *made = samples_of(job, p) + list * layout->kv_heads + head;
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

/* The wanted-th best of the sample; -infinity when one is no number. */
static float best_in_order(const float *values, uint32_t wanted) {
    float best[SAMPLE_PAGES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < SAMPLE_PAGES; i++) {
        if (isnan(values[i])) return -INFINITY;
        if (count == wanted && values[i] <= best[count - 1]) continue;
        uint32_t at = count < wanted ? count++ : count - 1;
        for (; at > 0 && best[at - 1] < values[i]; at--) best[at] = best[at - 1];
        best[at] = values[i];
    }
    return best[count - 1];
}

/* How many of the sample may be chosen: a chance of 1 in 40 that it is one more. */
static uint32_t sample_share(const plan *p, const window *w) {
    uint32_t first, pages = free_pages(p, w, &first);
    uint32_t forced = w->sinks - w->low + w->pages - w->recent;
    float wanted = (float)(w->k > forced ? w->k - forced : 1) / (float)pages * SAMPLE_PAGES;
    return min_u32(SAMPLE_PAGES, (uint32_t)(wanted + 2 * sqrtf(wanted)) + 1);
}

/* Returns how many of its heads spare little. */
static uint32_t cut_list(select_job *job, const plan *p, uint64_t list) {
    uint32_t heads = kv_heads(job);
    window w = window_of(job, p, list);
    sample *own = samples_of(job, p) + list * heads;
    uint32_t wanted = sample_share(p, &w), flat = 0;
    bool layer = job->args->union_over == CXLKV_UNION_LAYER;
    for (uint32_t head = 1; layer && head < heads; head++)
        for (uint32_t i = 0; i < SAMPLE_PAGES; i++)
            if (is_better(own[head].maxima[i], own[0].maxima[i]))
                own[0].maxima[i] = own[head].maxima[i];
    for (uint32_t head = 0; head < heads; head++) {
        float error = sqrtf(own[head].squares / own[head].count);
        float slack = job->args->errors * sqrtf(own[head].scaled / own[head].count);
        float cut = best_in_order(own[layer ? 0 : head].maxima, wanted);
        bool known = isfinite(cut) && isfinite(slack);
        p->thresholds[list * heads + head] = known ? cut : -INFINITY;
        slacks_of(job, p)[list * heads + head] = known ? slack : 0;
        uint32_t passing = 0;
        for (uint32_t i = 0; i < SAMPLE_PAGES; i++)
            passing += !(own[head].maxima[i] < cut - job->args->errors * error);
        flat += isfinite(job->args->errors) && (float)passing > SHARE_MAX * SAMPLE_PAGES;
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

/* ---- the scan ---- */

/* Tokens of one head that are to be scored by their keys, by the same queries. */
typedef struct waiting {
    uint32_t count;
    const void *keys[WAITING_MAX];
    float *scores[WAITING_MAX];  /* of their pages */
} waiting;

/* A run of pages for one list and some heads. */
typedef struct scan {
    const select_job *job;
    const plan *p;
    uint64_t list;
    uint32_t head_first, head_count;
    uint64_t row, rows;          /* whose queries are meant now */
    uint64_t tokens;             /* scored by their keys */
    waiting waits[HEADS_TOGETHER];
} scan;

static uint64_t first_query_of(const scan *s, uint32_t head) {
    return s->p->first_query + ((uint64_t)head * s->p->rows + s->row) * s->job->group;
}

static void score_waiting(scan *s, uint32_t head) {
    const cxlkv_layout *layout = &s->job->batch->pool->layout;
    waiting *w = &s->waits[head - s->head_first];
    kernel_queries queries = queries_range(s->job->queries, first_query_of(s, head),
                                           (uint32_t)s->rows * s->job->group);
    float best[WAITING_MAX];
    kernels_score_each(s->job->isa, (int)layout->dtype, w->keys, w->count, layout->head_dim,
                       &queries, s->job->args->scale, best);
    for (uint32_t i = 0; i < w->count; i++)
        if (is_better(best[i], *w->scores[i])) *w->scores[i] = best[i];
    s->tokens += w->count;
    w->count = 0;
}

static void score_all_waiting(scan *s) {
    for (uint32_t i = 0; i < s->head_count; i++)
        if (s->waits[i].count) score_waiting(s, s->head_first + i);
}

/* The key is asked for at once, to be here when it is scored. */
static void wait_for(scan *s, uint32_t head, const uint8_t *key, size_t key_bytes, float *score) {
    waiting *w = &s->waits[head - s->head_first];
    for (size_t at = 0; at < key_bytes; at += LINE_BYTES) __builtin_prefetch(key + at, 0, 2);
    if (w->count == WAITING_MAX) score_waiting(s, head);
    w->keys[w->count] = key;
    w->scores[w->count++] = score;
}

/* What the estimates of a page say, by head. */
typedef struct found {
    float best;
    bool waits;                  /* at least one token does */
} found;

/* Tokens [hidden, visible) of a page, which the scan's rows see. */
static void scan_tokens(scan *s, const page_sketch *page, uint32_t index, uint32_t hidden,
                        uint32_t visible, const page_sketch *next, found *heads) {
    const cxlkv_layout *layout = &s->job->batch->pool->layout;
    size_t key_bytes = layout->head_dim * dtype_bytes(layout->dtype);
    uint64_t list = s->list * layout->kv_heads + s->head_first;
    float *scores = s->p->scores + list * s->p->view.pages + index;
    sketch_estimate got[HEADS_TOGETHER];
    sketch_blocks blocks = {
        .stride_bytes = s->job->batch->pool->geometry.sketch_piece_bytes, .count = s->head_count,
        .dim = layout->head_dim,
        .queries = s->job->sketch_queries + first_query_of(s, s->head_first),
        .query_stride = s->p->rows * s->job->group,
        .query_count = (uint32_t)s->rows * s->job->group,
        .thresholds = s->p->thresholds + list, .slacks = slacks_of(s->job, s->p) + list};
    for (uint32_t block = hidden / SKETCH_TOKENS; block * SKETCH_TOKENS < visible; block++) {
        blocks.first = block_of(s->job, page, s->head_first, block);
        blocks.next = next ? block_of(s->job, next, s->head_first, block) : NULL;
        blocks.seen = seen_bits(block, hidden, visible);
        s->job->isa->estimate(&blocks, got);
        for (uint32_t i = 0; i < s->head_count; i++) {
            uint32_t head = s->head_first + i;
            const uint8_t *keys = page->keys.first + head * page->keys.head_bytes +
                                  block * SKETCH_TOKENS * page->keys.row_bytes;
            if (got[i].best > heads[i].best) heads[i].best = got[i].best;
            heads[i].waits |= got[i].passing != 0;
            for (uint32_t bits = got[i].passing; bits; bits &= bits - 1)
                wait_for(s, head, keys + (uint32_t)__builtin_ctz(bits) * page->keys.row_bytes,
                         key_bytes, scores + (uint64_t)i * s->p->view.pages);
        }
    }
}

/* The rows of the scan change: what waits is for those before. */
static void turn_to(scan *s, uint64_t row, uint64_t rows) {
    if (s->row == row && s->rows == rows) return;
    score_all_waiting(s);
    s->row = row, s->rows = rows;
}

static int scan_page(scan *s, uint32_t index, const page_sketch *next) {
    const plan *p = s->p;
    bool one_list = s->job->args->per == CXLKV_PER_SEQUENCE;
    uint64_t end = one_list ? p->rows : s->list + 1, rows;
    page_sketch page = sketch_of(s->job, p, index);
    found heads[HEADS_TOGETHER];
    int code = view_verify(&p->view, index);
    if (code < 0) return code;
    for (uint32_t i = 0; i < s->head_count; i++) heads[i] = (found){-INFINITY, false};
    for (uint64_t row = one_list ? 0 : s->list; row < end; row += rows) {
        uint32_t visible = view_visible(&p->view, index, row, p->rows);
        uint32_t hidden = view_hidden(&p->view, index, row, p->rows);
        rows = view_together(&p->view, index, row, p->rows, end - row);
        if (hidden >= visible) continue;
        turn_to(s, row, rows);
        scan_tokens(s, &page, index, hidden, visible, next, heads);
    }
    float *scores = p->scores + index +
                    (s->list * kv_heads(s->job) + s->head_first) * p->view.pages;
    for (uint32_t i = 0; i < s->head_count; i++)
        if (!heads[i].waits) scores[(uint64_t)i * p->view.pages] = heads[i].best;
    return 0;
}

/* Pages [first, last), all with sketches. */
static int scan_list(scan *s, uint32_t first, uint32_t last) {
    const cxlkv_pool *pool = s->job->batch->pool;
    ahead next = ahead_begin(&s->p->view, PIECE_SKETCH, NULL, first, last, s->head_first,
                             s->head_first + s->head_count, true);
    s->row = s->rows = 0;
    for (uint32_t i = 0; i < s->head_count; i++) s->waits[i].count = 0;
    for (uint32_t index = first; index < last; index++) {
        page_sketch later = {.blocks = ahead_next(&next)};
        if (later.blocks) later.blocks -= s->head_first * pool->geometry.sketch_piece_bytes;
        int code = scan_page(s, index, later.blocks ? &later : NULL);
        if (code < 0) return code;
    }
    score_all_waiting(s);
    return 0;
}

int sketch_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last,
                       bool counts) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    window w = window_of(job, p, 0);
    uint32_t start, end = free_pages(p, &w, &start) + start;
    uint64_t token_bytes = layout->head_dim * dtype_bytes(layout->dtype), bytes = 0;
    start = start < first ? first : min_u32(start, last);
    end = min_u32(end, last) < start ? start : min_u32(end, last);
    for (uint32_t index = first; index < last; index++) {
        if (index >= start && index < end) continue;
        int code = score_page(job, p, index, NULL);
        if (code < 0) return code;
        bytes += counts * layout->kv_heads * token_bytes * view_filled(&p->view, index);
    }
    scan s; /* large: only its head is set */
    s.job = job, s.p = p, s.tokens = 0;
    for (uint32_t head = 0; head < layout->kv_heads; head += HEADS_TOGETHER) {
        s.head_first = head;
        s.head_count = min_u32(HEADS_TOGETHER, layout->kv_heads - head);
        for (s.list = 0; s.list < p->lists; s.list++) {
            int code = scan_list(&s, start, end);
            if (code < 0) return code;
        }
    }
    uint64_t sketched = counts ? end - start : 0;
    sketched *= layout->kv_heads * job->batch->pool->geometry.sketch_piece_bytes;
    bytes += sketched + s.tokens * token_bytes;
    atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, sketched, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->tokens_scored, s.tokens, memory_order_relaxed);
    return 0;
}
