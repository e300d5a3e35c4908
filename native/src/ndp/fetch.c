/* Fetch: copy chosen pages, or all, to one contiguous buffer or to an engine's blocks, verified on
 * the way. */
#include "base/flush.h"
#include "base/guard.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "ndp/stored.h"
#include "ndp/stored_fp8.h"
#include "sequence/batch.h"
#include "sequence/page_write.h"
#include "sequence/usage.h"
#include "sharing/this_host.h"
#include "tiers/local_tier.h"

/* Above this the copy would only push other data out of the caches. */
enum { STREAM_BYTES = 16 << 20, PREFETCH_LINES = 8 };

typedef struct fetch_job {
    cxlkv_batch *batch;
    const cxlkv_layout *layout;  /* of the layer */
    cxlkv_fetch_args *args;
    uint32_t *sequence_of_list;
    uint32_t k;
    bool stream;
    local_reads reads;
} fetch_job;

/* What codes or bytes stand for, in the pool's dtype. */
static void decode_rows(const stored *s, int dtype, const uint8_t *piece, uint32_t tokens,
                        uint8_t *to) {
    if (s->fp8) {
        fp8_fetch(s, dtype, piece, tokens, to);
        return;
    }
    _Alignas(LINE_BYTES) float rows[CODE_TOKENS * CODE_DIM_MAX];
    for (uint32_t first = 0; first < tokens; first += CODE_TOKENS) {
        uint32_t count = min_u32(CODE_TOKENS, tokens - first);
        stored_decode(s, piece, first, count, rows);
        code_unrotate(rows, count, s->dim);
        s->isa->from_float(s->dtype, rows, (size_t)count * s->dim,
                           to + (size_t)first * s->dim * dtype_bytes((uint32_t)s->dtype));
    }
}

/* Blocks and scales, as they are kept, or joined; zeros where a tail has more than its tokens. The
 * copy need not begin on a line. */
static void copy_codes(const layer_view *view, uint32_t index, uint32_t kind, const uint8_t *from,
                       bool stream, uint8_t *to) {
    static const uint8_t zeros[CODE_DIM_MAX];
    const cxlkv_layout *layout = layout_of(view->sequence->pool, view->layer);
    code_form form = form_of(layout, kind);
    uint32_t end = code_blocks(layout->page_tokens) * CODE_TOKENS;
    size_t bytes = code_bytes(&form, layout->page_tokens);
    if (has_planes(layout, kind)) piece_join(layout, kind, from, to);
    else copy_past(to, from, bytes, stream);
    if (index < view->complete) return;
    uint32_t filled = view_filled(view, index);
    for (uint32_t t = filled; t < end; t++)
        code_place(&form, zeros, t % CODE_TOKENS,
                   to + t / CODE_TOKENS * code_block_bytes(&form));
    size_t scales = (end - filled) * sizeof(uint16_t);
    memset(to + bytes - scales, 0, scales);
}

/* Of a row that goes to its caller: in the pool's dtype, or as it is stored. */
static size_t given_row_bytes(const cxlkv_layout *layout, uint32_t kind, uint32_t dtype) {
    return dtype == CXLKV_BYTES ? stored_row_bytes(layout, kind)
                                : kind_dim(layout, kind) * dtype_bytes(dtype);
}

/* dtype: of rows that go to the caller, CXLKV_BYTES for those of fp8 as they are stored; as_kept:
 * codes as they are. */
static int copy_piece(const layer_view *view, uint32_t index, uint32_t head, uint32_t kind,
                      uint32_t dtype, bool stream, bool as_kept, uint8_t *to) {
    cxlkv_pool *pool = view->sequence->pool;
    const cxlkv_layout *layout = layout_of(pool, view->layer);
    size_t row = given_row_bytes(layout, kind, dtype), size = layout->page_tokens * row;
    size_t written = view_filled(view, index) * row;
    page_rows rows = view_rows(view, index, kind);
    const uint8_t *from = rows.first + head * rows.head_bytes;
    bool prefix = kind == PIECE_VALUES && values_are_keys(layout);
    stored s = stored_of(layout, kernels_current(), kind);
    bool is_rows = index >= view->complete || prefix;
    bool decodes = s.encoded || (s.fp8 && dtype != CXLKV_BYTES);
    if (s.encoded && as_kept) {
        copy_codes(view, index, kind, from, stream, to);
        if (is_rows) return 0;
    } else if (decodes) {
        decode_rows(&s, (int)dtype, from, view_filled(view, index), to);
        memset(to + written, 0, size - written);
        if (is_rows) return 0;
    } else if (is_rows) {
        for (size_t t = 0; t * row < written; t++)
            memcpy(to + t * row, from + t * rows.row_bytes, row);
        memset(to + written, 0, size - written);
        return 0;
    }
    if (!decodes) copy_past(to, from, size, stream);
    /* Values that are keys were verified with these, a copy when it was made. */
    if (!layout->checksum || rows.local) return 0;
    /* The CRC of the source while it is in the cache; a copy of it is what the caller gets. */
    return piece_verify(pool, sequence_page(view->sequence, view->part, index), view->layer, head,
                        kind, from);
}

