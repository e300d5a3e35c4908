/* A pool's memory, and a cache of each host that is as stale as it can be: in place of flush.c,
 * under the whole core. Not a test itself.
 *
 * From cache_begin() on the mapping of a host is memory of its own, a copy of the file as it was
 * then. A line goes from there to the file when it is written back, and comes from there when it is
 * invalidated; never by itself, but for what cache_evict() writes back at the end. So what is not
 * written back, or not invalidated, is missing for certain; the emulator in native/emulation draws
 * by chance, has store buffers and fences, too, and runs the protocol without a pool. */
#pragma once
#include <sys/mman.h>

#include "base/flush.h"
#include "check.h"
#include "format/mapping.h"
#include "host/locks.h"

typedef struct private_cache {
    uint8_t *base;               /* where the pool sees it, partly read-only */
    uint8_t *lines;              /* the same memory */
    uint8_t *clean;              /* each line as it came, or as it was written back last */
    uint8_t *memory;             /* the file's */
    uint64_t bytes;
} private_cache;

enum { CACHES_MAX = 4, WORDS = FLUSH_LINE_BYTES / 8 };
static private_cache caches[CACHES_MAX];
static uint32_t cache_count;
static pthread_mutex_t caches_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t lines_evicted;
/* What another host does before this thread reaches a site; asked until it says that it has. */
static _Thread_local bool (*meanwhile)(enum flush_site site);

/* ---- lines; under the lock ---- */

static void line_load(uint64_t line[WORDS], uint8_t *from) {
    for (uint32_t i = 0; i < WORDS; i++)
        line[i] = atomic_load_explicit((_Atomic uint64_t *)(void *)from + i, memory_order_relaxed);
}

static void line_store(uint8_t *to, const uint64_t line[WORDS]) {
    for (uint32_t i = 0; i < WORDS; i++)
        atomic_store_explicit((_Atomic uint64_t *)(void *)to + i, line[i], memory_order_relaxed);
}

/* To memory, if it was stored to. */
static bool line_out(private_cache *cache, uint64_t at) {
    uint64_t line[WORDS];
    line_load(line, cache->lines + at);
    if (memcmp(line, cache->clean + at, sizeof(line)) == 0) return false;
    line_store(cache->memory + at, line);
    memcpy(cache->clean + at, line, sizeof(line));
    return true;
}

/* From memory. What nobody else has changed is left alone: another thread may store to it. */
static void line_in(private_cache *cache, uint64_t at) {
    uint64_t line[WORDS];
    line_load(line, cache->memory + at);
    if (memcmp(line, cache->clean + at, sizeof(line)) == 0) return;
    line_store(cache->lines + at, line);
    memcpy(cache->clean + at, line, sizeof(line));
}

static void reach(enum flush_site site) {
    bool (*now)(enum flush_site) = meanwhile;
    meanwhile = NULL; /* not of its own doing */
    if (now && !now(site)) meanwhile = now;
}

/* What no cache has is memory that all hosts see. */
static void lines_send(const void *address, size_t bytes, bool drops) {
    pthread_mutex_lock(&caches_lock);
    for (uint32_t i = 0; i < cache_count; i++) {
        private_cache *cache = &caches[i];
        uint64_t at = (uint64_t)((const uint8_t *)address - cache->base);
        if (at >= cache->bytes) continue;
        uint64_t end = at + bytes;
        for (at -= at % FLUSH_LINE_BYTES; at < end; at += FLUSH_LINE_BYTES) {
            line_out(cache, at);
            if (drops) line_in(cache, at);
        }
    }
    pthread_mutex_unlock(&caches_lock);
}

/* ---- what a test does ---- */

