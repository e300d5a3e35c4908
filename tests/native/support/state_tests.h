/* Texts with state checkpoints: token t of a text is its mark and its id, first + t, and all bytes
 * of a checkpoint follow from its number. Not a test itself. */
#pragma once
#include "check.h"
#include "format/records.h"

enum { STATE_TOKENS_MAX = 64 };
static const uint8_t state_root[16] = {3, 1, 4};

typedef struct state_text {
    int64_t ids[STATE_TOKENS_MAX];
    uint64_t marks[STATE_TOKENS_MAX];
    uint8_t keys[16 * (STATE_TOKENS_MAX / TEST_PAGE_TOKENS + 1)]; /* the tail's is the last */
    uint32_t tokens, pages;
} state_text;

static inline state_text text_of(uint64_t first, uint32_t tokens) {
    state_text text = {.tokens = tokens, .pages = tokens / TEST_PAGE_TOKENS};
    uint32_t whole = text.pages * TEST_PAGE_TOKENS, rest = tokens - whole;
    uint8_t tails[16 * TEST_PAGE_TOKENS];
    test_marks(text.marks, first, tokens);
    for (uint32_t i = 0; i < tokens; i++) text.ids[i] = (int64_t)text.marks[i];
    CHECK(cxlkv_page_keys(text.ids, tokens, TEST_PAGE_TOKENS, CXLKV_KEYS_CHAINED, state_root,
                          text.keys) == text.pages);
    const uint8_t *before = text.pages ? text.keys + 16 * (text.pages - 1) : state_root;
    if (rest == 0) return text;
    CHECK(cxlkv_page_keys(text.ids + whole, rest, 0, CXLKV_KEYS_TAIL, before, tails) == rest);
    memcpy(text.keys + 16 * text.pages, tails + 16 * (rest - 1), 16);
    return text;
}

static inline const uint8_t *last_key(const state_text *text) {
    return text->keys + 16 * ((text->tokens + TEST_PAGE_TOKENS - 1) / TEST_PAGE_TOKENS - 1);
}

/* The number stands in the first bytes, too. */
static inline void fill_states(uint8_t *bytes, uint64_t size, uint64_t number) {
    uint64_t state = number;
    for (uint64_t i = 0; i < size; i++) bytes[i] = (uint8_t)random_next(&state);
    memcpy(bytes, &number, min_u64(size, sizeof(number)));
}

/* Pages and tail are published, and a checkpoint of this number; its pages that are new, or an
 * error. */
static inline int64_t publish_text(cxlkv_pool *pool, const state_text *text, uint64_t number) {
    uint64_t size = pool->layout.state_bytes;
    const uint8_t *before = text->pages ? text->keys + 16 * (text->pages - 1) : state_root;
    uint8_t *bytes = malloc(size);
    CHECK(bytes);
    fill_states(bytes, size, number);
    cxlkv_sequence *sequence = test_sequence(pool, text->marks, text->tokens);
    int64_t code = cxlkv_publish(sequence, text->pages, TEST_PAGE_TOKENS, text->keys, 0);
    if (code >= 0 && text->tokens % TEST_PAGE_TOKENS)
        code = cxlkv_publish_tail(sequence, text->tokens, before, last_key(text));
    if (code >= 0)
        code = cxlkv_publish_states(sequence, text->tokens, last_key(text), bytes, size);
    cxlkv_sequence_destroy(&sequence);
    free(bytes);
    return code;
}

static inline int64_t match_text(cxlkv_pool *pool, const state_text *text, cxlkv_sequence **hit) {
    const cxlkv_match_args args = {.hashes = text->keys, .count = text->pages, .single = 1,
                                   .ids = text->ids, .id_count = text->tokens,
                                   .root = state_root, .lease_s = 60};
    return cxlkv_match(pool, &args, hit);
}

/* The number of a hit's checkpoint, of which every byte is right. */
static inline uint64_t read_number(cxlkv_pool *pool, cxlkv_sequence *hit) {
    uint64_t size = pool->layout.state_bytes, number = 0;
    uint8_t *bytes = malloc(size), *wanted = malloc(size);
    CHECK(bytes && wanted);
    CHECK(cxlkv_read_states(hit, bytes, size) == 0);
    memcpy(&number, bytes, min_u64(size, sizeof(number)));
    fill_states(wanted, size, number);
    CHECK(memcmp(bytes, wanted, size) == 0);
    free(bytes);
    free(wanted);
    return number;
}

/* How many tokens are found, which are those of the text; and the number of their checkpoint. */
static inline int64_t find_text(cxlkv_pool *pool, const state_text *text, uint64_t *number) {
    cxlkv_sequence *hit;
    int64_t tokens = match_text(pool, text, &hit);
    CHECK(tokens >= 0);
    *number = tokens ? read_number(pool, hit) : 0;
    CHECK(test_verify_all(hit, text->marks, (uint32_t)tokens) == 0);
    cxlkv_sequence_destroy(&hit);
    return tokens;
}

static inline void forget_text(cxlkv_pool *pool, const state_text *text) {
    uint32_t keys = (text->tokens + TEST_PAGE_TOKENS - 1) / TEST_PAGE_TOKENS;
    CHECK(cxlkv_forget(pool, keys, text->keys, NULL) >= 0);
}

static inline cxlkv_layout state_layout(uint64_t state_bytes) {
    cxlkv_layout layout = test_layout();
    layout.state_bytes = state_bytes;
    layout.state_digest = 9;
    return layout;
}
