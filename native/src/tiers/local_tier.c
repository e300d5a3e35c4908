/* The local tier: copies of hot units in this process's own memory, which fetch and attend read.
 *
 * A unit is one layer of one page. A sealed page does not change until it is freed, and then its
 * generation does; so a copy is right as long as the generations are equal, and to demote is to
 * forget. A promotion has three steps: prepare (reserves a slot and holds the page, or refuses),
 * copy (by the pool's threads, each piece against its CRC), complete (shows it, or undoes it). */
#include <sys/mman.h>

#include "base/crc32c.h"
#include "base/flush.h"
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/threads.h"
#include "pages/pages.h"
#include "region/region.h"
#include "sequence/batch.h"
#include "sequence/places.h"
#include "sharing/this_host.h"
#include "tiers/local_tier.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it */
#endif

enum { ITEM_BYTES = 256 << 10, CHUNK_BYTES = 2048, WINDOW_READS = 10 };
#define NO_SLOT UINT32_MAX
#define NO_LAYER UINT16_MAX

/* ---- making and ending ---- */

/* A private mapping on a 2 MiB border. MADV_DONTFORK: a child has no use for the copies, and if it
 * shared them, its parent would pay a page fault for each that it refills. */
static int memory_map(local_tier *tier, uint64_t bytes) {
    uint64_t wanted = align_up(bytes, AREA_ALIGNMENT);
    uint8_t *begin = map_aligned(wanted, AREA_ALIGNMENT, PROT_READ | PROT_WRITE);
    if (!begin)
        return fail(ENOMEM, "no address space for a local tier of %lu MiB: ask for less, or raise "
                    "ulimit -v", bytes >> 20);
    tier->memory = begin;
    tier->mapped_bytes = wanted;
    madvise(begin, wanted, MADV_HUGEPAGE); /* advice: refused where there are none */
    madvise(begin, wanted, MADV_DONTFORK);
    /* Want of memory is told here, not by a kill later. */
    if (madvise(begin, wanted, MADV_POPULATE_WRITE) == 0 || errno == EINVAL) return 0;
    return fail(ENOMEM, "no memory for a local tier of %lu MiB (%s): ask for less", bytes >> 20,
                strerror(errno));
}

static void tier_free(local_tier *tier, bool mapped) {
    if (!tier) return;
    if (mapped && tier->memory) munmap(tier->memory, tier->mapped_bytes);
    pthread_rwlock_destroy(&tier->readers);
    pthread_mutex_destroy(&tier->lock);
    free(tier->slots);
    free(tier->table);
    free(tier->hotness);
    free(tier);
}

static int tables_make(local_tier *tier) {
    tier->slots = calloc(tier->slot_count, sizeof(*tier->slots));
    tier->table = calloc(tier->unit_count, sizeof(*tier->table));
    tier->hotness = calloc(tier->unit_count, sizeof(*tier->hotness));
    if (!tier->slots || !tier->table || !tier->hotness)
        return fail(ENOMEM, "no memory for the tables of a local tier of %u slots",
                    tier->slot_count);
    for (uint32_t i = 0; i < tier->slot_count; i++)
        tier->slots[i].next_free = i + 1 < tier->slot_count ? i + 1 : NO_SLOT;
    return 0;
}

/* Keys, then values, of all heads of a layer's page. */
static uint64_t values_offset(const layer_shape *shape) {
    return shape->layout.kv_heads * shape->strides[PIECE_KEYS];
}
static uint64_t unit_bytes_of(const cxlkv_pool *pool, uint32_t layer) {
    const layer_shape *shape = shape_of(pool, layer);
    return values_offset(shape) + shape->layout.kv_heads * shape->strides[PIECE_VALUES];
}

