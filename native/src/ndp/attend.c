/* Attend: softmax(q.k) v over chosen or all pages, streamed; output and log-sum-exp, mergeable.
 *
 * Online softmax (Milakov and Gimelshein, arXiv 1805.02867), float32 accumulators. A span is a
 * block of query rows over a range of pages and kv heads; spans of the same rows and heads are
 * merged by their log-sum-exp at the end, as in flash-decoding. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ndp/ahead.h"
#include "pool/peers.h"

enum { SPAN_QUERIES = 64, SPAN_PAGES_MIN = 64, SPANS_WANTED = 128 };

typedef struct span {
    uint32_t sequence;
    uint32_t head_first, head_count;
    uint64_t row_first, row_count;      /* within the sequence */
    const int32_t *pages;               /* a list, or NULL: the range below */
    uint32_t page_first, page_last;     /* positions in the list, or page indices */
    float *state;                       /* [head][query]{m, l} then [head][query][value_dim] */
} span;

typedef struct attend_job {
    cxlkv_batch *batch;
    cxlkv_attend_args *args;
    const kernels *isa;
    kernel_queries queries;             /* of all sequences */
    uint32_t group, rows;
    span *spans;
    uint32_t span_count;
    uint32_t parts;                     /* neighbouring spans that share rows and heads */
    atomic_ulong bytes;
    local_reads reads;
} attend_job;

static uint64_t span_queries(const attend_job *job, const span *s) {
    return s->row_count * job->group;
}

static float *state_of(const attend_job *job, const span *s, uint32_t head) {
    return s->state + head * span_queries(job, s) * 2;
}

static float *accumulator_of(const attend_job *job, const span *s, uint32_t head) {
    uint64_t queries = span_queries(job, s);
    return s->state + s->head_count * queries * 2 +
           head * queries * job->batch->pool->layout.value_head_dim;
}

/* logits[tokens] of one query to weights; raises the query's maximum, rescales its sum. */
static float softmax_row(const kernels *isa, float *logits, uint32_t tokens, float state[2]) {
    float largest = state[0], factor = 1;
    bool broken = false;
    for (uint32_t t = 0; t < tokens; t++) {
        if (logits[t] > largest) largest = logits[t];
        broken |= isnan(logits[t]);
    }
    if (broken) state[1] = NAN; /* as full attention would: such a key spoils the output, visibly */
    if (largest == -INFINITY) {
        memset(logits, 0, tokens * sizeof(float));
        return 1;
    }
    if (largest > state[0]) factor = state[0] == -INFINITY ? 0.0f : expf(state[0] - largest);
    state[0] = largest;
    state[1] = state[1] * factor + isa->exp_sum(logits, tokens, largest);
    return factor;
}

/* The same of `count` queries; rescales what they have accumulated. */
static void online_softmax(const attend_job *job, float *logits, uint32_t tokens, uint32_t count,
                           float (*states)[2], float *accumulator) {
    enum { TOGETHER = 4 };
    uint32_t value_dim = job->batch->pool->layout.value_head_dim;
    float cap = job->args->softcap, factors[TOGETHER];
    for (uint32_t i = 0; cap > 0 && i < count * tokens; i++)
        logits[i] = cap * tanhf(logits[i] / cap);
    for (uint32_t first = 0; first < count; first += TOGETHER) {
        uint32_t here = min_u32(TOGETHER, count - first);
        float *rows = logits + (uint64_t)first * tokens;
        bool done = job->isa->online_softmax &&
                    job->isa->online_softmax(rows, tokens, here, states + first, factors);
        if (!done)
            for (uint32_t i = 0; i < here; i++)
                factors[i] = softmax_row(job->isa, rows + (uint64_t)i * tokens, tokens,
                                         states[first + i]);
        for (uint32_t i = 0; i < here; i++) {
            float *sums = accumulator + (uint64_t)(first + i) * value_dim;
            if (factors[i] == 1) continue; /* nearly always, after the first pages */
            for (uint32_t d = 0; d < value_dim; d++) sums[d] *= factors[i];
        }
    }
}

