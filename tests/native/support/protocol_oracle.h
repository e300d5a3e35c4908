/* What really happened in a run of the protocol between hosts, kept outside of the shared memory,
 * and what must hold then. protocol_scenario.h has the hosts that do it. */
#pragma once
#include "base/crc32c.h"
#include "check.h"
#include "coherence/host_lines.h"
#include "knobs.h"

enum { EXTENTS_MAX = 8, EACH_MAX = 3, PAGES_MAX = EXTENTS_MAX * EACH_MAX, PAYLOAD_LINES_MAX = 8 };
/* Hosts' numbers have gaps in some runs: beyond 8, what one says of others lies in two lines. */
enum { MEMBERS_MAX = 25, BATCH = 3, NOTES_MAX = 64 };

/* How often; the test demands that all of it happened. */
typedef struct protocol_counts {
    uint64_t operations, publishes, acquires, frees, takes, gives, locks, appends, reads;
    uint64_t takeovers, laps, fenced_copies, late_drains, reuses, pinned, undecided;
    uint64_t fenced, returns, offs, recoveries, adopted, steps, left_out;
} protocol_counts;

struct extent_truth {
    uint8_t owner;               /* by claims that returned 0 */
    uint8_t pending;             /* whose claim has begun and has not returned 0 or FENCED */
    bool gives;                  /* the pending one */
};
struct page_truth {
    uint64_t published, logged, freed; /* generations: returned, returned, begun */
    uint8_t writer;
    uint8_t holds[MEMBERS_MAX];  /* readers that read it in place just now */
};
struct member_truth {
    bool gone;                   /* left, or off, and has not looked at the owners since */
    bool inside;                 /* the lock, */
    uint32_t inside_epoch;       /* in this epoch */
    uint32_t epoch;              /* of its last name that is surely in memory */
    uint64_t nonce;
};

/* What hosts did, as they would say it; the emulator's trace has the memory operations. */
struct note {
    uint64_t step, about, more;
    const char *what;
    uint32_t host;
};

typedef struct protocol {
    incoherent *sim;
    struct note notes[NOTES_MAX];
    uint64_t note_count;
    hosts_area area;
    uint8_t *extents;
    uint32_t members, stride, each, payload_lines; /* stride: between hosts' numbers */
    uint64_t lease_steps;
    enum visibility_mode mode;
    struct extent_truth extent[EXTENTS_MAX];
    struct page_truth page[PAGES_MAX];
    struct member_truth member[MEMBERS_MAX];
    protocol_counts counts;
    bool failed;
} protocol;

static inline void protocol_note(protocol *p, const char *what, uint32_t host, uint64_t about,
                                 uint64_t more) {
    p->notes[p->note_count++ % NOTES_MAX] =
        (struct note){incoherent_step_count(p->sim), about, more, what, host};
}

/* ---- where things are ---- */
static inline uint32_t extent_lines(const protocol *p) { return p->each * (2 + p->payload_lines); }
static inline uint8_t *extent_at(const protocol *p, uint32_t extent) {
    return p->extents + (uint64_t)extent * extent_lines(p) * FLUSH_LINE_BYTES;
}
static inline uint8_t *page_descriptor(const protocol *p, uint32_t page) {
    return extent_at(p, page / p->each) + page % p->each * FLUSH_LINE_BYTES;
}
static inline uint8_t *page_header(const protocol *p, uint32_t page) {
    return page_descriptor(p, page) + p->each * FLUSH_LINE_BYTES;
}
static inline size_t payload_bytes(const protocol *p) {
    return (size_t)p->payload_lines * FLUSH_LINE_BYTES;
}
static inline uint8_t *page_payload(const protocol *p, uint32_t page) {
    return extent_at(p, page / p->each) + 2 * p->each * FLUSH_LINE_BYTES +
           page % p->each * payload_bytes(p);
}

/* ---- a failure, and the lines of memory that it is about ---- */

/* Of what hosts say about themselves and each other, beats left out: they are of every moment. */
static inline void about_hosts(const protocol *p) {
    hosts h = {.area = p->area};
    for (uint32_t host = 0; host < p->members; host += p->stride) {
        knob_about(p->sim, "name", hosts_line(&h, host, NAME_LINE), FLUSH_LINE_BYTES);
        knob_about(p->sim, "lock", hosts_line(&h, host, LOCK_LINE), FLUSH_LINE_BYTES);
        knob_about(p->sim, "commits", hosts_line(&h, host, COMMIT_LINE), FLUSH_LINE_BYTES);
        knob_about(p->sim, "fences", fence_word(&h, host, 0), p->members * sizeof(uint64_t));
    }
}

