/* Two-stage select, the scan: estimates of all tokens, then the keys of those that may matter.
 *
 * The scan leaves the best estimate of each page, and of each token what its logit is hardly above.
 * Then the estimate of the worst page to be chosen is known, and only tokens that may be above that
 * are scored. It is the same tokens on any number of threads.
 *
 * They are scored page by page, all heads of a page one after another: each key lies in a page of
 * memory of its own, and neighbours are translated together. */
#include <math.h>

#include "kernels/sketch.h"
#include "ndp/ahead.h"
#include "ndp/select_choose.h"
#include "ndp/select_scan.h"
#include "ndp/select_score.h"
#include "ndp/select_sketch.h"
#include "ndp/stored.h"

/* The free pages among [first, last) that are estimated: *first to the end that is returned. The
 * others are scored by their keys. */
static uint32_t estimated_among(const select_job *job, const plan *p, uint32_t *first,
                                uint32_t last) {
    window w = window_of(job, p, 0);
    uint32_t start, end = free_pages(p, &w, &start) + start, begin = *first;
    if (start < begin) start = begin;
    if (end > last) end = last;
    if (start >= end) return *first = begin;
    whole_pages(p, &start, &end);
    *first = start;
    return end;
}

/* ---- the scan ---- */

/* Block `block` of a run of pages from `at` on, for a list and head. */
static void estimate_run(const select_job *job, const plan *p, const page_run *run, uint32_t at,
                         uint64_t list, uint32_t head, uint32_t block) {
    uint64_t place = list * kv_heads(job) + head;
    bool staged = job->args->by.method == CXLKV_METHOD_TWO_STAGE;
    stage_scratch stage = stage_of(job, p);
    const uint8_t *nothing[RUN_PAGES] = {NULL};
    float best[RUN_PAGES], *scores = p->scores + place * p->view.pages + at;
    float unread[RUN_PAGES][SKETCH_TOKENS], (*uppers)[SKETCH_TOKENS] = unread;
    if (staged) uppers = stage.uppers + (place * blocks_of(job) + block) * p->view.pages + at;
    estimated_blocks asked = {.pages = run->pages, .later = list == 0 ? run->later : nothing,
                              .count = run->count, .head = head, .block = block,
                              .slack = staged ? stage.slacks[place] : 0};
    asked.first_query = queries_of_list(job, p, list, head, &asked.query_count);
    estimate_blocks(job, &asked, best, uppers);
    for (uint32_t i = 0; i < run->count; i++)
        if (block == 0 || is_better(best[i], scores[i])) scores[i] = best[i];
}

static int estimate_pages(const select_job *job, const plan *p, uint32_t first, uint32_t last,
                          bool ahead) {
    uint32_t kind = estimated_kind(job->batch->pool);
    uint32_t step = page_run_step(job, kind, kv_heads(job));
    page_run run;
    for (uint32_t at = first; at < last; at += run.count) {
        int code = page_run_take(p, kind, at, last, step, ahead, &run);
        if (code < 0) return code;
        for (uint32_t head = 0; head < kv_heads(job); head++)
            for (uint64_t list = 0; list < p->lists; list++)
                for (uint32_t block = 0; block < blocks_of(job); block++)
                    estimate_run(job, p, &run, at, list, head, block);
    }
    return 0;
}

int sketch_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last,
                       bool counts) {
    const cxlkv_layout *layout = job->layout;
    uint32_t start = first, end = estimated_among(job, p, &start, last);
    uint64_t key_bytes = kind_token_bytes(layout, PIECE_KEYS), tokens = 0;
    for (uint32_t index = first; index < last; index++) {
        if (index >= start && index < end) continue;
        int code = score_page(job, p, index, NULL);
        if (code < 0) return code;
        tokens += view_filled(&p->view, index);
    }
    int code = estimate_pages(job, p, start, end, counts);
    if (code < 0 || !counts) return code;
    uint64_t sketched = (uint64_t)(end - start) * layout->kv_heads * estimated_bytes(job);
    atomic_fetch_add_explicit(&job->bytes_scored,
                              sketched + tokens * layout->kv_heads * key_bytes,
                              memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, sketched, memory_order_relaxed);
    return 0;
}

/* ---- the worst page ---- */

/* What a list's worst chosen page has by estimates; -infinity: all tokens are wanted. `ranks` and
 * `merged` have room for all pages. */
