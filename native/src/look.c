/* Looking at a pool without joining it: who uses it, what its pages are, what was counted.
 *
 * No lock is taken and nothing is written. What others change meanwhile is read as it is found:
 * each number is of some moment, and all bounds come from the superblock, whose CRC was checked. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

static void look_at_pages(const page_info *pages, const run_info *runs, uint32_t count,
                          cxlkv_overview *overview) {
    overview->pages_total = count;
    for (uint32_t page = 0; page < count; page++) {
        const page_info *info = &pages[page];
        bool held = __atomic_load_n(&info->holders, __ATOMIC_RELAXED) != 0;
        bool published = __atomic_load_n(&info->published, __ATOMIC_RELAXED) != 0;
        overview->pages_published += published;
        overview->pages_pinned += info->pinned;
        if (!__atomic_load_n(&runs[page / RUN_SLOTS].ours, __ATOMIC_RELAXED))
            overview->pages_elsewhere++;
        else if (info->withdrawn) overview->pages_withdrawn++;
        else if (__atomic_load_n(&info->retired, __ATOMIC_RELAXED)) overview->pages_retired++;
        else if (__atomic_load_n(&info->quarantined, __ATOMIC_RELAXED))
            overview->pages_quarantined++;
        else if (held) overview->pages_held++;
        else if (published) overview->pages_published_only++;
        else overview->pages_free++;
    }
}

static uint64_t pages_held(const uint32_t *held, uint32_t count) {
    uint64_t pages = 0;
    for (uint32_t page = 0; page < count; page++)
        pages += __atomic_load_n(&held[page], __ATOMIC_RELAXED) != 0;
    return pages;
}

/* `offsets` has the state's layout as it must be; `host` is only read through it. */
static uint32_t look_at_processes(host_state *host, const host_state *offsets,
                                  cxlkv_process *out, uint32_t capacity) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < PROCESS_MAX; i++) {
        process_slot slot = host->processes[i];
        if (slot.state == 0) continue;
        if (count < capacity) {
            cxlkv_process *process = &out[count];
            memset(process, 0, sizeof(*process));
            process->pid = slot.pid;
            process->alive = !process_is_dead(&slot);
            process->start_time = slot.start_time;
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

static uint32_t look_at_state(host_state *host, uint32_t page_count, cxlkv_overview *overview,
                              cxlkv_process *out, uint32_t capacity) {
    host_state offsets;
    host_state_layout(page_count, &offsets);
    overview->host_state = 1;
    look_at_pages((const page_info *)((uint8_t *)host + offsets.pages_offset),
                  (const run_info *)((uint8_t *)host + offsets.runs_offset), page_count, overview);
    counters_total(host, &overview->totals);
    return look_at_processes(host, &offsets, out, capacity);
}

static void name_overview(cxlkv_overview *overview, const cxlkv_layout *layout,
                          const cxlkv_geometry *geometry, const uint8_t identity[16]) {
    memset(overview, 0, sizeof(*overview));
    overview->region_bytes = geometry->region_bytes;
    memcpy(overview->model_id, layout->model_id, sizeof(overview->model_id));
    memcpy(overview->identity, identity, sizeof(overview->identity));
}

int64_t cxlkv_pool_processes(cxlkv_pool *pool, cxlkv_overview *overview, cxlkv_process *out,
                             uint32_t capacity) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    name_overview(overview, &pool->layout, &pool->geometry, pool->identity);
    overview->in_use = 1;
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        host_unlock(pool);
        code = look_at_state(pool->host, pool->geometry.page_count, overview, out, capacity);
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
    guard fault;
    volatile bool fits = false;
    GUARD_BEGIN(fault) {
        fits = host_state_fits(host, page_count, identity) &&
               (nonce == 0 || host->nonce == nonce);
    } GUARD_END(fault, fits = false)
    return fits;
}

/* Maps the state of a host of the pool in `fd` for reading; NULL when there is none that fits. */
static host_state *map_state(int fd, uint32_t host, uint64_t nonce, uint32_t page_count,
                             const uint8_t identity[16], uint64_t *bytes) {
    char path[STATE_PATH_BYTES];
    host_state expected;
    struct stat status;
    *bytes = host_state_layout(page_count, &expected);
    host_state_path(identity, fd, host, path);
    int state_fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (state_fd < 0) return NULL;
    void *at = MAP_FAILED;
    if (fstat(state_fd, &status) == 0 && (uint64_t)status.st_size == *bytes)
        at = mmap(NULL, *bytes, PROT_READ, MAP_SHARED, state_fd, 0);
    close(state_fd);
    if (at == MAP_FAILED) return NULL;
    if (state_fits(at, nonce, page_count, identity)) return at;
    munmap(at, *bytes);
    return NULL;
}

/* Nobody uses the pool: what is not published is free for whoever comes. */
static int look_at_descriptors(int fd, const cxlkv_geometry *geometry, cxlkv_overview *overview) {
    descriptor lines[64];
    overview->pages_total = geometry->page_count;
    for (uint32_t first = 0; first < geometry->page_count; first += geometry->slab_slots) {
        uint32_t count = geometry->slab_slots;
        uint64_t at = geometry->descriptors_offset + first / count * geometry->descriptors_bytes;
        if (!region_read(fd, at, lines, count * sizeof(*lines)))
            return fail(EIO, "the pool's descriptors cannot be read");
        for (uint32_t i = 0; i < count; i++) {
            bool whole = lines[i].page == first + i &&
                         lines[i].crc == crc32c(0, &lines[i], offsetof(descriptor, crc));
            bool published = whole && (lines[i].version & 255) == PAGE_PUBLISHED;
            overview->pages_published += published;
            if (!whole) overview->pages_quarantined++;
            else if (published) overview->pages_published_only++;
            else overview->pages_free++;
        }
    }
    return 0;
}

/* The last to leave saves the totals and then removes the state: without one they are in the page,
 * but perhaps just being written. */
static void look_at_saved(int fd, cxlkv_counters *totals) {
    uint8_t page[SUPERBLOCK_BYTES];
    bool whole = false;
    for (int attempt = 0; !whole && attempt < 20; attempt++) {
        if (!region_read(fd, 0, page, sizeof(page))) return;
        whole = counters_load(page + SAVED_COUNTERS_OFFSET, totals);
    }
}

__attribute__((noinline))
static int64_t look_guarded(host_state *host, uint32_t page_count, const char *path,
                            cxlkv_overview *overview, cxlkv_process *out, uint32_t capacity) {
    guard fault;
    volatile int64_t count = 0;
    GUARD_BEGIN(fault) {
        count = look_at_state(host, page_count, overview, out, capacity);
    } GUARD_END(fault, count = fail(CXLKV_E_POISON, "%s: its host state was cut while it was read",
                                    path))
    return count;
}

static int64_t peek_at(int fd, const char *path, cxlkv_overview *overview, cxlkv_process *out,
                       uint32_t capacity) {
    uint8_t page[SUPERBLOCK_BYTES], identity[16];
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint64_t bytes;
    int code = region_size(fd, path, &bytes);
    if (code == 0 && !region_read(fd, 0, page, sizeof(page)))
        code = fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool", path);
    if (code == 0)
        code = superblock_read(page, bytes, path, &layout, &sharing, &geometry, identity);
    if (code == 0) code = guard_install();
    if (code < 0) return code;
    name_overview(overview, &layout, &geometry, identity);
    overview->in_use = !byte_is_free(fd, USE_BYTE);
    uint32_t pages = geometry.page_count;
    host_state *host = NULL;
    if (sharing.kind == CXLKV_SHARING_HOST)
        host = map_state(fd, NO_HOST, host_line_nonce(page), pages, identity, &bytes);
    else /* the first host that runs on this machine: most often the only one */
        for (uint32_t number = 0; !host && number < sharing.hosts; number++)
            host = map_state(fd, number, 0, pages, identity, &bytes);
    if (!host) { /* another /dev/shm has the state, or nobody uses the pool */
        look_at_saved(fd, &overview->totals);
        return overview->in_use ? 0 : look_at_descriptors(fd, &geometry, overview);
    }
    int64_t count = look_guarded(host, geometry.page_count, path, overview, out, capacity);
    munmap(host, bytes);
    return count;
}

int64_t cxlkv_peek(const char *path, cxlkv_overview *overview, cxlkv_process *out,
                   uint32_t capacity) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail(errno, "%s: cannot open: %s", path, strerror(errno));
    int64_t code = peek_at(fd, path, overview, out, capacity);
    close(fd);
    return code;
}
