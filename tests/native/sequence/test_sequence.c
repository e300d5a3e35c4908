/* Goal: whatever is done to sequences, each holds exactly its own tokens. Method: random appends in
 * chunks across the layers, forks, truncations, hand-overs, publish, match and forget on a pool
 * that is often full, against plain arrays of marks; a token's numbers follow from its mark. */
#include "check.h"

enum { LIVE_MAX = 20, TOKENS_MAX = 96, STEPS = 50000, PUBLISHED_MAX = 4096, FREE_PAGES = 44 };

typedef struct model {
    cxlkv_sequence *sequence;
    uint32_t tokens[TEST_LAYERS];
    uint64_t marks[TOKENS_MAX];
} model;

static uint64_t seed = 990001, next_mark = 1;
static model live[LIVE_MAX];
static uint64_t published[PUBLISHED_MAX];
static uint32_t published_count;
static struct { uint32_t full, forks, adopted, hits, forgotten, uneven, truncated; } seen;

static bool is_even(const model *m) { return m->tokens[0] == m->tokens[TEST_LAYERS - 1]; }

static void verify(const model *m) {
    for (uint32_t layer = 0; layer < TEST_LAYERS; layer++) {
        CHECK(cxlkv_sequence_tokens(m->sequence, layer) == m->tokens[layer]);
        CHECK(test_verify(m->sequence, layer, m->marks, m->tokens[layer]) == 0);
    }
}

static model *pick(bool used) {
    uint32_t start = random_below(&seed, LIVE_MAX);
    for (uint32_t i = 0; i < LIVE_MAX; i++) {
        model *m = &live[(start + i) % LIVE_MAX];
        if ((m->sequence != NULL) == used) return m;
    }
    return NULL;
}

/* ---- published chains, as the model knows them: the hash of a chain stands for its pages ---- */

static uint32_t chain_hashes(const model *m, uint8_t *hashes) {
    uint32_t pages = m->tokens[TEST_LAYERS - 1] / TEST_PAGE_TOKENS;
    uint64_t chain = 1;
    for (uint32_t page = 0; page < pages; page++) {
        for (uint32_t t = 0; t < TEST_PAGE_TOKENS; t++) {
            chain ^= m->marks[page * TEST_PAGE_TOKENS + t];
            chain = random_next(&chain);
        }
        memcpy(hashes + page * 16, &chain, 8);
        memset(hashes + page * 16 + 8, 0x5a, 8);
    }
    return pages;
}

static int64_t find_published(const uint8_t *hash) {
    uint64_t chain;
    memcpy(&chain, hash, 8);
    for (uint32_t i = 0; i < published_count; i++)
        if (published[i] == chain) return i;
    return -1;
}

static void publish(model *m) {
    uint8_t hashes[TOKENS_MAX / TEST_PAGE_TOKENS * 16];
    uint32_t pages = chain_hashes(m, hashes);
    int64_t fresh = 0;
    for (uint32_t i = 0; i < pages; i++) {
        if (find_published(hashes + i * 16) >= 0) continue;
        CHECK(published_count < PUBLISHED_MAX);
        memcpy(&published[published_count++], hashes + i * 16, 8);
        fresh++;
    }
    CHECK(cxlkv_publish(m->sequence, pages, TEST_PAGE_TOKENS, hashes, 0) == fresh);
}

static void match(const model *m) {
    uint8_t hashes[TOKENS_MAX / TEST_PAGE_TOKENS * 16];
    uint32_t pages = chain_hashes(m, hashes), expected = 0;
    while (expected < pages && find_published(hashes + expected * 16) >= 0) expected++;
    cxlkv_sequence *hit, *forked;
    int64_t tokens = test_match(m->sequence->pool, pages, hashes, 1000, &hit);
    CHECK(tokens == (int64_t)expected * TEST_PAGE_TOKENS);
    CHECK(test_verify_all(hit, m->marks, expected * TEST_PAGE_TOKENS) == 0);
    seen.hits += expected > 0;
    model *made = pick(false);
    CHECK(cxlkv_sequence_fork(hit, &forked) == 0);
    cxlkv_sequence_destroy(&hit);
    if (!made) {
        cxlkv_sequence_destroy(&forked);
        return;
    }
    *made = *m;
    made->sequence = forked;
    for (uint32_t layer = 0; layer < TEST_LAYERS; layer++)
        made->tokens[layer] = expected * TEST_PAGE_TOKENS;
    verify(made);
}

static void forget(const model *m) {
    uint8_t hashes[TOKENS_MAX / TEST_PAGE_TOKENS * 16];
    uint32_t pages = chain_hashes(m, hashes);
    int64_t expected = 0;
    for (uint32_t i = 0; i < pages; i++) {
        int64_t at = find_published(hashes + i * 16);
        if (at < 0) continue;
        published[at] = published[--published_count];
        expected++;
    }
    CHECK(cxlkv_forget(m->sequence->pool, pages, hashes, NULL) == expected);
    seen.forgotten += expected > 0;
}

/* One page of some chain: what came before it may stay, or be gone already. */
static void forget_any(cxlkv_pool *pool) {
    uint8_t hash[16];
    if (!published_count) return;
    uint32_t at = random_below(&seed, published_count);
    memcpy(hash, &published[at], 8);
    memset(hash + 8, 0x5a, 8);
    published[at] = published[--published_count];
    CHECK(cxlkv_forget(pool, 1, hash, NULL) == 1);
}

/* ---- steps ---- */

