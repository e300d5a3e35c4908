/* The emulated memory: what must go wrong on it does at some seed, and what must not never does.
 *
 * Each case is a few actors run at many seeds; an outcome is wanted never, or at least once. */
#include <signal.h>
#include <time.h>

#include "base/flush.h"
#include "check.h"
#include "incoherent.h"

enum { SEEDS = 1500 };
enum { LINES = 16, FLAG = 8, POLLS_MAX = 40, COPY_WORDS = 24 };
enum wanted { NEVER, SOMETIMES };

static incoherent *sim;
static uint8_t *base;
static uint64_t seeds_run, steps_run;
static struct incoherent_counts total;

static uint64_t *line_of(uint32_t line) {
    return (uint64_t *)(void *)(base + (size_t)line * FLUSH_LINE_BYTES);
}

static bool early_drops = true, posted_fences;

static void begin(struct incoherent_options options) {
    options.lines = LINES;
    options.early_drops = early_drops;
    options.posted_fences |= posted_fences;
    options.steps_max = 1000000;
    sim = incoherent_make(&options);
    base = incoherent_base(sim);
}

static void end(void) {
    const struct incoherent_counts *counts = incoherent_counts(sim);
    for (size_t i = 0; i < sizeof(total) / sizeof(uint64_t); i++)
        ((uint64_t *)&total)[i] += ((const uint64_t *)counts)[i];
    seeds_run++;
    steps_run += counts->steps;
    incoherent_free(sim);
}

/* The line's words are all `value`. */
static void store_line(uint32_t line, uint64_t value) {
    uint64_t words[8];
    for (uint32_t i = 0; i < 8; i++) words[i] = value;
    flush_store_line(line_of(line), words, 0);
}

static uint64_t peek(uint32_t line, uint32_t word) {
    uint64_t value;
    incoherent_peek(sim, line_of(line) + word, 8, &value);
    return value;
}

/* What the running case does, and what it saw. */
static struct {
    bool plain;        /* no write-back, no invalidation */
    bool weak_fence;   /* the reader's fence is of stores */
    bool copies;       /* the data is COPY_WORDS words by flush_copy_in() and flush_copy_out() */
    uint32_t skew;     /* the copy starts so many bytes after a line does */
    uint32_t reader_host;
    bool seen, stale, torn;
    uint64_t got[2];
    bool given;
} now;

/* Outcome of one seed. */
typedef bool run_seed(struct incoherent_options options);

static uint32_t count_outcomes(run_seed *run, bool arm64, enum flush_site left_out) {
    uint32_t count = 0;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct incoherent_options options = incoherent_usual(seed);
        options.arm64 = arm64;
        options.left_out = left_out;
        now.seen = now.stale = now.torn = now.given = false;
        now.got[0] = now.got[1] = 0;
        count += run(options);
    }
    return count;
}

static void expect(const char *what, bool arm64, enum flush_site left_out, run_seed *run,
                   enum wanted wanted) {
    uint32_t count = count_outcomes(run, arm64, left_out);
    printf("%-5s %-67s %5u of %d, wanted %s\n", arm64 ? "arm64" : "x86", what, count, SEEDS,
           wanted == NEVER ? "never" : "sometimes");
    fflush(stdout);
    CHECK((count > 0) == (wanted == SOMETIMES));
}

static void expect_both(const char *what, enum flush_site left_out, run_seed *run,
                        enum wanted wanted) {
    expect(what, false, left_out, run, wanted);
    expect(what, true, left_out, run, wanted);
}

typedef struct role {
    uint32_t host;
    void (*run)(void *context);
} role;

/* The roles, with their numbers as contexts, until all are done. Returns what of `now` says that a
 * load was stale. */
static bool play(struct incoherent_options options, uint32_t count, const role *roles) {
    begin(options);
    for (uint32_t i = 0; i < count; i++)
        incoherent_actor(sim, roles[i].host, roles[i].run, (void *)(uintptr_t)i);
    incoherent_run(sim);
    end();
    return now.stale;
}
#define PLAY(options, ...) \
    play(options, sizeof((role[]){__VA_ARGS__}) / sizeof(role), (role[]){__VA_ARGS__})

/* Message passing: data, then a flag. */

