/* Looking at a pool without joining it: who uses it, what its pages are, what was counted.
 *
 * No lock is taken and nothing is written. What others change meanwhile is read as it is found:
 * each number is of some moment, and all bounds come from the superblock, whose CRC was checked. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/guard.h"
#include "format/state_folder.h"
#include "format/superblock.h"
#include "host/counters.h"
#include "host/locks.h"
#include "host/processes.h"
#include "pool/create.h"
#include "pool/host_state.h"
#include "pool/pool.h"
#include "region/region.h"
#include "region/stripes.h"

static uint64_t pages_held(const uint32_t *held, uint32_t count) {
    uint64_t pages = 0;
    for (uint32_t page = 0; page < count; page++)
        pages += __atomic_load_n(&held[page], __ATOMIC_RELAXED) != 0;
    return pages;
}

/* `offsets` has the state's layout as it must be; `host` is only read through it. */
static uint32_t inspect_processes(host_state *host, int state_fd, const host_state *offsets,
                                  cxlkv_process *out, uint32_t capacity) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < PROCESS_MAX; i++) {
        process_slot slot = host->processes[i];
        if (slot.state == 0) continue;
        if (count < capacity) {
            cxlkv_process *process = &out[count];
            memset(process, 0, sizeof(*process));
            process->pid = slot.pid;
            process->alive = !slot_is_dead(state_fd, i);
            if (slot.start_time) process->start_time = slot.start_time + process_shift_ticks();
            process->pages_held = pages_held(
                (const uint32_t *)((uint8_t *)host + offsets->held_offset +
                                   i * offsets->held_stride_bytes), offsets->page_count);
            process->sequences = atomic_load_explicit(&host->counters[i].sequences,
                                                      memory_order_relaxed);
            counters_of_slot(host, i, &process->counters);
        }
        count++;
    }
    return count;
}

static uint32_t inspect_state(host_state *host, int state_fd, uint32_t page_total,
                              cxlkv_overview *overview, cxlkv_process *out, uint32_t capacity) {
    host_state offsets;
    host_state_layout(page_total, &offsets);
    overview->host_state = 1;
    const page_info *pages = (const page_info *)((uint8_t *)host + offsets.pages_offset);
    const run_info *runs = (const run_info *)((uint8_t *)host + offsets.runs_offset);
    cxlkv_page_counts counts = {.total = page_total};
    for (uint32_t i = 0; i < page_total; i++)
        page_count(&counts, &pages[i],
                   __atomic_load_n(&runs[i / RUN_SLOTS].ours, __ATOMIC_RELAXED));
    counts.free = page_total - counts.elsewhere - counts.withdrawn - counts.retired -
                  counts.quarantined - counts.held - counts.published_only;
    overview->pages = counts;
    counters_total(host, &overview->totals);
    return inspect_processes(host, state_fd, &offsets, out, capacity);
}

static void name_overview(cxlkv_overview *overview, const cxlkv_layout *layout,
                          const cxlkv_geometry *geometry, const uint8_t identity[16]) {
    memset(overview, 0, sizeof(*overview));
    overview->layout = *layout;
    overview->geometry = *geometry;
    memcpy(overview->identity, identity, sizeof(overview->identity));
}

static int64_t inspect_open(cxlkv_pool *pool, cxlkv_overview *overview, cxlkv_process *out,
                            uint32_t capacity) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    name_overview(overview, &pool->layout, &pool->geometry, pool->identity);
    overview->in_use = 1;
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        host_unlock(pool);
        code = inspect_state(pool->host, pool->host_fd, pool->geometry.page_count, overview, out,
                             capacity);
    }
    pool_leave(pool);
    return code;
}

/* ---- from outside ---- */

/* The two guarded stretches are functions of their own: a jump out of one leaves no variable of its
 * caller in doubt. */
__attribute__((noinline))
static bool state_fits(const host_state *host, uint64_t nonce, uint32_t page_count,
                       const uint8_t identity[16]) {
    return GUARDED(host_state_fits(host, page_count, identity) &&
                   (nonce == 0 || host->nonce == nonce), false);
}

/* A host state, mapped for reading; its file tells which of its processes live. */
typedef struct seen_state {
    host_state *host;            /* NULL: there is none that fits */
    uint64_t bytes;
    int fd;
} seen_state;

static void state_map_file(seen_state *state, uint64_t nonce, uint32_t page_count,
                           const uint8_t identity[16]) {
    host_state expected;
    struct stat status;
    state->bytes = host_state_layout(page_count, &expected);
    if (fstat(state->fd, &status) < 0 || (uint64_t)status.st_size != state->bytes) return;
    void *at = mmap(NULL, state->bytes, PROT_READ, MAP_SHARED, state->fd, 0);
    if (at == MAP_FAILED) return;
    if (state_fits(at, nonce, page_count, identity)) state->host = at;
    else munmap(at, state->bytes);
}

/* The state of a host of the pool in `fd`. */
static seen_state map_state(int fd, uint32_t host, uint64_t nonce, uint32_t page_count,
                            const uint8_t identity[16]) {
    state_place place;
    seen_state found = {.fd = -1};
    if (state_place_open(fd, identity, host, false, &place) == 1)
        found.fd = state_file_open(&place, O_RDONLY);
    if (found.fd >= 0) state_map_file(&found, nonce, page_count, identity);
    if (found.fd >= 0 && !found.host) close(found.fd);
    state_place_close(&place);
    return found;
}

