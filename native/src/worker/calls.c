/* Calls by the worker: select, choose and attend, in as many requests as have room, and results. */
#include <math.h>

#include "base/clock.h"
#include "ndp/attend_cut.h"
#include "ndp/door.h"
#include "ndp/select.h"
#include "sequence/batch.h"
#include "sequence/usage.h"
#include "worker/client.h"
#include "worker/request.h"

/* What takes as long as a chooser's state of one run of pages may: two seconds, by so many channels
 * of a token's keys and values, such as 8 kv heads of 128 each. */
#define STATE_BYTES 1e9
#define STATE_CHANNELS 2048

/* A call, and what selects and attends have in common. */
typedef struct calling {
    worker_client *client;
    cxlkv_batch *batch;
    request_facts facts;
    uint32_t operation;          /* REQUEST_SELECT, REQUEST_CHOOSE or REQUEST_ATTEND */
    uint32_t layer, q_heads;
    const cxlkv_rows *queries;
    const int32_t *starts;
    /* Of a request beside queries and tails: whatever it asks for, by sequence and by row. */
    uint64_t fixed_bytes, sequence_bytes, row_bytes;
    int (*run)(struct calling *call);
    cxlkv_select_args *select;   /* one of the two; of a choose, too */
    cxlkv_attend_args *attend;
    uint64_t bytes_attended;
    uint32_t first;              /* of a choose: the first sequence */
    bool may_wait;               /* the caller asks again when it is told to */
    cxlkv_choice **choice;
    uint64_t deadline_ns;
} calling;

/* Some sequences of a batch: those of one request. */
typedef struct group {
    uint32_t low, high;
} group;

/* ---- requests ---- */

static uint64_t rows_of(const calling *call, group g) {
    return (uint64_t)(call->starts[g.high] - call->starts[g.low]);
}

static bool sends_values(const calling *call) {
    return call->operation == REQUEST_ATTEND && call->facts.value_dim;
}

static bool sends_keys(const calling *call) { return call->operation != REQUEST_CHOOSE; }

/* As the worker is told of it: its length, and what of its tail the worker has. */
static request_sequence sequence_item(const calling *call, uint32_t index) {
    const cxlkv_sequence *sequence = call->batch->sequences[index];
    uint32_t part = call->batch->pool->layers.part_of[call->layer];
    const worker_table *known = &sequence->worker_tables[part];
    const worker_tail *had = &sequence->worker_tails[call->layer];
    uint64_t tokens = sequence->layer_tokens[call->layer];
    uint64_t first = tokens - tokens % call->facts.layout->page_tokens;
    request_sequence item = {.table = known->table, .version = known->version, .tokens = tokens,
                             .rows = (uint32_t)rows_of(call, (group){index, index + 1})};
    if (sends_keys(call) && had->keys > first) item.keys_known = (uint32_t)(had->keys - first);
    if (sends_values(call) && had->values > first)
        item.values_known = (uint32_t)(had->values - first);
    return item;
}

/* What the call asks for, beside queries and tails. */
static uint64_t asked_bytes(const calling *call, group g) {
    return (g.high - g.low) * call->sequence_bytes + rows_of(call, g) * call->row_bytes;
}

static uint64_t group_bytes(const calling *call, group g) {
    uint64_t count = g.high - g.low, rows = rows_of(call, g);
    uint64_t bytes = sizeof(request_head) + call->fixed_bytes;
    bytes += count * sizeof(request_sequence);
    bytes += align_up(asked_bytes(call, g), 8);
    bytes += align_up(request_query_bytes(&call->facts, rows, call->q_heads, call->queries->dtype),
                      8);
    for (uint32_t i = g.low; i < g.high; i++) {
        request_sequence item = sequence_item(call, i);
        if (sends_keys(call)) bytes += request_key_bytes(&call->facts, &item);
        if (sends_values(call)) bytes += request_value_bytes(&call->facts, &item);
    }
    return bytes;
}

/* The longest group from `low` on that has room in a slot, or one sequence whose request goes in
 * parts. */
