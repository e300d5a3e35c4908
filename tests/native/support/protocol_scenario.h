/* The whole protocol between hosts, by the production functions alone: members of a pool claim
 * extents and give them back, publish, follow each other's logs, pin and read in place, free and
 * write again; they die, recover, are fenced, come back. What must hold is in protocol_oracle.h;
 * test_protocol_incoherent.c kills and pauses.
 *
 * A member is a host; what all its processes know is in `member`, and `process` is one of them, an
 * actor. They take turns by the two locks of a host, as those of a pool do: with the claims alone
 * one of them queues, looks and claims while the others go on with all else; and to copy and
 * acquire with none. */
#pragma once
#include "coherence/claims.h"
#include "coherence/fences.h"
#include "coherence/host_log.h"
#include "coherence/hosts.h"
#include "coherence/hosts_lock.h"
#include "coherence/lost_lines.h"
#include "coherence/membership.h"
#include "protocol_oracle.h"

enum page_state { NOT_OURS, FREE, WRITING, SEALED, FREEING };
/* Where a process is, so that it can be killed or paused just there. */
enum phase { IDLE, COPYING, LOCKING, INSIDE, CLAIMING, FENCING, ATTACHING, HOLDING, APPENDING,
             HANDING_OVER, NAMING, PHASES };

typedef struct process process;
typedef struct member {
    protocol *p;
    hosts h;
    uint64_t nonce, beats, log_next;
    uint64_t *turn;              /* the host's lock, */
    process *holder, *last;      /* who holds it, and who held it last */
    process *claimer;            /* who has the claims, maybe without the lock */
    bool attached, recovers, knows, gives; /* gives: next, what a process has died over */
    bool may_be_off;             /* dead, its caches lost: its operator may say so */
    bool mine[EXTENTS_MAX], takes[EXTENTS_MAX];
    bool returns;                /* its own extents are taken in as a host's that has died */
    bool arrived;                /* in this life */
    uint64_t generation[PAGES_MAX];
    enum page_state state[PAGES_MAX];
    process *worker[PAGES_MAX];  /* who writes or frees it */
    uint32_t pins[PAGES_MAX];    /* how many processes read it */
    uint64_t known[PAGES_MAX];   /* generations that others are known to have published */
    log_place log_at[MEMBERS_MAX];
    uint64_t beats_seen[MEMBERS_MAX], beat_step[MEMBERS_MAX], look_step;
} member;

struct process {
    member *m;
    int actor;
    uint32_t rounds;
    enum phase phase;
    bool dead, slow;             /* slow: it never unpins while there is something else to do */
    uint32_t held[BATCH], held_count; /* pinned */
    uint32_t accepted;           /* a bit for each that is read in place */
    uint64_t dice;
};

static inline uint64_t step_now(const member *m) { return incoherent_step_count(m->p->sim); }
static inline void count(member *m, uint64_t *kind) {
    ++*kind;
    m->p->counts.operations++;
}

/* ---- beats: a member is silent when we have watched it for a lease and it did not beat ---- */

static inline void beat_and_look(member *m) {
    uint64_t beats[HOSTS_MAX], wanted[HOSTS_MAX], now = step_now(m);
    bool watched = now - m->look_step < m->p->lease_steps / 2;
    hosts_beat(&m->h, ++m->beats, 0);
    hosts_look_beats(&m->h, beats, wanted);
    for (uint32_t host = 0; host < m->p->members; host++)
        if (beats[host] != m->beats_seen[host] || !watched) {
            m->beats_seen[host] = beats[host];
            m->beat_step[host] = now;
        }
    m->look_step = now;
}

static inline bool turn_is_free(const member *m) {
    return (!m->last || m->last->dead || !flush_load_word(m->turn)) &&
           (!m->holder || m->holder->dead); /* in this order: others run while it loads */
}
static inline void turn_begin(process *a);
static inline void turn_end(process *a);
static inline process *process_now(member *m);

/* Whoever has the claims and not the lock takes it for a beat, if it is free. */
static inline void member_pause(void *context) {
    member *m = context;
    process *a = process_now(m);
    incoherent_yield();
    if (m->holder == a) {
        beat_and_look(m);
    } else if (turn_is_free(m)) {
        turn_begin(a);
        beat_and_look(m);
        turn_end(a);
    }
}

/* Round a fence: one process of a host makes one at a time, with the lock. */
static inline bool member_fencing(void *context, bool begins) {
    process *a = process_now(context);
    if (begins) turn_begin(a);
    else turn_end(a);
    return true;
}

