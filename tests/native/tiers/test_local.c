/* Goal: copies are read exactly while they are right, whatever threads and pages do meanwhile, and
 * free + held + reserved = total. Method: a promotion broken off between its steps, pages freed and
 * reused under their copies, a damaged piece, a fork, a process that dies in a promotion; then
 * threads that promote and demote while others read, each reading checked. For ASan and TSan. */
#include "check.h"
#include "tiers/local_tier.h"

#ifdef __SANITIZE_THREAD__
enum { ROUNDS = 300, FORKS = 0 }; /* it takes a child's locks for those that its parent holds */
#else
enum { ROUNDS = 1500, FORKS = 1 };
#endif
enum { TOKENS = 40, PAGES = TOKENS / TEST_PAGE_TOKENS, SLOTS = 6 };

static uint64_t unit_bytes(const cxlkv_pool *pool) {
    return TEST_HEADS * (pool->geometry.key_piece_bytes + pool->geometry.value_piece_bytes);
}

static cxlkv_local_state local_state(cxlkv_pool *pool) {
    cxlkv_local_state state;
    CHECK(cxlkv_local_stats(pool, &state) == 0);
    CHECK(state.slots_free + state.slots_held + state.slots_reserved == state.slots_total);
    return state;
}

static int64_t unit_at(const cxlkv_sequence *sequence, uint32_t index, uint32_t layer) {
    return (int64_t)unit_of(sequence->pool, sequence_page(sequence, 0, index), layer);
}

static int64_t promote_one(cxlkv_pool *pool, int64_t unit, int32_t wanted) {
    int32_t code = -1;
    int64_t done = cxlkv_local_move(pool, 0, 1, &unit, NULL, &code);
    CHECK(done == (wanted == CXLKV_LOCAL_DONE) && code == wanted);
    return done;
}

/* Which copies are read is told by their bytes: one is changed, and fetch sees it. */
static void spoil(cxlkv_pool *pool, int64_t unit, uint8_t change) {
    uint32_t entry = atomic_load(&tier_of(pool)->table[unit]);
    CHECK(entry && !(entry & LOCAL_ON_ITS_WAY));
    tier_of(pool)->memory[(entry - 1) * tier_of(pool)->unit_bytes] ^= change;
}

static float first_key(cxlkv_sequence *sequence, uint32_t layer) {
    enum { FLOATS = TEST_HEADS * PAGES * TEST_PAGE_TOKENS * TEST_DIM };
    static float out[2][FLOATS];
    cxlkv_fetch_args args = {.layer = layer, .keys = out[0], .values = out[1],
                             .key_capacity_bytes = sizeof(out[0]),
                             .value_capacity_bytes = sizeof(out[1])};
    cxlkv_batch *batch = test_batch(sequence->pool, 1, &sequence);
    CHECK(cxlkv_batch_fetch(batch, &args) >= 0);
    cxlkv_batch_destroy(&batch);
    return out[0][0];
}

static void copies_are_read(cxlkv_pool *pool) {
    uint64_t marks[TOKENS];
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS);
    int64_t unit = unit_at(sequence, 0, 1);
    float key = first_key(sequence, 1);
    promote_one(pool, unit, CXLKV_LOCAL_DONE);
    promote_one(pool, unit, CXLKV_LOCAL_THERE);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    spoil(pool, unit, 1);
    CHECK(first_key(sequence, 1) != key && first_key(sequence, 0) != key);
    for (int64_t held = 1; held >= 0; held--)
        CHECK(cxlkv_local_move(pool, 1, 1, &unit, NULL, NULL) == held);
    CHECK(first_key(sequence, 1) == key);
    cxlkv_sequence_destroy(&sequence);
    CHECK(local_state(pool).slots_free == SLOTS);
}