static int group_from(const calling *call, uint32_t low, group *g) {
    uint64_t room = call->client->file.header.request_bytes;
    *g = (group){low, low};
    uint32_t step = call->batch->count - low;
    /* All, or as many as halving finds: sequences are of about one size. */
    for (; step; step = step == 1 ? 0 : (step + 1) / 2) {
        while (g->high + step <= call->batch->count &&
               group_bytes(call, (group){low, g->high + step}) <= room)
            g->high += step;
        if (g->high == call->batch->count) break;
    }
    if (g->high == low) g->high++;
    uint64_t bytes = group_bytes(call, *g);
    if (bytes <= REQUEST_BYTES_MAX) return client_reserve(call->client, bytes);
    return fail(CXLKV_E_ARGUMENT, "sequence %u's request has %lu bytes, the worker takes %d: ask "
                "with fewer rows at once", low, bytes, REQUEST_BYTES_MAX);
}

static uint8_t *fill_to_8(const calling *call, uint8_t *at) {
    while ((at - call->client->request) % 8) *at++ = 0;
    return at;
}

static uint8_t *put(uint8_t *to, const void *from, uint64_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

static uint8_t *put_sequences(const calling *call, group g, uint8_t *to) {
    for (uint32_t i = g.low; i < g.high; i++) {
        request_sequence item = sequence_item(call, i);
        to = put(to, &item, sizeof(item));
    }
    return to;
}

static uint8_t *put_queries(const calling *call, group g, uint8_t *to) {
    const cxlkv_rows *queries = call->queries;
    uint32_t dim = call->facts.layout->head_dim;
    size_t element = dtype_bytes(queries->dtype);
    for (int64_t row = call->starts[g.low]; row < call->starts[g.high]; row++)
        for (uint32_t head = 0; head < call->q_heads; head++) {
            const uint8_t *from = (const uint8_t *)queries->data + row * queries->stride_bytes[0] +
                                  (int64_t)head * queries->stride_bytes[1];
            if (queries->stride_bytes[2] == (int64_t)element) {
                to = put(to, from, dim * element);
                continue;
            }
            for (uint32_t d = 0; d < dim; d++)
                to = put(to, from + (int64_t)d * queries->stride_bytes[2], element);
        }
    return fill_to_8(call, to);
}

/* K or V of the tails' tokens that the worker does not have. */
static uint8_t *put_tails(const calling *call, group g, uint32_t kind, uint8_t *to) {
    const cxlkv_layout *layout = call->facts.layout;
    uint64_t dim = kind == PIECE_KEYS ? layout->head_dim : call->facts.value_dim;
    uint64_t bytes = layout->kv_heads * dim * dtype_bytes(layout->dtype);
    for (uint32_t i = g.low; i < g.high; i++) {
        request_sequence item = sequence_item(call, i);
        uint64_t filled = item.tokens % call->facts.layout->page_tokens;
        tail *from = call->batch->sequences[i]->tails[call->layer];
        uint64_t t = kind == PIECE_KEYS ? item.keys_known : item.values_known;
        uint64_t whole = worker_tail_bytes(layout, kind);
        if (whole && filled) to = put(to, tail_at(layout, from, kind, 0), whole);
        if (whole) continue;
        for (; t < filled; t++)
            to = put(to, tail_at(layout, from, kind, 0) + t * tail_row_bytes(layout, kind), bytes);
        to = fill_to_8(call, to);
    }
    return to;
}

/* Queries and tails, behind all else; returns the length of the whole. */
static uint64_t put_rows(const calling *call, group g, uint8_t *to) {
    to = put_queries(call, g, to);
    if (sends_keys(call)) to = put_tails(call, g, PIECE_KEYS, to);
    if (sends_values(call)) to = put_tails(call, g, PIECE_VALUES, to);
    return (uint64_t)(to - call->client->request);
}

/* After the worker's answer: it has these tails. */
static void tails_told(const calling *call, group g) {
    for (uint32_t i = g.low; i < g.high; i++) {
        cxlkv_sequence *sequence = call->batch->sequences[i];
        uint64_t tokens = sequence->layer_tokens[call->layer];
        uint64_t known = tokens % call->facts.layout->page_tokens ? tokens : 0;
        sequence->worker_tails[call->layer].keys = known;
        if (sends_values(call)) sequence->worker_tails[call->layer].values = known;
    }
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
static int take_result(const calling *call, answer_head head, uint64_t length,
                       uint64_t expected) {
    worker_client *c = call->client;
    if (head.bytes != expected || head.bytes > REQUEST_RESULT_MAX)
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker's result has %lu bytes, wanted "
                                   "%lu", head.bytes, expected), RETRY_NS);
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
        code = client_ask(c, REQUEST_MORE, 0, sizeof(request_head) + sizeof(more),
                          call->deadline_ns, &next, &length);
        if (code < 0) return code;
    }
}

