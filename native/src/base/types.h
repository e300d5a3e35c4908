/* What every folder uses: the C library's common headers, the size of a line, small arithmetic. */
#pragma once
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

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

/* Between two looks at what another thread or process writes. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
