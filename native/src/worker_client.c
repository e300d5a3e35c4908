/* A process's end of the worker: what it was told, and selects by it, in bounded time.
 *
 * Tables: the worker holds pages for this process, and is told of new ones before a select, and of
 * those that a release or a truncate drops, at once. Whatever goes wrong (no worker, a dead, slow
 * or full one, a refusal), the connection's epoch ends where it must, and the select is done here.
 * A worker that comes back is found within RETRY_NS, and told everything anew. */
#include "worker.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A look for a worker costs a few us; a slow one is left alone for longer. */
enum { RETRY_NS = 50000000, SLOW_RETRY_NS = 1000000000, ERROR_CODE_MAX = 4095 };
/* An answer is due after this time and what 500 MB/s would take. */
#define DEADLINE_S 0.05
#define DEADLINE_BYTES_S 5e8

typedef struct worker_client {
    pthread_mutex_t lock;        /* guards all below, and all worker_tables; leaf */
    atomic_uint use;             /* CXLKV_WORKER_... */
    double deadline_s;           /* 0: by the work */
    bool connected;
    worker_file file;
    uint32_t slot_index;
    rpc_slot slot;
    uint32_t epoch;              /* what was told in another one counts for nothing */
    uint32_t next_table;
    uint64_t next_version;
    uint64_t retry_ns;           /* no connection is tried before */
    atomic_bool untold;          /* pages went, and the worker could not be told */
    uint8_t *request, *response; /* as long as a slot's */
    uint8_t *result;             /* of one request */
    uint64_t result_capacity;
    cxlkv_worker_state state;
} worker_client;

/* ---- the connection ---- */

static void disconnect(worker_client *c, bool unclaims) {
    if (c->connected && unclaims) worker_unclaim(&c->file, c->slot_index);
    worker_file_close(&c->file);
    free(c->request);
    free(c->response);
    c->request = c->response = NULL;
    c->connected = false;
    c->state.connected = 0;
    c->epoch++;
    c->next_table = 0;
}

/* After a failed call; the text of the error stays. */
static int lost(worker_client *c, int code, uint64_t retry_ns) {
    disconnect(c, true);
    c->retry_ns = boottime_ns() + retry_ns;
    return code;
}

static int connect_slot(worker_client *c) {
    const worker_header *header = &c->file.header;
    c->slot = (rpc_slot){.mode = (enum visibility_mode)header->mode, .same_host = true};
    c->request = malloc(header->request_bytes);
    c->response = malloc(header->response_bytes);
    if (!c->request || !c->response) return fail(ENOMEM, "no memory for calls of the worker");
    int code = worker_claim(&c->file, &c->slot_index);
    if (code < 0) return code;
    code = rpc_client(&c->slot, worker_slot(&c->file, c->slot_index), header->request_bytes,
                      header->response_bytes);
    if (code < 0) worker_unclaim(&c->file, c->slot_index);
    return code;
}

static int connect_worker(cxlkv_pool *pool, worker_client *c) {
    uint64_t now = boottime_ns();
    if (now < c->retry_ns)
        return fail(CXLKV_E_WORKER, "the worker is left alone for %lu ms, since: %s",
                    (c->retry_ns - now) / 1000000 + 1, c->state.why);
    int code = worker_file_open(pool, &c->file);
    if (code == 0) code = connect_slot(c);
    if (code < 0) return lost(c, code, RETRY_NS);
    c->connected = true;
    atomic_store(&c->untold, false);
    c->state.connected = 1;
    c->state.connections++;
    c->state.pid = c->file.header.worker.pid;
    c->state.slots = c->file.header.slot_count;
    return 0;
}

/* Waits for the answer, until the deadline or the worker's death. */
static int64_t await(worker_client *c, uint64_t deadline_ns) {
    for (uint64_t slice_ns = 1000000;; slice_ns = min_u64(2 * slice_ns, 16000000)) {
        uint64_t now = boottime_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
        int64_t code = rpc_await(&c->slot, c->response, (double)min_u64(slice_ns, left) * 1e-9);
        if (code != -CXLKV_E_TIMEOUT) return code;
        if (!worker_lives(&c->file))
            return lost(c, fail(CXLKV_E_WORKER, "the worker, process %d, died during a call",
                                c->file.header.worker.pid), 0);
        if (boottime_ns() >= deadline_ns)
            return lost(c, fail(CXLKV_E_WORKER, "the worker, process %d, lives and did not answer "
                                "in time: it is overloaded or stopped",
                                c->file.header.worker.pid), SLOW_RETRY_NS);
    }
}

/* Sends c->request; 0 and the answer's length, or an error: the connection's (it has ended), or the
 * one with which the worker refused. */