static inline bool member_silent(void *context, uint32_t host) {
    member *m = context;
    bool silent = step_now(m) - m->beat_step[host] > m->p->lease_steps;
    process *a = process_now(m);
    if (silent && a->phase == LOCKING) a->phase = FENCING;
    return silent;
}

/* ---- a page of ours ---- */

static inline void free_pages(member *m, process *by, const uint32_t *pages, uint32_t pages_count) {
    uint8_t lines[PAGES_MAX][FLUSH_LINE_BYTES];
    publish_item items[PAGES_MAX] = {0};
    for (uint32_t i = 0; i < pages_count; i++) {
        uint32_t page = pages[i];
        struct page_truth *t = &m->p->page[page];
        if (t->freed < m->generation[page]) t->freed = m->generation[page];
        descriptor_fill(page, m->generation[page] + 1, PAGE_FREE, lines[i]);
        items[i].descriptor_line = page_descriptor(m->p, page);
        items[i].descriptor = lines[i];
        protocol_note(m->p, "frees", m->h.self, page, m->generation[page]);
        m->state[page] = FREEING;
        m->worker[page] = by;
    }
    visibility_free(items, pages_count, m->h.mode);
    for (uint32_t i = 0; i < pages_count; i++) {
        m->generation[pages[i]]++;
        m->state[pages[i]] = FREE;
    }
}

/* An extent that has become ours: what its descriptors say. */
static inline void take_in(process *a, uint32_t extent) {
    member *m = a->m;
    protocol *p = m->p;
    uint32_t damaged[EACH_MAX], damaged_count = 0;
    hosts_hand_over(extent_at(p, extent), (uint64_t)extent_lines(p) * FLUSH_LINE_BYTES, false);
    for (uint32_t page = extent * p->each; page < (extent + 1) * p->each; page++) {
        uint8_t line[FLUSH_LINE_BYTES], wanted[FLUSH_LINE_BYTES];
        uint64_t version;
        flush_copy_out(line, page_descriptor(p, page), sizeof(line));
        memcpy(&version, line, sizeof(version));
        m->generation[page] = version >> 8;
        m->state[page] = (version & 0xff) == PAGE_SEALED ? SEALED : FREE;
        descriptor_fill(page, version >> 8, version & 0xff, wanted);
        bool whole = memcmp(line, wanted, sizeof(line)) == 0;
        if (truth_stands(p, page, p->page[page].published) &&
            (!whole || version != (p->page[page].published << 8 | PAGE_SEALED)))
            page_fails(p, "a record was lost with its extent", m->h.self, page, version >> 8);
        if (m->state[page] == SEALED && whole) continue;
        if (!whole || m->returns) damaged[damaged_count++] = page;
    }
    if (damaged_count) free_pages(m, a, damaged, damaged_count);
    m->mine[extent] = true;
    m->takes[extent] = false;
}

/* ---- the host's lock, and what a process that died left ---- */

static inline void unpin(member *m, const uint32_t *pages, uint32_t pages_count) {
    pin_item items[BATCH];
    uint32_t n = 0;
    for (uint32_t i = 0; i < pages_count; i++)
        if (--m->pins[pages[i]] == 0)
            items[n++] = (pin_item){hosts_pin_word(&m->h, m->h.self, pages[i]),
                                    1ull << pages[i] % 64};
    if (n) visibility_unpin(items, n, m->h.mode);
}

static inline void recover(process *a, process *all, uint32_t all_count) {
    member *m = a->m;
    m->p->counts.recoveries++;
    protocol_note(m->p, "recovers", m->h.self, 0, 0);
    if (m->attached) hosts_recover(&m->h); /* and no claims: who has them may be alive */
    m->log_next = hosts_log_end(&m->h, m->h.self);
    for (uint32_t i = 0; i < all_count; i++) {
        process *dead = &all[i];
        if (dead->m != m || !dead->dead) continue;
        unpin(m, dead->held, dead->held_count);
        dead->held_count = 0;
        for (uint32_t page = 0; page < m->p->area.page_count; page++)
            if ((m->state[page] == WRITING || m->state[page] == FREEING) &&
                m->worker[page] == dead)
                free_pages(m, a, &page, 1);
    }
    pin_item none = {.word = hosts_pin_word(&m->h, m->h.self, 0)}; /* it may have died over one */
    for (uint32_t page = 0; page < m->p->area.page_count; page++)
        if (!m->pins[page]) none.bits |= 1ull << page;
    visibility_unpin(&none, 1, m->h.mode);
    m->recovers = false;
}

