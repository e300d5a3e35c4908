/* Hosts: where their blocks lie, and what each says of itself: name, epoch, commits, beats. */
#include "base/clock.h"
#include "base/crc32c.h"
#include "base/guard.h"
#include "base/types.h"
#include "coherence/host_lines.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"

void hosts_area_make(hosts_area *area) {
    uint64_t log_bytes = (uint64_t)area->log_records * LINE_BYTES;
    area->claims_offset = LOG_LINES * (uint64_t)LINE_BYTES + log_bytes;
    area->pins_offset =
        area->claims_offset + align_up(area->extent_count * sizeof(claim_pair), LINE_BYTES);
    uint64_t pins = align_up((area->page_count + 63ull) / 64 * 8, LINE_BYTES);
    area->block_bytes = align_up(area->pins_offset + pins, 4096);
}

/* ---- names ---- */

static bool name_is_whole(const host_name *name, uint32_t host) {
    return name->crc == crc32c(0, name, offsetof(host_name, crc)) && name->host == host &&
           name->status <= HOST_LEFT && name->epoch != 0 && name->epoch <= EPOCH_MAX;
}

/* Which of the two is the newest that is whole; -1: none is. */
static int newest_name(const host_name names[2], uint32_t host) {
    int newest = -1;
    for (int i = 0; i < 2; i++) {
        if (!name_is_whole(&names[i], host)) continue;
        if (newest < 0 || names[i].epoch > names[newest].epoch ||
            (names[i].epoch == names[newest].epoch && names[i].status > names[newest].status))
            newest = i;
    }
    return newest;
}

/* Which of the two is there, from memory; false: they are damaged, or were written between two of
 * the loads, or (lost) cannot be read. */
static bool look_at_name(const hosts *h, uint32_t host, host_name *name, bool *lost) {
    static const host_name none;
    const void *line = hosts_line(h, host, NAME_LINE);
    host_name names[2];
    line_look(h, FLUSH_NAME_LOOK_BEGIN, &line, 1, 1);
    *name = none;
    *lost = !line_try(h, names, line);
    if (*lost) return false;
    int newest = newest_name(names, host);
    *name = newest < 0 ? none : names[newest];
    /* The first name of all may be half written: then the second one has not been begun. */
    return newest >= 0 || memcmp(&names[1], &none, sizeof(none)) == 0;
}

bool hosts_name(const hosts *h, uint32_t host, host_name *name) {
    bool lost, found = look_at_name(h, host, name, &lost);
    for (int attempt = 0; !found && !lost && attempt < 16; attempt++) {
        h->pause(h->context);
        found = look_at_name(h, host, name, &lost);
    }
    return found;
}

void hosts_keep_name(const hosts *h, uint64_t nonce, uint32_t epoch, uint32_t status) {
    host_name names[2], name = {.nonce = nonce, .epoch = epoch, .status = status, .host = h->self,
                                .build = CXLKV_BUILD, .features = h->features};
    name.crc = crc32c(0, &name, offsetof(host_name, crc));
    uint64_t words[sizeof(name) / 8], *line = (uint64_t *)hosts_line(h, h->self, NAME_LINE);
    memcpy(words, &name, sizeof(name));
    flush_load_line(names, line);
    int first = newest_name(names, h->self) == 0; /* the one that counts stays until then */
    for (int i = 0; i < 2; i++) {
        uint64_t *half = line + (i ^ first) * sizeof(name) / 8;
        for (uint32_t w = 0; w < sizeof(name) / 8; w++) flush_store_word(half + w, words[w]);
        line_keep(h, FLUSH_NAME, half, sizeof(name));
    }
}

/* ---- a damaged name, written by another host: its own is off, an operator says so (V7) ---- */

static void raise_to(uint32_t *epoch, uint32_t seen) {
    if (seen > *epoch && seen < EPOCH_MAX) *epoch = seen;
}

/* The latest epoch of a host that anything in the pool speaks of: its place in the queue, its log,
 * its claims, and what others said of it. */