/* A page is what its header says, or has a copy that is. */
static int check_page(const layer_view *view, uint32_t index) {
    cxlkv_pool *pool = view->sequence->pool;
    uint32_t page = sequence_page(view->sequence, view->part, index);
    if (view->local && local_find(pool, view->local, page, view->layer)) return 0;
    return record_check_unlocked(pool, page, pool->pages[page].generation,
                                 pool->layout.page_tokens);
}

/* Page at place j of a list: -1 is padding. */
static int64_t page_at(const fetch_job *job, uint32_t item, uint32_t j) {
    const cxlkv_picked *picked = &job->args->picked;
    return picked->pages ? picked->pages[(uint64_t)item * job->k + j] : (int64_t)j;
}

/* Before a byte is copied: every page of the list exists and is what its header says. */
static int check_list(const fetch_job *job, const layer_view *view, uint32_t item) {
    const cxlkv_layout *layout = job->layout;
    const int32_t *own = job->args->picked.pages;
    uint32_t head = item % layout->kv_heads;
    /* A list like head 0's is checked with that one, in the same call. */
    if (head > 0 && (!own || memcmp(own + (uint64_t)item * job->k,
                                    own + (uint64_t)(item - head) * job->k,
                                    job->k * sizeof(*own)) == 0))
        return 0;
    uint64_t sealed = view_sealed(view);
    for (uint32_t j = 0; j < job->k; j++) {
        int64_t index = page_at(job, item, j);
        if (job->args->picked.pages && (index < -1 || index >= view->pages))
            return fail(CXLKV_E_ARGUMENT, "fetch: page %ld, the sequence has %u", index,
                        view->pages);
        if (index >= 0 && index < view->first)
            return fail(CXLKV_E_ARGUMENT,
                        "fetch: page %ld lies behind the window of %u tokens and was given back",
                        index, view->window);
        if (index < 0 || (uint64_t)index >= sealed) continue;
        int code = check_page(view, (uint32_t)index);
        if (code < 0) return code;
    }
    return 0;
}

/* The first lines of what is copied next: hardware prefetch does not cross into a new piece. */
static void prefetch_piece(const layer_view *view, int64_t index, uint32_t head, uint32_t kind) {
    if (index < view->first || index >= view->pages) return;
    page_rows rows = view_rows(view, (uint32_t)index, kind);
    const uint8_t *piece = rows.first + head * rows.head_bytes;
    for (uint32_t line = 0; line < PREFETCH_LINES; line++)
        __builtin_prefetch(piece + line * LINE_BYTES);
}

/* Of a page's K or V of a head, as the caller wants them. */
static size_t wanted_bytes(const cxlkv_layout *layout, const cxlkv_fetch_args *args,
                           uint32_t kind) {
    if (!args->as_kept) return rows_bytes(layout, kind);
    if (!has_codes(layout, kind)) return layout->page_tokens * stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind);
    return code_bytes(&form, layout->page_tokens);
}

static uint32_t wanted_dtype(const cxlkv_layout *layout, const cxlkv_fetch_args *args,
                             uint32_t kind) {
    return args->as_kept && has_fp8(layout, kind) ? CXLKV_BYTES : layout->dtype;
}

