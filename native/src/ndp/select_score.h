/* Pages are scored by their keys or digests, alone and in runs. */
#pragma once
#include "ndp/ahead.h"

enum { QUERY_BLOCK = 64 };
/* By keys, or by the digest if that is the method; next: where its pieces come from, or NULL. */
int score_page(select_job *job, const plan *p, uint32_t index, ahead *next);
int score_page_head(const select_job *job, const plan *p, uint32_t index, uint32_t head);
/* Narrows [*first, *last) to pages that are complete and seen whole by all rows. */
void whole_pages(const plan *p, uint32_t *first, uint32_t *last);
/* The same to pages that score_run() takes: by their keys, and all rows have one list together. */
void run_of(const select_job *job, const plan *p, uint32_t *first, uint32_t *last);
/* ahead: what follows is to be asked for meanwhile. */
int score_run(select_job *job, const plan *p, uint32_t first, uint32_t last, bool ahead);

/* Pages that are read together, and as many behind them, which are asked for meanwhile: where
 * their pieces of a kind are, those of head 0. */
enum { RUN_PAGES = 16 };
typedef struct page_run {
    uint32_t count;
    const uint8_t *pages[RUN_PAGES], *later[RUN_PAGES]; /* later: NULL where nothing is asked for */
} page_run;
/* How many pages of so many heads: not more bytes than a cache holds twice. */
uint32_t page_run_step(const select_job *job, uint32_t kind, uint32_t heads);
/* The next `step` of the pages [at, last), verified. */
int page_run_take(const plan *p, uint32_t kind, uint32_t at, uint32_t last, uint32_t step,
                  bool ahead, page_run *run);
/* One head of a run, by its keys: the best score of each page. */
void score_run_head(const select_job *job, const plan *p, uint32_t head, const page_run *run,
                    float *best);
/* The kind of piece that it reads of complete pages. */
uint32_t scored_kind(const select_job *job);
/* For batch->count * kv_heads items, where pages are chosen by mass: each page's share of it. */
int mass_task(void *context, uint32_t item);
