/* What the tests of the core share: a check that says where, random numbers, a small pool, rows of
 * known numbers. Not a test itself. */
#pragma once
#include <sched.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "format/geometry.h"
#include "sequence/types.h"

#define CHECK(claim)                                                                      \
    do {                                                                                  \
        if (!(claim)) {                                                                   \
            fprintf(stderr, "%s:%d: %s\n(last error: %s)\n", __FILE__, __LINE__, #claim,  \
                    cxlkv_error_text());                                                  \
            abort();                                                                      \
        }                                                                                 \
    } while (0)

/* In main() of what ThreadSanitizer cannot follow: ctest takes 77 for a test that was skipped. */
#ifdef __SANITIZE_THREAD__
#define NOT_UNDER_TSAN(why) return puts("skipped: " why), 77
#else
#define NOT_UNDER_TSAN(why) (void)0
#endif

enum { TEST_LAYERS = 2, TEST_HEADS = 2, TEST_DIM = 8, TEST_PAGE_TOKENS = 4 };

static inline uint64_t random_next(uint64_t *state) { /* splitmix64 */
    uint64_t word = *state += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

static inline uint32_t random_below(uint64_t *state, uint32_t limit) {
    return (uint32_t)(random_next(state) % limit);
}

static inline cxlkv_layout test_layout(void) {
    cxlkv_layout layout = {.layers = TEST_LAYERS, .kv_heads = TEST_HEADS, .head_dim = TEST_DIM,
                           .value_head_dim = TEST_DIM, .page_tokens = TEST_PAGE_TOKENS,
                           .dtype = CXLKV_FLOAT32, .checksum = 1, .shard = {0, 1, 0, 1},
                           .sketch = 1, .group_count = 1};
    return layout;
}

/* A pool of at least `pages` pages, and of not many more. */
static inline cxlkv_pool *test_pool(const char *path, uint32_t pages) {
    cxlkv_layout layout = test_layout();
    cxlkv_sharing sharing = {.hosts = 1};
    cxlkv_geometry geometry;
    cxlkv_pool *pool;
    uint64_t capacity = (2 << 20) + SUPERBLOCK_BYTES;
    do {
        capacity += 16 << 10;
    } while (geometry_make(&layout, &sharing, capacity, &geometry) < 0 ||
             geometry.page_count < pages);
    CHECK(cxlkv_pool_create(path, &layout, NULL, capacity, 0, NULL, 0, &pool) == 0);
    return pool;
}

/* Of two groups of a layer each, of which one sees a window of that many tokens. */
static inline cxlkv_pool *test_window_pool(uint32_t layer, uint32_t window) {
    cxlkv_layout layout = test_layout();
    cxlkv_pool *pool;
    layout.group_count = 2;
    layout.windows[layer] = window;
    layout.group_of[1] = 1;
    CHECK(cxlkv_pool_create(NULL, &layout, NULL, 8 << 20, 0, NULL, 0, &pool) == 0);
    return pool;
}

/* One that hosts share without hardware that keeps it coherent; this is the first of them. */
static inline cxlkv_pool *test_shared(const char *path, cxlkv_layout layout, cxlkv_sharing sharing,
                                      uint64_t capacity, double lease_s) {
    const cxlkv_host host = {.lease_s = lease_s};
    cxlkv_pool *pool;
    sharing.kind = CXLKV_SHARING_SOFTWARE;
    CHECK(cxlkv_pool_create(path, &layout, &sharing, capacity, 0, &host, 0, &pool) == 0);
    return pool;
}

/* cxlkv_match() of keys alone. */
static inline int64_t test_match(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                                 double lease_s, cxlkv_sequence **hit) {
    const cxlkv_match_args args = {.hashes = hashes, .count = count, .lease_s = lease_s};
    return cxlkv_match(pool, &args, hit);
}

static inline cxlkv_pool *test_open(const char *path, const cxlkv_host *host) {
    cxlkv_pool *pool;
    CHECK(cxlkv_pool_open(path, host, &pool) == 0);
    return pool;
}

static inline cxlkv_pool *test_open_host(const char *path, uint32_t number, double lease_s) {
    return test_open(path, &(cxlkv_host){.number = number, .lease_s = lease_s});
}

static inline cxlkv_batch *test_batch(cxlkv_pool *pool, uint32_t count,
                                      cxlkv_sequence **sequences) {
    cxlkv_batch *batch;
    CHECK(cxlkv_batch_create(pool, count, sequences, &batch) == 0);
    return batch;
}

static inline void test_remove(cxlkv_pool **pool, const char *path) {
    cxlkv_pool_destroy(pool);
    CHECK(cxlkv_pool_remove(path) == 0);
}

static inline pid_t test_fork(void) {
    fflush(stdout); /* or the child prints it, too */
    pid_t child = fork();
    CHECK(child >= 0);
    return child;
}

/* Waits for a child, which ends by this signal; 0: of itself, with 0. */
static inline void test_ended(pid_t child, int signal) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(signal ? WIFSIGNALED(status) && WTERMSIG(status) == signal : status == 0);
}

