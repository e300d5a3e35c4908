/* Goal: after os.fork() parent and child each have their own references, in whatever order they let
 * go or die; a death inside the host lock costs nobody a page. Method: real processes, pipes for
 * every order, SIGKILL, and deaths planted in the middle of a change. */
#include <signal.h>

#include "check.h"
#include "format/records.h"
#include "pool/alloc.h"

enum { TOKENS = 3 * TEST_PAGE_TOKENS + 2 };
static uint64_t marks[TOKENS + 8];

/* ---- in a forked child, before the pool's own handler: this one came first ---- */

static cxlkv_pool *robbed;
static bool dies_before_claim;
static int claim_waits_for = -1;

static void wait_other(int fd);
static void before_claim(void) {
    if (robbed) robbed->host->processes[robbed->fork.slot].nonce ^= 1;
    if (dies_before_claim) _exit(0);
    if (claim_waits_for >= 0) wait_other(claim_waits_for);
}

static void signal_other(int fd) { CHECK(write(fd, "x", 1) == 1); }
static void wait_other(int fd) {
    char byte;
    CHECK(read(fd, &byte, 1) == 1);
}

/* Who waits for a process that died at a failed check then reads the end of its pipe. */
static void keep_ends(bool is_child, int to_child[2], int to_parent[2]) {
    close(to_child[is_child ? 1 : 0]);
    close(to_parent[is_child ? 0 : 1]);
}

static cxlkv_sequence *filled(cxlkv_pool *pool) {
    test_marks(marks, 100, TOKENS + 8);
    return test_sequence(pool, marks, TOKENS);
}

/* All is free then; the pool goes, with its file if it has one. */
static void end(cxlkv_pool *pool, cxlkv_sequence *sequence, const char *path) {
    cxlkv_sequence_destroy(&sequence);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.pages.free == stats.pages.total && stats.processes == 1);
    test_clean(pool);
    cxlkv_pool_destroy(&pool);
    if (path) CHECK(cxlkv_pool_remove(path) == 0);
}

/* The child goes on from the inherited tail; the parent does too, with other tokens. */
static void test_both_go_on(const char *path) {
    cxlkv_pool *pool = test_pool(path, 64);
    cxlkv_sequence *sequence = filled(pool);
    pid_t child = test_fork();
    if (child == 0) {
        cxlkv_sequence *forked;
        CHECK(test_stats(pool).processes == 2);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        CHECK(cxlkv_sequence_fork(sequence, &forked) == 0);
        CHECK(test_append_all(forked, marks + TOKENS, 8) >= 0);
        CHECK(test_verify_all(forked, marks, TOKENS + 8) == 0);
        cxlkv_sequence_destroy(&forked);
        cxlkv_sequence_destroy(&sequence);
        cxlkv_pool_destroy(&pool);
        _exit(0);
    }
    marks[TOKENS] = 7777;
    CHECK(test_append_all(sequence, marks + TOKENS, 8) >= 0);
    test_ended(child, 0);
    CHECK(test_verify_all(sequence, marks, TOKENS + 8) == 0);
    end(pool, sequence, path);
}

/* order 0: the parent lets go first, 1: the child does, 2: the child is killed, 3: it just ends. */
static void test_order(int order) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    cxlkv_sequence *sequence = filled(pool);
    int to_child[2], to_parent[2];
    CHECK(pipe(to_child) == 0 && pipe(to_parent) == 0);
    uint64_t held = test_stats(pool).pages.held;
    pid_t child = test_fork();
    keep_ends(child == 0, to_child, to_parent);
    if (child == 0) {
        wait_other(to_child[0]);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        if (order == 1) cxlkv_sequence_destroy(&sequence);
        signal_other(to_parent[1]);
        if (order == 2) pause();
        wait_other(to_child[0]);
        if (order == 0) {
            CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
            cxlkv_sequence_destroy(&sequence);
            CHECK(test_stats(pool).pages.held == 0);
        }
        _exit(0);
    }
    if (order == 0) cxlkv_sequence_destroy(&sequence);
    CHECK(test_stats(pool).pages.held == held);
    signal_other(to_child[1]);
    wait_other(to_parent[0]);
    CHECK(test_stats(pool).pages.held == held);
    if (order == 2) CHECK(kill(child, SIGKILL) == 0);
    else signal_other(to_child[1]);
    test_ended(child, order == 2 ? SIGKILL : 0);
    CHECK(test_stats(pool).all.reaped_processes == 1);
    if (order != 0) CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    end(pool, order == 0 ? NULL : sequence, NULL);
    close(to_child[1]);
    close(to_parent[0]);
}