/* One head of a page, and what is asked for while it is worked on. */
typedef struct head_rows {
    uint32_t tokens;             /* that the page holds */
    bool whole;                  /* all rows of the span see all of it */
    page_rows keys, values;
    const uint8_t *next_keys, *next_values;
} head_rows;

/* `count` queries that all see the tokens [hidden, hidden + tokens) of one head's page. */
static void attend_block(const attend_job *job, uint64_t first_query, uint32_t count,
                         uint32_t hidden, uint32_t tokens, const head_rows *rows, float *state,
                         float *accumulator, float *logits) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint32_t value_dim = layout->value_head_dim;
    kernel_queries queries = queries_range(job->queries, first_query, count);
    job->isa->score((int)layout->dtype, rows->keys.first + hidden * rows->keys.row_bytes,
                    rows->keys.row_bytes, tokens, layout->head_dim, &queries, job->args->scale,
                    logits, tokens, rows->next_keys);
    online_softmax(job, logits, tokens, count, (float(*)[2])state, accumulator);
    job->isa->accumulate((int)layout->dtype, rows->values.first + hidden * rows->values.row_bytes,
                         rows->values.row_bytes, tokens, value_dim, logits, tokens, count,
                         accumulator, rows->next_values);
}

static void attend_head(const attend_job *job, const span *s, const layer_view *view,
                        uint32_t index, uint32_t head, head_rows *seen, float *logits) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    const cxlkv_attend_args *args = job->args;
    uint32_t group = job->group;
    uint64_t rows = (uint64_t)(args->starts[s->sequence + 1] - args->starts[s->sequence]);
    uint64_t first_query = (uint64_t)args->starts[s->sequence] * args->q_heads +
                           ((s->head_first + head) * rows + s->row_first) * group;
    float *state = state_of(job, s, head), *accumulator = accumulator_of(job, s, head);
    uint64_t row = 0, together = s->row_count;
    uint32_t visible = seen->tokens, hidden = 0;
    while (row < s->row_count) {
        if (!seen->whole) {
            uint64_t place = s->row_first + row;
            visible = view_visible(view, index, place, rows);
            hidden = view_hidden(view, index, place, rows);
            together = view_together(view, index, place, rows, s->row_count - row);
            visible = visible > hidden ? visible - hidden : 0;
        }
        uint64_t first = row * group, last = (row + together) * group;
        for (uint64_t query = first; visible && query < last; query += SPAN_QUERIES) {
            attend_block(job, first_query + query,
                         (uint32_t)min_u64(SPAN_QUERIES, last - query), hidden, visible, seen,
                         state + 2 * query, accumulator + query * layout->value_head_dim, logits);
            seen->next_keys = seen->next_values = NULL; /* once is enough */
        }
        row += together;
    }
}

static int attend_page(const attend_job *job, const span *s, const layer_view *view,
                       uint32_t index, ahead *keys, ahead *values, float *logits) {
    page_rows first = view_rows(view, index, PIECE_KEYS);
    int code = first.local ? 0 : view_verify(view, index);
    if (code < 0) return code;
    uint64_t all = (uint64_t)(job->args->starts[s->sequence + 1] - job->args->starts[s->sequence]);
    head_rows rows = {.tokens = view_filled(view, index),
                      .whole = view_whole(view, index, s->row_first, s->row_count, all),
                      .keys = first,
                      .values = view_rows(view, index, PIECE_VALUES)};
    rows.keys.first += s->head_first * rows.keys.head_bytes;
    rows.values.first += s->head_first * rows.values.head_bytes;
    for (uint32_t head = 0; head < s->head_count; head++) {
        rows.next_keys = ahead_next(keys);
        rows.next_values = values_are_keys(&job->batch->pool->layout) ? NULL : ahead_next(values);
        attend_head(job, s, view, index, head, &rows, logits);
        rows.keys.first += rows.keys.head_bytes;
        rows.values.first += rows.values.head_bytes;
    }
    return 0;
}

