/* Hosts on real memory, one after the other: names, lock, fences, claims, logs, hostile lines. */
#include "host_tests.h"

enum { EXTENTS = 10, PAGES = 640 };

typedef struct pool {
    hosts at[HOSTS];
    uint8_t *memory;
    uint64_t bytes;
    bool silent[HOSTS];
    int pauses;
    uint64_t *finish, finished;  /* what another host stores while somebody waits */
} pool;

typedef void host_test(pool *p);

static void pause_(void *context) {
    pool *p = context;
    if (p->finish) *p->finish = p->finished;
    CHECK(p->pauses++ < 1000); /* nobody else runs here: whoever waits would wait for ever */
}
static bool silent(void *context, uint32_t host) { return ((pool *)context)->silent[host]; }

static void pool_make(pool *p, enum visibility_mode mode) {
    hosts_area area = test_hosts_area(EXTENTS, PAGES);
    *p = (pool){.bytes = HOSTS * area.block_bytes, .memory = test_hosts_memory(&area)};
    area.base = p->memory;
    for (uint32_t i = 0; i < HOSTS; i++)
        p->at[i] = (hosts){.area = area, .self = i, .mode = mode, .context = p, .pause = pause_,
                           .silent = silent};
}

static void attach_all(pool *p) {
    for (uint32_t i = 0; i < HOSTS; i++) CHECK(hosts_attach(&p->at[i], 100 + i) == 0);
}

static void on_hosts(host_test *run, enum visibility_mode mode, bool attached) {
    pool p;
    pool_make(&p, mode);
    if (attached) attach_all(&p);
    run(&p);
    free(p.memory);
}

static int claim_from(hosts *h, uint32_t first, uint32_t count, bool ours) {
    uint32_t extents[EXTENTS];
    for (uint32_t i = 0; i < count; i++) extents[i] = first + i;
    return test_claim(h, count, extents, ours);
}

static extent_owner owner_of(const hosts *h, uint32_t extent) {
    extent_owner owners[EXTENTS];
    CHECK(hosts_owners(h, owners) == 0);
    return owners[extent];
}

static void test_claims(pool *p) {
    CHECK(owner_of(&p->at[0], 3).host == NO_HOST && owner_of(&p->at[0], 3).takeable);
    CHECK(claim_from(&p->at[1], 2, 4, true) == 0);
    for (uint32_t host = 0; host < HOSTS; host++) {
        CHECK(owner_of(&p->at[host], 3).host == 1 && !owner_of(&p->at[host], 3).takeable);
        CHECK(owner_of(&p->at[host], 6).host == NO_HOST);
    }
    for (int round = 0; round < 5; round++) {
        CHECK(claim_from(&p->at[1], 3, 1, false) == 0);
        CHECK(owner_of(&p->at[2], 3).host == NO_HOST && owner_of(&p->at[2], 3).takeable);
        CHECK(claim_from(&p->at[2], 3, 1, true) == 0);
        CHECK(owner_of(&p->at[0], 3).host == 2);
        CHECK(claim_from(&p->at[2], 3, 1, false) == 0 && claim_from(&p->at[1], 3, 1, true) == 0);
    }
    hosts_leave(&p->at[1], 101);
    CHECK(owner_of(&p->at[0], 3).host == 1 && owner_of(&p->at[0], 3).takeable);
    CHECK(hosts_attach(&p->at[1], 201) == 0 && p->at[1].epoch == 2);
    CHECK(owner_of(&p->at[0], 3).host == 1 && !owner_of(&p->at[0], 3).takeable);
}

