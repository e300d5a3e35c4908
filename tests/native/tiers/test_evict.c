/* Goal: cxlkv_evict_order takes what an obvious loop takes, whatever the parents are.
 * Method: random forests, cycles, strangers and lost parents among them, against a search of all
 * pages a time. */
#include <math.h>

#include "check.h"

enum { PAGES_MAX = 40, ROUNDS = 3000 };

typedef struct forest {
    uint32_t count;
    uint8_t priorities[PAGES_MAX];
    float scores[PAGES_MAX];
    uint32_t ages[PAGES_MAX], parents[PAGES_MAX];
    uint8_t blocked[PAGES_MAX];
} forest;

static forest forest_make(uint64_t *seed) {
    forest f = {.count = random_below(seed, PAGES_MAX + 1)};
    for (uint32_t page = 0; page < f.count; page++) {
        f.priorities[page] = (uint8_t)random_below(seed, 3);
        f.scores[page] = (float)random_below(seed, 4) - 1.0f;
        f.ages[page] = random_below(seed, 3);
        f.blocked[page] = random_below(seed, 8) == 0;
        uint32_t kind = random_below(seed, 11);
        f.parents[page] = kind == 0   ? UINT32_MAX
                          : kind == 10 ? CXLKV_PARENT_LOST
                          : kind == 1 ? random_below(seed, 2 * PAGES_MAX)
                          : page      ? random_below(seed, page)
                                      : UINT32_MAX;
    }
    return f;
}

static bool is_leaf(const forest *f, const bool *gone, uint32_t page) {
    for (uint32_t other = 0; other < f->count; other++)
        if (!gone[other] && f->parents[other] == page) return false;
    return true;
}

static bool is_lost(const forest *f, uint32_t page) {
    for (uint32_t steps = 0; page < f->count && steps <= f->count; steps++) page = f->parents[page];
    return page == CXLKV_PARENT_LOST;
}

static bool goes_first(const forest *f, uint32_t page, uint32_t best) {
    if (best == UINT32_MAX) return true;
    if (f->priorities[page] != f->priorities[best])
        return f->priorities[page] < f->priorities[best];
    if (is_lost(f, page) != is_lost(f, best)) return is_lost(f, page);
    if (f->scores[page] != f->scores[best]) return f->scores[page] < f->scores[best];
    return f->ages[page] > f->ages[best];
}

static uint32_t obvious(const forest *f, uint32_t wanted, uint32_t *chosen) {
    bool gone[PAGES_MAX] = {false};
    uint32_t taken = 0;
    for (; taken < wanted; taken++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t page = 0; page < f->count; page++)
            if (!gone[page] && !f->blocked[page] && is_leaf(f, gone, page) &&
                goes_first(f, page, best))
                best = page;
        if (best == UINT32_MAX) break;
        gone[best] = true;
        chosen[taken] = best;
    }
    return taken;
}

int main(void) {
    uint64_t seed = 11;
    uint64_t all = 0;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        forest f = forest_make(&seed);
        uint32_t wanted = random_below(&seed, f.count + 1), got[PAGES_MAX], expected[PAGES_MAX];
        uint32_t taken = obvious(&f, wanted, expected);
        CHECK(cxlkv_evict_order(f.count, f.priorities, f.scores, f.ages, f.parents, f.blocked,
                                wanted, got) == taken);
        CHECK(memcmp(got, expected, taken * sizeof(*got)) == 0);
        all += taken;
    }
    CHECK(all > ROUNDS);
    forest bad = {.count = 1, .scores = {NAN}};
    CHECK(cxlkv_evict_order(1, bad.priorities, bad.scores, bad.ages, bad.parents, bad.blocked, 1,
                            bad.ages) == -CXLKV_E_ARGUMENT);
    return 0;
}
