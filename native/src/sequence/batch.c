/* A batch: the sequences of one call, their locks, scratch, packed queries, views of a layer. */
#include "format/records.h"
#include "host/locks.h"
#include "pool/pool.h"
#include "sequence/batch.h"
#include "sequence/sequence.h"

static int by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t) * (cxlkv_sequence *const *)a;
    uintptr_t y = (uintptr_t) * (cxlkv_sequence *const *)b;
    return x < y ? -1 : x > y;
}

int cxlkv_batch_create(cxlkv_pool *pool, uint32_t count, cxlkv_sequence **sequences,
                       cxlkv_batch **out) {
    if (count == 0 || count > 1u << 20)
        return fail(CXLKV_E_ARGUMENT, "a batch of %u sequences: outside 1 to 1048576", count);
    int code = need(count, "sequences", sequences, NULL);
    if (code < 0) return code;
    for (uint32_t i = 0; i < count; i++)
        if (sequences[i]->pool != pool)
            return fail(CXLKV_E_ARGUMENT, "sequence %u of the batch is of another pool", i);
    cxlkv_batch *made = calloc(1, sizeof(*made));
    cxlkv_sequence **lists = malloc(2 * count * sizeof(*lists));
    if (!made || !lists) {
        free(made);
        free(lists);
        return fail(ENOMEM, "no memory for a batch of %u sequences", count);
    }
    made->pool = pool;
    made->count = count;
    made->sequences = lists;
    made->lock_order = lists + count;
    memcpy(made->sequences, sequences, count * sizeof(*sequences));
    memcpy(made->lock_order, sequences, count * sizeof(*sequences));
    qsort(made->lock_order, count, sizeof(*sequences), by_address);
    for (uint32_t i = 1; i < count; i++)
        if (made->lock_order[i] == made->lock_order[i - 1]) {
            free(made);
            free(lists);
            return fail(CXLKV_E_ARGUMENT, "a sequence is in the batch twice: fork it instead");
        }
    pthread_mutex_init(&made->lock, NULL);
    pool_retain(pool);
    *out = made;
    return 0;
}

void cxlkv_batch_destroy(cxlkv_batch **at) {
    cxlkv_batch *batch = *at;
    if (!batch) return;
    pthread_mutex_destroy(&batch->lock);
    pool_drop(batch->pool);
    free(batch->sequences);
    free(batch->scratch);
    free(batch);
}

int batch_lock(cxlkv_batch *batch, bool write) {
    int code = pool_enter(batch->pool);
    if (code < 0) return code;
    pthread_mutex_lock(&batch->lock);
    for (uint32_t i = 0; i < batch->count; i++) {
        if (write) pthread_rwlock_wrlock(&batch->lock_order[i]->lock);
        else pthread_rwlock_rdlock(&batch->lock_order[i]->lock);
    }
    for (uint32_t i = 0; code == 0 && i < batch->count; i++)
        code = sequence_usable(batch->sequences[i]);
    if (code < 0) batch_unlock(batch);
    return code;
}

void batch_unlock(cxlkv_batch *batch) {
    for (uint32_t i = 0; i < batch->count; i++)
        pthread_rwlock_unlock(&batch->lock_order[i]->lock);
    pthread_mutex_unlock(&batch->lock);
    pool_leave(batch->pool);
}

void *batch_scratch(cxlkv_batch *batch, size_t bytes) {
    if (bytes > batch->scratch_bytes) {
        size_t wanted = align_up(bytes + bytes / 4, 4096);
        void *grown = aligned_alloc(LINE_BYTES, wanted);
        if (!grown) {
            fail(ENOMEM, "no memory for %zu bytes of scratch: work on fewer rows at once", bytes);
            return NULL;
        }
        free(batch->scratch);
        batch->scratch = grown;
        batch->scratch_bytes = wanted;
    }
    return batch->scratch;
}

struct room {
    _Alignas(LINE_BYTES) size_t bytes;
};

void *room_take(cxlkv_pool *pool, size_t bytes) {
    struct room *kept = atomic_exchange(&sequences_of(pool)->room, NULL);
    if (kept && kept->bytes >= bytes) return kept + 1;
    free(kept);
    size_t wanted = align_up(bytes + bytes / 4, 4096);
    struct room *made = aligned_alloc(LINE_BYTES, sizeof(*made) + wanted);
    if (!made) return NULL;
    made->bytes = wanted;
    return made + 1;
}

void room_give(cxlkv_pool *pool, void *taken) {
    enum { KEPT_BYTES_MAX = 256 << 20 };
    struct room *given = taken;
    if (!given) return;
    given--;
    if (given->bytes <= KEPT_BYTES_MAX)
        given = atomic_exchange(&sequences_of(pool)->room, given);
    free(given);
}

