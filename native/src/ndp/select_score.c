/* Select's scores by keys and digests: one page, all its heads and queries. */
#include <math.h>

#include "kernels/code_bounds.h"
#include "ndp/ahead.h"
#include "ndp/select_score.h"
#include "ndp/stored.h"
#include "ndp/stored_fp8.h"
#include "sequence/batch.h"

/* Of `rows` rows with `group` maxima each, to out[row * out_stride], or all to out[0]. */
static void max_over_group(const float *maxima, uint64_t rows, uint32_t group, float *out,
                           uint64_t out_stride, bool one_list) {
    if (one_list) group *= (uint32_t)rows, rows = 1;
    for (uint64_t row = 0; row < rows; row++) {
        float best = kernels_largest(maxima + row * group, group), *to = out + row * out_stride;
        if (best > *to || isnan(best)) *to = best;
    }
}

/* One page as all its heads see it. */
typedef struct scored_page {
    uint32_t index;
    bool digest;                 /* in place of its keys */
    bool whole;                  /* all rows see all of it */
    page_rows rows;
    const uint8_t *keys;         /* of a page whose digest the rows are: where its keys are */
} scored_page;

/* By a head's digest. That of keys in codes has its scale behind their piece, and has no use for
 * codes of queries. */
static void bound_block(const select_job *job, const scored_page *page, const uint8_t *digest,
                        const kernel_queries *queries, const uint8_t *next, float *maxima) {
    uint32_t dim = job->keys.dim;
    if (job->keys.fp8) {
        fp8_bound(&job->keys, digest, queries, job->args->scale, maxima, next);
        return;
    }
    if (!job->keys.encoded) {
        job->isa->bound(job->keys.dtype, digest, dim, queries, job->args->scale, maxima, next);
        return;
    }
    uint64_t head = (uint64_t)(digest - page->rows.first) / page->rows.head_bytes;
    const uint8_t *piece = page->keys + head * job->strides[PIECE_KEYS];
    float scale, bounds[2 * CODE_DIM_MAX];
    kernel_queries rows = *queries;
    rows.packed = NULL;
    for (uint32_t at = 0; next && at < 2 * dim; at += LINE_BYTES)
        __builtin_prefetch(next + at, 0, 2);
    memcpy(&scale, piece + digest_scale_offset(job->layout), sizeof(scale));
    code_bounds_decode((const int8_t *)digest, scale, dim, bounds);
    job->isa->bound(CXLKV_FLOAT32, bounds, dim, &rows, job->args->scale, maxima, next);
}

/* Scores `count` queries against tokens [hidden, visible) of a head's keys, or its digest. */
static void score_block(const select_job *job, const scored_page *page, const uint8_t *keys,
                        uint64_t first_query, uint32_t count, uint32_t hidden, uint32_t visible,
                        const uint8_t *next, float *maxima) {
    kernel_queries queries = queries_range(job->queries, first_query, count);
    if (page->digest)
        bound_block(job, page, keys, &queries, next, maxima);
    else
        stored_score_max(&job->keys, keys, page->rows.row_bytes, hidden, visible - hidden, &queries,
                         job->args->scale, maxima, next);
}

static void score_head(const select_job *job, const plan *p, const scored_page *page, uint32_t head,
                       const uint8_t *next) {
    uint32_t group = job->group, heads = job->layout->kv_heads, index = page->index;
    uint32_t visible = view_filled(&p->view, index), hidden = 0;
    bool one_list = job->args->by.per == CXLKV_PER_SEQUENCE;
    uint64_t stride = (uint64_t)heads * p->view.pages;
    float *out = p->scores + (uint64_t)head * p->view.pages + index;
    const uint8_t *keys = page->rows.first + head * page->rows.head_bytes;
    uint64_t first = p->first_query + head * p->block;
    uint64_t block = QUERY_BLOCK / group ? QUERY_BLOCK / group : 1, rows;
    for (uint64_t row = 0; row < p->rows; row += rows) {
        rows = min_u64(block, p->rows - row);
        if (!page->whole) {
            visible = view_visible(&p->view, index, row, p->rows);
            hidden = view_hidden(&p->view, index, row, p->rows);
            rows = view_together(&p->view, index, row, p->rows, rows);
            if (hidden >= visible) continue;
        }
        for (uint32_t part = 0; part < group; part += QUERY_BLOCK) {
            float maxima[QUERY_BLOCK];
            uint32_t count = min_u32(QUERY_BLOCK, (uint32_t)rows * group - part);
            score_block(job, page, keys, first + row * group + part, count, hidden, visible,
                        row == 0 && part == 0 ? next : NULL, maxima);
            uint32_t wide = group > QUERY_BLOCK ? count : group;
            max_over_group(maxima, rows, wide, one_list ? out : out + row * stride, stride,
                           one_list);
        }
    }
}

