/* Calls by the worker: select, in as many requests as have room, and its results. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker_client.h"

/* Some sequences of a batch: those of one request. */
typedef struct group {
    uint32_t low, high;
} group;

/* How many tokens of the open tail the worker has. */
static uint32_t tail_known(const cxlkv_sequence *sequence, uint32_t layer) {
    uint64_t page_tokens = sequence->pool->layout.page_tokens;
    uint64_t tokens = sequence->layer_tokens[layer], first = tokens - tokens % page_tokens;
    uint64_t known = sequence->worker_tokens[layer];
    return known > first ? (uint32_t)(known - first) : 0;
}

static uint64_t rows_of(const cxlkv_select_args *args, uint32_t low, uint32_t high) {
    return (uint64_t)(args->starts[high] - args->starts[low]);
}

static uint64_t group_bytes(const cxlkv_batch *batch, const request_facts *facts,
                            const cxlkv_select_args *args, group g) {
    uint64_t count = g.high - g.low, bytes = sizeof(request_head) + sizeof(request_select);
    request_select select = {.q_heads = args->q_heads, .dtype = args->queries.dtype,
                             .rows = (uint32_t)rows_of(args, g.low, g.high)};
    bytes += count * sizeof(request_sequence);
    bytes += (args->budget_count == 1 ? 1 : count) * sizeof(cxlkv_budget);
    bytes += align_up(request_query_bytes(facts, &select), 8);
    for (uint32_t i = g.low; i < g.high; i++)
        bytes += request_tail_bytes(facts, batch->sequences[i]->layer_tokens[args->layer],
                                    tail_known(batch->sequences[i], args->layer));
    return bytes;
}

/* The longest group from `low` on that has room in a request. */
static int group_from(const worker_client *c, const cxlkv_batch *batch, const request_facts *facts,
                      const cxlkv_select_args *args, uint32_t low, group *g) {
    uint64_t room = c->file.header.request_bytes;
    *g = (group){low, low};
    uint32_t step = batch->count - low;
    /* All, or as many as halving finds: sequences are of about one size. */
    for (; step; step = step == 1 ? 0 : (step + 1) / 2) {
        while (g->high + step <= batch->count &&
               group_bytes(batch, facts, args, (group){low, g->high + step}) <= room)
            g->high += step;
        if (g->high == batch->count) break;
    }
    if (g->high > low) return 0;
    g->high = low + 1;
    return fail(CXLKV_E_ARGUMENT, "sequence %u's request has %lu bytes, a slot of the worker has "
                "room for %lu: select fewer rows at once", low,
                group_bytes(batch, facts, args, *g), room);
}

static uint8_t *put_queries(const cxlkv_batch *batch, const cxlkv_select_args *args, group g,
                            uint8_t *to) {
    const cxlkv_rows *queries = &args->queries;
    uint32_t dim = batch->pool->layout.head_dim;
    size_t element = dtype_bytes(queries->dtype);
    for (int64_t row = args->starts[g.low]; row < args->starts[g.high]; row++)
        for (uint32_t head = 0; head < args->q_heads; head++) {
            const uint8_t *from = (const uint8_t *)queries->data + row * queries->stride_bytes[0] +
                                  (int64_t)head * queries->stride_bytes[1];
            if (queries->stride_bytes[2] == (int64_t)element) {
                memcpy(to, from, dim * element);
                to += dim * element;
                continue;
            }
            for (uint32_t d = 0; d < dim; d++, to += element)
                memcpy(to, from + (int64_t)d * queries->stride_bytes[2], element);
        }
    return to;
}

static uint8_t *put_tail(const cxlkv_sequence *sequence, uint32_t layer, uint8_t *to) {
    const cxlkv_pool *pool = sequence->pool;
    const cxlkv_layout *layout = &pool->layout;
    uint64_t filled = sequence->layer_tokens[layer] % layout->page_tokens;
    uint64_t bytes = (uint64_t)layout->kv_heads * layout->head_dim * dtype_bytes(layout->dtype);
    for (uint64_t t = tail_known(sequence, layer); t < filled; t++, to += bytes)
        memcpy(to, tail_at(pool, sequence->tails[layer], PIECE_KEYS, 0) + t * tail_row_bytes(pool),
               bytes);
    return to;
}