static void writer(void *context) {
    (void)context;
    if (now.copies) {
        uint64_t words[COPY_WORDS];
        for (uint32_t i = 0; i < COPY_WORDS; i++) words[i] = UINT64_MAX;
        flush_copy_in(base + now.skew, words, sizeof(words));
    } else {
        store_line(0, 1);
        if (!now.plain) flush_write_back(FLUSH_PUBLISH_HEADER, line_of(0), 64);
    }
    if (!now.plain) flush_fence_stores(FLUSH_PUBLISH_PAYLOAD_FENCE);
    uint64_t flag[8] = {1};
    flush_store_line(line_of(FLAG), flag, 0);
    if (now.plain) return;
    flush_write_back(FLUSH_PUBLISH_DESCRIPTOR, line_of(FLAG), 64);
    flush_fence_stores(FLUSH_PUBLISH_FENCE);
}

static void reader(void *context) {
    (void)context;
    uint64_t words[COPY_WORDS] = {0};
    flush_load_line(words, line_of(0));
    for (uint32_t i = 0; i < POLLS_MAX && !now.seen; i++) {
        if (!now.plain) {
            flush_invalidate(FLUSH_ACQUIRE_DESCRIPTOR, line_of(FLAG), 64);
            flush_fence_all(FLUSH_ACQUIRE_DESCRIPTOR_FENCE);
        }
        now.seen = flush_load_word(line_of(FLAG)) == 1;
        if (!now.seen) incoherent_yield();
    }
    if (!now.seen) return;
    size_t bytes = now.copies ? sizeof(words) : 64;
    if (!now.plain) {
        flush_fence_all(FLUSH_ACQUIRE_SEEN_FENCE);
        flush_invalidate(FLUSH_ACQUIRE_PAYLOAD, base + now.skew, bytes);
        if (now.weak_fence) flush_fence_stores(FLUSH_ACQUIRE_PAYLOAD_FENCE);
        else flush_fence_all(FLUSH_ACQUIRE_PAYLOAD_FENCE);
    }
    flush_copy_out(words, base + now.skew, bytes);
    uint32_t fresh = 0;
    for (uint32_t i = 0; i < bytes / 8; i++) fresh += words[i] == (now.copies ? UINT64_MAX : 1);
    now.stale = fresh < bytes / 8;
    now.torn = now.stale && fresh;
}

static bool message_stale(struct incoherent_options options) {
    return PLAY(options, {now.reader_host, reader}, {0, writer});
}

static bool message_seen(struct incoherent_options options) {
    return !message_stale(options) && now.seen;
}

static bool message_torn(struct incoherent_options options) {
    message_stale(options);
    return now.torn;
}

static void test_message(void) {
    now.reader_host = 1;
    expect_both("message passed, all steps: the data is seen", 0, message_seen, SOMETIMES);
    expect_both("message passed, all steps: old data", 0, message_stale, NEVER);
    posted_fences = true;
    expect_both("message passed, all steps, posted fences: old data", 0, message_stale, NEVER);
    posted_fences = false;
    now.plain = true;
    expect_both("without any write-back or invalidation: old data", 0, message_stale, SOMETIMES);
    now.plain = false;
    static const struct {
        enum flush_site site;
        const char *what;
    } steps[] = {
        {FLUSH_PUBLISH_HEADER, "without the writer's write-back: old data"},
        {FLUSH_PUBLISH_PAYLOAD_FENCE, "without the writer's fence: old data"},
        {FLUSH_ACQUIRE_PAYLOAD, "without the reader's invalidation: old data"},
        {FLUSH_ACQUIRE_PAYLOAD_FENCE, "without the reader's full fence: old data"},
        {FLUSH_ACQUIRE_SEEN_FENCE, "without a fence between flag and invalidation: old data"},
    };
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++)
        expect_both(steps[i].what, steps[i].site, message_stale, SOMETIMES);
    early_drops = false;
    expect_both("the same where older loads come first: old data", FLUSH_ACQUIRE_SEEN_FENCE,
                message_stale, NEVER);
    early_drops = true;
    expect_both("without the write-back of the flag: the data is seen", FLUSH_PUBLISH_DESCRIPTOR,
                message_seen, SOMETIMES); /* by eviction */
    now.weak_fence = true;
    expect("the reader fences stores only: old data", false, 0, message_stale, SOMETIMES);
    expect("the reader fences stores only, which is dsb: old data", true, 0, message_stale, NEVER);
    now.weak_fence = false;
    now.reader_host = 0;
    now.plain = true;
    expect("on one host, no flush, stores in order: old data", false, 0, message_stale, NEVER);
    expect("on one host, no flush, stores in any order: old data", true, 0, message_stale,
           SOMETIMES);
    now.plain = false;
    now.reader_host = 1;
}

