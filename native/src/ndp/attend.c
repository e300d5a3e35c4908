/* Attend: softmax(q.k) v over chosen or all pages, streamed; output and log-sum-exp, mergeable.
 *
 * Online softmax (Milakov and Gimelshein, arXiv 1805.02867), float32 accumulators. A span is a
 * block of query rows over a range of pages and kv heads; spans of the same rows and heads are
 * merged by their log-sum-exp at the end, as in flash-decoding. */
#include <math.h>

#include "host/threads.h"
#include "ndp/attend.h"
#include "ndp/attend_cut.h"
#include "ndp/attend_mass.h"
#include "ndp/attend_planes.h"
#include "ndp/attend_virtual.h"
#include "ndp/attend_walk.h"
#include "ndp/stored.h"
#include "sequence/batch.h"
#include "sequence/usage.h"
#include "sharing/this_host.h"
#include "tiers/local_tier.h"

/* Of several heads, unless one has more: 64 KiB. */
enum { LOGITS_TOGETHER = 16 << 10 };

/* One head of a page. */
typedef struct head_rows {
    uint32_t at, tokens;         /* its position, and what it holds */
    bool whole;                  /* all rows of the span see all of it */
    const float *weights;        /* of its tokens, or NULL */
    page_rows keys, values;
} head_rows;

/* `count` queries that all see the tokens [hidden, hidden + tokens) of one head's page. */
static void attend_rows(const span_walk *w, uint32_t head, uint64_t query, uint32_t count,
                        uint32_t hidden, uint32_t tokens, const head_rows *rows, float *logits) {
    const attend_job *job = w->job;
    softmax_state state = mass_state(w, rows->at, head, query);
    if (rows->weights) state.log_weights = rows->weights + hidden;
    kernel_queries queries =
        queries_range(job->queries, first_query_of(job, w->s, head) + query, count);
    stored_score(&job->keys, rows->keys.first, rows->keys.row_bytes, hidden, tokens, &queries,
                 job->args->scale, logits, tokens, NULL);
    online_softmax(job, logits, tokens, count, &state);
    if (w->steps) mass_of_rows(w, rows->at, head, query, count, logits, tokens, tokens);
    stored_accumulate(&job->values, rows->values.first, rows->values.row_bytes, hidden, tokens,
                      logits, tokens, count, state.accumulator, NULL);
}

static void attend_head(const span_walk *w, uint32_t index, uint32_t head, const head_rows *seen,
                        float *logits) {
    const span *s = w->s;
    const layer_view *view = &w->view;
    uint32_t group = w->job->group;
    uint64_t row = 0, together = s->row_count;
    uint32_t visible = seen->tokens, hidden = 0;
    while (row < s->row_count) {
        if (!seen->whole) {
            uint64_t place = s->row_first + row;
            visible = view_visible(view, index, place, w->rows);
            hidden = view_hidden(view, index, place, w->rows);
            together = view_together(view, index, place, w->rows, s->row_count - row);
            visible = visible > hidden ? visible - hidden : 0;
        }
        uint64_t first = row * group, last = (row + together) * group;
        for (uint64_t query = first; visible && query < last; query += SPAN_QUERIES)
            attend_rows(w, head, query, (uint32_t)min_u64(SPAN_QUERIES, last - query), hidden,
                        visible, seen, logits);
        row += together;
    }
}

/* Page by page and head by head, as they lie in memory. */
static void score_whole(const whole_block *b) {
    const attend_job *job = b->w->job;
    const kernel_queries *all = b->w->s->shared ? &job->group_queries : &job->queries;
    for (uint32_t i = 0, done = 0; i < b->block->count; done += b->block->held[i], i++)
        for (uint32_t head = b->head_first; head < b->head_last; head++) {
            uint32_t at = b->w->s->head_first + head;
            kernel_queries queries =
                queries_range(*all, first_query_of(job, b->w->s, head), b->queries);
            const uint8_t *next = values_are_keys(job->layout)
                                      ? piece_at(b->later, b->later->keys, i, at)
                                      : piece_at(b->block, b->block->values, i, at);
            stored_score(&job->keys, piece_at(b->block, b->block->keys, i, at),
                         b->block->keys[i].row_bytes, 0, b->block->held[i], &queries,
                         job->args->scale, logits_of(b, head) + done, b->block->tokens, next);
        }
}