/* Without waiting: the claims, if nobody has them. What their holder died over never was. */
static inline bool claims_begin(process *a) {
    member *m = a->m;
    if (m->claimer && !m->claimer->dead) return false;
    bool died = m->claimer != NULL;
    m->claimer = a;
    if (!died) return true;
    protocol_note(m->p, "recovers claims", m->h.self, 0, 0);
    m->p->member[m->h.self].inside = false;
    if (m->attached) hosts_recover_claims(&m->h);
    m->gives = random_below(&a->dice, 2);
    return true;
}

static inline void claims_end(process *a) { a->m->claimer = NULL; }

extern process *processes; /* of this run */
extern uint32_t process_count;

/* A mutex in the host's own memory: taking it is a load that acquires, leaving it a store that
 * releases. Who died in it, or over leaving it, does not hold it. */
static inline void turn_begin(process *a) {
    member *m = a->m;
    while (!turn_is_free(m)) incoherent_yield();
    m->holder = m->last = a;
    flush_store_word(m->turn, 1);
    if (m->recovers) recover(a, processes, process_count);
}

static inline void turn_end(process *a) {
    flush_store_word(a->m->turn, 0);
    a->m->holder = NULL;
}

static inline process *process_now(member *m) {
    int actor = incoherent_running(m->p->sim);
    for (uint32_t i = 0; i < process_count; i++)
        if (processes[i].actor == actor) return &processes[i];
    return NULL;
}

/* ---- what stands in the pool ---- */

static inline void look_at_descriptors(member *m) {
    const void *words[PAGES_MAX];
    uint64_t values[PAGES_MAX];
    for (uint32_t page = 0; page < m->p->area.page_count; page++)
        words[page] = page_descriptor(m->p, page);
    visibility_look(words, m->p->area.page_count, values, m->h.mode);
    for (uint32_t page = 0; page < m->p->area.page_count; page++)
        if ((values[page] & 0xff) == PAGE_SEALED && values[page] >> 8 > m->known[page])
            m->known[page] = values[page] >> 8;
}

/* Whoever knows nothing yet: first the ends of the logs, then what stands. */
static inline void look_at_all(member *m) {
    for (uint32_t host = 0; host < m->p->members; host++)
        m->log_at[host] = (log_place){.next = hosts_log_end(&m->h, host)};
    look_at_descriptors(m);
    m->knows = true;
}

/* ---- attach and leave ---- */

static inline void fell_out(member *m) {
    protocol_note(m->p, "was fenced", m->h.self, m->h.epoch, 0);
    m->attached = false;
    m->p->counts.fenced++;
}

/* Whoever comes back waits until it is decided what of its epoch counts: with the claims alone. */
static inline int come_back(process *a) {
    member *m = a->m;
    hosts turn = m->h;
    host_fence fence;
    turn_end(a);
    int code = hosts_fence_of(&turn, turn.self, turn.epoch, &fence);
    turn_begin(a);
    if (code == 0 && fence.fenced) code = hosts_return(&turn, m->nonce, &fence);
    m->h.epoch = turn.epoch;
    return code;
}

static inline void attached(member *m) {
    struct member_truth *t = &m->p->member[m->h.self];
    m->p->counts.returns += t->epoch != 0;
    t->epoch = m->h.epoch;
    t->nonce = m->nonce;
    m->log_next = hosts_log_end(&m->h, m->h.self);
    uint64_t pins;
    incoherent_peek(m->p->sim, hosts_pin_word(&m->h, m->h.self, 0), sizeof(pins), &pins);
    if (!m->knows && pins) protocol_fail(m->p, "a dead host's pins stay", m->h.self, pins, 0);
    if (!m->knows) look_at_all(m);
    protocol_note(m->p, "attached, epoch, nonce", m->h.self, m->h.epoch, m->nonce);
    m->attached = m->arrived = true;
}

static inline void attach(process *a) {
    member *m = a->m;
    if (!claims_begin(a)) return;
    a->phase = ATTACHING;
    m->p->member[m->h.self].inside = false;
    beat_and_look(m);
    int code = m->arrived ? come_back(a) : hosts_attach(&m->h, m->nonce);
    if (code == -CXLKV_E_TIMEOUT) {
        m->p->counts.undecided++;
        incoherent_yield();
    } else if (code != 0) {
        protocol_fail(m->p, "cannot attach", m->h.self, (uint64_t)-code, m->nonce);
    } else {
        attached(m);
    }
    claims_end(a);
}

static inline bool is_busy(const member *m, uint32_t extent) {
    for (uint32_t page = extent * m->p->each; page < (extent + 1) * m->p->each; page++)
        if (m->state[page] == WRITING || m->state[page] == FREEING) return true;
    return false;
}

