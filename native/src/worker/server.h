/* The worker's own state, between server.c, which serves, and question.c, which has what choosers
 * are asked. */
#ifndef CXLKV_WORKER_SERVER_H
#define CXLKV_WORKER_SERVER_H
#include "coherence/rpc.h"
#include "worker/request.h"
#include "worker/worker.h"

typedef struct table {
    cxlkv_sequence *sequence;    /* NULL: there is none; pages of one part only */
    uint64_t number;             /* of all that this worker ever had */
    uint64_t version;
    uint64_t request;            /* that used it last */
    uint32_t part;
} table;

/* Memory that grows, and how much of it is used. */
typedef struct buffer {
    void *data;
    uint64_t capacity, bytes;
} buffer;

/* What one client has told. */
typedef struct session {
    struct cxlkv_worker *worker;
    uint64_t nonce;              /* of the claim that it belongs to; 0: none */
    table *tables;
    uint32_t table_capacity;
    uint64_t span_pages;         /* of its tables, those behind their windows too */
    buffer parts;                /* of a request that is longer than a slot, so far */
} session;

/* The last call's, until the next one: longer ones are fetched in several answers. */
enum { SELECT_HEAD, SELECT_PAGES, SELECT_SCORES, SELECT_COUNTS };
enum { ATTEND_HEAD, ATTEND_LSE, ATTEND_OUT, ATTEND_MASS };
enum { CHOOSE_HEAD, CHOOSE_PAGES, CHOOSE_WEIGHTS, CHOOSE_ROWS /* 3 */, RESULT_PARTS = 6 };
typedef struct result {
    uint64_t number;             /* 0: none */
    uint64_t nonce;              /* whose it is */
    uint32_t k;
    buffer parts[RESULT_PARTS];  /* all of it, in this order */
} result;

struct cxlkv_worker {
    cxlkv_pool *pool;
    worker_file file;
    request_facts facts;
    rpc_slot slots[WORKER_SLOTS_MAX];
    session sessions[WORKER_SLOTS_MAX];
    uint8_t *local;              /* of all slots: a request and an answer */
    cxlkv_batch batch;           /* of the request that is worked on; keeps its scratch */
    uint32_t batch_capacity;
    int32_t *starts;
    uint64_t *numbers;           /* tokens and tables of a question, [2][batch_capacity] */
    result result;
    session *asking;             /* the client that asked `question`; NULL: none waits */
    request question;
    uint64_t tables_made;
    uint64_t requests, refused;
    uint64_t looked_ns, served_ns;
};

/* Room for so many bytes of a result. */
int server_reserve(buffer *of, uint64_t bytes);
/* To who is asking: the result, or the error that a negative code is of. */
void server_answer(cxlkv_worker *w, int64_t code);
#endif
