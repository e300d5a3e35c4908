/* The worker: holds the pages of its clients' tables, and selects and attends for them, slot after
 * slot.
 *
 * Nothing of a client is believed: a request is checked on a copy (request.c), and pages are held
 * under the rules of adopt() before a byte of them is read. The work itself is done by the same
 * functions as anywhere, on sequences that are made of the tables. What a dead client's tables hold
 * is dropped when its lock on the slot is gone. */
#include "base/clock.h"
#include "base/flush.h"
#include "coherence/rpc.h"
#include "host/locks.h"
#include "ndp/attend.h"
#include "pool/pool.h"
#include "prefix/handle.h"
#include "sequence/sequence.h"
#include "worker/client.h"
#include "worker/file.h"
#include "worker/request.h"
#include "worker/server.h"

#include <sched.h>

/* Without requests: spins, then lets others run, then sleeps until a client rings. */
enum { SPIN_NS = 300000, YIELD_NS = 2000000, LOOK_NS = 100000000, SLEEP_NS = LOOK_NS };
enum { RESULT_BYTES_KEPT = 16 << 20 /* of an array, for later */, PARTS_BYTES_KEPT = 4 << 20 };
/* A sequence with a window has a list of its chunks from its first page on, 12 bytes for 256 pages,
 * though it holds few of them: what one client's tables may come to. */
enum { SPAN_PAGES_MAX = 1 << 28 };

/* ---- tables ---- */

static void table_clear(table *t) {
    cxlkv_sequence_destroy(&t->sequence);
    *t = (table){0};
}

static void session_clear(session *s) {
    for (uint32_t i = 0; i < s->table_capacity; i++) table_clear(&s->tables[i]);
    free(s->tables);
    free(s->parts.data);
    *s = (session){.worker = s->worker};
}

static table *table_of(session *s, uint32_t number) {
    if (number >= s->table_capacity) {
        uint32_t capacity = min_u32(REQUEST_TABLES_MAX, number + number / 2 + 16);
        table *grown = realloc(s->tables, capacity * sizeof(*grown));
        if (!grown) return NULL;
        memset(grown + s->table_capacity, 0, (capacity - s->table_capacity) * sizeof(*grown));
        s->tables = grown;
        s->table_capacity = capacity;
    }
    return &s->tables[number];
}

/* The new one holds its pages before the old one drops them: what both have stays verified. */
static int table_renew(cxlkv_pool *pool, table *t, const request_table *item,
                       const uint8_t *entries) {
    cxlkv_sequence *made;
    int code = sequence_make(pool, &made);
    if (code < 0) return code;
    made->of_client = true;
    uint64_t number = t->sequence && t->part == item->part ? t->number : 0;
    made->page_count = made->tables[item->part].first = item->first;
    code = sequence_hold(made, item->part, entries, item->added);
    if (code < 0) {
        cxlkv_sequence_destroy(&made);
        return code;
    }
    if (t->sequence && t->part == item->part) { /* what is known of its tails stays */
        cxlkv_sequence *old = t->sequence, both = *old;
        old->tails = made->tails;
        old->layer_tokens = made->layer_tokens;
        old->worker_tails = made->worker_tails;
        made->tails = both.tails;
        made->layer_tokens = both.layer_tokens;
        made->worker_tails = both.worker_tails;
    }
    table_clear(t);
    *t = (table){.sequence = made, .number = number, .part = item->part};
    return 0;
}

static int table_apply(session *s, table *t, const request_table *item, const uint8_t *entries) {
    if (item->to == 0) {
        table_clear(t);
        return 0;
    }
    if (item->first && !s->worker->pool->layers.parts[item->part].window)
        return fail(CXLKV_E_ARGUMENT, "worker: table %u begins with page %u, and part %u has no "
                    "window", item->table, item->first, item->part);
    int code = 0;
    if (item->from == 0) {
        code = table_renew(s->worker->pool, t, item, entries);
    } else {
        if (!t->sequence || t->version != item->from || t->part != item->part ||
            t->sequence->tables[t->part].first != item->first ||
            t->sequence->page_count < item->kept)
            return fail(CXLKV_E_STALE, "worker: table %u is not at version %lu, or shorter than "
                        "%u pages", item->table, item->from, item->kept);
        code = sequence_cut(t->sequence, item->kept);
        if (code == 0) code = sequence_hold(t->sequence, item->part, entries, item->added);
    }
    if (code < 0) table_clear(t);
    else t->version = item->to;
    if (code == 0 && !t->number) t->number = ++s->worker->tables_made;
    return code;
}

