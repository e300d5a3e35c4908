/* Goal: the tasks of a model's step run on the threads of the caller's OpenMP team: each item once,
 * by no more threads than the pool has, the first error with its text; all else, a team that is too
 * small and a forked child are left to the pool's own threads. Method: this program is its own
 * OpenMP runtime, which counts the regions that it is asked to run. */
#include "base/team.h"
#include "check.h"
#include "host/threads.h"

enum { ITEMS = 1000, TEAM_MAX = 8, POOL_THREADS = 3 };

static int team_size = 4, regions;

typedef struct member {
    void (*run)(void *);
    void *context;
} member;

static void *member_main(void *argument) {
    member *m = argument;
    m->run(m->context);
    return NULL;
}

/* What libgomp and libomp export. */
void GOMP_parallel(void (*run)(void *), void *context, unsigned threads, unsigned flags);
void GOMP_parallel(void (*run)(void *), void *context, unsigned threads, unsigned flags) {
    pthread_t others[TEAM_MAX];
    member m = {run, context};
    CHECK(threads == 0 && flags == 0);
    regions++;
    for (int i = 1; i < team_size; i++)
        CHECK(pthread_create(&others[i], NULL, member_main, &m) == 0);
    run(context);
    for (int i = 1; i < team_size; i++) CHECK(pthread_join(others[i], NULL) == 0);
}
int omp_get_max_threads(void);
int omp_get_max_threads(void) { return team_size; }

static atomic_uint done[ITEMS], takers;
static _Thread_local bool has_taken;

static int count_item(void *context, uint32_t item) {
    if (!has_taken) atomic_fetch_add(&takers, 1);
    has_taken = true;
    /* Waits until all threads of the region have taken an item. */
    while (atomic_load(&takers) < *(uint32_t *)context) sched_yield();
    atomic_fetch_add(&done[item], 1);
    return 0;
}

static int fail_item(void *context, uint32_t item) {
    (void)context;
    return item == 7 ? fail(EIO, "item %u is broken", item) : 0;
}

static void count_member(void *context) { atomic_fetch_add((atomic_uint *)context, 1); }

static void check_all_done(void) {
    for (int i = 0; i < ITEMS; i++) CHECK(atomic_exchange(&done[i], 0) == 1);
}

static void test_team(void) {
    atomic_uint members = 0;
    CHECK(team_run(4, count_member, &members) && atomic_load(&members) == 4 && regions == 1);
    CHECK(!team_run(5, count_member, &members) && atomic_load(&members) == 4 && regions == 1);
    team_size = 2;
    CHECK(!team_run(3, count_member, &members) && regions == 1);
    team_size = 4;
}

static void test_tasks(cxlkv_pool *pool) {
    uint32_t wanted = POOL_THREADS;
    int before = regions;
    CHECK(run_step_tasks(pool, ITEMS, count_item, &wanted) == 0);
    CHECK(regions == before + 1 && atomic_load(&takers) == POOL_THREADS);
    check_all_done();
    CHECK(run_step_tasks(pool, ITEMS, fail_item, NULL) == -EIO);
    CHECK(strstr(cxlkv_error_text(), "item 7 is broken"));
    CHECK(run_step_tasks(pool, 1, count_item, &wanted) == 0); /* one item: no region */
    CHECK(regions == before + 2 && atomic_exchange(&done[0], 0) == 1);
}

static void test_others(cxlkv_pool *pool) {
    uint32_t wanted = 1;
    int before = regions;
    CHECK(run_tasks(pool, ITEMS, count_item, &wanted) == 0 && regions == before);
    check_all_done();
    team_size = 2; /* an engine of fewer threads than the pool was given */
    CHECK(run_step_tasks(pool, ITEMS, count_item, &wanted) == 0 && regions == before);
    check_all_done();
    team_size = 4;
}

#ifndef __SANITIZE_THREAD__ /* which knows no threads in a forked child */
static void test_child(cxlkv_pool *pool) {
    uint32_t wanted = 1;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int before = regions;
        CHECK(run_step_tasks(pool, ITEMS, count_item, &wanted) == 0 && regions == before);
        check_all_done();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    int before = regions;
    CHECK(run_step_tasks(pool, ITEMS, count_item, &wanted) == 0 && regions == before + 1);
}
#endif

int main(void) {
    cxlkv_pool *pool = test_pool(NULL, 16);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, POOL_THREADS) == 0);
    test_team();
    test_tasks(pool);
    test_others(pool);
#ifndef __SANITIZE_THREAD__
    test_child(pool);
#endif
    cxlkv_pool_destroy(&pool);
    return 0;
}
