/* Owners that publish, free and write again, readers that acquire: what the tests of visibility.c
 * run, on threads over real memory and on the hosts of the incoherent one.
 *
 * An optimistic reader only acquires: what it accepts must be whole and of the generation it asked
 * for (V1, V3, V4, V5). A counted reader enters first and reads the record in place afterwards, as
 * attention does: it must not change until it leaves (V6). A record that was published before an
 * acquire began and not freed before it ended must be accepted. Readers also ask for what they only
 * guess, as whoever reads the descriptors does: they meet publishes half way. */
#ifndef CXLKV_VISIBILITY_SCENARIO_H
#define CXLKV_VISIBILITY_SCENARIO_H
#include <stdatomic.h>

#include "check.h"
#include "flush.h"
#include "visibility.h"

enum { SCENARIO_RECORDS_MAX = 16, SCENARIO_READERS_MAX = 8, SCENARIO_LINES_MAX = 8 };
enum { SCENARIO_BATCH = 3 };

typedef struct scenario {
    uint8_t *base;
    uint32_t records, payload_lines, readers;
    enum visibility_mode mode;
    void (*wait)(void);                  /* lets others run */
    void (*tell)(void);                  /* before others learn of something but by the memory */
    /* What really happened, outside of the shared memory: {generation published}, {being freed}. */
    _Atomic uint64_t published[SCENARIO_RECORDS_MAX], freed[SCENARIO_RECORDS_MAX];
    atomic_uint accepted, refused, reused, waited;
    atomic_bool failed;
} scenario;

