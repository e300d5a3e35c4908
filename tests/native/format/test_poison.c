/* Goal: memory of a pool that raises SIGBUS, wherever it lies, ends no process: each call that
 * meets it says so, or does without. Method: one page of the machine after the other, of all but
 * the bulk of the extents, is lost to all who have the pool mapped; then every call is made, in an
 * order that begins elsewhere each time, and the pool is closed. Debug builds go over the
 * allocator's books after each. A child for each page: the test can say who died, over what.
 *
 * Devices do more than that: a line reads as zeros, as ones, or as it was before (a store that was
 * dropped, or that a host's power took with its caches). Then no call may give wrong bytes, for the
 * pools have checksums: an error, a page less, or what was written. One line after the other of all
 * that a pool has written, under the same calls; then a newcomer reads all, repairs, reads again.
 * Then the same for whole areas, an extent, the device, and for any half of the lines of all. */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#include "coherence/membership.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/rebuild.h"
#include "object_tests.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/peers.h"
#include "sharing/claims_lock.h"
#include "sharing/extent_owners.h"
#include "sharing/extents.h"
#include "sharing/log_reader.h"

enum { MACHINE_PAGE = 4096, TOKENS = 3 * TEST_PAGE_TOKENS + 1, KEYS = 3, OBJECTS = 6, ROOM = 3000,
       LOOSE = 2 };

/* ---- loss ---- */

static int nothing_fd = -1;      /* a file of no bytes: a load from its mapping raises SIGBUS */
static uint64_t lost_offset, lost_bytes = MACHINE_PAGE;
static bool lost_when_mapped;    /* for what comes: the region is mapped with the page lost */

static void lose(uint8_t *base) {
    CHECK(mmap(base + lost_offset, lost_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               nothing_fd, 0) == base + lost_offset);
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    uint8_t magic[8] = "";
    void *made = __real_mmap(at, bytes, protection, flags, fd, offset);
    bool region = made != MAP_FAILED && fd >= 0 && pread(fd, magic, 8, 0) == 8 &&
                  memcmp(magic, "CXLKVPOL", 8) == 0;
    if (region && lost_when_mapped && lost_offset < bytes)
        CHECK(__real_mmap((uint8_t *)made + lost_offset, lost_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED, nothing_fd, 0) != MAP_FAILED);
    return made;
}

/* ---- a pool with something of everything ---- */

typedef struct scene {
    const char *path;
    bool shared, objects;
    cxlkv_pool *pool, *other;    /* hosts 0 and 1; not shared: another handle of the same host */
    cxlkv_sequence *whole, *open, *spare, *hit;
    cxlkv_lease *lease, *reserved;
    uint8_t *reserved_at;
    uint8_t hashes[KEYS * 16], handle[1024];
    uint64_t handle_bytes, marks[TOKENS], seed;
    uint32_t loose[LOOSE];
    bool reads_unseen;           /* what changes once it was verified here is not looked at again */
} scene;

static const cxlkv_host hosts_of[2] = {{.number = 0, .lease_s = 2}, {.number = 1, .lease_s = 2}};

/* What the pool was before anything was written to it. */
static uint8_t *old_bytes;

static const char **at_work;     /* in memory that parent and child share: what it is at */

static const cxlkv_host *host_of(const scene *s, int number) {
    return s->shared ? &hosts_of[number] : NULL;
}

static void begin_sequences(scene *s) {
    test_hashes(s->hashes, 3, KEYS);
    s->whole = test_written(s->pool, s->marks, 1, TOKENS);
    s->open = test_sequence(s->pool, s->marks, 2);
    s->spare = test_sequence(s->pool, s->marks, TEST_PAGE_TOKENS);
    CHECK(cxlkv_publish(s->whole, KEYS, TEST_PAGE_TOKENS, s->hashes, 0) == KEYS);
    int64_t size = cxlkv_sequence_export(s->whole, s->handle, sizeof(s->handle));
    CHECK(size > 0);
    s->handle_bytes = (uint64_t)size;
    CHECK(test_match(s->other, KEYS, s->hashes, 100, &s->hit) == KEYS * TEST_PAGE_TOKENS);
    CHECK(cxlkv_pages_alloc(s->pool, LOOSE, s->loose) == LOOSE);
}

