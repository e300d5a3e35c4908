/* Sequences and batches of them: page tables, tails, appending, leases. */
#pragma once
#include "format/types.h"

/* Up to 256 page ids, shared by forks; it holds one reference on each of pages [first, count). */
typedef struct chunk {
    atomic_uint references;
    uint16_t first, count;
    uint32_t pages[CHUNK_PAGES];
} chunk;

/* The pages of one part. */
typedef struct page_table {
    chunk **chunks;              /* NULL before `first` and behind the last */
    uint32_t chunk_capacity;
    uint32_t first;              /* pages before it lie behind the window: not ours any more */
} page_table;

/* Filled tokens of a layer's last page, a row each: K of all heads, then V; shared by forks. Token
 * by token, so that an append touches two runs of bytes and a fork's copy is one. In a pool with an
 * encoding it has the form of a page: K of each head, then V, in pieces as the pool stores them. */
typedef struct tail {
    atomic_uint references;
    struct tail *next_spare;     /* in the pool's list of tails that nobody uses */
    uint8_t pad[LINE_BYTES - 2 * sizeof(void *)];
    uint8_t data[];
} tail;
_Static_assert(sizeof(tail) == LINE_BYTES, "the data begins on a line");

/* What the worker was told of a part of a sequence. */
typedef struct worker_table {
    uint32_t epoch;              /* of the client's; another: it was told nothing */
    uint32_t table;
    uint64_t version;
    uint32_t first, end;         /* pages [first, end) */
} worker_table;
/* Up to which token of a layer the worker has an open tail's keys, and its values; apart, as a
 * select brings no values. In the worker itself layer_tokens stands for the keys. */
typedef struct worker_tail {
    uint64_t keys, values;
} worker_tail;
static inline void worker_tail_cut(worker_tail *known, uint64_t tokens) {
    known->keys = min_u64(known->keys, tokens);
    known->values = min_u64(known->values, tokens);
}

struct cxlkv_sequence {
    cxlkv_pool *pool;
    pthread_rwlock_t lock;
    bool released;
    bool expired;
    bool of_client;              /* a worker's: its layers are as long as they were asked last */
    bool approximate;            /* it has pages that a key of content found: fixed when made */
    atomic_ulong lease_deadline_ns;  /* CLOCK_BOOTTIME; 0: none; read without the lock */
    uint32_t deadline_place;     /* in the pool's deadlines, from 1; 0: nowhere */
    page_table *tables;          /* by part */
    uint32_t page_count;         /* = layer_tokens[0] / page_tokens, in every table */
    uint64_t *layer_tokens;      /* never more than the layer before */
    tail **tails;
    uint32_t *export_pages;      /* by part: the tail's copy that the last handle names */
    bool exported;               /* there are such copies */
    uint64_t export_tokens;
    uint32_t *states;            /* of a hit: the pages of its state checkpoint, held; or NULL */
    worker_table *worker_tables; /* by part: what the worker was told; NULL: nothing */
    worker_tail *worker_tails; /* by layer: what the worker has of a tail; or NULL */
    struct kept_choice **kept; /* [layers], what select found best; or NULL */
    atomic_bool kept_taken; /* by a select that runs */
    struct cxlkv_sequence *next, *previous;
    struct cxlkv_sequence *next_busy; /* within sequences_expire() */
};

/* Sequences whose leases end, a heap: the earliest first. */
typedef struct deadlines {
    cxlkv_sequence **heap;
    uint32_t count, capacity;
    atomic_ulong first_ns;       /* when the first ends; UINT64_MAX: there is none */
} deadlines;

/* What a pool has of OWNER_SEQUENCES. */
typedef struct pool_sequences {
    cxlkv_sequence *first;       /* and deadlines: under the pool's locks.list */
    deadlines deadlines;         /* of those that are hits */
    tail *spare_tails;           /* and their count: under its locks.spare */
    uint64_t spare_count;
    struct room *_Atomic room;   /* of the last call that wanted much: room_take() */
} pool_sequences;
static inline pool_sequences *sequences_of(const cxlkv_pool *pool) {
    return atomic_load_explicit(&pool->owner[OWNER_SEQUENCES], memory_order_relaxed);
}

struct cxlkv_batch {
    cxlkv_pool *pool;
    pthread_mutex_t lock;        /* one operation at a time: the scratch is shared */
    uint32_t count;
    cxlkv_sequence **sequences;
    cxlkv_sequence **lock_order; /* by address */
    void *scratch;
    size_t scratch_bytes;
    atomic_uint chosen_pages;    /* in the longest list of the last decode */
    bool counted_elsewhere;      /* a worker's: its client counts which pages were used */
};
static inline int layer_check(const cxlkv_pool *pool, uint32_t layer) {
    if (layer < pool->layout.layers) return 0;
    return fail(CXLKV_E_ARGUMENT, "layer %u: the pool has %u", layer, pool->layout.layers);
}

/* Of a tail that has the form of a page. */
static inline size_t tail_piece_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return align_up(piece_data_bytes(layout, kind), LINE_BYTES);
}
/* From a token to the next one. In rows a line more than a token: rows 4 KiB apart would all fall
 * into one set of the L1 cache. */
