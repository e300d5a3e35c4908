/* Select by a scorer that the pool was given: by a summary of each page and kv head, which is made
 * of its keys before a select names the page for the first time. */
#include <math.h>

#include "format/scorers.h"
#include "host/locks.h"
#include "host/threads.h"
#include "ndp/select_score.h"
#include "ndp/select_scorer.h"
#include "ndp/select_sketch.h"
#include "ndp/stored.h"
#include "ndp/stored_fp8.h"
#include "sequence/batch.h"

/* Keys of a page and head, decoded. */
static uint64_t keys_floats(const cxlkv_layout *layout) {
    return align_up((uint64_t)layout->page_tokens * layout->head_dim, 16);
}

/* float32 [page_tokens][head_dim] */
static void keys_decode(const select_job *job, const uint8_t *piece, float *to) {
    const stored *keys = &job->keys;
    const cxlkv_layout *layout = job->layout;
    uint32_t tokens = layout->page_tokens, dim = keys->dim;
    if (keys->encoded) {
        for (uint32_t first = 0, count; first < tokens; first += count) {
            count = min_u32(CODE_TOKENS, tokens - first);
            stored_decode(keys, piece, first, count, to + (size_t)first * dim);
        }
        code_unrotate(to, tokens, dim);
    } else if (keys->fp8) {
        fp8_fetch(keys, CXLKV_FLOAT32, piece, tokens, (uint8_t *)to);
    } else {
        job->isa->to_float(keys->dtype, piece, (size_t)tokens * dim, to);
    }
}

static int check_known(const cxlkv_pool *pool, const cxlkv_select_args *args) {
    const pool_scorer *s = scorer_find(pool, args->by.scorer);
    if (!s)
        return fail(CXLKV_E_ARGUMENT,
                    "select: scorer %u is not known here; a worker knows those that it was begun "
                    "with: `cxlkv ndp-worker --methods`, of the same code, with the same numbers "
                    "where they learn",
                    args->by.scorer);
    for (uint32_t i = 0; i < args->by.budget_count; i++)
        if (args->by.budgets[i].kind == CXLKV_BUDGET_MASS && !s->scorer.log_sums)
            return fail(CXLKV_E_ARGUMENT,
                        "budget %u: this method does not estimate attention, so that it has no "
                        "mass: give pages or a share",
                        i);
    return 0;
}

int scorer_check(const cxlkv_batch *batch, const cxlkv_select_args *args) {
    if (args->by.method != CXLKV_METHOD_SCORER) return 0;
    int code = pool_enter(batch->pool); /* which another thread may be closing */
    if (code < 0) return code;
    code = check_known(batch->pool, args);
    pool_leave(batch->pool);
    return code;
}

static int fail_raised(const cxlkv_scorer *scorer, const char *function) {
    return fail(CXLKV_E_ARGUMENT,
                "method '%s': %s() raised an exception: called as plain Python, with such arrays, "
                "it says which",
                scorer->name, function);
}

/* ---- summaries ---- */

typedef struct wanted_page {
    const plan *p;
    uint32_t page, index;
} wanted_page;

/* Pages that have no summary yet; task i makes those of i, i + items, ... */
typedef struct summarising {
    select_job *job;
    wanted_page *pages;
    uint32_t count, items;
    float *keys; /* of each item */
} summarising;

static int summarise_page(const summarising *s, const wanted_page *w, float *keys) {
    select_job *job = s->job;
    cxlkv_pool *pool = job->batch->pool;
    pool_scorer *scorer = job->scorer;
    const cxlkv_layout *layout = job->layout;
    uint32_t layer = w->p->view.layer;
    int code = view_verify(&w->p->view, w->index);
    if (code < 0) return code;
    page_rows rows = view_rows(&w->p->view, w->index, PIECE_KEYS);
    for (uint32_t head = 0; head < layout->kv_heads; head++) {
        keys_decode(job, rows.first + head * rows.head_bytes, keys);
        if (scorer->scorer.summarise(keys, layout->page_tokens, layout->head_dim,
                                     (int64_t)w->index * layout->page_tokens,
                                     scorer_parameters(pool, scorer, layer, head),
                                     summary_of(pool, scorer, w->page, layer, head)) < 0)
            return fail_raised(&scorer->scorer, "summarise");
    }
    summary_set_made(pool, scorer, w->page, layer);
    uint64_t bytes = layout->kv_heads * (uint64_t)layout->page_tokens *
                     kind_token_bytes(layout, PIECE_KEYS);
    atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    return 0;
}

