/* The pool's worker threads: they share out the items of one task, each under a SIGBUS guard.
 *
 * A call has several tasks of some hundred us, and a decode step a call for each layer; a thread
 * that sleeps is woken in 50 us or, on a virtual machine, in milliseconds. So a helper looks out
 * for the next task for a while before it sleeps, and nobody waits for one that has not begun. */
#include <stdlib.h>
#include <string.h>

#include "pool/pool.h"

enum { LOOK_OUT_NS = 100000 };

struct workers {
    pthread_mutex_t run_lock;    /* one task at a time; others run on their caller's thread */
    pthread_mutex_t lock;        /* guards all below */
    pthread_cond_t work, done;
    cxlkv_pool *pool;
    pthread_t *threads;
    uint32_t thread_count;
    atomic_ulong round;          /* counts tasks: a sleeper sees that there is a new one */
    bool open;                   /* helpers may still begin with it */
    atomic_uint busy;            /* those that have */
    bool stop;
    task_function task;
    void *context;
    uint32_t count;
    atomic_uint next;
    atomic_int result;
    char text[512];              /* of the first error: its thread's text dies with it */
};

static int run_guarded(cxlkv_pool *pool, task_function task, void *context, uint32_t item) {
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        code = task(context, item);
    } GUARD_END(fault, code = poison_error(pool, &fault))
    return code;
}

static void take_items(workers *w) {
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed);
        if (item >= w->count || atomic_load_explicit(&w->result, memory_order_relaxed) < 0) return;
        int code = run_guarded(w->pool, w->task, w->context, item);
        if (code >= 0) continue;
        pthread_mutex_lock(&w->lock);
        if (atomic_load_explicit(&w->result, memory_order_relaxed) == 0) {
            strncpy(w->text, cxlkv_error_text(), sizeof(w->text) - 1);
            atomic_store_explicit(&w->result, code, memory_order_relaxed);
        }
        pthread_mutex_unlock(&w->lock);
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

static void *worker_main(void *argument) {
    workers *w = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        if (atomic_load(&w->round) == seen) {
            pthread_cond_wait(&w->work, &w->lock);
            continue;
        }
        seen = atomic_load(&w->round);
        if (w->open) {
            atomic_fetch_add(&w->busy, 1);
            pthread_mutex_unlock(&w->lock);
            take_items(w);
            pthread_mutex_lock(&w->lock);
            if (atomic_fetch_sub(&w->busy, 1) == 1) pthread_cond_signal(&w->done);
        }
        pthread_mutex_unlock(&w->lock);
        look_out(&w->round, seen);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static workers *workers_make(cxlkv_pool *pool, uint32_t helper_count) {
    workers *w = calloc(1, sizeof(*w));
    if (!w) return NULL;
    w->threads = calloc(helper_count, sizeof(*w->threads));
    if (!w->threads) {
        free(w);
        return NULL;
    }
    w->pool = pool;
    pthread_mutex_init(&w->run_lock, NULL);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->work, NULL);
    pthread_cond_init(&w->done, NULL);
    for (uint32_t i = 0; i < helper_count; i++) {
        if (pthread_create(&w->threads[i], NULL, worker_main, w) != 0) break;
        w->thread_count++;
    }
    return w;
}

void workers_destroy(workers *w) {
    if (!w) return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_broadcast(&w->work);
    pthread_mutex_unlock(&w->lock);
    for (uint32_t i = 0; i < w->thread_count; i++) pthread_join(w->threads[i], NULL);
    pthread_mutex_destroy(&w->run_lock);
    pthread_mutex_destroy(&w->lock);
    pthread_cond_destroy(&w->work);
    pthread_cond_destroy(&w->done);
    free(w->threads);
    free(w);
}

static int run_alone(cxlkv_pool *pool, uint32_t count, task_function task, void *context) {
    for (uint32_t item = 0; item < count; item++) {
        int code = run_guarded(pool, task, context, item);
        if (code < 0) return code;
    }
    return 0;
}

static int run_shared(workers *w, uint32_t count, task_function task, void *context) {
    pthread_mutex_lock(&w->lock);
    w->task = task;
    w->context = context;
    w->count = count;
    atomic_store(&w->next, 0);
    atomic_store(&w->result, 0);
    w->open = true;
    atomic_fetch_add(&w->round, 1);
    pthread_cond_broadcast(&w->work);
    pthread_mutex_unlock(&w->lock);
    take_items(w);
    pthread_mutex_lock(&w->lock);
    w->open = false;
    while (atomic_load(&w->busy) > 0) pthread_cond_wait(&w->done, &w->lock);
    int code = atomic_load(&w->result);
    if (code < 0) fail(-code, "%s", w->text);
    pthread_mutex_unlock(&w->lock);
    return code;
}

int run_tasks(cxlkv_pool *pool, uint32_t count, task_function task, void *context) {
    if (count <= 1 || pool->thread_count <= 1) return run_alone(pool, count, task, context);
    pthread_mutex_lock(&pool->list_lock);
    if (!pool->threads) pool->threads = workers_make(pool, pool->thread_count - 1);
    workers *w = pool->threads;
    pthread_mutex_unlock(&pool->list_lock);
    if (!w || pthread_mutex_trylock(&w->run_lock) != 0)
        return run_alone(pool, count, task, context);
    int code = run_shared(w, count, task, context);
    pthread_mutex_unlock(&w->run_lock);
    return code;
}