static int tier_make(const cxlkv_pool *pool, uint64_t bytes, local_tier **out) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t heads = pool->layers.kv_heads, unit_bytes = 0;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        if (unit_bytes_of(pool, layer) > unit_bytes) unit_bytes = unit_bytes_of(pool, layer);
    uint64_t units = (uint64_t)g->page_count * g->record_layers;
    uint64_t slots = min_u64(min_u64(bytes / unit_bytes, units), LOCAL_ON_ITS_WAY - 2);
    if (slots == 0)
        return fail(CXLKV_E_ARGUMENT, "a local tier of %lu bytes: a layer of a page has %lu", bytes,
                    unit_bytes);
    local_tier *made = calloc(1, sizeof(*made));
    if (!made) return fail(ENOMEM, "no memory for a local tier");
    rwlock_init(&made->readers);
    pthread_mutex_init(&made->lock, NULL);
    made->unit_bytes = unit_bytes;
    made->unit_count = units;
    made->slot_count = made->free_count = (uint32_t)slots;
    made->window_reads = WINDOW_READS * slots * heads;
    int code = tables_make(made);
    if (code == 0) code = memory_map(made, slots * unit_bytes);
    if (code < 0) tier_free(made, true);
    else *out = made;
    return code;
}

int cxlkv_local_make(cxlkv_pool *pool, uint64_t bytes) {
    local_tier *made = NULL;
    int code = bytes ? tier_make(pool, bytes, &made) : 0;
    if (code < 0) return code;
    pthread_rwlock_wrlock(&pool->locks.operations);
    if (!made) local_drop_all(pool);
    else if (pool->handle.closed) code = fail(CXLKV_E_CLOSED, "the pool is closed: open it again");
    else if (tier_of(pool))
        code = fail(CXLKV_E_BUSY,
                    "the pool has a local tier in this process: close that one first");
    else atomic_store(&pool->owner[OWNER_TIERS], made);
    pthread_rwlock_unlock(&pool->locks.operations);
    if (code < 0) tier_free(made, true);
    return code;
}

void local_drop_all(cxlkv_pool *pool) {
    tier_free(tier_of(pool), true);
    atomic_store(&pool->owner[OWNER_TIERS], NULL);
}

void local_forked(cxlkv_pool *pool) {
    tier_free(tier_of(pool), false); /* its mapping did not come along */
    atomic_store(&pool->owner[OWNER_TIERS], NULL);
}

/* pool_enter() for those that need a tier. */
static int tier_enter(cxlkv_pool *pool) {
    int code = pool_enter(pool);
    if (code < 0 || tier_of(pool)) return code;
    pool_leave(pool);
    return fail(CXLKV_E_CLOSED,
                "this process has no local tier of the pool: make one. A child starts without");
}

void local_leave(cxlkv_pool *pool, const local_reads *reads) {
    local_tier *tier = tier_of(pool);
    if (!tier) return;
    pthread_rwlock_unlock(&tier->readers);
    uint64_t local = atomic_load(&reads->local), far = atomic_load(&reads->far);
    if (local + far == 0) return;
    uint64_t all = local + far +
                   atomic_fetch_add_explicit(&tier->reads_local, local, memory_order_relaxed) +
                   atomic_fetch_add_explicit(&tier->reads_far, far, memory_order_relaxed);
    /* Counts age by what is read, not by the clock: an idle process forgets nothing. As in TinyLFU
     * (arXiv 1512.00727), after ten readings for each that has room. */
    atomic_store_explicit(&tier->epoch, (uint32_t)(all / tier->window_reads),
                          memory_order_relaxed);
}

/* ---- slots; all under tier->lock ---- */

static uint32_t slot_take(local_tier *tier, int64_t unit) {
    uint32_t slot = tier->first_free;
    local_slot *taken = &tier->slots[slot];
    tier->first_free = taken->next_free;
    tier->free_count--;
    tier->reserved_count++;
    taken->unit = unit;
    taken->state = LOCAL_RESERVED;
    atomic_store_explicit(&tier->table[unit], LOCAL_ON_ITS_WAY | (slot + 1), memory_order_relaxed);
    return slot;
}

/* The reader's lock is held for writing when the slot could be read. */
static void slot_give(local_tier *tier, uint32_t slot) {
    local_slot *given = &tier->slots[slot];
    if (given->state == LOCAL_RESERVED) tier->reserved_count--;
    else tier->held_count--;
    tier->free_count++;
    atomic_store_explicit(&tier->table[given->unit], 0, memory_order_relaxed);
    given->state = LOCAL_FREE;
    given->next_free = tier->first_free;
    tier->first_free = slot;
}

