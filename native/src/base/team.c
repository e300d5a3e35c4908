/* The caller's OpenMP team. The runtime is the one that the process has, found by the names that
 * GNU's libgomp and LLVM's (and Intel's) libomp both have. */
#include "base/team.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>

typedef void parallel_function(void (*member)(void *), void *context, unsigned threads,
                               unsigned flags);
typedef int count_function(void);
typedef struct runtime {
    parallel_function *parallel; /* GOMP_parallel; 0 threads: as many as the team has anyway */
    count_function *team_size;
} runtime;

static runtime found;            /* written under the lock, before `is_found` */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool is_found;
static atomic_bool is_forked;    /* a team's threads did not come along */
static atomic_ullong seen;       /* libraries that had been loaded when it was last looked for */

static int count_loaded(struct dl_phdr_info *info, size_t size, void *loaded) {
    (void)size;
    *(unsigned long long *)loaded = info->dlpi_adds;
    return 1;
}

static void forked(void) { atomic_store(&is_forked, true); }

static void look(unsigned long long loaded) {
    pthread_mutex_lock(&lock);
    found.parallel = (parallel_function *)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    found.team_size = (count_function *)dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    bool there = found.parallel && found.team_size;
    if (there && !atomic_load(&is_found)) there = pthread_atfork(NULL, NULL, forked) == 0;
    atomic_store(&seen, loaded);
    if (there) atomic_store_explicit(&is_found, true, memory_order_release);
    pthread_mutex_unlock(&lock);
}

static bool runtime_is_there(void) {
    if (atomic_load_explicit(&is_found, memory_order_acquire)) return !atomic_load(&is_forked);
    unsigned long long loaded = 0;
    dl_iterate_phdr(count_loaded, &loaded);
    if (loaded == atomic_load(&seen)) return false;
    look(loaded);
    return atomic_load(&is_found);
}

bool team_run(uint32_t threads, void (*member)(void *), void *context) {
    if (!runtime_is_there() || found.team_size() < (int)threads) return false;
    found.parallel(member, context, 0, 0);
    return true;
}
