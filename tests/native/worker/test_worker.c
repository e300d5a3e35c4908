/* The worker answers each wrong request with an error that names the cause, and lives on: requests
 * are made by hand here, as a client that is broken, or worse, would send them. */
#include <math.h>

#include "check.h"
#include "worker/file.h"

enum { PAGES = 64, BYTES = 8192, TOKENS = 4 * TEST_PAGE_TOKENS + 1 };

typedef struct made {
    cxlkv_pool *pool, *served;   /* the client's, and the worker's own */
    cxlkv_worker *worker;
    worker_file file;
    rpc_slot slot;
    cxlkv_sequence *sequence;
    uint64_t marks[TOKENS];
    uint8_t request[BYTES], response[BYTES];
    uint64_t bytes;
    uint64_t version;            /* of table 0 */
} made;

static void put(made *m, const void *from, uint64_t bytes) {
    CHECK(m->bytes + bytes <= BYTES);
    memcpy(m->request + m->bytes, from, bytes);
    m->bytes += bytes;
}

static void begin(made *m, uint32_t operation, uint32_t count) {
    request_head head = {REQUEST_MAGIC, operation, 0, count};
    m->bytes = 0;
    put(m, &head, sizeof(head));
}

static void send_unserved(made *m, uint32_t operation) {
    while (m->bytes % 8) m->request[m->bytes++] = 0;
    uint32_t bytes = (uint32_t)m->bytes;
    memcpy(m->request + offsetof(request_head, bytes), &bytes, 4);
    CHECK(rpc_send(&m->slot, operation, m->request, bytes) == 0);
}

static void send_bytes(made *m, uint32_t operation) {
    send_unserved(m, operation);
    while (cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
}

/* The code of the answer that is there. */
static int answer(made *m) {
    uint32_t length = 0;
    answer_head head;
    CHECK(rpc_receive(&m->slot, m->response, &length) == 1);
    CHECK(length >= sizeof(head));
    memcpy(&head, m->response, sizeof(head));
    m->response[length < BYTES ? length : BYTES - 1] = 0;
    return head.code;
}

/* Sends what was put, has it served, and returns the answer's code. */
static int ask_bytes(made *m, uint32_t operation) {
    send_bytes(m, operation);
    return answer(m);
}

static const char *text(const made *m) { return (const char *)m->response + sizeof(answer_head); }

/* The code of an answer, and what its text has. */
#define SAYS(call, code, said)            \
    do {                                  \
        CHECK((call) == (code));          \
        CHECK(strstr(text(m), said));     \
    } while (0)

static void put_entry(made *m, uint32_t page, uint64_t generation) {
    put(m, &generation, 8);
    put(m, &page, 4);
}

/* A table of the sequence's pages; `wrong` of them has another generation, or is another page. */
static int tell(made *m, uint32_t table, uint64_t from, uint64_t to, uint32_t kept, uint32_t added,
                uint32_t wrong_generation, uint32_t other_page) {
    request_table item = {.table = table, .from = from, .to = to, .kept = kept, .added = added};
    begin(m, REQUEST_TABLES, 1);
    put(m, &item, sizeof(item));
    for (uint32_t i = kept; i < kept + added; i++) {
        uint32_t page = sequence_page(m->sequence, 0, i % m->sequence->page_count);
        uint64_t generation = m->pool->pages[page].generation + (i == wrong_generation);
        put_entry(m, i == other_page ? PAGES - 1 : page, generation);
    }
    return ask_bytes(m, REQUEST_TABLES);
}

static int tell_item(made *m, request_table item) {
    begin(m, REQUEST_TABLES, 1);
    put(m, &item, sizeof(item));
    return ask_bytes(m, REQUEST_TABLES);
}

static request_select plain_select(void) {
    return (request_select){.q_heads = TEST_HEADS, .dtype = CXLKV_FLOAT32, .scale = 1, .errors = 1,
                            .rows = 1, .budget_count = 1, .k_max = 8};
}

/* Rows of a query, or a token of a tail; the first channels are `first`. */
static void put_rows(made *m, uint64_t count, float first) {
    float row[TEST_HEADS][TEST_DIM] = {{0}};
    for (uint32_t head = 0; head < TEST_HEADS; head++) row[head][0] = first;
    for (; count; count--) put(m, row, sizeof(row));
}

static int ask(made *m, request_select select, uint64_t version, uint64_t tokens,
               uint32_t keys_known) {
    request_sequence item = {.table = 0, .rows = select.rows, .version = version,
                             .tokens = tokens, .keys_known = keys_known};
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = 2};
    begin(m, REQUEST_SELECT, 1);
    put(m, &select, sizeof(select));
    put(m, &item, sizeof(item));
    put(m, &budget, sizeof(budget));
    put_rows(m, 1, 1);
    put_rows(m, tokens % TEST_PAGE_TOKENS - keys_known, 2);
    return ask_bytes(m, REQUEST_SELECT);
}

