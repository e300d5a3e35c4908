/* Objects that a process reads, or writes, where they lie: held until it gives them back. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "format/mapping.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "objects/objects.h"
#include "objects/whole.h"
#include "pool/pool.h"
#include "sharing/this_host.h"

struct cxlkv_lease {
    cxlkv_pool *pool;
    pthread_mutex_t lock;        /* nobody gives back what is being published; inside operations */
    uint32_t count;
    bool reserved;               /* pages to be published, not objects that were found */
    object_place places[];       /* `held` changes under the lock */
};

static int lease_make(cxlkv_pool *pool, uint32_t count, bool reserved, cxlkv_lease **out) {
    int code = objects_check(pool);
    if (code < 0) return code;
    cxlkv_lease *made = calloc(1, sizeof(*made) + count * sizeof(made->places[0]));
    if (!made) return fail(ENOMEM, "no memory for a lease of %u objects", count);
    made->pool = pool;
    made->count = count;
    made->reserved = reserved;
    pthread_mutex_init(&made->lock, NULL);
    pool_retain(pool);
    *out = made;
    return 0;
}

/* Of a lease that holds nothing. */
static void lease_free(cxlkv_lease *lease) {
    places_free(lease->count, lease->places);
    pthread_mutex_destroy(&lease->lock);
    pool_drop(lease->pool);
    free(lease);
}

/* It is lent from now on. */
static void tell_addresses(const cxlkv_lease *lease, uint64_t *addresses) {
    uint32_t held = 0;
    for (uint32_t i = 0; i < lease->count; i++) {
        const object_place *place = &lease->places[i];
        bool one = place->held && !place->rest;
        addresses[i] = one ? (uintptr_t)object_at(lease->pool, place->page) : 0;
        held += place->held;
    }
    atomic_fetch_add(&objects_of(lease->pool)->lent, held);
}

/* What is damaged is not lent. */
static void drop_damaged(cxlkv_lease *lease) {
    for (uint32_t i = 0; i < lease->count; i++)
        if (lease->places[i].code < 0) objects_drop(lease->pool, 1, &lease->places[i]);
}

