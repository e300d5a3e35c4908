/* The bytes of a pool in its region: superblock, descriptors, records.
 * docs/reference/memory-layout.md explains them. */
#ifndef CXLKV_FORMAT_H
#define CXLKV_FORMAT_H

#include <stdatomic.h>

#include "coherence/hosts.h"
#include "cxlkv.h"
#include "kernels/code_planes.h"
#include "kernels/codes.h"
#include "kernels/sketch.h"
#include "region/region.h"

enum {
    FORMAT_VERSION = CXLKV_FORMAT_VERSION,
    FORMAT_BEFORE = 5, /* which `cxlkv pool upgrade` makes the present one */
    RUN_SLOTS = 16,
    PROCESS_MAX = 128,
    CHUNK_PAGES = 256,
    DTYPE_COUNT = 3, /* of K, V and queries */
    OBJECT_BYTES_MAX = 1 << 30,
    ENCODING_LAST = CXLKV_ENCODING_PROGRESSIVE,
};

enum { PIECE_DIGEST, PIECE_SKETCH, PIECE_KEYS, PIECE_VALUES, PIECE_KINDS };
enum { PAGE_FREE = 0, PAGE_SEALED = 1, PAGE_PUBLISHED = 2 };
#define NO_PAGE UINT32_MAX
static inline size_t dtype_bytes(uint32_t dtype) {
    if (dtype == CXLKV_BYTES) return 1;
    return dtype == CXLKV_FLOAT32 ? 4 : 2;
}

typedef struct group_row {
    uint32_t layers, kv_heads, head_dim, value_head_dim, dtype, kind, values, window;
} group_row;
_Static_assert(sizeof(group_row) == 32, "a row of the superblock's group table");

/* What a pool's bytes need of a build, a bit each, as ext4 has it. A build that does not know a bit
 * of the first word goes on, of the second it may read and write nothing, of the third it refuses.
 * FEATURES_KNOWN are the bits of this build; docs/reference/releases.md names them, too. */
enum { FEATURES_COMPATIBLE, FEATURES_READERS, FEATURES_INCOMPATIBLE, FEATURE_WORDS };
#define FEATURE_ENCODINGS 1u /* incompatible: K or V are kept in an encoding */
#define FEATURE_ROTARY 1u    /* compatible: the page of the superblock has a rotary_table */
#define FEATURES_KNOWN {FEATURE_ROTARY, 0, FEATURE_ENCODINGS}

/* For an upgrade a pool of FORMAT_BEFORE will do; who only looks may lack features of writers. */
enum superblock_purpose { SUPERBLOCK_USE, SUPERBLOCK_INSPECT, SUPERBLOCK_UPGRADE };

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
    uint32_t build;              /* CXLKV_BUILD that made the pool, or upgraded it */
    uint64_t features[FEATURE_WORDS];
    uint32_t k_encoding;         /* with FEATURE_ENCODINGS, else 0 */
    uint32_t v_encoding;
    uint8_t reserved[20];
    uint32_t crc;                /* of all bytes before it */
} superblock;
_Static_assert(sizeof(superblock) <= SUPERBLOCK_BYTES - 4 * LINE_BYTES,
               "leaves the saved counters and the host line");
_Static_assert(offsetof(superblock, crc_before) % LINE_BYTES == 0 &&
               sizeof(superblock) == offsetof(superblock, crc_before) + LINE_BYTES,
               "what is new in version 6 is a line, which an upgrade writes first");

_Static_assert(sizeof(superblock) <= IN_PLACE_OFFSET && IN_PLACE_OFFSET % LINE_BYTES == 0,
               "behind the CRC");

/* Behind the mark of pools in place, with FEATURE_ROTARY: older builds go on without it. */
typedef struct rotary_table {
    cxlkv_rotary rotary;
    uint32_t crc;                /* of all bytes before it */
} rotary_table;
enum { ROTARY_OFFSET = IN_PLACE_OFFSET + LINE_BYTES };
_Static_assert(ROTARY_OFFSET + sizeof(rotary_table) <= SUPERBLOCK_BYTES - 4 * LINE_BYTES,
               "leaves the saved counters and the host line");

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

