/* Objects copied into the pool and out of it, shared out over the pool's threads. Buffers of rows
 * are encoded and decoded on their way. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "base/guard.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "objects/objects.h"
#include "objects/rows.h"
#include "objects/whole.h"
#include "sharing/this_host.h"

/* A call that reads more than STREAM_BYTES writes past the caches: that much does not fit into a
 * core's own, and a line that is written whole need not be read first. */
enum { SPAN_BYTES = 256 << 10, STREAM_BYTES = 2 << 20, BLOCK_BYTES = 16 << 10 };

/* A call that moves objects; an item is a span of one. spans[i]: items before object i. */
typedef struct move_job {
    cxlkv_pool *pool;
    const cxlkv_buffers *buffers;
    const uint8_t *keys;
    int64_t *sizes;              /* out, of a get */
    int32_t *codes;              /* out, of a put */
    bool replaces;               /* a put */
    object_place *places;
    uint32_t *spans;
    uint32_t count;
    uint64_t span_bytes;
    bool stream;
} move_job;

static uint64_t buffer_begin(const cxlkv_buffers *buffers, uint64_t object) {
    return buffers->starts ? buffers->starts[object] : object;
}

/* Of buffer i, one of the object's; NULL: bytes that stay as they are. */
static const cxlkv_row_form *form_at(const cxlkv_buffers *buffers, uint64_t object, uint64_t i) {
    uint64_t place = i - buffer_begin(buffers, object);
    if (place >= buffers->form_count || buffers->forms[place].encoding == CXLKV_ENCODING_NONE)
        return NULL;
    return &buffers->forms[place];
}

/* Bytes in the pool that fit into the buffers of an object, or come from them; INT64_MAX: more than
 * a pool has for one. */
static int64_t buffers_bytes(const cxlkv_buffers *buffers, uint64_t object) {
    int64_t sum = 0;
    for (uint64_t i = buffer_begin(buffers, object); i < buffer_begin(buffers, object + 1); i++) {
        const cxlkv_row_form *form = form_at(buffers, object, i);
        if (buffers->sizes[i] && !buffers->addresses[i])
            return need(buffers->sizes[i], "a buffer", NULL, NULL);
        if (buffers->sizes[i] > INT64_MAX / 2) return INT64_MAX;
        int64_t its = form ? cxlkv_row_form_bytes(form, buffers->sizes[i])
                           : (int64_t)buffers->sizes[i];
        if (its < 0) return its;
        if (its > INT64_MAX / 2 - sum) return INT64_MAX;
        sum += its;
    }
    return sum;
}

/* With checksums a page is one item: its CRC is of all its bytes, in order. So is one with rows, of
 * which a span would begin anywhere in its buffers. */
static int spans_make(move_job *job, uint32_t threads) {
    const cxlkv_layout *layout = &job->pool->layout;
    bool whole = layout->checksum || threads <= 1 || job->buffers->form_count;
    job->span_bytes = has_object_pages(layout) ? layout->page_tokens
                      : whole                  ? UINT64_MAX
                                               : SPAN_BYTES;
    job->spans = malloc((job->count + 1ull) * sizeof(*job->spans));
    if (!job->spans) return fail(ENOMEM, "no memory for a list of %u objects", job->count);
    uint64_t spans = 0, bytes = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        job->spans[i] = (uint32_t)spans;
        if (!job->places[i].held) continue;
        spans += (job->places[i].bytes - 1) / job->span_bytes + 1;
        bytes += job->places[i].bytes;
        if (spans > INT32_MAX) return fail(CXLKV_E_ARGUMENT, "too many bytes in one call");
    }
    job->spans[job->count] = (uint32_t)spans;
    job->stream = bytes > STREAM_BYTES;
    return 0;
}

/* Which object an item is of: the last one with as many items before it that has any. Inlined, its
 * variables would seem to be clobbered by a guard's jump. */
static __attribute__((noinline)) uint32_t object_of(const move_job *job, uint32_t item) {
    return entry_at(job->spans, sizeof(*job->spans), job->count, item);
}

