/* Goal: what processes count is seen by all, and a total never falls or doubles, whoever leaves,
 * dies or takes over a slot. Method: real processes that count known amounts and are killed, a pool
 * that is left by all and opened again, threads that count at once. */
#include <signal.h>

#include "check.h"
#include "host/counters.h"
#include "pool/pool.h"

enum { CHILDREN = 40, ROUNDS = 300, THREADS = 4, THREAD_COUNTS = 20000 };

static cxlkv_counters total_of(cxlkv_pool *pool) {
    cxlkv_counters total;
    CHECK(test_stats(pool).processes >= 1); /* reaps */
    counters_total(pool->host, &total);
    return total;
}

/* Counts a known amount, says so, and waits to be killed; killed now and then while it counts. */
static void counting_child(cxlkv_pool *pool, int to_parent) {
    for (int i = 0; i < ROUNDS; i++) count_add(pool, COUNT_SCORED_BYTES, 3);
    CHECK(write(to_parent, "x", 1) == 1);
    for (;;) count_add(pool, COUNT_FETCHED_BYTES, 1);
}

static void test_killed_processes_stay_counted(const char *path) {
    cxlkv_pool *pool = test_pool(path, 32);
    uint64_t fetched = 0;
    count_add(pool, COUNT_SCORED_BYTES, 5);
    for (int i = 1; i <= CHILDREN; i++) {
        int pipes[2];
        char byte;
        CHECK(pipe(pipes) == 0);
        pid_t child = test_fork();
        if (child == 0) counting_child(pool, pipes[1]);
        CHECK(read(pipes[0], &byte, 1) == 1);
        CHECK(kill(child, SIGKILL) == 0);
        test_ended(child, SIGKILL);
        close(pipes[0]);
        close(pipes[1]);
        cxlkv_counters total = total_of(pool);
        CHECK(total.scored_bytes == 5 + 3ull * ROUNDS * (uint64_t)i);
        CHECK(total.reaped_processes == (uint64_t)i);
        CHECK(total.fetched_bytes >= fetched);
        fetched = total.fetched_bytes;
    }
    CHECK(test_stats(pool).own.scored_bytes == 5); /* its own only */
    cxlkv_pool_destroy(&pool);

    /* Nobody uses the pool now and the host state is gone: the totals are not. */
    for (uint64_t opened = 0; opened < 3; opened++) {
        CHECK(cxlkv_pool_open(path, NULL, &pool) == 0);
        CHECK(total_of(pool).scored_bytes == 5 + 3ull * ROUNDS * CHILDREN + opened);
        CHECK(total_of(pool).fetched_bytes == fetched);
        CHECK(test_stats(pool).own.scored_bytes == 0);
        count_add(pool, COUNT_SCORED_BYTES, 1);
        cxlkv_pool_destroy(&pool);
    }
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* A slot that is taken again begins at 0 for its new process, and loses nothing of the old. */
static void test_a_slot_is_taken_again(const char *path) {
    cxlkv_pool *first = test_pool(path, 32), *second;
    for (int i = 0; i < 3; i++) {
        CHECK(cxlkv_pool_open(path, NULL, &second) == 0);
        CHECK(second->slot == 1 && test_stats(second).own.fetched_bytes == 0);
        count_add(second, COUNT_FETCHED_BYTES, 7);
        CHECK(test_stats(second).own.fetched_bytes == 7);
        cxlkv_pool_destroy(&second);
    }
    CHECK(total_of(first).fetched_bytes == 21);
    test_remove(&first, path);
}

static void *count_many(void *context) {
    for (int i = 0; i < THREAD_COUNTS; i++) {
        count_add(context, COUNT_ATTENDED_BYTES, 1);
        count_outside(context, COUNT_STALE_HANDLES, 1);
    }
    return NULL;
}

static void test_threads_count_at_once(void) {
    cxlkv_pool *pool = test_pool(NULL, 32);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, count_many, pool) == 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    CHECK(total_of(pool).attended_bytes == (uint64_t)THREADS * THREAD_COUNTS);
    CHECK(test_stats(pool).own.stale_handles == (uint64_t)THREADS * THREAD_COUNTS);
    cxlkv_pool_destroy(&pool);
}

static void test_what_operations_count(void) {
    cxlkv_pool *pool = test_pool(NULL, 32);
    uint32_t pages[1024], page_count = (uint32_t)test_stats(pool).pages.total;
    uint64_t marks[3 * TEST_PAGE_TOKENS];
    uint8_t hashes[5 * 16];
    cxlkv_sequence *sequence, *hit;
    test_hashes(hashes, 1, 5);
    sequence = test_written(pool, marks, 1, 3 * TEST_PAGE_TOKENS);
    CHECK(total_of(pool).appended_bytes == test_stats(pool).own.appended_bytes);
    CHECK(total_of(pool).appended_bytes > 0);

    CHECK(cxlkv_publish(sequence, 3, TEST_PAGE_TOKENS, hashes, 0) == 3);
    CHECK(test_match(pool, 5, hashes, 100, &hit) == 3 * TEST_PAGE_TOKENS);
    CHECK(total_of(pool).match_keys_asked == 5 && total_of(pool).match_keys_hit == 3);
    CHECK(atomic_load(&pool->counters->sequences) == 2);
    cxlkv_sequence_destroy(&hit);
    CHECK(atomic_load(&pool->counters->sequences) == 1);

    CHECK(page_count < 1024 && cxlkv_pages_alloc(pool, page_count - 3, pages) >= 0);
    CHECK(test_append(sequence, 0, marks, TEST_PAGE_TOKENS) == -CXLKV_E_POOL_FULL);
    CHECK(total_of(pool).pool_full_errors == 1); /* it was tried twice, and refused once */
    CHECK(cxlkv_pages_alloc(pool, 1, pages + page_count - 1) == -CXLKV_E_POOL_FULL);
    CHECK(total_of(pool).pool_full_errors == 2);

    CHECK(cxlkv_pool_count_audit(pool, 0.5, 1.0) == 0);
    CHECK(cxlkv_pool_count_audit(pool, 0.25, 0.75) == 0);
    CHECK(cxlkv_pool_count_audit(pool, 1.5, 0.5) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_pool_count_audit(pool, 0.5, 0.0 / 0.0) == -CXLKV_E_ARGUMENT);
    CHECK(total_of(pool).audited_selects == 2);
    CHECK(total_of(pool).audited_recall == 3ull << 30);
    CHECK(total_of(pool).audited_mass == 7ull << 30);

    /* The sequence outlives the pool's mapping, and is let go of without it. */
    CHECK(cxlkv_pool_close(pool, 0) == 0);
    CHECK(cxlkv_pool_count_audit(pool, 0.5, 0.5) == -CXLKV_E_CLOSED);
    cxlkv_sequence_destroy(&sequence);
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    const char *path = test_path("counters");
    test_killed_processes_stay_counted(path);
    test_a_slot_is_taken_again(path);
    test_threads_count_at_once();
    test_what_operations_count();
    return 0;
}
