/* The host state: what the processes of one host share about a pool, in their own DRAM. */
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/flush.h"
#include "pool/peers.h"

#define HOST_MAGIC 0x33315453484b5643ull /* "CVKHST13" */

/* ---- processes: {pid, start time, namespace}; a pid alone is reused ---- */

typedef struct process_view {
    char state;
    uint64_t thread_count, start_time;
} process_view;

static bool process_look(int32_t pid, process_view *seen) {
    char path[64], line[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file) return false;
    size_t length = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    line[length] = 0;
    char *after_name = strrchr(line, ')'); /* the name itself may hold spaces and brackets */
    if (!after_name || after_name[1] == 0) return false;
    seen->state = after_name[2];
    char *at = after_name + 2; /* field 3; 20 is the number of threads, 22 the start time */
    for (int field = 3; field < 22; field++) {
        at = strchr(at + 1, ' ');
        if (!at) return false;
        if (field + 1 == 20) seen->thread_count = strtoull(at, NULL, 10);
    }
    seen->start_time = strtoull(at, NULL, 10);
    return true;
}

void process_identify(process_slot *slot) {
    process_view seen;
    struct stat status;
    slot->pid = getpid();
    slot->nonce = random_u64();
    slot->start_time = process_look(slot->pid, &seen) ? seen.start_time : 0; /* 0: not known */
    slot->pid_namespace = stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

/* A process of another pid namespace cannot be judged from here: it counts as alive. */
bool process_is_dead(const process_slot *slot) {
    struct stat status;
    process_view seen;
    uint64_t ours = stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
    if (slot->pid_namespace != ours) return false;
    if (!process_look(slot->pid, &seen)) return kill(slot->pid, 0) < 0 && errno == ESRCH;
    if (slot->start_time && seen.start_time != slot->start_time) return true;
    /* While a zombie has threads on their way out, one of them may still be storing to a page. */
    return (seen.state == 'Z' || seen.state == 'X') && seen.thread_count <= 1;
}

uint32_t *held_of(const cxlkv_pool *pool, uint32_t slot) {
    const host_state *host = pool->host;
    return (uint32_t *)((uint8_t *)host + host->held_offset + slot * host->held_stride_bytes);
}

static int room_error(int code, uint64_t bytes, const char *what) {
    if (code != ENOSPC)
        return fail(code == EFBIG ? ENOSPC : code, "/dev/shm: cannot reserve %lu KiB for %s: %s%s",
                    bytes >> 10, what, strerror(code), remedy_of(code));
    return fail(ENOSPC, "no room in /dev/shm for %lu KiB of %s. Make it larger (in Docker: "
                "--shm-size)", bytes >> 10, what);
}

int host_register(cxlkv_pool *pool, uint32_t state, uint32_t *slot) {
    host_state *host = pool->host;
    for (uint32_t i = 0; i < PROCESS_MAX; i++) {
        if (host->processes[i].state != 0) continue;
        int code = posix_fallocate(pool->host_fd,
                                   (off_t)(host->held_offset + i * host->held_stride_bytes),
                                   (off_t)host->held_stride_bytes);
        if (code != 0) return room_error(code, host->held_stride_bytes, "page references");
        memset(held_of(pool, i), 0, host->held_stride_bytes);
        counters_begin(host, i);
        process_identify(&host->processes[i]);
        host->processes[i].state = state;
        *slot = i;
        return 0;
    }
    return fail(CXLKV_E_PROCESSES, "%d processes have this pool open: close one", PROCESS_MAX);
}

void host_unregister(cxlkv_pool *pool, uint32_t slot) {
    pages_drop_slot(pool, slot);
    pool->host->processes[slot].state = 0;
}

/* The last row is nobody's own: whoever has the lock writes it. */
void host_count(host_state *host, enum counter which) {
    atomic_fetch_add_explicit(&host->counters[PROCESS_MAX].counts[which], 1, memory_order_relaxed);
}

/* By the lock alone: a pid says nothing in another namespace, as of a container. The kernel drops
 * it when the last thread has gone, so that none of them stores to a page any more. A child that is
 * being forked has its lock from its parent, and keeps it when that dies first. */
bool slot_is_dead(int state_fd, uint32_t slot) { return byte_is_free(state_fd, LIVE_BYTE + slot); }

uint64_t host_reap(cxlkv_pool *pool) {
    uint64_t reaped = 0;
    for (uint32_t i = 0; i < PROCESS_MAX; i++) {
        if (pool->host->processes[i].state == 0 || i == pool->slot) continue;
        if (!slot_is_dead(pool->host_fd, i)) continue;
        host_unregister(pool, i);
        host_count(pool->host, COUNT_REAPED_PROCESSES);
        reaped++;
    }
    return reaped;
}

/* ---- the lock ---- */

void rewrite_begin(cxlkv_pool *pool, uint32_t page) {
    pool->host->rewriting = page;
    atomic_signal_fence(memory_order_seq_cst); /* a death is seen in program order: no CPU fence */
}

void rewrite_end(cxlkv_pool *pool) {
    atomic_signal_fence(memory_order_seq_cst);
    pool->host->rewriting = NO_PAGE;
}

/* A death inside rewrite_begin .. rewrite_end may have torn the record's lines. Only whole, sealed
 * pages are rewritten, so it is made one again; the rebuild frees it if nobody holds it. */
static void rewrite_repair(cxlkv_pool *pool) {
    uint32_t page = pool->host->rewriting;
    guard fault;
    pool->host->rewriting = NO_PAGE;
    if (page >= pool->host->page_count) return;
    GUARD_BEGIN(fault) {
        record_seal(pool, page, record_part(pool, page), record_tokens(pool, page), NULL);
    } GUARD_END(fault, pool->pages[page].retired = 1)
}

/* Its holder died in the middle of a change: derive all that is derived anew. */
static void repair(cxlkv_pool *pool) {
    if (pool->shared) {
        peers_sync(pool);
        hosts_recover(&pool->hosts);
        pool->host->log_next = hosts_log_end(&pool->hosts, pool->hosts.self);
        pool->host->wanted_extents = 0; /* whoever waited for them is dead */
        /* It may have marked some runs of an extent only, which is ours in any case: what changes
         * hands is marked after it came, and before it goes. Who has the claims looks again. */
        extents_doubt(pool);
        /* V5: a page that it had begun to free is free for others, too, before it is used again. */
        descriptors_hand_over(pool, true);
    }
    rewrite_repair(pool);
    host_rebuild(pool);
    if (pool->shared) borrow_recover(pool);
    host_reap(pool);
    host_count(pool->host, COUNT_REBUILDS);
    if (pool->shared) log_again(pool);
    pthread_mutex_consistent(&pool->host->mutex);
}

/* What must be done first, by whoever has got it. */
static void locked(cxlkv_pool *pool, bool owner_died) {
    __atomic_store_n(&pool->host->holder, pool->slot, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->lock_thread, pthread_self(), __ATOMIC_RELAXED);
    if (owner_died) repair(pool);
    else if (pool->shared) peers_sync(pool);
    bool late = atomic_load_explicit(&pool->late_count, memory_order_acquire) != 0;
    if (__builtin_expect(late, 0) && pool->held) pages_drop_late(pool);
}

int host_trylock(cxlkv_pool *pool) {
    int code = pthread_mutex_trylock(&pool->host->mutex);
    if (code != 0 && code != EOWNERDEAD) return -CXLKV_E_TIMEOUT;
    locked(pool, code == EOWNERDEAD);
    return 0;
}

/* glibc has it from 2.30 on; a build for an older one finds it where it runs. */
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
    __attribute__((weak));

#if defined(__SANITIZE_THREAD__) /* of gcc 12 does not know that it locks */
#define WAITS_BY_CLOCK false
#else
#define WAITS_BY_CLOCK (pthread_mutex_clocklock != NULL)
#endif

/* By a clock that nobody sets: else a step of the machine's time would be taken for a wait. */
int mutex_lock_until(pthread_mutex_t *mutex, uint64_t until_ns) {
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                                   .tv_nsec = (long)(until_ns % 1000000000u)};
    if (WAITS_BY_CLOCK) return pthread_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
    struct timespec nap = {.tv_nsec = 20000};
    int code;
    while ((code = pthread_mutex_trylock(mutex)) == EBUSY && monotonic_ns() < until_ns) {
        nanosleep(&nap, NULL);
        nap.tv_nsec += nap.tv_nsec < 1000000 ? nap.tv_nsec / 4 : 0;
    }
    return code == EBUSY ? ETIMEDOUT : code;
}

