/* What the files of the core share: structures, and prototypes under the file that defines them.
 *
 * Words: a *page* is a record of page_tokens tokens of all layers; a *piece* is the K, V or digest
 * of one (page, layer, kv head); a *run* is 16 neighbouring slots, the grain of placement; a *slot*
 * of the host state is a process. Lock order: pool->operations, sequence->lock, the claims of the
 * host, host lock. */
#ifndef CXLKV_INTERNAL_H
#define CXLKV_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/crc32c.h"
#include "cxlkv.h"
#include "coherence/hosts.h"
#include "kernels/kernels.h"
#include "kernels/sketch.h"

#ifndef CXLKV_DEBUG
#define CXLKV_DEBUG 0
#endif

enum {
    LINE_BYTES = 64,
    SUPERBLOCK_BYTES = 4096,
    AREA_ALIGNMENT = 2 << 20,
    FORMAT_VERSION = CXLKV_FORMAT_VERSION,
    FORMAT_BEFORE = 5, /* which `cxlkv pool upgrade` makes the present one */
    RUN_SLOTS = 16,
    PROCESS_MAX = 128,
    CHUNK_PAGES = 256,
    DTYPE_COUNT = 3, /* of K, V and queries */
    OBJECT_BYTES_MAX = 1 << 30,
};
enum { PIECE_DIGEST, PIECE_SKETCH, PIECE_KEYS, PIECE_VALUES, PIECE_KINDS };
enum { PAGE_FREE = 0, PAGE_SEALED = 1, PAGE_PUBLISHED = 2 };
#define NO_PAGE UINT32_MAX

static inline uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}
static inline size_t dtype_bytes(uint32_t dtype) {
    if (dtype == CXLKV_BYTES) return 1;
    return dtype == CXLKV_FLOAT32 ? 4 : 2;
}
static inline uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- the format in the region (format.c); docs/memory-layout.md has it byte by byte ---- */

typedef struct group_row {
    uint32_t layers, kv_heads, head_dim, value_head_dim, dtype, kind, values, window;
} group_row;
_Static_assert(sizeof(group_row) == 32, "a row of the superblock's group table");

/* What a pool's bytes need of a build, a bit each, as ext4 has it. A build that does not know a bit
 * of the first word goes on, of the second it may read and write nothing, of the third it refuses.
 * FEATURES_KNOWN are the bits of this build: who adds one names it here and in docs/releases.md. */
enum { FEATURES_COMPATIBLE, FEATURES_READERS, FEATURES_INCOMPATIBLE, FEATURE_WORDS };
#define FEATURES_KNOWN {0, 0, 0}
/* For an upgrade a pool of FORMAT_BEFORE will do; who only looks may lack features of writers. */
enum superblock_purpose { SUPERBLOCK_USE, SUPERBLOCK_LOOK, SUPERBLOCK_UPGRADE };

typedef struct superblock {
    uint8_t magic[8];
    uint32_t version;
    uint32_t line_bytes;
    uint8_t identity[16];        /* random: names the pool, whatever its path */
    uint32_t page_tokens;
    uint32_t checksum;
    uint32_t sharing;
    uint32_t durable;
    uint32_t shard[4];
    char model_id[256];
    cxlkv_geometry geometry;
    uint32_t group_count;
    uint32_t sketch;
    group_row groups[CXLKV_GROUPS_MAX];
    uint8_t group_of[CXLKV_LAYERS_MAX];
    uint32_t host_count;
    uint32_t log_records;
    /* From here on a line that version 5 had not: its builds look at the CRC only. */
    uint32_t crc_before;         /* version 5: of all bytes before it */
    uint32_t build;              /* CXLKV_BUILD of who made the pool, or upgraded it */
    uint64_t features[FEATURE_WORDS];
    uint8_t reserved[28];
    uint32_t crc;                /* of all bytes before it */
} superblock;
_Static_assert(sizeof(superblock) <= SUPERBLOCK_BYTES - 4 * LINE_BYTES,
               "leaves the saved counters and the host line");
_Static_assert(offsetof(superblock, crc_before) % LINE_BYTES == 0 &&
               sizeof(superblock) == offsetof(superblock, crc_before) + LINE_BYTES,
               "what is new in version 6 is a line, which an upgrade writes first");

/* On a line of its own behind the CRC: the pool's file is not its own, so nobody removes it. */
#define IN_PLACE_OFFSET 2112
#define IN_PLACE_MARK "INPLACE" /* with its zero 8 bytes */
_Static_assert(sizeof(superblock) <= IN_PLACE_OFFSET && IN_PLACE_OFFSET % LINE_BYTES == 0,
               "behind the CRC");

/* The last line of the superblock's page: which host state speaks for this pool. */
typedef struct host_line {
    uint64_t nonce;
    uint32_t build;              /* of the processes that use it, and the incompatible features */
    uint32_t features;           /* that they know: the low 32 */
    uint32_t crc;                /* of the 16 bytes before it */
} host_line;

/* One writer: the page's owner. word 0 is {generation, state}, stored last. */
typedef struct descriptor {
    uint64_t version;            /* generation << 8 | state */
    uint64_t hash[2];            /* under which match() finds it; 0 when not published */
    uint32_t tokens;
    uint32_t page;
    uint32_t table_crc;          /* of the record's checksum table */
    uint32_t ordinal;            /* which page of its chain: a chain with a gap ends there */
    uint32_t part;               /* of the layers, whose tokens it holds */
    uint32_t publication;        /* counted by its host, 24 bits: one generation may have several */
    uint32_t reserved[3];
    uint32_t crc;                /* of the 60 bytes before it */
} descriptor;
_Static_assert(sizeof(descriptor) == LINE_BYTES, "one line, one writer");

typedef struct record_header {
    uint32_t magic;
    uint32_t page;
    uint64_t generation;
    uint64_t hash[2];
    uint32_t tokens;
    uint32_t table_crc;
    uint32_t ordinal;
    uint32_t part;
    uint32_t reserved[3];
    uint32_t crc;
} record_header;
_Static_assert(sizeof(record_header) == LINE_BYTES, "one line");
/* What a page is published under. */
typedef struct page_key {
    uint64_t hash[2];
    uint32_t ordinal;
} page_key;

#define RECORD_MAGIC 0x52564b43u /* "CKVR" */

/* ---- host state: in host DRAM, shared by the processes of one host (host.c) ---- */

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
    uint64_t start_time;         /* clock ticks since boot: a reused pid has another */
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
    uint32_t parent_plus_one;    /* the page before it in the tree of prefixes; 0: none is known */
    uint16_t hits;
    uint16_t parent_born;        /* low bits: a page published since then is no parent any more */
    uint16_t part;
    uint16_t reserved;
} reuse_record;
_Static_assert(sizeof(reuse_record) == 20, "24 bytes a page, with its heat");

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
    uint64_t beats, since_ns;    /* its last heartbeat, and since when by our own clock */
    uint64_t lease_ns;           /* that it promises to beat within, if longer than ours */
    uint64_t wanted_extents;
    log_place log;               /* how far its log was read */
} host_view;

