/* Clocks, and random numbers. */
#pragma once
#include <stdint.h>
#include <time.h>

/* CLOCK_BOOTTIME, which goes on while the machine sleeps: the same in all time namespaces. */
uint64_t boottime_ns(void);
int64_t boottime_offset_ns(void);         /* what our namespace's clock is ahead of that */
int64_t boottime_offset_of(const char *text); /* as /proc/PID/timens_offsets says it */
uint64_t monotonic_ns(void);              /* CLOCK_MONOTONIC: nobody sets it */
uint64_t random_u64(void);                /* never 0 */
static inline struct timespec timespec_of(uint64_t ns) {
    return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}