/* Who had the lock last, as far as that can be told without it. */
static int lock_error(cxlkv_pool *pool) {
    uint32_t holder = __atomic_load_n(&pool->host->holder, __ATOMIC_RELAXED);
    double waited_s = (double)pool->lock_wait_ns * 1e-9;
    process_view seen;
    int32_t pid = holder < PROCESS_MAX ? pool->host->processes[holder].pid : 0;
    if (pid <= 0 || !process_look(pid, &seen))
        return fail(CXLKV_E_TIMEOUT, "the pool's lock was not free for %g s, and who has it is not "
                    "known: a process that opens the pool, or one of another container", waited_s);
    bool stopped = seen.state == 'T' || seen.state == 't';
    return fail(CXLKV_E_TIMEOUT, "the pool's lock was not free for %g s: process %d has it, %s",
                waited_s, pid,
                stopped ? "and is stopped. Let it go on (kill -CONT), or end it"
                        : "which runs. If it makes no progress, end it");
}

/* Waits are counted from 1 ms on: who reads own pages should never see one. */
static int lock_slowly(cxlkv_pool *pool) {
    uint64_t began_ns = monotonic_ns();
    int code = mutex_lock_until(&pool->host->mutex, began_ns + pool->lock_wait_ns);
    if (monotonic_ns() - began_ns > 1000000) count_add(pool, COUNT_LOCK_WAITS, 1);
    return code;
}

