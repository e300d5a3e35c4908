/* What the files of select share: its plans, the job, and how a stage scores pages. */
#ifndef CXLKV_SELECT_H
#define CXLKV_SELECT_H
#include <math.h>
#include <string.h>

#include "format/scorers.h"
#include "kernels/sketch.h"
#include "ndp/ahead.h"
#include "ndp/planes.h"
#include "sequence/kept_choice.h"

typedef struct plan {
    layer_view view;
    uint32_t low;                /* pages before it are behind the window of every row */
    const cxlkv_budget *budget;
    uint64_t first_query, block; /* queries lie [kv_head][block], a block is [row][group] */
    uint64_t first_row, rows;
    uint64_t first_list, lists;
    float *scores;               /* [list][kv_head][page] */
    float *log_sums;             /* by mass only: [kv_head][row][group][page] */
    float *stage; /* two stages, else NULL: what stage_of() finds */
    uint32_t first_task, tasks;
    /* Forks share their first pages: those before `shared` are scored together with the leader's,
     * an earlier plan's, while they are in the cache. Tasks are for the others. */
    struct plan *leader, *follower; /* follower: the next one with the same leader */
    uint32_t shared;
    kept_choice *kept; /* of its sequence, where criteria.refresh is for more steps */
    bool narrow; /* some head looks at what was kept only */
} plan;

typedef struct select_job {
    cxlkv_batch *batch;
    cxlkv_select_args *args;
    const kernels *isa;
    stored keys;                 /* how they are kept */
    kernel_queries queries;      /* of all plans */
    uint64_t query_total;
    const sketch_query *sketch_queries; /* the same ones, for estimates */
    pool_scorer *scorer;         /* NULL: the method is one of the core's */
    plan *plans;
    uint32_t group;
    uint32_t task_pages;         /* of the tasks of all plans that are not narrow */
    atomic_ulong bytes_scored, bytes_fetched, bytes_sketched, tokens_scored;
} select_job;

static inline uint32_t page_of(const plan *p, uint32_t index) {
    return sequence_page(p->view.sequence, p->view.part, index);
}

static inline bool is_scored(const plan *p) {
    return p->rows && p->budget->kind != CXLKV_BUDGET_ALL;
}

/* By the share of the attention that pages hold, in place of their best token's score. */
static inline bool is_by_mass(const select_job *job, const plan *p) {
    return job->args->by.method == CXLKV_METHOD_ATTENTION || p->budget->kind == CXLKV_BUDGET_MASS ||
           (job->scorer && job->scorer->scorer.log_sums);
}

/* Pages of a task at most. */
enum { TASK_PAGES = 64 };

/* Those before it are scored with the leader's. */
static inline uint32_t first_own_page(const plan *p) { return p->leader ? p->shared : p->low; }

typedef struct window {
    uint32_t low, pages;         /* the list's queries can see [low, pages) */
    uint32_t sinks;              /* [low, sinks) are forced in */
    uint32_t recent;             /* and [recent, pages) */
    uint32_t k;                  /* the most that are chosen */
} window;

/* ---- select_choose.c ---- */
/* List `list` of a plan: one query row, or all rows of the sequence. */
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

/* ---- select_kept.c ---- */
/* Takes what the plan's sequence has kept: p->kept, p->narrow and, of a narrow one, p->tasks. */
void kept_begin(select_job *job, plan *p);
/* By what the select came to. */
void kept_end(const select_job *job, plan *p, int64_t code);
/* For the tasks of a narrow plan. */
int kept_score_task(select_job *job, const plan *p, uint32_t item);
/* When a head's pages are chosen; ranks as in choose_pages(). */
int kept_chosen(const select_job *job, const plan *p, uint32_t head, uint32_t *ranks);

/* ---- select_score.c ---- */
enum { QUERY_BLOCK = 64 };
/* By keys, or by the digest if that is the method; next: where its pieces come from, or NULL. */
int score_page(select_job *job, const plan *p, uint32_t index, ahead *next);
int score_page_head(const select_job *job, const plan *p, uint32_t index, uint32_t head);
/* Narrows [*first, *last) to pages that are complete and seen whole by all rows. */
void whole_pages(const plan *p, uint32_t *first, uint32_t *last);
/* The same to pages that score_run() takes: by their keys, and all rows have one list together. */
void run_of(const select_job *job, const plan *p, uint32_t *first, uint32_t *last);
/* ahead: what follows is to be asked for meanwhile. */
int score_run(select_job *job, const plan *p, uint32_t first, uint32_t last, bool ahead);

/* Pages that are read together, and as many behind them, which are asked for meanwhile: where
 * their pieces of a kind are, those of head 0. */
enum { RUN_PAGES = 16 };
typedef struct page_run {
    uint32_t count;
    const uint8_t *pages[RUN_PAGES], *later[RUN_PAGES]; /* later: NULL where nothing is asked for */
} page_run;
/* How many pages of so many heads: not more bytes than a cache holds twice. */
uint32_t page_run_step(const select_job *job, uint32_t kind, uint32_t heads);
/* The next `step` of the pages [at, last), verified. */
int page_run_take(const plan *p, uint32_t kind, uint32_t at, uint32_t last, uint32_t step,
                  bool ahead, page_run *run);
/* One head of a run, by its keys: the best score of each page. */
void score_run_head(const select_job *job, const plan *p, uint32_t head, const page_run *run,
                    float *best);
/* The kind of piece that it reads of complete pages. */
uint32_t scored_kind(const select_job *job);
/* For batch->count * kv_heads items, where pages are chosen by mass: each page's share of it. */
int mass_task(void *context, uint32_t item);

/* ---- select_scorer.c ---- */
/* That the one which the method names is known, and can do what the budgets ask for. */
int scorer_check(const cxlkv_batch *batch, const cxlkv_select_args *args);
/* Of complete pages that have none yet. */
int scorer_summarise(select_job *job);
/* Pages that have no summary, or that some row sees a part of only, are scored by their keys where
 * scores are log-sums, and are else before all others. */
int scorer_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts);

/* ---- select_sketch.c ---- */
/* Floats of scratch for all queries, and for a plan. */
uint64_t sketch_query_floats(const select_job *job, uint64_t query_count);
uint64_t sketch_plan_floats(const select_job *job, const plan *p);
/* The queries of the job, from job->queries. */
void sketch_prepare(select_job *job, float *scratch);
/* For batch->count * kv_heads items, then sketch_errors_all(): how far off estimates are. */
int sketch_sample_task(void *context, uint32_t item);
void sketch_errors_all(select_job *job);

/* ---- select_scan.c ---- */
/* Pages [first, last) of a plan, by estimates; counts: their sketches are not in the cache yet. */
int sketch_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts);
/* For batch->count * kv_heads items, when all pages are: which tokens may matter. */
int sketch_cut_task(void *context, uint32_t item);
/* For the segments of all plans: their keys. */
uint32_t sketch_segments(const plan *p);
int sketch_finish_task(void *context, uint32_t item);
#endif
