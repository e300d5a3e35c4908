/* Append: complete pages go to the pool by non-temporal stores, the rest to tails in local memory.
 * The rows lie in the caller's array one behind another, or in blocks that a table names.
 *
 * Of the n new tokens of a sequence whose layer holds `before` tokens (f = before % page_tokens):
 *   [0, head)              fill the open tail, when f > 0; a tail that gets full becomes a page
 *   [head, head + direct)  whole pages, straight from the caller's array to the pool
 *   [head + direct, n)     begin a new tail
 * All memory and pages are taken before the first byte is written: all or nothing. */
#include "base/flush.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "pool/alloc.h"
#include "sequence/batch.h"
#include "sequence/page_write.h"
#include "sequence/sequence.h"

typedef struct plan {
    uint64_t before;
    uint32_t first_row, rows;
    uint32_t filled, head, direct_pages, rest;
    uint32_t first_page;         /* index of the first page that this append completes */
    uint32_t completed;
    bool taken;                  /* layer 0: they were taken from the pool, for all parts */
    uint32_t first_item;         /* of its direct pages in the batch's tasks */
    tail *work;                  /* gets the head: the layer's own tail, or a private copy */
    tail *next;                  /* gets the rest */
} plan;

typedef struct append_job {
    cxlkv_batch *batch;
    uint32_t layer, part;
    int64_t rewind;
    const cxlkv_rows *keys, *values;
    const cxlkv_blocks *table;   /* the rows are in blocks of an engine; NULL: one behind another */
    plan *plans;
    uint32_t items; /* direct pages */
    uint32_t run_pages; /* of which a thread takes so many at a time */
} append_job;

/* One token's heads, side by side in a tail's row; one copy when they are so in the array too. */
static void copy_token(uint8_t *to, const cxlkv_rows *rows, uint32_t row, uint32_t heads,
                       uint32_t dim, size_t element) {
    bool contiguous = rows->stride_bytes[2] == (int64_t)element &&
                      rows->stride_bytes[1] == (int64_t)(dim * element);
    if (contiguous) {
        memcpy(to, row_at(rows, row, 0), heads * dim * element);
        return;
    }
    for (uint32_t head = 0; head < heads; head++)
        row_copy(to + head * dim * element, row_at(rows, row, head), rows->stride_bytes[2], dim,
                 element);
}

/* K or V of a head, into its piece of a tail that has the form of a page. */
static void tail_fill_piece(const append_job *job, tail *to, uint32_t kind, uint32_t head,
                            uint32_t at, uint32_t first, uint32_t count) {
    const cxlkv_layout *layout = layout_of(job->batch->pool, job->layer);
    const cxlkv_rows *rows = kind == PIECE_KEYS ? job->keys : job->values;
    size_t element = dtype_bytes(rows->dtype), row_bytes = tail_row_bytes(layout, kind);
    uint32_t dim = kind_dim(layout, kind);
    uint8_t *piece = tail_at(layout, to, kind, head);
    bool dense = rows->stride_bytes[2] == (int64_t)element && rows->stride_bytes[0] > 0;
    _Alignas(LINE_BYTES) uint8_t row[CODE_DIM_MAX * sizeof(float)];
    if (dense && encoding_of(layout, kind)) {
        piece_encode(layout, kind, rows->dtype, row_at(rows, first, head),
                     (size_t)rows->stride_bytes[0], at, count, piece);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *made = encoding_of(layout, kind) ? row : piece + (at + i) * row_bytes;
        row_copy(made, row_at(rows, first + i, head), rows->stride_bytes[2], dim, element);
        if (made == row)
            piece_encode(layout, kind, rows->dtype, row, row_bytes, at + i, 1, piece);
    }
}

static void tail_fill_pieces(const append_job *job, tail *to, uint32_t at, uint32_t first,
                             uint32_t count) {
    for (uint32_t head = 0; head < layout_of(job->batch->pool, job->layer)->kv_heads; head++) {
        tail_fill_piece(job, to, PIECE_KEYS, head, at, first, count);
        tail_fill_piece(job, to, PIECE_VALUES, head, at, first, count);
    }
}