static inline void let_go(member *m, uint32_t extent) {
    m->mine[extent] = false;
    for (uint32_t page = extent * m->p->each; page < (extent + 1) * m->p->each; page++) {
        if (m->state[page] == SEALED) m->known[page] = m->generation[page];
        m->state[page] = NOT_OURS;
    }
    hosts_hand_over(extent_at(m->p, extent), (uint64_t)extent_lines(m->p) * FLUSH_LINE_BYTES,
                    true);
}

/* All that we own may then be taken; the host comes back another time. */
static inline void leave(process *a) {
    member *m = a->m;
    for (uint32_t x = 0; x < m->p->area.extent_count; x++)
        if (is_busy(m, x)) return;
    for (uint32_t page = 0; page < m->p->area.page_count; page++)
        if (m->pins[page]) return;
    if (!claims_begin(a)) return;
    a->phase = HANDING_OVER;
    for (uint32_t x = 0; x < m->p->area.extent_count; x++)
        if (m->mine[x]) let_go(m, x);
    m->p->member[m->h.self].gone = true;
    m->attached = m->arrived = false;
    hosts_leave(&m->h, m->nonce);
    m->nonce++;
    claims_end(a);
    protocol_note(m->p, "left in epoch", m->h.self, m->h.epoch, 0);
}

/* ---- extents, under the lock between hosts ---- */

/* With the lock: which to take, or to give, and then no more use. */
static inline uint32_t choose_some(process *a, const extent_owner *owners, bool ours, bool counts,
                                   uint32_t list[2]) {
    member *m = a->m;
    protocol *p = m->p;
    uint32_t n = 0, wanted = 1 + random_below(&a->dice, 2);
    uint32_t first = random_below(&a->dice, p->area.extent_count);
    for (uint32_t i = 0; i < p->area.extent_count && n < wanted; i++) {
        uint32_t x = (first + i) % p->area.extent_count;
        bool takeable = owners[x].takeable && owners[x].host != m->h.self;
        if (ours ? takeable : m->mine[x] && !is_busy(m, x)) list[n++] = x;
    }
    a->phase = HANDING_OVER;
    for (uint32_t i = 0; i < n; i++) {
        if (!ours) let_go(m, list[i]);
        if (counts) truth_claims(p, m->h.self, list[i], ours);
    }
    return n;
}

/* With the claims alone. */
static inline int change_owner(process *a, const hosts *turn, const extent_owner *owners,
                               const uint32_t *list, uint32_t n, bool ours) {
    member *m = a->m;
    protocol *p = m->p;
    if (!n) return 0;
    a->phase = CLAIMING;
    int code = hosts_claim(turn, owners, n, list, ours);
    for (uint32_t i = 0; i < n; i++) {
        truth_claimed(p, m->h.self, list[i], ours, code);
        if (code == 0 && ours) m->takes[list[i]] = true;
    }
    count(m, ours ? &p->counts.takes : &p->counts.gives);
    return code;
}

/* What the owners say of ours: what an earlier process claimed, or this host before it died. */
static inline void adopt(member *m, const extent_owner *owners, bool counts) {
    for (uint32_t x = 0; x < m->p->area.extent_count; x++) {
        bool ours = owners[x].host == m->h.self;
        if (m->mine[x] && !ours)
            extent_fails(m->p, "an extent of ours is another's", m->h.self, x, owners[x].host);
        m->takes[x] = ours && !m->mine[x] && (counts || m->p->extent[x].owner == m->h.self);
        if (m->takes[x]) protocol_note(m->p, "adopts", m->h.self, x, owners[x].version);
        m->p->counts.adopted += m->takes[x];
    }
}

/* Between the locks of the hosts: with the claims, and with this host's lock where what it shares
 * is changed. */
static inline int inside(process *a, const hosts *turn) {
    member *m = a->m;
    protocol *p = m->p;
    extent_owner owners[EXTENTS_MAX];
    uint32_t list[2], n = 0;
    a->phase = INSIDE;
    truth_enters(p, turn);
    int code = hosts_owners(turn, owners);
    bool counts = code == 0 && truth_owners(p, turn, owners);
    bool zombie = code == 0 && !counts && !p->member[turn->self].gone &&
                  is_fenced(p, turn->self, turn->epoch, FENCE_CUT);
    bool gives = counts && m->gives;
    uint32_t what = gives ? 1 : random_below(&a->dice, 4);
    turn_begin(a);
    if (counts || zombie) adopt(m, owners, counts);
    m->gives = m->gives && !counts;
    /* A host that is fenced goes on, as it does not know. */
    if (what && (counts || zombie)) n = choose_some(a, owners, what > 1, counts, list);
    turn_end(a);
    if (n) code = change_owner(a, turn, owners, list, n, what > 1);
    if (n && code == 0) {
        log_record record = {.operation = LOG_FORGET, .page = list[0] * p->each};
        turn_begin(a);
        hosts_log(&m->h, m->log_next++, &record, 1);
        turn_end(a);
    }
    p->member[turn->self].inside = false;
    return code;
}

