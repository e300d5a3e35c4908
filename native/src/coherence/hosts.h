/* The hosts of a pool, as each knows the others: by lines in the pool's memory that one of them
 * alone writes. Names and epochs, heartbeats, the lock, fences, who owns which extent, logs, pins.
 *
 * docs/explanation/coherence.md has the protocol and the invariants (V1 ...). All memory is reached
 * through the seam of flush.h, so that the emulated incoherent memory runs this very code. Shared
 * memory is hostile: what is read is checked, a host number or an offset never comes from there.
 * Callers of one host take turns, by two locks: for its slot, claims, commits and name one that may
 * be held for long, and for its beats, log, pins and fences one that nobody waits with
 * (pool/host_state.h).
 *
 * Any line may raise SIGBUS. Nothing here lets that out: what another host says is then not known,
 * and taken for whatever is safe (lost_lines.c); a call that writes own lines ends where it is, as
 * if its process had died there, which the protocol stands, and says -CXLKV_E_POISON. */
#ifndef CXLKV_HOSTS_H
#define CXLKV_HOSTS_H

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
void hosts_area_make(hosts_area *area);

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
    void *context;               /* of the two below */
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

/* ---- names and beats ---- */
/* From memory; false when it is damaged or cannot be read. A line never written is HOST_UNUSED. */
bool hosts_name(const hosts *h, uint32_t host, host_name *name);
/* Becomes host h->self again, or for the first time: nobody else may use that number (callers have
 * watched its beats). What an earlier epoch left undone is cleaned up; h->epoch is set. With the
 * nonce of before (a fenced host returns, its processes live on) pins stay. */
int hosts_attach(hosts *h, uint64_t nonce);
/* The same for a host whose epoch was ended, as hosts_fence_of() said: does not wait. */
int hosts_return(hosts *h, uint64_t nonce, const host_fence *fence);
/* After a process of ours died at any step of what follows below. With the one lock: its claims and
 * its place in the queue never were. With the other: nor was its fence, and its append has no gaps.
 * While nobody has that lock, what they take away is damage, and would keep all others waiting. */
void hosts_recover_claims(const hosts *h);
void hosts_recover(const hosts *h);
/* Fences that we began and did not finish. */
void hosts_open_fences(const hosts *h);
/* Orderly: whatever we own may be taken by others afterwards (V8: write it back before). */
void hosts_leave(hosts *h, uint64_t nonce);
/* A beat, and how many extents we would like to have from others. False: others do not see it. */
bool hosts_beat(const hosts *h, uint64_t beats, uint64_t wanted_extents);
/* With the next beat: how many extents we could spare, and after how long a silence others may
 * suspect us. What another said when its beats were looked at. */
void hosts_offer(const hosts *h, uint64_t extents);
uint64_t hosts_offered(const hosts *h, uint32_t host);
void hosts_promise(const hosts *h, uint64_t lease_ns);
/* 0: it has said nothing, or that line is damaged. */
uint64_t hosts_promised(const hosts *h, uint32_t host);
/* Of all hosts, from memory. Returns a bit for each whose line cannot be read: it says nothing. */
uint64_t hosts_look_beats(const hosts *h, uint64_t *beats, uint64_t *wanted_extents);

/* ---- fences: which commits of a silent host count (V10) ---- */
/* As it is now, without waiting: 1 while somebody makes one, who has not said yet what counts. */
int hosts_fence_now(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence);
/* Waits while a fence is being made; -CXLKV_E_TIMEOUT when its maker went silent over it,
 * -CXLKV_E_POISON when a host that may have fenced it cannot be read. */
int hosts_fence_of(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence);
/* Ends an epoch of a host; off: its machine was switched off, as its operator says. -EAGAIN:
 * somebody is fencing us meanwhile, nothing was done. */
int hosts_fence(const hosts *h, uint32_t host, uint32_t epoch, bool off);

/* ---- the lock between hosts (V12) ---- */
/* Passes over silent hosts, fencing them. 0, or -CXLKV_E_FENCED when that happened to us;
 * -CXLKV_E_POISON when nobody can tell whether another one is inside. */
int hosts_lock(const hosts *h);
void hosts_unlock(const hosts *h);

/* ---- claims: who owns which extent; changed under the lock ---- */
typedef struct extent_owner {
    uint32_t version;            /* of the claim that counts; 0: none was ever made */
    uint8_t host;                /* NO_HOST: nobody */
    bool takeable;               /* nobody's, or of a host that left or is off */
} extent_owner;
/* Of all extents: 0, or -CXLKV_E_CORRUPT when two claims contradict each other. */
int hosts_owners(const hosts *h, extent_owner *owners);
/* Makes `count` extents ours, or nobody's, all or nothing; owners is what hosts_owners() said under
 * this lock. -CXLKV_E_FENCED: our epoch has ended, nothing changed. -CXLKV_E_TIMEOUT: whether it
 * counts is not decided yet; what hosts_owners() says under a later lock is. -CXLKV_E_POISON: the
 * same, as lines cannot be read or written. */
int hosts_claim(const hosts *h, const extent_owner *owners, uint32_t count,
                const uint32_t *extents, bool ours);
/* Before an extent is given back, and after it was taken: V8. It passes over what raises SIGBUS,
 * which no cache keeps. Returns how many stretches that were. */
uint64_t hosts_hand_over(const void *first, uint64_t bytes, bool gives);

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
/* Fills in sequence (from `next` on), epoch and crc. Never waits for readers. A record whose line
 * is lost is not told: readers then find what it says by the descriptors, or later. */
void hosts_log(const hosts *h, uint64_t next, log_record *records, uint32_t count);
/* How far a host's log was read. */
typedef struct log_place {
    uint64_t next;               /* the record that is read next */
    log_record damaged;          /* its line, as it was when it was given up; else zeros */
} log_place;
/* Up to 16 records of a host from place->next on, which moves behind them. 0: the end.
 * -CXLKV_E_STALE: it has written past us; -CXLKV_E_CORRUPT: the record is damaged. Then:
 * hosts_skip_log(), and look at its descriptors instead. */
enum { LOG_BATCH = 16 };
int hosts_read_log(const hosts *h, uint32_t host, log_place *place, log_record *records);
/* On to the end of the log. A damaged line there is no news until it, or what follows, changes. */
void hosts_skip_log(const hosts *h, uint32_t host, log_place *place);
/* A bit for each host whose log has news at places[host]. */
uint64_t hosts_logs_moved(const hosts *h, const log_place *const *places);
/* The sequence that the host writes next, or wrote just now. */
uint64_t hosts_log_end(const hosts *h, uint32_t host);
/* The records whose place is in the lines from `first` on, up to 16; what is no record has
 * operation 0. Returns how many lines were looked at. */
uint32_t hosts_read_lines(const hosts *h, uint32_t host, uint64_t first, log_record *records);
/* Of our own log: the wish to forget that the record `sequence` will overwrite, if it is one. */
bool hosts_own_forget(const hosts *h, uint64_t sequence, log_record *record);
/* Does a line of it say that it is a record which others may still read, and is not whole? An
 * append that its writer died over is no damage. */
bool hosts_log_is_damaged(const hosts *h, uint32_t host, uint64_t *sequence);

/* ---- pins (V6): a bit for each page that is in use by this host and is not its own ---- */
static inline uint64_t *hosts_pin_word(const hosts *h, uint32_t host, uint32_t page) {
    uint8_t *first = h->area.base + host * h->area.block_bytes + h->area.pins_offset;
    return (uint64_t *)first + page / 64;
}
#endif
