/* Goal: pages that somebody else wrote become a sequence's as if they had been appended, or not at
 * all. Method: pieces of an appended sequence are copied to loose pages, by hand, and attached to
 * another one; random lengths, batches, forks, truncations and refusals against plain marks; and
 * each thing that must hold is broken once. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "check.h"
#include "format/records.h"

enum { COUNT_MAX = 6, TOKENS_MAX = 160, STEPS = 1500 };
static uint64_t seed = 20261122, next_mark = 1;

/* New tokens for a sequence, as another program leaves them: pages with their pieces, and CRCs. */
typedef struct arrival {
    uint64_t marks[COUNT_MAX * TEST_PAGE_TOKENS];
    uint32_t *pages, *checksums; /* [parts][count], [layers][count][heads][4] */
    uint32_t count;
} arrival;

static void copy_layer(cxlkv_pool *pool, arrival *a, uint32_t from, uint32_t to, uint32_t layer,
                       uint32_t item) {
    uint32_t *sums = a->checksums + ((uint64_t)layer * a->count + item) * TEST_HEADS * PIECE_KINDS;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        uint64_t stride = piece_stride(&pool->geometry, kind);
        memcpy(pieces_of(pool, to, layer, kind), pieces_of(pool, from, layer, kind),
               TEST_HEADS * stride);
        for (uint32_t head = 0; head < TEST_HEADS; head++)
            sums[head * PIECE_KINDS + kind] =
                crc32c(0, pieces_of(pool, to, layer, kind) + head * stride,
                       piece_data_bytes(&pool->layout, kind));
    }
}

static arrival write_elsewhere(cxlkv_pool *pool, uint32_t count) {
    uint32_t parts = pool->geometry.part_count;
    arrival a = {.count = count, .pages = malloc((parts * count + 1) * sizeof(uint32_t))};
    a.checksums = calloc(TEST_LAYERS * (count + 1) * TEST_HEADS * PIECE_KINDS, sizeof(uint32_t));
    CHECK(a.pages && a.checksums);
    test_marks(a.marks, next_mark, count * TEST_PAGE_TOKENS);
    next_mark += count * TEST_PAGE_TOKENS;
    CHECK(cxlkv_pages_alloc(pool, parts * count, a.pages) == parts * count);
    cxlkv_sequence *source = test_empty(pool);
    for (uint32_t item = 0; item < count; item++) { /* page by page: no window passes one */
        CHECK(test_append_all(source, a.marks + item * TEST_PAGE_TOKENS, TEST_PAGE_TOKENS) >= 0);
        for (uint32_t layer = 0; layer < TEST_LAYERS; layer++) {
            uint32_t part = pool->layers.part_of[layer];
            copy_layer(pool, &a, sequence_page(source, part, item), a.pages[part * count + item],
                       layer, item);
        }
    }
    cxlkv_sequence_destroy(&source);
    return a;
}

static void forget(arrival *a) {
    free(a->pages);
    free(a->checksums);
}

static int64_t attach(cxlkv_sequence *sequence, const arrival *a, bool verify) {
    int32_t starts[2] = {0, (int32_t)a->count};
    cxlkv_attach_args args = {.starts = starts, .pages = a->pages, .checksums = a->checksums,
                              .rewind = -1, .verify = verify};
    cxlkv_batch *batch;
    int64_t code = cxlkv_batch_create(sequence->pool, 1, &sequence, &batch);
    CHECK(code == 0);
    code = cxlkv_batch_attach(batch, &args);
    cxlkv_batch_destroy(&batch);
    return code;
}

/* The pages are still the caller's: they are freed, once. */
static void still_ours(cxlkv_pool *pool, arrival *a) {
    uint32_t count = pool->geometry.part_count * a->count;
    CHECK(cxlkv_pages_free(pool, count, a->pages) == count);
    forget(a);
}

static cxlkv_sequence *sequence_of(cxlkv_pool *pool, uint64_t *marks, uint32_t count) {
    next_mark += count;
    return test_written(pool, marks, next_mark - count, count);
}

/* ---- a sequence grows by appends and by attached pages, and is cut and forked ---- */