static inline void round_extents(process *a) {
    member *m = a->m;
    protocol *p = m->p;
    if (!claims_begin(a)) return;
    const hosts turn = m->h;
    beat_and_look(m);
    turn_end(a);
    a->phase = LOCKING;
    int code = hosts_lock(&turn);
    count(m, &p->counts.locks);
    if (code == 0) {
        code = inside(a, &turn);
        bool tells = code != -CXLKV_E_FENCED || random_below(&a->dice, 2);
        if (!tells) code = 1; /* as if it died now: nobody here knows */
        if (code != -CXLKV_E_FENCED) hosts_unlock(&turn);
    }
    turn_begin(a);
    a->phase = HANDING_OVER;
    for (uint32_t x = 0; x < p->area.extent_count; x++)
        if (m->takes[x]) take_in(a, x);
    m->returns = m->returns && code != 0;
    if (code == -CXLKV_E_FENCED) fell_out(m);
    else if (code == -CXLKV_E_TIMEOUT) p->counts.undecided++;
    else if (code < 0) protocol_fail(p, "lock, owners or claim", m->h.self, (uint64_t)-code, 0);
    claims_end(a);
}

/* ---- publish and free ---- */

static inline void append(member *m, uint32_t operation, const uint32_t *pages, uint32_t n) {
    log_record records[BATCH];
    for (uint32_t i = 0; i < n; i++) {
        uint64_t generation = m->generation[pages[i]] - (operation == LOG_FREE);
        records[i] = (log_record){.operation = operation, .page = pages[i],
                                  .generation = generation};
        record_fill(pages[i], generation * 8 + operation, 3, records[i].hash, 16);
    }
    uint64_t first = m->log_next;
    hosts_log(&m->h, first, records, n);
    m->log_next = first + n;
    protocol_note(m->p, operation == LOG_FREE ? "logged frees" : "logged publishes", m->h.self,
                  pages[0], first);
    count(m, &m->p->counts.appends);
}

static inline bool is_off(member *m, uint32_t host) {
    host_name name;
    host_fence fence;
    const struct member_truth *t = &m->p->member[host];
    if (!hosts_name(&m->h, host, &name)) {
        protocol_fail(m->p, "a name is damaged", m->h.self, host, 0);
        return false;
    }
    if (name.epoch && name.epoch == t->epoch && name.nonce != t->nonce)
        protocol_fail(m->p, "a name is torn", m->h.self, host, name.nonce);
    return hosts_fence_of(&m->h, host, name.epoch, &fence) == 0 && fence.off;
}

/* Pages of ours that may be written: free, and nobody has them pinned any more. */
static inline uint32_t find_free(process *a, uint32_t *pages) {
    member *m = a->m;
    uint32_t n = 0, wanted = 1 + random_below(&a->dice, BATCH);
    uint32_t first = random_below(&a->dice, m->p->area.page_count);
    for (uint32_t i = 0; i < m->p->area.page_count && n < wanted; i++) {
        uint32_t page = (first + i) % m->p->area.page_count;
        if (!m->mine[page / m->p->each] || m->state[page] != FREE) continue;
        const void *words[MEMBERS_MAX];
        uint64_t values[MEMBERS_MAX];
        for (uint32_t host = 0; host < m->p->members; host++)
            words[host] = hosts_pin_word(&m->h, host, page);
        visibility_look(words, m->p->members, values, m->h.mode);
        bool pinned = false;
        for (uint32_t host = 0; host < m->p->members; host++)
            pinned |= (values[host] >> page % 64 & 1) && !is_off(m, host);
        m->p->counts.pinned += pinned;
        if (pinned) continue;
        m->state[page] = WRITING;
        m->worker[page] = a;
        pages[n++] = page;
    }
    return n;
}

