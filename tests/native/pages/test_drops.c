/* Goal: what is released while nobody can have the host lock is given back later, once, and told of
 * meanwhile. Method: another thread holds the lock, as a stopped process would; each way of giving
 * back is gone, then the lock is let go and one more call takes it. Also: who waits in vain learns
 * who has the lock. */
#include <semaphore.h>

#include "host/locks.h"
#include "object_tests.h"
#include "sequence/sequence.h"

enum { TOKENS = 8 * TEST_PAGE_TOKENS };

/* Holds a pool's lock from lock_begin() to lock_end(). */
static struct {
    cxlkv_pool *pool;
    pthread_t thread;
    sem_t has, lets_go;
} other;

static void *hold_lock(void *context) {
    (void)context;
    CHECK(host_lock(other.pool) == 0);
    sem_post(&other.has);
    while (sem_wait(&other.lets_go) != 0) continue;
    host_unlock(other.pool);
    return NULL;
}

static void lock_begin(cxlkv_pool *pool) {
    other.pool = pool;
    sem_init(&other.has, 0, 0);
    sem_init(&other.lets_go, 0, 0);
    CHECK(pthread_create(&other.thread, NULL, hold_lock, NULL) == 0);
    while (sem_wait(&other.has) != 0) continue;
    pool->waits.lock_ns = 2000000;
}

static void lock_end(void) {
    sem_post(&other.lets_go);
    CHECK(pthread_join(other.thread, NULL) == 0);
}

/* So many wait: all others see it, and then nobody does. */
static void check_queued(cxlkv_pool *pool, uint64_t count) {
    CHECK(atomic_load(&pool->late.count) == count);
    CHECK(atomic_load(&pool->host->counters[pool->slot].late_drops) == count);
}

static void check_given_back(cxlkv_pool *pool, uint64_t queued, uint64_t held) {
    cxlkv_stats stats = test_stats(pool); /* takes the lock */
    CHECK(stats.own.queued_drops == queued && stats.own.lock_waits > 0 && stats.pages.held == held);
    check_queued(pool, 0);
    test_clean(pool);
}

static cxlkv_sequence *written(cxlkv_pool *pool) {
    uint64_t marks[TOKENS];
    return test_written(pool, marks, 1, TOKENS);
}

static void test_a_release_without_the_lock(void) {
    cxlkv_pool *pool = test_pool(NULL, 32);
    cxlkv_sequence *sequence = written(pool), *fork;
    uint64_t pages = sequence->page_count, marks[1] = {9};
    CHECK(cxlkv_sequence_fork(sequence, &fork) == 0);
    CHECK(test_append(fork, 0, marks, 1) == 1);
    lock_begin(pool);
    cxlkv_sequence_destroy(&sequence);
    check_queued(pool, 0); /* the fork has them all */
    CHECK(cxlkv_sequence_release(fork) == 0);
    check_queued(pool, pages);
    cxlkv_sequence_destroy(&fork);
    CHECK(cxlkv_pages_alloc(pool, 1, (uint32_t[1]){0}) == -CXLKV_E_TIMEOUT);
    lock_end();
    check_given_back(pool, pages, 0);
    cxlkv_pool_destroy(&pool);
}

/* An append that fails after it took its pages leaves the sequence as it was. */
static void test_an_append_is_taken_back(void) {
    cxlkv_pool *pool = test_pool(NULL, 32);
    cxlkv_sequence *sequence = written(pool);
    uint64_t marks[2 * TOKENS];
    uint32_t pages = sequence->page_count;
    lock_begin(pool);
    sequence_pull(sequence, pages - 3); /* as undo() does */
    check_queued(pool, 3);
    CHECK(sequence->page_count == pages - 3);
    for (uint32_t layer = 0; layer < TEST_LAYERS; layer++)
        sequence->layer_tokens[layer] -= 3 * TEST_PAGE_TOKENS;
    lock_end();
    check_given_back(pool, 3, pages - 3);
    test_marks(marks, 1, 2 * TOKENS);
    CHECK(test_append_all(sequence, marks + sequence->layer_tokens[0], TOKENS) >= 0);
    CHECK(test_verify_all(sequence, marks, (uint32_t)sequence->layer_tokens[0]) == 0);
    cxlkv_sequence_destroy(&sequence);
    check_given_back(pool, 3, 0);
    cxlkv_pool_destroy(&pool);
}

