/* Questions to choosers, methods that the core does not have: the program that serves answers them,
 * between two calls of cxlkv_worker_serve(). */
#include "worker/request.h"
#include "worker/server.h"

int cxlkv_worker_asked(cxlkv_worker *w, cxlkv_question *question) {
    const request *r = &w->question;
    if (!w->asking) return 0;
    *question = (cxlkv_question){.asked = r->selecting, .count = r->head.count,
                                 .sequences = w->batch.sequences, .tokens = w->numbers,
                                 .tables = w->numbers + w->batch_capacity};
    question->asked.starts = w->starts;
    return 1;
}

static int put(buffer *to, const void *from, uint64_t bytes) {
    int code = server_reserve(to, from ? bytes : 0);
    if (code == 0 && from && bytes) memcpy(to->data, from, bytes);
    return code;
}

static int put_choice(cxlkv_worker *w, const cxlkv_choice *choice) {
    const cxlkv_picked *picked = &choice->picked;
    const cxlkv_layout *layout = w->question.facts->layout;
    uint32_t weight_tokens = picked->log_weights ? picked->weight_tokens : 0;
    uint64_t heads = 4ull * picked->lists * layout->kv_heads; /* all numbers have 4 bytes */
    uint64_t pages = heads * picked->k, rows = heads * picked->row_count;
    answer_choose head = {.bytes_scored = choice->bytes_scored,
                          .bytes_fetched = choice->bytes_fetched, .lists = picked->lists,
                          .weight_tokens = weight_tokens, .virtual_rows = picked->row_count};
    buffer *parts = w->result.parts, *of_rows = parts + CHOOSE_ROWS;
    int code = need(pages, "pages", picked->pages, NULL);
    if (code == 0)
        code = need(rows, "row_keys", picked->row_keys, "row_values", picked->row_values,
                    "row_log_counts", picked->row_log_counts, NULL);
    if (code == 0) code = put(&parts[CHOOSE_HEAD], &head, sizeof(head));
    if (code == 0) code = put(&parts[CHOOSE_PAGES], picked->pages, pages);
    if (code == 0) code = put(&parts[CHOOSE_WEIGHTS], picked->log_weights, pages * weight_tokens);
    if (code == 0) code = put(&of_rows[0], picked->row_keys, rows * layout->head_dim);
    if (code == 0) code = put(&of_rows[1], picked->row_values, rows * layout->value_head_dim);
    if (code == 0) code = put(&of_rows[2], picked->row_log_counts, rows);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RESULT_PARTS; i++) bytes += parts[i].bytes;
    if (code == 0 && bytes > REQUEST_RESULT_MAX)
        return fail(CXLKV_E_ARGUMENT, "worker: a choice of %lu MiB: ask for fewer rows at once",
                    bytes >> 20);
    return code;
}

int cxlkv_worker_answer(cxlkv_worker *w, const cxlkv_choice *choice, int code, const char *text) {
    if (!w->asking) return fail(CXLKV_E_ARGUMENT, "worker: no question waits for an answer");
    if (!choice) {
        server_answer(w, fail(code, "%s", text));
        return 0;
    }
    code = put_choice(w, choice);
    if (code == 0) { /* else no one gets what there is of it */
        w->result.number = w->requests;
        w->result.nonce = w->asking->nonce;
        w->result.k = choice->picked.k;
    }
    server_answer(w, code);
    return code;
}

int64_t cxlkv_worker_tables(cxlkv_worker *w, uint64_t *tables, uint64_t capacity) {
    uint64_t found = 0;
    int code = need(capacity, "tables", tables, NULL);
    if (code < 0) return code;
    for (uint32_t i = 0; i < w->file.header.slot_count; i++)
        for (uint32_t n = 0; n < w->sessions[i].table_capacity; n++) {
            const table *each = &w->sessions[i].tables[n];
            if (!each->sequence) continue;
            if (found < capacity) tables[found] = each->number;
            found++;
        }
    return (int64_t)found;
}
