/* Request and response slots over the flush seam; rpc.h says what holds. */
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/flush.h"
#include "base/types.h"
#include "coherence/rpc.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LINE = FLUSH_LINE_BYTES, ATTEMPTS = 8, ERROR_MAX = 4095 };
/* Of a wait: spins until SPIN_NS, lets others run until YIELD_NS, then sleeps. */
enum { SPIN_NS = 50000, YIELD_NS = 200000, PAUSE_MAX_NS = 1000000 };

typedef struct rpc_header {
    uint64_t sequence;  /* stored last; 0: nothing was ever sent */
    uint32_t operation;
    uint32_t bytes;     /* of the payload */
    int32_t status;     /* of an answer: 0 or a negated error */
    uint32_t crc;       /* of the 20 bytes before, then the payload */
    uint64_t reserved[4];
    uint64_t sleeps;    /* the writer of this line waits for a futex: not part of the message */
} rpc_header;
_Static_assert(sizeof(rpc_header) == LINE, "a header is a line");

uint64_t rpc_slot_bytes(uint32_t request_bytes_max, uint32_t response_bytes_max) {
    return 2 * LINE + align_up(request_bytes_max, LINE) + align_up(response_bytes_max, LINE);
}

static int attach(rpc_slot *slot, void *memory, uint32_t request_bytes_max,
                  uint32_t response_bytes_max) {
    if (request_bytes_max > RPC_BYTES_MAX || response_bytes_max > RPC_BYTES_MAX ||
        (uintptr_t)memory % LINE)
        return fail(CXLKV_E_ARGUMENT, "a slot begins at a multiple of %d, and has payloads of at "
                    "most %d bytes", LINE, RPC_BYTES_MAX);
    slot->request = memory;
    slot->response = slot->request + LINE + align_up(request_bytes_max, LINE);
    slot->request_bytes_max = request_bytes_max;
    slot->response_bytes_max = response_bytes_max;
    slot->local = NULL;
    slot->read_again = 0;
    return 0;
}

/* ---- sending ---- */

static void send_line(const rpc_slot *slot, const void *line) {
    if (slot->mode == VISIBILITY_FAST) flush_write_back(FLUSH_RPC_HEADER_SENT, line, LINE);
    if (slot->mode == VISIBILITY_STRICT) flush_evict(FLUSH_RPC_HEADER_SENT, line, LINE);
}

/* By plain stores: the other side takes a few lines from a cache sooner than from memory. */
static void store_payload(const rpc_slot *slot, uint8_t *lines, const uint8_t *from,
                          uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += LINE) {
        uint8_t part[LINE] = {0};
        memcpy(part, from + at, bytes - at < LINE ? bytes - at : LINE);
        flush_store_line(lines + at, part, 0);
    }
    if (bytes && slot->mode != VISIBILITY_COHERENT)
        flush_write_back(FLUSH_RPC_PAYLOAD_SENT, lines, bytes);
}

static uint32_t crc_of(const rpc_header *header, const void *payload) {
    return crc32c(crc32c(0, header, offsetof(rpc_header, crc)), payload, header->bytes);
}

