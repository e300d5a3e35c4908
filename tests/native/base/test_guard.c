/* Goal: memory that fails under an access is an error of that operation, and the pool lives on.
 * Method: a pool's file is cut short under its mapping, at the extents and at the descriptors; a
 * caller's array is cut likewise; a fault that is not ours still ends the process. */
#include <signal.h>
#include <sys/mman.h>

#include "check.h"
#include "host/locks.h"

enum { PAGES = 6, TOKENS = PAGES * TEST_PAGE_TOKENS + 1 };
static uint64_t marks[TOKENS];

static cxlkv_sequence *filled(cxlkv_pool *pool) {
    return test_written(pool, marks, 1, TOKENS);
}

/* All free pages, so that everything in the pool is in use. */
static uint32_t drain(cxlkv_pool *pool, uint32_t *pages) {
    uint32_t count = (uint32_t)test_stats(pool).pages.free;
    CHECK(cxlkv_pages_alloc(pool, count, pages) == count);
    return count;
}

static void cut(const char *path, uint64_t bytes) { CHECK(truncate(path, (off_t)bytes) == 0); }

/* Of one token with id 0, behind the last page. */
static void publish_tail(cxlkv_sequence *sequence, const uint8_t *hashes) {
    const int64_t id = 0;
    const uint8_t *before = hashes + (PAGES - 1) * 16;
    uint8_t key[16];
    CHECK(TOKENS % TEST_PAGE_TOKENS == 1);
    CHECK(cxlkv_page_keys(&id, 1, 0, CXLKV_KEYS_TAIL, before, key) == 1);
    CHECK(cxlkv_publish_tail(sequence, TOKENS, before, key) == 1);
}

/* Behind a root that is the key before it, the tail is looked for at once. */
static void lose_tail(cxlkv_sequence *sequence, const uint8_t *hashes) {
    const int64_t id = 0;
    const uint8_t *before = hashes + (PAGES - 1) * 16;
    const cxlkv_match_args args = {.hashes = before, .ids = &id, .id_count = 1, .root = before,
                                   .lease_s = 10};
    cxlkv_sequence *hit;
    uint8_t key[16];
    int64_t code = cxlkv_match(sequence->pool, &args, &hit);
    CHECK(code == 0 || code == -CXLKV_E_POISON);
    if (code == 0) cxlkv_sequence_destroy(&hit);
    CHECK(cxlkv_page_keys(&id, 1, 0, CXLKV_KEYS_TAIL, hashes, key) == 1);
    code = cxlkv_publish_tail(sequence, TEST_PAGE_TOKENS + 1, hashes, key);
    CHECK(code == 0 || code == -CXLKV_E_POOL_FULL || code == -CXLKV_E_POISON);
    CHECK(cxlkv_page_keys(&id, 1, 0, CXLKV_KEYS_TAIL, before, key) == 1);
    while ((code = cxlkv_forget(sequence->pool, 1, key, NULL)) < 0) CHECK(code == -CXLKV_E_POISON);
}

