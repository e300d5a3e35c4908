/* Goal: an address that is NULL, where a count says that there is something, is an error of the
 * call, names what lacks, and changes nothing; where the count is 0 it is none. Method: the calls
 * of the interface that take memory, each with each of its addresses NULL. */
#include "check.h"
#include "object_tests.h"

enum { TOKENS = 5 * TEST_PAGE_TOKENS + 1, ROWS = 2 };

#define REFUSED(name, call)                                                              \
    do {                                                                                 \
        CHECK((call) == -CXLKV_E_ARGUMENT);                                              \
        CHECK(strncmp(cxlkv_error_text(), name ": no address", strlen(name) + 12) == 0); \
    } while (0)

/* Of arguments `right` but for the change. */
#define REFUSED_WITH(name, change, call) \
    do {                                 \
        args = right;                    \
        change;                          \
        REFUSED(name, call);             \
    } while (0)

static uint8_t bytes[4096];
static uint32_t words[64];
static uint64_t longs[64];
static int64_t numbers[64];
static int32_t codes[64];
static float floats[64 * TEST_DIM];

static void test_keys(cxlkv_pool *pool, cxlkv_sequence *sequence) {
    cxlkv_sequence *made;
    cxlkv_match_args args = {.count = 1, .lease_s = 1};
    const uint64_t ends[1] = {3};
    REFUSED("ids", cxlkv_page_keys(NULL, 8, 4, CXLKV_KEYS_CHAINED, bytes, bytes));
    REFUSED("root", cxlkv_page_keys(numbers, 8, 4, CXLKV_KEYS_CHAINED, NULL, bytes));
    REFUSED("keys", cxlkv_page_keys(numbers, 8, 4, CXLKV_KEYS_CONTENT, bytes, NULL));
    CHECK(cxlkv_page_keys(NULL, 3, 4, CXLKV_KEYS_CHAINED, NULL, NULL) == 0);
    REFUSED("ids", cxlkv_page_keys(NULL, 1, 0, CXLKV_KEYS_TAIL, bytes, bytes));
    REFUSED("root", cxlkv_page_keys(numbers, 1, 0, CXLKV_KEYS_TAIL, NULL, bytes));
    REFUSED("keys", cxlkv_page_keys(numbers, 1, 0, CXLKV_KEYS_TAIL, bytes, NULL));
    REFUSED("names", cxlkv_object_keys(NULL, ends, 1, bytes, bytes));
    REFUSED("ends", cxlkv_object_keys(bytes, NULL, 1, bytes, bytes));
    REFUSED("root", cxlkv_object_keys(bytes, ends, 1, NULL, bytes));
    REFUSED("keys", cxlkv_object_keys(bytes, ends, 1, bytes, NULL));
    REFUSED("hashes", cxlkv_publish(sequence, 1, TEST_PAGE_TOKENS, NULL, 0));
    REFUSED("key", cxlkv_publish_tail(sequence, TOKENS, bytes, NULL));
    REFUSED("hashes", cxlkv_match(pool, &args, &made));
    args = (cxlkv_match_args){.ids = numbers, .id_count = 4, .lease_s = 1};
    REFUSED("root", cxlkv_match(pool, &args, &made));
    REFUSED("hashes", cxlkv_mark(pool, 1, NULL, CXLKV_MARK_PIN, 1));
    REFUSED("hashes", cxlkv_mark(pool, 1, NULL, CXLKV_MARK_PRIORITY_AT_LEAST, 1));
    REFUSED("hashes", cxlkv_forget(pool, 1, NULL, NULL));
    CHECK(cxlkv_forget(pool, 0, NULL, NULL) == 0);
    REFUSED("flags", cxlkv_evictable(pool, NULL, 1 << 20));
    REFUSED("bytes", cxlkv_sequence_adopt(pool, NULL, 64, &made));
}

