/* A process's end of the worker has the connection and tells it of pages. */
#pragma once
#include "worker/types.h"

/* A look for a worker costs a few us; a slow one is left alone for longer. */
enum { RETRY_NS = 50000000, SLOW_RETRY_NS = 1000000000 };

/* The worker drops the pages of a sequence from page_count on, in bounded time: before they are
 * dropped here. */
void worker_keep(cxlkv_sequence *sequence, uint32_t page_count);
/* All that the worker holds for this process. */
void worker_give_back(cxlkv_pool *pool);
void worker_forked(cxlkv_pool *pool);       /* in the child: the slot is its parent's */
void worker_leave(cxlkv_pool *pool);        /* the pool is being closed */
void worker_client_drop(cxlkv_pool *pool);  /* frees it */
/* What this process's use of the worker has come to. */
void worker_use_state(cxlkv_pool *pool, cxlkv_worker_state *state);

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
