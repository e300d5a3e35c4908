/* Goal: between hosts whose caches do not see each other, each answer is the one to its request,
 * what was sent is seen, nothing is read twice without need, and whoever dies leaves the slot in a
 * state that the next one goes on from. Method: clients and a server on 2 to 4 emulated hosts, x86
 * and arm64, many seeds. In a third of the seeds clients give up at random and send the next
 * request; in another third, processes and whole hosts are killed and come back as well. With one
 * flush or fence left out it must fail: tests/native/mutants.py.
 *
 * 300 seeds, or what knobs.h says. */
#include "coherence/rpc.h"
#include "knobs.h"
#include "rpc_scenario.h"

enum { SLOTS_MAX = 3, ROUNDS = 12, KILLS_MAX = 6 };
enum trouble { CALM, HASTY, DEADLY };

typedef struct call {                /* a client and its slot */
    struct scenario *s;
    uint8_t *memory;
    uint32_t host, rounds;
    uint64_t seed;
    int actor;
    /* What really happened, outside of the shared memory: numbers of what sending returned for. */
    uint64_t sent, answered;
} call;

typedef struct scenario {
    incoherent *sim;
    enum visibility_mode mode;
    enum trouble trouble;
    uint32_t count, kills;
    uint64_t dice;
    call calls[SLOTS_MAX];
    int server;
    uint32_t server_host;
    bool failed;
} scenario;

static struct { uint64_t answers, errors, given_up, read_again, kills, steps, left_out; } total;

static void fails(scenario *s, const char *what, const call *c, uint64_t sequence) {
    if (s->failed) return;
    s->failed = true;
    incoherent_trace(s->sim, stderr);
    fprintf(stderr, "failed: %s", what);
    if (c) fprintf(stderr, " (slot %ld, request %lu)", (long)(c - s->calls), sequence);
    fputc('\n', stderr);
    if (c) knob_about(s->sim, "slot", c->memory, rpc_slot_bytes(QUESTION_MAX, ANSWER_MAX));
}

/* ---- client ---- */

/* Until the answer, or until patience ends: a deadline in looks. */
static void ask(call *c, rpc_slot *slot) {
    scenario *s = c->s;
    uint8_t question[QUESTION_MAX], answer[ANSWER_MAX];
    uint32_t bytes = question_make(&c->seed, QUESTION_MAX, question), answer_bytes = 0;
    uint32_t operation = random_below(&c->seed, OPERATIONS);
    uint32_t looks = s->trouble == CALM ? UINT32_MAX : 1 + random_below(&c->seed, 300);
    if (s->trouble == HASTY && random_below(&c->seed, 2)) looks = 1 + random_below(&c->seed, 6);
    CHECK(rpc_send(slot, operation, question, bytes) == 0);
    incoherent_tell();
    c->sent = slot->sequence;
    for (; looks && !s->failed; looks--) {
        bool must = c->answered == slot->sequence;
        int code = rpc_receive(slot, answer, &answer_bytes);
        if (code == 0 && must) fails(s, "an answer was lost", c, slot->sequence);
        if (code) {
            int64_t got = code < 0 ? code : (int64_t)answer_bytes;
            if (!answer_right(operation, question, bytes, got, answer))
                fails(s, "a wrong answer", c, slot->sequence);
            total.answers += code > 0;
            total.errors += code < 0;
            return;
        }
        incoherent_yield();
    }
    total.given_up += looks == 0;
}

static void client_run(void *context) {
    call *c = context;
    rpc_slot slot = {.mode = c->s->mode};
    CHECK(rpc_client(&slot, c->memory, QUESTION_MAX, ANSWER_MAX) == 0);
    while (c->rounds && !c->s->failed) {
        ask(c, &slot);
        c->rounds--;
    }
    if (slot.read_again) fails(c->s, "an answer had to be read again", c, slot.sequence);
}

/* ---- server ---- */

static bool all_done(const scenario *s) {
    for (uint32_t i = 0; i < s->count; i++)
        if (s->calls[i].rounds) return s->failed;
    return true;
}