static uint64_t span_of(const table *t) { return t->sequence ? t->sequence->page_count : 0; }

static int table_change(session *s, const request_table *item, const uint8_t *entries) {
    table *t = table_of(s, item->table);
    if (!t) return fail(ENOMEM, "worker: no memory for table %u", item->table);
    if (item->to && t->version == item->to) return 0; /* asked again: it was done */
    uint64_t others = s->span_pages - span_of(t), end = (uint64_t)item->kept + item->added;
    if (item->to && others + end > SPAN_PAGES_MAX)
        return fail(CXLKV_E_ARGUMENT, "worker: table %u of %lu pages beside others of %lu: at most "
                    "%u for one client. Release sequences, or select without the worker",
                    item->table, end, others, SPAN_PAGES_MAX);
    int code = table_apply(s, t, item, entries);
    s->span_pages = others + span_of(t);
    return code;
}

static int do_tables(session *s, const request *r) {
    const uint8_t *entries = r->entries;
    for (uint32_t i = 0; i < r->head.count; i++) {
        int code = table_change(s, &r->tables[i], entries);
        if (code < 0) return code;
        entries += (uint64_t)r->tables[i].added * REQUEST_ENTRY_BYTES;
    }
    return 0;
}

/* ---- the sequences of a request ---- */

static int batch_reserve(cxlkv_worker *w, uint32_t count) {
    if (count <= w->batch_capacity) return 0;
    uint32_t capacity = count + count / 2;
    cxlkv_sequence **lists = malloc(2 * (uint64_t)capacity * sizeof(*lists));
    int32_t *starts = malloc((capacity + 1ull) * sizeof(*starts));
    uint64_t *numbers = malloc(2 * (uint64_t)capacity * sizeof(*numbers));
    if (!lists || !starts || !numbers) {
        free(lists);
        free(starts);
        free(numbers);
        return fail(ENOMEM, "worker: no memory for %u sequences", count);
    }
    free(w->batch.sequences);
    free(w->starts);
    free(w->numbers);
    w->batch.sequences = lists;
    w->batch.lock_order = lists + capacity;
    w->starts = starts;
    w->numbers = numbers;
    w->batch_capacity = capacity;
    return 0;
}

/* Is the tail there up to `had`, of this page, and as much of it as the client believes? */
static int tail_check(const cxlkv_worker *w, const request_sequence *item, uint64_t had,
                      uint32_t known) {
    uint64_t page_tokens = w->pool->layout.page_tokens;
    uint64_t first = item->tokens - item->tokens % page_tokens;
    if (known == 0 || (had / page_tokens == first / page_tokens && had >= first + known)) return 0;
    return fail(CXLKV_E_STALE, "worker: table %u has %lu tokens of a layer, not %lu", item->table,
                had, first + known);
}

static void tail_fill(const request_facts *facts, tail *to, uint32_t kind, uint32_t known,
                      uint64_t filled, const uint8_t *rows) {
    const cxlkv_layout *layout = facts->layout;
    uint64_t dim = kind == PIECE_KEYS ? layout->head_dim : facts->value_dim;
    uint64_t bytes = layout->kv_heads * dim * dtype_bytes(layout->dtype);
    uint64_t whole = worker_tail_bytes(layout, kind);
    if (whole && filled) memcpy(tail_at(layout, to, kind, 0), rows, whole);
    if (whole) return;
    for (uint64_t t = known; t < filled; t++, rows += bytes)
        memcpy(tail_at(layout, to, kind, 0) + t * tail_row_bytes(layout, kind), rows, bytes);
}

/* The open tail of a layer, as long as the request says: what is known of it, and what comes along.
 * Values are NULL in a select, which looks at none. */