/* Where a pool's bytes are read from. striped: NULL, or all members; fd is the first one's then. */
typedef struct source {
    int fd;
    members *striped;
    uint64_t bytes;
} source;

static int source_open(const char *path, source *from) {
    *from = (source){.fd = -1};
    if (stripes_path(path)) {
        int code = striped_inspect(path, &from->striped);
        if (code < 0) return code;
        from->fd = stripes_fd(from->striped);
        from->bytes = stripes_bytes(from->striped);
        return 0;
    }
    from->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (from->fd < 0) return fail(errno, "%s: cannot open: %s", path, strerror(errno));
    int code = region_size(from->fd, path, &from->bytes);
    if (code < 0) close(from->fd);
    return code;
}

static bool source_read(const source *from, uint64_t offset, void *to, size_t bytes) {
    return from->striped ? stripes_read(from->striped, offset, to, bytes)
                         : region_read(from->fd, offset, to, bytes);
}

/* Nobody uses the pool: what is not published is free for whoever comes. */
static int inspect_descriptors(const source *from, const cxlkv_geometry *geometry,
                               cxlkv_overview *overview) {
    descriptor lines[64];
    overview->pages.total = geometry->page_count;
    for (uint32_t first = 0; first < geometry->page_count; first += geometry->slab_slots) {
        uint32_t count = geometry->slab_slots;
        uint64_t at = geometry->descriptors_offset + first / count * geometry->descriptors_bytes;
        if (!source_read(from, at, lines, count * sizeof(*lines)))
            return fail(EIO, "the pool's descriptors cannot be read");
        for (uint32_t i = 0; i < count; i++) {
            bool whole = lines[i].page == first + i &&
                         lines[i].crc == crc32c(0, &lines[i], offsetof(descriptor, crc));
            bool published = whole && (lines[i].version & 255) == PAGE_PUBLISHED;
            overview->pages.published += published;
            if (!whole) overview->pages.quarantined++;
            else if (published) overview->pages.published_only++;
            else overview->pages.free++;
        }
    }
    return 0;
}

/* The last to leave saves the totals and then removes the state: without one they are in the page,
 * but perhaps just being written. */
static void inspect_saved(const source *from, cxlkv_counters *totals) {
    uint8_t page[SUPERBLOCK_BYTES];
    bool whole = false;
    for (int attempt = 0; !whole && attempt < 20; attempt++) {
        if (!source_read(from, 0, page, sizeof(page))) return;
        whole = counters_load(page + SAVED_COUNTERS_OFFSET, totals);
    }
}

__attribute__((noinline))
static int64_t inspect_guarded(const seen_state *state, uint32_t page_count, const char *path,
                               cxlkv_overview *overview, cxlkv_process *out, uint32_t capacity) {
    return GUARDED(inspect_state(state->host, state->fd, page_count, overview, out, capacity),
                   fail(CXLKV_E_POISON, "%s: its host state was cut while it was read", path));
}

static int64_t peek_at(const source *from, const char *path, cxlkv_overview *overview,
                       cxlkv_process *out, uint32_t capacity) {
    uint8_t page[SUPERBLOCK_BYTES];
    pool_facts facts;
    if (!source_read(from, 0, page, sizeof(page)))
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool", path);
    int code = superblock_read(SUPERBLOCK_INSPECT, page, from->bytes, path, &facts);
    if (code == 0) code = guard_install();
    if (code < 0) return code;
    name_overview(overview, &facts.layout, &facts.geometry, facts.identity);
    overview->in_use = !byte_is_free(from->fd, USE_BYTE);
    uint32_t pages = facts.geometry.page_count;
    seen_state state = {.fd = -1};
    uint64_t nonce = host_line_nonce(page); /* 0: nobody uses the pool, or the line is damaged */
    if (facts.sharing.kind == CXLKV_SHARING_HOST && nonce)
        state = map_state(from->fd, NO_HOST, nonce, pages, facts.identity);
    /* The first host that runs on this machine: most often the only one. */
    if (facts.sharing.kind != CXLKV_SHARING_HOST)
        for (uint32_t number = 0; !state.host && number < facts.sharing.hosts; number++)
            state = map_state(from->fd, number, 0, pages, facts.identity);
    if (!state.host) { /* another /dev/shm has the state, or nobody uses the pool */
        inspect_saved(from, &overview->totals);
        return overview->in_use ? 0 : inspect_descriptors(from, &facts.geometry, overview);
    }
    int64_t count = inspect_guarded(&state, pages, path, overview, out, capacity);
    munmap(state.host, state.bytes);
    close(state.fd);
    return count;
}

static int64_t inspect_path(const char *path, cxlkv_overview *overview, cxlkv_process *out,
                            uint32_t capacity) {
    source from;
    int64_t code = source_open(path, &from);
    if (code < 0) return code;
    code = peek_at(&from, path, overview, out, capacity);
    if (from.striped) stripes_close(from.striped);
    else close(from.fd);
    return code;
}

int64_t cxlkv_inspect(cxlkv_pool *pool, const char *path, cxlkv_overview *overview,
                      cxlkv_process *out, uint32_t capacity) {
    int64_t code = need(capacity, "processes", out, NULL);
    if (code < 0) return code;
    return pool ? inspect_open(pool, overview, out, capacity)
                : inspect_path(path, overview, out, capacity);
}
