/* A pool in a process: what it has open, its operations, threads and counters.
 *
 * Words: a *page* is a record of page_tokens tokens of all layers; a *piece* is the K, V or digest
 * of one (page, layer, kv head); a *run* is 16 neighbouring slots, the grain of placement; a *slot*
 * of the host state is a process.
 *
 * The order of locks, for who takes several:
 *   pools_lock()
 *   operations
 *   a batch's, then its sequences' by their addresses
 *   list_lock (who has it only tries a sequence's), then spare_lock
 *   the local tier's lock, then its readers
 *   claims of the host state, then its mutex, the host lock
 * Who has the host lock waits for no other host, and not for readers, who may wait for it. */
#ifndef CXLKV_POOL_H
#define CXLKV_POOL_H

#include <string.h>

#include "kernels/kernels.h"
#include "pool/host_state.h"

/* Sequences whose leases end, a heap: the earliest first. */
typedef struct deadlines {
    struct cxlkv_sequence **heap;
    uint32_t count, capacity;
    atomic_ulong first_ns;       /* when the first ends; UINT64_MAX: there is none */
} deadlines;

typedef struct helpers helpers; /* threads of this process; worker.h is about another one */

/* Up to record_layers layers of one group: what one page holds. Derived from the layout. */
typedef struct part {
    uint32_t window;             /* 0: none */
    uint32_t layers;
    uint32_t first_layer, last_layer;
} part;

struct cxlkv_pool {
    char *path;                  /* NULL: anonymous */
    region region;               /* its memory, mapped */
    int host_fd;
    state_place state;           /* open as long as the pool: who leaves may have no file free */
    cxlkv_layout layout;
    cxlkv_geometry geometry;
    cxlkv_sharing sharing;
    part *parts;
    uint16_t part_of[CXLKV_LAYERS_MAX], row_of[CXLKV_LAYERS_MAX];  /* by layer: where it lies */
    bool windowed;               /* a part has a window */
    uint8_t identity[16];
    bool in_place;               /* made where its file, or device, was before */
    host_state *host;
    page_info *pages;
    atomic_uint *hotness;
    reuse_record *reuse;
    run_info *runs;
    index_entry *index;
    uint32_t *held;              /* our row of the held table: references by page */
    atomic_ulong *loose;         /* bit by page: taken by pages_alloc(), and nobody's else */
    /* By page: references that nobody here needs, and that wait for the host lock to go; and how
     * many these are. */
    atomic_uint *late;
    atomic_ulong late_count;
    uint32_t slot;
    uint64_t lock_wait_ns;       /* for the host lock, before that is an error */
    atomic_ulong *verified;      /* bit page * record_layers + row: its CRCs were right here */
    pthread_rwlock_t operations; /* read: an operation runs; write: close */
    bool closed;
    pthread_mutex_t list_lock;   /* guards sequences, deadlines, the worker threads' creation */
    struct cxlkv_sequence *sequences;
    uint64_t sequence_count;
    deadlines deadlines;         /* of those that are hits */
    atomic_uint references;
    uint32_t thread_count;
    helpers *threads;
    pthread_mutex_t spare_lock;  /* guards the two below */
    struct tail *spare_tails;
    uint64_t spare_count;
    counter_row *counters;       /* our row in the host state */
    atomic_bool hotness_off;     /* this process counts no hotness */
    atomic_bool hotness_by_mass; /* its attends count by attention */
    bool shared;                 /* by several hosts */
    enum visibility_mode mode;
    hosts hosts;                 /* how this process reaches the others */
    uint64_t lease_ns;
    uint64_t mapped_version;     /* host->extents_version when the mapping was made to fit it */
    uint32_t pauses;             /* in the present wait for another host, with the host lock */
    atomic_uint claim_pauses;    /* and with the claims */
    pthread_t lock_thread;       /* which of this process has the host lock; 0: none */
    struct keeper *keeper;
    log_record log_waiting[LOG_BATCH]; /* written when the host lock is given back */
    uint32_t log_count;
    log_record *forgotten;       /* while all is read anew, or a log is followed */
    uint32_t forgotten_count, forgotten_room;
    /* Between fork's prepare and its end: the slot that was made for the child, the slot's nonce,
     * and files that the child inherits: one keeps the slot, one is the child's own region file. */
    uint32_t fork_slot;
    uint64_t fork_nonce;
    int fork_state_fd, fork_region_fd;
    struct alive *alive;         /* our slot's lock */
    _Atomic(struct worker_client *) client; /* of a worker (worker.h); NULL: never asked for one */
    struct pool_scorer *_Atomic scorers; /* the last one added (scorers.h) */
    atomic_ulong *seen;          /* of objects, by page: the generation whose CRC was right here */
    atomic_uint lent;            /* objects that are held by leases */
    struct room *_Atomic room;   /* of the last call that wanted much: room_take() */
    struct local_tier *local;    /* set under the write lock of operations; NULL: there is none */
    struct cxlkv_pool *next;     /* all open pools of this process, for fork */
};

/* The first of kv_heads neighbouring pieces of (page, layer). */
static inline uint8_t *pieces_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer,
                                 uint32_t kind) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t slot = page % g->slab_slots;
    uint8_t *at = pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes +
                  g->layers_offset + pool->row_of[layer] * g->layer_bytes;
    if (kind == PIECE_VALUES && values_are_keys(&pool->layout)) kind = PIECE_KEYS;
    return at + slab_offset(g, kind) + slot * pool->layout.kv_heads * piece_stride(g, kind);
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

