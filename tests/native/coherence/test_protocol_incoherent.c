/* Goal: on memory whose hosts' caches do not see each other, the protocol between hosts holds while
 * they die, are fenced and come back. Method: the members of protocol_scenario.h on 2 to 8 emulated
 * hosts, x86 and arm64, many seeds. Between any two memory operations a seed may kill a process,
 * or a host (its caches lost, or written back much later), or pause a host past its lease and
 * resume it; dead hosts come back, or are declared off. With one flush, fence or check left out it
 * must fail: tests/native/mutants.py.
 *
 * 700 seeds, or what knobs.h says. CXLKV_LONG=1: fails unless enough of all happened. */
#include "protocol_scenario.h"

enum { STEPS_MAX = 20000000, DISTURBANCES_MAX = 6 };
enum disturbance { KILL_PROCESS, KILL_DROP, KILL_DELAY, PAUSE_HOST, DISTURBANCES };

member all_members[MEMBERS_MAX];
static process all[INCOHERENT_ACTORS_MAX];
process *processes = all;
uint32_t process_count;
static protocol_counts total;

/* What is still to be done to the hosts. */
static struct plan {
    uint32_t left;               /* disturbances */
    uint64_t next_step, until_step; /* of the next one: from when on, and when at the latest */
    enum disturbance what;
    enum phase phase;            /* it waits for a process to be there */
    uint64_t fires_step;
    uint32_t victim;
    bool armed;
    uint64_t restart_step[MEMBERS_MAX], resume_step[MEMBERS_MAX]; /* 0: not */
    uint64_t dice;
} plan;

/* ---- processes ---- */

static void process_start(protocol *p, uint32_t host, uint32_t rounds) {
    if (process_count == INCOHERENT_ACTORS_MAX) return;
    process *a = &all[process_count++];
    *a = (process){.m = &all_members[host], .dice = random_next(&plan.dice),
                   .slow = random_below(&plan.dice, 8) == 0,
                   .rounds = knob_limit("CXLKV_ROUNDS", rounds)};
    a->actor = incoherent_actor(p->sim, host / p->stride, process_run, a);
}

static void process_dies(process *a) {
    holds_no_more(a);
    a->dead = true;
    a->rounds = 0;
}

/* Of the host itself: what it knows is lost with it. */
static void host_dies(protocol *p, uint32_t host, enum incoherent_loss loss) {
    member *m = &all_members[host];
    protocol_note(p, "dies, its caches are lost", host, loss == INCOHERENT_DROP, 0);
    incoherent_kill_host(p->sim, host / p->stride, loss);
    for (uint32_t i = 0; i < process_count; i++)
        if (all[i].m == m) process_dies(&all[i]);
    m->may_be_off = loss == INCOHERENT_DROP;
    plan.resume_step[host] = 0;
    uint64_t now = incoherent_step_count(p->sim);
    bool stays = random_below(&plan.dice, 8) == 0;
    plan.restart_step[host] = stays ? 0 : now + 1 + random_below(&plan.dice, 1 << 16);
}

static void host_starts(protocol *p, uint32_t host) {
    member *m = &all_members[host];
    uint64_t nonce = m->nonce + 1;
    protocol_note(p, "starts", host, nonce, 0);
    hosts h = {.area = p->area, .self = host, .mode = p->mode, .context = m,
               .pause = member_pause, .silent = member_silent, .fencing = member_fencing};
    for (uint32_t i = 0; i < process_count; i++)
        if (all[i].m == m) all[i].dead = false, all[i].held_count = 0; /* nothing to recover */
    *m = (member){.p = p, .h = h, .nonce = nonce, .beats = nonce << 32,
                  .returns = p->member[host].epoch != 0};
    uint8_t *turns = extent_at(p, p->area.extent_count);
    m->turn = (uint64_t *)(turns + host * (uint64_t)FLUSH_LINE_BYTES);
    plan.restart_step[host] = 0;
    process_start(p, host, 8 + random_below(&plan.dice, 16));
    if (random_below(&plan.dice, 3) == 0) process_start(p, host, 8);
}

/* ---- what happens to them ---- */

static void host_pauses(protocol *p, uint32_t host, bool pauses) {
    for (uint32_t i = 0; i < process_count; i++) {
        if (all[i].m != &all_members[host]) continue;
        protocol_note(p, pauses ? "pauses" : "goes on", host, i, all[i].phase);
        if (pauses) incoherent_pause(p->sim, all[i].actor);
        else incoherent_resume(p->sim, all[i].actor);
    }
}

static bool runs(protocol *p, const process *a) { return incoherent_alive(p->sim, a->actor); }

