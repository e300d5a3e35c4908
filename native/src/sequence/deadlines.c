/* The leases of a pool's hits by their ends: a binary heap, so that what has ended is found without
 * a look at what has not. */
#include "sequence/deadlines.h"

static uint64_t end_of(const cxlkv_sequence *sequence) {
    return atomic_load_explicit(&sequence->lease_deadline_ns, memory_order_relaxed);
}

static void put_at(deadlines *all, uint32_t place, cxlkv_sequence *sequence) {
    all->heap[place] = sequence;
    sequence->deadline_place = place + 1;
}

/* Towards the root, past all that end later. */
static void move_up(deadlines *all, uint32_t place, cxlkv_sequence *sequence) {
    for (uint32_t above; place > 0; place = above) {
        above = (place - 1) / 2;
        if (end_of(all->heap[above]) <= end_of(sequence)) break;
        put_at(all, place, all->heap[above]);
    }
    put_at(all, place, sequence);
}

static void move_down(deadlines *all, uint32_t place, cxlkv_sequence *sequence) {
    for (uint64_t below; (below = 2ull * place + 1) < all->count; place = (uint32_t)below) {
        if (below + 1 < all->count && end_of(all->heap[below + 1]) < end_of(all->heap[below]))
            below++;
        if (end_of(sequence) <= end_of(all->heap[below])) break;
        put_at(all, place, all->heap[below]);
    }
    put_at(all, place, sequence);
}

/* Callers read it without the lock to know whether there is anything to do. */
static void tell_first(deadlines *all) {
    atomic_store_explicit(&all->first_ns, all->count ? end_of(all->heap[0]) : UINT64_MAX,
                          memory_order_relaxed);
}

int deadlines_add(deadlines *all, cxlkv_sequence *sequence) {
    if (all->count == all->capacity) {
        uint32_t capacity = all->capacity ? 2 * all->capacity : 64;
        cxlkv_sequence **grown = realloc(all->heap, capacity * sizeof(cxlkv_sequence *));
        if (!grown) return fail(ENOMEM, "no memory for a list of %u leases", capacity);
        all->heap = grown;
        all->capacity = capacity;
    }
    move_up(all, all->count++, sequence);
    tell_first(all);
    return 0;
}

void deadlines_remove(deadlines *all, cxlkv_sequence *sequence) {
    if (sequence->deadline_place == 0) return;
    uint32_t place = sequence->deadline_place - 1;
    cxlkv_sequence *last = all->heap[--all->count];
    sequence->deadline_place = 0;
    if (last != sequence) { /* the last takes its place, and goes from there where it belongs */
        move_down(all, place, last);
        move_up(all, last->deadline_place - 1, last);
    }
    tell_first(all);
}

cxlkv_sequence *deadlines_ended(deadlines *all, uint64_t now_ns) {
    cxlkv_sequence *first = all->count ? all->heap[0] : NULL;
    if (!first || now_ns <= end_of(first)) return NULL;
    deadlines_remove(all, first);
    return first;
}

bool deadlines_any_ended(const deadlines *all, uint64_t now_ns) {
    return now_ns > atomic_load_explicit(&all->first_ns, memory_order_relaxed);
}