static void server_run(void *context) {
    scenario *s = context;
    rpc_slot slots[SLOTS_MAX];
    uint8_t local[SLOTS_MAX][QUESTION_MAX + ANSWER_MAX];
    for (uint32_t i = 0; i < s->count; i++) {
        slots[i] = (rpc_slot){.mode = s->mode};
        CHECK(rpc_server(&slots[i], s->calls[i].memory, QUESTION_MAX, ANSWER_MAX, local[i]) == 0);
        incoherent_tell();
        s->calls[i].answered = slots[i].sequence; /* by the server before, which died */
        incoherent_yield();
    }
    while (!all_done(s)) {
        for (uint32_t i = 0; i < s->count; i++) {
            call *c = &s->calls[i];
            uint64_t sent = c->sent;
            int code = rpc_serve_once(&slots[i], answer_make, NULL);
            if (code == 0 && sent > slots[i].sequence) fails(s, "a request was lost", c, sent);
            if (code < 0 && s->trouble == CALM) fails(s, "a request was damaged", c, sent);
            if (code == 0) continue;
            incoherent_tell();
            c->answered = slots[i].sequence;
        }
        incoherent_yield();
    }
    for (uint32_t i = 0; i < s->count; i++) {
        total.read_again += slots[i].read_again;
        if (s->trouble == CALM && slots[i].read_again)
            fails(s, "a request had to be read again", &s->calls[i], slots[i].sequence);
    }
}

/* ---- deaths ---- */

/* A process dies and the next one of its host takes over, or the whole host with what it cached. */
static void kill_sometimes(void *context) {
    scenario *s = context;
    if (!s->kills || random_below(&s->dice, 1500)) return;
    uint32_t victim = random_below(&s->dice, s->count + 1);
    bool server = victim == s->count;
    int actor = server ? s->server : s->calls[victim].actor;
    uint32_t host = server ? s->server_host : s->calls[victim].host;
    if (!incoherent_alive(s->sim, actor)) return;
    s->kills--;
    total.kills++;
    uint32_t how = random_below(&s->dice, 4);
    if (how < 2) incoherent_kill(s->sim, actor);
    else incoherent_kill_host(s->sim, host, how == 2 ? INCOHERENT_DROP : INCOHERENT_DELAY);
    for (uint32_t i = 0; i < s->count; i++)
        if (s->calls[i].rounds && s->calls[i].host == host &&
            !incoherent_alive(s->sim, s->calls[i].actor))
            s->calls[i].actor = incoherent_actor(s->sim, host, client_run, &s->calls[i]);
    if (s->server_host == host && !incoherent_alive(s->sim, s->server))
        s->server = incoherent_actor(s->sim, host, server_run, s);
}

static bool run(uint64_t seed, bool arm64) {
    scenario *s = calloc(1, sizeof(*s));
    CHECK(s);
    s->dice = seed * 2 + arm64;
    uint32_t hosts = knob_hosts(2 + random_below(&s->dice, 3));
    s->count = 1 + random_below(&s->dice, SLOTS_MAX);
    s->trouble = (enum trouble)random_below(&s->dice, 3);
    s->mode = random_below(&s->dice, 2) ? VISIBILITY_FAST : VISIBILITY_STRICT;
    s->kills = s->trouble == DEADLY ? knob_limit("CXLKV_DISTURBANCES", KILLS_MAX) : 0;
    uint64_t slot_bytes = rpc_slot_bytes(QUESTION_MAX, ANSWER_MAX);
    struct incoherent_options options = incoherent_usual(seed);
    options.hosts = hosts;
    options.lines = (uint32_t)(s->count * slot_bytes / FLUSH_LINE_BYTES);
    options.arm64 = arm64;
    options.early_drops = true;
    knob_options(&options);
    options.steps_max = 20000000;
    incoherent *sim = s->sim = incoherent_make(&options);
    for (uint32_t i = 0; i < s->count; i++) {
        call *c = &s->calls[i];
        *c = (call){.s = s, .memory = (uint8_t *)incoherent_base(sim) + i * slot_bytes,
                    .host = 1 + random_below(&s->dice, hosts - 1), .seed = seed * 8 + i,
                    .rounds = knob_limit("CXLKV_ROUNDS", ROUNDS)};
        c->actor = incoherent_actor(sim, c->host, client_run, c);
    }
    s->server = incoherent_actor(sim, s->server_host, server_run, s);
    incoherent_hook(sim, kill_sometimes, s);
    incoherent_run(sim);
    if (!all_done(s)) fails(s, "a client or the server hangs", &s->calls[0], s->calls[0].sent);
    if (incoherent_counts(sim)->overwritten) fails(s, "a line has two writers", NULL, 0);
    total.steps += incoherent_step_count(sim);
    total.left_out += incoherent_counts(sim)->left_out;
    bool failed = s->failed;
    incoherent_free(sim);
    free(s);
    return !failed;
}

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 300);
    if (!knob_all_seeds(seeds, run)) return 1;
    fprintf(stderr, "%lu seeds, %lu steps: answers %lu, errors %lu, given up %lu, read again %lu, "
            "kills %lu, left out %lu\n", seeds, total.steps, total.answers, total.errors,
            total.given_up, total.read_again, total.kills, total.left_out);
    if (!knob_enough(seeds)) return 0;
    CHECK(total.answers > seeds && total.errors > 0 && total.given_up > 0 && total.kills > 0);
    return 0;
}