int host_lock(cxlkv_pool *pool) {
    int code = pthread_mutex_trylock(&pool->host->mutex);
    if (code == EBUSY) code = lock_slowly(pool);
    if (code != 0 && code != EOWNERDEAD) return lock_error(pool);
    locked(pool, code == EOWNERDEAD);
    return 0;
}

void host_unlock(cxlkv_pool *pool) {
    if (pool->log_count) log_write(pool);
    host_assert(pool);
    __atomic_store_n(&pool->lock_thread, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&pool->host->mutex);
}

/* ---- making and rebuilding ---- */

uint64_t host_state_layout(uint32_t page_count, host_state *host) {
    uint64_t capacity = 64;
    while (capacity < 2ull * page_count) capacity *= 2;
    host->page_count = page_count;
    host->run_count = (page_count + RUN_SLOTS - 1) / RUN_SLOTS;
    host->index_capacity = (uint32_t)capacity;
    host->pages_offset = align_up(sizeof(host_state), 4096);
    host->heat_offset = align_up(host->pages_offset + page_count * sizeof(page_info), 4096);
    host->reuse_offset = align_up(host->heat_offset + page_count * sizeof(atomic_uint), 4096);
    host->runs_offset = align_up(host->reuse_offset + page_count * sizeof(reuse_record), 4096);
    host->index_offset = align_up(host->runs_offset + host->run_count * sizeof(run_info), 4096);
    host->held_offset = align_up(host->index_offset + capacity * sizeof(index_entry), 4096);
    host->held_stride_bytes = align_up(page_count * sizeof(uint32_t), 4096);
    host->bytes = host->held_offset + PROCESS_MAX * host->held_stride_bytes;
    return host->bytes;
}

/* Two hosts may have published one text; each finds its own copy, so that it can give that up. */
static bool index_page(cxlkv_pool *pool, const uint64_t hash[2], uint32_t page) {
    uint32_t other = index_find(pool, hash);
    if (other == page) return true;
    if (other != NO_PAGE) {
        if (page_is_ours(pool, other) || !page_is_ours(pool, page)) return false;
        index_erase(pool, hash);
        page_unpublish(pool, other);
    }
    return index_insert(pool, hash, page);
}

