/* The lock between hosts: Lamport's bakery (1974), a slot for each host, no atomic between them.
 *
 * First come, first served once the ticket is drawn. The slot of a fenced epoch reads as 0, which
 * is the failure that the algorithm allows. */
#include "base/error.h"
#include "base/guard.h"
#include "coherence/fences.h"
#include "coherence/host_lines.h"
#include "coherence/hosts.h"
#include "coherence/hosts_lock.h"
#include "coherence/lost_lines.h"

static void put_slot(const hosts *h, bool chooses, uint64_t ticket) {
    uint64_t *word = (uint64_t *)hosts_line(h, h->self, LOCK_LINE);
    flush_store_word(word, SLOT_WORD(h->epoch, chooses, ticket));
    line_keep(h, FLUSH_SLOT, word, sizeof(*word));
}

static int set_slot(const hosts *h, bool chooses, uint64_t ticket) {
    return GUARDED((put_slot(h, chooses, ticket), 0), hosts_lost(h, &fault));
}

static uint64_t largest_ticket(const hosts *h) {
    const void *lines[HOSTS_MAX];
    uint64_t words[HOSTS_MAX], largest = 0;
    for (uint32_t host = 0; host < h->area.host_count; host++)
        lines[host] = hosts_line(h, host, LOCK_LINE);
    line_look(h, FLUSH_SLOT_LOOK_BEGIN, lines, h->area.host_count, 1);
    words_try(h, lines, h->area.host_count, words); /* whom we cannot read we wait for below */
    for (uint32_t host = 0; host < h->area.host_count; host++) {
        uint64_t ticket = SLOT_TICKET(words[host]);
        if (host != h->self && ticket > largest) largest = ticket;
    }
    return largest;
}

/* Who never was, or left, has no place in the queue, whatever became of its lines. */
static int is_unread(const hosts *h, uint32_t host) {
    host_name name;
    if (hosts_name(h, host, &name) && name.status != HOST_LIVE) return 0;
    return fail(CXLKV_E_POISON,
                "bus error in the lines of host %u (poisoned, or the file was cut): nobody can "
                "tell whether it holds the lock between hosts, so no extent changes hands. Bring "
                "that memory back, or create the pool anew. `cxlkv pool check` says more", host);
}

/* 1: it stands before us; 0: not, or not any more; or an error. */
static int stands_before(const hosts *h, uint32_t host, uint64_t ticket, uint32_t *epoch) {
    const void *line = hosts_line(h, host, LOCK_LINE);
    line_look(h, FLUSH_SLOT_LOOK_BEGIN, &line, 1, 1);
    uint64_t word;
    if (!word_try(h, line, &word)) return is_unread(h, host);
    uint64_t theirs = SLOT_TICKET(word);
    *epoch = SLOT_EPOCH(word);
    if (SLOT_CHOOSES(word)) return 1;
    return theirs != 0 && (theirs < ticket || (theirs == ticket && host < h->self));
}

/* A fence of ours is one word for each host: one of us writes it at a time. */
static bool passes_over(const hosts *h, uint32_t host, uint32_t epoch) {
    if (!h->silent(h->context, host)) return false;
    if (h->fencing && !h->fencing(h->context, true)) return false;
    bool fenced = hosts_fence(h, host, epoch, false) == 0;
    if (h->fencing) h->fencing(h->context, false);
    return fenced;
}

static int wait_for(const hosts *h, uint32_t host, uint64_t ticket) {
    uint32_t epoch = 0;
    int code;
    while ((code = stands_before(h, host, ticket, &epoch)) > 0) {
        host_fence fence;
        code = hosts_fence_of(h, host, epoch, &fence);
        if (code < 0) return code;
        if (fence.fenced) return 0;
        if (passes_over(h, host, epoch)) return 0;
        code = hosts_fence_of(h, h->self, h->epoch, &fence);
        if (code < 0) return code;
        if (fence.fenced) return -CXLKV_E_FENCED;
        h->pause(h->context);
    }
    return code;
}

int hosts_lock(const hosts *h) {
    int code = set_slot(h, true, 0);
    uint64_t ticket = largest_ticket(h) + 1;
    if (code == 0) code = set_slot(h, false, ticket);
    for (uint32_t host = 0; code == 0 && host < h->area.host_count; host++)
        if (host != h->self) code = wait_for(h, host, ticket);
    if (code < 0) hosts_unlock(h);
    if (code == -CXLKV_E_FENCED)
        return fail(CXLKV_E_FENCED, "this host was silent for too long and was fenced by another");
    return code;
}

void hosts_unlock(const hosts *h) { set_slot(h, false, 0); }