static void begin_objects(scene *s) {
    const uint64_t sizes[1] = {ROOM};
    uint64_t address;
    int64_t size;
    const uint8_t *at;
    for (uint64_t name = 0; name < OBJECTS; name++)
        CHECK(put(s->pool, name, name, ROOM, &s->seed) == 1);
    s->lease = lease_of(s->other, 1, &size, &at);
    CHECK(size == ROOM);
    CHECK(cxlkv_lease_reserve(s->pool, 1, sizes, &address, &s->reserved) == 1);
    s->reserved_at = (uint8_t *)(uintptr_t)address;
    fill(s->reserved_at, 77, ROOM);
}

static void make(scene *s) {
    cxlkv_layout layout = s->objects ? object_layout(ROOM, true) : test_layout();
    cxlkv_sharing sharing = {.kind = s->shared ? CXLKV_SHARING_SOFTWARE : CXLKV_SHARING_HOST,
                             .hosts = s->shared ? 2 : 1, .log_records = s->shared ? 64 : 0};
    CHECK(cxlkv_pool_create(s->path, &layout, &sharing, (2 << 20) + (600 << 10), 0,
                            host_of(s, 0), 0, &s->pool) == 0);
    CHECK(cxlkv_pool_open(s->path, host_of(s, 1), &s->other) == 0);
}

static void begin_things(scene *s) {
    if (s->objects) begin_objects(s);
    else begin_sequences(s);
}

static void begin(scene *s) {
    *at_work = "begin";
    make(s);
    begin_things(s);
}

/* ---- the calls ---- */

/* What a caller may be told; never that the memory was its own. */
static int64_t told(int64_t code) {
    static const int codes[] = {CXLKV_E_POISON, CXLKV_E_CORRUPT, CXLKV_E_POOL_FULL, CXLKV_E_STALE,
                                CXLKV_E_RELEASED, CXLKV_E_HOST, CXLKV_E_UNEVEN, CXLKV_E_ORDER,
                                CXLKV_E_FENCED, CXLKV_E_TIMEOUT, CXLKV_E_CLOSED};
    bool known = code >= 0;
    for (size_t i = 0; i < sizeof(codes) / sizeof(*codes); i++) known |= code == -codes[i];
    if (!known) fprintf(stderr, "code %ld\n", (long)code);
    CHECK(known);
    return code;
}

/* The superblock says to who comes now that there is none, or another one. */
static bool is_no_pool(int64_t code) {
    return code == -CXLKV_E_NOT_A_POOL || code == -CXLKV_E_VERSION || code == -CXLKV_E_GEOMETRY ||
           code == -CXLKV_E_TRUNCATED;
}

static cxlkv_pool *either(scene *s) { return random_below(&s->seed, 2) ? s->pool : s->other; }

static void call_append(scene *s) {
    told(test_append_all(s->open, s->marks, TEST_PAGE_TOKENS));
}

static void call_append_more(scene *s) {
    cxlkv_sequence *made;
    if (told(cxlkv_sequence_create(either(s), &made)) < 0) return;
    told(test_append_all(made, s->marks, TOKENS));
    cxlkv_sequence_destroy(&made);
}

static void call_verify(scene *s) { told(test_verify_all(s->whole, s->marks, TOKENS)); }

static void call_verify_hit(scene *s) {
    told(test_verify_all(s->hit, s->marks, KEYS * TEST_PAGE_TOKENS));
}

static void call_fork(scene *s) {
    cxlkv_sequence *child;
    if (told(cxlkv_sequence_fork(s->whole, &child)) < 0) return;
    told(cxlkv_sequence_truncate(child, TEST_PAGE_TOKENS + 1));
    cxlkv_sequence_destroy(&child);
}

static void call_truncate(scene *s) { told(cxlkv_sequence_truncate(s->spare, 1)); }

static void call_release(scene *s) { told(cxlkv_sequence_release(s->spare)); }

static void call_export(scene *s) {
    uint8_t bytes[1024];
    told(cxlkv_sequence_export(s->open, bytes, sizeof(bytes)));
}

