/* Requests to the worker, checked: the one place that reads their bytes before they are trusted. */
#include "request.h"

#include <math.h>
#include <string.h>

#include "internal.h"

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

/* An array, with what fills it up to a multiple of 8. */
static bool read_array(reading *r, uint64_t bytes, const uint8_t **out) {
    if (bytes > r->length - r->at || align_up(bytes, 8) > r->length - r->at) return false;
    *out = r->bytes + r->at;
    r->at += align_up(bytes, 8);
    return true;
}

static int short_error(const reading *r, const char *what) {
    return fail(CXLKV_E_ARGUMENT, "request: %s end behind its %lu bytes", what, r->length);
}

request_table request_table_at(const request *r, uint32_t index) {
    request_table item;
    memcpy(&item, r->items + (uint64_t)index * sizeof(item), sizeof(item));
    return item;
}

request_sequence request_sequence_at(const request *r, uint32_t index) {
    request_sequence item;
    memcpy(&item, r->items + (uint64_t)index * sizeof(item), sizeof(item));
    return item;
}

uint64_t request_tail_bytes(const request_facts *facts, uint64_t tokens, uint32_t tail_known) {
    uint64_t token_bytes = (uint64_t)facts->kv_heads * facts->head_dim * dtype_bytes(facts->dtype);
    return align_up((tokens % facts->page_tokens - tail_known) * token_bytes, 8);
}

uint64_t request_query_bytes(const request_facts *facts, const request_select *select) {
    uint64_t row = (uint64_t)select->q_heads * facts->head_dim * dtype_bytes(select->dtype);
    return select->rows * row;
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
    if (item->to && item->from == 0 && item->kept != item->first)
        return fail(CXLKV_E_ARGUMENT, "request: table %u is new and keeps pages", index);
    return 0;
}

static int parse_tables(reading *r, const request_facts *facts, request *out) {
    uint64_t count = out->head.count;
    if (!read_array(r, count * sizeof(request_table), &out->items))
        return short_error(r, "its tables");
    out->entry_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        request_table item = request_table_at(out, i);
        int code = check_table(facts, &item, i);
        if (code < 0) return code;
        out->entry_count += item.added;
    }
    if (!read_array(r, out->entry_count * REQUEST_ENTRY_BYTES, &out->entries))
        return short_error(r, "the pages of its tables");
    for (uint64_t i = 0; i < out->entry_count; i++) {
        uint32_t page;
        memcpy(&page, out->entries + i * REQUEST_ENTRY_BYTES + 8, sizeof(page));
        if (page >= facts->page_count)
            return fail(CXLKV_E_ARGUMENT, "request: page %u of %u", page, facts->page_count);
    }
    return 0;
}

/* ---- select ---- */

static int check_select(const request_facts *facts, const request_select *s, uint32_t count) {
    if (s->layer >= facts->layers)
        return fail(CXLKV_E_ARGUMENT, "request: layer %u of %u", s->layer, facts->layers);
    if (s->q_heads == 0 || s->q_heads % facts->kv_heads ||
        s->q_heads / facts->kv_heads > REQUEST_GROUP_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: %u query heads for %u kv heads", s->q_heads,
                    facts->kv_heads);
    if (s->dtype >= DTYPE_COUNT || s->method > CXLKV_METHOD_AUTO ||
        s->union_over > CXLKV_UNION_LAYER || s->per > CXLKV_PER_SEQUENCE)
        return fail(CXLKV_E_ARGUMENT, "request: unknown dtype, method, union or per");
    if (s->method == CXLKV_METHOD_TWO_STAGE && !facts->sketch)
        return fail(CXLKV_E_ARGUMENT, "request: two stages in a pool without sketches");
    if (!(s->scale > 0 && s->scale < INFINITY) || !(s->errors >= 0))
        return fail(CXLKV_E_ARGUMENT, "request: scale %g, %g errors", (double)s->scale,
                    (double)s->errors);
    if (s->budget_count != 1 && s->budget_count != count)
        return fail(CXLKV_E_ARGUMENT, "request: %u budgets for %u sequences", s->budget_count,
                    count);
    if (s->rows > INT32_MAX || (uint64_t)s->rows * s->q_heads > INT32_MAX || s->k_max > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "request: %u rows of %u heads, lists of %u pages", s->rows,
                    s->q_heads, s->k_max);
    return 0;
}

