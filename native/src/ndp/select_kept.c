/* A step of one token that chooses among what earlier ones found (criteria.refresh).
 *
 * From one token to the next mostly the same pages hold the attention. A sequence keeps, for each
 * kv head, the pages that were best when all were looked at, KEPT_TIMES as many as a list has. The
 * steps that follow score these and what is new since, and choose among them: by their keys, or by
 * estimates alone where these tell a sequence's pages apart. When a head looks at all pages again,
 * its new list tells what would have been missed: where the pages that were kept have WANTED_SHARE
 * of it, by the exponentials of the scores, the next look is twice as far off, up to
 * criteria.refresh steps; else half as far. Heads look in different steps, each at its own pace. */
#include <math.h>

#include "kernels/sketch.h"
#include "ndp/select_choose.h"
#include "ndp/select_kept.h"
#include "ndp/select_score.h"
#include "ndp/select_sketch.h"
#include "sequence/batch.h"
#include "sequence/kept_choice.h"

enum { KEPT_TIMES = 4 };
static const double WANTED_SHARE = 0.95;

/* ---- what a plan has kept ---- */

static bool goes_on(const select_job *job, const plan *p) {
    const kept_choice *kept = p->kept;
    return kept->tokens && kept->tokens + 1 == p->view.tokens &&
           kept->refresh == job->args->by.refresh && kept->q_heads == job->args->q_heads &&
           kept->scale == job->args->scale &&
           memcmp(&kept->budget, p->budget, sizeof(kept->budget)) == 0;
}

static uint32_t positions_of(const plan *p, const kept_head *kept) {
    return kept->left ? kept->count + p->view.pages - kept->looked : p->view.pages - p->low;
}

static uint32_t page_at(const plan *p, const kept_head *kept, uint32_t at) {
    if (!kept->left) return p->low + at;
    return at < kept->count ? (uint32_t)kept->pages[at] : kept->looked + at - kept->count;
}

void kept_begin(select_job *job, plan *p) {
    const cxlkv_select_args *args = job->args;
    uint32_t method = args->by.method;
    bool by_score = method == CXLKV_METHOD_EXACT || method == CXLKV_METHOD_TWO_STAGE;
    if (args->by.refresh <= 1 || !by_score || is_by_mass(job, p) || !is_scored(p) || p->rows != 1 ||
        args->by.union_over != CXLKV_UNION_KV_HEAD || job->batch->counted_elsewhere)
        return;
    p->kept = kept_take(p->view.sequence, args->layer);
    if (!p->kept) return;
    uint32_t heads = job->layout->kv_heads, tasks = 0;
    bool same = goes_on(job, p);
    for (uint32_t head = 0; head < heads; head++) {
        kept_head *kept = &p->kept->heads[head];
        if (!same) kept->interval = kept->left = kept->count = 0;
        p->narrow |= kept->left > 0;
        kept->first_task = tasks;
        tasks += (positions_of(p, kept) + TASK_PAGES - 1) / TASK_PAGES;
    }
    p->tasks = tasks;
}

void kept_end(const select_job *job, plan *p, int64_t code) {
    const cxlkv_select_args *args = job->args;
    if (!p->kept) return;
    if (code >= 0) {
        p->kept->budget = *p->budget;
        p->kept->scale = args->scale;
        p->kept->q_heads = args->q_heads;
        p->kept->refresh = args->by.refresh;
        p->kept->tokens = p->view.tokens;
        if (!p->narrow) p->kept->estimates = p->stage != NULL;
    } else if (code != -CXLKV_E_ROOM) p->kept->tokens = 0; /* some heads are ahead of others */
    kept_give_back(p->view.sequence);
    p->kept = NULL;
}

/* ---- scoring it ---- */

/* Positions [at, last) of what a head looks at. */
typedef struct kept_walk {
    select_job *job;
    const plan *p;
    const kept_head *kept;
    uint32_t kind, step;         /* what is read of whole pages, and of how many together */
    bool estimates;              /* in place of scores */
    uint32_t head, at, last;
    uint64_t bytes, bytes_sketched; /* that were taken */
} kept_walk;

typedef struct kept_run {
    page_run run;
    uint32_t index[RUN_PAGES];
} kept_run;

/* The next whole pages, none at the end. Those that are not whole are scored on the way. */
static int take_run(kept_walk *w, kept_run *taken) {
    const plan *p = w->p;
    const cxlkv_pool *pool = w->job->batch->pool;
    uint64_t key_bytes = kind_token_bytes(w->job->layout, PIECE_KEYS);
    for (taken->run.count = 0; w->at < w->last && taken->run.count < w->step; w->at++) {
        uint32_t index = page_at(p, w->kept, w->at);
        if (index < p->low) continue;
        if (index < p->view.complete && view_whole(&p->view, index, 0, 1, 1)) {
            uint32_t i = taken->run.count++;
            taken->index[i] = index;
            taken->run.pages[i] = pieces_of(pool, page_of(p, index), p->view.layer, w->kind);
            continue;
        }
        int code = score_page_head(w->job, p, index, w->head);
        if (code < 0) return code;
        w->bytes += view_filled(&p->view, index) * key_bytes;
    }
    uint64_t piece_bytes = w->estimates ? estimated_bytes(w->job)
                                        : pool->layout.page_tokens * key_bytes;
    w->bytes += taken->run.count * piece_bytes;
    if (w->estimates) w->bytes_sketched += taken->run.count * piece_bytes;
    return 0;
}

