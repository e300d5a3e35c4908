/* Owners that publish, free and write again, readers that acquire: what the tests of visibility.c
 * run, on threads over real memory and on the hosts of the incoherent one.
 *
 * An optimistic reader only acquires: what it accepts must be whole and of the generation it asked
 * for (V1, V3, V4, V5). A pinning one pins a batch first, keeps what was accepted for some rounds
 * and reads it in place, as attention does: it must not change until it is unpinned (V6). A
 * trusting one takes what it has pinned, with one look at the descriptor: V6 alone must do.
 * A record that was published before an acquire began and not freed before it ended must be
 * accepted, and none whose free had returned; a pin is seen once it has returned, and not once its
 * end has. Readers also ask for what they only guess, as whoever
 * reads the descriptors does: they meet publishes half way. Of an owner two processes take turns,
 * so that one may have to look at the pins of what the other one freed. */
#pragma once
#include "base/crc32c.h"
#include "base/flush.h"
#include "check.h"

enum { SCENARIO_RECORDS_MAX = 16, SCENARIO_READERS_MAX = 8, SCENARIO_LINES_MAX = 8 };
/* A host has two lines of pins, so that a batch spans both; in each a word for each reader. */
enum { SCENARIO_BATCH = 3, SCENARIO_HELD_MAX = 4, SCENARIO_HALVES = 2 };

typedef struct scenario {
    uint8_t *base;
    uint32_t records, payload_lines, hosts;
    uint32_t readers;                    /* those that pin */
    uint32_t reader_host[SCENARIO_READERS_MAX];
    enum visibility_mode mode;
    bool guesses;                        /* may readers ask for what nobody told them of? */
    bool until_seen;                     /* all go on until something was visited and reused */
    void (*wait)(void);                  /* lets others run */
    void (*tell)(void);                  /* before others learn of something but by the memory */
    void (*fail)(const struct scenario *s, uint32_t r); /* or NULL: told of the first failure */
    /* What really happened, outside of the shared memory: generations that are published, that are
     * about to be freed, whose free has returned. */
    _Atomic uint64_t published[SCENARIO_RECORDS_MAX], freed[SCENARIO_RECORDS_MAX];
    _Atomic uint64_t gone[SCENARIO_RECORDS_MAX];
    /* Modulo 4: a pin that is not there, begins, is there, ends. Relaxed: it orders nothing, so
     * that TSan sees what the pins order. */
    _Atomic uint32_t steps[SCENARIO_READERS_MAX][SCENARIO_RECORDS_MAX];
    atomic_uint accepted, refused, reused, waited, visited;
    atomic_bool failed;
} scenario;

static inline uint64_t scenario_lines(const scenario *s) {
    return s->records * (2ull + s->payload_lines) + s->hosts * SCENARIO_HALVES;
}
static inline uint8_t *scenario_line(const scenario *s, uint64_t line) {
    return s->base + line * FLUSH_LINE_BYTES;
}
static inline uint8_t *scenario_descriptor(const scenario *s, uint32_t r) {
    return scenario_line(s, r);
}
static inline uint8_t *scenario_header(const scenario *s, uint32_t r) {
    return scenario_line(s, s->records + r);
}
static inline uint8_t *scenario_payload(const scenario *s, uint32_t r) {
    return scenario_line(s, 2ull * s->records + (uint64_t)r * s->payload_lines);
}
static inline pin_item scenario_pin(const scenario *s, uint32_t reader, uint32_t r) {
    uint64_t line = s->records * (2ull + s->payload_lines);
    line += s->reader_host[reader] * SCENARIO_HALVES + r % SCENARIO_HALVES;
    uint64_t *words = (uint64_t *)scenario_line(s, line);
    return (pin_item){words + reader, 1ull << r / SCENARIO_HALVES};
}

/* The bytes of header (kind 0) or payload (1) of a record's generation. */
static inline void scenario_fill(uint32_t r, uint64_t generation, uint32_t kind, uint64_t *words,
                                 size_t bytes) {
    uint64_t state = r * 1000003ull + generation * 101 + kind;
    for (size_t i = 0; i < bytes / 8; i++) words[i] = random_next(&state);
}

static inline void scenario_line_of(uint64_t generation, uint32_t state, uint8_t *line) {
    uint64_t version = generation << 8 | state;
    memset(line, 0, FLUSH_LINE_BYTES);
    memcpy(line, &version, sizeof(version));
    uint32_t crc = crc32c(0, line, FLUSH_LINE_BYTES - 4);
    memcpy(line + FLUSH_LINE_BYTES - 4, &crc, sizeof(crc));
}

