/* Keys of pages from token ids: chained, of a page that is not full, and of content alone.
 *
 * cxlkv/prefix.py says what they are, in terms of hashlib; a page of ids is hashed by itself, eight
 * pages at a time, and one block more hangs it on the key before. Ids are little endian in memory,
 * as all that this core reads. */
#include "base/types.h"
#include "kernels/blake2s.h"
#include "prefix/keys.h"

enum { KEY_WORDS = 4, PAGE_WORDS = 8, BLOCK = BLAKE2S_BLOCK_WORDS };

static const char PAGE_PURPOSE[] = "cxlkvpag", CHAIN_PURPOSE[] = "cxlkvkey",
                  TAIL_PURPOSE[] = "cxlkvtai", CONTENT_PURPOSE[] = "cxlkvcon";

/* Word w of a page: the low halves of its ids, then, where one of them needs it, the high ones. */
static uint32_t page_word(const int64_t *ids, uint32_t count, uint64_t word) {
    if (word < count) return (uint32_t)ids[word];
    return (uint32_t)((uint64_t)ids[word - count] >> 32);
}

static void hash_page(const int64_t *ids, uint32_t count, uint32_t hash[PAGE_WORDS]) {
    uint32_t block[BLOCK], high = 0;
    blake2s state;
    blake2s_begin(&state, 4 * PAGE_WORDS, PAGE_PURPOSE, 0);
    for (uint32_t i = 0; i < count; i++) high |= page_word(ids, count, (uint64_t)count + i);
    uint64_t words = high ? 2ull * count : count, at = 0;
    for (; words - at > BLOCK; at += BLOCK) {
        for (uint32_t i = 0; i < BLOCK; i++) block[i] = page_word(ids, count, at + i);
        blake2s_block(&state, block);
    }
    memset(block, 0, sizeof(block));
    for (uint32_t i = 0; i < words - at; i++) block[i] = page_word(ids, count, at + i);
    blake2s_last(&state, block, (uint32_t)(4 * (words - at)));
    memcpy(hash, state.h, 4 * PAGE_WORDS);
}

/* Of up to eight pages; those with large ids go one by one, as they are twice as long. */
static void hash_pages(const int64_t *ids, uint32_t page_tokens, uint32_t pages,
                       uint32_t hashes[BLAKE2S_LANES][PAGE_WORDS]) {
    uint32_t high[BLAKE2S_LANES];
    blake2s start;
    blake2s_begin(&start, 4 * PAGE_WORDS, PAGE_PURPOSE, 0);
    bool together = pages == BLAKE2S_LANES;
    if (together) blake2s_lanes(&start, ids, page_tokens, hashes, high);
    for (uint32_t page = 0; page < pages; page++)
        if (!together || high[page])
            hash_page(ids + (uint64_t)page * page_tokens, page_tokens, hashes[page]);
}

/* One block: a key, then the hash of a page. */
static void hang_on(const blake2s *start, const uint32_t key[KEY_WORDS],
                    const uint32_t hash[PAGE_WORDS], uint32_t out[KEY_WORDS]) {
    uint32_t block[BLOCK] = {0};
    blake2s state = *start;
    memcpy(block, key, 4 * KEY_WORDS);
    memcpy(block + KEY_WORDS, hash, 4 * PAGE_WORDS);
    blake2s_last(&state, block, 4 * (KEY_WORDS + PAGE_WORDS));
    memcpy(out, state.h, 4 * KEY_WORDS);
}

/* The message is the key before, then the ids, all 8 bytes of each. Only its last block is its own:
 * the state before it serves all lengths that end in one block, which are hashed together. */