static int place_tail(const cxlkv_worker *w, cxlkv_sequence *sequence, const request *r,
                      const request_sequence *item, const uint8_t *keys, const uint8_t *values) {
    const uint32_t layer = r->layer;
    uint64_t filled = item->tokens % w->pool->layout.page_tokens;
    if (values && !sequence->worker_tails) {
        sequence->worker_tails = calloc(w->pool->layout.layers, sizeof(*sequence->worker_tails));
        if (!sequence->worker_tails) return fail(ENOMEM, "worker: no memory for a tail");
    }
    uint64_t *had_values = values ? &sequence->worker_tails[layer].values : NULL;
    int code = tail_check(w, item, sequence->layer_tokens[layer], item->keys_known);
    if (code == 0 && values) code = tail_check(w, item, *had_values, item->values_known);
    if (code < 0) return code;
    tail **at = &sequence->tails[layer];
    if (!*at && filled && !(*at = tail_make(w->pool)))
        return fail(ENOMEM, "worker: no memory for a tail");
    tail_fill(r->facts, *at, PIECE_KEYS, item->keys_known, filled, keys);
    sequence->layer_tokens[layer] = item->tokens;
    if (values) {
        tail_fill(r->facts, *at, PIECE_VALUES, item->values_known, filled, values);
        *had_values = item->tokens;
    }
    return 0;
}

/* A chooser has states of complete pages, and needs no tail: what is known of the open one stays.
 * No more tokens are there than pages, which the table may have let go. */
static void place_pages(const cxlkv_worker *w, cxlkv_sequence *sequence, uint32_t layer,
                        uint64_t tokens) {
    uint64_t *had = &sequence->layer_tokens[layer], page_tokens = w->pool->layout.page_tokens;
    if (*had / page_tokens != tokens / page_tokens) *had = tokens - tokens % page_tokens;
}

/* Sequence `index` of the request, as long as it says, in the batch; keys and values move on. */
static int place_sequence(session *s, const request *r, uint32_t index, const uint8_t **keys,
                          const uint8_t **values) {
    cxlkv_worker *w = s->worker;
    request_sequence item = r->sequences[index];
    table *t = item.table < s->table_capacity ? &s->tables[item.table] : NULL;
    if (!t || !t->sequence || t->version != item.version)
        return fail(CXLKV_E_STALE, "worker: table %u is not at version %lu", item.table,
                    item.version);
    if (t->request == w->requests)
        return fail(CXLKV_E_ARGUMENT, "worker: table %u is there twice", item.table);
    if (t->part != w->pool->layers.part_of[r->layer] ||
        item.tokens / w->pool->layout.page_tokens > t->sequence->page_count)
        return fail(CXLKV_E_ARGUMENT, "worker: table %u has %u pages of part %u, %lu tokens of "
                    "layer %u are wanted", item.table, t->sequence->page_count, t->part,
                    item.tokens, r->layer);
    bool chooses = r->head.operation == REQUEST_CHOOSE;
    if (chooses) place_pages(w, t->sequence, r->layer, item.tokens);
    int code = chooses ? 0 : place_tail(w, t->sequence, r, &item, *keys, *values);
    if (code < 0) return code;
    if (!chooses) *keys += request_key_bytes(r->facts, &item);
    if (*values) *values += request_value_bytes(r->facts, &item);
    t->request = w->requests;
    w->numbers[index] = item.tokens;
    w->numbers[w->batch_capacity + index] = t->number;
    w->batch.sequences[index] = w->batch.lock_order[index] = t->sequence;
    w->starts[index + 1] = w->starts[index] + (int32_t)item.rows;
    w->batch.count = index + 1;
    return 0;
}

static int place_batch(session *s, const request *r) {
    cxlkv_worker *w = s->worker;
    const uint8_t *keys = r->keys;
    const uint8_t *values = r->head.operation == REQUEST_ATTEND ? r->values : NULL;
    int code = batch_reserve(w, r->head.count);
    if (code < 0) return code;
    w->batch.count = 0;
    w->starts[0] = 0;
    for (uint32_t i = 0; code == 0 && i < r->head.count; i++)
        code = place_sequence(s, r, i, &keys, &values);
    return code;
}

/* ---- select and attend ---- */

int server_reserve(buffer *of, uint64_t bytes) {
    of->bytes = bytes;
    if (bytes <= of->capacity) return 0;
    if (bytes > REQUEST_RESULT_MAX)
        return fail(CXLKV_E_ARGUMENT, "worker: a result of %lu MiB: ask for fewer rows at once",
                    bytes >> 20);
    free(of->data);
    of->data = malloc(bytes);
    of->capacity = of->data ? bytes : 0;
    return of->data ? 0 : fail(ENOMEM, "worker: no memory for a result");
}

