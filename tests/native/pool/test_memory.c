/* Goal: no operation leaks or stays half done when local memory runs out in its middle. Method:
 * each is tried with its first allocation failing, then its second, until none fails any more (the
 * linker sends the core's calls here); after each failure all is as it was. ASan finds leaks. */
#include "check.h"

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__real_aligned_alloc(size_t alignment, size_t bytes);

static uint32_t countdown; /* 0: none fails; n: the n-th from now does */
static uint32_t failures;

static bool fails_now(void) {
    if (countdown == 0 || --countdown > 0) return false;
    failures++;
    return true;
}

void *__wrap_malloc(size_t bytes) { return fails_now() ? NULL : __real_malloc(bytes); }
void *__wrap_calloc(size_t count, size_t bytes) {
    return fails_now() ? NULL : __real_calloc(count, bytes);
}
void *__wrap_realloc(void *old, size_t bytes) {
    return fails_now() ? NULL : __real_realloc(old, bytes);
}
void *__wrap_aligned_alloc(size_t alignment, size_t bytes) {
    return fails_now() ? NULL : __real_aligned_alloc(alignment, bytes);
}

enum { PAGES = CHUNK_PAGES + 5, TOKENS = PAGES * TEST_PAGE_TOKENS + 3, MORE = 9, WINDOW = 30 };
static uint64_t marks[TOKENS + MORE];
static cxlkv_pool *pool;
static cxlkv_sequence *sequence, *made;
static cxlkv_batch *batch;
static uint8_t hashes[PAGES * 16], handle[2 * PAGES * 12 + 256];
static uint64_t handle_bytes;
static float rows[MORE][TEST_HEADS][TEST_DIM];

/* ---- what is tried; each leaves its result in `made` or changes `sequence` ---- */

static int64_t do_create(void) { return cxlkv_sequence_create(pool, &made); }
static int64_t do_fork(void) { return cxlkv_sequence_fork(sequence, &made); }
static int64_t do_adopt(void) {
    return cxlkv_sequence_adopt(pool, handle, handle_bytes, &made);
}
static int64_t do_match(void) { return test_match(pool, PAGES, hashes, 100, &made); }
/* The tail, under the key that cxlkv_match() looks for behind the last page. */
static const int64_t ids[TOKENS];
static int64_t do_publish_tail(void) {
    uint8_t keys[3 * 16];
    const uint8_t *before = hashes + (PAGES - 1) * 16;
    CHECK(cxlkv_page_keys(ids, 3, 0, CXLKV_KEYS_TAIL, before, keys) == 3);
    return cxlkv_publish_tail(sequence, TOKENS, before, keys + 2 * 16);
}
static int64_t do_match_tail(void) {
    const cxlkv_match_args args = {.hashes = hashes, .count = PAGES, .single = 1, .ids = ids,
                                   .id_count = TOKENS, .root = hashes, .lease_s = 100};
    return cxlkv_match(pool, &args, &made);
}
static int64_t do_truncate(void) { return cxlkv_sequence_truncate(sequence, TOKENS - 5); }
static int64_t do_export(void) {
    int64_t bytes = cxlkv_sequence_export(sequence, handle, sizeof(handle));
    if (bytes > 0) handle_bytes = (uint64_t)bytes;
    return bytes;
}
static int64_t do_batch(void) {
    cxlkv_batch *another;
    int64_t code = cxlkv_batch_create(pool, 1, &sequence, &another);
    if (code == 0) cxlkv_batch_destroy(&another);
    return code;
}
static int64_t do_append(void) {
    int32_t starts[2] = {0, MORE};
    cxlkv_rows k = test_rows_at(rows);
    return cxlkv_batch_append(batch, 0, &k, &k, starts, -1);
}
static int64_t do_fetch(void) {
    static float out[2][(PAGES + 1) * TEST_HEADS * TEST_PAGE_TOKENS * TEST_DIM];
    cxlkv_fetch_args args = {.keys = out[0], .values = out[1], .key_capacity_bytes = sizeof(out[0]),
                             .value_capacity_bytes = sizeof(out[1])};
    return cxlkv_batch_fetch(batch, &args);
}
static int64_t do_select(void) {
    int32_t starts[2] = {0, 1}, pages[TEST_HEADS * 8], counts[TEST_HEADS];
    float scores[TEST_HEADS * 8];
    cxlkv_budget budget = {.kind = CXLKV_BUDGET_PAGES, .pages = 8, .sinks = 1, .recent = 1};
    cxlkv_select_args args = {.q_heads = TEST_HEADS, .starts = starts, .by.budgets = &budget,
                              .by.budget_count = 1, .scale = 1, .capacity = TEST_HEADS * 8,
                              .pages = pages, .scores = scores, .counts = counts,
                              .queries = test_rows_at(rows)};
    return cxlkv_batch_select(batch, &args);
}
static int64_t do_attend(void) {
    int32_t starts[2] = {0, 1};
    float out[TEST_HEADS][TEST_DIM], lse[TEST_HEADS];
    cxlkv_attend_args args = {.q_heads = TEST_HEADS, .starts = starts, .scale = 1, .out = out,
                              .lse = lse, .queries = test_rows_at(rows)};
    return cxlkv_batch_attend(batch, &args);
}
static int64_t do_open(void) {
    cxlkv_pool *other;
    int64_t code = cxlkv_pool_open(pool->path, NULL, &other);
    if (code == 0) cxlkv_pool_destroy(&other);
    return code;
}
static int64_t do_create_pool(void) {
    cxlkv_pool *other;
    cxlkv_layout layout = test_layout();
    const char *path = "/dev/shm/cxlkv-test-memory.other";
    int64_t code = cxlkv_pool_create(path, &layout, NULL, 4 << 20, 0, NULL, 0, &other);
    if (code < 0) {
        CHECK(access(path, F_OK) < 0);
        return code;
    }
    test_remove(&other, path);
    return 0;
}