static inline bool scenario_goes_on(const scenario *s) {
    return s->until_seen && (s->visited == 0 || s->reused == 0);
}

static inline void scenario_fail(scenario *s, const char *what, uint32_t r, uint64_t generation) {
    if (atomic_exchange(&s->failed, true)) return;
    if (s->fail) s->fail(s, r);
    fprintf(stderr, "failed: %s (record %u, %lu)\n", what, r, generation);
}

typedef struct owner {
    scenario *s;
    uint32_t first, count;               /* its records */
    uint32_t rounds;
    uint64_t seed;
    atomic_bool busy;                    /* one of its processes has the turn */
    uint64_t generation[SCENARIO_RECORDS_MAX];
    bool sealed[SCENARIO_RECORDS_MAX];
    /* Of a freed record: the readers whose pins were not seen clear since. */
    uint32_t pinning[SCENARIO_RECORDS_MAX];
} owner;

static inline void owner_publish(owner *o, const uint32_t *records, uint32_t count) {
    scenario *s = o->s;
    publish_item items[SCENARIO_BATCH] = {0};
    uint8_t headers[SCENARIO_BATCH][FLUSH_LINE_BYTES], lines[SCENARIO_BATCH][FLUSH_LINE_BYTES];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = records[i];
        uint64_t words[SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
        size_t bytes = (size_t)s->payload_lines * FLUSH_LINE_BYTES;
        scenario_fill(r, o->generation[r], 1, words, bytes);
        flush_copy_in(scenario_payload(s, r), words, bytes);
        scenario_fill(r, o->generation[r], 0, (uint64_t *)headers[i], FLUSH_LINE_BYTES);
        scenario_line_of(o->generation[r], PAGE_SEALED, lines[i]);
        items[i] = (publish_item){scenario_header(s, r), headers[i], scenario_descriptor(s, r),
                                  lines[i]};
    }
    visibility_publish(items, count, s->mode);
    s->tell();
    for (uint32_t i = 0; i < count; i++) {
        atomic_store(&s->published[records[i]], o->generation[records[i]]);
        o->sealed[records[i]] = true;
    }
}

/* What one look saw of a pin, `before` being how far it was when the look began. */
static inline void owner_check(scenario *s, uint32_t reader, uint32_t r, uint32_t before,
                               bool pinned) {
    if (atomic_load_explicit(&s->steps[reader][r], memory_order_relaxed) != before) return;
    if (before % 4 == 0 && pinned) scenario_fail(s, "a pin seen after its end", r, before);
    if (before % 4 == 2 && !pinned) scenario_fail(s, "a pin not seen", r, before);
}

/* Records that nobody pins any more may be written again. True when no other one is left. */
static inline bool owner_look(owner *o) {
    scenario *s = o->s;
    const void *words[SCENARIO_HALVES * SCENARIO_READERS_MAX];
    uint64_t values[SCENARIO_HALVES * SCENARIO_READERS_MAX];
    uint32_t before[SCENARIO_READERS_MAX][SCENARIO_RECORDS_MAX];
    uint32_t count = 0, first = o->first, end = o->first + o->count;
    bool clear = true;
    for (uint32_t reader = 0; reader < s->readers; reader++)
        for (uint32_t r = first; r < end; r++)
            before[reader][r] = atomic_load_explicit(&s->steps[reader][r], memory_order_relaxed);
    for (uint32_t half = 0; half < SCENARIO_HALVES; half++)
        for (uint32_t reader = 0; reader < s->readers; reader++)
            words[count++] = scenario_pin(s, reader, half).word;
    visibility_look(words, count, values, s->mode);
    for (uint32_t r = first; r < end; r++) {
        uint32_t pinning = o->pinning[r];
        for (uint32_t reader = 0; reader < s->readers; reader++) {
            uint64_t value = values[r % SCENARIO_HALVES * s->readers + reader];
            bool pinned = (value & scenario_pin(s, reader, r).bits) != 0;
            owner_check(s, reader, r, before[reader][r], pinned);
            if (!pinned) o->pinning[r] &= ~(1u << reader);
        }
        atomic_fetch_add(&s->reused, pinning && !o->pinning[r]);
        atomic_fetch_add(&s->waited, o->pinning[r] != 0);
        clear = clear && !o->pinning[r];
    }
    return clear;
}