/* A long result was for one call: what a part has beyond `kept` bytes goes at the next one. */
static void result_clear(result *of, uint64_t kept) {
    of->number = of->k = 0;
    for (buffer *part = of->parts; part < of->parts + RESULT_PARTS; part++) {
        part->bytes = 0;
        if (part->capacity <= kept) continue;
        free(part->data);
        *part = (buffer){0};
    }
}

/* The pages of all lists, and their scores: both together no more than a result may have. */
static int lists_reserve(result *of, uint64_t elements) {
    if (elements > REQUEST_RESULT_MAX / (sizeof(int32_t) + sizeof(float)))
        return fail(CXLKV_E_ARGUMENT, "worker: lists of %lu pages in all: ask for fewer rows at "
                    "once, or a smaller budget", elements);
    int code = server_reserve(&of->parts[SELECT_PAGES], elements * sizeof(int32_t));
    return code < 0 ? code : server_reserve(&of->parts[SELECT_SCORES], elements * sizeof(float));
}

static int64_t select_placed(cxlkv_worker *w, const request *r) {
    const request_select *s = &r->select;
    result *of = &w->result;
    buffer *pages = &of->parts[SELECT_PAGES], *scores = &of->parts[SELECT_SCORES];
    uint32_t lists = s->per == CXLKV_PER_QUERY ? s->rows : r->head.count;
    uint64_t rows = (uint64_t)lists * r->facts->layout->kv_heads;
    cxlkv_select_args args = r->selecting;
    args.starts = w->starts;
    int64_t code = server_reserve(&of->parts[SELECT_COUNTS], rows * sizeof(int32_t));
    if (code == 0) code = server_reserve(&of->parts[SELECT_HEAD], sizeof(answer_select));
    for (int attempt = 0; code == 0 && attempt < 2; attempt++) {
        args.by.method = s->method;
        args.pages = pages->data;
        args.scores = scores->data;
        args.counts = of->parts[SELECT_COUNTS].data;
        args.capacity = min_u64(pages->capacity, scores->capacity) / sizeof(float);
        code = cxlkv_batch_select(&w->batch, &args);
        of->k = args.k;
        if (code != -CXLKV_E_ROOM || args.k > s->k_max) break;
        code = lists_reserve(of, rows * args.k);
    }
    if (code >= 0 && of->k > s->k_max)
        code = fail(CXLKV_E_ROOM, "worker: lists of %u pages, room for %u", of->k, s->k_max);
    if (code < 0) return code;
    *(answer_select *)of->parts[SELECT_HEAD].data = args.found;
    pages->bytes = scores->bytes = rows * of->k * sizeof(float);
    return 0;
}

/* Pages that the shares of a row are of. */
static uint64_t mass_pages(const cxlkv_worker *w, const request *r) {
    uint64_t tokens = 0, page_tokens = w->pool->layout.page_tokens;
    for (uint32_t i = 0; i < r->head.count; i++)
        if (r->sequences[i].tokens > tokens) tokens = r->sequences[i].tokens;
    return r->attend.lists ? r->attend.k : (tokens + page_tokens - 1) / page_tokens;
}

static int64_t attend_placed(cxlkv_worker *w, const request *r) {
    const request_attend *a = &r->attend;
    result *of = &w->result;
    uint64_t queries = (uint64_t)a->rows * a->q_heads;
    uint64_t out_bytes = queries * r->facts->layout->value_head_dim * dtype_bytes(a->dtype);
    uint64_t mass_k = a->mass ? mass_pages(w, r) : 0;
    uint64_t mass_bytes = mass_k * a->rows * r->facts->layout->kv_heads * sizeof(float);
    if (mass_k > REQUEST_RESULT_MAX / sizeof(float) / (queries ? queries : 1))
        return fail(CXLKV_E_ARGUMENT, "worker: the mass of %lu pages for %lu queries: ask for "
                    "fewer rows at once", mass_k, queries);
    int64_t code = server_reserve(&of->parts[ATTEND_HEAD], sizeof(answer_attend));
    if (code == 0) code = server_reserve(&of->parts[ATTEND_LSE], queries * sizeof(float));
    if (code == 0) code = server_reserve(&of->parts[ATTEND_OUT], out_bytes);
    if (code == 0) code = server_reserve(&of->parts[ATTEND_MASS], mass_bytes);
    if (code < 0) return code;
    cxlkv_attend_args args = r->attending;
    args.starts = w->starts;
    args.out = of->parts[ATTEND_OUT].data;
    args.lse = of->parts[ATTEND_LSE].data;
    args.mass = a->mass ? of->parts[ATTEND_MASS].data : NULL;
    args.mass_capacity = mass_bytes / sizeof(float);
    code = attend_here(&w->batch, &args, a->parts);
    if (code < 0) return code;
    *(answer_attend *)of->parts[ATTEND_HEAD].data = (answer_attend){
        .bytes_attended = (uint64_t)code, .rows = a->rows, .q_heads = a->q_heads};
    return 0;
}

