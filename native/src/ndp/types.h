/* What selecting, attending and fetching share: a layer of a sequence as they read it, the plans
 * and the job of a select, the job of an attend and what it is cut into. */
#pragma once
#include "format/scorers.h"
#include "kernels/sketch.h"
#include "sequence/kept_choice.h"
#include "tiers/local_tier.h"

/* K or V of one page, all heads: where head 0, token 0 is, and how far the next ones are. Of a kind
 * that is encoded, where the pieces are. */
typedef struct page_rows {
    const uint8_t *first;
    uint64_t head_bytes;
    size_t row_bytes;
    bool local;                   /* of a copy, which was verified when it was made */
} page_rows;
static inline __attribute__((always_inline)) page_rows
view_rows(const layer_view *view, uint32_t index, uint32_t kind) {
    cxlkv_pool *pool = view->sequence->pool;
    const layer_shape *shape = shape_of(pool, view->layer);
    bool keys = kind == PIECE_KEYS || values_are_keys(&shape->layout);
    uint32_t own = keys ? PIECE_KEYS : PIECE_VALUES;
    page_rows rows = {.row_bytes = stored_row_bytes(&shape->layout, own)};
    if (index < view->complete) {
        uint32_t page = sequence_page(view->sequence, view->part, index);
        rows.first = pieces_of(pool, page, view->layer, kind);
        rows.head_bytes = shape->strides[own];
        bool looks = __builtin_expect(view->local != NULL, 0);
        const uint8_t *copy = looks ? view_copy(view, page, keys) : NULL;
        if (copy) {
            rows.first = copy;
            rows.local = true;
        }
    } else {
        rows.first = tail_at(&shape->layout, view->sequence->tails[view->layer], kind, 0);
        rows.head_bytes =
            is_encoded(&shape->layout) ? tail_piece_bytes(&shape->layout, own) : rows.row_bytes;
        rows.row_bytes = tail_row_bytes(&shape->layout, own);
    }
    return rows;
}

/* How keys or values are kept. */
typedef struct stored {
    const kernels *isa;
    int dtype;                   /* as kernels take it */
    uint32_t dim;
    bool fp8;
    bool encoded, planes;        /* in codes; those in two planes */
    code_form form, upper;       /* upper: of the upper plane, where there are two */
    size_t scales_offset;        /* of a piece of codes */
    size_t lower_offset;         /* from a block's upper plane to its lower one */
} stored;

/* ---- select ---- */

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
    const cxlkv_layout *layout;  /* of the layer */
    const uint64_t *strides;     /* of its pieces */
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

/* ---- attend ---- */

/* The most queries of a kv head that go together. */
enum { SPAN_QUERIES = 64 };

typedef struct span {
    uint32_t sequence;
    uint32_t head_first, head_count;
    uint64_t row_first, row_count;      /* within the sequence, or the group */
    uint64_t first_query, block;        /* of the sequence or group; as of a select's plan */
    const int32_t *pages;               /* a list, or NULL: the range below */
    uint64_t list;                      /* which one, of all lists' kv heads */
    uint32_t page_first, page_last;     /* positions in the list, or in the range */
    uint32_t gap_first, gap_pages;      /* a range leaves these pages out */
    bool shared;                        /* rows are of a group, and see all of all pages */
    float *state;                       /* [head][query]{m, l} then [head][query][value_dim] */
    uint32_t merge;                     /* that it is a part of, unless shared */
    float *upper;                       /* of a job that is sparing: attend_planes.c */
    float *sums;                        /* of one that weighs pages: [head][query][page] */
} span;

/* What the output of some rows is made of. */
typedef struct merge {
    uint32_t first, count;              /* spans of these rows alone: parts of their pages */
    uint32_t shared, shared_count;      /* of their group, part by part, with a span a head */
    uint64_t shared_query;              /* of the first row, in a head of these */
} merge;

/* A sequence of an attend to all pages. Those that have their first pages in common are a group of
 * at most SPAN_QUERIES queries a head, which are read once for all. */
typedef struct sharer {
    layer_view view;                    /* .complete: all rows see all of the pages before it */
    uint64_t rows;
    uint32_t first;                     /* and all from here on */
    struct sharer *leader, *follower;   /* follower: the next one with the same leader */
    uint32_t end;                       /* pages [leader's first, end) are read with the group */
    uint64_t group_rows;                /* of a leader: of all */
    uint64_t group_row;                 /* its first among them: the more it shares, the earlier */
    uint32_t spans, parts;              /* as a merge's shared, shared_count */
} sharer;