static void test_copies(void) {
    now.copies = true;
    for (now.skew = 0; now.skew <= 21; now.skew += 21) {
        expect_both(now.skew ? "a copy at an odd address: old data" : "a copy: old data", 0,
                    message_stale, NEVER);
        expect_both("a copy without the writer's fence: torn data", FLUSH_PUBLISH_PAYLOAD_FENCE,
                    message_torn, SOMETIMES);
    }
    now.skew = 0;
    now.copies = false;
}

/* Message passing by release and acquire, within a host: needs no fence on either CPU. */

static void releaser(void *context) {
    (void)context;
    store_line(0, 1);
    flush_store_word(line_of(FLAG), 1);
}

static void acquirer(void *context) {
    (void)context;
    uint64_t words[8];
    for (uint32_t i = 0; i < POLLS_MAX && !now.seen; i++) {
        if (now.plain) flush_copy_out(words, line_of(FLAG), 8);
        else words[0] = flush_load_word(line_of(FLAG));
        now.seen = words[0] == 1;
        if (!now.seen) incoherent_yield();
    }
    flush_load_line(words, line_of(0));
    for (uint32_t i = 0; i < 8; i++) now.stale |= now.seen && words[i] != 1;
}

static bool release_stale(struct incoherent_options options) {
    return PLAY(options, {0, releaser}, {0, acquirer});
}

/* A load never goes back in time on one host, whatever its cache and its neighbours do. */

static void counter(void *context) {
    (void)context;
    for (uint64_t i = 1; i <= 30; i++) flush_store_word(line_of(3), i);
}

static void observer(void *context) {
    (void)context;
    uint64_t last = 0, words[8];
    for (uint32_t i = 0; i < 30; i++) {
        flush_load_line(words, line_of(3));
        now.stale |= words[0] < last;
        last = words[0];
        if (i % 4 == 0) flush_invalidate(FLUSH_NONE, line_of(3), 64);
    }
}

static bool went_back(struct incoherent_options options) {
    return PLAY(options, {0, counter}, {0, observer}, {0, observer});
}

/* Store buffering: each stores its own line, then loads the other's. */

static bool stores_fenced_only;

static void buffering(void *context) {
    uint32_t self = (uint32_t)(uintptr_t)context;
    (void)flush_load_word(line_of(1 - self));
    flush_store_word(line_of(self), 1);
    flush_write_back(FLUSH_PIN, line_of(self), 64);
    flush_fence_all(FLUSH_PIN_FENCE);
    flush_invalidate(FLUSH_OWNER_LOOK, line_of(1 - self), 64);
    flush_fence_all(FLUSH_OWNER_LOOK_FENCE);
    now.got[self] = flush_load_word(line_of(1 - self));
}

static bool both_old(struct incoherent_options options) {
    PLAY(options, {0, buffering}, {1, buffering});
    return !now.got[0] && !now.got[1];
}

static void buffering_at_home(void *context) {
    uint32_t self = (uint32_t)(uintptr_t)context;
    flush_store_word(line_of(self), 1);
    if (stores_fenced_only) flush_fence_stores(FLUSH_PIN_FENCE);
    else flush_fence_all(FLUSH_PIN_FENCE);
    now.got[self] = flush_load_word(line_of(1 - self));
}

static bool both_old_at_home(struct incoherent_options options) {
    PLAY(options, {0, buffering_at_home}, {0, buffering_at_home});
    return !now.got[0] && !now.got[1];
}

static void test_buffering(void) {
    expect_both("two hosts store and look, all steps: both see old", 0, both_old, NEVER);
    expect_both("without the full fence: both see old", FLUSH_PIN_FENCE, both_old,
                SOMETIMES);
    expect_both("without the last fence: both see old", FLUSH_OWNER_LOOK_FENCE, both_old,
                SOMETIMES);
    expect_both("without the invalidation: both see old", FLUSH_OWNER_LOOK, both_old, SOMETIMES);
    expect_both("without the write-back: both see old", FLUSH_PIN, both_old, SOMETIMES);
    expect_both("on one host with fences: both see old", 0, both_old_at_home, NEVER);
    expect_both("on one host without: both see old", FLUSH_PIN_FENCE, both_old_at_home,
                SOMETIMES);
    stores_fenced_only = true;
    expect_both("on one host, stores fenced: both see old", 0, both_old_at_home, NEVER);
    posted_fences = true;
    expect("on one host, stores fenced, posted: both see old", false, 0, both_old_at_home,
           SOMETIMES);
    stores_fenced_only = posted_fences = false;
}

