/* Hosts: where their blocks lie, names and epochs, heartbeats. */
#include "base/base.h"
#include "coherence/hosts.h"

#include <stddef.h>
#include <string.h>

#include "base/crc32c.h"
#include "coherence/host_lines.h"

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

static void keep_name(const hosts *h, uint64_t nonce, uint32_t epoch, uint32_t status) {
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

static void open_fence(const hosts *h, uint32_t host) {
    uint64_t *word = fence_word(h, h->self, host), said;
    const void *line = word;
    line_look(h, FLUSH_FENCE_LOOK_BEGIN, &line, 1, 1);
    if (!word_try(h, word, &said) || FENCE_STATE(said) != FENCE_CLOSED) return;
    guard fault;
    GUARD_BEGIN(fault) {
        flush_store_word(word, 0);
        line_keep(h, FLUSH_CUT, word, sizeof(*word));
    } GUARD_END(fault, hosts_lost(h, &fault))
}

/* Of an earlier epoch of ours, or of a process that died: whoever waits goes on. */
void hosts_open_fences(const hosts *h) {
    for (uint32_t host = 0; host < h->area.host_count; host++) open_fence(h, host);
}

static void clear_pins(const hosts *h) {
    uint8_t *first = (uint8_t *)hosts_pin_word(h, h->self, 0);
    static const uint8_t zeros[LINE_BYTES];
    uint64_t bytes = h->area.block_bytes - h->area.pins_offset;
    guard fault;
    GUARD_BEGIN(fault) { /* where it fails, pins stay: pages wait, nobody is hurt */
        for (uint64_t at = 0; at < bytes; at += LINE_BYTES) flush_store_line(first + at, zeros, 0);
        line_keep(h, FLUSH_UNPIN, first, bytes);
    } GUARD_END(fault, hosts_lost(h, &fault))
}

static int epoch_check(const hosts *h, uint32_t epoch) {
    if (epoch < EPOCH_MAX) return 0;
    return fail(CXLKV_E_CORRUPT, "host %u has used up its epochs: create the pool anew", h->self);
}

static void attach_as(hosts *h, const host_name *name, uint64_t nonce, const host_fence *fence) {
    uint64_t commits = name->status == HOST_UNUSED ? 0 : hosts_commits(h, h->self);
    if (fence->fenced && fence->cut < commits) commits = fence->cut;
    hosts_forget_claims(h, commits);
    h->epoch = name->epoch + 1;
    hosts_set_commits(h, commits);
    hosts_unlock(h);
    hosts_mend_log(h);
    if (name->nonce != nonce) clear_pins(h); /* else its processes read on */
    keep_name(h, nonce, h->epoch, HOST_LIVE);
}

static int attach(hosts *h, uint64_t nonce) {
    host_name name;
    host_fence fence = {0};
    if (!hosts_name(h, h->self, &name))
        return fail(CXLKV_E_CORRUPT,
                    "the name line of host %u is damaged, or cannot be read. If that host is "
                    "surely not running: `cxlkv pool check --repair`", h->self);
    int code = epoch_check(h, name.epoch);
    if (code < 0) return code;
    h->epoch = name.epoch;
    /* What this machine's caches still hold of an earlier time is not what memory says. */
    hosts_hand_over(hosts_line(h, h->self, 0), h->area.block_bytes, false);
    /* First: two that died while they fenced each other would wait for each other. */
    hosts_open_fences(h);
    if (name.status != HOST_UNUSED) {
        code = hosts_fence_of(h, h->self, name.epoch, &fence);
        if (code < 0) return code;
    }
    attach_as(h, &name, nonce, &fence);
    return 0;
}

int hosts_attach(hosts *h, uint64_t nonce) {
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        code = attach(h, nonce);
    } GUARD_END(fault, code = hosts_lost(h, &fault))
    return code;
}

/* Who fences this epoch from now on counts no fewer commits than who has: no smaller cut comes. */
int hosts_return(hosts *h, uint64_t nonce, const host_fence *fence) {
    const host_name name = {.nonce = nonce, .epoch = h->epoch, .status = HOST_LIVE};
    guard fault;
    volatile int code = epoch_check(h, h->epoch);
    if (code < 0) return code;
    hosts_open_fences(h);
    GUARD_BEGIN(fault) {
        attach_as(h, &name, nonce, fence);
    } GUARD_END(fault, code = hosts_lost(h, &fault))
    return code;
}

void hosts_recover_claims(const hosts *h) {
    guard fault;
    GUARD_BEGIN(fault) {
        hosts_forget_claims(h, hosts_commits(h, h->self));
    } GUARD_END(fault, hosts_lost(h, &fault)) /* without a commit they count nowhere */
    hosts_unlock(h);
}

void hosts_recover(const hosts *h) {
    hosts_open_fences(h);
    hosts_mend_log(h);
}

void hosts_leave(hosts *h, uint64_t nonce) {
    guard fault;
    hosts_unlock(h);
    clear_pins(h);
    GUARD_BEGIN(fault) { /* else it looks as if it had died: its operator says that it is off */
        keep_name(h, nonce, h->epoch, HOST_LEFT);
    } GUARD_END(fault, hosts_lost(h, &fault))
}

/* ---- beats ---- */

static uint64_t *beat_word(const hosts *h, uint32_t host, uint32_t word) {
    return (uint64_t *)hosts_line(h, host, BEAT_LINE) + word;
}

bool hosts_beat(const hosts *h, uint64_t beats, uint64_t wanted_extents) {
    guard fault;
    volatile bool done = true;
    GUARD_BEGIN(fault) {
        flush_store_word(beat_word(h, h->self, 1), wanted_extents);
        flush_store_word(beat_word(h, h->self, 0), beats);
        line_send(FLUSH_BEAT, beat_word(h, h->self, 0), h->mode);
        flush_fence_stores(FLUSH_BEAT_FENCE);
    } GUARD_END(fault, done = hosts_lost(h, &fault) == 0)
    return done;
}

/* With the next beat; what is lost of it, that tells. */
static void say(const hosts *h, uint32_t word, uint64_t value) {
    guard fault;
    GUARD_BEGIN(fault) {
        flush_store_word(beat_word(h, h->self, word), value);
    } GUARD_END(fault, (void)fault)
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
