/* Pages: free ones and their runs, who takes, holds and drops them, the index of published ones.
 *
 * The caller has the host lock, unless a comment says otherwise. */
#ifndef CXLKV_PAGES_H
#define CXLKV_PAGES_H

#include "pool/pool.h"

/* ---- runs.c ---- */
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
static inline bool page_is_free(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].free_mask >> page % RUN_SLOTS & 1;
}

/* ---- alloc.c: pages_unclaim() and host_lock_with_room() without the host lock ---- */
/* Tries to have so many free pages: dead processes', withdrawn ones. See host_lock_with_room(). */
/* Published here, and held, pinned or leased by nobody. */
bool page_is_evictable(const cxlkv_pool *pool, uint32_t page);
void pages_make_room(cxlkv_pool *pool, uint64_t count);
/* Takes count pages, neighbours of `after` first; all or nothing: 0 or -CXLKV_E_POOL_FULL. */
int pages_take(cxlkv_pool *pool, uint32_t count, uint32_t after, uint32_t *pages);
/* Pages of cxlkv_pages_alloc() are the caller's to free no more, and are again; all or none. */
int pages_claim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_unclaim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
int full_error(cxlkv_pool *pool, uint32_t wanted);
/* host_lock(); when fewer pages are free, ended leases give up theirs first, and other hosts. */
int host_lock_with_room(cxlkv_pool *pool, uint64_t page_count);
/* The value of `work`, which takes pages, under the host lock; when the pool is full, once more
 * with `room` of them free, if that can be had: none is made for what is there already. */
#define TAKING_PAGES(pool, room, work)                                                \
    __extension__({                                                                   \
        int64_t taking = HOST_LOCKED(pool, work);                                     \
        if (taking == -CXLKV_E_POOL_FULL)                                             \
            taking = HOST_LOCKED_BY(host_lock_with_room(pool, room), pool, work);     \
        if (taking == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);        \
        taking;                                                                       \
    })

/* ---- pages.c: pages_drop_later() without it ---- */
void pages_hold(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* For who does not have the host lock, and cannot have it: they are dropped by the next call of
 * this process that has it. Never fails. */
void pages_drop_later(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop_late(cxlkv_pool *pool);   /* those */
void pages_drop_slot(cxlkv_pool *pool, uint32_t slot);  /* all that its process holds */
/* Frees those that nothing needs any more; neighbours share their looks and fences. */
void pages_settle(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* Bit i is page first + i of a pin word, that nothing here needs: free, or withdrawn. */
void pages_free_word(cxlkv_pool *pool, uint32_t first, uint64_t pages);
void withdrawn_look(cxlkv_pool *pool);    /* frees those that nobody pins any more */
/* Round each change of a record that others may hold: a death there is mended. */
static inline void rewrite_begin(cxlkv_pool *pool, uint32_t page) {
    pool->host->rewriting = page;
    atomic_signal_fence(memory_order_seq_cst); /* a death is seen in program order: no CPU fence */
}
static inline void rewrite_end(cxlkv_pool *pool) {
    atomic_signal_fence(memory_order_seq_cst);
    pool->host->rewriting = NO_PAGE;
}
/* Before a page is free: zeros in all of it, if somebody asked for that. False: it is retired. */
bool page_scrubbed(cxlkv_pool *pool, uint32_t page);
/* Where stores went through the caches (V1). */
void pieces_write_back(const cxlkv_pool *pool, uint32_t page, uint32_t layer);

/* ---- published.c: the index, then what it names ---- */
void index_expect(const cxlkv_pool *pool, const uint64_t hash[2]);  /* it is asked for soon */
/* Its page, if it is ours, is checked and held soon: that page, or NO_PAGE. */
uint32_t page_expect(const cxlkv_pool *pool, const uint64_t hash[2]);
uint32_t index_find(const cxlkv_pool *pool, const uint64_t hash[2]);
bool index_insert(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page);
void index_erase(cxlkv_pool *pool, const uint64_t hash[2]);
void index_erase_page(cxlkv_pool *pool, uint32_t page); /* the page's entry; walks the index */
void index_clear(cxlkv_pool *pool);
/* The index's hash of one page of a key: its place among the key's pages, and its part. */
void page_hash(const uint8_t *hashes, uint64_t key, uint64_t place, uint32_t part,
               uint64_t hash[2]);
/* A page that is published already, or whose hash is, stays as it is: the first copy serves all. */
bool publish_page(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                  const page_key *key);
/* The page of one part under a hash, and which of its chain it is; false: none. A damaged page, or
 * one of another number of tokens, is none either: a miss, never a wrong hit. */
bool match_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t part, uint32_t tokens,
                uint32_t *page, uint32_t *ordinal);
/* everywhere: the copies that other hosts may have published under this hash, too. */
bool page_forget(cxlkv_pool *pool, const uint64_t hash[2], bool everywhere);

#endif
