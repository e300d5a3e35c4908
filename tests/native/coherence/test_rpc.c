/* Goal: on real memory, in every mode, each call gets its own answer or a named error in time;
 * nothing in the memory, and no death at either end, makes it hang, crash or lie. Method: threads
 * over one mapping, processes that are killed, and memory that is changed by hand. */
#include <signal.h>
#include <sys/mman.h>

#include "base/flush.h"
#include "coherence/rpc.h"
#include "rpc_scenario.h"

static const double LONG_S = 60, SHORT_S = 0.02;
enum { CALLS = 3000, OPERATION_DIES = 77, OPERATION_QUITS = 78 };

static uint8_t *memory;          /* of a slot, which processes share */

static void begin(void) { memset(memory, 0, rpc_slot_bytes(QUESTION_MAX, ANSWER_MAX)); }

typedef struct served {
    rpc_slot slot;
    uint8_t local[QUESTION_MAX + ANSWER_MAX];
    bool quits;
} served;

static int64_t handler(void *context, uint32_t operation, const void *question, uint32_t bytes,
                       void *answer) {
    served *s = context;
    if (operation == OPERATION_DIES) raise(SIGKILL);
    if (operation == OPERATION_QUITS) s->quits = true;
    return operation == OPERATION_QUITS ? 0 : answer_make(NULL, operation, question, bytes, answer);
}

static void serve_begin(served *s, enum visibility_mode mode, bool same_host) {
    s->slot = (rpc_slot){.mode = mode, .same_host = same_host};
    s->quits = false;
    CHECK(rpc_server(&s->slot, memory, QUESTION_MAX, ANSWER_MAX, s->local) == 0);
}

static void *serve(void *context) {
    served *s = context;
    while (!s->quits) CHECK(rpc_serve(&s->slot, 1, handler, s, LONG_S) == 1);
    CHECK(s->slot.read_again == 0);
    return NULL;
}

static rpc_slot client_begin(enum visibility_mode mode, bool same_host) {
    rpc_slot slot = {.mode = mode, .same_host = same_host};
    CHECK(rpc_client(&slot, memory, QUESTION_MAX, ANSWER_MAX) == 0);
    return slot;
}

static void ask(rpc_slot *slot, uint64_t *seed) {
    uint8_t question[QUESTION_MAX], answer[ANSWER_MAX];
    uint32_t bytes = question_make(seed, QUESTION_MAX, question);
    uint32_t operation = random_below(seed, OPERATIONS);
    int64_t got = rpc_call(slot, operation, question, bytes, answer, LONG_S);
    CHECK(answer_right(operation, question, bytes, got, answer));
}

static void test_threads(enum visibility_mode mode, bool same_host) {
    served server;
    pthread_t thread;
    uint64_t seed = 3;
    begin();
    serve_begin(&server, mode, same_host);
    CHECK(pthread_create(&thread, NULL, serve, &server) == 0);
    rpc_slot slot = client_begin(mode, same_host);
    for (uint32_t i = 0; i < CALLS; i++) ask(&slot, &seed);
    CHECK(slot.sequence == CALLS && slot.read_again == 0);
    CHECK(rpc_call(&slot, OPERATION_QUITS, NULL, 0, NULL, LONG_S) == 0);
    pthread_join(thread, NULL);
}

/* No server in time; then it answers late, and the next request gets its own answer. */
static void test_late(enum visibility_mode mode) {
    uint8_t answer[ANSWER_MAX];
    const char *questions[] = {"the first question", "the second question"};
    served server;
    uint32_t bytes = 0;
    begin();
    rpc_slot slot = client_begin(mode, true);
    CHECK(rpc_call(&slot, 1, questions[0], 18, answer, SHORT_S) == -CXLKV_E_TIMEOUT);
    CHECK(strstr(cxlkv_error_text(), "no answer to request 1 within 0.02 s"));
    serve_begin(&server, mode, true);
    CHECK(rpc_serve(&server.slot, 1, handler, &server, LONG_S) == 1);
    CHECK(rpc_serve(&server.slot, 1, handler, &server, SHORT_S) == 0);
    CHECK(rpc_send(&slot, 2, questions[1], 19) == 0);
    CHECK(rpc_receive(&slot, answer, &bytes) == 0);
    CHECK(rpc_serve_once(&server.slot, handler, &server) == 1);
    CHECK(rpc_serve_once(&server.slot, handler, &server) == 0);
    CHECK(rpc_receive(&slot, answer, &bytes) == 1);
    CHECK(answer_right(2, (const uint8_t *)questions[1], 19, bytes, answer));
    CHECK(rpc_send(&slot, 1, answer, QUESTION_MAX + 1) == -CXLKV_E_ARGUMENT);
    CHECK(slot.read_again == 0 && server.slot.read_again == 0);
    serve_begin(&server, mode, true); /* the next server does not answer twice */
    CHECK(rpc_serve_once(&server.slot, handler, &server) == 0);
}

/* One bit of what lies in memory is wrong: the server answers with the error. A bit of the answer
 * is wrong: the client says so. Neither calls the handler or believes a length. */