static void call_adopt(scene *s) {
    cxlkv_sequence *made;
    if (told(cxlkv_sequence_adopt(either(s), s->handle, s->handle_bytes, &made)) < 0) return;
    told(test_verify_all(made, s->marks, TOKENS));
    cxlkv_sequence_destroy(&made);
}

static void call_publish(scene *s) {
    uint8_t hashes[16], key[16];
    const int64_t id = 0;
    test_hashes(hashes, 9, 1);
    if (cxlkv_sequence_tokens(s->open, CXLKV_LAYER_LAST) >= TEST_PAGE_TOKENS)
        told(cxlkv_publish(s->open, 1, TEST_PAGE_TOKENS, hashes, 0));
    CHECK(cxlkv_page_keys(&id, 1, 0, CXLKV_KEYS_TAIL, s->hashes + (KEYS - 1) * 16, key) == 1);
    told(cxlkv_publish_tail(s->whole, TOKENS, s->hashes + (KEYS - 1) * 16, key));
}

static void call_match(scene *s) {
    const int64_t ids[TOKENS] = {0};
    const cxlkv_match_args args = {.hashes = s->hashes, .count = KEYS, .lease_s = 100, .ids = ids,
                                   .id_count = TOKENS, .root = s->hashes};
    cxlkv_sequence *hit;
    int64_t tokens = told(cxlkv_match(either(s), &args, &hit));
    if (tokens < 0) return;
    told(test_verify_all(hit, s->marks, (uint32_t)tokens));
    cxlkv_sequence_destroy(&hit);
}

static void call_records(scene *s) {
    enum { BYTES = 1 << 14 };
    static uint8_t bytes[KEYS * BYTES];
    uint8_t names[KEYS * 16];
    uint32_t pages[KEYS];
    uint64_t generations[KEYS];
    int32_t codes[KEYS];
    CHECK(record_packed_bytes(s->pool) <= BYTES);
    CHECK(cxlkv_names(s->pool, KEYS, s->hashes, 1, names) == 0);
    told(cxlkv_find_pages(s->pool, KEYS, names, pages, generations));
    if (told(cxlkv_records_read(s->pool, KEYS, pages, generations, bytes, codes)) < 0) return;
    told(cxlkv_forget_pages(s->pool, KEYS, pages, generations, 0, codes));
    told(cxlkv_records_write(s->pool, KEYS, bytes, NULL, codes));
}

static void call_loose(scene *s) {
    uint32_t pages[LOOSE];
    if (told(cxlkv_pages_free(s->pool, LOOSE, s->loose)) < 0) return;
    if (told(cxlkv_pages_alloc(s->pool, LOOSE, pages)) < 0) return;
    memcpy(s->loose, pages, sizeof(pages));
}

static void call_keys(scene *s) {
    cxlkv_scrubbed scrubbed;
    static uint8_t flags[1 << 16];
    told(cxlkv_mark(either(s), KEYS, s->hashes, CXLKV_MARK_PIN, 1));
    told(cxlkv_mark(either(s), KEYS, s->hashes, CXLKV_MARK_PRIORITY_AT_LEAST, CXLKV_PRIORITY_MAX));
    told(cxlkv_evictable(s->pool, flags, sizeof(flags)));
    told(cxlkv_forget(either(s), 1, s->hashes, &scrubbed));
    told(cxlkv_forget(either(s), 1, s->hashes + 16, NULL));
}

static void call_near(scene *s) {
    int64_t units[2] = {0, 1};
    int32_t codes[2];
    told(cxlkv_local_make(s->pool, 1 << 20));
    told(cxlkv_local_move(s->pool, 0, 2, units, NULL, codes));
    told(cxlkv_local_make(s->pool, 0));
}

static void call_objects(scene *s) {
    uint64_t name = random_below(&s->seed, OBJECTS);
    int64_t size = get(either(s), name, name, ROOM, &s->seed);
    if (size < 0 && size != CXLKV_OBJECT_ABSENT && size != CXLKV_OBJECT_DAMAGED) told(size);
    told(cxlkv_objects_get(either(s), 1, key_of(name).bytes, NULL, &size));
}