int64_t cxlkv_lease_take(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                         uint64_t *addresses, int64_t *sizes, cxlkv_lease **out) {
    cxlkv_lease *made = NULL;
    int64_t code = need(count, "keys", keys, "addresses", addresses, "sizes", sizes, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    code = lease_make(pool, count, false, &made);
    if (code == 0) code = objects_hold(pool, count, keys, made->places);
    if (code == 0) {
        code = objects_verify(pool, count, made->places);
        code = peers_verify(pool, code);
        if (code == 0) drop_damaged(made);
        else objects_drop(pool, count, made->places);
    }
    for (uint32_t i = 0; code >= 0 && i < count; i++) sizes[i] = object_size(&made->places[i]);
    if (code == 0) tell_addresses(made, addresses);
    pool_leave(pool);
    if (code < 0 && made) lease_free(made);
    else *out = made;
    return code < 0 ? code : (int64_t)count;
}

int64_t cxlkv_lease_reserve(cxlkv_pool *pool, uint32_t count, const uint64_t *sizes,
                            uint64_t *addresses, cxlkv_lease **out) {
    cxlkv_lease *made = NULL;
    int64_t code = need(count, "sizes", sizes, "addresses", addresses, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    int32_t *codes = calloc(count + 1ull, sizeof(*codes));
    code = codes ? lease_make(pool, count, true, &made) : fail(ENOMEM, "no memory for a lease");
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        if (sizes[i] == 0 || sizes[i] > pool->layout.page_tokens)
            code = fail(CXLKV_E_ARGUMENT, "object %u of %u is %lu bytes: memory in one piece is "
                        "1 to %u bytes in this pool%s", i, count, sizes[i],
                        pool->layout.page_tokens,
                        has_object_pages(&pool->layout) ? ". put() stores larger ones" : "");
        made->places[i].bytes = (uint32_t)sizes[i];
    }
    if (code == 0) code = objects_take(pool, count, NULL, false, made->places, codes);
    if (code == 0) tell_addresses(made, addresses);
    free(codes);
    pool_leave(pool);
    if (code < 0 && made) lease_free(made);
    else *out = made;
    return code < 0 ? code : (int64_t)count;
}

/* ---- publishing what was written ---- */

typedef struct sum_job {
    cxlkv_pool *pool;
    const object_place *places;
    const int32_t *codes;
} sum_job;

/* It was written by plain stores: where other hosts do not see our caches it is written back. */
static int sum_task(void *context, uint32_t item) {
    const sum_job *job = context;
    cxlkv_pool *pool = job->pool;
    const object_place *place = &job->places[item];
    const uint8_t *at = object_at(pool, place->page);
    if (job->codes[item] != 0) return 0;
    int code = page_stays_ours(pool, place->page);
    if (code < 0) return code;
    if (pool->layout.checksum)
        *checksum_of(pool, place->page, 0, 0, PIECE_KEYS) = crc32c(0, at, place->bytes);
    if (pool->mode != VISIBILITY_COHERENT)
        flush_write_back(FLUSH_PUBLISH_HEADER, at, place->bytes); /* V1 */
    store_fence();
    return 0;
}

static int chosen_check(const cxlkv_lease *lease, uint32_t count, const uint32_t *places) {
    if (!lease->reserved)
        return fail(CXLKV_E_ARGUMENT, "these objects were found, and are published: only those of "
                    "a reservation can be");
    for (uint32_t i = 0; i < count; i++)
        if (places[i] >= lease->count || !lease->places[places[i]].held)
            return fail(CXLKV_E_RELEASED, "place %u of a reservation of %u was given back, or "
                        "there is none", places[i], lease->count);
    return 0;
}

static int64_t publish_locked(cxlkv_lease *lease, uint32_t count, const uint32_t *places,
                              const uint8_t *keys, int32_t *codes) {
    cxlkv_pool *pool = lease->pool;
    int64_t code = chosen_check(lease, count, places), bytes = 0;
    object_place *chosen = code == 0 ? malloc((count + 1ull) * sizeof(*chosen)) : NULL;
    if (code == 0 && !chosen) code = fail(ENOMEM, "no memory for a list of %u objects", count);
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        object_place *place = &lease->places[places[i]];
        chosen[i] = *place;
        codes[i] = place->published ? CXLKV_RECORD_PRESENT : 0;
        place->published = true; /* a second time in this call, too, it is there already */
    }
    sum_job job = {.pool = pool, .places = chosen, .codes = codes};
    if (code == 0) code = run_tasks(pool, count, sum_task, &job);
    if (code == 0) code = objects_publish(pool, count, keys, false, chosen, codes);
    for (uint32_t i = 0; chosen && i < count; i++) {
        if (chosen[i].published) continue;
        lease->places[places[i]].published = code > 0 && codes[i] == 0;
        bytes += code > 0 && codes[i] == 0 ? chosen[i].bytes : 0;
    }
    count_add(pool, COUNT_APPENDED_BYTES, (uint64_t)bytes);
    free(chosen);
    return code;
}

int64_t cxlkv_lease_publish(cxlkv_lease *lease, uint32_t count, const uint32_t *places,
                            const uint8_t *keys, int32_t *codes) {
    int64_t code = need(count, "places", places, "keys", keys, "codes", codes, NULL);
    if (code == 0) code = pool_enter(lease->pool);
    if (code < 0) return code;
    pthread_mutex_lock(&lease->lock);
    code = publish_locked(lease, count, places, keys, codes);
    pthread_mutex_unlock(&lease->lock);
    pool_leave(lease->pool);
    return code;
}

/* ---- the end ---- */

static void release(cxlkv_lease *lease, uint32_t count, object_place *places) {
    atomic_fetch_sub(&objects_of(lease->pool)->lent, objects_drop(lease->pool, count, places));
}

int cxlkv_lease_release(cxlkv_lease *lease, uint32_t count, const uint32_t *places) {
    int code = pool_enter_to_release(lease->pool);
    if (code < 0) return code;
    pthread_mutex_lock(&lease->lock);
    if (!places) release(lease, lease->count, lease->places);
    for (uint32_t i = 0; places && code == 0 && i < count; i++) {
        if (places[i] >= lease->count)
            code = fail(CXLKV_E_ARGUMENT, "place %u of a lease of %u", places[i], lease->count);
        else
            release(lease, 1, &lease->places[places[i]]);
    }
    pthread_mutex_unlock(&lease->lock);
    pool_leave(lease->pool);
    return code;
}

void cxlkv_lease_destroy(cxlkv_lease **at) {
    if (!*at) return;
    cxlkv_lease_release(*at, 0, NULL); /* a closed pool has given all back */
    lease_free(*at);
}
