/* What this CPU offers, asked of it directly: __builtin_cpu_supports needs a table that lives in
 * the compiler's run-time library, and the one of the compiler that makes the wheels has none. */
#pragma once

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>

static inline bool cpu_is_amd(void) {
    unsigned a = 0, b = 0, c = 0, d = 0; /* gcc under its sanitizers does not see them set. */
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx &&
           d == signature_AMD_edx;
}

/* In leaf 1, register c, all of `bits`: bit_SSE4_2, bit_FMA ... */
static inline bool cpu_has(unsigned bits) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bits) == bits;
}

/* All of `bits` of XCR0: what the operating system saves over a task switch. Without that a
 * register does not count as there. */
__attribute__((target("xsave"))) static inline bool cpu_saves(unsigned long bits) {
    return cpu_has(bit_OSXSAVE) && (_xgetbv(0) & bits) == bits;
}

static inline bool cpu_has_avx2(void) {
    enum { XMM_AND_YMM = 6 };
    unsigned a, b, c, d;
    return cpu_saves(XMM_AND_YMM) && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

/* F, BW, DQ and VL, on top of AVX2, FMA and F16C. */
static inline bool cpu_has_avx512(void) {
    enum { XMM_YMM_MASKS_AND_ZMM = 0xe6 };
    const unsigned wanted = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    return cpu_saves(XMM_YMM_MASKS_AND_ZMM) && cpu_has_avx2() && cpu_has(bit_FMA | bit_F16C) &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & wanted) == wanted;
}

/* AVX-512 and carry-less products of its width. */
static inline bool cpu_has_vpclmulqdq(void) {
    const unsigned vpclmulqdq = 1u << 10;
    unsigned a, b, c, d;
    return cpu_has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & vpclmulqdq);
}

/* And VNNI and BMI2, which sketches take and every such CPU has. */
static inline bool cpu_has_avx512_bf16(void) {
    const unsigned bf16 = 1u << 5, vnni = 1u << 11, bmi2 = 1u << 8;
    unsigned a, b, c, d;
    if (!cpu_has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(c & vnni) || !(b & bmi2)) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bf16);
}

/* Tiles and their bf16 products. The operating system saves them only for processes that ask. */
static inline bool cpu_has_amx(void) {
    enum { TILE_CONFIG_AND_DATA = 3 << 17 };
    const unsigned wanted = 1u << 22 | 1u << 24;
    unsigned a, b, c, d;
    return cpu_has_avx512_bf16() && cpu_saves(TILE_CONFIG_AND_DATA) &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & wanted) == wanted;
}

#elif defined(__aarch64__)

#include <stdbool.h>
#include <sys/auxv.h>

static inline bool cpu_has_avx2(void) { return false; }

/* CRC32CX and its family: an extension in ARMv8.0, which nearly every CPU has. */
static inline bool cpu_has_crc32(void) { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

/* BFMLALB and its family. Headers that are older than the feature have no name for its bit. */
static inline bool cpu_has_bf16(void) {
    enum { HWCAP2_BIT_BF16 = 1 << 14 };
    return getauxval(AT_HWCAP2) & HWCAP2_BIT_BF16;
}

/* SDOT and UDOT. */
static inline bool cpu_has_dot_products(void) {
    enum { HWCAP_BIT_ASIMDDP = 1 << 20 };
    return getauxval(AT_HWCAP) & HWCAP_BIT_ASIMDDP;
}

#endif