static int attend_span(void *context, uint32_t item) {
    attend_job *job = context;
    const span *s = &job->spans[item];
    const cxlkv_layout *layout = &job->batch->pool->layout;
    layer_view view = view_of(job->batch->sequences[s->sequence], job->args->layer);
    view.local = job->batch->pool->local;
    uint64_t queries = span_queries(job, s) * s->head_count, bytes = 0;
    uint64_t token_bytes = row_channels(layout) * dtype_bytes(layout->dtype) * s->head_count;
    float *logits = malloc(SPAN_QUERIES * layout->page_tokens * sizeof(float));
    if (!logits) return fail(ENOMEM, "no memory for logits");
    for (uint64_t i = 0; i < queries; i++) {
        s->state[2 * i] = -INFINITY;
        s->state[2 * i + 1] = 0;
    }
    memset(s->state + 2 * queries, 0, queries * layout->value_head_dim * sizeof(float));
    if (view.local && s->pages)
        local_count_reads(&view, s->pages + s->page_first, s->page_last - s->page_first,
                         &job->reads);
    int code = 0;
    uint32_t head_end = s->head_first + s->head_count;
    ahead keys = ahead_begin(&view, PIECE_KEYS, s->pages, s->page_first, s->page_last,
                             s->head_first, head_end, false);
    ahead values = ahead_begin(&view, PIECE_VALUES, s->pages, s->page_first, s->page_last,
                               s->head_first, head_end, false);
    for (uint32_t at = s->page_first; code == 0 && at < s->page_last; at++) {
        int64_t index = s->pages ? s->pages[at] : (int64_t)at;
        if (index == -1 && s->pages) continue;
        if (index < 0 || index >= view.pages) {
            code = fail(CXLKV_E_ARGUMENT, "attend: page %ld, the sequence has %u", index,
                        view.pages);
            break;
        }
        if (index < view.first) continue; /* behind the window of every row */
        code = attend_page(job, s, &view, (uint32_t)index, &keys, &values, logits);
        bytes += token_bytes * view_filled(&view, (uint32_t)index);
    }
    free(logits);
    atomic_fetch_add_explicit(&job->bytes, bytes, memory_order_relaxed);
    return code;
}

/* ---- merging ---- */

static void write_query(const attend_job *job, uint64_t row, uint32_t q_head, float *accumulator,
                        float largest, float sum) {
    const cxlkv_attend_args *args = job->args;
    uint32_t value_dim = job->batch->pool->layout.value_head_dim;
    uint64_t place = row * args->q_heads + q_head;
    float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    for (uint32_t d = 0; d < value_dim; d++) accumulator[d] *= inverse;
    job->isa->from_float((int)args->queries.dtype, accumulator, value_dim,
                         (uint8_t *)args->out +
                             place * value_dim * dtype_bytes(args->queries.dtype));
    args->lse[place] = sum == 0 ? -INFINITY : largest + logf(sum);
}

/* All parts of one (rows, head): into the first part's accumulator, then out. */
static void merge_query(const attend_job *job, const span *parts, uint32_t head, uint64_t query) {
    uint32_t value_dim = job->batch->pool->layout.value_head_dim;
    float largest = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < job->parts; i++) {
        float m = state_of(job, &parts[i], head)[2 * query];
        if (m > largest) largest = m;
    }
    float *total = accumulator_of(job, &parts[0], head) + query * value_dim;
    for (uint32_t i = 0; i < job->parts; i++) {
        const float *state = state_of(job, &parts[i], head) + 2 * query;
        const float *part = accumulator_of(job, &parts[i], head) + query * value_dim;
        float factor = state[0] == -INFINITY ? 0.0f : expf(state[0] - largest);
        sum += isnan(state[1]) ? state[1] : factor * state[1];
        for (uint32_t d = 0; d < value_dim; d++)
            total[d] = i == 0 ? factor * part[d] : total[d] + factor * part[d];
    }
    uint64_t row = (uint64_t)job->args->starts[parts->sequence] + parts->row_first +
                   query / job->group;
    uint32_t q_head = (parts->head_first + head) * job->group + (uint32_t)(query % job->group);
    write_query(job, row, q_head, total, largest, sum);
}

