/* The whole C interface. cffi reads this file as it is: declarations and plain #defines only.
 *
 * Every function returns a value >= 0, or a negated error: -errno, or one of the numbers below.
 * cxlkv_error_text() then says, for the calling thread, what was wrong and what mends it.
 * Sizes are in bytes where the name says so; strides are always bytes. */

/* Counted up with each change of this file, so that Python that was written for another one says so
 * at import: cxlkv_abi() is the number of the core, CXLKV_ABI of what binds it to Python. */
#define CXLKV_ABI 28
/* Of a pool's bytes; cxlkv_pool_upgrade() makes it from the one before. */
#define CXLKV_FORMAT_VERSION 6

#define CXLKV_BFLOAT16 0
#define CXLKV_FLOAT16 1
#define CXLKV_FLOAT32 2
#define CXLKV_BYTES 3 /* of objects only */

#define CXLKV_E_NOT_A_POOL 1001
#define CXLKV_E_VERSION 1002
#define CXLKV_E_GEOMETRY 1003
#define CXLKV_E_CORRUPT 1004
#define CXLKV_E_TRUNCATED 1005
#define CXLKV_E_POOL_EXISTS 1006
#define CXLKV_E_POOL_FULL 1007
#define CXLKV_E_STALE 1008
#define CXLKV_E_CLOSED 1009
#define CXLKV_E_RELEASED 1010
#define CXLKV_E_ORDER 1011
#define CXLKV_E_UNEVEN 1012
#define CXLKV_E_POISON 1013
#define CXLKV_E_BUSY 1014
#define CXLKV_E_TIMEOUT 1015
#define CXLKV_E_ROOM 1016
#define CXLKV_E_PROCESSES 1017
#define CXLKV_E_ARGUMENT 1018
#define CXLKV_E_FENCED 1019
#define CXLKV_E_HOST 1020
#define CXLKV_E_WORKER 1021

#define CXLKV_VALUES_OWN 0
#define CXLKV_VALUES_KEY_PREFIX 1
/* No K and V: a page is one object of 1 to page_tokens bytes, in one piece. One layer, one head of
 * one channel of CXLKV_BYTES. */
#define CXLKV_VALUES_OBJECT 2
#define CXLKV_GROUPS_MAX 16
/* What K or V are kept as: docs/decisions/0034-encodings.md. */
#define CXLKV_ENCODING_NONE 0 /* as they came */
#define CXLKV_ENCODING_INT8 1
#define CXLKV_ENCODING_INT4 2
#define CXLKV_ENCODING_FP8_E4M3 3 /* native/src/kernels/fp8.h */
#define CXLKV_ENCODING_PROGRESSIVE 4 /* 8 bits in two planes of 4; a reader may stop at the first */
#define CXLKV_LAYERS_MAX 1024
#define CXLKV_ROTARY_PAIRS_MAX 256 /* of all groups together */

/* How the model turns keys by their position (RoFormer, arXiv 2104.09864). By group: pairs of
 * channels, 0 where it does not or where it was not said, and the radians by which a pair turns
 * from one token to the next, group after group. The core does not turn keys: methods ask. */
typedef struct cxlkv_rotary {
    uint32_t neighbours; /* a bit a group: pair i is channels 2i and 2i + 1, else i and pairs + i */
    uint32_t pairs[16];
    float frequencies[256];
} cxlkv_rotary;

/* Of the layers of one group, where groups differ in more than their window. */
typedef struct cxlkv_shape {
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t value_head_dim;
    uint32_t dtype;
    uint32_t values;
} cxlkv_shape;

/* What a pool stores. Layers of one group have one shape and one attention window. */
typedef struct cxlkv_layout {
    uint32_t layers;
    uint32_t kv_heads;   /* 0: the groups differ, `shapes` has what they are, and 0 stands here */
    uint32_t head_dim;
    uint32_t value_head_dim;
    uint32_t page_tokens;
    uint32_t dtype;
    uint32_t checksum;   /* 1: every piece has a CRC32C, made at append and verified on reading */
    uint32_t values;     /* own, or the first value_head_dim channels of the keys (MLA) */
    uint32_t sketch;     /* 1: keys are also kept in 2 bits a channel, to estimate logits from */
    uint32_t shard[4];   /* tensor-parallel rank and size, pipeline rank and size */
    char model_id[256];
    uint32_t group_count;
    uint32_t windows[16];   /* by group: the token at p sees (p - window, p]; 0: all before it */
    uint8_t group_of[1024]; /* by layer */
    uint32_t k_encoding;
    uint32_t v_encoding;
    cxlkv_rotary rotary; /* nothing that is stored depends on it */
    uint32_t state_digest; /* of the description of the tensors that a state checkpoint has */
    uint64_t state_bytes;  /* of a checkpoint; 0: the model has no states */
    uint64_t object_bytes; /* the most of an object in pages of page_tokens bytes; 0: it has one */
    cxlkv_shape shapes[16]; /* by group */
} cxlkv_layout;

#define CXLKV_SHARING_HOST 0
#define CXLKV_SHARING_HW_COHERENT 1
#define CXLKV_SHARING_SOFTWARE 2
#define CXLKV_DURABLE_PROCESS 0
#define CXLKV_DURABLE_HOST 1

/* Who shares a pool: one host; several whose caches the hardware keeps coherent; several whose
 * caches do not see each other. Durable: what was published outlives its process, or its host. */
typedef struct cxlkv_sharing {
    uint32_t kind;
    uint32_t durable;
    uint32_t hosts;               /* 1 to 64; 1 when kind is host */
    uint32_t log_records;         /* of each host, a power of two; 0: by the capacity */
} cxlkv_sharing;

/* Which host this is, in a pool that several share. */
typedef struct cxlkv_host {
    uint32_t number;              /* from 0; no other machine may use the same */
    uint32_t certified;           /* 1: the litmus run has passed on this memory */
    double lease_s;               /* a host that is silent for longer is suspected */
} cxlkv_host;

/* Where everything lies, derived from layout and capacity: docs/reference/memory-layout.md. */
typedef struct cxlkv_geometry {
    uint64_t region_bytes;
    uint64_t hosts_offset;        /* a block for each host; where one host only uses it, none */
    uint64_t host_block_bytes;
    uint64_t descriptors_offset;
    uint64_t descriptors_bytes;   /* of one extent's pages; where hosts share, whole 4 KiB */
    uint64_t extents_offset;
    uint64_t extent_bytes;
    uint64_t checksums_offset;    /* the next five are relative to the extent */
    uint64_t layers_offset;
    uint64_t layer_bytes;         /* digest slab + sketch slab + K slab + V slab of one layer. Where
                                   * groups differ in shape: the pieces of one page, all layers:
                                   * cxlkv_pool_plan_layers() says how they lie */
    uint64_t sketches_offset;     /* relative to the layer's start, where the digest slab lies */
    uint64_t keys_offset;
    uint64_t values_offset;
    uint64_t checksum_bytes;      /* per record */
    uint64_t digest_piece_bytes;  /* per (page, layer, kv head): the stride; data may be less */
    uint64_t sketch_piece_bytes;  /* 0: there are none; likewise for V. Where groups differ: the
                                   * most of any */
    uint64_t key_piece_bytes;
    uint64_t value_piece_bytes;
    uint64_t record_bytes;        /* of one page: pieces, header, checksums, descriptor */
    uint32_t page_count;
    uint32_t extent_count;
    uint32_t slab_slots;
    uint32_t record_layers;       /* layers of a page: a group with more has several parts. Where
                                   * groups differ: the most of any */
    uint32_t part_count;          /* of all groups; each has its own page for the same tokens */
    uint32_t reserved;
} cxlkv_geometry;

