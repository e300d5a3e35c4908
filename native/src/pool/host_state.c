/* The host state: what the processes of one host share about a pool, in their own DRAM. */
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/guard.h"
#include "format/state_folder.h"
#include "format/superblock.h"
#include "host/counters.h"
#include "host/locks.h"
#include "host/processes.h"
#include "host/rebuild.h"
#include "pages/peers.h"
#include "pool/host_state.h"
#include "region/alive.h"
#include "region/region.h"
#include "sharing/this_host.h"

#define HOST_MAGIC 0x36315453484b5643ull /* "CVKHST16" */

uint64_t host_state_layout(uint32_t page_count, host_state *host) {
    uint64_t capacity = 64;
    while (capacity < 2ull * page_count) capacity *= 2;
    host->page_count = page_count;
    host->run_count = (page_count + RUN_SLOTS - 1) / RUN_SLOTS;
    host->index_capacity = (uint32_t)capacity;
    host->pages_offset = align_up(sizeof(host_state), 4096);
    host->hotness_offset = align_up(host->pages_offset + page_count * sizeof(page_info), 4096);
    host->reuse_offset = align_up(host->hotness_offset + page_count * sizeof(atomic_uint), 4096);
    host->runs_offset = align_up(host->reuse_offset + page_count * sizeof(reuse_record), 4096);
    host->index_offset = align_up(host->runs_offset + host->run_count * sizeof(run_info), 4096);
    host->held_offset = align_up(host->index_offset + capacity * sizeof(index_entry), 4096);
    host->held_stride_bytes = align_up(page_count * sizeof(uint32_t), 4096);
    host->bytes = host->held_offset + PROCESS_MAX * host->held_stride_bytes;
    return host->bytes;
}

static void bind_tables(cxlkv_pool *pool) {
    uint8_t *base = (uint8_t *)pool->host;
    pool->pages = (page_info *)(base + pool->host->pages_offset);
    pool->hotness = (atomic_uint *)(base + pool->host->hotness_offset);
    pool->reuse = (reuse_record *)(base + pool->host->reuse_offset);
    pool->runs = (run_info *)(base + pool->host->runs_offset);
    pool->index = (index_entry *)(base + pool->host->index_offset);
}

static int state_map(cxlkv_pool *pool, uint64_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, pool->host_fd, 0);
    if (at == MAP_FAILED) return fail(errno, "cannot map the pool's host state");
    pool->host = at;
    return 0;
}

/* For whoever finds the state when nobody uses it: is its pool still there? */
static void name_pool(cxlkv_pool *pool) {
    char path[PATH_MAX];
    struct stat status;
    host_state *host = pool->host;
    if (fstat(pool->region.fd, &status) < 0 || !realpath(pool->path, path)) return;
    host->pool_device = status.st_dev;
    host->pool_inode = status.st_ino;
    if (strlen(path) < sizeof(host->pool_path)) strcpy(host->pool_path, path);
}

/* Fills a new state of the pool from the region's descriptors. */
static int state_make(cxlkv_pool *pool) {
    host_state fresh;
    memset(&fresh, 0, sizeof(fresh));
    uint64_t bytes = host_state_layout(pool->geometry.page_count, &fresh);
    int code = ftruncate(pool->host_fd, (off_t)bytes) < 0 ? errno : 0;
    if (code == 0) code = posix_fallocate(pool->host_fd, 0, (off_t)fresh.held_offset);
    if (code != 0) return host_room_error(code, fresh.held_offset, "the pool's host state");
    code = state_map(pool, bytes);
    if (code < 0) return code;
    host_state *host = pool->host;
    *host = fresh;
    host->magic = HOST_MAGIC;
    host->nonce = random_u64();
    host->publications = (uint32_t)host->nonce; /* nobody's that holds a page now */
    host->rewriting = NO_PAGE;
    memcpy(host->identity, pool->identity, sizeof(host->identity));
    if (pool->path) name_pool(pool);
    counters_restore(pool);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&host->claims, &attributes);
    pthread_mutex_init(&host->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    bind_tables(pool);
    for (uint32_t run = 0; run < host->run_count; run++) pool->runs[run].ours = !pool->shared;
    if (pool->shared) {
        for (uint32_t page = 0; page < host->page_count; page++) pool->pages[page].shown = 1;
        code = peers_arrive(pool);
        if (code < 0) return code;
    }
    host_rebuild(pool);
    if (!pool->shared) code = host_line_write(pool, host->nonce);
    if (code < 0) return code;
    host->ready = 1;
    return 0;
}

bool host_state_is_ours(const host_state *host) { return host->magic == HOST_MAGIC; }

