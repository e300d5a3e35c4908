/* Goal: leases end in the order of their deadlines, whatever was added and taken out in between;
 * what has not ended is not looked at. Method: random adds, removals and ends against a plain
 * array; then hits of a pool, some of them in use when they end. */
#include "check.h"
#include "sequence/deadlines.h"
#include "sequence/sequence.h"

enum { SEQUENCES = 300, STEPS = 40000 };

static cxlkv_sequence made[SEQUENCES];

static bool is_there(const deadlines *all, const cxlkv_sequence *s) {
    return s->deadline_place && all->heap[s->deadline_place - 1] == s;
}

static uint64_t earliest_of(void) {
    uint64_t found = UINT64_MAX;
    for (int i = 0; i < SEQUENCES; i++)
        if (made[i].deadline_place) found = min_u64(found, made[i].lease_deadline_ns);
    return found;
}

static void check_order(void) {
    uint64_t seed = 11, now = 1000;
    uint32_t ended = 0, removed = 0;
    deadlines all = {.first_ns = UINT64_MAX};
    for (uint32_t step = 0; step < STEPS; step++) {
        cxlkv_sequence *s = &made[random_below(&seed, SEQUENCES)];
        now += random_below(&seed, 4);
        if (s->deadline_place && random_below(&seed, 3) == 0) {
            deadlines_remove(&all, s);
            CHECK(s->deadline_place == 0);
            deadlines_remove(&all, s); /* a second time does nothing */
            removed++;
        } else if (!s->deadline_place) {
            s->lease_deadline_ns = now + random_below(&seed, 200); /* several of one deadline */
            CHECK(deadlines_add(&all, s) == 0 && is_there(&all, s));
        }
        CHECK(all.first_ns == earliest_of());
        CHECK(deadlines_any_ended(&all, now) == (now > earliest_of()));
        if (random_below(&seed, 8)) continue;
        for (uint64_t before = earliest_of(); (s = deadlines_ended(&all, now)); ended++) {
            CHECK(s->lease_deadline_ns == before && before < now && s->deadline_place == 0);
            before = earliest_of();
        }
        CHECK(earliest_of() >= now);
    }
    CHECK(ended > STEPS / 20 && removed > STEPS / 20);
    free(all.heap);
}

static cxlkv_sequence *hit_for(cxlkv_pool *pool, const uint8_t *key, double lease_s) {
    cxlkv_sequence *hit;
    CHECK(test_match(pool, 1, key, lease_s, &hit) == TEST_PAGE_TOKENS);
    return hit;
}

/* A hit that a call works on when it ends keeps its pages, and loses them at the next look. */
static void check_hits(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    const deadlines *all = &sequences_of(pool)->deadlines;
    cxlkv_sequence *hits[4];
    const uint8_t key[16] = {7};
    uint64_t marks[TEST_PAGE_TOKENS];
    cxlkv_sequence *source = test_written(pool, marks, 1, TEST_PAGE_TOKENS);
    CHECK(cxlkv_publish(source, 1, TEST_PAGE_TOKENS, key, 0) == 1);
    for (int i = 3; i >= 0; i--) hits[i] = hit_for(pool, key, i < 3 ? 1e-9 : 1000.0);
    CHECK(all->count >= 1 && hits[3]->deadline_place);
    pthread_rwlock_rdlock(&hits[0]->lock);
    while (boottime_ns() <= hits[0]->lease_deadline_ns) {}
    sequences_expire(pool);
    CHECK(hits[2]->expired && hits[1]->expired && !hits[0]->expired && !hits[3]->expired);
    CHECK(hits[0]->deadline_place && !hits[2]->deadline_place && all->count == 2);
    pthread_rwlock_unlock(&hits[0]->lock);
    sequences_expire(pool);
    CHECK(hits[0]->expired && hits[0]->page_count == 0 && all->count == 1);
    cxlkv_sequence_destroy(&hits[3]); /* before its end: it is not looked for any more */
    CHECK(all->count == 0 && all->first_ns == UINT64_MAX);
    for (int i = 0; i < 3; i++) cxlkv_sequence_destroy(&hits[i]);
    test_end(&pool, &source, NULL);
}

int main(void) {
    check_order();
    check_hits();
    return 0;
}
