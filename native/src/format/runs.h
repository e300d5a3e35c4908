/* Runs of slots: free pages are listed, chosen, taken and put back.
 *
 * The caller has the host lock. */
#pragma once
#include "format/types.h"

void run_list(cxlkv_pool *pool, uint32_t run);       /* puts a run where its mask says */
void run_unlist(cxlkv_pool *pool, uint32_t run);     /* takes it, all free, out of the allocator */
void run_take(cxlkv_pool *pool, uint32_t page);      /* a free page is free no more */
void run_put(cxlkv_pool *pool, uint32_t page);
uint64_t page_retire(cxlkv_pool *pool, uint32_t page);   /* for good; returns 1 if it was not yet */
/* In place of a page to be behind: no page follows these, so they open no run while gaps are left.
 * An extent that has one of them cannot be given to another host. */
#define IN_A_GAP (NO_PAGE - 1)
/* A free page: the slot right behind `after`, then one in a run of its own, then in any gap. */
uint32_t run_choose(const cxlkv_pool *pool, uint32_t after);
