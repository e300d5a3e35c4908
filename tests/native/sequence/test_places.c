/* Goal: the places of pages are where their bytes lie. Method: sequences of every kind of page
 * (sealed, not yet sealed, open tail, behind a window), and the numbers read at these offsets are
 * those that were appended. Values in the keys are tests/test_places.py's, what is verified before
 * a device reads it is tests/test_verify.py's. */
#include "check.h"

enum { ROOM = 16 };
typedef struct places {
    int64_t keys[ROOM], values[ROOM], descriptors[ROOM];
    uint32_t pages[ROOM];
    uint64_t generations[ROOM];
} places;

static int64_t places_of(cxlkv_sequence *sequence, uint32_t layer, uint64_t first,
                         uint64_t capacity, places *out) {
    memset(out, 0xee, sizeof(*out));
    return cxlkv_sequence_places(sequence, layer, first, capacity, out->keys, out->values,
                                 out->descriptors, out->pages, out->generations);
}

/* Entry i is page `first` + i of a layer, whose tokens are marks[0..). */
static void check_bytes(cxlkv_pool *pool, const places *at, uint32_t i, uint32_t layer,
                        const uint64_t *marks) {
    uint64_t address;
    int64_t region_bytes = cxlkv_pool_memory(pool, &address);
    const uint8_t *region = (const uint8_t *)(uintptr_t)address;
    CHECK(region_bytes == (int64_t)pool->geometry.region_bytes);
    CHECK(at->keys[i] > 0 && at->keys[i] < region_bytes && at->keys[i] % LINE_BYTES == 0);
    CHECK(at->values[i] > 0 && at->values[i] < region_bytes && at->values[i] % LINE_BYTES == 0);
    for (uint32_t h = 0; h < TEST_HEADS; h++)
        for (uint32_t t = 0; t < TEST_PAGE_TOKENS; t++)
            for (uint32_t d = 0; d < TEST_DIM; d++) {
                float k, v;
                size_t in_piece = (t * TEST_DIM + d) * sizeof(float);
                memcpy(&k, region + at->keys[i] + h * pool->geometry.key_piece_bytes + in_piece, 4);
                memcpy(&v, region + at->values[i] + h * pool->geometry.value_piece_bytes + in_piece,
                       4);
                CHECK(k == test_value(marks[t], layer, 0, h, d));
                CHECK(v == test_value(marks[t], layer, 1, h, d));
            }
}

static void sealed_and_not(void) {
    cxlkv_pool *pool = test_pool(NULL, 16);
    uint64_t marks[18];
    places at;
    test_marks(marks, 1, 18);
    cxlkv_sequence *sequence = test_empty(pool);
    CHECK(places_of(sequence, 0, 0, ROOM, &at) == 0);
    CHECK(test_append_all(sequence, marks, 10) >= 0);
    CHECK(test_append(sequence, 0, marks + 10, 8) >= 0); /* pages 2 and 3 in layer 0 only */
    CHECK(places_of(sequence, 1, 0, ROOM, &at) == 2);
    CHECK(places_of(sequence, 0, 0, ROOM, &at) == 4);
    for (uint32_t i = 0; i < 4; i++) {
        check_bytes(pool, &at, i, 0, marks + i * TEST_PAGE_TOKENS);
        CHECK(at.pages[i] < pool->geometry.page_count);
        CHECK(at.generations[i] == pool->pages[at.pages[i]].generation);
        if (i >= 2) {
            CHECK(at.descriptors[i] == -1);
            continue;
        }
        descriptor line;
        memcpy(&line, pool->region.base + at.descriptors[i], sizeof(line));
        CHECK(line.page == at.pages[i] && line.version == (at.generations[i] << 8 | PAGE_SEALED));
    }
    CHECK(at.keys[4] == (int64_t)0xeeeeeeeeeeeeeeee && at.pages[4] == 0xeeeeeeee);
    /* From a page on, and no more than there is room for. */
    places later;
    CHECK(places_of(sequence, 0, 2, 1, &later) == 2);
    CHECK(later.keys[0] == at.keys[2] && later.pages[0] == at.pages[2]);
    CHECK(later.keys[1] == (int64_t)0xeeeeeeeeeeeeeeee);
    CHECK(cxlkv_sequence_places(sequence, 0, 0, 0, NULL, NULL, NULL, NULL, NULL) == 4);
    CHECK(places_of(sequence, 0, 4, ROOM, &at) == 0);
    CHECK(places_of(sequence, 0, UINT64_MAX, ROOM, &at) == 0);
    CHECK(places_of(sequence, 2, 0, ROOM, &at) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_sequence_release(sequence) == 0);
    CHECK(places_of(sequence, 0, 0, ROOM, &at) == -CXLKV_E_RELEASED);
    cxlkv_sequence_destroy(&sequence);
    uint64_t address;
    CHECK(cxlkv_pool_close(pool, 0) == 0);
    CHECK(cxlkv_pool_memory(pool, &address) == -CXLKV_E_CLOSED);
    cxlkv_pool_destroy(&pool);
}

static void behind_a_window(void) {
    cxlkv_pool *pool = test_window_pool(1, 5);
    uint64_t marks[24];
    places at;
    test_marks(marks, 1, 24);
    cxlkv_sequence *sequence = test_empty(pool);
    for (uint32_t step = 0; step < 24; step += 4)
        CHECK(test_append_all(sequence, marks + step, 4) >= 0);
    CHECK(places_of(sequence, 1, 0, ROOM, &at) == 6);
    uint32_t gone = 0;
    while (gone < 6 && at.pages[gone] == NO_PAGE) {
        CHECK(at.keys[gone] == -1 && at.values[gone] == -1 && at.descriptors[gone] == -1);
        CHECK(at.generations[gone++] == 0);
    }
    CHECK(gone >= 2 && gone <= 4);
    for (uint32_t i = gone; i < 6; i++) check_bytes(pool, &at, i, 1, marks + i * 4);
    CHECK(places_of(sequence, 0, 0, ROOM, &at) == 6);
    for (uint32_t i = 0; i < 6; i++) check_bytes(pool, &at, i, 0, marks + i * 4);
    test_end(&pool, &sequence, NULL);
}

int main(void) {
    sealed_and_not();
    behind_a_window();
    return 0;
}
