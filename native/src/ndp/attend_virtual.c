/* Attend: virtual rows, tokens of no page that a choice brings along.
 *
 * They are cut into as many parts as the pages of their list, so that each takes part once, in the
 * span of its part, by the same softmax as the pages' tokens. That comes before the first page:
 * values of pages that are codes are summed in the rotated space, and so what is there of other
 * values is rotated once, however many rows there are. */
#include <math.h>

#include "ndp/attend_mass.h"
#include "ndp/attend_virtual.h"
#include "ndp/attend_walk.h"

/* Rows [first, first + count) of all virtual rows, which are all there. */
static void attend_some(const span_walk *w, uint64_t first, uint32_t count, float *logits) {
    const attend_job *job = w->job;
    const cxlkv_picked *picked = &job->args->picked;
    const cxlkv_layout *layout = job->layout;
    uint32_t dim = layout->head_dim, value_dim = layout->value_head_dim;
    uint64_t queries = span_queries(job, w->s);
    kernel_queries some = {.rows = job->queries.rows, .total = job->queries.total};
    for (uint64_t query = 0; query < queries; query += SPAN_QUERIES) {
        softmax_state state = mass_state(w, w->s->page_first, 0, query);
        state.log_weights = picked->row_log_counts + first;
        some.first = (uint32_t)(first_query_of(job, w->s, 0) + query);
        some.count = (uint32_t)min_u64(SPAN_QUERIES, queries - query);
        job->isa->score(CXLKV_FLOAT32, picked->row_keys + first * dim, dim * sizeof(float), count,
                        dim, &some, job->args->scale, logits, count, NULL);
        online_softmax(job, logits, count, some.count, &state);
        job->isa->accumulate(CXLKV_FLOAT32, picked->row_values + first * value_dim,
                             value_dim * sizeof(float), count, value_dim, logits, count,
                             some.count, state.accumulator, NULL);
    }
}

/* From row `at` on, how many there are before one that is not, or `end`; a block at most. */
static uint32_t run_of(const float *log_counts, uint64_t at, uint64_t end) {
    uint64_t last = at;
    while (last < end && last < at + BLOCK_TOKENS && log_counts[last] != -INFINITY) last++;
    return (uint32_t)(last - at);
}

static bool is_wrong(const float *log_counts, uint32_t count) {
    bool wrong = false;
    for (uint32_t i = 0; i < count; i++) wrong |= !(log_counts[i] < INFINITY);
    return wrong;
}

int virtual_attend(const span_walk *w, float *logits) {
    const attend_job *job = w->job;
    const span *s = w->s;
    const cxlkv_layout *layout = job->layout;
    const cxlkv_picked *picked = &job->args->picked;
    const merge *m = &job->merges[s->merge];
    uint64_t list = s->list * picked->row_count, part = (uint64_t)(s - job->spans) - m->first;
    uint64_t at = list + picked->row_count * part / m->count;
    uint64_t end = list + picked->row_count * (part + 1) / m->count;
    for (uint32_t count; at < end; at += count ? count : 1) {
        count = run_of(picked->row_log_counts, at, end);
        if (is_wrong(picked->row_log_counts + at, count))
            return fail(CXLKV_E_ARGUMENT, "attend: log_counts have NaN or infinity in list %lu of "
                        "kv head %u: numbers and -infinity are wanted",
                        s->list / layout->kv_heads, s->head_first);
        if (count) attend_some(w, at, count, logits);
    }
    if (job->values.encoded)
        code_rotate(accumulator_of(job, s, 0), (uint32_t)span_queries(job, s),
                    layout->value_head_dim);
    return 0;
}