/* Two locks, both robust and process-shared, taken in this order:
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
    uint64_t bytes;
    uint64_t pages_offset, runs_offset, index_offset, held_offset, held_stride_bytes;
    uint32_t page_count, run_count, index_capacity, ready;
    pthread_mutex_t mutex, claims;
    uint32_t holder, claimer;    /* the slots that had them last, for who waits in vain */
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
    uint64_t wanted_extents;
    uint64_t log_next;           /* the record of our log that is written next */
    uint32_t publications;       /* as they are counted in descriptors */
    uint64_t extents_version;    /* moves when extents come or go */
    uint64_t withdrawn_pages;
    host_view views[HOSTS_MAX];
    uint64_t pool_device, pool_inode;
    char pool_path[512];         /* where the pool's file lay; empty when the name is longer */
    uint64_t heat_offset, reuse_offset;
    uint64_t clock;              /* pages that were found or published so far */
    /* Of heat, without the mutex: uses counted so far, and epochs begun by hand. */
    _Alignas(LINE_BYTES) atomic_ulong heat_uses;
    atomic_ulong heat_advances;
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

/* ---- process-local ---- */

/* Sequences whose leases end, a heap: the earliest first. */
typedef struct deadlines {
    struct cxlkv_sequence **heap;
    uint32_t count, capacity;
    atomic_ulong first_ns;       /* when the first ends; UINT64_MAX: there is none */
} deadlines;

typedef struct workers workers; /* threads of this process; worker.h is about another one */

/* Up to record_layers layers of one group: what one page holds. Derived from the layout. */
typedef struct part {
    uint32_t window;             /* 0: none */
    uint32_t layers;
    uint32_t first_layer, last_layer;
} part;

/* Where a host state lies (state_folder.c). */
enum { STATE_PATH_BYTES = 128 };
typedef struct state_place {
    int folder;                  /* -1: there is none */
    uid_t owner;                 /* of the pool's file; folder and files are that user's */
    uint32_t name_at;            /* where in path the file's own name begins */
    char path[STATE_PATH_BYTES]; /* of the file, for messages: it is reached by the folder */
} state_place;

struct cxlkv_pool {
    char *path;                  /* NULL: anonymous */
    int fd, host_fd;
    state_place state;           /* open as long as the pool: who leaves may have no file free */
    uint8_t *base;
    uint64_t mapped_bytes;       /* region_bytes in whole units */
    uint64_t unit_bytes;         /* of the mapping: a page, a huge page, a unit of a device */
    cxlkv_layout layout;
    cxlkv_geometry geometry;
    cxlkv_sharing sharing;
    part *parts;
    uint16_t part_of[CXLKV_LAYERS_MAX], row_of[CXLKV_LAYERS_MAX];  /* by layer: where it lies */
    bool windowed;               /* a part has a window */
    uint8_t identity[16];
    const char *page_kind;
    uint64_t nodes;              /* asked for when it was made, bit by node; 0: none */
    bool in_place;               /* made where its file, or device, was before */
    host_state *host;
    page_info *pages;
    atomic_uint *heat;
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
    workers *threads;
    pthread_mutex_t spare_lock;  /* guards the two below */
    struct tail *spare_tails;
    uint64_t spare_count;
    counter_row *counters;       /* our row in the host state */
    atomic_bool heat_off;        /* this process counts no heat */
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
    atomic_ulong *seen;          /* of objects, by page: the generation whose CRC was right here */
    atomic_uint lent;            /* objects that are held by leases */
    struct near_tier *near;      /* set under the write lock of operations; NULL: there is none */
    struct cxlkv_pool *next;     /* all open pools of this process, for fork */
};

/* Up to 256 page ids, shared by forks; it holds one reference on each of pages [first, count). */
typedef struct chunk {
    atomic_uint references;
    uint16_t first, count;
    uint32_t pages[CHUNK_PAGES];
} chunk;

/* The pages of one part. */
typedef struct page_table {
    chunk **chunks;              /* NULL before `first` and behind the last */
    uint32_t chunk_capacity;
    uint32_t first;              /* pages before it lie behind the window: not ours any more */
} page_table;

/* Filled tokens of a layer's last page, a row each: K of all heads, then V; shared by forks. Token
 * by token, so that an append touches two runs of bytes and a fork's copy is one. */
typedef struct tail {
    atomic_uint references;
    struct tail *next_spare;     /* in the pool's list of tails that nobody uses */
    uint8_t pad[LINE_BYTES - 2 * sizeof(void *)];
    uint8_t data[];
} tail;
_Static_assert(sizeof(tail) == LINE_BYTES, "the data begins on a line");

struct cxlkv_sequence {
    cxlkv_pool *pool;
    pthread_rwlock_t lock;
    bool released;
    bool expired;
    bool approximate;            /* it has pages that a key of content found: fixed when made */
    atomic_ulong lease_deadline_ns;  /* CLOCK_BOOTTIME; 0: none; read without the lock */
    uint32_t deadline_place;     /* in the pool's deadlines, from 1; 0: nowhere */
    page_table *tables;          /* by part */
    uint32_t page_count;         /* = layer_tokens[0] / page_tokens, in every table */
    uint64_t *layer_tokens;      /* never more than the layer before */
    tail **tails;
    uint32_t *export_pages;      /* by part: the tail's copy that the last handle names */
    bool exported;               /* there are such copies */
    uint64_t export_tokens;
    struct worker_table *worker_tables; /* by part: what the worker was told; NULL: nothing */
    struct worker_tail *worker_tails; /* by layer: what the worker has of a tail; or NULL */
    struct cxlkv_sequence *next, *previous;
    struct cxlkv_sequence *next_busy; /* within sequences_expire() */
};

struct cxlkv_batch {
    cxlkv_pool *pool;
    pthread_mutex_t lock;        /* one operation at a time: the scratch is shared */
    uint32_t count;
    cxlkv_sequence **sequences;
    cxlkv_sequence **lock_order; /* by address */
    void *scratch;
    size_t scratch_bytes;
    bool counted_elsewhere;      /* a worker's: its client counts which pages were used */
};

/* ---- error.c ---- */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- guard.c: SIGBUS inside a guarded stretch becomes a return value ---- */
typedef struct guard {
    sigjmp_buf jump;
    struct guard *previous;
    uintptr_t address;
    size_t granularity_bytes;
} guard;
int guard_install(void);
void guard_forked(void);                  /* in a forked child */
guard **guard_current(void);
/* GUARD_BEGIN(g) { work } GUARD_END(g, on_fault): on_fault is evaluated after a SIGBUS. */
#define GUARD_BEGIN(g)                   \
    (g).previous = *guard_current();     \
    *guard_current() = &(g);             \
    if (sigsetjmp((g).jump, 0) == 0) {
#define GUARD_END(g, on_fault)           \
        *guard_current() = (g).previous; \
    } else {                             \
        *guard_current() = (g).previous; \
        on_fault;                        \
    }