static void test_pages(cxlkv_pool *pool, cxlkv_sequence *sequence) {
    cxlkv_overview overview;
    REFUSED("pages", cxlkv_pages_alloc(pool, 1, NULL));
    REFUSED("pages", cxlkv_pages_free(pool, 1, NULL));
    REFUSED("pages", cxlkv_sequence_pages(sequence, NULL, 1));
    CHECK(cxlkv_sequence_pages(sequence, NULL, 0) == TOKENS / TEST_PAGE_TOKENS);
    for (int i = 0; i < 5; i++)
        CHECK(cxlkv_sequence_places(sequence, 0, 0, 1, i == 0 ? NULL : numbers,
                                    i == 1 ? NULL : numbers, i == 2 ? NULL : numbers,
                                    i == 3 ? NULL : words,
                                    i == 4 ? NULL : longs) == -CXLKV_E_ARGUMENT);
    REFUSED("counts", cxlkv_hotness_read(pool, 0, 1, NULL, words));
    REFUSED("epochs", cxlkv_hotness_read(pool, 0, 1, words, NULL));
    REFUSED("rows", cxlkv_pool_published(pool, NULL, 1, longs));
    REFUSED("rows", cxlkv_pool_hosts(pool, NULL, 1));
    REFUSED("processes", cxlkv_inspect(pool, NULL, &overview, NULL, 1));
    REFUSED("processes", cxlkv_inspect(NULL, "/nowhere", &overview, NULL, 1));
    REFUSED("pages", cxlkv_pages_wanted(pool, NULL, 1 << 20));
    CHECK(cxlkv_pool_check(pool, 0, NULL, 64) == -CXLKV_E_ARGUMENT);
    REFUSED("pages", cxlkv_records_read(pool, 1, NULL, longs, bytes, codes));
    REFUSED("generations", cxlkv_records_read(pool, 1, words, NULL, bytes, codes));
    REFUSED("bytes", cxlkv_records_read(pool, 1, words, longs, NULL, codes));
    REFUSED("codes", cxlkv_records_read(pool, 1, words, longs, bytes, NULL));
    REFUSED("bytes", cxlkv_records_write(pool, 1, NULL, NULL, codes));
    REFUSED("codes", cxlkv_records_write(pool, 1, bytes, NULL, NULL));
    REFUSED("hashes", cxlkv_names(pool, 1, NULL, 1, bytes));
    REFUSED("names", cxlkv_names(pool, 1, bytes, 1, NULL));
    REFUSED("names", cxlkv_find_pages(pool, 1, NULL, words, longs));
    REFUSED("pages", cxlkv_find_pages(pool, 1, bytes, NULL, longs));
    REFUSED("generations", cxlkv_find_pages(pool, 1, bytes, words, NULL));
    REFUSED("pages", cxlkv_forget_pages(pool, 1, NULL, longs, 0, codes));
    REFUSED("generations", cxlkv_forget_pages(pool, 1, words, NULL, 0, codes));
    REFUSED("codes", cxlkv_forget_pages(pool, 1, words, longs, 0, NULL));
    REFUSED("scores", cxlkv_evict_order(1, bytes, NULL, words, words, bytes, 1, words));
    REFUSED("chosen", cxlkv_evict_order(1, bytes, floats, words, words, bytes, 1, NULL));
    REFUSED("found", cxlkv_word_wait(numbers, 0, 0, NULL));
}

static void test_tier(cxlkv_pool *pool, cxlkv_batch *batch) {
    const int32_t starts[2] = {0, 1}, pages[TEST_HEADS] = {0};
    cxlkv_picked picked = {.lists = 1, .k = 1, .per = CXLKV_PER_SEQUENCE};
    CHECK(cxlkv_local_make(pool, 1 << 20) == 0);
    REFUSED("units", cxlkv_local_move(pool, 0, 1, NULL, NULL, codes));
    REFUSED("codes", cxlkv_local_move(pool, 0, 1, numbers, NULL, NULL));
    REFUSED("units", cxlkv_local_move(pool, 1, 1, NULL, NULL, NULL));
    REFUSED("units", cxlkv_local_hotness(pool, NULL, words, bytes, 1));
    REFUSED("counts", cxlkv_local_hotness(pool, numbers, NULL, bytes, 1));
    REFUSED("resident", cxlkv_local_hotness(pool, numbers, words, NULL, 1));
    REFUSED("pages", cxlkv_batch_chosen(batch, 0, &picked, starts, 0, numbers));
    picked.pages = pages;
    REFUSED("units", cxlkv_batch_chosen(batch, 0, &picked, starts, 0, NULL));
    CHECK(cxlkv_local_make(pool, 0) == 0);
}