int batch_starts(const cxlkv_batch *batch, const int32_t *starts, uint32_t *rows) {
    if (!starts || starts[0] != 0) return fail(CXLKV_E_ARGUMENT, "starts must begin with 0");
    for (uint32_t i = 0; i < batch->count; i++)
        if (starts[i + 1] < starts[i])
            return fail(CXLKV_E_ARGUMENT, "starts must not fall: starts[%u] = %d, then %d", i,
                        starts[i], starts[i + 1]);
    *rows = (uint32_t)starts[batch->count];
    return 0;
}

int blocks_check(const cxlkv_batch *batch, const cxlkv_blocks *table, uint32_t *rows) {
    const cxlkv_layout *layout = &batch->pool->layout;
    uint32_t blocks = 0, tokens = table->block_tokens;
    int code = batch_starts(batch, table->starts, &blocks);
    if (code < 0) return code;
    if (tokens == 0 || tokens % layout->page_tokens)
        return fail(CXLKV_E_ARGUMENT,
                    "blocks of %u tokens are no multiple of the pool's pages of %u: make the pool "
                    "with page_tokens that divide them",
                    tokens, layout->page_tokens);
    if ((uint64_t)blocks * tokens > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "%u blocks of %u tokens: copy fewer at once", blocks, tokens);
    code = need(blocks, "blocks", table->blocks, NULL);
    for (uint32_t i = 0; code == 0 && i < blocks; i++)
        if (table->blocks[i] < 0 || (uint32_t)table->blocks[i] >= table->block_count)
            return fail(CXLKV_E_ARGUMENT, "blocks[%u] is %d: there are blocks 0 to %d", i,
                        table->blocks[i], (int)table->block_count - 1);
    *rows = blocks * tokens;
    return code;
}

int queries_bounds(const cxlkv_layout *layout, uint32_t q_heads, uint32_t dtype, uint32_t rows) {
    enum { GROUP_MAX = 4096 };
    if (q_heads == 0 || q_heads % layout->kv_heads || q_heads / layout->kv_heads > GROUP_MAX)
        return fail(CXLKV_E_ARGUMENT, "%u query heads are no multiple of %u kv heads, 1 to %d "
                    "times them", q_heads, layout->kv_heads, GROUP_MAX);
    if (dtype >= DTYPE_COUNT)
        return fail(CXLKV_E_ARGUMENT, "queries: dtype code %u is unknown", dtype);
    if (rows > INT32_MAX || (uint64_t)rows * q_heads > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "%u query rows of %u heads: ask with fewer rows at once",
                    rows, q_heads);
    return 0;
}

uint32_t rows_asked(const cxlkv_batch *batch, const int32_t *starts) {
    return starts && starts[batch->count] > 0 ? (uint32_t)starts[batch->count] : 0;
}

int queries_check(const cxlkv_batch *batch, uint32_t layer, uint32_t q_heads,
                  const cxlkv_rows *queries, const int32_t *starts, uint32_t *rows) {
    int code = layer_check(batch->pool, layer);
    if (code < 0) return code;
    const cxlkv_layout *layout = layout_of(batch->pool, layer);
    code = batch_starts(batch, starts, rows);
    if (code == 0) code = queries_bounds(layout, q_heads, queries->dtype, *rows);
    if (code == 0) code = need(*rows, "queries", queries->data, NULL);
    for (uint32_t i = 0; code == 0 && i < batch->count; i++) {
        uint64_t tokens = batch->sequences[i]->layer_tokens[layer];
        uint64_t wanted = (uint64_t)(starts[i + 1] - starts[i]);
        if (wanted > tokens)
            code = fail(CXLKV_E_ARGUMENT,
                        "sequence %u has %lu tokens in layer %u, fewer than its %lu query rows: "
                        "append their keys first",
                        i, tokens, layer, wanted);
        uint32_t part = batch->pool->layers.part_of[layer];
        uint32_t first = batch->sequences[i]->tables[part].first;
        if (code == 0 && wanted && window_page(batch->pool, part, tokens - wanted) < first)
            code = fail(CXLKV_E_ARGUMENT,
                        "sequence %u: query row 0 is token %lu, and layer %u has given back what "
                        "it sees (all before token %lu, behind its window of %u). Ask for the "
                        "newest tokens, or append with a larger rewind=",
                        i, tokens - wanted, layer, (uint64_t)first * layout->page_tokens,
                        batch->pool->layers.parts[part].window);
    }
    return code;
}

/* The rows, up to the line on which the packed form starts. */
static size_t query_row_bytes(const cxlkv_layout *layout, uint64_t query_count) {
    return align_up(query_count * layout->head_dim * sizeof(float), LINE_BYTES);
}

/* The codes of queries to keys that are codes. */
static size_t code_query_bytes(const cxlkv_layout *layout, uint64_t query_count) {
    return align_up(query_count * 2 * code_channels(layout->head_dim), LINE_BYTES);
}

size_t queries_bytes(const cxlkv_layout *layout, const kernels *isa, uint64_t query_total) {
    size_t bytes = query_row_bytes(layout, query_total);
    if (has_codes(layout, PIECE_KEYS))
        return bytes + code_query_bytes(layout, query_total) +
               align_up(query_total * sizeof(code_query), LINE_BYTES);
    if (isa->pack) bytes += isa->packed_bytes(layout->head_dim, (uint32_t)query_total);
    return align_up(bytes, LINE_BYTES);
}