static int ask(worker_client *c, uint32_t operation, uint32_t count, uint64_t bytes,
               uint64_t deadline_ns, answer_head *head, uint64_t *length) {
    request_head request = {REQUEST_MAGIC, operation, (uint32_t)bytes, count};
    memcpy(c->request, &request, sizeof(request));
    c->state.requests++;
    int64_t code = rpc_send(&c->slot, operation, c->request, (uint32_t)bytes);
    if (code < 0) return (int)code;
    worker_ring(&c->file);
    code = await(c, deadline_ns);
    if (code < 0 && !c->connected) return (int)code;
    if (code < 0) return lost(c, (int)code, RETRY_NS);
    if ((uint64_t)code < sizeof(*head))
        return lost(c, fail(CXLKV_E_WORKER, "the worker's answer has %ld bytes", (long)code),
                    RETRY_NS);
    memcpy(head, c->response, sizeof(*head));
    if (head->code < -ERROR_CODE_MAX)
        return lost(c, fail(CXLKV_E_WORKER, "the worker answered with code %d, which is none",
                            head->code), RETRY_NS);
    *length = (uint64_t)code - sizeof(*head);
    if (head->code >= 0) return 0;
    c->state.refused++;
    return fail(-head->code, "%.*s", (int)min_u64(*length, 500),
                (const char *)c->response + sizeof(*head));
}

static uint64_t deadline_of(const worker_client *c, double work_bytes) {
    double seconds = c->deadline_s > 0 ? c->deadline_s : DEADLINE_S + work_bytes / DEADLINE_BYTES_S;
    return boottime_ns() + (uint64_t)(fmin(seconds, 3600) * 1e9);
}

/* Another thread may be in a call: so long at most. */
static int client_lock(worker_client *c, uint64_t deadline_ns) {
    struct timespec until;
    uint64_t now = boottime_ns(), left = deadline_ns > now ? deadline_ns - now : 0;
    if (pthread_mutex_trylock(&c->lock) == 0) return 0;
    clock_gettime(CLOCK_REALTIME, &until);
    left += (uint64_t)until.tv_nsec;
    until.tv_sec += (time_t)(left / 1000000000u);
    until.tv_nsec = (long)(left % 1000000000u);
    if (pthread_mutex_timedlock(&c->lock, &until) == 0) return 0;
    return fail(CXLKV_E_WORKER, "other threads' calls of the worker take too long");
}

/* ---- tables ---- */

/* All that it was told: it drops it. */
static int forget_all(worker_client *c, uint64_t deadline_ns) {
    answer_head head;
    uint64_t length;
    int code = ask(c, REQUEST_LEAVE, 0, sizeof(request_head), deadline_ns, &head, &length);
    if (!c->connected) return code;
    c->epoch++;
    c->next_table = 0;
    atomic_store(&c->untold, false);
    return code;
}

static void tails_untold(cxlkv_sequence *sequence, uint32_t part) {
    const cxlkv_pool *pool = sequence->pool;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        if (pool->part_of[layer] == part) sequence->worker_tokens[layer] = 0;
}

/* How many tokens of the open tail the worker has. */
static uint32_t tail_known(const cxlkv_sequence *sequence, uint32_t layer) {
    uint64_t page_tokens = sequence->pool->layout.page_tokens;
    uint64_t tokens = sequence->layer_tokens[layer], first = tokens - tokens % page_tokens;
    uint64_t known = sequence->worker_tokens[layer];
    return known > first ? (uint32_t)(known - first) : 0;
}

/* False when the worker knows all complete pages of the layer. */
static bool change_of(worker_client *c, cxlkv_sequence *sequence, uint32_t part, uint32_t layer,
                      request_table *change) {
    const worker_table *known = &sequence->worker_tables[part];
    uint64_t complete = sequence->layer_tokens[layer] / sequence->pool->layout.page_tokens;
    uint32_t first = sequence->tables[part].first, end = (uint32_t)complete;
    bool told = known->epoch == c->epoch;
    if (!told) tails_untold(sequence, part);
    if (end < first) end = first;
    *change = (request_table){.table = told ? known->table : c->next_table, .part = part,
                              .to = c->next_version + 1, .first = first, .kept = first};
    if (told && known->first == first) {
        change->from = known->version;
        change->kept = known->end;
        if (known->end >= end) return false;
    }
    change->added = end - change->kept;
    c->next_version++;
    if (!told) c->next_table++;
    return true;
}

static void was_told(const worker_client *c, cxlkv_sequence *sequence,
                     const request_table *change) {
    sequence->worker_tables[change->part] = (worker_table){
        .epoch = c->epoch, .table = change->table, .version = change->to, .first = change->first,
        .end = change->kept + change->added};
}