static void test_blocks(cxlkv_batch *batch) {
    const int32_t starts[2] = {0, 1};
    cxlkv_blocks table = {.keys = bytes, .values = bytes, .block_count = 1,
                          .block_tokens = TEST_PAGE_TOKENS, .dtype = CXLKV_FLOAT32,
                          .starts = starts};
    REFUSED("blocks", cxlkv_batch_append_blocks(batch, 0, &table, -1));
    REFUSED("blocks", cxlkv_batch_fetch_blocks(batch, 0, &table, codes, codes));
    REFUSED("first", cxlkv_batch_fetch_blocks(batch, 0, &table, NULL, codes));
    REFUSED("good", cxlkv_batch_fetch_blocks(batch, 0, &table, codes, NULL));
}

static void test_select(cxlkv_batch *batch) {
    const int32_t starts[2] = {0, 1};
    const cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = 1};
    const cxlkv_select_args right = {.q_heads = TEST_HEADS, .queries = test_rows_at(floats),
                                     .starts = starts, .by = {.budgets = &budget, .budget_count = 1,
                                            .per = CXLKV_PER_SEQUENCE}, .scale = 1, .capacity = 64,
                                     .pages = codes, .scores = floats, .counts = codes};
    cxlkv_select_args args;
    REFUSED_WITH("queries", args.queries.data = NULL, cxlkv_batch_select(batch, &args));
    REFUSED_WITH("budgets", args.by.budgets = NULL, cxlkv_batch_select(batch, &args));
    args.asks = 1;
    REFUSED("budgets", cxlkv_batch_select(batch, &args));
    REFUSED_WITH("pages", args.pages = NULL, cxlkv_batch_select(batch, &args));
    REFUSED_WITH("scores", args.scores = NULL, cxlkv_batch_select(batch, &args));
    REFUSED_WITH("counts", args.counts = NULL, cxlkv_batch_select(batch, &args));
}

static void test_attend(cxlkv_batch *batch) {
    const int32_t starts[2] = {0, 1}, none[2] = {0, 0};
    const int32_t pages[TEST_HEADS] = {0};
    const cxlkv_attend_args right = {.q_heads = TEST_HEADS, .queries = test_rows_at(floats),
                                     .starts = starts, .scale = 1, .out = floats, .lse = floats};
    cxlkv_attend_args args;
    REFUSED_WITH("queries", args.queries.data = NULL, cxlkv_batch_attend(batch, &args));
    REFUSED_WITH("out", args.out = NULL, cxlkv_batch_attend(batch, &args));
    REFUSED_WITH("lse", args.lse = NULL, cxlkv_batch_attend(batch, &args));
    args = right;
    args.picked = (cxlkv_picked){.pages = pages, .lists = 1, .k = 1, .per = CXLKV_PER_SEQUENCE,
                                 .row_count = 1};
    REFUSED("row_keys", cxlkv_batch_attend(batch, &args));
    args = (cxlkv_attend_args){.q_heads = TEST_HEADS, .starts = none, .scale = 1};
    CHECK(cxlkv_batch_attend(batch, &args) == 0);
}

static void test_fetch(cxlkv_batch *batch) {
    cxlkv_fetch_args args = {.values = bytes, .key_capacity_bytes = sizeof(bytes),
                             .value_capacity_bytes = sizeof(bytes)};
    REFUSED("keys", cxlkv_batch_fetch(batch, &args));
    args.keys = bytes;
    args.values = NULL;
    REFUSED("values", cxlkv_batch_fetch(batch, &args));
}

/* Before the tokens are there. */
static void test_decode(cxlkv_batch *batch, cxlkv_sequence *sequence) {
    const int32_t starts[2] = {0, 1};
    const cxlkv_decode_args right = {
        .q_heads = TEST_HEADS, .queries = test_rows_at(floats), .keys = test_rows_at(floats),
        .values = test_rows_at(floats), .starts = starts, .rewind = -1, .scale = 1, .out = floats,
        .lse = floats};
    cxlkv_decode_args args;
    REFUSED_WITH("out", args.out = NULL, cxlkv_batch_decode(batch, &args));
    REFUSED_WITH("lse", args.lse = NULL, cxlkv_batch_decode(batch, &args));
    REFUSED_WITH("queries", args.queries.data = NULL, cxlkv_batch_decode(batch, &args));
    REFUSED_WITH("budgets", args.by.budget_count = 1, cxlkv_batch_decode(batch, &args));
    args = right;
    args.keys.data = NULL;
    CHECK(cxlkv_batch_decode(batch, &args) == -CXLKV_E_ARGUMENT && !args.appended);
    CHECK(cxlkv_sequence_tokens(sequence, 0) == TOKENS);
}

