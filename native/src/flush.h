/* The seam for ordering stores to the pool's memory; the only place with raw fence instructions. */
#ifndef CXLKV_FLUSH_H
#define CXLKV_FLUSH_H
#include <stdatomic.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Non-temporal stores before it are visible in this coherence domain before any store after it. */
static inline void store_fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#else
    atomic_thread_fence(memory_order_seq_cst);
#endif
}
#endif