/* All of the header that says where to read: no offset is taken from a file. */
bool host_state_fits(const host_state *host, uint32_t page_count, const uint8_t identity[16]) {
    host_state expected;
    const size_t first = offsetof(host_state, bytes), end = offsetof(host_state, ready);
    host_state_layout(page_count, &expected);
    return host->magic == HOST_MAGIC && host->ready && host->nonce != 0 &&
           memcmp((const char *)host + first, (const char *)&expected + first, end - first) == 0 &&
           host->hotness_offset == expected.hotness_offset &&
           host->reuse_offset == expected.reuse_offset &&
           memcmp(host->identity, identity, sizeof(host->identity)) == 0;
}

/* Opens the state's file under its lock, which is held while the file is open: so whoever gets it
 * alone knows that nobody uses the state. 0: it is not there, or was removed meanwhile. */
static int state_open(cxlkv_pool *pool, const state_place *place) {
    struct stat status;
    int fd = state_file_open(place, O_RDWR);
    if (fd < 0) return fd == -ENOENT ? 0 : fd;
    int code = lock_byte(fd, STATE_BYTE, false, true);
    if (code < 0) code = byte_lock_error(code, place->path);
    else code = fstat(fd, &status) == 0 && status.st_nlink > 0;
    if (code == 1) pool->host_fd = fd;
    else close(fd);
    return code;
}

static void state_leave(cxlkv_pool *pool, uint64_t bytes) {
    if (pool->host) munmap(pool->host, bytes);
    pool->host = NULL;
    close(pool->host_fd);
    pool->host_fd = -1;
}

/* No nonce, where nobody uses the pool or its line is damaged, names no state. */
static bool state_is_named(cxlkv_pool *pool) {
    uint64_t nonce = pool->shared ? peers_nonce(pool) : host_line_read(pool);
    return nonce != 0 && pool->host->nonce == nonce && !(pool->shared && peers_is_off(pool));
}

/* 1 when a state of this pool lies there and is the one that the pool names. */
static int state_join(cxlkv_pool *pool, const state_place *place) {
    host_state expected;
    struct stat status;
    uint64_t bytes = host_state_layout(pool->geometry.page_count, &expected);
    int code = state_open(pool, place);
    if (code <= 0) return code;
    if (fstat(pool->host_fd, &status) == 0 && (uint64_t)status.st_size == bytes &&
        state_map(pool, bytes) == 0 &&
        host_state_fits(pool->host, pool->geometry.page_count, pool->identity) &&
        state_is_named(pool)) {
        bind_tables(pool);
        return 1;
    }
    state_leave(pool, bytes);
    return 0;
}

/* What lies there was left behind, or it stays: a process that has it open would go on with it,
 * while others made another. `cxlkv pool gc` has the lock for a moment when it looks. */
static int state_clear(const cxlkv_pool *pool, const state_place *place) {
    int fd = state_file_open(place, O_RDWR);
    if (fd < 0) return fd == -ENOENT ? 0 : fd;
    int code = lock_byte_within(fd, STATE_BYTE, true, 0.2);
    if (code == 0 && state_file_is(place, fd)) state_file_unlink(place);
    close(fd);
    if (code == 0) return 0;
    return fail(CXLKV_E_BUSY, "%s: processes have its host state open, which the pool names no "
                "more (the host was declared off, or its line is damaged): close the pool in them. "
                "`fuser -v %s` names them", pool->path, place->path);
}

/* It appears when it is whole. */
static int state_new(cxlkv_pool *pool, const state_place *place) {
    /* Nobody may be using the pool through a state that we cannot see, as in another container. */
    if (!pool->shared && lock_byte(pool->region.fd, USE_BYTE, true, false) < 0)
        return fail(CXLKV_E_BUSY,
                    "%s is in use by processes with another /dev/shm (another container?). Share "
                    "/dev/shm with them, or close the pool there",
                    pool->path);
    int code = state_clear(pool, place);
    if (code < 0) return code;
    int fd = state_file_make(place);
    if (fd < 0) return fd;
    pool->host_fd = fd;
    code = lock_byte(fd, STATE_BYTE, false, false);
    if (code < 0) return byte_lock_error(code, place->path);
    code = state_make(pool);
    return code < 0 ? code : state_file_show(place, fd);
}

static int state_attach_file(cxlkv_pool *pool) {
    uint32_t host = pool->shared ? pool->hosts.self : NO_HOST;
    int code = state_place_open(pool->region.fd, pool->identity, host, true, &pool->state);
    if (code < 0) return code;
    code = state_join(pool, &pool->state);
    if (code == 0) code = state_older_in_use(pool->region.fd, pool->identity, host);
    if (code == 0) code = state_new(pool, &pool->state);
    return code < 0 ? code : lock_byte(pool->region.fd, USE_BYTE, false, false);
}