/* Host 1 dies, silent, at a place that it is interrupted at; host 0 goes on, host 1 comes back. */
static void fence(pool *p, bool off) {
    extent_owner owners[EXTENTS];
    uint32_t extent = 5;
    CHECK(claim_from(&p->at[1], 0, 2, true) == 0);
    CHECK(hosts_lock(&p->at[1]) == 0);
    CHECK(hosts_owners(&p->at[1], owners) == 0);
    p->silent[1] = true;
    CHECK(claim_from(&p->at[0], 5, 1, true) == 0); /* passes over it */
    host_fence fence;
    CHECK(hosts_fence_of(&p->at[2], 1, 1, &fence) == 0 && fence.fenced && fence.cut == 1);
    if (off) CHECK(hosts_fence(&p->at[2], 1, 1, true) == 0);
    CHECK(owner_of(&p->at[0], 0).host == 1 && owner_of(&p->at[0], 0).takeable == off);
    if (off) CHECK(claim_from(&p->at[2], 0, 1, true) == 0);
    /* It goes on where it stood: its claim does not count, for anybody. Nor does one that follows
     * a commit that did not count, and what counted before stays as it is. */
    uint32_t older = 0;
    CHECK(hosts_claim(&p->at[1], owners, 1, &extent, true) == -CXLKV_E_FENCED);
    for (int i = 0; !off && i < 2; i++)
        CHECK(hosts_claim(&p->at[1], owners, 1, &older, false) == -CXLKV_E_FENCED);
    CHECK(owner_of(&p->at[2], 0).host == (off ? 2 : 1));
    CHECK(owner_of(&p->at[1], 5).host == 0 && owner_of(&p->at[2], 5).host == 0);
    CHECK(hosts_lock(&p->at[1]) == 0 || !off); /* it may wait in the queue, which does no harm */
    p->silent[1] = false;
    CHECK(hosts_attach(&p->at[1], 301) == 0 && p->at[1].epoch == 2);
    CHECK(owner_of(&p->at[2], 5).host == 0 && owner_of(&p->at[2], 0).host == (off ? 2 : 1));
    CHECK(!owner_of(&p->at[2], 1).takeable && claim_from(&p->at[1], 7, 1, true) == 0);
    CHECK(owner_of(&p->at[0], 7).host == 1);
}

static void test_fence(pool *p) { fence(p, false); }
static void test_fence_off(pool *p) { fence(p, true); }

/* A maker of a fence that dies over it: others say so, until somebody says that it is off. */
static void test_undecided(pool *p) {
    host_fence fence;
    uint64_t *word = (uint64_t *)hosts_line(&p->at[0], 1, FENCE_LINES) + 2;
    *word = 1ull << 40 | 1ull << 38; /* host 1 has closed epoch 1 of host 2 */
    p->silent[1] = true;
    CHECK(hosts_fence_of(&p->at[0], 2, 1, &fence) == -CXLKV_E_TIMEOUT);
    CHECK(strstr(cxlkv_error_text(), "confirmed-off"));
    CHECK(hosts_fence(&p->at[2], 0, 1, false) == -EAGAIN); /* it is being fenced itself */
    CHECK(hosts_fence(&p->at[0], 1, 1, true) == 0);
    CHECK(hosts_fence_of(&p->at[0], 2, 1, &fence) == 0 && !fence.fenced);
    p->silent[1] = false;
    *word = 1ull << 40 | 1ull << 38;
    CHECK(hosts_attach(&p->at[1], 7) == 0 && *word == 0);
    /* Two died while they fenced each other, and both come back. */
    *word = 1ull << 40 | 1ull << 38;
    *((uint64_t *)hosts_line(&p->at[0], 2, FENCE_LINES) + 1) = 2ull << 40 | 1ull << 38;
    p->silent[1] = p->silent[2] = true;
    CHECK(hosts_attach(&p->at[1], 8) == -CXLKV_E_TIMEOUT);
    CHECK(hosts_attach(&p->at[2], 9) == 0 && hosts_attach(&p->at[1], 8) == 0);
}

/* A name is being written, or its writer died over it: what its host owns is still known. */
static void test_torn_name(pool *p) {
    extent_owner owners[EXTENTS];
    host_name name;
    uint8_t *line = hosts_line(&p->at[0], 1, NAME_LINE);
    line[8] = 1; /* of a first attach */
    CHECK(hosts_name(&p->at[0], 1, &name) && name.status == HOST_UNUSED);
    attach_all(p);
    CHECK(claim_from(&p->at[1], 3, 1, true) == 0);
    for (int half = 0; half < 2; half++) {
        line[half * 32 + 8] ^= 2;
        CHECK(hosts_name(&p->at[0], 1, &name) && name.nonce == 101u + (uint32_t)half);
        CHECK(owner_of(&p->at[0], 3).host == 1 && !owner_of(&p->at[0], 3).takeable);
        CHECK(hosts_attach(&p->at[1], 102 + (uint64_t)half) == 0);
        CHECK(p->at[1].epoch == 2u + (uint32_t)half);
        CHECK(memcmp(line, line + 32, 32) == 0);
    }
    line[8] ^= 2, line[40] ^= 2;
    CHECK(!hosts_name(&p->at[0], 1, &name));
    CHECK(hosts_owners(&p->at[0], owners) == -CXLKV_E_CORRUPT);
    for (uint32_t extent = 0; extent < EXTENTS; extent++) CHECK(!owners[extent].takeable);
}