/* ---- region.c ---- */
/* What helps, as the end of a sentence, when a limit of this process is the cause; or "". */
const char *remedy_of(int code);
/* The three map geometry.region_bytes and set base, mapped_bytes, unit_bytes and page_kind. */
int region_map_anonymous(cxlkv_pool *pool);
int region_create_file(cxlkv_pool *pool, const char *path, char *made, size_t made_bytes);
int region_map_file(cxlkv_pool *pool);
void region_unmap(cxlkv_pool *pool);
/* Bytes of a file or a dax device; an error when it is neither. */
int region_size(int fd, const char *path, uint64_t *bytes);
/* Of a file or a dax device; false when there are fewer, or they cannot be read. */
bool region_read(int fd, uint64_t offset, void *to, size_t bytes);
/* The end of a pool: a file's name goes; of a device, and of a file in which it was made in place
 * (as its mark says, or the caller), the superblock. */
int region_discard(int fd, const char *path, bool in_place);
bool region_is_in_place(int fd);
/* Takes from its file system what the first `bytes` of a file lack; its size stays. */
int region_fill_holes(int fd, uint64_t bytes, const char *path);
/* Byte 0 is held while a process joins or leaves, byte 1 (shared) while it uses the pool. */
enum { ATTACH_BYTE = 0, USE_BYTE = 1 };
/* And of a host state's file: held (shared) while it is open; LIVE_BYTE + i (shared) while the
 * process of slot i lives, or the child that is being forked for it. */
enum { STATE_BYTE = 0, LIVE_BYTE = 64 };
/* wait: for lock_wait_s at most, then -ETIMEDOUT; byte_lock_error() says what it means. */
extern double lock_wait_s;
int lock_byte(int fd, off_t offset, bool exclusive, bool wait);
int lock_byte_within(int fd, off_t offset, bool exclusive, double wait_s);
int byte_lock_error(int code, const char *path);
int unlock_byte(int fd, off_t offset);
/* Another open file of the same file, with the byte locked (shared); -1 when that fails. */
int open_again(int fd, off_t offset);
bool byte_is_free(int fd, off_t offset);  /* nobody has it locked; takes no lock to find out */

/* ---- place.c: NUMA nodes ---- */
/* Of the mapping's file, from pool->nodes; before it has pages. */
int place_bind(cxlkv_pool *pool);
int place_look(cxlkv_pool *pool, uint64_t pages_max, cxlkv_placed *out);
/* All pages lie where pool->nodes says. */
int place_verify(cxlkv_pool *pool);

/* ---- stripes.c: several devices or files as one region, "dax:A+B" ---- */
bool stripes_path(const char *path);
/* The first bytes of a member. */
bool stripes_is_label(const uint8_t *bytes);
/* The two map and set pool->fd, as region_map_file() and what it needs; create formats, too. */
int stripes_create(cxlkv_pool *pool, const char *path, uint32_t flags);
int stripes_open(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose);
int stripes_remove(const char *path);
/* For who only reads: labels and superblock are checked. fd: the first member's. stripes_leave()
 * closes it with the others. */
typedef struct members members;
int stripes_look(const char *path, members **found, int *fd, uint64_t *bytes);
bool stripes_read(const members *all, uint64_t offset, void *to, size_t bytes);
void stripes_leave(members *all);

/* ---- device.c: a dax device (/dev/daxX.Y) in place of a file ---- */
enum { DEVICE_NAME_BYTES = 64 };
typedef struct device_facts {
    char name[DEVICE_NAME_BYTES];    /* "dax0.0" */
    char driver[DEVICE_NAME_BYTES];  /* "device_dax", "kmem" (system RAM), or "": none is bound */
    uint64_t bytes;
    uint64_t unit_bytes;         /* a mapping's address, offset and length are multiples of it */
    int64_t node;                /* the NUMA node that it is, or would be, as system RAM */
} device_facts;
/* False when it is no dax device. sysfs: "/sys", or a test's. */
bool device_look(const char *sysfs, dev_t number, device_facts *facts);
bool device_of(int fd, device_facts *facts);
/* Why open() said ENXIO, and what mends it. */
int device_refused(const char *sysfs, const char *path, dev_t number);
bool device_read(int fd, const device_facts *facts, uint64_t offset, void *to, size_t bytes);
/* Its first bytes, or those of a file; the first line of them before the others. */
int device_write(int fd, const device_facts *facts, const char *path,
                 const uint8_t page[SUPERBLOCK_BYTES]);
int device_wipe(int fd, const device_facts *facts, const char *path);
/* Of a device, or of a file as if it were one: its bytes, and the unit in which it is mapped. */
int region_facts(int fd, const char *path, device_facts *facts);

/* ---- format.c ---- */
int layout_check(const cxlkv_layout *layout);
int parts_make(cxlkv_pool *pool);         /* parts, part_of, row_of from layout and geometry */
/* Fills in sharing->log_records when that is 0. */
int geometry_make(const cxlkv_layout *layout, cxlkv_sharing *sharing, uint64_t capacity_bytes,
                  cxlkv_geometry *geometry);
hosts_area hosts_area_of(uint8_t *base, const cxlkv_sharing *sharing, const cxlkv_geometry *g);
void superblock_write(cxlkv_pool *pool);
/* Reads and checks a superblock of a file of file_bytes. */
int superblock_read(enum superblock_purpose purpose, const uint8_t *bytes, uint64_t file_bytes,
                    const char *path,
                    cxlkv_layout *layout, cxlkv_sharing *sharing, cxlkv_geometry *geometry,
                    uint8_t *identity);
/* Of FORMAT_BEFORE, in place: a whole pool of the one version or the other after each store. */
void superblock_upgrade(uint8_t *base);
/* The incompatible features that this build knows, as it tells other hosts. */
uint32_t features_told(void);
int host_line_write(cxlkv_pool *pool, uint64_t nonce);
uint64_t host_line_read(const cxlkv_pool *pool);   /* 0: none */
uint64_t host_line_nonce(const uint8_t *superblock_page);
descriptor *descriptor_of(const cxlkv_pool *pool, uint32_t page);
void descriptor_write(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t state,
                      uint32_t tokens, const page_key *key);
void descriptor_restore(cxlkv_pool *pool, uint32_t page, const descriptor *line);
/* Copies the line and verifies the copy; 0 or -CXLKV_E_CORRUPT. */
int descriptor_read(const cxlkv_pool *pool, uint32_t page, descriptor *copy);
/* The same where nothing else catches a bus error: -CXLKV_E_POISON, and the page is retired. Under
 * the host lock. */
int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy);
void record_seal(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                 const page_key *key);
void record_header_wipe(const cxlkv_pool *pool, uint32_t page); /* and its checksum table */
bool record_header_read(const cxlkv_pool *pool, uint32_t page, record_header *header);
bool record_table_is_whole(const cxlkv_pool *pool, uint32_t page, const record_header *header);
/* As its header says, even one whose rewriting was broken off: that does not change them. */
uint32_t record_part(const cxlkv_pool *pool, uint32_t page);
uint32_t record_tokens(const cxlkv_pool *pool, uint32_t page);
void record_expect(const cxlkv_pool *pool, uint32_t page);     /* it is checked soon */
/* Verifies header against page, generation and tokens. */
int record_check(const cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens);
/* The same for a held page, by a thread that does not have the host lock. */
int record_check_unlocked(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens);
uint32_t *checksum_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head,
                      uint32_t kind);