static inline size_t tail_row_bytes(const cxlkv_layout *layout, uint32_t kind) {
    uint64_t dims = layout->kv_heads * row_channels(layout);
    if (is_encoded(layout)) return stored_row_bytes(layout, kind);
    return align_up(dims * dtype_bytes(layout->dtype), LINE_BYTES) + LINE_BYTES;
}
static inline size_t tail_data_bytes(const cxlkv_layout *layout) {
    if (!is_encoded(layout)) return layout->page_tokens * tail_row_bytes(layout, PIECE_KEYS);
    return layout->kv_heads *
           (tail_piece_bytes(layout, PIECE_KEYS) + tail_piece_bytes(layout, PIECE_VALUES));
}
/* Where K or V of a head begin in the row of token 0, or their piece. */
static inline uint8_t *tail_at(const cxlkv_layout *layout, tail *tail, uint32_t kind,
                               uint32_t head) {
    uint64_t channels = (uint64_t)head * layout->head_dim;
    if (is_encoded(layout)) {
        uint8_t *first = tail->data;
        if (kind == PIECE_VALUES) first += layout->kv_heads * tail_piece_bytes(layout, PIECE_KEYS);
        return first + head * tail_piece_bytes(layout, kind);
    }
    if (kind == PIECE_VALUES && !values_are_keys(layout))
        channels = (uint64_t)layout->kv_heads * layout->head_dim + head * layout->value_head_dim;
    return tail->data + channels * dtype_bytes(layout->dtype);
}
static inline uint32_t sequence_page(const cxlkv_sequence *sequence, uint32_t part,
                                     uint32_t index) {
    return sequence->tables[part].chunks[index / CHUNK_PAGES]->pages[index % CHUNK_PAGES];
}
/* Queries of one sequence and kv head, [row][group], are a block: kernels take them by fours, and
 * AMX by sixteens where there are so many: blocks begin with these and are filled up to them. */
static inline uint32_t query_unit(uint64_t rows, uint32_t group) {
    return rows * group < 16 ? 4 : 16;
}
static inline uint64_t query_block(uint64_t rows, uint32_t group) {
    return align_up(rows * group, query_unit(rows, group));
}
/* Where the next sequence's blocks begin, *end being where those before it ended. */
static inline uint64_t query_place(uint64_t rows, uint32_t group, uint32_t kv_heads,
                                   uint64_t *end) {
    uint64_t first = align_up(*end, query_unit(rows, group));
    *end = first + kv_heads * query_block(rows, group);
    return first;
}
static inline kernel_queries queries_range(kernel_queries all, uint64_t first, uint32_t count) {
    return (kernel_queries){all.rows, all.packed, all.total, (uint32_t)first, count};
}

/* A layer of one sequence as the scoring loops see it: complete pages, then the open tail. */
typedef struct layer_view {
    cxlkv_sequence *sequence;
    uint64_t tokens;
    uint32_t first;              /* pages before it are gone */
    uint32_t pages;              /* with the tail */
    uint32_t complete;           /* without it */
    uint32_t layer, part;
    uint32_t window;             /* 0: none */
    /* Whose copies are read instead; NULL: none. Scoring has none. */
    const struct local_tier *local;
} layer_view;
/* Tokens that page `index` holds. */
static inline uint32_t view_filled(const layer_view *view, uint32_t index) {
    uint64_t page_tokens = view->sequence->pool->layout.page_tokens;
    return (uint32_t)min_u64(page_tokens, view->tokens - index * page_tokens);
}
/* Of those, the ones that query row `row` of `rows` may see: it is token tokens - (rows - row). */
static inline uint32_t view_visible(const layer_view *view, uint32_t index, uint64_t row,
                                    uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t seen = view->tokens - rows + row + 1;
    return seen <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), seen - first);
}
/* The first token that query row `row` of `rows` may see. */
static inline uint64_t view_low(const layer_view *view, uint64_t row, uint64_t rows) {
    uint64_t position = view->tokens - rows + row;
    return view->window && position >= view->window ? position - view->window + 1 : 0;
}
/* Tokens at the start of page `index` that lie behind that row's window. */
static inline uint32_t view_hidden(const layer_view *view, uint32_t index, uint64_t row,
                                   uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t low = view_low(view, row, rows);
    return low <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), low - first);
}
/* Do `count` rows from `row` on see all that page `index` holds? */
static inline bool view_whole(const layer_view *view, uint32_t index, uint64_t row, uint64_t count,
                              uint64_t rows) {
    return view_visible(view, index, row, rows) == view_filled(view, index) &&
           view_hidden(view, index, row + count - 1, rows) == 0;
}
/* How many of the rows from `row` on, at most `limit`, see all of page `index`: they go together.
 * 1 when that row sees a part of it only. */
static inline uint64_t view_together(const layer_view *view, uint32_t index, uint64_t row,
                                     uint64_t rows, uint64_t limit) {
    if (view_visible(view, index, row, rows) < view_filled(view, index)) return 1;
    return view_hidden(view, index, row + limit - 1, rows) ? 1 : limit;
}
/* Pages whose record is complete in all layers of the part: only those have a header that can be
 * asked. */
static inline uint64_t view_sealed(const layer_view *view) {
    const cxlkv_pool *pool = view->sequence->pool;
    if (view->sequence->of_client) return 0;
    uint32_t last_layer = pool->layers.parts[view->part].last_layer;
    return view->sequence->layer_tokens[last_layer] / pool->layout.page_tokens;
}