static inline void copy_pages(process *a, const uint32_t *pages, uint32_t n) {
    member *m = a->m;
    uint32_t epoch = m->h.epoch;
    bool before = is_fenced(m->p, m->h.self, epoch, FENCE_CUT);
    a->phase = COPYING;
    for (uint32_t i = 0; i < n; i++) {
        uint8_t payload[PAYLOAD_LINES_MAX * FLUSH_LINE_BYTES];
        protocol_note(m->p, "writes", m->h.self, pages[i], m->generation[pages[i]]);
        truth_writes(m->p, m->h.self, pages[i]);
        record_fill(pages[i], m->generation[pages[i]], 0, payload, payload_bytes(m->p));
        flush_copy_in(page_payload(m->p, pages[i]), payload, payload_bytes(m->p));
        truth_writes(m->p, m->h.self, pages[i]);
    }
    m->p->counts.fenced_copies += !before && is_fenced(m->p, m->h.self, epoch, FENCE_CUT);
}

static inline void round_publish(process *a) {
    member *m = a->m;
    uint32_t pages[BATCH], n = find_free(a, pages);
    uint8_t headers[BATCH][FLUSH_LINE_BYTES], lines[BATCH][FLUSH_LINE_BYTES];
    publish_item items[BATCH];
    if (!n) return;
    turn_end(a);
    copy_pages(a, pages, n);
    for (uint32_t i = 0; i < n; i++) {
        record_fill(pages[i], m->generation[pages[i]], 1, headers[i], FLUSH_LINE_BYTES);
        descriptor_fill(pages[i], m->generation[pages[i]], PAGE_SEALED, lines[i]);
        items[i] = (publish_item){page_header(m->p, pages[i]), headers[i],
                                  page_descriptor(m->p, pages[i]), lines[i]};
    }
    bool gives_up = random_below(&a->dice, 8) == 0;
    /* Else its copies could still be under way when another process writes the page. */
    if (gives_up) store_fence();
    else visibility_publish(items, n, m->h.mode);
    incoherent_tell();
    for (uint32_t i = 0; i < n && !gives_up; i++)
        m->p->page[pages[i]].published = m->generation[pages[i]];
    turn_begin(a);
    for (uint32_t i = 0; i < n; i++) m->state[pages[i]] = gives_up ? FREE : SEALED;
    if (gives_up) return;
    count(m, &m->p->counts.publishes);
    a->phase = n > 1 ? APPENDING : IDLE; /* of one record there is nothing to lose */
    append(m, LOG_PUBLISH, pages, n);
    incoherent_tell();
    for (uint32_t i = 0; i < n; i++) m->p->page[pages[i]].logged = m->generation[pages[i]];
}

static inline void round_free(process *a) {
    member *m = a->m;
    uint32_t pages[BATCH], n = 0, wanted = 1 + random_below(&a->dice, BATCH);
    uint32_t first = random_below(&a->dice, m->p->area.page_count);
    for (uint32_t i = 0; i < m->p->area.page_count && n < wanted; i++) {
        uint32_t page = (first + i) % m->p->area.page_count;
        if (m->mine[page / m->p->each] && m->state[page] == SEALED) pages[n++] = page;
    }
    if (!n) return;
    free_pages(m, a, pages, n);
    count(m, &m->p->counts.frees);
    a->phase = n > 1 ? APPENDING : IDLE;
    append(m, LOG_FREE, pages, n);
}

/* A page of ours is read as it is: no other host writes it, and its lines went when we took it. */
static inline void round_read_own(process *a) {
    member *m = a->m;
    uint32_t first = random_below(&a->dice, m->p->area.page_count);
    for (uint32_t i = 0; i < m->p->area.page_count; i++) {
        uint32_t page = (first + i) % m->p->area.page_count;
        uint8_t payload[PAYLOAD_LINES_MAX * FLUSH_LINE_BYTES], header[FLUSH_LINE_BYTES];
        if (!m->mine[page / m->p->each] || m->state[page] != SEALED) continue;
        flush_copy_out(payload, page_payload(m->p, page), payload_bytes(m->p));
        flush_copy_out(header, page_header(m->p, page), sizeof(header));
        if (!record_is(page, m->generation[page], 0, payload, payload_bytes(m->p)) ||
            !record_is(page, m->generation[page], 1, header, sizeof(header)))
            page_fails(m->p, "an own record is another", m->h.self, page, m->generation[page]);
        return;
    }
}

/* ---- what others have published ---- */

static inline void learn(member *m, uint32_t host, const log_record *record) {
    uint64_t hash[2];
    if (record->operation == LOG_FORGET) return;
    record_fill(record->page, record->generation * 8 + record->operation, 3, hash, 16);
    if (memcmp(hash, record->hash, 16) != 0)
        protocol_fail_about(m->p, LOGS, "a log record is torn", m->h.self, host,
                            record->sequence);
    uint64_t *known = &m->known[record->page];
    if (record->operation == LOG_PUBLISH && record->generation > *known)
        *known = record->generation;
    if (record->operation == LOG_FREE && record->generation == *known) *known = 0;
}

