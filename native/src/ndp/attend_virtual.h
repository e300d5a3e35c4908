/* Virtual rows, which lie in no page, are attended to. */
#pragma once
#include "ndp/types.h"

/* The span's share of its list's virtual rows, before its first page. logits: room for those of
 * BLOCK_TOKENS rows and SPAN_QUERIES queries. */
int virtual_attend(const span_walk *w, float *logits);