/* ---- select ---- */

/* Where the lists of a select go. */
typedef struct collecting {
    uint64_t row;                /* the next of [lists, kv_heads] */
    uint32_t k_max, k;           /* room for each; the longest so far */
    double error;                /* mean errors, times lists */
} collecting;

static uint64_t put_select(const calling *call, group g, const collecting *to) {
    const cxlkv_select_args *args = call->select;
    uint32_t count = g.high - g.low;
    request_select select = {.layer = args->layer, .q_heads = args->q_heads,
                             .dtype = args->queries.dtype, .method = args->by.method,
                             .union_over = args->by.union_over, .per = args->by.per,
                             .scale = args->scale, .errors = args->by.errors,
                             .rows = (uint32_t)rows_of(call, g),
                             .budget_count = args->by.budget_count == 1 ? 1 : count,
                             .k_max = to->k_max, .scorer = args->by.scorer};
    const cxlkv_budget *budgets = args->by.budgets + (args->by.budget_count == 1 ? 0 : g.low);
    uint8_t *at = call->client->request + sizeof(request_head);
    at = put(at, &select, sizeof(select));
    at = put_sequences(call, g, at);
    at = put(at, budgets, select.budget_count * sizeof(*budgets));
    return put_rows(call, g, at);
}

/* Rows of a result to args, k_max apart; their lengths and pages may be what they say. */
static int place_lists(worker_client *c, const cxlkv_select_args *args, uint64_t rows, uint32_t k,
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

static uint64_t lists_of(const calling *call, uint32_t per, group g) {
    return per == CXLKV_PER_QUERY ? rows_of(call, g) : g.high - g.low;
}

/* Pages of the longest sequence, with its tail. */
static uint64_t pages_of(const calling *call, group g) {
    uint64_t longest = 0;
    for (uint32_t i = g.low; i < g.high; i++) {
        uint64_t tokens = call->batch->sequences[i]->layer_tokens[call->layer];
        if (tokens > longest) longest = tokens;
    }
    return (longest + call->facts.layout->page_tokens - 1) / call->facts.layout->page_tokens;
}

static int select_group(const calling *call, group g, collecting *to) {
    worker_client *c = call->client;
    cxlkv_select_args *args = call->select;
    answer_head head = {0};
    answer_select found;
    uint64_t length = 0, rows = lists_of(call, args->by.per, g) * call->facts.layout->kv_heads;
    uint64_t bytes = put_select(call, g, to);
    int code = client_ask(c, REQUEST_SELECT, g.high - g.low, bytes, call->deadline_ns, &head,
                          &length);
    if (code == -CXLKV_E_ROOM) args->k = head.k;
    if (code < 0) return code;
    if (head.k > to->k_max)
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker's lists have %u pages, there is "
                                   "room for %u", head.k, to->k_max), RETRY_NS);
    code = take_result(call, head, length, sizeof(found) + rows * 4 * (2ull * head.k + 1));
    if (code == 0) code = place_lists(c, args, rows, head.k, pages_of(call, g), to);
    if (code < 0) return code;
    memcpy(&found, c->result, sizeof(found));
    args->found.bytes_scored += found.bytes_scored;
    args->found.bytes_sketched += found.bytes_sketched;
    args->found.tokens_scored += found.tokens_scored;
    args->found.bytes_fetched += found.bytes_fetched;
    args->found.method = found.method;
    args->found.lists_staged += found.lists_staged;
    to->error += (double)found.mean_error * found.lists_staged;
    to->row += rows;
    if (head.k > to->k) to->k = head.k;
    tails_told(call, g);
    return 0;
}

