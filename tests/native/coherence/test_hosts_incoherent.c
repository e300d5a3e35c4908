/* Goal: who reads what others own may be interrupted anywhere, for any time; who appends to its log
 * may die anywhere. Method: on emulated memory, a host that looks at the owners of all extents is
 * stopped at each of its steps in turn; meanwhile another host, which had been fenced over a claim,
 * comes back, falls silent and is fenced anew, in the word that said what counts. The claim must
 * not count. Then a host that appends a batch dies at each of its steps in turn: its process, or
 * all of it, with its caches lost or written back later. Who follows its log never waits and finds
 * nothing damaged; the host comes back and is heard. A host that has come back is seen by its name
 * at once.
 *
 * 25 seeds for each step, or what knobs.h says; there is nothing to limit. */
#include "host_tests.h"
#include "knobs.h"

enum { READER, FENCER, OTHER, EXTENTS = 2, PAGES = 64, NONCE = 7 };
enum { COMING_BACK = 1, FENCING, DONE };

static struct scene {
    incoherent *sim;
    hosts at[HOSTS];
    int actor[HOSTS];
    uint64_t stops_step;         /* of the reader */
    uint64_t reader_steps;
    int stage;                   /* of what happens while it stands */
    extent_owner owners[EXTENTS];
} scene;

static uint64_t left_out, runs, all_steps;

static void pause_(void *context) {
    (void)context;
    incoherent_yield();
}
static bool silent(void *context, uint32_t host) {
    (void)context, (void)host;
    return false;
}

static void reader_run(void *context) {
    (void)context;
    CHECK(hosts_owners(&scene.at[READER], scene.owners) == 0);
}
static void other_run(void *context) {
    (void)context;
    CHECK(hosts_attach(&scene.at[OTHER], NONCE) == 0);
    scene.stage = FENCING;
}
static void fencer_run(void *context) {
    (void)context;
    CHECK(hosts_fence(&scene.at[FENCER], OTHER, 2, false) == 0);
    scene.stage = DONE;
}

/* One after the other: the reader, who comes back, who fences it, the reader again. */
static void disturb(void *context) {
    (void)context;
    if (incoherent_running(scene.sim) == scene.actor[READER] && scene.stage == 0 &&
        ++scene.reader_steps == scene.stops_step) {
        incoherent_pause(scene.sim, scene.actor[READER]);
        scene.actor[OTHER] = incoherent_actor(scene.sim, OTHER, other_run, NULL);
        scene.stage = COMING_BACK;
    }
}

/* A memory with the hosts in it. keeps: caches have room for all of it, and nothing leaves them of
 * itself. */
static incoherent *sim_make(uint64_t seed, bool arm64, bool keeps) {
    hosts_area area = test_hosts_area(EXTENTS, PAGES);
    struct incoherent_options options = incoherent_usual(seed);
    options.hosts = HOSTS;
    options.lines = (uint32_t)(HOSTS * area.block_bytes / FLUSH_LINE_BYTES);
    options.arm64 = arm64;
    options.early_drops = true;
    if (keeps) {
        options.cache_lines_max = options.lines;
        options.odds.fill = 4096;
        options.odds.evict = 0;
    }
    knob_options(&options);
    incoherent *sim = incoherent_make(&options);
    area.base = incoherent_base(sim);
    for (uint32_t i = 0; i < HOSTS; i++)
        scene.at[i] = (hosts){.area = area, .self = i, .mode = VISIBILITY_FAST, .pause = pause_,
                              .silent = silent};
    return sim;
}

/* OTHER gave extent 0 back in its commit 2, and was cut at 1: the extent is its own. */
static void prepare(void) {
    const uint32_t extent = 0;
    for (uint32_t i = 0; i < HOSTS; i++) CHECK(hosts_attach(&scene.at[i], NONCE) == 0);
    for (int ours = 1; ours >= 0; ours--)
        CHECK(test_claim(&scene.at[OTHER], 1, &extent, ours) == 0);
    uint64_t *word = (uint64_t *)hosts_line(&scene.at[FENCER], FENCER, FENCE_LINES) + OTHER;
    flush_store_word(word, 1ull << 40 | 2ull << 38 | 1); /* epoch 1 of OTHER is cut at 1 */
}

