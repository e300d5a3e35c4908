/* What the processes of one host share about a pool, in their own DRAM: which pages are free, held
 * and found, who the processes are, what was counted. */
#ifndef CXLKV_HOST_STATE_H
#define CXLKV_HOST_STATE_H

#include "pool/format.h"

typedef struct page_info {
    uint64_t generation;         /* the descriptor's; bumped when the page is freed */
    uint32_t holders;            /* processes with held[page] > 0 */
    uint8_t published, retired, quarantined;
    /* Where hosts share the pool. Shown: others may know this generation. Withdrawn: free but for
     * the pins of another host. */
    uint8_t shown : 1, withdrawn : 1;
    uint8_t pinned : 1;          /* by a user: published, and eviction leaves it alone */
    uint8_t scrub : 1;           /* its bytes are not to outlive its last holder */
} page_info;

typedef struct run_info {
    uint16_t free_mask;          /* bit i: slot i is free */
    uint16_t ours;               /* 1: it lies in an extent of this host */
    uint32_t next, previous;     /* in the list of free runs, or of partly free ones */
} run_info;

typedef struct process_slot {
    uint32_t state;              /* 0 unused, 1 live, 2 made for a child about to be forked */
    int32_t pid;
    uint64_t start_time;         /* ticks of the machine's clock: a reused pid has another */
    uint64_t pid_namespace;
    uint64_t nonce;
} process_slot;

typedef struct index_entry {
    uint64_t hash[2];
    uint32_t page_plus_one;      /* 0: empty */
    uint32_t reserved;
} index_entry;

/* Of a published page: when it was asked for, in the pages asked for so far (hotness.c). */
typedef struct reuse_record {
    uint32_t used, born;         /* when it was found last, and published */
    uint32_t parent_plus_one;    /* the page before it in its text; 0: none is known */
    uint16_t hits;
    uint16_t parent_born;        /* low bits: a page published since then is no parent any more */
    uint16_t part;
    uint16_t priority;           /* of who asked that it stay longer than others; 0: nobody */
} reuse_record;
_Static_assert(sizeof(reuse_record) == 20, "24 bytes a page, with its hotness");

/* In the order of cxlkv_counters, which says what each counts. */
enum counter {
    COUNT_APPENDED_BYTES,
    COUNT_SCORED_BYTES,
    COUNT_FETCHED_BYTES,
    COUNT_ATTENDED_BYTES,
    COUNT_CORRUPT_PIECES,
    COUNT_STALE_HANDLES,
    COUNT_POOL_FULL,
    COUNT_MATCH_KEYS_ASKED,
    COUNT_MATCH_KEYS_HIT,
    COUNT_WINDOW_PAGES_FREED,
    COUNT_WINDOW_PAGES_SKIPPED,
    COUNT_AUDITED_SELECTS,
    COUNT_AUDITED_RECALL,
    COUNT_AUDITED_MASS,
    COUNT_REAPED_PROCESSES,
    COUNT_REBUILDS,
    COUNT_QUEUED_DROPS,
    COUNT_LOCK_WAITS,
    COUNT_LOST_LINES,
    COUNT_LOG_RESCANS,
    COUNT_LOST_FORGETS,
    COUNT_KINDS
};
_Static_assert(sizeof(cxlkv_counters) == COUNT_KINDS * sizeof(uint64_t), "one for each");

/* On lines of its own: no process waits for another to count. */
typedef struct counter_row {
    _Alignas(LINE_BYTES) atomic_ulong counts[COUNT_KINDS];
    /* Not sums but numbers now: sequences, and references that wait in pages_drop_later(). */
    atomic_ulong sequences, late_drops;
} counter_row;
_Static_assert(sizeof(counter_row) % LINE_BYTES == 0, "a row shares no line");

/* Another host, as this one sees it. */
typedef struct host_view {
    uint64_t beats, since_ns;    /* its last heartbeat, and since when by our machine's clock */
    uint64_t lease_ns;           /* that it promises to beat within, if longer than ours */
    uint64_t seen;               /* 1: it has beaten since our first look */
    uint64_t wanted_extents;
    log_place log;               /* how far its log was read */
} host_view;