static int summarise_task(void *context, uint32_t item) {
    const summarising *s = context;
    float *keys = s->keys + item * keys_floats(s->job->layout);
    int code = 0;
    for (uint32_t i = item; code == 0 && i < s->count; i += s->items)
        code = summarise_page(s, &s->pages[i], keys);
    return code;
}

/* How many there are; `room` of them at most to pages: there may be more than a moment ago. */
static uint32_t wanted_pages(const select_job *job, wanted_page *pages, uint32_t room) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        const plan *p = &job->plans[i];
        if (!is_scored(p)) continue;
        for (uint32_t index = first_own_page(p); index < p->view.complete; index++) {
            uint32_t page = page_of(p, index);
            if (summary_is_made(job->batch->pool, job->scorer, page, p->view.layer)) continue;
            if (count < room) pages[count] = (wanted_page){p, page, index};
            count++;
        }
    }
    return count;
}

static int by_page(const void *a, const void *b) {
    uint32_t x = ((const wanted_page *)a)->page, y = ((const wanted_page *)b)->page;
    return (x > y) - (x < y);
}

/* Two sequences may have a page: each is made once. */
static uint32_t pages_once(wanted_page *pages, uint32_t count) {
    uint32_t kept = 0;
    qsort(pages, count, sizeof(*pages), by_page);
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || pages[i].page != pages[i - 1].page) pages[kept++] = pages[i];
    return kept;
}

static int summarise_all(select_job *job) {
    enum { ITEMS_OF_A_THREAD = 4 };
    cxlkv_pool *pool = job->batch->pool;
    summarising s = {.job = job, .count = wanted_pages(job, NULL, 0)};
    if (s.count == 0) return 0;
    s.items = min_u32(s.count, ITEMS_OF_A_THREAD * pool->threads.count);
    s.pages = malloc(s.count * sizeof(*s.pages));
    s.keys = aligned_alloc(LINE_BYTES, s.items * keys_floats(job->layout) * sizeof(float));
    int code = s.pages && s.keys ? 0 : fail(ENOMEM, "no memory to summarise %u pages", s.count);
    if (code == 0) {
        s.count = pages_once(s.pages, min_u32(s.count, wanted_pages(job, s.pages, s.count)));
        code = run_step_tasks(pool, s.items, summarise_task, &s);
    }
    free(s.pages);
    free(s.keys);
    return code;
}

static bool scores_any(const select_job *job) {
    for (uint32_t i = 0; i < job->batch->count; i++) {
        const plan *p = &job->plans[i];
        if (is_scored(p) && first_own_page(p) < p->view.complete) return true;
    }
    return false;
}

/* Parameters are read once a select: by score(), and all of them to make summaries. */
int scorer_summarise(select_job *job) {
    const cxlkv_scorer *scorer = &job->scorer->scorer;
    uint64_t bytes = scorer->parameter_bytes;
    int code = 0;
    if (wanted_pages(job, NULL, 0)) {
        bytes = scorer->parameter_count * sizeof(float);
        pthread_mutex_lock(&job->scorer->making);
        code = summarise_all(job);
        pthread_mutex_unlock(&job->scorer->making);
    }
    if (scores_any(job))
        atomic_fetch_add_explicit(&job->bytes_scored, bytes * kv_heads(job), memory_order_relaxed);
    return code;
}

/* ---- scores ---- */

enum { ROOM_BYTES = 32 << 10 };
_Static_assert(ROOM_BYTES >= CXLKV_SUMMARY_BYTES_MAX, "one at the least");

