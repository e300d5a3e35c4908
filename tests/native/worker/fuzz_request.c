/* Whatever bytes a request has, the parser reads within them, and what it accepts is in range.
 *
 * `make fuzz` builds this for libFuzzer. As a test it goes through the corpus, each file also cut
 * short and with each byte changed, under the sanitizers of `make native-test`. */
#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker/request.h"

static void demand(bool claim, const char *what) {
    if (claim) return;
    fprintf(stderr, "a request was accepted with a wrong %s\n", what);
    abort();
}

static uint64_t sum_of(const void *array, uint64_t count) {
    const uint8_t *bytes = array;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += bytes[i];
    return sum;
}

volatile uint64_t fuzz_seen; /* so that what is read is needed */
static int accepted; /* by how many of the pools, the last time */

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
    demand(r->layer < facts->layers, "layer");
    for (uint32_t i = 0; i < r->head.count; i++) {
        request_sequence item = r->sequences[i];
        uint64_t filled = item.tokens % facts->page_tokens;
        demand(item.keys_known <= filled && item.values_known <= (attends ? filled : 0), "tail");
        rows += item.rows;
        keys += request_key_bytes(facts, &item);
        if (attends) values += request_value_bytes(facts, &item);
    }
    demand(rows == rows_wanted, "number of rows");
    return sum_of(r->queries, r->query_bytes) + sum_of(r->keys, keys) + sum_of(r->values, values);
}

static uint64_t walk_select(const request *r, const request_facts *facts) {
    const request_select *s = &r->select;
    demand(s->layer == r->layer && s->q_heads % facts->kv_heads == 0 && s->q_heads, "layer");
    demand(isfinite(s->scale) && s->scale > 0 && s->errors >= 0, "number");
    return sum_of(r->budgets, s->budget_count * sizeof(cxlkv_budget)) +
           walk_rows(r, facts, s->rows, false);
}

static uint64_t walk_attend(const request *r, const request_facts *facts) {
    const request_attend *a = &r->attend;
    const int32_t *page = r->pages;
    uint64_t lists = 0;
    demand(a->layer == r->layer && a->q_heads % facts->kv_heads == 0 && a->q_heads, "layer");
    demand(isfinite(a->scale) && a->scale > 0 && isfinite(a->softcap) && a->softcap >= 0, "number");
    demand(a->parts && (a->k == 0 || a->lists), "list");
    for (uint32_t i = 0; a->lists && i < r->head.count; i++) {
        request_sequence item = r->sequences[i];
        uint64_t mine = a->per == CXLKV_PER_QUERY ? item.rows : 1;
        lists += mine;
        for (uint64_t n = mine * facts->kv_heads * a->k; n; n--, page++)
            demand(*page >= -1 &&
                   (*page < 0 || (uint64_t)*page * facts->page_tokens < item.tokens), "page");
    }
    demand(lists == a->lists, "number of lists");
    return walk_rows(r, facts, a->rows, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length) {
    static const request_facts pools[] = {
        {.layers = 3, .kv_heads = 2, .head_dim = 4, .page_tokens = 4, .dtype = CXLKV_FLOAT32,
         .value_dim = 3, .sketch = 1, .page_count = 100, .part_count = 2},
        {.layers = 1, .kv_heads = 1, .head_dim = 3, .page_tokens = 16, .dtype = CXLKV_BFLOAT16,
         .page_count = 1, .part_count = 1}}; /* its values are in the keys */
    accepted = 0;
    for (size_t i = 0; i < sizeof(pools) / sizeof(pools[0]); i++) {
        request r;
        if (request_parse(bytes, length, &pools[i], &r) < 0) continue;
        accepted++;
        if (r.head.operation == REQUEST_TABLES) fuzz_seen += walk_tables(&r, &pools[i]);
        if (r.head.operation == REQUEST_SELECT) fuzz_seen += walk_select(&r, &pools[i]);
        if (r.head.operation == REQUEST_ATTEND) fuzz_seen += walk_attend(&r, &pools[i]);
    }
    return 0;
}

#ifndef FUZZ
/* On an allocation of just that length, so that a byte more is seen. */
static void try_bytes(const uint8_t *bytes, size_t length) {
    uint8_t *own = malloc(length ? length : 1);
    if (!own) abort();
    memcpy(own, bytes, length);
    LLVMFuzzerTestOneInput(own, length);
    free(own);
}

/* A seed that no pool takes would show nothing of what lies behind the first checks. */
static void demand_seed(const char *path) {
    if (accepted) return;
    fprintf(stderr, "%s: %s\n", path, cxlkv_error_text());
    abort();
}

static void try_file(const char *path) {
    uint8_t bytes[8192];
    FILE *file = fopen(path, "rb");
    if (!file) abort();
    size_t length = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    try_bytes(bytes, length);
    demand_seed(path);
    for (size_t cut = 0; cut <= length; cut++) try_bytes(bytes, cut);
    for (size_t at = 0; at < length; at++)
        for (int change = 0; change < 3; change++) {
            uint8_t before = bytes[at];
            bytes[at] = change == 0 ? (uint8_t)~before : change == 1 ? 0 : (uint8_t)(before + 1);
            try_bytes(bytes, length);
            bytes[at] = before;
        }
}

int main(void) {
    DIR *folder = opendir(REQUEST_CORPUS);
    int count = 0;
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof(path), "%s/%s", REQUEST_CORPUS, entry->d_name);
        try_file(path);
        count++;
    }
    if (folder) closedir(folder);
    if (count == 0) {
        fprintf(stderr, "no corpus in %s\n", REQUEST_CORPUS);
        return 1;
    }
    printf("%d requests, cut and changed\n", count);
    return 0;
}
#endif