/* Verifies all pieces of (page, layer), once per acquisition of the page by this process. */
int pieces_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer);
int piece_verify(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t kv_head, uint32_t kind,
                 const void *bytes);
/* Of a piece the bytes that its CRC covers: all, but of an object that does not fill its page. */
size_t piece_used_bytes(const cxlkv_pool *pool, uint32_t page, uint32_t kind);
void verified_set(cxlkv_pool *pool, uint32_t page, uint32_t layer);
void verified_clear(cxlkv_pool *pool, uint32_t page);
/* Retires the pages with a byte in the aligned granule at `address`; under the host lock. Returns
 * how many. */
uint64_t retire_range(cxlkv_pool *pool, uintptr_t address, size_t bytes);

static inline bool values_are_keys(const cxlkv_layout *layout) {
    return layout->values == CXLKV_VALUES_KEY_PREFIX;
}
/* A pool of objects, each the bytes of one page; a "token" is a byte then. */
static inline bool stores_objects(const cxlkv_layout *layout) {
    return layout->values == CXLKV_VALUES_OBJECT;
}
/* Channels stored of one token and head. */
static inline uint64_t row_channels(const cxlkv_layout *layout) {
    return layout->head_dim + (values_are_keys(layout) ? 0 : layout->value_head_dim);
}

/* As a caller sees them; values that are a prefix of the keys have no piece of their own. */
static inline size_t piece_data_bytes(const cxlkv_layout *layout, uint32_t kind) {
    size_t element = dtype_bytes(layout->dtype);
    if (stores_objects(layout)) return kind == PIECE_KEYS ? layout->page_tokens : 0;
    if (kind == PIECE_DIGEST) return 2 * layout->head_dim * element;
    if (kind == PIECE_SKETCH) return sketch_bytes(layout->page_tokens, layout->head_dim);
    uint32_t dim = kind == PIECE_KEYS ? layout->head_dim : layout->value_head_dim;
    return (size_t)layout->page_tokens * dim * element;
}

/* From one head's piece to the next one's; 0: this pool has none of this kind. */
static inline uint64_t piece_stride(const cxlkv_geometry *g, uint32_t kind) {
    const uint64_t strides[PIECE_KINDS] = {g->digest_piece_bytes, g->sketch_piece_bytes,
                                           g->key_piece_bytes, g->value_piece_bytes};
    return strides[kind];
}
/* Of a kind's slab, from the layer's start. */
static inline uint64_t slab_offset(const cxlkv_geometry *g, uint32_t kind) {
    const uint64_t offsets[PIECE_KINDS] = {0, g->sketches_offset, g->keys_offset,
                                           g->values_offset};
    return offsets[kind];
}

/* The first of kv_heads neighbouring pieces of (page, layer). */
static inline uint8_t *pieces_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer,
                                 uint32_t kind) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t slot = page % g->slab_slots;
    uint8_t *at = pool->base + g->extents_offset + page / g->slab_slots * g->extent_bytes +
                  g->layers_offset + pool->row_of[layer] * g->layer_bytes;
    if (kind == PIECE_VALUES && values_are_keys(&pool->layout)) kind = PIECE_KEYS;
    return at + slab_offset(g, kind) + slot * pool->layout.kv_heads * piece_stride(g, kind);
}

