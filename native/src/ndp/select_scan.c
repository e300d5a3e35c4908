/* Two-stage select, the scan: estimates of all tokens, then the keys of those that may matter.
 *
 * The scan goes by thresholds of a sample, which are a bit low, and keeps the tokens that pass.
 * Then all estimates are known, and with them the one of the worst page to be chosen: only tokens
 * that may be above that are scored. Where more passed than there is room for, sketches are read
 * once more. Either way it is the same tokens, on any number of threads.
 *
 * Both go by segments, runs of pages of one task, and score all heads of a page one after another:
 * each key lies in a page of memory of its own, and neighbours are translated together. */
#include <stdlib.h>

#include "ndp/select_sketch.h"

enum { WAITING_MAX = 64, SCORED_TOGETHER = 16 };

/* ---- segments ---- */

/* Forks have segments of their own, in the leader's tasks. */
static uint32_t segment_of(const plan *p, uint32_t page) {
    if (p->leader && page < p->shared) return (page - p->leader->low) / TASK_PAGES;
    return shared_segments(p) + (page - first_own_page(p)) / TASK_PAGES;
}

/* Its pages that the plan has. */
static uint32_t segment_first(const plan *p, uint32_t segment) {
    uint32_t shared = shared_segments(p);
    if (segment >= shared) return first_own_page(p) + (segment - shared) * TASK_PAGES;
    return p->leader->low + segment * TASK_PAGES;
}

static uint32_t segment_end(const plan *p, uint32_t segment) {
    uint32_t end = segment_first(p, segment) + TASK_PAGES;
    return min_u32(end, segment < shared_segments(p) ? p->shared : p->view.pages);
}

/* ---- the keys of single tokens ---- */

/* Tokens of one list and head whose keys were asked for, and wait until some are together. */
typedef struct waiting {
    uint32_t count;
    const void *keys[WAITING_MAX];
    uint8_t pages[WAITING_MAX];  /* of the segment */
} waiting;

/* A run of pages for one list and some heads. */
typedef struct scan {
    const select_job *job;
    const plan *p;
    stage_scratch stage;
    uint64_t list;
    uint32_t head_first, head_count;
    uint32_t segment, first;     /* its first page */
    const float *thresholds;     /* [head_count] */
    bool scores;                 /* what passes; else it is kept */
    uint64_t scored;
    waiting waits[HEADS_TOGETHER];
    /* The best true score of each page that has one. */
    float trues[HEADS_TOGETHER][TASK_PAGES];
    uint64_t known[HEADS_TOGETHER]; /* a bit for each page */
} scan;

static void score_first(scan *s, uint32_t i, uint32_t count) {
    const cxlkv_layout *layout = &s->job->batch->pool->layout;
    waiting *w = &s->waits[i];
    float best[WAITING_MAX];
    uint32_t query_count;
    uint64_t first = queries_of_list(s->job, s->p, s->list, s->head_first + i, &query_count);
    kernel_queries queries = queries_range(s->job->queries, first, query_count);
    kernels_score_each(s->job->isa, (int)layout->dtype, w->keys, count, layout->head_dim, &queries,
                       s->job->args->scale, best);
    for (uint32_t at = 0; at < count; at++) {
        uint64_t bit = 1ull << w->pages[at];
        float *score = &s->trues[i][w->pages[at]];
        if (!(s->known[i] & bit) || is_better(best[at], *score)) *score = best[at];
        s->known[i] |= bit;
    }
    s->scored += count;
    w->count -= count;
    memmove(w->keys, w->keys + count, w->count * sizeof(*w->keys));
    memmove(w->pages, w->pages + count, w->count * sizeof(*w->pages));
}

