/* What this CPU offers, asked of it directly: __builtin_cpu_supports needs a table that lives in
 * the compiler's run-time library, and the one of the compiler that makes the wheels has none. */
#ifndef CXLKV_CPU_H
#define CXLKV_CPU_H

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>

/* In leaf 1, register c, all of `bits`: bit_SSE4_2, bit_FMA ... */
static inline bool cpu_has(unsigned bits) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bits) == bits;
}

/* An operating system that does not save ymm over a task switch counts as "no AVX". */
__attribute__((target("xsave"))) static inline bool cpu_saves_ymm(void) {
    enum { XMM_AND_YMM = 6 };
    return cpu_has(bit_OSXSAVE) && (_xgetbv(0) & XMM_AND_YMM) == XMM_AND_YMM;
}

static inline bool cpu_has_avx2(void) {
    unsigned a, b, c, d;
    return cpu_saves_ymm() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

#endif
#endif
