/* A pool: created, opened, carried over a fork, counted, checked, closed. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/flush.h"
#include "pool/hooks.h"
#include "pool/peers.h"

/* All that were opened and have references left: a closed one has locks, too, which the child of a
 * fork must find free. */
static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static cxlkv_pool *pools;

void pool_retain(cxlkv_pool *pool) {
    atomic_fetch_add_explicit(&pool->references, 1, memory_order_relaxed);
}

static void pools_remove(const cxlkv_pool *pool) {
    pthread_mutex_lock(&pools_lock);
    cxlkv_pool **at = &pools;
    while (*at && *at != pool) at = &(*at)->next;
    if (*at) *at = pool->next;
    pthread_mutex_unlock(&pools_lock);
}

/* Under no lock of the pool: a fork may be waiting for that, with the list locked. */
void pool_drop(cxlkv_pool *pool) {
    if (atomic_fetch_sub_explicit(&pool->references, 1, memory_order_acq_rel) != 1) return;
    pools_remove(pool);
    pthread_rwlock_destroy(&pool->operations);
    pthread_mutex_destroy(&pool->list_lock);
    pthread_mutex_destroy(&pool->spare_lock);
    hooks.tails_discard(pool);
    hooks.worker_client_drop(pool);
    free(pool->deadlines.heap);
    free(pool->path);
    free(pool->parts);
    free(pool);
}

int pool_enter_to_release(cxlkv_pool *pool) {
    pthread_rwlock_rdlock(&pool->operations);
    if (!pool->closed) return 0;
    pthread_rwlock_unlock(&pool->operations);
    return fail(CXLKV_E_CLOSED, "the pool is closed: open it again");
}

int pool_enter(cxlkv_pool *pool) {
    int code = pool_enter_to_release(pool);
    if (code < 0 || !pool->shared) return code;
    code = peers_check(pool);
    if (code < 0) pool_leave(pool);
    return code;
}

void pool_leave(cxlkv_pool *pool) { pthread_rwlock_unlock(&pool->operations); }

int poison_error_locked(cxlkv_pool *pool, const guard *fault) {
    uint64_t offset = fault->address - (uintptr_t)pool->region.base;
    if (offset >= pool->geometry.region_bytes)
        return fail(EFAULT, "bus error in the caller's own array: was the file behind it cut?");
    uint64_t retired = retire_range(pool, fault->address, fault->granularity_bytes);
    return fail(CXLKV_E_POISON,
                "bus error in the pool's memory at offset %lu (poisoned, or the file was "
                "truncated): %lu pages were retired. Release the sequence and recompute it",
                offset, retired);
}

int poison_error(cxlkv_pool *pool, const guard *fault) {
    if (host_lock(pool) < 0) return -CXLKV_E_TIMEOUT;
    int code = poison_error_locked(pool, fault);
    host_unlock(pool);
    return code;
}

/* Writers (close, fork) go first: steady traffic must not keep them out. So no operation may enter
 * twice. */
static void operations_init(cxlkv_pool *pool) {
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&pool->operations, &attributes);
    pthread_rwlockattr_destroy(&attributes);
}

/* ---- fork: the child gets a slot of its own, with the references that it inherits ---- */

/* The child's references, in a slot that waits for it: host_reap() gives it back if the fork fails,
 * or if the child dies before it comes for it. */
static void fork_slot_make(cxlkv_pool *pool) {
    if (host_lock(pool) < 0) return;
    host_reap(pool);
    if (host_register(pool, 2, &pool->fork_slot) == 0) {
        pool->fork_nonce = pool->host->processes[pool->fork_slot].nonce;
        pool->fork_state_fd = open_again(pool->host_fd, LIVE_BYTE + pool->fork_slot);
        if (pool->path) pool->fork_region_fd = open_again(pool->region.fd, USE_BYTE);
        uint32_t *child = held_of(pool, pool->fork_slot);
        for (uint32_t page = 0; page < pool->host->page_count; page++) {
            child[page] = pool->held[page];
            pool->pages[page].holders += child[page] > 0;
        }
    }
    host_unlock(pool);
}