static void append(cxlkv_pool *pool, model *m) {
    uint32_t layer = random_below(&seed, TEST_LAYERS), count = random_below(&seed, 15);
    uint32_t before = m->tokens[layer];
    if (layer > 0 && random_below(&seed, 10)) count = m->tokens[layer - 1] - before; /* in order */
    if (before + count > TOKENS_MAX) return;
    uint64_t kept[TOKENS_MAX];
    memcpy(kept, m->marks, sizeof(kept));
    if (layer == 0) {
        test_marks(m->marks + before, next_mark, count);
        next_mark += count;
    }
    cxlkv_stats stats = test_stats(pool);
    int64_t code = test_append(m->sequence, layer, m->marks + before, count);
    if (layer > 0 && before + count > m->tokens[layer - 1]) {
        CHECK(code == -CXLKV_E_ORDER);
    } else if (code == -CXLKV_E_POOL_FULL) {
        CHECK(layer == 0 && (before + count) / TEST_PAGE_TOKENS - before / TEST_PAGE_TOKENS >
                                stats.pages.free);
        memcpy(m->marks, kept, sizeof(kept));
        seen.full++;
        CHECK(test_stats(pool).pages.free == stats.pages.free);
    } else {
        CHECK(code == count);
        m->tokens[layer] += count;
    }
    if (code < 0) verify(m);
}

static void fork_one(const model *m) {
    model *made = pick(false);
    cxlkv_sequence *child;
    if (!is_even(m)) {
        CHECK(cxlkv_sequence_fork(m->sequence, &child) == -CXLKV_E_UNEVEN);
        seen.uneven++;
        return;
    }
    if (!made) return;
    CHECK(cxlkv_sequence_fork(m->sequence, &child) == 0);
    *made = *m;
    made->sequence = child;
    seen.forks++;
}

static void truncate_one(model *m) {
    uint32_t tokens = random_below(&seed, m->tokens[0] + 2);
    int code = cxlkv_sequence_truncate(m->sequence, tokens);
    if (tokens > m->tokens[0]) {
        CHECK(code == -CXLKV_E_ARGUMENT);
        return;
    }
    CHECK(code == 0);
    for (uint32_t layer = 0; layer < TEST_LAYERS; layer++)
        if (m->tokens[layer] > tokens) m->tokens[layer] = tokens;
    seen.truncated++;
    verify(m);
}

static void hand_over(cxlkv_pool *pool, const model *m) {
    uint8_t bytes[2048];
    int64_t size = cxlkv_sequence_export(m->sequence, bytes, sizeof(bytes));
    if (!is_even(m)) {
        CHECK(size == -CXLKV_E_UNEVEN);
        return;
    }
    if (size == -CXLKV_E_POOL_FULL) {
        CHECK(m->tokens[0] % TEST_PAGE_TOKENS && test_stats(pool).pages.free == 0);
        return;
    }
    CHECK(size > 0);
    model *made = pick(false);
    cxlkv_sequence *adopted;
    CHECK(cxlkv_sequence_adopt(pool, bytes, (uint64_t)size, &adopted) == 0);
    seen.adopted++;
    if (!made) {
        CHECK(test_verify_all(adopted, m->marks, m->tokens[0]) == 0);
        cxlkv_sequence_destroy(&adopted);
        return;
    }
    *made = *m;
    made->sequence = adopted;
    verify(made);
}

static void step(cxlkv_pool *pool) {
    uint32_t dice = random_below(&seed, 100);
    model *m = dice < 12 ? pick(false) : pick(true);
    if (!m) return;
    if (dice < 12) {
        memset(m, 0, sizeof(*m));
        CHECK(cxlkv_sequence_create(pool, &m->sequence) == 0);
    } else if (dice < 50) {
        append(pool, m);
    } else if (dice < 60) {
        fork_one(m);
    } else if (dice < 68) {
        truncate_one(m);
    } else if (dice < 76) {
        hand_over(pool, m);
    } else if (dice < 80) {
        publish(m);
    } else if (dice < 86) {
        match(m);
    } else if (dice < 88) {
        forget(m);
    } else if (dice < 91) {
        for (int i = 0; i < 4; i++) forget_any(pool);
    } else if (dice < 93) {
        verify(m);
    } else {
        cxlkv_sequence_destroy(&m->sequence);
        m->sequence = NULL;
    }
}

int main(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    uint32_t loose[4096], loose_count = (uint32_t)test_stats(pool).pages.total - FREE_PAGES;
    CHECK(loose_count <= 4096 && cxlkv_pages_alloc(pool, loose_count, loose) == loose_count);
    for (uint32_t i = 0; i < STEPS; i++) {
        step(pool);
        if (i % 500 == 0) test_clean(pool);
    }
    for (uint32_t i = 0; i < LIVE_MAX; i++) {
        if (!live[i].sequence) continue;
        verify(&live[i]);
        if (i % 2) forget(&live[i]);
        cxlkv_sequence_destroy(&live[i].sequence);
    }
    CHECK(cxlkv_pages_free(pool, loose_count, loose) == loose_count);
    test_clean(pool);
    cxlkv_stats stats = test_stats(pool);
    CHECK(stats.pages.held == 0 && stats.pages.published_only == published_count);
    CHECK(stats.pages.free + published_count == stats.pages.total);
    fprintf(stderr, "full %u, forks %u, adopted %u, hits %u, forgotten %u, uneven %u, cut %u\n",
            seen.full, seen.forks, seen.adopted, seen.hits, seen.forgotten, seen.uneven,
            seen.truncated);
    CHECK(seen.full > 20 && seen.forks > 20 && seen.adopted > 20 && seen.hits > 20);
    CHECK(seen.forgotten > 10 && seen.uneven > 20 && seen.truncated > 20);
    cxlkv_pool_destroy(&pool);
    return 0;
}
