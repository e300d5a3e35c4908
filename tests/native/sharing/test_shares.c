/* Goal: who lacks room of its share gets it, one of two that needs more gets it in its turn, and
 * nobody is kept from what no other wants. Method: what must hold of any made-up shares; and hosts
 * that need, take, hold and give at random, as engines do: each must begin again and again. */
#include "check.h"
#include "sharing/shares.h"

static uint64_t seed;

static shares made_up(void) {
    shares s = {.host_count = 1 + random_below(&seed, 8)};
    uint32_t reached = 0, users = 0;
    s.takeable = random_below(&seed, 3) ? 0 : random_below(&seed, 10);
    for (uint32_t host = 0; host < s.host_count; host++) {
        s.owned[host] = random_below(&seed, 4) ? random_below(&seed, 20) : 0;
        s.wanted[host] = random_below(&seed, 2) ? random_below(&seed, GIVE_MAX + 1) : 0;
        users += s.owned[host] || s.wanted[host];
        reached += s.owned[host];
    }
    s.share = users ? (reached + s.takeable) / users : 1;
    if (s.share == 0) s.share = 1;
    return s;
}

static uint32_t first_that_wants(const shares *s) {
    uint32_t first = NO_HOST;
    for (uint32_t host = s->host_count; host-- > 0;)
        if (s->wanted[host] && (first == NO_HOST || s->owned[host] <= s->owned[first]))
            first = host;
    return first;
}

/* Of one of them, of which `first` goes first, or NO_HOST. */
static void check_one(const shares *s, uint32_t first) {
    uint32_t own = s->owned[s->self], owed = shares_owed(s), takeable = shares_takeable(s);
    uint32_t wanted = 0, idle = 0, least = min_u32(s->takeable, s->share - min_u32(own, s->share));
    for (uint32_t host = 0; host < s->host_count; host++) {
        if (host != s->self) wanted += s->wanted[host];
        if (host != s->self && !s->wanted[host] && s->owned[host] > idle) idle = s->owned[host];
    }
    CHECK(owed == 0 || own > owed);
    CHECK(owed <= wanted - min_u32(wanted, s->takeable));
    CHECK(owed == 0 || own > s->share || own >= idle); /* from who has most */
    CHECK(takeable >= least && takeable <= s->takeable);
    if (first == NO_HOST || first == s->self) CHECK(owed == 0 && takeable == s->takeable);
    else if (least == 0 && s->owned[first] < own)
        CHECK(takeable <= s->takeable - min_u32(s->takeable, s->wanted[first]));
}

static void test_any(void) {
    shares s = made_up();
    uint32_t first = first_that_wants(&s), owed_by_all = 0, reached = 0;
    bool lacks = false;
    for (s.self = 0; s.self < s.host_count; s.self++) {
        check_one(&s, first);
        lacks |= s.wanted[s.self] && s.owned[s.self] < s.share;
        owed_by_all += shares_owed(&s);
        reached += s.owned[s.self];
    }
    CHECK(!lacks || s.takeable || owed_by_all || reached < s.host_count);
}

/* The extents of the request that waits, and of those that run; how many have begun. */
typedef struct engine {
    uint32_t need, held;
    uint64_t begun;
} engine;

enum { ENGINES_MAX = 6, EXTENTS_MAX = 24, WINDOW = 20000, WINDOWS = 10 };

/* What an engine does in a step: native/src/sharing/wants.c, cxlkv/adapters/vllm/admission.py. */
static void step(shares *s, engine *own, uint32_t longest, uint32_t most) {
    uint32_t *owned = &s->owned[s->self], *wanted = &s->wanted[s->self], room = *owned - own->held;
    uint32_t owed = shares_owed(s), given = min_u32(owed, room);
    if (own->held && random_below(&seed, longest) == 0) { /* one of those that run ends */
        own->held -= 1 + random_below(&seed, own->held);
    } else if (owed) { /* none begins, none is asked for */
        *wanted = 0;
        *owned -= given;
        s->takeable += given;
    } else if (own->need > room + shares_takeable(s)) {
        uint32_t lacking = s->share - min_u32(*owned, s->share);
        *wanted = own->need - room;
        if (own->held) *wanted = min_u32(*wanted > *owned ? *wanted : *owned, lacking);
    } else {
        uint32_t taken = own->need - min_u32(own->need, room);
        *wanted = 0;
        *owned += taken;
        s->takeable -= taken;
        own->held += own->need;
        own->begun++;
        own->need = random_below(&seed, 3) ? 1 : 1 + random_below(&seed, most);
    }
}

static void step_of_one(shares *s, engine *engines, uint32_t extents, uint32_t longest) {
    /* Of two, one may need all that the other can give: one extent stays with each. */
    uint32_t most = s->host_count == 2 ? extents - 1 : extents / s->host_count;
    uint32_t users = 0;
    s->self = random_below(&seed, s->host_count);
    for (uint32_t host = 0; host < s->host_count; host++)
        users += host == s->self || s->owned[host] || s->wanted[host];
    s->share = extents / users ? extents / users : 1;
    step(s, &engines[s->self], longest, most);
}

static void test_engines(void) {
    engine engines[ENGINES_MAX] = {0};
    shares s = {.host_count = 1 + random_below(&seed, ENGINES_MAX)};
    uint32_t extents = s.host_count + random_below(&seed, EXTENTS_MAX - s.host_count);
    uint32_t longest = 1 + random_below(&seed, 20);
    s.takeable = extents;
    for (uint32_t host = 0; host < s.host_count; host++) engines[host].need = 1;
    for (int window = 0; window < WINDOWS; window++) {
        engine before[ENGINES_MAX];
        memcpy(before, engines, sizeof(before));
        for (int i = 0; i < WINDOW; i++) step_of_one(&s, engines, extents, longest);
        for (uint32_t host = 0; host < s.host_count; host++)
            CHECK(engines[host].begun > before[host].begun);
    }
}

int main(void) {
    for (uint64_t i = 1; i <= 20000; i++) {
        seed = i;
        test_any();
        if (i % 400 == 0) test_engines();
    }
    return 0;
}