/* Layer 0 may have a window: then pages behind it may have gone in an append that failed later, and
 * only the last layer is read whole. */
static void as_it_was(uint64_t free_pages) {
    if (pool->layers.windowed) CHECK(test_stats(pool).pages.free >= free_pages);
    else CHECK(test_stats(pool).pages.free == free_pages);
    CHECK(cxlkv_sequence_tokens(sequence, CXLKV_LAYER_LAST) == TOKENS);
    CHECK(cxlkv_sequence_tokens(sequence, 0) == TOKENS);
    CHECK(test_verify(sequence, TEST_LAYERS - 1, marks, TOKENS) == 0);
    if (!pool->layers.windowed) CHECK(test_verify(sequence, 0, marks, TOKENS) == 0);
    test_clean(pool);
}

/* `keeps`: a failure may leave the page for the tail's copy with the sequence. */
static void try(const char *name, int64_t (*operation)(void), bool keeps) {
    uint64_t free_pages = test_stats(pool).pages.free;
    for (uint32_t nth = 1;; nth++) {
        uint32_t before = failures;
        made = NULL;
        countdown = nth;
        int64_t code = operation();
        countdown = 0;
        if (failures == before) { /* it did not get as far as the nth */
            CHECK(code >= 0);
            fprintf(stderr, "%s: %u allocations\n", name, nth - 1);
            break;
        }
        if (code >= 0) { /* a cache or a helper thread did without */
            cxlkv_sequence_destroy(&made);
            continue;
        }
        CHECK(code == -ENOMEM && made == NULL);
        if (keeps) free_pages = test_stats(pool).pages.free;
        as_it_was(free_pages);
    }
    cxlkv_sequence_destroy(&made);
}

/* What leaves the sequence as it is. */
static void try_what_keeps_it(void) {
    try("fork", do_fork, false);
    try("match", do_match, false);
    try("publish the tail", do_publish_tail, false);
    try("match the tail", do_match_tail, false);
    CHECK(do_match_tail() == TOKENS);
    cxlkv_sequence_destroy(&made);
    try("export", do_export, true);
    try("adopt", do_adopt, false);
    try("select", do_select, false);
    try("attend", do_attend, false);
}

/* Back to TOKENS tokens after an operation that changed the sequence. */
static void restore(void) {
    CHECK(cxlkv_sequence_truncate(sequence, TOKENS - 5) == 0);
    CHECK(test_append_all(sequence, marks + TOKENS - 5, 5) >= 0);
    CHECK(test_verify(sequence, TEST_LAYERS - 1, marks, TOKENS) == 0);
}

