/* Goal: a process that is killed inside an append to its host's log costs no other host anything,
 * whichever of the line's words it stored last. Method: a real process, another host of a pool of
 * objects, is killed by its own hand after each of the eight stores in turn; flush_store_line() and
 * flush_store_word() are wrapped for that. Then this host looks up what it knows, some hundred
 * times: no log is read anew, and the other one comes back and is heard. */
#include <signal.h>
#include <time.h>

#include "base/flush.h"
#include "object_tests.h"

enum { OBJECT_BYTES = 8192, OBJECTS = 20, LOOKS = 200, WORDS = FLUSH_LINE_BYTES / 8 };
#define LEASE_S 0.05
static uint64_t seed = 20261122;

/* ---- stores to a log, and the last one of them ---- */

static const uint8_t *log_first, *log_end; /* of the host that is to die */
static int stores_left;                    /* to its log; then it does */

static void stored(const void *word) {
    if ((const uint8_t *)word < log_first || (const uint8_t *)word >= log_end) return;
    if (--stores_left == 0) kill(getpid(), SIGKILL);
}

void __real_flush_store_word(void *word, uint64_t value);
void __wrap_flush_store_word(void *word, uint64_t value) {
    __real_flush_store_word(word, value);
    stored(word);
}

void __wrap_flush_store_line(void *line, const void *from, uint32_t first_word) {
    uint64_t words[WORDS];
    memcpy(words, from, sizeof(words));
    for (uint32_t i = first_word; i < WORDS; i++) {
        atomic_store_explicit((_Atomic uint64_t *)line + i, words[i], memory_order_relaxed);
        stored((uint64_t *)line + i);
    }
}

/* ---- the two hosts ---- */

/* A process of host 1: puts some objects and then one more, whose record in the log it stores that
 * many words of. 0: all, and it leaves in order. */
static void other_host(const char *path, uint64_t first, int dies_store) {
    pid_t child = test_fork();
    if (child == 0) {
        cxlkv_pool *pool = test_open_host(path, 1, LEASE_S);
        for (uint64_t i = 0; i < 3; i++)
            CHECK(put(pool, first + i, i, OBJECT_BYTES, &seed) == 1);
        log_first = hosts_line(&pool->hosts, 1, LOG_LINES);
        log_end = log_first + pool->hosts.area.log_records * FLUSH_LINE_BYTES;
        stores_left = dies_store;
        CHECK(put(pool, first + 3, 3, OBJECT_BYTES, &seed) == 1);
        cxlkv_pool_destroy(&pool);
        _exit(dies_store != 0);
    }
    test_ended(child, dies_store ? SIGKILL : 0);
}

/* The time of a lookup, for who reads the output; what is checked is what it has to do. */
static double looks_us(cxlkv_pool *pool) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (uint64_t i = 0; i < LOOKS; i++) CHECK(size_of(pool, i % OBJECTS) == OBJECT_BYTES);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) * 1e6 / LOOKS +
           (double)(end.tv_nsec - begin.tv_nsec) / 1e3 / LOOKS;
}

int main(void) {
    NOT_UNDER_TSAN("TSan dies of threads that are made after a fork");
    const char *path = test_path("log");
    cxlkv_pool *pool = test_shared(path, object_layout(OBJECT_BYTES, true),
                                   (cxlkv_sharing){.hosts = 2}, 6 << 20, LEASE_S);
    uint64_t next = 100;
    for (uint64_t i = 0; i < OBJECTS; i++) CHECK(put(pool, i, i, OBJECT_BYTES, &seed) == 1);
    double before_us = looks_us(pool);
    for (int dies_store = 1; dies_store <= WORDS; dies_store++, next += 10) {
        other_host(path, next, dies_store);
        printf("killed after store %d: a lookup %.1f us, before %.1f us\n", dies_store,
               looks_us(pool), before_us);
        CHECK(size_of(pool, next + 2) == OBJECT_BYTES); /* what it said before is known */
        CHECK(test_stats(pool).all.log_rescans == 0);
        char report[4096];
        CHECK(cxlkv_pool_check(pool, 0, report, sizeof(report)) == 0);
        other_host(path, next + 5, 0);
        for (uint64_t i = 5; i < 9; i++) CHECK(size_of(pool, next + i) == OBJECT_BYTES);
        CHECK(test_stats(pool).all.log_rescans == 0);
    }
    cxlkv_pool_destroy(&pool);
    for (uint32_t number = 0; number < 2; number++) { /* an empty state of the killed one */
        pool = test_open_host(path, number, LEASE_S);
        cxlkv_pool_destroy(&pool);
    }
    CHECK(cxlkv_pool_remove(path) == 0);
    return 0;
}