/* One list of one head: all its K, then all its V. */
static int fetch_task(void *context, uint32_t item) {
    fetch_job *job = context;
    const cxlkv_layout *layout = job->layout;
    uint32_t list = item / layout->kv_heads, head = item % layout->kv_heads;
    layer_view view =
        view_of(job->batch->sequences[job->sequence_of_list[list]], job->args->layer);
    view.local = tier_of(job->batch->pool);
    int code = check_list(job, &view, item);
    if (code == 0 && view.local && job->args->picked.pages)
        local_count_reads(&view, job->args->picked.pages + (uint64_t)item * job->k, job->k,
                         &job->reads);
    for (uint32_t kind = PIECE_KEYS; code == 0 && kind <= PIECE_VALUES; kind++) {
        size_t size = wanted_bytes(layout, job->args, kind);
        uint8_t *to = kind == PIECE_KEYS ? job->args->keys : job->args->values;
        to += (uint64_t)item * job->k * size;
        for (uint32_t j = 0; code == 0 && j < job->k; j++, to += size) {
            int64_t index = page_at(job, item, j);
            if (j + 1 < job->k) prefetch_piece(&view, page_at(job, item, j + 1), head, kind);
            if (index < view.first || index >= view.pages) memset(to, 0, size);
            else
                code = copy_piece(&view, (uint32_t)index, head, kind,
                                  wanted_dtype(layout, job->args, kind), job->stream,
                                  job->args->as_kept, to);
        }
    }
    store_fence();
    return code;
}

static bool per_query(const cxlkv_fetch_args *args) {
    return args->picked.pages && args->picked.per == CXLKV_PER_QUERY;
}

static int lists_make(fetch_job *job, uint32_t *lists) {
    const cxlkv_batch *batch = job->batch;
    const cxlkv_picked *picked = &job->args->picked;
    *lists = batch->count;
    if (per_query(job->args)) {
        int code = batch_starts(batch, job->args->starts, lists);
        if (code < 0) return code;
    }
    if (picked->pages && picked->lists != *lists)
        return fail(CXLKV_E_ARGUMENT, "fetch: %u lists of pages, %u wanted", picked->lists, *lists);
    job->sequence_of_list = malloc((*lists + 1) * sizeof(uint32_t));
    if (!job->sequence_of_list) return fail(ENOMEM, "no memory for %u lists", *lists);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (!per_query(job->args)) job->sequence_of_list[i] = i;
        else
            for (int32_t row = job->args->starts[i]; row < job->args->starts[i + 1]; row++)
                job->sequence_of_list[row] = i;
    }
    return 0;
}

static int64_t fetch_locked(fetch_job *job) {
    cxlkv_fetch_args *args = job->args;
    const cxlkv_pool *pool = job->batch->pool;
    uint32_t lists;
    int code = layer_check(pool, args->layer);
    if (code < 0) return code;
    const cxlkv_layout *layout = job->layout = layout_of(pool, args->layer);
    uint32_t window = pool->layers.parts[pool->layers.part_of[args->layer]].window;
    if (window && !args->picked.pages)
        return fail(CXLKV_E_ARGUMENT,
                    "fetch: layer %u has a window of %u tokens: name the pages, as select() does",
                    args->layer, window);
    code = lists_make(job, &lists);
    if (code < 0) return code;
    job->k = args->picked.k;
    if (!args->picked.pages) {
        job->k = 0;
        for (uint32_t i = 0; i < job->batch->count; i++) {
            uint32_t pages = view_of(job->batch->sequences[i], args->layer).pages;
            if (pages > job->k) job->k = pages;
        }
    }
    args->k = job->k;
    uint64_t items = (uint64_t)lists * layout->kv_heads, pieces;
    /* A piece has less than 2^24 bytes: below this limit no size overflows. */
    if (items > INT32_MAX || __builtin_mul_overflow(items, job->k, &pieces) || pieces >> 38)
        return fail(CXLKV_E_ARGUMENT, "fetch: %u lists of %u pages are too many at once", lists,
                    job->k);
    uint64_t key_bytes = pieces * wanted_bytes(layout, args, PIECE_KEYS);
    uint64_t value_bytes = pieces * wanted_bytes(layout, args, PIECE_VALUES);
    if (key_bytes > args->key_capacity_bytes || value_bytes > args->value_capacity_bytes)
        return fail(CXLKV_E_ROOM, "fetch: %lu bytes of keys wanted, room for %lu", key_bytes,
                    args->key_capacity_bytes);
    code = need(key_bytes, "keys", args->keys, NULL);
    if (code == 0) code = need(value_bytes, "values", args->values, NULL);
    if (code < 0) return code;
    job->stream = key_bytes + value_bytes > STREAM_BYTES;
    code = run_tasks(job->batch->pool, lists * layout->kv_heads, fetch_task, job);
    if (code < 0) return code;
    count_add(job->batch->pool, COUNT_FETCHED_BYTES, key_bytes + value_bytes);
    hotness_count(job->batch, args->layer, &args->picked, per_query(args) ? args->starts : NULL);
    return (int64_t)(key_bytes + value_bytes);
}