/* Pages that were written elsewhere: after each failure they are still the caller's. */
static void attaching(void) {
    enum { ATTACHED = 2 };
    static uint32_t checksums[TEST_LAYERS * ATTACHED * TEST_HEADS * PIECE_KINDS];
    const int32_t starts[2] = {0, ATTACHED};
    uint32_t pages[ATTACHED], nth = 1;
    cxlkv_sequence *child;
    CHECK(cxlkv_sequence_fork(sequence, &child) == 0); /* it shares the last chunk of the table */
    CHECK(cxlkv_sequence_truncate(child, PAGES * TEST_PAGE_TOKENS) == 0);
    CHECK(cxlkv_pages_alloc(pool, ATTACHED, pages) == ATTACHED);
    cxlkv_batch *own = test_batch(pool, 1, &child);
    cxlkv_attach_args args = {.starts = starts, .pages = pages, .checksums = checksums,
                              .rewind = -1};
    for (uint32_t before = failures;; nth++, before = failures) {
        countdown = nth;
        int64_t code = cxlkv_batch_attach(own, &args);
        countdown = 0;
        if (failures == before) CHECK(code == ATTACHED);
        if (code >= 0) break;
        CHECK(code == -ENOMEM);
        CHECK(test_verify_all(child, marks, PAGES * TEST_PAGE_TOKENS) == 0);
        CHECK(cxlkv_pages_free(pool, ATTACHED, pages) == ATTACHED);
        CHECK(cxlkv_pages_alloc(pool, ATTACHED, pages) == ATTACHED);
    }
    fprintf(stderr, "attach: %u allocations\n", nth - 1);
    CHECK(cxlkv_sequence_tokens(child, CXLKV_LAYER_LAST) == (PAGES + ATTACHED) * TEST_PAGE_TOKENS);
    cxlkv_batch_destroy(&own);
    cxlkv_sequence_destroy(&child);
    CHECK(test_verify_all(sequence, marks, TOKENS) == 0);
}

/* Layer 0 sees WINDOW tokens, layer 1 all: two parts. The window's pages cross from one chunk of
 * the page table to the next, and forks share them. */
static void windowed(void) {
    pool = test_window_pool(0, WINDOW);
    CHECK(pool->geometry.part_count == 2 && pool->layers.windowed);
    for (int shared = 0; shared < 2; shared++) {
        cxlkv_sequence *child = NULL;
        sequence = test_sequence(pool, marks, TOKENS);
        batch = test_batch(pool, 1, &sequence);
        CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) > (shared ? -1 : PAGES));
        try_what_keeps_it();
        if (shared) CHECK(cxlkv_sequence_fork(sequence, &child) == 0);
        try("truncate", do_truncate, false);
        restore();
        try("append", do_append, false);
        CHECK(cxlkv_sequence_truncate(sequence, TOKENS) == 0);
        if (shared) CHECK(test_verify(child, TEST_LAYERS - 1, marks, TOKENS) == 0);
        cxlkv_sequence_destroy(&child);
        cxlkv_batch_destroy(&batch);
        cxlkv_sequence_destroy(&sequence);
        CHECK(test_stats(pool).pages.held == 0 && test_stats(pool).own.window_pages_freed > 0);
    }
    cxlkv_pool_destroy(&pool);
}

int main(void) {
    const char *path = test_path("memory");
    pool = test_pool(path, 2 * PAGES);
    test_marks(marks, 1, TOKENS + MORE);
    test_hashes(hashes, 1, PAGES);
    sequence = test_sequence(pool, marks, TOKENS);
    batch = test_batch(pool, 1, &sequence);
    CHECK(cxlkv_publish(sequence, PAGES, TEST_PAGE_TOKENS, hashes, 0) == PAGES);
    try("create", do_create, false);
    try("batch", do_batch, false);
    try_what_keeps_it();
    CHECK(do_match_tail() == TOKENS);
    CHECK(test_verify_all(made, marks, TOKENS) == 0);
    cxlkv_sequence_destroy(&made);
    /* Whatever its key is: a tail is found at its place only. */
    const cxlkv_match_args at_the_front = {.hashes = hashes, .ids = ids, .id_count = 3,
                                           .root = hashes + (PAGES - 1) * 16, .lease_s = 100};
    CHECK(cxlkv_match(pool, &at_the_front, &made) == 0);
    const cxlkv_match_args too_few = {.hashes = hashes, .count = 1, .ids = ids, .id_count = 3,
                                      .root = hashes, .lease_s = 100};
    CHECK(cxlkv_match(pool, &too_few, &made) == -CXLKV_E_ARGUMENT);
    cxlkv_sequence_destroy(&made);
    try("fetch", do_fetch, false);
    try("truncate", do_truncate, false);
    restore();
    try("append", do_append, false);
    restore();
    /* With its last chunk and its tails shared, an append and a truncation clone them first. */
    cxlkv_sequence *child;
    CHECK(cxlkv_sequence_fork(sequence, &child) == 0);
    try("append to a fork", do_append, false);
    restore();
    cxlkv_sequence_destroy(&child);
    CHECK(cxlkv_sequence_fork(sequence, &child) == 0);
    try("truncate a fork", do_truncate, false);
    CHECK(test_verify_all(child, marks, TOKENS) == 0);
    cxlkv_sequence_destroy(&child);
    restore();
    attaching();
    try("open", do_open, false);
    try("create a pool", do_create_pool, false);
    CHECK(failures > 30);
    cxlkv_batch_destroy(&batch);
    cxlkv_sequence_destroy(&sequence);
    test_remove(&pool, path);
    windowed();
    return 0;
}
