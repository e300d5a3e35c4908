/* Pages are scored by a method that the core does not have. */
#pragma once
#include "ndp/types.h"

/* That the one which the method names is known, and can do what the budgets ask for. */
int scorer_check(const cxlkv_batch *batch, const cxlkv_select_args *args);
/* Of complete pages that have none yet. */
int scorer_summarise(select_job *job);
/* Pages that have no summary, or that some row sees a part of only, are scored by their keys where
 * scores are log-sums, and are else before all others. */
int scorer_score_pages(select_job *job, const plan *p, uint32_t first, uint32_t last, bool counts);
