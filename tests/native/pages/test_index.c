/* Goal: the index of published pages finds what was put in, and nothing else, through erasures.
 * Method: random insert, erase and find against a plain array; hashes that collide on purpose, at
 * the table's wrap as well. */
#include "check.h"
#include "pages/published.h"

enum { KEYS = 120, STEPS = 60000 };

int main(void) {
    uint64_t seed = 7;
    cxlkv_pool *pool = test_pool(NULL, 128);
    uint32_t capacity = pool->host->index_capacity, inserted = 0, erased = 0;
    uint64_t hashes[KEYS][2];
    uint32_t model[KEYS];
    CHECK(KEYS <= pool->host->page_count && (capacity & (capacity - 1)) == 0);
    for (uint32_t i = 0; i < KEYS; i++) {
        /* A third start in the last three places, a third in five, a third anywhere. */
        uint64_t home = i % 3 == 0 ? capacity - 1 - i / 3 % 3 : i % 3 == 1 ? i / 3 % 5
                                                                           : random_next(&seed);
        hashes[i][0] = (home & 0xffffffffu) | (uint64_t)i << 32;
        hashes[i][1] = 0;
        model[i] = NO_PAGE;
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t key = random_below(&seed, KEYS);
        bool insert = random_below(&seed, 100) < (step < STEPS / 2 ? 60u : 40u);
        CHECK(index_find(pool, hashes[key]) == model[key]);
        if (insert) {
            CHECK(index_insert(pool, hashes[key], key) == (model[key] == NO_PAGE));
            inserted += model[key] == NO_PAGE;
            model[key] = key;
        } else {
            index_erase(pool, hashes[key]);
            erased += model[key] != NO_PAGE;
            model[key] = NO_PAGE;
        }
        if (step % 64 == 0)
            for (uint32_t i = 0; i < KEYS; i++) CHECK(index_find(pool, hashes[i]) == model[i]);
    }
    CHECK(inserted > STEPS / 20 && erased > STEPS / 20);
    /* A page number that no page has is a miss, whoever wrote it there. */
    index_clear(pool);
    CHECK(index_insert(pool, hashes[0], pool->host->page_count));
    CHECK(index_find(pool, hashes[0]) == NO_PAGE);
    index_clear(pool);
    for (uint32_t i = 0; i < KEYS; i++) CHECK(index_find(pool, hashes[i]) == NO_PAGE);
    cxlkv_pool_destroy(&pool);
    return 0;
}
