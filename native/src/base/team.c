/* The caller's OpenMP team. The runtime is the one that the process has, found by the names that
 * GNU's libgomp and LLVM's (and Intel's) libomp both have: in the global scope, or in a library
 * that was loaded out of it. */
#include "base/team.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"

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
static atomic_uint forks;        /* of this process's ancestors, since this library was loaded */
static unsigned found_after;     /* so many: a team's threads do not come along */
static atomic_ullong seen;       /* libraries that had been loaded when it was last looked for */
static atomic_ullong look_again; /* ns: one had no team then */
static atomic_int own_threads;

enum { LOOK_EVERY_NS = 100000000, PATH_BYTES = 1024, LIBRARIES = 8 };

/* Libraries that are named as OpenMP runtimes are. */
typedef struct libraries {
    char paths[LIBRARIES][PATH_BYTES];
    int count;
} libraries;

void team_count_own(int change) { atomic_fetch_add(&own_threads, change); }

static int count_loaded(struct dl_phdr_info *info, size_t size, void *loaded) {
    (void)size;
    *(unsigned long long *)loaded = info->dlpi_adds;
    return 1;
}

static int note_library(struct dl_phdr_info *info, size_t size, void *noted) {
    (void)size;
    libraries *all = noted;
    const char *path = info->dlpi_name, *slash = path ? strrchr(path, '/') : NULL;
    const char *name = slash ? slash + 1 : path;
    bool is_one = name && (strncmp(name, "libgomp", 7) == 0 || strncmp(name, "libomp", 6) == 0 ||
                           strncmp(name, "libiomp", 7) == 0);
    if (is_one && strlen(path) < PATH_BYTES) strcpy(all->paths[all->count++], path);
    return all->count == LIBRARIES;
}

static void forked(void) { atomic_fetch_add(&forks, 1); }

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(NULL, NULL, forked); }

static bool has_runtime(void *library, runtime *to) {
    to->parallel = (parallel_function *)dlsym(library, "GOMP_parallel");
    to->team_size = (count_function *)dlsym(library, "omp_get_max_threads");
    return to->parallel && to->team_size;
}

/* Threads of this process beside those of its pools. */
static int other_threads(void) {
    struct stat tasks;
    if (stat("/proc/self/task", &tasks) != 0) return 0;
    return (int)tasks.st_nlink - 2 - atomic_load(&own_threads);
}

static void do_nothing(void *context) { (void)context; }

/* Whether the calling thread has a team: else running something on it makes new threads, which end
 * again here. */
static bool has_team(void *library, const runtime *of) {
    typedef int pause_function(int kind, int device);
    pause_function *end = (pause_function *)dlsym(library, "omp_pause_resource");
    count_function *host = (count_function *)dlsym(library, "omp_get_initial_device");
    int before = other_threads();
    if (before < of->team_size() || !end || !host) return false;
    of->parallel(do_nothing, NULL, 0, 0);
    if (other_threads() <= before) return true;
    enum { SOFT = 1 };
    end(SOFT, host());
    return false;
}

/* A runtime that was loaded for one library alone, as most wheels do. It has a team once somebody
 * has used it; this is not what starts one. In a forked child it may wait for its parent's. */
static bool look_in_libraries(runtime *to) {
    libraries all = {.count = 0};
    if (atomic_load(&forks)) return false;
    dl_iterate_phdr(note_library, &all);
    for (int i = 0; i < all.count; i++) {
        void *library = dlopen(all.paths[i], RTLD_LAZY | RTLD_NOLOAD);
        if (!library) continue;
        if (has_runtime(library, to) && to->team_size() > 1) {
            if (has_team(library, to)) return true; /* the library stays */
            atomic_store(&look_again, boottime_ns() + LOOK_EVERY_NS);
        }
        dlclose(library);
    }
    return false;
}

static void look(unsigned long long loaded) {
    pthread_mutex_lock(&lock);
    if (!atomic_load(&is_found)) {
        runtime here;
        atomic_store(&look_again, 0);
        bool there = has_runtime(RTLD_DEFAULT, &here) || look_in_libraries(&here);
        if (there) found = here;
        found_after = atomic_load(&forks);
        atomic_store(&seen, loaded);
        if (there) atomic_store_explicit(&is_found, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
}

static bool runtime_is_there(void) {
    if (atomic_load_explicit(&is_found, memory_order_acquire))
        return atomic_load(&forks) == found_after;
    unsigned long long loaded = 0, again = atomic_load(&look_again);
    dl_iterate_phdr(count_loaded, &loaded);
    if (loaded == atomic_load(&seen) && !(again && boottime_ns() > again)) return false;
    look(loaded);
    return atomic_load(&is_found);
}

bool team_run(uint32_t threads, void (*member)(void *), void *context) {
    if (!runtime_is_there() || found.team_size() < (int)threads) return false;
    found.parallel(member, context, 0, 0);
    return true;
}