/* Slots of the processes that are registered: few of all. */
typedef struct registered {
    uint32_t count, slots[PROCESS_MAX];
} registered;

static registered registered_slots(const host_state *host) {
    registered all = {0};
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
        if (host->processes[slot].state) all.slots[all.count++] = slot;
    return all;
}

/* The region's descriptors say what is published; all else that nobody holds is free, or will be
 * when its descriptor says so: then the answer is true. */
static bool rebuild_page(cxlkv_pool *pool, uint32_t page, const registered *processes) {
    page_info *info = &pool->pages[page];
    descriptor line;
    info->holders = 0;
    for (uint32_t i = 0; i < processes->count; i++)
        info->holders += held_of(pool, processes->slots[i])[page] != 0;
    bool ours = page_is_ours(pool, page);
    info->published = info->quarantined = 0;
    if (descriptor_read(pool, page, &line) < 0) {
        /* A holder may be writing it just now, or died so: then the page is settled when reaped. */
        info->quarantined = ours && info->holders == 0;
        return false;
    }
    uint64_t generation = line.version >> 8, state = line.version & 255;
    if (!ours && info->holders && generation != info->generation) return false; /* as pinned */
    if (generation > info->generation || !ours) info->generation = generation;
    bool forgotten = state == PAGE_PUBLISHED && is_forgotten(pool, &line);
    if (state == PAGE_PUBLISHED && !forgotten && index_page(pool, line.hash, page)) {
        info->published = 1;
        hotness_found(pool, page, line.part);
        pool->host->published_pages++;
    } else if (ours && state == PAGE_PUBLISHED && !info->retired) {
        descriptor_write(pool, page, info->generation, PAGE_SEALED, line.tokens, NULL);
    }
    if (!info->published) info->pinned = 0;
    return state != PAGE_FREE;
}

static bool rebuild_page_guarded(cxlkv_pool *pool, uint32_t page, const registered *processes) {
    guard fault;
    volatile bool sealed = false;
    GUARD_BEGIN(fault) {
        sealed = rebuild_page(pool, page, processes);
    } GUARD_END(fault, pool->pages[page].retired = 1)
    return sealed;
}

/* Where the index will be looked at, for all descriptors of a word: these are misses otherwise. */
static void expect_index(cxlkv_pool *pool, uint32_t first, uint32_t end) {
    guard fault;
    GUARD_BEGIN(fault) {
        for (uint32_t page = first; page < end; page++) {
            const descriptor *line = descriptor_of(pool, page);
            uint64_t hash[2] = {flush_load_word(&line->hash[0]), flush_load_word(&line->hash[1])};
            index_expect(pool, hash);
        }
    } GUARD_END(fault, (void)fault) /* its page is found below */
}

/* What a page is now that its descriptor was read. True: it is to be freed. */
static bool rebuild_state(cxlkv_pool *pool, uint32_t page, bool sealed, bool pinned) {
    run_info *run = &pool->runs[page / RUN_SLOTS];
    page_info *info = &pool->pages[page];
    pool->host->withdrawn_pages -= info->withdrawn;
    info->withdrawn = 0;
    if (!run->ours || info->holders || info->published || info->retired || info->quarantined)
        return false;
    if (sealed) return true;
    info->withdrawn = pinned;
    pool->host->withdrawn_pages += pinned;
    if (pinned || !page_scrubbed(pool, page)) return false;
    run->free_mask |= (uint16_t)(1u << page % RUN_SLOTS);
    pool->host->free_pages++;
    hotness_freed(pool, page);
    return false;
}

