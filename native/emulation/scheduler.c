/* The actors of the emulator: coroutines of one thread, and who of them is next. */
#include "simulation.h"

#include <sys/mman.h>
#include <unistd.h>

/* The sanitizers are told of each change of stacks. GCC says __SANITIZE_*, clang __has_feature. */
#ifndef __has_feature
#define __has_feature(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define WITH_ASAN 1
#else
#define WITH_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__) || __has_feature(thread_sanitizer)
#include <sanitizer/tsan_interface.h>
#define WITH_TSAN 1
#else
#define WITH_TSAN 0
#endif

enum { STACK_BYTES = 256 << 10 };
/* PCT lets one actor run until it returns; one that waits for another without incoherent_yield()
 * must not do so for ever. */
enum { SLICE_STEPS_MAX = 4096 };

/* Stacks are kept for the next actor: to map one takes longer than many steps. */
static void *spare_stacks[INCOHERENT_ACTORS_MAX];
static uint32_t spare_count;

static void *stack_make(incoherent *sim) {
    if (spare_count) return spare_stacks[--spare_count];
    size_t guard_bytes = (size_t)sysconf(_SC_PAGESIZE);
    uint8_t *pages = mmap(NULL, STACK_BYTES + guard_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, guard_bytes, PROT_NONE) != 0)
        simulation_die(sim, "no memory for an actor's stack");
    return pages + guard_bytes;
}

static void stack_free(void *stack) {
#if WITH_ASAN
    __asan_unpoison_memory_region(stack, STACK_BYTES);
#endif
    spare_stacks[spare_count++] = stack;
}

/* Between leave() and arrive() the stack changes; `for_good` when the old one is done with. */
static void leave(struct actor *to, void **fake_stack, bool for_good) {
#if WITH_ASAN
    const void *stack = to ? to->stack : simulation->stack;
    __sanitizer_start_switch_fiber(for_good ? NULL : fake_stack, stack,
                                   to ? STACK_BYTES : simulation->stack_bytes);
#elif WITH_TSAN
    __tsan_switch_to_fiber(to ? to->fiber : simulation->fiber, 0);
#endif
    (void)to, (void)fake_stack, (void)for_good;
}

static void arrive(void *fake_stack, bool from_run) {
#if WITH_ASAN
    const void *stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &stack, &bytes);
    if (from_run) {
        simulation->stack = stack;
        simulation->stack_bytes = bytes;
    }
#endif
    (void)fake_stack, (void)from_run;
}

static bool is_ready(const struct actor *actor) { return actor->state == ACTOR_READY; }

/* -1 when nobody can run. */
static int next_actor(incoherent *sim, int self) {
    int best = -1;
    uint32_t ready = 0;
    if (sim->options.switch_odds) {
        bool stays = self >= 0 && is_ready(sim->actors[self]);
        if (stays && simulation_below(sim, 4096) >= sim->options.switch_odds) return self;
        for (uint32_t i = 0; i < sim->actor_count; i++) ready += is_ready(sim->actors[i]);
        if (!ready) return -1;
        uint32_t skip = simulation_below(sim, ready);
        while (!is_ready(sim->actors[++best]) || skip--) {}
        return best;
    }
    for (uint32_t i = 0; i < sim->actor_count; i++)
        if (is_ready(sim->actors[i]) &&
            (best < 0 || sim->actors[i]->priority > sim->actors[best]->priority))
            best = (int)i;
    return best;
}

/* Goes on with `next`, or with incoherent_run() when it is -1. Comes back when the caller, which is
 * `from`, or incoherent_run() when that is -1, is chosen again: never, when it is done. */
static void change_to(incoherent *sim, int from, int next, bool for_good) {
    struct actor *old = from < 0 ? NULL : sim->actors[from];
    struct actor *new = next < 0 ? NULL : sim->actors[next];
    void *fake_stack = NULL;
    sim->running = next;
    sim->slice_steps = 0;
    sim->counts.switches++;
    leave(new, &fake_stack, for_good);
    swapcontext(old ? &old->machine : &sim->machine, new ? &new->machine : &sim->machine);
    arrive(fake_stack, false);
}

static void begin(void) {
    incoherent *sim = simulation;
    arrive(NULL, sim->stack == NULL);
    struct actor *actor = sim->actors[sim->running];
    int index = sim->running;
    actor->run(actor->context);
    actor->state = ACTOR_RETURNED;
    change_to(sim, index, next_actor(sim, -1), true);
    simulation_die(sim, "an actor that had returned went on");
}

static void fall_behind(incoherent *sim, struct actor *actor) {
    actor->priority = --sim->lowest_priority;
    sim->slice_steps = 0;
}