/* Who finds a fence that is only begun waits for it, and then sees what it says. */
static void test_wait(pool *p) {
    host_fence fence;
    p->finish = (uint64_t *)hosts_line(&p->at[0], 1, FENCE_LINES) + 2;
    p->finished = 1ull << 40 | 2ull << 38 | 7; /* host 1: epoch 1 of host 2 is cut at 7 */
    *p->finish = 1ull << 40 | 1ull << 38;
    CHECK(hosts_fence_of(&p->at[0], 2, 1, &fence) == 0 && fence.fenced && fence.cut == 7);
    CHECK(p->pauses > 0);
}

static void test_recover(pool *p) {
    extent_owner owners[EXTENTS];
    uint32_t extent = 4;
    CHECK(hosts_lock(&p->at[0]) == 0 && hosts_owners(&p->at[0], owners) == 0);
    uint64_t *commits = (uint64_t *)hosts_line(&p->at[0], 0, COMMIT_LINE);
    CHECK(hosts_claim(&p->at[0], owners, 1, &extent, true) == 0);
    *commits -= 1; /* as if the process had died before its commit */
    hosts_recover_claims(&p->at[0]);
    CHECK(claim_from(&p->at[0], 6, 1, true) == 0); /* makes up that commit's number */
    CHECK(owner_of(&p->at[1], 6).host == 0 && owner_of(&p->at[1], 4).host == NO_HOST);
    CHECK(claim_from(&p->at[1], 4, 1, true) == 0);
    /* A claim that comes to nothing leaves the newer one of its two entries as it was. */
    CHECK(claim_from(&p->at[1], 4, 1, false) == 0);
    commits = (uint64_t *)hosts_line(&p->at[0], 1, COMMIT_LINE);
    CHECK(hosts_lock(&p->at[1]) == 0 && hosts_owners(&p->at[1], owners) == 0);
    CHECK(hosts_claim(&p->at[1], owners, 1, &extent, true) == 0);
    *commits -= 1;
    hosts_recover_claims(&p->at[1]);
    CHECK(owner_of(&p->at[0], 4).host == NO_HOST && owner_of(&p->at[0], 4).takeable);
}

/* A number of 32 bits that begins again would make a claim count that was never committed. */
static void test_commits_end(pool *p) {
    uint64_t *commits = (uint64_t *)hosts_line(&p->at[0], 0, COMMIT_LINE);
    CHECK(claim_from(&p->at[0], 4, 1, true) == 0);
    *commits = UINT32_MAX - 1;
    CHECK(claim_from(&p->at[0], 5, 1, true) == 0 && *commits == UINT32_MAX);
    CHECK(claim_from(&p->at[0], 6, 1, true) == -CXLKV_E_CORRUPT && *commits == UINT32_MAX);
    CHECK(strstr(cxlkv_error_text(), "has used up its 4294967295 commits"));
    CHECK(claim_from(&p->at[0], 4, 1, false) == -CXLKV_E_CORRUPT);
    CHECK(owner_of(&p->at[1], 4).host == 0 && owner_of(&p->at[1], 5).host == 0);
    CHECK(owner_of(&p->at[1], 6).host == NO_HOST && claim_from(&p->at[1], 6, 1, true) == 0);
}

/* A host that was fenced comes back under those who read: what they read stays pinned. */
static void test_pins(pool *p) {
    uint64_t *word = hosts_pin_word(&p->at[0], 1, 70);
    *word = 1 << 6;
    CHECK(hosts_attach(&p->at[1], 101) == 0 && *word == 1 << 6);
    CHECK(hosts_attach(&p->at[1], 102) == 0 && *word == 0);
}