/* Of a run: what the environment says, or this one. */
static inline uint64_t test_seed_or(uint64_t otherwise) {
    const char *given = getenv("CXLKV_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 10) : otherwise;
    printf("CXLKV_TEST_SEED=%lu\n", seed);
    return seed;
}

/* Another one each time. */
static inline uint64_t test_seed(void) { return test_seed_or(boottime_ns()); }

/* Four threads use what is switched between the serial way and the best one meanwhile. */
static inline void test_while_forced(void *(*use)(void *), int (*force)(const char *name)) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, use, NULL) == 0);
    for (int i = 0; i < 1000; i++) CHECK(force(i % 2 ? "auto" : "serial") == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A name in /dev/shm that no other test has; the caller removes it. */
static inline const char *test_path(const char *name) {
    static char path[128];
    snprintf(path, sizeof(path), "/dev/shm/cxlkv-test-%s-%d.pool", name, (int)getpid());
    unlink(path);
    return path;
}

/* The number that stands in K (kind 0) or V (1) of a token; `mark` names the token. */
static inline float test_value(uint64_t mark, uint32_t layer, uint32_t kind, uint32_t head,
                               uint32_t channel) {
    uint64_t state = mark * 1000003 + layer * 1009 + kind * 101 + head * 31 + channel;
    return (float)(random_next(&state) >> 44);
}

typedef float test_rows[TEST_HEADS][TEST_DIM];

static inline cxlkv_rows test_rows_at(const void *data) {
    return (cxlkv_rows){.data = data, .dtype = CXLKV_FLOAT32,
                        .stride_bytes = {sizeof(test_rows), TEST_DIM * sizeof(float),
                                         sizeof(float)}};
}

/* Appends tokens whose marks are marks[0..count) to one layer. */
static inline int64_t test_append(cxlkv_sequence *sequence, uint32_t layer, const uint64_t *marks,
                                  uint32_t count) {
    cxlkv_batch *batch;
    int64_t code = cxlkv_batch_create(sequence->pool, 1, &sequence, &batch);
    if (code < 0) return code;
    test_rows *k = malloc((count + 1) * sizeof(*k)), *v = malloc((count + 1) * sizeof(*v));
    CHECK(k && v);
    for (uint32_t t = 0; t < count; t++)
        for (uint32_t h = 0; h < TEST_HEADS; h++)
            for (uint32_t d = 0; d < TEST_DIM; d++) {
                k[t][h][d] = test_value(marks[t], layer, 0, h, d);
                v[t][h][d] = test_value(marks[t], layer, 1, h, d);
            }
    int32_t starts[2] = {0, (int32_t)count};
    cxlkv_rows keys = test_rows_at(k), values = test_rows_at(v);
    code = cxlkv_batch_append(batch, layer, &keys, &values, starts, -1);
    free(k);
    free(v);
    cxlkv_batch_destroy(&batch);
    return code;
}

/* Fetches all of a layer and compares it with the marks; 0, or the error of the fetch. */
static inline int64_t test_verify(cxlkv_sequence *sequence, uint32_t layer, const uint64_t *marks,
                                  uint32_t count) {
    uint32_t pages = (count + TEST_PAGE_TOKENS - 1) / TEST_PAGE_TOKENS;
    size_t bytes = (size_t)TEST_HEADS * pages * TEST_PAGE_TOKENS * TEST_DIM * sizeof(float);
    float *out[2] = {aligned_alloc(64, align_up(bytes + 1, 64)),
                     aligned_alloc(64, align_up(bytes + 1, 64))};
    cxlkv_fetch_args args = {.layer = layer, .keys = out[0], .values = out[1],
                             .key_capacity_bytes = bytes, .value_capacity_bytes = bytes};
    cxlkv_batch *batch;
    CHECK(out[0] && out[1]);
    int64_t code = cxlkv_batch_create(sequence->pool, 1, &sequence, &batch);
    if (code == 0) {
        code = cxlkv_batch_fetch(batch, &args);
        cxlkv_batch_destroy(&batch);
    }
    if (code >= 0) CHECK(args.k == pages);
    for (uint32_t t = 0; code >= 0 && t < pages * TEST_PAGE_TOKENS; t++)
        for (uint32_t kind = 0; kind < 2; kind++)
            for (uint32_t h = 0; h < TEST_HEADS; h++)
                for (uint32_t d = 0; d < TEST_DIM; d++) {
                    size_t row = ((size_t)h * pages * TEST_PAGE_TOKENS + t) * TEST_DIM;
                    float wanted = t < count ? test_value(marks[t], layer, kind, h, d) : 0;
                    CHECK(out[kind][row + d] == wanted);
                }
    free(out[0]);
    free(out[1]);
    return code < 0 ? code : 0;
}

/* Appends to, or verifies, every layer. */
static inline int64_t test_append_all(cxlkv_sequence *sequence, const uint64_t *marks,
                                      uint32_t count) {
    int64_t code = 0;
    for (uint32_t layer = 0; code >= 0 && layer < TEST_LAYERS; layer++)
        code = test_append(sequence, layer, marks, count);
    return code;
}

static inline cxlkv_sequence *test_empty(cxlkv_pool *pool) {
    cxlkv_sequence *sequence;
    CHECK(cxlkv_sequence_create(pool, &sequence) == 0);
    return sequence;
}

/* A sequence of these tokens. */
static inline cxlkv_sequence *test_sequence(cxlkv_pool *pool, const uint64_t *marks,
                                            uint32_t count) {
    cxlkv_sequence *sequence = test_empty(pool);
    CHECK(test_append_all(sequence, marks, count) >= 0);
    return sequence;
}

static inline int64_t test_verify_all(cxlkv_sequence *sequence, const uint64_t *marks,
                                      uint32_t count) {
    int64_t code = 0;
    for (uint32_t layer = 0; code >= 0 && layer < TEST_LAYERS; layer++)
        code = test_verify(sequence, layer, marks, count);
    return code;
}

static inline void test_marks(uint64_t *marks, uint64_t first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) marks[i] = first + i;
}