static void accumulate_page(const whole_block *b, uint32_t head, uint32_t i, uint32_t done) {
    const attend_job *job = b->w->job;
    const cxlkv_layout *layout = job->layout;
    uint32_t at = b->w->s->head_first + head;
    const uint8_t *next = piece_at(b->later, b->later->keys, i, at);
    stored_accumulate(&job->values, piece_at(b->block, b->block->values, i, at),
                      b->block->values[i].row_bytes, 0, b->block->held[i],
                      logits_of(b, head) + done, b->block->tokens, b->queries,
                      accumulator_of(job, b->w->s, head), values_are_keys(layout) ? NULL : next);
}

static void accumulate_codes(const whole_block *b, uint32_t head) {
    const attend_job *job = b->w->job;
    const cxlkv_layout *layout = job->layout;
    uint32_t at = b->w->s->head_first + head;
    code_piece pieces[BLOCK_PAGES];
    const void *next[BLOCK_PAGES];
    for (uint32_t i = 0; i < b->block->count; i++) {
        pieces[i] = stored_codes(&job->values, piece_at(b->block, b->block->values, i, at));
        next[i] = values_are_keys(layout) ? NULL : piece_at(b->later, b->later->keys, i, at);
    }
    job->isa->code_accumulate_pieces(&job->values.form, pieces, next, b->block->count,
                                     b->block->held[0], logits_of(b, head), b->block->tokens,
                                     b->queries, accumulator_of(job, b->w->s, head));
}

/* Of one head, all pages together. */
static void accumulate_head(const whole_block *b, uint32_t head) {
    const attend_job *job = b->w->job;
    const cxlkv_layout *layout = job->layout;
    uint32_t at = b->w->s->head_first + head;
    const void *values[BLOCK_PAGES], *next[BLOCK_PAGES];
    bool by_page = job->values.planes || job->values.fp8;
    for (uint32_t i = 0, done = 0; by_page && i < b->block->count; i++) {
        accumulate_page(b, head, i, done);
        done += b->block->held[i];
    }
    if (by_page) return;
    if (job->values.encoded) {
        accumulate_codes(b, head);
        return;
    }
    for (uint32_t i = 0; i < b->block->count; i++) {
        values[i] = piece_at(b->block, b->block->values, i, at);
        next[i] = values_are_keys(layout) ? NULL : piece_at(b->later, b->later->keys, i, at);
    }
    job->isa->accumulate_pieces((int)layout->dtype, values, next, b->block->count,
                                b->block->values[0].row_bytes, b->block->held[0],
                                layout->value_head_dim, logits_of(b, head), b->block->tokens,
                                b->queries, accumulator_of(job, b->w->s, head));
}

/* The accumulators of many queries do not stay in the first cache from page to page. */
static bool goes_by_head(const whole_block *b) {
    enum { QUERIES_MIN = 8 };
    const page_block *block = b->block;
    const attend_job *job = b->w->job;
    if (b->queries < QUERIES_MIN) return false;
    if (job->values.planes || job->values.fp8) return block->count > 1;
    if (job->values.encoded ? !job->isa->code_accumulate_pieces : !job->isa->accumulate_pieces)
        return false;
    for (uint32_t i = 1; i < block->count; i++)
        if (block->held[i] != block->held[0] ||
            block->values[i].row_bytes != block->values[0].row_bytes)
            return false;
    return block->count > 1;
}

static void accumulate_whole(const whole_block *b) {
    bool by_head = goes_by_head(b);
    for (uint32_t head = b->head_first; by_head && head < b->head_last; head++)
        accumulate_head(b, head);
    for (uint32_t i = 0, done = 0; !by_head && i < b->block->count; done += b->block->held[i], i++)
        for (uint32_t head = b->head_first; head < b->head_last; head++)
            accumulate_page(b, head, i, done);
}

