/* The worker near the memory and its clients: the file with their slots, and what they share.
 *
 * The worker is a process that has the pool open like any other. It makes the file: a header, a
 * claim for each slot, the slots (rpc.h). A client claims a slot and asks by the requests of
 * request.h. Locks on bytes of the file tell which process is alive, as the kernel drops them with
 * it: USE_BYTE is the worker's, CLAIM_BYTE + i that of slot i's client. A new worker makes a
 * new file, so that no slot outlives its server, and clients of the old one see its lock go. */
#pragma once
#include "coherence/rpc.h"
#include "sequence/types.h"
#include "worker/request.h"

enum { WORKER_VERSION = 6, WORKER_SLOTS_MAX = 64, CLAIM_BYTE = 64 };
enum {
    WORKER_BELL = 128,           /* 4: rung by clients while the worker sleeps */
    WORKER_SLEEPS = 192,         /* 8: the worker's */
    WORKER_COUNTS = 256,         /* 8, 8: requests that it answered, and refused */
    WORKER_CLAIMS = 4096,        /* a line each: process_slot, its nonce stored last; 0: no one's */
    WORKER_SLOTS = 8192
};

typedef struct worker_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t slot_count;
    uint8_t identity[16];        /* the pool's */
    uint32_t request_bytes, response_bytes; /* payloads of a slot */
    uint32_t mode;               /* enum visibility_mode */
    uint32_t reserved;
    uint64_t slot_stride;
    process_slot worker;
    uint32_t reserved_too;
    uint32_t crc;                /* of the 92 bytes before it */
} worker_header;
_Static_assert(sizeof(worker_header) == 96, "no holes: it is written as it lies");

typedef struct worker_file {
    int fd;                      /* -1: none is open */
    uint8_t *base;
    uint64_t bytes;
    worker_header header;        /* a copy, checked */
} worker_file;

/* Of a tail that has the form of a page, of which all of a kind goes along; 0: rows do. */
static inline uint64_t worker_tail_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return is_encoded(layout) ? layout->kv_heads * tail_piece_bytes(layout, kind) : 0;
}

/* What a request of a layer is checked against, on both sides. */
static inline request_facts worker_facts(const cxlkv_pool *pool, const cxlkv_layout *layout) {
    return (request_facts){.layout = layout,
                           .value_dim = values_are_keys(layout) ? 0 : layout->value_head_dim,
                           .page_count = pool->host->page_count,
                           .key_pieces_bytes = worker_tail_bytes(layout, PIECE_KEYS),
                           .value_pieces_bytes = worker_tail_bytes(layout, PIECE_VALUES),
                           .part_count = pool->geometry.part_count};
}

/* ---- a process's end ---- */
typedef struct worker_client {
    pthread_mutex_t lock;        /* guards all below, and all worker_tables; leaf */
    atomic_uint use;             /* CXLKV_WORKER_... */
    double deadline_s;           /* 0: by the work */
    bool connected;
    worker_file file;
    uint32_t slot_index;
    rpc_slot slot;
    uint32_t epoch;              /* what was told in another one counts for nothing */
    uint32_t next_table;
    uint64_t next_version;
    uint64_t retry_ns;           /* no connection is tried before */
    atomic_bool untold;          /* pages went, and the worker could not be told */
    uint8_t *request, *response; /* as long as a slot's, a request maybe longer */
    uint64_t request_capacity;
    uint8_t *part;               /* a slot's of a long one */
    uint8_t *result;             /* of one request */
    uint64_t result_capacity;
    cxlkv_worker_state state;
} worker_client;

/* ---- the worker's own state ---- */
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
    request_facts facts[CXLKV_GROUPS_MAX]; /* by shape; request_facts.shapes */
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