/* Log of the sum of exp over one page's visible tokens, for each query of a head. */
static void mass_head(const select_job *job, const plan *p, const scored_page *page, uint32_t head,
                      const uint8_t *next) {
    enum { LOGITS = 4096 };      /* page_tokens is at most a quarter of that */
    const uint8_t *keys = page->rows.first + head * page->rows.head_bytes;
    float logits[LOGITS];
    uint32_t group = job->group, index = page->index;
    for (uint64_t row = 0; row < p->rows; row++) {
        uint64_t first = ((uint64_t)head * p->rows + row) * group;
        uint32_t hidden = view_hidden(&p->view, index, row, p->rows);
        uint32_t visible = view_visible(&p->view, index, row, p->rows);
        visible = visible > hidden ? visible - hidden : 0;
        uint32_t together = visible ? LOGITS / visible : group;
        for (uint32_t part = 0; part < group; part += together) {
            uint32_t count = min_u32(together, group - part);
            kernel_queries queries =
                queries_range(job->queries, p->first_query + head * p->block + row * group + part,
                              count);
            float *out = p->log_sums + (first + part) * p->view.pages + index;
            if (visible)
                stored_score(&job->keys, keys, page->rows.row_bytes, hidden, visible, &queries,
                             job->args->scale, logits, visible,
                             row == 0 && part == 0 ? next : NULL);
            for (uint32_t i = 0; i < count; i++, out += p->view.pages) {
                float *own = logits + (uint64_t)i * visible;
                float largest = kernels_largest(own, visible); /* or NaN, which then stays */
                *out = visible ? largest + logf(job->isa->exp_sum(own, visible, largest))
                               : -INFINITY;
            }
        }
    }
}

uint32_t scored_kind(const select_job *job) {
    return job->args->by.method == CXLKV_METHOD_DIGEST ? PIECE_DIGEST : PIECE_KEYS;
}

static int page_open(const select_job *job, const plan *p, uint32_t index, scored_page *page) {
    cxlkv_pool *pool = job->batch->pool;
    *page = (scored_page){.index = index,
                          .whole = view_whole(&p->view, index, 0, p->rows, p->rows),
                          .rows = view_rows(&p->view, index, PIECE_KEYS)};
    int code = view_verify(&p->view, index);
    if (code < 0) return code;
    if (scored_kind(job) == PIECE_DIGEST && index < p->view.complete) {
        page->digest = true;
        page->keys = page->rows.first;
        page->rows.first = pieces_of(pool, page_of(p, index), p->view.layer, PIECE_DIGEST);
        page->rows.head_bytes = job->strides[PIECE_DIGEST];
    }
    return 0;
}

int score_page(select_job *job, const plan *p, uint32_t index, ahead *next) {
    scored_page page;
    int code = page_open(job, p, index, &page);
    if (code < 0) return code;
    for (uint32_t head = 0; head < job->layout->kv_heads; head++) {
        const uint8_t *wanted = next ? ahead_next(next) : NULL;
        if (p->log_sums) mass_head(job, p, &page, head, wanted);
        else score_head(job, p, &page, head, wanted);
    }
    return 0;
}

int score_page_head(const select_job *job, const plan *p, uint32_t index, uint32_t head) {
    scored_page page;
    int code = page_open(job, p, index, &page);
    if (code == 0) score_head(job, p, &page, head, NULL);
    return code;
}

/* ---- runs of whole pages: what a step of one token scores ---- */

void whole_pages(const plan *p, uint32_t *first, uint32_t *last) {
    uint32_t begin = *first, end = min_u32(*last, p->view.complete);
    /* Those that are not seen whole lie at the ends. */
    while (begin < end && !view_whole(&p->view, begin, 0, p->rows, p->rows)) begin++;
    while (begin < end && !view_whole(&p->view, end - 1, 0, p->rows, p->rows)) end--;
    *first = begin;
    *last = end < begin ? begin : end;
}

void run_of(const select_job *job, const plan *p, uint32_t *first, uint32_t *last) {
    bool one_list = p->lists == 1 && p->rows * job->group <= QUERY_BLOCK;
    if (one_list && !p->log_sums && scored_kind(job) == PIECE_KEYS) whole_pages(p, first, last);
    else *last = *first;
}

uint32_t page_run_step(const select_job *job, uint32_t kind, uint32_t heads) {
    enum { RUN_BYTES = 24 << 10 };
    uint64_t page_bytes = heads * job->strides[kind];
    return (uint32_t)min_u64(RUN_PAGES, RUN_BYTES / page_bytes + 1);
}

static const uint8_t *piece_at(const plan *p, uint32_t kind, uint32_t index) {
    return pieces_of(p->view.sequence->pool, page_of(p, index), p->view.layer, kind);
}