static void test_log(pool *p) {
    log_record records[LOG_BATCH], seen[LOG_BATCH];
    uint64_t written = 1;
    log_place at = {.next = 1};
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == 0 && hosts_log_end(&p->at[1], 0) == 1);
    for (int round = 0; round < 20; round++) {
        uint32_t count = 1 + (uint32_t)round % 5;
        for (uint32_t i = 0; i < count; i++)
            records[i] = (log_record){.operation = LOG_PUBLISH, .page = (uint32_t)written + i};
        hosts_log(&p->at[0], written, records, count);
        CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == (int)count);
        for (uint32_t i = 0; i < count; i++) CHECK(seen[i].page == written + i);
        written += count;
        CHECK(at.next == written && hosts_log_end(&p->at[2], 0) == written);
    }
    for (uint32_t i = 0; i < 9; i++) records[i] = (log_record){.operation = LOG_FREE, .page = i};
    hosts_log(&p->at[0], written, records, 9); /* one more than there is room for */
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == -CXLKV_E_STALE);
    at = (log_place){.next = written + 5};
    uint8_t *line = hosts_line(&p->at[0], 0, LOG_LINES + ((written + 6) & (RECORDS - 1)));
    line[20] ^= 1;
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == 1 && at.next == written + 6);
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == -CXLKV_E_CORRUPT);
    /* A batch of three whose first line is lost with its writer, who goes on behind it. */
    at.next = written = hosts_log_end(&p->at[0], 0);
    for (uint32_t i = 0; i < 3; i++) records[i] = (log_record){.operation = LOG_FREE, .page = i};
    line = hosts_line(&p->at[0], 0, LOG_LINES + (written & (RECORDS - 1)));
    uint8_t before[64];
    memcpy(before, line, 64);
    hosts_log(&p->at[0], written, records, 3);
    memcpy(line, before, 64);
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == 0 && at.next == written);
    hosts_recover(&p->at[0]);
    CHECK(hosts_read_log(&p->at[1], 0, &at, seen) == 3 && at.next == written + 3);
    CHECK(seen[0].operation == LOG_FORGET && seen[0].generation == 0 && seen[1].page == 1);
    CHECK(hosts_log_end(&p->at[1], 0) == written + 3);
}

/* A flipped bit of what a host promised is no promise: else it would be silent in an hour only. */
static void test_promise(pool *p) {
    const uint64_t lease_ns = 5000000000ull;
    CHECK(hosts_promised(&p->at[1], 0) == 0);
    hosts_promise(&p->at[0], lease_ns);
    CHECK(hosts_promised(&p->at[1], 0) == lease_ns);
    uint64_t *line = (uint64_t *)hosts_line(&p->at[0], 0, BEAT_LINE);
    for (uint32_t bit = 0; bit < 128; bit++) {
        line[3 + bit / 64] ^= 1ull << bit % 64;
        CHECK(hosts_promised(&p->at[1], 0) == 0);
        line[3 + bit / 64] ^= 1ull << bit % 64;
    }
    hosts_promise(&p->at[0], 2 * lease_ns);
    CHECK(hosts_promised(&p->at[1], 0) == 2 * lease_ns);
}

/* What host 1 reads of host 0's log from now on; an error is met once, and skipped. */
static int read_once(pool *p, log_place *at) {
    log_record seen[LOG_BATCH];
    const log_place *places[HOSTS] = {at, &(log_place){.next = 1}, &(log_place){.next = 1}};
    if (!(hosts_logs_moved(&p->at[1], places) & 1)) return 0;
    int count = hosts_read_log(&p->at[1], 0, at, seen);
    if (count < 0) hosts_skip_log(&p->at[1], 0, at);
    return count;
}

/* A line that says more than it is costs its readers one look, and is heard when it changes; so is
 * what follows it, and its owner when it comes back. */