void host_rebuild_runs(cxlkv_pool *pool, uint32_t first_run, uint32_t count) {
    registered processes = registered_slots(pool->host);
    uint32_t first = first_run * RUN_SLOTS, word = first / 64 * 64;
    uint32_t end = min_u32(pool->host->page_count, first + count * RUN_SLOTS);
    uint64_t pinned = 0, over = 0;
    bool some_ours = false;
    for (uint32_t run = first_run; run * RUN_SLOTS < end; run++) {
        run_info *info = &pool->runs[run];
        info->free_mask = 0; /* `ours` stays: who has the claims may be reading it */
        info->next = info->previous = NO_PAGE;
        some_ours |= info->ours;
    }
    /* V6: a page that is free may still be read on another host. */
    if (pool->shared && some_ours) pinned = pinned_elsewhere(pool, first);
    expect_index(pool, first, end);
    for (uint32_t page = first; page < end; page++) {
        uint64_t bit = 1ull << page % 64;
        bool sealed = rebuild_page_guarded(pool, page, &processes);
        if (rebuild_state(pool, page, sealed, (pinned & bit) != 0)) over |= bit;
    }
    for (uint32_t run = (end + RUN_SLOTS - 1) / RUN_SLOTS; run-- > first_run;)
        pages_list(pool, run);
    if (over) pages_free_word(pool, word, over);
}

/* From the end, so that the first runs are the first to be taken. */
void host_rebuild(cxlkv_pool *pool) {
    host_state *host = pool->host;
    uint32_t runs = 64 / RUN_SLOTS;
    index_clear(pool);
    forgotten_read(pool);
    host->free_pages = host->published_pages = 0;
    host->free_runs = host->partial_runs = NO_PAGE;
    for (uint32_t word = (host->run_count + runs - 1) / runs; word-- > 0;)
        host_rebuild_runs(pool, word * runs, runs);
    forgotten_drop(pool);
}

void log_again(cxlkv_pool *pool) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        descriptor line;
        if (!page_is_ours(pool, page) || !pool->pages[page].published) continue;
        if (descriptor_try(pool, page, &line) == 0)
            log_add(pool, LOG_PUBLISH, page, line.version >> 8, line.hash);
    }
}