/* Of how many heads the logits of a block of `tokens` are made before they are used. */
static uint32_t heads_together(const attend_job *job, const span *s, uint32_t tokens) {
    uint64_t heads = LOGITS_TOGETHER / (span_queries(job, s) * tokens);
    return (uint32_t)min_u64(s->head_count, heads ? heads : 1);
}

static void attend_whole(const span_walk *w, const page_block *block, const page_block *later,
                         float *logits) {
    const attend_job *job = w->job;
    uint32_t step = heads_together(job, w->s, block->tokens);
    whole_block b = {.w = w, .block = block, .later = later, .logits = logits,
                     .queries = (uint32_t)span_queries(job, w->s)};
    for (b.head_first = 0; b.head_first < w->s->head_count; b.head_first = b.head_last) {
        b.head_last = min_u32(b.head_first + step, w->s->head_count);
        score_whole(&b);
        for (uint32_t head = b.head_first; head < b.head_last; head++) {
            softmax_state state = mass_state(w, block->at[0], head, 0);
            state.log_weights = w->weights;
            online_softmax(job, logits_of(&b, head), block->tokens, b.queries, &state);
        }
        if (w->steps) mass_of_block(w, block, b.head_first, b.head_last - b.head_first, logits);
        accumulate_whole(&b);
    }
}

/* Page i of a block of which not all rows see all; weights: of its tokens, or NULL. */
static void attend_part(const span_walk *w, const page_block *block, uint32_t i,
                        const float *weights, float *logits) {
    const span *s = w->s;
    head_rows rows = {.at = block->at[i], .tokens = block->held[i], .keys = block->keys[i],
                      .values = block->values[i], .weights = weights,
                      .whole = view_whole(&w->view, block->index[i], s->row_first, s->row_count,
                                          w->rows)};
    rows.keys.first += s->head_first * rows.keys.head_bytes;
    rows.values.first += s->head_first * rows.values.head_bytes;
    for (uint32_t head = 0; head < s->head_count; head++) {
        attend_head(w, block->index[i], head, &rows, logits);
        rows.keys.first += rows.keys.head_bytes;
        rows.values.first += rows.values.head_bytes;
    }
    if (w->steps) mass_step(w, block->at[i] + 1);
}

/* What a span of a job that is sparing goes on with. */
typedef struct sparing {
    float *at;                   /* of the next whole block; NULL: all bits are read */
    float (*totals)[2];
    uint64_t bytes;
} sparing;

static int attend_block(const span_walk *w, const page_block *block, const page_block *later,
                        float *logits, sparing *upper) {
    int code = block_verify(w, block);
    if (code == 0 && w->weights) code = block_weigh(w, block);
    if (code < 0) return code;
    bool together = block->whole && span_queries(w->job, w->s) <= SPAN_QUERIES;
    bool spares = together && upper->at;
    if (spares)
        upper->at = planes_attend_block(w, block, later, upper->at, upper->totals, logits,
                                        &upper->bytes);
    else
        upper->bytes +=
            block->tokens * token_bytes(w->job->layout) * w->s->head_count;
    if (together && !spares) attend_whole(w, block, later, logits);
    for (uint32_t i = 0, done = 0; !together && i < block->count; done += block->held[i++])
        attend_part(w, block, i, w->weights ? w->weights + done : NULL, logits);
    if (together && w->steps) mass_step(w, block->at[block->count - 1] + 1);
    return 0;
}

static int attend_pages(span_walk *w, float *logits, sparing *upper) {
    page_block blocks[2];
    int code = block_take(w, &blocks[0]);
    for (uint32_t i = 0; code == 0 && blocks[i].count; i ^= 1) {
        code = block_take(w, &blocks[i ^ 1]);
        if (code == 0) code = attend_block(w, &blocks[i], &blocks[i ^ 1], logits, upper);
    }
    return code;
}