int64_t tail_keys(const int64_t *ids, uint64_t count, const uint8_t *before, uint8_t *keys) {
    uint32_t block[BLOCK] = {0}, used = KEY_WORDS;
    uint32_t blocks[BLAKE2S_LANES][BLOCK], bytes[BLAKE2S_LANES], h[BLAKE2S_LANES][8];
    int code = need(count, "ids", ids, "root", before, "keys", keys, NULL);
    if (code < 0 || count == 0) return code;
    blake2s state;
    blake2s_begin(&state, 4 * KEY_WORDS, TAIL_PURPOSE, 0);
    memcpy(block, before, 4 * KEY_WORDS);
    for (uint64_t first = 0, some; first < count; first += some) {
        some = min_u64(count - first, (BLOCK - used) / 2);
        for (uint32_t lane = 0; lane < BLAKE2S_LANES; lane++) {
            if (lane < some) {
                memcpy(block + used, &ids[first + lane], sizeof(*ids));
                used += 2;
            }
            memcpy(blocks[lane], block, sizeof(block));
            bytes[lane] = 4 * used;
        }
        blake2s_last_lanes(&state, blocks, bytes, h);
        for (uint32_t lane = 0; lane < some; lane++)
            memcpy(keys + 16 * (first + lane), h[lane], 4 * KEY_WORDS);
        if (first + some < count) blake2s_block(&state, block);
        memset(block, 0, sizeof(block));
        used = 0;
    }
    return (int64_t)count;
}

/* Keys of pages stand at their last tokens, those of tails at the others. */
static int64_t every_key(const int64_t *ids, uint64_t count, uint32_t page_tokens,
                         const uint8_t *root, uint8_t *keys) {
    uint64_t pages = page_tokens ? count / page_tokens : 0;
    uint8_t *chain = malloc(16 * pages + 1);
    if (!chain) return fail(ENOMEM, "no memory for keys of %lu pages", pages);
    int64_t code = cxlkv_page_keys(ids, count, page_tokens, CXLKV_KEYS_CHAINED, root, chain);
    for (uint64_t page = 0; code >= 0 && page <= pages && page * page_tokens < count; page++) {
        uint64_t first = page * page_tokens, rest = min_u64(page_tokens - 1, count - first);
        const uint8_t *before = page ? chain + 16 * (page - 1) : root;
        code = tail_keys(ids + first, rest, before, keys + 16 * first);
        if (page < pages) memcpy(keys + 16 * (first + page_tokens - 1), chain + 16 * page, 16);
    }
    free(chain);
    return code < 0 ? code : (int64_t)count;
}

int64_t cxlkv_page_keys(const int64_t *ids, uint64_t count, uint32_t page_tokens, uint32_t kind,
                        const uint8_t *root, uint8_t *keys) {
    if (kind == CXLKV_KEYS_TAIL) return tail_keys(ids, count, root, keys);
    if (kind == CXLKV_KEYS_EVERY) return every_key(ids, count, page_tokens, root, keys);
    if (page_tokens == 0 || kind > CXLKV_KEYS_TAIL)
        return fail(CXLKV_E_ARGUMENT, "keys of kind %u for pages of %u tokens", kind, page_tokens);
    uint32_t before[KEY_WORDS], hashes[BLAKE2S_LANES][PAGE_WORDS];
    uint64_t pages = count / page_tokens;
    int code = need(pages, "ids", ids, "root", root, "keys", keys, NULL);
    if (code < 0 || pages == 0) return code;
    blake2s start;
    memcpy(before, root, sizeof(before));
    blake2s_begin(&start, 4 * KEY_WORDS, CHAIN_PURPOSE, 0);
    for (uint64_t first = 0; first < pages; first += BLAKE2S_LANES) {
        uint32_t some = (uint32_t)min_u64(BLAKE2S_LANES, pages - first);
        hash_pages(ids + first * page_tokens, page_tokens, some, hashes);
        for (uint32_t i = 0; i < some; i++) {
            uint32_t key[KEY_WORDS];
            if (kind == CXLKV_KEYS_CONTENT) /* hangs on the root, and names its place */
                blake2s_begin(&start, 4 * KEY_WORDS, CONTENT_PURPOSE, first + i);
            hang_on(&start, before, hashes[i], key);
            memcpy(keys + 16 * (first + i), key, sizeof(key));
            if (kind == CXLKV_KEYS_CHAINED) memcpy(before, key, sizeof(key));
        }
    }
    return (int64_t)pages;
}