static void refusals(cxlkv_pool *pool) {
    uint64_t marks[TOKENS], wanted = 77;
    int32_t codes[PAGES];
    int64_t units[PAGES], wrong = (int64_t)tier_of(pool)->unit_count;
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS), *open;
    for (uint32_t i = 0; i < PAGES; i++) units[i] = unit_at(sequence, i, 0);
    promote_one(pool, -1, CXLKV_LOCAL_UNKNOWN);
    promote_one(pool, wrong, CXLKV_LOCAL_UNKNOWN);
    CHECK(cxlkv_local_move(pool, 0, 1, units, &wanted, codes) == 0);
    CHECK(codes[0] == CXLKV_LOCAL_CHANGED);
    CHECK(cxlkv_sequence_create(pool, &open) == 0); /* layer 1 of its page is not written */
    CHECK(test_append(open, 0, marks, TEST_PAGE_TOKENS) >= 0);
    promote_one(pool, unit_at(open, 0, 0), CXLKV_LOCAL_NOT_SEALED);
    int64_t free_unit = unit_at(open, 0, 0);
    cxlkv_sequence_destroy(&open);
    promote_one(pool, free_unit, CXLKV_LOCAL_NOT_SEALED);
    pieces_of(pool, sequence_page(sequence, 0, 3), 0, PIECE_VALUES)[5] ^= 16;
    promote_one(pool, units[3], CXLKV_LOCAL_DAMAGED);
    CHECK(local_state(pool).slots_free == SLOTS && local_state(pool).undone > 0);
    pieces_of(pool, sequence_page(sequence, 0, 3), 0, PIECE_VALUES)[5] ^= 16;
    CHECK(cxlkv_local_move(pool, 0, PAGES, units, NULL, codes) == SLOTS);
    for (uint32_t i = 0; i < PAGES; i++)
        CHECK(codes[i] == (i < SLOTS ? CXLKV_LOCAL_DONE : CXLKV_LOCAL_NO_ROOM));
    CHECK(local_state(pool).refused_no_room == PAGES - SLOTS);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    cxlkv_sequence_destroy(&sequence);
    CHECK(cxlkv_local_hotness(pool, NULL, NULL, NULL, 0) == 0); /* which drops what was freed */
    CHECK(local_state(pool).slots_free == SLOTS && local_state(pool).dropped == SLOTS);
}

/* Broken off before the copy and after it, with one page changed in between. */
static void between_the_steps(cxlkv_pool *pool) {
    uint64_t marks[TOKENS];
    cxlkv_sequence *sequence = test_written(pool, marks, 1, TOKENS);
    local_move moves[3];
    uint32_t pages_free = (uint32_t)test_stats(pool).pages.free;
    for (int copies = 0; copies < 2; copies++) {
        for (uint32_t i = 0; i < 3; i++)
            moves[i] = (local_move){.unit = unit_at(sequence, i, 1)};
        moves[2].unit = moves[0].unit; /* twice in one call */
        CHECK(local_prepare(pool, moves, 3) == 0);
        CHECK(moves[0].reserved && moves[1].reserved && moves[2].code == CXLKV_LOCAL_THERE);
        CHECK(local_state(pool).slots_reserved == 2);
        promote_one(pool, moves[1].unit, CXLKV_LOCAL_THERE); /* on its way */
        CHECK(cxlkv_local_move(pool, 1, 1, &moves[1].unit, NULL, NULL) == 0);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0); /* and not read yet */
        if (copies) CHECK(local_copy(pool, moves, 3) == 0);
        pool->pages[moves[0].page].generation++;
        CHECK(local_complete(pool, moves, 3, true) == copies);
        pool->pages[moves[0].page].generation--;
        CHECK(moves[0].code == CXLKV_LOCAL_CHANGED);
        CHECK(local_state(pool).slots_reserved == 0);
        CHECK(local_state(pool).slots_held == (uint64_t)copies);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    }
    CHECK(cxlkv_local_move(pool, 1, 1, &moves[1].unit, NULL, NULL) == 1);
    /* The sequence goes while its page is copied: the promotion's own reference keeps the page. */
    moves[0] = (local_move){.unit = unit_at(sequence, 0, 0)};
    CHECK(local_prepare(pool, moves, 1) == 0);
    cxlkv_sequence_destroy(&sequence);
    CHECK(test_stats(pool).pages.free == pages_free + PAGES - 1);
    CHECK(local_copy(pool, moves, 1) == 0 && local_complete(pool, moves, 1, true) == 1);
    CHECK(test_stats(pool).pages.free == pages_free + PAGES);
    CHECK(cxlkv_local_hotness(pool, NULL, NULL, NULL, 0) == 0);
}

/* The slot behind is not the page that it was: its unit has an old copy, which is not read. */
static void reused_pages(cxlkv_pool *pool) {
    uint64_t marks[TOKENS];
    for (uint64_t round = 0; round < 20; round++) {
        cxlkv_sequence *sequence = test_written(pool, marks, 1000 * round, TOKENS);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        for (uint32_t i = 0; i < 2; i++)
            promote_one(pool, unit_at(sequence, i, (uint32_t)round % 2), CXLKV_LOCAL_DONE);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        CHECK(local_state(pool).slots_held <= SLOTS);
        cxlkv_sequence_destroy(&sequence);
    }
    CHECK(local_state(pool).dropped > 20);
    CHECK(cxlkv_local_hotness(pool, NULL, NULL, NULL, 0) == 0);
}