static int select_all(calling *call) {
    cxlkv_select_args *args = call->select;
    uint64_t rows = lists_of(call, args->by.per, (group){0, call->batch->count}) *
                    call->facts.layout->kv_heads;
    collecting to = {.k_max = (uint32_t)min_u64(INT32_MAX, args->capacity / rows)};
    int code = 0;
    args->found = (cxlkv_scored){.lists = (uint32_t)(rows / call->facts.layout->kv_heads)};
    for (group g = {0, 0}; code == 0 && g.high < call->batch->count;) {
        code = group_from(call, g.high, &g);
        if (code == 0) code = select_group(call, g, &to);
    }
    if (code < 0) return code;
    args->k = to.k;
    if (args->found.lists_staged)
        args->found.mean_error = (float)(to.error / args->found.lists_staged);
    close_gaps(args, &to);
    return 0;
}

/* ---- choose ---- */

/* The result has the bytes that it says, and names pages that there are. */
static bool choice_is_whole(const calling *call, group g, const answer_choose *found, uint32_t k,
                            uint64_t bytes) {
    const request_facts *facts = &call->facts;
    uint64_t end = pages_of(call, g);
    /* In double, which is exact where it is equal. */
    double heads = (double)found->lists * facts->layout->kv_heads;
    double page = 1 + (double)found->weight_tokens;
    double row = 1 + (double)facts->layout->head_dim + (double)facts->layout->value_head_dim;
    double wanted = sizeof(*found) + 4 * heads * (k * page + found->virtual_rows * row);
    if (found->lists != lists_of(call, call->select->by.per, g) || k > end ||
        (found->weight_tokens && found->weight_tokens != facts->layout->page_tokens) ||
        wanted != (double)bytes)
        return false;
    const int32_t *pages = (const int32_t *)(const void *)(call->client->result + sizeof(*found));
    bool right = true;
    for (uint64_t i = 0; i < (uint64_t)found->lists * facts->layout->kv_heads * k; i++)
        right &= pages[i] >= -1 && pages[i] < (int64_t)end;
    return right;
}

/* The result's bytes with what points to them. */
static cxlkv_choice *choice_of(const calling *call, const answer_choose *found, uint32_t k,
                               uint64_t bytes) {
    const request_facts *facts = &call->facts;
    cxlkv_choice *made = malloc(sizeof(*made) + bytes);
    if (!made) return NULL;
    memcpy(made + 1, call->client->result + sizeof(*found), bytes - sizeof(*found));
    uint64_t lists = (uint64_t)found->lists * facts->layout->kv_heads;
    uint64_t rows = lists * found->virtual_rows;
    const int32_t *pages = (const int32_t *)(made + 1);
    const float *weights = (const float *)(pages + lists * k);
    const float *keys = weights + lists * k * found->weight_tokens;
    const float *values = keys + rows * facts->layout->head_dim;
    *made = (cxlkv_choice){
        .picked = {.pages = pages, .lists = found->lists, .k = k, .per = call->select->by.per,
                   .weight_tokens = found->weight_tokens, .log_weights = weights,
                   .row_count = found->virtual_rows, .row_keys = keys, .row_values = values,
                   .row_log_counts = values + rows * facts->layout->value_head_dim},
        .bytes_scored = found->bytes_scored, .bytes_fetched = found->bytes_fetched};
    return made;
}

/* The worker forgets what it had of the keys of another page's tail. */
static void tails_left(const calling *call, group g) {
    uint64_t page_tokens = call->facts.layout->page_tokens;
    for (uint32_t i = g.low; i < g.high; i++) {
        cxlkv_sequence *sequence = call->batch->sequences[i];
        worker_tail *had = &sequence->worker_tails[call->layer];
        if (had->keys / page_tokens != sequence->layer_tokens[call->layer] / page_tokens)
            had->keys = 0;
    }
}