/* free + held + published_only + quarantined + retired + withdrawn + elsewhere = total. */
typedef struct cxlkv_page_counts {
    uint64_t total;
    uint64_t free;
    uint64_t held;                  /* by at least one live process */
    uint64_t published;             /* found by match(); held or not */
    uint64_t published_only;        /* published, and no process holds them */
    uint64_t quarantined;           /* their descriptor is damaged: not handed out */
    uint64_t retired;               /* their memory is bad: never handed out again */
    uint64_t withdrawn;             /* freed here, and still read by another host */
    uint64_t elsewhere;             /* in other hosts' extents, or in free ones */
    uint64_t borrowed;              /* of those, held by a live process of this host */
    uint64_t published_elsewhere;   /* of those, as this host knows; others' holders are not seen */
    uint64_t pinned;                /* published and not to be evicted */
} cxlkv_page_counts;

/* They only grow: of one process since it opened the pool, or of all since the pool was made. */
typedef struct cxlkv_counters {
    uint64_t appended_bytes;        /* K and V */
    uint64_t scored_bytes;          /* read to choose pages */
    uint64_t fetched_bytes;         /* copied out */
    uint64_t attended_bytes;        /* K and V read by attention */
    uint64_t corrupt_pieces;        /* CRCs that were wrong */
    uint64_t stale_handles;         /* refused by adopt() */
    uint64_t pool_full_errors;
    uint64_t match_keys_asked;      /* prefix keys that match() looked for */
    uint64_t match_keys_hit;        /* of them, those that a hit covers */
    uint64_t window_pages_freed;    /* given back because no later token can see them */
    uint64_t window_pages_skipped;  /* never taken, for the same reason */
    uint64_t audited_selects;
    uint64_t audited_recall;        /* summed over the audited selects, in 2^-32 */
    uint64_t audited_mass;          /* attention mass kept, likewise */
    uint64_t reaped_processes;      /* of a pool only: dead ones whose pages were given back */
    uint64_t rebuilds;              /* of a pool only: of the allocator, after a death inside it */
    uint64_t queued_drops;          /* pages whose giving back had to wait for the next call */
    uint64_t lock_waits;            /* for the pool's lock, over 1 ms */
    uint64_t lost_lines;            /* looks at a line about hosts that ended in a bus error */
    uint64_t log_rescans;           /* of a pool only: logs that could not be followed */
    uint64_t lost_forgets;          /* of a pool only: of a dead host's pages, too many to keep */
} cxlkv_counters;

typedef struct cxlkv_stats {
    cxlkv_page_counts pages;
    uint64_t processes;
    uint64_t sequences;             /* of this process */
    cxlkv_counters own;             /* of this process, since it opened the pool */
    cxlkv_counters all;             /* of the pool, since it was made */
} cxlkv_stats;

typedef struct cxlkv_process {
    int32_t pid;
    uint32_t alive;                 /* 0: dead, and nobody has given its pages back yet */
    uint64_t start_time;            /* as /proc has it here, +-2: a reused pid has another */
    uint64_t pages_held;
    uint64_t sequences;
    cxlkv_counters counters;
} cxlkv_process;

typedef struct cxlkv_overview {
    uint32_t in_use;                /* by a process on this machine */
    uint32_t host_state;            /* 0: none is seen here; when in use, /dev/shm is another one */
    cxlkv_page_counts pages;
    cxlkv_counters totals;
    uint8_t identity[16];
    cxlkv_layout layout;
    cxlkv_geometry geometry;
} cxlkv_overview;

/* A [rows, heads, dim] array: data and strides in bytes. */
typedef struct cxlkv_rows {
    const void *data;
    int64_t stride_bytes[3];
    uint32_t dtype;
    uint32_t reserved;
} cxlkv_rows;

#define CXLKV_BUDGET_PAGES 0
#define CXLKV_BUDGET_SHARE 1
#define CXLKV_BUDGET_MASS 2
#define CXLKV_BUDGET_ALL 3   /* pages that are not scored: their scores are 0 */

typedef struct cxlkv_budget {
    uint32_t kind;
    uint32_t pages;
    double amount;       /* share or mass, in (0, 1] */
    uint32_t sinks;
    uint32_t recent;
} cxlkv_budget;

#define CXLKV_METHOD_EXACT 0
#define CXLKV_METHOD_DIGEST 1
#define CXLKV_METHOD_TWO_STAGE 2 /* estimates from sketches, then the keys of single tokens */
#define CXLKV_METHOD_AUTO 3 /* what is cheapest of exact, two stages and, to decode, all */
#define CXLKV_METHOD_ATTENTION 4 /* by a page's share of the attention, of its group on average */
#define CXLKV_METHOD_ALL 5 /* out: nothing was chosen, all pages were attended to */
#define CXLKV_METHOD_KEPT                                                                          \
    6 /* out: chosen among what was best in an earlier step, and what is new */
#define CXLKV_METHOD_SCORER 7 /* by a scorer that the pool knows */
#define CXLKV_METHOD_SKETCH 8 /* estimates from sketches alone */
#define CXLKV_UNION_KV_HEAD 0
#define CXLKV_UNION_LAYER 1
#define CXLKV_PER_QUERY 0
#define CXLKV_PER_SEQUENCE 1

/* By what pages are chosen. */
typedef struct cxlkv_criteria {
    const cxlkv_budget *budgets;   /* [budget_count] */
    uint32_t budget_count;         /* 1, or one for each sequence */
    uint32_t method;
    uint32_t union_over;
    uint32_t per;
    uint32_t refresh;              /* steps that what one found may be used for; 0, 1: its own */
    uint32_t scorer;               /* CXLKV_METHOD_SCORER: its id */
    float errors;                  /* two stages: how many of its errors an estimate may be short */
    float read_rate;               /* AUTO: bytes of the pool a ns, by all threads; 0: not known */
} cxlkv_criteria;

/* How that went. */
typedef struct cxlkv_scored {
    uint64_t bytes_scored;
    uint64_t bytes_sketched;       /* of them, those of sketches */
    uint64_t tokens_scored;        /* by their keys, after an estimate; samples not counted */
    uint64_t bytes_fetched;        /* K and V of the chosen pages' tokens */
    uint32_t method;               /* that was taken */
    uint32_t lists_staged;         /* lists and heads that went through two stages */
    float mean_error;              /* of their estimates, as logits; 0 when there are none */
    uint32_t lists;
} cxlkv_scored;

typedef struct cxlkv_select_args {
    uint32_t layer;
    uint32_t q_heads;
    cxlkv_rows queries;            /* [rows, q_heads, head_dim] */
    const int32_t *starts;         /* [n + 1] */
    cxlkv_criteria by;             /* method AUTO is replaced by the one that is taken */
    float scale;
    uint32_t k;                    /* out: pages in the longest list */
    uint32_t asks;                 /* 1: no page is read or chosen: found.method becomes what AUTO
                                    * comes to where the chosen pages are then attended to */
    uint32_t reserved;
    uint64_t capacity;             /* elements of pages and of scores */
    int32_t *pages;                /* out: [lists, kv_heads, k], ascending, -1 padded */
    float *scores;                 /* out: the same shape, -inf padded */
    int32_t *counts;               /* out: [lists, kv_heads] */
    cxlkv_scored found;            /* out */
} cxlkv_select_args;

/* Scores pages by a summary of each, made once, which lies in this process, not in the pool. Both
 * functions are called by any thread, several at once: they use what they are given and nothing
 * else, and do not wait. They return 0; a number below 0 fails the select, with the scorer's name.
 * `parameters` are those of the layer and kv head. */