static uint8_t *put_entries(const cxlkv_sequence *sequence, const request_table *change,
                            uint8_t *to) {
    for (uint32_t i = 0; i < change->added; i++, to += REQUEST_ENTRY_BYTES) {
        uint32_t page = sequence_page(sequence, change->part, change->kept + i);
        memcpy(to, &sequence->pool->pages[page].generation, 8);
        memcpy(to + 8, &page, 4);
    }
    return to;
}

static int tell_some(worker_client *c, cxlkv_sequence **sequences, const request_table *changes,
                     uint32_t count, uint64_t deadline_ns) {
    uint8_t *at = c->request + sizeof(request_head);
    answer_head head;
    uint64_t length;
    memcpy(at, changes, count * sizeof(*changes));
    at += count * sizeof(*changes);
    for (uint32_t i = 0; i < count; i++) at = put_entries(sequences[i], &changes[i], at);
    while ((at - c->request) % 8) *at++ = 0;
    int code = ask(c, REQUEST_TABLES, count, (uint64_t)(at - c->request), deadline_ns, &head,
                   &length);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        if (changes[i].to) was_told(c, sequences[i], &changes[i]);
        else sequences[i]->worker_tables[changes[i].part].epoch = 0;
    }
    return code;
}

/* What the worker does not know yet of sequences [low, high), in as few requests as have room. */
static int tell(worker_client *c, cxlkv_batch *batch, uint32_t layer, uint64_t deadline_ns) {
    enum { CHANGES = 64 };
    uint32_t part = batch->pool->part_of[layer], next = 0;
    while (next < batch->count) {
        request_table changes[CHANGES];
        cxlkv_sequence *whose[CHANGES];
        uint32_t count = 0;
        uint64_t room = c->file.header.request_bytes - sizeof(request_head) - 8;
        for (; next < batch->count && count < CHANGES; next++) {
            request_table *change = &changes[count];
            uint64_t needed = sizeof(*change) + REQUEST_ENTRY_BYTES;
            if (room < needed) break;
            if (!change_of(c, batch->sequences[next], part, layer, change)) continue;
            uint64_t fits = (room - sizeof(*change)) / REQUEST_ENTRY_BYTES;
            bool cut = change->added > fits;
            if (cut) change->added = (uint32_t)fits;
            room -= sizeof(*change) + change->added * REQUEST_ENTRY_BYTES;
            whose[count++] = batch->sequences[next];
            if (cut) break; /* the rest of it in the next request */
        }
        int code = count ? tell_some(c, whose, changes, count, deadline_ns) : 0;
        if (code < 0) return code;
    }
    return 0;
}

/* Of each part that the worker knows: pages from `end` on go; end 0: all of it. */
static void tell_less(cxlkv_sequence *sequence, uint32_t end) {
    cxlkv_pool *pool = sequence->pool;
    worker_client *c = atomic_load(&pool->client);
    if (!c || !sequence->worker_tables) return;
    uint64_t deadline_ns = deadline_of(c, 0);
    if (client_lock(c, deadline_ns) < 0) {
        atomic_store(&c->untold, true);
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            sequence->worker_tables[part].epoch = 0;
        return;
    }
    int code = 0;
    for (uint32_t part = 0; code == 0 && part < pool->geometry.part_count; part++) {
        worker_table *known = &sequence->worker_tables[part];
        request_table change = {.table = known->table, .part = part};
        if (!c->connected || known->epoch != c->epoch || (end && known->end <= end)) continue;
        if (end > known->first) {
            change = (request_table){.table = known->table, .part = part, .from = known->version,
                                     .to = ++c->next_version, .first = known->first, .kept = end};
        }
        code = tell_some(c, &sequence, &change, 1, deadline_ns);
    }
    if (code < 0 && c->connected) lost(c, code, RETRY_NS); /* so all is dropped for certain */
    pthread_mutex_unlock(&c->lock);
}

void worker_forget(cxlkv_sequence *sequence) { tell_less(sequence, 0); }

void worker_cut(cxlkv_sequence *sequence) { tell_less(sequence, sequence->page_count); }

void worker_give_back(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->client);
    uint64_t deadline_ns = c ? deadline_of(c, 0) : 0;
    if (!c || client_lock(c, deadline_ns) < 0) return;
    if (c->connected && c->next_table) forget_all(c, deadline_ns);
    pthread_mutex_unlock(&c->lock);
}

/* ---- select ---- */