static inline void about_extent(const protocol *p, uint32_t x) {
    hosts h = {.area = p->area};
    for (uint32_t host = 0; host < p->members; host += p->stride) {
        knob_about(p->sim, "claims", claims_of(&h, host) + x * sizeof(claim_pair),
                   sizeof(claim_pair));
        knob_about(p->sim, "commits", hosts_line(&h, host, COMMIT_LINE), FLUSH_LINE_BYTES);
        knob_about(p->sim, "fences", fence_word(&h, host, 0), p->members * sizeof(uint64_t));
    }
}

static inline void about_page(const protocol *p, uint32_t page) {
    hosts h = {.area = p->area};
    knob_about(p->sim, "descriptor", page_descriptor(p, page), FLUSH_LINE_BYTES);
    knob_about(p->sim, "header", page_header(p, page), FLUSH_LINE_BYTES);
    knob_about(p->sim, "payload", page_payload(p, page), payload_bytes(p));
    for (uint32_t host = 0; host < p->members; host += p->stride)
        knob_about(p->sim, "pins", hosts_pin_word(&h, host, page), sizeof(uint64_t));
}

static inline void about_logs(const protocol *p) {
    hosts h = {.area = p->area};
    for (uint32_t host = 0; host < p->members; host += p->stride)
        knob_about(p->sim, "log", hosts_line(&h, host, LOG_LINES),
                   p->area.log_records * (uint64_t)FLUSH_LINE_BYTES);
}

enum about { NO_LINES, HOSTS, EXTENT, PAGE, LOGS };

static inline void protocol_fail_about(protocol *p, enum about lines, const char *what,
                                       uint32_t host, uint64_t about, uint64_t more) {
    if (p->failed) return;
    p->failed = true;
    incoherent_trace(p->sim, stderr);
    protocol_note(p, what, host, about, more);
    fprintf(stderr, "what the members did; %u is host 1 above:\n", p->stride);
    for (uint64_t i = p->note_count < NOTES_MAX ? 0 : p->note_count - NOTES_MAX;
         i < p->note_count; i++) {
        const struct note *note = &p->notes[i % NOTES_MAX];
        fprintf(stderr, "%8lu member %u %s (%lu, %lu)\n", note->step, note->host, note->what,
                note->about, note->more);
    }
    if (lines == HOSTS) about_hosts(p);
    if (lines == EXTENT) about_extent(p, (uint32_t)about);
    if (lines == PAGE) about_page(p, (uint32_t)about);
    if (lines == LOGS) about_logs(p);
    fprintf(stderr, "failed: %s (%lu, %lu)\n", what, about, more);
}

static inline void protocol_fail(protocol *p, const char *what, uint32_t host, uint64_t about,
                                 uint64_t more) {
    protocol_fail_about(p, HOSTS, what, host, about, more);
}
/* About an extent, or a page. */
static inline void extent_fails(protocol *p, const char *what, uint32_t host, uint32_t x,
                                uint64_t more) {
    protocol_fail_about(p, EXTENT, what, host, x, more);
}
static inline void page_fails(protocol *p, const char *what, uint32_t host, uint32_t page,
                              uint64_t more) {
    protocol_fail_about(p, PAGE, what, host, page, more);
}

/* ---- what a record holds: payload (kind 0), header (1), descriptor (2), log record (3) ---- */
static inline void record_fill(uint32_t page, uint64_t generation, uint32_t kind, void *to,
                               size_t bytes) {
    uint64_t state = page * 1000003ull + generation * 101 + kind, word;
    for (size_t at = 0; at < bytes; at += 8) {
        word = random_next(&state);
        memcpy((uint8_t *)to + at, &word, bytes - at < 8 ? bytes - at : 8);
    }
}

static inline bool record_is(uint32_t page, uint64_t generation, uint32_t kind, const void *is,
                             size_t bytes) {
    uint8_t wanted[PAYLOAD_LINES_MAX * FLUSH_LINE_BYTES];
    record_fill(page, generation, kind, wanted, bytes);
    return memcmp(wanted, is, bytes) == 0;
}

static inline void descriptor_fill(uint32_t page, uint64_t generation, uint32_t state,
                                   uint8_t *line) {
    uint64_t version = generation << 8 | state;
    record_fill(page, version, 2, line, FLUSH_LINE_BYTES);
    memcpy(line, &version, sizeof(version));
    uint32_t crc = crc32c(0, line, FLUSH_LINE_BYTES - 4);
    memcpy(line + FLUSH_LINE_BYTES - 4, &crc, sizeof(crc));
}

/* ---- fences as they are in memory ---- */
static inline bool fence_says(const protocol *p, uint32_t by, uint32_t about, uint32_t epoch,
                              uint32_t state) {
    hosts h = {.area = p->area};
    uint64_t word;
    incoherent_peek(p->sim, fence_word(&h, by, about), sizeof(word), &word);
    return FENCE_EPOCH(word) == epoch && FENCE_STATE(word) >= state;
}

static inline bool is_fenced(const protocol *p, uint32_t host, uint32_t epoch, uint32_t state) {
    for (uint32_t by = 0; by < p->members; by++)
        if (fence_says(p, by, host, epoch, state)) return true;
    return false;
}