/* Two hosts write words of one line (V7), or of a line each. */

static uint32_t second_line;

static void sharer(void *context) {
    uint32_t self = (uint32_t)(uintptr_t)context;
    uint64_t *word = line_of(self * second_line) + self;
    for (uint64_t i = 1; i <= 4; i++) {
        flush_store_word(word, i);
        flush_write_back(FLUSH_NONE, word, 8);
        flush_fence_all(FLUSH_NONE);
    }
}

static bool update_lost(struct incoherent_options options) {
    begin(options);
    for (uint32_t i = 0; i < 2; i++) incoherent_actor(sim, i, sharer, (void *)(uintptr_t)i);
    incoherent_run(sim);
    incoherent_drain(sim);
    bool lost = peek(0, 0) != 4 || peek(second_line, 1) != 4;
    CHECK(!lost || incoherent_counts(sim)->overwritten > 0);
    CHECK(second_line == 0 || incoherent_counts(sim)->overwritten == 0);
    end();
    return lost;
}

/* A line changes hands (V8). */

static void giver(void *context) {
    (void)context;
    store_line(0, 1);
    flush_write_back(FLUSH_FREE_DESCRIPTOR, line_of(0), 64);
    flush_invalidate(FLUSH_FREE_DESCRIPTOR, line_of(0), 64);
    flush_fence_all(FLUSH_FREE_FENCE);
    now.given = true;
}

static void receiver(void *context) {
    (void)context;
    while (!now.given) incoherent_yield();
    flush_invalidate(FLUSH_NONE, line_of(0), 64);
    flush_fence_all(FLUSH_NONE);
    store_line(0, 2);
    flush_write_back(FLUSH_NONE, line_of(0), 64);
    flush_fence_all(FLUSH_NONE);
}

static bool late_eviction(struct incoherent_options options) {
    begin(options);
    incoherent_actor(sim, 0, giver, NULL);
    incoherent_actor(sim, 1, receiver, NULL);
    incoherent_run(sim);
    incoherent_drain(sim);
    bool destroyed = false;
    for (uint32_t i = 0; i < 8; i++) destroyed |= peek(0, i) != 2;
    end();
    return destroyed;
}

static void test_lines(void) {
    expect_both("two hosts write a line each: a store is lost",
                (second_line = 1, FLUSH_NONE), update_lost, NEVER);
    expect_both("two hosts write one line (V7): a store is lost",
                (second_line = 0, FLUSH_NONE), update_lost, SOMETIMES);
    expect_both("handed over after write-back and invalidation (V8): data destroyed", 0,
                late_eviction, NEVER);
    expect_both("handed over without: data destroyed", FLUSH_FREE_DESCRIPTOR, late_eviction,
                SOMETIMES);
    expect_both("handed over without the fence: data destroyed", FLUSH_FREE_FENCE, late_eviction,
                SOMETIMES);
}

/* Deaths. */

static uint64_t kill_step;
static enum { KILL_PROCESS, KILL_HOST_DROP, KILL_HOST_DELAY } how;
static uint64_t landed[LINES]; /* when the host died */

static void strike(void *context) {
    (void)context;
    if (incoherent_step_count(sim) != kill_step) return;
    if (how == KILL_PROCESS) incoherent_kill(sim, 0);
    else incoherent_kill_host(sim, 0, how == KILL_HOST_DROP ? INCOHERENT_DROP : INCOHERENT_DELAY);
    for (uint32_t i = 0; i < LINES; i++) landed[i] = peek(i, 0);
}

static void victim(void *context) {
    (void)context;
    for (uint32_t i = 0; i < LINES; i++) store_line(i, 1);
}

static void bystander(void *context) {
    (void)context;
    for (uint32_t i = 0; i < 100; i++) (void)flush_load_word(line_of(i % LINES));
}

