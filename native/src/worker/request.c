/* Requests to the worker, checked: the one place that reads their bytes before they are trusted. */
#include "ndp/attend.h"
#include "ndp/select.h"
#include "worker/request.h"
#include "worker/types.h"

/* Reads on from `at`; false when fewer bytes are left. */
typedef struct reading {
    const uint8_t *bytes;
    uint64_t length, at;
} reading;

static bool read_bytes(reading *r, void *to, uint64_t count) {
    if (count > r->length - r->at) return false;
    memcpy(to, r->bytes + r->at, count);
    r->at += count;
    return true;
}

/* An array, with what fills it up to a multiple of 8; NULL when fewer bytes are left. */
static const void *read_array(reading *r, uint64_t bytes) {
    const void *array = r->bytes + r->at;
    if (bytes > r->length - r->at || align_up(bytes, 8) > r->length - r->at) return NULL;
    r->at += align_up(bytes, 8);
    return array;
}

static int short_error(const reading *r, const char *what) {
    return fail(CXLKV_E_ARGUMENT, "request: %s end behind its %lu bytes", what, r->length);
}

static uint64_t tail_bytes(const request_facts *facts, uint64_t tokens, uint32_t known,
                           uint32_t dim, uint64_t pieces_bytes) {
    const cxlkv_layout *layout = facts->layout;
    uint64_t token_bytes = (uint64_t)layout->kv_heads * dim * dtype_bytes(layout->dtype);
    if (pieces_bytes) return tokens % layout->page_tokens ? pieces_bytes : 0;
    return align_up((tokens % layout->page_tokens - known) * token_bytes, 8);
}

uint64_t request_key_bytes(const request_facts *facts, const request_sequence *item) {
    return tail_bytes(facts, item->tokens, item->keys_known, facts->layout->head_dim,
                      facts->key_pieces_bytes);
}

uint64_t request_value_bytes(const request_facts *facts, const request_sequence *item) {
    return tail_bytes(facts, item->tokens, item->values_known, facts->value_dim,
                      facts->value_pieces_bytes);
}

uint64_t request_query_bytes(const request_facts *facts, uint64_t rows, uint32_t q_heads,
                             uint32_t dtype) {
    return rows * q_heads * facts->layout->head_dim * dtype_bytes(dtype);
}

/* ---- tables ---- */

static int check_table(const request_facts *facts, const request_table *item, uint32_t index) {
    if (item->table >= REQUEST_TABLES_MAX || item->part >= facts->part_count || item->reserved)
        return fail(CXLKV_E_ARGUMENT, "request: table %u is number %u of part %u: below %d and %u",
                    index, item->table, item->part, REQUEST_TABLES_MAX, facts->part_count);
    uint64_t end = (uint64_t)item->kept + item->added;
    if (item->to == 0 ? item->added || item->kept || item->first
                      : item->kept < item->first || end > REQUEST_PAGES_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: table %u keeps pages [%u, %u) and adds %u", index,
                    item->first, item->kept, item->added);
    if (item->to && end - item->first > facts->page_count)
        return fail(CXLKV_E_ARGUMENT, "request: table %u holds %lu pages, of %u that there are",
                    index, end - item->first, facts->page_count);
    if (item->to && item->from == 0 && item->kept != item->first)
        return fail(CXLKV_E_ARGUMENT, "request: table %u is new and keeps pages", index);
    return 0;
}

static int parse_tables(reading *r, const request_facts *facts, request *out) {
    uint64_t count = out->head.count;
    out->tables = read_array(r, count * sizeof(*out->tables));
    if (!out->tables) return short_error(r, "its tables");
    out->entry_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        int code = check_table(facts, &out->tables[i], i);
        if (code < 0) return code;
        out->entry_count += out->tables[i].added;
    }
    out->entries = read_array(r, out->entry_count * REQUEST_ENTRY_BYTES);
    if (!out->entries) return short_error(r, "the pages of its tables");
    for (uint64_t i = 0; i < out->entry_count; i++) {
        uint32_t page;
        memcpy(&page, out->entries + i * REQUEST_ENTRY_BYTES + 8, sizeof(page));
        if (page >= facts->page_count)
            return fail(CXLKV_E_ARGUMENT, "request: page %u of %u", page, facts->page_count);
    }
    return 0;
}

/* ---- select and attend ---- */

/* How much of its tail the worker can have; and that the rows are as many as the arguments say. */
static int parse_sequences(reading *r, const request_facts *facts, request *out,
                           uint32_t rows_wanted, bool attends) {
    uint64_t rows = 0, page_tokens = facts->layout->page_tokens;
    out->sequences = read_array(r, (uint64_t)out->head.count * sizeof(*out->sequences));
    if (!out->sequences) return short_error(r, "its sequences");
    for (uint32_t i = 0; i < out->head.count; i++) {
        const request_sequence *item = &out->sequences[i];
        uint64_t filled = item->tokens % page_tokens;
        if (item->table >= REQUEST_TABLES_MAX || item->version == 0 || item->rows > item->tokens ||
            item->tokens / page_tokens > REQUEST_PAGES_MAX || item->keys_known > filled ||
            item->values_known > (attends && facts->value_dim ? filled : 0))
            return fail(CXLKV_E_ARGUMENT, "request: sequence %u, table %u: %u rows of %lu tokens, "
                        "%u keys and %u values of its tail are known", i, item->table, item->rows,
                        item->tokens, item->keys_known, item->values_known);
        rows += item->rows;
    }
    if (rows == rows_wanted) return 0;
    return fail(CXLKV_E_ARGUMENT, "request: %u rows, its sequences have %lu", rows_wanted, rows);
}

