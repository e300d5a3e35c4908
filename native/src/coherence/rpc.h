/* Calls through memory that hosts share: a slot with one client and one server, who may be on
 * different hosts, or a worker near the memory.
 *
 * A slot is request lines, which the client alone writes, and response lines, which the server
 * alone writes: each a header line {sequence, operation, bytes, status, CRC32C} and the payload.
 * The payload goes to memory first, the header with the next sequence number last. An answer has
 * the number of its request, so that a late or repeated one is never taken for another; who timed
 * out sends the next number through the same slot. Nothing in the memory is believed: each length
 * is checked and each CRC, on a copy. A message that is torn is read again, a bounded number of
 * times; in time it happens only when a client gave up and overwrites what the server reads.
 *
 * At least once: a server that died in a handler leaves the request to the next one, who runs it
 * again. A slot stays with its two hosts: the next process of the same host may take over an end,
 * one of another host may not (docs/explanation/coherence.md, V8 and V11). */
#pragma once
#include "coherence/visibility.h"

enum { RPC_BYTES_MAX = 1 << 20 };

/* One end's view of a slot; one thread uses it at a time. */
typedef struct rpc_slot {
    uint8_t *request, *response;     /* in the shared memory, lines */
    uint32_t request_bytes_max, response_bytes_max; /* payloads */
    enum visibility_mode mode;
    /* Both ends run on one kernel, so that a futex of the memory wakes the other one. The maker of
     * the slot knows: it handed out both ends itself, or their /proc/sys/kernel/random/boot_id is
     * equal. Where it is wrongly true, calls are as slow as without and not wrong: no wait for a
     * wake is longer than the pause that would be made else. */
    bool same_host;
    uint8_t *local;                  /* server: own memory for a request and then a response */
    uint64_t sequence;               /* of the last request sent, or answered */
    uint64_t read_again;             /* how often a message was torn */
} rpc_slot;

/* Lines for the payloads and two headers. */
uint64_t rpc_slot_bytes(uint32_t request_bytes_max, uint32_t response_bytes_max);
/* The memory is at a line, and zeros or what earlier ends of the same hosts left. -CXLKV_E_ARGUMENT
 * for a size above RPC_BYTES_MAX or memory that is not at a line. `slot` comes with mode and
 * same_host set, all else is set here. */
int rpc_client(rpc_slot *slot, void *memory, uint32_t request_bytes_max,
               uint32_t response_bytes_max);
/* local: request_bytes_max + response_bytes_max bytes that stay as long as the slot is served. */
int rpc_server(rpc_slot *slot, void *memory, uint32_t request_bytes_max,
               uint32_t response_bytes_max, void *local);

/* ---- client ---- */

/* Calls and waits. The response has room for response_bytes_max. Returns the bytes of the answer,
 * the error that the handler returned, -CXLKV_E_TIMEOUT when no answer came in time (the server is
 * dead or slow; the slot can be used again), -CXLKV_E_CORRUPT when the request or the answer could
 * not be read, or -CXLKV_E_ARGUMENT when the request is too large. */
int64_t rpc_call(rpc_slot *slot, uint32_t operation, const void *request, uint32_t bytes,
                 void *response, double timeout_s);
/* The second half alone: waits for the answer to what rpc_send() sent. */
int64_t rpc_await(rpc_slot *slot, void *response, double timeout_s);
/* The two halves: sends, and looks once. rpc_receive returns 1 and the bytes of the answer, 0 when
 * it is not there yet, or an error as rpc_call does. */
int rpc_send(rpc_slot *slot, uint32_t operation, const void *request, uint32_t bytes);
int rpc_receive(rpc_slot *slot, void *response, uint32_t *bytes);

/* ---- server ---- */

/* Returns the bytes of the response, at most response_bytes_max, or a negated error, which the
 * client's call returns; RPC_LATER: rpc_answer() comes, before this slot is looked at again. */
#define RPC_LATER INT64_MIN
typedef int64_t (*rpc_handler)(void *context, uint32_t operation, const void *request,
                               uint32_t bytes, void *response);
/* One look: 1 when a request was answered, 0 when there is none, -CXLKV_E_CORRUPT when there is one
 * that cannot be read: it was answered with that error. */
int rpc_serve_once(rpc_slot *slot, rpc_handler handler, void *context);
/* Where the response is made: memory of response_bytes_max. */
static inline uint8_t *rpc_response(const rpc_slot *slot) {
    return slot->local + slot->request_bytes_max;
}
/* What the handler did not return; bytes: as it would have. */
void rpc_answer(rpc_slot *slot, uint32_t operation, int64_t bytes);
/* Looks at all of them until at least one request was answered, and returns how many were, or 0
 * when none came within timeout_s. What cannot be read counts as answered. */
uint32_t rpc_serve(rpc_slot *slots, uint32_t count, rpc_handler handler, void *context,
                   double timeout_s);