/* ---- counters.c: what is counted is seen by all processes of the host ---- */
static inline void count_add(cxlkv_pool *pool, enum counter which, uint64_t amount) {
    atomic_fetch_add_explicit(&pool->counters->counts[which], amount, memory_order_relaxed);
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

/* ---- hotness.c ---- */
/* Pages of a call that succeeded, under the locks of its batch: those of its lists, or all that it
 * read. starts may be NULL where picked->pages are of whole sequences, or NULL. */
void hotness_count(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts);
void hotness_freed(cxlkv_pool *pool, uint32_t page);
/* The others under the host lock. parent: the page before it, or NO_PAGE. */
void hotness_published(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t parent);
void hotness_follows(cxlkv_pool *pool, uint32_t page, uint32_t parent);
void hotness_found(cxlkv_pool *pool, uint32_t page, uint32_t part); /* by its descriptor */
void hotness_unpublished(cxlkv_pool *pool, uint32_t page);
void hotness_asked(cxlkv_pool *pool, uint32_t page);  /* the last page of a hit, not full */
/* Pages [first, count) of a part are a hit's; found is [count][part_count]. */
void hotness_matched(cxlkv_pool *pool, const uint32_t *found, uint32_t part, uint32_t first,
                     uint32_t count);

/* ---- host.c ---- */
int host_attach(cxlkv_pool *pool);        /* joins or makes the host state; registers us */
void host_detach(cxlkv_pool *pool);
int host_trylock(cxlkv_pool *pool);       /* 0, or -CXLKV_E_TIMEOUT without a text */
int host_lock(cxlkv_pool *pool);          /* 0, or -CXLKV_E_TIMEOUT; repairs after a death inside */
void host_unlock(cxlkv_pool *pool);
int mutex_lock_until(pthread_mutex_t *mutex, uint64_t until_ns);  /* by the next one */
uint64_t lock_clock_ns(void);
uint64_t host_reap(cxlkv_pool *pool);     /* under the lock: gives back what dead processes held */
/* Under the lock: one more of what no process counts for itself. */
void host_count(host_state *host, enum counter which);
int host_register(cxlkv_pool *pool, uint32_t state, uint32_t *slot);
void host_unregister(cxlkv_pool *pool, uint32_t slot);
void host_rebuild_runs(cxlkv_pool *pool, uint32_t first_run, uint32_t count);  /* of 64 pages */
void host_rebuild(cxlkv_pool *pool);      /* lists, holders and index from their primary records */
/* All that we have published, in the log: whoever died may not have come to say it. */
void log_again(cxlkv_pool *pool);
uint32_t *held_of(const cxlkv_pool *pool, uint32_t slot);
int host_recount(cxlkv_pool *pool, char *text, size_t text_bytes);  /* problems found */
/* Offsets for so many pages; returns the bytes of the whole. */
uint64_t host_state_layout(uint32_t page_count, host_state *host);
bool host_state_is_ours(const host_state *host);
bool host_state_fits(const host_state *host, uint32_t page_count, const uint8_t identity[16]);
/* Of the pool in `fd`, when nobody has its state open: after the pool itself. */
void host_remove_state(const uint8_t identity[16], int fd, uint32_t host);
/* Round each change, under the lock, of a record that others may hold: a death there is mended. */
void rewrite_begin(cxlkv_pool *pool, uint32_t page);
void rewrite_end(cxlkv_pool *pool);
void process_identify(process_slot *slot);
bool process_is_dead(const process_slot *slot);
bool slot_is_dead(int state_fd, uint32_t slot); /* one that is taken, in a host state's file */
uint64_t random_u64(void);
#if CXLKV_DEBUG >= 2
void host_assert(cxlkv_pool *pool);
#else
#define host_assert(pool) ((void)(pool))
#endif

/* ---- alive.c: open files whose locks say that this process lives; none crosses a fork ---- */
typedef struct alive alive;
alive *alive_begin(int fd, off_t byte);   /* opens it again, byte locked; NULL: errno says why */
alive *alive_keep(int fd);                /* one that was made for this process; NULL: no memory */
void alive_end(alive *own);
void alive_fork_prepare(void);
void alive_fork_parent(void);
void alive_fork_child(void);

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

/* ---- pages.c: all under the host lock, but for pages_drop_later() and pages_unclaim() ---- */
void pages_list(cxlkv_pool *pool, uint32_t run);     /* puts a run where its mask says */
void pages_unlist(cxlkv_pool *pool, uint32_t run);   /* takes it, all free, out of the allocator */
void pages_put_back(cxlkv_pool *pool, uint32_t page); /* free, and its descriptor says so */
/* Tries to have so many free pages: dead processes', withdrawn ones. See host_lock_with_room(). */
void pages_make_room(cxlkv_pool *pool, uint64_t count);
/* In place of a page to be behind: no page follows these, so they open no run while gaps are left.
 * An extent that has one of them cannot be given to another host. */
#define IN_A_GAP (NO_PAGE - 1)
/* Takes count pages, neighbours of `after` first; all or nothing: 0 or -CXLKV_E_POOL_FULL. */
int pages_take(cxlkv_pool *pool, uint32_t count, uint32_t after, uint32_t *pages);
void pages_hold(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* For who does not have the host lock, and cannot have it: they are dropped by the next call of
 * this process that has it. Never fails. */
void pages_drop_later(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_drop_late(cxlkv_pool *pool);   /* those */
void pages_drop_slot(cxlkv_pool *pool, uint32_t slot);  /* all that its process holds */
/* Frees those that nothing needs any more; neighbours share their looks and fences. */
void pages_settle(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
/* Bit i is page first + i of a pin word, that nothing here needs: free, or withdrawn. */
void pages_free_word(cxlkv_pool *pool, uint32_t first, uint64_t pages);
/* Pages of cxlkv_pages_alloc() are the caller's to free no more, and are again; all or none. */
int pages_claim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
void pages_unclaim(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);
uint64_t page_retire(cxlkv_pool *pool, uint32_t page);   /* for good; returns 1 if it was not yet */
int full_error(cxlkv_pool *pool, uint32_t wanted);

/* ---- where hosts share the pool; all under the host lock, if nothing else is said ---- */
/* claiming.c: dealing with other hosts, without the host lock. `turn` is how: it beats while it
 * waits, and has the epoch of the claims' holder. */
int claim_lock(cxlkv_pool *pool, hosts *turn);    /* 0, or -CXLKV_E_TIMEOUT */
int claim_trylock(cxlkv_pool *pool, hosts *turn); /* the same without a text */
void claim_unlock(cxlkv_pool *pool);
/* To look only: without the claims. */
hosts hosts_outside(cxlkv_pool *pool);
/* After a SIGBUS that interrupted their holder, perhaps with the host lock: an error. */
int claim_poisoned(cxlkv_pool *pool, const hosts *turn, const guard *fault);
/* peers.c: the first three under no lock */
int peers_prepare(cxlkv_pool *pool, const cxlkv_host *host); /* before the host state is joined */
int peers_arrive(cxlkv_pool *pool);       /* a new host state speaks for this host from now on */
void peers_leave(cxlkv_pool *pool);       /* the last process has left */
uint64_t peers_nonce(const cxlkv_pool *pool);     /* of the host state that speaks for this host */
bool peers_is_off(cxlkv_pool *pool);      /* the epoch of the host state was ended for good */
void peers_sync(cxlkv_pool *pool);        /* after another process may have changed something */
void peers_beat(cxlkv_pool *pool, bool now);      /* when it is due; looks at the others' */
/* May this host go on? True: it was fenced, and is to return. Does not wait. */
int peers_look(cxlkv_pool *pool, bool *fenced);
/* If this host was fenced: a new epoch. With the claims, without the host lock. */
int peers_return(cxlkv_pool *pool, hosts *turn);
/* What another host, or time, may say at once: for a wait without the host lock. */
bool peers_silent(cxlkv_pool *pool, uint32_t host);
void peers_pause(cxlkv_pool *pool);
int peers_check(cxlkv_pool *pool);        /* may this host go on? */
/* After pages were read: `code`, or an error if this host may have been declared off meanwhile, and
 * others have written to what it had pinned. */
int64_t peers_verify(cxlkv_pool *pool, int64_t code);
/* The page is in no index any more; its entry is the caller's to erase. */
static inline void page_unpublish(cxlkv_pool *pool, uint32_t page) {
    pool->host->published_pages -= pool->pages[page].published;
    pool->pages[page].published = 0;
    pool->pages[page].pinned = 0;
    hotness_unpublished(pool, page);
}
/* extents.c */
static inline bool page_is_ours(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].ours;
}
/* It is in doubt which are ours, until somebody with the claims has looked; the number is for who
 * clears the doubt itself. */
static inline uint32_t extents_doubt(cxlkv_pool *pool) {
    return __atomic_add_fetch(&pool->host->owners_doubted, 1, __ATOMIC_SEQ_CST);
}
static inline bool extents_in_doubt(const cxlkv_pool *pool) {
    return __atomic_load_n(&pool->host->owners_doubted, __ATOMIC_RELAXED) !=
           __atomic_load_n(&pool->host->owners_sure, __ATOMIC_RELAXED);
}
/* Which are ours, from what all hosts claim: with the claims, without the host lock. */
int extents_refresh(cxlkv_pool *pool, const hosts *turn);
/* Before a page that was taken in an earlier call is written: 0, or an error when its extent is not
 * ours any more, for then its memory can only be read. */
int page_stays_ours(const cxlkv_pool *pool, uint32_t page);
void extents_protect(cxlkv_pool *pool);   /* this process's mapping: what is not ours, read-only */
/* V8 for all descriptors: written back, if any was stored here, and dropped from the caches. */
void descriptors_hand_over(const cxlkv_pool *pool, bool gives);
void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable); /* another host's */
bool extents_take(cxlkv_pool *pool, uint64_t page_count); /* under no lock; there was room */
const char *extents_why(void);            /* if not, and if that is an error: its text */
uint64_t extents_wanted(const cxlkv_pool *pool);  /* by others */
/* As many as others want and we can spare: with the claims, without the host lock. */
void extents_give(cxlkv_pool *pool, hosts *turn);
void extents_offer(cxlkv_pool *pool);
/* borrow.c: pages of other hosts */
typedef struct borrowing {
    uint32_t page;
    uint32_t state;              /* that is wanted: sealed or published */
    uint64_t generation;
    int code;                    /* out */
} borrowing;
/* Pins them and takes them into view, to be read in place until the last holder drops them. */
void borrow(cxlkv_pool *pool, borrowing *items, uint32_t count);
void borrow_end(cxlkv_pool *pool, uint32_t first, uint64_t pages);  /* bit i: page first + i */
void borrow_own(cxlkv_pool *pool, uint32_t first, uint32_t count); /* that are ours from now on */
void borrow_recover(cxlkv_pool *pool);    /* no pins but of what is held, after a death */
/* Which of the 64 pages of a word other hosts have pinned. */
uint64_t pinned_elsewhere(const cxlkv_pool *pool, uint32_t page);
void withdrawn_look(cxlkv_pool *pool);    /* frees those that nobody pins any more */
/* follow.c: logs */
void log_add(cxlkv_pool *pool, uint32_t operation, uint32_t page, uint64_t generation,
             const uint64_t hash[2]);
/* What another host published under that hash is to be forgotten: by it, and by all who find it. */
void log_forget(cxlkv_pool *pool, uint32_t page, uint64_t generation, const uint64_t hash[2]);
/* forgotten: not evicted, so that other copies go as well. */
void log_free(cxlkv_pool *pool, uint32_t page, uint64_t generation, const uint64_t hash[2],
              bool forgotten);
void log_write(cxlkv_pool *pool);
void peers_follow(cxlkv_pool *pool);
/* forgotten.c: such wishes. As a list: of all logs, for who reads descriptors. */
void forgotten_read(cxlkv_pool *pool);
bool is_forgotten(const cxlkv_pool *pool, const descriptor *line);
void forgotten_add(cxlkv_pool *pool, const log_record *record);
void forgotten_drop(cxlkv_pool *pool);
/* Is the page still what is to be forgotten? By its descriptor, from memory. */
bool forget_matters(cxlkv_pool *pool, const log_record *record);
uint32_t publication_of(cxlkv_pool *pool, uint32_t page);
/* After `count` records were written: what the next would overwrite stands in our log again. */
void forgotten_carry(cxlkv_pool *pool, uint32_t count);
/* keeper.c: a thread that beats and does what others wait for */
int keeper_start(cxlkv_pool *pool);
void keeper_stop(cxlkv_pool *pool);

/* ---- index.c: all under the host lock ---- */
void index_expect(const cxlkv_pool *pool, const uint64_t hash[2]);  /* it is asked for soon */
uint32_t index_find(const cxlkv_pool *pool, const uint64_t hash[2]);
bool index_insert(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page);
void index_erase(cxlkv_pool *pool, const uint64_t hash[2]);
void index_erase_page(cxlkv_pool *pool, uint32_t page); /* the page's entry; walks the index */
void index_clear(cxlkv_pool *pool);

/* ---- pool.c ---- */
/* Reads the superblock through the file, not the mapping: a short file is an error, no SIGBUS. */
int open_checked(enum superblock_purpose purpose, const char *path, int *fd, cxlkv_layout *layout,
                 cxlkv_sharing *sharing, cxlkv_geometry *geometry, uint8_t *identity);
void close_region(int fd);                /* and its locks */
int busy_error(const char *path);
/* Writes an empty pool into the mapping: its superblock last. */
int pool_format(cxlkv_pool *pool);
int pool_enter(cxlkv_pool *pool);         /* read lock; -CXLKV_E_CLOSED */
/* The same for who gives something back: also on a host that may not go on, which could not be
 * closed otherwise. */
int pool_enter_to_release(cxlkv_pool *pool);
void pool_leave(cxlkv_pool *pool);
void pool_retain(cxlkv_pool *pool);
void pool_drop(cxlkv_pool *pool);
/* After a SIGBUS: retires what was hit. The second is for a thread that has the host lock. */
int poison_error(cxlkv_pool *pool, const guard *fault);
int poison_error_locked(cxlkv_pool *pool, const guard *fault);
uint64_t boottime_ns(void);

/* ---- deadlines.c: all under the pool's list_lock but the last ---- */
int deadlines_add(deadlines *all, cxlkv_sequence *sequence);
void deadlines_remove(deadlines *all, cxlkv_sequence *sequence); /* if it is there */
/* One whose lease has ended, taken out, the earliest first; NULL: none has. */
cxlkv_sequence *deadlines_ended(deadlines *all, uint64_t now_ns);
bool deadlines_any_ended(const deadlines *all, uint64_t now_ns);

/* ---- sequence.c ---- */
int sequence_make(cxlkv_pool *pool, cxlkv_sequence **sequence);
int sequence_usable(const cxlkv_sequence *sequence);     /* under its lock */
uint64_t sequence_even_tokens(const cxlkv_sequence *sequence);  /* UINT64_MAX when layers differ */
void sequence_drop_pages(cxlkv_sequence *sequence);
void sequences_expire(cxlkv_pool *pool);
/* host_lock(); when fewer pages are free, ended leases give up theirs first, and other hosts. */
int host_lock_with_room(cxlkv_pool *pool, uint64_t page_count);
/* Room for pages [page_count, page_count + count) of a part; then sequence_push() cannot fail. */
int sequence_reserve(cxlkv_sequence *sequence, uint32_t part, uint32_t count);
void sequence_push(cxlkv_sequence *sequence, uint32_t part, uint32_t index, uint32_t page);
/* Takes back the pages from page_count on, which this call pushed: nobody shares them, so it cannot
 * fail. */
void sequence_pull(cxlkv_sequence *sequence, uint32_t page_count);
/* Gives back a part's pages before `first`; under the host lock. */
int sequence_advance(cxlkv_sequence *sequence, uint32_t part, uint32_t first);
/* The first page of a part that the token at `position` sees. */
uint32_t window_page(const cxlkv_pool *pool, uint32_t part, uint64_t position);
int sequence_cut(cxlkv_sequence *sequence, uint32_t page_count);
/* The first `filled` tokens of a complete page; on an error *out may be one, to be dropped. */
int tail_from_page(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t filled, tail **out);
tail *tail_make(cxlkv_pool *pool);
tail *tail_copy(cxlkv_pool *pool, tail *from, uint32_t filled);  /* its first tokens */
void tail_drop(cxlkv_pool *pool, tail *tail);
void tails_discard(cxlkv_pool *pool);
/* A line more than a token: rows 4 KiB apart would all fall into one set of the L1 cache. */
static inline size_t tail_row_bytes(const cxlkv_pool *pool) {
    const cxlkv_layout *layout = &pool->layout;
    uint64_t dims = layout->kv_heads * row_channels(layout);
    return align_up(dims * dtype_bytes(layout->dtype), LINE_BYTES) + LINE_BYTES;
}
/* Where K or V of a head begin in the row of token 0. */
static inline uint8_t *tail_at(const cxlkv_pool *pool, tail *tail, uint32_t kind, uint32_t head) {
    const cxlkv_layout *layout = &pool->layout;
    uint64_t channels = (uint64_t)head * layout->head_dim;
    if (kind == PIECE_VALUES && !values_are_keys(layout))
        channels = (uint64_t)layout->kv_heads * layout->head_dim + head * layout->value_head_dim;
    return tail->data + channels * dtype_bytes(layout->dtype);
}
static inline uint32_t sequence_page(const cxlkv_sequence *sequence, uint32_t part,
                                     uint32_t index) {
    return sequence->tables[part].chunks[index / CHUNK_PAGES]->pages[index % CHUNK_PAGES];
}

/* ---- handle.c ---- */
/* The index's hash of one page of a key: its place among the key's pages, and its part. */
void page_hash(const uint8_t *hashes, uint64_t key, uint64_t place, uint32_t part,
               uint64_t hash[2]);
/* These four under the host lock. Is the page what a handle says, and still alive? */
int page_acquire_check(cxlkv_pool *pool, uint32_t page, uint32_t part, uint64_t generation,
                       uint32_t tokens);
/* A page that is published already, or whose hash is, stays as it is: the first copy serves all. */
bool publish_page(cxlkv_pool *pool, uint32_t page, uint32_t part, uint32_t tokens,
                  const page_key *key);
/* The page of one part under a hash, and which of its chain it is; false: none. A damaged page, or
 * one of another number of tokens, is none either: a miss, never a wrong hit. */
bool match_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t part, uint32_t tokens,
                uint32_t *page, uint32_t *ordinal);
/* everywhere: the copies that other hosts may have published under this hash, too. */
bool page_forget(cxlkv_pool *pool, const uint64_t hash[2], bool everywhere);
/* A whole call: `each` of every page that is published under these keys, under the host lock.
 * reaps: first what the worker and dead processes still hold is given back. */
typedef void page_function(cxlkv_pool *pool, uint32_t page, const uint64_t hash[2], void *context);
int keys_call(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, bool reaps,
              page_function *each, void *context);
/* Before a page is free: zeros in all of it, if somebody asked for that. False: it is retired. */
bool page_scrubbed(cxlkv_pool *pool, uint32_t page);
/* Refuses one whose pages are approximate. */
int publish_check(const cxlkv_sequence *sequence);
/* Writes the first `filled` tokens of a tail to a (page, layer). */
int export_layer(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t filled);
/* A last page that is not full, pushed as if it were, becomes an open tail of this process. */
int reopen_tail(cxlkv_sequence *sequence, uint64_t tokens);
/* Complete pages of one part behind those that it has, held under adopt()'s rules; entries are as
 * in a handle. On an error some of them are held: destroy it. */
int sequence_hold(cxlkv_sequence *sequence, uint32_t part, const uint8_t *entries, uint32_t count);

/* ---- tails.c ---- */
/* Adds the longest published page that is not full behind the sequence's pages, if there is one;
 * the sequence is nobody else's. Returns its tokens, or 0. */
int64_t match_tail(cxlkv_sequence *sequence, const cxlkv_match_args *args);
/* ---- near.c: copies of units in this process's memory; docs/near-tier.md ---- */
typedef struct near_slot {
    int64_t unit;
    uint64_t generation;         /* of its page; written before the table names the slot */
    uint32_t next_free;
    enum { NEAR_FREE, NEAR_RESERVED, NEAR_HELD, NEAR_STALE } state;
} near_slot;

/* free_count + reserved_count + held_count = slot_count; a stale slot counts as held. */
typedef struct near_tier {
    uint8_t *memory;
    uint64_t mapped_bytes, unit_bytes;
    uint64_t values_offset;      /* in a slot; the keys begin it */
    near_slot *slots;
    atomic_uint *table;          /* by unit: slot + 1, and NEAR_ON_ITS_WAY; 0: none */
    atomic_uint *heat;           /* by unit: epoch << 16 | count */
    uint16_t *layer_of;          /* by part * record_layers + row; UINT16_MAX: there is none */
    uint64_t unit_count, window_reads;
    atomic_uint epoch;
    atomic_ulong reads_near, reads_far;
    /* Who reads copies holds it for reading, for the length of a call; entries leave the table
     * under the write lock only. So what a reader has found stays, and no slot is refilled
     * meanwhile. Lock order: sequences, lock, host lock or readers; readers may take the host
     * lock, too, so nobody who has that one waits for readers. */
    pthread_rwlock_t readers;
    pthread_mutex_t lock;        /* guards slots, the table's changes and all below */
    uint32_t slot_count, free_count, reserved_count, held_count, first_free;
    uint64_t promoted, demoted, dropped, refused, refused_no_room, undone;
} near_tier;
#define NEAR_ON_ITS_WAY (1u << 31)

static inline uint64_t unit_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    return (uint64_t)page * pool->geometry.record_layers + pool->row_of[layer];
}
/* The copy of a unit whose page the caller holds, or NULL; between near_enter and near_leave. */
static inline const uint8_t *near_find(const cxlkv_pool *pool, const near_tier *tier,
                                       uint32_t page, uint32_t layer) {
    /* Pairs with the release of near_complete(): slot and bytes are there when the entry is. */
    uint32_t entry =
        atomic_load_explicit(&tier->table[unit_of(pool, page, layer)], memory_order_acquire);
    if (entry == 0 || entry & NEAR_ON_ITS_WAY) return NULL;
    if (tier->slots[entry - 1].generation != pool->pages[page].generation) return NULL;
    return tier->memory + (entry - 1) * tier->unit_bytes;
}
/* One reading of a unit more. Threads that meet here may lose one: it is a hint. */
static inline void near_heat_add(near_tier *tier, uint64_t unit) {
    uint32_t epoch = atomic_load_explicit(&tier->epoch, memory_order_relaxed);
    uint32_t heat = atomic_load_explicit(&tier->heat[unit], memory_order_relaxed);
    uint32_t age = (epoch - (heat >> 16)) & UINT16_MAX;
    uint32_t count = age < 16 ? (heat & UINT16_MAX) >> age : 0;
    count += count < UINT16_MAX;
    atomic_store_explicit(&tier->heat[unit], epoch << 16 | count, memory_order_relaxed);
}
/* What a call read of chosen pages: one for each unit and head. */
typedef struct near_reads {
    atomic_ulong near, far;
} near_reads;
/* Round each call that reads copies; the second also counts what was read. */
static inline void near_enter(cxlkv_pool *pool) {
    if (pool->near) pthread_rwlock_rdlock(&pool->near->readers);
}
void near_leave(cxlkv_pool *pool, const near_reads *reads);
void near_drop_all(cxlkv_pool *pool);     /* the tier, at close; under the write lock */
void near_forked(cxlkv_pool *pool);       /* in the child: its copies are its parent's */
/* A promotion in three steps, each under pool_enter(); cxlkv_near_promote() is all of them. */
typedef struct near_move {
    int64_t unit;
    uint64_t generation;         /* 0: as the page is */
    uint32_t page, slot;
    uint16_t layer;
    bool reserved;               /* has a slot, and a reference of its own on its page */
    bool copied;
    int32_t code;                /* CXLKV_NEAR_... */
} near_move;
/* Reserves slots, and holds the pages, of those that can be promoted; an error: of none. */
int near_prepare(cxlkv_pool *pool, near_move *moves, uint32_t count);
int near_copy(cxlkv_pool *pool, near_move *moves, uint32_t count);
/* Shows what was copied, if shows and if its page is what it was; undoes the rest. Lets go of the
 * pages. Returns how many can be read now. */
