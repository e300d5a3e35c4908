/* Lower planes are read where the error that is allowed wants them. */
#pragma once
#include "ndp/types.h"

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