static int merge_task(void *context, uint32_t item) {
    const attend_job *job = context;
    const span *parts = &job->spans[item * job->parts];
    for (uint32_t head = 0; head < parts->head_count; head++)
        for (uint64_t query = 0; query < span_queries(job, parts); query++)
            merge_query(job, parts, head, query);
    return 0;
}

/* ---- cutting the work into spans ---- */

/* How many pages, from *low on, `count` rows from `row` on see; without a window all. */
static uint32_t pages_in_sight(const layer_view *view, uint64_t row, uint64_t count, uint64_t rows,
                               uint32_t *low) {
    uint64_t page_tokens = view->sequence->pool->layout.page_tokens;
    *low = 0;
    if (view->window == 0) return view->pages;
    uint64_t last = view->tokens - rows + row + count - 1;
    *low = (uint32_t)(view_low(view, row, rows) / page_tokens);
    return (uint32_t)(last / page_tokens) + 1 - *low;
}

/* Picked: a span for each (list, head). All pages: for each block of rows, cut in `parts`. */
static uint32_t cut(attend_job *job, span *out) {
    const cxlkv_attend_args *args = job->args;
    const cxlkv_picked *picked = &args->picked;
    uint32_t heads = job->batch->pool->layout.kv_heads, count = 0;
    uint64_t block = SPAN_QUERIES / job->group ? SPAN_QUERIES / job->group : 1;
    bool per_query = picked->pages && picked->per == CXLKV_PER_QUERY;
    if (per_query) block = 1;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        uint64_t rows = (uint64_t)(args->starts[i + 1] - args->starts[i]);
        layer_view view = view_of(job->batch->sequences[i], args->layer);
        for (uint64_t row = 0; row < rows; row += block) {
            span made = {.sequence = i, .row_first = row, .row_count = min_u64(block, rows - row),
                         .head_count = picked->pages ? 1 : heads};
            uint64_t list = per_query ? (uint64_t)args->starts[i] + row : i;
            for (uint32_t head = 0; picked->pages && head < heads; head++, count++) {
                if (!out) continue;
                made.head_first = head;
                made.pages = picked->pages + (list * heads + head) * picked->k;
                made.page_last = picked->k;
                out[count] = made;
            }
            uint32_t low, pages = pages_in_sight(&view, row, made.row_count, rows, &low);
            for (uint32_t part = 0; !picked->pages && part < job->parts; part++, count++) {
                if (!out) continue;
                made.page_first = low + (uint32_t)((uint64_t)pages * part / job->parts);
                made.page_last = low + (uint32_t)((uint64_t)pages * (part + 1) / job->parts);
                out[count] = made;
            }
        }
    }
    return count;
}

/* The same for any number of threads: where the sums are cut decides their last bits. */
static void choose_parts(attend_job *job) {
    uint32_t pages = 0;
    job->parts = 1;
    if (job->args->picked.pages) return;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        layer_view view = view_of(job->batch->sequences[i], job->args->layer);
        uint64_t reach = view.window / job->batch->pool->layout.page_tokens + 1;
        uint32_t mine = view.window ? (uint32_t)min_u64(view.pages, reach) : view.pages;
        if (mine > pages) pages = mine;
    }
    uint32_t blocks = cut(job, NULL);
    if (blocks == 0 || blocks >= SPANS_WANTED) return;
    uint32_t wanted = (SPANS_WANTED + blocks - 1) / blocks;
    job->parts = min_u32(wanted, pages / SPAN_PAGES_MIN > 1 ? pages / SPAN_PAGES_MIN : 1);
}

