/* Pages of other hosts are pinned and read in place. */
#pragma once
#include "format/types.h"

typedef struct borrowing {
    uint32_t page;
    uint32_t state;              /* that is wanted: sealed or published */
    uint64_t generation;
    int code;                    /* out */
} borrowing;
/* Pins them and takes them into view, to be read in place until the last holder drops them. */
void borrow(cxlkv_pool *pool, borrowing *items, uint32_t count);
void borrow_end(cxlkv_pool *pool, uint32_t first, uint64_t pages);  /* bit i: page first + i */
void borrow_own(cxlkv_pool *pool, uint32_t first, uint32_t count); /* that are ours from now on */
void borrow_recover(cxlkv_pool *pool);    /* no pins but of what is held, after a death */
/* Which of the 64 pages of a word other hosts have pinned. */
uint64_t pinned_elsewhere(const cxlkv_pool *pool, uint32_t page);