static int attend_span(void *context, uint32_t item) {
    attend_job *job = context;
    const span *s = &job->spans[item];
    const cxlkv_layout *layout = job->layout;
    span_walk walk = {.job = job, .s = s, .at = s->page_first, .step = block_pages(job, s),
                      .view = view_of(job->batch->sequences[s->sequence], job->args->layer),
                      .rows = (uint64_t)(job->args->starts[s->sequence + 1] -
                                         job->args->starts[s->sequence])};
    walk.view.local = tier_of(job->batch->pool);
    uint64_t queries = span_queries(job, s) * s->head_count;
    uint32_t wide = layout->page_tokens > BLOCK_TOKENS ? layout->page_tokens : BLOCK_TOKENS;
    uint64_t one_head = SPAN_QUERIES * wide, most = LOGITS_TOGETHER;
    uint64_t logits_most = one_head > most ? one_head : most;
    float *room = malloc((logits_most + 2 * queries + wide) * sizeof(float) + LINE_BYTES);
    sparing upper = {0};
    if (!room) return fail(ENOMEM, "no memory for logits");
    float *logits = (float *)align_up((uintptr_t)room, LINE_BYTES), *totals = logits + logits_most;
    for (uint64_t i = 0; i < queries; i++) {
        s->state[2 * i] = -INFINITY;
        s->state[2 * i + 1] = 0;
    }
    memset(s->state + 2 * queries, 0, queries * layout->value_head_dim * sizeof(float));
    if (walk.view.local && s->pages)
        local_count_reads(&walk.view, s->pages + s->page_first, s->page_last - s->page_first,
                          &job->reads);
    if (job->sparing) {
        upper.at = s->upper + 2 * queries;
        upper.totals = (float(*)[2])totals;
        planes_totals(job, s, upper.totals);
    }
    mass_steps steps = {0};
    if (job->weighs) mass_begin(job, s, walk.steps = &steps);
    if (job->args->picked.log_weights) walk.weights = totals + 2 * queries;
    int code = job->args->picked.row_count ? virtual_attend(&walk, logits) : 0;
    if (code == 0) code = attend_pages(&walk, logits, &upper);
    if (walk.steps) mass_end(&walk);
    free(room);
    atomic_fetch_add_explicit(&job->bytes, upper.bytes, memory_order_relaxed);
    return code;
}

/* ---- merging ---- */

static void write_query(const attend_job *job, uint64_t row, uint32_t q_head, float *accumulator,
                        float largest, float sum) {
    const cxlkv_attend_args *args = job->args;
    uint32_t value_dim = job->layout->value_head_dim;
    uint64_t place = row * args->q_heads + q_head;
    float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    for (uint32_t d = 0; d < value_dim; d++) accumulator[d] *= inverse;
    if (job->values.encoded) code_unrotate(accumulator, 1, value_dim);
    job->isa->from_float((int)args->queries.dtype, accumulator, value_dim,
                         (uint8_t *)args->out +
                             place * value_dim * dtype_bytes(args->queries.dtype));
    args->lse[place] = sum == 0 ? -INFINITY : largest + logf(sum);
}

/* One head of a span that a merge is made of, from a query on. */
typedef struct partial {
    const span *s;
    uint32_t head;
    uint64_t query;
    float *state, *sums;
} partial;

static partial partial_of(const attend_job *job, const merge *m, uint32_t i, uint32_t head,
                          uint64_t query) {
    uint64_t heads = job->layout->kv_heads;
    const span *s = &job->spans[m->first + i];
    if (i >= m->count) {
        s = &job->spans[m->shared + (i - m->count) * heads + head];
        head = 0;
        query += m->shared_query;
    }
    return (partial){.s = s, .head = head, .query = query,
                     .state = state_of(job, s, head) + 2 * query,
                     .sums = accumulator_of(job, s, head) +
                             query * job->layout->value_head_dim};
}

/* The mean of a group's queries, which are merged: their states are factors and, of the first part,
 * what the sum is to be multiplied by. */
