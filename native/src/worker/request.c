/* Requests to the worker, checked: the one place that reads their bytes before they are trusted. */
#include "worker/request.h"

#include <math.h>
#include <string.h>

#include "sequence/sequence.h"

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
    uint64_t token_bytes = (uint64_t)facts->kv_heads * dim * dtype_bytes(facts->dtype);
    if (pieces_bytes) return tokens % facts->page_tokens ? pieces_bytes : 0;
    return align_up((tokens % facts->page_tokens - known) * token_bytes, 8);
}

uint64_t request_key_bytes(const request_facts *facts, const request_sequence *item) {
    return tail_bytes(facts, item->tokens, item->keys_known, facts->head_dim,
                      facts->key_pieces_bytes);
}

uint64_t request_value_bytes(const request_facts *facts, const request_sequence *item) {
    return tail_bytes(facts, item->tokens, item->values_known, facts->value_dim,
                      facts->value_pieces_bytes);
}

uint64_t request_query_bytes(const request_facts *facts, uint64_t rows, uint32_t q_heads,
                             uint32_t dtype) {
    return rows * q_heads * facts->head_dim * dtype_bytes(dtype);
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

static int check_queries(const request_facts *facts, uint32_t layer, uint32_t q_heads,
                         uint32_t dtype, uint32_t rows, float scale) {
    if (layer >= facts->layers)
        return fail(CXLKV_E_ARGUMENT, "request: layer %u of %u", layer, facts->layers);
    if (q_heads == 0 || q_heads % facts->kv_heads || q_heads / facts->kv_heads > REQUEST_GROUP_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: %u query heads for %u kv heads", q_heads,
                    facts->kv_heads);
    if (dtype >= DTYPE_COUNT) return fail(CXLKV_E_ARGUMENT, "request: dtype %u of queries", dtype);
    if (rows > INT32_MAX || (uint64_t)rows * q_heads > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: %u rows of %u heads", rows, q_heads);
    if (!(scale > 0 && scale < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "request: scale %g", (double)scale);
    return 0;
}

/* How much of its tail the worker can have; and that the rows are as many as the arguments say. */
static int parse_sequences(reading *r, const request_facts *facts, request *out,
                           uint32_t rows_wanted, bool attends) {
    uint64_t rows = 0;
    out->sequences = read_array(r, (uint64_t)out->head.count * sizeof(*out->sequences));
    if (!out->sequences) return short_error(r, "its sequences");
    for (uint32_t i = 0; i < out->head.count; i++) {
        const request_sequence *item = &out->sequences[i];
        uint64_t filled = item->tokens % facts->page_tokens;
        if (item->table >= REQUEST_TABLES_MAX || item->version == 0 || item->rows > item->tokens ||
            item->tokens / facts->page_tokens > REQUEST_PAGES_MAX || item->keys_known > filled ||
            item->values_known > (attends && facts->value_dim ? filled : 0))
            return fail(CXLKV_E_ARGUMENT, "request: sequence %u, table %u: %u rows of %lu tokens, "
                        "%u keys and %u values of its tail are known", i, item->table, item->rows,
                        item->tokens, item->keys_known, item->values_known);
        rows += item->rows;
    }
    if (rows == rows_wanted) return 0;
    return fail(CXLKV_E_ARGUMENT, "request: %u rows, its sequences have %lu", rows_wanted, rows);
}

/* The last of a request: queries, then what is new of the tails. */
static int parse_rows(reading *r, const request_facts *facts, request *out) {
    bool attends = out->head.operation == REQUEST_ATTEND;
    bool chooses = out->head.operation == REQUEST_CHOOSE;
    uint64_t key_bytes = 0, value_bytes = 0;
    for (uint32_t i = 0; !chooses && i < out->head.count; i++) {
        key_bytes += request_key_bytes(facts, &out->sequences[i]);
        if (attends) value_bytes += request_value_bytes(facts, &out->sequences[i]);
    }
    if (!(out->queries = read_array(r, out->query_bytes))) return short_error(r, "its queries");
    if (!(out->keys = read_array(r, key_bytes))) return short_error(r, "the keys of its tails");
    out->values = read_array(r, value_bytes);
    return out->values ? 0 : short_error(r, "the values of its tails");
}

static int check_select(const request_facts *facts, const request_select *s,
                        const request_head *head) {
    int code = check_queries(facts, s->layer, s->q_heads, s->dtype, s->rows, s->scale);
    uint32_t count = head->count;
    if (code < 0) return code;
    bool chooses = head->operation == REQUEST_CHOOSE, scorer = s->method == CXLKV_METHOD_SCORER;
    bool known = chooses ? scorer : scorer || s->method <= CXLKV_METHOD_ATTENTION;
    if (!known || s->union_over > CXLKV_UNION_LAYER || s->per > CXLKV_PER_SEQUENCE)
        return fail(CXLKV_E_ARGUMENT, "request: unknown method, union or per");
    if (s->method == CXLKV_METHOD_TWO_STAGE && !facts->sketch)
        return fail(CXLKV_E_ARGUMENT, "request: two stages in a pool without sketches");
    if (!(s->errors >= 0))
        return fail(CXLKV_E_ARGUMENT, "request: %g errors", (double)s->errors);
    if (s->budget_count != 1 && s->budget_count != count)
        return fail(CXLKV_E_ARGUMENT, "request: %u budgets for %u sequences", s->budget_count,
                    count);
    if (s->k_max > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: lists of %u pages", s->k_max);
    return 0;
}

static int check_budgets(const request *out) {
    for (uint32_t i = 0; i < out->select.budget_count; i++) {
        const cxlkv_budget *budget = &out->budgets[i];
        bool pages = budget->kind == CXLKV_BUDGET_PAGES, all = budget->kind == CXLKV_BUDGET_ALL;
        bool is_share = budget->amount > 0 && budget->amount <= 1;
        if (budget->kind > CXLKV_BUDGET_ALL || (pages ? budget->pages == 0 : !all && !is_share))
            return fail(CXLKV_E_ARGUMENT, "request: budget %u of kind %u, %u pages, amount %g", i,
                        budget->kind, budget->pages, budget->amount);
    }
    return 0;
}

static int parse_select(reading *r, const request_facts *facts, request *out) {
    const request_select *s = &out->select;
    if (!read_bytes(r, &out->select, sizeof(*s))) return short_error(r, "its arguments");
    int code = check_select(facts, s, &out->head);
    if (code < 0) return code;
    code = parse_sequences(r, facts, out, s->rows, false);
    if (code < 0) return code;
    out->budgets = read_array(r, (uint64_t)s->budget_count * sizeof(*out->budgets));
    if (!out->budgets) return short_error(r, "its budgets");
    out->layer = s->layer;
    out->query_bytes = request_query_bytes(facts, s->rows, s->q_heads, s->dtype);
    code = parse_rows(r, facts, out);
    return code < 0 ? code : check_budgets(out);
}

static int check_attend(const request_facts *facts, const request_attend *a, uint32_t count) {
    int code = check_queries(facts, a->layer, a->q_heads, a->dtype, a->rows, a->scale);
    if (code < 0) return code;
    if (!(a->softcap >= 0 && a->softcap < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "request: softcap %g", (double)a->softcap);
    if (!(a->error >= 0 && a->error < INFINITY))
        return fail(CXLKV_E_ARGUMENT, "request: an error of %g", (double)a->error);
    uint32_t wanted = a->per == CXLKV_PER_QUERY ? a->rows : count;
    if (a->per > CXLKV_PER_SEQUENCE || (a->lists ? a->lists != wanted : a->k || a->per))
        return fail(CXLKV_E_ARGUMENT, "request: %u lists of %u pages, per %u: %u are wanted, or "
                    "none", a->lists, a->k, a->per, wanted);
    if (a->parts == 0 || a->parts > REQUEST_PARTS_MAX || a->mass > 1)
        return fail(CXLKV_E_ARGUMENT, "request: pages in %u parts, mass %u", a->parts, a->mass);
    if ((a->weight_tokens > 1 && a->weight_tokens != facts->page_tokens) ||
        (!a->lists && (a->weight_tokens || a->virtual_rows)))
        return fail(CXLKV_E_ARGUMENT, "request: %u log-weights a page, %u virtual rows, %u lists",
                    a->weight_tokens, a->virtual_rows, a->lists);
    return 0;
}

/* Each page is one of its sequence, or -1. */
static int check_pages(const request_facts *facts, const request *out) {
    const request_attend *a = &out->attend;
    const int32_t *page = out->pages;
    for (uint32_t i = 0; a->lists && i < out->head.count; i++) {
        const request_sequence *item = &out->sequences[i];
        uint64_t lists = a->per == CXLKV_PER_QUERY ? item->rows : 1;
        int64_t pages = (int64_t)((item->tokens + facts->page_tokens - 1) / facts->page_tokens);
        for (uint64_t n = lists * facts->kv_heads * a->k; n; n--, page++)
            if (*page < -1 || *page >= pages)
                return fail(CXLKV_E_ARGUMENT, "request: page %d of sequence %u, which has %ld",
                            *page, i, (long)pages);
    }
    return 0;
}

/* An array of float32 by `count` items of `each`; false when fewer bytes are left. Both are in
 * range, so that the product is. */
static bool read_floats(reading *r, uint64_t count, uint32_t each, const float **to) {
    *to = read_array(r, count * each * sizeof(float));
    return *to;
}

/* What the lists have besides pages. Numbers are looked at when they are used. */
static int parse_more(reading *r, const request_facts *facts, request *out) {
    const request_attend *a = &out->attend;
    uint64_t lists = (uint64_t)a->lists * facts->kv_heads, rows = lists * a->virtual_rows;
    out->log_weights = out->row_keys = out->row_values = out->row_log_counts = NULL;
    if (a->weight_tokens && !read_floats(r, lists * a->k, a->weight_tokens, &out->log_weights))
        return short_error(r, "its log-weights");
    if (!a->virtual_rows) return 0;
    if (a->virtual_rows > r->length / sizeof(float) / lists ||
        !read_floats(r, rows, facts->head_dim, &out->row_keys) ||
        !read_floats(r, rows, facts->row_value_dim, &out->row_values) ||
        !read_floats(r, rows, 1, &out->row_log_counts))
        return short_error(r, "its virtual rows");
    return 0;
}

static int parse_attend(reading *r, const request_facts *facts, request *out) {
    const request_attend *a = &out->attend;
    if (!read_bytes(r, &out->attend, sizeof(*a))) return short_error(r, "its arguments");
    int code = check_attend(facts, a, out->head.count);
    if (code < 0) return code;
    code = parse_sequences(r, facts, out, a->rows, true);
    if (code < 0) return code;
    uint64_t lists = (uint64_t)a->lists * facts->kv_heads;
    if ((lists && a->k > r->length / sizeof(int32_t) / lists) ||
        !(out->pages = read_array(r, lists * a->k * sizeof(*out->pages))))
        return short_error(r, "its pages");
    code = check_pages(facts, out);
    if (code == 0) code = parse_more(r, facts, out);
    if (code < 0) return code;
    out->layer = a->layer;
    out->query_bytes = request_query_bytes(facts, a->rows, a->q_heads, a->dtype);
    return parse_rows(r, facts, out);
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