int64_t cxlkv_batch_fetch(cxlkv_batch *batch, cxlkv_fetch_args *args) {
    fetch_job job = {.batch = batch, .args = args};
    int64_t code = batch_lock(batch, false);
    if (code < 0) return code;
    local_enter(batch->pool);
    code = fetch_locked(&job);
    local_leave(batch->pool, &job.reads);
    code = peers_verify(batch->pool, code);
    batch_unlock(batch);
    free(job.sequence_of_list);
    return code;
}

/* ---- to the blocks of an engine ---- */

typedef struct blocks_job {
    cxlkv_batch *batch;
    const cxlkv_layout *layout;  /* of the layer */
    uint32_t layer;
    const cxlkv_blocks *table;
    const int32_t *first;
    int32_t *good;
    bool stream;
    pthread_mutex_t lock;        /* guards good and what follows */
    int code;                    /* of the first error, and where it was */
    uint32_t sequence, place;
    char text[400];
} blocks_job;

static uint8_t *block_target(const blocks_job *job, uint32_t entry, uint32_t head, uint32_t kind) {
    const cxlkv_blocks *t = job->table;
    bool keys = kind == PIECE_KEYS;
    const int64_t *strides = keys ? t->key_stride_bytes : t->value_stride_bytes;
    return (uint8_t *)(keys ? t->keys : t->values) + t->blocks[entry] * strides[0] +
           (int64_t)head * strides[1];
}

/* A page of a block, all heads; NULL view: zeros. */
static int page_to_block(const blocks_job *job, const layer_view *view, uint32_t index,
                         uint32_t entry, uint32_t place) {
    const cxlkv_layout *layout = job->layout;
    for (uint32_t kind = PIECE_KEYS; kind <= PIECE_VALUES; kind++) {
        uint32_t dtype = job->table->dtype;
        size_t size = layout->page_tokens * given_row_bytes(layout, kind, dtype);
        if (kind == PIECE_VALUES && values_are_keys(layout)) break;
        for (uint32_t head = 0; head < layout->kv_heads; head++) {
            uint8_t *to = block_target(job, entry, head, kind) + place * size;
            if (view && head + 1 < layout->kv_heads) prefetch_piece(view, index, head + 1, kind);
            int code = 0;
            if (view) code = copy_piece(view, index, head, kind, dtype, job->stream, false, to);
            else memset(to, 0, size);
            if (code < 0) return code;
        }
    }
    return 0;
}

static int block_fill(const blocks_job *job, const layer_view *view, uint32_t page,
                      uint32_t entry) {
    uint32_t pages = job->table->block_tokens / job->layout->page_tokens;
    for (uint32_t place = 0; place < pages; place++) {
        uint32_t index = page + place;
        bool behind = index < view->first;
        int code = !behind && index < view_sealed(view) ? check_page(view, index) : 0;
        if (code == 0) code = page_to_block(job, behind ? NULL : view, index, entry, place);
        if (code < 0) return code;
    }
    return 0;
}

/* Nothing of a block that could not be read is left in it. */
static void block_clear(const blocks_job *job, uint32_t entry) {
    uint32_t pages = job->table->block_tokens / job->layout->page_tokens;
    for (uint32_t place = 0; place < pages; place++) page_to_block(job, NULL, 0, entry, place);
}

static void note_bad(blocks_job *job, uint32_t sequence, uint32_t place, int code) {
    pthread_mutex_lock(&job->lock);
    if (job->good[sequence] > (int32_t)place) job->good[sequence] = (int32_t)place;
    if (job->code == 0) {
        job->code = code;
        job->sequence = sequence;
        job->place = place;
        strncpy(job->text, cxlkv_error_text(), sizeof(job->text) - 1);
    }
    pthread_mutex_unlock(&job->lock);
}

static int block_guarded(const blocks_job *job, const layer_view *view, uint32_t page,
                         uint32_t entry) {
    return GUARDED(block_fill(job, view, page, entry), poison_error(job->batch->pool, &fault));
}

