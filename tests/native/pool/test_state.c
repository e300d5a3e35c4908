/* Goal: a host state is joined only when it is the one that its pool names, and each part of it
 * lies where this build puts it; no wait for a file's lock is without an end. Method: each word of
 * the header that says where to read is changed in turn, as is the nonce; locks are kept by another
 * open file. */
#include <fcntl.h>

#include "check.h"
#include "format/state_folder.h"
#include "format/superblock.h"
#include "pool/pool.h"
#include "region/region.h"

/* A state that its users left behind, as those that are killed do: another name keeps it. */
static void state_keep(cxlkv_pool *pool, state_place *place) {
    CHECK(state_place_open(pool->region.fd, pool->identity, NO_HOST, false, place) == 1);
    CHECK(state_file_is(place, pool->host_fd));
}

static void state_write(const state_place *place, const host_state *whole, size_t bytes) {
    int fd = openat(place->folder, state_name(place), O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(pwrite(fd, whole, bytes, 0) == (ssize_t)bytes);
    close(fd);
}

static bool is_joined(const char *path, const host_state *planted) {
    cxlkv_pool *pool = test_open(path, NULL);
    bool joined = pool->host->nonce == planted->nonce;
    CHECK(test_stats(pool).processes == 1);
    test_end(&pool, NULL);
    return joined;
}

static void test_each_offset_is_compared(const char *path) {
    static const size_t words[] = {
        offsetof(host_state, magic), offsetof(host_state, nonce), offsetof(host_state, identity),
        offsetof(host_state, bytes), offsetof(host_state, pages_offset),
        offsetof(host_state, runs_offset), offsetof(host_state, index_offset),
        offsetof(host_state, held_offset), offsetof(host_state, held_stride_bytes),
        offsetof(host_state, page_count), offsetof(host_state, run_count),
        offsetof(host_state, index_capacity), offsetof(host_state, ready),
        offsetof(host_state, hotness_offset), offsetof(host_state, reuse_offset)};
    state_place place;
    cxlkv_pool *pool = test_pool(path, 64);
    size_t bytes = pool->host->bytes;
    host_state *whole = malloc(bytes);
    CHECK(whole);
    memcpy(whole, pool->host, bytes);
    memset(whole->processes, 0, sizeof(whole->processes));
    uint64_t nonce = whole->nonce;
    state_keep(pool, &place);
    cxlkv_pool_destroy(&pool);
    CHECK(!state_file_is(&place, 0));
    for (size_t i = 0; i <= sizeof(words) / sizeof(*words); i++) {
        bool as_it_was = i == sizeof(words) / sizeof(*words);
        uint32_t *word = as_it_was ? NULL : (uint32_t *)((uint8_t *)whole + words[i]);
        uint32_t before = as_it_was ? 0 : *word;
        if (word) *word = word == &whole->ready ? 0 : before ^ 4096;
        cxlkv_pool *keeper = test_open(path, NULL);
        /* The nonce in the pool is that of the last state: put ours there. */
        host_line_write(keeper, nonce);
        cxlkv_pool_destroy(&keeper);
        state_write(&place, whole, bytes);
        CHECK(is_joined(path, whole) == as_it_was);
        if (word) *word = before;
    }
    /* No nonce on both sides is no match: this is what a pool says that nobody uses. */
    whole->nonce = 0;
    CHECK(cxlkv_pool_open(path, NULL, &pool) == 0);
    host_line_write(pool, 0);
    cxlkv_pool_destroy(&pool);
    state_write(&place, whole, bytes);
    CHECK(!is_joined(path, whole));
    state_place_close(&place);
    free(whole);
    CHECK(cxlkv_pool_remove(path) == 0);
}

/* By another open file, as another process's would be. */
static void test_no_wait_is_without_an_end(const char *path) {
    cxlkv_pool *pool, *second;
    state_place place;
    lock_wait_s = 0.05;
    pool = test_pool(path, 64);
    int other = open(path, O_RDONLY);
    CHECK(other >= 0 && lock_byte(other, ATTACH_BYTE, false, false) == 0);
    CHECK(cxlkv_pool_open(path, NULL, &second) == -CXLKV_E_TIMEOUT);
    CHECK(strstr(cxlkv_error_text(), "has had its lock for 0.05 s"));
    CHECK(cxlkv_pool_remove(path) == -CXLKV_E_TIMEOUT);
    close(other);
    CHECK(state_place_open(pool->region.fd, pool->identity, NO_HOST, false, &place) == 1);
    unlock_byte(pool->host_fd, STATE_BYTE);
    other = state_file_open(&place, O_RDWR);
    CHECK(other >= 0 && lock_byte(other, STATE_BYTE, true, false) == 0);
    CHECK(cxlkv_pool_open(path, NULL, &second) == -CXLKV_E_TIMEOUT);
    CHECK(strstr(cxlkv_error_text(), place.path));
    close(other);
    CHECK(cxlkv_pool_open(path, NULL, &second) == 0);
    CHECK(test_stats(second).processes == 2);
    cxlkv_pool_destroy(&second);
    state_place_close(&place);
    test_remove(&pool, path);
    lock_wait_s = 30;
}

/* Another file may have the pool's identity and numbers, and a host's processes may not have seen
 * yet that it was declared off. */
static void test_a_state_in_use_is_never_removed(const char *path) {
    cxlkv_pool *pool, *second;
    state_place place;
    pool = test_pool(path, 64);
    CHECK(state_place_open(pool->region.fd, pool->identity, NO_HOST, false, &place) == 1);
    uint64_t nonce = pool->host->nonce;
    host_line_write(pool, nonce ^ 1);
    unlock_byte(pool->region.fd, USE_BYTE);
    CHECK(cxlkv_pool_open(path, NULL, &second) == -CXLKV_E_BUSY);
    CHECK(strstr(cxlkv_error_text(), place.path));
    CHECK(state_file_is(&place, pool->host_fd));
    host_line_write(pool, nonce);
    CHECK(lock_byte(pool->region.fd, USE_BYTE, false, false) == 0);
    CHECK(cxlkv_pool_open(path, NULL, &second) == 0);
    CHECK(test_stats(pool).processes == 2);
    cxlkv_pool_destroy(&second);
    /* Nor by who removes the pool's file under it. */
    unlock_byte(pool->region.fd, USE_BYTE);
    CHECK(cxlkv_pool_remove(path) == 0 && state_file_is(&place, pool->host_fd));
    cxlkv_pool_destroy(&pool);
    CHECK(!state_file_is(&place, 0) && faccessat(place.folder, state_name(&place), F_OK, 0) < 0);
    state_place_close(&place);
}

int main(void) {
    test_a_state_in_use_is_never_removed(test_path("state"));
    test_each_offset_is_compared(test_path("state"));
    test_no_wait_is_without_an_end(test_path("state"));
    return 0;
}