typedef cxlkv_record_header record_header;
_Static_assert(sizeof(record_header) == LINE_BYTES, "one line");

/* What a page is published under. */
typedef struct page_key {
    uint64_t hash[2];
    uint32_t ordinal;
} page_key;

/* ---- geometry.c ---- */
int layout_check(const cxlkv_layout *layout);
int sharing_check(const cxlkv_sharing *sharing);
int parts_make(cxlkv_pool *pool);         /* parts, part_of, row_of from layout and geometry */
/* Fills in sharing->log_records when that is 0. */
int geometry_make(const cxlkv_layout *layout, cxlkv_sharing *sharing, uint64_t capacity_bytes,
                  cxlkv_geometry *geometry);
/* Its two steps: extents of slab_slots records; what depends on how many of them there are. */
void extent_layout(const cxlkv_layout *layout, uint32_t slab_slots, cxlkv_geometry *g);
void place_extents(const cxlkv_sharing *sharing, uint64_t extents, cxlkv_geometry *g);
hosts_area hosts_area_of(uint8_t *base, const cxlkv_sharing *sharing, const cxlkv_geometry *g);

/* ---- superblock.c ---- */
/* What a superblock says of its pool. */
typedef struct pool_facts {
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint8_t identity[16];
} pool_facts;
/* Writes an empty pool into the mapping: its superblock last. */
int pool_format(cxlkv_pool *pool);
void superblock_write(cxlkv_pool *pool);
/* Reads and checks a superblock of a file of file_bytes. */
int superblock_read(enum superblock_purpose purpose, const uint8_t *bytes, uint64_t file_bytes,
                    const char *path, pool_facts *facts);
void pool_learn(cxlkv_pool *pool, const pool_facts *facts); /* it has what that says */
/* Of FORMAT_BEFORE, in place: a whole pool of the one version or the other after each store. */
void superblock_upgrade(uint8_t *base);
/* The incompatible features that this build knows, as it tells other hosts. */
uint32_t features_told(void);
int host_line_write(cxlkv_pool *pool, uint64_t nonce);
uint64_t host_line_read(const cxlkv_pool *pool);   /* 0: none */
uint64_t host_line_nonce(const uint8_t *superblock_page);

/* ---- records.c ---- */
descriptor *descriptor_of(const cxlkv_pool *pool, uint32_t page);
void descriptor_write(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t state,
                      uint32_t tokens, const page_key *key);
void descriptor_restore(cxlkv_pool *pool, uint32_t page, const descriptor *line);
/* Another host's: what is read next comes from memory. */
void descriptor_drop(const cxlkv_pool *pool, uint32_t page);
/* Copies the line and verifies the copy; 0 or -CXLKV_E_CORRUPT. */
int descriptor_read(const cxlkv_pool *pool, uint32_t page, descriptor *copy);
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

static inline uint32_t encoding_of(const cxlkv_layout *layout, uint32_t kind) {
    return kind == PIECE_VALUES ? layout->v_encoding : layout->k_encoding;
}
static inline bool is_encoded(const cxlkv_layout *layout) {
    return layout->k_encoding || layout->v_encoding;
}
static inline uint32_t kind_dim(const cxlkv_layout *layout, uint32_t kind) {
    return kind == PIECE_VALUES ? layout->value_head_dim : layout->head_dim;
}
/* Rows of numbers in a byte each: their kernels read bfloat16, which has all of these numbers. */
static inline bool has_fp8(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) == CXLKV_ENCODING_FP8_E4M3;
}
static inline bool has_codes(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) && !has_fp8(layout, kind);
}
static inline uint32_t kernel_dtype(const cxlkv_layout *layout, uint32_t kind) {
    return has_fp8(layout, kind) ? CXLKV_BFLOAT16 : layout->dtype;
}
/* Of a row of K or V as it is stored, where it is a row. */
static inline size_t stored_row_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return kind_dim(layout, kind) * (has_fp8(layout, kind) ? 1 : dtype_bytes(layout->dtype));
}
/* Whether rows of this dtype are taken and given: of the layout's, or bytes as they are stored. */
static inline bool is_given(const cxlkv_layout *layout, uint32_t kind, uint32_t dtype) {
    return dtype == layout->dtype || (dtype == CXLKV_BYTES && has_fp8(layout, kind));
}
/* Of keys or values that are codes. */
static inline code_form form_of(const cxlkv_layout *layout, uint32_t kind) {
    return (code_form){.bits = encoding_of(layout, kind) == CXLKV_ENCODING_INT4 ? 4 : 8,
                       .dim = kind_dim(layout, kind), .values = kind == PIECE_VALUES};
}