/* The write lock waits until no thread is inside an operation: the child sees whole structures. */
static void fork_prepare(void) {
    pthread_mutex_lock(&pools_lock);
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        pool->fork_slot = UINT32_MAX;
        pthread_rwlock_wrlock(&pool->operations);
        pthread_mutex_lock(&pool->list_lock);
        pthread_mutex_lock(&pool->spare_lock);
        if (!pool->closed) fork_slot_make(pool);
    }
    alive_fork_prepare();
}

static void fork_files_close(cxlkv_pool *pool) {
    if (pool->fork_state_fd >= 0) close(pool->fork_state_fd);
    if (pool->fork_region_fd >= 0) close(pool->fork_region_fd);
    pool->fork_state_fd = pool->fork_region_fd = -1;
}

static void fork_parent(void) {
    alive_fork_parent();
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        fork_files_close(pool);
        pthread_mutex_unlock(&pool->spare_lock);
        pthread_mutex_unlock(&pool->list_lock);
        pthread_rwlock_unlock(&pool->operations);
    }
    pthread_mutex_unlock(&pools_lock);
}

/* The byte locks belong to the open file, which the fork shares: the child has one of its own, so
 * that what it locks and unlocks later does not touch its parent's locks. The parent made it: when
 * that closes the pool before the child is here, the pool is still in use. */
static bool take_region_file(cxlkv_pool *pool) {
    return !pool->path || dup3(pool->fork_region_fd, pool->region.fd, O_CLOEXEC) >= 0;
}

static bool claim_fork_slot(cxlkv_pool *pool) {
    pool->held = NULL;
    alive_end(pool->alive); /* the parent's, closed already */
    pool->alive = NULL;
    if (pool->fork_slot == UINT32_MAX) return false;
    pool->slot = pool->fork_slot;
    if (host_lock(pool) < 0) return false;
    process_slot *slot = &pool->host->processes[pool->slot];
    bool claimed = slot->state == 2 && slot->nonce == pool->fork_nonce &&
                   pool->fork_state_fd >= 0;
    if (claimed) claimed = (pool->alive = alive_keep(pool->fork_state_fd)) != NULL;
    if (claimed) {
        pool->fork_state_fd = -1;
        process_identify(slot);
        slot->state = 1;
        pool->held = held_of(pool, pool->slot);
        counters_bind(pool, pool->slot);
    }
    host_unlock(pool);
    return claimed;
}

/* When there is no slot for the child, or no lock, its copy is closed and says so when used; the
 * parent's locks and references stay as they are. */
static void leave_to_parent(cxlkv_pool *pool) {
    if (pool->held && host_lock(pool) == 0) {
        host_unregister(pool, pool->slot);
        host_unlock(pool);
    }
    counters_unbind(pool);
    alive_end(pool->alive);
    pool->alive = NULL;
    munmap(pool->host, pool->host->bytes);
    region_unmap(&pool->region);
    close(pool->host_fd);
    close(pool->region.fd);
    state_place_close(&pool->state);
    pool->host = NULL;
    pool->held = NULL;
    pool->closed = true;
}

/* Threads and held locks do not cross a fork: all that can be locked is made anew. */
static void fork_child(void) {
    alive_fork_child();
    for (cxlkv_pool *pool = pools; pool; pool = pool->next) {
        pthread_mutex_init(&pool->list_lock, NULL);
        pthread_mutex_init(&pool->spare_lock, NULL);
        operations_init(pool);
        pool->threads = NULL;
        pool->keeper = NULL; /* its thread is the parent's, and what it was about to log */
        pool->log_count = 0;
        hooks.worker_forked(pool);
        hooks.local_forked(pool);
        hooks.sequences_forked(pool);
        if (pool->closed) continue;
        if (!claim_fork_slot(pool) || !take_region_file(pool) ||
            (pool->shared && keeper_start(pool) < 0))
            leave_to_parent(pool);
        fork_files_close(pool);
    }
    pthread_mutex_init(&pools_lock, NULL);
    guard_forked();
}

