/* Questions and answers that say whose they are: what the tests of rpc.c ask and check. */
#pragma once
#include "base/crc32c.h"
#include "check.h"

/* Odd sizes: ends of lines are met. Operation 0 always fails with this error. */
enum { QUESTION_MAX = 250, ANSWER_MAX = 330, OPERATION_FAILS = 0, OPERATIONS = 5 };

/* No two questions of a test are equal, so that an answer to another one is seen. */
static inline uint32_t question_make(uint64_t *seed, uint32_t bytes_max, uint8_t *question) {
    uint32_t bytes = 8 + random_below(seed, bytes_max - 7);
    for (uint32_t i = 0; i < bytes; i++) question[i] = (uint8_t)random_next(seed);
    return bytes;
}

/* The answer to a question; the handler, too. */
static inline int64_t answer_make(void *context, uint32_t operation, const void *question,
                                  uint32_t bytes, void *answer) {
    uint64_t seed = operation * 1000003ull + crc32c(0, question, bytes);
    (void)context;
    if (operation == OPERATION_FAILS) return -CXLKV_E_STALE;
    uint32_t answer_bytes = random_below(&seed, ANSWER_MAX + 1);
    uint8_t *byte = answer;
    for (uint32_t i = 0; i < answer_bytes; i++) byte[i] = (uint8_t)random_next(&seed);
    return answer_bytes;
}

static inline bool answer_right(uint32_t operation, const uint8_t *question, uint32_t bytes,
                                int64_t got, const uint8_t *answer) {
    uint8_t wanted[ANSWER_MAX];
    int64_t wanted_bytes = answer_make(NULL, operation, question, bytes, wanted);
    return got == wanted_bytes && (got < 0 || memcmp(answer, wanted, (size_t)got) == 0);
}