/* All logs to their ends: whatever was appended before is known then, until it is freed. */
static inline void round_follow(process *a) {
    member *m = a->m;
    uint64_t logged[PAGES_MAX];
    bool ended = true;
    for (uint32_t page = 0; page < m->p->area.page_count; page++)
        logged[page] = m->p->page[page].logged;
    const log_place *places[MEMBERS_MAX];
    for (uint32_t host = 0; host < m->p->members; host++) places[host] = &m->log_at[host];
    uint64_t moved = random_below(&a->dice, 2) ? ~0ull : hosts_logs_moved(&m->h, places);
    for (uint32_t host = 0; host < m->p->members; host++) {
        log_record records[LOG_BATCH];
        int n = moved >> host & 1;
        for (int batch = 0; host != m->h.self && n > 0 && batch < 16; batch++) {
            n = hosts_read_log(&m->h, host, &m->log_at[host], records);
            count(m, &m->p->counts.reads);
            for (int i = 0; i < n; i++) learn(m, host, &records[i]);
            if (n >= 0) continue;
            m->p->counts.laps += n == -CXLKV_E_STALE;
            hosts_skip_log(&m->h, host, &m->log_at[host]);
            protocol_note(m->p, "was lapped by, goes on at", m->h.self, host,
                          m->log_at[host].next);
            look_at_descriptors(m);
        }
        ended &= n <= 0 || host == m->h.self;
    }
    for (uint32_t page = 0; ended && page < m->p->area.page_count; page++)
        if (logged[page] && !m->mine[page / m->p->each] && m->known[page] < logged[page] &&
            truth_stands(m->p, page, logged[page]))
            protocol_fail_about(m->p, LOGS, "a published record is not known", m->h.self, page,
                                logged[page]);
}

typedef struct copies {
    uint8_t payload[BATCH][PAYLOAD_LINES_MAX * FLUSH_LINE_BYTES], header[BATCH][FLUSH_LINE_BYTES];
    visible_range ranges[BATCH][2];
    acquire_item items[BATCH];
    uint64_t wanted[BATCH];
    bool must[BATCH], guessed[BATCH];
} copies;

/* Chooses and pins; the host's lock is held. */
static inline uint32_t pin_some(process *a, copies *c) {
    member *m = a->m;
    pin_item pins[BATCH];
    uint32_t n = 0, pin_count = 0, wanted = 1 + random_below(&a->dice, BATCH);
    uint32_t first = random_below(&a->dice, m->p->area.page_count);
    for (uint32_t i = 0; i < m->p->area.page_count && n < wanted; i++) {
        uint32_t page = (first + i) % m->p->area.page_count;
        uint64_t generation = m->known[page];
        bool guessed = random_below(&a->dice, 8) == 0;
        if (guessed) generation = m->p->page[page].published + random_below(&a->dice, 2);
        if (!generation || m->mine[page / m->p->each]) continue;
        a->held[n] = page;
        c->guessed[n] = guessed;
        c->wanted[n] = generation;
        c->must[n] = truth_stands(m->p, page, generation);
        c->ranges[n][0] = (visible_range){page_header(m->p, page), c->header[n], FLUSH_LINE_BYTES};
        c->ranges[n][1] = (visible_range){page_payload(m->p, page), c->payload[n],
                                          payload_bytes(m->p)};
        c->items[n] = (acquire_item){.descriptor_line = page_descriptor(m->p, page),
                                     .version = generation << 8 | PAGE_SEALED,
                                     .ranges = c->ranges[n], .range_count = 2};
        if (m->pins[page]++ == 0)
            pins[pin_count++] = (pin_item){hosts_pin_word(&m->h, m->h.self, page),
                                           1ull << page % 64};
        a->held_count = ++n;
    }
    if (pin_count) visibility_pin(pins, pin_count, m->h.mode);
    return n;
}

static inline void check_held(process *a, const copies *c, uint32_t i, const char *what) {
    protocol *p = a->m->p;
    if (!record_is(a->held[i], c->wanted[i], 0, c->payload[i], payload_bytes(p)) ||
        !record_is(a->held[i], c->wanted[i], 1, c->header[i], FLUSH_LINE_BYTES))
        page_fails(p, what, a->m->h.self, a->held[i], c->wanted[i]);
}