static int check_budgets(const request *out) {
    for (uint32_t i = 0; i < out->select.budget_count; i++) {
        cxlkv_budget budget;
        memcpy(&budget, out->budgets + (uint64_t)i * sizeof(budget), sizeof(budget));
        if (budget.kind > CXLKV_BUDGET_MASS ||
            (budget.kind == CXLKV_BUDGET_PAGES ? budget.pages == 0
                                               : !(budget.amount > 0 && budget.amount <= 1)))
            return fail(CXLKV_E_ARGUMENT, "request: budget %u of kind %u, %u pages, amount %g", i,
                        budget.kind, budget.pages, budget.amount);
    }
    return 0;
}

static int check_sequences(const request_facts *facts, const request *out, uint64_t *tail_bytes) {
    uint64_t rows = 0;
    *tail_bytes = 0;
    for (uint32_t i = 0; i < out->head.count; i++) {
        request_sequence item = request_sequence_at(out, i);
        if (item.table >= REQUEST_TABLES_MAX || item.version == 0 || item.rows > item.tokens ||
            item.tokens / facts->page_tokens > REQUEST_PAGES_MAX || item.reserved ||
            item.tail_known > item.tokens % facts->page_tokens)
            return fail(CXLKV_E_ARGUMENT, "request: sequence %u, table %u: %u rows of %lu tokens",
                        i, item.table, item.rows, item.tokens);
        rows += item.rows;
        *tail_bytes += request_tail_bytes(facts, item.tokens, item.tail_known);
    }
    if (rows != out->select.rows)
        return fail(CXLKV_E_ARGUMENT, "request: %u rows, its sequences have %lu", out->select.rows,
                    rows);
    return 0;
}

static int parse_select(reading *r, const request_facts *facts, request *out) {
    uint64_t tail_bytes, count = out->head.count;
    if (!read_bytes(r, &out->select, sizeof(out->select))) return short_error(r, "its arguments");
    int code = check_select(facts, &out->select, out->head.count);
    if (code < 0) return code;
    if (!read_array(r, count * sizeof(request_sequence), &out->items))
        return short_error(r, "its sequences");
    code = check_sequences(facts, out, &tail_bytes);
    if (code < 0) return code;
    if (!read_array(r, (uint64_t)out->select.budget_count * sizeof(cxlkv_budget), &out->budgets))
        return short_error(r, "its budgets");
    out->query_bytes = request_query_bytes(facts, &out->select);
    if (!read_array(r, out->query_bytes, &out->queries)) return short_error(r, "its queries");
    if (!read_array(r, tail_bytes, &out->tails)) return short_error(r, "the keys of its tails");
    return check_budgets(out);
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
    bool counts = out->head.operation == REQUEST_TABLES || out->head.operation == REQUEST_SELECT;
    if (counts != (out->head.count > 0))
        return fail(CXLKV_E_ARGUMENT, "request: operation %u of %u items", out->head.operation,
                    out->head.count);
    if (out->head.operation == REQUEST_TABLES) code = parse_tables(&r, facts, out);
    else if (out->head.operation == REQUEST_SELECT) code = parse_select(&r, facts, out);
    else if (out->head.operation == REQUEST_MORE)
        code = read_bytes(&r, &out->more, sizeof(out->more)) ? 0 : short_error(&r, "its numbers");
    else if (out->head.operation != REQUEST_LEAVE)
        code = fail(CXLKV_E_ARGUMENT, "request: operation %u", out->head.operation);
    if (code == 0 && r.at != length)
        code = fail(CXLKV_E_ARGUMENT, "request: %lu bytes are left over", length - r.at);
    return code;
}