static int choose_some(calling *call) {
    worker_client *c = call->client;
    answer_head head = {0};
    answer_choose found;
    uint64_t length = 0;
    group g;
    if (!call->select->by.scorer)
        return fail(CXLKV_E_WORKER, "this process added the chooser itself: no worker has it");
    int code = group_from(call, call->first, &g);
    if (code < 0) return code;
    tails_left(call, g);
    uint64_t bytes = put_select(call, g, &(collecting){0});
    code = client_ask(c, REQUEST_CHOOSE, g.high - g.low, bytes, call->deadline_ns, &head, &length);
    if (code == 0)
        code = take_result(call, head, length, head.bytes < sizeof(found) ? 0 : head.bytes);
    if (code < 0) return code;
    memcpy(&found, c->result, sizeof(found));
    if (!choice_is_whole(call, g, &found, head.k, head.bytes))
        return client_lost(c, fail(CXLKV_E_WORKER, "the worker's choice of %lu bytes is none of "
                                   "this pool", head.bytes), RETRY_NS);
    *call->choice = choice_of(call, &found, head.k, head.bytes);
    if (!*call->choice) return fail(ENOMEM, "no memory for a choice of %lu bytes", head.bytes);
    (*call->choice)->end = g.high;
    return 0;
}

/* ---- attend ---- */

/* Pages that the shares of a row are of. */
static uint64_t mass_pages(const calling *call, group g) {
    const cxlkv_picked *picked = &call->attend->picked;
    return picked->pages ? picked->k : pages_of(call, g);
}

/* What a group's lists have lies side by side: they follow each other. each: numbers, of 4 bytes,
 * of a list and kv head. */
static uint8_t *put_lists(const calling *call, group g, const void *from, uint64_t each,
                          uint8_t *to) {
    uint32_t per = call->attend->picked.per;
    uint64_t list_bytes = call->facts.layout->kv_heads * each * 4;
    uint64_t first = lists_of(call, per, (group){0, g.low});
    if (!from) return to;
    to = put(to, (const uint8_t *)from + first * list_bytes, lists_of(call, per, g) * list_bytes);
    return fill_to_8(call, to);
}

static uint8_t *put_picked(const calling *call, group g, uint8_t *to) {
    const cxlkv_picked *picked = &call->attend->picked;
    const request_facts *facts = &call->facts;
    uint64_t k = picked->k, n = picked->row_count;
    to = put_lists(call, g, picked->pages, k, to);
    to = put_lists(call, g, picked->log_weights, k * picked->weight_tokens, to);
    if (!n) return to;
    to = put_lists(call, g, picked->row_keys, n * facts->layout->head_dim, to);
    to = put_lists(call, g, picked->row_values, n * facts->layout->value_head_dim, to);
    return put_lists(call, g, picked->row_log_counts, n, to);
}

/* Of a list with all its kv heads. */
static uint64_t picked_bytes(const cxlkv_layout *layout, const cxlkv_picked *picked) {
    if (!picked->pages) return 0;
    uint64_t weights = picked->log_weights ? picked->weight_tokens : 0;
    uint64_t row = 1ull + layout->head_dim + layout->value_head_dim;
    return 4ull * layout->kv_heads * (picked->k * (1 + weights) + picked->row_count * row);
}

static uint64_t put_attend(const calling *call, group g, uint32_t parts) {
    const cxlkv_attend_args *args = call->attend;
    const cxlkv_picked *picked = &args->picked;
    request_attend attend = {.layer = args->layer, .q_heads = args->q_heads,
                             .dtype = args->queries.dtype, .scale = args->scale,
                             .softcap = args->softcap, .error = args->error,
                             .rows = (uint32_t)rows_of(call, g), .parts = parts,
                             .mass = args->mass != NULL};
    if (picked->pages) {
        attend.per = picked->per;
        attend.lists = (uint32_t)lists_of(call, picked->per, g);
        attend.k = picked->k;
        attend.weight_tokens = picked->log_weights ? picked->weight_tokens : 0;
        attend.virtual_rows = picked->row_count;
    }
    uint8_t *at = call->client->request + sizeof(request_head);
    at = put(at, &attend, sizeof(attend));
    at = put_sequences(call, g, at);
    at = put_picked(call, g, at);
    return put_rows(call, g, at);
}

