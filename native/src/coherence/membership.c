/* A host's membership: it arrives, returns after it was fenced, and leaves; and what a process that
 * died left undone. */
#include "base/guard.h"
#include "base/types.h"
#include "coherence/claims.h"
#include "coherence/fences.h"
#include "coherence/host_lines.h"
#include "coherence/host_log.h"
#include "coherence/hosts.h"
#include "coherence/hosts_lock.h"
#include "coherence/lost_lines.h"
#include "coherence/membership.h"

static void clear_pins(const hosts *h) {
    uint8_t *first = (uint8_t *)hosts_pin_word(h, h->self, 0);
    static const uint8_t zeros[LINE_BYTES];
    uint64_t bytes = h->area.block_bytes - h->area.pins_offset;
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
    hosts_keep_name(h, nonce, h->epoch, HOST_LIVE);
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
    return GUARDED(attach(h, nonce), hosts_lost(h, &fault));
}

/* Any later fence of this epoch counts at least as many commits, so the cut cannot shrink. */
int hosts_return(hosts *h, uint64_t nonce, const host_fence *fence) {
    const host_name name = {.nonce = nonce, .epoch = h->epoch, .status = HOST_LIVE};
    int code = epoch_check(h, h->epoch);
    if (code < 0) return code;
    hosts_open_fences(h);
    return GUARDED((attach_as(h, &name, nonce, fence), 0), hosts_lost(h, &fault));
}

void hosts_recover_claims(const hosts *h) {
    /* What is not forgotten counts nowhere without a commit. */
    GUARDED((hosts_forget_claims(h, hosts_commits(h, h->self)), 0), hosts_lost(h, &fault));
    hosts_unlock(h);
}

void hosts_recover(const hosts *h) {
    hosts_open_fences(h);
    hosts_mend_log(h);
}

void hosts_leave(hosts *h, uint64_t nonce) {
    hosts_unlock(h);
    clear_pins(h);
    GUARD_BEGIN(fault) { /* else it looks as if it had died: its operator says that it is off */
        hosts_keep_name(h, nonce, h->epoch, HOST_LEFT);
    } GUARD_END(fault, hosts_lost(h, &fault))
}