static void tail_fill(const append_job *job, tail *to, uint32_t at, uint32_t first,
                      uint32_t count) {
    const cxlkv_layout *layout = layout_of(job->batch->pool, job->layer);
    size_t element = dtype_bytes(layout->dtype), row_bytes = tail_row_bytes(layout, PIECE_KEYS);
    if (is_encoded(layout)) {
        tail_fill_pieces(job, to, at, first, count);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        size_t token = (at + i) * row_bytes;
        copy_token(tail_at(layout, to, PIECE_KEYS, 0) + token, job->keys, first + i,
                   layout->kv_heads, layout->head_dim, element);
        if (values_are_keys(layout)) continue;
        copy_token(tail_at(layout, to, PIECE_VALUES, 0) + token, job->values, first + i,
                   layout->kv_heads, layout->value_head_dim, element);
    }
}

/* K or V of a page, from row `row` of the call on. */
static cxlkv_rows rows_from(const append_job *job, const cxlkv_rows *rows, uint32_t row) {
    cxlkv_rows made = *rows;
    const uint8_t *data = rows->data;
    if (job->table) {
        const cxlkv_blocks *table = job->table;
        bool keys = rows == job->keys;
        int64_t stride = keys ? table->key_stride_bytes[0] : table->value_stride_bytes[0];
        data += table->blocks[row / table->block_tokens] * stride;
        row %= table->block_tokens;
    }
    made.data = data + (int64_t)row * rows->stride_bytes[0];
    return made;
}

/* The rows of a direct page, and its number in the pool: NO_PAGE behind the window. */
static uint32_t direct_page(const append_job *job, uint32_t item, kv_rows *rows) {
    uint32_t i = entry_at(&job->plans->first_item, sizeof(plan), job->batch->count, item);
    const cxlkv_sequence *sequence = job->batch->sequences[i];
    const plan *p = &job->plans[i];
    uint32_t item_page = item - p->first_item;
    uint32_t first = p->first_row + p->head + item_page * job->batch->pool->layout.page_tokens;
    uint32_t index = p->first_page + (p->completed - p->direct_pages) + item_page;
    if (index < sequence->tables[job->part].first) return NO_PAGE;
    rows->keys = rows_from(job, job->keys, first);
    if (job->values) rows->values = rows_from(job, job->values, first);
    return sequence_page(sequence, job->part, index);
}

/* Neighbours in one go: while one is written, the next one's rows are asked for. */
static int write_direct_run(void *context, uint32_t run) {
    append_job *job = context;
    cxlkv_pool *pool = job->batch->pool;
    uint32_t first = run * job->run_pages, end = min_u32(first + job->run_pages, job->items);
    kv_rows rows = {0}, next_rows = {0};
    uint32_t page = direct_page(job, first, &rows);
    int code = 0;
    for (uint32_t item = first; code == 0 && item < end; item++) {
        uint32_t next = item + 1 < end ? direct_page(job, item + 1, &next_rows) : NO_PAGE;
        if (page != NO_PAGE)
            code = page_write_rows(pool, page, job->layer, &rows,
                                   next != NO_PAGE ? &next_rows : NULL, pool->layout.page_tokens);
        page = next;
        rows = next_rows;
    }
    store_fence(); /* of this thread's own non-temporal stores */
    return code;
}

/* As many runs as keep all threads busy to the end. */
static uint32_t run_pages_of(const append_job *job) {
    enum { RUNS_A_THREAD = 4, RUN_PAGES_MAX = 16 };
    uint32_t pages = job->items / (RUNS_A_THREAD * job->batch->pool->threads.count);
    return pages < 1 ? 1 : min_u32(pages, RUN_PAGES_MAX);
}