static request_attend plain_attend(void) {
    return (request_attend){.q_heads = TEST_HEADS, .dtype = CXLKV_FLOAT32, .scale = 1, .rows = 1,
                            .parts = 1};
}

/* Of a list of two pages for each head: log-weights, then virtual rows with the keys 0 and, in
 * their first channel, the values 9. */
static float log_weight, log_count;
static void put_more(made *m, const request_attend *attend) {
    float row[TEST_DIM] = {0}, value[TEST_DIM] = {9};
    uint64_t weights = 2ull * TEST_HEADS * min_u32(attend->weight_tokens, TEST_PAGE_TOKENS);
    uint64_t rows = (uint64_t)TEST_HEADS * min_u32(attend->virtual_rows, 4);
    for (uint64_t i = 0; i < weights; i++) put(m, &log_weight, sizeof(log_weight));
    for (uint64_t i = 0; i < rows; i++) put(m, row, sizeof(row));
    for (uint64_t i = 0; i < rows; i++) put(m, value, sizeof(value));
    for (uint64_t i = 0; i < rows; i++) put(m, &log_count, sizeof(log_count));
    while (m->bytes % 8) m->request[m->bytes++] = 0;
}

/* With a list of two pages for each head, or without any. */
static int attend(made *m, request_attend attend, uint64_t tokens, uint32_t keys_known,
                  uint32_t values_known, const int32_t *pages) {
    request_sequence item = {.table = 0, .rows = 1, .version = m->version, .tokens = tokens,
                             .keys_known = keys_known, .values_known = values_known};
    begin(m, REQUEST_ATTEND, 1);
    put(m, &attend, sizeof(attend));
    put(m, &item, sizeof(item));
    for (uint32_t head = 0; pages && head < TEST_HEADS; head++)
        put(m, pages, 2 * sizeof(*pages));
    while (m->bytes % 8) m->request[m->bytes++] = 0;
    if (pages) put_more(m, &attend);
    put_rows(m, 1, 1);
    put_rows(m, tokens % TEST_PAGE_TOKENS - keys_known, 2);
    put_rows(m, tokens % TEST_PAGE_TOKENS - values_known, 5);
    return ask_bytes(m, REQUEST_ATTEND);
}

/* The first channel of head 0 in the answer's output. */
static float first_out(const made *m) {
    float out;
    uint64_t at = sizeof(answer_head) + sizeof(answer_attend) + TEST_HEADS * sizeof(float);
    memcpy(&out, m->response + at, sizeof(out));
    return out;
}

static void connect_client(made *m) {
    uint32_t slot;
    CHECK(worker_file_open(m->pool, &m->file) == 0);
    CHECK(worker_claim(&m->file, &slot) == 0);
    m->slot = (rpc_slot){.mode = VISIBILITY_COHERENT, .same_host = true};
    CHECK(rpc_client(&m->slot, worker_slot(&m->file, slot), BYTES, BYTES) == 0);
}

static void make(made *m) {
    const char *path = test_path("worker");
    m->pool = test_pool(path, PAGES);
    CHECK(cxlkv_pool_open(path, NULL, &m->served) == 0);
    CHECK(cxlkv_worker_make(m->served, 2, BYTES, BYTES, 0, &m->worker) == 0);
    connect_client(m);
    m->sequence = test_written(m->pool, m->marks, 1, TOKENS);
}