static uint8_t *fill_to_8(const uint8_t *begin, uint8_t *at) {
    while ((at - begin) % 8) *at++ = 0;
    return at;
}

/* Where the lists of a select go. */
typedef struct collecting {
    uint64_t row;                /* the next of [lists, kv_heads] */
    uint32_t k_max, k;           /* room for each; the longest so far */
    uint32_t method;             /* that was asked for */
    double error;                /* mean errors, times lists */
} collecting;

static uint64_t put_select(worker_client *c, const cxlkv_batch *batch,
                           const cxlkv_select_args *args, group g, const collecting *to) {
    uint32_t part = batch->pool->part_of[args->layer], count = g.high - g.low;
    request_select select = {.layer = args->layer, .q_heads = args->q_heads,
                             .dtype = args->queries.dtype, .method = to->method,
                             .union_over = args->union_over, .per = args->per,
                             .scale = args->scale, .errors = args->errors,
                             .rows = (uint32_t)rows_of(args, g.low, g.high),
                             .budget_count = args->budget_count == 1 ? 1 : count,
                             .k_max = to->k_max, .pages_min = args->pages_min};
    uint8_t *at = c->request + sizeof(request_head);
    memcpy(at, &select, sizeof(select));
    at += sizeof(select);
    for (uint32_t i = g.low; i < g.high; i++, at += sizeof(request_sequence)) {
        const worker_table *known = &batch->sequences[i]->worker_tables[part];
        request_sequence item = {.table = known->table, .rows = (uint32_t)rows_of(args, i, i + 1),
                                 .version = known->version,
                                 .tokens = batch->sequences[i]->layer_tokens[args->layer],
                                 .tail_known = tail_known(batch->sequences[i], args->layer)};
        memcpy(at, &item, sizeof(item));
    }
    const cxlkv_budget *budgets = args->budgets + (args->budget_count == 1 ? 0 : g.low);
    memcpy(at, budgets, select.budget_count * sizeof(*budgets));
    at += select.budget_count * sizeof(*budgets);
    at = fill_to_8(c->request, put_queries(batch, args, g, at));
    for (uint32_t i = g.low; i < g.high; i++)
        at = fill_to_8(c->request, put_tail(batch->sequences[i], args->layer, at));
    return (uint64_t)(at - c->request);
}

static int result_reserve(worker_client *c, uint64_t bytes) {
    if (bytes <= c->result_capacity) return 0;
    uint8_t *made = malloc(bytes + bytes / 2);
    if (!made) return fail(ENOMEM, "no memory for the worker's result");
    free(c->result);
    c->result = made;
    c->result_capacity = bytes + bytes / 2;
    return 0;
}

/* The result of the request that was just answered, which may be longer than an answer. */
static int take_result(worker_client *c, answer_head head, uint64_t length, uint64_t deadline_ns) {
    int code = result_reserve(c, head.bytes);
    if (code < 0) return code;
    for (uint64_t at = 0;;) {
        if (length > head.bytes - at || length == 0)
            return client_lost(c, fail(CXLKV_E_WORKER, "the worker's result of %lu bytes goes on "
                                       "by %lu after %lu", head.bytes, length, at), RETRY_NS);
        memcpy(c->result + at, c->response + sizeof(head), length);
        at += length;
        if (at == head.bytes) return 0;
        answer_head next;
        request_more more = {.result = head.result, .offset = at};
        memcpy(c->request + sizeof(request_head), &more, sizeof(more));
        code = client_ask(c, REQUEST_MORE, 0, sizeof(request_head) + sizeof(more), deadline_ns,
                          &next, &length);
        if (code < 0) return code;
    }
}

/* Rows of a result to args, k_max apart; their lengths and pages may be what they say. */
static int place(worker_client *c, const cxlkv_select_args *args, uint64_t rows, uint32_t k,
                 uint64_t page_end, const collecting *to) {
    const int32_t *pages = (const int32_t *)(const void *)(c->result + sizeof(answer_select));
    const float *scores = (const float *)(pages + rows * k);
    const int32_t *counts = (const int32_t *)(scores + rows * k);
    bool right = true;
    for (uint64_t row = 0; right && row < rows; row++) {
        uint64_t at = (to->row + row) * to->k_max, count = (uint32_t)counts[row];
        if (!(right = count <= k)) break;
        for (uint64_t i = 0; i < count; i++) {
            int32_t page = pages[row * k + i];
            right &= page >= 0 && (uint64_t)page < page_end;
        }
        memcpy(args->pages + at, pages + row * k, count * sizeof(*pages));
        memcpy(args->scores + at, scores + row * k, count * sizeof(*scores));
        args->counts[to->row + row] = (int32_t)count;
    }
    return right ? 0 : client_lost(c, fail(CXLKV_E_WORKER, "the worker named pages that there are "
                                           "not"), RETRY_NS);
}