static void test_objects(void) {
    cxlkv_pool *pool = object_pool(NULL, 4096, true, 1 << 22, 1);
    cxlkv_lease *lease = NULL;
    const object_key key = key_of(1);
    const uint64_t none[1] = {0}, at[1] = {(uintptr_t)bytes}, sizes[1] = {64};
    const cxlkv_buffers right = {.addresses = at, .sizes = sizes};
    const cxlkv_buffers wrong[] = {{.sizes = sizes}, {.addresses = at},
                                   {.addresses = none, .sizes = sizes},
                                   {.addresses = at, .sizes = sizes, .form_count = 1}};
    const cxlkv_range range = {.bytes = 8};
    for (uint32_t i = 0; i < 4; i++)
        CHECK(cxlkv_objects_put(pool, 1, key.bytes, &wrong[i], 0, codes) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_objects_put(pool, 1, key.bytes, &right, 0, codes) == 1);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(cxlkv_objects_get(pool, 1, key.bytes, &wrong[i], numbers) == -CXLKV_E_ARGUMENT);
    REFUSED("a buffer", cxlkv_objects_get(pool, 1, key.bytes, &wrong[2], numbers));
    REFUSED("keys", cxlkv_objects_put(pool, 1, NULL, &right, 0, codes));
    REFUSED("results", cxlkv_objects_put(pool, 1, key.bytes, &right, 0, NULL));
    REFUSED("results", cxlkv_objects_get(pool, 1, key.bytes, &right, NULL));
    REFUSED("keys", cxlkv_objects_get(pool, 1, NULL, NULL, numbers));
    REFUSED("sizes", cxlkv_objects_get(pool, 1, key.bytes, NULL, NULL));
    REFUSED("keys", cxlkv_objects_ranges(pool, 1, NULL, 1, &range, bytes, 64, numbers));
    REFUSED("ranges", cxlkv_objects_ranges(pool, 1, key.bytes, 1, NULL, bytes, 64, numbers));
    REFUSED("to", cxlkv_objects_ranges(pool, 1, key.bytes, 1, &range, NULL, 64, numbers));
    REFUSED("sizes", cxlkv_objects_ranges(pool, 1, key.bytes, 1, &range, bytes, 64, NULL));
    REFUSED("keys", cxlkv_lease_take(pool, 1, NULL, longs, numbers, &lease));
    REFUSED("addresses", cxlkv_lease_take(pool, 1, key.bytes, NULL, numbers, &lease));
    REFUSED("sizes", cxlkv_lease_take(pool, 1, key.bytes, longs, NULL, &lease));
    REFUSED("sizes", cxlkv_lease_reserve(pool, 1, NULL, longs, &lease));
    REFUSED("addresses", cxlkv_lease_reserve(pool, 1, sizes, NULL, &lease));
    CHECK(!lease && cxlkv_lease_reserve(pool, 1, sizes, longs, &lease) == 1);
    REFUSED("places", cxlkv_lease_publish(lease, 1, NULL, key.bytes, codes));
    REFUSED("keys", cxlkv_lease_publish(lease, 1, words, NULL, codes));
    REFUSED("codes", cxlkv_lease_publish(lease, 1, words, key.bytes, NULL));
    cxlkv_lease_destroy(&lease);
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    uint64_t marks[TOKENS];
    cxlkv_pool *pool = test_pool(NULL, 16);
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence), *none;
    REFUSED("sequences", cxlkv_batch_create(pool, 1, NULL, &none));
    test_keys(pool, sequence);
    test_pages(pool, sequence);
    test_tier(pool, batch);
    test_blocks(batch);
    test_select(batch);
    test_attend(batch);
    test_fetch(batch);
    test_decode(batch, sequence);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    cxlkv_batch_destroy(&batch);
    cxlkv_sequence_destroy(&sequence);
    cxlkv_pool_destroy(&pool);
    test_objects();
    return 0;
}