static void grow(cxlkv_sequence *sequence, uint64_t *marks, uint32_t *tokens) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t room = (TOKENS_MAX - *tokens) / TEST_PAGE_TOKENS;
    if (*tokens % TEST_PAGE_TOKENS || random_below(&seed, 2)) {
        uint32_t count = min_u32(random_below(&seed, 9), TOKENS_MAX - *tokens);
        test_marks(marks + *tokens, next_mark, count);
        next_mark += count;
        CHECK(test_append_all(sequence, marks + *tokens, count) >= 0);
        *tokens += count;
        return;
    }
    arrival a = write_elsewhere(pool, random_below(&seed, min_u32(room, COUNT_MAX) + 1));
    CHECK(attach(sequence, &a, random_below(&seed, 2)) == a.count);
    memcpy(marks + *tokens, a.marks, a.count * TEST_PAGE_TOKENS * sizeof(*marks));
    *tokens += a.count * TEST_PAGE_TOKENS;
    forget(&a);
}

static void test_against_marks(const char *path, bool shared) {
    const cxlkv_sharing sharing = {.hosts = 1};
    cxlkv_pool *pool = shared ? test_shared(path, test_layout(), sharing, 8 << 20, 60)
                              : test_pool(NULL, 300);
    CHECK((pool->mode != VISIBILITY_COHERENT) == shared);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, 3) == 0);
    static uint64_t marks[TOKENS_MAX], kept[TOKENS_MAX];
    cxlkv_sequence *sequence = sequence_of(pool, marks, 0), *child = NULL;
    uint32_t tokens = 0, kept_tokens = 0, attached = 0;
    for (uint32_t step = 0; step < (shared ? STEPS / 10 : STEPS); step++) {
        uint32_t before = tokens;
        if (random_below(&seed, 4) || tokens == 0) grow(sequence, marks, &tokens);
        else CHECK(cxlkv_sequence_truncate(sequence, tokens = random_below(&seed, tokens)) == 0);
        attached += tokens > before;
        if (random_below(&seed, 8) == 0) {
            if (child) CHECK(test_verify_all(child, kept, kept_tokens) == 0);
            cxlkv_sequence_destroy(&child);
            CHECK(cxlkv_sequence_fork(sequence, &child) == 0);
            memcpy(kept, marks, sizeof(kept));
            kept_tokens = tokens;
        }
        CHECK(test_verify_all(sequence, marks, tokens) == 0);
    }
    CHECK(attached > 20);
    test_end(&pool, &child, &sequence, NULL);
    if (shared) CHECK(cxlkv_pool_remove(path) == 0);
}

/* ---- what is refused, and leaves all as it was ---- */

static void refused(cxlkv_sequence *sequence, arrival *a, int64_t code) {
    uint64_t held = test_stats(sequence->pool).pages.held;
    int64_t tokens = cxlkv_sequence_tokens(sequence, 0);
    CHECK(attach(sequence, a, true) == code);
    CHECK(test_stats(sequence->pool).pages.held == held);
    CHECK(cxlkv_sequence_tokens(sequence, 0) == tokens);
}

static void test_refusals(void) {
    cxlkv_pool *pool = test_pool(NULL, 100);
    uint64_t marks[64];
    cxlkv_sequence *sequence = sequence_of(pool, marks, 8), *open = sequence_of(pool, marks + 8, 3);
    cxlkv_sequence *uneven = sequence_of(pool, marks + 16, 4);
    CHECK(test_append(uneven, 0, marks, 4) == 4);
    arrival a = write_elsewhere(pool, 3);
    refused(open, &a, -CXLKV_E_ARGUMENT);   /* a tail */
    refused(uneven, &a, -CXLKV_E_UNEVEN);   /* a step is half done */
    uint32_t page = a.pages[2];
    a.pages[2] = a.pages[0];
    refused(sequence, &a, -CXLKV_E_ARGUMENT); /* twice */
    a.pages[2] = sequence_page(sequence, 0, 0);
    refused(sequence, &a, -CXLKV_E_ARGUMENT); /* a sequence's */
    a.pages[2] = pool->geometry.page_count;
    refused(sequence, &a, -CXLKV_E_ARGUMENT);
    a.pages[2] = NO_PAGE;
    refused(sequence, &a, -CXLKV_E_ARGUMENT); /* no window has passed it */
    a.pages[2] = page;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) { /* a byte is not written yet */
        uint8_t *last = pieces_of(pool, page, 1, kind) + piece_stride(&pool->geometry, kind) +
                        piece_data_bytes(&pool->layout, kind) - 1;
        *last ^= 1;
        refused(sequence, &a, -CXLKV_E_CORRUPT);
        *last ^= 1;
    }
    uint32_t *checksums = a.checksums;
    a.checksums = NULL;
    refused(sequence, &a, -CXLKV_E_ARGUMENT);
    a.checksums = checksums;
    CHECK(test_verify_all(sequence, marks, 8) == 0);
    CHECK(attach(sequence, &a, true) == 3);
    memcpy(marks + 8, a.marks, 12 * sizeof(*marks));
    CHECK(test_verify_all(sequence, marks, 20) == 0);
    refused(sequence, &a, -CXLKV_E_ARGUMENT); /* they are its own by now */
    CHECK(cxlkv_pages_free(pool, 3, a.pages) == -CXLKV_E_ARGUMENT);
    forget(&a);
    test_end(&pool, &sequence, &open, &uneven, NULL);
}