int64_t near_complete(cxlkv_pool *pool, near_move *moves, uint32_t count, bool shows);

/* ---- append.c ---- */
/* Writes one (page, layer) from a tail with `tokens` filled, the others zero. */
int page_write_tail(cxlkv_pool *pool, uint32_t page, uint32_t layer, tail *from, uint32_t tokens);
/* Where stores went through the caches (V1). */
void pieces_write_back(const cxlkv_pool *pool, uint32_t page, uint32_t layer);

/* ---- batch.c ---- */
int batch_lock(cxlkv_batch *batch, bool write);
void batch_unlock(cxlkv_batch *batch);
void *batch_scratch(cxlkv_batch *batch, size_t bytes);
int batch_starts(const cxlkv_batch *batch, const int32_t *starts, uint32_t *rows);
/* Of an engine's block table; *rows: the tokens of all blocks. */
int blocks_check(const cxlkv_batch *batch, const cxlkv_blocks *table, uint32_t *rows);
int queries_check(const cxlkv_batch *batch, uint32_t layer, uint32_t q_heads,
                  const cxlkv_rows *queries, const int32_t *starts, uint32_t *rows);
/* Query rows of any strides and dtype to float32 [sequence][kv_head][row][group][dim], and packed
 * if the instruction set has a form for them; `out` is as long as queries_bytes() says. */