/* The key is asked for at once, to be here when it is scored. */
static void wait_for(scan *s, uint32_t i, uint32_t page, const uint8_t *key) {
    waiting *w = &s->waits[i];
    const cxlkv_layout *layout = &s->job->batch->pool->layout;
    size_t key_bytes = layout->head_dim * dtype_bytes(layout->dtype);
    for (size_t at = 0; at < key_bytes; at += LINE_BYTES) __builtin_prefetch(key + at);
    if (w->count == WAITING_MAX) score_first(s, i, SCORED_TOGETHER);
    w->keys[w->count] = key;
    w->pages[w->count++] = (uint8_t)page;
}

/* ---- the scan ---- */

/* A token as it is kept: head of the scan, page of the segment, token of the page. */
static uint32_t place_of(uint32_t i, uint32_t page, uint32_t token, uint32_t page_tokens) {
    return i * TASK_PAGES * page_tokens + page * page_tokens + token;
}

/* Room and count of the tokens that are kept of a list and some heads. */
static candidate_token *section_of(const scan *s, uint32_t **count) {
    uint64_t chunk = s->head_first / HEADS_TOGETHER;
    uint64_t section = (s->segment * (uint64_t)s->stage.chunks + chunk) * s->p->lists + s->list;
    *count = &s->stage.counts[section];
    return s->stage.candidates + section * s->stage.capacity;
}

static int scan_page(scan *s, uint32_t index, const page_sketch *next) {
    const select_job *job = s->job;
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint64_t list = s->list * layout->kv_heads + s->head_first;
    const float *slacks = s->stage.slacks + list;
    float *scores = s->p->scores + list * s->p->view.pages + index;
    float estimates[HEADS_TOGETHER][SKETCH_TOKENS], best[HEADS_TOGETHER];
    sketch_estimate got[HEADS_TOGETHER];
    page_sketch page = sketch_of(job, s->p, index);
    sketch_blocks blocks = {
        .stride_bytes = job->batch->pool->geometry.sketch_piece_bytes, .count = s->head_count,
        .dim = layout->head_dim, .query_stride = s->p->block,
        .thresholds = s->thresholds, .slacks = slacks, .maxima = estimates[0]};
    uint32_t *count, here = index - s->first;
    candidate_token *kept = section_of(s, &count);
    blocks.queries = job->sketch_queries +
                     queries_of_list(job, s->p, s->list, s->head_first, &blocks.query_count);
    int code = view_verify(&s->p->view, index);
    if (code < 0) return code;
    for (uint32_t i = 0; i < s->head_count; i++) best[i] = -INFINITY;
    for (uint32_t block = 0; block * SKETCH_TOKENS < layout->page_tokens; block++) {
        blocks.first = block_of(job, &page, s->head_first, block);
        blocks.next = next ? block_of(job, next, s->head_first, block) : NULL;
        blocks.seen = block_tokens(job, block);
        job->isa->estimate(&blocks, got);
        for (uint32_t i = 0; i < s->head_count; i++) {
            if (is_better(got[i].best, best[i])) best[i] = got[i].best;
            for (uint32_t bits = got[i].passing; bits; bits &= bits - 1) {
                uint32_t t = (uint32_t)__builtin_ctz(bits), token = block * SKETCH_TOKENS + t;
                if (s->scores) {
                    wait_for(s, i, here, page.keys.first + token * page.keys.row_bytes +
                                             (s->head_first + i) * page.keys.head_bytes);
                } else if ((*count)++ < s->stage.capacity) {
                    const float *scales = scales_of(job, blocks.first + i * blocks.stride_bytes);
                    kept[*count - 1] = (candidate_token){
                        estimates[i][t] + slacks[i] * scales[t],
                        place_of(i, here, token, layout->page_tokens)};
                }
            }
        }
    }
    for (uint32_t i = 0; !s->scores && i < s->head_count; i++)
        scores[(uint64_t)i * s->p->view.pages] = best[i];
    return 0;
}

/* All rows see all of a free page, or it is scored by its keys. */
static bool is_sketched(const plan *p, uint32_t index) {
    return view_whole(&p->view, index, 0, p->rows, p->rows);
}

