/* Lines that raise SIGBUS. */
#pragma once
#include "base/guard.h"
#include "coherence/types.h"

/* Before an extent is given back, and after it was taken: V8. It passes over what raises SIGBUS,
 * which no cache keeps. Returns how many stretches that were. */
uint64_t hosts_hand_over(const void *first, uint64_t bytes, bool gives);
/* Into `to`; false when they cannot be read: then `to` is zeros. */
bool line_try(const hosts *h, void *to, const void *line);
bool word_try(const hosts *h, const void *word, uint64_t *value);
/* Of `count` lines; a bit for each that cannot be read, whose value is 0. */
uint64_t words_try(const hosts *h, const void *const *words, uint32_t count, uint64_t *values);
/* Counts it. The error says whose line it was, and what mends that. */
int hosts_lost(const hosts *h, const guard *fault);
