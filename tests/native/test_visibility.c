/* Goal: on real memory, in every mode, nothing stale or torn is accepted and nothing is lost.
 * Method: owners and readers as threads over one mapping. The hardware is coherent, so that a
 * missing flush cannot show here: test_visibility_incoherent.c is for that. This one is for the
 * order of the steps, the instructions themselves, and true parallelism. */
#undef NDEBUG
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include "visibility_scenario.h"

enum { OWNERS = 2, READERS = 3, RECORDS = 6 };

static void yield(void) { sched_yield(); }
static void nothing(void) {}

static void run(enum visibility_mode mode, uint32_t payload_lines, uint32_t rounds) {
    scenario *s = calloc(1, sizeof(*s));
    CHECK(s);
    *s = (scenario){.records = RECORDS, .payload_lines = payload_lines, .readers = READERS,
                    .mode = mode, .wait = yield, .tell = nothing};
    size_t bytes = align_up(scenario_lines(s) * FLUSH_LINE_BYTES, 4096);
    s->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s->base != MAP_FAILED);
    owner owners[OWNERS];
    reader readers[READERS + 1];
    pthread_t threads[OWNERS + READERS + 1];
    for (uint32_t i = 0; i < OWNERS; i++) {
        owners[i] = (owner){.s = s, .first = i * RECORDS / OWNERS, .count = RECORDS / OWNERS,
                            .rounds = rounds, .seed = 7 + i};
        for (uint32_t r = 0; r < RECORDS; r++) owners[i].generation[r] = 1;
        CHECK(pthread_create(&threads[i], NULL, owner_run, &owners[i]) == 0);
    }
    for (uint32_t i = 0; i < READERS + 1; i++) { /* the last one is optimistic */
        readers[i] = (reader){.s = s, .line = i < READERS ? (int32_t)i : -1, .rounds = rounds,
                              .seed = 70 + i};
        CHECK(pthread_create(&threads[OWNERS + i], NULL, reader_run, &readers[i]) == 0);
    }
    for (uint32_t i = 0; i < OWNERS + READERS + 1; i++) pthread_join(threads[i], NULL);
    fprintf(stderr, "mode %d, %u lines: accepted %u, refused %u, reused %u, waited %u\n", (int)mode,
            payload_lines, s->accepted, s->refused, s->reused, s->waited);
    CHECK(!s->failed && s->accepted > 0 && s->reused > 0);
    munmap(s->base, bytes);
    free(s);
}

int main(void) {
#ifdef __SANITIZE_THREAD__
    printf("skipped: a copy that is checked afterwards races by design, TSan cannot know\n");
    return 77;
#endif
    for (uint32_t lines = 1; lines <= SCENARIO_LINES_MAX; lines *= 2) {
        run(VISIBILITY_COHERENT, lines, 4000);
        run(VISIBILITY_FAST, lines, 4000);
        run(VISIBILITY_STRICT, lines, 4000);
    }
    return 0;
}
