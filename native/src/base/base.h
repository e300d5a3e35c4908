/* What every folder uses: errors, SIGBUS as a return value, small arithmetic. */
#ifndef CXLKV_BASE_H
#define CXLKV_BASE_H

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "cxlkv.h"

#ifndef CXLKV_DEBUG
#define CXLKV_DEBUG 0
#endif

enum { LINE_BYTES = 64 };

static inline uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}
static inline uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
/* Of `count` entries that begin one after another, the first at 0: the one that `at` is in. Their
 * beginnings lie `stride` bytes apart. */
static inline uint32_t entry_at(const void *begins, size_t stride, uint32_t count, uint32_t at) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        const void *begin = (const char *)begins + middle * stride;
        if (*(const uint32_t *)begin <= at) low = middle;
        else high = middle;
    }
    return low;
}

/* ---- error.c ---- */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The caller's memory is there: CXLKV_E_ARGUMENT where one of these names and addresses, in turn to
 * a NULL, is to have `count` of something and is NULL. */
int need(uint64_t count, ...) __attribute__((sentinel));

/* ---- clock.c ---- */
/* CLOCK_BOOTTIME, which goes on while the machine sleeps: the same in all time namespaces. */
uint64_t boottime_ns(void);
int64_t boottime_offset_ns(void);         /* what our namespace's clock is ahead of that */
int64_t boottime_offset_of(const char *text); /* as /proc/PID/timens_offsets says it */
uint64_t monotonic_ns(void);              /* CLOCK_MONOTONIC: nobody sets it */
uint64_t random_u64(void);                /* never 0 */
static inline struct timespec timespec_of(uint64_t ns) {
    return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

/* ---- guard.c: SIGBUS inside a guarded stretch becomes a return value ---- */
typedef struct guard {
    sigjmp_buf jump;
    struct guard *previous;
    uintptr_t address;
    size_t granularity_bytes;
} guard;
int guard_install(void);
void guard_forked(void);                  /* in a forked child */
guard **guard_current(void);
/* GUARD_BEGIN(g) { work } GUARD_END(g, on_fault): on_fault is evaluated after a SIGBUS in the work,
 * and may look at g. It may return from the function; the work may not. */
#define GUARD_BEGIN(g)                       \
    {                                        \
        guard g;                             \
        (g).previous = *guard_current();     \
        *guard_current() = &(g);             \
        if (sigsetjmp((g).jump, 0) == 0) {
#define GUARD_END(g, on_fault)               \
            *guard_current() = (g).previous; \
        } else {                             \
            *guard_current() = (g).previous; \
            on_fault;                        \
        }                                    \
    }
/* The value of `work`, or, after a SIGBUS in it, of `on_fault`, which may look at `fault`. */
#define GUARDED(work, on_fault)                  \
    __extension__({                              \
        volatile __typeof__(work) guarded;       \
        GUARD_BEGIN(fault) {                     \
            guarded = (work);                    \
        } GUARD_END(fault, guarded = (on_fault)) \
        guarded;                                 \
    })

/* Between two looks at what another thread or process writes. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