/* Summaries of one head, one behind another. */
typedef struct summary_run {
    const uint8_t *at;
    uint32_t pages;
} summary_run;

/* Of the pages [first, last) as many as there is room for, read where they lie if they follow one
 * another in the pool, else copied. Where they lie does not change how many a call scores, since
 * the last bits of scores depend on that, nor the bytes that are counted. */
static summary_run summaries_take(const select_job *job, const plan *p, uint32_t head,
                                  uint32_t first, uint32_t last, uint8_t *room) {
    const cxlkv_pool *pool = job->batch->pool;
    uint32_t bytes = job->scorer->scorer.summary_bytes, layer = p->view.layer;
    uint32_t pages = min_u32(last - first, ROOM_BYTES / bytes), begin = page_of(p, first), run = 1;
    while (run < pages && page_of(p, first + run) == begin + run) run++;
    if (run == pages)
        return (summary_run){summary_of(pool, job->scorer, begin, layer, head), pages};
    for (uint32_t i = 0; i < pages; i++)
        memcpy(room + (size_t)i * bytes,
               summary_of(pool, job->scorer, page_of(p, first + i), layer, head), bytes);
    return (summary_run){room, pages};
}

static bool are_finite(const float *numbers, uint64_t count) {
    for (uint64_t i = 0; i < count; i++)
        if (!isfinite(numbers[i])) return false;
    return true;
}

/* A score is NaN: whether one of the keys is, or is infinite, or of the queries. */
static int check_nan(const select_job *job, const plan *p, uint32_t head, const float *query,
                     uint32_t index) {
    const cxlkv_layout *layout = job->layout;
    page_rows rows = view_rows(&p->view, index, PIECE_KEYS);
    float *keys = aligned_alloc(LINE_BYTES, keys_floats(layout) * sizeof(float));
    if (!keys) return fail(ENOMEM, "no memory for the keys of a page");
    keys_decode(job, rows.first + head * rows.head_bytes, keys);
    uint64_t count = (uint64_t)layout->page_tokens * layout->head_dim;
    bool is_own = are_finite(query, job->keys.dim) && are_finite(keys, count);
    free(keys);
    if (!is_own) return 0;
    return fail(CXLKV_E_ARGUMENT,
                "method '%s': score() gives NaN for page %u of kv head %u in layer %u, whose keys "
                "are numbers, and for a query of numbers: it is not defined for them, or overflows",
                job->scorer->scorer.name, index, head, p->view.layer);
}

/* Scores [count][pages] of queries [count][dim] and of pages from `at` on. */
static int check_scores(const select_job *job, const plan *p, uint32_t head, const float *queries,
                        uint32_t count, uint32_t at, uint32_t pages, const float *scores) {
    bool any = false;
    for (uint32_t i = 0; i < count * pages; i++) any |= scores[i] != scores[i];
    for (uint32_t i = 0; any && i < count * pages; i++) {
        if (!isnan(scores[i])) continue;
        int code = check_nan(job, p, head, queries + (size_t)(i / pages) * job->keys.dim,
                             at + i % pages);
        if (code < 0) return code;
    }
    return 0;
}

/* Scores [count][pages] of queries from `query` on, among those of head `head`, to where they are
 * chosen by. */
static void scores_place(const select_job *job, const plan *p, uint32_t head, uint64_t query,
                         uint32_t count, uint32_t at, uint32_t pages, const float *scores) {
    uint64_t list_stride = (uint64_t)kv_heads(job) * p->view.pages;
    for (uint32_t i = 0; i < count; i++) {
        const float *from = scores + (size_t)i * pages;
        uint64_t row = (query + i) / job->group;
        uint64_t list = job->args->by.per == CXLKV_PER_SEQUENCE ? 0 : row;
        uint64_t place = (uint64_t)head * p->rows * job->group + query + i;
        float *best = p->scores + list * list_stride + (uint64_t)head * p->view.pages + at;
        if (p->log_sums) {
            memcpy(p->log_sums + place * p->view.pages + at, from, pages * sizeof(*from));
            continue;
        }
        for (uint32_t page = 0; page < pages; page++)
            if (is_better(from[page], best[page])) best[page] = from[page];
    }
}

