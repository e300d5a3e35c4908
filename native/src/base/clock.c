/* Asks the kernel for the time since boot, and for random numbers. */
#include <sys/random.h>
#include <time.h>

#include "base/base.h"

uint64_t boottime_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

uint64_t random_u64(void) {
    uint64_t value = 0;
    while (getrandom(&value, sizeof(value), 0) != sizeof(value) || value == 0) continue;
    return value;
}