static void test_flipped_bits(void) {
    uint8_t question[130], answer[ANSWER_MAX];
    served server;
    uint64_t seed = 9;
    uint32_t bytes = 0, refused = 0;
    begin();
    for (uint32_t i = 0; i < sizeof(question); i++) question[i] = (uint8_t)random_next(&seed);
    serve_begin(&server, VISIBILITY_FAST, false);
    rpc_slot slot = client_begin(VISIBILITY_FAST, false);
    for (uint32_t bit = 0; bit < (FLUSH_LINE_BYTES + sizeof(question)) * 8; bit++) {
        bool used = bit / 8 < 24 || bit / 8 >= FLUSH_LINE_BYTES;
        CHECK(rpc_send(&slot, 1, question, sizeof(question)) == 0);
        slot.request[bit / 8] ^= (uint8_t)(1 << bit % 8);
        int code = rpc_serve_once(&server.slot, handler, &server);
        CHECK(code == (used ? -CXLKV_E_CORRUPT : 1) || (bit / 8 < 8 && code == 0));
        if (bit / 8 >= 8) {
            code = rpc_receive(&slot, answer, &bytes);
            CHECK(code == (used ? -CXLKV_E_CORRUPT : 1));
        }
        refused += code < 0;
        CHECK(rpc_send(&slot, 1, question, sizeof(question)) == 0);
        CHECK(rpc_serve_once(&server.slot, handler, &server) == 1);
        slot.response[bit / 8] ^= (uint8_t)(1 << bit % 8);
        code = rpc_receive(&slot, answer, &bytes);
        CHECK(code == (used && bit / 8 >= 8 ? -CXLKV_E_CORRUPT : bit / 8 < 8 ? 0 : 1));
        if (code < 0) CHECK(strstr(cxlkv_error_text(), "wrong CRC or length after 8 reads"));
    }
    CHECK(refused > 1000);
}

/* A line that an enemy made, with a right CRC. */
static void test_lengths(void) {
    uint8_t answer[ANSWER_MAX];
    served server;
    uint32_t bytes = 7;
    begin();
    struct { uint64_t sequence; uint32_t operation, bytes; int32_t status; uint32_t crc; } forged;
    rpc_slot slot = client_begin(VISIBILITY_COHERENT, false);
    serve_begin(&server, VISIBILITY_COHERENT, false);
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t sizes[] = {QUESTION_MAX + 1, ANSWER_MAX + 1, 1 << 20, INT32_MAX, UINT32_MAX};
        forged.sequence = slot.sequence + 1;
        forged.operation = 1;
        forged.bytes = i < 5 ? sizes[i] : 0;
        forged.status = i < 5 ? 0 : INT32_MIN;
        forged.crc = crc32c(0, &forged, 20);
        memcpy(slot.request, &forged, sizeof(forged));
        CHECK(rpc_serve_once(&server.slot, handler, &server) == -CXLKV_E_CORRUPT);
        CHECK(rpc_send(&slot, 1, "question", 8) == 0);
        memcpy(slot.response, &forged, sizeof(forged));
        if (forged.bytes <= ANSWER_MAX && i < 5) continue;
        CHECK(rpc_receive(&slot, answer, &bytes) == -CXLKV_E_CORRUPT);
    }
    CHECK(bytes == 7);
    CHECK(rpc_client(&slot, memory + 8, 1, 1) == -CXLKV_E_ARGUMENT);
    CHECK(rpc_client(&slot, memory, RPC_BYTES_MAX + 1, 1) == -CXLKV_E_ARGUMENT);
}

static pid_t serve_in_child(enum visibility_mode mode) {
    pid_t child = test_fork();
    if (child) return child;
    served server;
    serve_begin(&server, mode, true);
    serve(&server);
    _exit(0);
}

/* The server dies in its handler: a timeout. The next one meets the same request, dies of it, too;
 * the client gives it up, and goes on with a third one through the same slot. Then the client dies
 * with an answer on its way, and the next client goes on. */
static void test_deaths(enum visibility_mode mode) {
    uint64_t seed = 5;
    begin();
    rpc_slot slot = client_begin(mode, true);
    for (int i = 0; i < 2; i++) {
        pid_t child = serve_in_child(mode);
        if (i == 0) {
            ask(&slot, &seed);
            CHECK(rpc_call(&slot, OPERATION_DIES, "", 1, NULL, SHORT_S) == -CXLKV_E_TIMEOUT);
        }
        test_ended(child, SIGKILL);
    }
    CHECK(rpc_send(&slot, 1, "given up, too", 13) == 0);
    pid_t child = serve_in_child(mode);
    for (uint32_t i = 0; i < 200; i++) ask(&slot, &seed);
    uint64_t last = slot.sequence;
    pid_t client = test_fork();
    if (client == 0) {
        CHECK(rpc_send(&slot, 1, "last words", 10) == 0);
        raise(SIGKILL);
    }
    test_ended(client, SIGKILL);
    slot = client_begin(mode, true);
    CHECK(slot.sequence == last + 1);
    for (uint32_t i = 0; i < 200; i++) ask(&slot, &seed);
    CHECK(rpc_call(&slot, OPERATION_QUITS, NULL, 0, NULL, LONG_S) == 0);
    test_ended(child, 0);
}

int main(void) {
    memory = mmap(NULL, rpc_slot_bytes(QUESTION_MAX, ANSWER_MAX), PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    const enum visibility_mode modes[] = {VISIBILITY_COHERENT, VISIBILITY_FAST, VISIBILITY_STRICT};
    for (uint32_t i = 0; i < 3; i++) {
        test_deaths(modes[i]);
        test_late(modes[i]);
    }
    test_flipped_bits();
    test_lengths();
    for (uint32_t i = 0; i < 3; i++) {
        test_threads(modes[i], false);
        test_threads(modes[i], true);
    }
    return 0;
}
