/* The local tier: copies of units in this process's own memory; docs/explanation/local-tier.md. */
#pragma once
#include "sequence/types.h"

typedef struct local_slot {
    int64_t unit;
    uint64_t generation;         /* of its page; written before the table names the slot */
    uint32_t next_free;
    enum { LOCAL_FREE, LOCAL_RESERVED, LOCAL_HELD, LOCAL_STALE } state;
} local_slot;

/* free_count + reserved_count + held_count = slot_count; a stale slot counts as held. */
typedef struct local_tier {
    uint8_t *memory;
    uint64_t mapped_bytes, unit_bytes;
    local_slot *slots;
    atomic_uint *table;          /* by unit: slot + 1, and LOCAL_ON_ITS_WAY; 0: none */
    atomic_uint *hotness;        /* by unit, as host/hotness.h counts */
    uint64_t unit_count, window_reads;
    atomic_uint epoch;
    atomic_ulong reads_local, reads_far;
    /* Readers of copies hold it for reading, for the length of a call; entries leave the table
     * under the write lock only. So what a reader has found stays, and no slot is refilled
     * meanwhile. */
    pthread_rwlock_t readers;
    pthread_mutex_t lock;        /* guards slots, the table's changes and all below */
    uint32_t slot_count, free_count, reserved_count, held_count, first_free;
    uint64_t promoted, demoted, dropped, refused, refused_no_room, undone;
} local_tier;
#define LOCAL_ON_ITS_WAY (1u << 31)

/* What a pool has of OWNER_TIERS, set under the write lock of operations; NULL: there is none. */
static inline local_tier *tier_of(const cxlkv_pool *pool) {
    return atomic_load_explicit(&pool->owner[OWNER_TIERS], memory_order_relaxed);
}
static inline uint64_t unit_of(const cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    return (uint64_t)page * pool->geometry.record_layers + pool->layers.row_of[layer];
}
/* The copy of a unit whose page the caller holds, or NULL; between local_enter and local_leave. */
static inline const uint8_t *local_find(const cxlkv_pool *pool, const local_tier *tier,
                                       uint32_t page, uint32_t layer) {
    /* Pairs with the release of local_complete(): slot and bytes are there when the entry is. */
    uint32_t entry =
        atomic_load_explicit(&tier->table[unit_of(pool, page, layer)], memory_order_acquire);
    if (entry == 0 || entry & LOCAL_ON_ITS_WAY) return NULL;
    if (tier->slots[entry - 1].generation != pool->pages[page].generation) return NULL;
    return tier->memory + (entry - 1) * tier->unit_bytes;
}
/* What a call read of chosen pages: one for each unit and head. */
typedef struct local_reads {
    atomic_ulong local, far;
} local_reads;
/* Round each call that reads copies; the second also counts what was read. */
static inline void local_enter(cxlkv_pool *pool) {
    local_tier *tier = tier_of(pool);
    if (tier) pthread_rwlock_rdlock(&tier->readers);
}
void local_leave(cxlkv_pool *pool, const local_reads *reads);
void local_drop_all(cxlkv_pool *pool);     /* the tier, at close; under the write lock */
void local_forked(cxlkv_pool *pool);       /* in the child: its copies are its parent's */
/* A promotion in three steps, each under pool_enter(); cxlkv_local_move() is all of them. */
typedef struct local_move {
    int64_t unit;
    uint64_t generation;         /* 0: as the page is */
    uint32_t page, slot;
    uint16_t layer;
    bool reserved;               /* has a slot, and a reference of its own on its page */
    bool copied;
    int32_t code;                /* CXLKV_LOCAL_... */
} local_move;
/* Reserves slots, and holds the pages, of those that can be promoted; an error: of none. */
int local_prepare(cxlkv_pool *pool, local_move *moves, uint32_t count);
int local_copy(cxlkv_pool *pool, local_move *moves, uint32_t count);
/* Shows what was copied, if shows and if its page is what it was; undoes the rest. Lets go of the
 * pages. Returns how many can be read now. */
int64_t local_complete(cxlkv_pool *pool, local_move *moves, uint32_t count, bool shows);
/* Counts the pages of a list, as local or far, and by unit; the view has a tier. */
void local_count_reads(const layer_view *view, const int32_t *pages, uint32_t count,
                      local_reads *reads);
/* K or V in the page's copy, or NULL. No inline: most pools have no tier. */
const uint8_t *view_copy(const layer_view *view, uint32_t page, bool keys);