static inline void owner_free(owner *o, const uint32_t *records, uint32_t count) {
    scenario *s = o->s;
    uint8_t lines[SCENARIO_BATCH][FLUSH_LINE_BYTES];
    publish_item items[SCENARIO_BATCH] = {0};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = records[i];
        atomic_store(&s->freed[r], o->generation[r]);
        scenario_line_of(++o->generation[r], PAGE_FREE, lines[i]);
        items[i] = (publish_item){.descriptor_line = scenario_descriptor(s, r),
                                  .descriptor = lines[i]};
        o->sealed[r] = false;
        o->pinning[r] = (1u << s->readers) - 1;
    }
    visibility_free(items, count, s->mode);
    s->tell();
    for (uint32_t i = 0; i < count; i++)
        atomic_store(&s->gone[records[i]], o->generation[records[i]] - 1);
}

static inline void owner_round(owner *o) {
    uint32_t fresh[SCENARIO_BATCH], sealed[SCENARIO_BATCH], fresh_count = 0, sealed_count = 0;
    uint32_t wanted = 1 + random_below(&o->seed, SCENARIO_BATCH);
    uint32_t start = random_below(&o->seed, o->count);
    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t r = o->first + (start + i) % o->count;
        if (o->sealed[r] && sealed_count < wanted) sealed[sealed_count++] = r;
        if (!o->sealed[r] && !o->pinning[r] && fresh_count < wanted) fresh[fresh_count++] = r;
    }
    if (fresh_count && random_below(&o->seed, 3)) owner_publish(o, fresh, fresh_count);
    else if (sealed_count) owner_free(o, sealed, sealed_count);
    if (random_below(&o->seed, 2)) owner_look(o);
}

/* One process of the owner. In the end every pin must be seen to go. */
static inline void *owner_run(void *context) {
    owner *o = context;
    bool clear = false, ending = false;
    for (uint32_t round = 0; !ending || !clear; round++) {
        if (atomic_load(&o->s->failed)) break;
        while (atomic_exchange(&o->busy, true)) o->s->wait();
        ending = round >= o->rounds && !scenario_goes_on(o->s);
        if (ending) clear = owner_look(o);
        else owner_round(o);
        o->s->tell();
        atomic_store(&o->busy, false);
        o->s->wait();
    }
    return NULL;
}

enum reader_kind { READER_OPTIMISTIC, READER_PINNING, READER_TRUSTING };

typedef struct reader {
    scenario *s;
    enum reader_kind kind;
    uint32_t number;                     /* of those that pin */
    uint32_t rounds;
    uint64_t seed;
    uint32_t held_count;
    uint64_t held[SCENARIO_RECORDS_MAX]; /* the generation that it has pinned, or 0 */
} reader;