/* It stays in its slot until the answer, and so do the tables: the client waits. */
static int64_t ask(session *s, const request *r) {
    s->worker->asking = s;
    s->worker->question = *r;
    return RPC_LATER;
}

static int64_t do_call(session *s, const request *r) {
    cxlkv_worker *w = s->worker;
    result_clear(&w->result, RESULT_BYTES_KEPT);
    int64_t code = place_batch(s, r);
    if (code == 0 && r->head.operation == REQUEST_CHOOSE) return ask(s, r);
    if (code == 0)
        code = r->head.operation == REQUEST_SELECT ? select_placed(w, r) : attend_placed(w, r);
    if (code < 0) return code;
    w->result.number = w->requests;
    w->result.nonce = s->nonce;
    return 0;
}

/* ---- answers ---- */

static uint64_t answer_result(const cxlkv_worker *w, uint64_t offset, uint8_t *response) {
    const result *of = &w->result;
    uint64_t room = w->file.header.response_bytes - sizeof(answer_head), at = 0;
    answer_head head = {.k = of->k, .result = of->number};
    for (uint32_t i = 0; i < RESULT_PARTS; i++) head.bytes += of->parts[i].bytes;
    uint64_t end = offset < head.bytes ? min_u64(head.bytes, offset + room) : offset;
    uint8_t *to = response + sizeof(head);
    memcpy(response, &head, sizeof(head));
    for (const buffer *part = of->parts; part < of->parts + RESULT_PARTS; part++) {
        uint64_t low = offset > at ? offset : at, high = min_u64(end, at + part->bytes);
        if (low < high) {
            memcpy(to, (const uint8_t *)part->data + (low - at), high - low);
            to += high - low;
        }
        at += part->bytes;
    }
    return (uint64_t)(to - response);
}

static uint64_t answer_error(int64_t code, uint32_t k, uint8_t *response) {
    const char *text = cxlkv_error_text();
    answer_head head = {.code = (int32_t)code, .k = k, .bytes = strlen(text)};
    memcpy(response, &head, sizeof(head));
    memcpy(response + sizeof(head), text, head.bytes); /* shorter than the smallest slot */
    return sizeof(head) + head.bytes;
}

/* To the client: the error, the result of a call from the offset on, or that it was done. */
static int64_t respond(cxlkv_worker *w, int64_t code, uint32_t operation, uint64_t offset,
                       uint8_t *response) {
    w->refused += code < 0 && code != -CXLKV_E_BUSY;
    flush_store_word(w->file.base + WORKER_COUNTS, w->requests);
    flush_store_word(w->file.base + WORKER_COUNTS + 8, w->refused);
    if (code < 0) return (int64_t)answer_error(code, w->result.k, response);
    bool has_result = operation != REQUEST_TABLES && operation != REQUEST_PART &&
                      operation != REQUEST_LEAVE;
    if (has_result) return (int64_t)answer_result(w, offset, response);
    memset(response, 0, sizeof(answer_head));
    return sizeof(answer_head);
}

/* The next bytes of a long request. */
static int gather(session *s, const request *r) {
    buffer *to = &s->parts;
    uint64_t wanted = r->part.offset + r->part_length;
    if (r->part.offset == 0) to->bytes = 0;
    if (r->part.offset != to->bytes)
        return fail(CXLKV_E_STALE, "worker: bytes from %lu on of a request of which it has %lu",
                    r->part.offset, to->bytes);
    if (wanted > to->capacity) {
        uint64_t capacity = min_u64(REQUEST_BYTES_MAX, wanted + wanted / 2);
        void *grown = realloc(to->data, capacity);
        if (!grown) return fail(ENOMEM, "worker: no memory for a request of %lu bytes", wanted);
        to->data = grown;
        to->capacity = capacity;
    }
    memcpy((uint8_t *)to->data + to->bytes, r->part_bytes, r->part_length);
    to->bytes = wanted;
    return 0;
}

