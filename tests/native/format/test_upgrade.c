/* Goal: wherever an upgrade is stopped, the pool is a whole one of the version before or of this
 * one, and a second upgrade finishes it; nothing that was published is lost.
 * Method: a child upgrades under ptrace, one instruction at a time; each state of the superblock's
 * page is kept, put into a copy of the pool, opened, upgraded again and read. What builds of the
 * version before really wrote is tests/test_upgrade.py's. */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>

#include "base/crc32c.h"
#include "check.h"
#include "format/superblock.h"

enum { TOKENS = 3 * TEST_PAGE_TOKENS, KEYS = TOKENS / TEST_PAGE_TOKENS, STATES_MAX = 64 };

static const char *path;

static int map_page(uint8_t **page) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    *page = mmap(NULL, SUPERBLOCK_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(*page != MAP_FAILED);
    return fd;
}

/* The superblock's page as the version before had it. */
static void go_back(uint8_t *page) {
    superblock *block = (superblock *)page;
    uint64_t nonce = host_line_nonce(page);
    uint32_t crc = crc32c(0, &nonce, sizeof(nonce));
    block->version = FORMAT_BEFORE;
    memset(&block->crc_before, 0, sizeof(*block) - offsetof(superblock, crc_before));
    block->crc_before = crc32c(0, block, offsetof(superblock, crc_before));
    memset(page + SUPERBLOCK_BYTES - LINE_BYTES, 0, LINE_BYTES);
    memcpy(page + SUPERBLOCK_BYTES - LINE_BYTES, &nonce, sizeof(nonce));
    memcpy(page + SUPERBLOCK_BYTES - LINE_BYTES + sizeof(nonce), &crc, sizeof(crc));
}

static void make_pool(void) {
    cxlkv_pool *pool = test_pool(path, 64);
    uint64_t marks[TOKENS];
    uint8_t hashes[KEYS * 16];
    test_hashes(hashes, 7, KEYS);
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS);
    CHECK(cxlkv_publish(sequence, KEYS, TEST_PAGE_TOKENS, hashes, 0) == KEYS);
    test_end(&pool, &sequence, NULL);
}

static void check_contents(void) {
    uint64_t marks[TOKENS];
    uint8_t hashes[KEYS * 16];
    test_marks(marks, 1, TOKENS);
    test_hashes(hashes, 7, KEYS);
    cxlkv_pool *pool = test_open(path, NULL);
    test_hit(pool, KEYS, hashes, marks);
    test_end(&pool, NULL);
}

/* Every state that the page goes through while a child upgrades it; how many. */
static int record_states(uint8_t *page, uint8_t (*states)[SUPERBLOCK_BYTES]) {
    int count = 0, status;
    pid_t child = test_fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0) _exit(77);
        raise(SIGSTOP);
        superblock_upgrade(page);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    memcpy(states[count++], page, SUPERBLOCK_BYTES);
    while (!WIFEXITED(status)) {
        CHECK(WIFSTOPPED(status) && ptrace(PTRACE_SINGLESTEP, child, NULL, NULL) == 0);
        CHECK(waitpid(child, &status, 0) == child);
        if (memcmp(states[count - 1], page, SUPERBLOCK_BYTES) == 0) continue;
        CHECK(count < STATES_MAX);
        memcpy(states[count++], page, SUPERBLOCK_BYTES);
    }
    return WEXITSTATUS(status) == 77 ? -1 : count;
}

static void test_stopped_at_every_store(void) {
    static uint8_t states[STATES_MAX][SUPERBLOCK_BYTES];
    uint8_t *page;
    cxlkv_pool *pool;
    int fd = map_page(&page), before = 0;
    go_back(page);
    int count = record_states(page, states);
    if (count < 0) { /* qemu-user has no ptrace, a container may forbid it */
        fprintf(stderr, "skipped: an upgrade stopped at every store: nothing may be traced here\n");
        CHECK(cxlkv_pool_upgrade(path) == FORMAT_BEFORE);
        count = 0;
    }
    for (int i = 0; i < count; i++) {
        memcpy(page, states[i], SUPERBLOCK_BYTES);
        bool is_before = ((superblock *)page)->version == FORMAT_BEFORE;
        before += is_before;
        if (is_before) {
            CHECK(cxlkv_pool_open(path, NULL, &pool) == -CXLKV_E_VERSION);
            CHECK(strstr(cxlkv_error_text(), "cxlkv pool upgrade") != NULL);
        } else {
            check_contents();
        }
        CHECK(cxlkv_pool_upgrade(path) == (is_before ? FORMAT_BEFORE : FORMAT_VERSION));
        CHECK(cxlkv_pool_upgrade(path) == FORMAT_VERSION);
        check_contents();
    }
    CHECK(count == 0 || (before >= 3 && count == before + 1)); /* the version is the last store */
    munmap(page, SUPERBLOCK_BYTES);
    close(fd);
}

/* Nothing is stored in a pool that is in use, or damaged, or of a version that is not known. */
static void test_refused(void) {
    uint8_t *page, kept[SUPERBLOCK_BYTES];
    int fd = map_page(&page);
    cxlkv_pool *pool = test_open(path, NULL);
    CHECK(cxlkv_pool_upgrade(path) == -CXLKV_E_BUSY);
    cxlkv_pool_destroy(&pool);
    const uint32_t versions[] = {0, FORMAT_BEFORE - 1, FORMAT_VERSION + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
        uint32_t was = ((superblock *)page)->version;
        ((superblock *)page)->version = versions[i];
        CHECK(cxlkv_pool_upgrade(path) == -CXLKV_E_VERSION);
        ((superblock *)page)->version = was;
    }
    go_back(page);
    for (size_t i = 12; i < offsetof(superblock, build); i += 13) {
        page[i] ^= 4;
        memcpy(kept, page, SUPERBLOCK_BYTES);
        CHECK(cxlkv_pool_upgrade(path) == -CXLKV_E_CORRUPT);
        CHECK(memcmp(kept, page, SUPERBLOCK_BYTES) == 0);
        page[i] ^= 4;
    }
    CHECK(cxlkv_pool_upgrade(path) == FORMAT_BEFORE);
    check_contents();
    munmap(page, SUPERBLOCK_BYTES);
    close(fd);
}

int main(void) {
    path = test_path("upgrade");
    make_pool();
    test_stopped_at_every_store();
    test_refused();
    CHECK(cxlkv_pool_remove(path) == 0);
    return 0;
}