static void take_step(incoherent *sim, bool yields) {
    int self = sim->running;
    struct actor *actor = sim->actors[self];
    sim->counts.steps++;
    if (sim->options.steps_max && sim->counts.steps > sim->options.steps_max)
        simulation_die(sim, "more steps than steps_max: does somebody wait for ever?");
    caches_events(sim);
    if (sim->hook) sim->hook(sim->hook_context);
    while (sim->change_index < sim->options.priority_changes &&
           sim->changes[sim->change_index] <= sim->counts.steps) {
        sim->change_index++;
        fall_behind(sim, actor);
    }
    if (yields || ++sim->slice_steps > SLICE_STEPS_MAX) fall_behind(sim, actor);
    int next = next_actor(sim, yields ? -1 : self);
    if (next != self) change_to(sim, self, next, actor->state == ACTOR_KILLED);
}

void scheduler_step(incoherent *sim) { take_step(sim, false); }

void incoherent_yield(void) {
    if (simulation->running >= 0) take_step(simulation, true);
}

void incoherent_run(incoherent *sim) {
    int next = next_actor(sim, -1);
#if WITH_TSAN
    sim->fiber = __tsan_get_current_fiber();
#endif
    simulation = sim;
    if (next >= 0) change_to(sim, -1, next, false);
}

int incoherent_actor(incoherent *sim, uint32_t host, void (*run)(void *context), void *context) {
    if (sim->actor_count == INCOHERENT_ACTORS_MAX) simulation_die(sim, "more than 32 actors");
    if (host >= sim->options.hosts) simulation_die(sim, "no such host");
    struct actor *actor = calloc(1, sizeof(*actor));
    if (!actor) simulation_die(sim, "no memory for an actor");
    if (!sim->hosts[host].alive) caches_restart_host(sim, &sim->hosts[host]);
    actor->host = host;
    actor->run = run;
    actor->context = context;
    actor->priority = (int64_t)(simulation_random(sim) >> 2);
    actor->stack = stack_make(sim);
    getcontext(&actor->machine);
    actor->machine.uc_stack.ss_sp = actor->stack;
    actor->machine.uc_stack.ss_size = STACK_BYTES;
    makecontext(&actor->machine, begin, 0);
#if WITH_TSAN
    actor->fiber = __tsan_create_fiber(0);
#endif
    sim->actors[sim->actor_count] = actor;
    return (int)sim->actor_count++;
}

static struct actor *actor_of(incoherent *sim, int actor) {
    if (actor < 0 || (uint32_t)actor >= sim->actor_count) simulation_die(sim, "no such actor");
    return sim->actors[actor];
}

bool incoherent_alive(incoherent *sim, int actor) {
    return is_ready(actor_of(sim, actor)) || sim->actors[actor]->state == ACTOR_PAUSED;
}

void incoherent_kill(incoherent *sim, int actor) {
    if (!incoherent_alive(sim, actor)) return;
    simulation_note(sim, "killed", actor, sim->actors[actor]->host, NO_WORD, FLUSH_NONE, 0);
    caches_lose(sim, sim->actors[actor]);
    sim->actors[actor]->state = ACTOR_KILLED;
}

void incoherent_kill_host(incoherent *sim, uint32_t host, enum incoherent_loss loss) {
    if (host >= sim->options.hosts) simulation_die(sim, "no such host");
    if (!sim->hosts[host].alive) return;
    simulation_note(sim, "host killed", -1, host, NO_WORD, FLUSH_NONE, loss);
    for (uint32_t i = 0; i < sim->actor_count; i++) {
        struct actor *actor = sim->actors[i];
        if (actor->host != host) continue;
        if (loss == INCOHERENT_DROP) caches_lose(sim, actor);
        if (incoherent_alive(sim, (int)i)) actor->state = ACTOR_KILLED;
    }
    if (loss == INCOHERENT_DROP) caches_lose_host(sim, &sim->hosts[host]);
    sim->hosts[host].alive = false;
}

void incoherent_pause(incoherent *sim, int actor) {
    if (is_ready(actor_of(sim, actor))) sim->actors[actor]->state = ACTOR_PAUSED;
}

void incoherent_resume(incoherent *sim, int actor) {
    if (actor_of(sim, actor)->state == ACTOR_PAUSED) sim->actors[actor]->state = ACTOR_READY;
}

static int compare_steps(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

void scheduler_make(incoherent *sim) {
    uint32_t count = sim->options.priority_changes;
    if (count > INCOHERENT_CHANGES_MAX) simulation_die(sim, "more than 16 priority changes");
    for (uint32_t i = 0; i < count; i++)
        sim->changes[i] = 1 + simulation_below(sim, sim->options.steps_expected);
    qsort(sim->changes, count, sizeof(sim->changes[0]), compare_steps);
    sim->running = -1;
    simulation = sim;
}

void scheduler_free(incoherent *sim) {
    for (uint32_t i = 0; i < sim->actor_count; i++) {
#if WITH_TSAN
        __tsan_destroy_fiber(sim->actors[i]->fiber);
#endif
        stack_free(sim->actors[i]->stack);
        free(sim->actors[i]);
    }
}