static int write_direct_pages(append_job *job) {
    cxlkv_pool *pool = job->batch->pool;
    job->run_pages = run_pages_of(job);
    uint32_t runs = (job->items + job->run_pages - 1) / job->run_pages;
    /* Blocks are those of an engine's transfers, beside its steps. */
    if (job->table) return run_tasks(pool, runs, write_direct_run, job);
    return run_step_tasks(pool, runs, write_direct_run, job);
}

/* ---- phase 1: count ---- */

static int make_plan(append_job *job, uint32_t i, const int32_t *starts) {
    cxlkv_batch *batch = job->batch;
    const cxlkv_sequence *sequence = batch->sequences[i];
    uint32_t page_tokens = batch->pool->layout.page_tokens;
    plan *p = &job->plans[i];
    p->before = sequence->layer_tokens[job->layer];
    uint32_t unit = job->table ? job->table->block_tokens : 1;
    p->first_row = (uint32_t)starts[i] * unit;
    p->rows = (uint32_t)(starts[i + 1] - starts[i]) * unit;
    if (job->layer > 0 && p->before + p->rows > sequence->layer_tokens[job->layer - 1])
        return fail(CXLKV_E_ORDER,
                    "sequence %u: layer %u would have %lu tokens and layer %u has %lu: append "
                    "layers in order, 0 first",
                    i, job->layer, p->before + p->rows, job->layer - 1,
                    sequence->layer_tokens[job->layer - 1]);
    if ((p->before + p->rows) / page_tokens >= INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "sequence %u: too many tokens", i);
    p->filled = (uint32_t)(p->before % page_tokens);
    if (job->table && p->rows && p->filled)
        return fail(CXLKV_E_ARGUMENT,
                    "sequence %u has %lu tokens in layer %u, no multiple of %u: blocks are "
                    "appended at the end of a page. Append up to there, or truncate",
                    i, p->before, job->layer, page_tokens);
    p->head = p->filled ? min_u32(p->rows, page_tokens - p->filled) : 0;
    p->direct_pages = (p->rows - p->head) / page_tokens;
    p->rest = p->rows - p->head - p->direct_pages * page_tokens;
    p->first_page = (uint32_t)(p->before / page_tokens);
    p->completed = (uint32_t)((p->before + p->rows) / page_tokens) - p->first_page;
    p->first_item = job->items;
    job->items += p->direct_pages;
    return 0;
}

/* ---- phase 2: take memory and pages ---- */

static int prepare_tails(append_job *job, uint32_t i) {
    cxlkv_pool *pool = job->batch->pool;
    plan *p = &job->plans[i];
    tail *own = job->batch->sequences[i]->tails[job->layer];
    bool shared = own && atomic_load_explicit(&own->references, memory_order_acquire) > 1;
    if (p->head) {
        p->work = own;
        if (shared && !(p->work = tail_copy(pool, job->layer, own, p->filled)))
            return fail(ENOMEM, "no memory for a tail");
    }
    if (p->rest) {
        /* A tail whose tokens all went into a page is free to be used again. */
        bool reusable = own && !shared && p->filled == 0;
        p->next = reusable ? own : tail_make(pool);
        if (!p->next) return fail(ENOMEM, "no memory for a tail");
    }
    return 0;
}

/* What a part keeps: pages from `now` on whatever becomes of this append, from `then` on after it.
 * No token to come is before the slowest layer's next one, or, as the caller says by rewind, before
 * the new length less rewind. */
typedef struct keep {
    uint32_t now, then;
} keep;

static keep keep_of(const append_job *job, uint32_t i, uint32_t part) {
    const cxlkv_sequence *sequence = job->batch->sequences[i];
    const cxlkv_pool *pool = job->batch->pool;
    const plan *p = &job->plans[i];
    uint64_t length = p->before + p->rows, next = sequence->layer_tokens[pool->layout.layers - 1];
    uint32_t first = sequence->tables[part].first;
    uint64_t back = job->rewind < 0 ? next : length - min_u64(length, (uint64_t)job->rewind);
    keep k = {.now = window_page(pool, part, min_u64(next, back))};
    if (k.now < first) k.now = first;
    k.then = k.now;
    uint32_t then = window_page(pool, part, back);
    if (then > k.then) k.then = then;
    return k;
}

