/* SIGBUS inside a guarded stretch becomes a return value. */
#pragma once
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

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
