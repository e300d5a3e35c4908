/* What the files of the emulator share: its state, and who does what. incoherent.c is the seam and
 * the interface, caches.c the caches and buffers, scheduler.c the actors, trace.c the record. */
#pragma once
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "incoherent.h"

enum { LINE_WORDS = FLUSH_LINE_BYTES / 8 };
enum { ITEMS_MAX = 64, EARLY_MAX = 4, RECENT_MAX = 8, TRACE_EVENTS = 256 };
#define NO_WORD UINT32_MAX /* of an event that is of no line: a fence, a death */

/* What an actor has issued and what has not happened yet, in program order. */
enum item_kind {
    ITEM_STORE,
    ITEM_RELEASE,
    ITEM_STREAM,     /* a non-temporal store */
    ITEM_WRITE_BACK, /* clwb, dc cvac */
    ITEM_DROP,       /* clflushopt, dc civac */
    ITEM_DROP_LEFT,  /* clflushopt after sfence: written back, holds up nothing */
};

struct item {
    uint64_t value;
    uint32_t word, fence; /* fence: how many fences of stores the actor had issued before */
    uint8_t kind, mask;   /* mask: which bytes of the word */
};

enum actor_state { ACTOR_READY, ACTOR_PAUSED, ACTOR_RETURNED, ACTOR_KILLED };

struct early { /* arm64: a line as the cache held it at some time since the last fence */
    uint32_t line;
    uint64_t words[LINE_WORDS];
};

struct actor {
    enum actor_state state;
    uint32_t host;
    int64_t priority;
    void (*run)(void *context);
    void *context;
    ucontext_t machine;
    void *stack, *fiber, *fake_stack;
    uint64_t fence_step; /* when its last fence was done */
    uint32_t fences, item_count, early_count;
    struct item items[ITEMS_MAX];
    struct early early[EARLY_MAX];
};

struct cached {
    uint32_t line, version; /* version: of the line in memory that it was filled from */
    uint8_t dirty;          /* a bit for each word */
    uint64_t filled_step;
    uint64_t words[LINE_WORDS];
};

struct old_line { /* a line of memory as it was before some change */
    uint64_t until_step;
    uint32_t version;
    uint64_t words[LINE_WORDS];
};

struct host {
    bool alive;
    uint32_t capacity, count;
    uint32_t recent[RECENT_MAX], recent_count; /* lines that were loaded, for the prefetcher */
    int32_t *where; /* for each line of memory: its index below, or -1 */
    struct cached *cached;
    uint32_t *seen;         /* of each line: the version that its actors may have loaded last */
    uint64_t *dropped_step; /* of each line: when it was last invalidated or evicted */
};

struct event {
    uint64_t step, value;
    const char *what;
    int actor;
    uint32_t host, word, site;
};

struct incoherent {
    struct incoherent_options options;
    uint64_t random;
    uint8_t *base;
    size_t base_bytes;
    uint64_t *memory;
    uint32_t *version; /* of each line: how often it was written in memory */
    struct old_line *old;
    struct host hosts[INCOHERENT_HOSTS_MAX];

    struct actor *actors[INCOHERENT_ACTORS_MAX];
    uint32_t actor_count;
    int running; /* -1: none, outside of incoherent_run() */
    uint64_t slice_steps;
    int64_t lowest_priority;
    uint64_t changes[INCOHERENT_CHANGES_MAX]; /* steps, in order */
    uint32_t change_index;
    ucontext_t machine; /* of incoherent_run() */
    const void *stack;
    size_t stack_bytes;
    void *fiber;
    void (*hook)(void *context);
    void *hook_context;

    struct incoherent_counts counts;
    struct event *trace; /* a ring of this many: */
    uint64_t trace_events, trace_count, trace_hash;
};

/* The one that the seam works on. */
extern incoherent *simulation;

static inline uint64_t simulation_random(incoherent *sim) { /* splitmix64 */
    uint64_t word = sim->random += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

static inline uint32_t simulation_below(incoherent *sim, uint32_t limit) {
    return (uint32_t)((simulation_random(sim) >> 32) * limit >> 32);
}

_Noreturn void simulation_die(incoherent *sim, const char *why);
void simulation_note(incoherent *sim, const char *what, int actor, uint32_t host, uint32_t word,
                     enum flush_site site, uint64_t value);

void caches_make(incoherent *sim);
void caches_free(incoherent *sim);
/* What the actor sees: its own buffer over its host's cache over memory. */
uint64_t caches_load(incoherent *sim, struct actor *actor, uint32_t word);
void caches_issue(incoherent *sim, struct actor *actor, struct item item);
/* For a fence that waits, before each of its steps: something happens. False when it is enough. */
bool caches_hurry(incoherent *sim, struct actor *actor);
/* All that was issued before the actor's last fence of stores happens. */
void caches_settle(incoherent *sim, struct actor *actor);
/* All that was issued happens, and nothing was loaded ahead. */
void caches_finish(incoherent *sim, struct actor *actor);
void caches_evict(incoherent *sim, struct actor *actor, uint32_t line);
void caches_forget_early(struct actor *actor);
/* What memory does unasked before a step. */
void caches_events(incoherent *sim);
/* Some of the buffer takes effect, the rest never will. */
void caches_lose(incoherent *sim, struct actor *actor);
void caches_lose_host(incoherent *sim, struct host *host);
/* What a killed host has left is written back or lost. */
void caches_restart_host(incoherent *sim, struct host *host);
void caches_drain(incoherent *sim);

void scheduler_make(incoherent *sim);
void scheduler_free(incoherent *sim);
/* A step: events, the hook, and perhaps other actors. Returns when the caller's turn has come. */
void scheduler_step(incoherent *sim);
