/* The seam between the protocol and the memory that hosts share: write back, invalidate, fence,
 * copy, and the loads and stores of metadata lines. The only place with raw cache instructions.
 *
 * For tests the whole memory may be the emulator's (native/emulation/incoherent.h): linked in place
 * of flush.c, it runs the protocol's own object code. Every use names its site, so that the
 * emulator can leave one out and a test must then fail; real memory has no use for the name.
 * Addresses are of the pool; sizes in bytes; a range stands for all lines that it touches.
 * docs/explanation/coherence.md has the rules. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FLUSH_LINE_BYTES = 64 };

enum flush_site {
    FLUSH_NONE,
    FLUSH_PUBLISH_HEADER,        /* V1: the header is written back before the fence */
    FLUSH_PUBLISH_PAYLOAD_FENCE, /* V1 */
    FLUSH_PUBLISH_DESCRIPTOR,    /* a publish that returned is seen by others */
    FLUSH_PUBLISH_FENCE,
    FLUSH_ACQUIRE_BEGIN_FENCE,   /* what told us of the record comes before we drop its line */
    FLUSH_ACQUIRE_DESCRIPTOR,    /* a publish by others is seen */
    FLUSH_ACQUIRE_DESCRIPTOR_FENCE,
    FLUSH_ACQUIRE_SEEN_FENCE,    /* V4: the descriptor is loaded before the payload is dropped */
    FLUSH_ACQUIRE_PAYLOAD,       /* V4 */
    FLUSH_ACQUIRE_PAYLOAD_FENCE,
    FLUSH_ACQUIRE_COPIED_FENCE,  /* V3: the copy is loaded before the descriptor is dropped */
    FLUSH_ACQUIRE_RECHECK,       /* V3 */
    FLUSH_ACQUIRE_RECHECK_FENCE,
    FLUSH_FREE_DESCRIPTOR,       /* V5 */
    FLUSH_FREE_FENCE,
    FLUSH_PIN,                   /* V6: the pin is in memory before its reader looks */
    FLUSH_PIN_FENCE,
    FLUSH_UNPIN_BEGIN_FENCE,     /* V6: what was read in place is loaded before the pin goes */
    FLUSH_UNPIN,
    FLUSH_UNPIN_FENCE,
    FLUSH_OWNER_LOOK_BEGIN_FENCE, /* V6: what told us of the free comes before the look */
    FLUSH_OWNER_LOOK,            /* V6: the owner reads the pins from memory */
    FLUSH_OWNER_LOOK_FENCE,
    /* Hosts among themselves (hosts.h). A line that is kept: sent, then a fence. A look: a fence,
     * the lines dropped, a fence; so each of them is three sites that follow one another. */
    FLUSH_NAME, FLUSH_NAME_FENCE,
    FLUSH_BEAT, FLUSH_BEAT_FENCE,
    FLUSH_CLOSE, FLUSH_CLOSE_FENCE,      /* V10: closed before the commits are counted */
    FLUSH_CUT, FLUSH_CUT_FENCE,
    FLUSH_SLOT, FLUSH_SLOT_FENCE,        /* V12: our ticket is in memory before we look */
    FLUSH_CLAIM, FLUSH_CLAIM_FENCE,      /* claims are in memory before the commit */
    FLUSH_COMMIT, FLUSH_COMMIT_FENCE,    /* V10: the commit is in memory before we look */
    FLUSH_LOG, FLUSH_LOG_FENCE,          /* V9 */
    FLUSH_GIVE, FLUSH_GIVE_FENCE,        /* V8: nothing of the giver is left to be evicted */
    FLUSH_TAKE, FLUSH_TAKE_FENCE,        /* V8: nothing that our cache filled before is left */
    FLUSH_NAME_LOOK_BEGIN, FLUSH_NAME_LOOK, FLUSH_NAME_LOOK_FENCE,
    FLUSH_BEAT_LOOK_BEGIN, FLUSH_BEAT_LOOK, FLUSH_BEAT_LOOK_FENCE,
    FLUSH_FENCE_LOOK_BEGIN, FLUSH_FENCE_LOOK, FLUSH_FENCE_LOOK_FENCE,
    FLUSH_SLOT_LOOK_BEGIN, FLUSH_SLOT_LOOK, FLUSH_SLOT_LOOK_FENCE,
    FLUSH_COMMIT_LOOK_BEGIN, FLUSH_COMMIT_LOOK, FLUSH_COMMIT_LOOK_FENCE,
    FLUSH_CLAIM_LOOK_BEGIN, FLUSH_CLAIM_LOOK, FLUSH_CLAIM_LOOK_FENCE,
    FLUSH_LOG_LOOK_BEGIN, FLUSH_LOG_LOOK, FLUSH_LOG_LOOK_FENCE,
    FLUSH_RPC_PAYLOAD_SENT,      /* rpc.h: the payload is on its way before the fence */
    FLUSH_RPC_PAYLOAD_SENT_FENCE, /* its header is in memory only after it */
    FLUSH_RPC_HEADER_SENT,       /* a message whose sending returned is seen by the other side */
    FLUSH_RPC_HEADER_SENT_FENCE,
    FLUSH_RPC_LOOK_BEGIN_FENCE,  /* what told us of the message comes before we drop its line */
    FLUSH_RPC_LOOK,              /* messages of the other side are seen */
    FLUSH_RPC_LOOK_FENCE,
    FLUSH_RPC_SEEN_FENCE,        /* the header is loaded before the payload is dropped */
    FLUSH_RPC_PAYLOAD,           /* nothing of an earlier message is read */
    FLUSH_RPC_PAYLOAD_FENCE,
    FLUSH_RPC_ATTACH,            /* what a dead server answered is in memory */
    FLUSH_RPC_ATTACH_FENCE,
    FLUSH_LOCAL,                 /* ordering within this host only: append, fetch */
    FLUSH_SITES
};

