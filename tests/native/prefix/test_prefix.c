/* Goal: BLAKE2s is that of RFC 7693, and page keys are what hashlib makes of them, however many
 * pages are hashed together and whatever the CPU has.
 * A tail keeps its number of tokens when it is forgotten.
 * Method: known answers; eight messages together against one by one; each instruction set. */
#include "check.h"
#include "host/locks.h"
#include "kernels/blake2s.h"
#include "pages/pages.h"
#include "pages/published.h"

static void check_hex(const void *bytes, const char *hex) {
    char text[65];
    for (size_t i = 0; i < strlen(hex) / 2; i++)
        snprintf(text + 2 * i, 3, "%02x", ((const uint8_t *)bytes)[i]);
    if (strcmp(text, hex) != 0) fprintf(stderr, "%s, not %s\n", text, hex);
    CHECK(strcmp(text, hex) == 0);
}

/* RFC 7693, appendix B; the digest of nothing from the vectors that the authors publish. */
static void known_answers(void) {
    const char none[8] = {0};
    uint32_t block[BLAKE2S_BLOCK_WORDS] = {0};
    blake2s state;
    blake2s_begin(&state, 32, none, 0);
    blake2s_last(&state, block, 0);
    check_hex(state.h, "69217a3079908094e11121d042354a7c1f55b6482ca1a51e1b250dfd1ed0eef9");
    memcpy(block, "abc", 3);
    blake2s_begin(&state, 32, none, 0);
    blake2s_last(&state, block, 3);
    check_hex(state.h, "508c5e8c327c14e2e1a72ba34eeb452f37458b209ed63a294d999b4c86675982");
}

static void lanes_agree(uint64_t *seed) {
    for (uint32_t count = 1; count <= 70; count++) {
        int64_t numbers[BLAKE2S_LANES * 70];
        uint32_t h[BLAKE2S_LANES][8], high[BLAKE2S_LANES];
        blake2s start;
        for (uint32_t i = 0; i < BLAKE2S_LANES * count; i++)
            numbers[i] = (int64_t)(random_next(seed) >> (i % 7 ? 32 : 0));
        blake2s_begin(&start, 32, "a person", random_next(seed));
        blake2s_lanes(&start, numbers, count, h, high);
        for (uint32_t lane = 0; lane < BLAKE2S_LANES; lane++) {
            blake2s state = start;
            uint32_t block[BLAKE2S_BLOCK_WORDS], filled = 0, any = 0;
            memset(block, 0, sizeof(block));
            for (uint32_t i = 0; i < count; i++) {
                uint64_t number = (uint64_t)numbers[lane * count + i];
                if (filled == BLAKE2S_BLOCK_WORDS) {
                    blake2s_block(&state, block);
                    memset(block, 0, sizeof(block));
                    filled = 0;
                }
                block[filled++] = (uint32_t)number;
                any |= (uint32_t)(number >> 32);
            }
            blake2s_last(&state, block, 4 * filled);
            CHECK(memcmp(state.h, h[lane], sizeof(state.h)) == 0 && any == high[lane]);
        }
    }
}

/* Messages of other lengths, behind a block that they have in common, and without one. */
static void last_lanes_agree(uint64_t *seed) {
    for (uint32_t round = 0; round < 100; round++) {
        uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS] = {{0}};
        uint32_t bytes[BLAKE2S_LANES], h[BLAKE2S_LANES][8];
        blake2s start;
        blake2s_begin(&start, 16, "a person", random_next(seed));
        for (uint32_t lane = 0; lane < BLAKE2S_LANES; lane++) {
            bytes[lane] = (uint32_t)(random_next(seed) % (sizeof(blocks[lane]) + 1));
            for (uint32_t i = 0; i < bytes[lane]; i++)
                ((uint8_t *)blocks[lane])[i] = (uint8_t)random_next(seed);
        }
        if (round % 2) blake2s_block(&start, blocks[round % BLAKE2S_LANES]);
        blake2s_last_lanes(&start, blocks, bytes, h);
        for (uint32_t lane = 0; lane < BLAKE2S_LANES; lane++) {
            blake2s state = start;
            blake2s_last(&state, blocks[lane], bytes[lane]);
            CHECK(memcmp(state.h, h[lane], sizeof(state.h)) == 0);
        }
    }
}

/* As tests/test_prefix.py makes them with hashlib: ids 3 i, for i = 0 to 99 but 2^40 for i = 40, in
 * pages of 10; salt "s". The last key of each kind, and that of 1 and of 9 tokens behind page 9. */
