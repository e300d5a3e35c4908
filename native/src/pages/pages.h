/* Pages are held, dropped, scrubbed and freed.
 *
 * The caller has the host lock, unless a comment says otherwise. */
#pragma once
#include "format/types.h"

void pages_hold(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* Without the host lock: the next call of this process that has it drops them. Never fails. */
void pages_drop_later(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop_late(cxlkv_pool *pool);   /* those */
void pages_drop_slot(cxlkv_pool *pool, uint32_t slot);  /* all that its process holds */
/* Frees those that nothing needs any more; neighbours share their looks and fences. */
void pages_settle(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* Bit i is page first + i of a pin word, that nothing here needs: free, or withdrawn. */
void pages_free_word(cxlkv_pool *pool, uint32_t first, uint64_t pages);
void withdrawn_look(cxlkv_pool *pool);    /* frees those that nobody pins any more */
/* Before a page is free: zeros in all of it, if somebody asked for that. False: it is retired. */
bool page_scrubbed(cxlkv_pool *pool, uint32_t page);
/* Where stores went through the caches (V1). */
void pieces_write_back(const cxlkv_pool *pool, uint32_t page, uint32_t layer);