#define CXLKV_SUMMARY_BYTES_MAX 16384
#define CXLKV_SCORERS_MAX 32
typedef struct cxlkv_scorer {
    uint32_t id;                   /* not 0; of all processes of a pool, a worker's too */
    uint32_t summary_bytes;        /* of a page and kv head: a multiple of 8 */
    uint32_t read_bytes;           /* of them, those that score() reads; 0: it depends on the
                                    * queries, and score() returns it */
    uint32_t parameter_bytes;      /* of its parameters, those that score() reads */
    uint32_t log_sums;             /* 1: a score is the log of a page's sum of exp(logit), and pages
                                    * are chosen by attention; 0: by the best score of any query */
    /* A complete page: keys [tokens][dim] as attention sees them, from position `first` on. */
    int (*summarise)(const float *keys, int64_t tokens, int64_t dim, int64_t first,
                     const float *parameters, void *summary);
    /* Pages' summaries, one behind another, to scores [count][pages] of queries [count][dim], whose
     * logits are scale * q.k: the higher the better. NaN is refused where neither a query nor a key
     * has one or is infinite. */
    int (*score)(const float *queries, int64_t count, int64_t dim, float scale,
                 const void *summaries, int64_t pages, const float *parameters, float *scores);
    const float *parameters;       /* [layers][kv_heads][parameter_count]; NULL: none. They stay
                                    * there as long as the pool is open. */
    uint64_t parameter_count;
    char name[32];                 /* of messages; ends in 0 */
} cxlkv_scorer;

/* Which pages: pages NULL means all. lists is rows (per query) or n (per sequence). An attend to
 * listed pages also takes, and all else ignores:
 * log_weights: added to the tokens' logits, behind scale and softcap; -inf leaves a token out, and
 *     of a page that has no other nothing is read. NaN and +inf among those that are read are
 *     refused.
 * virtual rows: tokens of no page, which all query rows of a list see. A row's log_count is added
 *     to its logit likewise; -inf: there is no such row; NaN and +inf are refused. */
typedef struct cxlkv_picked {
    const int32_t *pages;          /* [lists, kv_heads, k] */
    uint32_t lists;
    uint32_t k;
    uint32_t per;
    uint32_t weight_tokens;        /* of log_weights: page_tokens, or 1: a number a page */
    const float *log_weights;      /* [lists, kv_heads, k, weight_tokens]; NULL: none */
    const float *row_keys;         /* [lists, kv_heads, row_count, head_dim] */
    const float *row_values;       /* [lists, kv_heads, row_count, value_head_dim] */
    const float *row_log_counts;   /* [lists, kv_heads, row_count] */
    uint32_t row_count;            /* virtual rows of each; 0: none */
    uint32_t reserved;
} cxlkv_picked;

typedef struct cxlkv_fetch_args {
    uint32_t layer;
    uint32_t k;                    /* out, when every page is wanted: of the longest sequence */
    cxlkv_picked picked;
    const int32_t *starts;         /* [n + 1]; needed when per is CXLKV_PER_QUERY */
    void *keys;                    /* out: [lists, kv_heads, k, page_tokens, head_dim] */
    void *values;                  /* out: [lists, kv_heads, k, page_tokens, value_head_dim] */
    uint64_t key_capacity_bytes;
    uint64_t value_capacity_bytes;
    uint32_t as_kept;              /* 1: of what is encoded, a piece's blocks and scales in place of
                                      [page_tokens, dim] */
    uint32_t reserved;
} cxlkv_fetch_args;

typedef struct cxlkv_attend_args {
    uint32_t layer;
    uint32_t q_heads;
    cxlkv_rows queries;
    const int32_t *starts;
    cxlkv_picked picked;
    float scale;
    float softcap;                 /* 0: none; else logits become softcap * tanh(logit / softcap) */
    float error;                   /* of an output, relative to the values' length, that may come of
                                    * not reading lower planes; 0: all of them are read */
    void *out;                     /* [rows, q_heads, value_head_dim], contiguous, queries' dtype */
    float *lse;                    /* [rows, q_heads], natural log; -inf where nothing was seen */
    float *mass;                   /* out: [rows, kv_heads, mass_k]: each page's share of the
                                    * attention, the mean over the head's queries; by place in the
                                    * list, or by page of the sequence. NULL: it is not wanted */
    uint64_t mass_capacity;        /* elements of mass; too few: -CXLKV_E_ROOM, nothing is read */
    uint32_t mass_k;               /* out: picked.k, or pages of the longest sequence */
    uint32_t reserved;
} cxlkv_attend_args;

/* A layer of a step: what append, select and attend take, and what they tell. */
typedef struct cxlkv_decode_args {
    uint32_t layer;
    uint32_t q_heads;
    cxlkv_rows keys;
    cxlkv_rows values;             /* data NULL when they are a prefix of the keys */
    cxlkv_rows queries;
    const int32_t *starts;
    int64_t rewind;
    cxlkv_criteria by;             /* no budgets: all pages are attended to */
    float scale;
    float softcap;
    float error;                   /* as of an attend */
    uint32_t appended;             /* out: 1: also after an error, the tokens are there */
    cxlkv_scored found;            /* out */
    uint64_t bytes_attended;       /* out */
    void *out;
    float *lse;
} cxlkv_decode_args;

typedef struct cxlkv_pool cxlkv_pool;
typedef struct cxlkv_sequence cxlkv_sequence;
typedef struct cxlkv_batch cxlkv_batch;

/* Over something that is no pool. Over a pool, or a part of one, that nobody uses: 4. */
#define CXLKV_CREATE_FORCE 1
#define CXLKV_CREATE_REPLACE 4
/* In the file that lies at path, as on a device: it keeps name, size and whatever lies behind the
 * pool, which ends with its superblock. For file systems whose files cannot be made or renamed. */
#define CXLKV_CREATE_IN_PLACE 2
/* Leaves memory in pages of 4 KiB where the kernel would give huge ones for the asking. */
#define CXLKV_CREATE_SMALL_PAGES 8

/* What went wrong in this thread's last call that returned a negative value. */
const char *cxlkv_error_text(void);
const char *cxlkv_version(void);
uint32_t cxlkv_abi(void);

/* "serial", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16" or "auto" is used from now
 * on; -ENOTSUP when this CPU lacks it. force NULL: what was. name not NULL: gets what is used. */
int cxlkv_isa(const char *force, const char **name);
uint32_t cxlkv_crc32c(uint32_t crc, const void *data, size_t bytes);

/* sharing NULL: one host. host NULL: for a pool of one host. path NULL: anonymous memory.
 * A file is reserved whole, formatted, and appears at once or not.
 * nodes: its pages are on these NUMA nodes, bit by node: one node is bound, over several they are
 * interleaved, by their weights where the kernel has that. All memory is taken and verified at
 * once. A file must be on tmpfs or hugetlbfs. 0: as the kernel pleases. */
int cxlkv_pool_create(const char *path, const cxlkv_layout *layout, const cxlkv_sharing *sharing,
                      uint64_t capacity_bytes, uint32_t flags, const cxlkv_host *host,
                      uint64_t nodes, cxlkv_pool **pool);
/* The geometry that a pool of this capacity would have; nothing is made. */
int cxlkv_pool_plan(const cxlkv_layout *layout, const cxlkv_sharing *sharing,
                    uint64_t capacity_bytes, cxlkv_geometry *geometry);
/* Where the pieces of a layer lie, by kind: digest, sketch, K, V. */
typedef struct cxlkv_layer_place {
    uint32_t part;                /* which of the pages for the same tokens */
    uint32_t row;                 /* of its layers */
    uint64_t piece_bytes[4];      /* from one kv head's piece to the next; 0: there are none */
    uint64_t offsets[4];          /* of kv head 0's piece in slot 0, from the extent's start */
    uint64_t slot_bytes[4];       /* from one slot to the next */
} cxlkv_layer_place;
/* places [layers]. Returns the pages of a state checkpoint; 0: the layout has no states. */
int64_t cxlkv_pool_plan_layers(const cxlkv_layout *layout, const cxlkv_geometry *geometry,
                               cxlkv_layer_place *places);
