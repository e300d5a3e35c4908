/* What the processes of one host share about a pool, in their own DRAM (which pages are free, held
 * and found, who the processes are, what was counted), and what each of them has of it open.
 *
 * Words: a *page* is a record of page_tokens tokens of one part; a *piece* is the K, V or digest
 * of one (page, layer, kv head); a *run* is 16 neighbouring slots, the grain of placement; a *slot*
 * of the host state is a process.
 *
 * The order in which a thread takes several locks:
 *   pools_lock()
 *   operations
 *   a batch's, then its sequences' by their addresses
 *   locks.list (with it, a sequence's is only tried), then locks.spare
 *   the local tier's lock, then its readers
 *   claims of the host state, then its mutex, the host lock
 * The holder of the host lock waits for no other host, nor for readers, which may wait for it. */
#pragma once
#include "coherence/types.h"
#include "format/layout.h"
#include "kernels/kernels.h"

/* Written under the host lock. `published`: set by pages/published.c, host/rebuild.c,
 * sharing/log_reader.c and admin/check.c, cleared by page_unpublish() and a rebuild. */
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

/* 16 slots. format/runs.c writes it, and host/rebuild.c makes it anew, both but for `ours`; under
 * the host lock, or where no other process has the state. */
typedef struct run_info {
    uint16_t free_mask;          /* bit i: slot i is free */
    uint16_t ours;               /* 1: its extent is this host's (sharing/extent_owners.c) */
    uint32_t next, previous;     /* in the list of free runs, or of partly free ones */
} run_info;

/* Written under the host lock by host/processes.c and pool/fork.c; a worker's clients have such
 * ones too, in its own file (worker/types.h). */
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
    uint16_t priority;           /* the higher, the longer it stays; 0: none was set */
} reuse_record;
_Static_assert(sizeof(reuse_record) == 20, "24 bytes a page, with its hotness");