/* Two locks, both robust and process-shared; pool.h has the order of all.
 *
 * `claims`: whose this host's dealings with the others are: its place in the queue for the lock
 * between hosts, its claims and commits, its epoch. Who waits for another host has this one at
 * most.
 * `mutex`, the host lock: all else here, the held tables, the rest of this host's lines (beats,
 * log, pins, what it says of others: fences). Never held while another host is waited for, so who
 * reads what is its own waits for this host's processes only.
 *
 * Which extents are ours (run_info.ours) and the epoch change under both. Who finds that a holder
 * died mends what that lock guards, and nothing of the other: its holder may be alive. The model is
 * docs/models/processes.pml. */
typedef struct host_state {
    uint64_t magic;
    uint64_t nonce;
    uint8_t identity[16];
    uint64_t bytes;              /* from here to `ready`, as host_state_layout() says */
    uint64_t pages_offset, runs_offset, index_offset, held_offset, held_stride_bytes;
    uint32_t page_count, run_count, index_capacity, ready;
    pthread_mutex_t mutex, claims;
    uint32_t holder, claimer;    /* slots of the last holders, named in time-out errors */
    uint32_t free_runs, partial_runs;  /* heads of the two lists, NO_PAGE when empty */
    uint64_t free_pages, published_pages;
    uint32_t rewriting;          /* page whose sealed record is being rewritten, or NO_PAGE */
    process_slot processes[PROCESS_MAX];
    /* Where hosts share the pool; under the mutex like the rest. */
    uint32_t host_epoch;
    uint32_t stopped;            /* an error number: this host may not go on */
    /* How often it was in doubt which extents are ours, and up to which time it was looked at. */
    uint32_t owners_doubted, owners_sure;
    uint64_t beats, beat_ns;     /* our last heartbeat */
    uint64_t safe_ns;            /* of the last one after which we were not fenced */
    uint64_t wanted_extents;     /* by a process of this host, until then */
    uint64_t wanted_until_ns;
    uint64_t log_next;           /* the record of our log that is written next */
    uint32_t publications;       /* as they are counted in descriptors */
    uint64_t extents_version;    /* moves when extents come or go */
    uint64_t withdrawn_pages;
    host_view views[HOSTS_MAX];
    uint64_t pool_device, pool_inode;
    char pool_path[512];         /* where the pool's file lay; empty when the name is longer */
    uint64_t hotness_offset, reuse_offset;
    uint64_t clock;              /* pages that were found or published so far */
    /* Of hotness, without the mutex: uses counted so far, and epochs begun by hand. */
    _Alignas(LINE_BYTES) atomic_ulong hotness_uses;
    atomic_ulong hotness_advances;
    /* A row for each slot, written by the slot's process only and never set back: the pool's total
     * is the sum of all rows, and no death can take from it or add twice. What a process counted
     * is its row less what stood there when it came. The last row is written under the lock: what
     * was counted before this state was made, and what no process of its own counts. */
    counter_row counters[PROCESS_MAX + 1];
    counter_row counters_before[PROCESS_MAX];
} host_state;

/* The totals, as the last to leave wrote them before the host line: they outlive the host state. */
typedef struct saved_counters {
    uint64_t counts[COUNT_KINDS];
    uint32_t crc;
} saved_counters;
enum { SAVED_COUNTERS_OFFSET = SUPERBLOCK_BYTES - 4 * LINE_BYTES };
_Static_assert(sizeof(saved_counters) <= 3 * LINE_BYTES, "leaves the host line");

