/* The pages that a match finds, by part and place, until a sequence holds them. */
#include "format/records.h"
#include "host/hotness.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "prefix/found.h"
#include "sequence/sequence.h"

int found_add(cxlkv_pool *pool, found *f, uint32_t part, uint32_t ordinal, uint32_t page) {
    uint64_t parts = pool->geometry.part_count;
    while (ordinal >= f->capacity) {
        uint64_t capacity = f->capacity ? 2 * f->capacity : 64;
        uint32_t *keys = realloc(f->keys, capacity * sizeof(*keys));
        if (keys) f->keys = keys;
        if (keys) memset(keys + f->capacity, 0, (capacity - f->capacity) * sizeof(*keys));
        uint32_t *pages = keys ? realloc(f->pages, capacity * parts * sizeof(*pages)) : NULL;
        if (!pages) return fail(ENOMEM, "no memory for a match of %lu pages", capacity);
        memset(pages + f->capacity * parts, 0xff,
               (capacity - f->capacity) * parts * sizeof(*pages));
        f->pages = pages;
        f->capacity = capacity;
    }
    f->pages[ordinal * parts + part] = page;
    if (ordinal >= f->count) f->count = ordinal + 1;
    return 0;
}

int found_hold(cxlkv_pool *pool, const found *f, found_prefix prefix, cxlkv_sequence *sequence) {
    uint32_t parts = pool->geometry.part_count, count = prefix.count;
    for (uint32_t part = 0; part < parts; part++) {
        uint32_t first = window_page(pool, part, prefix.tokens);
        int code = sequence_reserve(sequence, part, count); /* own chunks */
        if (code < 0) return code;
        for (uint32_t i = first; i < count; i++) {
            pages_hold(pool, 1, &f->pages[(uint64_t)i * parts + part]);
            sequence_push(sequence, part, i, f->pages[(uint64_t)i * parts + part]);
        }
        sequence->tables[part].first = first;
        hotness_matched(pool, f->pages, part, first, count);
    }
    sequence->page_count = count;
    return 0;
}

/* Another host's page that a hit holds: one behind its part's window is not. */
static bool is_borrowed(const cxlkv_pool *pool, const found *f, uint64_t i, found_prefix prefix) {
    uint64_t parts = pool->geometry.part_count;
    return f->pages[i] != NO_PAGE && !page_is_ours(pool, f->pages[i]) &&
           i / parts >= window_page(pool, (uint32_t)(i % parts), prefix.tokens);
}

/* How many tokens the page at a place has: the last one may be the copy of a tail. */
static uint32_t tokens_there(const cxlkv_pool *pool, uint32_t page) {
    descriptor line;
    return descriptor_read(pool, page, &line) == 0 ? line.tokens : 0;
}

bool found_borrow(cxlkv_pool *pool, found *f, found_prefix prefix) {
    uint64_t parts = pool->geometry.part_count, count = prefix.count, used = 0;
    bool all = true;
    borrowing *items = malloc((parts * count + 1) * sizeof(*items));
    for (uint64_t i = 0; i < parts * count; i++) {
        uint32_t page = f->pages[i];
        if (!is_borrowed(pool, f, i, prefix)) continue;
        if (!items) f->pages[i] = NO_PAGE;
        else items[used++] = (borrowing){.page = page, .state = PAGE_PUBLISHED,
                                         .generation = pool->pages[page].generation};
        all &= items != NULL;
    }
    if (items) borrow(pool, items, (uint32_t)used);
    used = 0;
    for (uint64_t i = 0; items && i < parts * count; i++) {
        uint32_t page = f->pages[i];
        if (!is_borrowed(pool, f, i, prefix)) continue;
        int code = items[used++].code;
        bool is_last = i / parts == count - 1;
        if (code == 0 && record_check(pool, page, pool->pages[page].generation,
                                      is_last ? tokens_there(pool, page)
                                              : pool->layout.page_tokens) < 0) {
            count_add(pool, COUNT_CORRUPT_PIECES, 1);
            code = -CXLKV_E_CORRUPT;
        }
        if (code == 0) continue;
        f->pages[i] = NO_PAGE;
        all = false;
    }
    free(items);
    return all;
}
