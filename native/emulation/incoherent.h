/* An emulated memory that several hosts share and whose caches do not see each other: the seam of
 * flush.h works on it when linked in place of flush.c, so that the protocol's code runs
 * unchanged where a missing flush or fence shows. Hosts' processes are actors: coroutines of one
 * thread, run in an order that the seed alone decides. Every call of the seam, each 8 bytes of a
 * copy and each line of a flush is a step; between any two, other actors run and memory does what
 * hardware may do.
 *
 * What an actor's store goes through: its buffer -> its host's cache (write-back, whole lines, of
 * random capacity) -> memory. What may happen unasked: a line is filled, evicted, written back.
 *
 * x86: stores of an actor reach its cache in order; non-temporal ones reach memory in any order, 8
 * bytes at a time; clwb and clflushopt are done at some time, surely by the next fence, except that
 * after sfence clflushopt has only written back, and loads may hit the old line until mfence. Loads
 * are in order: one that was speculated too early looks like a line that was filled too early.
 * arm64: plain stores reach the cache in any order, but for those of one word; flush_store_word
 * waits for those before it; a load may return what the host's cache held at some time since the
 * actor's last dsb or acquiring load; every fence is dsb sy. Weaker than the architecture in two
 * points, and so safe to test on: an address dependency orders nothing, nor does stlr a later ldar.
 * early_drops: only fences order clflushopt and dc civac after older loads, as the manuals' wording
 * has it; so they may have been done before those, and the line filled again. Without: older loads
 * come first, as in the model Px86 (Raad et al., POPL 2020).
 * Stronger than some hardware: flush_evict is done when it returns, as flush.h promises. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/flush.h"

enum { INCOHERENT_HOSTS_MAX = 8, INCOHERENT_ACTORS_MAX = 32, INCOHERENT_CHANGES_MAX = 16 };

typedef struct incoherent incoherent;

/* How likely each event is before a step, in 4096ths. */
struct incoherent_odds {
    uint32_t drain;    /* something in an actor's buffer takes effect */
    uint32_t evict;    /* a host's cache loses a line, which is written back if it is dirty */
    uint32_t fill;     /* a host's cache prefetches a line */
    uint32_t early;    /* arm64: an actor loads a line ahead of its turn */
};

struct incoherent_options {
    uint64_t seed;
    uint32_t hosts;            /* 1 to 8 */
    uint32_t lines;            /* of memory */
    uint32_t cache_lines_max;  /* each host has from 1 to this many, drawn by the seed */
    bool arm64;
    bool posted_fences;        /* x86: sfence orders and does not wait; see incoherent_tell() */
    bool early_drops;          /* older loads do not hold up an invalidation; see above */
    uint32_t switch_odds;      /* of a step, in 4096ths, to go on with any actor; 0: PCT instead */
    /* PCT (Burckhardt et al., ASPLOS 2010): the actor of the highest, random priority runs. */
    uint32_t priority_changes; /* how often the running actor falls behind all others, to 16 */
    uint32_t steps_expected;   /* the changes fall into this many first steps */
    uint64_t steps_max;        /* more than these: print the trace and abort; 0 is no limit */
    enum flush_site left_out;  /* calls of the seam with this site do nothing */
    uint32_t trace_events;     /* that are kept for incoherent_trace(); 0: 256 */
    struct incoherent_odds odds;
};

/* What happened, so that a test can demand that it did. */
struct incoherent_counts {
    uint64_t steps, switches;
    uint64_t fills, prefetches, evictions, write_backs, drops;
    uint64_t stale_loads;      /* a cached line was read after memory had changed below it */
    uint64_t early_loads;      /* arm64: a load that was satisfied ahead of its turn */
    uint64_t early_drops;      /* an invalidation that was done before loads older than it */
    uint64_t reordered_stores; /* a store overtook an older one of its actor */
    uint64_t partial_lines;    /* a non-temporal line that reached memory in parts */
    uint64_t overwritten;      /* a dirty line was written back over another host's store: V7, V8 */
    uint64_t lost_stores, lost_lines; /* with a killed actor, host */
    uint64_t late_write_backs; /* dirty lines of a killed host that reached memory afterwards */
    uint64_t left_out;         /* calls of the seam that did nothing, as options say */
};

/* Two hosts, 64 lines, no posted fences, no early drops, and all else drawn by the seed: caches
 * from tiny to roomy, calm and busy memory, both ways to schedule. Tests set what they need. */
struct incoherent_options incoherent_usual(uint64_t seed);

/* One at a time in a process: the seam works on the one that was made last. */
incoherent *incoherent_make(const struct incoherent_options *options);
void incoherent_free(incoherent *sim);

/* Addresses for the protocol. Nothing is mapped there: an access past the seam dies by SIGSEGV.
 * Called outside of incoherent_run(), the seam reads and writes memory itself, at once. */
void *incoherent_base(incoherent *sim);

/* Starts an actor of a host, also while others run. A killed host comes back with an empty cache:
 * what of its lines was still on the way is written back or lost before. Returns its number. */
int incoherent_actor(incoherent *sim, uint32_t host, void (*run)(void *context), void *context);
/* Runs until each actor has returned, was killed, or is paused. */
void incoherent_run(incoherent *sim);
/* For an actor that waits: others go first. */
void incoherent_yield(void);
/* The actor tells others something by another way than this memory (a variable of the test, a
 * socket): what it fenced by posted fences has happened. */
void incoherent_tell(void);
/* The actor was told something: no early drop of it reaches back before this. */
void incoherent_hear(void);
/* Who runs; -1 outside of incoherent_run(). */
int incoherent_running(incoherent *sim);
bool incoherent_alive(incoherent *sim, int actor);

/* A process dies. Part of its buffer, in an order that is allowed, still takes effect; the host's
 * cache stays. One that kills itself goes on until its next step. */
void incoherent_kill(incoherent *sim, int actor);
enum incoherent_loss {
    INCOHERENT_DROP,  /* power off: the cache is lost */
    INCOHERENT_DELAY, /* cut off: buffers and dirty lines reach memory later, at random */
};
void incoherent_kill_host(incoherent *sim, uint32_t host, enum incoherent_loss loss);
void incoherent_pause(incoherent *sim, int actor);
void incoherent_resume(incoherent *sim, int actor);

/* Called at every step, by whoever takes it; it may kill, pause, resume and start actors. */
void incoherent_hook(incoherent *sim, void (*hook)(void *context), void *context);

/* Empties all buffers and caches into memory. */
void incoherent_drain(incoherent *sim);
/* Reads memory itself. */
void incoherent_peek(incoherent *sim, const void *address, size_t bytes, void *out);

uint64_t incoherent_step_count(incoherent *sim);
const struct incoherent_counts *incoherent_counts(incoherent *sim);
/* Equal for equal seeds and programs: all operations, values and events are in it. */
uint64_t incoherent_trace_hash(incoherent *sim);
/* The last operations and events, the latest at the end. */
void incoherent_trace(incoherent *sim, FILE *to);
