/* What the tests of kernels share: memory that ends where nothing can be read, random numbers, each
 * instruction set in turn. */
#pragma once
#include <math.h>
#include <sys/mman.h>

#include "check.h"

static const kernels *const reference = &kernels_serial;

/* `bytes` that end where nothing can be read. */
static inline void *guarded(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = align_up(bytes, page);
    uint8_t *at = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                       0);
    CHECK(at != MAP_FAILED && mprotect(at + whole, page, PROT_NONE) == 0);
    return at + whole - bytes;
}

static inline void guarded_free(void *pointer, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = align_up(bytes, page);
    CHECK(munmap((uint8_t *)pointer + bytes - whole, whole + page) == 0);
}

static inline float normal(uint64_t *seed) {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += (float)random_below(seed, 1 << 20) / (1 << 20);
    return sum;
}

static inline size_t element_bytes(int dtype) { return dtype == KERNEL_FLOAT32 ? 4 : 2; }

/* Tests each of these instruction sets that this CPU has, up to NULL, from the same seed; returns
 * how many. */
static inline uint32_t test_each_isa(void (*test)(const kernels *isa, uint64_t *seed),
                                     uint64_t seed, const char *const *names) {
    uint32_t tried = 0;
    for (; *names; names++) {
        uint64_t own = seed;
        if (kernels_force(*names) != 0) {
            printf("skipped: this CPU has no %s\n", *names);
            continue;
        }
        test(kernels_current(), &own);
        tried++;
    }
    CHECK(tried > 0 && kernels_force("auto") == 0);
    return tried;
}

/* The transform that rotates a row, block by block, in double precision: it is its own inverse. */
static inline void model_transform(double *x, uint32_t dim) {
    for (uint32_t first = 0, size; first < dim; first += size) {
        size = 1u << (31 - __builtin_clz(dim - first));
        for (uint32_t half = 1; half < size; half *= 2)
            for (uint32_t i = first; i < first + size; i++)
                if (!((i - first) & half)) {
                    double a = x[i], b = x[i + half];
                    x[i] = a + b;
                    x[i + half] = a - b;
                }
        for (uint32_t i = first; i < first + size; i++) x[i] /= sqrt(size);
    }
}