static float cut_of(const select_job *job, const plan *p, uint64_t list, uint32_t head,
                    uint32_t *ranks, float *merged) {
    uint32_t heads = kv_heads(job), equal;
    window w = window_of(job, p, list);
    uint32_t pages = w.recent - w.sinks, wanted = free_choices(&w);
    const float *all = p->scores + list * heads * p->view.pages + w.sinks;
    const float *scores = all + head * (uint64_t)p->view.pages;
    if (wanted == 0) return INFINITY;
    if (wanted >= pages || !isfinite(stage_of(job, p).slacks[list * heads + head]))
        return -INFINITY;
    if (job->args->by.union_over == CXLKV_UNION_LAYER) {
        memcpy(merged, all, pages * sizeof(*merged));
        for (uint32_t each = 1; each < heads; each++)
            for (uint32_t i = 0; i < pages; i++) {
                float score = all[each * (uint64_t)p->view.pages + i];
                if (is_better(score, merged[i])) merged[i] = score;
            }
        scores = merged;
    }
    float cut = kth_largest(scores, pages, wanted, ranks, &equal);
    return isnan(cut) ? -INFINITY : cut;
}

int sketch_cut_task(void *context, uint32_t item) {
    select_job *job = context;
    uint32_t head = item % kv_heads(job);
    const plan *p = &job->plans[item / kv_heads(job)];
    if (!p->stage) return 0;
    uint32_t *ranks = malloc((p->view.pages + 1) * 2ull * sizeof(*ranks));
    if (!ranks) return fail(ENOMEM, "no memory to choose among %u pages", p->view.pages);
    for (uint64_t list = 0; list < p->lists; list++)
        stage_of(job, p).cuts[list * kv_heads(job) + head] =
            cut_of(job, p, list, head, ranks, (float *)(ranks + p->view.pages + 1));
    free(ranks);
    return 0;
}

/* ---- the keys of single tokens ---- */

enum { WAITING_MAX = 64, SCORED_TOGETHER = 16, HEADS_TOGETHER = 16 };

/* Tokens of one list and head whose keys were asked for, and wait until some are together. */
typedef struct waiting {
    uint32_t count;
    const void *keys[WAITING_MAX];
    uint8_t pages[WAITING_MAX]; /* of the segment */
    /* Of codes, whose blocks wait: */
    const uint16_t *scales[WAITING_MAX];
    uint8_t tokens[WAITING_MAX];
} waiting;

/* Some pages, for one list and some heads. */
typedef struct finish {
    const select_job *job;
    const plan *p;
    uint64_t list;
    uint32_t head_first, head_count;
    uint32_t first, count; /* pages, at most TASK_PAGES */
    uint64_t scored;
    waiting waits[HEADS_TOGETHER];
    uint16_t wanted[HEADS_TOGETHER][TASK_PAGES]; /* tokens of a block, a bit each */
    /* The best true score of each page that has one. */
    float trues[HEADS_TOGETHER][TASK_PAGES];
    uint64_t known[HEADS_TOGETHER]; /* a bit for each page */
} finish;

