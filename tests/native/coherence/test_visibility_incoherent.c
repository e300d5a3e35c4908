/* Goal: on memory whose hosts' caches do not see each other, nothing stale or torn is accepted and
 * nothing published is lost. Method: the owners and readers of visibility_scenario.h on 2 to 8
 * emulated hosts, x86 and arm64, many seeds; every step of every copy is a place where another host
 * may go on. With one flush or fence left out it must fail: tests/native/mutants.py.
 *
 * 300 seeds, or what knobs.h says. */
#include "knobs.h"
#include "visibility_scenario.h"

enum { OWNERS_MAX = 4, OWNER_PROCESSES = 2, OPTIMISTS = 2 };
static struct { uint64_t accepted, refused, reused, waited, visited, steps, left_out; } total;
static incoherent *memory;

/* As the emulator wants them. */
static void owner_actor(void *context) { owner_run(context); }
static void reader_actor(void *context) { reader_run(context); }

/* While all stand where they stood: the trace, and where the record lies. */
static void failed(const scenario *s, uint32_t r) {
    incoherent_trace(memory, stderr);
    knob_about(memory, "descriptor", scenario_descriptor(s, r), FLUSH_LINE_BYTES);
    knob_about(memory, "header", scenario_header(s, r), FLUSH_LINE_BYTES);
    knob_about(memory, "payload", scenario_payload(s, r), s->payload_lines * FLUSH_LINE_BYTES);
    for (uint32_t reader = 0; reader < s->readers; reader++)
        knob_about(memory, "pins", scenario_pin(s, reader, r).word, sizeof(uint64_t));
}

static bool run(uint64_t seed, bool arm64) {
    uint64_t dice = seed * 2 + arm64;
    uint32_t hosts = 2 + random_below(&dice, 7), owners_count = 1 + random_below(&dice, OWNERS_MAX);
    hosts = knob_hosts(hosts);
    scenario *s = calloc(1, sizeof(*s));
    CHECK(s);
    *s = (scenario){.records = owners_count * (1 + random_below(&dice, 3)),
                    .payload_lines = 1u << random_below(&dice, 3),
                    .hosts = hosts, .readers = 1 + random_below(&dice, 4), .guesses = true,
                    .wait = incoherent_yield, .tell = incoherent_tell, .fail = failed,
                    .mode = random_below(&dice, 2) ? VISIBILITY_FAST : VISIBILITY_STRICT};
    struct incoherent_options options = incoherent_usual(seed);
    options.hosts = hosts;
    options.lines = (uint32_t)scenario_lines(s);
    options.arm64 = arm64;
    options.early_drops = true; /* what the manuals allow, whatever hardware does */
    knob_options(&options);
    incoherent *sim = memory = incoherent_make(&options);
    CHECK(sim);
    s->base = incoherent_base(sim);
    owner owners[OWNERS_MAX];
    reader readers[SCENARIO_READERS_MAX + OPTIMISTS];
    uint32_t each = s->records / owners_count;
    for (uint32_t i = 0; i < owners_count; i++) {
        owners[i] = (owner){.s = s, .first = i * each, .count = each,
                            .rounds = knob_limit("CXLKV_ROUNDS", 8),
                            .seed = seed + i};
        for (uint32_t r = 0; r < SCENARIO_RECORDS_MAX; r++) owners[i].generation[r] = 1;
        for (uint32_t process = 0; process < OWNER_PROCESSES; process++)
            incoherent_actor(sim, i % hosts, owner_actor, &owners[i]);
    }
    for (uint32_t i = 0; i < s->readers + OPTIMISTS; i++) {
        readers[i] = (reader){.s = s, .number = i, .seed = seed + 100 + i,
                              .rounds = knob_limit("CXLKV_ROUNDS", 16)};
        uint32_t host = random_below(&dice, hosts);
        if (i < s->readers) {
            readers[i].kind = random_below(&dice, 3) ? READER_PINNING : READER_TRUSTING;
            s->reader_host[i] = host;
        }
        incoherent_actor(sim, host, reader_actor, &readers[i]);
    }
    incoherent_run(sim);
    total.accepted += s->accepted;
    total.refused += s->refused;
    total.reused += s->reused;
    total.waited += s->waited;
    total.visited += s->visited;
    total.steps += incoherent_step_count(sim);
    total.left_out += incoherent_counts(sim)->left_out;
    bool overwritten = incoherent_counts(sim)->overwritten != 0; /* V7 */
    bool fine = !s->failed && !overwritten;
    if (!s->failed && overwritten) {
        incoherent_trace(sim, stderr);
        fprintf(stderr, "failed: a line has two writers\n");
    }
    incoherent_free(sim);
    free(s);
    return fine;
}

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 300);
    if (!knob_all_seeds(seeds, run)) return 1;
    fprintf(stderr, "%lu seeds, %lu steps: accepted %lu, refused %lu, read in place %lu, ", seeds,
            total.steps, total.accepted, total.refused, total.visited);
    fprintf(stderr, "reused %lu, still pinned %lu, left out %lu\n", total.reused, total.waited,
            total.left_out);
    if (!knob_enough(seeds)) return 0;
    CHECK(total.accepted > seeds && total.refused > 0 && total.reused > seeds);
    CHECK(total.visited > seeds && total.waited > 0);
    return 0;
}