/* The best estimate of each page. */
static void estimate_run(const kept_walk *w, const page_run *run, float *best) {
    const select_job *job = w->job;
    float uppers[RUN_PAGES][SKETCH_TOKENS], found[RUN_PAGES];
    estimated_blocks asked = {.pages = run->pages, .later = run->later, .count = run->count,
                              .head = w->head};
    asked.first_query = queries_of_list(job, w->p, 0, w->head, &asked.query_count);
    for (; asked.block < blocks_of(job); asked.block++) {
        estimate_blocks(job, &asked, found, uppers);
        for (uint32_t i = 0; i < run->count; i++)
            if (asked.block == 0 || is_better(found[i], best[i])) best[i] = found[i];
    }
}

static int score_taken(const kept_walk *w, kept_run *taken, const kept_run *next) {
    float best[RUN_PAGES], *scores = w->p->scores + (uint64_t)w->head * w->p->view.pages;
    for (uint32_t i = 0; i < taken->run.count; i++) {
        int code = view_verify(&w->p->view, taken->index[i]);
        if (code < 0) return code;
        taken->run.later[i] = i < next->run.count ? next->run.pages[i] : NULL;
    }
    if (w->estimates) estimate_run(w, &taken->run, best);
    else score_run_head(w->job, w->p, w->head, &taken->run, best);
    for (uint32_t i = 0; i < taken->run.count; i++) scores[taken->index[i]] = best[i];
    return 0;
}

int kept_score_task(select_job *job, const plan *p, uint32_t item) {
    const kept_head *heads = p->kept->heads;
    uint32_t head = entry_at(&heads->first_task, sizeof(*heads), job->layout->kv_heads, item);
    bool staged = job->args->by.method == CXLKV_METHOD_TWO_STAGE;
    kept_walk w = {.job = job, .p = p, .kept = &heads[head], .head = head,
                   .estimates = staged && p->kept->estimates,
                   .at = (item - heads[head].first_task) * TASK_PAGES};
    w.kind = w.estimates ? estimated_kind(job->batch->pool) : PIECE_KEYS;
    w.step = page_run_step(job, w.kind, 1);
    w.last = min_u32(w.at + TASK_PAGES, positions_of(p, w.kept));
    kept_run runs[2];
    int code = take_run(&w, &runs[0]);
    for (uint32_t i = 0; code == 0 && runs[i].run.count; i ^= 1) {
        code = take_run(&w, &runs[i ^ 1]);
        if (code == 0) code = score_taken(&w, &runs[i], &runs[i ^ 1]);
    }
    atomic_fetch_add_explicit(&job->bytes_scored, w.bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&job->bytes_sketched, w.bytes_sketched, memory_order_relaxed);
    return code;
}

/* ---- a look at all pages ---- */

/* What the pages of the new list have that had been kept, too. */
static double share_kept(const kept_head *kept, const int32_t *pages, const float *scores,
                         uint32_t count) {
    float largest = kernels_largest(scores, count);
    double found = 0, all = 0;
    for (uint32_t i = 0, at = 0; i < count; i++) {
        double weight = exp((double)(scores[i] - largest));
        while (at < kept->count && kept->pages[at] < pages[i]) at++;
        bool had = at < kept->count && kept->pages[at] == pages[i];
        all += weight;
        if (had || (uint32_t)pages[i] >= kept->looked) found += weight;
    }
    return all > 0 ? found / all : 0; /* of a NaN: 0 */
}

static int keep_best(kept_head *kept, const window *w, const float *scores, uint32_t *ranks) {
    uint32_t sinks = w->sinks - w->low;
    uint32_t wanted = min_u32(w->recent - w->sinks, KEPT_TIMES * free_choices(w));
    if (sinks + wanted > kept->room) {
        int32_t *grown = realloc(kept->pages, (sinks + wanted) * sizeof(*grown));
        if (!grown) return fail(ENOMEM, "no memory to keep %u pages", sinks + wanted);
        kept->pages = grown;
        kept->room = sinks + wanted;
    }
    for (uint32_t i = 0; i < sinks; i++) kept->pages[i] = (int32_t)(w->low + i);
    kept->count = sinks + best_pages(w, wanted, scores, ranks, kept->pages + sinks);
    kept->looked = w->recent;
    return 0;
}

int kept_chosen(const select_job *job, const plan *p, uint32_t head, uint32_t *ranks) {
    const cxlkv_select_args *args = job->args;
    kept_head *kept = &p->kept->heads[head];
    uint32_t heads = job->layout->kv_heads, before = kept->interval;
    uint64_t row = p->first_list * heads + head;
    if (kept->left) {
        kept->left--;
        return 0;
    }
    window w = window_of(job, p, 0);
    bool had = before && share_kept(kept, args->pages + row * args->k, args->scores + row * args->k,
                                    (uint32_t)args->counts[row]) >= WANTED_SHARE;
    kept->interval = had ? min_u32(2 * before, args->by.refresh) : (before + 1) / 2;
    if (kept->interval == 0) kept->interval = 1;
    kept->left = kept->interval - 1;
    if (kept->interval > before && kept->left)
        kept->left -= (args->layer * heads + head + (uint32_t)(p - job->plans)) % kept->interval;
    return keep_best(kept, &w, p->scores + (uint64_t)head * p->view.pages, ranks);
}