/* In the order of cxlkv_counters, which says what each counts. */
enum counter {
    COUNT_APPENDED_BYTES, COUNT_SCORED_BYTES, COUNT_FETCHED_BYTES, COUNT_ATTENDED_BYTES,
    COUNT_CORRUPT_PIECES, COUNT_STALE_HANDLES, COUNT_POOL_FULL, COUNT_MATCH_KEYS_ASKED,
    COUNT_MATCH_KEYS_HIT, COUNT_WINDOW_PAGES_FREED, COUNT_WINDOW_PAGES_SKIPPED,
    COUNT_AUDITED_SELECTS, COUNT_AUDITED_RECALL, COUNT_AUDITED_MASS, COUNT_REAPED_PROCESSES,
    COUNT_REBUILDS, COUNT_QUEUED_DROPS, COUNT_LOCK_WAITS, COUNT_LOST_LINES, COUNT_LOG_RESCANS,
    COUNT_LOST_FORGETS, COUNT_KINDS,
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

/* Two locks, both robust and process-shared; the top has the order of all.
 *
 * `claims`: whose this host's dealings with the others are: its place in the queue for the lock
 * between hosts, its claims and commits, its epoch. A thread that waits for another host has this
 * one at most.
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
    uint32_t unfinished;         /* pages of the state checkpoint that is being published, or 0 */
    uint8_t unfinished_key[16];
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

/* Folders above that keep state of their own with a pool, in the order of its closing. */
enum pool_owner { OWNER_SEQUENCES, OWNER_WORKER, OWNER_TIERS, OWNER_OBJECTS, OWNER_COUNT };

typedef struct helpers helpers; /* threads of this process; worker/ is about another one */

/* Where the pieces of one layer lie in a record outside of the pool, from the layer's start; the
 * same for all pools of one layout. */
typedef struct packing {
    uint64_t offsets[PIECE_KINDS], sizes[PIECE_KINDS]; /* of a kind's first piece, of each piece */
    uint64_t layer_bytes, payload_bytes;
} packing;

/* How the layers of one shape are kept. Derived from layout and geometry. */
typedef struct layer_shape {
    cxlkv_layout layout;         /* the pool's, with this shape */
    uint64_t strides[PIECE_KINDS]; /* from one head's piece to the next; 0: there are none */
    uint64_t offsets[PIECE_KINDS]; /* of slot 0's first piece in row 0, from the extent's start */
    uint64_t slot_bytes[PIECE_KINDS], row_bytes; /* from one slot, one row to the next */
    uint32_t rows;               /* of a page */
    packing packing;
} layer_shape;

/* Up to record_layers layers of one group: what one page holds. Derived from the layout. */
typedef struct part {
    uint32_t window;             /* 0: none */
    uint32_t layers;
    uint32_t first_layer, last_layer;
} part;

/* What a process has of a pool open. The comment of each field begins with the folders that write
 * it: tests/test_layers.py finds writes elsewhere. What lies in the host state has its lock. */
struct cxlkv_pool {
    char *path;                  /* pool, admin: NULL: anonymous */
    region region;               /* pool, admin: its memory, mapped */
    int host_fd;                 /* pool: of the host state */
    state_place state;           /* pool: open as long as the pool: who leaves may have no file
                                  * free */
    cxlkv_layout layout;         /* format, pool: */
    cxlkv_geometry geometry;     /* format, pool: */
    cxlkv_sharing sharing;       /* format, pool: */
    struct {
        part *parts;             /* format: [stored_parts()] */
        uint16_t part_of[CXLKV_LAYERS_MAX], row_of[CXLKV_LAYERS_MAX]; /* format: where it lies */
        uint16_t *layer_at;      /* format: [stored_parts()][record_layers]: layer_at() */
        layer_shape *shapes;     /* format: one, or, where groups differ, of each group */
        const layer_shape *shape_of[CXLKV_LAYERS_MAX]; /* format: by layer */
        uint32_t kv_heads;       /* format: the most of any */
        bool windowed;           /* format: a part has a window */
    } layers;
    uint8_t identity[16];        /* format, pool: */
    bool in_place;               /* pool: made where its file, or device, was before */
    host_state *host;            /* pool: */
    page_info *pages;            /* pool: the host state's */
    atomic_uint *hotness;        /* pool: the host state's */
    reuse_record *reuse;         /* pool: the host state's */
    run_info *runs;              /* pool: the host state's */
    index_entry *index;          /* pool: the host state's */
    uint32_t *held;              /* pool, pages: our row of the held table: references by page */
    atomic_ulong *loose;         /* pool: bit by page: taken by pages_alloc(), and nobody's else */
    struct {                     /* that nobody here needs, and that wait for the host lock to go */
        atomic_uint *references; /* pages, pool: by page */
        atomic_ulong count;      /* pages: of all */
    } late;
    uint32_t slot;               /* pool: ours in the host state */
    struct {
        uint64_t lock_ns;        /* pool: for the host lock, before that is an error */
        uint32_t pauses;         /* pages: in the present one for a host, with the host lock */
        atomic_uint claim_pauses; /* sharing: and with the claims */
        pthread_t lock_thread;   /* host: which of this process has the host lock; 0: none */
    } waits;
    atomic_ulong *verified;      /* format, pool: bit page * record_layers + row: its CRCs were
                                  * right here */
    struct {
        pthread_rwlock_t operations; /* pool: read: an operation runs; write: close */
        pthread_mutex_t list;    /* pool: guards sequences, deadlines, making of helpers */
        pthread_mutex_t spare;   /* pool: guards spare tails */
    } locks;
    uint64_t sequence_count;     /* format: by count_sequences() only */
    struct {
        atomic_uint references;  /* pool: */
        bool closed;             /* pool: */
        struct cxlkv_pool *next; /* pool: all open pools of this process, for fork */
    } handle;
    struct {
        uint32_t count;          /* pool: with the one that calls */
        helpers *helpers;        /* host, pool: */
    } threads;
    counter_row *counters;       /* host: our row in the host state */
    struct {                     /* of hotness, in this process */
        atomic_bool off;         /* host: it counts none */
        atomic_bool by_mass;     /* host: its attends count by attention */
    } counts;
    bool shared;                 /* pages: by several hosts */
    enum visibility_mode mode;   /* pages: */
    hosts hosts;                 /* pages, sharing: how this process reaches the others */
    uint64_t lease_ns;           /* pages: */
    uint64_t mapped_version;     /* format: host->extents_version when the mapping was made to fit
                                  * it */
    struct keeper *keeper;       /* sharing, pool: */
    struct {
        log_record waiting[LOG_BATCH]; /* pages: written when the host lock is given back */
        uint32_t count;          /* pages, pool: */
    } log;
    struct {                     /* while all is read anew, or a log is followed */
        log_record *records;     /* pages: */
        uint32_t count, capacity; /* pages: */
    } forgotten;
    struct {                     /* between fork's prepare and its end */
        uint32_t slot;           /* pool: that was made for the child */
        uint64_t nonce;          /* pool: the slot's */
        int state_fd, region_fd; /* pool: the child's: one keeps the slot, one is its region file */
    } fork;
    struct alive *alive;         /* pool: our slot's lock */
    void *_Atomic owner[OWNER_COUNT]; /* sequence, worker, tiers, objects: what each keeps
                                       * (host/hooks.h); NULL: nothing yet */
    struct pool_scorer *_Atomic scorers; /* format: the last one added (scorers.h) */
};

/* The parts of the layers, and one more of state checkpoints, or of objects in several pages. */
static inline uint32_t stored_parts(const cxlkv_pool *pool) {
    return pool->geometry.part_count +
           (has_states(&pool->layout) || has_object_pages(&pool->layout));
}
/* The layer that a row of a part's pages has. Of states it is any layer of this row: their bytes
 * fill the pieces of all rows. */
static inline uint32_t layer_at(const cxlkv_pool *pool, uint32_t part, uint32_t row) {
    return pool->layers.layer_at[part * pool->geometry.record_layers + row];
}

static inline const layer_shape *shape_of(const cxlkv_pool *pool, uint32_t layer) {
    return pool->layers.shape_of[layer];
}
/* The pool's layout with the shape of a layer. Where groups differ, pool->layout has none. */
static inline const cxlkv_layout *layout_of(const cxlkv_pool *pool, uint32_t layer) {
    return &shape_of(pool, layer)->layout;
}

/* The first of kv_heads neighbouring pieces of (page, layer). */
static inline uint8_t *pieces_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer,
                                 uint32_t kind) {
    const cxlkv_geometry *g = &pool->geometry;
    const layer_shape *s = shape_of(pool, layer);
    uint64_t slot = page % g->slab_slots;
    uint8_t *at = pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes +
                  pool->layers.row_of[layer] * s->row_bytes;
    if (kind == PIECE_VALUES && values_are_keys(&s->layout)) kind = PIECE_KEYS;
    return at + s->offsets[kind] + slot * s->slot_bytes[kind];
}