/* Where a host state lies (state_folder.c). */
enum { STATE_PATH_BYTES = 128 };
typedef struct state_place {
    int folder;                  /* -1: there is none */
    uid_t owner;                 /* of the pool's file; folder and files are that user's */
    uint32_t name_at;            /* where in path the file's own name begins */
    char path[STATE_PATH_BYTES]; /* of the file, for messages: it is reached by the folder */
} state_place;
/* ---- host_state.c ---- */
int host_attach(cxlkv_pool *pool);        /* joins or makes the host state; registers us */
void host_detach(cxlkv_pool *pool);
/* Offsets for so many pages; returns the bytes of the whole. */
uint64_t host_state_layout(uint32_t page_count, host_state *host);
bool host_state_is_ours(const host_state *host);
bool host_state_fits(const host_state *host, uint32_t page_count, const uint8_t identity[16]);
/* Removes the state of each host of the pool in `fd`, unless a process has it open. Call it after
 * the pool itself was removed. */
void host_remove_states(const pool_facts *facts, int fd);

/* ---- locks.c ---- */
int host_trylock(cxlkv_pool *pool);       /* 0, or -CXLKV_E_TIMEOUT without a text */
int host_lock(cxlkv_pool *pool);          /* 0, or -CXLKV_E_TIMEOUT; repairs after a death inside */
void host_unlock(cxlkv_pool *pool);
int mutex_lock_until(pthread_mutex_t *mutex, uint64_t until_ns);  /* by monotonic_ns() */

/* ---- processes.c ---- */
/* What procfs says of one. */
typedef struct process_view {
    char state;
    uint64_t thread_count, start_time;
} process_view;
bool process_look(int32_t pid, process_view *seen);
uint64_t process_shift_ticks(void); /* from the machine's clock to that of /proc as we see it */
void process_identify(process_slot *slot);
bool process_is_dead(const process_slot *slot);
bool slot_is_dead(int state_fd, uint32_t slot); /* one that is taken, in a host state's file */
int host_room_error(int code, uint64_t bytes, const char *what); /* none in /dev/shm */
uint64_t host_reap(cxlkv_pool *pool);     /* under the lock: gives back what dead processes held */
int host_register(cxlkv_pool *pool, uint32_t state, uint32_t *slot);
void host_unregister(cxlkv_pool *pool, uint32_t slot);

/* ---- rebuild.c ---- */
void host_rebuild_runs(cxlkv_pool *pool, uint32_t first_run, uint32_t count);  /* of 64 pages */
void host_rebuild(cxlkv_pool *pool);      /* lists, holders and index from their primary records */
/* All that we have published, in the log: whoever died may not have come to say it. */
void log_again(cxlkv_pool *pool);
/* The sealed record whose rewriting a death broke off is whole again. */
void rewrite_repair(cxlkv_pool *pool);
int host_recount(cxlkv_pool *pool, char *text, size_t text_bytes);  /* problems found */
#if CXLKV_DEBUG >= 2
void host_assert(cxlkv_pool *pool);
#else
#define host_assert(pool) ((void)(pool))
#endif

/* ---- state_folder.c: where host states, and the worker's slots, lie ---- */
/* Of the state of the pool in `fd`. host: NO_HOST where one host only uses the pool. 1: the folder
 * is there; 0: it is not, and was not to be made; an error: it is not fit to be used. */
int state_place_open(int fd, const uint8_t identity[16], uint32_t host, bool makes,
                     state_place *place);
/* Of a file in such a folder, by its path: the same; 0 also when the path is none. */
int state_place_at(const char *path, state_place *place);
void state_place_worker(state_place *place); /* from a state's to that of its worker's slots */
void state_place_close(state_place *place);
const char *state_name(const state_place *place);
/* A descriptor, -ENOENT without a text, or an error; flags: O_RDWR or O_RDONLY. */
int state_file_open(const state_place *place, int flags);
int state_file_make(const state_place *place);          /* a descriptor, of no name yet */
int state_file_show(const state_place *place, int fd);  /* gives it the name */
bool state_file_is(const state_place *place, int fd);   /* the name means this file */
void state_file_unlink(const state_place *place);
/* -CXLKV_E_BUSY when a build that had its states elsewhere uses the pool. */
int state_older_in_use(int pool_fd, const uint8_t identity[16], uint32_t host);

#endif
