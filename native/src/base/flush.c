/* The seam on real memory: x86 by what CPUID offers, arm64 by dc and dsb, else fences only. */
#include "base/cpu.h"
#include "base/flush.h"

#include <string.h>

static uintptr_t first_line(const void *address) {
    return (uintptr_t)address & ~(uintptr_t)(FLUSH_LINE_BYTES - 1);
}

#if defined(__x86_64__)

enum { CLFLUSH, CLFLUSHOPT, CLWB };

/* CPUID leaf 7: ebx 23 is CLFLUSHOPT, ebx 24 is CLWB; CLFLUSH is in every x86-64. */
static int best_instruction(void) {
    static _Atomic int known = -1;
    int best = atomic_load_explicit(&known, memory_order_relaxed);
    if (best >= 0) return best;
    unsigned a = 0, b = 0, c = 0, d = 0;
    best = CLFLUSH;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        if (b >> 23 & 1) best = CLFLUSHOPT;
        if (b >> 24 & 1) best = CLWB;
    }
    atomic_store_explicit(&known, best, memory_order_relaxed);
    return best;
}

const char *flush_name(void) {
    static const char *const names[] = {"clflush", "clflushopt", "clwb"};
    return names[best_instruction()];
}

bool flush_supported(void) { return true; }

__attribute__((target("clwb"))) static void write_back_clwb(uintptr_t line, uintptr_t end) {
    for (; line < end; line += FLUSH_LINE_BYTES) _mm_clwb((void *)line);
}

__attribute__((target("clflushopt"))) static void drop_clflushopt(uintptr_t line, uintptr_t end) {
    for (; line < end; line += FLUSH_LINE_BYTES) _mm_clflushopt((void *)line);
}

static void drop_clflush(uintptr_t line, uintptr_t end) {
    for (; line < end; line += FLUSH_LINE_BYTES) _mm_clflush((const void *)line);
}

void flush_write_back(enum flush_site site, const void *address, size_t bytes) {
    uintptr_t end = (uintptr_t)address + bytes;
    (void)site;
    if (best_instruction() == CLWB) write_back_clwb(first_line(address), end);
    else flush_invalidate(site, address, bytes);
}

void flush_invalidate(enum flush_site site, const void *address, size_t bytes) {
    uintptr_t end = (uintptr_t)address + bytes;
    (void)site;
    if (best_instruction() >= CLFLUSHOPT) drop_clflushopt(first_line(address), end);
    else drop_clflush(first_line(address), end);
}

void flush_evict(enum flush_site site, const void *address, size_t bytes) {
    (void)site;
    drop_clflush(first_line(address), (uintptr_t)address + bytes);
}

void flush_fence_stores(enum flush_site site) {
    (void)site;
    _mm_sfence();
}

void flush_fence_all(enum flush_site site) {
    (void)site;
    _mm_mfence();
}

/* Asked once: in a virtual machine CPUID takes longer than a record. */
static bool wide_stores(void) {
    static _Atomic int known = -1;
    int wide = atomic_load_explicit(&known, memory_order_relaxed);
    if (wide < 0) {
        wide = cpu_has_avx2();
        atomic_store_explicit(&known, wide, memory_order_relaxed);
    }
    return wide;
}

static void stream_16(uint8_t *to, const uint8_t *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}

__attribute__((target("avx2"))) static void stream_32(uint8_t *to, const uint8_t *from,
                                                      size_t bytes) {
    for (size_t i = 0; i < bytes; i += 32)
        _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
}

/* Units of 16 bytes past the cache, two at a time where that is possible; what is left at the ends
 * by stores that are written back at once. */
void flush_copy_in(void *pool, const void *from, size_t bytes) {
    uint8_t *to = pool;
    const uint8_t *source = from;
    size_t head = (size_t)(-(uintptr_t)to & 15);
    if (head > bytes) head = bytes;
    size_t end = head + (bytes - head) / 16 * 16, at = head;
    if (head) {
        memcpy(to, source, head);
        flush_write_back(FLUSH_NONE, to, head);
    }
    if (end - at >= 64 && wide_stores()) {
        size_t odd = (uintptr_t)(to + at) & 16, pairs = (end - at - odd) / 32 * 32;
        stream_16(to + at, source + at, odd);
        stream_32(to + at + odd, source + at + odd, pairs);
        at += odd + pairs;
    }
    stream_16(to + at, source + at, end - at);
    if (end < bytes) {
        memcpy(to + end, source + end, bytes - end);
        flush_write_back(FLUSH_NONE, to + end, bytes - end);
    }
}

#else

#if defined(__aarch64__)

/* sy: the whole system; ish would end at this host's caches. The line may be longer than ours. */
static size_t line_bytes(void) {
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    size_t bytes = (size_t)4 << (type >> 16 & 15);
    return bytes < FLUSH_LINE_BYTES ? bytes : FLUSH_LINE_BYTES;
}

const char *flush_name(void) { return "dc"; }
bool flush_supported(void) { return true; }

void flush_write_back(enum flush_site site, const void *address, size_t bytes) {
    uintptr_t end = (uintptr_t)address + bytes;
    (void)site;
    for (uintptr_t line = first_line(address); line < end; line += line_bytes())
        __asm__ volatile("dc cvac, %0" ::"r"(line) : "memory");
}

void flush_invalidate(enum flush_site site, const void *address, size_t bytes) {
    uintptr_t end = (uintptr_t)address + bytes;
    (void)site;
    for (uintptr_t line = first_line(address); line < end; line += line_bytes())
        __asm__ volatile("dc civac, %0" ::"r"(line) : "memory");
}

static void fence_system(void) { __asm__ volatile("dsb sy" ::: "memory"); }

#else

const char *flush_name(void) { return "none"; }
bool flush_supported(void) { return false; }

void flush_write_back(enum flush_site site, const void *address, size_t bytes) {
    (void)site, (void)address, (void)bytes;
}

void flush_invalidate(enum flush_site site, const void *address, size_t bytes) {
    (void)site, (void)first_line(address), (void)bytes;
}

static void fence_system(void) { atomic_thread_fence(memory_order_seq_cst); }

#endif

void flush_evict(enum flush_site site, const void *address, size_t bytes) {
    flush_invalidate(site, address, bytes);
    (void)site;
    fence_system();
}

void flush_fence_stores(enum flush_site site) {
    (void)site;
    fence_system();
}

void flush_fence_all(enum flush_site site) {
    (void)site;
    fence_system();
}

void flush_copy_in(void *pool, const void *from, size_t bytes) {
    memcpy(pool, from, bytes);
    flush_write_back(FLUSH_NONE, pool, bytes);
}

#endif

void flush_copy_out(void *to, const void *pool, size_t bytes) { memcpy(to, pool, bytes); }

void flush_store_line(void *line, const void *from, uint32_t first_word) {
    uint64_t words[FLUSH_LINE_BYTES / 8];
    memcpy(words, from, sizeof(words));
    for (uint32_t i = first_word; i < FLUSH_LINE_BYTES / 8; i++)
        atomic_store_explicit((_Atomic uint64_t *)line + i, words[i], memory_order_relaxed);
}

void flush_load_line(void *to, const void *line) {
    uint64_t words[FLUSH_LINE_BYTES / 8];
    for (uint32_t i = 0; i < FLUSH_LINE_BYTES / 8; i++)
        words[i] = atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)line + i,
                                        memory_order_relaxed);
    memcpy(to, words, sizeof(words));
}

void flush_store_word(void *word, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_release);
}

uint64_t flush_load_word(const void *word) {
    return atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)word, memory_order_acquire);
}