int cxlkv_pool_open(const char *path, const cxlkv_host *host, cxlkv_pool **pool);
/* asks 1: nothing is done; 0, or why a close would be refused now. */
int cxlkv_pool_close(cxlkv_pool *pool, uint32_t asks);
/* Of each kind of object: destroys what lies at `at`; does nothing while that is NULL. A
 * caller through a binding can be interrupted between a call and the note of what it made: the
 * place has this destructor before the call. */
void cxlkv_pool_destroy(cxlkv_pool **at);
/* Unlinks a pool that no other process has open, or wipes its superblock from a device, and from a
 * file in which it was made in place; not_a_pool is refused. */
int cxlkv_pool_remove(const char *path);
/* What a pool's bytes are, and need of a build: a bit for each feature. */
typedef struct cxlkv_format {
    uint32_t version;
    uint32_t build;               /* that made or upgraded it: 10203 is version 1.2.3 */
    uint64_t compatible;
    uint64_t readers;             /* a build that lacks one may look, and not use the pool */
    uint64_t incompatible;
} cxlkv_format;
/* Makes a pool of format version 5 one of version 6, where it lies, while nobody uses it, and keeps
 * all that it holds; stopped anywhere, it is one or the other. Returns the version it had. */
int cxlkv_pool_upgrade(const char *path);
/* What does not change while a pool is open; told of a closed one, too, but for its format. */
typedef struct cxlkv_description {
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint8_t identity[16];
    char page_kind[16];           /* what the kernel gave: "hugetlb", "devdax", "fsdax" (mapped with
                                   * MAP_SYNC), or "4KiB", some of which it may have made huge */
    cxlkv_format format;
    uint64_t packed_bytes;        /* of a record outside of the pool */
    uint32_t layout_crc;          /* of all that two pools must agree in to exchange records */
    uint32_t state_pages;         /* of a state checkpoint; 0: the layout has none */
} cxlkv_description;
void cxlkv_pool_describe(cxlkv_pool *pool, cxlkv_description *description);
int cxlkv_pool_stats(cxlkv_pool *pool, cxlkv_stats *stats);
/* The processes that have the pool open, `capacity` of them at most; returns how many there are.
 * pool NULL: of the one at path, from outside: nothing is written and no lock is taken. */
int64_t cxlkv_inspect(cxlkv_pool *pool, const char *path, cxlkv_overview *overview,
                      cxlkv_process *processes, uint32_t capacity);

/* What one of the devices or files of a striped pool says of itself. */
typedef struct cxlkv_stripe {
    uint32_t index, count;
    uint8_t identity[16];           /* the pool's */
} cxlkv_stripe;
/* Reads it; not_a_pool when it is no part of a striped pool. */
int cxlkv_stripe_inspect(const char *path, cxlkv_stripe *part);

/* This user's folder of host states, which is made if need be: a descriptor. Nobody else may enter
 * it, so that a lock on it is a lock among this user's processes. */
int cxlkv_state_folder(void);

#define CXLKV_GC_DRAFT 0  /* the file of a creation that was killed */
#define CXLKV_GC_ORPHAN 1 /* a host state that nobody uses, and whose pool is gone */
#define CXLKV_GC_IDLE 2   /* a pool that nobody has used for idle_s */
/* 1 when the file is provably nobody's, and was removed if `removes`; 0 when it is somebody's. */
int cxlkv_gc(const char *path, uint32_t kind, double idle_s, uint32_t removes);

/* Counts an audited select: the share of the exact method's pages that it chose, and the share of
 * the attention that they hold. */
int cxlkv_pool_count_audit(cxlkv_pool *pool, double recall, double mass);
/* What cxlkv_pool_set() sets, for this process: */
#define CXLKV_SET_THREADS 0   /* 1 to 1024, the caller's included, that share a scan or a copy */
#define CXLKV_SET_COUNTED 1   /* whether its uses of pages are counted; they are until it says so */
/* Whether its attends deal out their uses by the attention that pages got. At first only those do
 * that are asked for it (cxlkv_attend_args.mass). */
#define CXLKV_SET_BY_MASS 2
#define CXLKV_SET_EPOCH 3     /* begins an epoch of all processes; returns its number */
int64_t cxlkv_pool_set(cxlkv_pool *pool, uint32_t what, uint32_t value);
#define CXLKV_CHECK_DEEP 1   /* reads every page */
#define CXLKV_CHECK_REPAIR 2 /* this host's damaged pages: found again, or free; says so in text */
/* Writes one line a problem into text; returns how many problems there are. */
int64_t cxlkv_pool_check(cxlkv_pool *pool, uint32_t flags, char *text, uint64_t text_bytes);

#define CXLKV_HOST_UNUSED 0
#define CXLKV_HOST_LIVE 1
#define CXLKV_HOST_LEFT 2
#define CXLKV_HOST_DAMAGED 3
typedef struct cxlkv_host_row {
    uint32_t number;
    uint32_t status;
    uint32_t epoch;
    uint32_t fenced;                /* its epoch has ended */
    uint32_t off;                   /* and somebody said that its machine is off */
    uint32_t is_self;
    uint32_t silent;                /* for longer than a lease */
    uint32_t build;                 /* of its processes, likewise; 0: older than 0.2.0 */
    uint64_t silent_ns;             /* since this host saw it beat last, or its first look */
    uint64_t seen;                  /* it has beaten since this host's first look */
    uint64_t extents;
} cxlkv_host_row;
/* The hosts of a shared pool, `capacity` of them at most; returns how many there may be. */
int64_t cxlkv_pool_hosts(cxlkv_pool *pool, cxlkv_host_row *rows, uint32_t capacity);
/* Ends the epoch of a host that has been silent for a lease (waits for that long). confirmed_off:
 * an operator knows that its machine does not run: its pages may be taken by others then. */
int cxlkv_pool_fence(cxlkv_pool *pool, uint32_t host, uint32_t confirmed_off);

#define CXLKV_NODES_MAX 64
#define CXLKV_POLICY_DEFAULT 0    /* the kernel's numbers */
#define CXLKV_POLICY_BIND 2
#define CXLKV_POLICY_INTERLEAVE 3
#define CXLKV_POLICY_WEIGHTED 6
/* Where the kernel has a pool's pages, and where it was asked to have them. */
typedef struct cxlkv_placed {
    uint32_t policy;
    uint32_t reserved;
    uint64_t wanted_nodes;          /* bit by node; 0: no wish */
    uint64_t page_bytes;
    uint64_t pages_seen;
    uint64_t pages_unseen;          /* never written, swapped out, or of a device */
    uint64_t pages_elsewhere;       /* seen on a node that is not wanted */
    uint64_t pages_on[64];
} cxlkv_placed;
/* Looks at up to pages_max pages spread over the pool, 0: at all. Reads a byte of each. */
int cxlkv_pool_placed(cxlkv_pool *pool, uint64_t pages_max, cxlkv_placed *placed);

/* Pages without a sequence: metadata only. Alloc is all or nothing. */
int64_t cxlkv_pages_alloc(cxlkv_pool *pool, uint32_t count, uint32_t *pages);
int64_t cxlkv_pages_free(cxlkv_pool *pool, uint32_t count, const uint32_t *pages);