static int register_self(cxlkv_pool *pool) {
    uint32_t slot;
    int code = host_register(pool, 1, &slot);
    if (code < 0) return code;
    pool->alive = alive_begin(pool->host_fd, LIVE_BYTE + slot);
    if (!pool->alive) {
        code = errno;
        host_unregister(pool, slot);
        return fail(code, "the pool's host state: cannot be opened again: %s%s", strerror(code),
                    remedy_of(code));
    }
    pool->slot = slot;
    return 0;
}

int host_attach(cxlkv_pool *pool) {
    int code;
    if (pool->path) {
        struct stat status;
        code = lock_byte(pool->region.fd, ATTACH_BYTE, true, true);
        if (code < 0) return byte_lock_error(code, pool->path);
        if (fstat(pool->region.fd, &status) == 0 && status.st_nlink == 0)
            code = fail(ENOENT, "%s was removed while it was being opened: create it anew",
                        pool->path);
        else
            code = state_attach_file(pool);
    } else {
        pool->host_fd = memfd_create("cxlkv-host", MFD_CLOEXEC);
        if (pool->host_fd < 0)
            return fail(errno, "memfd_create: %s%s", strerror(errno), remedy_of(errno));
        code = state_make(pool);
    }
    if (code == 0) {
        pool->slot = UINT32_MAX;
        code = host_lock(pool);
    }
    if (code == 0) {
        host_reap(pool);
        code = register_self(pool);
        if (code == 0) {
            pool->held = held_of(pool, pool->slot);
            counters_bind(pool, pool->slot);
        }
        host_unlock(pool);
    }
    if (pool->path) unlock_byte(pool->region.fd, ATTACH_BYTE);
    return code;
}

/* What outlives the host state. Who leaves has no use for the loss of a count. */
static void save_counters(cxlkv_pool *pool) { GUARDED((counters_save(pool), 0), 0); }

/* Not while somebody else has it open, and only what the name still means. */
static void state_remove(const state_place *place, int fd) {
    state_place slots = *place;
    if (lock_byte(fd, STATE_BYTE, true, false) < 0 || !state_file_is(place, fd)) return;
    state_file_unlink(place);
    state_place_worker(&slots); /* of a worker that was killed: one that lives uses the state */
    state_file_unlink(&slots);
}

void host_remove_states(const pool_facts *facts, int fd) {
    bool shared = facts->sharing.kind != CXLKV_SHARING_HOST;
    for (uint32_t host = 0; host < facts->sharing.hosts; host++) {
        state_place place;
        if (state_place_open(fd, facts->identity, shared ? host : NO_HOST, false, &place) != 1)
            continue;
        int state = state_file_open(&place, O_RDWR);
        if (state >= 0) {
            state_remove(&place, state);
            close(state);
        }
        state_place_close(&place);
    }
}

/* True: nobody is left. Who came no further than the state itself does not wait for its lock. */
static bool unregister(cxlkv_pool *pool) {
    if ((pool->held ? host_lock(pool) : host_trylock(pool)) < 0) return false;
    if (pool->held) host_unregister(pool, pool->slot);
    host_reap(pool);
    bool last = true;
    for (uint32_t i = 0; i < PROCESS_MAX; i++)
        if (pool->host->processes[i].state) last = false;
    if (last && pool->shared) save_counters(pool);
    if (last && pool->shared) peers_leave(pool);
    host_unlock(pool);
    return last;
}

/* The last one out removes the state: the region alone says all that the next one needs. */
void host_detach(cxlkv_pool *pool) {
    if (!pool->host) {
        if (pool->host_fd >= 0) close(pool->host_fd);
        pool->host_fd = -1;
        state_place_close(&pool->state);
        return;
    }
    bool alone = !pool->path || lock_byte(pool->region.fd, ATTACH_BYTE, true, true) == 0;
    bool last = pool->host->ready && unregister(pool);
    if (pool->path && !pool->shared && pool->host->ready) {
        save_counters(pool);
        futimens(pool->region.fd, NULL); /* when the pool was last in use */
    }
    counters_unbind(pool);
    alive_end(pool->alive);
    pool->alive = NULL;
    if (pool->path && last && alone &&
        (pool->shared || lock_byte(pool->region.fd, USE_BYTE, true, false) == 0))
        state_remove(&pool->state, pool->host_fd);
    state_leave(pool, pool->host->bytes);
    state_place_close(&pool->state);
    pool->held = NULL;
    /* The use lock goes first: the next holder of the attach lock must find the pool unused. */
    if (pool->path) unlock_byte(pool->region.fd, USE_BYTE);
    if (pool->path) unlock_byte(pool->region.fd, ATTACH_BYTE);
}