/* ---- the lock ---- */

/* V12: all others inside are fenced, unless we are. */
static inline void truth_enters(protocol *p, const hosts *h) {
    for (uint32_t host = 0; host < p->members; host++) {
        const struct member_truth *other = &p->member[host];
        if (host == h->self || !other->inside) continue;
        p->counts.takeovers++;
        if (!is_fenced(p, host, other->inside_epoch, FENCE_CUT) &&
            !is_fenced(p, h->self, h->epoch, FENCE_CLOSED))
            protocol_fail(p, "two are inside the lock", h->self, host, other->inside_epoch);
    }
    protocol_note(p, "is inside in epoch", h->self, h->epoch, 0);
    p->member[h->self].inside = true;
    p->member[h->self].inside_epoch = h->epoch;
    /* Of two that fence each other, one gives way. */
    for (uint32_t a = 0; a < p->members; a++)
        for (uint32_t b = 0; b < a; b++)
            if (p->member[a].epoch && p->member[b].epoch &&
                fence_says(p, a, b, p->member[b].epoch, FENCE_CUT) &&
                fence_says(p, b, a, p->member[a].epoch, FENCE_CUT))
                protocol_fail(p, "two have fenced each other", h->self, a, b);
}

/* ---- extents ---- */

static inline void truth_takes(protocol *p, uint32_t host, uint32_t x) {
    struct extent_truth *t = &p->extent[x];
    if (t->owner != NO_HOST && t->owner != host && !p->member[t->owner].gone)
        extent_fails(p, "two own an extent", host, x, t->owner);
    t->owner = (uint8_t)host;
}

/* A claim whose maker has not heard yet what became of it: others may know. */
static inline void truth_decides(protocol *p, const hosts *h, uint32_t x, uint32_t owner) {
    struct extent_truth *t = &p->extent[x];
    uint8_t maker = t->pending;
    if (maker == NO_HOST) return;
    if (maker == h->self || (owner == maker) != t->gives) t->pending = NO_HOST;
    if (t->gives && t->owner == maker && owner != maker) t->owner = NO_HOST;
    if (!t->gives && owner == maker) truth_takes(p, maker, x);
}

/* What hosts_owners() said, under the lock. False when we were fenced meanwhile: others may be
 * inside, too, so it means nothing. */
static inline bool truth_owners(protocol *p, const hosts *h, const extent_owner *owners) {
    if (is_fenced(p, h->self, h->epoch, FENCE_CLOSED)) return false;
    bool back = p->member[h->self].gone;
    for (uint32_t x = 0; x < p->area.extent_count; x++) {
        struct extent_truth *t = &p->extent[x];
        truth_decides(p, h, x, owners[x].host);
        if (back && t->owner == h->self && owners[x].host != h->self) t->owner = NO_HOST;
        if (owners[x].host != t->owner)
            extent_fails(p, "a claim is not believed", h->self, x, owners[x].host);
        if (owners[x].takeable && t->owner != NO_HOST && !p->member[t->owner].gone)
            extent_fails(p, "an extent in use may be taken", h->self, x, t->owner);
    }
    p->member[h->self].gone = false;
    return true;
}

static inline void truth_claims(protocol *p, uint32_t host, uint32_t x, bool ours) {
    p->extent[x].pending = (uint8_t)host;
    p->extent[x].gives = !ours;
}

static inline void truth_claimed(protocol *p, uint32_t host, uint32_t x, bool ours, int code) {
    struct extent_truth *t = &p->extent[x];
    protocol_note(p, ours ? "took" : "gave", host, x, (uint64_t)-code);
    if (code != 0 && code != -CXLKV_E_FENCED) return;
    if (t->pending == host) t->pending = NO_HOST;
    if (code != 0) {
        if ((t->owner == host) == ours)
            extent_fails(p, "a claim of a fenced host is believed", host, x, t->owner);
    } else if (ours) {
        truth_takes(p, host, x);
    } else if (t->owner == host) { /* else it has been taken by now */
        t->owner = NO_HOST;
    }
}

/* ---- pages ---- */

static inline void truth_writes(protocol *p, uint32_t host, uint32_t page) {
    struct page_truth *t = &p->page[page];
    if (p->extent[page / p->each].owner != host || p->member[host].gone)
        page_fails(p, "writes what is another's", host, page, p->extent[page / p->each].owner);
    for (uint32_t reader = 0; reader < p->members; reader++)
        if (t->holds[reader]) page_fails(p, "a pinned page is written", host, page, reader);
    p->counts.reuses += t->writer != NO_HOST && t->writer != host;
    t->writer = (uint8_t)host;
}

/* Published, and nobody has begun to free it. */
static inline bool truth_stands(const protocol *p, uint32_t page, uint64_t generation) {
    return p->page[page].published == generation && p->page[page].freed < generation;
}