static void damaged_log(pool *p, uint64_t sequence_said, bool record_is_there) {
    log_record record = {.operation = LOG_FREE};
    log_place at = {.next = 1};
    uint64_t sequence;
    for (uint64_t s = 1; s < RECORDS + 3; s++) {
        hosts_log(&p->at[0], s, &record, 1);
        CHECK(read_once(p, &at) == 1 && at.next == s + 1);
    }
    CHECK(!hosts_log_is_damaged(&p->at[1], 0, &sequence));
    uint64_t *line = (uint64_t *)hosts_line(&p->at[0], 0, LOG_LINES + (at.next & (RECORDS - 1)));
    if (record_is_there) hosts_log(&p->at[0], at.next, &record, 1);
    line[0] = sequence_said;
    line[2] ^= 1;
    int pauses = p->pauses;
    CHECK(read_once(p, &at) == -CXLKV_E_CORRUPT && at.next == RECORDS + 3);
    CHECK(p->pauses > pauses && hosts_log_is_damaged(&p->at[1], 0, &sequence));
    CHECK(sequence == sequence_said);
    pauses = p->pauses;
    for (int look = 0; look < 100; look++) CHECK(read_once(p, &at) == 0);
    CHECK(p->pauses == pauses);
    line[3] ^= 1; /* other damage */
    CHECK(read_once(p, &at) == -CXLKV_E_CORRUPT && read_once(p, &at) == 0);
    if (record_is_there) { /* its writer does not know of it */
        hosts_log(&p->at[0], at.next + 1, &record, 1);
        CHECK(read_once(p, &at) == -CXLKV_E_CORRUPT && at.next == RECORDS + 5);
    } else { /* it comes back */
        CHECK(hosts_attach(&p->at[0], 100) == 0);
        CHECK(hosts_log_end(&p->at[0], 0) == RECORDS + 4);
        CHECK(read_once(p, &at) == 1 && at.next == RECORDS + 4);
        CHECK(!hosts_log_is_damaged(&p->at[1], 0, &sequence));
    }
    hosts_log(&p->at[0], at.next, &record, 1);
    CHECK(read_once(p, &at) == 1 && read_once(p, &at) == 0);
}

static void test_damaged_next(pool *p) { damaged_log(p, RECORDS + 3, false); }
static void test_damaged_next_there(pool *p) { damaged_log(p, RECORDS + 3, true); }
static void test_damaged_later(pool *p) { damaged_log(p, 1ull << 40, false); }
static void test_damaged_last_there(pool *p) { damaged_log(p, UINT64_MAX, true); }

/* Random bytes in everybody's lines: errors or nothing, never out of bounds (ASan) or for ever. */
static void test_hostile(uint64_t seed) {
    for (int round = 0; round < 200; round++) {
        pool p;
        extent_owner owners[EXTENTS];
        log_record seen[LOG_BATCH];
        log_place at = {.next = 1};
        host_name name;
        pool_make(&p, VISIBILITY_COHERENT);
        attach_all(&p);
        CHECK(claim_from(&p.at[1], 0, 3, true) == 0);
        for (uint32_t i = 0, n = 1 + random_below(&seed, 2000); i < n; i++)
            p.memory[p.at[0].area.block_bytes + random_below(&seed, (uint32_t)p.bytes * 2 / 3)] =
                (uint8_t)random_next(&seed);
        p.silent[1] = p.silent[2] = true;
        hosts_owners(&p.at[0], owners);
        for (uint32_t e = 0; e < EXTENTS; e++)
            CHECK(owners[e].host < HOSTS || owners[e].host == NO_HOST);
        hosts_read_log(&p.at[0], 1, &at, seen);
        hosts_log_end(&p.at[0], 2);
        hosts_name(&p.at[0], 1, &name);
        if (hosts_lock(&p.at[0]) == 0) hosts_unlock(&p.at[0]);
        free(p.memory);
    }
}

int main(void) {
    static host_test *const fast[] = {test_claims, test_recover, test_commits_end, test_pins};
    static host_test *const strict[] = {
        test_claims, test_fence, test_fence_off, test_undecided, test_wait, test_log,
        test_damaged_next, test_damaged_next_there, test_damaged_later, test_damaged_last_there};
    on_hosts(test_claims, VISIBILITY_COHERENT, true);
    on_hosts(test_torn_name, VISIBILITY_STRICT, false);
    on_hosts(test_promise, VISIBILITY_STRICT, false);
    for (size_t i = 0; i < sizeof(fast) / sizeof(*fast); i++)
        on_hosts(fast[i], VISIBILITY_FAST, true);
    for (size_t i = 0; i < sizeof(strict) / sizeof(*strict); i++)
        on_hosts(strict[i], VISIBILITY_STRICT, true);
    test_hostile(test_seed_or(1));
    return 0;
}
