/* Where a text of a model with states can be gone on with: boundary.c. */
#pragma once
#include "prefix/found.h"

/* The longest prefix of what was found that ends at a checkpoint: the sequence holds both. Its last
 * page has fewer tokens than a page if *tokens says so. Under the host lock, on a sequence that
 * nobody else knows yet. */
int match_boundary(cxlkv_pool *pool, const cxlkv_match_args *args, found *f,
                   cxlkv_sequence *sequence, uint64_t *tokens);