static bool is_held(const local_tier *tier, int64_t unit) {
    uint32_t entry = atomic_load_explicit(&tier->table[unit], memory_order_relaxed);
    return entry && !(entry & LOCAL_ON_ITS_WAY);
}

/* Drops the copies of pages that were freed. */
static int sweep(cxlkv_pool *pool, local_tier *tier) {
    uint32_t stale = 0, rows = pool->geometry.record_layers;
    if (tier->held_count == 0) return 0;
    int code = host_lock(pool);
    if (code < 0) return code;
    for (uint32_t i = 0; i < tier->slot_count; i++) {
        local_slot *slot = &tier->slots[i];
        if (slot->state != LOCAL_HELD ||
            slot->generation == pool->pages[slot->unit / rows].generation)
            continue;
        slot->state = LOCAL_STALE;
        stale++;
    }
    host_unlock(pool);
    if (stale == 0) return 0;
    pthread_rwlock_wrlock(&tier->readers);
    for (uint32_t i = 0; i < tier->slot_count; i++)
        if (tier->slots[i].state == LOCAL_STALE) slot_give(tier, i);
    pthread_rwlock_unlock(&tier->readers);
    tier->dropped += stale;
    return 0;
}

/* free + held + reserved = total, recounted. */
static void tier_assert(const local_tier *tier) {
#if CXLKV_DEBUG >= 2
    uint32_t counts[4] = {0}, listed = 0, named = 0;
    for (uint32_t i = 0; i < tier->slot_count; i++) counts[tier->slots[i].state]++;
    for (uint32_t i = tier->first_free; i != NO_SLOT; i = tier->slots[i].next_free) listed++;
    for (uint64_t unit = 0; unit < tier->unit_count; unit++) {
        uint32_t entry = atomic_load(&tier->table[unit]) & ~LOCAL_ON_ITS_WAY;
        named += entry != 0;
        if (entry && tier->slots[entry - 1].unit != (int64_t)unit) abort();
    }
    if (counts[LOCAL_FREE] != tier->free_count || listed != tier->free_count ||
        counts[LOCAL_RESERVED] != tier->reserved_count ||
        counts[LOCAL_HELD] + counts[LOCAL_STALE] != tier->held_count ||
        named != tier->reserved_count + tier->held_count)
        abort();
#else
    (void)tier;
#endif
}

/* ---- a promotion ---- */

/* The part that a page holds if it is complete, and somebody of this host needs it; or -1. Under
 * the host lock, so that its descriptor is not just being rewritten. */
static int64_t part_of_page(const cxlkv_pool *pool, uint32_t page) {
    const page_info *info = &pool->pages[page];
    descriptor line;
    bool alive = info->holders || (info->published && page_is_ours(pool, page));
    if (!alive || info->retired || info->quarantined) return -1;
    if (descriptor_read(pool, page, &line) < 0 || (line.version & 255) == PAGE_FREE ||
        line.version >> 8 != info->generation || line.part >= pool->geometry.part_count)
        return -1;
    return line.part;
}

static int32_t admit(const cxlkv_pool *pool, local_tier *tier, local_move *move, int64_t part) {
    uint32_t rows = pool->geometry.record_layers;
    uint64_t generation = pool->pages[move->page].generation;
    if (move->generation && move->generation != generation) return CXLKV_LOCAL_CHANGED;
    if (part < 0) return CXLKV_LOCAL_NOT_SEALED;
    move->layer = (uint16_t)layer_at(pool, (uint32_t)part, (uint32_t)((uint64_t)move->unit % rows));
    if (move->layer == NO_LAYER) return CXLKV_LOCAL_UNKNOWN;
    if (tier->free_count == 0) return CXLKV_LOCAL_NO_ROOM;
    move->generation = generation;
    return CXLKV_LOCAL_DONE;
}