int cxlkv_sequence_create(cxlkv_pool *pool, cxlkv_sequence **sequence);
int cxlkv_sequence_fork(cxlkv_sequence *sequence, cxlkv_sequence **child);
int cxlkv_sequence_truncate(cxlkv_sequence *sequence, uint64_t tokens);
int cxlkv_sequence_release(cxlkv_sequence *sequence);
void cxlkv_sequence_destroy(cxlkv_sequence **at);
/* Tokens of a layer; of the last one, which has no more than any other: CXLKV_LAYER_LAST. */
#define CXLKV_LAYER_LAST 0xffffffff
int64_t cxlkv_sequence_tokens(cxlkv_sequence *sequence, uint32_t layer);
/* Ids of its pages in the pool, part after part, without open tails; returns how many there are. */
int64_t cxlkv_sequence_pages(cxlkv_sequence *sequence, uint32_t *pages, uint64_t capacity);
/* Where the region begins in this process, for readers past the core (a GPU), until the pool is
 * closed; returns its bytes. */
int64_t cxlkv_pool_memory(cxlkv_pool *pool, uint64_t *address);
/* Brings bytes of the region into memory and into this process's map of it, from `offset` on in
 * whole pages of memory, which else happens at the first use of each. Nothing is changed, and of
 * what lies on a disk nothing is written out. huge 1: pages of a file in memory become huge ones,
 * as far as the kernel makes such. Returns where it ended: the next offset. */
int64_t cxlkv_pool_prefault(cxlkv_pool *pool, uint64_t offset, uint64_t bytes, uint32_t huge);
/* Of the pages of one layer from `first` on that are complete in it: where in the region the K of
 * all kv heads begins (from head to head it is key_piece_bytes), and the V (the K again, where
 * values are the first channels of the keys), and the page's descriptor; its id and generation.
 * Offsets are -1 behind a window, where page and generation are UINT32_MAX and 0; a descriptor's
 * also while the page has no seal yet, because a layer of it is not complete. Fills at most
 * `capacity` of each; returns how many pages there are. */
int64_t cxlkv_sequence_places(cxlkv_sequence *sequence, uint32_t layer, uint64_t first,
                              uint64_t capacity, int64_t *key_offsets, int64_t *value_offsets,
                              int64_t *descriptor_offsets, uint32_t *pages, uint64_t *generations);
/* Writes a handle, the tail in a page of its own; returns its size. Above capacity: nothing was
 * written, and a call with as much room may find that the sequence has grown once more. */
int64_t cxlkv_sequence_export(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t capacity);
int cxlkv_sequence_adopt(cxlkv_pool *pool, const uint8_t *bytes, uint64_t size,
                         cxlkv_sequence **sequence);

#define CXLKV_KEYS_CHAINED 0 /* a key names all before its page, too */
#define CXLKV_KEYS_CONTENT 1 /* only its page, and which one of its text that is */
/* Of a page with the first 1, 2 ... `count` of the ids only, behind the page whose key is root. */
#define CXLKV_KEYS_TAIL 2
/* Of a text's first 1, 2 ... `count` ids: the page's where they end one, else the tail's. */
#define CXLKV_KEYS_EVERY 3
/* Keys of the full pages of a text, 16 bytes each; cxlkv/prefix.py says what they are. root: 16
 * bytes, the hash of a salt. Returns how many there are. */
int64_t cxlkv_page_keys(const int64_t *ids, uint64_t count, uint32_t page_tokens, uint32_t kind,
                        const uint8_t *root, uint8_t *keys);

/* hashes are 16 bytes each; hash i names the tokens before (i + 1) * tokens_per_key. content 1:
 * they are keys of content; a sequence that has such pages of others is no source for other keys
 * any more. Returns how many pages were not published before. */
int64_t cxlkv_publish(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                      const uint8_t *hashes, uint32_t content);
/* A copy of what follows the last full page of the sequence's first `tokens` tokens, in a page of
 * each part, under a key of CXLKV_KEYS_TAIL. before: the key of that last page; not used if there
 * is none. Returns how many pages were published: 0 when the chain before it is not. */
int64_t cxlkv_publish_tail(cxlkv_sequence *sequence, uint64_t tokens, const uint8_t *before,
                           const uint8_t *key);
/* The state checkpoint after the sequence's first `tokens` tokens, size = the layout's state_bytes,
 * under the key of its last full page, or of the tail behind it. Where the layout has states, a
 * match ends at a checkpoint, and holds it. Returns how many pages were published: 0 when one is
 * there. */
int64_t cxlkv_publish_states(cxlkv_sequence *sequence, uint64_t tokens, const uint8_t *key,
                             const uint8_t *bytes, uint64_t size);
/* The pages of a hit's checkpoint and their generations, `capacity` of them at most; returns how
 * many there are: 0 where it has none. */
int64_t cxlkv_state_places(cxlkv_sequence *sequence, uint32_t *pages, uint64_t *generations,
                           uint64_t capacity);
/* Copies the checkpoint of a hit, verified. */
int cxlkv_read_states(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t size);
typedef struct cxlkv_match_args {
    const uint8_t *hashes;       /* [count], 16 bytes each */
    uint32_t count;
    uint32_t single;             /* each stands for one page: the search ends at a missing one */
    uint32_t content;            /* keys of content: the sequence is marked as having such pages */
    uint32_t reserved;
    const int64_t *ids;          /* NULL: no page that is not full is looked for behind them */
    uint64_t id_count;
    const uint8_t *root;         /* of the hashes; used with ids */
    double lease_s;
    uint64_t *known_tokens;      /* out, or NULL: tokens of which the pages alone are there */
} cxlkv_match_args;
/* The longest run of published pages from the first; pinned by *sequence until lease end. */
int64_t cxlkv_match(cxlkv_pool *pool, const cxlkv_match_args *args, cxlkv_sequence **sequence);
#define CXLKV_MARK_PIN 0      /* 1: cxlkv_evictable() leaves them out; 0: no more */
/* From 0, as pages are published; the higher, the later they go: cxlkv_evict_order(). */
#define CXLKV_MARK_PRIORITY 1
#define CXLKV_MARK_PRIORITY_AT_LEAST 2 /* those with a higher one keep it */
#define CXLKV_PRIORITY_MAX 100
/* Marks this host's pages under these hashes, until they are forgotten. Returns how many there are.
 */
int64_t cxlkv_mark(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t mark,
                   uint32_t value);
/* flags, a byte a page: 1 for a published page of this host that nobody holds or has pinned.
 * Returns how many there are. */
int64_t cxlkv_evictable(cxlkv_pool *pool, uint8_t *flags, uint64_t capacity);
/* Tells the other hosts of a shared pool for two leases that this one lacks room for so many pages
 * beyond what it has and may take; 0: no more. within_share: for so many, or as many as it has, but
 * for no more than it lacks of its share (native/src/sharing/shares.h). */
int64_t cxlkv_pages_want(cxlkv_pool *pool, uint64_t page_count, uint32_t within_share);
/* How many extents this host is to empty for others; takes 1: how many it may take. */
int64_t cxlkv_extents_due(cxlkv_pool *pool, uint32_t takes);
/* Of a shared pool: this host's pages to evict, so that as many extents as it owes become empty and
 * are given to others: those in which nothing is held or pinned; first those whose highest priority
 * is lowest, of equal ones those that were asked for longest ago. Returns how many; capacity: of
 * all pages. */
int64_t cxlkv_pages_wanted(cxlkv_pool *pool, uint32_t *pages, uint64_t capacity);
typedef struct cxlkv_scrubbed {
    uint64_t pages;                 /* overwritten now */
    uint64_t held;                  /* will be, when the last holder lets go; poisoned ones
                                     * never are */
    uint64_t elsewhere;             /* of other hosts: nothing was done, they are theirs to scrub */
} cxlkv_scrubbed;
/* Forgets the pages under these hashes; returns how many. scrubbed not NULL: only this host's, and
 * their bytes are overwritten with zeros before they are free, whoever frees them. The mark is in
 * the host state, as a pin. */