static void call_ranges(scene *s) {
    const cxlkv_range range = {.bytes = 100};
    const object_key key = key_of(4);
    uint8_t out[128];
    int64_t size;
    if (told(cxlkv_objects_ranges(either(s), 1, key.bytes, 1, &range, out, sizeof(out), &size)) > 0)
        CHECK(size < 0 || !s->reads_unseen || is_filled(out, 4, 96));
}

static void call_put(scene *s) {
    told(put(s->pool, 100, 100, ROOM, &s->seed));
    told(put(s->other, 101, 101, ROOM, &s->seed));
}

static void call_lease(scene *s) {
    uint64_t address;
    int64_t size;
    cxlkv_lease *lease;
    if (told(cxlkv_lease_take(either(s), 1, key_of(2).bytes, &address, &size, &lease)) < 0) return;
    told(cxlkv_lease_release(lease, 0, NULL));
    cxlkv_lease_destroy(&lease);
}

static void call_reserved(scene *s) {
    const uint32_t place = 0;
    int32_t code;
    told(cxlkv_lease_publish(s->reserved, 1, &place, key_of(200).bytes, &code));
    told(cxlkv_lease_release(s->reserved, 0, NULL));
}

static void call_lease_end(scene *s) { told(cxlkv_lease_release(s->lease, 0, NULL)); }

static void call_forget_objects(scene *s) {
    cxlkv_scrubbed scrubbed;
    told(cxlkv_forget(either(s), 1, key_of(5).bytes, &scrubbed));
    told(forget(either(s), 3));
}

/* A host whose name is gone is told so. */
static void look_at_stats(cxlkv_pool *pool) {
    cxlkv_stats stats;
    if (told(cxlkv_pool_stats(pool, &stats)) == 0) test_stats(pool);
}

static void call_look(scene *s) {
    cxlkv_overview overview;
    cxlkv_process processes[8];
    cxlkv_host_row rows[2];
    cxlkv_placed placed;
    look_at_stats(s->pool);
    look_at_stats(s->other);
    told(cxlkv_inspect(s->pool, NULL, &overview, processes, 8));
    int64_t seen = cxlkv_inspect(NULL, s->path, &overview, processes, 8);
    if (!is_no_pool(seen)) told(seen);
    if (s->shared) told(cxlkv_pool_hosts(either(s), rows, 2));
    int code = cxlkv_pool_placed(s->pool, 100, &placed);
    if (code != -ENOTSUP) told(code);
}

static void call_check(scene *s) {
    static char text[1 << 16];
    uint32_t flags = random_below(&s->seed, 4);
    told(cxlkv_pool_check(either(s), flags, text, sizeof(text)));
}

static void call_hotness(scene *s) {
    cxlkv_published rows[8];
    uint64_t clock;
    told(cxlkv_pool_published(s->pool, rows, 8, &clock));
}

static void deal(cxlkv_pool *pool, void (*with)(cxlkv_pool *pool, hosts *turn)) {
    hosts turn;
    if (told(claim_lock(pool, &turn)) < 0) return;
    with(pool, &turn);
    claim_unlock(pool);
}

static void refresh(cxlkv_pool *pool, hosts *turn) { told(extents_refresh(pool, turn)); }

static void call_beat(scene *s) {
    if (!s->shared) return;
    if (told(host_lock(s->pool)) < 0) return;
    peers_beat(s->pool, true);
    peers_follow(s->pool);
    withdrawn_look(s->pool);
    uint64_t free_pages = s->pool->host->free_pages;
    host_unlock(s->pool);
    static uint32_t pages[1 << 16];
    told(cxlkv_pages_want(s->pool, 1, random_below(&s->seed, 2)));
    told(cxlkv_extents_due(s->pool, 0));
    told(cxlkv_pages_wanted(s->pool, pages, 1 << 16));
    deal(s->pool, extents_give);
    extents_take(s->pool, free_pages + 1);
}

/* A process of this host dies inside the lock: the next one derives everything anew. */
static void call_rebuild(scene *s) {
    CHECK(pthread_mutex_lock(&s->pool->host->mutex) == 0);
    if (s->shared) peers_sync(s->pool);
    host_rebuild(s->pool);
    if (s->shared) {
        hosts_recover(&s->pool->hosts);
        borrow_recover(s->pool);
    }
    pthread_mutex_unlock(&s->pool->host->mutex);
    if (s->shared) deal(s->pool, refresh);
}