static void test_a_lease_without_the_lock(void) {
    cxlkv_pool *pool = object_pool(NULL, 4096, true, 4 << 20, 1);
    uint64_t sizes[2] = {100, 200}, addresses[2];
    cxlkv_lease *lease;
    CHECK(cxlkv_lease_reserve(pool, 2, sizes, addresses, &lease) == 2);
    lock_begin(pool);
    CHECK(cxlkv_lease_release(lease, 0, NULL) == 0);
    CHECK(cxlkv_lease_release(lease, 0, NULL) == 0); /* once */
    cxlkv_lease_destroy(&lease);
    check_queued(pool, 2);
    CHECK(cxlkv_pool_close(pool, 1) == 0); /* nobody reads there any more */
    lock_end();
    check_given_back(pool, 2, 0);
    cxlkv_pool_destroy(&pool);
}

/* Another handle, as another process: what waits here is held, and not lost. */
static void test_others_are_told(const char *path) {
    cxlkv_pool *pool = test_pool(path, 32), *watcher;
    char text[512];
    CHECK(cxlkv_pool_open(path, NULL, &watcher) == 0);
    cxlkv_sequence *sequence = written(pool);
    uint64_t pages = sequence->page_count;
    lock_begin(watcher);
    pool->waits.lock_ns = 2000000;
    cxlkv_sequence_destroy(&sequence);
    lock_end();
    CHECK(cxlkv_pool_check(watcher, 0, text, sizeof(text)) == 1);
    CHECK(strstr(text, "page references could not be given back"));
    CHECK(test_stats(watcher).pages.held == pages && test_stats(watcher).own.queued_drops == 0);
    check_given_back(pool, pages, 0);
    CHECK(cxlkv_pool_check(watcher, 0, text, sizeof(text)) == 0);
    cxlkv_pool_destroy(&watcher);
    test_remove(&pool, path);
}

static void *release_one(void *sequence) {
    cxlkv_sequence *own = sequence;
    cxlkv_sequence_destroy(&own);
    return NULL;
}

static void test_many_at_once(void) {
    enum { THREADS = 4 };
    cxlkv_pool *pool = test_pool(NULL, 64);
    pthread_t threads[THREADS];
    cxlkv_sequence *sequences[THREADS];
    uint64_t pages = 0;
    for (int i = 0; i < THREADS; i++) pages += (sequences[i] = written(pool))->page_count;
    lock_begin(pool);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, release_one, sequences[i]) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    check_queued(pool, pages);
    lock_end();
    check_given_back(pool, pages, 0);
    cxlkv_pool_destroy(&pool);
}

static void test_who_waits_in_vain_learns_why(void) {
    cxlkv_pool *pool = test_pool(NULL, 32);
    char wanted[64];
    lock_begin(pool);
    CHECK(host_lock(pool) == -CXLKV_E_TIMEOUT);
    snprintf(wanted, sizeof(wanted), "process %d has it, which runs", (int)getpid());
    CHECK(strstr(cxlkv_error_text(), wanted));
    CHECK(strstr(cxlkv_error_text(), "not free for 0.002 s"));
    lock_end();
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    test_a_release_without_the_lock();
    test_an_append_is_taken_back();
    test_a_lease_without_the_lock();
    test_others_are_told(test_path("drops"));
    test_many_at_once();
    test_who_waits_in_vain_learns_why();
    return 0;
}
