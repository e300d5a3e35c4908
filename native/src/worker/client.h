/* A process's end of the worker, between its files: client.c has the connection and tells the
 * worker of pages, calls.c asks it to select and to attend. */
#ifndef CXLKV_WORKER_CLIENT_H
#define CXLKV_WORKER_CLIENT_H
#include "coherence/rpc.h"
#include "worker/request.h"
#include "worker/worker.h"

/* A look for a worker costs a few us; a slow one is left alone for longer. */
enum { RETRY_NS = 50000000, SLOW_RETRY_NS = 1000000000 };

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

/* What cxlkv_pool_use_worker does, but for the door. */
int client_use(cxlkv_pool *pool, uint32_t use, double deadline_s);
/* All that follow under the client's lock, but for the first. */
/* Another thread may be in a call: waits until the deadline at most. */
int client_lock(worker_client *c, uint64_t deadline_ns);
uint64_t client_deadline(const worker_client *c, double work_bytes);
int client_connect(cxlkv_pool *pool, worker_client *c);
/* After a failed call: ends the connection and returns `code`; the text of the error stays. */
int client_lost(worker_client *c, int code, uint64_t retry_ns);
/* Room for a request of so many bytes, which may be more than a slot has; none of it is kept. */
int client_reserve(worker_client *c, uint64_t bytes);
/* Sends c->request; 0 and the answer's length, or an error: the connection's (it has ended), or the
 * one with which the worker refused. */
int client_ask(worker_client *c, uint32_t operation, uint32_t count, uint64_t bytes,
               uint64_t deadline_ns, answer_head *head, uint64_t *length);
/* What the worker does not know yet of a layer's complete pages, under the locks of the batch. */
int client_tell(worker_client *c, cxlkv_batch *batch, uint32_t layer, uint64_t deadline_ns);
/* All that it was told: it drops it. */
int client_forget(worker_client *c, uint64_t deadline_ns);
#endif