/* An error of a block is its sequence's: the others' go on. */
static int block_task(void *context, uint32_t entry) {
    blocks_job *job = context;
    cxlkv_batch *batch = job->batch;
    uint32_t i = entry_at(job->table->starts, sizeof(int32_t), batch->count, entry);
    uint32_t place = entry - (uint32_t)job->table->starts[i];
    layer_view view = view_of(batch->sequences[i], job->layer);
    view.local = tier_of(batch->pool);
    uint32_t pages = job->table->block_tokens / batch->pool->layout.page_tokens;
    int code = block_guarded(job, &view, (uint32_t)job->first[i] + place * pages, entry);
    if (code == -EFAULT) return code; /* the caller's own array */
    if (code < 0) {
        note_bad(job, i, place, code);
        block_clear(job, entry);
    }
    store_fence();
    return 0;
}

/* The pages that are wanted of a sequence are there. */
static int check_range(const blocks_job *job, uint32_t i) {
    layer_view view = view_of(job->batch->sequences[i], job->layer);
    uint32_t pages = job->table->block_tokens / job->layout->page_tokens;
    int64_t blocks = job->table->starts[i + 1] - job->table->starts[i], first = job->first[i];
    if (blocks == 0) return 0;
    if (first < 0 || first + blocks * pages > view.complete)
        return fail(CXLKV_E_ARGUMENT,
                    "sequence %u: pages %ld to %ld wanted, its complete pages are 0 to %ld", i,
                    first, first + blocks * pages - 1, (int64_t)view.complete - 1);
    if (first + pages <= view.first)
        return fail(CXLKV_E_ARGUMENT,
                    "sequence %u: page %ld lies behind the window of %u tokens and was given back: "
                    "its pages are %u to %u",
                    i, first, view.window, view.first, view.complete - 1);
    return 0;
}

static int check_target(const blocks_job *job, uint32_t *tokens) {
    const cxlkv_layout *layout = job->layout;
    const cxlkv_blocks *table = job->table;
    for (uint32_t kind = PIECE_KEYS; kind <= PIECE_VALUES; kind++)
        if (!is_given(layout, kind, table->dtype))
            return fail(CXLKV_E_ARGUMENT, "blocks of dtype code %u, the pool stores %u",
                        table->dtype, layout->dtype);
    int code = blocks_check(job->batch, table, tokens);
    if (code == 0 && *tokens && (!table->keys || (!table->values) != values_are_keys(layout)))
        code = fail(CXLKV_E_ARGUMENT, "keys or values: no data, or one that the pool lacks");
    for (uint32_t i = 0; code == 0 && i < job->batch->count; i++) code = check_range(job, i);
    return code;
}

static int64_t fetch_blocks_locked(blocks_job *job) {
    cxlkv_batch *batch = job->batch;
    const int32_t *starts = job->table->starts;
    uint32_t tokens = 0;
    int code = layer_check(batch->pool, job->layer);
    if (code < 0) return code;
    const cxlkv_layout *layout = job->layout = layout_of(batch->pool, job->layer);
    code = check_target(job, &tokens);
    if (code < 0) return code;
    for (uint32_t i = 0; i < batch->count; i++) job->good[i] = starts[i + 1] - starts[i];
    uint64_t bytes =
        (uint64_t)tokens * layout->kv_heads * row_channels(layout) * dtype_bytes(job->table->dtype);
    job->stream = bytes > STREAM_BYTES;
    local_enter(batch->pool);
    code = run_tasks(batch->pool, (uint32_t)starts[batch->count], block_task, job);
    local_leave(batch->pool, &(local_reads){0});
    if (code == 0 && job->code < 0)
        code = fail(-job->code, "sequence %u of the batch, block %u of it: %s", job->sequence,
                    job->place, job->text);
    if (code == 0) count_add(batch->pool, COUNT_FETCHED_BYTES, bytes);
    return code < 0 ? code : (int64_t)bytes;
}

int64_t cxlkv_batch_fetch_blocks(cxlkv_batch *batch, uint32_t layer, const cxlkv_blocks *blocks,
                                 const int32_t *first, int32_t *good) {
    blocks_job job = {.batch = batch, .layer = layer, .table = blocks, .first = first,
                      .good = good, .lock = PTHREAD_MUTEX_INITIALIZER};
    int64_t code = need(batch->count, "first", first, "good", good, NULL);
    if (code < 0) return code;
    memset(good, 0, batch->count * sizeof(*good));
    code = IN_BATCH(batch, false, peers_verify(batch->pool, fetch_blocks_locked(&job)));
    if (code < 0 && code != job.code) memset(good, 0, batch->count * sizeof(*good));
    pthread_mutex_destroy(&job.lock);
    return code;
}
