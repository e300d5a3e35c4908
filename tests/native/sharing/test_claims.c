/* Goal: while one process of a host waits for another host, nobody else of its host does; and what
 * a process leaves that dies there is mended by the others, which leave alone what a living one
 * has. Method: a host is killed, and its place in the queue is written as if it stood there, with
 * a lease that does not end here. Behind it queues a thread, or a forked child, of the first host.
 * What is looked for is what must come, however long it takes. */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include "check.h"
#include "coherence/host_lines.h"
#include "coherence/hosts.h"
#include "format/runs.h"
#include "host/locks.h"

enum { READS = 2000, TOKENS = 4 * TEST_PAGE_TOKENS };

typedef struct scene {
    const char *path;
    cxlkv_pool *pool;
    cxlkv_sequence *sequence;
    uint64_t marks[TOKENS];
    uint32_t *pages, wanted;
    int64_t got;
} scene;

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL); }

static void poke(const scene *s, const void *line, uint64_t word) {
    int fd = open(s->path, O_RDWR | O_CLOEXEC);
    off_t at = (off_t)((const uint8_t *)line - s->pool->region.base);
    CHECK(fd >= 0 && pwrite(fd, &word, sizeof(word), at) == sizeof(word));
    close(fd);
}

static const void *slot_of(const scene *s, uint32_t host) {
    return hosts_line(&s->pool->hosts, host, LOCK_LINE);
}

static bool is_in_the_queue(const scene *s) {
    return SLOT_TICKET(flush_load_word(slot_of(s, 0))) != 0;
}

/* Host 1 is killed, and seems to stand before everybody who comes. */
static void freeze(scene *s) {
    pid_t child = test_fork();
    if (child == 0) {
        test_open_host(s->path, 1, 3600);
        kill(getpid(), SIGKILL);
    }
    test_ended(child, SIGKILL);
    host_name name;
    CHECK(hosts_name(&s->pool->hosts, 1, &name) && name.status == HOST_LIVE);
    poke(s, slot_of(s, 1), SLOT_WORD(name.epoch, 0, 1));
}

static void thaw(const scene *s) { poke(s, slot_of(s, 1), 0); }

static cxlkv_pool *make(const char *path, double lease_s) {
    return test_shared(path, test_layout(), (cxlkv_sharing){.hosts = 2}, 16 << 20, lease_s);
}

static void scene_make(scene *s, const char *path) {
    *s = (scene){.path = path, .pool = make(path, 0.5)};
    s->sequence = test_written(s->pool, s->marks, 1, TOKENS);
    freeze(s);
    s->wanted = (uint32_t)test_stats(s->pool).pages.free + 1; /* one from a free extent */
    s->pages = malloc(s->wanted * sizeof(*s->pages));
    CHECK(s->pages);
}

static void scene_end(scene *s) {
    cxlkv_sequence_destroy(&s->sequence);
    CHECK(test_stats(s->pool).pages.held == 0);
    test_clean(s->pool);
    test_remove(&s->pool, s->path);
    free(s->pages);
}

static void *take(void *context) {
    scene *s = context;
    s->got = cxlkv_pages_alloc(s->pool, s->wanted, s->pages);
    return NULL;
}

/* What is its own, a host reads and writes; and others see it beat. */
static void check_goes_on(scene *s) {
    const uint64_t *beats = (const uint64_t *)hosts_line(&s->pool->hosts, 0, BEAT_LINE);
    uint64_t first = flush_load_word(beats), waits = test_stats(s->pool).own.lock_waits;
    uint32_t page;
    cxlkv_host_row rows[2];
    for (int i = 0; i < READS; i++) {
        CHECK(is_in_the_queue(s));
        CHECK(test_verify(s->sequence, 0, s->marks, TOKENS) == 0);
    }
    CHECK(cxlkv_pages_alloc(s->pool, 1, &page) == 1 && cxlkv_pages_free(s->pool, 1, &page) == 1);
    CHECK(cxlkv_pool_hosts(s->pool, rows, 2) == 2 && !rows[1].silent && !rows[1].fenced);
    while (flush_load_word(beats) == first) nap();
    CHECK(is_in_the_queue(s));
    fprintf(stderr, "%d reads beside who waits: %lu waits for the lock over 1 ms\n", READS,
            test_stats(s->pool).own.lock_waits - waits);
}

static void test_who_waits_has_no_lock(const char *path) {
    pthread_t thread;
    scene s;
    scene_make(&s, path);
    CHECK(pthread_create(&thread, NULL, take, &s) == 0);
    while (!is_in_the_queue(&s)) nap();
    CHECK(pthread_mutex_trylock(&s.pool->host->claims) == EBUSY);
    check_goes_on(&s);
    thaw(&s);
    CHECK(pthread_join(thread, NULL) == 0 && s.got == s.wanted);
    CHECK(!is_in_the_queue(&s));
    CHECK(cxlkv_pages_free(s.pool, s.wanted, s.pages) == s.wanted);
    scene_end(&s);
}

/* A forked child that queues for its host. */
static pid_t child_queues(scene *s) {
    pid_t child = test_fork();
    if (child == 0) {
        take(s);
        _exit(s->got == s->wanted ? 0 : 1);
    }
    while (!is_in_the_queue(s)) nap();
    return child;
}