/* From k apart, as they come, to mass_k apart. */
static void take_mass(const calling *call, group g, const uint8_t *from, uint64_t k) {
    const cxlkv_attend_args *args = call->attend;
    uint64_t heads = call->facts.layout->kv_heads, first = (uint64_t)call->starts[g.low] * heads;
    for (uint64_t i = 0; i < rows_of(call, g) * heads; i++, from += k * sizeof(float)) {
        float *to = args->mass + (first + i) * args->mass_k;
        memcpy(to, from, k * sizeof(float));
        memset(to + k, 0, (args->mass_k - k) * sizeof(float));
    }
}

static int attend_group(calling *call, group g, uint32_t parts) {
    worker_client *c = call->client;
    const cxlkv_attend_args *args = call->attend;
    answer_head head = {0};
    answer_attend found;
    uint64_t value_dim = call->facts.layout->value_head_dim, length = 0;
    uint64_t row_bytes = value_dim * dtype_bytes(args->queries.dtype);
    uint64_t first = (uint64_t)call->starts[g.low] * args->q_heads;
    uint64_t rows = rows_of(call, g) * args->q_heads;
    uint64_t k = args->mass ? mass_pages(call, g) : 0;
    uint64_t mass_bytes = rows_of(call, g) * call->facts.layout->kv_heads * k * sizeof(float);
    uint64_t bytes = put_attend(call, g, parts);
    int code = client_ask(c, REQUEST_ATTEND, g.high - g.low, bytes, call->deadline_ns, &head,
                          &length);
    if (code == 0)
        code = take_result(call, head, length,
                           sizeof(found) + rows * (sizeof(float) + row_bytes) + mass_bytes);
    if (code < 0) return code;
    const uint8_t *at = c->result + sizeof(found);
    memcpy(&found, c->result, sizeof(found));
    memcpy(args->lse + first, at, rows * sizeof(float));
    memcpy((uint8_t *)args->out + first * row_bytes, at + rows * sizeof(float), rows * row_bytes);
    if (args->mass) take_mass(call, g, at + rows * (sizeof(float) + row_bytes), k);
    call->bytes_attended += found.bytes_attended;
    tails_told(call, g);
    return 0;
}

static int attend_all(calling *call) {
    /* Of the whole batch: so that the sums of a part of it are cut where they would be here. */
    uint32_t parts = attend_parts(call->batch, call->attend);
    int code = 0;
    call->bytes_attended = 0;
    for (group g = {0, 0}; code == 0 && g.high < call->batch->count;) {
        code = group_from(call, g.high, &g);
        if (code == 0 && rows_of(call, g)) code = attend_group(call, g, parts);
    }
    return code;
}

/* ---- both ---- */

/* Each sequence has a place for what the worker was told of it. */
static int tables_reserve(cxlkv_batch *batch) {
    uint32_t parts = batch->pool->geometry.part_count;
    for (uint32_t i = 0; i < batch->count; i++) {
        cxlkv_sequence *sequence = batch->sequences[i];
        if (!sequence->worker_tables)
            sequence->worker_tables = calloc(parts, sizeof(*sequence->worker_tables));
        if (!sequence->worker_tails)
            sequence->worker_tails =
                calloc(batch->pool->layout.layers, sizeof(*sequence->worker_tails));
        if (!sequence->worker_tables || !sequence->worker_tails)
            return fail(ENOMEM, "no memory for a worker's tables");
    }
    return batch->count <= REQUEST_TABLES_MAX ? 0
           : fail(CXLKV_E_ARGUMENT, "%u sequences at once: the worker takes %d", batch->count,
                  REQUEST_TABLES_MAX);
}