/* From k_max apart to k apart, padded. */
static void close_gaps(const cxlkv_select_args *args, const collecting *all) {
    for (uint64_t row = 0; row < all->row; row++) {
        int32_t *pages = args->pages + row * all->k;
        float *scores = args->scores + row * all->k;
        uint64_t count = (uint64_t)args->counts[row];
        memmove(pages, args->pages + row * all->k_max, count * sizeof(*pages));
        memmove(scores, args->scores + row * all->k_max, count * sizeof(*scores));
        for (; count < all->k; count++) {
            pages[count] = -1;
            scores[count] = -INFINITY;
        }
    }
}

static uint64_t lists_of(const cxlkv_select_args *args, group g) {
    return args->per == CXLKV_PER_QUERY ? rows_of(args, g.low, g.high) : g.high - g.low;
}

static int select_group(worker_client *c, cxlkv_batch *batch, cxlkv_select_args *args, group g,
                        collecting *to, uint64_t deadline_ns) {
    const cxlkv_layout *layout = &batch->pool->layout;
    answer_head head = {0};
    uint64_t length = 0, rows = lists_of(args, g) * layout->kv_heads, longest = 0;
    uint64_t bytes = put_select(c, batch, args, g, to);
    int code = client_ask(c, REQUEST_SELECT, g.high - g.low, bytes, deadline_ns, &head, &length);
    if (code == -CXLKV_E_ROOM) args->k = head.k;
    if (code < 0) return code;
    uint64_t expected = sizeof(answer_select) + rows * 4 * (2ull * head.k + 1);
    if (head.k > to->k_max || head.bytes != expected)
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker's result has %lu bytes, wanted "
                                   "%lu", head.bytes, expected), RETRY_NS);
    code = take_result(c, head, length, deadline_ns);
    for (uint32_t i = g.low; i < g.high; i++)
        if (batch->sequences[i]->layer_tokens[args->layer] > longest)
            longest = batch->sequences[i]->layer_tokens[args->layer];
    uint64_t page_end = (longest + layout->page_tokens - 1) / layout->page_tokens;
    if (code == 0) code = place(c, args, rows, head.k, page_end, to);
    if (code < 0) return code;
    answer_select found;
    memcpy(&found, c->result, sizeof(found));
    args->bytes_scored += found.bytes_scored;
    args->bytes_sketched += found.bytes_sketched;
    args->tokens_scored += found.tokens_scored;
    args->bytes_fetched += found.bytes_fetched;
    args->method = found.method;
    args->lists_staged += found.lists_staged;
    to->error += (double)found.mean_error * found.lists_staged;
    to->row += rows;
    if (head.k > to->k) to->k = head.k;
    for (uint32_t i = g.low; i < g.high; i++) {
        uint64_t tokens = batch->sequences[i]->layer_tokens[args->layer];
        batch->sequences[i]->worker_tokens[args->layer] = tokens % layout->page_tokens ? tokens : 0;
    }
    return 0;
}

static int select_all(worker_client *c, cxlkv_batch *batch, cxlkv_select_args *args,
                      uint32_t method, uint64_t deadline_ns) {
    request_facts facts = worker_facts(batch->pool);
    uint64_t rows = lists_of(args, (group){0, batch->count}) * facts.kv_heads;
    collecting to = {.k_max = (uint32_t)min_u64(INT32_MAX, args->capacity / rows),
                     .method = method};
    args->lists_staged = 0;
    args->bytes_scored = args->bytes_sketched = args->tokens_scored = args->bytes_fetched = 0;
    if (atomic_load(&c->untold) || c->next_table + batch->count > REQUEST_TABLES_MAX) {
        int code = client_forget(c, deadline_ns);
        if (code < 0) return code;
    }
    int code = client_tell(c, batch, args->layer, deadline_ns);
    for (group g = {0, 0}; code == 0 && g.high < batch->count;) {
        code = group_from(c, batch, &facts, args, g.high, &g);
        if (code == 0) code = select_group(c, batch, args, g, &to, deadline_ns);
    }
    if (code < 0) return code;
    args->k = to.k;
    args->mean_error = args->lists_staged ? (float)(to.error / args->lists_staged) : 0;
    close_gaps(args, &to);
    return 0;
}