/* Pages [first, last) of the scan's segment, which are free. */
static int scan_pages(scan *s, uint32_t first, uint32_t last) {
    const cxlkv_pool *pool = s->job->batch->pool;
    uint32_t soon = min_u32(last + TASK_PAGES, s->p->view.pages);
    ahead next = ahead_begin(&s->p->view, PIECE_SKETCH, NULL, first, soon, s->head_first,
                             s->head_first + s->head_count, true);
    for (uint32_t index = first; index < last; index++) {
        page_sketch later = {.blocks = ahead_next(&next)};
        if (later.blocks) later.blocks -= s->head_first * pool->geometry.sketch_piece_bytes;
        if (!is_sketched(s->p, index)) continue;
        int code = scan_page(s, index, later.blocks ? &later : NULL);
        if (code < 0) return code;
    }
    return 0;
}

/* The free pages among [first, last): *first to the end that is returned. */
static uint32_t free_among(const select_job *job, const plan *p, uint32_t *first, uint32_t last) {
    window w = window_of(job, p, 0);
    uint32_t start, end = free_pages(p, &w, &start) + start;
    start = start < *first ? *first : min_u32(start, last);
    *first = start;
    return min_u32(end, last) < start ? start : min_u32(end, last);
}

/* For each list and some heads in turn: `each`, until there is an error. */
static int scan_each(scan *s, int (*each)(scan *s, uint32_t first, uint32_t last), uint32_t first,
                     uint32_t last) {
    uint32_t heads = kv_heads(s->job);
    for (s->head_first = 0; s->head_first < heads; s->head_first += HEADS_TOGETHER)
        for (s->list = 0; s->list < s->p->lists; s->list++) {
            s->head_count = min_u32(HEADS_TOGETHER, heads - s->head_first);
            int code = each(s, first, last);
            if (code < 0) return code;
        }
    return 0;
}

static int keep_each(scan *s, uint32_t first, uint32_t last) {
    s->thresholds = s->stage.thresholds + s->list * kv_heads(s->job) + s->head_first;
    return scan_pages(s, first, last);
}

int sketch_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last,
                       bool counts) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint32_t start = first, end = free_among(job, p, &start, last), sketched = 0;
    uint64_t token_bytes = layout->head_dim * dtype_bytes(layout->dtype), bytes = 0;
    for (uint32_t index = first; index < last; index++) {
        bool is_free = index >= start && index < end && is_sketched(p, index);
        sketched += is_free && counts;
        if (is_free) continue;
        int code = score_page(job, p, index, NULL);
        if (code < 0) return code;
        bytes += counts * layout->kv_heads * token_bytes * view_filled(&p->view, index);
    }
    scan s; /* large: only its head is set */
    s.job = job, s.p = p, s.stage = stage_of(job, p), s.scores = false;
    s.segment = segment_of(p, first);
    s.first = segment_first(p, s.segment);
    int code = scan_each(&s, keep_each, start, end);
    if (code < 0) return code;
    uint64_t sketch = (uint64_t)sketched * layout->kv_heads *
                      job->batch->pool->geometry.sketch_piece_bytes;
    atomic_fetch_add_explicit(&job->bytes_scored, bytes + sketch, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, sketch, memory_order_relaxed);
    return 0;
}

/* ---- the second stage ---- */

/* What a list's worst chosen page has at least, by estimates: with those above all that may be
 * chosen is known. `ranks` and `merged` have room for all pages. */