static uint8_t *memory_map(int fd, uint64_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static inline void cache_begin(cxlkv_pool *pool) {
    private_cache made = {.base = pool->region.base, .bytes = pool->region.mapped_bytes};
    int fd = memfd_create("cache", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)made.bytes) == 0);
    made.memory = memory_map(pool->region.fd, made.bytes);
    made.lines = memory_map(fd, made.bytes);
    made.clean = malloc(made.bytes);
    CHECK(made.clean && cache_count < CACHES_MAX);
    CHECK(host_lock(pool) == 0); /* no thread of this host stores meanwhile */
    pthread_mutex_lock(&caches_lock);
    for (uint64_t at = 0; at < made.bytes; at += FLUSH_LINE_BYTES) {
        uint64_t line[WORDS];
        line_load(line, made.memory + at);
        line_store(made.lines + at, line);
        memcpy(made.clean + at, line, sizeof(line));
    }
    CHECK(mmap(made.base, made.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) ==
          made.base);
    caches[cache_count++] = made;
    pthread_mutex_unlock(&caches_lock);
    extents_protect(pool);
    host_unlock(pool);
    close(fd);
}

/* Whatever a host's cache still has to write goes now, also of a host that has left. */
static inline void cache_evict(uint32_t index) {
    private_cache *cache = &caches[index];
    pthread_mutex_lock(&caches_lock);
    for (uint64_t at = 0; at < cache->bytes; at += FLUSH_LINE_BYTES)
        lines_evicted += line_out(cache, at);
    pthread_mutex_unlock(&caches_lock);
}

static inline void caches_end(void) {
    for (uint32_t i = 0; i < cache_count; i++) {
        munmap(caches[i].memory, caches[i].bytes);
        munmap(caches[i].lines, caches[i].bytes);
        free(caches[i].clean);
    }
    cache_count = 0;
}

/* ---- in place of flush.c ---- */

const char *flush_name(void) { return "private"; }
bool flush_supported(void) { return true; }

void flush_write_back(enum flush_site site, const void *address, size_t bytes) {
    reach(site);
    lines_send(address, bytes, false);
}

void flush_invalidate(enum flush_site site, const void *address, size_t bytes) {
    reach(site);
    lines_send(address, bytes, true);
}

void flush_evict(enum flush_site site, const void *address, size_t bytes) {
    flush_invalidate(site, address, bytes);
}

void flush_fence_stores(enum flush_site site) {
    (void)site; /* nothing is on its way: lines move at once */
    pthread_mutex_lock(&caches_lock);
    pthread_mutex_unlock(&caches_lock);
}

void flush_fence_all(enum flush_site site) { flush_fence_stores(site); }

void flush_copy_in(void *pool, const void *from, size_t bytes) {
    memcpy(pool, from, bytes);
    lines_send(pool, bytes, false);
}

void flush_copy_out(void *to, const void *pool, size_t bytes) { memcpy(to, pool, bytes); }

void flush_store_line(void *line, const void *from, uint32_t first_word) {
    uint64_t words[WORDS];
    memcpy(words, from, sizeof(words));
    for (uint32_t i = first_word; i < WORDS; i++)
        atomic_store_explicit((_Atomic uint64_t *)line + i, words[i], memory_order_relaxed);
}

void flush_load_line(void *to, const void *line) {
    uint64_t words[WORDS];
    line_load(words, (uint8_t *)(uintptr_t)line);
    memcpy(to, words, sizeof(words));
}

void flush_store_word(void *word, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)word, value, memory_order_release);
}

uint64_t flush_load_word(const void *word) {
    return atomic_load_explicit((_Atomic uint64_t *)(uintptr_t)word, memory_order_acquire);
}

/* ---- in place of the serial kernels ---- */

static void rows_past_the_cache(void *destination, const void *source, size_t stride_bytes,
                                uint32_t rows, size_t row_bytes);

/* By this name the core has them, as an instruction set that streams, or does not. Objects need the
 * copy only. */
kernels private_kernels __asm__("kernels_serial") = {
    .name = "serial", .streams = true, .store_rows = rows_past_the_cache};

static void rows_past_the_cache(void *destination, const void *source, size_t stride_bytes,
                                uint32_t rows, size_t row_bytes) {
    CHECK((uintptr_t)destination % FLUSH_LINE_BYTES == 0);
    for (size_t row = 0; row < rows; row++)
        memcpy((char *)destination + row * row_bytes, (const char *)source + row * stride_bytes,
               row_bytes);
    if (private_kernels.streams) lines_send(destination, rows * row_bytes, false);
}