uint64_t queries_total(const cxlkv_batch *batch, uint32_t heads, uint32_t q_heads,
                       const int32_t *starts) {
    uint64_t end = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        query_place((uint64_t)(starts[i + 1] - starts[i]), q_heads / heads, heads, &end);
    return end;
}

/* One query of any strides. */
static void query_unpack(const kernels *isa, const cxlkv_rows *queries, uint64_t row, uint32_t head,
                         uint32_t dim, float *to) {
    size_t element = dtype_bytes(queries->dtype);
    const uint8_t *from = (const uint8_t *)queries->data +
                          (int64_t)row * queries->stride_bytes[0] +
                          (int64_t)head * queries->stride_bytes[1];
    if (queries->stride_bytes[2] == (int64_t)element) {
        isa->to_float((int)queries->dtype, from, dim, to);
        return;
    }
    for (uint32_t d = 0; d < dim; d++)
        isa->to_float((int)queries->dtype, from + d * queries->stride_bytes[2], 1, to + d);
}

/* [rows, q_heads, dim] to float32 blocks, zeros where they are filled up. */
static void queries_unpack(const cxlkv_batch *batch, const kernels *isa, const query_source *source,
                           float *out) {
    const cxlkv_layout *layout = source->layout;
    const int32_t *starts = source->starts, *order = source->order;
    uint32_t dim = layout->head_dim, heads = layout->kv_heads, group = source->q_heads / heads;
    uint64_t end = 0, written = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        uint64_t row = (uint64_t)starts[i], rows = (uint64_t)starts[i + 1] - row;
        uint64_t at = query_place(rows, group, heads, &end), block = query_block(rows, group);
        for (uint32_t head = 0; head < heads; head++, at += block) {
            memset(out + written * dim, 0, (at - written) * dim * sizeof(*out));
            for (uint64_t j = 0; j < rows * group; j++) {
                uint64_t from = row + j / group;
                query_unpack(isa, source->rows, order ? (uint64_t)order[from] : from,
                             head * group + (uint32_t)(j % group), dim, out + (at + j) * dim);
            }
            written = at + rows * group;
        }
    }
    memset(out + written * dim, 0, (end - written) * dim * sizeof(*out));
}

kernel_queries queries_pack(const cxlkv_batch *batch, const kernels *isa,
                            const query_source *source, void *out) {
    const cxlkv_layout *layout = source->layout;
    kernel_queries made = {
        .rows = out, .total = (uint32_t)queries_total(batch, layout->kv_heads, source->q_heads,
                                                source->starts)};
    queries_unpack(batch, isa, source, out);
    void *packed = (char *)out + query_row_bytes(layout, made.total);
    if (has_codes(layout, PIECE_KEYS)) {
        code_query *prepared = (void *)((char *)packed + code_query_bytes(layout, made.total));
        code_queries(made.rows, made.total, layout->head_dim, source->scale, packed, prepared);
        made.packed = prepared;
        return made;
    }
    int dtype = (int)kernel_dtype(layout, PIECE_KEYS);
    if (isa->pack && isa->pack(dtype, made.rows, layout->head_dim, made.total, packed))
        made.packed = packed;
    return made;
}

layer_view view_of(cxlkv_sequence *sequence, uint32_t layer) {
    uint64_t tokens = sequence->layer_tokens[layer];
    uint32_t page_tokens = sequence->pool->layout.page_tokens;
    uint32_t part = sequence->pool->layers.part_of[layer];
    return (layer_view){.sequence = sequence, .layer = layer, .tokens = tokens, .part = part,
                        .first = sequence->tables[part].first,
                        .window = sequence->pool->layers.parts[part].window,
                        .complete = (uint32_t)(tokens / page_tokens),
                        .pages = (uint32_t)((tokens + page_tokens - 1) / page_tokens)};
}

uint32_t views_shared(const layer_view *a, const layer_view *b, uint32_t low) {
    const page_table *x = &a->sequence->tables[a->part], *y = &b->sequence->tables[b->part];
    uint32_t end = min_u32(a->complete, b->complete), page = low;
    while (page < end) {
        const chunk *ours = x->chunks[page / CHUNK_PAGES], *theirs = y->chunks[page / CHUNK_PAGES];
        if (ours == theirs) page = (page / CHUNK_PAGES + 1) * CHUNK_PAGES;
        else if (ours->pages[page % CHUNK_PAGES] == theirs->pages[page % CHUNK_PAGES]) page++;
        else return page;
    }
    return low < end ? end : low;
}

int view_verify(const layer_view *view, uint32_t index) {
    if (index >= view->complete) return 0;
    return pieces_verify(view->sequence->pool, sequence_page(view->sequence, view->part, index),
                         view->layer);
}
