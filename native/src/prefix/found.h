/* What a match found, and the sequence that is made of it. */
#pragma once
#include "sequence/types.h"

/* By part and place in the chain a page, or NO_PAGE. */
typedef struct found {
    uint32_t *pages;             /* [capacity][part_count] */
    uint32_t *keys;              /* [capacity]: how many keys there are up to that page's */
    uint64_t count, capacity;
} found;

/* Pages [0, count) of which the token at `tokens` behind them sees all that there is. The last one
 * may have fewer tokens than a page. */
typedef struct found_prefix {
    uint32_t count;
    uint64_t tokens;
} found_prefix;

int found_add(cxlkv_pool *pool, found *f, uint32_t part, uint32_t ordinal, uint32_t page);
/* Takes the other hosts' pages of a prefix into view. False: some were freed meanwhile, or are
 * damaged, and are no longer among those that were found. */
bool found_borrow(cxlkv_pool *pool, found *f, found_prefix prefix);
/* Holds the pages of a prefix for a sequence that has none. */
int found_hold(cxlkv_pool *pool, const found *f, found_prefix prefix, cxlkv_sequence *sequence);
