/* What the files of attend share: its job, and what the work is cut into. */
#ifndef CXLKV_ATTEND_H
#define CXLKV_ATTEND_H
#include "ndp/stored.h"

/* The most queries of a kv head that go together. */
enum { SPAN_QUERIES = 64 };

typedef struct span {
    uint32_t sequence;
    uint32_t head_first, head_count;
    uint64_t row_first, row_count;      /* within the sequence, or the group */
    uint64_t first_query, block;        /* of the sequence or group; as of a select's plan */
    const int32_t *pages;               /* a list, or NULL: the range below */
    uint32_t page_first, page_last;     /* positions in the list, or in the range */
    uint32_t gap_first, gap_pages;      /* a range leaves these pages out */
    bool shared;                        /* rows are of a group, and see all of all pages */
    float *state;                       /* [head][query]{m, l} then [head][query][value_dim] */
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
    atomic_ulong bytes;
    local_reads reads;
} attend_job;

/* ---- attend_cut.c ---- */
/* Sets job->parts, if it is 0, then job->spans and job->merges, which the caller frees. */
int attend_cut(attend_job *job);
void attend_cut_free(attend_job *job);
#endif