/* A walk over an object's buffers, some bytes of one at a time. */
typedef struct walk {
    const cxlkv_buffers *buffers;
    uint64_t index, offset;      /* in the buffer */
} walk;

static walk walk_to(const cxlkv_buffers *buffers, uint64_t object, uint64_t offset) {
    walk w = {.buffers = buffers, .index = buffer_begin(buffers, object), .offset = offset};
    while (w.offset && w.offset >= buffers->sizes[w.index]) w.offset -= buffers->sizes[w.index++];
    return w;
}

static uint8_t *walk_on(walk *w, uint64_t most, uint64_t *bytes) {
    while (w->offset == w->buffers->sizes[w->index]) {
        w->index++;
        w->offset = 0;
    }
    uint8_t *at = (uint8_t *)(uintptr_t)w->buffers->addresses[w->index] + w->offset;
    *bytes = min_u64(most, w->buffers->sizes[w->index] - w->offset);
    w->offset += *bytes;
    return at;
}

typedef void (*move_block)(const move_job *job, uint8_t *mine, uint8_t *pool_bytes, size_t bytes);

/* Moves bytes as they are, block by block; the CRC of what lies in the pool, or goes there, behind
 * what has `crc`. */
static uint32_t move_bytes(const move_job *job, uint8_t *mine, uint8_t *pool_bytes, uint64_t bytes,
                           move_block move, bool out, uint32_t crc) {
    const bool sums = job->pool->layout.checksum;
    for (uint64_t done = 0, here; done < bytes; done += here) {
        here = sums ? min_u64(bytes - done, BLOCK_BYTES) : bytes;
        if (sums) crc = crc32c(crc, out ? pool_bytes + done : mine + done, here);
        move(job, mine + done, pool_bytes + done, here);
    }
    return crc;
}

/* In the pool, from an offset of the object on: of one in several pages a page's beginning. */
static uint8_t *span_at(const move_job *job, const object_place *place, uint64_t first) {
    if (!place->rest) return object_at(job->pool, place->page) + first;
    return object_at(job->pool, place_page(place, (uint32_t)(first / job->span_bytes)));
}

static uint32_t page_index(const move_job *job, const object_place *place, uint64_t first) {
    return place->rest ? (uint32_t)(first / job->span_bytes) : 0;
}

static uint32_t move_span(const move_job *job, uint32_t object, uint64_t first, move_block move,
                          bool out) {
    const object_place *place = &job->places[object];
    uint8_t *at = span_at(job, place, first);
    uint64_t end = place->bytes;
    if (job->span_bytes < end - first) end = first + job->span_bytes;
    walk w = walk_to(job->buffers, object, first);
    uint32_t crc = 0;
    for (uint64_t bytes; first < end; first += bytes, at += bytes) {
        uint8_t *mine = walk_on(&w, end - first, &bytes);
        crc = move_bytes(job, mine, at, bytes, move, out, crc);
    }
    return crc;
}

/* The same of a buffer's rows, piece by piece; *at moves on in the pool. Into it they go by way of
 * this core's cache: so every line of the pool is written once, whole. */
static uint32_t move_rows(const move_job *job, const cxlkv_row_form *form, uint8_t *rows,
                          uint64_t count, uint8_t **at, move_block move, bool out, uint32_t crc) {
    _Alignas(LINE_BYTES) uint8_t piece[OBJECT_PIECE_BYTES_MAX];
    for (uint64_t done = 0; done < count; done += OBJECT_PIECE_ROWS) {
        uint32_t here = (uint32_t)min_u64(OBJECT_PIECE_ROWS, count - done);
        uint8_t *first = rows + done * row_form_row_bytes(form);
        size_t bytes = object_piece_bytes(form, here);
        if (!out) object_piece_encode(form, first, here, piece);
        if (job->pool->layout.checksum) crc = crc32c(crc, out ? *at : piece, bytes);
        if (out) object_piece_decode(form, *at, here, first);
        else move(job, piece, *at, bytes);
        *at += bytes;
    }
    return crc;
}