int64_t cxlkv_forget(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                     cxlkv_scrubbed *scrubbed);

/* ---- whole records, out of the pool and into it: docs/reference/memory-layout.md ---- */

/* By record or page: 0, one of these, or a negated error. */
#define CXLKV_RECORD_PRESENT 1 /* its hash is published already: nothing was written */
#define CXLKV_PAGE_HELD 2      /* forgotten; it is free when its last holder drops it */

/* The line before a page's checksum table in the pool, */
#define CXLKV_RECORD_MAGIC 0x52564b43 /* "CKVR" */
typedef struct cxlkv_record_header {
    uint32_t magic;
    uint32_t page;
    uint64_t generation;
    uint64_t hash[2];              /* under which it is published */
    uint32_t tokens;
    uint32_t table_crc;
    uint32_t ordinal;
    uint32_t part;
    uint32_t object[2];            /* of an object in several pages: which one; else 0 */
    uint32_t reserved;
    uint32_t crc;                  /* of all bytes before it */
} cxlkv_record_header;
/* and that at the front of a record outside of it. */
#define CXLKV_PACKED_MAGIC 0x50564b43 /* "CKVP" */
#define CXLKV_PACKED_VERSION 1
typedef struct cxlkv_packed_header {
    uint32_t magic;
    uint32_t version;
    uint64_t bytes;                /* of the whole record */
    uint64_t hash[2];
    uint32_t tokens;
    uint32_t ordinal;
    uint32_t part;
    uint32_t layout_crc;           /* of the pool's layout: no other one may read it */
    uint32_t table_crc;
    uint32_t object[2];            /* as in the pool */
    uint32_t crc;
} cxlkv_packed_header;
/* Copies published pages out, every CRC verified; nobody can reuse them meanwhile. Returns how many
 * were; a record with another code has no header. */
int64_t cxlkv_records_read(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                           const uint64_t *generations, uint8_t *bytes, int32_t *codes);
/* Publishes records under the hashes that they were published under; returns how many were not yet.
 * Pages are taken for all or for none: -CXLKV_E_POOL_FULL. Of a record whose bytes are not what
 * their CRCs say nothing is ever visible. parents: the hash of the page before each, zeros where
 * there is none; or NULL: not known. */
int64_t cxlkv_records_write(cxlkv_pool *pool, uint32_t count, const uint8_t *bytes,
                            const uint8_t *parents, int32_t *codes);
/* The hashes under which match() looks for keys, in its order: names[count][places][parts][16]. */
int cxlkv_names(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t places,
                uint8_t *names);
/* The hashes of the first `pages` pages of a state checkpoint under each key:
 * names[count][pages][16]. */
int cxlkv_state_names(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t pages,
                      uint8_t *names);
/* The published page of each name and its generation, UINT32_MAX and 0 where there is none. Returns
 * how many there are. */
int64_t cxlkv_find_pages(cxlkv_pool *pool, uint32_t count, const uint8_t *names, uint32_t *pages,
                         uint64_t *generations);
/* Takes published pages of these generations out of the index; only_unheld: none that somebody
 * holds or has pinned. Returns how many are free now. */
int64_t cxlkv_forget_pages(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                           const uint64_t *generations, uint32_t only_unheld, int32_t *codes);

/* ---- the store door: pools whose values are CXLKV_VALUES_OBJECT; docs/engines/store.md ---- */

/* Keys of objects from their names, one behind the other; ends[i]: where name i ends. root: 16
 * bytes, the hash of a salt. keys: 16 bytes each. */
int64_t cxlkv_object_keys(const uint8_t *names, const uint64_t *ends, uint64_t count,
                          const uint8_t *root, uint8_t *keys);

/* A buffer of rows, one behind the other, that objects keep encoded: a put encodes them on their
 * way into the pool, a get decodes them. CXLKV_ENCODING_NONE: bytes that stay as they are. */
typedef struct cxlkv_row_form {
    uint32_t encoding;             /* not CXLKV_ENCODING_PROGRESSIVE */
    uint32_t dtype;                /* of the rows, not CXLKV_BYTES */
    uint32_t dim;                  /* channels of a row, 1 to 1024 */
} cxlkv_row_form;

/* The caller's memory of several objects: of object i the buffers starts[i] to starts[i + 1], one
 * behind the other; starts NULL: one each. forms: of the first form_count buffers of each object;
 * those beyond have none. */
typedef struct cxlkv_buffers {
    const uint64_t *addresses;
    const uint64_t *sizes;
    const uint64_t *starts;
    const cxlkv_row_form *forms;
    uint64_t form_count;
} cxlkv_buffers;
/* What a buffer of so many bytes takes in an object; -CXLKV_E_ARGUMENT unless they are whole rows
 * of a form that there is. */
int64_t cxlkv_row_form_bytes(const cxlkv_row_form *form, uint64_t bytes);
/* Where an object's size is told: there is none of this key, or its bytes are not what was put (or
 * cannot be read): then it is to be forgotten. */
#define CXLKV_OBJECT_ABSENT -1
#define CXLKV_OBJECT_DAMAGED -2
#define CXLKV_OBJECT_HELD -3 /* of a removal: somebody reads it, or has a lease of it */
/* Publishes the objects that are not there; codes: 0, or CXLKV_RECORD_PRESENT. Pages are taken for
 * all or for none: -CXLKV_E_POOL_FULL. After an error nothing was published. replaces: and those
 * that are there, whose readers keep the old ones. Returns how many are new. */
int64_t cxlkv_objects_put(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                          const cxlkv_buffers *from, uint32_t replaces, int32_t *codes);
/* Copies the objects that are there into memory of at least their size, every byte verified; all
 * memory of what is damaged is zeros. With forms that is memory of exactly what they make of its
 * size. sizes: of each, in the pool. Returns the sum of what was copied. to NULL: only sizes are
 * told, nothing is read, and how many objects there are is returned. */
int64_t cxlkv_objects_get(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                          const cxlkv_buffers *to, int64_t *sizes);
/* Some bytes of an object, to a place in the caller's memory. */
typedef struct cxlkv_range {
    uint64_t object;               /* index of its key */
    uint64_t offset;
    uint64_t bytes;
    uint64_t target;               /* offset in `to` */
} cxlkv_range;
/* sizes: by range, its bytes, or why there are none. An object is verified whole, once in this
 * process as long as it is that one. Returns the bytes that were copied. */
int64_t cxlkv_objects_ranges(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                             uint32_t range_count, const cxlkv_range *ranges, uint8_t *to,
                             uint64_t to_bytes, int64_t *sizes);

/* These objects follow each other in a text, from its beginning or from any place in it: eviction
 * takes its end first, and a use of one counts as a use of all before it. Of objects that are there
 * now, this host's own; of several calls that place one object, the last holds. Returns how many
 * are there. */
int64_t cxlkv_objects_chain(cxlkv_pool *pool, uint32_t count, const uint8_t *keys);

/* Takes objects out of the index; codes: 0, CXLKV_OBJECT_ABSENT or CXLKV_OBJECT_HELD: those stay.
 * keys NULL: all of the pool, without codes. Returns how many are gone. */
int64_t cxlkv_objects_remove(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                             int32_t *codes);

/* Objects that this process holds, to be read, or written, where they lie. They last until they are
 * given back, or the process ends: a pool with leases cannot be closed (CXLKV_E_BUSY). */
typedef struct cxlkv_lease cxlkv_lease;
/* addresses and sizes: of each; 0 where there is none, and the address of one in several pages: it
 * is held, and copied by cxlkv_objects_get(). Verified. */