size_t queries_bytes(const cxlkv_batch *batch, const kernels *isa, uint64_t query_count);
kernel_queries queries_pack(const cxlkv_batch *batch, const kernels *isa, const cxlkv_rows *queries,
                            uint32_t q_heads, const int32_t *starts, void *out);
static inline kernel_queries queries_range(kernel_queries all, uint64_t first, uint32_t count) {
    return (kernel_queries){all.rows, all.packed, all.total, (uint32_t)first, count};
}

/* A layer of one sequence as the scoring loops see it: complete pages, then the open tail. */
typedef struct layer_view {
    cxlkv_sequence *sequence;
    uint64_t tokens;
    uint32_t first;              /* pages before it are gone */
    uint32_t pages;              /* with the tail */
    uint32_t complete;           /* without it */
    uint32_t layer, part;
    uint32_t window;             /* 0: none */
    const near_tier *near;       /* whose copies are read instead; NULL: none. Scoring has none */
} layer_view;
layer_view view_of(cxlkv_sequence *sequence, uint32_t layer);
/* K or V of one page, all heads: where head 0, token 0 is, and how far the next ones are. */
typedef struct page_rows {
    const uint8_t *first;
    uint64_t head_bytes;
    size_t row_bytes;
    bool near;                   /* of a copy, which was verified when it was made */
} page_rows;
/* These two in near.c. Counts the pages of a list, as near or far, and by unit; the view has a
 * tier. */