static uint32_t move_buffers(const move_job *job, uint32_t object, move_block move, bool out) {
    const cxlkv_buffers *buffers = job->buffers;
    uint8_t *at = object_at(job->pool, job->places[object].page);
    uint8_t *end = at + job->places[object].bytes;
    uint32_t crc = 0;
    for (uint64_t i = buffer_begin(buffers, object); i < buffer_begin(buffers, object + 1ull);
         i++) {
        const cxlkv_row_form *form = form_at(buffers, object, i);
        uint8_t *mine = (uint8_t *)(uintptr_t)buffers->addresses[i];
        if (form) {
            crc = move_rows(job, form, mine, buffers->sizes[i] / row_form_row_bytes(form), &at,
                            move, out, crc);
        } else {
            uint64_t bytes = min_u64(buffers->sizes[i], (uint64_t)(end - at));
            crc = move_bytes(job, mine, at, bytes, move, out, crc);
            at += bytes;
        }
    }
    return crc;
}

static uint32_t move_item(const move_job *job, uint32_t object, uint64_t first, move_block move,
                          bool out) {
    return job->buffers->form_count ? move_buffers(job, object, move, out)
                                    : move_span(job, object, first, move, out);
}

static void block_out(const move_job *job, uint8_t *mine, uint8_t *pool_bytes, size_t bytes) {
    copy_past(mine, pool_bytes, bytes, job->stream);
}

static bool get_span(const move_job *job, uint32_t object, uint64_t first) {
    uint32_t wanted = 0;
    if (!job->pool->layout.checksum) {
        move_item(job, object, first, block_out, true);
        return true;
    }
    const object_place *place = &job->places[object];
    return object_crc(job->pool, place, page_index(job, place, first), &wanted) &&
           move_item(job, object, first, block_out, true) == wanted;
}

/* The beginning of what this thread reads next, if all are as fast: it may lie anywhere. */
static __attribute__((noinline)) void expect_item(const move_job *job, uint32_t item) {
    enum { LINES = 8 };
    if (item >= job->spans[job->count]) return;
    uint32_t object = object_of(job, item);
    const uint8_t *at =
        span_at(job, &job->places[object], (item - job->spans[object]) * job->span_bytes);
    for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * LINE_BYTES);
}

static int get_task(void *context, uint32_t item) {
    const move_job *job = context;
    const uint32_t object = object_of(job, item);
    const uint64_t first = (item - job->spans[object]) * job->span_bytes;
    expect_item(job, item + job->pool->threads.count);
    int code = GUARDED(get_span(job, object, first) ? 0 : -CXLKV_E_CORRUPT,
                       poison_error(job->pool, &fault));
    if (job->stream) store_fence();
    if (code == -EFAULT) return -EFAULT; /* the caller's own memory */
    if (code < 0) object_set_damaged(job->pool, &job->places[object]);
    return 0;
}

/* Rows are encoded by pieces, which would lie in two pages. */
static int forms_check(const move_job *job, uint32_t object, uint64_t bytes) {
    if (!job->buffers->form_count || bytes <= job->pool->layout.page_tokens) return 0;
    return fail(CXLKV_E_ARGUMENT, "object %u of %u is %lu bytes with encoded rows: these go into "
                "objects of one slot, %u bytes. Put smaller ones, or bytes without forms",
                object, job->count, bytes, job->pool->layout.page_tokens);
}

static int targets_check(const move_job *job) {
    for (uint32_t i = 0; i < job->count; i++) {
        int64_t room = buffers_bytes(job->buffers, i);
        if (room < 0) return (int)room;
        if (!job->places[i].held) continue;
        if (room < job->places[i].bytes)
            return fail(CXLKV_E_ARGUMENT, "object %u of %u is %u bytes, its buffers hold %ld. "
                        "Nothing was copied", i, job->count, job->places[i].bytes, room);
        if (job->buffers->form_count && room != job->places[i].bytes)
            return fail(CXLKV_E_ARGUMENT, "object %u of %u is %u bytes, its buffers and their "
                        "forms make %ld. Nothing was copied", i, job->count,
                        job->places[i].bytes, room);
        int code = forms_check(job, i, job->places[i].bytes);
        if (code < 0) return code;
    }
    return 0;
}