/* Attaching is long; the name comes last, after the epoch. */
static bool is_at(protocol *p, const process *a, enum phase phase) {
    if (phase != NAMING) return a->phase == phase;
    return a->phase == ATTACHING && a->m->h.epoch > p->member[a->m->h.self].epoch;
}

/* Somebody who is where the next disturbance wants him. */
static int find_victim(protocol *p, bool anywhere) {
    uint32_t first = random_below(&plan.dice, process_count);
    for (uint32_t i = 0; i < process_count; i++) {
        process *a = &all[(first + i) % process_count];
        if (runs(p, a) && (anywhere || is_at(p, a, plan.phase))) return (int)(a - all);
    }
    return -1;
}

static void plan_next(uint64_t now) {
    if (!plan.left) return;
    plan.left--;
    plan.armed = false;
    plan.next_step = now + 1 + random_below(&plan.dice, 1 << 14);
    plan.until_step = plan.next_step + (1 << 15);
    plan.what = (enum disturbance)random_below(&plan.dice, DISTURBANCES);
    plan.phase = (enum phase)(1 + random_below(&plan.dice, PHASES - 1));
    if (plan.what == PAUSE_HOST && random_below(&plan.dice, 2)) plan.phase = COPYING;
    if (plan.what == KILL_DROP && random_below(&plan.dice, 2)) plan.phase = APPENDING;
}

static void strike(protocol *p, uint64_t now) {
    process *a = &all[plan.victim];
    uint32_t host = a->m->h.self;
    if (!runs(p, a)) return;
    switch (plan.what) {
    case KILL_PROCESS:
        protocol_note(p, "process dies in phase", host, plan.victim, a->phase);
        incoherent_kill(p->sim, a->actor);
        process_dies(a);
        a->m->recovers = true;
        process_start(p, host, 8);
        break;
    case PAUSE_HOST:
        host_pauses(p, host, true);
        plan.resume_step[host] = now + 1 + random_below(&plan.dice, (uint32_t)p->lease_steps * 8);
        break;
    default:
        host_dies(p, host, plan.what == KILL_DROP ? INCOHERENT_DROP : INCOHERENT_DELAY);
    }
}

static void disturb(void *context) {
    protocol *p = context;
    uint64_t now = incoherent_step_count(p->sim);
    for (uint32_t host = 0; host < p->members; host++) {
        if (plan.restart_step[host] && plan.restart_step[host] <= now) host_starts(p, host);
        if (plan.resume_step[host] && plan.resume_step[host] <= now) {
            plan.resume_step[host] = 0;
            host_pauses(p, host, false);
        }
    }
    if (!plan.next_step || now < plan.next_step) return;
    if (!plan.armed) {
        int victim = find_victim(p, now >= plan.until_step);
        if (victim < 0) return;
        plan.armed = true;
        plan.victim = (uint32_t)victim;
        plan.fires_step = now + random_below(&plan.dice, 1u << random_below(&plan.dice, 9));
        if (plan.phase == APPENDING) plan.fires_step = now + random_below(&plan.dice, 32);
        if (plan.phase == NAMING) plan.fires_step = now + random_below(&plan.dice, 128);
    }
    if (now < plan.fires_step) return;
    plan.next_step = 0;
    strike(p, now);
    plan_next(now);
}

/* ---- a run ---- */

static protocol *protocol_make(uint64_t seed, bool arm64) {
    protocol *p = calloc(1, sizeof(*p));
    CHECK(p);
    uint64_t dice = seed * 2 + arm64;
    uint32_t hosts = 2 + random_below(&dice, random_below(&dice, 2) ? 3 : INCOHERENT_HOSTS_MAX - 1);
    hosts = knob_hosts(hosts);
    p->stride = hosts < 5 && random_below(&dice, 3) == 0 ? 8 : 1;
    p->members = (hosts - 1) * p->stride + 1;
    p->each = 1 + random_below(&dice, EACH_MAX);
    p->payload_lines = 2 + random_below(&dice, PAYLOAD_LINES_MAX - 1);
    p->mode = random_below(&dice, 2) ? VISIBILITY_FAST : VISIBILITY_STRICT;
    p->lease_steps = 1500u << random_below(&dice, 5);
    p->area.host_count = p->members;
    p->area.extent_count = 1 + random_below(&dice, hosts < 5 ? hosts + 1 : 6);
    p->area.page_count = p->area.extent_count * p->each;
    p->area.log_records = 8;
    hosts_area_make(&p->area);
    struct incoherent_options options = incoherent_usual(seed);
    uint64_t block_lines = p->members * p->area.block_bytes / FLUSH_LINE_BYTES;
    options.hosts = hosts;
    if (random_below(&dice, 4) == 0) options.cache_lines_max = 2048;
    if (random_below(&dice, 4) == 0) options.odds.evict = 0;
    options.lines = (uint32_t)block_lines + p->area.extent_count * extent_lines(p) + p->members;
    options.arm64 = arm64;
    options.early_drops = true; /* what the manuals allow, whatever hardware does */
    options.steps_max = STEPS_MAX;
    options.steps_expected = 1 << 16;
    knob_options(&options);
    p->sim = incoherent_make(&options);
    p->area.base = incoherent_base(p->sim);
    p->extents = p->area.base + block_lines * FLUSH_LINE_BYTES;
    for (uint32_t x = 0; x < EXTENTS_MAX; x++)
        p->extent[x] = (struct extent_truth){.owner = NO_HOST, .pending = NO_HOST};
    for (uint32_t page = 0; page < p->area.page_count; page++) {
        uint8_t line[FLUSH_LINE_BYTES];
        p->page[page].writer = NO_HOST;
        descriptor_fill(page, 1, PAGE_FREE, line); /* as whoever makes a pool does */
        flush_store_line(page_descriptor(p, page), line, 0);
    }
    return p;
}

