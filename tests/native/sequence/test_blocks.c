/* Goal: whole blocks of an engine's memory come back as they were, whatever their bits, and nothing
 * beside them is read or written. Method: each block is an allocation of its own, exactly as long
 * as it is, so that a sanitizer sees what lies beside; with each instruction set of this CPU, by
 * several threads. */
#include "kernel_tests.h"

enum { BLOCKS = 24, BLOCK_TOKENS = 3 * TEST_PAGE_TOKENS, SEQUENCES = 3 };
enum { HEAD_BYTES = BLOCK_TOKENS * TEST_DIM * 2, BLOCK_BYTES = TEST_HEADS * HEAD_BYTES };

static uint64_t seed = 771;

static cxlkv_pool *pool_of(uint32_t checksum, uint32_t threads) {
    cxlkv_layout layout = test_layout();
    cxlkv_pool *pool;
    layout.dtype = CXLKV_BFLOAT16;
    layout.checksum = checksum;
    CHECK(cxlkv_pool_create(NULL, &layout, NULL, 4 << 20, threads, NULL, 0, &pool) == 0);
    return pool;
}

/* The only block of a tensor, of random bits; NaN among them. */
static uint8_t *block_make(void) {
    uint8_t *made = malloc(BLOCK_BYTES);
    CHECK(made);
    for (uint32_t i = 0; i < BLOCK_BYTES; i++) made[i] = (uint8_t)random_next(&seed);
    memset(made + random_below(&seed, BLOCK_BYTES - 8), 0xff, 8);
    return made;
}

static cxlkv_blocks table_of(uint8_t *keys, uint8_t *values, const int32_t *starts,
                             const int32_t *blocks) {
    return (cxlkv_blocks){.keys = keys, .values = values,
                          .key_stride_bytes = {BLOCK_BYTES, HEAD_BYTES},
                          .value_stride_bytes = {BLOCK_BYTES, HEAD_BYTES}, .block_count = 1,
                          .block_tokens = BLOCK_TOKENS, .dtype = CXLKV_BFLOAT16,
                          .starts = starts, .blocks = blocks};
}

/* One block after the other, each in memory of its own. */
static void test_round_trip(cxlkv_pool *pool) {
    uint8_t *kept[TEST_LAYERS][4][2];
    const int32_t starts[2] = {0, 1}, block = 0;
    cxlkv_sequence *sequence = test_empty(pool);
    cxlkv_batch *batch = test_batch(pool, 1, &sequence);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t layer = 0; layer < TEST_LAYERS; layer++) {
            for (uint32_t kind = 0; kind < 2; kind++) kept[layer][i][kind] = block_make();
            cxlkv_blocks table =
                table_of(kept[layer][i][0], kept[layer][i][1], starts, &block);
            CHECK(cxlkv_batch_append_blocks(batch, layer, &table, -1) == BLOCK_TOKENS);
        }
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t layer = 0; layer < TEST_LAYERS; layer++) {
            uint8_t *to[2] = {block_make(), block_make()};
            cxlkv_blocks table = table_of(to[0], to[1], starts, &block);
            int32_t first = (int32_t)i * BLOCK_TOKENS / TEST_PAGE_TOKENS, good = -1;
            CHECK(cxlkv_batch_fetch_blocks(batch, layer, &table, &first, &good) ==
                  2 * BLOCK_BYTES);
            CHECK(good == 1);
            for (uint32_t kind = 0; kind < 2; kind++) {
                CHECK(memcmp(to[kind], kept[layer][i][kind], BLOCK_BYTES) == 0);
                free(to[kind]);
                free(kept[layer][i][kind]);
            }
        }
    cxlkv_batch_destroy(&batch);
    cxlkv_sequence_destroy(&sequence);
}

/* Many at once, shared out among threads; then pieces of two of them are damaged. */
static void test_threads(void) {
    cxlkv_pool *pool = pool_of(1, 4);
    cxlkv_sequence *sequences[SEQUENCES];
    size_t bytes = (size_t)BLOCKS * BLOCK_BYTES;
    uint8_t *from[2] = {malloc(bytes), malloc(bytes)}, *to[2] = {malloc(bytes), malloc(bytes)};
    const int32_t starts[SEQUENCES + 1] = {0, 9, 9, BLOCKS}, first[SEQUENCES] = {0};
    int32_t blocks[BLOCKS], good[SEQUENCES];
    for (uint32_t i = 0; i < SEQUENCES; i++)
        CHECK(cxlkv_sequence_create(pool, &sequences[i]) == 0);
    cxlkv_batch *batch = test_batch(pool, SEQUENCES, sequences);
    for (uint32_t i = 0; i < BLOCKS; i++) blocks[i] = (int32_t)(i * 7 % BLOCKS);
    for (size_t i = 0; i < bytes; i++)
        for (uint32_t kind = 0; kind < 2; kind++) from[kind][i] = (uint8_t)random_next(&seed);
    cxlkv_blocks source = table_of(from[0], from[1], starts, blocks);
    cxlkv_blocks target = table_of(to[0], to[1], starts, blocks);
    source.block_count = target.block_count = BLOCKS;
    CHECK(cxlkv_batch_append_blocks(batch, 0, &source, -1) == BLOCKS * BLOCK_TOKENS);
    CHECK(cxlkv_batch_fetch_blocks(batch, 0, &target, first, good) == (int64_t)(2 * bytes));
    CHECK(good[0] == 9 && good[1] == 0 && good[2] == BLOCKS - 9);
    for (uint32_t kind = 0; kind < 2; kind++) CHECK(memcmp(to[kind], from[kind], bytes) == 0);
    for (uint32_t place = 4; place <= 10; place += 6) {
        uint32_t page = sequence_page(sequences[2], 0, place * BLOCK_TOKENS / TEST_PAGE_TOKENS);
        pieces_of(pool, page, 0, PIECE_VALUES)[1] ^= 1;
    }
    CHECK(cxlkv_batch_fetch_blocks(batch, 0, &target, first, good) == -CXLKV_E_CORRUPT);
    CHECK(good[0] == 9 && good[1] == 0 && good[2] == 4);
    cxlkv_batch_destroy(&batch);
    for (uint32_t i = 0; i < SEQUENCES; i++) cxlkv_sequence_destroy(&sequences[i]);
    for (uint32_t kind = 0; kind < 2; kind++) {
        free(from[kind]);
        free(to[kind]);
    }
    cxlkv_pool_destroy(&pool);
}

static void test_isa(const kernels *isa, uint64_t *unused) {
    (void)isa, (void)unused;
    for (uint32_t checksum = 0; checksum < 2; checksum++) {
        cxlkv_pool *pool = pool_of(checksum, 1);
        test_round_trip(pool);
        test_end(&pool, NULL);
    }
}

int main(void) {
    static const char *const names[] = {"serial", "avx2", "avx512",    "avx512_bf16",
                                        "amx",    "neon", "neon_bf16", NULL};
    printf("blocks: %u instruction sets\n", test_each_isa(test_isa, seed, names));
    test_threads();
    return 0;
}