/* Keys, or blocks of 16 codes, which are scored together: the best of each. */
static void score_keys(const finish *f, const waiting *w, uint32_t count,
                       const kernel_queries *queries, float *best) {
    const stored *keys = &f->job->keys;
    code_piece blocks[WAITING_MAX];
    const void *next[WAITING_MAX] = {NULL};
    if (!keys->encoded) {
        stored_score_each(keys, w->keys, count, queries, f->job->args->scale, best);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        blocks[i] = (code_piece){w->keys[i], w->scales[i]};
    /* The last block of a page may have fewer tokens than the others. */
    for (uint32_t i = 0, alike; i < count; i += alike) {
        for (alike = 1; i + alike < count && w->tokens[i + alike] == w->tokens[i]; alike++) {}
        stored_score_best(keys, blocks + i, next, alike, w->tokens[i], queries, best + i);
    }
}

static void score_first(finish *f, uint32_t i, uint32_t count) {
    waiting *w = &f->waits[i];
    float best[WAITING_MAX];
    uint32_t query_count;
    uint64_t first = queries_of_list(f->job, f->p, f->list, f->head_first + i, &query_count);
    kernel_queries queries = queries_range(f->job->queries, first, query_count);
    score_keys(f, w, count, &queries, best);
    for (uint32_t at = 0; at < count; at++) {
        uint64_t bit = 1ull << w->pages[at];
        float *score = &f->trues[i][w->pages[at]];
        if (!(f->known[i] & bit) || is_better(best[at], *score)) *score = best[at];
        f->known[i] |= bit;
    }
    w->count -= count;
    memmove(w->keys, w->keys + count, w->count * sizeof(*w->keys));
    memmove(w->pages, w->pages + count, w->count * sizeof(*w->pages));
    memmove(w->scales, w->scales + count, w->count * sizeof(*w->scales));
    memmove(w->tokens, w->tokens + count, w->count * sizeof(*w->tokens));
}

/* `bytes` of keys of some tokens are asked for at once, to be here when they are scored. */
static void wait_for(finish *f, uint32_t i, uint32_t page, const uint8_t *keys, size_t bytes,
                     const uint16_t *scales, uint32_t tokens) {
    waiting *w = &f->waits[i];
    const uint8_t *lower = f->job->keys.planes ? keys + f->job->keys.lower_offset : NULL;
    for (size_t at = 0; at < bytes; at += LINE_BYTES) __builtin_prefetch(keys + at);
    for (size_t at = 0; lower && at < bytes; at += LINE_BYTES) __builtin_prefetch(lower + at);
    if (w->count == WAITING_MAX) score_first(f, i, SCORED_TOGETHER);
    w->keys[w->count] = keys;
    w->scales[w->count] = scales;
    w->tokens[w->count] = (uint8_t)tokens;
    w->pages[w->count++] = (uint8_t)page;
    f->scored += tokens;
}

/* Of one head's rows, or piece, in a page: the tokens of a block that a bit is set for. */
static void wait_for_tokens(finish *f, uint32_t i, uint32_t page, uint32_t block,
                            const page_rows *rows) {
    const stored *keys = &f->job->keys;
    const uint8_t *piece = rows->first + (f->head_first + i) * rows->head_bytes;
    uint32_t seen = block_tokens(f->job, block), bits = f->wanted[i][page] & seen;
    if (keys->encoded && bits) { /* all of the block: a token of it cannot be read for itself */
        code_piece codes = stored_codes(keys, piece);
        size_t bytes = code_block_bytes(keys->planes ? &keys->upper : &keys->form);
        wait_for(f, i, page, codes.blocks + block * bytes, bytes,
                 codes.scales + block * CODE_TOKENS, (uint32_t)__builtin_popcount(seen));
        return;
    }
    for (; bits; bits &= bits - 1) {
        uint32_t token = block * SKETCH_TOKENS + (uint32_t)__builtin_ctz(bits);
        wait_for(f, i, page, piece + token * rows->row_bytes, rows->row_bytes, NULL, 1);
    }
}

/* Block `block` of each page. */
static void finish_block(finish *f, uint32_t block) {
    const select_job *job = f->job;
    stage_scratch stage = stage_of(job, f->p);
    uint64_t place = f->list * kv_heads(job) + f->head_first;
    for (uint32_t i = 0; i < f->head_count; i++)
        job->isa->above((const float (*)[SKETCH_TOKENS])stage.uppers +
                            ((place + i) * blocks_of(job) + block) * f->p->view.pages + f->first,
                        f->count, stage.cuts[place + i], f->wanted[i]);
    for (uint32_t page = 0; page < f->count; page++) {
        page_rows rows = {0};
        for (uint32_t i = 0; i < f->head_count; i++) {
            if (!(f->wanted[i][page] & block_tokens(job, block))) continue;
            if (!rows.first) rows = view_rows(&f->p->view, f->first + page, PIECE_KEYS);
            wait_for_tokens(f, i, page, block, &rows);
        }
    }
}

static void finish_heads(finish *f) {
    uint64_t place = f->list * kv_heads(f->job) + f->head_first;
    for (uint32_t i = 0; i < f->head_count; i++) f->waits[i].count = 0, f->known[i] = 0;
    for (uint32_t block = 0; block < blocks_of(f->job); block++) finish_block(f, block);
    for (uint32_t i = 0; i < f->head_count; i++) {
        float *scores = f->p->scores + (place + i) * f->p->view.pages + f->first;
        if (f->waits[i].count) score_first(f, i, f->waits[i].count);
        for (uint64_t bits = f->known[i]; bits; bits &= bits - 1)
            scores[__builtin_ctzll(bits)] = f->trues[i][__builtin_ctzll(bits)];
    }
}

uint32_t sketch_segments(const plan *p) {
    return p->stage ? (p->view.pages - p->low + TASK_PAGES - 1) / TASK_PAGES : 0;
}

int sketch_finish_task(void *context, uint32_t item) {
    select_job *job = context;
    const cxlkv_layout *layout = job->layout;
    const plan *p = job->plans;
    for (; item >= sketch_segments(p); p++) item -= sketch_segments(p);
    uint32_t first = p->low + item * TASK_PAGES, heads = kv_heads(job);
    uint32_t end = estimated_among(job, p, &first, first + TASK_PAGES);
    finish f; /* large: only its head is set */
    f.job = job, f.p = p, f.scored = 0;
    f.first = first, f.count = end - first;
    for (f.head_first = 0; f.count && f.head_first < heads; f.head_first += HEADS_TOGETHER) {
        f.head_count = min_u32(HEADS_TOGETHER, heads - f.head_first);
        for (f.list = 0; f.list < p->lists; f.list++) finish_heads(&f);
    }
    uint64_t bytes = f.scored * kind_token_bytes(layout, PIECE_KEYS);
    atomic_fetch_add_explicit(&job->bytes_scored, bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->tokens_scored, f.scored, memory_order_relaxed);
    return 0;
}