static void merge_mass(const attend_job *job, const merge *m, uint32_t head, uint64_t query) {
    enum { TOGETHER = 16 };
    const span *s = &job->spans[m->first];
    uint64_t row = (uint64_t)job->args->starts[s->sequence] + s->row_first + query / job->group;
    float *to = mass_of_row(job, row, s->head_first + head), factors[TOGETHER];
    const float *all = partial_of(job, m, 0, head, query).state;
    memset(to, 0, job->mass_k * sizeof(*to));
    for (uint32_t i = 0; i < m->count + m->shared_count; i++)
        for (uint32_t first = 0; first < job->group; first += TOGETHER) {
            partial p = partial_of(job, m, i, head, query + first);
            uint32_t count = min_u32(TOGETHER, job->group - first);
            for (uint32_t q = 0; q < count; q++)
                factors[q] = p.state[2 * q] * all[2 * (first + q) + 1];
            mass_add(job, p.s, p.head, p.query, factors, count, to);
        }
}

/* All parts of one (rows, head): into the first part's accumulator, then out. */
static void merge_query(const attend_job *job, const merge *m, uint32_t head, uint64_t query) {
    const span *s = &job->spans[m->first];
    uint32_t value_dim = job->layout->value_head_dim;
    uint32_t count = m->count + m->shared_count;
    float largest = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        float found = partial_of(job, m, i, head, query).state[0];
        if (found > largest) largest = found;
    }
    float *total = partial_of(job, m, 0, head, query).sums;
    for (uint32_t i = 0; i < count; i++) {
        partial p = partial_of(job, m, i, head, query);
        float factor = p.state[0] == -INFINITY ? 0.0f : expf(p.state[0] - largest);
        sum += isnan(p.state[1]) ? p.state[1] : factor * p.state[1];
        for (uint32_t d = 0; d < value_dim; d++)
            total[d] = i == 0 ? factor * p.sums[d] : total[d] + factor * p.sums[d];
        p.state[0] = factor; /* for merge_mass() */
    }
    uint64_t row = (uint64_t)job->args->starts[s->sequence] + s->row_first + query / job->group;
    uint32_t q_head = (s->head_first + head) * job->group + (uint32_t)(query % job->group);
    write_query(job, row, q_head, total, largest, sum);
    partial_of(job, m, 0, head, query).state[1] = sum == 0 ? 0 : 1 / (sum * (float)job->group);
}

static int merge_task(void *context, uint32_t item) {
    const attend_job *job = context;
    const merge *m = &job->merges[item];
    const span *s = &job->spans[m->first];
    for (uint32_t head = 0; head < s->head_count; head++)
        for (uint64_t query = 0; query < span_queries(job, s); query++) {
            merge_query(job, m, head, query);
            if (job->weighs && (query + 1) % job->group == 0)
                merge_mass(job, m, head, query + 1 - job->group);
        }
    return 0;
}

/* ---- putting it together ---- */

/* Logits of more than this are not kept, nor where there is no memory: then all bits are read. */
#define SPARING_BYTES_MAX (1ull << 30)

static uint64_t sparing_floats(const attend_job *job) {
    uint64_t floats = queries_total(job->batch, job->layout->kv_heads, job->args->q_heads,
                                    job->args->starts);
    for (uint32_t i = 0; i < job->span_count; i++)
        floats += planes_span_floats(job, &job->spans[i]);
    return floats;
}

/* Lays out job->room: the queries' spreads and the spans' .upper, then the spans' .sums, then the
 * mass where only hotness wants it. */
static int place_room(attend_job *job) {
    uint64_t upper = job->sparing ? sparing_floats(job) : 0, sums = 0;
    uint64_t mass = (uint64_t)job->rows * job->layout->kv_heads * job->mass_k;
    if (upper * sizeof(float) > SPARING_BYTES_MAX) upper = 0;
    for (uint32_t i = 0; job->weighs && i < job->span_count; i++)
        sums += mass_span_floats(job, &job->spans[i]);
    if (job->weighs) sums += job->args->mass ? 1 : mass + 1;
    if (upper + sums) job->room = room_take(job->batch->pool, (upper + sums) * sizeof(float));
    job->sparing = upper && job->room;
    if (!job->room) job->weighs = false;
    if (job->args->mass && !job->weighs) return fail(ENOMEM, "no memory for what pages weigh");
    if (!job->weighs) return 0;
    float *at = job->room + upper;
    for (uint32_t i = 0; i < job->span_count; i++) {
        job->spans[i].sums = at;
        at += mass_span_floats(job, &job->spans[i]);
    }
    job->mass = job->args->mass ? job->args->mass : at;
    return 0;
}