static void run_victim(struct incoherent_options options) {
    begin(options);
    incoherent_actor(sim, 0, victim, NULL);
    incoherent_actor(sim, 1, bystander, NULL);
    kill_step = 20 + options.seed % 150;
    incoherent_hook(sim, strike, NULL);
    incoherent_run(sim);
    CHECK(!incoherent_alive(sim, 0) && !incoherent_alive(sim, 1));
    incoherent_drain(sim);
}

static bool not_a_prefix(struct incoherent_options options) {
    how = KILL_PROCESS;
    run_victim(options);
    bool gap = false;
    for (uint32_t i = 1; i < LINES * 8; i++)
        gap |= peek(i / 8, i % 8) > peek((i - 1) / 8, (i - 1) % 8);
    end();
    return gap;
}

static bool stores_lost(struct incoherent_options options) {
    how = KILL_PROCESS;
    run_victim(options);
    bool lost = incoherent_counts(sim)->lost_stores > 0;
    end();
    return lost;
}

static bool lands_after_death(struct incoherent_options options) {
    run_victim(options);
    bool later = false;
    for (uint32_t i = 0; i < LINES; i++) later |= peek(i, 0) != landed[i];
    CHECK(!later || incoherent_counts(sim)->late_write_backs > 0);
    end();
    return later;
}

static bool starts_again_empty(struct incoherent_options options) {
    how = KILL_HOST_DELAY;
    run_victim(options);
    incoherent_actor(sim, 0, bystander, NULL);
    incoherent_run(sim);
    uint64_t late = incoherent_counts(sim)->late_write_backs;
    incoherent_drain(sim);
    bool wrong = incoherent_counts(sim)->late_write_backs != late;
    end();
    return wrong;
}

static void test_deaths(void) {
    expect("a process dies: a later store is there, an earlier one is not", false, 0, not_a_prefix,
           NEVER);
    expect("a process dies: a later store is there, an earlier one is not", true, 0, not_a_prefix,
           SOMETIMES);
    expect_both("a process dies: stores are lost with it", 0, stores_lost, SOMETIMES);
    how = KILL_HOST_DELAY;
    expect_both("a host is cut off: its stores land later", 0, lands_after_death, SOMETIMES);
    how = KILL_HOST_DROP;
    expect_both("a host loses power: its stores land later", 0, lands_after_death, NEVER);
    expect_both("a host comes back: its old lines land later", 0, starts_again_empty, NEVER);
}

/* One actor sees its own stores, whatever its cache, its buffer and early loads do; and memory has
 * them in the end. */

static uint8_t model[LINES * FLUSH_LINE_BYTES];

static void loner(void *context) {
    uint64_t random = *(uint64_t *)context;
    uint8_t bytes[200];
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t length = 1 + random_below(&random, sizeof(bytes));
        uint32_t at = random_below(&random, (uint32_t)sizeof(model) - length);
        uint32_t word = at / 8;
        switch (random_below(&random, 7)) {
        case 0:
            for (uint32_t b = 0; b < length; b++) bytes[b] = (uint8_t)random_next(&random);
            memcpy(model + at, bytes, length);
            flush_copy_in(base + at, bytes, length);
            break;
        case 1:
            memcpy(model + word * 8, &random, 8);
            flush_store_word(base + word * 8, random);
            break;
        case 2: flush_write_back(FLUSH_NONE, base + at, length); break;
        case 3: flush_invalidate(FLUSH_NONE, base + at, length); break;
        case 4: flush_evict(FLUSH_NONE, base + at, length); break;
        case 5: flush_fence_stores(FLUSH_NONE); break;
        default:
            flush_copy_out(bytes, base + at, length);
            now.stale |= memcmp(bytes, model + at, length) != 0;
        }
    }
}

static bool own_stores_missed(struct incoherent_options options) {
    options.posted_fences = options.seed % 2;
    begin(options);
    memset(model, 0, sizeof(model));
    incoherent_actor(sim, 0, loner, &options.seed);
    incoherent_run(sim);
    incoherent_drain(sim);
    uint8_t memory[sizeof(model)];
    incoherent_peek(sim, base, sizeof(memory), memory);
    now.stale |= memcmp(memory, model, sizeof(model)) != 0;
    CHECK(incoherent_counts(sim)->overwritten == 0);
    end();
    return now.stale;
}

/* A posted fence and a word by another way: what was fenced is in memory when others hear of it. */