void near_count_reads(const layer_view *view, const int32_t *pages, uint32_t count,
                      near_reads *reads);
/* K or V in the page's copy, or NULL. No inline: most pools have no tier. */
const uint8_t *view_copy(const layer_view *view, uint32_t page, bool keys);
static inline __attribute__((always_inline)) page_rows
view_rows(const layer_view *view, uint32_t index, uint32_t kind) {
    cxlkv_pool *pool = view->sequence->pool;
    const cxlkv_geometry *g = &pool->geometry;
    bool keys = kind == PIECE_KEYS || values_are_keys(&pool->layout);
    size_t dim = keys ? pool->layout.head_dim : pool->layout.value_head_dim;
    page_rows rows = {.row_bytes = dim * dtype_bytes(pool->layout.dtype)};
    if (index < view->complete) {
        uint32_t page = sequence_page(view->sequence, view->part, index);
        rows.first = pieces_of(pool, page, view->layer, kind);
        rows.head_bytes = keys ? g->key_piece_bytes : g->value_piece_bytes;
        bool looks = __builtin_expect(view->near != NULL, 0);
        const uint8_t *copy = looks ? view_copy(view, page, keys) : NULL;
        if (copy) {
            rows.first = copy;
            rows.near = true;
        }
    } else {
        rows.first = tail_at(pool, view->sequence->tails[view->layer], kind, 0);
        rows.head_bytes = rows.row_bytes;
        rows.row_bytes = tail_row_bytes(pool);
    }
    return rows;
}
/* Tokens that page `index` holds. */
static inline uint32_t view_filled(const layer_view *view, uint32_t index) {
    uint64_t page_tokens = view->sequence->pool->layout.page_tokens;
    return (uint32_t)min_u64(page_tokens, view->tokens - index * page_tokens);
}
/* Of those, the ones that query row `row` of `rows` may see: it is token tokens - (rows - row). */
static inline uint32_t view_visible(const layer_view *view, uint32_t index, uint64_t row,
                                    uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t seen = view->tokens - rows + row + 1;
    return seen <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), seen - first);
}
/* The first token that query row `row` of `rows` may see. */
static inline uint64_t view_low(const layer_view *view, uint64_t row, uint64_t rows) {
    uint64_t position = view->tokens - rows + row;
    return view->window && position >= view->window ? position - view->window + 1 : 0;
}
/* Tokens at the start of page `index` that lie behind that row's window. */
static inline uint32_t view_hidden(const layer_view *view, uint32_t index, uint64_t row,
                                   uint64_t rows) {
    uint64_t first = (uint64_t)index * view->sequence->pool->layout.page_tokens;
    uint64_t low = view_low(view, row, rows);
    return low <= first ? 0 : (uint32_t)min_u64(view_filled(view, index), low - first);
}
/* Do `count` rows from `row` on see all that page `index` holds? */
static inline bool view_whole(const layer_view *view, uint32_t index, uint64_t row, uint64_t count,
                              uint64_t rows) {
    return view_visible(view, index, row, rows) == view_filled(view, index) &&
           view_hidden(view, index, row + count - 1, rows) == 0;
}
/* How many of the rows from `row` on, at most `limit`, see all of page `index`: they go together.
 * 1 when that row sees a part of it only. */
static inline uint64_t view_together(const layer_view *view, uint32_t index, uint64_t row,
                                     uint64_t rows, uint64_t limit) {
    if (view_visible(view, index, row, rows) < view_filled(view, index)) return 1;
    return view_hidden(view, index, row + limit - 1, rows) ? 1 : limit;
}
/* Verifies page `index` on its first reading here; the tail needs none. */
int view_verify(const layer_view *view, uint32_t index);

/* ---- attend.c ---- */
/* Into how many ranges the pages of each row are cut, under the locks of the batch: together with
 * the call's rows it decides the last bits of the output. */
uint32_t attend_parts(cxlkv_batch *batch, cxlkv_attend_args *args);
/* cxlkv_batch_attend in this process, by arguments that were checked; parts 0: chosen. */
int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts);

/* ---- select.c ---- */
/* What a select chose, as fetch and attend take it. */
static inline cxlkv_picked select_chosen(const cxlkv_select_args *args) {
    return (cxlkv_picked){.pages = args->pages, .k = args->k, .per = args->per};
}

/* ---- threads.c ---- */
/* Between two looks at what another thread or process writes. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
typedef int (*task_function)(void *context, uint32_t item);
/* Runs items 0..count-1 on the pool's threads, each under a SIGBUS guard; the first error wins. */
int run_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context);
void workers_destroy(workers *threads);

#endif