typedef struct attend_job {
    cxlkv_batch *batch;
    const cxlkv_layout *layout;         /* of the layer */
    cxlkv_attend_args *args;
    const kernels *isa;
    stored keys, values;                /* how they are kept */
    kernel_queries queries;             /* of all sequences */
    kernel_queries group_queries;       /* of all groups, likewise */
    uint32_t group, rows;
    sharer *sharers;                    /* NULL: no pages are shared */
    int32_t *group_starts, *group_order; /* rows of the groups, as queries_pack() takes them */
    span *spans;
    merge *merges;
    uint32_t span_count, merge_count;
    uint32_t parts;                     /* that the pages of a row are cut in, unless shared */
    bool sparing;                       /* lower planes are read where args->error wants them */
    float *room;                        /* for what follows, and the spans' .upper and .sums */
    float *spreads;                     /* by query, the variance of a logit by the upper plane
                                         * alone, over the square of its token's scale */
    bool weighs;                        /* fills mass, [row][kv_head][mass_k]: attend_mass.c */
    float *mass;
    uint64_t mass_k;
    atomic_ulong bytes;
    local_reads reads;
} attend_job;

/* Pages that are attended to together, while as many behind them are asked for. */
enum { BLOCK_PAGES = 8, BLOCK_TOKENS = 64, BLOCK_BYTES = 128 << 10 };
static inline uint64_t span_queries(const attend_job *job, const span *s) {
    return s->row_count * job->group;
}

static inline float *state_of(const attend_job *job, const span *s, uint32_t head) {
    return s->state + head * span_queries(job, s) * 2;
}

static inline float *accumulator_of(const attend_job *job, const span *s, uint32_t head) {
    uint64_t queries = span_queries(job, s);
    return s->state + s->head_count * queries * 2 +
           head * queries * job->layout->value_head_dim;
}

/* Of a head of a span, in the queries of the job or its groups. */
static inline uint64_t first_query_of(const attend_job *job, const span *s, uint32_t head) {
    return s->first_query + (s->head_first + head) * s->block + s->row_first * job->group;
}

/* Some pages of a span, one behind the other in its list. */
typedef struct page_block {
    uint32_t count, tokens;             /* tokens: of all */
    bool whole;                         /* all rows of the span see all of all */
    uint32_t index[BLOCK_PAGES], held[BLOCK_PAGES];
    uint32_t at[BLOCK_PAGES];           /* positions, as of the span */
    page_rows keys[BLOCK_PAGES], values[BLOCK_PAGES];
} page_block;

/* Of a span that weighs pages, some that are taken together: attend_mass.c. */
typedef struct mass_steps {
    uint32_t first;                     /* position at which the present one begins */
    uint32_t count;                     /* that are over */
    float *largest;                     /* [step][head][query] */
    uint32_t *ends;                     /* positions */
} mass_steps;

/* A span, and how far its pages have been taken. */
typedef struct span_walk {
    const attend_job *job;
    const span *s;
    layer_view view;
    uint64_t rows;                      /* of the sequence */
    uint32_t at, step;                  /* pages of a block */
    mass_steps *steps;                  /* of a job that weighs pages */
    float *weights;                     /* room for those of a block's tokens; NULL: there are none
                                         */
} span_walk;

/* Some heads of a block of pages that all rows of the span see whole. */
typedef struct whole_block {
    const span_walk *w;
    const page_block *block, *later;
    uint32_t head_first, head_last, queries;
    float *logits;                      /* [head][query][token] */
} whole_block;

static inline float *logits_of(const whole_block *b, uint32_t head) {
    return b->logits + (uint64_t)(head - b->head_first) * b->queries * b->block->tokens;
}

/* What some queries of a head have of the pages before: all of it is rescaled together. */
typedef struct softmax_state {
    float (*states)[2];
    float *accumulator;                 /* [query][value_dim], or NULL */
    float *sums;                        /* of weights: the last pages', [query][sum_stride] */
    uint64_t sum_count, sum_stride;
    const float *log_weights;           /* [tokens], added to all queries' logits; NULL: none */
} softmax_state;