/* A place in the queue is given up with the process that stood there: its host's keeper sees to it,
 * and whoever queues next gets in. */
static void test_who_queues_dies(const char *path) {
    scene s;
    scene_make(&s, path);
    pid_t child = child_queues(&s);
    CHECK(kill(child, SIGKILL) == 0);
    test_ended(child, SIGKILL);
    while (is_in_the_queue(&s)) nap();
    CHECK(test_verify(s.sequence, 0, s.marks, TOKENS) == 0);
    thaw(&s);
    take(&s);
    CHECK(s.got == s.wanted && cxlkv_pages_free(s.pool, s.wanted, s.pages) == s.wanted);
    scene_end(&s);
}

/* Another process dies with the host lock: who repairs leaves the queue to who stands there. */
static void test_another_dies_with_the_lock(const char *path) {
    scene s;
    scene_make(&s, path);
    pid_t queues = child_queues(&s);
    uint64_t place = flush_load_word(slot_of(&s, 0));
    pid_t dies = test_fork();
    if (dies == 0) {
        CHECK(host_lock(s.pool) == 0);
        kill(getpid(), SIGKILL);
    }
    test_ended(dies, SIGKILL);
    CHECK(host_lock(s.pool) == 0); /* repairs, unless somebody has */
    host_unlock(s.pool);
    CHECK(test_stats(s.pool).all.rebuilds == 1);
    CHECK(flush_load_word(slot_of(&s, 0)) == place);
    check_goes_on(&s);
    thaw(&s);
    test_ended(queues, 0);
    scene_end(&s);
}

/* The lines of host 1 raise SIGBUS, as poisoned memory does; or are there again. */
static void lose(const scene *s, bool lost) {
    const hosts_area *area = &s->pool->hosts.area;
    uint8_t *block = hosts_line(&s->pool->hosts, 1, 0);
    int fd = lost ? memfd_create("lost", MFD_CLOEXEC) : open(s->path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(mmap(block, area->block_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd,
               lost ? 0 : block - s->pool->region.base) == block);
    close(fd);
}

/* A host gives what another asks for, and while it queues the lines of that one are lost: what it
 * had marked as given is its own again. */
static void test_what_was_not_given_comes_back(const char *path) {
    scene s;
    scene_make(&s, path);
    const uint64_t *asks = (const uint64_t *)hosts_line(&s.pool->hosts, 1, BEAT_LINE) + 1;
    uint64_t place = flush_load_word(slot_of(&s, 1));
    thaw(&s);
    take(&s);
    CHECK(s.got == s.wanted && cxlkv_pages_free(s.pool, s.wanted, s.pages) == s.wanted);
    uint64_t all = test_stats(s.pool).pages.free;
    poke(&s, slot_of(&s, 1), place);
    poke(&s, asks, 3);
    while (!is_in_the_queue(&s) || test_stats(s.pool).pages.free == all) nap();
    lose(&s, true);
    while (is_in_the_queue(&s)) nap();
    poke(&s, asks, 0);
    thaw(&s);
    lose(&s, false);
    /* Or it was given at last, and is to be had again: all that there is. */
    cxlkv_stats stats = test_stats(s.pool);
    all = stats.pages.total - stats.pages.held;
    uint32_t *pages = malloc(all * sizeof(*pages));
    CHECK(pages);
    while (cxlkv_pages_alloc(s.pool, (uint32_t)all, pages) != (int64_t)all) nap();
    CHECK(cxlkv_pages_free(s.pool, (uint32_t)all, pages) == (int64_t)all);
    free(pages);
    scene_end(&s);
}

/* A process dies between its claim of an extent and its marking it as the host's: the next one that
 * wants pages has them, without waiting for the keeper, which looks every 3 minutes here. */
static void test_what_a_dead_process_claimed_is_used(const char *path) {
    cxlkv_pool *pool = make(path, 3600);
    uint32_t all = (uint32_t)test_stats(pool).pages.total;
    uint32_t *pages = malloc(all * sizeof(*pages));
    CHECK(pages && cxlkv_pages_alloc(pool, all, pages) == all);
    CHECK(cxlkv_pages_free(pool, all, pages) == all);
    CHECK(host_lock(pool) == 0);
    for (uint32_t run = 0; run < pool->geometry.slab_slots / RUN_SLOTS; run++) {
        run_unlist(pool, run);
        pool->runs[run].ours = 0;
    }
    extents_doubt(pool);
    host_unlock(pool);
    CHECK(test_stats(pool).pages.free < all);
    CHECK(cxlkv_pages_alloc(pool, all, pages) == all);
    CHECK(cxlkv_pages_free(pool, all, pages) == all);
    test_clean(pool);
    test_remove(&pool, path);
    free(pages);
}

int main(void) {
    NOT_UNDER_TSAN("ThreadSanitizer has no threads after a fork");
    const char *path = test_path("claims");
    test_who_waits_has_no_lock(path);
    test_who_queues_dies(path);
    test_another_dies_with_the_lock(path);
    test_what_was_not_given_comes_back(path);
    test_what_a_dead_process_claimed_is_used(path);
    return 0;
}