static void pools_add(cxlkv_pool *pool) {
    pthread_mutex_lock(&pools_lock);
    pool->next = pools;
    pools = pool;
    pthread_mutex_unlock(&pools_lock);
}

/* ---- making ---- */

static void fork_register(void) { pthread_atfork(fork_prepare, fork_parent, fork_child); }

static cxlkv_pool *pool_make(const char *path) {
    /* Before any lock is taken that a fork by another thread could copy. */
    static pthread_once_t registered = PTHREAD_ONCE_INIT;
    pthread_once(&registered, fork_register);
    cxlkv_pool *pool = calloc(1, sizeof(*pool));
    if (!pool) return NULL;
    pool->region.fd = pool->host_fd = pool->fork_state_fd = pool->fork_region_fd = -1;
    pool->state.folder = -1;
    pool->slot = pool->fork_slot = UINT32_MAX;
    pool->thread_count = 1;
    pool->lock_wait_ns = 30000000000u;
    atomic_store(&pool->references, 1);
    atomic_store(&pool->deadlines.first_ns, UINT64_MAX);
    operations_init(pool);
    pthread_mutex_init(&pool->list_lock, NULL);
    pthread_mutex_init(&pool->spare_lock, NULL);
    counters_unbind(pool);
    pool->path = path ? strdup(path) : NULL;
    if (path && !pool->path) {
        pool_drop(pool);
        return NULL;
    }
    return pool;
}

static void pool_unmake(cxlkv_pool *pool) {
    keeper_stop(pool);
    host_detach(pool);
    if (pool->region.base) region_unmap(&pool->region);
    if (pool->region.fd >= 0) close(pool->region.fd);
    pool->region.fd = -1;
    free(pool->verified);
    free(pool->loose);
    free(pool->late);
    free(pool->seen);
    pool->seen = NULL;
    pool->verified = NULL;
    pool->loose = NULL;
    pool->late = NULL;
}

static int pool_ready(cxlkv_pool *pool) {
    uint64_t bits = (uint64_t)pool->geometry.page_count * pool->geometry.record_layers;
    pool->verified = calloc((bits + 63) / 64, sizeof(*pool->verified));
    pool->loose = calloc(pool->geometry.page_count / 64 + 1, sizeof(*pool->loose));
    pool->late = calloc(pool->geometry.page_count, sizeof(*pool->late));
    bool objects = stores_objects(&pool->layout);
    if (objects) pool->seen = calloc(pool->geometry.page_count, sizeof(*pool->seen));
    if (!pool->verified || !pool->loose || !pool->late || (objects && !pool->seen))
        return fail(ENOMEM, "no memory for %lu verification bits", bits);
    int code = parts_make(pool);
    if (code == 0) code = guard_install();
    if (code == 0) code = host_attach(pool);
    if (code == 0 && pool->shared) code = keeper_start(pool);
    return code;
}

int pool_format(cxlkv_pool *pool) {
    guard fault;
    volatile int code = 0;
    for (size_t at = 0; at < 16; at += 8) {
        uint64_t half = random_u64();
        memcpy(pool->identity + at, &half, 8);
    }
    GUARD_BEGIN(fault) {
        memset(pool->region.base + pool->geometry.hosts_offset, 0,
               pool->geometry.descriptors_offset - pool->geometry.hosts_offset);
        for (uint32_t page = 0; page < pool->geometry.page_count; page++)
            descriptor_write(pool, page, 1, PAGE_FREE, 0, NULL);
        if (pool->shared) hosts_hand_over(pool->region.base, pool->geometry.extents_offset, true);
        store_fence();
        superblock_write(pool); /* last: on a device, until here there is no pool */
        if (pool->shared) hosts_hand_over(pool->region.base, SUPERBLOCK_BYTES, true);
    } GUARD_END(fault, code = fail(CXLKV_E_POISON, "bus error while the pool was formatted: its "
                                   "file system ran out of memory"))
    return code;
}