static void teller(void *context) {
    (void)context;
    store_line(0, 1);
    flush_write_back(FLUSH_NONE, line_of(0), 64);
    flush_fence_stores(FLUSH_PUBLISH_FENCE);
    incoherent_tell();
    for (uint32_t i = 0; i < 8; i++) now.stale |= peek(0, i) != 1;
}

static bool told_too_early(struct incoherent_options options) {
    options.posted_fences = true;
    return PLAY(options, {0, teller});
}

/* Told by another way, the reader invalidates and must find what it was told of. */

static bool hears;

static void told_reader(void *context) {
    (void)context;
    uint64_t words[8];
    flush_fence_all(FLUSH_NONE);
    while (!now.given) {
        flush_load_line(words, line_of(0));
        incoherent_yield();
    }
    if (hears) incoherent_hear();
    flush_invalidate(FLUSH_NONE, line_of(0), 64);
    flush_fence_all(FLUSH_NONE);
    flush_load_line(words, line_of(0));
    for (uint32_t i = 0; i < 8; i++) now.stale |= words[i] != 1;
}

/* What it drops early must not bring old data back for its neighbours. */
static void neighbour(void *context) {
    (void)context;
    uint64_t words[8];
    for (uint32_t i = 0; i < 30; i++) {
        flush_copy_out(words, line_of(0), 8);
        flush_invalidate(FLUSH_NONE, line_of(0), 64);
        if (i % 8 == 0) flush_fence_all(FLUSH_NONE);
    }
}

static bool heard_stale(struct incoherent_options options) {
    return PLAY(options, {1, neighbour}, {0, giver}, {1, told_reader});
}

/* An invalidation writes back what its own host stored. */

static void dropper(void *context) {
    (void)context;
    store_line(0, 1);
    flush_invalidate(FLUSH_FREE_DESCRIPTOR, line_of(0), 64);
    flush_fence_all(FLUSH_NONE);
    for (uint32_t i = 0; i < 8; i++) now.stale |= peek(0, i) != 1;
}

static bool dropped_unwritten(struct incoherent_options options) {
    return PLAY(options, {0, dropper});
}

/* clflush is done at once, but does not push non-temporal stores elsewhere into memory. */

static void evicter(void *context) {
    (void)context;
    uint64_t words[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    flush_copy_in(line_of(0), words, sizeof(words));
    store_line(1, 1);
    flush_evict(FLUSH_NONE, line_of(1), 64);
    for (uint32_t i = 0; i < 8; i++) {
        now.stale |= peek(1, i) != 1;
        now.torn |= peek(0, i) != 1;
    }
}

static bool evicted_late(struct incoherent_options options) {
    return PLAY(options, {0, evicter});
}

static bool evict_pushes_others(struct incoherent_options options) {
    evicted_late(options);
    return now.torn;
}

static void test_single(void) {
    expect_both("one actor does not see its own stores", 0, own_stores_missed, NEVER);
    expect_both("release and acquire on one host: old data", 0, release_stale, NEVER);
    now.plain = true;
    expect("release and a plain load on one host: old data", false, 0, release_stale, NEVER);
    expect("release and a plain load on one host: old data", true, 0, release_stale, SOMETIMES);
    now.plain = false;
    expect_both("loads of one word on one host go back in time", 0, went_back, NEVER);
    expect_both("told after a posted fence: not in memory", 0, told_too_early, NEVER);
    expect_both("told without the fence: not in memory", FLUSH_PUBLISH_FENCE, told_too_early,
                SOMETIMES);
    hears = true;
    expect_both("told, and heard: old data", 0, heard_stale, NEVER);
    hears = false;
    expect_both("told, and invalidated before it was heard: old data", 0, heard_stale, SOMETIMES);
    expect_both("invalidated and fenced: not in memory", 0, dropped_unwritten, NEVER);
    expect_both("not invalidated: not in memory", FLUSH_FREE_DESCRIPTOR, dropped_unwritten,
                SOMETIMES);
    expect_both("clflush has returned: not in memory", 0, evicted_late, NEVER);
    expect("clflush has returned: non-temporal stores elsewhere are on the way", false, 0,
           evict_pushes_others, SOMETIMES);
}

/* Interface. */

static void waiter(void *context) {
    while (flush_load_word(line_of(2)) != 7) incoherent_yield();
    *(bool *)context = true;
}

static void test_pause(void) {
    bool done = false;
    begin(incoherent_usual(1));
    int actor = incoherent_actor(sim, 0, waiter, &done);
    incoherent_pause(sim, actor);
    incoherent_run(sim);
    CHECK(!done && incoherent_alive(sim, actor) && incoherent_running(sim) == -1);
    flush_store_word(line_of(2), 7); /* outside of a run: memory itself */
    CHECK(peek(2, 0) == 7 && flush_load_word(line_of(2)) == 7);
    incoherent_resume(sim, actor);
    incoherent_run(sim);
    CHECK(done && !incoherent_alive(sim, actor));
    end();
}

static uint64_t hash_of(uint64_t seed, bool arm64) {
    struct incoherent_options options = incoherent_usual(seed);
    options.arm64 = arm64;
    options.switch_odds = seed % 2 * 512;
    begin(options);
    now.seen = false;
    incoherent_actor(sim, 1, reader, NULL);
    incoherent_actor(sim, 0, writer, NULL);
    incoherent_run(sim);
    incoherent_drain(sim);
    uint64_t hash = incoherent_trace_hash(sim);
    end();
    return hash;
}

static void test_determinism(void) {
    for (uint64_t seed = 1; seed <= 50; seed++) {
        CHECK(hash_of(seed, false) == hash_of(seed, false));
        CHECK(hash_of(seed, true) == hash_of(seed, true));
        CHECK(hash_of(seed, false) != hash_of(seed + 50, false));
    }
}

static void test_direct_access_dies(void) {
    begin(incoherent_usual(1));
    fflush(stdout);
    pid_t child = test_fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        _exit(*(volatile uint8_t *)base);
    }
    test_ended(child, SIGSEGV);
    end();
}