static void unmake(made *m) {
    char path[128];
    snprintf(path, sizeof(path), "%s", m->pool->path);
    worker_file_close(&m->file);
    cxlkv_worker_destroy(&m->worker);
    cxlkv_pool_destroy(&m->served);
    cxlkv_sequence_destroy(&m->sequence);
    test_clean(m->pool);
    CHECK(test_stats(m->pool).pages.held == 0);
    test_remove(&m->pool, path);
}

static void wrong_tables(made *m) {
    CHECK(tell(m, 0, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0);
    CHECK(tell(m, 0, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0); /* once more: nothing happens */
    m->version = 1;
    SAYS(tell(m, 1, 0, 2, 0, 4, 2, NO_PAGE), -CXLKV_E_STALE, "stale handle: page");
    CHECK(tell(m, 1, 0, 2, 0, 4, NO_PAGE, 3) == -CXLKV_E_STALE); /* free, or of another */
    SAYS(tell(m, 1, 5, 6, 4, 0, NO_PAGE, NO_PAGE), -CXLKV_E_STALE, "table 1 is not at version 5");
    CHECK(tell(m, 0, 1, 2, 5, 0, NO_PAGE, NO_PAGE) == -CXLKV_E_STALE); /* it has 4 */
    CHECK(tell(m, REQUEST_TABLES_MAX, 0, 1, 0, 1, NO_PAGE, NO_PAGE) == -CXLKV_E_ARGUMENT);
    request_table item = {.from = 0, .to = 9, .first = 2, .kept = 2};
    SAYS(tell_item(m, item), -CXLKV_E_ARGUMENT, "has no window");
    item = (request_table){.to = 9, .added = 1};
    begin(m, REQUEST_TABLES, 1);
    put(m, &item, sizeof(item));
    put_entry(m, m->pool->host->page_count, 1);
    SAYS(ask_bytes(m, REQUEST_TABLES), -CXLKV_E_ARGUMENT, "request: page");
}

/* Far behind a window, where no page has to be named: each table takes 768 KiB for a list of
 * chunks, so a request of 16,384 tables, 640 KiB long, would reserve 12 GiB. */
static void tables_without_end(made *m) {
    enum { TABLES = 17, FIRST = REQUEST_PAGES_MAX - 1 };
    uint32_t window = m->served->layers.parts[0].window;
    m->served->layers.parts[0].window = 1;
    for (int turn = 0; turn < 2; turn++) {
        for (uint32_t i = 0; i < TABLES; i++) {
            request_table item = {.table = 1 + i, .to = 9, .first = FIRST, .kept = FIRST};
            CHECK(tell_item(m, item) == (i < TABLES - 1 ? 0 : -CXLKV_E_ARGUMENT));
        }
        CHECK(strstr(text(m), "at most 268435456 for one client"));
        for (uint32_t i = 0; i < TABLES; i++) /* the memory of those that go is there again */
            CHECK(tell_item(m, (request_table){.table = 1 + i}) == 0);
    }
    m->served->layers.parts[0].window = window;
    request_table item = {.table = 1, .from = 8, .to = 9, .kept = m->pool->host->page_count + 1};
    SAYS(tell_item(m, item), -CXLKV_E_ARGUMENT, "that there are");
}

/* `bad` is a good one but for the change. */
#define REFUSED(good, change, call)           \
    do {                                      \
        bad = good;                           \
        change;                               \
        CHECK((call) == -CXLKV_E_ARGUMENT);   \
    } while (0)

static void wrong_selects(made *m) {
    request_select good = plain_select(), bad;
    CHECK(ask(m, good, 1, TOKENS, 0) == 0);
    CHECK(ask(m, good, 1, TOKENS, 1) == 0); /* it has the key of the tail's token now */
    CHECK(ask(m, good, 1, TOKENS - 2, 1) == -CXLKV_E_STALE); /* of another page */
    SAYS(ask(m, good, 7, TOKENS, 0), -CXLKV_E_STALE, "table 0 is not at version 7");
    SAYS(ask(m, good, 1, TOKENS + TEST_PAGE_TOKENS, 0), -CXLKV_E_ARGUMENT, "has 4 pages");
    REFUSED(good, bad.layer = TEST_LAYERS, ask(m, bad, 1, TOKENS, 0));
    CHECK(strstr(text(m), "layer 2: the pool has 2"));
    REFUSED(good, bad.q_heads = 3, ask(m, bad, 1, TOKENS, 0));
    REFUSED(good, bad.scale = NAN, ask(m, bad, 1, TOKENS, 0));
    REFUSED(good, bad.errors = -1, ask(m, bad, 1, TOKENS, 0));
    bad = good, bad.method = CXLKV_METHOD_TWO_STAGE;
    CHECK(ask(m, bad, 1, TOKENS, 0) == 0);
    m->served->layers.shapes[0].layout.sketch = 0; /* as if its pool had no sketches */
    CHECK(ask(m, bad, 1, TOKENS, 0) == -CXLKV_E_ARGUMENT);
    m->served->layers.shapes[0].layout.sketch = 1;
    REFUSED(good, bad.budget_count = 2, ask(m, bad, 1, TOKENS, 0));
    bad = good, bad.k_max = 1;
    CHECK(ask(m, bad, 1, TOKENS, 0) == -CXLKV_E_ROOM);
    CHECK(ask(m, good, 1, TOKENS, 1) == 0);
}

/* So many lists of so many pages that their bytes, modulo 2^64, are those of one line. */
static void pages_beyond_64_bits(made *m) {
    request_attend attend = plain_attend();
    attend.rows = attend.lists = 631832658;
    attend.k = 3649452082;
    CHECK((uint64_t)attend.lists * attend.k * TEST_HEADS * sizeof(int32_t) == 32);
    enum { COUNT = 10 }; /* of the longest sequences that there are */
    request_sequence item = {.version = m->version,
                             .tokens = (uint64_t)REQUEST_PAGES_MAX * TEST_PAGE_TOKENS};
    begin(m, REQUEST_ATTEND, COUNT);
    put(m, &attend, sizeof(attend));
    for (uint32_t i = 0; i < COUNT; i++) {
        item.rows = attend.rows / COUNT + (i < attend.rows % COUNT);
        put(m, &item, sizeof(item));
    }
    put_rows(m, 1, 0);
    SAYS(ask_bytes(m, REQUEST_ATTEND), -CXLKV_E_ARGUMENT, "request: its pages end behind");
}

static void wrong_attends(made *m) {
    request_attend good = plain_attend(), bad, picks = good;
    const int32_t tail_only[] = {-1, 4}, elsewhere[] = {0, 5}, negative[] = {-2, 0};
    picks.lists = 1;
    picks.k = 2;
    CHECK(attend(m, good, TOKENS, 1, 1, NULL) == -CXLKV_E_STALE); /* its value never came */
    CHECK(strstr(text(m), "table 0 has 0 tokens of a layer, not 17"));
    CHECK(attend(m, good, TOKENS, 1, 0, NULL) == 0);
    CHECK(attend(m, good, TOKENS, 1, 1, NULL) == 0);
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == 0);
    CHECK(first_out(m) == 5); /* the tail's value, and nothing else */
    request_attend halves = picks;
    halves.parts = 2;
    CHECK(attend(m, halves, TOKENS, 1, 1, tail_only) == 0);
    CHECK(first_out(m) == 5); /* one half of the list has it, the other has nothing */
    CHECK(attend(m, good, TOKENS - 2, 0, 1, NULL) == -CXLKV_E_STALE); /* of another page */
    CHECK(attend(m, picks, TOKENS, 1, 1, elsewhere) == -CXLKV_E_ARGUMENT);
    CHECK(strstr(text(m), "request: page 5 of sequence 0, which has 5"));
    CHECK(attend(m, picks, TOKENS, 1, 1, negative) == -CXLKV_E_ARGUMENT);
    REFUSED(picks, bad.lists = 3, attend(m, bad, TOKENS, 1, 1, tail_only));
    REFUSED(picks, bad.k = UINT32_MAX, attend(m, bad, TOKENS, 1, 1, tail_only));
    CHECK(strstr(text(m), "request: its pages end behind"));
    pages_beyond_64_bits(m);
    REFUSED(good, bad.k = 1, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(good, bad.parts = 0, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(good, bad.mass = 2, attend(m, bad, TOKENS, 1, 1, NULL));
    bad.parts = REQUEST_PARTS_MAX; /* in range, and more than there is work for */
    SAYS(attend(m, bad, TOKENS, 1, 1, NULL), -CXLKV_E_ARGUMENT, "pages in 1024 parts");
    for (int i = 0; i < 3; i++) {
        bad = good, bad.softcap = i == 0 ? NAN : i == 1 ? -1 : INFINITY;
        CHECK(attend(m, bad, TOKENS, 1, 1, NULL) == -CXLKV_E_ARGUMENT);
    }
    REFUSED(good, bad.scale = 0, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(good, bad.per = CXLKV_PER_SEQUENCE + 1, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(good, bad.rows = 2, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(good, bad.layer = TEST_LAYERS, attend(m, bad, TOKENS, 1, 1, NULL));
    CHECK(attend(m, good, TOKENS, 1, 1, NULL) == 0);
    /* A table that begins anew: what is known of its tail stays. */
    CHECK(tell(m, 0, 0, 2, 0, 4, NO_PAGE, NO_PAGE) == 0);
    m->version = 2;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == 0);
    CHECK(first_out(m) == 5);
    CHECK(tell(m, 0, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0);
    m->version = 1;
}

/* Tokens weigh nothing, so that the virtual rows are all there is, and the other way round. */
static void more_than_pages(made *m) {
    request_attend picks = plain_attend(), bad;
    const int32_t tail_only[] = {-1, 4};
    picks.lists = 1;
    picks.k = 2;
    picks.weight_tokens = TEST_PAGE_TOKENS;
    picks.virtual_rows = 3;
    log_weight = -INFINITY, log_count = 0;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == 0);
    CHECK(first_out(m) == 9);
    log_weight = 0, log_count = -INFINITY;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == 0);
    CHECK(first_out(m) == 5);
    picks.weight_tokens = 1;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == 0);
    REFUSED(picks, bad.weight_tokens = 2, attend(m, bad, TOKENS, 1, 1, tail_only));
    CHECK(strstr(text(m), "log_weights of 2 tokens a page"));
    REFUSED(picks, bad.weight_tokens = UINT32_MAX, attend(m, bad, TOKENS, 1, 1, tail_only));
    REFUSED(picks, bad.virtual_rows = 5, attend(m, bad, TOKENS, 1, 1, tail_only));
    REFUSED(picks, bad.virtual_rows = UINT32_MAX, attend(m, bad, TOKENS, 1, 1, tail_only));
    CHECK(strstr(text(m), "request: its virtual rows end behind"));
    REFUSED(picks, bad.virtual_rows = 0, attend(m, bad, TOKENS, 1, 1, NULL));
    REFUSED(picks, (bad.lists = bad.k = 0), attend(m, bad, TOKENS, 1, 1, NULL));
    CHECK(strstr(text(m), "3 virtual rows of no list"));
    log_count = NAN;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == -CXLKV_E_ARGUMENT);
    CHECK(strstr(text(m), "log_counts have NaN"));
    log_weight = INFINITY, log_count = 0;
    CHECK(attend(m, picks, TOKENS, 1, 1, tail_only) == -CXLKV_E_ARGUMENT);
    CHECK(strstr(text(m), "log_weights have NaN"));
    log_weight = 0;
}

static void wrong_others(made *m) {
    request_more more = {.result = 12345};
    begin(m, REQUEST_MORE, 0);
    put(m, &more, sizeof(more));
    SAYS(ask_bytes(m, REQUEST_MORE), -CXLKV_E_STALE, "result 12345 is gone");
    begin(m, REQUEST_LEAVE, 0);
    CHECK(ask_bytes(m, REQUEST_MORE) == -CXLKV_E_ARGUMENT); /* its slot says another operation */
    begin(m, 77, 0);
    CHECK(ask_bytes(m, 77) == -CXLKV_E_ARGUMENT);
    m->bytes = 0;
    put(m, "some sixteen bytes of text", 24);
    CHECK(ask_bytes(m, REQUEST_SELECT) == -CXLKV_E_ARGUMENT);
}

static void put_choose(made *m, request_select select, uint64_t tokens) {
    request_sequence item = {.rows = select.rows, .version = m->version, .tokens = tokens};
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = 2};
    begin(m, REQUEST_CHOOSE, 1);
    put(m, &select, sizeof(select));
    put(m, &item, sizeof(item));
    put(m, &budget, sizeof(budget));
    put_rows(m, 1, 1);
}

static int choose(made *m, request_select select, uint64_t tokens) {
    put_choose(m, select, tokens);
    return ask_bytes(m, REQUEST_CHOOSE);
}

/* A question waits for the program that serves, which answers, refuses or forgets it. */
static void questions(made *m) {
    const int32_t pages[TEST_HEADS * 2] = {0, 4, 3, -1};
    const float weights[TEST_HEADS * 2 * TEST_PAGE_TOKENS] = {0}, rows[TEST_HEADS * TEST_DIM] = {7};
    request_select good = plain_select(), bad;
    cxlkv_question got;
    uint64_t table = 0;
    cxlkv_choice choice = {.bytes_scored = 5, .bytes_fetched = 6,
                           .picked = {.pages = pages, .lists = 1, .k = 2}};
    good.method = CXLKV_METHOD_SCORER, good.scorer = 99;
    CHECK(cxlkv_worker_asked(m->worker, &got) == 0);
    CHECK(cxlkv_worker_answer(m->worker, &choice, 0, NULL) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_worker_answer(m->worker, NULL, CXLKV_E_BUSY, "") == -CXLKV_E_ARGUMENT);
    REFUSED(good, bad.method = CXLKV_METHOD_EXACT, choose(m, bad, TOKENS));
    REFUSED(good, bad.scale = NAN, choose(m, bad, TOKENS));
    REFUSED(good, bad.rows = 2, choose(m, bad, TOKENS));
    CHECK(choose(m, good, TOKENS + TEST_PAGE_TOKENS) == -CXLKV_E_ARGUMENT);
    put_choose(m, good, TOKENS); /* with a tail, which it must not have */
    put_rows(m, 1, 2);
    SAYS(ask_bytes(m, REQUEST_CHOOSE), -CXLKV_E_ARGUMENT, "bytes are left over");

    CHECK(ask(m, plain_select(), 1, TOKENS, 0) == 0);
    put_choose(m, good, TOKENS);
    send_bytes(m, REQUEST_CHOOSE);
    CHECK(cxlkv_worker_asked(m->worker, &got) == 1);
    CHECK(got.asked.by.scorer == 99 && got.count == 1 && got.tokens[0] == TOKENS);
    CHECK(got.asked.by.budgets[0].pages == 2 && got.asked.starts[1] == 1);
    CHECK(cxlkv_sequence_tokens(got.sequences[0], 0) == TOKENS);
    CHECK(cxlkv_worker_tables(m->worker, NULL, 0) == 1);
    CHECK(cxlkv_worker_tables(m->worker, &table, 1) == 1 && table == got.tables[0]);
    choice.picked.weight_tokens = TEST_PAGE_TOKENS;
    choice.picked.log_weights = weights;
    choice.picked.row_count = 1;
    choice.picked.row_keys = choice.picked.row_values = choice.picked.row_log_counts = rows;
    CHECK(cxlkv_worker_answer(m->worker, &choice, 0, NULL) == 0);
    CHECK(answer(m) == 0);
    answer_head head;
    answer_choose found;
    memcpy(&head, m->response, sizeof(head));
    memcpy(&found, m->response + sizeof(head), sizeof(found));
    CHECK(head.k == 2 && found.lists == 1 && found.virtual_rows == 1 && found.bytes_scored == 5);
    CHECK(head.bytes == sizeof(found) + sizeof(pages) + sizeof(weights) + 2 * sizeof(rows) +
                            TEST_HEADS * sizeof(float));
    CHECK(ask(m, plain_select(), 1, TOKENS, 1) == 0); /* its tail is known as before */

    /* Of a table that has fewer pages than before, no tokens are left behind them. */
    CHECK(tell(m, 0, 1, 2, 2, 0, NO_PAGE, NO_PAGE) == 0);
    m->version = 2;
    put_choose(m, good, 2 * TEST_PAGE_TOKENS + 1);
    send_bytes(m, REQUEST_CHOOSE);
    CHECK(cxlkv_worker_asked(m->worker, &got) == 1);
    CHECK(cxlkv_sequence_tokens(got.sequences[0], 0) == 2 * TEST_PAGE_TOKENS);
    CHECK(cxlkv_worker_answer(m->worker, NULL, CXLKV_E_BUSY, "not yet") == 0);
    SAYS(answer(m), -CXLKV_E_BUSY, "not yet");
    CHECK(tell(m, 0, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0);
    m->version = 1;

    put_choose(m, good, TOKENS);
    send_bytes(m, REQUEST_CHOOSE);
    CHECK(cxlkv_worker_serve(m->worker, 0.001) == 0);
    SAYS(answer(m), -CXLKV_E_ARGUMENT, "without choosers");
    CHECK(tell(m, 1, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0);
    CHECK(cxlkv_worker_tables(m->worker, &table, 1) == 2);
    CHECK(tell_item(m, (request_table){.table = 1}) == 0);
    CHECK(cxlkv_worker_tables(m->worker, &table, 1) == 1);
}

/* What there is of a choice that is too long is no result that a client could fetch. */
static void choice_without_end(made *m) {
    static const int32_t pages[1];
    request_select good = plain_select();
    cxlkv_choice choice = {.picked = {.pages = pages, .lists = 1, .k = REQUEST_RESULT_MAX}};
    cxlkv_worker_state state;
    good.method = CXLKV_METHOD_SCORER;
    put_choose(m, good, TOKENS);
    send_bytes(m, REQUEST_CHOOSE);
    CHECK(cxlkv_worker_answer(m->worker, &choice, 0, NULL) == -CXLKV_E_ARGUMENT);
    SAYS(answer(m), -CXLKV_E_ARGUMENT, "ask for fewer rows at once");
    CHECK(cxlkv_worker_state_of(m->worker, NULL, &state) == 0);
    request_more more = {.result = state.requests, .offset = REQUEST_RESULT_MAX / 2};
    begin(m, REQUEST_MORE, 0);
    put(m, &more, sizeof(more));
    CHECK(ask_bytes(m, REQUEST_MORE) == -CXLKV_E_STALE);
}

static int put_part(made *m, uint64_t offset, const void *from, uint64_t bytes) {
    begin(m, REQUEST_PART, 0);
    put(m, &offset, sizeof(offset));
    put(m, from, bytes);
    return ask_bytes(m, REQUEST_PART);
}

/* A request in three parts is answered as it is in one, and no other one is made of its parts. */
static void parts(made *m) {
    static uint8_t whole[BYTES];
    request_head head = {REQUEST_MAGIC, REQUEST_SELECT, 0, 1};
    CHECK(ask(m, plain_select(), 1, TOKENS, 0) == 0);
    uint64_t bytes = m->bytes;
    memcpy(whole, m->request, bytes);
    head.bytes = (uint32_t)bytes;
    for (int turn = 0; turn < 2; turn++) {
        CHECK(put_part(m, 0, whole, 64) == 0);
        CHECK(put_part(m, 64, whole + 64, 16) == 0);
        SAYS(put_part(m, 88, whole + 88, bytes - 88), -CXLKV_E_STALE, "of which it has 80");
        CHECK(put_part(m, 80, whole + 80, bytes - 80) == 0);
        m->bytes = 0;
        put(m, &head, sizeof(head));
        CHECK(rpc_send(&m->slot, REQUEST_SELECT, m->request, sizeof(head)) == 0);
        while (cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
        CHECK(answer(m) == 0);
    }
    CHECK(ask(m, plain_select(), 1, TOKENS, 1) == 0); /* in its place: the parts are gone */
    CHECK(rpc_send(&m->slot, REQUEST_SELECT, &head, sizeof(head)) == 0);
    while (cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
    SAYS(answer(m), -CXLKV_E_ARGUMENT, "request: 16 bytes, it says");
    CHECK(put_part(m, 0, whole, 64) == 0);
    SAYS(put_part(m, REQUEST_BYTES_MAX - 8, whole, 16), -CXLKV_E_ARGUMENT, "at most 16777216");
    SAYS(put_part(m, UINT64_MAX - 7, whole, 16), -CXLKV_E_ARGUMENT, "at most 16777216");
    CHECK(rpc_send(&m->slot, REQUEST_SELECT, &head, sizeof(head)) == 0); /* 64 of its bytes */
    while (cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
    CHECK(answer(m) == -CXLKV_E_ARGUMENT);

    /* A part is not gathered out of what is gathered: from its place on, or behind it. */
    for (uint64_t offset = 0; offset <= 4096; offset += 4096) {
        request_head part = {REQUEST_MAGIC, REQUEST_PART, 4096, 0};
        memset(whole, 0, sizeof(whole));
        memcpy(whole, &part, sizeof(part));
        memcpy(whole + sizeof(part), &offset, sizeof(offset));
        CHECK(put_part(m, 0, whole, 4096) == 0);
        CHECK(rpc_send(&m->slot, REQUEST_PART, &part, sizeof(part)) == 0);
        while (cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
        SAYS(answer(m), -CXLKV_E_ARGUMENT, "request: 16 bytes, it says 4096");
    }
}

/* The client dies with its tables told, or lets go of a page: the worker's hold keeps it whole. */
static void pages_stay_held(made *m) {
    CHECK(ask(m, plain_select(), 1, TOKENS, 1) == 0);
    CHECK(cxlkv_sequence_release(m->sequence) == 0);
    CHECK(test_stats(m->pool).pages.held == 4);
    CHECK(ask(m, plain_select(), 1, TOKENS, 1) == 0);
    begin(m, REQUEST_LEAVE, 0);
    CHECK(ask_bytes(m, REQUEST_LEAVE) == 0);
    CHECK(test_stats(m->pool).pages.held == 0);
    CHECK(ask(m, plain_select(), 1, TOKENS, 0) == -CXLKV_E_STALE);
}

/* A client dies before its question is looked at, and while it waits for an answer: what a question
 * points to is there until then, and goes later. */
static void death_of_who_asks(made *m) {
    request_select good = plain_select();
    cxlkv_question got;
    good.method = CXLKV_METHOD_SCORER;
    for (int late = 0; late < 2; late++) {
        put_choose(m, good, TOKENS);
        if (late) send_bytes(m, REQUEST_CHOOSE);
        else send_unserved(m, REQUEST_CHOOSE);
        worker_file_close(&m->file); /* its lock on the slot goes, as when it dies */
        m->worker->looked_ns = 0;
        while (!late && cxlkv_worker_serve(m->worker, 0.001) == 0) continue;
        bool asked = cxlkv_worker_asked(m->worker, &got) == 1;
        CHECK(asked || !late);
        CHECK(!asked || cxlkv_worker_tables(m->worker, NULL, 0) == 1);
        CHECK(!asked || cxlkv_worker_answer(m->worker, NULL, CXLKV_E_BUSY, "not yet") == 0);
        CHECK(cxlkv_worker_serve(m->worker, 0.001) == 0);
        CHECK(cxlkv_worker_tables(m->worker, NULL, 0) == 0);
        connect_client(m);
        CHECK(tell(m, 0, 0, 1, 0, 4, NO_PAGE, NO_PAGE) == 0);
        CHECK(ask(m, plain_select(), 1, TOKENS, 0) == 0);
    }
}

int main(void) {
    static made m;
    make(&m);
    wrong_tables(&m);
    tables_without_end(&m);
    wrong_selects(&m);
    wrong_attends(&m);
    more_than_pages(&m);
    wrong_others(&m);
    questions(&m);
    choice_without_end(&m);
    parts(&m);
    death_of_who_asks(&m);
    pages_stay_held(&m);
    unmake(&m);
    printf("wrong requests are refused by name\n");
    return 0;
}