/* Some sequences of a batch: those of one request. */
typedef struct group {
    uint32_t low, high;
} group;

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
            return lost(c, fail(CXLKV_E_WORKER, "the worker's result of %lu bytes goes on by %lu "
                                "after %lu", head.bytes, length, at), RETRY_NS);
        memcpy(c->result + at, c->response + sizeof(head), length);
        at += length;
        if (at == head.bytes) return 0;
        answer_head next;
        request_more more = {.result = head.result, .offset = at};
        memcpy(c->request + sizeof(request_head), &more, sizeof(more));
        code = ask(c, REQUEST_MORE, 0, sizeof(request_head) + sizeof(more), deadline_ns, &next,
                   &length);
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
    return right ? 0 : lost(c, fail(CXLKV_E_WORKER, "the worker named pages that there are not"),
                            RETRY_NS);
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
    int code = ask(c, REQUEST_SELECT, g.high - g.low, bytes, deadline_ns, &head, &length);
    if (code == -CXLKV_E_ROOM) args->k = head.k;
    if (code < 0) return code;
    uint64_t expected = sizeof(answer_select) + rows * 4 * (2ull * head.k + 1);
    if (head.k > to->k_max || head.bytes != expected)
        return lost(c, fail(CXLKV_E_WORKER, "the worker's result has %lu bytes, wanted %lu",
                            head.bytes, expected), RETRY_NS);
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
        int code = forget_all(c, deadline_ns);
        if (code < 0) return code;
    }
    int code = tell(c, batch, args->layer, deadline_ns);
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
    uint64_t deadline_ns = deadline_of(c, work_bytes(batch, args));
    int code = client_lock(c, deadline_ns);
    if (code < 0) return code;
    code = tables_reserve(batch);
    /* A second time when tables are not what was told, or a worker has taken the other's place. */
    for (int attempt = 0; code == 0 && attempt < 2; attempt++) {
        bool was_connected = c->connected;
        code = was_connected ? 0 : connect_worker(batch->pool, c);
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

/* ---- beginning and end ---- */

static worker_client *client_make(void) {
    worker_client *made = calloc(1, sizeof(*made));
    if (!made) return NULL;
    pthread_mutex_init(&made->lock, NULL);
    made->file.fd = -1;
    made->epoch = 1;
    return made;
}

int cxlkv_pool_use_worker(cxlkv_pool *pool, uint32_t use, double deadline_s) {
    if (use > CXLKV_WORKER_ONLY || !(deadline_s >= 0))
        return fail(CXLKV_E_ARGUMENT, "worker: use %u within %g s", use, deadline_s);
    if (!pool->path)
        return fail(CXLKV_E_ARGUMENT, "an anonymous pool has no other processes: no worker can "
                    "open it");
    int code = pool_enter(pool);
    if (code < 0) return code;
    pthread_mutex_lock(&pool->list_lock);
    worker_client *c = atomic_load(&pool->client);
    if (!c) c = client_make();
    if (c) atomic_store(&pool->client, c);
    else code = fail(ENOMEM, "no memory for a worker's client");
    pthread_mutex_unlock(&pool->list_lock);
    if (c) {
        pthread_mutex_lock(&c->lock);
        c->deadline_s = deadline_s;
        c->retry_ns = 0;
        atomic_store(&c->use, use);
        if (use == CXLKV_WORKER_NONE && c->connected) {
            forget_all(c, deadline_of(c, 0));
            disconnect(c, true);
        } else if (use != CXLKV_WORKER_NONE && !c->connected) {
            int found = connect_worker(pool, c);
            if (found < 0) snprintf(c->state.why, sizeof(c->state.why), "%s", cxlkv_error_text());
            if (use == CXLKV_WORKER_ONLY) code = found;
        }
        pthread_mutex_unlock(&c->lock);
    }
    pool_leave(pool);
    return code;
}

int cxlkv_pool_worker_state(cxlkv_pool *pool, cxlkv_worker_state *state) {
    worker_client *c = atomic_load(&pool->client);
    *state = (cxlkv_worker_state){0};
    if (!c) return 0;
    pthread_mutex_lock(&c->lock);
    *state = c->state;
    pthread_mutex_unlock(&c->lock);
    return 0;
}

void worker_forked(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->client);
    if (!c) return;
    pthread_mutex_init(&c->lock, NULL);
    disconnect(c, false);
    c->retry_ns = 0;
}

void worker_leave(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->client);
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    if (c->connected) forget_all(c, deadline_of(c, 0));
    disconnect(c, true);
    atomic_store(&c->use, CXLKV_WORKER_NONE);
    pthread_mutex_unlock(&c->lock);
}

void worker_client_drop(cxlkv_pool *pool) {
    worker_client *c = atomic_load(&pool->client);
    if (!c) return;
    pthread_mutex_destroy(&c->lock);
    free(c->result);
    free(c);
}