static void call_os_fork(scene *s) {
    pid_t child = test_fork();
    if (child == 0) {
        look_at_stats(s->pool);
        _exit(0);
    }
    test_ended(child, 0);
}

typedef struct call {
    const char *name;
    void (*run)(scene *s);
} call;

#define CALL(name) {#name, call_##name}
static const call sequence_calls[] = {
    CALL(append), CALL(append_more), CALL(verify), CALL(verify_hit), CALL(fork), CALL(truncate),
    CALL(export), CALL(adopt), CALL(publish), CALL(match), CALL(records), CALL(loose), CALL(near),
    CALL(look), CALL(check), CALL(hotness), CALL(beat), CALL(rebuild), CALL(os_fork), CALL(keys),
    CALL(release),
};
static const call object_calls[] = {
    CALL(objects), CALL(ranges), CALL(put), CALL(lease), CALL(reserved), CALL(lease_end),
    CALL(look), CALL(check), CALL(beat), CALL(rebuild), CALL(os_fork), CALL(forget_objects),
};
enum { SEQUENCE_CALLS = sizeof(sequence_calls) / sizeof(call),
       OBJECT_CALLS = sizeof(object_calls) / sizeof(call) };

static void end(scene *s) {
    cxlkv_sequence_destroy(&s->whole);
    cxlkv_sequence_destroy(&s->open);
    cxlkv_sequence_destroy(&s->spare);
    cxlkv_sequence_destroy(&s->hit);
    cxlkv_lease_destroy(&s->lease);
    cxlkv_lease_destroy(&s->reserved);
    look_at_stats(s->pool);
    look_at_stats(s->other);
    CHECK(cxlkv_pool_close(s->other, 0) == 0);
    cxlkv_pool_destroy(&s->other);
    cxlkv_pool_destroy(&s->pool);
}

static void make_calls(scene *s, uint32_t first) {
    const call *calls = s->objects ? object_calls : sequence_calls;
    uint32_t count = s->objects ? OBJECT_CALLS : SEQUENCE_CALLS;
    for (uint32_t i = 0; i < count; i++) {
        *at_work = calls[(first + i) % count].name;
        calls[(first + i) % count].run(s);
    }
    *at_work = "end";
    end(s);
}

/* ---- a child for each page ---- */

static void run_calls(scene *s, uint32_t first) {
    begin(s);
    lose(s->pool->region.base);
    lose(s->other->region.base);
    make_calls(s, first);
}

/* A pool that is whole is opened by somebody to whom the page is lost. */
static void run_open(scene *s, uint32_t first) {
    cxlkv_pool *pool;
    (void)first;
    begin(s);
    end(s);
    lost_when_mapped = true;
    *at_work = "open";
    if (told(cxlkv_pool_open(s->path, host_of(s, 1), &pool)) == 0) {
        s->pool = s->other = pool;
        *at_work = "check";
        call_check(s);
        call_look(s);
        *at_work = "close";
        cxlkv_pool_destroy(&pool);
    }
    lost_when_mapped = false;
}

/* ---- lines that say something else ---- */

enum change { ZEROS, ONES, OLD, CHANGES };
static enum change change;

static uint64_t region_bytes(const scene *s) { return s->pool->geometry.region_bytes; }

static uint64_t half;            /* 0: all lines of the range are changed; else any half of them */

static void change_lines(const scene *s) {
    uint64_t seed = half;
    for (uint64_t at = lost_offset; at < lost_offset + lost_bytes; at += LINE_BYTES) {
        uint8_t line[LINE_BYTES];
        if (half && random_below(&seed, 2)) continue;
        if (change == OLD) memcpy(line, old_bytes + at, LINE_BYTES);
        else memset(line, change == ONES ? 0xff : 0, LINE_BYTES);
        CHECK(pwrite(s->pool->region.fd, line, LINE_BYTES, (off_t)at) == LINE_BYTES);
    }
}