/* The last of a request: queries, whose dtype is known, then what is new of the tails. */
static int parse_rows(reading *r, const request_facts *facts, request *out, cxlkv_rows *queries,
                      uint32_t layer, uint32_t q_heads, uint32_t rows) {
    bool attends = out->head.operation == REQUEST_ATTEND;
    bool chooses = out->head.operation == REQUEST_CHOOSE;
    uint64_t key_bytes = 0, value_bytes = 0;
    for (uint32_t i = 0; !chooses && i < out->head.count; i++) {
        key_bytes += request_key_bytes(facts, &out->sequences[i]);
        if (attends) value_bytes += request_value_bytes(facts, &out->sequences[i]);
    }
    out->layer = layer;
    out->query_bytes = request_query_bytes(facts, rows, q_heads, queries->dtype);
    if (!(out->queries = read_array(r, out->query_bytes))) return short_error(r, "its queries");
    queries->data = out->queries;
    queries->stride_bytes[2] = (int64_t)dtype_bytes(queries->dtype);
    queries->stride_bytes[1] = queries->stride_bytes[2] * facts->layout->head_dim;
    queries->stride_bytes[0] = queries->stride_bytes[1] * q_heads;
    if (!(out->keys = read_array(r, key_bytes))) return short_error(r, "the keys of its tails");
    out->values = read_array(r, value_bytes);
    return out->values ? 0 : short_error(r, "the values of its tails");
}

static int layer_facts(const request_facts *all, uint32_t layer, request *out) {
    if (layer >= all->layout->layers)
        return fail(CXLKV_E_ARGUMENT, "layer %u: the pool has %u", layer, all->layout->layers);
    out->facts = all->shapes ? &all[all->layout->group_of[layer]] : all;
    return 0;
}