/* A grandchild still has the pages when both before it are gone, and the pool is in use, even while
 * it has not yet come for its slot; then the pool can be opened. */
static void test_grandchild_outlives(void) {
    const char *path = test_path("fork");
    cxlkv_pool *pool = test_pool(path, 64);
    cxlkv_sequence *sequence = filled(pool);
    int go[2], done[2];
    CHECK(pipe(go) == 0 && pipe(done) == 0);
    pid_t child = fork();
    keep_ends(child == 0, go, done);
    if (child == 0) {
        claim_waits_for = go[0];
        pid_t grandchild = fork();
        if (grandchild != 0) {
            cxlkv_pool_close(pool, 0);
            _exit(0);
        }
        CHECK(test_stats(pool).processes == 1);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        cxlkv_pool *again = test_open(path, NULL);
        CHECK(test_stats(again).processes == 2);
        cxlkv_pool_destroy(&again);
        CHECK(cxlkv_pool_remove(path) == -CXLKV_E_BUSY);
        cxlkv_pool_close(pool, 0);
        signal_other(done[1]);
        _exit(0);
    }
    test_ended(child, 0);
    CHECK(test_stats(pool).processes == 2); /* it was not taken for dead with its parent */
    cxlkv_sequence_destroy(&sequence);
    cxlkv_pool_destroy(&pool);
    CHECK(cxlkv_pool_remove(path) == -CXLKV_E_BUSY);
    signal_other(go[1]);
    wait_other(done[0]);
    end(test_open(path, NULL), NULL, path);
    close(go[1]);
    close(done[0]);
}

/* Nor does a child that dies before it has its slot keep that for as long as its parent lives. */
static void test_death_before_claim(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    cxlkv_sequence *sequence = filled(pool);
    dies_before_claim = true;
    pid_t child = fork();
    dies_before_claim = false;
    CHECK(child > 0);
    test_ended(child, 0);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.processes == 1 && stats.all.reaped_processes == 1);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    end(pool, sequence, NULL);
}

/* ---- deaths inside the lock ---- */

static void die_in_lock(cxlkv_pool *pool, int where, uint32_t page) {
    CHECK(host_lock(pool) == 0);
    if (where == 0) { /* lists and counts half changed */
        memset(pool->runs, 0xff, sizeof(run_info));
        pool->host->free_pages = 12345;
        pool->pages[page].holders = 99;
        pool->host->free_runs = 7;
    } else if (where == 1) { /* a record that both hold, torn by publish() */
        rewrite_begin(pool, page);
        memset(descriptor_of(pool, page), 0xee, 40);
        uint8_t *extents = pool->region.base + pool->geometry.extents_offset;
        record_header *header = (record_header *)extents + page % pool->geometry.slab_slots;
        CHECK(page < pool->geometry.slab_slots);
        memset(header, 0xdd, 24);
    } else { /* a page's last reference is gone */
        uint32_t fresh;
        CHECK(pages_take(pool, 1, NO_PAGE, &fresh) == 0);
        pool->held[fresh] = 0;
        if (where == 2) { /* its descriptor is half written */
            rewrite_begin(pool, fresh);
            memset(descriptor_of(pool, fresh), 0xcc, 16);
        } else { /* what it has is still to be scrubbed */
            memset(pieces_of(pool, fresh, 0, PIECE_KEYS), 0xbb, LINE_BYTES);
            pool->pages[fresh].scrub = 1;
        }
    }
    kill(getpid(), SIGKILL);
}

