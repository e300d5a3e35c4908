/* What the environment says to the tests on the emulated memory: which seeds, what is left out, and
 * limits that make a failing run small. Not a test itself; tests/native/incoherent.py sets it.
 *
 * CXLKV_SEEDS: how many; CXLKV_SEED: the first one; CXLKV_ARM64=0 or 1: one of them;
 * CXLKV_LEFT_OUT: the number of a flush_site. CXLKV_HOSTS, CXLKV_DISTURBANCES, CXLKV_ROUNDS: no
 * more hosts, deaths and pauses, or rounds of a process than this, where the seed draws more.
 * CXLKV_TRACE: how many events the trace of a failure has. */
#pragma once
#include <stdlib.h>

#include "base/flush.h"
#include "incoherent.h"

static inline uint64_t knob(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static inline uint32_t knob_limit(const char *name, uint32_t drawn) {
    uint64_t limit = knob(name, drawn);
    return limit < drawn ? (uint32_t)limit : drawn;
}

/* Fewer than 2 hosts share nothing. */
static inline uint32_t knob_hosts(uint32_t drawn) {
    uint32_t hosts = knob_limit("CXLKV_HOSTS", drawn);
    return hosts < 2 ? 2 : hosts;
}

static inline void knob_options(struct incoherent_options *options) {
    options->left_out = (enum flush_site)knob("CXLKV_LEFT_OUT", FLUSH_NONE);
    options->trace_events = (uint32_t)knob("CXLKV_TRACE", 0);
}

/* All seeds, on each CPU; false: one failed. */
static inline bool knob_all_seeds(uint64_t seeds, bool (*run)(uint64_t seed, bool arm64)) {
    uint64_t first = knob("CXLKV_SEED", 1), only = knob("CXLKV_ARM64", 2);
    for (uint64_t seed = first; seed < first + seeds; seed++)
        for (uint64_t arm64 = 0; arm64 < 2; arm64++) {
            if ((only != 2 && only != arm64) || run(seed, arm64 != 0)) continue;
            fprintf(stderr, "seed %lu, %s failed\n", seed, arm64 ? "arm64" : "x86");
            return false;
        }
    return true;
}

/* A run for each step that somebody may stop or die at, until all was done before it. */
static inline bool knob_each_step(bool (*one)(uint64_t seed, bool arm64, uint64_t step,
                                              uint64_t *steps),
                                  uint64_t seed, bool arm64, uint64_t *runs) {
    uint64_t steps;
    for (uint64_t step = 1;; step++, ++*runs) {
        if (!one(seed, arm64, step, &steps)) return false;
        if (steps < step) return true;
    }
}

/* Few seeds, or small ones, need not have met all that a test wants to have seen. */
static inline bool knob_enough(uint64_t seeds) {
    return seeds >= 100 && !getenv("CXLKV_HOSTS") && !getenv("CXLKV_DISTURBANCES") &&
           !getenv("CXLKV_ROUNDS");
}

/* Lines that a failure is about, for whoever reads the trace. */
static inline void knob_about(incoherent *sim, const char *what, const void *address,
                              size_t bytes) {
    size_t first = (size_t)((const uint8_t *)address - (const uint8_t *)incoherent_base(sim));
    fprintf(stderr, "about lines %zu to %zu: %s\n", first / FLUSH_LINE_BYTES,
            (first + bytes - 1) / FLUSH_LINE_BYTES, what);
}