/* Every operation that touches the lost memory fails by name; every other one goes on. */
static void test_extents_cut(uint32_t threads) {
    const char *path = test_path("guard");
    cxlkv_pool *pool = test_pool(path, 256);
    static uint32_t pages[1 << 16];
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, threads) == 0);
    uint32_t loose = drain(pool, pages), last = 0;
    for (uint32_t i = 0; i < loose; i++)
        if (pages[i] > last) last = pages[i];
    for (uint32_t i = 0; i < loose; i++) /* only the last run stays free: it will be lost */
        if (pages[i] / RUN_SLOTS != last / RUN_SLOTS) continue;
        else CHECK(cxlkv_pages_free(pool, 1, &pages[i]) == 1);
    cxlkv_sequence *hurt = filled(pool), *fresh, *hit;
    uint8_t hashes[PAGES * 16], bytes[1024];
    test_hashes(hashes, 3, PAGES);
    CHECK(cxlkv_publish(hurt, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    publish_tail(hurt, hashes);
    int64_t size = cxlkv_sequence_export(hurt, bytes, sizeof(bytes));
    CHECK(size > 0);
    uint32_t own[PAGES];
    CHECK(cxlkv_sequence_pages(hurt, own, PAGES) == PAGES);
    uint64_t extent = own[0] / pool->geometry.slab_slots;
    CHECK(extent > 0);
    cut(path, pool->geometry.extents_offset + extent * pool->geometry.extent_bytes);

    CHECK(test_verify(hurt, 0, marks, TOKENS) == -CXLKV_E_POISON);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.pages.retired > 0);
    int64_t code, found = test_match(pool, PAGES, hashes, 10, &hit);
    CHECK(found == 0 || found == -CXLKV_E_POISON);
    if (found == 0) cxlkv_sequence_destroy(&hit);
    lose_tail(hurt, hashes);
    CHECK(cxlkv_sequence_adopt(pool, bytes, (uint64_t)size, &fresh) == -CXLKV_E_POISON);
    CHECK(cxlkv_sequence_truncate(hurt, 2) == -CXLKV_E_POISON);
    CHECK(cxlkv_sequence_tokens(hurt, 0) == TOKENS);
    while ((code = cxlkv_forget(pool, PAGES, hashes, NULL)) < 0) CHECK(code == -CXLKV_E_POISON);
    cxlkv_sequence_destroy(&hurt);
    stats = test_stats(pool);
    CHECK(stats.pages.published == 0);

    /* A new sequence gets only pages that are still there, or fails once for each that is not. */
    for (uint32_t i = 0; i < loose; i++)
        if (pages[i] / RUN_SLOTS != last / RUN_SLOTS)
            CHECK(cxlkv_pages_free(pool, 1, &pages[i]) == 1);
    uint32_t poisoned = 0;
    for (;;) {
        CHECK(cxlkv_sequence_create(pool, &fresh) == 0);
        code = test_append_all(fresh, marks, TOKENS);
        if (code >= 0 || code != -CXLKV_E_POISON) break;
        CHECK(cxlkv_sequence_tokens(fresh, TEST_LAYERS - 1) == 0);
        cxlkv_sequence_destroy(&fresh);
        CHECK(++poisoned < 200);
    }
    CHECK(code >= 0 && test_verify_all(fresh, marks, TOKENS) == 0);
    cxlkv_sequence_destroy(&fresh);
    stats = test_stats(pool);
    CHECK(stats.pages.held == 0 && stats.pages.free + stats.pages.retired == stats.pages.total);
    cxlkv_pool_destroy(&pool);
    CHECK(cxlkv_pool_open(path, NULL, &pool) == -CXLKV_E_TRUNCATED);
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* The descriptors themselves are gone: giving pages back must not kill, nor lose count. */
static void test_descriptors_cut(void) {
    const char *path = test_path("guard");
    cxlkv_pool *pool = test_pool(path, 256);
    cxlkv_sequence *hurt = filled(pool), *child, *hit;
    uint8_t hashes[PAGES * 16], bytes[1024];
    char text[4096];
    uint32_t pages[8];
    test_hashes(hashes, 3, PAGES);
    CHECK(cxlkv_publish(hurt, 3, TEST_PAGE_TOKENS, hashes, 0) == 3);
    CHECK(cxlkv_sequence_fork(hurt, &child) == 0);
    CHECK(cxlkv_pages_alloc(pool, 8, pages) == 8);
    cut(path, 4096);
    CHECK(cxlkv_sequence_export(child, bytes, sizeof(bytes)) == -CXLKV_E_POISON);
    CHECK(cxlkv_publish(hurt, PAGES, TEST_PAGE_TOKENS, hashes, 0) == -CXLKV_E_POISON);
    int64_t found = test_match(pool, 3, hashes, 10, &hit);
    CHECK(found == 0 || found == -CXLKV_E_POISON);
    if (found == 0) cxlkv_sequence_destroy(&hit);
    CHECK(cxlkv_pages_free(pool, 8, pages) == 8);
    found = cxlkv_forget(pool, 3, hashes, NULL);
    CHECK(found >= 0 || found == -CXLKV_E_POISON);
    CHECK(cxlkv_sequence_release(hurt) == 0);
    cxlkv_sequence_destroy(&hurt);
    cxlkv_sequence_destroy(&child);
    CHECK(test_stats(pool).pages.retired > 0);
    CHECK(cxlkv_pool_check(pool, 1, text, sizeof(text)) > 0 && strstr(text, "bus error"));
    cxlkv_pool_destroy(&pool);
    CHECK(cxlkv_pool_open(path, NULL, &pool) == -CXLKV_E_TRUNCATED);
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* A death inside the lock is mended without the descriptors as well. */
static void test_rebuild_when_cut(void) {
    const char *path = test_path("guard");
    cxlkv_pool *pool = test_pool(path, 64);
    cxlkv_sequence *hurt = filled(pool);
    pid_t child = test_fork();
    if (child == 0) {
        CHECK(host_lock(pool) == 0);
        rewrite_begin(pool, 3);
        kill(getpid(), SIGKILL);
    }
    test_ended(child, SIGKILL);
    cut(path, 4096);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.all.rebuilds == 1 && stats.pages.free == 0);
    cxlkv_sequence_destroy(&hurt);
    test_remove(&pool, path);
}

/* The caller's own array fails: no page of the pool is blamed for it. */
static void test_callers_array_cut(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    int fd = memfd_create("array", MFD_CLOEXEC);
    CHECK(ftruncate(fd, 8192) == 0);
    void *array = mmap(NULL, 8192, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(array != MAP_FAILED && ftruncate(fd, 0) == 0);
    cxlkv_sequence *sequence = test_empty(pool);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    cxlkv_rows rows = test_rows_at(array);
    int32_t starts[2] = {0, 9};
    CHECK(cxlkv_batch_append(batch, 0, &rows, &rows, starts, -1) == -EFAULT);
    CHECK(cxlkv_sequence_tokens(sequence, 0) == 0);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.pages.retired == 0 && stats.pages.free == stats.pages.total);
    cxlkv_batch_destroy(&batch);
    test_end(&pool, &sequence, NULL);
    munmap(array, 8192);
    close(fd);
}

/* Nor for an engine's blocks, of which the second half of the memory is lost. */
static void test_blocks_cut(void) {
    enum { HEAD_BYTES = TEST_PAGE_TOKENS * TEST_DIM * 4 };
    cxlkv_pool *pool = test_pool(NULL, 64);
    const int32_t starts[2] = {0, 1}, block = 0, first = 0;
    int32_t good = -1;
    int fd = memfd_create("engine", MFD_CLOEXEC);
    CHECK(ftruncate(fd, 8192) == 0);
    uint8_t *array = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(array != MAP_FAILED);
    cxlkv_sequence *sequence = test_empty(pool);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    cxlkv_blocks table = {.keys = array, .values = array + 4096, .block_count = 1,
                          .key_stride_bytes = {4096, HEAD_BYTES},
                          .value_stride_bytes = {4096, HEAD_BYTES},
                          .block_tokens = TEST_PAGE_TOKENS, .dtype = CXLKV_FLOAT32,
                          .starts = starts, .blocks = &block};
    CHECK(cxlkv_batch_append_blocks(batch, 0, &table, -1) == TEST_PAGE_TOKENS);
    CHECK(ftruncate(fd, 4096) == 0);
    CHECK(cxlkv_batch_append_blocks(batch, 0, &table, -1) == -EFAULT);
    CHECK(cxlkv_sequence_tokens(sequence, 0) == TEST_PAGE_TOKENS);
    CHECK(cxlkv_batch_fetch_blocks(batch, 0, &table, &first, &good) == -EFAULT && good == 0);
    CHECK(test_stats(pool).pages.retired == 0);
    cxlkv_batch_destroy(&batch);
    test_end(&pool, &sequence, NULL);
    munmap(array, 8192);
    close(fd);
}

/* ---- faults that are not ours ---- */

static volatile sig_atomic_t seen;

static void on_fault_before(int number) {
    (void)number;
    seen++;
    CHECK(seen == 1);
    raise(SIGBUS); /* as faulthandler does when it has said its say */
}

/* handler 0: none was there before; 1: one that raises again. way 0: a fault, 1: kill(). */
static void test_not_ours(int handler, int way) {
    pid_t child = fork();
    if (child == 0) {
        struct sigaction action = {.sa_flags = SA_NODEFER};
        if (handler) action.sa_handler = on_fault_before;
        else action.sa_handler = SIG_DFL; /* a sanitizer's would print and exit */
        sigaction(SIGBUS, &action, NULL);
        cxlkv_pool *pool = test_pool(NULL, 64);
        (void)pool;
        if (way == 1) kill(getpid(), SIGBUS);
        int fd = memfd_create("array", MFD_CLOEXEC);
        CHECK(ftruncate(fd, 4096) == 0);
        volatile char *at = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
        CHECK(ftruncate(fd, 0) == 0);
        (void)at[0];
        _exit(0);
    }
    test_ended(child, SIGBUS);
}

int main(void) {
    NOT_UNDER_TSAN("TSan runs handlers with all signals blocked, so that the second jump kills");
    for (int i = 0; i < 4; i++) test_not_ours(i / 2, i % 2);
    test_extents_cut(1);
    test_extents_cut(2);
    test_descriptors_cut();
    test_rebuild_when_cut();
    test_callers_array_cut();
    test_blocks_cut();
    return 0;
}
