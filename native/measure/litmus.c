/* The litmus run: see litmus.h. Each round draws its places and ways from what both roles know. */
#include "measure/litmus.h"

#include <time.h>

#include "base/flush.h"

#define LABEL_MAGIC 0x54494c564b4c5843ull /* "CXLKVLIT" */
#define GAVE_UP UINT64_MAX
enum { LINE = FLUSH_LINE_BYTES, LINE_WORDS = LINE / 8 };
enum { MESSAGE_LINES = CXLKV_LITMUS_MESSAGE_BYTES / LINE, SPINS = 512, POLLS = 8 };
enum { NONCE, ECHO, STEP, FIELDS = 4 };      /* words of a control line; a field for odd and even */
enum { HANDED = 2 };                         /* the part of the lines that change hands */
enum { OF_GIVER = 1, OF_RECEIVER };          /* whose words stand in a line */

static uint64_t mix(uint64_t word) { /* splitmix64 */
    word += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

static uint32_t below(uint64_t *dice, uint32_t limit) {
    return (uint32_t)((*dice = mix(*dice)) % limit);
}

static uint64_t *line_at(const cxlkv_litmus *l, uint32_t region, uint32_t line) {
    return (uint64_t *)(l->regions[region] + (size_t)line * LINE);
}

static uint64_t *control_of(const cxlkv_litmus *l, uint32_t role) {
    return line_at(l, 0, LITMUS_CONTROL_LINES + role);
}

/* ---- how the roles find and await each other: mode strict ---- */

static void tell_all(const void *first, size_t bytes) {
    flush_evict(FLUSH_NONE, first, bytes);
    flush_fence_all(FLUSH_NONE);
}

static void tell(const void *line) { tell_all(line, LINE); }

static void look(const void *line) {
    flush_fence_all(FLUSH_NONE);
    tell(line);
}

void litmus_begin(cxlkv_litmus *l, uint64_t nonce) {
    uint64_t *own = control_of(l, l->role);
    l->nonce = nonce;
    flush_store_word(&own[ECHO], 0);
    flush_store_word(&own[STEP], 0);
    flush_store_word(&own[NONCE], nonce);
    for (uint32_t i = 0; l->role == 0 && i < l->region_count; i++) {
        const uint64_t label[LINE_WORDS] = {LABEL_MAGIC, nonce, i, l->region_count};
        flush_store_line(line_at(l, i, LITMUS_LABEL_LINE), label, 0);
        tell(line_at(l, i, LITMUS_LABEL_LINE));
    }
    tell(own);
}

void cxlkv_litmus_give_up(cxlkv_litmus *l) {
    flush_store_word(&control_of(l, l->role)[STEP], GAVE_UP);
    tell(control_of(l, l->role));
}

static int check_labels(cxlkv_litmus *l) {
    uint64_t label[LINE_WORDS];
    for (uint32_t i = 0; l->role == 1 && i < l->region_count; i++) {
        look(line_at(l, i, LITMUS_LABEL_LINE));
        flush_load_line(label, line_at(l, i, LITMUS_LABEL_LINE));
        if (label[0] == LABEL_MAGIC && label[1] == l->peer_nonce && label[2] == i &&
            label[3] == l->region_count)
            continue;
        cxlkv_litmus_give_up(l);
        return fail(CXLKV_E_ARGUMENT, "region %u is not the region %u of role a, or role a has "
                    "more of them: give both roles the same regions in the same order", i, i);
    }
    return 1;
}

/* A role that sees its own nonce echoed has a live peer, whatever an older run left. */
int cxlkv_litmus_meet(cxlkv_litmus *l) {
    uint64_t *own = control_of(l, l->role), *peer = control_of(l, !l->role);
    look(peer);
    uint64_t echo = flush_load_word(&peer[ECHO]); /* before the nonce, which it vouches for */
    uint64_t nonce = flush_load_word(&peer[NONCE]);
    if (nonce != l->peer_nonce) {
        l->peer_nonce = nonce;
        flush_store_word(&own[ECHO], nonce);
        tell(own);
    }
    if (nonce == 0 || echo != l->nonce) return 0;
    return check_labels(l);
}

static void arrive(cxlkv_litmus *l, uint64_t field) {
    uint64_t *own = control_of(l, l->role);
    l->step++;
    flush_store_word(&own[FIELDS + l->step % 2], field);
    flush_store_word(&own[STEP], l->step);
    tell(own);
}

/* 1: the other role has arrived `step` times; 0: not yet. */
static int has_arrived(cxlkv_litmus *l, uint64_t step) {
    const uint64_t *peer = control_of(l, !l->role);
    look(peer);
    uint64_t seen = flush_load_word(&peer[STEP]);
    if (seen == GAVE_UP)
        return fail(ECANCELED, "the other role gave up; its own message says why");
    if (flush_load_word(&peer[NONCE]) != l->peer_nonce)
        return fail(ECANCELED, "the other role was started anew: start both again");
    return seen >= step;
}

static int await(cxlkv_litmus *l, uint64_t step) {
    int code;
    l->looks = 0;
    while ((code = has_arrived(l, step)) == 0) {
        code = l->wait(l);
        if (code < 0) return code;
    }
    return code < 0 ? code : 0;
}

static int rendezvous(cxlkv_litmus *l, uint64_t field) {
    arrive(l, field);
    return await(l, l->step);
}

/* ---- rounds ---- */

typedef struct litmus_round {
    uint64_t number, id;       /* the words of a round come from its id, and occur nowhere else */
    uint32_t first, second;    /* regions */
    uint32_t active;           /* the role that writes, or gives */
    uint32_t start, lines;     /* within a part, around its end */
    bool primed;               /* the other side has the old lines in its caches */
    bool patient;              /* it looks at the flag only after the publish has returned */
    bool streamed;             /* the receiver writes by non-temporal stores */
    bool swept;                /* the pressure is on all lines */
} litmus_round;

static litmus_round draw(const cxlkv_litmus *l, const cxlkv_litmus_case *which, uint64_t number) {
    uint64_t both = l->role == 0 ? l->nonce ^ mix(l->peer_nonce) : l->peer_nonce ^ mix(l->nonce);
    uint64_t place = (uint64_t)which->test << 16 | which->first << 8 | which->second;
    litmus_round r = {.number = number, .first = which->first, .second = which->second};
    uint64_t dice = r.id = mix(both ^ mix(number << 24 | place));
    r.active = below(&dice, 2);
    r.start = below(&dice, l->part_lines);
    r.lines = 1 + below(&dice, min_u32(l->part_lines - 2, LITMUS_PAYLOAD_LINES_MAX));
    r.primed = below(&dice, 4) != 0;
    r.patient = below(&dice, 4) == 0;
    r.streamed = below(&dice, 2);
    r.swept = below(&dice, 256) == 0;
    return r;
}

static uint64_t *part_line(const cxlkv_litmus *l, uint32_t region, uint32_t part, uint32_t index) {
    uint32_t line = part * l->part_lines + index % l->part_lines;
    return line_at(l, region, LITMUS_SCRATCH_LINES + line);
}

static void fill(const litmus_round *r, uint32_t whose, uint32_t index, uint64_t *words) {
    for (uint32_t i = 0; i < LINE_WORDS; i++)
        words[i] = mix(r->id + ((uint64_t)whose << 32 | index << 3 | i));
}

/* From none to about a microsecond, as often short as long. */
static void delay(cxlkv_litmus *l) {
    uint32_t most = 1u << below(&l->delay_dice, 11);
    for (volatile uint32_t spins = below(&l->delay_dice, most); spins > 0; spins--) {}
}

/* The old lines come into this host's caches. */
static void prime(const cxlkv_litmus *l, const litmus_round *r, uint32_t region, uint32_t part,
                  uint32_t lines) {
    uint64_t words[LINE_WORDS];
    for (uint32_t i = 0; r->primed && i < lines; i++)
        flush_load_line(words, part_line(l, region, part, r->start + i));
}

static void violate(cxlkv_litmus_found *found, const cxlkv_litmus_found *this) {
    if (found->violations++) return;
    uint64_t rounds = found->rounds, raced = found->raced;
    *found = *this;
    found->rounds = rounds;
    found->raced = raced;
    found->violations = 1;
}

/* Loads the lines and compares them with what `whose` wrote in this round. */
static void verify(const cxlkv_litmus *l, const litmus_round *r, uint32_t kind, uint32_t part,
                   uint32_t lines, uint32_t whose, cxlkv_litmus_found *found) {
    cxlkv_litmus_found this = {.kind = kind, .round = r->number, .region = r->first};
    uint64_t wanted[LINE_WORDS], got[LINE_WORDS];
    for (uint32_t i = 0; i < lines; i++) {
        const uint64_t *line = part_line(l, r->first, part, r->start + i);
        flush_copy_out(got, line, LINE);
        fill(r, whose, i, wanted);
        for (uint32_t word = 0; word < LINE_WORDS; word++) {
            if (got[word] == wanted[word] || this.words_wrong++) continue;
            this.line = (uint64_t)(line - line_at(l, r->first, 0)) / LINE_WORDS;
            this.word = word;
            this.wanted = wanted[word];
            this.got = got[word];
        }
    }
    if (this.words_wrong) violate(found, &this);
}

/* ---- message passing: publish and acquire of docs/explanation/coherence.md ---- */

static void raise_flag(const litmus_round *r, uint64_t *flag) {
    flush_store_word(flag, r->id);
    flush_write_back(FLUSH_PUBLISH_DESCRIPTOR, flag, LINE);
    flush_fence_stores(FLUSH_PUBLISH_FENCE);
}

/* Until it is seen, or the other role has arrived after raising it: then it must be seen. Returns
 * 1 when it was there at the first look, 2 when later, 0 when it is lost, which is counted. */
static int await_flag(cxlkv_litmus *l, const litmus_round *r, const uint64_t *flag,
                      cxlkv_litmus_found *found) {
    l->looks = 0;
    for (uint32_t polls = 1;; polls++) {
        int told = r->patient || polls % POLLS == 0 ? has_arrived(l, l->step + 1) : 0;
        if (told < 0) return told;
        if (told || !r->patient) {
            flush_fence_all(FLUSH_ACQUIRE_BEGIN_FENCE);
            flush_invalidate(FLUSH_ACQUIRE_DESCRIPTOR, flag, LINE);
            flush_fence_all(FLUSH_ACQUIRE_DESCRIPTOR_FENCE);
            if (flush_load_word(flag) == r->id) return polls == 1 || r->patient ? 1 : 2;
        }
        if (told) break;
        int code = l->wait(l);
        if (code < 0) return code;
    }
    cxlkv_litmus_found this = {.kind = CXLKV_LITMUS_LOST, .round = r->number, .region = r->second,
                               .words_wrong = 1, .wanted = r->id, .got = flush_load_word(flag)};
    this.line = (uint64_t)(flag - line_at(l, r->second, 0)) / LINE_WORDS;
    violate(found, &this);
    return 0;
}

/* The lines of a round in its writer's part: payload, header, flag. The flag in `second`. */
static int message_write(cxlkv_litmus *l, const litmus_round *r) {
    uint64_t words[LINE_WORDS], *header = part_line(l, r->first, l->role, r->start + r->lines);
    uint64_t *flag = part_line(l, r->second, l->role, r->start + r->lines + 1);
    int code = rendezvous(l, 0);
    if (code < 0) return code;
    delay(l);
    for (uint32_t i = 0; i < r->lines; i++) {
        fill(r, OF_GIVER, i, words);
        flush_copy_in(part_line(l, r->first, l->role, r->start + i), words, LINE);
    }
    fill(r, OF_GIVER, r->lines, words);
    flush_store_line(header, words, 0);
    flush_write_back(FLUSH_PUBLISH_HEADER, header, LINE);
    flush_fence_stores(FLUSH_PUBLISH_PAYLOAD_FENCE);
    raise_flag(r, flag);
    return rendezvous(l, 0);
}

static int message_read(cxlkv_litmus *l, const litmus_round *r, cxlkv_litmus_found *found) {
    uint32_t writer = r->active;
    const uint64_t *flag = part_line(l, r->second, writer, r->start + r->lines + 1);
    prime(l, r, r->first, writer, r->lines + 1);
    if (r->primed) (void)flush_load_word(flag);
    int code = rendezvous(l, 0);
    if (code < 0) return code;
    delay(l);
    code = await_flag(l, r, flag, found);
    if (code < 0) return code;
    if (code == 0) return rendezvous(l, 0);
    found->raced += code == 2;
    flush_fence_all(FLUSH_ACQUIRE_SEEN_FENCE);
    for (uint32_t i = 0; i <= r->lines; i++)
        flush_invalidate(FLUSH_ACQUIRE_PAYLOAD, part_line(l, r->first, writer, r->start + i),
                         LINE);
    flush_fence_all(FLUSH_ACQUIRE_PAYLOAD_FENCE);
    verify(l, r, CXLKV_LITMUS_STALE, writer, r->lines + 1, OF_GIVER, found);
    return rendezvous(l, 0);
}

/* ---- store buffering: what pins and locks rest on ---- */

static int buffer_round(cxlkv_litmus *l, const litmus_round *r, cxlkv_litmus_found *found) {
    uint32_t regions[2] = {r->first, r->second};
    uint64_t *own = part_line(l, regions[l->role], l->role, r->start);
    const uint64_t *other = part_line(l, regions[!l->role], !l->role, r->start);
    prime(l, r, regions[!l->role], !l->role, 1);
    int code = rendezvous(l, 0);
    if (code < 0) return code;
    delay(l);
    flush_store_word(own, r->id);
    flush_write_back(FLUSH_PIN, own, LINE);
    flush_fence_all(FLUSH_PIN_FENCE);
    flush_invalidate(FLUSH_OWNER_LOOK, other, LINE);
    flush_fence_all(FLUSH_OWNER_LOOK_FENCE);
    uint64_t got = flush_load_word(other);
    bool saw = got == r->id;
    code = rendezvous(l, saw);
    if (code < 0) return code;
    bool peer_saw = flush_load_word(&control_of(l, !l->role)[FIELDS + l->step % 2]) == 1;
    found->raced += saw != peer_saw && l->role == 0;
    if (saw || peer_saw || l->role != 0) return 0; /* role 0 counts for both */
    cxlkv_litmus_found this = {.kind = CXLKV_LITMUS_BOTH_OLD, .round = r->number,
                               .region = r->second, .words_wrong = 1, .wanted = r->id, .got = got};
    this.line = (uint64_t)(other - line_at(l, r->second, 0)) / LINE_WORDS;
    violate(found, &this);
    return 0;
}

/* ---- late eviction: lines of `first` that change hands (V8), told by a flag in `second` ---- */

/* Makes this host's caches evict: lines that share a place in them with the round's, or all. */
static void press(const cxlkv_litmus *l, const litmus_round *r) {
    uint64_t stride = r->swept ? LINE : l->pressure_stride_bytes;
    uint64_t at = (uintptr_t)part_line(l, r->first, HANDED, r->start) % l->pressure_stride_bytes;
    for (at = r->swept ? 0 : at; at < l->pressure_bytes; at += stride) {
        uint64_t *word = (uint64_t *)(l->pressure + at);
        flush_store_word(word, flush_load_word(word) + 1);
    }
}

/* From the other role's hands: all that the caches filled before is dropped. */
static void take(cxlkv_litmus *l, const litmus_round *r, uint32_t kind, uint32_t whose,
                 cxlkv_litmus_found *found) {
    flush_fence_all(FLUSH_ACQUIRE_SEEN_FENCE);
    for (uint32_t i = 0; i < r->lines; i++)
        flush_invalidate(FLUSH_TAKE, part_line(l, r->first, HANDED, r->start + i), LINE);
    flush_fence_all(FLUSH_TAKE_FENCE);
    verify(l, r, kind, HANDED, r->lines, whose, found);
}

static int eviction_give(cxlkv_litmus *l, const litmus_round *r, cxlkv_litmus_found *found) {
    uint64_t words[LINE_WORDS];
    int code = rendezvous(l, 0);
    if (code < 0) return code;
    for (uint32_t i = 0; i < r->lines; i++) {
        fill(r, OF_GIVER, i, words);
        flush_store_line(part_line(l, r->first, HANDED, r->start + i), words, 0);
    }
    for (uint32_t i = 0; i < r->lines; i++)
        flush_invalidate(FLUSH_GIVE, part_line(l, r->first, HANDED, r->start + i), LINE);
    flush_fence_all(FLUSH_GIVE_FENCE);
    raise_flag(r, part_line(l, r->second, l->role, r->start));
    arrive(l, 0);
    press(l, r);
    code = has_arrived(l, l->step);
    found->raced += code == 1; /* the receiver wrote while we pressed */
    if (code >= 0) code = await(l, l->step);
    if (code < 0) return code;
    press(l, r);
    code = rendezvous(l, 0);
    if (code >= 0) take(l, r, CXLKV_LITMUS_OVERWRITTEN, OF_RECEIVER, found);
    return code;
}

static int eviction_receive(cxlkv_litmus *l, const litmus_round *r, cxlkv_litmus_found *found) {
    uint64_t words[LINE_WORDS];
    prime(l, r, r->first, HANDED, r->lines);
    int code = rendezvous(l, 0);
    if (code >= 0) code = await_flag(l, r, part_line(l, r->second, r->active, r->start), found);
    if (code < 0) return code;
    take(l, r, CXLKV_LITMUS_STALE, OF_GIVER, found);
    for (uint32_t i = 0; i < r->lines; i++) {
        uint64_t *line = part_line(l, r->first, HANDED, r->start + i);
        fill(r, OF_RECEIVER, i, words);
        if (r->streamed) {
            flush_copy_in(line, words, LINE);
        } else {
            flush_store_line(line, words, 0);
            flush_write_back(FLUSH_PUBLISH_HEADER, line, LINE);
        }
    }
    flush_fence_stores(FLUSH_PUBLISH_PAYLOAD_FENCE);
    code = rendezvous(l, 0);
    if (code >= 0) code = rendezvous(l, 0);
    if (code >= 0) take(l, r, CXLKV_LITMUS_OVERWRITTEN, OF_RECEIVER, found);
    return code;
}

/* ---- the interface ---- */

int cxlkv_litmus_run(cxlkv_litmus *l, const cxlkv_litmus_case *which, cxlkv_litmus_found *found) {
    if (which->test > CXLKV_LITMUS_EVICTION || which->first >= l->region_count ||
        which->second >= l->region_count)
        return fail(CXLKV_E_ARGUMENT, "no such litmus test or region");
    for (uint64_t i = 0; i < which->rounds; i++) {
        litmus_round r = draw(l, which, which->first_round + i);
        bool active = r.active == l->role;
        int code;
        if (which->test == CXLKV_LITMUS_BUFFER) code = buffer_round(l, &r, found);
        else if (which->test == CXLKV_LITMUS_MESSAGE)
            code = active ? message_write(l, &r) : message_read(l, &r, found);
        else code = active ? eviction_give(l, &r, found) : eviction_receive(l, &r, found);
        if (code < 0) return code;
        found->rounds++;
    }
    return 0;
}

/* Spins, then sleeps, so that two roles which share a core find another, and looks at the clock. */
static int wait_for_peer(cxlkv_litmus *l) {
    if (++l->looks < SPINS) return 0;
    if (l->looks == SPINS) l->deadline_ns = monotonic_ns() + l->wait_ns;
    nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    if (monotonic_ns() < l->deadline_ns) return 0;
    return fail(ETIMEDOUT, "the other role has been silent for %.3g s: it was killed, or hangs",
                (double)l->wait_ns * 1e-9);
}

int cxlkv_litmus_make(void *const *regions, uint32_t count, uint32_t role, uint64_t pressure_bytes,
                      double wait_s, cxlkv_litmus **litmus) {
    if (count < 1 || count > CXLKV_LITMUS_REGIONS_MAX || role > 1 || !(wait_s > 0 && wait_s < 1e9))
        return fail(CXLKV_E_ARGUMENT, "a litmus run has 1 to %d regions, role 0 or 1, and waits "
                    "some time", CXLKV_LITMUS_REGIONS_MAX);
    if (!flush_supported())
        return fail(ENOTSUP, "this CPU has no instruction that flushes a line");
    cxlkv_litmus *l = calloc(1, sizeof(*l));
    if (l) l->pressure = aligned_alloc(4096, align_up(pressure_bytes + 1, 4096));
    if (!l || !l->pressure) {
        free(l);
        return fail(ENOMEM, "no memory for the pressure on the caches");
    }
    memset(l->pressure, 0, pressure_bytes);
    for (uint32_t i = 0; i < count; i++) l->regions[i] = regions[i];
    uint32_t lines = CXLKV_LITMUS_REGION_BYTES / LINE - LITMUS_SCRATCH_LINES - 2 * MESSAGE_LINES;
    l->region_count = count;
    l->role = role;
    l->part_lines = lines / 3;
    l->pressure_bytes = pressure_bytes;
    l->pressure_stride_bytes = 4096; /* the smallest page: a cache's place beyond is not known */
    l->wait = wait_for_peer;
    l->wait_ns = (uint64_t)(wait_s * 1e9);
    l->delay_dice = random_u64();
    litmus_begin(l, random_u64());
    *litmus = l;
    return 0;
}

void cxlkv_litmus_destroy_at(cxlkv_litmus **at) {
    if (*at) free((*at)->pressure);
    free(*at);
}

/* The messages lie behind the scratch lines of the first region. */
int cxlkv_litmus_exchange(cxlkv_litmus *l, const uint8_t *own, uint8_t *peer) {
    uint32_t first = LITMUS_SCRATCH_LINES + 3 * l->part_lines;
    uint64_t *to = line_at(l, 0, first + l->role * MESSAGE_LINES);
    const uint64_t *from = line_at(l, 0, first + !l->role * MESSAGE_LINES);
    memcpy(to, own, CXLKV_LITMUS_MESSAGE_BYTES);
    tell_all(to, CXLKV_LITMUS_MESSAGE_BYTES);
    int code = rendezvous(l, 0);
    if (code < 0) return code;
    flush_fence_all(FLUSH_NONE);
    tell_all(from, CXLKV_LITMUS_MESSAGE_BYTES);
    flush_copy_out(peer, from, CXLKV_LITMUS_MESSAGE_BYTES);
    return rendezvous(l, 0); /* the messages may be written anew */
}