/* Whether a superblock may be written there while we look: on a device, and in a file that begins
 * as before that, or as after. Of other files no byte is ours to lock. */
static bool is_written_in_place(int fd) {
    static const uint8_t nothing[8];
    uint8_t magic[sizeof(nothing)];
    struct stat status;
    if (fstat(fd, &status) < 0) return false;
    if (!S_ISREG(status.st_mode)) return S_ISCHR(status.st_mode);
    return pread(fd, magic, sizeof(magic), 0) == (ssize_t)sizeof(magic) &&
           (memcmp(magic, nothing, sizeof(magic)) == 0 || memcmp(magic, "CXLKVPOL", 8) == 0);
}

/* Who opens such a region waits until nobody joins or makes a pool on it. */
static int open_region(const char *path, int flags, int *fd) {
    struct stat status;
    *fd = open(path, flags | O_CLOEXEC);
    if (*fd < 0 && errno == ENXIO && stat(path, &status) == 0 && S_ISCHR(status.st_mode))
        return device_refused("/sys", path, status.st_rdev);
    if (*fd < 0)
        return fail(errno, "%s: cannot open: %s%s", path, strerror(errno), remedy_of(errno));
    if (flags != O_RDWR || !is_written_in_place(*fd)) return 0;
    int code = lock_byte(*fd, ATTACH_BYTE, true, true);
    if (code == 0) return 0;
    close(*fd);
    *fd = -1;
    return byte_lock_error(code, path);
}

static int refuse_place(const char *path) {
    return fail(CXLKV_E_POOL_EXISTS, "%s is neither a regular file nor a dax device", path);
}

/* As what_lies_at(). A device that was never used holds zeros, as does one whose pool was removed,
 * and a file that is given to be a pool's; any other file is somebody's, whatever it holds. */
static int what_lies_in(int fd, const char *path, bool in_place) {
    static const uint8_t nothing[SUPERBLOCK_BYTES];
    uint8_t bytes[SUPERBLOCK_BYTES] = "";
    struct stat status;
    device_facts device;
    bool is_file = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    if (!is_file && !device_of(fd, &device)) return refuse_place(path);
    if (is_file && in_place && status.st_size < SUPERBLOCK_BYTES)
        return fail(ENOSPC, "%s has %ld bytes: a pool in place takes the size that its file has, "
                    "so give it one before (fallocate -l)", path, (long)status.st_size);
    bool in_page = in_place || !is_file;
    bool whole = region_read(fd, 0, bytes, in_page ? sizeof(bytes) : 8);
    if (in_page && !whole)
        return fail(CXLKV_E_POISON, "%s: its first bytes cannot be read", path);
    if (whole && (memcmp(bytes, "CXLKVPOL", 8) == 0 || stripes_is_label(bytes))) return 1;
    return in_page && memcmp(bytes, nothing, sizeof(bytes)) == 0 ? 0 : 2;
}

/* What lies at path, if anything: 0 nothing, 1 a pool or a part of one, 2 something else, or an
 * error. */
static int what_lies_at(const char *path, bool in_place) {
    struct stat status;
    int fd;
    if (stat(path, &status) < 0)
        return errno == ENOENT ? 0 : fail(errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode)) return refuse_place(path);
    int code = open_region(path, O_RDONLY | O_NONBLOCK, &fd);
    if (code < 0) return code;
    code = what_lies_in(fd, path, in_place);
    close(fd);
    return code;
}

static int refuse_existing(const char *path, int what) {
    if (what == 1)
        return fail(CXLKV_E_POOL_EXISTS,
                    "%s is a pool already, or a part of one: open it, remove it first, or pass "
                    "replace=True (cxlkv pool create --replace)", path);
    return fail(CXLKV_E_POOL_EXISTS,
                "%s exists and is not a pool: it is not overwritten unless force=True", path);
}

/* A pool goes by a word of its own: whoever forces over something that is in the way may not know
 * that prefixes are published there. */