static float cut_of(const select_job *job, const plan *p, uint64_t list, uint32_t head,
                    uint32_t *ranks, float *merged) {
    uint32_t heads = kv_heads(job), equal;
    window w = window_of(job, p, list);
    uint32_t pages = w.recent - w.sinks, wanted = free_choices(&w);
    const float *all = p->scores + list * heads * p->view.pages + w.sinks;
    const float *scores = all + head * (uint64_t)p->view.pages;
    float guess = stage_of(job, p).thresholds[list * heads + head];
    if (wanted == 0) return INFINITY;
    if (wanted >= pages || guess == -INFINITY) return guess; /* all tokens are wanted */
    if (job->args->union_over == CXLKV_UNION_LAYER) {
        memcpy(merged, all, pages * sizeof(*merged));
        for (uint32_t each = 1; each < heads; each++)
            for (uint32_t i = 0; i < pages; i++) {
                float score = all[each * (uint64_t)p->view.pages + i];
                if (is_better(score, merged[i])) merged[i] = score;
            }
        scores = merged;
    }
    float cut = kth_largest(scores, pages, wanted, guess, ranks, &equal);
    return cut > guess ? cut : guess; /* below the guess nothing was kept */
}

int sketch_cut_task(void *context, uint32_t item) {
    select_job *job = context;
    uint32_t head = item % kv_heads(job);
    const plan *p = &job->plans[item / kv_heads(job)];
    if (!p->thresholds) return 0;
    uint32_t *ranks = malloc(p->view.pages * 2ull * sizeof(*ranks));
    if (!ranks) return fail(ENOMEM, "no memory to choose among %u pages", p->view.pages);
    for (uint64_t list = 0; list < p->lists; list++)
        stage_of(job, p).cuts[list * kv_heads(job) + head] =
            cut_of(job, p, list, head, ranks, (float *)(ranks + p->view.pages));
    free(ranks);
    return 0;
}

/* Tokens that were kept, by what is known now; all of the segment's, if some were not. */
static int score_kept(scan *s, uint32_t first, uint32_t last) {
    uint32_t page_tokens = s->job->batch->pool->layout.page_tokens, *count;
    const candidate_token *kept = section_of(s, &count);
    if (*count > s->stage.capacity) return scan_pages(s, first, last);
    for (uint32_t at = 0; at < *count; at++) {
        uint32_t place = kept[at].place, i = place / (TASK_PAGES * page_tokens);
        if (kept[at].upper < s->thresholds[i]) continue;
        uint32_t page = place / page_tokens % TASK_PAGES;
        page_rows rows = view_rows(&s->p->view, s->first + page, PIECE_KEYS);
        wait_for(s, i, page, rows.first + (s->head_first + i) * rows.head_bytes +
                                 place % page_tokens * rows.row_bytes);
    }
    return 0;
}

static int finish_each(scan *s, uint32_t first, uint32_t last) {
    uint64_t list = s->list * kv_heads(s->job) + s->head_first;
    s->thresholds = s->stage.cuts + list;
    for (uint32_t i = 0; i < s->head_count; i++) s->waits[i].count = 0, s->known[i] = 0;
    int code = score_kept(s, first, last);
    for (uint32_t i = 0; code == 0 && i < s->head_count; i++) {
        float *scores = s->p->scores + (list + i) * s->p->view.pages + s->first;
        if (s->waits[i].count) score_first(s, i, s->waits[i].count);
        for (uint64_t bits = s->known[i]; bits; bits &= bits - 1)
            scores[__builtin_ctzll(bits)] = s->trues[i][__builtin_ctzll(bits)];
    }
    return code;
}

int sketch_finish_task(void *context, uint32_t item) {
    select_job *job = context;
    const cxlkv_layout *layout = &job->batch->pool->layout;
    const plan *p = job->plans;
    for (; item >= sketch_segments(p); p++) item -= sketch_segments(p);
    if (!p->thresholds) return 0;
    scan s; /* large: only its head is set */
    s.job = job, s.p = p, s.stage = stage_of(job, p), s.scores = true, s.scored = 0;
    s.segment = item;
    s.first = segment_first(p, item);
    uint32_t first = s.first, end = free_among(job, p, &first, segment_end(p, item));
    int code = scan_each(&s, finish_each, first, end);
    if (code < 0) return code;
    uint64_t bytes = s.scored * layout->head_dim * dtype_bytes(layout->dtype);
    atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->tokens_scored, s.scored, memory_order_relaxed);
    return 0;
}
