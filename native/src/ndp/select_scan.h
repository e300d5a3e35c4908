/* Pages are scored by estimates, then the tokens that may matter by their keys. */
#pragma once
#include "ndp/types.h"

/* Pages [first, last) of a plan, by estimates; counts: their sketches are not in the cache yet. */
int sketch_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts);
/* For batch->count * kv_heads items, when all pages are: which tokens may matter. */
int sketch_cut_task(void *context, uint32_t item);
/* For the segments of all plans: their keys. */
uint32_t sketch_segments(const plan *p);
int sketch_finish_task(void *context, uint32_t item);
