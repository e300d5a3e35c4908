/* Pages that are not full are published and matched. */
#pragma once
#include "sequence/types.h"

/* Adds the longest published page that is not full behind the sequence's pages, if there is one;
 * the sequence is nobody else's. Returns its tokens, or 0. */
int64_t match_tail(cxlkv_sequence *sequence, const cxlkv_match_args *args);