/* Under both locks. */
static void admit_all(cxlkv_pool *pool, local_tier *tier, local_move *moves, uint32_t count) {
    uint32_t known = NO_PAGE;
    int64_t part = -1;
    for (uint32_t i = 0; i < count; i++) {
        local_move *move = &moves[i];
        if (move->code == CXLKV_LOCAL_UNKNOWN) continue;
        if (atomic_load_explicit(&tier->table[move->unit], memory_order_relaxed)) {
            move->code = CXLKV_LOCAL_THERE;
            continue;
        }
        if (move->page != known) part = part_of_page(pool, move->page);
        known = move->page;
        move->code = admit(pool, tier, move, part);
        if (move->code != CXLKV_LOCAL_DONE) continue;
        pages_hold(pool, 1, &move->page);
        move->slot = slot_take(tier, move->unit);
        move->reserved = true;
    }
}

/* Which pages are meant, and do copies of freed ones stand in their way? */
static bool look_over(const cxlkv_pool *pool, const local_tier *tier, local_move *moves,
                      uint32_t count) {
    bool in_the_way = tier->free_count < count;
    for (uint32_t i = 0; i < count; i++) {
        local_move *move = &moves[i];
        move->reserved = move->copied = false;
        move->code = CXLKV_LOCAL_DONE;
        if (move->unit < 0 || (uint64_t)move->unit >= tier->unit_count) {
            move->code = CXLKV_LOCAL_UNKNOWN;
            continue;
        }
        move->page = (uint32_t)(move->unit / pool->geometry.record_layers);
        in_the_way |= is_held(tier, move->unit);
        __builtin_prefetch(descriptor_of(pool, move->page));
    }
    return in_the_way;
}

static void let_go(cxlkv_pool *pool, local_move *moves, uint32_t count, bool locked) {
    uint32_t pages[64], waiting = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (moves[i].reserved) pages[waiting++] = moves[i].page;
        if (waiting < 64 && i + 1 < count) continue;
        if (locked) pages_drop(pool, waiting, pages);
        else pages_drop_later(pool, waiting, pages);
        waiting = 0;
    }
}

static int admit_under_lock(cxlkv_pool *pool, local_tier *tier, local_move *moves, uint32_t count) {
    int code = host_lock(pool);
    if (code < 0) return code;
    code = GUARDED((admit_all(pool, tier, moves, count), 0), poison_error_locked(pool, &fault));
    if (code < 0) let_go(pool, moves, count, true);
    host_unlock(pool);
    return code;
}

int local_prepare(cxlkv_pool *pool, local_move *moves, uint32_t count) {
    local_tier *tier = tier_of(pool);
    pthread_mutex_lock(&tier->lock);
    int code = 0;
    if (look_over(pool, tier, moves, count)) code = sweep(pool, tier);
    if (code == 0) code = admit_under_lock(pool, tier, moves, count);
    for (uint32_t i = 0; i < count; i++) {
        if (code < 0 && moves[i].reserved) {
            slot_give(tier, moves[i].slot);
            moves[i].reserved = false;
        }
        tier->refused += moves[i].code > CXLKV_LOCAL_THERE;
        tier->refused_no_room += moves[i].code == CXLKV_LOCAL_NO_ROOM;
    }
    tier_assert(tier);
    pthread_mutex_unlock(&tier->lock);
    return code;
}

typedef struct copy_job {
    cxlkv_pool *pool;
    local_move *moves;
    uint32_t count, per_item;
} copy_job;

/* The pieces of an item are read in this order: move by move, K of all heads, V of all heads. */
typedef struct copy_place {
    uint32_t move, kind, head;
} copy_place;

static bool place_next(const copy_job *job, uint32_t last, copy_place *at) {
    const cxlkv_layout *layout = layout_of(job->pool, job->moves[at->move].layer);
    if (++at->head < layout->kv_heads) return true;
    at->head = 0;
    if (++at->kind <= PIECE_VALUES && !values_are_keys(layout)) return true;
    at->kind = PIECE_KEYS;
    do at->move++;
    while (at->move < last && !job->moves[at->move].reserved);
    return at->move < last;
}

static const uint8_t *place_from(const copy_job *job, const copy_place *at) {
    const local_move *move = &job->moves[at->move];
    return pieces_of(job->pool, move->page, move->layer, at->kind) +
           at->head * shape_of(job->pool, move->layer)->strides[at->kind];
}

/* Copies one piece past the cache, the CRC made on the way, while the next one comes: hardware does
 * not look that far, and without it this took twice as long. */
