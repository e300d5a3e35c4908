/* Whatever bytes a request has, the parser reads within them, and what it accepts is in range. */
#include <math.h>

#include "fuzz.h"
#include "worker/request.h"

static uint64_t sum_of(const void *array, uint64_t count) {
    const uint8_t *bytes = array;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += bytes[i];
    return sum;
}

volatile uint64_t fuzz_seen; /* so that what is read is needed */

static uint64_t walk_tables(const request *r, const request_facts *facts) {
    uint64_t entries = 0;
    for (uint32_t i = 0; i < r->head.count; i++) {
        request_table item = r->tables[i];
        demand(item.table < REQUEST_TABLES_MAX && item.part < facts->part_count, "table");
        demand(item.kept >= item.first, "first page");
        demand(item.kept - item.first + (uint64_t)item.added <= facts->page_count, "page count");
        entries += item.added;
    }
    demand(entries == r->entry_count, "number of pages");
    for (uint64_t i = 0; i < entries; i++) {
        uint32_t page;
        memcpy(&page, r->entries + i * REQUEST_ENTRY_BYTES + 8, sizeof(page));
        demand(page < facts->page_count, "page");
    }
    return sum_of(r->entries, entries * REQUEST_ENTRY_BYTES);
}

/* Of a select and an attend: sequences, queries and tails. */
static uint64_t walk_rows(const request *r, const request_facts *facts, uint32_t rows_wanted,
                          bool attends) {
    uint64_t rows = 0, keys = 0, values = 0;
    demand(r->layer < facts->layout->layers, "layer");
    bool tails = r->head.operation != REQUEST_CHOOSE;
    for (uint32_t i = 0; i < r->head.count; i++) {
        request_sequence item = r->sequences[i];
        uint64_t filled = item.tokens % facts->layout->page_tokens;
        demand(item.keys_known <= filled && item.values_known <= (attends ? filled : 0), "tail");
        rows += item.rows;
        if (tails) keys += request_key_bytes(facts, &item);
        if (attends) values += request_value_bytes(facts, &item);
    }
    demand(rows == rows_wanted, "number of rows");
    return sum_of(r->queries, r->query_bytes) + sum_of(r->keys, keys) + sum_of(r->values, values);
}

static uint64_t walk_select(const request *r, const request_facts *facts) {
    const request_select *s = &r->select;
    demand(s->layer == r->layer && s->q_heads, "layer");
    demand(s->q_heads % facts->layout->kv_heads == 0, "heads");
    demand(isfinite(s->scale) && s->scale > 0 && s->errors >= 0, "number");
    return sum_of(r->selecting.by.budgets, s->budget_count * sizeof(cxlkv_budget)) +
           walk_rows(r, facts, s->rows, false);
}

static uint64_t walk_attend(const request *r, const request_facts *facts) {
    const request_attend *a = &r->attend;
    const cxlkv_picked *picked = &r->attending.picked;
    const int32_t *page = picked->pages;
    uint64_t lists = 0;
    demand(a->layer == r->layer && a->q_heads, "layer");
    demand(a->q_heads % facts->layout->kv_heads == 0, "heads");
    demand(isfinite(a->scale) && a->scale > 0 && isfinite(a->softcap) && a->softcap >= 0, "number");
    demand(isfinite(a->error) && a->error >= 0, "error");
    demand(a->parts && (a->k == 0 || a->lists), "list");
    demand(a->mass <= 1, "mass");
    for (uint32_t i = 0; a->lists && i < r->head.count; i++) {
        request_sequence item = r->sequences[i];
        uint64_t mine = a->per == CXLKV_PER_QUERY ? item.rows : 1;
        lists += mine;
        for (uint64_t n = mine * facts->layout->kv_heads * a->k; n; n--, page++) {
            uint64_t first = *page < 0 ? 0 : (uint64_t)*page * facts->layout->page_tokens;
            demand(*page >= -1 && (*page < 0 || first < item.tokens), "page");
        }
    }
    demand(lists == a->lists, "number of lists");
    lists *= facts->layout->kv_heads;
    demand(!picked->log_weights == !a->weight_tokens, "log-weights");
    demand(!picked->row_keys == !a->virtual_rows, "virtual rows");
    demand(a->weight_tokens <= 1 || a->weight_tokens == facts->layout->page_tokens, "log-weights");
    demand(lists || !(a->weight_tokens || a->virtual_rows), "more without lists");
    uint64_t more = sum_of(picked->log_weights, 4 * lists * a->k * a->weight_tokens);
    more += sum_of(picked->row_keys, 4 * lists * a->virtual_rows * facts->layout->head_dim);
    more += sum_of(picked->row_values, 4 * lists * a->virtual_rows * facts->layout->value_head_dim);
    more += sum_of(picked->row_log_counts, 4 * lists * a->virtual_rows);
    return more + walk_rows(r, facts, a->rows, true);
}

static uint64_t walk_part(const request *r) {
    demand(r->part.offset + r->part_length <= REQUEST_BYTES_MAX, "part");
    return sum_of(r->part_bytes, r->part_length);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length) {
    static const cxlkv_layout layouts[] = {
        {.layers = 3, .kv_heads = 2, .head_dim = 4, .value_head_dim = 3, .page_tokens = 4,
         .dtype = CXLKV_FLOAT32, .sketch = 1},
        {.layers = 1, .kv_heads = 1, .head_dim = 3, .value_head_dim = 2, .page_tokens = 16,
         .dtype = CXLKV_BFLOAT16},
        {.layers = 1, .kv_heads = 1, .head_dim = 3, .value_head_dim = 5, .page_tokens = 16,
         .dtype = CXLKV_BFLOAT16}};
    static const request_facts pools[] = {
        {.layout = &layouts[0], .value_dim = 3, .page_count = 100, .part_count = 2},
        {.layout = &layouts[1], .page_count = 1, .part_count = 1}, /* values are in the keys */
        {.layout = &layouts[2], .value_dim = 5, .page_count = 1, .part_count = 1,
         .key_pieces_bytes = 64, .value_pieces_bytes = 128}}; /* a pool with an encoding */
    accepted = 0;
    for (size_t i = 0; i < sizeof(pools) / sizeof(pools[0]); i++) {
        request r;
        if (request_parse(bytes, length, &pools[i], &r) < 0) continue;
        accepted++;
        if (r.head.operation == REQUEST_TABLES) fuzz_seen += walk_tables(&r, &pools[i]);
        if (r.head.operation == REQUEST_SELECT || r.head.operation == REQUEST_CHOOSE)
            fuzz_seen += walk_select(&r, &pools[i]);
        if (r.head.operation == REQUEST_PART) fuzz_seen += walk_part(&r);
        if (r.head.operation == REQUEST_ATTEND) fuzz_seen += walk_attend(&r, &pools[i]);
    }
    return 0;
}