/* Pages of a part that this append needs from the pool: those behind the window are skipped. */
static uint32_t pages_wanted(const append_job *job, uint32_t i, uint32_t part, uint32_t *first) {
    const plan *p = &job->plans[i];
    uint32_t end = p->first_page + p->completed, then = keep_of(job, i, part).then;
    *first = then > p->first_page ? then : p->first_page;
    return *first < end ? end - *first : 0;
}

/* Is there something to take or to give back, and how many pages are to be taken? */
static bool needs_pages(const append_job *job, uint64_t *wanted) {
    uint32_t parts = job->batch->pool->geometry.part_count, first;
    bool needed = false;
    *wanted = 0;
    for (uint32_t i = 0; i < job->batch->count; i++) {
        needed |= job->plans[i].completed != 0;
        for (uint32_t part = 0; part < parts; part++) {
            *wanted += pages_wanted(job, i, part, &first);
            needed |= keep_of(job, i, part).then > job->batch->sequences[i]->tables[part].first;
        }
    }
    return needed;
}

static int advance_windows(append_job *job, bool then) {
    cxlkv_batch *batch = job->batch;
    if (!batch->pool->layers.windowed) return 0;
    for (uint32_t i = 0; i < batch->count; i++)
        for (uint32_t part = 0; part < batch->pool->geometry.part_count; part++) {
            keep k = keep_of(job, i, part);
            int code = sequence_advance(batch->sequences[i], part, then ? k.then : k.now);
            if (code < 0) return code;
        }
    return 0;
}

/* Under the host lock, with enough free pages: one part of one sequence. */
static int take_part(append_job *job, uint32_t i, uint32_t part, uint32_t *pages) {
    cxlkv_pool *pool = job->batch->pool;
    cxlkv_sequence *sequence = job->batch->sequences[i];
    const plan *p = &job->plans[i];
    uint32_t first, wanted = pages_wanted(job, i, part, &first);
    uint32_t after = NO_PAGE, last = p->first_page - 1;
    if (p->first_page > sequence->tables[part].first) after = sequence_page(sequence, part, last);
    int code = sequence_reserve(sequence, part, p->completed);
    if (code == 0) code = pages_take(pool, wanted, after, pages);
    if (code < 0) return code;
    for (uint32_t j = 0; j < wanted; j++) sequence_push(sequence, part, first + j, pages[j]);
    uint32_t skipped = p->completed - wanted;
    if (skipped) count_add(pool, COUNT_WINDOW_PAGES_SKIPPED, skipped);
    return 0;
}

/* Under the host lock. What can fail by the pool's state comes first; memory of this process may
 * still be short later, and undo() then cuts what was pushed. */
static int take_locked(append_job *job, uint64_t wanted, uint32_t *pages) {
    cxlkv_batch *batch = job->batch;
    cxlkv_pool *pool = batch->pool;
    int code = advance_windows(job, false);
    if (code < 0) return code;
    pages_make_room(pool, wanted);
    if (pool->host->free_pages < wanted || wanted > UINT32_MAX)
        return full_error(pool, (uint32_t)min_u64(wanted, UINT32_MAX));
    code = advance_windows(job, true);
    for (uint32_t i = 0; code == 0 && i < batch->count; i++) {
        if (job->plans[i].completed == 0) continue;
        job->plans[i].taken = true;
        for (uint32_t part = 0; code == 0 && part < pool->geometry.part_count; part++)
            code = take_part(job, i, part, pages);
        batch->sequences[i]->page_count += job->plans[i].completed;
    }
    return code;
}

static int try_pages(append_job *job, uint64_t wanted, uint32_t *pages, uint64_t room) {
    cxlkv_pool *pool = job->batch->pool;
    int code = host_lock_with_room(pool, room);
    if (code < 0) return code;
    code = take_locked(job, wanted, pages);
    host_unlock(pool);
    return code;
}