static void copy_one(const copy_job *job, const copy_place *at, const uint8_t *next) {
    cxlkv_pool *pool = job->pool;
    local_move *move = &job->moves[at->move];
    const layer_shape *shape = shape_of(pool, move->layer);
    size_t size = piece_data_bytes(&shape->layout, at->kind);
    const uint8_t *from = place_from(job, at);
    uint8_t *to = tier_of(pool)->memory + move->slot * tier_of(pool)->unit_bytes +
                  (at->kind == PIECE_KEYS ? 0 : values_offset(shape)) +
                  at->head * shape->strides[at->kind];
    const kernels *isa = kernels_current();
    bool checks = pool->layout.checksum;
    uint32_t crc = 0;
    for (size_t offset = 0; offset < size; offset += CHUNK_BYTES) {
        size_t here = min_u64(CHUNK_BYTES, size - offset);
        for (size_t line = 0; next && line < here; line += LINE_BYTES)
            __builtin_prefetch(next + offset + line, 0, 0); /* it is read once only */
        if (checks) crc = crc32c(crc, from + offset, here);
        isa->store_rows(to + offset, from + offset, here, 1, here);
    }
    if (checks && crc != *checksum_of(pool, move->page, move->layer, at->head, at->kind)) {
        count_add(pool, COUNT_CORRUPT_PIECES, 1);
        move->code = CXLKV_LOCAL_DAMAGED;
    }
}

static int copy_task(void *context, uint32_t item) {
    const copy_job *job = context;
    uint32_t last = min_u32(job->count, (item + 1) * job->per_item);
    copy_place at = {.move = item * job->per_item, .kind = PIECE_KEYS};
    while (at.move < last && !job->moves[at.move].reserved) at.move++;
    for (bool more = at.move < last; more;) {
        copy_place here = at;
        more = place_next(job, last, &at);
        copy_one(job, &here, more ? place_from(job, &at) : NULL);
        if (!more || at.move != here.move) job->moves[here.move].copied = true;
    }
    store_fence();
    return 0;
}

int local_copy(cxlkv_pool *pool, local_move *moves, uint32_t count) {
    copy_job job = {.pool = pool, .moves = moves, .count = count,
                    .per_item = (uint32_t)(ITEM_BYTES / tier_of(pool)->unit_bytes)};
    if (job.per_item == 0) job.per_item = 1;
    return run_tasks(pool, (count + job.per_item - 1) / job.per_item, copy_task, &job);
}

/* Under the host lock: is the page still what it was when the copy was begun? */
static void recheck(const cxlkv_pool *pool, local_move *moves, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (moves[i].reserved && moves[i].code == CXLKV_LOCAL_DONE &&
            (pool->pages[moves[i].page].generation != moves[i].generation || !moves[i].copied))
            moves[i].code = CXLKV_LOCAL_CHANGED;
}

int64_t local_complete(cxlkv_pool *pool, local_move *moves, uint32_t count, bool shows) {
    local_tier *tier = tier_of(pool);
    int64_t shown = 0;
    pthread_mutex_lock(&tier->lock);
    int code = host_lock(pool);
    if (code == 0) recheck(pool, moves, count);
    let_go(pool, moves, count, code == 0);
    if (code == 0) host_unlock(pool);
    for (uint32_t i = 0; i < count; i++) {
        local_move *move = &moves[i];
        if (!move->reserved) continue;
        move->reserved = false;
        if (code < 0 || !shows || move->code != CXLKV_LOCAL_DONE) {
            slot_give(tier, move->slot);
            tier->undone++;
            continue;
        }
        local_slot *slot = &tier->slots[move->slot];
        slot->generation = move->generation;
        slot->state = LOCAL_HELD;
        tier->reserved_count--;
        tier->held_count++;
        shown++;
        /* The bytes and the generation are there before the entry is: local_find() acquires it. */
        atomic_store_explicit(&tier->table[move->unit], move->slot + 1, memory_order_release);
    }
    tier->promoted += (uint64_t)shown;
    tier_assert(tier);
    pthread_mutex_unlock(&tier->lock);
    return code < 0 ? code : shown;
}

