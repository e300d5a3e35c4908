/* Batches: their locks, scratch and queries, and views of their layers. */
#pragma once
#include "sequence/types.h"

int batch_lock(cxlkv_batch *batch, bool write);
void batch_unlock(cxlkv_batch *batch);
/* The value of `work` between the two, or the error of the first. */
#define IN_BATCH(batch, write, work)                     \
    __extension__({                                      \
        int64_t entered = batch_lock(batch, write);      \
        if (entered == 0) {                              \
            entered = (work);                            \
            batch_unlock(batch);                         \
        }                                                \
        entered;                                         \
    })
void *batch_scratch(cxlkv_batch *batch, size_t bytes);
/* Room for a call that wants much, on a line; NULL: there is no memory. Batches stay, each with the
 * scratch of its largest call; this is given back, and the pool keeps one for the next call. */
void *room_take(cxlkv_pool *pool, size_t bytes);
void room_give(cxlkv_pool *pool, void *taken);
int batch_starts(const cxlkv_batch *batch, const int32_t *starts, uint32_t *rows);
/* Of an engine's block table; *rows: the tokens of all blocks. */
int blocks_check(const cxlkv_batch *batch, const cxlkv_blocks *table, uint32_t *rows);
/* Of queries, whoever asks: what only a batch can tell, queries_check() looks at. */
int queries_bounds(const cxlkv_layout *layout, uint32_t q_heads, uint32_t dtype, uint32_t rows);
/* By `starts`, which need not be right. */
uint32_t rows_asked(const cxlkv_batch *batch, const int32_t *starts);
int queries_check(const cxlkv_batch *batch, uint32_t layer, uint32_t q_heads,
                  const cxlkv_rows *queries, const int32_t *starts, uint32_t *rows);
uint64_t queries_total(const cxlkv_batch *batch, uint32_t heads, uint32_t q_heads,
                       const int32_t *starts);
/* Query rows, and which of them are whose. */
typedef struct query_source {
    const cxlkv_rows *rows;
    const cxlkv_layout *layout;  /* of the layer that they ask */
    uint32_t q_heads;
    const int32_t *starts;
    const int32_t *order;        /* which of the rows each is; NULL: as they come */
    float scale;
} query_source;
/* Query rows of any strides and dtype to float32 [sequence][kv_head][row][group][dim], and packed
 * if the instruction set has a form for them, or keys are codes: codes of them, with the scale.
 * `out` is as long as queries_bytes() says of their queries_total(). */
size_t queries_bytes(const cxlkv_layout *layout, const kernels *isa, uint64_t query_total);
kernel_queries queries_pack(const cxlkv_batch *batch, const kernels *isa,
                            const query_source *source, void *out);
layer_view view_of(cxlkv_sequence *sequence, uint32_t layer);
/* Where the complete pages end that two sequences have in common from `low` on: forks, and those
 * that adopted one prefix. Behind it some may be the same again, as pages are that were matched by
 * their own text only. */
uint32_t views_shared(const layer_view *a, const layer_view *b, uint32_t low);
/* Verifies page `index` on its first reading here; the tail needs none. */
int view_verify(const layer_view *view, uint32_t index);