/* A head alone stands for the request whose parts came before it, which is no part itself: it would
 * be gathered into what it lies in. They stay until another request: a question still reads them.
 */
static int parse(session *s, uint32_t operation, const void *bytes, uint32_t length, request *r) {
    buffer *parts = &s->parts;
    uint64_t whole = length;
    request_head head = {0};
    if (length == sizeof(head)) memcpy(&head, bytes, sizeof(head));
    bool stands = head.magic == REQUEST_MAGIC && operation != REQUEST_PART;
    if (stands && head.bytes > length && head.bytes == parts->bytes) {
        bytes = parts->data;
        whole = parts->bytes;
    } else if (operation != REQUEST_PART) {
        parts->bytes = 0;
        if (parts->capacity > PARTS_BYTES_KEPT) {
            free(parts->data);
            *parts = (buffer){0};
        }
    }
    return request_parse(bytes, whole, s->worker->facts, r);
}

void server_answer(cxlkv_worker *w, int64_t code) {
    rpc_slot *slot = &w->slots[w->asking - w->sessions];
    int64_t bytes = respond(w, code, REQUEST_CHOOSE, 0, rpc_response(slot));
    w->asking = NULL;
    rpc_answer(slot, REQUEST_CHOOSE, bytes);
    w->served_ns = boottime_ns();
}

static int64_t handle(void *context, uint32_t operation, const void *bytes, uint32_t length,
                      void *response) {
    session *s = context;
    cxlkv_worker *w = s->worker;
    request r;
    uint64_t offset = 0, nonce = worker_claim_nonce(&w->file, (uint32_t)(s - w->sessions));
    if (s->nonce != nonce) session_clear(s);
    s->nonce = nonce;
    w->requests++;
    int64_t code = parse(s, operation, bytes, length, &r);
    if (code == 0 && r.head.operation != operation)
        code = fail(CXLKV_E_ARGUMENT, "request: operation %u, its slot says %u",
                    r.head.operation, operation);
    if (code == 0 && operation == REQUEST_TABLES) code = do_tables(s, &r);
    else if (code == 0 && operation == REQUEST_PART) code = gather(s, &r);
    else if (code == 0 && operation == REQUEST_LEAVE) session_clear(s), s->nonce = nonce;
    else if (code == 0 && operation != REQUEST_MORE) code = do_call(s, &r);
    else if (code == 0) {
        offset = r.more.offset;
        if (w->result.number == 0 || r.more.result != w->result.number || w->result.nonce != nonce)
            code = fail(CXLKV_E_STALE, "worker: result %lu is gone", r.more.result);
    }
    return code == RPC_LATER ? code : respond(w, code, operation, offset, response);
}

/* ---- serving ---- */

static bool serve_each(void *context) {
    cxlkv_worker *w = context;
    bool served = false;
    for (uint32_t i = 0; i < w->file.header.slot_count && !w->asking; i++)
        served |= rpc_serve_once(&w->slots[i], handle, &w->sessions[i]) != 0;
    if (served) w->served_ns = boottime_ns();
    return served;
}

/* Who died, or left, holds nothing any more. */
static void look_at_clients(cxlkv_worker *w) {
    for (uint32_t i = 0; i < w->file.header.slot_count; i++) {
        session *s = &w->sessions[i];
        if (s->nonce && (worker_claim_nonce(&w->file, i) != s->nonce ||
                         worker_claim_is_dead(&w->file, i)))
            session_clear(s);
    }
    w->looked_ns = boottime_ns();
}