/* What the instructions below are on this CPU: "clwb", "clflushopt", "clflush", "dc" or "none". */
const char *flush_name(void);
/* Can lines be written back and invalidated at all? If not, no other sharing than host is there. */
bool flush_supported(void);

/* Begins to write back the lines; done after flush_fence_stores(). They may stay cached. */
void flush_write_back(enum flush_site site, const void *address, size_t bytes);
/* Begins to write back and drop the lines; done after flush_fence_all(). */
void flush_invalidate(enum flush_site site, const void *address, size_t bytes);
/* The same in mode strict: each line is done when the instruction is (clflush). */
void flush_evict(enum flush_site site, const void *address, size_t bytes);
/* Stores and write-backs before it are in memory before any store after it. */
void flush_fence_stores(enum flush_site site);
/* All before it is done before any load or store after it. */
void flush_fence_all(enum flush_site site);

/* Copies into the pool past the cache; in memory after flush_fence_stores(). */
void flush_copy_in(void *pool, const void *from, size_t bytes);
/* Copies out of the pool by plain loads. */
void flush_copy_out(void *to, const void *pool, size_t bytes);
/* The line will be stored to or loaded soon: a hint, so that several misses overlap. Only where the
 * line may be filled at any time anyway. */
static inline void flush_expect(const void *line) { __builtin_prefetch(line); }
/* A metadata line: words [first_word, 8) stored, or all loaded, each in one access. */
void flush_store_line(void *line, const void *from, uint32_t first_word);
void flush_load_line(void *to, const void *line);
/* One word, after all stores before it (release), or before all loads after it (acquire). */
void flush_store_word(void *word, uint64_t value);
uint64_t flush_load_word(const void *word);

/* Non-temporal stores before it are visible in this coherence domain before any store after it. */
static inline void store_fence(void) { flush_fence_stores(FLUSH_LOCAL); }
