/* Goal: the litmus run finds no violation on memory that keeps what the flushes promise, and finds
 * each flush and fence that is missing. Method: its two roles on two emulated hosts whose caches
 * do not see each other, x86 and arm64, one region and two, many seeds; then each site left out in
 * turn, until a seed tells.
 *
 * 300 seeds, or what knobs.h says. */
#include "check.h"
#include "knobs.h"
#include "measure/litmus.h"

enum { PART_LINES = 4, REGION_LINES = LITMUS_SCRATCH_LINES + 3 * PART_LINES, ROUNDS = 6 };
enum { PRESSURE_LINES = 5, FOUND_WITHIN = 3000 };

typedef struct site {
    enum flush_site site;
    const char *name;
    bool rare_on_arm64;
} site;
#define SITE(name) name, #name
static const site sites[] = {
    {SITE(FLUSH_PUBLISH_HEADER), false},
    {SITE(FLUSH_PUBLISH_PAYLOAD_FENCE), false},
    {SITE(FLUSH_PUBLISH_DESCRIPTOR), false},
    /* Its loss shows when others are told too early that the publish has returned. On arm64 what
     * tells them, the rendezvous, has a dsb of its own: only its line's early eviction can. */
    {SITE(FLUSH_PUBLISH_FENCE), true},
    {SITE(FLUSH_ACQUIRE_BEGIN_FENCE), false},
    {SITE(FLUSH_ACQUIRE_DESCRIPTOR), false},
    {SITE(FLUSH_ACQUIRE_DESCRIPTOR_FENCE), false},
    {SITE(FLUSH_ACQUIRE_SEEN_FENCE), false},
    {SITE(FLUSH_ACQUIRE_PAYLOAD), false},
    {SITE(FLUSH_ACQUIRE_PAYLOAD_FENCE), false},
    {SITE(FLUSH_PIN), false},
    {SITE(FLUSH_PIN_FENCE), false},
    {SITE(FLUSH_OWNER_LOOK), false},
    {SITE(FLUSH_OWNER_LOOK_FENCE), false},
    {SITE(FLUSH_GIVE), false},
    {SITE(FLUSH_GIVE_FENCE), false},
    {SITE(FLUSH_TAKE), false},
    {SITE(FLUSH_TAKE_FENCE), false},
};

typedef struct side {
    cxlkv_litmus litmus;
    cxlkv_litmus_found found;
    uint64_t seed;
} side;

static struct { uint64_t rounds, raced, steps; } total;

static int yield(cxlkv_litmus *litmus) {
    (void)litmus;
    incoherent_yield();
    return 0;
}

static void role(void *context) {
    side *own = context;
    cxlkv_litmus *l = &own->litmus;
    litmus_begin(l, own->seed * 2 + l->role + 1);
    while (cxlkv_litmus_meet(l) == 0) incoherent_yield();
    for (uint32_t test = 0; test <= CXLKV_LITMUS_EVICTION; test++)
        for (uint32_t pair = 0; pair < l->region_count * l->region_count; pair++) {
            cxlkv_litmus_case which = {.test = test, .first = pair / l->region_count,
                                       .second = pair % l->region_count, .rounds = ROUNDS};
            CHECK(cxlkv_litmus_run(l, &which, &own->found) == 0);
        }
}

/* Violations, and stores that met in a line. */
static uint64_t run(uint64_t seed, bool arm64, enum flush_site left_out, bool loud) {
    struct incoherent_options options = incoherent_usual(seed);
    uint32_t regions = 1 + seed % 2;
    options.lines = regions * REGION_LINES + 2 * PRESSURE_LINES;
    options.arm64 = arm64;
    options.early_drops = true;
    options.left_out = left_out;
    options.steps_max = 4000000;
    incoherent *sim = incoherent_make(&options);
    CHECK(sim);
    side sides[2] = {0};
    for (uint32_t i = 0; i < 2; i++) {
        cxlkv_litmus *l = &sides[i].litmus;
        *l = (cxlkv_litmus){.region_count = regions, .role = i, .part_lines = PART_LINES,
                            .wait = yield, .delay_dice = seed + i};
        uint8_t *base = incoherent_base(sim);
        for (uint32_t region = 0; region < regions; region++)
            l->regions[region] = base + region * REGION_LINES * FLUSH_LINE_BYTES;
        uint32_t pressure_line = regions * REGION_LINES + i * PRESSURE_LINES;
        l->pressure = base + pressure_line * FLUSH_LINE_BYTES;
        l->pressure_bytes = PRESSURE_LINES * FLUSH_LINE_BYTES;
        l->pressure_stride_bytes = FLUSH_LINE_BYTES;
        sides[i].seed = seed;
        incoherent_actor(sim, i, role, &sides[i]);
    }
    incoherent_run(sim);
    uint64_t bad = incoherent_counts(sim)->overwritten;
    for (uint32_t i = 0; i < 2; i++) {
        bad += sides[i].found.violations;
        total.rounds += sides[i].found.rounds;
        total.raced += sides[i].found.raced;
    }
    total.steps += incoherent_step_count(sim);
    if (bad && loud) {
        for (uint32_t i = 0; i < 2; i++)
            fprintf(stderr, "role %u: %lu violations, first kind %lu, round %lu, line %lu\n", i,
                    sides[i].found.violations, sides[i].found.kind, sides[i].found.round,
                    sides[i].found.line);
        incoherent_trace(sim, stderr);
    }
    uint64_t reported = sides[0].found.violations + sides[1].found.violations;
    incoherent_free(sim);
    return left_out ? reported : bad;
}

/* The first seed by which the litmus itself reports; 0 when none does. */
static uint64_t first_telling(enum flush_site site, bool arm64) {
    for (uint64_t seed = 1; seed <= FOUND_WITHIN; seed++)
        if (run(seed, arm64, site, false)) return seed;
    return 0;
}

static bool is_right(uint64_t seed, bool arm64) { return run(seed, arm64, FLUSH_NONE, true) == 0; }

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 300);
    if (!knob_all_seeds(seeds, is_right)) return 1;
    fprintf(stderr, "%lu seeds: %lu rounds, %lu of them raced, %lu steps\n", seeds, total.rounds,
            total.raced, total.steps);
    CHECK(total.raced > seeds);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < sizeof(sites) / sizeof(sites[0]); i++)
        for (uint32_t arm64 = 0; arm64 < 2; arm64++) {
            if (arm64 && sites[i].rare_on_arm64) continue;
            if (first_telling(sites[i].site, arm64)) continue;
            fprintf(stderr, "%s: %s left out, and no violation in %u seeds\n",
                    arm64 ? "arm64" : "x86", sites[i].name, FOUND_WITHIN);
            wrong++;
        }
    CHECK(wrong == 0);
    return 0;
}