/* Reads what was accepted in place, for a while; then it is not held any more. */
static inline void hold(process *a, copies *c, uint32_t n) {
    member *m = a->m;
    uint32_t looks = a->slow ? 24 : 1 + random_below(&a->dice, 3);
    a->phase = HOLDING;
    for (uint32_t look = 0; look < looks && !m->p->failed; look++)
        for (uint32_t i = 0; i < n; i++) {
            if (c->items[i].code != 0) continue;
            incoherent_yield();
            flush_copy_out(c->header[i], page_header(m->p, a->held[i]), FLUSH_LINE_BYTES);
            flush_copy_out(c->payload[i], page_payload(m->p, a->held[i]), payload_bytes(m->p));
            check_held(a, c, i, "changed while it was pinned");
        }
}

static inline void holds_no_more(process *a) {
    for (uint32_t i = 0; i < BATCH; i++)
        if (a->accepted >> i & 1) a->m->p->page[a->held[i]].holds[a->m->h.self]--;
    a->accepted = 0;
}

static inline void round_match(process *a) {
    member *m = a->m;
    static copies all[INCOHERENT_ACTORS_MAX];
    copies *c = &all[a->actor];
    uint32_t n = pin_some(a, c);
    if (!n) return;
    turn_end(a);
    a->phase = IDLE;
    visibility_acquire(c->items, n, m->h.mode);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = a->held[i];
        uint8_t wanted[FLUSH_LINE_BYTES];
        count(m, &m->p->counts.acquires);
        if (c->items[i].code != 0) {
            if (c->must[i] && truth_stands(m->p, page, c->wanted[i]))
                page_fails(m->p, "a published record is lost", m->h.self, page, c->wanted[i]);
            continue;
        }
        m->p->page[page].holds[m->h.self]++;
        a->accepted |= 1u << i;
        descriptor_fill(page, c->wanted[i], PAGE_SEALED, wanted);
        if (memcmp(wanted, c->items[i].descriptor, sizeof(wanted)) != 0)
            page_fails(m->p, "a descriptor is torn", m->h.self, page, c->wanted[i]);
        check_held(a, c, i, "stale or torn");
    }
    hold(a, c, n);
    holds_no_more(a);
    turn_begin(a);
    for (uint32_t i = 0; i < n; i++)
        if (c->items[i].code != 0 && !c->guessed[i] && m->known[a->held[i]] == c->wanted[i])
            m->known[a->held[i]] = 0;
    n = a->held_count;
    a->held_count = 0;
    unpin(m, a->held, n);
}

/* A host that is silent is fenced, by an operator or whoever waits for it; of one that is dead, and
 * whose caches are lost, its operator says that it is off. */
static inline void round_fence(process *a, const member *others) {
    member *m = a->m;
    host_name name;
    beat_and_look(m);
    a->phase = FENCING;
    uint32_t first = random_below(&a->dice, m->p->members);
    for (uint32_t i = 0; i < m->p->members; i++) {
        uint32_t host = (first + i) % m->p->members;
        const member *other = &others[host];
        if (host == m->h.self || !(other->may_be_off || member_silent(m, host))) continue;
        if (!hosts_name(&m->h, host, &name) || name.status != HOST_LIVE) continue;
        bool off = other->may_be_off;
        if (off) m->p->member[host].gone = true;
        int code = hosts_fence(&m->h, host, name.epoch, off);
        m->p->counts.offs += off && code == 0;
        if (code != 0 && code != -EAGAIN)
            protocol_fail(m->p, "cannot fence", m->h.self, host, (uint64_t)-code);
        return;
    }
}

extern member all_members[MEMBERS_MAX];

static inline void round_of(process *a) {
    member *m = a->m;
    bool owns = false;
    for (uint32_t x = 0; x < m->p->area.extent_count; x++) owns |= m->mine[x];
    uint32_t what = random_below(&a->dice, 32);
    if (!m->attached) attach(a);
    else if (m->returns && random_below(&a->dice, 2)) round_match(a); /* before it owns anything */
    else if (m->gives || what < (owns ? 5 : 14)) round_extents(a);
    else if (what < 15) round_publish(a);
    else if (what < 19) round_free(a);
    else if (what < 22) round_follow(a);
    else if (what < 28) round_match(a);
    else if (what < 29) round_read_own(a);
    else if (what < 31) round_fence(a, all_members);
    else if (random_below(&a->dice, 4) == 0) leave(a);
    else beat_and_look(m);
}

static inline void process_run(void *context) {
    process *a = context;
    while (a->rounds && !a->m->p->failed) {
        a->rounds--;
        turn_begin(a);
        round_of(a);
        turn_end(a);
        a->phase = IDLE;
        incoherent_yield();
    }
}
