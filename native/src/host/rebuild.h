/* Lists, holders and the index are made again from their primary records, under the host lock. */
#pragma once
#include "format/types.h"

void host_rebuild_runs(cxlkv_pool *pool, uint32_t first_run, uint32_t count);  /* of 64 pages */
void host_rebuild(cxlkv_pool *pool);      /* lists, holders and index from their primary records */
/* All that we have published, in the log: whoever died may not have come to say it. */
void log_again(cxlkv_pool *pool);
/* The sealed record whose rewriting a death broke off is whole again. */
void rewrite_repair(cxlkv_pool *pool);
int host_recount(cxlkv_pool *pool, char *text, size_t text_bytes);  /* problems found */
#if CXLKV_DEBUG >= 2
void host_assert(cxlkv_pool *pool);
#else
#define host_assert(pool) ((void)(pool))
#endif
