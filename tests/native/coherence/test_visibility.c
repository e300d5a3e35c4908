/* Goal: on real memory, in every mode, nothing stale or torn is accepted and nothing is lost.
 * Method: owners and readers as threads over one mapping. The hardware is coherent, so that a
 * missing flush cannot show here: test_visibility_incoherent.c is for that. This one is for the
 * order of the steps, the instructions themselves, and true parallelism. Under TSan there are no
 * optimists and no guesses, whose copies race by design, so that it can tell whether who writes a
 * page again happens after all who read it in place. */
#include <sys/mman.h>

#include "visibility_scenario.h"

#ifdef __SANITIZE_THREAD__
enum { OPTIMISTS = 0, ROUNDS = 1000 };
#else
enum { OPTIMISTS = 1, ROUNDS = 4000 };
#endif
enum { OWNERS = 2, OWNER_PROCESSES = 2, READERS = 3, RECORDS = 6 };
enum { THREADS = OWNERS * OWNER_PROCESSES + READERS + OPTIMISTS };

static void yield(void) { sched_yield(); }
static void nothing(void) {}

static void run(enum visibility_mode mode, uint32_t payload_lines) {
    scenario *s = calloc(1, sizeof(*s));
    CHECK(s);
    *s = (scenario){.records = RECORDS, .payload_lines = payload_lines, .hosts = READERS,
                    .readers = READERS, .mode = mode, .guesses = OPTIMISTS > 0, .until_seen = true,
                    .wait = yield, .tell = nothing};
    size_t bytes = align_up(scenario_lines(s) * FLUSH_LINE_BYTES, 4096);
    s->base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(s->base != MAP_FAILED);
    for (uint32_t i = 0; i < READERS; i++) s->reader_host[i] = i;
    owner owners[OWNERS];
    reader readers[READERS + OPTIMISTS];
    pthread_t threads[THREADS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < OWNERS; i++) {
        owners[i] = (owner){.s = s, .first = i * RECORDS / OWNERS, .count = RECORDS / OWNERS,
                            .rounds = ROUNDS / OWNER_PROCESSES, .seed = 7 + i};
        for (uint32_t r = 0; r < RECORDS; r++) owners[i].generation[r] = 1;
        for (uint32_t process = 0; process < OWNER_PROCESSES; process++)
            CHECK(pthread_create(&threads[count++], NULL, owner_run, &owners[i]) == 0);
    }
    for (uint32_t i = 0; i < READERS + OPTIMISTS; i++) {
        readers[i] = (reader){.s = s, .number = i, .rounds = ROUNDS, .seed = 70 + i};
        if (i < READERS) readers[i].kind = i ? READER_PINNING : READER_TRUSTING;
        CHECK(pthread_create(&threads[count++], NULL, reader_run, &readers[i]) == 0);
    }
    for (uint32_t i = 0; i < count; i++) pthread_join(threads[i], NULL);
    fprintf(stderr, "mode %d, %u lines: accepted %u, refused %u, read in place %u, reused %u, "
            "still pinned %u\n", (int)mode, payload_lines, s->accepted, s->refused, s->visited,
            s->reused, s->waited);
    CHECK(!s->failed && s->visited > 0 && s->reused > 0);
    munmap(s->base, bytes);
    free(s);
}

/* Of the version that is wanted, and half written: what else the line says is not believed. */
static void test_torn_descriptor(enum visibility_mode mode) {
    _Alignas(FLUSH_LINE_BYTES) uint8_t line[FLUSH_LINE_BYTES];
    acquire_item item = {.descriptor_line = line, .version = 5 << 8 | PAGE_SEALED};
    for (int byte = 8; byte < FLUSH_LINE_BYTES; byte++) {
        scenario_line_of(5, PAGE_SEALED, line);
        CHECK(visibility_acquire(&item, 1, mode) == 1 && item.code == 0);
        line[byte] ^= 1;
        CHECK(visibility_acquire(&item, 1, mode) == 0 && item.code == -CXLKV_E_CORRUPT);
    }
}

int main(void) {
    for (int mode = VISIBILITY_COHERENT; mode <= VISIBILITY_STRICT; mode++)
        test_torn_descriptor((enum visibility_mode)mode);
    for (uint32_t lines = 1; lines <= SCENARIO_LINES_MAX; lines *= 2) {
        run(VISIBILITY_COHERENT, lines);
        run(VISIBILITY_FAST, lines);
        run(VISIBILITY_STRICT, lines);
    }
    return 0;
}
