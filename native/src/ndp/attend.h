/* What the files of attend share: its job, what the work is cut into, and how that is walked. */
#ifndef CXLKV_ATTEND_H
#define CXLKV_ATTEND_H
#include "ndp/ndp.h"
#include "ndp/planes.h"
#include "tiers/local_tier.h"

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
           head * queries * job->batch->pool->layout.value_head_dim;
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

/* K or V of page i of a block and a head, NULL behind its end. */
static inline const uint8_t *piece_at(const page_block *block, const page_rows *rows, uint32_t i,
                               uint32_t head) {
    return i < block->count ? rows[i].first + head * rows[i].head_bytes : NULL;
}

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

/* ---- attend_walk.c ---- */
/* The next pages, none at the end. Nothing of them is read yet. */
int block_take(span_walk *w, page_block *block);
int block_verify(const span_walk *w, const page_block *block);
/* Pages of a block: enough tokens for a vector or four, not more bytes than a cache holds twice. */
uint32_t block_pages(const attend_job *job, const span *s);
/* The log weights of a block's tokens, one page behind the other, to w->weights. */
int block_weigh(const span_walk *w, const page_block *block);
/* Logits [count][tokens] under args->softcap. */
void cap_logits(const attend_job *job, float *logits, uint64_t count);
/* What some queries of a head have of the pages before: all of it is rescaled together. */
typedef struct softmax_state {
    float (*states)[2];
    float *accumulator;                 /* [query][value_dim], or NULL */
    float *sums;                        /* of weights: the last pages', [query][sum_stride] */
    uint64_t sum_count, sum_stride;
    const float *log_weights;           /* [tokens], added to all queries' logits; NULL: none */
} softmax_state;
/* logits [count][tokens] to weights; raises the queries' maxima, and rescales all else. */
void online_softmax(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                    const softmax_state *state);

/* ---- attend_planes.c ---- */
/* Floats that a span needs in its .upper. */
uint64_t planes_span_floats(const attend_job *job, const span *s);
void planes_prepare(attend_job *job); /* fills job->spreads */
/* A task for each span, before those that attend: logits by upper planes, and what they sum to. */
int planes_measure_task(void *context, uint32_t item);
/* What the spans of a merge have measured, by head and query of a span: M, the largest logit, and
 * M + log of the sum. */
void planes_totals(const attend_job *job, const span *s, float (*totals)[2]);
/* Whole blocks one after the other, from `at` in the span's .upper on; returns where the next one
 * begins there. room: as many floats as one head's logits of a page. Counts what it reads. */
float *planes_attend_block(const span_walk *w, const page_block *block, const page_block *later,
                           float *at, float (*totals)[2], float *room, uint64_t *bytes);

/* ---- attend_mass.c ---- */
/* Floats that a span needs in its .sums. */
uint64_t mass_span_floats(const attend_job *job, const span *s);
void mass_begin(const attend_job *job, const span *s, mass_steps *steps);
/* Of a head's queries from one on, before the page at position `at`. */
softmax_state mass_state(const span_walk *w, uint32_t at, uint32_t head, uint64_t query);
/* Weights of `count` queries of a head, `stride` apart, of the page at position `at`. */
void mass_of_rows(const span_walk *w, uint32_t at, uint32_t head, uint64_t query, uint32_t count,
                  const float *weights, uint32_t stride, uint32_t tokens);
/* Of all queries of some heads from one on, [head][query][token]. */
void mass_of_block(const span_walk *w, const page_block *block, uint32_t head, uint32_t heads,
                   const float *weights);
/* After the pages up to position `end`, of all heads and queries. */
void mass_step(const span_walk *w, uint32_t end);
void mass_end(const span_walk *w);
float *mass_of_row(const attend_job *job, uint64_t row, uint32_t kv_head);
/* What a span has of some queries, times a factor each, to their row's pages. */
void mass_add(const attend_job *job, const span *s, uint32_t head, uint64_t query,
              const float *factors, uint32_t count, float *to);

/* ---- attend_virtual.c ---- */
/* The span's share of its list's virtual rows, before its first page. logits: room for those of
 * BLOCK_TOKENS rows and SPAN_QUERIES queries. */
int virtual_attend(const span_walk *w, float *logits);

/* ---- attend_cut.c ---- */
/* Sets job->parts, if it is 0, then job->spans and job->merges, which the caller frees. */
int attend_cut(attend_job *job);
void attend_cut_free(attend_job *job);
#endif
