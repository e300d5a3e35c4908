/* Fences: an epoch of a silent host is ended, and all hosts agree which of its commits count (V10).
 *
 * {closed}, count, {cut}: whoever sees closed waits. Several hosts may fence one: the smallest cut
 * counts. No commit that anybody believed is above it: it was in memory before the closing was.
 * Two that fence each other: the one that finds itself closed after it has closed gives way. */
#include "base/guard.h"
#include "base/types.h"
#include "coherence/fences.h"
#include "coherence/host_lines.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"

/* A word that cannot be read says nothing if its host never was, or if it is about that host: none
 * fences itself. Else it may say anything. */
static uint64_t unknown(const hosts *h, uint64_t lost, uint32_t about) {
    for (uint32_t by = 0; lost >> by && by < h->area.host_count; by++) {
        host_name name;
        if (by == about || (lost >> by & 1 && hosts_name(h, by, &name) &&
                            name.status == HOST_UNUSED))
            lost &= ~(1ull << by);
    }
    return lost;
}

/* What all hosts say of one. Returns a bit for each that is at it just now, or may be: what it says
 * cannot be read. */
static uint64_t look_fences(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence) {
    const void *lines[HOSTS_MAX];
    uint64_t words[HOSTS_MAX];
    for (uint32_t by = 0; by < h->area.host_count; by++) lines[by] = fence_word(h, by, host);
    line_look(h, FLUSH_FENCE_LOOK_BEGIN, lines, h->area.host_count, 1);
    uint64_t lost = words_try(h, lines, h->area.host_count, words);
    uint64_t makers = lost ? unknown(h, lost, host) : 0;
    *fence = (host_fence){.cut = COUNT_MAX, .unread = makers};
    for (uint32_t by = 0; by < h->area.host_count; by++) {
        uint64_t word = words[by];
        if (FENCE_EPOCH(word) != epoch || FENCE_STATE(word) == FENCE_OPEN) continue;
        if (FENCE_STATE(word) == FENCE_CLOSED) {
            makers |= 1ull << by;
            continue;
        }
        fence->fenced = true;
        fence->off |= FENCE_STATE(word) == FENCE_OFF;
        fence->cut = min_u64(fence->cut, FENCE_COUNT(word));
    }
    return makers;
}

/* Does anybody say that this host's machine is off, in its present epoch? */
static bool is_off(const hosts *h, uint32_t host) {
    host_name name;
    host_fence fence;
    if (!hosts_name(h, host, &name) || name.status == HOST_UNUSED) return false;
    look_fences(h, host, name.epoch, &fence);
    return fence.off;
}

/* V10: what counts of a host is unknown while a host that may have fenced it cannot be read. */
static int unread_error(uint32_t by, uint32_t host) {
    return fail(CXLKV_E_POISON,
                "bus error in the lines of host %u (poisoned, or the file was cut): nobody can "
                "tell whether it fenced host %u, or what counts of that one. Bring that memory "
                "back, or create the pool anew. `cxlkv pool check` says more", by, host);
}

static void open_fence(const hosts *h, uint32_t host) {
    uint64_t *word = fence_word(h, h->self, host), said;
    const void *line = word;
    line_look(h, FLUSH_FENCE_LOOK_BEGIN, &line, 1, 1);
    if (!word_try(h, word, &said) || FENCE_STATE(said) != FENCE_CLOSED) return;
    GUARD_BEGIN(fault) {
        flush_store_word(word, 0);
        line_keep(h, FLUSH_CUT, word, sizeof(*word));
    } GUARD_END(fault, hosts_lost(h, &fault))
}

/* One of us at a time makes a fence, so one that is half made in our turn has lost its maker, or
 * somebody else wrote our word. Other hosts open none of ours: they would wait for ever. */
static void open_in_turn(const hosts *h, uint32_t host) {
    if (h->fencing && !h->fencing(h->context, true)) return;
    open_fence(h, host);
    if (h->fencing) h->fencing(h->context, false);
}

/* 1: it will finish; 0: it is off, and its part of it never was; or an error. */
static int maker_goes_on(const hosts *h, uint32_t maker, uint32_t host, const host_fence *fence) {
    if (fence->unread >> maker & 1) return unread_error(maker, host);
    if (is_off(h, maker)) return 0;
    if (maker == h->self) open_in_turn(h, host);
    if (maker == h->self || !h->silent(h->context, maker)) return 1;
    return fail(CXLKV_E_TIMEOUT,
                "host %u went silent while it fenced host %u: nobody can tell what counts. Bring "
                "it back, or switch it off and say `cxlkv pool fence PATH %u --confirmed-off`",
                maker, host, maker);
}

int hosts_fence_of(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence) {
    for (bool waits = true; waits;) {
        uint64_t makers = look_fences(h, host, epoch, fence);
        waits = false;
        for (uint32_t by = 0; by < h->area.host_count; by++) {
            if (!(makers >> by & 1)) continue;
            int code = maker_goes_on(h, by, host, fence);
            if (code < 0) return code;
            waits |= code > 0;
        }
        if (waits) h->pause(h->context);
    }
    return 0;
}

int hosts_fence_now(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence) {
    uint64_t makers = look_fences(h, host, epoch, fence);
    if (fence->unread) return unread_error((uint32_t)__builtin_ctzll(fence->unread), host);
    return makers != 0;
}

static void set_fence(const hosts *h, uint32_t host, uint64_t value, enum flush_site site) {
    uint64_t *word = fence_word(h, h->self, host);
    flush_store_word(word, value);
    line_keep(h, site, word, sizeof(*word));
}

static int fence_by_hand(const hosts *h, uint32_t host, uint32_t epoch, uint32_t state) {
    host_fence fence;
    uint64_t before = flush_load_word(fence_word(h, h->self, host)); /* our own: what we stored */
    if (FENCE_EPOCH(before) == epoch && FENCE_STATE(before) >= FENCE_CUT) {
        if (FENCE_STATE(before) < state)
            set_fence(h, host, FENCE_WORD(epoch, state, FENCE_COUNT(before)), FLUSH_CUT);
        return 0;
    }
    set_fence(h, host, FENCE_WORD(epoch, FENCE_CLOSED, 0), FLUSH_CLOSE);
    if (look_fences(h, h->self, h->epoch, &fence) != 0 || fence.fenced) {
        set_fence(h, host, FENCE_WORD(epoch, FENCE_OPEN, 0), FLUSH_CUT);
        if (fence.unread) return unread_error((uint32_t)__builtin_ctzll(fence.unread), h->self);
        return -EAGAIN;
    }
    set_fence(h, host, FENCE_WORD(epoch, state, hosts_commits(h, host)), FLUSH_CUT);
    return 0;
}

/* Where a line is lost on the way the fence stays closed, as if we had died over it; our next
 * hosts_open_fences() opens it. */
int hosts_fence(const hosts *h, uint32_t host, uint32_t epoch, bool off) {
    return GUARDED(fence_by_hand(h, host, epoch, off ? FENCE_OFF : FENCE_CUT),
                   hosts_lost(h, &fault));
}

/* ---- what was begun and not finished ---- */

/* Of an earlier epoch of ours, or of a process that died: whoever waits goes on. */
void hosts_open_fences(const hosts *h) {
    for (uint32_t host = 0; host < h->area.host_count; host++) open_fence(h, host);
}