static inline bool reader_same(const scenario *s, uint32_t r, uint64_t generation,
                               const uint64_t *header, const uint64_t *payload) {
    uint64_t words[SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
    size_t bytes = (size_t)s->payload_lines * FLUSH_LINE_BYTES;
    scenario_fill(r, generation, 0, words, FLUSH_LINE_BYTES);
    if (memcmp(words, header, FLUSH_LINE_BYTES) != 0) return false;
    scenario_fill(r, generation, 1, words, bytes);
    return memcmp(words, payload, bytes) == 0;
}

typedef struct wish {
    uint32_t r;
    uint64_t generation, gone;
    bool must;                           /* it is there, unless it was freed since */
    bool granted;
    uint64_t header[FLUSH_LINE_BYTES / 8];
    uint64_t payload[SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
} wish;

static inline uint32_t reader_wishes(reader *own, wish *wishes) {
    scenario *s = own->s;
    uint32_t count = 0;
    for (uint32_t i = 0, n = 1 + random_below(&own->seed, SCENARIO_BATCH); i < n; i++) {
        uint32_t r = random_below(&own->seed, s->records);
        bool known = own->held[r] != 0;
        for (uint32_t before = 0; before < count; before++) known |= wishes[before].r == r;
        if (known || own->held_count + count >= SCENARIO_HELD_MAX) continue;
        uint64_t generation = atomic_load(&s->published[r]);
        bool guess = generation == 0 || random_below(&own->seed, 3) == 0;
        if (guess && !s->guesses) continue;
        /* A guess may be the generation that is there, or the one that is about to be. */
        if (guess) generation = atomic_load(&s->freed[r]) + 1;
        wish *at = &wishes[count++];
        at->r = r, at->generation = generation, at->must = !guess, at->granted = false;
        at->gone = atomic_load(&s->gone[r]);
    }
    return count;
}

typedef uint32_t taking(acquire_item *items, uint32_t count, enum visibility_mode mode);
typedef void pins_change(const pin_item *items, uint32_t count, enum visibility_mode mode);

static inline void reader_pins(reader *own, const uint32_t *records, uint32_t count,
                               pins_change *change) {
    scenario *s = own->s;
    pin_item items[SCENARIO_RECORDS_MAX];
    if (!count) return;
    for (uint32_t i = 0; i < count; i++) {
        items[i] = scenario_pin(s, own->number, records[i]);
        atomic_fetch_add_explicit(&s->steps[own->number][records[i]], 1, memory_order_relaxed);
    }
    change(items, count, s->mode);
    s->tell();
    for (uint32_t i = 0; i < count; i++)
        atomic_fetch_add_explicit(&s->steps[own->number][records[i]], 1, memory_order_relaxed);
}

static inline void reader_acquire(scenario *s, wish *wishes, uint32_t count, taking *take) {
    size_t bytes = (size_t)s->payload_lines * FLUSH_LINE_BYTES;
    visible_range ranges[SCENARIO_BATCH][2];
    acquire_item items[SCENARIO_BATCH] = {0};
    for (uint32_t i = 0; i < count; i++) {
        wish *at = &wishes[i];
        ranges[i][0] = (visible_range){scenario_header(s, at->r), at->header, FLUSH_LINE_BYTES};
        ranges[i][1] = (visible_range){scenario_payload(s, at->r), at->payload, bytes};
        items[i] = (acquire_item){.descriptor_line = scenario_descriptor(s, at->r),
                                  .version = at->generation << 8 | PAGE_SEALED,
                                  .ranges = ranges[i], .range_count = 2};
    }
    take(items, count, s->mode);
    for (uint32_t i = 0; i < count; i++) {
        wish *at = &wishes[i];
        at->granted = items[i].code == 0;
        if (!at->granted && at->must && atomic_load(&s->freed[at->r]) < at->generation)
            scenario_fail(s, "lost", at->r, at->generation);
        if (at->granted && !reader_same(s, at->r, at->generation, at->header, at->payload))
            scenario_fail(s, "stale or torn", at->r, at->generation);
    }
}

/* A pinned record, in place: what is cached of it stays right. */
static inline void reader_visit(reader *own, uint32_t r) {
    scenario *s = own->s;
    uint64_t header[FLUSH_LINE_BYTES / 8], payload[SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
    flush_copy_out(header, scenario_header(s, r), FLUSH_LINE_BYTES);
    flush_copy_out(payload, scenario_payload(s, r), (size_t)s->payload_lines * FLUSH_LINE_BYTES);
    if (!reader_same(s, r, own->held[r], header, payload))
        scenario_fail(s, "changed under its pin", r, own->held[r]);
    atomic_fetch_add(&s->visited, 1);
}

/* Visits most of what it holds, then lets go of some of it, in the end of all. */
static inline void reader_visits(reader *own, bool last) {
    uint32_t records[SCENARIO_RECORDS_MAX], count = 0;
    for (uint32_t r = 0; r < own->s->records; r++) {
        if (!own->held[r]) continue;
        bool leave = last || random_below(&own->seed, 3) == 0;
        if (leave || random_below(&own->seed, 2)) {
            own->s->wait();
            reader_visit(own, r);
        }
        if (!leave) continue;
        records[count++] = r;
        own->held[r] = 0;
        own->held_count--;
    }
    reader_pins(own, records, count, visibility_unpin);
}

static inline void reader_round(reader *own, bool last) {
    scenario *s = own->s;
    wish wishes[SCENARIO_BATCH];
    uint32_t count = reader_wishes(own, wishes);
    uint32_t records[SCENARIO_BATCH], refused = 0;
    bool pins = own->kind != READER_OPTIMISTIC;
    for (uint32_t i = 0; i < count; i++) records[i] = wishes[i].r;
    if (pins) reader_pins(own, records, count, visibility_pin);
    bool trusts = own->kind == READER_TRUSTING;
    if (count) reader_acquire(s, wishes, count, trusts ? visibility_take : visibility_acquire);
    for (uint32_t i = 0; i < count; i++) {
        wish *at = &wishes[i];
        atomic_fetch_add(at->granted ? &s->accepted : &s->refused, 1);
        if (at->granted && at->generation <= at->gone)
            scenario_fail(s, "accepted after its free", at->r, at->generation);
        if (!at->granted) records[refused++] = at->r;
        if (!at->granted || !pins) continue;
        own->held[at->r] = at->generation;
        own->held_count++;
    }
    if (!pins) return;
    reader_pins(own, records, refused, visibility_unpin);
    reader_visits(own, last);
}

static inline void *reader_run(void *context) {
    reader *own = context;
    bool last = false;
    for (uint32_t round = 1; !last && !atomic_load(&own->s->failed); round++) {
        last = round >= own->rounds && !scenario_goes_on(own->s);
        reader_round(own, last);
        own->s->wait();
    }
    return NULL;
}
