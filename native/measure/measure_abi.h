/* The interface of cxlkv._measure, which is no part of the product: loops that `cxlkv bench` times
 * and `cxlkv bench litmus` runs. cffi reads this file as it is: declarations and plain #defines.
 *
 * As in cxlkv_abi.h, of whose build it is: values >= 0 or negated errors, and a text for them. */

#define CXLKV_ABI 28
uint32_t cxlkv_abi(void);
const char *cxlkv_error_text(void);

/* ---- what `cxlkv bench coherence` measures ---- */

/* Writes of records, then a fence of stores. */
#define CXLKV_COHERENCE_STORE 0            /* plain stores */
#define CXLKV_COHERENCE_STREAM 1           /* past the cache: what a publish is compared with */
#define CXLKV_COHERENCE_WRITE_BACK 2       /* plain stores, each line written back */
#define CXLKV_COHERENCE_INVALIDATE 3       /* plain stores, each line invalidated */
#define CXLKV_COHERENCE_EVICT 4            /* the same by the instruction that is ordered */
/* Reads by memcpy, after a full fence. */
#define CXLKV_COHERENCE_READ 5             /* no flush, no fence */
#define CXLKV_COHERENCE_READ_INVALIDATED 6 /* what an acquire is compared with */
#define CXLKV_COHERENCE_READ_EVICTED 7
/* The protocol. */
#define CXLKV_COHERENCE_PUBLISH 8
#define CXLKV_COHERENCE_ACQUIRE 9          /* as a pool does it: pinned, one look, copied */
#define CXLKV_COHERENCE_ACQUIRE_UNPINNED 10 /* a look before the copy and one after it */
#define CXLKV_COHERENCE_UNPIN 11

typedef struct cxlkv_coherence_args {
    uint32_t operation;
    uint32_t mode;           /* 0 coherent, 1 fast, 2 strict */
    uint32_t batch;          /* records under the same fences */
    uint32_t checksum;       /* 1: with CRC32C of the payload */
    uint32_t generation;     /* that is published, or wanted */
    uint32_t reserved;
    uint64_t record_bytes;   /* of the payload */
    uint64_t record_count;   /* records in the memory, taken in turn */
    uint64_t first;          /* the record to begin with */
    uint64_t repeat;         /* batches */
    uint8_t *memory;         /* record_count * (record_bytes + 128), at a line */
    uint8_t *local;          /* record_bytes, copied from or to */
} cxlkv_coherence_args;

/* Nanoseconds for all of it, with flushes really executed. */
int64_t cxlkv_coherence_time(const cxlkv_coherence_args *args);
/* Round trips between two threads, nanoseconds of each: requests and responses of `bytes`. */
int64_t cxlkv_coherence_calls(uint32_t mode, uint32_t bytes, uint32_t count,
                              uint64_t *nanoseconds);
/* From before a record is copied and published until another thread has acquired it. */
int64_t cxlkv_coherence_visible(uint32_t mode, uint64_t record_bytes, uint32_t count,
                                uint64_t *nanoseconds);
/* What lines are written back with: "clwb", "clflushopt", "clflush", "dc", or "none". */
const char *cxlkv_flush_name(void);

/* ---- what `cxlkv bench memory` and foundation/gather measure ---- */

/* What a stream does, block after block, from the beginning again when the memory ends. */
#define CXLKV_MEMORY_CHASE 0      /* one load behind the other, along the ring in the memory */
#define CXLKV_MEMORY_READ 1
#define CXLKV_MEMORY_WRITE 2      /* plain stores */
#define CXLKV_MEMORY_WRITE_PAST 3 /* stores past the cache; only on x86-64 */
#define CXLKV_MEMORY_MIXED 4      /* two lines read from the first two thirds, one written behind */
#define CXLKV_MEMORY_MIXED_PAST 5
#define CXLKV_MEMORY_COPY 6       /* memcpy from the first half into the second one */
#define CXLKV_MEMORY_COPY_PAST 7  /* the core's own copy into memory that hosts share */
typedef struct cxlkv_memory_stream {
    uint32_t kind;
    int32_t cpu;             /* where its thread runs; -1: anywhere */
    uint8_t *memory;         /* at a line */
    uint64_t bytes;
    uint64_t block_bytes;    /* after each block it looks at the clock */
    uint64_t pace_ns;        /* that a block takes at least; 0: as fast as it goes */
    uint64_t first_word;     /* word i of the memory that is written becomes first_word + i */
    uint64_t moved_bytes;    /* found: read and written; of a copy, copied */
    uint64_t steps;          /* found: loads of a chase, else blocks */
    uint64_t elapsed_ns;     /* found */
    uint64_t sum;            /* found: of all words read; of a chase, where in the ring it ended */
} cxlkv_memory_stream;