static bool may_overwrite(int what, uint32_t flags) {
    return what == 0 || flags & (what == 1 ? CXLKV_CREATE_REPLACE : CXLKV_CREATE_FORCE);
}

int busy_error(const char *path) {
    return fail(CXLKV_E_BUSY, "%s is in use: close it in the other processes first", path);
}

/* link() fails where a file is, rename() replaces it: both show the finished pool at once. */
static int file_into_place(const char *made, const char *path, bool over) {
    if (over) {
        if (rename(made, path) == 0) return 0;
    } else if (link(made, path) == 0) {
        unlink(made);
        return 0;
    }
    int code = errno;
    unlink(made);
    if (code == EEXIST) return refuse_existing(path, what_lies_at(path, false));
    return fail(code, "%s: cannot be put in place: %s", path, strerror(code));
}

/* On a device, or in a file that keeps its size: what was there is wiped first, and the superblock
 * comes last, so that a creation that is cut short leaves no pool. */
static int create_in_place(cxlkv_pool *pool, const char *path, uint32_t flags) {
    device_facts facts;
    uint64_t bytes = pool->geometry.region_bytes;
    int code = open_region(path, O_RDWR, &pool->region.fd);
    if (code == 0) code = region_facts(pool->region.fd, path, &facts);
    if (code < 0) return code;
    if (bytes > facts.bytes)
        return fail(ENOSPC, "%s has %lu MiB, %lu MiB wanted: ask for less", path,
                    facts.bytes >> 20, bytes >> 20);
    /* Held already, but where a file held something else when it was opened. */
    if (lock_byte(pool->region.fd, ATTACH_BYTE, true, false) < 0) return busy_error(path);
    int what = what_lies_in(pool->region.fd, path, true);
    if (what < 0) return what;
    if (!may_overwrite(what, flags)) return refuse_existing(path, what);
    if (!byte_is_free(pool->region.fd, USE_BYTE)) return busy_error(path);
    if (!device_of(pool->region.fd, &facts)) code = region_fill_holes(pool->region.fd, bytes, path);
    if (code == 0 && what != 0) code = device_wipe(pool->region.fd, &facts, path);
    if (code == 0) code = region_map_file(&pool->region, pool->geometry.region_bytes);
    return code < 0 ? code : pool_format(pool);
}

static int remove_at(const char *path, bool in_place);

/* Refuses while somebody uses it. A part of a striped pool is none that could be removed. */
static int remove_old(const char *path, bool in_place) {
    int fd, code = remove_at(path, in_place);
    if (code != -CXLKV_E_NOT_A_POOL) return code == -CXLKV_E_BUSY ? code : 0;
    code = open_region(path, O_RDONLY | O_NONBLOCK, &fd);
    if (code < 0) return code;
    code = byte_is_free(fd, USE_BYTE) ? 0 : busy_error(path);
    close(fd);
    return code;
}

static int create_region(cxlkv_pool *pool, const char *path, uint32_t flags) {
    if (!path) {
        int code = region_map_anonymous(&pool->region, pool->geometry.region_bytes);
        return code < 0 ? code : pool_format(pool);
    }
    if (stripes_path(path)) return striped_create(pool, path, flags);
    struct stat status;
    pool->in_place |= stat(path, &status) == 0 && S_ISCHR(status.st_mode);
    int what = what_lies_at(path, pool->in_place);
    if (what < 0) return what;
    if (!may_overwrite(what, flags)) return refuse_existing(path, what);
    int code = what == 1 ? remove_old(path, pool->in_place) : 0;
    if (code < 0) return code;
    if (pool->in_place && pool->region.nodes)
        return fail(ENOTSUP, "%s: a device lies where it lies, and so does a file that is there: "
                    "leave the nodes away", path);
    if (pool->in_place) return create_in_place(pool, path, flags);
    char made[4096];
    code = region_create_file(&pool->region, pool->geometry.region_bytes, path, made,
                              sizeof(made));
    if (code < 0) return code;
    code = pool_format(pool);
    if (code == 0) return file_into_place(made, path, what != 0);
    unlink(made);
    return code;
}

