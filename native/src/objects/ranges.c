/* Some bytes of objects, wherever they lie in them. */
#include <stdlib.h>
#include <string.h>

#include "objects/objects.h"
#include "pool/peers.h"

typedef struct range_job {
    cxlkv_pool *pool;
    const object_place *places;
    const cxlkv_range *ranges;
    uint8_t *to;
    int64_t *sizes;
} range_job;

static int range_task(void *context, uint32_t item) {
    const range_job *job = context;
    const cxlkv_range *range = &job->ranges[item];
    const object_place *place = &job->places[range->object];
    job->sizes[item] = place->code;
    if (place->code < 0) return 0;
    const uint8_t *from = object_at(job->pool, place->page) + range->offset;
    int code = GUARDED((memcpy(job->to + range->target, from, range->bytes), 0),
                       poison_error(job->pool, &fault));
    if (code == -EFAULT) return -EFAULT;
    if (code < 0) memset(job->to + range->target, 0, range->bytes);
    job->sizes[item] = code < 0 ? CXLKV_OBJECT_DAMAGED : (int64_t)range->bytes;
    return 0;
}

static int ranges_check(const range_job *job, uint32_t count, uint32_t range_count,
                        uint64_t to_bytes) {
    for (uint32_t i = 0; i < range_count; i++) {
        const cxlkv_range *r = &job->ranges[i];
        if (r->object >= count)
            return fail(CXLKV_E_ARGUMENT, "range %u is of object %lu, there are %u keys", i,
                        r->object, count);
        if (r->target > to_bytes || r->bytes > to_bytes - r->target)
            return fail(CXLKV_E_ARGUMENT, "range %u: %lu bytes at %lu of a buffer of %lu", i,
                        r->bytes, r->target, to_bytes);
        const object_place *place = &job->places[r->object];
        if (place->code == 0 &&
            (r->offset > place->bytes || r->bytes > place->bytes - r->offset))
            return fail(CXLKV_E_ARGUMENT, "range %u: %lu bytes at %lu of an object of %u", i,
                        r->bytes, r->offset, place->bytes);
    }
    return 0;
}

static int64_t ranges_held(range_job *job, uint32_t count, uint32_t range_count,
                           object_place *places, uint64_t to_bytes) {
    int64_t code = ranges_check(job, count, range_count, to_bytes), moved = 0;
    if (code == 0) code = objects_verify(job->pool, count, places);
    if (code == 0) code = run_tasks(job->pool, range_count, range_task, job);
    code = peers_verify(job->pool, code);
    for (uint32_t i = 0; code == 0 && i < range_count; i++)
        moved += job->sizes[i] > 0 ? job->sizes[i] : 0;
    if (code == 0) count_add(job->pool, COUNT_FETCHED_BYTES, (uint64_t)moved);
    return code < 0 ? code : moved;
}

int64_t cxlkv_objects_ranges(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                             uint32_t range_count, const cxlkv_range *ranges, uint8_t *to,
                             uint64_t to_bytes, int64_t *sizes) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    code = objects_check(pool);
    object_place *places = code == 0 ? malloc((count + 1ull) * sizeof(*places)) : NULL;
    if (code == 0 && !places) code = fail(ENOMEM, "no memory for a list of %u objects", count);
    if (code == 0) code = objects_hold(pool, count, keys, places);
    if (code == 0) {
        range_job job = {.pool = pool, .places = places, .ranges = ranges, .to = to,
                         .sizes = sizes};
        code = ranges_held(&job, count, range_count, places, to_bytes);
        objects_drop(pool, count, places);
    }
    free(places);
    pool_leave(pool);
    return code;
}