/* One head's pages from `at` on, by all queries. Returns the bytes that are read of a summary. */
static int score_run_of(const select_job *job, const plan *p, uint32_t head, uint32_t at,
                        const summary_run *run) {
    float scores[QUERY_BLOCK * TASK_PAGES];
    const cxlkv_scorer *scorer = &job->scorer->scorer;
    const float *own = scorer_parameters(job->batch->pool, job->scorer, p->view.layer, head);
    uint32_t dim = job->keys.dim, read = scorer->read_bytes;
    uint64_t all = p->rows * job->group;
    for (uint64_t query = 0; query < all; query += QUERY_BLOCK) {
        uint32_t count = (uint32_t)min_u64(QUERY_BLOCK, all - query);
        const float *from = job->queries.rows + (p->first_query + head * p->block + query) * dim;
        int bytes = scorer->score(from, count, dim, job->args->scale, run->at, run->pages, own,
                                  scores);
        if (bytes < 0) return fail_raised(scorer, "score");
        int code = check_scores(job, p, head, from, count, at, run->pages, scores);
        if (code < 0) return code;
        if (!scorer->read_bytes) read = min_u32(read + (uint32_t)bytes, scorer->summary_bytes);
        scores_place(job, p, head, query, count, at, run->pages, scores);
    }
    return (int)read;
}

/* Pages [first, last), which all have summaries and are seen whole by all rows. */
static int score_whole(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts) {
    _Alignas(LINE_BYTES) uint8_t room[ROOM_BYTES];
    uint64_t bytes = 0;
    for (uint32_t head = 0; head < kv_heads(job); head++)
        for (uint32_t at = first; at < last;) {
            summary_run run = summaries_take(job, p, head, at, last, room);
            int read = score_run_of(job, p, head, at, &run);
            if (read < 0) return read;
            bytes += (uint64_t)read * run.pages;
            at += run.pages;
        }
    /* Other queries read other bytes. */
    if (counts || !job->scorer->scorer.read_bytes)
        atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    return 0;
}

static bool has_summary(const select_job *job, const plan *p, uint32_t index) {
    return summary_is_made(job->batch->pool, job->scorer, page_of(p, index), p->view.layer);
}

static int score_other(select_job *job, const plan *p, uint32_t index, bool counts) {
    if (!p->log_sums) {
        for (uint64_t list = 0; list < lists_of(job, p); list++)
            p->scores[list * p->view.pages + index] = INFINITY;
        return 0;
    }
    uint64_t bytes = (uint64_t)kv_heads(job) * view_filled(&p->view, index) *
                     kind_token_bytes(job->layout, PIECE_KEYS);
    if (counts) atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    return score_page(job, p, index, NULL);
}

int scorer_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts) {
    uint32_t start = first, end = last;
    int code = 0;
    whole_pages(p, &start, &end);
    for (uint32_t index = first; code == 0 && index < last; index++)
        if (index < start || index >= end) code = score_other(job, p, index, counts);
    for (uint32_t at = start, stop; code == 0 && at < end; at = stop) {
        for (stop = at; stop < end && has_summary(job, p, stop); stop++) {}
        code = score_whole(job, p, at, stop, counts);
        /* One that another call appended meanwhile. */
        if (stop == at) code = score_other(job, p, stop++, counts);
    }
    return code;
}

/* ---- the interface ---- */

int cxlkv_pool_add_scorer(cxlkv_pool *pool, const cxlkv_scorer *scorer) {
    int code = scorer_valid(scorer);
    if (code < 0) return code;
    code = pool_enter(pool);
    if (code < 0) return code;
    pthread_mutex_lock(&pool->locks.list);
    code = scorer_add(pool, scorer);
    pthread_mutex_unlock(&pool->locks.list);
    pool_leave(pool);
    return code;
}