/* Private memory in huge pages where they are to be had, all there; node -1: wherever. */
int cxlkv_memory_take(uint64_t bytes, int32_t node, uint8_t **memory);
int cxlkv_memory_give(uint8_t *memory, uint64_t bytes);
/* Makes one ring of the memory's lines, in random order. */
int cxlkv_memory_ring(uint8_t *memory, uint64_t bytes, uint64_t seed);
/* All streams at once, each for so long and for one block (1,024 loads) at least. */
int64_t cxlkv_memory_run(cxlkv_memory_stream *streams, uint32_t count, uint64_t nanoseconds);
/* Nanoseconds for a memcpy of each piece, one behind the other in `to`. */
int64_t cxlkv_memory_gather(uint8_t *to, const uint8_t *from, uint64_t from_bytes,
                            const uint64_t *offsets, uint32_t count, uint64_t piece_bytes);

/* ---- what `cxlkv bench decode` holds kernels against ---- */

#define CXLKV_ARITHMETIC_FP32 0 /* fp32 multiply and add */
#define CXLKV_ARITHMETIC_BF16 1 /* how keys of bf16 meet bf16 queries; by fp32 where they do not */
#define CXLKV_ARITHMETIC_CODES 2 /* codes of 8 or 4 bits, by queries or weights of 14 */
typedef struct cxlkv_arithmetic {
    uint64_t products;       /* found: multiplied and added */
    uint64_t elapsed_ns;     /* found */
} cxlkv_arithmetic;

/* One thread multiplies with the instructions of a table of kernels, on registers alone, for so
 * long at least. kernels: as cxlkv_isa_name() has it; -ENOTSUP where the CPU has it not. */
int cxlkv_arithmetic_run(const char *kernels, uint32_t kind, uint64_t nanoseconds,
                         cxlkv_arithmetic *found);

/* The litmus run: two roles, on two hosts, and what their flushes and fences promise over memory
 * that they share; docs/explanation/coherence.md has the tests. */
#define CXLKV_LITMUS_REGIONS_MAX 16
#define CXLKV_LITMUS_REGION_BYTES 2097152
#define CXLKV_LITMUS_MESSAGE_BYTES 4096
#define CXLKV_LITMUS_MESSAGE 0   /* payload in region `first`, flag in region `second` */
#define CXLKV_LITMUS_BUFFER 1    /* role 0 stores in `first`, role 1 in `second` */
#define CXLKV_LITMUS_EVICTION 2  /* lines of `first` change hands, told by a flag in `second` */
/* What a violation is. */
#define CXLKV_LITMUS_LOST 1         /* a publish that had returned was not seen */
#define CXLKV_LITMUS_STALE 2        /* a payload or a line that was handed over is an older one */
#define CXLKV_LITMUS_BOTH_OLD 3     /* neither side saw the other's store */
#define CXLKV_LITMUS_OVERWRITTEN 4  /* what the receiver wrote did not stay */
typedef struct cxlkv_litmus_case {
    uint32_t test;
    uint32_t first;
    uint32_t second;
    uint64_t first_round;
    uint64_t rounds;
} cxlkv_litmus_case;
/* What this role saw; added to by each call. */
typedef struct cxlkv_litmus_found {
    uint64_t rounds;
    uint64_t raced;       /* rounds in which the two sides met, as far as can be told */
    uint64_t violations;
    uint64_t kind;        /* of the first violation, and so on; 0: there was none */
    uint64_t round;
    uint64_t region;
    uint64_t line;        /* within the region */
    uint64_t word;
    uint64_t words_wrong;
    uint64_t wanted;
    uint64_t got;
} cxlkv_litmus_found;
typedef struct cxlkv_litmus cxlkv_litmus;
/* Regions of CXLKV_LITMUS_REGION_BYTES each, which are overwritten; the same ones in the same order
 * for role 0 and role 1. The pressure is memory of this process alone, more than its caches hold.
 * A role that is silent for wait_s ends a call with -ETIMEDOUT. */
int cxlkv_litmus_make(void *const *regions, uint32_t count, uint32_t role, uint64_t pressure_bytes,
                      double wait_s, cxlkv_litmus **litmus);
void cxlkv_litmus_destroy_at(cxlkv_litmus **at);
/* 1 when the other role is there and has the same regions; 0: not yet, call again. */
int cxlkv_litmus_meet(cxlkv_litmus *litmus);
/* Both: gives CXLKV_LITMUS_MESSAGE_BYTES to the other role and gets as many from it. */
int cxlkv_litmus_exchange(cxlkv_litmus *litmus, const uint8_t *own, uint8_t *peer);
/* Both, the same rounds of the same case. */
int cxlkv_litmus_run(cxlkv_litmus *litmus, const cxlkv_litmus_case *which,
                     cxlkv_litmus_found *found);
/* Tells the other role, wherever it waits, that this one does not go on. */
void cxlkv_litmus_give_up(cxlkv_litmus *litmus);