/* Scratch: packed queries, then those of groups, then the states of spans. */
static int place_scratch(attend_job *job) {
    const cxlkv_attend_args *args = job->args;
    cxlkv_batch *batch = job->batch;
    const cxlkv_layout *layout = job->layout;
    uint64_t state_floats = 2 + layout->value_head_dim, floats = 0, group_bytes = 0;
    uint32_t heads = layout->kv_heads, q_heads = args->q_heads;
    uint64_t query_bytes =
        queries_bytes(layout, job->isa, queries_total(batch, heads, q_heads, args->starts));
    if (job->sharers)
        group_bytes =
            queries_bytes(layout, job->isa, queries_total(batch, heads, q_heads,
                                                          job->group_starts));
    for (uint32_t i = 0; i < job->span_count; i++)
        floats += span_queries(job, &job->spans[i]) * job->spans[i].head_count * state_floats;
    int code = place_room(job);
    if (code < 0) return code;
    uint64_t bytes = query_bytes + group_bytes + floats * sizeof(float);
    uint8_t *at = batch_scratch(batch, bytes + LINE_BYTES);
    if (!at) return -ENOMEM;
    query_source source = {&args->queries, layout, args->q_heads, args->starts, NULL, args->scale};
    job->queries = queries_pack(batch, job->isa, &source, at);
    source.starts = job->group_starts;
    source.order = job->group_order;
    if (job->sharers)
        job->group_queries = queries_pack(batch, job->isa, &source, at + query_bytes);
    float *state = (float *)(at + query_bytes + group_bytes);
    for (uint32_t i = 0; i < job->span_count; i++) {
        job->spans[i].state = state;
        state += span_queries(job, &job->spans[i]) * job->spans[i].head_count * state_floats;
    }
    if (job->sparing) {
        job->spreads = job->room;
        state = job->room + job->queries.total;
        for (uint32_t i = 0; i < job->span_count; i++) {
            job->spans[i].upper = state;
            state += planes_span_floats(job, &job->spans[i]);
        }
        planes_prepare(job);
    }
    return 0;
}

static int picked_bounds(const cxlkv_layout *layout, const cxlkv_picked *picked, uint32_t rows,
                         uint32_t sequences) {
    uint32_t wanted = picked->per == CXLKV_PER_QUERY ? rows : sequences;
    if (!picked->pages && (picked->log_weights || picked->row_count))
        return fail(CXLKV_E_ARGUMENT, "attend: weights and virtual rows are of lists of pages");
    if (picked->log_weights && picked->weight_tokens != 1 &&
        picked->weight_tokens != layout->page_tokens)
        return fail(CXLKV_E_ARGUMENT, "attend: log_weights of %u tokens a page: 1 or %u",
                    picked->weight_tokens, layout->page_tokens);
    if (picked->per > CXLKV_PER_SEQUENCE)
        return fail(CXLKV_E_ARGUMENT, "attend: a list per %u, which is unknown", picked->per);
    if (!picked->pages || picked->lists == wanted) return 0;
    return fail(CXLKV_E_ARGUMENT, "attend: %u lists of pages, %u wanted", picked->lists, wanted);
}