/* ---- pool.c ---- */
/* One page more, which others may be changing; free ones, which are most, count nowhere. */
static inline void page_count(cxlkv_page_counts *counts, const page_info *info, bool ours) {
    bool held = __atomic_load_n(&info->holders, __ATOMIC_RELAXED) != 0;
    bool published = __atomic_load_n(&info->published, __ATOMIC_RELAXED) != 0;
    bool retired = __atomic_load_n(&info->retired, __ATOMIC_RELAXED) != 0;
    bool quarantined = __atomic_load_n(&info->quarantined, __ATOMIC_RELAXED) != 0;
    if (ours && !(held | published | retired | quarantined | info->withdrawn)) return;
    counts->published += published;
    counts->pinned += info->pinned;
    if (!ours) {
        counts->elsewhere++;
        counts->borrowed += held;
        counts->published_elsewhere += published;
    } else if (info->withdrawn) counts->withdrawn++;
    else if (retired) counts->retired++;
    else if (quarantined) counts->quarantined++;
    else if (held) counts->held++;
    else counts->published_only++;
}
void pool_retain(cxlkv_pool *pool);
void pool_drop(cxlkv_pool *pool);
/* fork.c: the list of all pools of this process, which a fork goes through */
void fork_register(void);
void pools_add(cxlkv_pool *pool);
void pools_remove(const cxlkv_pool *pool);
void pools_lock(void);                    /* no fork until pools_unlock() */
void pools_unlock(void);
/* create.c */
int create_region(cxlkv_pool *pool, const char *path, uint32_t flags);
/* Maps what lies there; the pool is what its superblock says. */
int open_mapped(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose);
void close_region(int fd);                /* and its locks */
/* For who only reads: labels and superblock are checked. */
int striped_inspect(const char *path, members **found);

/* ---- locks.c: operations. The host lock: host_state.h ---- */
/* Writers (close, fork) go first: steady traffic must not keep them out. So a thread never takes
 * the lock for reading twice. */
void rwlock_init(pthread_rwlock_t *lock);
int pool_enter(cxlkv_pool *pool);         /* read lock; -CXLKV_E_CLOSED */
/* The same for who gives something back: also on a host that may not go on, which could not be
 * closed otherwise. */
int pool_enter_to_release(cxlkv_pool *pool);
void pool_leave(cxlkv_pool *pool);
/* The value of `work` between the two, or the error of the first. */
#define IN_POOL(pool, work)                    \
    __extension__({                            \
        int64_t entered = pool_enter(pool);    \
        if (entered == 0) {                    \
            entered = (work);                  \
            pool_leave(pool);                  \
        }                                      \
        entered;                               \
    })
/* record_check() for a held page, by a thread that does not have the host lock. */
int record_check_unlocked(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens);
/* After a SIGBUS: retires what was hit. */
int poison_error(cxlkv_pool *pool, const guard *fault);

/* ---- poison.c: the same under the host lock; a rewriting that was interrupted is over ---- */
int poison_error_locked(cxlkv_pool *pool, const guard *fault);
/* descriptor_read() where nothing else catches a bus error: -CXLKV_E_POISON. */
int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy);

/* The value of `work` under the host lock, or the error of that, or of a SIGBUS in it. */
#define HOST_LOCKED(pool, work) HOST_LOCKED_BY(host_lock(pool), pool, work)
/* The same where `lock` takes it, as host_lock_with_room() does. */
#define HOST_LOCKED_BY(lock, pool, work)                                     \
    __extension__({                                                          \
        int64_t locked = (lock);                                             \
        if (locked == 0) {                                                   \
            locked = GUARDED(work, poison_error_locked(pool, &fault));       \
            host_unlock(pool);                                               \
        }                                                                    \
        locked;                                                              \
    })

/* ---- threads.c ---- */
typedef int (*task_function)(void *context, uint32_t item);
/* Runs items 0..count-1 on the pool's threads, each under a SIGBUS guard; the first error wins. */
int run_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context);
/* The same in a model's step: on the threads that multiply its matrices, where there are such. */
int run_step_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context);
void helpers_destroy(helpers *threads);

/* ---- counters.c: what is counted is seen by all processes of the host ---- */
static inline void count_add(cxlkv_pool *pool, enum counter which, uint64_t amount) {
    atomic_fetch_add_explicit(&pool->counters->counts[which], amount, memory_order_relaxed);
}
/* The last row is nobody's own: whoever has the lock writes it. */
static inline void host_count(host_state *host, enum counter which) {
    atomic_fetch_add_explicit(&host->counters[PROCESS_MAX].counts[which], 1, memory_order_relaxed);
}
/* The number of sequences now; under list_lock. */
static inline void count_sequences(cxlkv_pool *pool) {
    atomic_store_explicit(&pool->counters->sequences, pool->sequence_count, memory_order_relaxed);
}
/* For a thread outside of any operation: the pool may be closing. */
void count_outside(cxlkv_pool *pool, enum counter which, uint64_t amount);
void counters_begin(host_state *host, uint32_t slot);  /* under the lock, before the slot is live */
void counters_bind(cxlkv_pool *pool, uint32_t slot);
void counters_unbind(cxlkv_pool *pool);                /* before the host state is unmapped */
/* Those of a slot's process since it came; of all processes ever. */
void counters_of_slot(host_state *host, uint32_t slot, cxlkv_counters *counters);
void counters_total(host_state *host, cxlkv_counters *counters);
void counters_save(cxlkv_pool *pool);                  /* in the region */
/* False, and zeros, where nobody has saved any, or died over it. */
bool counters_load(const uint8_t *from, cxlkv_counters *counters);
void counters_restore(cxlkv_pool *pool);               /* into a new host state */

#endif