static int finish(cxlkv_pool *pool, int code, const cxlkv_host *host, cxlkv_pool **out) {
    if (code == 0) code = peers_prepare(pool, host);
    if (code == 0) code = pool_ready(pool);
    if (code < 0) {
        pool_unmake(pool);
        pool_drop(pool);
        return code;
    }
    pools_add(pool);
    *out = pool;
    return 0;
}

static const cxlkv_sharing one_host = {.kind = CXLKV_SHARING_HOST, .hosts = 1};

int cxlkv_pool_create(const char *path, const cxlkv_layout *layout, const cxlkv_sharing *sharing,
                      uint64_t capacity_bytes, uint32_t flags, const cxlkv_host *host,
                      cxlkv_pool **out) {
    return cxlkv_pool_create_at(path, layout, sharing, capacity_bytes, flags, host, 0, out);
}

int cxlkv_pool_create_at(const char *path, const cxlkv_layout *layout,
                         const cxlkv_sharing *sharing, uint64_t capacity_bytes, uint32_t flags,
                         const cxlkv_host *host, uint64_t nodes, cxlkv_pool **out) {
    cxlkv_geometry geometry;
    cxlkv_sharing shared = sharing ? *sharing : one_host;
    int code = geometry_make(layout, &shared, capacity_bytes, &geometry);
    if (code < 0) return code;
    cxlkv_pool *pool = pool_make(path);
    if (!pool) return fail(ENOMEM, "no memory for the pool's handle");
    pool->layout = *layout;
    pool->sharing = shared;
    pool->geometry = geometry;
    pool->region.nodes = nodes;
    pool->in_place = flags & CXLKV_CREATE_IN_PLACE;
    code = peers_prepare(pool, host); /* what it has to say about the host, before a file is made */
    if (code == 0) code = create_region(pool, path, flags);
    bool placed = code == 0 && path;
    code = finish(pool, code, host, out);
    if (code < 0 && placed) { /* the file is whole, but it was not what the caller asked for */
        char why[512];
        snprintf(why, sizeof(why), "%s", cxlkv_error_text());
        cxlkv_pool_remove(path);
        fail(-code, "%s", why);
    }
    return code;
}

/* Unlocked by name: a child that was forked meanwhile has the file open, too. */
void close_region(int fd) {
    unlock_byte(fd, ATTACH_BYTE);
    unlock_byte(fd, USE_BYTE);
    close(fd);
}

int open_checked(enum superblock_purpose purpose, const char *path, int *fd, cxlkv_layout *layout,
                 cxlkv_sharing *sharing, cxlkv_geometry *geometry, uint8_t *identity) {
    uint8_t bytes[SUPERBLOCK_BYTES];
    uint64_t region_bytes;
    int code = open_region(path, O_RDWR, fd);
    if (code < 0) return code;
    code = region_size(*fd, path, &region_bytes);
    if (code == 0 && !region_read(*fd, 0, bytes, sizeof(bytes)))
        code = fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool: %lu bytes, and its first %d "
                    "cannot be read", path, region_bytes, SUPERBLOCK_BYTES);
    if (code == 0)
        code = superblock_read(purpose, bytes, region_bytes, path, layout, sharing, geometry,
                               identity);
    if (code < 0) {
        close_region(*fd);
        *fd = -1;
    }
    return code;
}

int cxlkv_pool_open(const char *path, const cxlkv_host *host, cxlkv_pool **out) {
    cxlkv_pool *pool = pool_make(path);
    if (!pool) return fail(ENOMEM, "no memory for the pool's handle");
    int code;
    if (stripes_path(path)) {
        code = striped_open(pool, path, SUPERBLOCK_USE);
    } else {
        code = open_checked(SUPERBLOCK_USE, path, &pool->region.fd, &pool->layout, &pool->sharing,
                            &pool->geometry, pool->identity);
        if (code == 0) code = region_map_file(&pool->region, pool->geometry.region_bytes);
    }
    return finish(pool, code, host, out);
}