/* Nobody takes for an object what is none. */
static int clear_task(void *context, uint32_t object) {
    const move_job *job = context;
    const cxlkv_buffers *to = job->buffers;
    if (job->places[object].code != CXLKV_OBJECT_DAMAGED) return 0;
    for (uint64_t i = buffer_begin(to, object); i < buffer_begin(to, object + 1ull); i++)
        memset((void *)(uintptr_t)to->addresses[i], 0, to->sizes[i]);
    return 0;
}

static int64_t get_held(move_job *job) {
    int64_t code = targets_check(job), moved = 0;
    bool damaged = false;
    if (code == 0) code = spans_make(job, job->pool->threads.count);
    if (code == 0) code = run_tasks(job->pool, job->spans[job->count], get_task, job);
    bool copied = code == 0;
    code = peers_verify(job->pool, code);
    for (uint32_t i = 0; i < job->count; i++)
        damaged |= job->places[i].code == CXLKV_OBJECT_DAMAGED;
    if (copied && damaged) {
        int cleared = run_tasks(job->pool, job->count, clear_task, job);
        if (code == 0) code = cleared;
    }
    for (uint32_t i = 0; code == 0 && i < job->count; i++) {
        job->sizes[i] = object_size(&job->places[i]);
        moved += job->sizes[i] > 0 ? job->sizes[i] : 0;
    }
    free(job->spans);
    if (code == 0) count_add(job->pool, COUNT_FETCHED_BYTES, (uint64_t)moved);
    return code < 0 ? code : moved;
}

static int64_t get_places(move_job *job) {
    int64_t code = objects_hold(job->pool, job->count, job->keys, job->places);
    if (code < 0) return code;
    code = get_held(job);
    objects_drop(job->pool, job->count, job->places);
    return code;
}

/* With a place for each object. results: where each is told how it went. */
static int64_t move_objects(move_job job, const void *results, int64_t (*move)(move_job *job)) {
    const cxlkv_buffers *b = job.buffers;
    int64_t code = objects_check(job.pool);
    if (code == 0) code = need(job.count, "keys", job.keys, "results", results, NULL);
    if (code == 0)
        code = need(buffer_begin(b, job.count), "addresses", b->addresses, "sizes", b->sizes, NULL);
    if (code == 0) code = need(b->form_count, "forms", b->forms, NULL);
    if (code < 0) return code;
    job.places = calloc(job.count + 1ull, sizeof(*job.places));
    if (!job.places) return fail(ENOMEM, "no memory for a list of %u objects", job.count);
    code = IN_POOL(job.pool, move(&job));
    places_free(job.count, job.places);
    free(job.places);
    return code;
}

int64_t cxlkv_objects_get(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                          const cxlkv_buffers *to, int64_t *sizes) {
    if (!to) return objects_sizes(pool, count, keys, sizes);
    return move_objects((move_job){.pool = pool, .buffers = to, .keys = keys, .count = count,
                                   .sizes = sizes}, sizes, get_places);
}

/* ---- into the pool ---- */

/* Past the caches; what cannot go so is written back where other hosts do not see our caches. */
static void block_in(const move_job *job, uint8_t *mine, uint8_t *pool_bytes, size_t bytes) {
    bool streams = (uintptr_t)pool_bytes % LINE_BYTES == 0;
    copy_past(pool_bytes, mine, bytes, streams);
    if (job->pool->mode != VISIBILITY_COHERENT && !(streams && kernels_current()->streams))
        flush_write_back(FLUSH_PUBLISH_HEADER, pool_bytes, bytes); /* V1 */
}

static void put_span(const move_job *job, uint32_t object, uint64_t first) {
    const object_place *place = &job->places[object];
    uint32_t page = place_page(place, page_index(job, place, first));
    uint32_t crc = move_item(job, object, first, block_in, false);
    if (job->pool->layout.checksum) *checksum_of(job->pool, page, 0, 0, PIECE_KEYS) = crc;
}

/* Even of a page that is given up halfway the stores are fenced: its next owner may be another
 * process. */
static int put_task(void *context, uint32_t item) {
    const move_job *job = context;
    const uint32_t object = object_of(job, item);
    const uint64_t first = (item - job->spans[object]) * job->span_bytes;
    int code = GUARDED((put_span(job, object, first), 0), poison_error(job->pool, &fault));
    store_fence(); /* of this thread's own non-temporal stores */
    return code;
}

