/* The attention of each page, from the weights that the online softmax makes anyway.
 *
 * A weight is exp(logit - m), m the largest logit of its query so far. A span keeps the sum of the
 * weights of each page and query. Like what is accumulated of the values, sums are rescaled when m
 * is raised, but only those of a step, some pages: else pages of which each has a larger m would
 * take the square of their number. A step that is over keeps its m, and is rescaled at the end.
 * Where spans are merged, sums become shares of the row's attention. */
#include <math.h>

#include "ndp/attend_mass.h"

enum { STEP_PAGES = 64 };

static uint64_t pages_of(const span *s) { return s->page_last - s->page_first; }

static uint64_t queries_of(const attend_job *job, const span *s) {
    return s->head_count * span_queries(job, s);
}

static float *sums_of(const attend_job *job, const span *s, uint32_t head, uint64_t query) {
    return s->sums + (head * span_queries(job, s) + query) * pages_of(s);
}

/* ---- of a span: .sums, then of each step its largest logits and where it ends ---- */

static uint64_t steps_most(const span *s) { return pages_of(s) / STEP_PAGES; }

uint64_t mass_span_floats(const attend_job *job, const span *s) {
    return (pages_of(s) + steps_most(s)) * queries_of(job, s) + steps_most(s);
}

void mass_begin(const attend_job *job, const span *s, mass_steps *steps) {
    uint64_t sums = pages_of(s) * queries_of(job, s);
    memset(s->sums, 0, sums * sizeof(float));
    steps->first = s->page_first;
    steps->largest = s->sums + sums;
    steps->ends = (uint32_t *)(steps->largest + steps_most(s) * queries_of(job, s));
}

softmax_state mass_state(const span_walk *w, uint32_t at, uint32_t head, uint64_t query) {
    const attend_job *job = w->job;
    const span *s = w->s;
    softmax_state made = {.states = (float(*)[2])state_of(job, s, head) + query,
                          .accumulator = accumulator_of(job, s, head) +
                                         query * job->layout->value_head_dim};
    if (!w->steps) return made;
    made.sums = sums_of(job, s, head, query) + (w->steps->first - s->page_first);
    made.sum_count = at - w->steps->first;
    made.sum_stride = pages_of(s);
    return made;
}

/* What every CPU of these two architectures can do: 4 numbers at once. */
typedef float four __attribute__((vector_size(16)));

static float sum_of(const float *weights, uint32_t tokens) {
    four sums = {0}, others = {0}, x[2];
    float sum = 0;
    for (; tokens >= 8; tokens -= 8, weights += 8) {
        memcpy(x, weights, sizeof(x));
        sums += x[0];
        others += x[1];
    }
    sums += others;
    for (; tokens; tokens--) sum += *weights++;
    return sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void mass_of_rows(const span_walk *w, uint32_t at, uint32_t head, uint64_t query, uint32_t count,
                  const float *weights, uint32_t stride, uint32_t tokens) {
    uint64_t pages = pages_of(w->s);
    float *sums = sums_of(w->job, w->s, head, query) + (at - w->s->page_first);
    for (uint32_t q = 0; q < count; q++)
        sums[q * pages] = sum_of(weights + (uint64_t)q * stride, tokens);
}

void mass_of_block(const span_walk *w, const page_block *block, uint32_t head, uint32_t heads,
                   const float *weights) {
    const kernels *isa = w->job->isa;
    uint64_t queries = heads * span_queries(w->job, w->s), pages = pages_of(w->s);
    uint32_t count = block->count, wide = block->held[0];
    float *sums = w->s->sums + head * span_queries(w->job, w->s) * pages +
                  (block->at[0] - w->s->page_first);
    /* No page has more tokens than a full one, and those of a tail all have the same. */
    bool even = block->tokens == count * wide && block->at[count - 1] - block->at[0] == count - 1;
    if (even && isa->part_sums &&
        isa->part_sums(weights, count, wide, (uint32_t)queries, sums, pages))
        return;
    for (uint64_t q = 0; q < queries; q++, sums += pages)
        for (uint32_t i = 0; i < count; weights += block->held[i++])
            sums[block->at[i] - block->at[0]] = sum_of(weights, block->held[i]);
}

void mass_step(const span_walk *w, uint32_t end) {
    const span *s = w->s;
    mass_steps *steps = w->steps;
    uint64_t queries = queries_of(w->job, s);
    if (end - steps->first < STEP_PAGES) return;
    float *largest = steps->largest + steps->count * queries;
    for (uint64_t i = 0; i < queries; i++) largest[i] = s->state[2 * i];
    steps->ends[steps->count++] = steps->first = end;
}

void mass_end(const span_walk *w) {
    const span *s = w->s;
    const mass_steps *steps = w->steps;
    uint64_t queries = queries_of(w->job, s), pages = pages_of(s);
    uint32_t at = 0;
    for (uint32_t step = 0; step < steps->count; step++) {
        const float *largest = steps->largest + step * queries;
        uint32_t end = steps->ends[step] - s->page_first;
        for (uint64_t i = 0; i < queries; i++) {
            if (largest[i] == s->state[2 * i]) continue;
            float factor = expf(largest[i] - s->state[2 * i]), *sums = s->sums + i * pages;
            for (uint32_t page = at; page < end; page++) sums[page] *= factor;
        }
        at = end;
    }
}

/* ---- of a row ---- */

/* Of four rows at once, what is added to is loaded and stored once. */
static void add_times(float *restrict to, const float *from, uint64_t stride, uint64_t pages,
                      const float *factors, uint32_t count) {
    uint32_t q = 0;
    for (; q + 4 <= count; q += 4, from += 4 * stride) {
        const float *a = from, *b = a + stride, *c = b + stride, *d = c + stride;
        const float e = factors[q], f = factors[q + 1], g = factors[q + 2], h = factors[q + 3];
        for (uint64_t i = 0; i < pages; i++)
            to[i] += (e * a[i] + f * b[i]) + (g * c[i] + h * d[i]);
    }
    for (; q < count; q++, from += stride)
        for (uint64_t i = 0; i < pages; i++) to[i] += factors[q] * from[i];
}

float *mass_of_row(const attend_job *job, uint64_t row, uint32_t kv_head) {
    return job->mass + (row * job->layout->kv_heads + kv_head) * job->mass_k;
}

void mass_add(const attend_job *job, const span *s, uint32_t head, uint64_t query,
              const float *factors, uint32_t count, float *to) {
    const float *sums = sums_of(job, s, head, query);
    uint64_t pages = pages_of(s), before = pages;
    if (s->gap_pages) /* pages from there on are so many further on */
        before = s->gap_first > s->page_first ? min_u64(pages, s->gap_first - s->page_first) : 0;
    to += s->page_first;
    add_times(to, sums, pages, before, factors, count);
    if (before < pages)
        add_times(to + before + s->gap_pages, sums + before, pages, pages - before, factors, count);
}