/* Its host state stays, as the identity cannot be trusted: `cxlkv pool gc` finds that. */
static int remove_damaged(const char *path, bool in_place) {
    int fd, code = open_region(path, O_RDWR, &fd);
    if (code < 0) return code;
    code = byte_is_free(fd, USE_BYTE) ? region_discard(fd, path, in_place) : busy_error(path);
    close_region(fd);
    return code;
}

static int remove_at(const char *path, bool in_place) {
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint8_t identity[16];
    int fd, code = open_checked(SUPERBLOCK_USE, path, &fd, &layout, &sharing, &geometry, identity);
    /* A damaged pool may go as well; something that never was one may not. */
    if (code == -CXLKV_E_CORRUPT || code == -CXLKV_E_TRUNCATED || code == -CXLKV_E_VERSION ||
        code == -CXLKV_E_GEOMETRY)
        return remove_damaged(path, in_place);
    if (code < 0) return code;
    code = lock_byte(fd, ATTACH_BYTE, true, true);
    if (code < 0) code = byte_lock_error(code, path);
    if (code == 0 && lock_byte(fd, USE_BYTE, true, false) < 0) code = busy_error(path);
    if (code == 0) code = region_discard(fd, path, in_place);
    bool shared = sharing.kind != CXLKV_SHARING_HOST;
    for (uint32_t host = 0; code == 0 && host < sharing.hosts; host++)
        host_remove_state(identity, fd, shared ? host : NO_HOST);
    close_region(fd);
    return code;
}

int cxlkv_pool_remove(const char *path) {
    return stripes_path(path) ? striped_remove(path) : remove_at(path, false);
}

/* ---- closing ---- */

static void pool_end(cxlkv_pool *pool) {
    pthread_mutex_lock(&pool->list_lock);
    hooks.sequences_release(pool);
    workers *threads = pool->threads;
    pool->threads = NULL;
    pthread_mutex_unlock(&pool->list_lock);
    workers_destroy(threads);
    hooks.worker_leave(pool);
    hooks.local_drop_all(pool);
    pool_unmake(pool); /* gives all our pages back at once */
    pool->closed = true;
}

/* Under the lock of operations. */
static int lent_check(const cxlkv_pool *pool) {
    uint32_t lent = atomic_load(&pool->lent);
    if (!lent || pool->closed) return 0;
    return fail(CXLKV_E_BUSY, "the pool cannot be closed: %u objects in its memory are held by "
                "leases, or by views that outlived these. Release and drop them first", lent);
}

/* even_lent: nobody is left who could read what was lent. */
static int pool_close(cxlkv_pool *pool, bool even_lent) {
    int code = 0;
    /* Fork takes the two in this order; between them it would copy a pool that it does not see. */
    pthread_mutex_lock(&pools_lock);
    pthread_rwlock_wrlock(&pool->operations);
    if (!even_lent) code = lent_check(pool);
    if (!pool->closed && code == 0) pool_end(pool);
    pthread_rwlock_unlock(&pool->operations);
    pthread_mutex_unlock(&pools_lock);
    return code;
}

int cxlkv_pool_close(cxlkv_pool *pool) { return pool_close(pool, false); }

int cxlkv_pool_may_close(cxlkv_pool *pool) {
    pthread_rwlock_rdlock(&pool->operations);
    int code = lent_check(pool);
    pthread_rwlock_unlock(&pool->operations);
    return code;
}

void cxlkv_pool_destroy(cxlkv_pool *pool) {
    if (!pool) return;
    pool_close(pool, true);
    pool_drop(pool);
}

void cxlkv_pool_destroy_at(cxlkv_pool **at) { cxlkv_pool_destroy(*at); }

/* ---- looking ---- */

int cxlkv_pool_layout(cxlkv_pool *pool, cxlkv_layout *layout) {
    *layout = pool->layout;
    return 0;
}