/* Layer 0 takes the pages of all parts, so that the other layers' appends cannot find it full. */
static int take_pages(append_job *job) {
    uint64_t wanted;
    if (job->layer != 0 || !needs_pages(job, &wanted)) return 0;
    uint32_t *pages = malloc((wanted + 1) * sizeof(*pages));
    if (!pages) return fail(ENOMEM, "no memory for a list of %lu pages", wanted);
    int code = try_pages(job, wanted, pages, 0);
    if (code == -CXLKV_E_POOL_FULL) code = try_pages(job, wanted, pages, wanted);
    free(pages);
    return code;
}

/* ---- phase 3: write ---- */

static int write_tails(void *context, uint32_t item) {
    append_job *job = context;
    cxlkv_batch *batch = job->batch;
    uint32_t page_tokens = batch->pool->layout.page_tokens;
    (void)item;
    for (uint32_t i = 0; i < batch->count; i++) {
        const plan *p = &job->plans[i];
        if (p->head) {
            tail_fill(job, p->work, p->filled, p->first_row, p->head);
            bool kept = p->first_page >= batch->sequences[i]->tables[job->part].first;
            if (p->filled + p->head == page_tokens && kept) {
                uint32_t page = sequence_page(batch->sequences[i], job->part, p->first_page);
                int code = page_write_tail(batch->pool, page, job->layer, p->work, page_tokens);
                if (code < 0) return code;
            }
        }
        if (p->rest) tail_fill(job, p->next, 0, p->first_row + p->rows - p->rest, p->rest);
    }
    return 0;
}

/* A part's last layer completes the record: its header and descriptor make it whole. */
static int seal_pages(void *context, uint32_t item) {
    append_job *job = context;
    cxlkv_batch *batch = job->batch;
    (void)item;
    if (job->layer != batch->pool->layers.parts[job->part].last_layer) return 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        const plan *p = &job->plans[i];
        const cxlkv_sequence *sequence = batch->sequences[i];
        for (uint32_t index = p->first_page; index < p->first_page + p->completed; index++)
            if (index >= sequence->tables[job->part].first)
                record_seal(batch->pool, sequence_page(sequence, job->part, index), job->part,
                            batch->pool->layout.page_tokens, NULL);
    }
    return 0;
}

static void commit(append_job *job) {
    cxlkv_batch *batch = job->batch;
    for (uint32_t i = 0; i < batch->count; i++) {
        plan *p = &job->plans[i];
        tail **own = &batch->sequences[i]->tails[job->layer];
        tail *wanted = p->rest ? p->next : p->head ? p->work : *own;
        if (p->work && p->work != wanted && p->work != *own) tail_drop(batch->pool, p->work);
        if (wanted != *own) {
            tail_drop(batch->pool, *own);
            *own = wanted;
        }
        batch->sequences[i]->layer_tokens[job->layer] = p->before + p->rows;
    }
}

static void undo(append_job *job) {
    cxlkv_batch *batch = job->batch;
    for (uint32_t i = 0; i < batch->count; i++) {
        plan *p = &job->plans[i];
        tail *own = batch->sequences[i]->tails[job->layer];
        if (p->work != own) tail_drop(batch->pool, p->work);
        if (p->next != own) tail_drop(batch->pool, p->next);
        if (p->taken) sequence_pull(batch->sequences[i], p->first_page);
    }
}

/* `rows` is NULL exactly when nothing of that name is stored. */
static int rows_check(const cxlkv_layout *layout, const cxlkv_rows *rows, const char *name) {
    uint32_t kind = name[0] == 'k' ? PIECE_KEYS : PIECE_VALUES;
    bool wanted = kind == PIECE_KEYS || !values_are_keys(layout);
    if (wanted != (rows != NULL))
        return fail(CXLKV_E_ARGUMENT, "%s: the pool stores %s", name,
                    wanted ? "them: give an array" : "keys only, values are their prefix");
    if (rows && !is_given(layout, kind, rows->dtype))
        return fail(CXLKV_E_ARGUMENT, "%s: dtype code %u, the pool stores %u", name, rows->dtype,
                    layout->dtype);
    return 0;
}

