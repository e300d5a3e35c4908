/* The bytes of a pool in its region: superblock, descriptors, records.
 * docs/reference/memory-layout.md explains them. */
#pragma once
#include "region/types.h"

enum {
    FORMAT_VERSION = CXLKV_FORMAT_VERSION,
    FORMAT_BEFORE = 5, /* which `cxlkv pool upgrade` makes the present one */
    RUN_SLOTS = 16,
    PROCESS_MAX = 128,
    CHUNK_PAGES = 256,
    DTYPE_COUNT = 3, /* of K, V and queries */
    OBJECT_BYTES_MAX = 1 << 30,
    OBJECT_PAGES_MAX = 1 << 16,
    STATE_PAGES_MAX = 1 << 16,   /* of a checkpoint */
    ENCODING_LAST = CXLKV_ENCODING_PROGRESSIVE,
};

enum { PIECE_DIGEST, PIECE_SKETCH, PIECE_KEYS, PIECE_VALUES, PIECE_KINDS };
enum { PAGE_FREE = 0, PAGE_SEALED = 1, PAGE_PUBLISHED = 2 };
#define NO_PAGE UINT32_MAX

typedef struct group_row {
    uint32_t layers, kv_heads, head_dim, value_head_dim, dtype, kind, values, window;
} group_row;
_Static_assert(sizeof(group_row) == 32, "a row of the superblock's group table");

/* What a pool's bytes need of a build, a bit each, as ext4 has it. A build that does not know a bit
 * of the first word goes on, of the second it may read and write nothing, of the third it refuses.
 * FEATURES_KNOWN are the bits of this build; docs/reference/releases.md names them, too. */
enum { FEATURES_COMPATIBLE, FEATURES_READERS, FEATURES_INCOMPATIBLE, FEATURE_WORDS };
#define FEATURE_ENCODINGS 1u /* incompatible: K or V are kept in an encoding */
#define FEATURE_STATES 2u    /* incompatible: pages of one more part have state checkpoints */
#define FEATURE_OBJECT_PAGES 4u /* incompatible: objects of several pages */
#define FEATURE_SHAPES 8u    /* incompatible: groups of layers differ in more than their window */
#define FEATURE_ROTARY 1u    /* compatible: the page of the superblock has a rotary_table */
#define FEATURES_KNOWN \
    {FEATURE_ROTARY, 0, \
     FEATURE_ENCODINGS | FEATURE_STATES | FEATURE_OBJECT_PAGES | FEATURE_SHAPES}

/* An upgrade also takes a pool of FORMAT_BEFORE; an inspection may lack features of writers. */
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
    uint64_t state_bytes;        /* with FEATURE_STATES, else 0 */
    uint32_t state_digest;
    uint32_t object_bytes;       /* with FEATURE_OBJECT_PAGES, else 0 */
    uint8_t reserved[4];
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
    uint32_t object[2];          /* of an object in several pages: which one; else 0 */
    uint32_t reserved;
    uint32_t crc;                /* of the 60 bytes before it */
} descriptor;
_Static_assert(sizeof(descriptor) == LINE_BYTES, "one line, one writer");

typedef cxlkv_record_header record_header;
_Static_assert(sizeof(record_header) == LINE_BYTES, "one line");

/* What a page is published under. */
typedef struct page_key {
    uint64_t hash[2];
    uint32_t ordinal;
    uint32_t object[2];          /* as in the descriptor */
} page_key;

/* What a superblock says of its pool. */
typedef struct pool_facts {
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint8_t identity[16];
} pool_facts;