static void known_keys(void) {
    int64_t ids[100];
    uint8_t root[16], keys[10 * 16], tails[9 * 16], every[100 * 16];
    blake2s state;
    uint32_t block[BLAKE2S_BLOCK_WORDS] = {'s'};
    for (int i = 0; i < 100; i++) ids[i] = i == 40 ? 1ll << 40 : 3 * i;
    blake2s_begin(&state, 16, "cxlkvslt", 0);
    blake2s_last(&state, block, 1);
    memcpy(root, state.h, sizeof(root));
    check_hex(root, "b250af1dd75971536ba524c1f3a34f36");
    CHECK(cxlkv_page_keys(ids, 100, 10, CXLKV_KEYS_CHAINED, root, keys) == 10);
    check_hex(keys, "3139ee35b0f0182356c964e183b468ec");
    check_hex(keys + 9 * 16, "eaf42d4421e4256bbc34cf2ddc44d0d4");
    CHECK(cxlkv_page_keys(ids, 9, 0, CXLKV_KEYS_TAIL, keys + 9 * 16, tails) == 9);
    check_hex(tails, "2f6bbb5b5f2d3b4640ed120304f548c9");
    check_hex(tails + 8 * 16, "13b0f0db0e0412df994e51d45df7b3a0");
    CHECK(cxlkv_page_keys(ids, 100, 10, CXLKV_KEYS_CONTENT, root, keys) == 10);
    check_hex(keys + 9 * 16, "78f2cb44199a1a327ca238d4056d5f5d");
    CHECK(cxlkv_page_keys(ids, 99, 100, CXLKV_KEYS_CHAINED, root, keys) == 0);
    CHECK(cxlkv_page_keys(ids, 99, 0, CXLKV_KEYS_CHAINED, root, keys) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_page_keys(ids, 99, 10, 4, root, keys) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_page_keys(ids, 100, 0, CXLKV_KEYS_EVERY, root, every) == -CXLKV_E_ARGUMENT);
    CHECK(cxlkv_page_keys(ids, 100, 10, CXLKV_KEYS_EVERY, root, every) == 100);
    check_hex(every + 9 * 16, "3139ee35b0f0182356c964e183b468ec");
    check_hex(every + 99 * 16, "eaf42d4421e4256bbc34cf2ddc44d0d4");
    CHECK(cxlkv_page_keys(ids + 90, 9, 0, CXLKV_KEYS_TAIL, every + 89 * 16, tails) == 9);
    CHECK(memcmp(every + 90 * 16, tails, sizeof(tails)) == 0);
}

/* As by a match of another process that was just going to copy it. */
static void a_held_tail_is_forgotten(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    uint64_t marks[3], hash[2];
    const int64_t ids[3] = {5, 6, 7};
    uint8_t root[16] = {9}, keys[3 * 16];
    uint32_t alone;
    CHECK(cxlkv_pages_alloc(pool, 1, &alone) == 1);
    cxlkv_sequence *sequence = test_written(pool, marks, 1, 3);
    CHECK(cxlkv_page_keys(ids, 3, 0, CXLKV_KEYS_TAIL, root, keys) == 3);
    CHECK(cxlkv_publish_tail(sequence, 3, root, keys + 2 * 16) == 1);
    page_hash(keys, 2, 0, 0, hash);
    CHECK(host_lock(pool) == 0);
    uint32_t page = index_find(pool, hash);
    CHECK(page != NO_PAGE && page / RUN_SLOTS == alone / RUN_SLOTS); /* no run of its own */
    pages_hold(pool, 1, &page);
    host_unlock(pool);
    CHECK(cxlkv_forget(pool, 1, keys + 2 * 16, NULL) == 1);
    test_clean(pool); /* it has 3 tokens, as its header says */
    CHECK(host_lock(pool) == 0);
    pages_drop(pool, 1, &page);
    host_unlock(pool);
    cxlkv_sequence_destroy(&sequence);
    CHECK(cxlkv_pages_free(pool, 1, &alone) == 1);
    CHECK(test_stats(pool).pages.free == test_stats(pool).pages.total);
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    const char *const names[] = {"serial", "auto"};
    uint64_t seed = 11;
    for (int i = 0; i < 2; i++) {
        CHECK(kernels_force(names[i]) == 0);
        known_answers();
        lanes_agree(&seed);
        last_lanes_agree(&seed);
        known_keys();
    }
    a_held_tail_is_forgotten();
    return 0;
}