static void futex_wake(const void *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* The message is in memory when this returns; where hardware is coherent, what orders its stores is
 * that the last one releases. `other`: the header line of the side that waits for it. */
static void send_message(const rpc_slot *slot, uint8_t *line, const uint8_t *other,
                         rpc_header *header, const void *payload) {
    header->crc = crc_of(header, payload);
    store_payload(slot, line + LINE, payload, header->bytes);
    if (slot->mode != VISIBILITY_COHERENT) flush_fence_stores(FLUSH_RPC_PAYLOAD_SENT_FENCE);
    flush_store_line(line, header, 1);
    flush_store_word(line, header->sequence);
    send_line(slot, line);
    if (slot->mode != VISIBILITY_COHERENT) flush_fence_stores(FLUSH_RPC_HEADER_SENT_FENCE);
    if (!slot->same_host) return;
    /* Whoever says that it sleeps looks once more after that; see wait_for_word(). */
    flush_fence_all(FLUSH_LOCAL);
    if (flush_load_word(other + offsetof(rpc_header, sleeps))) futex_wake(line);
}

/* ---- receiving ---- */

/* The header as memory has it. The sequence number is loaded before the rest. */
static void look_at(const rpc_slot *slot, const uint8_t *line, rpc_header *header) {
    if (slot->mode != VISIBILITY_COHERENT) {
        flush_fence_all(FLUSH_RPC_LOOK_BEGIN_FENCE);
        if (slot->mode == VISIBILITY_FAST) flush_invalidate(FLUSH_RPC_LOOK, line, LINE);
        else flush_evict(FLUSH_RPC_LOOK, line, LINE);
        flush_fence_all(FLUSH_RPC_LOOK_FENCE);
    }
    uint64_t sequence = flush_load_word(line);
    flush_load_line(header, line);
    header->sequence = sequence;
}

static bool read_payload(const rpc_slot *slot, const uint8_t *line, const rpc_header *header,
                         uint32_t bytes_max, void *payload) {
    if (header->bytes > bytes_max || header->status > 0 || header->status < -ERROR_MAX)
        return false;
    if (header->bytes) {
        if (slot->mode != VISIBILITY_COHERENT) {
            flush_fence_all(FLUSH_RPC_SEEN_FENCE);
            flush_invalidate(FLUSH_RPC_PAYLOAD, line + LINE, header->bytes);
            flush_fence_all(FLUSH_RPC_PAYLOAD_FENCE);
        }
        flush_copy_out(payload, line + LINE, header->bytes);
    }
    return header->crc == crc_of(header, payload);
}

/* Answers: the one to the last request. Requests: any other than the last one that was answered,
 * so that whatever number the memory shows, the next one is served again. */
static bool is_new(const rpc_slot *slot, bool answers, uint64_t sequence) {
    return sequence != 0 && (sequence == slot->sequence) == answers;
}

/* 1 and the message, when there is one that is new; 0 when there is none; -CXLKV_E_CORRUPT when it
 * cannot be read, with header->sequence set. */
static int receive(rpc_slot *slot, bool answers, rpc_header *header, void *payload) {
    const uint8_t *line = answers ? slot->response : slot->request;
    uint32_t bytes_max = answers ? slot->response_bytes_max : slot->request_bytes_max;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        look_at(slot, line, header);
        if (!is_new(slot, answers, header->sequence)) return 0;
        if (read_payload(slot, line, header, bytes_max, payload)) return 1;
        slot->read_again++;
    }
    return -CXLKV_E_CORRUPT;
}

/* ---- waiting ---- */

/* Until the other side's header changes, or pause_ns. What is missed costs one pause. */
static void wait_for_word(const rpc_slot *slot, bool answers, uint64_t pause_ns) {
    struct timespec pause = {.tv_nsec = (long)pause_ns};
    const uint8_t *other = answers ? slot->response : slot->request;
    uint8_t *own = answers ? slot->request : slot->response;
    void *sleeps = own + offsetof(rpc_header, sleeps);
    flush_store_word(sleeps, 1);
    flush_fence_all(FLUSH_LOCAL);
    uint64_t word = flush_load_word(other);
    if (!is_new(slot, answers, word))
        syscall(SYS_futex, other, FUTEX_WAIT, (uint32_t)word, &pause, NULL, 0);
    flush_store_word(sleeps, 0);
}

typedef struct waiting {
    uint64_t began_ns, deadline_ns;
} waiting;

static waiting wait_begin(double timeout_s) {
    const double century_s = 3e9;
    uint64_t now_ns = boottime_ns();
    if (!(timeout_s > 0)) timeout_s = 0;
    if (timeout_s > century_s) timeout_s = century_s;
    return (waiting){now_ns, now_ns + (uint64_t)(timeout_s * 1e9)};
}

/* After a look that found nothing: an eighth of what was waited so far. False when time is up. */
static bool wait_on(const waiting *w, const rpc_slot *slot, bool answers, bool wakes) {
    uint64_t now_ns = boottime_ns(), waited_ns = now_ns - w->began_ns;
    if (now_ns >= w->deadline_ns) return false;
    if (waited_ns < SPIN_NS) {
        cpu_relax();
        return true;
    }
    if (waited_ns < YIELD_NS) return sched_yield() == 0;
    uint64_t pause_ns = waited_ns / 8 < PAUSE_MAX_NS ? waited_ns / 8 : PAUSE_MAX_NS;
    if (pause_ns > w->deadline_ns - now_ns) pause_ns = w->deadline_ns - now_ns;
    if (wakes) wait_for_word(slot, answers, pause_ns);
    else nanosleep(&(struct timespec){.tv_nsec = (long)pause_ns}, NULL);
    return true;
}

/* ---- client ---- */