/* Keys, and values, that are read at most, times what more than 8 queries a head take. */
static double work_bytes(const calling *call) {
    const cxlkv_layout *layout = call->facts.layout;
    bool chooses = call->operation == REQUEST_CHOOSE;
    double dim = layout->head_dim + (call->attend || chooses ? layout->value_head_dim : 0);
    double channels = layout->kv_heads * dim, token = channels * 4;
    double bytes = chooses ? STATE_BYTES * fmax(1, channels / STATE_CHANNELS) : 0;
    for (uint32_t i = 0; i < call->batch->count; i++) {
        double queries = (double)rows_of(call, (group){i, i + 1}) * call->q_heads /
                         layout->kv_heads;
        bytes += (double)call->batch->sequences[i]->layer_tokens[call->layer] * token *
                 fmax(1, queries / 8);
        if (call->attend) bytes += (double)asked_bytes(call, (group){i, i + 1});
    }
    return bytes;
}

static int told_and_run(calling *call) {
    worker_client *c = call->client;
    int code = 0;
    if (atomic_load(&c->untold) || c->next_table + call->batch->count > REQUEST_TABLES_MAX)
        code = client_forget(c, call->deadline_ns);
    if (code == 0) code = client_tell(c, call->batch, call->layer, call->deadline_ns);
    return code == 0 ? call->run(call) : code;
}

/* Not this process's work yet. */
static bool again_by_caller(const calling *call, int64_t code) {
    return (code == -CXLKV_E_ROOM && call->operation == REQUEST_SELECT) ||
           (code == -CXLKV_E_BUSY && call->may_wait);
}

/* Under the locks of the batch. */
static int call_locked(calling *call) {
    worker_client *c = call->client;
    call->deadline_ns = client_deadline(c, work_bytes(call));
    int code = client_lock(c, call->deadline_ns);
    if (code < 0) return code;
    code = tables_reserve(call->batch);
    /* A second time when tables are not what was told, or a worker has taken the other's place. */
    for (int attempt = 0; code == 0 && attempt < 2; attempt++) {
        bool was_connected = c->connected;
        code = was_connected ? 0 : client_connect(call->batch->pool, c);
        if (code == 0) code = told_and_run(call);
        bool again = code == -CXLKV_E_STALE ||
                     (code == -CXLKV_E_WORKER && was_connected && c->retry_ns <= boottime_ns());
        if (!again || attempt) break;
        if (c->connected) c->epoch++, c->next_table = 0;
        code = 0;
    }
    bool goes_on = code == 0 && call->choice && (*call->choice)->end < call->batch->count;
    if (code == 0) { /* a choose of several requests is one select */
        *(call->select ? &c->state.selects : &c->state.attends) += !goes_on;
    } else if (!again_by_caller(call, code)) {
        if (!strstr(cxlkv_error_text(), "is left alone for"))
            snprintf(c->state.why, sizeof(c->state.why), "%s", cxlkv_error_text());
        *(call->select ? &c->state.selects_here : &c->state.attends_here) +=
            atomic_load(&c->use) == CXLKV_WORKER_IF_THERE;
    }
    pthread_mutex_unlock(&c->lock);
    return code;
}

/* Sets what an attend says of the mass: its k. */
static bool mass_fits(const calling *call) {
    group all = {0, call->batch->count};
    if (!call->attend) return true;
    call->attend->mass_k = (uint32_t)mass_pages(call, all);
    uint64_t wanted = rows_of(call, all) * call->facts.layout->kv_heads * call->attend->mass_k;
    return !call->attend->mass || call->attend->mass_capacity >= wanted;
}