/* By one who comes now, in each way; missing and damaged are right answers, other bytes are not. */
static void read_all(scene *s) {
    s->reads_unseen = true;
    if (!s->objects) call_match(s);
    for (uint64_t name = 0; s->objects && name < OBJECTS; name++) {
        const object_key key = key_of(name);
        uint64_t address;
        int64_t size;
        cxlkv_lease *lease;
        if (told(cxlkv_lease_take(s->pool, 1, key.bytes, &address, &size, &lease)) < 0) continue;
        CHECK(size < 0 || (size == ROOM && is_filled((const uint8_t *)address, name, ROOM)));
        cxlkv_lease_destroy(&lease);
        call_objects(s);
        call_ranges(s);
    }
}

static void newcomer(scene *s) {
    static char text[1 << 16];
    cxlkv_pool *pool;
    *at_work = "a newcomer";
    int64_t code = cxlkv_pool_open(s->path, host_of(s, 0), &pool);
    if (is_no_pool(code) || told(code) < 0) return;
    s->pool = s->other = pool;
    read_all(s);
    *at_work = "a repair";
    told(cxlkv_pool_check(pool, CXLKV_CHECK_DEEP | CXLKV_CHECK_REPAIR, text, sizeof(text)));
    read_all(s);
    cxlkv_pool_destroy(&pool);
}

static void run_changed(scene *s, uint32_t first) {
    begin(s);
    change_lines(s);
    make_calls(s, first);
    newcomer(s);
}

/* What a host owns is forgotten while it writes there: its mapping is read-only from then on. */
static void run_claim_lost(scene *s, uint32_t first) {
    cxlkv_sequence *half_written = NULL;
    (void)first;
    begin(s);
    if (!s->objects) CHECK(cxlkv_sequence_create(s->pool, &half_written) == 0);
    if (!s->objects) CHECK(test_append(half_written, 0, s->marks, TEST_PAGE_TOKENS) >= 0);
    const hosts *h = &s->pool->hosts;
    lost_offset = (uint64_t)(hosts_line(h, 0, 0) - s->pool->region.base) + h->area.claims_offset;
    lost_bytes = h->area.pins_offset - h->area.claims_offset;
    change_lines(s);
    call_rebuild(s);
    *at_work = "a write";
    if (s->objects) call_reserved(s);
    else CHECK(test_append(half_written, 1, s->marks, TEST_PAGE_TOKENS) == -CXLKV_E_CORRUPT);
    cxlkv_sequence_destroy(&half_written);
    end(s);
}

