/* Goal: the time since boot is the machine's in every time namespace, also for a process that comes
 * into another one while it runs, and a process is known by its start in all of them. Method:
 * processes in namespaces ahead of and behind the machine's, where the kernel allows one. */
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

#include "check.h"
#include "host/processes.h"

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif
#define SECOND_NS 1000000000ll
enum { SLACK_S = 60 };

typedef struct facts { /* of the first process, in memory that all have */
    uint64_t now_ns;
    process_slot slot;
} facts;

static void test_offsets(void) {
    CHECK(boottime_offset_of("monotonic  3  0\nboottime  0  0\n") == 0);
    CHECK(boottime_offset_of("monotonic  5  0\nboottime  86400 500000000\n") ==
          86400 * SECOND_NS + SECOND_NS / 2);
    CHECK(boottime_offset_of("monotonic  5  0\nboottime  -10 250000000\n") ==
          -10 * SECOND_NS + SECOND_NS / 4);
    CHECK(boottime_offset_of("") == 0);
}

static int64_t own_clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static void check_same(const facts *first) {
    uint64_t now_ns = boottime_ns();
    CHECK(now_ns >= first->now_ns && now_ns - first->now_ns < SLACK_S * SECOND_NS);
    CHECK(!process_is_dead(&first->slot));
}

/* Of the namespace's children: its first process comes into it by fork(), and goes back. */
static void live_in(const facts *first, const char *offsets, int64_t offset_ns, int machines) {
    int fd = open("/proc/self/timens_offsets", O_WRONLY);
    if (fd < 0 || write(fd, offsets, strlen(offsets)) < 0) _exit(77);
    close(fd);
    check_same(first);
    if (fork() == 0) {
        check_same(first);
        CHECK(boottime_offset_ns() == offset_ns);
        CHECK(llabs(own_clock_ns() - offset_ns - (int64_t)boottime_ns()) < SECOND_NS);
        process_slot other = first->slot;
        other.start_time += 100;
        CHECK(process_is_dead(&other)); /* another had its number a second before */
        if (setns(machines, CLONE_NEWTIME) == 0) {
            CHECK(boottime_offset_ns() == 0);
            check_same(first);
        }
        _exit(0);
    }
    int status;
    CHECK(wait(&status) > 0);
    _exit(status == 0 ? 0 : 1);
}

static int test_namespace(const char *offsets, int64_t offset_ns) {
    facts *first = mmap(NULL, sizeof(*first), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0);
    int machines = open("/proc/self/ns/time", O_RDONLY | O_CLOEXEC), status;
    CHECK(first != MAP_FAILED);
    process_identify(&first->slot);
    first->now_ns = boottime_ns();
    if (fork() == 0) {
        if (machines < 0 || (unshare(CLONE_NEWTIME) && unshare(CLONE_NEWUSER | CLONE_NEWTIME)))
            _exit(77);
        live_in(first, offsets, offset_ns, machines);
    }
    CHECK(wait(&status) > 0 && WIFEXITED(status));
    close(machines);
    munmap(first, sizeof(*first));
    return WEXITSTATUS(status);
}

int main(void) {
    test_offsets();
    int ahead = test_namespace("boottime 86400 123456789", 86400 * SECOND_NS + 123456789);
    int behind = test_namespace("boottime -10 250000000", -10 * SECOND_NS + SECOND_NS / 4);
    CHECK((ahead == 0 && behind == 0) || (ahead == 77 && behind == 77));
    if (ahead) return puts("skipped: no time namespace may be made here"), 77;
    puts("test_clock: ok");
    return 0;
}