int64_t cxlkv_lease_take(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                         uint64_t *addresses, int64_t *sizes, cxlkv_lease **lease);
/* Pages for objects of these sizes that nobody finds; all or none. */
int64_t cxlkv_lease_reserve(cxlkv_pool *pool, uint32_t count, const uint64_t *sizes,
                            uint64_t *addresses, cxlkv_lease **lease);
/* Reserved ones, by their places in the lease, once each, as they are now; the lease holds them on.
 * codes as of a put. Returns how many are new. */
int64_t cxlkv_lease_publish(cxlkv_lease *lease, uint32_t count, const uint32_t *places,
                            const uint8_t *keys, int32_t *codes);
/* Gives back those at these places, a second time nothing; places NULL: all. */
int cxlkv_lease_release(cxlkv_lease *lease, uint32_t count, const uint32_t *places);
void cxlkv_lease_destroy(cxlkv_lease **at);

/* ---- how much pages are used: docs/explanation/hotness.md ---- */

/* Uses of pages [first, first + count), halved once for each epoch since the last one (at most
 * 65535), and in which epoch that was. Returns the epoch now. */
int64_t cxlkv_hotness_read(cxlkv_pool *pool, uint32_t first, uint32_t count, uint32_t *counts,
                           uint32_t *epochs);

#define CXLKV_PUBLISHED_HELD 1u /* by a process of this host, or pinned by another host */
#define CXLKV_PUBLISHED_PINNED 2u /* by cxlkv_mark() */
#define CXLKV_PUBLISHED_LOST 4u /* an object, and the one before it in its text is not there */

/* A page that match() finds, of this host's own. */
typedef struct cxlkv_published {
    uint64_t generation;
    uint64_t hash[2];    /* in the index */
    uint32_t page;
    uint32_t used;       /* the low bits of the clock when it was found last, or published */
    uint32_t born;       /* when it was published */
    uint32_t parent;     /* the page before it in its chain; of part 0's pages for the others the
                            one of the same tokens; UINT32_MAX: none, or it is not known */
    uint32_t hits;       /* at most 65535 */
    uint32_t hotness;    /* as cxlkv_hotness_read counts */
    uint32_t part;
    uint32_t flags;
    uint32_t priority;   /* as cxlkv_mark() gave it */
    uint32_t reserved;
} cxlkv_published;
/* By page, `capacity` of them at most; returns how many there are. The clock counts the pages that
 * were found by a match or published so far. */
int64_t cxlkv_pool_published(cxlkv_pool *pool, cxlkv_published *rows, uint32_t capacity,
                             uint64_t *clock);

int cxlkv_batch_create(cxlkv_pool *pool, uint32_t count, cxlkv_sequence **sequences,
                       cxlkv_batch **batch);
void cxlkv_batch_destroy(cxlkv_batch **at);
/* All or nothing. starts is int32 [n + 1]; returns the tokens appended. values is NULL when they
 * are a prefix of the keys. rewind matters in layer 0, for layers with a window: they keep what the
 * tokens from (new length - rewind) on see; -1: what the step's own tokens see. */
int64_t cxlkv_batch_append(cxlkv_batch *batch, uint32_t layer, const cxlkv_rows *keys,
                           const cxlkv_rows *values, const int32_t *starts, int64_t rewind);
/* Some blocks of the paged memory that an engine has of its own: K and V of one layer, each
 * [block_count, kv_heads, block_tokens, dim], of which [block_tokens, dim] are contiguous. */
typedef struct cxlkv_blocks {
    void *keys;
    void *values;                  /* NULL when they are a prefix of the keys */
    int64_t key_stride_bytes[2];   /* to the next block, to the next head */
    int64_t value_stride_bytes[2];
    uint32_t block_count;
    uint32_t block_tokens;         /* a multiple of page_tokens */
    uint32_t dtype;
    uint32_t reserved;
    const int32_t *starts;         /* [n + 1]: sequence i has blocks[starts[i] .. starts[i + 1]) */
    const int32_t *blocks;         /* [starts[n]], each below block_count */
} cxlkv_blocks;
/* Appends whole blocks, whatever their bytes are, to sequences that end at the end of a page; as
 * cxlkv_batch_append in all else. */
int64_t cxlkv_batch_append_blocks(cxlkv_batch *batch, uint32_t layer, const cxlkv_blocks *blocks,
                                  int64_t rewind);
/* Copies pages into whole blocks, those of sequence i from its page first[i] on, which must be
 * complete. Pages behind a window are zeros in a block that has later ones, too. Every piece is
 * verified: good[i] becomes the number of sequence i's blocks that are right before the first one
 * that is not; what is wrong there is zeros, and the first of all errors is returned. Other errors
 * begin nothing. Returns the bytes that were copied. */
int64_t cxlkv_batch_fetch_blocks(cxlkv_batch *batch, uint32_t layer, const cxlkv_blocks *blocks,
                                 const int32_t *first, int32_t *good);
/* Whole pages whose pieces somebody else has written, by cxlkv_geometry's offsets. */
typedef struct cxlkv_attach_args {
    const int32_t *starts;         /* [n + 1], in pages */
    const uint32_t *pages;         /* [parts, pages]: from cxlkv_pages_alloc(); UINT32_MAX: none,
                                      behind the part's window */
    const uint32_t *checksums;     /* [layers, pages, kv_heads, 4]: CRC32C of digest, sketch, K, V;
                                      NULL in a pool that has none */
    int64_t rewind;                /* as of an append */
    uint32_t verify;               /* 1: by their CRC, now; 0: when they are read first */
    uint32_t reserved;
} cxlkv_attach_args;
/* Makes them the next pages of sequences that end at the end of a page in all layers; they are
 * theirs from then on. All or nothing: after an error they are still the caller's, to write again,
 * attach or free. Pages behind a window are freed. Returns how many pages of tokens there were. */
int64_t cxlkv_batch_attach(cxlkv_batch *batch, const cxlkv_attach_args *args);
/* A scorer that selects of this pool may name from now on, in this process. */
int cxlkv_pool_add_scorer(cxlkv_pool *pool, const cxlkv_scorer *scorer);
/* -CXLKV_E_ROOM with args->k set when capacity is too small: nothing was scored. */
int64_t cxlkv_batch_select(cxlkv_batch *batch, cxlkv_select_args *args);
int64_t cxlkv_batch_fetch(cxlkv_batch *batch, cxlkv_fetch_args *args);
int64_t cxlkv_batch_attend(cxlkv_batch *batch, cxlkv_attend_args *args);
/* Appends the rows' keys and values, chooses pages for their queries and attends to these: as the
 * three calls do one after the other. */
int64_t cxlkv_batch_decode(cxlkv_batch *batch, cxlkv_decode_args *args);

/* Which of `count` pages go, at most `wanted`: lowest priority first, of equal ones the lowest
 * score, then the older, then the lower index. parents are indexes; any other number is none. A
 * page goes only after all whose parent it is, whatever their priorities; blocked ones and their
 * ancestors stay. Of equal priority those go first whose parent, or an ancestor's, is
 * CXLKV_PARENT_LOST: nobody finds them. Returns how many, in the order of going. */
#define CXLKV_PARENT_LOST 0xfffffffeu
int64_t cxlkv_evict_order(uint32_t count, const uint8_t *priorities, const float *scores,
                          const uint32_t *ages, const uint32_t *parents, const uint8_t *blocked,
                          uint32_t wanted, uint32_t *chosen);

/* ---- the worker near the memory: docs/explanation/ndp-worker.md ---- */

