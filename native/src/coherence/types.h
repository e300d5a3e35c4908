/* The hosts of a pool, as each knows the others: by lines in the pool's memory that one of them
 * alone writes. Names and epochs, heartbeats, the lock, fences, who owns which extent, logs, pins.
 *
 * docs/explanation/coherence.md has the protocol and the invariants (V1 ...). All memory is reached
 * through the seam of flush.h, so that the emulated incoherent memory runs this very code. Shared
 * memory is hostile: what is read is checked, a host number or an offset never comes from there.
 * Callers of one host take turns, by two locks: for its slot, claims, commits and name one that may
 * be held for long, and for its beats, log, pins and fences one that nobody waits with
 * (format/types.h).
 *
 * Any line may raise SIGBUS. Nothing here lets that out: what another host says is then not known,
 * and taken for whatever is safe (lost_lines.c); a call that writes own lines ends where it is, as
 * if its process had died there, which the protocol stands, and says -CXLKV_E_POISON. */
#pragma once
#include "coherence/visibility.h"

enum { HOSTS_MAX = 64, NO_HOST = 255 };
enum host_status { HOST_UNUSED, HOST_LIVE, HOST_LEFT };

/* Each host has a block: these lines, then fences, log, claims, pins. Written by it alone (V7). */
enum { NAME_LINE, BEAT_LINE, LOCK_LINE, COMMIT_LINE, FENCE_LINES, COUNTER_LINES = 12,
       LOG_LINES = 16 };

/* Where the blocks lie. The first five are given, the rest follows from them. */
typedef struct hosts_area {
    uint8_t *base;
    uint32_t host_count, extent_count, page_count;
    uint32_t log_records;        /* a power of two */
    uint64_t claims_offset, pins_offset, block_bytes;
} hosts_area;

/* Twice in its line, written one after the other: of a writer that is interrupted, or dies, one of
 * the two is whole. */
typedef struct host_name {
    uint64_t nonce;              /* of the host state that speaks for the host */
    uint32_t epoch;              /* from 1; one more at each return */
    uint32_t status;
    uint32_t host;
    uint32_t build;              /* CXLKV_BUILD of the processes there; 0: before it was told */
    uint32_t features;           /* the incompatible ones that they know: the low 32 */
    uint32_t crc;
} host_name;
_Static_assert(sizeof(host_name) == 32, "two in a line");

/* What all others say of an epoch of a host. */
typedef struct host_fence {
    bool fenced;                 /* its epoch has ended, and commits above `cut` do not count */
    bool off;                    /* and its machine was switched off: its extents may be taken */
    uint64_t unread;             /* by host: what it says of that epoch cannot be read */
    uint64_t cut;
} host_fence;

typedef struct hosts {
    hosts_area area;
    uint32_t self;
    uint32_t epoch;              /* ours, once attached */
    enum visibility_mode mode;
    uint32_t features;           /* the incompatible ones of this build, for its name */
    void *context;               /* of the four below */
    void (*pause)(void *context);                 /* between two looks at what another writes */
    bool (*silent)(void *context, uint32_t host); /* has it not beaten for a lease? */
    void (*lost)(void *context, uint32_t host);   /* a line of its block raised SIGBUS; or NULL */
    /* Round a fence that hosts_lock() makes, where others of this host may make one, too; false:
     * not now. NULL: the caller takes turns with them. */
    bool (*fencing)(void *context, bool begins);
} hosts;

static inline uint8_t *hosts_line(const hosts *h, uint32_t host, uint64_t line) {
    return h->area.base + host * h->area.block_bytes + line * 64;
}

/* ---- claims: who owns which extent; changed under the lock ---- */
typedef struct extent_owner {
    uint32_t version;            /* of the claim that counts; 0: none was ever made */
    uint8_t host;                /* NO_HOST: nobody */
    bool takeable;               /* nobody's, or of a host that left or is off */
} extent_owner;

/* ---- logs: what a host published, freed, and wants forgotten: others need not look at all ---- */
enum log_operation { LOG_PUBLISH = 1, LOG_FREE, LOG_FORGET };
typedef struct log_record {
    uint64_t sequence;           /* absolute, from 1 */
    uint64_t generation;
    uint64_t hash[2];
    uint32_t epoch;
    uint32_t operation : 8;
    /* LOG_FORGET: which publication of that generation it means. LOG_FREE: 1 when a user forgot the
     * page, 0 when it was evicted; after a 1 each host also forgets its own copy, if it has one. */
    uint32_t publication : 24;
    uint32_t page;
    uint32_t crc;                /* of the 44 bytes before it */
    uint32_t reserved[4];
} log_record;
_Static_assert(sizeof(log_record) == 64, "one line");
/* How far a host's log was read. */
typedef struct log_place {
    uint64_t next;               /* the record that is read next */
    log_record damaged;          /* its line, as it was when it was given up; else zeros */
} log_place;
enum { LOG_BATCH = 16 };

/* ---- pins (V6): a bit for each page that is in use by this host and is not its own ---- */
static inline uint64_t *hosts_pin_word(const hosts *h, uint32_t host, uint32_t page) {
    uint8_t *first = h->area.base + host * h->area.block_bytes + h->area.pins_offset;
    return (uint64_t *)first + page / 64;
}