static void protocol_run(protocol *p, uint64_t seed) {
    memset(all_members, 0, sizeof(all_members));
    process_count = 0;
    plan = (struct plan){.dice = seed ^ 0x706c616e};
    plan.left = knob_limit("CXLKV_DISTURBANCES", random_below(&plan.dice, DISTURBANCES_MAX + 1));
    for (uint32_t host = 0; host < p->members; host += p->stride) {
        all_members[host].nonce = (uint64_t)(host + 1) << 8;
        host_starts(p, host);
    }
    plan_next(0);
    incoherent_hook(p->sim, disturb, p);
    for (bool again = true; again && !p->failed;) {
        incoherent_run(p->sim);
        again = false;
        for (uint32_t host = 0; host < p->members; host++) {
            again |= plan.restart_step[host] || plan.resume_step[host];
            if (plan.restart_step[host]) host_starts(p, host);
            if (plan.resume_step[host]) host_pauses(p, host, false);
            plan.resume_step[host] = 0;
        }
    }
}

static bool run(uint64_t seed, bool arm64) {
    protocol *p = protocol_make(seed, arm64);
    protocol_run(p, seed * 2 + arm64);
    const struct incoherent_counts *counts = incoherent_counts(p->sim);
    p->counts.late_drains = counts->late_write_backs;
    p->counts.steps = counts->steps;
    p->counts.left_out = counts->left_out;
    if (counts->overwritten)
        protocol_fail_about(p, NO_LINES, "a line has two writers", 0, counts->overwritten, 0);
    for (size_t i = 0; i < sizeof(total) / sizeof(uint64_t); i++)
        ((uint64_t *)&total)[i] += ((uint64_t *)&p->counts)[i];
    bool failed = p->failed;
    incoherent_free(p->sim);
    free(p);
    return !failed;
}

static void report(uint64_t seeds) {
    const protocol_counts *c = &total;
    fprintf(stderr, "%lu seeds, %lu operations, %lu steps\n", seeds, c->operations, c->steps);
    fprintf(stderr, "publishes %lu, acquires %lu, frees %lu, takes %lu, gives %lu, locks %lu, "
            "appends %lu, reads %lu\n",
            c->publishes, c->acquires, c->frees, c->takes, c->gives, c->locks, c->appends,
            c->reads);
    fprintf(stderr, "takeovers %lu, laps %lu, fenced mid-copy %lu, late drains %lu, reuses %lu, "
            "pinned %lu, undecided %lu\n", c->takeovers, c->laps, c->fenced_copies,
            c->late_drains, c->reuses, c->pinned, c->undecided);
    fprintf(stderr, "fenced %lu, returns %lu, offs %lu, recoveries %lu, adopted %lu, "
            "left out %lu\n", c->fenced, c->returns, c->offs, c->recoveries, c->adopted,
            c->left_out);
}

int main(void) {
    uint64_t seeds = knob("CXLKV_SEEDS", 700);
    uint64_t least = knob("CXLKV_LONG", 0) ? 100 : 0;
    if (!knob_all_seeds(seeds, run)) return 1;
    report(seeds);
    const uint64_t rare[] = {total.takeovers, total.laps, total.fenced_copies, total.late_drains,
                             total.reuses, total.pinned, total.undecided, total.offs};
    for (size_t i = 0; i < sizeof(rare) / sizeof(rare[0]); i++) CHECK(rare[i] >= least);
    CHECK(least == 0 || (total.operations >= 1000000 && seeds >= 20000));
    return 0;
}