/* A sequence of new tokens, marked from `first` on. */
static inline cxlkv_sequence *test_written(cxlkv_pool *pool, uint64_t *marks, uint64_t first,
                                           uint32_t count) {
    test_marks(marks, first, count);
    return test_sequence(pool, marks, count);
}

/* All of these pages are found; and are those of the marks, if any are given. */
static inline void test_hit(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes,
                            const uint64_t *marks) {
    cxlkv_sequence *hit;
    uint32_t tokens = count * TEST_PAGE_TOKENS;
    CHECK(test_match(pool, count, hashes, 60, &hit) == tokens);
    if (marks) CHECK(test_verify_all(hit, marks, tokens) == 0);
    cxlkv_sequence_destroy(&hit);
}

static inline cxlkv_stats test_stats(cxlkv_pool *pool) {
    cxlkv_stats stats;
    CHECK(cxlkv_pool_stats(pool, &stats) == 0);
    CHECK(stats.pages.free + stats.pages.held + stats.pages.published_only +
              stats.pages.quarantined + stats.pages.retired + stats.pages.withdrawn +
              stats.pages.elsewhere == stats.pages.total);
    return stats;
}

static inline void test_clean(cxlkv_pool *pool) {
    char text[4096];
    int64_t problems = cxlkv_pool_check(pool, 1, text, sizeof(text));
    if (problems != 0) fprintf(stderr, "%ld problems:\n%s", (long)problems, text);
    CHECK(problems == 0);
}

/* These sequences go, up to NULL; then the pool, which is whole and in which nothing is held. */
__attribute__((sentinel)) static inline void test_end(cxlkv_pool **pool, ...) {
    va_list rest;
    va_start(rest, pool);
    for (cxlkv_sequence **at; (at = va_arg(rest, cxlkv_sequence **));) cxlkv_sequence_destroy(at);
    va_end(rest);
    CHECK(test_stats(*pool).pages.held == 0);
    test_clean(*pool);
    cxlkv_pool_destroy(pool);
}

/* What other hosts have to let go is let go by their keepers: within a few beats. */
static inline void test_comes_back(cxlkv_pool **pools, uint32_t hosts,
                                   void (*forget_all)(cxlkv_pool *pool)) {
    for (uint32_t turn = 0;; turn++) {
        uint64_t in_use = 0;
        for (uint32_t i = 0; i < hosts; i++) {
            forget_all(pools[i]);
            cxlkv_stats stats = test_stats(pools[i]);
            in_use += stats.pages.total - stats.pages.free - stats.pages.elsewhere;
        }
        if (!in_use) return;
        CHECK(turn < 2000000);
        sched_yield();
    }
}

/* 16-byte hashes of keys 0..count-1 of one text. */
static inline void test_hashes(uint8_t *hashes, uint64_t text, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t state = text * 7919 + i, words[2];
        words[0] = random_next(&state);
        words[1] = random_next(&state);
        memcpy(hashes + i * 16, words, 16);
    }
}