typedef struct cxlkv_worker cxlkv_worker;
/* What a worker says of itself, or a client of its worker. */
typedef struct cxlkv_worker_state {
    uint32_t connected;             /* a client: has a slot of a worker that lived when last seen */
    int32_t pid;                    /* the worker's; 0: none is known */
    uint32_t slots;
    uint32_t clients;               /* a worker: slots that are taken by the living */
    uint64_t requests;              /* a worker: answered; a client: sent */
    uint64_t refused;               /* of them, those answered with an error */
    uint64_t selects;               /* a client: by the worker */
    uint64_t selects_here;          /* in this process, because the worker did not */
    uint64_t attends;               /* likewise */
    uint64_t attends_here;
    uint64_t connections;           /* made so far */
    char why[256];                  /* of the last call that the worker did not do */
} cxlkv_worker_state;
/* One for each pool (and host): CXLKV_E_BUSY. Payloads of a slot are whole lines up to 1 MiB. mode:
 * 0 coherent, 1 fast, 2 strict, as of the memory that worker and clients share. */
int cxlkv_worker_make(cxlkv_pool *pool, uint32_t slots, uint32_t request_bytes,
                      uint32_t response_bytes, uint32_t mode, cxlkv_worker **worker);
/* Answers requests for timeout_s, or until one asks a chooser, which is not the core's; returns how
 * many. One thread at a time. A question that is not answered when this is called again is refused.
 */
int64_t cxlkv_worker_serve(cxlkv_worker *worker, double timeout_s);
/* Some sequences of a client, as they are until the answer. */
typedef struct cxlkv_question {
    cxlkv_select_args asked;        /* scorer: the chooser's number; queries: contiguous */
    uint32_t count;
    cxlkv_sequence *const *sequences; /* [count], the worker's own */
    const uint64_t *tokens;         /* of each in the layer; its complete pages are there */
    const uint64_t *tables;         /* numbers that no other sequence of this worker ever has */
} cxlkv_question;
/* What was chosen for sequences [.., end) of a batch. */
typedef struct cxlkv_choice {
    cxlkv_picked picked;
    uint64_t bytes_scored;
    uint64_t bytes_fetched;         /* as of a select */
    uint32_t end;
} cxlkv_choice;
/* Returns 1, or 0 when nothing is asked. What it points to lasts until the answer. */
int cxlkv_worker_asked(cxlkv_worker *worker, cxlkv_question *question);
/* The answer; CXLKV_E_ARGUMENT, and the client is told, when it is too long for one. choice NULL:
 * the client gets this error. CXLKV_E_BUSY: it asks again at once. */
int cxlkv_worker_answer(cxlkv_worker *worker, const cxlkv_choice *choice, int code,
                        const char *text);
/* Tables that there are, `capacity` of them at most; returns how many there are. */
int64_t cxlkv_worker_tables(cxlkv_worker *worker, uint64_t *tables, uint64_t capacity);
/* Of a worker; NULL: of this process's use of the pool's. */
int cxlkv_worker_state_of(cxlkv_worker *worker, cxlkv_pool *pool, cxlkv_worker_state *state);
void cxlkv_worker_destroy(cxlkv_worker **at);

#define CXLKV_WORKER_NONE 0     /* selects and attends of this process are its own */
#define CXLKV_WORKER_IF_THERE 1 /* by the worker; in this process when it does not answer */
#define CXLKV_WORKER_ONLY 2     /* by the worker, or CXLKV_E_WORKER */
/* deadline_s: how long an answer may take; 0: by the work. */
int cxlkv_pool_use_worker(cxlkv_pool *pool, uint32_t use, double deadline_s);
/* Asks the worker's chooser args->scorer for sequences of the batch, from `first` on, as many as
 * have room in a request; number 0: of a chooser that no worker has. Returns 1, or 0 when this
 * process has to do it itself. CXLKV_E_BUSY: the worker is not done with its states, and goes on
 * when it is asked again; without may_wait that is one more reason to do it here. */
int cxlkv_batch_choose(cxlkv_batch *batch, const cxlkv_select_args *args, uint32_t first,
                       uint32_t may_wait, cxlkv_choice **choice);
void cxlkv_choice_destroy(cxlkv_choice **at);

/* ---- the local tier: docs/explanation/local-tier.md ---- */

/* A unit is one layer of one page: page * record_layers + the layer's row in its page. The tier has
 * copies of units in this process's own memory; fetch and attend read these instead.
 * free + held + reserved = total. */
typedef struct cxlkv_local_state {
    uint64_t unit_bytes;            /* a slot: K, then V, of all kv heads */
    uint64_t slots_total;
    uint64_t slots_free;
    uint64_t slots_held;            /* with a copy; of a page that was freed since, maybe */
    uint64_t slots_reserved;        /* with a copy on its way */
    uint64_t reads_local;           /* of chosen pages, by fetch and attend, from copies: one for */
    uint64_t reads_far;             /* each unit and kv head; likewise from the pool */
    uint64_t promoted;              /* units */
    uint64_t promoted_bytes;
    uint64_t demoted;
    uint64_t dropped;               /* because their page was freed */
    uint64_t refused;               /* by prepare, but for those that are there */
    uint64_t refused_no_room;       /* of them, because all slots were taken */
    uint64_t undone;                /* by complete: damaged, or the page changed meanwhile */
    uint64_t epoch;                 /* counts are halved with each */
} cxlkv_local_state;

/* What became of a unit that was to be promoted. */
#define CXLKV_LOCAL_DONE 0
#define CXLKV_LOCAL_THERE 1      /* is in the tier, or on its way by another call */
#define CXLKV_LOCAL_NO_ROOM 2
#define CXLKV_LOCAL_NOT_SEALED 3 /* free, being written, retired, neither held nor published */
#define CXLKV_LOCAL_CHANGED 4    /* another generation than was wanted, or than at the beginning */
#define CXLKV_LOCAL_DAMAGED 5    /* a CRC is wrong */
#define CXLKV_LOCAL_UNKNOWN 6    /* no such unit in this pool */

/* All its memory is taken now. bytes 0: the tier ends, if there is one. A forked child starts
 * without a tier. */
int cxlkv_local_make(cxlkv_pool *pool, uint64_t bytes);
/* demotes 0: copies units into free slots; generations NULL: the pages as they are. Returns how
 * many became readable; codes[i] says what became of each. After an error: none.
 * demotes 1: drops copies; returns how many there were. The last two are not used. */
int64_t cxlkv_local_move(cxlkv_pool *pool, uint32_t demotes, uint32_t count, const int64_t *units,
                         const uint64_t *generations, int32_t *codes);
/* Units with a count or a copy, ascending, `capacity` of them at most; returns how many there are.
 * Copies of freed pages are dropped first. */
int64_t cxlkv_local_hotness(cxlkv_pool *pool, int64_t *units, uint32_t *counts, uint8_t *resident,
                            uint64_t capacity);
int cxlkv_local_stats(cxlkv_pool *pool, cxlkv_local_state *state);
/* verifies 1: that the CRCs of chosen pages, a list for each sequence, are right, unless this
 * process has seen so before: for a device, which reads them by their addresses; counts as a use.
 * units not NULL: gets the pages' units, [lists, kv_heads, k] as in picked; -1: padding, or nothing
 * that could be promoted: a page that is not complete in all layers, or lies behind the window. */
int cxlkv_batch_chosen(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                       const int32_t *starts, uint32_t verifies, int64_t *units);

/* ---- words that a device and this process share: docs/explanation/gpu.md ---- */

/* Waits for another value than `old`, spinning at first: 1, or 0 when timeout_s have passed. What
 * was written before the value was stored is then seen. */
int cxlkv_word_wait(const int64_t *word, int64_t old, double timeout_s, int64_t *found);
/* Stores it after all that was written before. */
int cxlkv_word_store(int64_t *word, int64_t value);