int rpc_client(rpc_slot *slot, void *memory, uint32_t request_bytes_max,
               uint32_t response_bytes_max) {
    int code = attach(slot, memory, request_bytes_max, response_bytes_max);
    /* The line's writers were all of this host: its cache has the last number. */
    if (code == 0) slot->sequence = flush_load_word(slot->request);
    return code;
}

int rpc_send(rpc_slot *slot, uint32_t operation, const void *request, uint32_t bytes) {
    if (bytes > slot->request_bytes_max)
        return fail(CXLKV_E_ARGUMENT, "a request of %u bytes, but the slot has room for %u", bytes,
                    slot->request_bytes_max);
    if (++slot->sequence == 0) slot->sequence = 1;
    rpc_header header = {.sequence = slot->sequence, .operation = operation, .bytes = bytes};
    send_message(slot, slot->request, slot->response, &header, request);
    return 0;
}

int rpc_receive(rpc_slot *slot, void *response, uint32_t *bytes) {
    rpc_header header;
    int code = receive(slot, true, &header, response);
    if (code == 0) return 0;
    if (code < 0)
        return fail(CXLKV_E_CORRUPT, "the answer to request %lu has a wrong CRC or length after %d "
                    "reads: the memory is damaged, or not a slot", slot->sequence, ATTEMPTS);
    if (header.status < 0)
        return fail(-header.status, "the server answered request %lu with error %d",
                    slot->sequence, -header.status);
    *bytes = header.bytes;
    return 1;
}

int64_t rpc_call(rpc_slot *slot, uint32_t operation, const void *request, uint32_t bytes,
                 void *response, double timeout_s) {
    int code = rpc_send(slot, operation, request, bytes);
    return code < 0 ? code : rpc_await(slot, response, timeout_s);
}

int64_t rpc_await(rpc_slot *slot, void *response, double timeout_s) {
    waiting w = wait_begin(timeout_s);
    uint32_t answer_bytes = 0;
    int code;
    while ((code = rpc_receive(slot, response, &answer_bytes)) == 0)
        if (!wait_on(&w, slot, true, slot->same_host))
            return fail(CXLKV_E_TIMEOUT, "no answer to request %lu within %g s: is the server "
                        "alive? The slot can be used again, a late answer is ignored",
                        slot->sequence, timeout_s);
    return code < 0 ? code : (int64_t)answer_bytes;
}

/* ---- server ---- */

int rpc_server(rpc_slot *slot, void *memory, uint32_t request_bytes_max,
               uint32_t response_bytes_max, void *local) {
    int code = attach(slot, memory, request_bytes_max, response_bytes_max);
    if (code < 0) return code;
    slot->local = local;
    slot->sequence = flush_load_word(slot->response);
    /* A server that died after it had stored the header may not have sent it. */
    if (slot->mode != VISIBILITY_COHERENT)
        flush_write_back(FLUSH_RPC_ATTACH, slot->response, LINE);
    flush_fence_stores(FLUSH_RPC_ATTACH_FENCE);
    return 0;
}

void rpc_answer(rpc_slot *slot, uint32_t operation, int64_t bytes) {
    if (bytes > slot->response_bytes_max) bytes = -CXLKV_E_ROOM;
    if (bytes < -ERROR_MAX) bytes = -CXLKV_E_ARGUMENT;
    rpc_header answer = {.sequence = slot->sequence, .operation = operation,
                         .bytes = bytes < 0 ? 0 : (uint32_t)bytes,
                         .status = bytes < 0 ? (int32_t)bytes : 0};
    send_message(slot, slot->response, slot->request, &answer, rpc_response(slot));
}

int rpc_serve_once(rpc_slot *slot, rpc_handler handler, void *context) {
    rpc_header header;
    int code = receive(slot, false, &header, slot->local);
    if (code == 0) return 0;
    int64_t bytes = code;
    if (code > 0)
        bytes = handler(context, header.operation, slot->local, header.bytes, rpc_response(slot));
    slot->sequence = header.sequence;
    if (bytes != RPC_LATER) rpc_answer(slot, header.operation, bytes);
    return code;
}

uint32_t rpc_serve(rpc_slot *slots, uint32_t count, rpc_handler handler, void *context,
                   double timeout_s) {
    waiting w = wait_begin(timeout_s);
    /* A futex waits for one word. */
    bool wakes = count == 1 && slots[0].same_host;
    for (;;) {
        uint32_t answered = 0;
        for (uint32_t i = 0; i < count; i++)
            answered += rpc_serve_once(&slots[i], handler, context) != 0;
        if (answered || !wait_on(&w, &slots[0], false, wakes)) return answered;
    }
}