/* past: past the caches, if it begins on a line. */
static inline void copy_past(uint8_t *to, const uint8_t *from, size_t bytes, bool past) {
    if (past && (uintptr_t)to % LINE_BYTES == 0)
        kernels_current()->store_rows(to, from, bytes, 1, bytes);
    else
        memcpy(to, from, bytes);
}

static inline uint32_t *held_of(const cxlkv_pool *pool, uint32_t slot) {
    const host_state *host = pool->host;
    return (uint32_t *)((uint8_t *)host + host->held_offset + slot * host->held_stride_bytes);
}

static inline void count_add(cxlkv_pool *pool, enum counter which, uint64_t amount) {
    atomic_fetch_add_explicit(&pool->counters->counts[which], amount, memory_order_relaxed);
}
/* The last row is nobody's own: whoever has the lock writes it. */
static inline void host_count(host_state *host, enum counter which) {
    atomic_fetch_add_explicit(&host->counters[PROCESS_MAX].counts[which], 1, memory_order_relaxed);
}
/* So many sequences more; under locks.list. */
static inline void count_sequences(cxlkv_pool *pool, int64_t more) {
    pool->sequence_count += (uint64_t)more;
    atomic_store_explicit(&pool->counters->sequences, pool->sequence_count, memory_order_relaxed);
}
static inline bool page_is_free(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].free_mask >> page % RUN_SLOTS & 1;
}
/* Round each change of a record that others may hold: a death there is mended. */
static inline void rewrite_begin(cxlkv_pool *pool, uint32_t page) {
    pool->host->rewriting = page;
    atomic_signal_fence(memory_order_seq_cst); /* a death is seen in program order: no CPU fence */
}
static inline void rewrite_end(cxlkv_pool *pool) {
    atomic_signal_fence(memory_order_seq_cst);
    pool->host->rewriting = NO_PAGE;
}
static inline void hotness_freed(cxlkv_pool *pool, uint32_t page) {
    atomic_store_explicit(&pool->hotness[page], 0, memory_order_relaxed);
}
/* The page is in no index any more; its entry is the caller's to erase. */
static inline void page_unpublish(cxlkv_pool *pool, uint32_t page) {
    pool->host->published_pages -= pool->pages[page].published;
    pool->pages[page].published = 0;
    pool->pages[page].pinned = 0;
    pool->reuse[page] = (reuse_record){0};
}
static inline uint64_t extents_of(const cxlkv_pool *pool, uint64_t page_count) {
    uint64_t slots = pool->geometry.slab_slots;
    return page_count / slots + (page_count % slots != 0);
}
static inline bool page_is_ours(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].ours;
}
static inline uint32_t first_run_of(const cxlkv_pool *pool, uint32_t extent) {
    return extent * pool->geometry.slab_slots / RUN_SLOTS;
}
/* It is in doubt which are ours, until somebody with the claims has looked; a caller that
 * clears the doubt itself uses the number. */
static inline uint32_t extents_doubt(cxlkv_pool *pool) {
    return __atomic_add_fetch(&pool->host->owners_doubted, 1, __ATOMIC_SEQ_CST);
}
static inline bool extents_in_doubt(const cxlkv_pool *pool) {
    return __atomic_load_n(&pool->host->owners_doubted, __ATOMIC_RELAXED) !=
           __atomic_load_n(&pool->host->owners_sure, __ATOMIC_RELAXED);
}