static void test_death_in_lock(int where) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    cxlkv_sequence *sequence = filled(pool);
    uint32_t page;
    CHECK(cxlkv_sequence_pages(sequence, &page, 1) > 0);
    pid_t child = fork();
    if (child == 0) die_in_lock(pool, where, page);
    test_ended(child, SIGKILL);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.all.rebuilds == 1 && stats.all.reaped_processes == 1);
    CHECK(stats.pages.quarantined == 0);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    test_clean(pool);
    for (page = 0; page < pool->host->page_count; page++)
        CHECK(!pool->pages[page].scrub && *pieces_of(pool, page, 0, PIECE_KEYS) != 0xbb);
    uint8_t hashes[3 * 16];
    test_hashes(hashes, 5, 3);
    CHECK(cxlkv_publish(sequence, 3, TEST_PAGE_TOKENS, hashes, 0) == 3);
    cxlkv_sequence_destroy(&sequence);
    test_hit(pool, 3, hashes, marks);
    CHECK(cxlkv_forget(pool, 3, hashes, NULL) == 3);
    end(pool, NULL, NULL);
}

/* The slot that was made for a child was reaped and given to another: the child must not take it.
 * What it forks in turn has no pool either. */
static void test_slot_of_another(void) {
    cxlkv_pool *pool = robbed = test_pool(NULL, 64);
    cxlkv_sequence *sequence = filled(pool);
    pid_t child = fork();
    if (child == 0) {
        cxlkv_stats stats;
        CHECK(cxlkv_pool_stats(pool, &stats) == -CXLKV_E_CLOSED);
        robbed = NULL;
        pid_t grandchild = fork();
        CHECK(cxlkv_pool_stats(pool, &stats) == -CXLKV_E_CLOSED);
        if (grandchild == 0) _exit(0);
        test_ended(grandchild, 0);
        cxlkv_sequence_destroy(&sequence);
        cxlkv_pool_destroy(&pool);
        _exit(0);
    }
    robbed = NULL;
    test_ended(child, 0);
    CHECK(pool->host->processes[pool->fork.slot].state == 2); /* "the other" still has it */
    end(pool, sequence, NULL);
}

/* More processes than slots: the child that gets none says so, and harms nobody. */
static void test_no_slot_left(void) {
    const char *path = test_path("slots");
    cxlkv_pool *pool = test_pool(path, 64), *others[PROCESS_MAX], *one_more;
    for (int i = 1; i < PROCESS_MAX; i++) CHECK(cxlkv_pool_open(path, NULL, &others[i]) == 0);
    CHECK(cxlkv_pool_open(path, NULL, &one_more) == -CXLKV_E_PROCESSES);
    cxlkv_sequence *sequence = filled(pool);
    pid_t child = fork();
    if (child == 0) {
        cxlkv_stats stats;
        CHECK(cxlkv_pool_stats(pool, &stats) == -CXLKV_E_CLOSED);
        CHECK(test_append_all(sequence, marks, 1) == -CXLKV_E_CLOSED);
        cxlkv_sequence_destroy(&sequence);
        cxlkv_pool_destroy(&pool);
        _exit(0);
    }
    test_ended(child, 0);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    CHECK(test_stats(pool).processes == PROCESS_MAX);
    for (int i = 1; i < PROCESS_MAX; i++) cxlkv_pool_destroy(&others[i]);
    end(pool, sequence, path);
}

int main(void) {
    NOT_UNDER_TSAN("TSan takes a child's locks, made anew, for those that its parent holds");
    CHECK(pthread_atfork(NULL, NULL, before_claim) == 0);
    test_both_go_on(NULL);
    test_both_go_on(test_path("both"));
    for (int order = 0; order < 4; order++) test_order(order);
    test_grandchild_outlives();
    test_death_before_claim();
    for (int where = 0; where < 4; where++) test_death_in_lock(where);
    test_slot_of_another();
    test_no_slot_left();
    return 0;
}