static void fails(uint64_t stops_step) {
    const hosts *h = &scene.at[READER];
    incoherent_trace(scene.sim, stderr);
    knob_about(scene.sim, "claims", claims_of(h, OTHER), sizeof(claim_pair));
    for (uint32_t host = 0; host < HOSTS; host++) {
        knob_about(scene.sim, "name", hosts_line(h, host, NAME_LINE), FLUSH_LINE_BYTES);
        knob_about(scene.sim, "commits", hosts_line(h, host, COMMIT_LINE), FLUSH_LINE_BYTES);
        knob_about(scene.sim, "fences", fence_word(h, host, 0), HOSTS * sizeof(uint64_t));
    }
    fprintf(stderr, "failed: a claim is not believed (stopped at step %lu)\n", stops_step);
}

/* False: extent 0 is said to be nobody's. reader_steps: how many steps the reader made. */
static bool run(uint64_t seed, bool arm64, uint64_t stops_step, uint64_t *reader_steps) {
    scene = (struct scene){.stops_step = stops_step};
    scene.sim = sim_make(seed, arm64, true);
    prepare();
    incoherent_hook(scene.sim, disturb, NULL);
    scene.actor[READER] = incoherent_actor(scene.sim, READER, reader_run, NULL);
    incoherent_run(scene.sim);
    if (scene.stage == FENCING) {
        incoherent_actor(scene.sim, FENCER, fencer_run, NULL);
        incoherent_run(scene.sim);
        incoherent_resume(scene.sim, scene.actor[READER]);
        incoherent_run(scene.sim);
    }
    const extent_owner *owner = &scene.owners[0];
    bool right = owner->host == OTHER && !owner->takeable;
    if (!right) fails(stops_step);
    left_out += incoherent_counts(scene.sim)->left_out;
    all_steps += *reader_steps = scene.reader_steps;
    incoherent_free(scene.sim);
    return right;
}

/* ---- a host that dies over an append ---- */

enum { WRITER, FOLLOWER, APPENDED = 3 };

static struct append {
    incoherent *sim;
    int writer;
    uint64_t next, dies_step, steps;
    int loss;                    /* of the host that dies; -1: its process only */
    uint32_t pauses;
    log_place place;
} append;

static void count_pause(void *context) {
    (void)context;
    append.pauses++;
    incoherent_yield();
}

static void append_some(uint64_t next, uint32_t count) {
    log_record records[APPENDED];
    for (uint32_t i = 0; i < count; i++)
        records[i] = (log_record){.operation = LOG_FREE, .page = i, .generation = next + i};
    hosts_log(&scene.at[WRITER], next, records, count);
}

static void writer_run(void *context) {
    (void)context;
    append_some(append.next, APPENDED);
}

/* Comes back, and says something more. */
static void writer_again(void *context) {
    (void)context;
    CHECK(hosts_attach(&scene.at[WRITER], NONCE + 1) == 0);
    append.next = hosts_log_end(&scene.at[WRITER], WRITER);
    append_some(append.next, 1);
}

static void writer_dies(void *context) {
    (void)context;
    if (incoherent_running(append.sim) != append.writer) return;
    if (append.dies_step == 0 || ++append.steps != append.dies_step) return;
    if (append.loss < 0) incoherent_kill(append.sim, append.writer);
    else incoherent_kill_host(append.sim, WRITER, (enum incoherent_loss)append.loss);
}

/* To the end of the log, some times over. */
static void follower_run(void *right) {
    const log_place nobody = {.next = 1}, *places[] = {&append.place, &nobody, &nobody};
    for (int look = 0; look < 4; look++) {
        log_record records[LOG_BATCH];
        uint64_t at = append.place.next;
        int count = 0;
        if (hosts_logs_moved(&scene.at[FOLLOWER], places) & 1 << WRITER)
            count = hosts_read_log(&scene.at[FOLLOWER], WRITER, &append.place, records);
        for (int i = 0; i < count; i++)
            if (records[i].generation && records[i].generation != at + (uint32_t)i) count = -1;
        if (count < 0) *(bool *)right = false;
    }
}