static int sources_check(move_job *job) {
    for (uint32_t i = 0; i < job->count; i++) {
        int64_t bytes = buffers_bytes(job->buffers, i);
        if (bytes < 0) return (int)bytes;
        uint64_t most = object_bytes_max(&job->pool->layout);
        if (bytes == 0 || (uint64_t)bytes > most)
            return fail(CXLKV_E_ARGUMENT, "object %u of %u is %ld bytes: this pool stores objects "
                        "of 1 to %lu bytes. Nothing was put", i, job->count, bytes, most);
        int code = forms_check(job, i, (uint64_t)bytes);
        if (code < 0) return code;
        job->places[i] = (object_place){.page = NO_PAGE, .bytes = (uint32_t)bytes};
    }
    return 0;
}

static int64_t put_places(move_job *job) {
    cxlkv_pool *pool = job->pool;
    int64_t code = sources_check(job), bytes = 0;
    if (code == 0) code = objects_take(pool, job->count, job->keys, job->replaces, job->places,
                                       job->codes);
    if (code < 0) return code;
    code = spans_make(job, pool->threads.count);
    if (code == 0) code = run_tasks(pool, job->spans[job->count], put_task, job);
    free(job->spans);
    if (code == 0)
        code = objects_publish(pool, job->count, job->keys, job->replaces, job->places, job->codes);
    for (uint32_t i = 0; code > 0 && i < job->count; i++)
        bytes += job->codes[i] == 0 ? job->places[i].bytes : 0;
    count_add(pool, COUNT_APPENDED_BYTES, (uint64_t)bytes);
    objects_drop(pool, job->count, job->places);
    return code;
}

int64_t cxlkv_objects_put(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                          const cxlkv_buffers *from, uint32_t replaces, int32_t *codes) {
    return move_objects((move_job){.pool = pool, .buffers = from, .keys = keys, .count = count,
                                   .replaces = replaces != 0, .codes = codes}, codes, put_places);
}

/* ---- some bytes of objects, wherever they lie in them ---- */

typedef struct range_job {
    cxlkv_pool *pool;
    const object_place *places;
    const cxlkv_range *ranges;
    uint8_t *to;
    int64_t *sizes;
} range_job;

static void range_out(const cxlkv_pool *pool, const object_place *place, const cxlkv_range *range,
                      uint8_t *to) {
    uint64_t page_bytes = place->rest ? pool->layout.page_tokens : UINT64_MAX;
    for (uint64_t done = 0, here; done < range->bytes; done += here) {
        uint64_t at = range->offset + done, in_page = at % page_bytes;
        here = min_u64(range->bytes - done, page_bytes - in_page);
        memcpy(to + done, object_at(pool, place_page(place, (uint32_t)(at / page_bytes))) + in_page,
               here);
    }
}

static int range_task(void *context, uint32_t item) {
    const range_job *job = context;
    const cxlkv_range *range = &job->ranges[item];
    const object_place *place = &job->places[range->object];
    job->sizes[item] = place->code;
    if (place->code < 0) return 0;
    int code = GUARDED((range_out(job->pool, place, range, job->to + range->target), 0),
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
    int64_t code = need(count, "keys", keys, NULL);
    if (code == 0) code = need(range_count, "ranges", ranges, "sizes", sizes, NULL);
    if (code == 0) code = need(to_bytes, "to", to, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    code = objects_check(pool);
    object_place *places = code == 0 ? calloc(count + 1ull, sizeof(*places)) : NULL;
    if (code == 0 && !places) code = fail(ENOMEM, "no memory for a list of %u objects", count);
    if (code == 0) code = objects_hold(pool, count, keys, places);
    if (code == 0) {
        range_job job = {.pool = pool, .places = places, .ranges = ranges, .to = to,
                         .sizes = sizes};
        code = ranges_held(&job, count, range_count, places, to_bytes);
        objects_drop(pool, count, places);
        places_free(count, places);
    }
    free(places);
    pool_leave(pool);
    return code;
}