static int64_t promote(cxlkv_pool *pool, local_move *moves, uint32_t count) {
    int64_t code = local_prepare(pool, moves, count);
    if (code < 0) return code;
    int64_t copied = peers_verify(pool, local_copy(pool, moves, count));
    int64_t shown = local_complete(pool, moves, count, copied >= 0);
    return copied < 0 ? copied : shown;
}

static int64_t promote_all(cxlkv_pool *pool, uint32_t count, const int64_t *units,
                           const uint64_t *generations, int32_t *codes) {
    int64_t code = 0;
    local_move *moves = calloc((size_t)count + 1, sizeof(*moves));
    if (!moves) code = fail(ENOMEM, "no memory to promote %u units: fewer at once", count);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        moves[i].unit = units[i];
        moves[i].generation = generations ? generations[i] : 0;
    }
    if (code == 0) code = promote(pool, moves, count);
    for (uint32_t i = 0; code >= 0 && i < count; i++) codes[i] = moves[i].code;
    free(moves);
    return code;
}

/* ---- the rest ---- */

static int64_t demote_all(cxlkv_pool *pool, uint32_t count, const int64_t *units) {
    local_tier *tier = tier_of(pool);
    int64_t code = 0;
    pthread_mutex_lock(&tier->lock);
    pthread_rwlock_wrlock(&tier->readers); /* until those that read now are done */
    for (uint32_t i = 0; i < count; i++) {
        if (units[i] < 0 || (uint64_t)units[i] >= tier->unit_count || !is_held(tier, units[i]))
            continue;
        slot_give(tier, atomic_load_explicit(&tier->table[units[i]], memory_order_relaxed) - 1);
        code++;
    }
    pthread_rwlock_unlock(&tier->readers);
    tier->demoted += (uint64_t)code;
    tier_assert(tier);
    pthread_mutex_unlock(&tier->lock);
    return code;
}

int64_t cxlkv_local_move(cxlkv_pool *pool, uint32_t demotes, uint32_t count, const int64_t *units,
                         const uint64_t *generations, int32_t *codes) {
    int64_t code = need(count, "units", units, NULL);
    if (code == 0 && !demotes) code = need(count, "codes", codes, NULL);
    if (code == 0) code = tier_enter(pool);
    if (code < 0) return code;
    code = demotes ? demote_all(pool, count, units)
                   : promote_all(pool, count, units, generations, codes);
    pool_leave(pool);
    return code;
}

int64_t cxlkv_local_hotness(cxlkv_pool *pool, int64_t *units, uint32_t *counts, uint8_t *resident,
                        uint64_t capacity) {
    int64_t code = need(capacity, "units", units, "counts", counts, "resident", resident, NULL);
    if (code == 0) code = tier_enter(pool);
    if (code < 0) return code;
    local_tier *tier = tier_of(pool);
    pthread_mutex_lock(&tier->lock);
    code = sweep(pool, tier);
    uint32_t epoch = atomic_load_explicit(&tier->epoch, memory_order_relaxed);
    uint64_t found = 0;
    for (uint64_t unit = 0; code == 0 && unit < tier->unit_count; unit++) {
        uint32_t hotness = atomic_load_explicit(&tier->hotness[unit], memory_order_relaxed);
        uint32_t entry = atomic_load_explicit(&tier->table[unit], memory_order_relaxed);
        if (hotness == 0 && entry == 0) continue;
        uint32_t count = decayed(hotness, epoch);
        bool held = entry && !(entry & LOCAL_ON_ITS_WAY);
        if (count == 0 && !held) continue;
        if (found < capacity) {
            units[found] = (int64_t)unit;
            counts[found] = count;
            resident[found] = held;
        }
        found++;
    }
    pthread_mutex_unlock(&tier->lock);
    pool_leave(pool);
    return code < 0 ? code : (int64_t)found;
}

