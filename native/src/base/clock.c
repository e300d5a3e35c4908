/* Asks the kernel for the time, and for random numbers. */
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/types.h"

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t monotonic_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

/* ---- the machine's time: clocks since boot are a time namespace's own (unshare -T, a container
 * that was restored), and whom a process shares times with may be in another ---- */

enum { JUMP_NS = 50000000 }; /* more than the coarse clock's steps */
static _Atomic int64_t offset_ns;              /* of our namespace */
static _Atomic int64_t gap_ns = INT64_MIN / 2; /* to the wall clock, when we learned that */

int64_t boottime_offset_of(const char *text) {
    static const char name[] = "boottime";
    const char *line = strstr(text, name);
    char *end;
    if (!line) return 0;
    int64_t seconds = strtoll(line + sizeof(name) - 1, &end, 10);
    return seconds * 1000000000 + strtoll(end, NULL, 10); /* the nanoseconds always add */
}

/* A kernel without time namespaces has no such file. After unshare() it speaks of the children. */
static void offset_learn(void) {
    struct stat own, childrens;
    char text[256];
    if (stat("/proc/self/ns/time", &own) < 0 ||
        stat("/proc/self/ns/time_for_children", &childrens) < 0 || own.st_ino != childrens.st_ino)
        return;
    int fd = open("/proc/self/timens_offsets", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0) close(fd);
    if (length < 0) return;
    text[length] = 0;
    atomic_store_explicit(&offset_ns, boottime_offset_of(text), memory_order_relaxed);
}

/* A process comes into another namespace by fork(), setns() or a restore. Then its clock moves
 * against the wall clock, which no namespace changes; so it does when somebody sets that one. The
 * coarse wall clock costs next to nothing. */
uint64_t boottime_ns(void) {
    for (;;) {
        int64_t now_ns = (int64_t)clock_ns(CLOCK_BOOTTIME);
        int64_t gap_now_ns = (int64_t)clock_ns(CLOCK_REALTIME_COARSE) - now_ns;
        int64_t moved_ns = gap_now_ns - atomic_load_explicit(&gap_ns, memory_order_acquire);
        if (moved_ns > -JUMP_NS && moved_ns < JUMP_NS)
            return (uint64_t)(now_ns - atomic_load_explicit(&offset_ns, memory_order_relaxed));
        int code = errno;
        offset_learn();
        errno = code;
        atomic_store_explicit(&gap_ns, gap_now_ns, memory_order_release);
    }
}

int64_t boottime_offset_ns(void) {
    boottime_ns();
    return atomic_load_explicit(&offset_ns, memory_order_relaxed);
}

uint64_t random_u64(void) {
    uint64_t value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value) || value == 0) continue;
    return value;
}
