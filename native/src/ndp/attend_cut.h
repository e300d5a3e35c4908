/* An attend is cut into spans, and these into merges. */
#pragma once
#include "ndp/types.h"

/* Sets job->parts, if it is 0, then job->spans and job->merges, which the caller frees. */
int attend_cut(attend_job *job);
void attend_cut_free(attend_job *job);
/* Into how many ranges the pages of each row are cut, under the locks of the batch: together with
 * the call's rows it decides the last bits of the output. */
uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args);
