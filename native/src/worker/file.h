/* The file with the slots: made, opened, its slots claimed, a sleeping worker rung. */
#pragma once
#include "worker/types.h"

/* A new file in place of a dead worker's; -CXLKV_E_BUSY when there is one that lives. */
int worker_file_make(const cxlkv_pool *pool, uint32_t slots, uint32_t request_bytes,
                     uint32_t response_bytes, enum visibility_mode mode, worker_file *file);
/* The file of the worker that lives now; -CXLKV_E_WORKER when there is none, or it is not whole. */
int worker_file_open(const cxlkv_pool *pool, worker_file *file);
void worker_file_close(worker_file *file);
void worker_file_remove(const cxlkv_pool *pool, worker_file *file); /* and its name */
bool worker_lives(const worker_file *file);
uint8_t *worker_slot(const worker_file *file, uint32_t slot);
/* A slot that nobody has, or -CXLKV_E_WORKER. */
int worker_claim(const worker_file *file, uint32_t *slot);
void worker_unclaim(const worker_file *file, uint32_t slot);
uint64_t worker_claim_nonce(const worker_file *file, uint32_t slot);
bool worker_claim_is_dead(const worker_file *file, uint32_t slot);
void worker_ring(const worker_file *file);
/* Sleeps until a client rings, or for pause_ns; `again` is called once after saying so, and when it
 * returns true, there is no sleep. */
void worker_sleep(const worker_file *file, uint64_t pause_ns, bool (*again)(void *context),
                  void *context);
