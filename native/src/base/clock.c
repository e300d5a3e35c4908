/* Asks the kernel for the time, and for random numbers. */
#include <sys/random.h>
#include <time.h>

#include "base/base.h"

static uint64_t clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t boottime_ns(void) { return clock_ns(CLOCK_BOOTTIME); }

uint64_t monotonic_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

uint64_t random_u64(void) {
    uint64_t value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value) || value == 0) continue;
    return value;
}
