/* The worker near the memory and its clients: the file with their slots, and what they share.
 *
 * The worker is a process that has the pool open like any other. It makes the file: a header, a
 * claim for each slot, the slots (rpc.h). A client claims a slot and asks by the requests of
 * request.h. Who is alive is told by locks on bytes of the file, which the kernel drops with their
 * process: USE_BYTE is the worker's, CLAIM_BYTE + i that of slot i's client. A new worker makes a
 * new file, so that no slot outlives its server, and clients of the old one see its lock go. */
#ifndef CXLKV_WORKER_H
#define CXLKV_WORKER_H
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

/* ---- file.c ---- */
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

/* Of a tail that has the form of a page, of which all of a kind goes along; 0: rows do. */
static inline uint64_t worker_tail_bytes(const cxlkv_pool *pool, uint32_t kind) {
    return is_encoded(&pool->layout) ? pool->layout.kv_heads * tail_piece_bytes(pool, kind) : 0;
}

/* What a request is checked against, on both sides. */
static inline request_facts worker_facts(const cxlkv_pool *pool) {
    const cxlkv_layout *layout = &pool->layout;
    return (request_facts){.layout = layout,
                           .value_dim = values_are_keys(layout) ? 0 : layout->value_head_dim,
                           .page_count = pool->host->page_count,
                           .key_pieces_bytes = worker_tail_bytes(pool, PIECE_KEYS),
                           .value_pieces_bytes = worker_tail_bytes(pool, PIECE_VALUES),
                           .part_count = pool->geometry.part_count};
}

/* ---- client.c ---- */
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
#endif