static inline uint64_t scenario_lines(const scenario *s) {
    return s->records * (2ull + s->payload_lines) + s->readers;
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
static inline reader_line *scenario_reader(const scenario *s, uint32_t reader) {
    uint64_t first = s->records * (2ull + s->payload_lines);
    return (reader_line *)scenario_line(s, first + reader);
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

typedef struct owner {
    scenario *s;
    uint32_t first, count;               /* its records */
    uint32_t rounds;
    uint64_t seed;
    uint64_t generation[SCENARIO_RECORDS_MAX];
    bool sealed[SCENARIO_RECORDS_MAX];
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

static inline void owner_free(owner *o, uint32_t r) {
    scenario *s = o->s;
    uint8_t line[FLUSH_LINE_BYTES];
    uint64_t before[SCENARIO_READERS_MAX], now[SCENARIO_READERS_MAX];
    atomic_store(&s->freed[r], o->generation[r]);
    scenario_line_of(++o->generation[r], PAGE_FREE, line);
    publish_item item = {.descriptor_line = scenario_descriptor(s, r), .descriptor = line};
    visibility_free(&item, 1, s->mode);
    visibility_look(scenario_reader(s, 0), s->readers, sizeof(reader_line), before, s->mode);
    memcpy(now, before, sizeof(now));
    while (!visibility_left(before, now, s->readers)) {
        s->wait();
        visibility_look(scenario_reader(s, 0), s->readers, sizeof(reader_line), now, s->mode);
        atomic_fetch_add(&s->waited, 1);
    }
    o->sealed[r] = false;
    atomic_fetch_add(&s->reused, 1);
}

static inline void *owner_run(void *context) {
    owner *o = context;
    for (uint32_t round = 0; round < o->rounds && !atomic_load(&o->s->failed); round++) {
        uint32_t fresh[SCENARIO_BATCH], count = 0;
        uint32_t wanted = 1 + random_below(&o->seed, SCENARIO_BATCH);
        for (uint32_t i = 0; i < o->count && count < wanted; i++)
            if (!o->sealed[o->first + i]) fresh[count++] = o->first + i;
        if (count && random_below(&o->seed, 3)) {
            owner_publish(o, fresh, count);
        } else {
            uint32_t r = o->first + random_below(&o->seed, o->count);
            if (o->sealed[r]) owner_free(o, r);
        }
        o->s->wait();
    }
    return NULL;
}

typedef struct reader {
    scenario *s;
    int32_t line;                        /* its reader line, or -1: optimistic */
    uint32_t rounds;
    uint64_t seed;
} reader;

static inline void reader_fail(scenario *s, const char *what, uint32_t r, uint64_t generation) {
    if (!atomic_exchange(&s->failed, true))
        fprintf(stderr, "%s: record %u, generation %lu\n", what, r, generation);
}

static inline bool reader_same(const scenario *s, uint32_t r, uint64_t generation,
                               const uint64_t *header, const uint64_t *payload) {
    uint64_t words[SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
    size_t bytes = (size_t)s->payload_lines * FLUSH_LINE_BYTES;
    scenario_fill(r, generation, 0, words, FLUSH_LINE_BYTES);
    if (memcmp(words, header, FLUSH_LINE_BYTES) != 0) return false;
    scenario_fill(r, generation, 1, words, bytes);
    return memcmp(words, payload, bytes) == 0;
}

static inline void reader_round(reader *own) {
    scenario *s = own->s;
    uint64_t header[SCENARIO_BATCH][FLUSH_LINE_BYTES / 8];
    uint64_t payload[SCENARIO_BATCH][SCENARIO_LINES_MAX * FLUSH_LINE_BYTES / 8];
    size_t bytes = (size_t)s->payload_lines * FLUSH_LINE_BYTES;
    visible_range ranges[SCENARIO_BATCH][2];
    acquire_item items[SCENARIO_BATCH] = {0};
    uint32_t records[SCENARIO_BATCH], count = 0;
    uint64_t wanted[SCENARIO_BATCH];
    bool must[SCENARIO_BATCH];
    if (own->line >= 0) visibility_enter(scenario_reader(s, (uint32_t)own->line), s->mode);
    for (uint32_t i = 0, n = 1 + random_below(&own->seed, SCENARIO_BATCH); i < n; i++) {
        uint32_t r = random_below(&own->seed, s->records);
        uint64_t generation = atomic_load(&s->published[r]);
        bool guessed = generation == 0 || random_below(&own->seed, 3) == 0;
        if (guessed) generation = atomic_load(&s->freed[r]) + 1;
        ranges[count][0] = (visible_range){scenario_header(s, r), header[count], FLUSH_LINE_BYTES};
        ranges[count][1] = (visible_range){scenario_payload(s, r), payload[count], bytes};
        items[count] = (acquire_item){.descriptor_line = scenario_descriptor(s, r),
                                      .version = generation << 8 | PAGE_SEALED,
                                      .ranges = ranges[count], .range_count = 2};
        records[count] = r;
        /* A guess may be the generation that is there, or the one that is about to be. */
        must[count] = !guessed;
        wanted[count++] = generation;
    }
    if (count) visibility_acquire(items, count, s->mode);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = records[i];
        if (items[i].code != 0) {
            bool lost = must[i] && atomic_load(&s->freed[r]) < wanted[i];
            if (lost) reader_fail(s, "lost", r, wanted[i]);
            atomic_fetch_add(&s->refused, 1);
            continue;
        }
        atomic_fetch_add(&s->accepted, 1);
        if (!reader_same(s, r, wanted[i], header[i], payload[i]))
            reader_fail(s, "stale or torn", r, wanted[i]);
        if (own->line < 0) continue;
        s->wait();
        flush_copy_out(header[i], scenario_header(s, r), FLUSH_LINE_BYTES);
        flush_copy_out(payload[i], scenario_payload(s, r), bytes);
        if (!reader_same(s, r, wanted[i], header[i], payload[i]))
            reader_fail(s, "changed while it was read", r, wanted[i]);
    }
    if (own->line >= 0) visibility_leave(scenario_reader(s, (uint32_t)own->line), s->mode);
}

static inline void *reader_run(void *context) {
    reader *own = context;
    for (uint32_t round = 0; round < own->rounds && !atomic_load(&own->s->failed); round++) {
        reader_round(own);
        own->s->wait();
    }
    return NULL;
}

#endif
