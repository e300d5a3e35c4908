/* State checkpoints are published, found and read: states.c. */
#pragma once
#include "prefix/found.h"

/* The pages of the whole checkpoint under a key, and after how many tokens it was taken, other
 * hosts' taken into view; false: there is none. Under the host lock. */
bool states_find(cxlkv_pool *pool, const uint8_t *key, uint32_t *pages, uint64_t *tokens);
/* Those of other hosts that nobody here holds go out of view. */
void states_let_go(cxlkv_pool *pool, const uint32_t *pages);
/* Some page of one is there: the others are worth a look. */
bool states_expected(const cxlkv_pool *pool, const uint8_t *key);