static int parse_select(reading *r, const request_facts *all, request *out) {
    const request_select *s = &out->select;
    if (!read_bytes(r, &out->select, sizeof(*s))) return short_error(r, "its arguments");
    int code = layer_facts(all, s->layer, out);
    if (code < 0) return code;
    const request_facts *facts = out->facts;
    code = parse_sequences(r, facts, out, s->rows, false);
    if (code < 0) return code;
    out->selecting = (cxlkv_select_args){
        .layer = s->layer, .q_heads = s->q_heads, .queries.dtype = s->dtype, .scale = s->scale,
        .by = {.method = s->method, .union_over = s->union_over, .per = s->per,
               .errors = s->errors, .scorer = s->scorer, .budget_count = s->budget_count,
               .budgets = read_array(r, (uint64_t)s->budget_count * sizeof(cxlkv_budget))}};
    if (!out->selecting.by.budgets) return short_error(r, "its budgets");
    code = select_bounds(facts->layout, &out->selecting, s->rows, out->head.count);
    if (code < 0) return code;
    if (out->head.operation == REQUEST_CHOOSE && s->method != CXLKV_METHOD_SCORER)
        return fail(CXLKV_E_ARGUMENT, "request: a choice by method %u", s->method);
    if (s->k_max > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: lists of %u pages", s->k_max);
    return parse_rows(r, facts, out, &out->selecting.queries, s->layer, s->q_heads, s->rows);
}

/* Each page is one of its sequence, or -1. */
static int check_pages(const cxlkv_layout *layout, const request *out) {
    uint64_t page_tokens = layout->page_tokens;
    const request_attend *a = &out->attend;
    const int32_t *page = out->attending.picked.pages;
    for (uint32_t i = 0; a->lists && i < out->head.count; i++) {
        const request_sequence *item = &out->sequences[i];
        uint64_t lists = a->per == CXLKV_PER_QUERY ? item->rows : 1;
        int64_t pages = (int64_t)((item->tokens + page_tokens - 1) / page_tokens);
        for (uint64_t n = lists * layout->kv_heads * a->k; n; n--, page++)
            if (*page < -1 || *page >= pages)
                return fail(CXLKV_E_ARGUMENT, "request: page %d of sequence %u, which has %ld",
                            *page, i, (long)pages);
    }
    return 0;
}

/* An array of 4-byte numbers by `count` items of `each`; NULL when fewer bytes are left. */
static const void *read_numbers(reading *r, uint64_t count, uint64_t each) {
    if (each && count > r->length / 4 / each) return NULL;
    return read_array(r, count * each * 4);
}

/* The lists, and what they have besides pages. Numbers are looked at when they are used. */
static int parse_picked(reading *r, const cxlkv_layout *layout, const request_attend *a,
                        cxlkv_picked *to) {
    uint64_t lists = (uint64_t)a->lists * layout->kv_heads;
    *to = (cxlkv_picked){.lists = a->lists, .k = a->k, .per = a->per,
                         .weight_tokens = a->weight_tokens, .row_count = a->virtual_rows};
    if (!a->lists)
        return a->k || a->per || a->weight_tokens || a->virtual_rows
                   ? fail(CXLKV_E_ARGUMENT, "request: %u pages, %u log-weights and %u virtual rows "
                          "of no list, per %u", a->k, a->weight_tokens, a->virtual_rows, a->per)
                   : 0;
    if (!(to->pages = read_numbers(r, lists, a->k))) return short_error(r, "its pages");
    if (a->weight_tokens && !(to->log_weights = read_numbers(r, lists * a->k, a->weight_tokens)))
        return short_error(r, "its log-weights");
    uint64_t rows = lists * a->virtual_rows; /* no more than there are bytes, if it comes to that */
    if (a->virtual_rows && (a->virtual_rows > r->length / lists ||
                            !(to->row_keys = read_numbers(r, rows, layout->head_dim)) ||
                            !(to->row_values = read_numbers(r, rows, layout->value_head_dim)) ||
                            !(to->row_log_counts = read_numbers(r, rows, 1))))
        return short_error(r, "its virtual rows");
    return 0;
}

static int parse_attend(reading *r, const request_facts *all, request *out) {
    const request_attend *a = &out->attend;
    cxlkv_attend_args *args = &out->attending;
    if (!read_bytes(r, &out->attend, sizeof(*a))) return short_error(r, "its arguments");
    int code = layer_facts(all, a->layer, out);
    if (code < 0) return code;
    const request_facts *facts = out->facts;
    code = parse_sequences(r, facts, out, a->rows, true);
    if (code < 0) return code;
    *args = (cxlkv_attend_args){.layer = a->layer, .q_heads = a->q_heads, .queries.dtype = a->dtype,
                                .scale = a->scale, .softcap = a->softcap, .error = a->error};
    code = parse_picked(r, facts->layout, a, &args->picked);
    if (code == 0) code = attend_bounds(facts->layout, args, a->rows, out->head.count);
    if (code == 0) code = check_pages(facts->layout, out);
    if (code < 0) return code;
    if (a->parts == 0 || a->parts > REQUEST_PARTS_MAX || a->mass > 1)
        return fail(CXLKV_E_ARGUMENT, "request: pages in %u parts, mass %u", a->parts, a->mass);
    return parse_rows(r, facts, out, &args->queries, a->layer, a->q_heads, a->rows);
}

/* ---- requests in parts ---- */

static int parse_part(reading *r, request *out) {
    if (!read_bytes(r, &out->part, sizeof(out->part))) return short_error(r, "its offset");
    out->part_length = r->length - r->at;
    out->part_bytes = r->bytes + r->at;
    r->at = r->length;
    if (out->part.offset <= REQUEST_BYTES_MAX - out->part_length) return 0;
    return fail(CXLKV_E_ARGUMENT, "request: %lu bytes from %lu on: at most %d in all",
                out->part_length, out->part.offset, REQUEST_BYTES_MAX);
}

/* ---- all ---- */

int request_parse(const uint8_t *bytes, uint64_t length, const request_facts *facts,
                  request *out) {
    reading r = {.bytes = bytes, .length = length};
    int code = 0;
    if (!read_bytes(&r, &out->head, sizeof(out->head)) || out->head.magic != REQUEST_MAGIC)
        return fail(CXLKV_E_ARGUMENT, "request: these %lu bytes are none", length);
    if (out->head.bytes != length)
        return fail(CXLKV_E_ARGUMENT, "request: %lu bytes, it says %u", length, out->head.bytes);
    bool selects = out->head.operation == REQUEST_SELECT ||
                   out->head.operation == REQUEST_CHOOSE;
    bool counts = out->head.operation == REQUEST_TABLES || selects ||
                  out->head.operation == REQUEST_ATTEND;
    if (counts != (out->head.count > 0))
        return fail(CXLKV_E_ARGUMENT, "request: operation %u of %u items", out->head.operation,
                    out->head.count);
    if (out->head.operation == REQUEST_TABLES) code = parse_tables(&r, facts, out);
    else if (selects) code = parse_select(&r, facts, out);
    else if (out->head.operation == REQUEST_ATTEND) code = parse_attend(&r, facts, out);
    else if (out->head.operation == REQUEST_MORE)
        code = read_bytes(&r, &out->more, sizeof(out->more)) ? 0 : short_error(&r, "its numbers");
    else if (out->head.operation == REQUEST_PART) code = parse_part(&r, out);
    else if (out->head.operation != REQUEST_LEAVE)
        code = fail(CXLKV_E_ARGUMENT, "request: operation %u", out->head.operation);
    if (code == 0 && r.at != length)
        code = fail(CXLKV_E_ARGUMENT, "request: %lu bytes are left over", length - r.at);
    return code;
}