/* K or V of a head, as a caller sees them. */
static inline size_t rows_bytes(const cxlkv_layout *layout, uint32_t kind) {
    return (size_t)layout->page_tokens * kind_dim(layout, kind) * dtype_bytes(layout->dtype);
}

/* They are in two planes of 4 bits, the lower one from lower_offset() on. */
static inline bool has_planes(const cxlkv_layout *layout, uint32_t kind) {
    return encoding_of(layout, kind) == CXLKV_ENCODING_PROGRESSIVE;
}
/* Of a piece of codes: where its scales are, and, of keys, that of their digest. */
static inline size_t scales_offset(const cxlkv_layout *layout, uint32_t kind) {
    code_form form = form_of(layout, kind), upper = code_upper(&form);
    return code_scales_offset(has_planes(layout, kind) ? &upper : &form, layout->page_tokens);
}
static inline size_t digest_scale_offset(const cxlkv_layout *layout) {
    return scales_offset(layout, PIECE_KEYS) +
           code_blocks(layout->page_tokens) * CODE_TOKENS * sizeof(uint16_t);
}
static inline size_t lower_offset(const cxlkv_layout *layout, uint32_t kind) {
    size_t scales = code_blocks(layout->page_tokens) * CODE_TOKENS * sizeof(uint16_t);
    return align_up(scales_offset(layout, kind) + scales + (kind == PIECE_KEYS ? sizeof(float) : 0),
                    LINE_BYTES);
}

/* As they are stored; values that are a prefix of the keys have no piece of their own. A digest of
 * encoded keys has 8 bits a channel: of codes, its scale, a float, lies behind the keys' piece. */
static inline size_t piece_data_bytes(const cxlkv_layout *layout, uint32_t kind) {
    if (stores_objects(layout)) return kind == PIECE_KEYS ? layout->page_tokens : 0;
    if (kind == PIECE_DIGEST)
        return 2 * layout->head_dim * (layout->k_encoding ? 1 : dtype_bytes(layout->dtype));
    if (kind == PIECE_SKETCH) return sketch_bytes(layout->page_tokens, layout->head_dim);
    if (!has_codes(layout, kind)) return layout->page_tokens * stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind), upper = code_upper(&form);
    if (has_planes(layout, kind))
        return lower_offset(layout, kind) + code_scales_offset(&upper, layout->page_tokens);
    return code_bytes(&form, layout->page_tokens) + (kind == PIECE_KEYS ? sizeof(float) : 0);
}

/* What is read of K or V for a token and a head. */
static inline size_t kind_token_bytes(const cxlkv_layout *layout, uint32_t kind) {
    if (kind == PIECE_VALUES && values_are_keys(layout)) return 0;
    if (!has_codes(layout, kind)) return stored_row_bytes(layout, kind);
    code_form form = form_of(layout, kind);
    return code_block_bytes(&form) / CODE_TOKENS + sizeof(uint16_t);
}
static inline size_t token_bytes(const cxlkv_layout *layout) {
    return kind_token_bytes(layout, PIECE_KEYS) + kind_token_bytes(layout, PIECE_VALUES);
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

#endif
