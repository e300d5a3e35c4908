/* Making records visible to other hosts, taking theirs into view, and pinning what is read.
 *
 * docs/explanation/coherence.md has the sequences and the invariants (V1 ...). Batches share their
 * fences. A descriptor and a header are one 64-byte line each; the descriptor's last 4 bytes
 * are the CRC32C of the 60 before, its first 8 are generation << 8 | state. Nothing
 * here takes a lock. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum visibility_mode {
    VISIBILITY_COHERENT, /* one host, or hardware coherence: fences only */
    VISIBILITY_FAST,     /* a machine that the litmus run certified */
    VISIBILITY_STRICT,   /* metadata by clflush */
};

/* The payload was given to flush_copy_in() before; the publisher alone writes all of it. */
typedef struct publish_item {
    void *header_line;
    const void *header;
    void *descriptor_line;
    const void *descriptor;
} publish_item;
/* When it returns, every host that looks from now on sees the records (V1). */
void visibility_publish(const publish_item *items, uint32_t count, enum visibility_mode mode);

/* Lines of the owner's descriptors with the next generation and state free (V5). When it returns,
 * no later look takes these records; a reader that looked before may still read. */
void visibility_free(const publish_item *items, uint32_t count, enum visibility_mode mode);

typedef struct visible_range {
    const void *pool;            /* in the pool */
    void *to;                    /* where the copy goes; NULL: it is read in place later */
    size_t bytes;
} visible_range;

typedef struct acquire_item {
    const void *descriptor_line;
    uint64_t version;            /* generation << 8 | state that is wanted */
    const visible_range *ranges; /* header and pieces of this record, as many as are wanted */
    uint32_t range_count;
    uint8_t descriptor[64];      /* out: as it was while the copy was made */
    int code;                    /* out: 0, -CXLKV_E_STALE or -CXLKV_E_CORRUPT */
} acquire_item;
/* Copies what is wanted of each record and accepts it only if the record was there, whole, from
 * before the copy to after it (V3, V4). Returns how many were accepted. A descriptor whose CRC is
 * wrong may be one that is being written: it is read again, a bounded number of times. */
uint32_t visibility_acquire(acquire_item *items, uint32_t count, enum visibility_mode mode);
/* The same for records that this host has pinned before: they cannot change any more once they were
 * seen (V6), so the descriptor is not looked at again. */
uint32_t visibility_take(acquire_item *items, uint32_t count, enum visibility_mode mode);

/* A pin (V6): a page's bit in a word of a line that only the reader's host writes (V7). Set before
 * the reader looks at the descriptor, it keeps the page from being written again until it is clear,
 * however long that is: the ranges that were acquired under it may be read in place. Nothing counts
 * here: a page that was pinned twice is unpinned once. */
typedef struct pin_item {
    void *word;                  /* 64 bits, in an own line */
    uint64_t bits;
} pin_item;
/* Sets the bits, all of them under the same fences; when it returns they are in memory, before any
 * later look at a descriptor. Callers of one host take turns, in unpinning too. */
void visibility_pin(const pin_item *items, uint32_t count, enum visibility_mode mode);
/* Clears them, after all that this thread has read, or has been told was read, is read. They are
 * clear in memory before any store after it. */
void visibility_unpin(const pin_item *items, uint32_t count, enum visibility_mode mode);
/* After visibility_free(), in any process of the owner's host: words of other hosts' pins, from
 * memory. A page that was freed may be written again when each of its bits was clear in some look
 * since. Words of one line are best neighbours: their line is then dropped once. */
void visibility_look(const void *const *words, uint32_t count, uint64_t *values,
                     enum visibility_mode mode);