static int64_t append_locked(append_job *job, const int32_t *starts) {
    cxlkv_batch *batch = job->batch;
    cxlkv_pool *pool = batch->pool;
    uint32_t rows = 0;
    int code = job->table ? blocks_check(batch, job->table, &rows)
                          : batch_starts(batch, starts, &rows);
    if (code == 0 && rows && !(job->keys->data && (!job->values || job->values->data)))
        code = fail(CXLKV_E_ARGUMENT, "keys or values: no data"); /* empty tensors have none */
    for (uint32_t i = 0; code == 0 && i < batch->count; i++) code = make_plan(job, i, starts);
    if (code < 0 || rows == 0) return code;
    for (uint32_t i = 0; code == 0 && i < batch->count; i++) code = prepare_tails(job, i);
    if (code == 0) code = take_pages(job);
    if (code == -CXLKV_E_POOL_FULL) { /* hits whose lease has ended may still pin pages */
        sequences_expire(pool);
        code = take_pages(job);
    }
    if (code == 0) code = write_direct_pages(job);
    if (code == 0) code = run_tasks(pool, 1, write_tails, job);
    if (code == 0) code = run_tasks(pool, 1, seal_pages, job);
    if (code < 0) {
        if (code == -CXLKV_E_POOL_FULL) count_add(pool, COUNT_POOL_FULL, 1);
        undo(job);
        return code;
    }
    commit(job);
    const cxlkv_layout *layout = layout_of(pool, job->layer);
    count_add(pool, COUNT_APPENDED_BYTES, rows * layout->kv_heads * token_bytes(layout));
    return rows;
}

static int64_t append(append_job *job, const int32_t *starts) {
    cxlkv_batch *batch = job->batch;
    cxlkv_pool *pool = batch->pool;
    int64_t code = layer_check(pool, job->layer);
    if (code < 0) return code;
    job->part = pool->layers.part_of[job->layer];
    const cxlkv_layout *layout = layout_of(pool, job->layer);
    code = rows_check(layout, job->keys, "keys");
    if (code == 0) code = rows_check(layout, job->values, "values");
    if (code < 0) return code;
    job->plans = calloc(batch->count, sizeof(*job->plans));
    if (!job->plans) return fail(ENOMEM, "no memory to plan an append");
    code = IN_BATCH(batch, true, append_locked(job, starts));
    free(job->plans);
    return code;
}

int64_t cxlkv_batch_append(cxlkv_batch *batch, uint32_t layer, const cxlkv_rows *keys,
                           const cxlkv_rows *values, const int32_t *starts, int64_t rewind) {
    append_job job = {.batch = batch, .layer = layer, .rewind = rewind, .keys = keys,
                      .values = values};
    return append(&job, starts);
}

int64_t cxlkv_batch_append_blocks(cxlkv_batch *batch, uint32_t layer, const cxlkv_blocks *blocks,
                                  int64_t rewind) {
    int code = layer_check(batch->pool, layer);
    if (code < 0) return code;
    const cxlkv_layout *layout = layout_of(batch->pool, layer);
    int64_t element = (int64_t)dtype_bytes(blocks->dtype);
    cxlkv_rows keys = {
        .data = blocks->keys, .dtype = blocks->dtype,
        .stride_bytes = {layout->head_dim * element, blocks->key_stride_bytes[1], element}};
    cxlkv_rows values = {
        .data = blocks->values, .dtype = blocks->dtype,
        .stride_bytes = {layout->value_head_dim * element, blocks->value_stride_bytes[1], element}};
    append_job job = {.batch = batch, .layer = layer, .rewind = rewind, .keys = &keys,
                      .values = blocks->values ? &values : NULL, .table = blocks};
    return append(&job, blocks->starts);
}