static int place_states(attend_job *job) {
    const cxlkv_layout *layout = &job->batch->pool->layout;
    uint64_t queries = (uint64_t)job->rows * job->args->q_heads;
    uint64_t query_floats = queries_bytes(job->batch, job->isa, queries) / sizeof(float);
    uint64_t floats = query_floats + queries * job->parts * (2ull + layout->value_head_dim);
    if (!batch_scratch(job->batch, floats * sizeof(float) + LINE_BYTES)) return -ENOMEM;
    float *at = (float *)job->batch->scratch + query_floats;
    for (uint32_t i = 0; i < job->span_count; i++) {
        job->spans[i].state = at;
        at += span_queries(job, &job->spans[i]) * job->spans[i].head_count *
              (2 + layout->value_head_dim);
    }
    return 0;
}

static int picked_check(const attend_job *job) {
    const cxlkv_picked *picked = &job->args->picked;
    if (!picked->pages) return 0;
    uint32_t wanted = picked->per == CXLKV_PER_QUERY ? job->rows : job->batch->count;
    if (picked->lists == wanted) return 0;
    return fail(CXLKV_E_ARGUMENT, "attend: %u lists of pages, %u wanted", picked->lists, wanted);
}

int attend_check(const cxlkv_attend_args *args) {
    if (args->scale > 0 && args->scale < INFINITY && args->softcap >= 0) return 0;
    return fail(CXLKV_E_ARGUMENT, "attend: scale %g and softcap %g must be positive",
                (double)args->scale, (double)args->softcap);
}

uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args) {
    attend_job job = {.batch = batch, .args = args,
                      .group = args->q_heads / batch->pool->layout.kv_heads};
    choose_parts(&job);
    return job.parts;
}

static int64_t attend_locked(attend_job *job) {
    cxlkv_attend_args *args = job->args;
    cxlkv_batch *batch = job->batch;
    int code = queries_check(batch, args->layer, args->q_heads, &args->queries, args->starts,
                             &job->rows);
    if (code < 0) return code;
    job->group = args->q_heads / batch->pool->layout.kv_heads;
    code = picked_check(job);
    if (code < 0) return code;
    if (job->parts == 0) choose_parts(job);
    job->span_count = cut(job, NULL);
    if (job->parts > 1 && job->span_count >= 2 * SPANS_WANTED)
        return fail(CXLKV_E_ARGUMENT, "attend: pages in %u parts are %u spans", job->parts,
                    job->span_count);
    job->spans = calloc(job->span_count + 1, sizeof(*job->spans));
    if (!job->spans) return fail(ENOMEM, "no memory for %u spans", job->span_count);
    cut(job, job->spans);
    code = place_states(job);
    if (code < 0) return code;
    job->queries = queries_pack(batch, job->isa, &args->queries, args->q_heads, args->starts,
                                batch->scratch);
    code = run_step_tasks(batch->pool, job->span_count, attend_span, job);
    uint32_t merges = job->span_count / job->parts;
    if (code == 0) code = run_step_tasks(batch->pool, merges, merge_task, job);
    if (code < 0) return code;
    uint64_t bytes = atomic_load(&job->bytes);
    count_add(batch->pool, COUNT_ATTENDED_BYTES, bytes);
    hotness_count(batch, args->layer, &args->picked, args->starts);
    return (int64_t)bytes;
}

int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts) {
    attend_job job = {.batch = batch, .args = args, .isa = kernels_current(), .parts = parts};
    int64_t code = batch_lock(batch, false);
    if (code < 0) return code;
    local_enter(batch->pool);
    code = attend_locked(&job);
    local_leave(batch->pool, &job.reads);
    code = peers_verify(job.batch->pool, code);
    batch_unlock(batch);
    free(job.spans);
    return code;
}
