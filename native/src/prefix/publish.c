/* Publishing: the pages of a sequence are found under its keys from now on.
 *
 * Key i stands for tokens [0, (i + 1) * tokens_per_key) of a sequence. A page is published under
 * the first key that covers all of it; pages that share a key are told apart by their place and
 * part. The ordinal in the descriptor makes a chain with a gap end at the gap. A part with a window
 * has gaps by right: it matches up to where all that the next token sees is there. */
#include "host/hotness.h"
#include "host/locks.h"
#include "pages/published.h"
#include "prefix/publish.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

/* The page of part 0 at a place of a key, or NO_PAGE. */
static uint32_t find_first_part(const cxlkv_pool *pool, const uint8_t *hashes, uint64_t key,
                                uint64_t place) {
    uint64_t hash[2];
    page_hash(hashes, key, place, 0, hash);
    return index_find(pool, hash);
}

/* The pages that one key stands for. */
typedef struct key_pages {
    uint64_t key, first, end;
    uint32_t before;             /* the page of part 0 before the first, or NO_PAGE */
} key_pages;

/* Publishes the pages of one key in one part; false when the chain ends there. What stands behind
 * a gap could not be matched, or forgotten: a key has its pages from its first on. */
static bool publish_key(cxlkv_sequence *sequence, const uint8_t *hashes, key_pages of,
                        uint32_t part, int64_t *published) {
    cxlkv_pool *pool = sequence->pool;
    if (of.first < sequence->tables[part].first) return true;
    uint32_t parent = of.before;
    for (uint64_t page = of.first; page < of.end; page++) {
        page_key made = {.ordinal = (uint32_t)page};
        page_hash(hashes, of.key, page - of.first, part, made.hash);
        bool added = publish_page(pool, sequence_page(sequence, part, (uint32_t)page), part,
                                  pool->layout.page_tokens, &made);
        uint32_t found = index_find(pool, made.hash);
        /* Published under other keys, or retired. */
        if (found == NO_PAGE) return pool->layers.parts[part].window != 0;
        if (part) parent = find_first_part(pool, hashes, of.key, page - of.first);
        if (added) hotness_published(pool, found, part, parent);
        else hotness_follows(pool, found, parent);
        *published += added;
        if (!part) parent = found;
    }
    return true;
}

static int64_t publish_keys(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                            const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    key_pages of = {.before = NO_PAGE};
    int64_t published = 0;
    if (pool->shared) peers_follow(pool); /* what others forgot is not published any more */
    for (; of.key < count; of.key++, of.first = of.end) {
        of.end = (of.key + 1) * tokens_per_key / pool->layout.page_tokens;
        for (uint32_t part = 0; part < pool->geometry.part_count; part++)
            if (!publish_key(sequence, hashes, of, part, &published)) return published;
        if (of.end > of.first)
            of.before = find_first_part(pool, hashes, of.key, of.end - of.first - 1);
    }
    return published;
}

static int64_t publish_locked(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                              const uint8_t *hashes) {
    cxlkv_pool *pool = sequence->pool;
    uint64_t tokens = sequence->layer_tokens[pool->layout.layers - 1];
    if (tokens_per_key == 0 || count > tokens / tokens_per_key)
        return fail(CXLKV_E_ARGUMENT,
                    "publish: %u keys of %lu tokens, the sequence has %lu in all layers", count,
                    tokens_per_key, tokens);
    int64_t code = peers_verify(pool, 0); /* else the pages may be others' since it appended */
    if (code < 0) return code;
    return HOST_LOCKED(pool, publish_keys(sequence, count, tokens_per_key, hashes));
}

int publish_check(const cxlkv_sequence *sequence) {
    if (!sequence->approximate) return 0;
    return fail(CXLKV_E_ARGUMENT,
                "the sequence has pages that were computed behind other text: publish it with "
                "strict=False, or compute it anew");
}

int64_t cxlkv_publish(cxlkv_sequence *sequence, uint32_t count, uint64_t tokens_per_key,
                      const uint8_t *hashes, uint32_t content) {
    int code = need(count, "hashes", hashes, NULL);
    if (code == 0 && !content) code = publish_check(sequence);
    if (code < 0) return code;
    return IN_SEQUENCE(sequence, false, publish_locked(sequence, count, tokens_per_key, hashes));
}
