/* The items of one task are shared out to threads, each item under a SIGBUS guard.
 *
 * A model's step has a few tasks of some hundred us for each layer, between matrices that an OpenMP
 * team has multiplied. That team looks out for more for milliseconds, on all CPUs that there are:
 * threads of our own would share these with it, so the step's tasks are run by the team
 * (docs/decisions/0029).
 *
 * All else is run by the pool's own helpers, which one task at a time has, and so is a step where
 * there is no team. A thread that sleeps is woken in 50 us or, on a virtual machine, in
 * milliseconds. So a helper waits for the next task for LOOK_OUT_NS before it sleeps, and a task
 * ends without the helpers that have not begun with it. */
#include "base/clock.h"
#include "base/guard.h"
#include "base/team.h"
#include "host/locks.h"
#include "host/threads.h"

enum { LOOK_OUT_NS = 100000 };

/* A task under way; it lies on its caller's stack. */
typedef struct task_run {
    cxlkv_pool *pool;
    task_function task;
    void *context;
    uint32_t count;
    atomic_uint next;
    atomic_uint members;         /* of a team, that have begun: it may have more than are wanted */
    atomic_int result;
    pthread_mutex_t lock;        /* guards the text */
    char text[512];              /* of the first error: its thread's text dies with it */
} task_run;

struct helpers {
    pthread_mutex_t run_lock;    /* one task at a time; others run on their caller's thread */
    pthread_mutex_t lock;        /* guards all below */
    pthread_cond_t work, done;
    pthread_t *threads;
    uint32_t thread_count;
    atomic_ulong round;          /* counts tasks: a sleeper sees that there is a new one */
    task_run *run;               /* that helpers may still begin with; or NULL */
    atomic_uint busy;            /* those that have */
    bool stop;
};

static int run_guarded(cxlkv_pool *pool, task_function task, void *context, uint32_t item) {
    return GUARDED(task(context, item), poison_error(pool, &fault));
}

static void take_items(task_run *run) {
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&run->next, 1, memory_order_relaxed);
        if (item >= run->count || atomic_load_explicit(&run->result, memory_order_relaxed) < 0)
            return;
        int code = run_guarded(run->pool, run->task, run->context, item);
        if (code >= 0) continue;
        pthread_mutex_lock(&run->lock);
        if (atomic_load_explicit(&run->result, memory_order_relaxed) == 0) {
            strncpy(run->text, cxlkv_error_text(), sizeof(run->text) - 1);
            atomic_store_explicit(&run->result, code, memory_order_relaxed);
        }
        pthread_mutex_unlock(&run->lock);
        return;
    }
}

/* Until `value` is no longer `is`, but not for long. */
static void look_out(const atomic_ulong *value, uint64_t is) {
    enum { LOOKS = 64 };
    uint64_t begin = boottime_ns();
    do
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(value, memory_order_relaxed) != is) return;
            cpu_relax();
        }
    while (boottime_ns() - begin < LOOK_OUT_NS);
}

static void *helper_main(void *argument) {
    helpers *h = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&h->lock);
    while (!h->stop) {
        if (atomic_load(&h->round) == seen) {
            pthread_cond_wait(&h->work, &h->lock);
            continue;
        }
        seen = atomic_load(&h->round);
        task_run *run = h->run;
        if (run) {
            atomic_fetch_add(&h->busy, 1);
            pthread_mutex_unlock(&h->lock);
            take_items(run);
            pthread_mutex_lock(&h->lock);
            if (atomic_fetch_sub(&h->busy, 1) == 1) pthread_cond_signal(&h->done);
        }
        pthread_mutex_unlock(&h->lock);
        look_out(&h->round, seen);
        pthread_mutex_lock(&h->lock);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

static helpers *helpers_make(uint32_t helper_count) {
    helpers *h = calloc(1, sizeof(*h));
    if (!h) return NULL;
    h->threads = calloc(helper_count, sizeof(*h->threads));
    if (!h->threads) {
        free(h);
        return NULL;
    }
    pthread_mutex_init(&h->run_lock, NULL);
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->work, NULL);
    pthread_cond_init(&h->done, NULL);
    for (uint32_t i = 0; i < helper_count; i++) {
        if (pthread_create(&h->threads[i], NULL, helper_main, h) != 0) break;
        h->thread_count++;
        team_count_own(1);
    }
    return h;
}

void helpers_destroy(helpers *h) {
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->stop = true;
    pthread_cond_broadcast(&h->work);
    pthread_mutex_unlock(&h->lock);
    for (uint32_t i = 0; i < h->thread_count; i++) pthread_join(h->threads[i], NULL);
    team_count_own(-(int)h->thread_count);
    pthread_mutex_destroy(&h->run_lock);
    pthread_mutex_destroy(&h->lock);
    pthread_cond_destroy(&h->work);
    pthread_cond_destroy(&h->done);
    free(h->threads);
    free(h);
}

static int run_alone(cxlkv_pool *pool, uint32_t count, task_function task, void *context) {
    for (uint32_t item = 0; item < count; item++) {
        int code = run_guarded(pool, task, context, item);
        if (code < 0) return code;
    }
    return 0;
}

static void run_by_helpers(helpers *h, task_run *run) {
    pthread_mutex_lock(&h->lock);
    h->run = run;
    atomic_fetch_add(&h->round, 1);
    pthread_cond_broadcast(&h->work);
    pthread_mutex_unlock(&h->lock);
    take_items(run);
    pthread_mutex_lock(&h->lock);
    h->run = NULL;
    while (atomic_load(&h->busy) > 0) pthread_cond_wait(&h->done, &h->lock);
    pthread_mutex_unlock(&h->lock);
}

/* False: they are busy with another task, or there are none. */
static bool helpers_run(task_run *run) {
    cxlkv_pool *pool = run->pool;
    pthread_mutex_lock(&pool->locks.list);
    if (!pool->threads.helpers) pool->threads.helpers = helpers_make(pool->threads.count - 1);
    helpers *h = pool->threads.helpers;
    pthread_mutex_unlock(&pool->locks.list);
    if (!h || pthread_mutex_trylock(&h->run_lock) != 0) return false;
    run_by_helpers(h, run);
    pthread_mutex_unlock(&h->run_lock);
    return true;
}

static void member_main(void *context) {
    task_run *run = context;
    if (atomic_fetch_add(&run->members, 1) < run->pool->threads.count) take_items(run);
}

static int run_shared(bool by_team, cxlkv_pool *pool, uint32_t count, task_function task,
                      void *context) {
    if (count <= 1 || pool->threads.count <= 1) return run_alone(pool, count, task, context);
    task_run run = {.pool = pool, .task = task, .context = context, .count = count,
                    .lock = PTHREAD_MUTEX_INITIALIZER};
    if (!(by_team && team_run(pool->threads.count, member_main, &run)) && !helpers_run(&run))
        return run_alone(pool, count, task, context);
    int code = atomic_load(&run.result);
    if (code < 0) fail(-code, "%s", run.text);
    return code;
}

int run_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context) {
    return run_shared(false, pool, count, task, context);
}

int run_step_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context) {
    return run_shared(true, pool, count, task, context);
}