static void test_trace(void) {
    (void)hash_of(3, false);
    struct incoherent_options options = incoherent_usual(3);
    options.left_out = FLUSH_PUBLISH_FENCE;
    now.seen = false;
    begin(options);
    incoherent_actor(sim, 0, writer, NULL);
    incoherent_run(sim);
    char *text;
    size_t bytes;
    FILE *file = open_memstream(&text, &bytes);
    CHECK(file);
    incoherent_trace(sim, file);
    fclose(file);
    CHECK(strstr(text, "seed 3, x86, left out: publish_fence"));
    CHECK(strstr(text, "clean        line 8.0 = 0 at publish_descriptor"));
    CHECK(strstr(text, "fence stores at publish_payload_fence"));
    CHECK(strstr(text, "no fence     at publish_fence"));
    free(text);
    end();
}

static void test_events_happened(void) {
    const uint64_t *counts = (const uint64_t *)&total;
    for (size_t i = 0; i < sizeof(total) / sizeof(uint64_t); i++) CHECK(counts[i] > 0);
    printf("fills %lu, prefetches %lu, evictions %lu, write-backs %lu, loads of old lines %lu, "
           "early loads %lu, early drops %lu, stores out of order %lu, partial lines %lu, "
           "overwritten %lu, lost stores %lu, lost lines %lu, late write-backs %lu\n",
           (unsigned long)total.fills, (unsigned long)total.prefetches,
           (unsigned long)total.evictions, (unsigned long)total.write_backs,
           (unsigned long)total.stale_loads, (unsigned long)total.early_loads,
           (unsigned long)total.early_drops, (unsigned long)total.reordered_stores,
           (unsigned long)total.partial_lines,
           (unsigned long)total.overwritten, (unsigned long)total.lost_stores,
           (unsigned long)total.lost_lines, (unsigned long)total.late_write_backs);
}

int main(void) {
    struct timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    test_pause();
    test_determinism();
    test_direct_access_dies();
    test_trace();
#ifdef __SANITIZE_THREAD__
    puts("skipped: the litmus tests, as one thread has no races for TSan to find");
    return 77;
#endif
    test_message();
    test_copies();
    test_buffering();
    test_lines();
    test_deaths();
    test_single();
    test_events_happened();
    clock_gettime(CLOCK_MONOTONIC, &stop);
    double seconds = (double)(stop.tv_sec - start.tv_sec) +
                     (double)(stop.tv_nsec - start.tv_nsec) / 1e9;
    printf("%lu seeds, %lu steps in %.1f s: %.2f million steps a second\n",
           (unsigned long)seeds_run, (unsigned long)steps_run, seconds,
           (double)steps_run / seconds / 1e6);
    return 0;
}