int page_run_take(const plan *p, uint32_t kind, uint32_t at, uint32_t last, uint32_t step,
                  bool ahead, page_run *run) {
    run->count = min_u32(step, last - at);
    for (uint32_t i = 0; i < run->count; i++) {
        int code = view_verify(&p->view, at + i);
        if (code < 0) return code;
        bool is_later = ahead && at + step + i < p->view.complete;
        run->pages[i] = piece_at(p, kind, at + i);
        run->later[i] = is_later ? piece_at(p, kind, at + step + i) : NULL;
    }
    return 0;
}

static void score_codes(const select_job *job, const void *const *pieces, const void *const *next,
                        uint32_t count, const kernel_queries *queries, float *best) {
    code_piece codes[RUN_PAGES];
    for (uint32_t i = 0; i < count; i++) codes[i] = stored_codes(&job->keys, pieces[i]);
    stored_score_best(&job->keys, codes, next, count, job->layout->page_tokens, queries,
                      best);
}

void score_run_head(const select_job *job, const plan *p, uint32_t head, const page_run *run,
                    float *best) {
    const cxlkv_layout *layout = job->layout;
    size_t row_bytes = stored_row_bytes(layout, PIECE_KEYS);
    uint64_t offset = head * job->strides[PIECE_KEYS];
    const void *pieces[RUN_PAGES], *next[RUN_PAGES];
    kernel_queries queries = queries_range(job->queries, p->first_query + head * p->block,
                                           (uint32_t)p->rows * job->group);
    for (uint32_t i = 0; i < run->count; i++) {
        pieces[i] = run->pages[i] + offset;
        next[i] = run->later[i] ? run->later[i] + offset : NULL;
    }
    if (job->keys.encoded) {
        score_codes(job, pieces, next, run->count, &queries, best);
        return;
    }
    if (!job->keys.fp8 && job->isa->score_pieces &&
        job->isa->score_pieces((int)layout->dtype, pieces, next, run->count, row_bytes,
                               layout->page_tokens, layout->head_dim, &queries, job->args->scale,
                               best))
        return;
    for (uint32_t i = 0; i < run->count; i++) {
        float maxima[QUERY_BLOCK];
        stored_score_max(&job->keys, pieces[i], row_bytes, 0, layout->page_tokens, &queries,
                         job->args->scale, maxima, next[i]);
        best[i] = kernels_largest(maxima, queries.count);
    }
}

int score_run(select_job *job, const plan *p, uint32_t first, uint32_t last, bool ahead) {
    uint32_t heads = job->layout->kv_heads,
             step = page_run_step(job, PIECE_KEYS, heads);
    page_run run;
    for (uint32_t at = first; at < last; at += run.count) {
        int code = page_run_take(p, PIECE_KEYS, at, last, step, ahead, &run);
        if (code < 0) return code;
        for (uint32_t head = 0; head < heads; head++)
            score_run_head(job, p, head, &run, p->scores + (uint64_t)head * p->view.pages + at);
    }
    return 0;
}

/* Turns a query's page log-sums into its attention by page, added to its list's scores. */
static void add_mass(const select_job *job, const plan *p, float *log_sums, float share,
                     float *scores) {
    enum { SOME = 256 };         /* of which a float has the sum */
    float largest = kernels_largest(log_sums + p->low, p->view.pages - p->low);
    double total = 0;
    for (uint32_t page = p->low; page < p->view.pages; page += SOME)
        total += (double)job->isa->exp_sum(log_sums + page, min_u32(SOME, p->view.pages - page),
                                           largest);
    float factor = (float)((double)share / total);
    for (uint32_t page = p->low; page < p->view.pages; page++)
        scores[page] += factor * log_sums[page];
}

int mass_task(void *context, uint32_t item) {
    select_job *job = context;
    uint32_t heads = job->layout->kv_heads, head = item % heads;
    const plan *p = &job->plans[item / heads];
    uint32_t pages = p->view.pages;
    bool one_list = job->args->by.per == CXLKV_PER_SEQUENCE;
    float share = 1.0f / (float)(job->group * (one_list ? p->rows : 1));
    if (!p->log_sums) return 0;
    for (uint64_t list = 0; list < p->lists; list++)
        for (uint32_t page = 0; page < pages; page++)
            p->scores[(list * heads + head) * pages + page] = 0;
    for (uint64_t row = 0; row < p->rows; row++)
        for (uint32_t i = 0; i < job->group; i++) {
            uint64_t query = (head * p->rows + row) * job->group + i;
            uint64_t list = one_list ? 0 : row;
            add_mass(job, p, p->log_sums + query * pages, share,
                     p->scores + (list * heads + head) * pages);
        }
    return 0;
}