int64_t cxlkv_worker_serve(cxlkv_worker *w, double timeout_s) {
    uint64_t before = w->requests, begin = boottime_ns(), now = begin;
    uint64_t length = timeout_s > 0 && timeout_s < 1e6 ? (uint64_t)(timeout_s * 1e9) : 0;
    if (w->asking)
        server_answer(w, fail(CXLKV_E_ARGUMENT, "this worker was begun without choosers"));
    while (now - begin < length && !w->asking) {
        /* Before the next question: while one waits, what it points to stays, whoever died. */
        if (now - w->looked_ns > LOOK_NS) look_at_clients(w);
        bool served = serve_each(w);
        now = boottime_ns();
        if (served || w->asking) continue;
        if (now - w->served_ns > YIELD_NS)
            worker_sleep(&w->file, min_u64(SLEEP_NS, length), serve_each, w);
        else if (now - w->served_ns > SPIN_NS) sched_yield();
        now = boottime_ns();
    }
    return (int64_t)(w->requests - before);
}

int cxlkv_worker_state_of(cxlkv_worker *w, cxlkv_pool *pool, cxlkv_worker_state *state) {
    if (!w) {
        worker_use_state(pool, state);
        return 0;
    }
    *state = (cxlkv_worker_state){.pid = w->file.header.worker.pid, .requests = w->requests,
                                  .refused = w->refused,
                                  .slots = w->file.header.slot_count};
    for (uint32_t i = 0; i < w->file.header.slot_count; i++)
        state->clients += worker_claim_nonce(&w->file, i) && !worker_claim_is_dead(&w->file, i);
    return 0;
}

/* ---- beginning and end ---- */

void cxlkv_worker_destroy(cxlkv_worker **at) {
    cxlkv_worker *w = *at;
    if (!w) return;
    for (uint32_t i = 0; i < WORKER_SLOTS_MAX; i++) session_clear(&w->sessions[i]);
    if (pool_enter(w->pool) == 0) {
        worker_file_remove(w->pool, &w->file);
        pool_leave(w->pool);
    }
    worker_file_close(&w->file);
    pthread_mutex_destroy(&w->batch.lock);
    free(w->batch.sequences);
    free(w->batch.scratch);
    free(w->starts);
    free(w->numbers);
    result_clear(&w->result, 0);
    free(w->local);
    pool_drop(w->pool);
    free(w);
}

static int attach_slots(cxlkv_worker *w) {
    const worker_header *header = &w->file.header;
    uint64_t stride = align_up((uint64_t)header->request_bytes, LINE_BYTES) +
                      align_up((uint64_t)header->response_bytes, LINE_BYTES);
    w->local = aligned_alloc(LINE_BYTES, header->slot_count * stride);
    if (!w->local) return fail(ENOMEM, "no memory for %u slots", header->slot_count);
    for (uint32_t i = 0; i < header->slot_count; i++) {
        rpc_slot *slot = &w->slots[i];
        *slot = (rpc_slot){.mode = (enum visibility_mode)header->mode, .same_host = true};
        int code = rpc_server(slot, worker_slot(&w->file, i), header->request_bytes,
                              header->response_bytes, w->local + i * stride);
        if (code < 0) return code;
    }
    return 0;
}

int cxlkv_worker_make(cxlkv_pool *pool, uint32_t slots, uint32_t request_bytes,
                      uint32_t response_bytes, uint32_t mode, cxlkv_worker **out) {
    if (mode > VISIBILITY_STRICT) return fail(CXLKV_E_ARGUMENT, "mode %u: 0 to 2", mode);
    int code = pool_enter(pool);
    if (code < 0) return code;
    cxlkv_worker *w = calloc(1, sizeof(*w));
    if (!w) code = fail(ENOMEM, "no memory for a worker");
    if (w) {
        w->pool = w->batch.pool = pool;
        w->file.fd = -1;
        w->batch.counted_elsewhere = true;
        uint32_t shapes = has_shapes(&pool->layout) ? pool->layout.group_count : 0;
        for (uint32_t i = 0; i < shapes || i == 0; i++) {
            w->facts[i] = worker_facts(pool, &pool->layers.shapes[i].layout);
            w->facts[i].shapes = shapes;
        }
        pool_retain(pool);
        pthread_mutex_init(&w->batch.lock, NULL);
        for (uint32_t i = 0; i < WORKER_SLOTS_MAX; i++) w->sessions[i].worker = w;
        code = worker_file_make(pool, slots, request_bytes, response_bytes,
                                (enum visibility_mode)mode, &w->file);
        if (code == 0) code = attach_slots(w);
    }
    pool_leave(pool);
    if (code < 0) cxlkv_worker_destroy(&w);
    else *out = w;
    return code;
}