/* Each sequence has a place for what the worker was told of it. */
static int tables_reserve(cxlkv_batch *batch) {
    uint32_t parts = batch->pool->geometry.part_count;
    for (uint32_t i = 0; i < batch->count; i++) {
        cxlkv_sequence *sequence = batch->sequences[i];
        if (!sequence->worker_tables)
            sequence->worker_tables = calloc(parts, sizeof(*sequence->worker_tables));
        if (!sequence->worker_tokens)
            sequence->worker_tokens =
                calloc(batch->pool->layout.layers, sizeof(*sequence->worker_tokens));
        if (!sequence->worker_tables || !sequence->worker_tokens)
            return fail(ENOMEM, "no memory for a worker's tables");
    }
    return batch->count <= REQUEST_TABLES_MAX ? 0
           : fail(CXLKV_E_ARGUMENT, "%u sequences at once: the worker takes %d", batch->count,
                  REQUEST_TABLES_MAX);
}

/* Keys that are scored, at most, times what more than 8 queries a head take. */
static double work_bytes(const cxlkv_batch *batch, const cxlkv_select_args *args) {
    const cxlkv_layout *layout = &batch->pool->layout;
    double bytes = 0, token = (double)layout->kv_heads * layout->head_dim * 4;
    for (uint32_t i = 0; i < batch->count; i++) {
        double queries = (double)rows_of(args, i, i + 1) * args->q_heads / layout->kv_heads;
        bytes += (double)batch->sequences[i]->layer_tokens[args->layer] * token *
                 fmax(1, queries / 8);
    }
    return bytes;
}

/* Under the locks of the batch. */
static int select_by(worker_client *c, cxlkv_batch *batch, cxlkv_select_args *args,
                     uint32_t method) {
    uint64_t deadline_ns = client_deadline(c, work_bytes(batch, args));
    int code = client_lock(c, deadline_ns);
    if (code < 0) return code;
    code = tables_reserve(batch);
    /* A second time when tables are not what was told, or a worker has taken the other's place. */
    for (int attempt = 0; code == 0 && attempt < 2; attempt++) {
        bool was_connected = c->connected;
        code = was_connected ? 0 : client_connect(batch->pool, c);
        if (code == 0) code = select_all(c, batch, args, method, deadline_ns);
        bool again = code == -CXLKV_E_STALE ||
                     (code == -CXLKV_E_WORKER && was_connected && c->retry_ns <= boottime_ns());
        if (!again || attempt) break;
        if (c->connected) c->epoch++, c->next_table = 0;
        code = 0;
    }
    if (code == 0 || code == -CXLKV_E_ROOM) {
        c->state.selects += code == 0;
    } else {
        if (!strstr(cxlkv_error_text(), "is left alone for"))
            snprintf(c->state.why, sizeof(c->state.why), "%s", cxlkv_error_text());
        c->state.selects_here += atomic_load(&c->use) == CXLKV_WORKER_IF_THERE;
    }
    pthread_mutex_unlock(&c->lock);
    return code;
}

int64_t worker_select(cxlkv_batch *batch, cxlkv_select_args *args, uint32_t method) {
    worker_client *c = atomic_load(&batch->pool->client);
    uint32_t rows, use = c ? atomic_load(&c->use) : CXLKV_WORKER_NONE;
    if (use == CXLKV_WORKER_NONE || batch_lock(batch, false) < 0) return NOT_BY_WORKER;
    int64_t code = NOT_BY_WORKER;
    /* What is wrong in the arguments is said by the select of this process. */
    if (queries_check(batch, args->layer, args->q_heads, &args->queries, args->starts,
                      &rows) == 0 && rows > 0)
        code = select_by(c, batch, args, method);
    batch_unlock(batch);
    if (code >= 0) return args->k;
    if (code == -CXLKV_E_ROOM || use == CXLKV_WORKER_ONLY) return code;
    return NOT_BY_WORKER;
}