static void forked(cxlkv_pool *pool) {
    uint64_t marks[TOKENS];
    cxlkv_sequence *sequence = test_written(pool, marks, 5, TOKENS);
    int64_t unit = unit_at(sequence, 0, 1);
    promote_one(pool, unit, CXLKV_LOCAL_DONE);
    local_move move = {.unit = unit_at(sequence, 1, 1)};
    pid_t child = test_fork();
    if (child == 0) {
        cxlkv_local_state state;
        CHECK(cxlkv_local_stats(pool, &state) == -CXLKV_E_CLOSED);
        CHECK(cxlkv_local_move(pool, 1, 1, &unit, NULL, NULL) == -CXLKV_E_CLOSED);
        CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
        CHECK(cxlkv_local_make(pool, SLOTS * unit_bytes(pool)) == 0);
        promote_one(pool, unit, CXLKV_LOCAL_DONE);
        CHECK(local_prepare(pool, &move, 1) == 0 && local_copy(pool, &move, 1) == 0);
        _exit(0); /* killed in the middle of it */
    }
    test_ended(child, 0);
    CHECK(test_stats(pool).processes == 1); /* which gave back what the child held */
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
    CHECK(local_state(pool).slots_held == 1);
    cxlkv_sequence_destroy(&sequence);
    CHECK(test_stats(pool).pages.held == 0);
}

/* ---- threads ---- */

static cxlkv_pool *shared_pool;
static cxlkv_sequence *common;
static uint64_t common_marks[TOKENS];
static atomic_uint finished;

static void *read_on(void *argument) {
    uint64_t seed = (uintptr_t)argument, marks[TOKENS];
    for (uint32_t i = 0; i < ROUNDS; i++) {
        CHECK(test_verify(common, i % TEST_LAYERS, common_marks, TOKENS) == 0);
        if (i % 8) continue;
        cxlkv_sequence *own = test_written(shared_pool, marks, random_next(&seed) >> 8, 12);
        promote_one(shared_pool, -1, CXLKV_LOCAL_UNKNOWN);
        int64_t units[2] = {unit_at(own, 0, 0), unit_at(own, 1, 1)};
        int32_t codes[2];
        CHECK(cxlkv_local_move(shared_pool, 0, 2, units, NULL, codes) >= 0);
        CHECK(test_verify_all(own, marks, 12) == 0);
        cxlkv_sequence_destroy(&own);
    }
    atomic_fetch_add(&finished, 1);
    return NULL;
}

static void *move_on(void *argument) {
    uint64_t seed = (uintptr_t)argument;
    while (atomic_load(&finished) < 2) {
        int64_t units[4];
        int32_t codes[4];
        for (int i = 0; i < 4; i++)
            units[i] = unit_at(common, random_below(&seed, PAGES), random_below(&seed, 2));
        CHECK(cxlkv_local_move(shared_pool, 0, 4, units, NULL, codes) >= 0);
        CHECK(cxlkv_local_move(shared_pool, 1, 2, units, NULL, NULL) >= 0);
        local_state(shared_pool);
        CHECK(cxlkv_local_hotness(shared_pool, NULL, NULL, NULL, 0) >= 0);
        sched_yield();
    }
    return NULL;
}

static void threads(cxlkv_pool *pool) {
    pthread_t made[4];
    shared_pool = pool;
    common = test_written(pool, common_marks, 3, TOKENS);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, 2) == 0);
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&made[i], NULL, i < 2 ? read_on : move_on, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++) pthread_join(made[i], NULL);
    CHECK(local_state(pool).promoted > 50 && local_state(pool).demoted > 20);
    cxlkv_sequence_destroy(&common);
}

int main(void) {
    const char *path = test_path("local");
    cxlkv_pool *pool = test_pool(path, 48);
    cxlkv_local_state state;
    CHECK(cxlkv_local_stats(pool, &state) == -CXLKV_E_CLOSED);
    CHECK(cxlkv_local_make(pool, unit_bytes(pool) - 1) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_local_make(pool, UINT64_MAX / 2) >= 0); /* no more than there are units */
    CHECK(local_state(pool).slots_total == tier_of(pool)->unit_count);
    CHECK(cxlkv_local_make(pool, 0) == 0 && cxlkv_local_make(pool, 0) == 0);
    CHECK(cxlkv_local_make(pool, SLOTS * unit_bytes(pool) + 1) == 0);
    CHECK(cxlkv_local_make(pool, SLOTS * unit_bytes(pool)) == -CXLKV_E_BUSY);
    copies_are_read(pool);
    refusals(pool);
    between_the_steps(pool);
    reused_pages(pool);
    if (FORKS) forked(pool);
    threads(pool);
    test_clean(pool);
    CHECK(test_stats(pool).pages.held == 0);
    CHECK(cxlkv_pool_close(pool, 0) == 0); /* with copies in the tier */
    CHECK(cxlkv_local_stats(pool, &state) == -CXLKV_E_CLOSED);
    test_remove(&pool, path);
    return 0;
}
