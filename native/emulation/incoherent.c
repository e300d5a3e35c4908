/* The seam of flush.h on the emulated memory, and the emulator's interface. */
#include "incoherent.h"

#include <sys/mman.h>
#include <unistd.h>

#include "simulation.h"

incoherent *simulation;

struct incoherent_options incoherent_usual(uint64_t seed) {
    incoherent draw = {.random = seed ^ 0x6f7074696f6e73};
    struct incoherent_options options = {.seed = seed, .hosts = 2, .lines = 64};
    options.cache_lines_max = simulation_below(&draw, 3) ? 64 : 4;
    options.switch_odds = simulation_below(&draw, 2) ? 32 << simulation_below(&draw, 8) : 0;
    options.priority_changes = 1 + simulation_below(&draw, 4);
    options.steps_expected = 64 << simulation_below(&draw, 4);
    options.odds.drain = 64 << simulation_below(&draw, 5);
    options.odds.evict = 8 << simulation_below(&draw, 6);
    options.odds.fill = 8 << simulation_below(&draw, 8);
    options.odds.early = 32 << simulation_below(&draw, 5);
    return options;
}

incoherent *incoherent_make(const struct incoherent_options *options) {
    incoherent *sim = calloc(1, sizeof(*sim));
    if (!sim) abort();
    sim->options = *options;
    sim->random = options->seed;
    if (options->hosts < 1 || options->hosts > INCOHERENT_HOSTS_MAX || !options->lines ||
        options->lines > 1 << 24 || !options->cache_lines_max)
        simulation_die(sim, "options: hosts is 1 to 8, lines and cache_lines_max are not 0");
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    sim->base_bytes = (size_t)options->lines * FLUSH_LINE_BYTES;
    sim->base_bytes = (sim->base_bytes + page_bytes - 1) / page_bytes * page_bytes;
    sim->trace_events = options->trace_events ? options->trace_events : TRACE_EVENTS;
    sim->trace = calloc(sim->trace_events, sizeof(*sim->trace));
    if (!sim->trace) abort();
    sim->base = mmap(NULL, sim->base_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
    if (sim->base == MAP_FAILED) simulation_die(sim, "no addresses for the memory");
    caches_make(sim);
    scheduler_make(sim);
    return simulation = sim;
}

void incoherent_free(incoherent *sim) {
    scheduler_free(sim);
    caches_free(sim);
    munmap(sim->base, sim->base_bytes);
    free(sim->trace);
    if (simulation == sim) simulation = NULL;
    free(sim);
}

static uint32_t word_of(incoherent *sim, const void *address) {
    uintptr_t offset = (uintptr_t)address - (uintptr_t)sim->base;
    if (offset >= (uintptr_t)sim->options.lines * FLUSH_LINE_BYTES)
        simulation_die(sim, "the seam was called with an address outside of the memory");
    return (uint32_t)(offset / 8);
}

static uint32_t whole_word_of(incoherent *sim, const void *address) {
    if ((uintptr_t)address % 8) simulation_die(sim, "a word that is not aligned to 8 bytes");
    return word_of(sim, address);
}

/* Before each operation: a step, then the operation is written down. NULL outside of a run. */
static struct actor *step(const char *what, enum flush_site site, uint32_t word, uint64_t value) {
    incoherent *sim = simulation;
    if (sim->running < 0) return NULL;
    scheduler_step(sim);
    struct actor *actor = sim->actors[sim->running];
    simulation_note(sim, what, sim->running, actor->host, word, site, value);
    return actor;
}

static void store(enum item_kind kind, const char *what, uint32_t word, uint8_t mask,
                  uint64_t value) {
    struct actor *actor = step(what, FLUSH_NONE, word, value);
    struct item item = {.value = value, .word = word, .kind = (uint8_t)kind, .mask = mask};
    if (actor) {
        caches_issue(simulation, actor, item);
        return;
    }
    uint8_t *to = (uint8_t *)&simulation->memory[word], *from = (uint8_t *)&value;
    for (uint32_t byte = 0; byte < 8; byte++)
        if (mask >> byte & 1) to[byte] = from[byte];
}

static uint64_t load(uint32_t word) {
    incoherent *sim = simulation;
    if (sim->running < 0) return sim->memory[word];
    scheduler_step(sim);
    struct actor *actor = sim->actors[sim->running];
    uint64_t stale_loads = sim->counts.stale_loads, value = caches_load(sim, actor, word);
    const char *what = sim->counts.stale_loads > stale_loads ? "load stale" : "load";
    simulation_note(sim, what, sim->running, actor->host, word, FLUSH_NONE, value);
    return value;
}

static bool left_out(enum flush_site site) {
    return site != FLUSH_NONE && site == simulation->options.left_out;
}

/* No step, so that leaving out what has no effect changes nothing. */
static void note_left_out(const char *what, enum flush_site site, uint32_t word) {
    incoherent *sim = simulation;
    sim->counts.left_out++;
    if (sim->running < 0) return;
    simulation_note(sim, what, sim->running, sim->actors[sim->running]->host, word, site, 0);
}

static bool fence_left_out(enum flush_site site) {
    if (left_out(site)) note_left_out("no fence", site, NO_WORD);
    return left_out(site);
}

static bool lines_left_out(enum flush_site site, uint32_t line, uint32_t last) {
    for (; left_out(site) && line <= last; line++)
        note_left_out("left out", site, line * LINE_WORDS);
    return left_out(site);
}

const char *flush_name(void) { return "emulated"; }
bool flush_supported(void) { return true; }

static void flush_lines(enum flush_site site, const void *address, size_t bytes, const char *what,
                        enum item_kind kind) {
    if (!bytes) return;
    uint32_t line = word_of(simulation, address) / LINE_WORDS;
    uint32_t last = word_of(simulation, (const uint8_t *)address + bytes - 1) / LINE_WORDS;
    if (lines_left_out(site, line, last)) return;
    for (; line <= last; line++) {
        struct actor *actor = step(what, site, line * LINE_WORDS, 0);
        struct item item = {.word = line * LINE_WORDS, .kind = (uint8_t)kind};
        if (actor) caches_issue(simulation, actor, item);
    }
}

void flush_write_back(enum flush_site site, const void *address, size_t bytes) {
    flush_lines(site, address, bytes, "clean", ITEM_WRITE_BACK);
}

void flush_invalidate(enum flush_site site, const void *address, size_t bytes) {
    flush_lines(site, address, bytes, "invalidate", ITEM_DROP);
}

void flush_evict(enum flush_site site, const void *address, size_t bytes) {
    if (!bytes) return;
    uint32_t line = word_of(simulation, address) / LINE_WORDS;
    uint32_t last = word_of(simulation, (const uint8_t *)address + bytes - 1) / LINE_WORDS;
    if (lines_left_out(site, line, last)) return;
    for (; line <= last; line++) {
        struct actor *actor = step("flush", site, line * LINE_WORDS, 0);
        if (!actor) continue;
        caches_evict(simulation, actor, line);
        if (simulation->options.arm64) caches_finish(simulation, actor);
    }
}

/* A fence takes a while: what it waits for happens in any order, and others run meanwhile, some
 * of them far. */
static struct actor *wait_for_buffer(const char *what, enum flush_site site) {
    struct actor *actor = step(what, site, NO_WORD, 0);
    while (actor && caches_hurry(simulation, actor)) {
        if (simulation_below(simulation, 4)) scheduler_step(simulation);
        else incoherent_yield();
    }
    return actor;
}

void flush_fence_stores(enum flush_site site) {
    if (fence_left_out(site)) return;
    bool posted = simulation->options.posted_fences && !simulation->options.arm64;
    struct actor *actor = posted ? step("fence stores", site, NO_WORD, 0)
                                 : wait_for_buffer("fence stores", site);
    if (!actor) return;
    actor->fences++;
    if (simulation->options.arm64) caches_finish(simulation, actor);
    else if (!posted) caches_settle(simulation, actor);
}

void flush_fence_all(enum flush_site site) {
    if (fence_left_out(site)) return;
    struct actor *actor = wait_for_buffer("fence all", site);
    if (!actor) return;
    caches_finish(simulation, actor);
    if (!simulation_below(simulation, 8)) incoherent_yield();
}

/* Bytes [0, bytes) of `from` by 8-byte accesses to the words that they touch. */
static void copy_in(enum item_kind kind, const char *what, uint8_t *to, const uint8_t *from,
                    size_t bytes) {
    while (bytes) {
        size_t skip = (uintptr_t)to % 8, part = 8 - skip < bytes ? 8 - skip : bytes;
        uint64_t value = 0;
        memcpy((uint8_t *)&value + skip, from, part);
        uint8_t mask = (uint8_t)((0xff >> (8 - part)) << skip);
        store(kind, what, word_of(simulation, to), mask, value);
        to += part, from += part, bytes -= part;
    }
}

/* As flush.c does: on x86 the middle in units of 16 bytes past the cache, the ends through it. */
void flush_copy_in(void *pool, const void *from, size_t bytes) {
    uint8_t *to = pool;
    const uint8_t *source = from;
    size_t head = (size_t)(-(uintptr_t)to & 15);
    if (head > bytes || simulation->options.arm64) head = bytes;
    size_t middle = (bytes - head) / 16 * 16, tail = bytes - head - middle;
    copy_in(ITEM_STORE, "store", to, source, head);
    flush_write_back(FLUSH_NONE, to, head);
    copy_in(ITEM_STREAM, "stream in", to + head, source + head, middle);
    copy_in(ITEM_STORE, "store", to + head + middle, source + head + middle, tail);
    flush_write_back(FLUSH_NONE, to + head + middle, tail);
}

/* Up or down, as a memcpy may: a reader that counts on the order of a copy must fail. */
void flush_copy_out(void *to, const void *pool, size_t bytes) {
    if (!bytes) return;
    uintptr_t start = (uintptr_t)pool, end = start + bytes;
    uintptr_t first = start & ~(uintptr_t)7;
    size_t words = (end - first + 7) / 8;
    bool down = simulation->running >= 0 && simulation_below(simulation, 2);
    (void)word_of(simulation, pool);
    (void)word_of(simulation, (const uint8_t *)pool + bytes - 1);
    for (size_t i = 0; i < words; i++) {
        uintptr_t at = first + (down ? words - 1 - i : i) * 8;
        uint64_t value = load(word_of(simulation, (void *)at));
        uintptr_t low = at < start ? start : at, high = at + 8 < end ? at + 8 : end;
        memcpy((uint8_t *)to + (low - start), (uint8_t *)&value + (low - at), high - low);
    }
}

void flush_store_line(void *line, const void *from, uint32_t first_word) {
    uint32_t word = whole_word_of(simulation, line);
    uint64_t words[LINE_WORDS];
    memcpy(words, from, sizeof(words));
    for (uint32_t i = first_word; i < LINE_WORDS; i++)
        store(ITEM_STORE, "store", word + i, 0xff, words[i]);
}

void flush_load_line(void *to, const void *line) {
    uint32_t word = whole_word_of(simulation, line);
    uint64_t words[LINE_WORDS];
    for (uint32_t i = 0; i < LINE_WORDS; i++) words[i] = load(word + i);
    memcpy(to, words, sizeof(words));
}

void flush_store_word(void *word, uint64_t value) {
    store(ITEM_RELEASE, "release", whole_word_of(simulation, word), 0xff, value);
}

/* Loads after it are not satisfied before it. */
uint64_t flush_load_word(const void *word) {
    uint64_t value = load(whole_word_of(simulation, word));
    incoherent *sim = simulation;
    if (sim->running >= 0) caches_forget_early(sim->actors[sim->running]);
    return value;
}

void *incoherent_base(incoherent *sim) { return sim->base; }
int incoherent_running(incoherent *sim) { return sim->running; }
uint64_t incoherent_step_count(incoherent *sim) { return sim->counts.steps; }
uint64_t incoherent_trace_hash(incoherent *sim) { return sim->trace_hash; }
void incoherent_drain(incoherent *sim) { caches_drain(sim); }

const struct incoherent_counts *incoherent_counts(incoherent *sim) { return &sim->counts; }

void incoherent_hook(incoherent *sim, void (*hook)(void *context), void *context) {
    sim->hook = hook;
    sim->hook_context = context;
}

void incoherent_tell(void) {
    incoherent *sim = simulation;
    if (sim->running >= 0) caches_settle(sim, sim->actors[sim->running]);
}

void incoherent_hear(void) {
    incoherent *sim = simulation;
    if (sim->running >= 0) sim->actors[sim->running]->fence_step = sim->counts.steps;
}

void incoherent_peek(incoherent *sim, const void *address, size_t bytes, void *out) {
    if (!bytes) return;
    (void)word_of(sim, address);
    (void)word_of(sim, (const uint8_t *)address + bytes - 1);
    memcpy(out, (uint8_t *)sim->memory + ((uintptr_t)address - (uintptr_t)sim->base), bytes);
}