int cxlkv_pool_sharing(cxlkv_pool *pool, cxlkv_sharing *sharing) {
    *sharing = pool->sharing;
    return 0;
}

int cxlkv_pool_geometry(cxlkv_pool *pool, cxlkv_geometry *geometry) {
    *geometry = pool->geometry;
    return 0;
}

int cxlkv_pool_identity(cxlkv_pool *pool, uint8_t *identity) {
    memcpy(identity, pool->identity, sizeof(pool->identity));
    return 0;
}

const char *cxlkv_pool_page_kind(cxlkv_pool *pool) { return pool->region.page_kind; }

int cxlkv_pool_set_threads(cxlkv_pool *pool, uint32_t threads) {
    if (threads == 0 || threads > 1024)
        return fail(CXLKV_E_ARGUMENT, "%u threads: outside 1 to 1024", threads);
    /* The write lock: no task runs while its threads are replaced. */
    pthread_rwlock_wrlock(&pool->operations);
    bool closed = pool->closed;
    workers *old = pool->threads;
    pool->threads = NULL;
    pool->thread_count = threads;
    pthread_rwlock_unlock(&pool->operations);
    workers_destroy(old);
    return closed ? fail(CXLKV_E_CLOSED, "the pool is closed: open it again") : 0;
}

static void count_pages(const cxlkv_pool *pool, cxlkv_stats *stats) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        const page_info *info = &pool->pages[page];
        stats->pages_published += info->published;
        stats->pages_pinned += info->pinned;
        if (!page_is_ours(pool, page)) {
            stats->pages_elsewhere++;
            stats->pages_borrowed += info->holders != 0;
        } else if (info->withdrawn) stats->pages_withdrawn++;
        else if (info->retired) stats->pages_retired++;
        else if (info->quarantined) stats->pages_quarantined++;
        else if (info->holders) stats->pages_held++;
        else if (info->published) stats->pages_published_only++;
    }
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
        stats->processes += pool->host->processes[slot].state != 0;
}

int cxlkv_pool_stats(cxlkv_pool *pool, cxlkv_stats *stats) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    hooks.sequences_expire(pool);
    memset(stats, 0, sizeof(*stats));
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        stats->pages_total = pool->host->page_count;
        stats->pages_free = pool->host->free_pages;
        count_pages(pool, stats);
        cxlkv_counters all;
        counters_total(pool->host, &all);
        stats->reaped_processes = all.reaped_processes;
        stats->rebuilds = all.rebuilds;
        stats->lost_lines = all.lost_lines;
        stats->log_rescans = all.log_rescans;
        stats->lost_forgets = all.lost_forgets;
        host_unlock(pool);
    }
    pthread_mutex_lock(&pool->list_lock);
    stats->sequences = pool->sequence_count;
    pthread_mutex_unlock(&pool->list_lock);
    cxlkv_counters own;
    counters_of_slot(pool->host, pool->slot, &own);
    stats->appended_bytes = own.appended_bytes;
    stats->scored_bytes = own.scored_bytes;
    stats->fetched_bytes = own.fetched_bytes;
    stats->attended_bytes = own.attended_bytes;
    stats->corrupt_pieces = own.corrupt_pieces;
    stats->stale_handles = own.stale_handles;
    stats->window_pages_freed = own.window_pages_freed;
    stats->window_pages_skipped = own.window_pages_skipped;
    stats->queued_drops = own.queued_drops;
    stats->lock_waits = own.lock_waits;
    pool_leave(pool);
    return code;
}

/* ---- where its memory lies ---- */

int cxlkv_pool_placed(cxlkv_pool *pool, uint64_t pages_max, cxlkv_placed *placed) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    code = place_look(&pool->region, pages_max, placed);
    pool_leave(pool);
    return code;
}

int64_t cxlkv_pool_prefault(cxlkv_pool *pool, uint64_t offset, uint64_t bytes) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    code = region_prefault(&pool->region, offset, bytes, pool->geometry.region_bytes);
    pool_leave(pool);
    return code;
}