static void in_child(scene *s, void (*run)(scene *, uint32_t), uint32_t first) {
    pid_t child = test_fork();
    if (child == 0) {
        run(s, first);
        if (cxlkv_pool_remove(s->path) < 0) unlink(s->path); /* it may say that it is no pool */
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    if (status == 0) return;
    static const char *const changes[] = {"zeros", "ones", "old", "lost"};
    bool is_lost = run == run_calls || run == run_open;
    fprintf(stderr, "%s pool of %s: %lu bytes at %lu %s, calls from %u: %s ended with status %d\n",
            s->shared ? "a shared" : "one host's", s->objects ? "objects" : "sequences",
            lost_bytes, lost_offset, changes[is_lost ? CHANGES : change], first, *at_work, status);
    cxlkv_pool_remove(s->path);
    abort();
}

/* Areas and extents, the device, and any half of its lines; each lost, and changed in each way. */
static uint32_t test_areas(const scene *like, const cxlkv_geometry *g, uint32_t halves) {
    const uint64_t areas[][2] = {
        {0, g->region_bytes}, {SUPERBLOCK_BYTES, g->extents_offset - SUPERBLOCK_BYTES},
        {g->descriptors_offset, align_up(g->extent_count * g->descriptors_bytes, MACHINE_PAGE)},
        {g->extents_offset, g->extent_bytes},
        {g->extents_offset + g->extent_bytes, g->extent_bytes}};
    scene s = *like;
    uint32_t count = 0;
    for (uint32_t i = 0; i < sizeof(areas) / sizeof(*areas); i++) {
        lost_offset = areas[i][0];
        lost_bytes = areas[i][1];
        for (change = ZEROS; change < CHANGES; change++) in_child(&s, run_changed, count++ * 5);
        lost_bytes = lost_bytes / MACHINE_PAGE * MACHINE_PAGE; /* extents begin anywhere */
        lost_offset = lost_offset / MACHINE_PAGE * MACHINE_PAGE;
        in_child(&s, run_calls, count++ * 5);
        in_child(&s, run_open, count++);
    }
    lost_offset = SUPERBLOCK_BYTES; /* which is written once, when nobody uses the pool */
    lost_bytes = g->region_bytes - SUPERBLOCK_BYTES;
    change = OLD;
    if (s.shared) in_child(&s, run_claim_lost, count++);
    for (half = 1; half <= halves; half++) in_child(&s, run_changed, count++ * 5);
    half = 0;
    lost_bytes = MACHINE_PAGE;
    return count;
}

/* Every line that a pool has written, one change each; all three where `thorough`. */
static uint32_t test_changes(bool shared, bool objects, bool thorough) {
    scene s = {.path = test_path("poison"), .shared = shared, .objects = objects, .seed = 11};
    make(&s);
    uint64_t bytes = region_bytes(&s);
    uint8_t *now = malloc(bytes);
    old_bytes = malloc(bytes);
    CHECK(now && old_bytes && pread(s.pool->region.fd, old_bytes, bytes, 0) == (ssize_t)bytes);
    cxlkv_geometry g = s.pool->geometry;
    begin_things(&s);
    CHECK(pread(s.pool->region.fd, now, bytes, 0) == (ssize_t)bytes);
    end(&s);
    CHECK(cxlkv_pool_remove(s.path) == 0);
    uint32_t count = test_areas(&s, &g, thorough ? 100 : 10), lines = 0;
    lost_bytes = LINE_BYTES;
    for (lost_offset = 0; lost_offset < bytes; lost_offset += LINE_BYTES) {
        bool is_written = memcmp(now + lost_offset, old_bytes + lost_offset, LINE_BYTES) != 0;
        if (!is_written && lost_offset >= SUPERBLOCK_BYTES / 2) continue;
        lines++;
        if (!thorough && lost_offset >= g.extents_offset && lines % 4) continue; /* much alike */
        for (change = ZEROS; change < CHANGES; change++) {
            if (!thorough && lines % CHANGES != change) continue;
            in_child(&s, run_changed, count++ * 5);
        }
    }
    lost_bytes = MACHINE_PAGE;
    free(now);
    free(old_bytes);
    return count;
}

static uint32_t test_kind(bool shared, bool objects) {
    scene s = {.path = test_path("poison"), .shared = shared, .objects = objects, .seed = 11};
    make(&s);
    cxlkv_geometry g = s.pool->geometry;
    cxlkv_pool_destroy(&s.other);
    test_remove(&s.pool, s.path);
    uint32_t count = 0;
    for (uint64_t at = 0; at < g.extents_offset + 2 * g.extent_bytes; at += MACHINE_PAGE) {
        if (at >= g.descriptors_offset + g.extent_count * g.descriptors_bytes &&
            at < g.extents_offset)
            continue;
        lost_offset = at;
        in_child(&s, run_calls, count * 5);
        in_child(&s, run_calls, count * 5 + 13);
        if (at < g.extents_offset) in_child(&s, run_open, 0);
        count++;
    }
    return count;
}

/* A process of its own, as most of its time goes by in waiting for leases. */
static pid_t begin_kind(int kind, bool thorough) {
    pid_t child = test_fork();
    if (child != 0) return child;
    at_work = __real_mmap(NULL, MACHINE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                          -1, 0);
    CHECK(at_work != MAP_FAILED);
    printf("%u pages were lost, one at a time\n", test_kind(kind & 1, kind & 2));
    printf("%u times lines were changed\n", test_changes(kind & 1, kind & 2, thorough));
    exit(0);
}

int main(int count_given, char **given) {
    NOT_UNDER_TSAN("TSan runs handlers with all signals blocked, so that the second jump kills");
    bool thorough = count_given > 1 && strcmp(given[1], "thorough") == 0;
    nothing_fd = memfd_create("nothing", MFD_CLOEXEC);
    CHECK(nothing_fd >= 0);
    enum { KINDS = 4 };
    pid_t children[KINDS];
    for (int kind = 0; kind < KINDS; kind++) children[kind] = begin_kind(kind, thorough);
    for (int kind = 0; kind < KINDS; kind++) test_ended(children[kind], 0);
    printf("ok\n");
    return 0;
}