int cxlkv_local_stats(cxlkv_pool *pool, cxlkv_local_state *state) {
    int code = tier_enter(pool);
    if (code < 0) return code;
    local_tier *tier = tier_of(pool);
    pthread_mutex_lock(&tier->lock);
    *state = (cxlkv_local_state){
        .unit_bytes = tier->unit_bytes,
        .slots_total = tier->slot_count,
        .slots_free = tier->free_count,
        .slots_held = tier->held_count,
        .slots_reserved = tier->reserved_count,
        .reads_local = atomic_load_explicit(&tier->reads_local, memory_order_relaxed),
        .reads_far = atomic_load_explicit(&tier->reads_far, memory_order_relaxed),
        .promoted = tier->promoted,
        .promoted_bytes = tier->promoted * tier->unit_bytes,
        .demoted = tier->demoted,
        .dropped = tier->dropped,
        .refused = tier->refused,
        .refused_no_room = tier->refused_no_room,
        .undone = tier->undone,
        .epoch = atomic_load_explicit(&tier->epoch, memory_order_relaxed)};
    pthread_mutex_unlock(&tier->lock);
    pool_leave(pool);
    return 0;
}

/* ---- reading ---- */

const uint8_t *view_copy(const layer_view *view, uint32_t page, bool keys) {
    const uint8_t *copy = local_find(view->sequence->pool, view->local, page, view->layer);
    return copy && !keys ? copy + values_offset(shape_of(view->sequence->pool, view->layer))
                         : copy;
}

void local_count_reads(const layer_view *view, const int32_t *pages, uint32_t count,
                      local_reads *reads) {
    cxlkv_pool *pool = view->sequence->pool;
    uint64_t local_count = 0, far_count = 0;
    uint32_t epoch = atomic_load_explicit(&tier_of(pool)->epoch, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++) {
        int64_t index = pages[i];
        if (index < view->first || index >= view->complete) continue;
        uint32_t page = sequence_page(view->sequence, view->part, (uint32_t)index);
        if (local_find(pool, view->local, page, view->layer)) local_count++;
        else far_count++;
        hotness_raise(&tier_of(pool)->hotness[unit_of(pool, page, view->layer)], epoch, 1);
    }
    atomic_fetch_add_explicit(&reads->local, local_count, memory_order_relaxed);
    atomic_fetch_add_explicit(&reads->far, far_count, memory_order_relaxed);
}

/* ---- which units a selection names ---- */

static void units_of_lists(cxlkv_sequence *sequence, uint32_t layer, const int32_t *pages,
                           uint64_t count, int64_t *units) {
    const cxlkv_pool *pool = sequence->pool;
    layer_view view = view_of(sequence, layer);
    uint64_t sealed = view_sealed(&view);
    for (uint64_t i = 0; i < count; i++) {
        bool there = pages[i] >= (int64_t)view.first && pages[i] < (int64_t)sealed;
        units[i] = !there ? -1 : (int64_t)unit_of(
            pool, sequence_page(sequence, view.part, (uint32_t)pages[i]), layer);
    }
}

static int batch_units(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                       const int32_t *starts, int64_t *units) {
    bool per_query = picked->per == CXLKV_PER_QUERY;
    uint32_t lists = batch->count;
    int code = layer_check(batch->pool, layer);
    if (code == 0 && per_query) code = batch_starts(batch, starts, &lists);
    if (code < 0) return code;
    if (picked->lists != lists)
        return fail(CXLKV_E_ARGUMENT, "units: %u lists of pages, %u wanted", picked->lists, lists);
    uint64_t list = (uint64_t)layout_of(batch->pool, layer)->kv_heads * picked->k;
    code = need(lists * list, "pages", picked->pages, "units", units, NULL);
    if (code < 0) return code;
    for (uint32_t i = 0; i < batch->count; i++) {
        uint64_t first = per_query ? (uint64_t)starts[i] : i;
        uint64_t count = per_query ? (uint64_t)(starts[i + 1] - starts[i]) : 1;
        units_of_lists(batch->sequences[i], layer, picked->pages + first * list, count * list,
                       units + first * list);
    }
    return 0;
}

int cxlkv_batch_chosen(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                       const int32_t *starts, uint32_t verifies, int64_t *units) {
    int code = verifies ? chosen_verify(batch, layer, picked) : 0;
    if (code < 0 || (verifies && !units)) return code;
    return IN_BATCH(batch, false, batch_units(batch, layer, picked, starts, units));
}
