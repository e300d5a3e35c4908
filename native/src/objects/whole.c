/* Objects of several pages: found when all of these are there, published and forgotten as one.
 *
 * Page i of a key has its hash at place i and all bytes from i * page_tokens on. The first page is
 * published last and forgotten first, and its ordinal is the object's size; the others' ordinals
 * are their places. All have the random number of one publication: pages that a death, a cold tier
 * or another host has left of another one do not fit. */
#include "base/clock.h"
#include "coherence/lines.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hotness.h"
#include "host/processes.h"
#include "objects/whole.h"
#include "pages/published.h"

enum { WHOLE_PART = 1 };

void key_hash(const uint8_t *keys, uint64_t i, uint32_t page, uint64_t hash[2]) {
    page_hash(keys, i, page, 0, hash); /* so that forget() and pin() find it, too */
}

int place_make_rest(const cxlkv_pool *pool, object_place *place) {
    uint32_t count = object_pages(&pool->layout, place->bytes);
    if (count < 2) return 0;
    place->rest = calloc(count - 1, sizeof(*place->rest));
    return place->rest ? 0 : fail(ENOMEM, "no memory for a list of %u pages", count);
}

void places_free(uint32_t count, object_place *places) {
    for (uint32_t i = 0; i < count; i++) {
        free(places[i].rest);
        places[i].rest = NULL;
    }
}

/* ---- find ---- */

static bool find_page(cxlkv_pool *pool, const uint64_t hash[2], const descriptor *first,
                      uint32_t place, uint32_t bytes, object_page *found) {
    descriptor line;
    uint32_t ordinal;
    found->page = index_find(pool, hash);
    if (found->page == NO_PAGE || pool->pages[found->page].retired) return false;
    if (!page_is_ours(pool, found->page)) descriptor_drop(pool, found->page);
    if (descriptor_read(pool, found->page, &line) < 0 ||
        memcmp(line.object, first->object, sizeof(line.object)) != 0 ||
        !match_page(pool, hash, WHOLE_PART, bytes, &found->page, &ordinal) || ordinal != place)
        return false;
    found->generation = pool->pages[found->page].generation;
    return true;
}

bool whole_find(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const descriptor *line,
                object_place *place) {
    enum { AHEAD = 4 };
    place->bytes = line->ordinal;
    if (line->ordinal > pool->layout.object_bytes || line->ordinal <= pool->layout.page_tokens ||
        place_make_rest(pool, place) < 0)
        return false;
    uint32_t count = place_pages(pool, place);
    for (uint32_t page = 1; page < count; page++) {
        uint64_t hash[2];
        key_hash(keys, i, page + AHEAD, hash);
        if (page + AHEAD < count) page_expect(pool, hash);
        key_hash(keys, i, page, hash);
        if (!find_page(pool, hash, line, page, place_bytes(pool, place, page),
                       &place->rest[page - 1]))
            return false;
    }
    return true;
}

/* ---- publish and forget ---- */

void whole_hash(const uint64_t first[2], uint32_t page, uint64_t hash[2]) {
    uint64_t key[2];
    page_hash((const uint8_t *)first, 0, 0, 0, key); /* twice is not at all */
    page_hash((const uint8_t *)key, 0, page, 0, hash);
}

bool whole_forget(cxlkv_pool *pool, const uint64_t first[2]) {
    bool found = page_forget(pool, first, true), more = has_object_pages(&pool->layout);
    for (uint32_t page = 1; more; page++) {
        uint64_t hash[2];
        whole_hash(first, page, hash);
        more = page_forget(pool, hash, true);
    }
    return found;
}

/* What is left of another object, or is another host's, which may be putting this one, too: that
 * host's copy stays whole there. */
static void drop_left(cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE) return;
    if (page_is_ours(pool, page)) {
        page_forget(pool, hash, false);
    } else {
        index_erase(pool, hash);
        page_unpublish(pool, page);
    }
}

void whole_drop(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const descriptor *line) {
    uint32_t count = object_pages(&pool->layout, line->ordinal);
    for (uint32_t page = 0; page < count; page++) {
        descriptor its;
        uint64_t hash[2];
        key_hash(keys, i, page, hash);
        uint32_t found = index_find(pool, hash);
        if (found != NO_PAGE && (page == 0 || page_is_ours(pool, found)) &&
            descriptor_read(pool, found, &its) == 0 &&
            memcmp(its.object, line->object, sizeof(its.object)) == 0)
            page_forget(pool, hash, false);
    }
}

bool whole_publish(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const object_place *place) {
    uint64_t hash[2], object = random_u64();
    uint32_t parent = NO_PAGE, count = place_pages(pool, place);
    key_hash(keys, i, 0, hash);
    if (index_find(pool, hash) != NO_PAGE) return false; /* another came first */
    for (uint32_t page = count; page-- > 0; parent = place_page(place, page)) {
        page_key key = {.ordinal = page ? page : place->bytes};
        memcpy(key.object, &object, sizeof(key.object));
        key_hash(keys, i, page, key.hash);
        if (page) drop_left(pool, key.hash);
        if (!publish_page(pool, place_page(place, page), WHOLE_PART,
                          place_bytes(pool, place, page), &key))
            break;
        hotness_published(pool, place_page(place, page), page > 0, parent);
    }
    key_hash(keys, i, 0, hash);
    if (index_find(pool, hash) == place->page) return true;
    for (uint32_t page = 1; page < count; page++) {
        key_hash(keys, i, page, hash);
        if (index_find(pool, hash) == place_page(place, page)) page_forget(pool, hash, false);
    }
    return false;
}

void whole_sweep(cxlkv_pool *pool) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        descriptor line;
        uint64_t key[2], first[2];
        if (!pool->pages[page].published || !page_is_ours(pool, page) ||
            pool->pages[page].retired || descriptor_read(pool, page, &line) < 0 ||
            descriptor_is_first(pool, &line))
            continue;
        page_hash((const uint8_t *)line.hash, 0, line.ordinal, 0, key);
        page_hash((const uint8_t *)key, 0, 0, 0, first);
        uint32_t found = index_find(pool, first);
        descriptor its;
        if (found != NO_PAGE && (!page_is_ours(pool, found) ||
                                 (descriptor_read(pool, found, &its) == 0 &&
                                  memcmp(its.object, line.object, sizeof(its.object)) == 0)))
            continue;
        page_forget(pool, line.hash, false);
    }
}
