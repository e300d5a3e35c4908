/* The processes of a host. Each has a slot of the host state: {pid, start time, namespace}, for a
 * pid alone is reused. What a dead one held is given back. */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "host/counters.h"
#include "host/processes.h"
#include "pages/pages.h"
#include "region/region.h"

/* /proc shifts the starts of processes as its reader's time namespace says, and rounds after it. */
enum { TICK_NS = 10000000, ROUNDING_TICKS = 2 };

uint64_t process_shift_ticks(void) { return (uint64_t)(boottime_offset_ns() / TICK_NS); }

bool process_look(int32_t pid, process_view *seen) {
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
    seen->start_time = strtoull(at, NULL, 10) - process_shift_ticks();
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
    uint64_t later = seen.start_time - slot->start_time + ROUNDING_TICKS;
    if (slot->start_time && later > 2 * ROUNDING_TICKS) return true;
    /* While a zombie has threads on their way out, one of them may still be storing to a page. */
    return (seen.state == 'Z' || seen.state == 'X') && seen.thread_count <= 1;
}

int host_room_error(int code, uint64_t bytes, const char *what) {
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
        if (code != 0) return host_room_error(code, host->held_stride_bytes, "page references");
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