/* Where the pages of a row's attention go, if anything asks for it. */
static int mass_check(attend_job *job) {
    cxlkv_attend_args *args = job->args;
    uint32_t pages = args->picked.pages ? args->picked.k : 0;
    for (uint32_t i = 0; !args->picked.pages && i < job->batch->count; i++) {
        layer_view view = view_of(job->batch->sequences[i], args->layer);
        if (view.pages > pages) pages = view.pages;
    }
    uint64_t wanted = (uint64_t)job->rows * job->layout->kv_heads * pages;
    job->weighs = args->mass || hotness_weighs(job->batch);
    job->mass_k = args->mass_k = pages;
    if (!args->mass || args->mass_capacity >= wanted) return 0;
    return fail(CXLKV_E_ROOM, "attend: mass of %lu elements, room for %lu", wanted,
                args->mass_capacity);
}

int attend_bounds(const cxlkv_layout *layout, const cxlkv_attend_args *args, uint32_t rows,
                  uint32_t sequences) {
    int code = queries_bounds(layout, args->q_heads, args->queries.dtype, rows);
    if (code < 0) return code;
    if (!(args->error >= 0 && args->error < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "attend: an error of %g", (double)args->error);
    if (!(args->scale > 0 && args->scale < INFINITY && args->softcap >= 0 &&
          args->softcap < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "attend: scale %g and softcap %g must be positive and finite",
                    (double)args->scale, (double)args->softcap);
    return picked_bounds(layout, &args->picked, rows, sequences);
}

int attend_check(const cxlkv_batch *batch, const cxlkv_attend_args *args) {
    const cxlkv_picked *picked = &args->picked;
    uint32_t rows = rows_asked(batch, args->starts);
    int code = need(rows, "queries", args->queries.data, "out", args->out, "lse", args->lse, NULL);
    if (code == 0)
        code = need((uint64_t)picked->lists * picked->row_count, "row_keys", picked->row_keys,
                    "row_values", picked->row_values, "row_log_counts", picked->row_log_counts,
                    NULL);
    if (code == 0) code = layer_check(batch->pool, args->layer);
    return code < 0 ? code
                    : attend_bounds(layout_of(batch->pool, args->layer), args, rows, batch->count);
}

static int64_t attend_locked(attend_job *job) {
    cxlkv_attend_args *args = job->args;
    cxlkv_batch *batch = job->batch;
    int code = queries_check(batch, args->layer, args->q_heads, &args->queries, args->starts,
                             &job->rows);
    if (code < 0) return code;
    job->group = args->q_heads / job->layout->kv_heads;
    code = mass_check(job);
    if (code < 0) return code;
    code = attend_cut(job);
    if (code == 0) code = place_scratch(job);
    if (code < 0) return code;
    if (job->sparing) code = run_step_tasks(batch->pool, job->span_count, planes_measure_task, job);
    if (code == 0) code = run_step_tasks(batch->pool, job->span_count, attend_span, job);
    if (code == 0) code = run_step_tasks(batch->pool, job->merge_count, merge_task, job);
    if (code < 0) return code;
    uint64_t bytes = atomic_load(&job->bytes);
    count_add(batch->pool, COUNT_ATTENDED_BYTES, bytes);
    if (job->weighs)
        hotness_weigh(batch, args->layer, &args->picked, args->starts, job->mass, job->mass_k);
    else
        hotness_count(batch, args->layer, &args->picked, args->starts);
    return (int64_t)bytes;
}

int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts) {
    int64_t code = layer_check(batch->pool, args->layer);
    if (code < 0) return code;
    const cxlkv_layout *layout = layout_of(batch->pool, args->layer);
    attend_job job = {.batch = batch, .layout = layout, .args = args, .isa = kernels_current(),
                      .parts = parts};
    job.keys = stored_of(layout, job.isa, PIECE_KEYS);
    job.values = stored_of(layout, job.isa, PIECE_VALUES);
    /* Pages' shares are measured without weights. */
    job.sparing = args->error > 0 && (job.keys.planes || job.values.planes) &&
                  !args->picked.log_weights;
    code = batch_lock(batch, false);
    if (code < 0) return code;
    local_enter(batch->pool);
    code = attend_locked(&job);
    local_leave(batch->pool, &job.reads);
    code = peers_verify(job.batch->pool, code);
    batch_unlock(batch);
    room_give(batch->pool, job.room);
    attend_cut_free(&job);
    return code;
}