/* 0, an error that is the caller's, or NOT_BY_WORKER. */
static int64_t by_worker(calling *call) {
    cxlkv_batch *batch = call->batch;
    worker_client *c = call->client = atomic_load(&batch->pool->owner[OWNER_WORKER]);
    uint32_t rows, use = c ? atomic_load(&c->use) : CXLKV_WORKER_NONE;
    if (use == CXLKV_WORKER_NONE || layer_check(batch->pool, call->layer) < 0 ||
        batch_lock(batch, false) < 0)
        return NOT_BY_WORKER;
    int64_t code = NOT_BY_WORKER;
    call->facts = worker_facts(batch->pool, layout_of(batch->pool, call->layer));
    /* What is wrong in the arguments is said by this process. */
    if (queries_check(batch, call->layer, call->q_heads, call->queries, call->starts, &rows) == 0 &&
        rows > 0 && mass_fits(call))
        code = call_locked(call);
    const cxlkv_attend_args *attend = call->attend;
    if (code == 0 && attend && attend->mass) {
        hotness_weigh(batch, call->layer, &attend->picked, call->starts, attend->mass,
                      attend->mass_k);
    } else if (code == 0 && call->operation != REQUEST_CHOOSE) {
        cxlkv_picked picked = call->select ? select_chosen(call->select) : attend->picked;
        hotness_count(batch, call->layer, &picked, call->starts);
    }
    batch_unlock(batch);
    if (code >= 0 || again_by_caller(call, code)) return code;
    return use == CXLKV_WORKER_ONLY ? code : NOT_BY_WORKER;
}

static calling select_call(cxlkv_batch *batch, cxlkv_select_args *args, uint32_t operation) {
    bool one = args->by.budget_count == 1;
    return (calling){.batch = batch, .operation = operation, .layer = args->layer,
                     .q_heads = args->q_heads, .queries = &args->queries, .starts = args->starts,
                     .fixed_bytes = sizeof(request_select) + (one ? sizeof(cxlkv_budget) : 0),
                     .sequence_bytes = one ? 0 : sizeof(cxlkv_budget), .select = args};
}

static int64_t worker_select(cxlkv_batch *batch, cxlkv_select_args *args) {
    calling call = select_call(batch, args, REQUEST_SELECT);
    call.run = select_all;
    int64_t code = by_worker(&call);
    return code == 0 ? args->k : code;
}

int cxlkv_batch_choose(cxlkv_batch *batch, const cxlkv_select_args *args, uint32_t first,
                       uint32_t may_wait, cxlkv_choice **choice) {
    cxlkv_select_args asked = *args;
    asked.by.method = CXLKV_METHOD_SCORER;
    int code = need(args->by.budget_count, "budgets", args->by.budgets, NULL);
    if (code == 0) code = layer_check(batch->pool, args->layer);
    if (code == 0)
        code = select_bounds(layout_of(batch->pool, args->layer), &asked,
                             rows_asked(batch, args->starts), batch->count);
    if (code < 0) return code;
    if (first >= batch->count)
        return fail(CXLKV_E_ARGUMENT, "choose: from sequence %u of %u on", first, batch->count);
    calling call = select_call(batch, &asked, REQUEST_CHOOSE);
    call.run = choose_some;
    call.first = first;
    call.may_wait = may_wait != 0;
    call.choice = choice;
    code = (int)by_worker(&call);
    return code == NOT_BY_WORKER ? 0 : code < 0 ? code : 1;
}

void cxlkv_choice_destroy(cxlkv_choice **at) { free(*at); }

static int64_t worker_attend(cxlkv_batch *batch, cxlkv_attend_args *args) {
    const cxlkv_picked *picked = &args->picked;
    if (layer_check(batch->pool, args->layer) < 0) return NOT_BY_WORKER;
    uint64_t list = picked_bytes(layout_of(batch->pool, args->layer), picked);
    bool more = picked->log_weights || picked->row_count; /* four arrays, each up to 8 bytes */
    bool per_query = picked->per == CXLKV_PER_QUERY;
    calling call = {.batch = batch, .operation = REQUEST_ATTEND, .layer = args->layer,
                    .q_heads = args->q_heads, .queries = &args->queries, .starts = args->starts,
                    .fixed_bytes = sizeof(request_attend) + (more ? 4 * 8 : 0),
                    .run = attend_all, .attend = args,
                    .sequence_bytes = per_query ? 0 : list, .row_bytes = per_query ? list : 0};
    int64_t code = by_worker(&call);
    return code == 0 ? (int64_t)call.bytes_attended : code;
}

int cxlkv_pool_use_worker(cxlkv_pool *pool, uint32_t use, double deadline_s) {
    static const door_worker calls = {.select = worker_select, .attend = worker_attend};
    door_answers(&calls);
    return client_use(pool, use, deadline_s);
}
