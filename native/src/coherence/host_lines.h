/* What the files about hosts share: lines kept and looked at, words that say several things. */
#pragma once
#include "base/guard.h"
#include "coherence/lines.h"
#include "coherence/types.h"

/* ---- an own line goes to memory, before anything that follows ---- */
static inline void line_keep(const hosts *h, enum flush_site site, const void *first,
                             uint64_t bytes) {
    uintptr_t at = (uintptr_t)first & ~(uintptr_t)(FLUSH_LINE_BYTES - 1);
    for (; at < (uintptr_t)first + bytes; at += FLUSH_LINE_BYTES)
        line_send(site, (const void *)at, h->mode);
    flush_fence_all(site + 1);
}

/* ---- lines of others are read from memory, after anything that was done before ---- */
static inline void line_look(const hosts *h, enum flush_site begin, const void *const *first,
                             uint32_t count, uint64_t lines_each) {
    volatile uint64_t done = 0;
    flush_fence_all(begin);
    while (done < count * lines_each)
        GUARD_BEGIN(fault) {
            for (; done < count * lines_each; done++) {
                uintptr_t at = (uintptr_t)first[done / lines_each];
                at &= ~(uintptr_t)(FLUSH_LINE_BYTES - 1);
                at += done % lines_each * FLUSH_LINE_BYTES;
                line_drop(begin + 1, (const void *)at, h->mode);
            }
        } GUARD_END(fault, done++) /* who loads it finds that out */
    flush_fence_all(begin + 2);
}

/* ---- words: an epoch, 24 bits, and what is said about it or in it ---- */
enum { EPOCH_MAX = (1 << 24) - 2 };
#define COUNT_MAX ((1ull << 38) - 1)

/* What one host says of another one's epoch: {epoch 24, state 2, cut 38}. */
enum { FENCE_OPEN, FENCE_CLOSED, FENCE_CUT, FENCE_OFF };
#define FENCE_EPOCH(word) ((uint32_t)((word) >> 40))
#define FENCE_STATE(word) ((uint32_t)((word) >> 38 & 3))
#define FENCE_COUNT(word) ((word) & COUNT_MAX)
#define FENCE_WORD(epoch, state, cut) ((uint64_t)(epoch) << 40 | (uint64_t)(state) << 38 | (cut))
static inline uint64_t *fence_word(const hosts *h, uint32_t by, uint32_t about) {
    return (uint64_t *)hosts_line(h, by, FENCE_LINES) + about;
}

/* A place in the queue: {epoch 24, choosing 1, ticket 39}. */
#define SLOT_EPOCH(word) ((uint32_t)((word) >> 40))
#define SLOT_CHOOSES(word) ((word) >> 39 & 1)
#define SLOT_TICKET(word) ((word) & ((1ull << 39) - 1))
#define SLOT_WORD(epoch, chooses, ticket) \
    ((uint64_t)(epoch) << 40 | (uint64_t)(chooses) << 39 | (ticket))

/* Two for each extent, written in turn: a commit that fails leaves the other one as it was. */
typedef struct claim {
    uint32_t version;
    uint32_t commit;             /* counts when its host committed that many */
    uint32_t epoch_ours;         /* epoch << 1 | ours */
    uint32_t crc;                /* of the 12 bytes before it, from the extent's number on */
} claim;
typedef struct claim_pair {
    claim claims[2];
} claim_pair;
static inline uint8_t *claims_of(const hosts *h, uint32_t host) {
    return h->area.base + host * h->area.block_bytes + h->area.claims_offset;
}