/* Without verify a page that was not written whole is found out by its first reader; and pages that
 * were refused may be written again. */
static void test_late_writes(void) {
    cxlkv_pool *pool = test_pool(NULL, 100);
    uint64_t marks[64];
    cxlkv_sequence *sequence = sequence_of(pool, marks, 4);
    cxlkv_sequence *open = sequence_of(pool, marks + 32, 3);
    arrival a = write_elsewhere(pool, 2);
    uint8_t *byte = pieces_of(pool, a.pages[1], 0, PIECE_VALUES);
    *byte ^= 4;
    CHECK(attach(open, &a, false) < 0);
    CHECK(attach(sequence, &a, true) == -CXLKV_E_CORRUPT);
    CHECK(attach(sequence, &a, false) == 2);
    memcpy(marks + 4, a.marks, 8 * sizeof(*marks));
    CHECK(pieces_verify(pool, a.pages[1], 0) == -CXLKV_E_CORRUPT); /* what select and attend ask */
    CHECK(test_verify(sequence, 0, marks, 12) == -CXLKV_E_CORRUPT);
    CHECK(test_verify(sequence, 1, marks, 12) == 0);
    *byte ^= 4;
    CHECK(test_verify_all(sequence, marks, 12) == 0);
    forget(&a);
    test_end(&pool, &sequence, &open, NULL);
}

/* Who would only free the pages fails as well as who attaches them: nobody has them twice. */
static void test_batches(void) {
    cxlkv_pool *pool = test_pool(NULL, 200);
    static uint64_t marks[3][64];
    cxlkv_sequence *sequences[3];
    const uint32_t before[3] = {8, 0, 4};
    const int32_t starts[4] = {0, 2, 2, 5};
    for (uint32_t i = 0; i < 3; i++) sequences[i] = sequence_of(pool, marks[i], before[i]);
    cxlkv_batch *batch = test_batch(pool, 3, sequences);
    arrival a = write_elsewhere(pool, 5);
    cxlkv_attach_args args = {.starts = starts, .pages = a.pages, .checksums = a.checksums,
                              .rewind = -1, .verify = 1};
    uint64_t appended = test_stats(pool).own.appended_bytes;
    CHECK(cxlkv_batch_attach(batch, &args) == 5);
    CHECK(test_stats(pool).own.appended_bytes - appended ==
          5 * TEST_PAGE_TOKENS * TEST_LAYERS * TEST_HEADS * 2 * TEST_DIM * sizeof(float));
    memcpy(marks[0] + 8, a.marks, 8 * sizeof(uint64_t));
    memcpy(marks[2] + 4, a.marks + 8, 12 * sizeof(uint64_t));
    CHECK(test_verify_all(sequences[0], marks[0], 16) == 0);
    CHECK(test_verify_all(sequences[1], marks[1], 0) == 0);
    CHECK(test_verify_all(sequences[2], marks[2], 16) == 0);
    const int32_t falling[4] = {0, 2, 1, 5};
    args.starts = falling;
    CHECK(cxlkv_batch_attach(batch, &args) == -CXLKV_E_ARGUMENT);
    forget(&a);
    cxlkv_batch_destroy(&batch);
    for (uint32_t i = 0; i < 3; i++) cxlkv_sequence_destroy(&sequences[i]);
    cxlkv_pool_destroy(&pool);
}

