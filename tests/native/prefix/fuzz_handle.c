/* A handle of any bytes is refused, or names pages that its sequence then holds, and gives back.
 * Identity and CRC are set right first, as a fuzzer cannot guess them. */
#include "base/crc32c.h"
#include "check.h"
#include "fuzz.h"

enum { TOKENS = 10 };

static cxlkv_pool *pool;
static cxlkv_sequence *kept;
static uint8_t whole[512];
static size_t whole_bytes;
static uint64_t free_pages;

static void make(void) {
    uint64_t marks[TOKENS];
    for (uint64_t i = 0; i < TOKENS; i++) marks[i] = i;
    pool = test_pool(NULL, 8);
    kept = test_empty(pool);
    CHECK(test_append_all(kept, marks, TOKENS) >= 0);
    int64_t size = cxlkv_sequence_export(kept, whole, sizeof(whole));
    CHECK(size > 0 && (size_t)size <= sizeof(whole));
    whole_bytes = (size_t)size;
    free_pages = test_stats(pool).pages.free;
}

static void adopt(const uint8_t *bytes, size_t length) {
    cxlkv_sequence *sequence = NULL;
    if (cxlkv_sequence_adopt(pool, bytes, length, &sequence) == 0) {
        uint64_t marks[1] = {0};
        accepted++;
        test_append_all(sequence, marks, 1); /* its tail, if it has one, is read */
        cxlkv_sequence_destroy(&sequence);
    }
    demand(test_stats(pool).pages.free == free_pages, "number of pages given back");
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length) {
    uint8_t own[4096];
    if (!pool) make();
    accepted = 0;
    adopt(bytes, length);
    if (length < 44 || length > sizeof(own)) return 0;
    memcpy(own, bytes, length);
    memcpy(own + 8, pool->identity, sizeof(pool->identity));
    uint32_t crc = crc32c(0, own, length - 4);
    memcpy(own + length - 4, &crc, sizeof(crc));
    adopt(own, length);
    return 0;
}