static uint32_t latest_epoch(const hosts *h, uint32_t host) {
    uint32_t epoch = 1;
    hosts_hand_over(hosts_line(h, host, 0), h->area.block_bytes, false);
    raise_to(&epoch, SLOT_EPOCH(flush_load_word(hosts_line(h, host, LOCK_LINE))));
    for (uint32_t i = 0; i < h->area.log_records; i++) {
        log_record record;
        flush_load_line(&record, hosts_line(h, host, LOG_LINES + i));
        if (record.crc == crc32c(0, &record, offsetof(log_record, crc)))
            raise_to(&epoch, record.epoch);
    }
    for (uint64_t at = 0; at < h->area.extent_count * sizeof(claim_pair); at += LINE_BYTES) {
        claim claims[LINE_BYTES / sizeof(claim)];
        flush_load_line(claims, claims_of(h, host) + at);
        for (uint32_t i = 0; i < LINE_BYTES / sizeof(claim); i++)
            if (claims[i].version) raise_to(&epoch, claims[i].epoch_ours >> 1);
    }
    for (uint32_t by = 0; by < h->area.host_count; by++)
        raise_to(&epoch, FENCE_EPOCH(flush_load_word(fence_word(h, by, host))));
    return epoch;
}

static void write_name(const hosts *h, uint32_t host, host_name *name) {
    host_name names[2];
    *name = (host_name){.nonce = random_u64(), .epoch = latest_epoch(h, host),
                        .status = HOST_LIVE, .host = host};
    name->crc = crc32c(0, name, offsetof(host_name, crc));
    names[0] = names[1] = *name;
    void *line = hosts_line(h, host, NAME_LINE);
    flush_store_line(line, names, 0);
    line_keep(h, FLUSH_NAME, line, LINE_BYTES);
}

int hosts_name_again(const hosts *h, uint32_t host, host_name *name) {
    return GUARDED((write_name(h, host, name), 0), hosts_lost(h, &fault));
}

/* ---- commits ---- */

uint64_t hosts_commits(const hosts *h, uint32_t host) {
    const void *line = hosts_line(h, host, COMMIT_LINE);
    line_look(h, FLUSH_COMMIT_LOOK_BEGIN, &line, 1, 1);
    return min_u64(flush_load_word(line), COUNT_MAX);
}

void hosts_set_commits(const hosts *h, uint64_t commits) {
    uint64_t *word = (uint64_t *)hosts_line(h, h->self, COMMIT_LINE);
    flush_store_word(word, commits);
    line_keep(h, FLUSH_COMMIT, word, sizeof(*word));
}

/* ---- beats ---- */

static uint64_t *beat_word(const hosts *h, uint32_t host, uint32_t word) {
    return (uint64_t *)hosts_line(h, host, BEAT_LINE) + word;
}

bool hosts_beat(const hosts *h, uint64_t beats, uint64_t wanted_extents) {
    GUARD_BEGIN(fault) {
        flush_store_word(beat_word(h, h->self, 1), wanted_extents);
        flush_store_word(beat_word(h, h->self, 0), beats);
        line_send(FLUSH_BEAT, beat_word(h, h->self, 0), h->mode);
        flush_fence_stores(FLUSH_BEAT_FENCE);
    } GUARD_END(fault, return hosts_lost(h, &fault) == 0)
    return true;
}

/* With the next beat; what is lost of it, that tells. */
static void say(const hosts *h, uint32_t word, uint64_t value) {
    GUARDED((flush_store_word(beat_word(h, h->self, word), value), 0), 0);
}

static uint64_t said(const hosts *h, uint32_t host, uint32_t word) {
    uint64_t value;
    word_try(h, beat_word(h, host, word), &value);
    return value;
}

void hosts_offer(const hosts *h, uint64_t extents) { say(h, 2, extents); }
uint64_t hosts_offered(const hosts *h, uint32_t host) { return said(h, host, 2); }

/* Never 0, which stands there before the first promise. */
static uint64_t promise_check(uint64_t lease_ns) {
    return crc32c(0, &lease_ns, sizeof(lease_ns)) | 1ull << 32;
}

void hosts_promise(const hosts *h, uint64_t lease_ns) {
    say(h, 3, lease_ns);
    say(h, 4, promise_check(lease_ns));
}

uint64_t hosts_promised(const hosts *h, uint32_t host) {
    uint64_t lease_ns = said(h, host, 3);
    return said(h, host, 4) == promise_check(lease_ns) ? lease_ns : 0;
}

uint64_t hosts_look_beats(const hosts *h, uint64_t *beats, uint64_t *wanted_extents) {
    const void *lines[HOSTS_MAX], *wants[HOSTS_MAX];
    for (uint32_t host = 0; host < h->area.host_count; host++) {
        lines[host] = beat_word(h, host, 0);
        wants[host] = beat_word(h, host, 1);
    }
    line_look(h, FLUSH_BEAT_LOOK_BEGIN, lines, h->area.host_count, 1);
    uint64_t lost = words_try(h, lines, h->area.host_count, beats);
    return lost | words_try(h, wants, h->area.host_count, wanted_extents);
}