static bool append_run(uint64_t seed, bool arm64, uint64_t dies_step, uint64_t *steps) {
    append = (struct append){.sim = sim_make(seed, arm64, false), .dies_step = dies_step,
                             .next = seed % 2 ? 1 : RECORDS + 3, .loss = (int)(seed % 3) - 1};
    for (uint32_t i = 0; i < HOSTS; i++) {
        CHECK(hosts_attach(&scene.at[i], NONCE) == 0);
        scene.at[i].pause = count_pause;
    }
    for (uint64_t s = 1; s < append.next; s++) append_some(s, 1);
    append.place.next = append.next;
    incoherent_hook(append.sim, writer_dies, NULL);
    append.writer = incoherent_actor(append.sim, WRITER, writer_run, NULL);
    incoherent_run(append.sim);
    all_steps += *steps = append.steps;
    append.dies_step = 0;
    bool right = true;
    incoherent_actor(append.sim, FOLLOWER, follower_run, &right);
    incoherent_run(append.sim);
    right = right && append.pauses == 0;
    incoherent_actor(append.sim, WRITER, writer_again, NULL);
    incoherent_run(append.sim);
    incoherent_actor(append.sim, FOLLOWER, follower_run, &right);
    incoherent_run(append.sim);
    right = right && append.pauses == 0 && append.place.next == append.next + 1;
    if (!right) {
        incoherent_trace(append.sim, stderr);
        knob_about(append.sim, "log", hosts_line(&scene.at[FOLLOWER], WRITER, LOG_LINES),
                   RECORDS * FLUSH_LINE_BYTES);
        fprintf(stderr, "failed: a log is followed (its writer died at step %lu)\n", dies_step);
    }
    left_out += incoherent_counts(append.sim)->left_out;
    incoherent_free(append.sim);
    return right;
}

/* ---- a host that has come back ---- */

static struct {
    bool back, seen, right;
} coming;

static void coming_run(void *context) {
    (void)context;
    CHECK(hosts_attach(&scene.at[OTHER], NONCE + 1) == 0);
    incoherent_tell();
    coming.back = true;
    while (!coming.seen) incoherent_yield(); /* nothing of its own helps its name into memory */
}

static void seeing_run(void *context) {
    (void)context;
    host_name name;
    while (!coming.back) incoherent_yield();
    coming.right = hosts_name(&scene.at[READER], OTHER, &name) && name.status == HOST_LIVE &&
                   name.nonce == NONCE + 1 && name.epoch == scene.at[OTHER].epoch;
    coming.seen = true;
}

static bool come_back(uint64_t seed, bool arm64) {
    incoherent *sim = sim_make(seed, arm64, false);
    for (uint32_t i = 0; i < HOSTS; i++) CHECK(hosts_attach(&scene.at[i], NONCE) == 0);
    coming.back = coming.seen = coming.right = false;
    incoherent_actor(sim, OTHER, coming_run, NULL);
    incoherent_actor(sim, READER, seeing_run, NULL);
    incoherent_run(sim);
    if (!coming.right) {
        incoherent_trace(sim, stderr);
        knob_about(sim, "name", hosts_line(&scene.at[READER], OTHER, NAME_LINE), FLUSH_LINE_BYTES);
        fprintf(stderr, "failed: a host that has come back is seen\n");
    }
    left_out += incoherent_counts(sim)->left_out;
    incoherent_free(sim);
    return coming.right;
}

static bool run_all(uint64_t seed, bool arm64) {
    return come_back(seed, arm64) && knob_each_step(append_run, seed, arm64, &runs) &&
           knob_each_step(run, seed, arm64, &runs);
}

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 25);
    if (!knob_all_seeds(seeds, run_all)) return 1;
    fprintf(stderr, "%lu seeds, %lu runs, %lu steps: left out %lu\n", seeds, runs, all_steps,
            left_out);
    return 0;
}