/* Layer 0 sees 6 tokens: pages behind its window may be missing, and are freed if they are not. */
static void test_windows(void) {
    cxlkv_pool *pool = test_window_pool(0, 6);
    for (int missing = 0; missing < 2; missing++) {
        uint64_t marks[64];
        cxlkv_sequence *sequence = sequence_of(pool, marks, 8);
        arrival a = write_elsewhere(pool, 5);
        cxlkv_batch *batch = test_batch(pool, 1, &sequence);
        memcpy(marks + 8, a.marks, 20 * sizeof(*marks));
        const int32_t starts[2] = {0, 5};
        cxlkv_attach_args args = {.starts = starts, .pages = a.pages, .checksums = a.checksums,
                                  .rewind = 0, .verify = 1};
        /* The token at 28 sees from 23 on: of part 0 pages 5 and 6 of 7. */
        if (missing) {
            CHECK(cxlkv_pages_free(pool, 3, a.pages) == 3);
            for (uint32_t i = 0; i < 3; i++) a.pages[i] = NO_PAGE;
        }
        cxlkv_stats before = test_stats(pool);
        CHECK(cxlkv_batch_attach(batch, &args) == 5);
        cxlkv_stats after = test_stats(pool);
        CHECK(sequence->tables[0].first == 5 && sequence->page_count == 7);
        /* Its two pages before are given back, and those of the new ones that no token sees. */
        CHECK(after.pages.held == before.pages.held - (missing ? 2 : 5));
        CHECK(after.own.window_pages_skipped ==
              before.own.window_pages_skipped + (missing ? 3 : 0));
        CHECK(cxlkv_sequence_tokens(sequence, CXLKV_LAYER_LAST) == 28);
        CHECK(test_verify(sequence, 1, marks, 28) == 0);
        CHECK(cxlkv_sequence_truncate(sequence, 28) == 0);
        CHECK(cxlkv_sequence_truncate(sequence, 24) == -CXLKV_E_ARGUMENT);
        test_marks(marks + 28, next_mark, 9);
        next_mark += 9;
        CHECK(test_append_all(sequence, marks + 28, 9) >= 0);
        CHECK(test_verify(sequence, 1, marks, 37) == 0);
        forget(&a);
        cxlkv_batch_destroy(&batch);
        cxlkv_sequence_destroy(&sequence);
        CHECK(test_stats(pool).pages.held == 0);
        test_clean(pool);
    }
    /* Without a rewind this call's own tokens may still look back: nothing of theirs is missing. */
    uint64_t marks[64];
    cxlkv_sequence *sequence = sequence_of(pool, marks, 8);
    arrival a = write_elsewhere(pool, 3);
    uint32_t page = a.pages[0];
    a.pages[0] = NO_PAGE;
    refused(sequence, &a, -CXLKV_E_ARGUMENT);
    a.pages[0] = page;
    still_ours(pool, &a);
    test_end(&pool, &sequence, NULL);
}

/* Without checksums there is nothing to give, and nothing to verify by. */
static void test_no_checksums(void) {
    cxlkv_layout layout = test_layout();
    cxlkv_pool *pool;
    uint64_t marks[32];
    layout.checksum = 0;
    CHECK(cxlkv_pool_create(NULL, &layout, NULL, 8 << 20, 0, NULL, 0, &pool) == 0);
    cxlkv_sequence *sequence = sequence_of(pool, marks, 4);
    arrival a = write_elsewhere(pool, 2);
    refused(sequence, &a, -CXLKV_E_ARGUMENT);
    uint32_t *checksums = a.checksums;
    a.checksums = NULL;
    CHECK(attach(sequence, &a, false) == 2);
    memcpy(marks + 4, a.marks, 8 * sizeof(*marks));
    CHECK(test_verify_all(sequence, marks, 12) == 0);
    a.checksums = checksums;
    forget(&a);
    test_end(&pool, &sequence, NULL);
}

int main(void) {
    printf("seed %llu\n", (unsigned long long)seed);
    test_against_marks(NULL, false);
    if (flush_supported()) test_against_marks(test_path("attach"), true);
    test_refusals();
    test_late_writes();
    test_batches();
    test_windows();
    test_no_checksums();
    return 0;
}
