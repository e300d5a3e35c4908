/* Goal: the loops that benchmarks time touch what they say: sums, contents and the ring are right,
 * at sizes that end within a block, too; what is nonsense is refused. */
#include "check.h"
#include "measure/measure.h"

enum { LINES = 4096 / 64 * 3 * 5, BYTES = LINES * 64, WORDS = BYTES / 8 };
static uint8_t *memory;
static uint64_t *words;

static void fill(uint64_t first) {
    for (uint64_t i = 0; i < WORDS; i++) words[i] = first + i;
}

static cxlkv_memory_stream stream_of(uint32_t kind, uint64_t block_bytes) {
    cxlkv_memory_stream s = {.kind = kind, .cpu = -1, .memory = memory, .bytes = BYTES,
                             .block_bytes = block_bytes, .first_word = 1000};
    return s;
}

static int run(cxlkv_memory_stream *s, uint64_t nanoseconds) {
    int64_t code = cxlkv_memory_run(s, 1, nanoseconds);
    CHECK(code <= 0);
    return (int)code;
}

static void test_ring(void) {
    static bool seen[LINES];
    CHECK(cxlkv_memory_ring(memory, BYTES, 7) == 0);
    uint8_t *at = memory;
    for (uint64_t i = 0; i < LINES; i++) {
        CHECK(!seen[(at - memory) / 64] && ((uint64_t *)at)[1] == i);
        seen[(at - memory) / 64] = true;
        at = *(uint8_t **)at;
    }
    CHECK(at == memory);
    cxlkv_memory_stream s = stream_of(CXLKV_MEMORY_CHASE, 64);
    CHECK(run(&s, 1000000) == 0);
    CHECK(s.steps && s.sum == s.steps % LINES && s.elapsed_ns >= 1000000);
}

static uint64_t sum_of(uint64_t count) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < count; i++) sum += words[i];
    return sum;
}

static void test_reads(void) {
    fill(5);
    cxlkv_memory_stream s = stream_of(CXLKV_MEMORY_READ, BYTES / 2 + 64);
    CHECK(run(&s, 0) == 0);
    CHECK(s.moved_bytes == BYTES / 2 + 64 && s.sum == sum_of(WORDS / 2 + 8));
    CHECK(run(&s, 2000000) == 0);
    uint64_t passes = s.moved_bytes / BYTES, left = s.moved_bytes % BYTES / 8;
    CHECK(passes && s.sum == passes * sum_of(WORDS) + sum_of(left));
}

static void test_writes(bool past) {
    memset(memory, 0, BYTES);
    cxlkv_memory_stream s = stream_of(past ? CXLKV_MEMORY_WRITE_PAST : CXLKV_MEMORY_WRITE, 128);
    if (run(&s, 0) == -ENOTSUP) return; /* past the cache, on another CPU */
    CHECK(words[15] == 1015 && words[16] == 0 && s.moved_bytes == 128);
    CHECK(run(&s, 2000000) == 0 && s.moved_bytes > BYTES);
    for (uint64_t i = 0; i < WORDS; i++) CHECK(words[i] == 1000 + i);
    fill(0);
    s = stream_of(past ? CXLKV_MEMORY_MIXED_PAST : CXLKV_MEMORY_MIXED, BYTES);
    CHECK(run(&s, 0) == 0 && s.moved_bytes == BYTES && s.sum == sum_of(WORDS / 3 * 2));
    s.block_bytes = 128; /* a third of what a block moves */
    CHECK(run(&s, 2000000) == 0 && s.moved_bytes > BYTES);
    uint64_t read = s.moved_bytes / 3 * 2, span = BYTES / 3 * 2;
    CHECK(s.sum == read / span * sum_of(span / 8) + sum_of(read % span / 8));
    for (uint64_t i = 0; i < WORDS; i++) CHECK(words[i] == (i < WORDS / 3 * 2 ? i : 1000 + i));
}

static void test_copies(uint32_t kind) {
    fill(9);
    cxlkv_memory_stream s = stream_of(kind, 4096);
    CHECK(run(&s, 0) == 0 && s.moved_bytes == 4096);
    CHECK(words[WORDS / 2] == 9 && words[WORDS / 2 + 511] == 9 + 511);
    CHECK(words[WORDS / 2 + 512] == 9 + WORDS / 2 + 512);
    CHECK(run(&s, 2000000) == 0 && memcmp(memory, memory + BYTES / 2, BYTES / 2) == 0);
}

static void test_pace_and_threads(void) {
    cxlkv_memory_stream both[2] = {stream_of(CXLKV_MEMORY_READ, 4096),
                                   stream_of(CXLKV_MEMORY_READ, 4096)};
    both[1].pace_ns = 500000;
    CHECK(cxlkv_memory_run(both, 2, 2000000) == 0);
    CHECK(both[1].steps <= both[1].elapsed_ns / 500000 && both[1].steps <= both[0].steps);
    both[1].cpu = 1000;
    CHECK(cxlkv_memory_run(both, 2, 0) < 0 && strstr(cxlkv_error_text(), "CPU 1000"));
}

static void test_gather(void) {
    const uint64_t offsets[3] = {BYTES - 64, 0, 640};
    uint8_t to[3 * 64];
    fill(1);
    CHECK(cxlkv_memory_gather(to, memory, BYTES, offsets, 3, 64) >= 0);
    for (int i = 0; i < 3; i++) CHECK(memcmp(to + 64 * i, memory + offsets[i], 64) == 0);
    const uint64_t outside[2] = {0, BYTES - 63};
    CHECK(cxlkv_memory_gather(to, memory, BYTES, outside, 2, 64) == -CXLKV_E_ARGUMENT);
}

static void test_nonsense(void) {
    uint8_t *at;
    CHECK(cxlkv_memory_take(0, -1, &at) < 0 && cxlkv_memory_take(100, -1, &at) < 0);
    CHECK(cxlkv_memory_take(4096, 1023, &at) < 0); /* no such node, or no NUMA here */
    cxlkv_memory_stream s = stream_of(99, 64);
    CHECK(run(&s, 0) == -CXLKV_E_ARGUMENT);
    s = stream_of(CXLKV_MEMORY_READ, 0);
    CHECK(run(&s, 0) == -CXLKV_E_ARGUMENT);
    s = stream_of(CXLKV_MEMORY_READ, 64);
    s.bytes = 100;
    CHECK(run(&s, 0) == -CXLKV_E_ARGUMENT && cxlkv_memory_run(&s, 0, 0) < 0);
    CHECK(cxlkv_memory_ring(memory, 63, 1) < 0);
}

int main(void) {
    CHECK(cxlkv_memory_take(BYTES, -1, &memory) == 0);
    words = (uint64_t *)memory;
    test_ring();
    test_reads();
    test_writes(false);
    test_writes(true);
    test_copies(CXLKV_MEMORY_COPY);
    test_copies(CXLKV_MEMORY_COPY_PAST);
    test_pace_and_threads();
    test_gather();
    test_nonsense();
    CHECK(cxlkv_memory_give(memory, BYTES) == 0);
    return 0;
}