static void bind_tables(cxlkv_pool *pool) {
    uint8_t *base = (uint8_t *)pool->host;
    pool->pages = (page_info *)(base + pool->host->pages_offset);
    pool->heat = (atomic_uint *)(base + pool->host->heat_offset);
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
    if (code != 0) return room_error(code, fresh.held_offset, "the pool's host state");
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
    uint64_t bytes = host_state_layout(page_count, &expected);
    return host->magic == HOST_MAGIC && host->ready && host->nonce != 0 && host->bytes == bytes &&
           host->page_count == page_count && host->run_count == expected.run_count &&
           host->index_capacity == expected.index_capacity &&
           host->pages_offset == expected.pages_offset &&
           host->heat_offset == expected.heat_offset &&
           host->reuse_offset == expected.reuse_offset &&
           host->runs_offset == expected.runs_offset &&
           host->index_offset == expected.index_offset &&
           host->held_offset == expected.held_offset &&
           host->held_stride_bytes == expected.held_stride_bytes &&
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

/* What lies there was left behind, or it stays: who has it open would go on with it, while others
 * made another. `cxlkv pool gc` has the lock for a moment when it looks. */
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

/* What outlives the host state: the totals, and when the pool was last in use (the file's time). */
static void leave_traces(cxlkv_pool *pool) {
    guard fault;
    GUARD_BEGIN(fault) {
        counters_save(pool);
    } GUARD_END(fault, (void)fault) /* who leaves has no use for the loss of a count */
    futimens(pool->region.fd, NULL);
}

static void leave_pool(cxlkv_pool *pool) {
    guard fault;
    GUARD_BEGIN(fault) {
        counters_save(pool);
    } GUARD_END(fault, (void)fault) /* as above */
    peers_leave(pool);
}

/* Not while somebody else has it open, and only what the name still means. */
static void state_remove(const state_place *place, int fd) {
    state_place slots = *place;
    if (lock_byte(fd, STATE_BYTE, true, false) < 0 || !state_file_is(place, fd)) return;
    state_file_unlink(place);
    state_place_worker(&slots); /* of a worker that was killed: one that lives uses the state */
    state_file_unlink(&slots);
}

void host_remove_state(const uint8_t identity[16], int fd, uint32_t host) {
    state_place place;
    if (state_place_open(fd, identity, host, false, &place) != 1) return;
    int state = state_file_open(&place, O_RDWR);
    if (state >= 0) {
        state_remove(&place, state);
        close(state);
    }
    state_place_close(&place);
}

/* True: nobody is left. Who came no further than the state itself does not wait for its lock. */
static bool unregister(cxlkv_pool *pool) {
    if ((pool->held ? host_lock(pool) : host_trylock(pool)) < 0) return false;
    if (pool->held) host_unregister(pool, pool->slot);
    host_reap(pool);
    bool last = true;
    for (uint32_t i = 0; i < PROCESS_MAX; i++)
        if (pool->host->processes[i].state) last = false;
    if (last && pool->shared) leave_pool(pool);
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
    if (pool->path && !pool->shared && pool->host->ready) leave_traces(pool);
    counters_unbind(pool);
    alive_end(pool->alive);
    pool->alive = NULL;
    if (pool->path && last && alone &&
        (pool->shared || lock_byte(pool->region.fd, USE_BYTE, true, false) == 0))
        state_remove(&pool->state, pool->host_fd);
    state_leave(pool, pool->host->bytes);
    state_place_close(&pool->state);
    pool->held = NULL;
    /* The use lock goes first: who waits for the attach lock must not find the pool in use. */
    if (pool->path) unlock_byte(pool->region.fd, USE_BYTE);
    if (pool->path) unlock_byte(pool->region.fd, ATTACH_BYTE);
}

/* ---- what must hold, recounted ---- */

#define PROBLEM(...)                                                                       \
    do {                                                                                   \
        problems++;                                                                        \
        if (used < text_bytes) {                                                           \
            int wrote = snprintf(text + used, text_bytes - used, __VA_ARGS__);             \
            used = wrote > 0 ? min_u64(used + (size_t)wrote, text_bytes) : used;           \
        }                                                                                  \
    } while (0)

int host_recount(cxlkv_pool *pool, char *text, size_t text_bytes) {
    const host_state *host = pool->host;
    uint64_t free_pages = 0, published = 0, listed = 0, used = 0;
    int problems = 0;
    if (text_bytes) text[0] = 0;
    for (uint32_t page = 0; page < host->page_count; page++) {
        const page_info *info = &pool->pages[page];
        bool is_free = pool->runs[page / RUN_SLOTS].free_mask >> page % RUN_SLOTS & 1;
        uint32_t holders = 0;
        for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
            if (host->processes[slot].state && held_of(pool, slot)[page]) holders++;
        if (holders != info->holders)
            PROBLEM("page %u: %u processes hold it, %u counted\n", page, holders, info->holders);
        bool wanted = holders || info->published || info->retired || info->quarantined ||
                      info->withdrawn || !page_is_ours(pool, page);
        if (is_free == wanted)
            PROBLEM("page %u: %s\n", page, is_free ? "free but in use" : "lost: in use by nobody");
        free_pages += is_free;
        published += info->published;
    }
    const uint32_t heads[2] = {host->free_runs, host->partial_runs};
    for (int list = 0; list < 2; list++)
        for (uint32_t run = heads[list], steps = 0; run != NO_PAGE; run = pool->runs[run].next) {
            if (run >= host->run_count || steps++ > host->run_count) {
                PROBLEM("the list of %s runs is broken\n", list ? "partly free" : "free");
                break;
            }
            listed += (uint64_t)__builtin_popcount(pool->runs[run].free_mask);
        }
    if (free_pages != host->free_pages || listed != free_pages)
        PROBLEM("%lu pages are free, %lu are counted, %lu are listed\n", free_pages,
                host->free_pages, listed);
    if (published != host->published_pages)
        PROBLEM("%lu pages are published, %lu are counted\n", published, host->published_pages);
    return problems;
}

#if CXLKV_DEBUG >= 2
void host_assert(cxlkv_pool *pool) {
    char text[512];
    if (host_recount(pool, text, sizeof(text)) == 0) return;
    fprintf(stderr, "cxlkv: the allocator's counts do not add up:\n%s", text);
    abort();
}
#endif
