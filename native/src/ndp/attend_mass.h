/* Pages are weighed while they are attended to. */
#pragma once
#include "ndp/types.h"

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
