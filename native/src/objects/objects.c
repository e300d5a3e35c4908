/* The store door: objects found by their keys, held, verified, published.
 *
 * A page holds one object in one piece, whose "tokens" are its bytes. A put takes pages, writes and
 * sums the bytes without a lock, and publishes; a get holds what it found, copies, and gives it
 * back. So a reader meets whole objects only, and nobody's page is reused under it. */
#include "base/crc32c.h"
#include "base/guard.h"
#include "coherence/lines.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/threads.h"
#include "objects/objects.h"
#include "objects/whole.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "pool/alloc.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

/* ---- what a pool keeps ---- */

int objects_begin(cxlkv_pool *pool) {
    if (!stores_objects(&pool->layout)) return 0;
    uint64_t pages = pool->geometry.page_count;
    pool_objects *made = calloc(1, sizeof(*made) + pages * sizeof(made->seen[0]));
    if (!made) return fail(ENOMEM, "no memory for what is known of %lu objects", pages);
    atomic_store(&pool->owner[OWNER_OBJECTS], made);
    return 0;
}

void objects_free(cxlkv_pool *pool) { free(objects_of(pool)); }

int objects_busy(const cxlkv_pool *pool) {
    const pool_objects *kept = objects_of(pool);
    uint32_t lent = kept ? atomic_load(&kept->lent) : 0;
    if (!lent) return 0;
    return fail(CXLKV_E_BUSY, "the pool cannot be closed: %u objects in its memory are held by "
                "leases, or by views that outlived these. Release and drop them first", lent);
}

/* ---- finding and holding ---- */

int objects_check(const cxlkv_pool *pool) {
    if (stores_objects(&pool->layout)) return 0;
    return fail(CXLKV_E_ARGUMENT, "this pool stores K and V, which are appended to sequences: "
                "objects need a pool that was made for them, KVLayout.objects()");
}

uint8_t *object_at(const cxlkv_pool *pool, uint32_t page) {
    return pieces_of(pool, page, 0, PIECE_KEYS);
}

/* Under the host lock. Other hosts' pages are looked at again, under a pin, before use. */
static object_place find_place(cxlkv_pool *pool, const uint8_t *keys, uint64_t i) {
    object_place place = {.code = CXLKV_OBJECT_ABSENT};
    uint64_t hash[2];
    uint32_t ordinal;
    descriptor line;
    key_hash(keys, i, 0, hash);
    place.page = index_find(pool, hash);
    if (place.page == NO_PAGE) return place;
    bool read = !pool->pages[place.page].retired && descriptor_read(pool, place.page, &line) == 0;
    uint32_t part = read ? line.part : 0;
    place.bytes = read ? line.tokens : 0;
    bool found = match_page(pool, hash, part, place.bytes, &place.page, &ordinal) && place.bytes;
    place.generation = pool->pages[place.page].generation;
    if (found && (part == 0 || whole_find(pool, keys, i, &line, &place))) {
        place.code = 0;
    } else if (found && place.rest) {
        whole_drop(pool, keys, i, &line); /* so that it can be put again */
    } else if (page_is_ours(pool, place.page)) {
        place.code = CXLKV_OBJECT_DAMAGED;
    }
    return place;
}

/* What other hosts said, and the descriptors of theirs that are about to be read, from memory. */
static void follow(cxlkv_pool *pool, uint32_t count, const uint8_t *keys) {
    if (!pool->shared) return;
    peers_follow(pool);
    flush_fence_all(FLUSH_ACQUIRE_BEGIN_FENCE);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash[2];
        key_hash(keys, i, 0, hash);
        uint32_t page = index_find(pool, hash);
        if (page != NO_PAGE && !page_is_ours(pool, page))
            line_drop(FLUSH_ACQUIRE_DESCRIPTOR, descriptor_of(pool, page), pool->mode);
    }
    flush_fence_all(FLUSH_ACQUIRE_DESCRIPTOR_FENCE);
}

/* A page of another host, and whose it is. */
typedef struct foreign_page {
    object_place *place;
    uint64_t generation;
    uint32_t page, bytes;
} foreign_page;

/* What was learned of it. */
static void settle_borrowed(cxlkv_pool *pool, const foreign_page *foreign, const borrowing *item) {
    object_place *place = foreign->place;
    if (item->code < 0 || item->generation != foreign->generation) {
        place->code = CXLKV_OBJECT_ABSENT;
    } else if (record_check(pool, foreign->page, foreign->generation, foreign->bytes) < 0) {
        count_add(pool, COUNT_CORRUPT_PIECES, 1);
        if (place->code == 0) place->code = CXLKV_OBJECT_DAMAGED;
    }
}

static int by_page(const void *a, const void *b) {
    const foreign_page *one = a, *other = b;
    return (one->page > other->page) - (one->page < other->page);
}

static void borrow_each_once(cxlkv_pool *pool, const foreign_page *foreign, uint64_t count,
                             borrowing *items) {
    uint32_t used = 0;
    for (uint64_t i = 0; i < count; i++)
        if (i == 0 || foreign[i].page != foreign[i - 1].page)
            items[used++] = (borrowing){.page = foreign[i].page, .state = PAGE_PUBLISHED,
                                        .generation = foreign[i].generation};
    borrow(pool, items, used);
}

static uint64_t list_foreign(const cxlkv_pool *pool, uint32_t count, object_place *places,
                             foreign_page *foreign) {
    uint64_t used = 0;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; places[i].code == 0 && k < place_pages(pool, &places[i]); k++) {
            uint32_t page = place_page(&places[i], k);
            if (page_is_ours(pool, page)) continue;
            if (foreign)
                foreign[used] = (foreign_page){
                    .place = &places[i], .page = page, .bytes = place_bytes(pool, &places[i], k),
                    .generation = k ? places[i].rest[k - 1].generation : places[i].generation};
            used++;
        }
    return used;
}

/* Pages of other hosts into view: those that were freed meanwhile are absent. One that is asked for
 * twice is borrowed once: a second look that fails would take away the first one's pin. */
static int borrow_places(cxlkv_pool *pool, uint32_t count, object_place *places) {
    uint64_t used = list_foreign(pool, count, places, NULL);
    if (used == 0) return 0;
    foreign_page *foreign = malloc(used * sizeof(*foreign));
    borrowing *items = malloc(used * sizeof(*items));
    if (foreign && items) {
        list_foreign(pool, count, places, foreign);
        qsort(foreign, used, sizeof(*foreign), by_page);
        borrow_each_once(pool, foreign, used, items);
        for (uint64_t i = 0, item = 0; i < used; i++) {
            item += i > 0 && foreign[i].page != foreign[i - 1].page;
            settle_borrowed(pool, &foreign[i], &items[item]);
        }
        for (uint64_t i = 0, item = 0; i < used; i++) { /* of what is not had after all */
            item += i > 0 && foreign[i].page != foreign[i - 1].page;
            if (foreign[i].place->code < 0 && items[item].code == 0 &&
                !pool->pages[foreign[i].page].holders)
                borrow_end(pool, foreign[i].page, 1);
        }
    }
    int code = foreign && items ? 0 : fail(ENOMEM, "no memory for a list of %lu pages", used);
    free(foreign);
    free(items);
    return code;
}

/* What a key further on will touch, each of it a miss. */
static void expect_place(const cxlkv_pool *pool, uint32_t count, const uint8_t *keys, uint32_t i) {
    enum { AHEAD = 8 };
    uint64_t hash[2];
    if (i + 2 * AHEAD < count) {
        key_hash(keys, i + 2 * AHEAD, 0, hash);
        index_expect(pool, hash);
    }
    if (i + AHEAD >= count) return;
    key_hash(keys, i + AHEAD, 0, hash);
    uint32_t page = page_expect(pool, hash);
    if (page == NO_PAGE) return;
    __builtin_prefetch(&pool->reuse[page], 1);
    __builtin_prefetch((const void *)&pool->hotness[page], 1);
}

/* Under the host lock; of a bus error the lines that were held are told by `held`. */
static int hold_places(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                       object_place *places) {
    uint64_t found = 0;
    uint32_t since = (uint32_t)pool->host->clock;
    follow(pool, count, keys);
    for (uint32_t i = 0; i < count; i++) {
        expect_place(pool, count, keys, i);
        places[i] = find_place(pool, keys, i);
    }
    int code = pool->shared ? borrow_places(pool, count, places) : 0;
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        if (places[i].code != 0) continue;
        for (uint32_t k = 0; k < place_pages(pool, &places[i]); k++) {
            uint32_t page = place_page(&places[i], k);
            pages_hold(pool, 1, &page);
        }
        places[i].held = true;
        hotness_reached(pool, places[i].page, since);
        found++;
    }
    count_add(pool, COUNT_MATCH_KEYS_ASKED, count);
    count_add(pool, COUNT_MATCH_KEYS_HIT, found);
    return code;
}

static uint32_t drop_places(cxlkv_pool *pool, uint32_t count, object_place *places, bool locked) {
    uint32_t dropped = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!places[i].held) continue;
        places[i].held = false;
        for (uint32_t k = 0; k < place_pages(pool, &places[i]); k++) {
            uint32_t page = place_page(&places[i], k);
            if (locked) pages_drop(pool, 1, &page);
            else pages_drop_later(pool, 1, &page);
        }
        dropped++;
    }
    return dropped;
}

int objects_hold(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, object_place *places) {
    for (uint32_t i = 0; i < count; i++)
        places[i] = (object_place){.page = NO_PAGE, .code = CXLKV_OBJECT_ABSENT};
    int outcome = host_lock(pool);
    if (outcome < 0) return outcome;
    outcome = GUARDED(hold_places(pool, count, keys, places), poison_error_locked(pool, &fault));
    if (outcome < 0) drop_places(pool, count, places, true);
    host_unlock(pool);
    if (outcome < 0) places_free(count, places);
    return outcome;
}

uint32_t objects_drop(cxlkv_pool *pool, uint32_t count, object_place *places) {
    bool locked = host_lock(pool) == 0;
    uint32_t dropped = drop_places(pool, count, places, locked);
    if (locked) host_unlock(pool);
    return dropped;
}

static int64_t sizes_of(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, int64_t *sizes) {
    int64_t found = 0;
    follow(pool, count, keys);
    for (uint32_t i = 0; i < count; i++) {
        object_place place = find_place(pool, keys, i);
        sizes[i] = object_size(&place);
        found += place.code == 0;
        places_free(1, &place);
    }
    return found;
}

int64_t objects_sizes(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, int64_t *sizes) {
    int64_t code = need(count, "keys", keys, "sizes", sizes, NULL);
    if (code == 0) code = objects_check(pool);
    return code < 0 ? code : IN_POOL(pool, HOST_LOCKED(pool, sizes_of(pool, count, keys, sizes)));
}

/* ---- texts ---- */

/* An object stands behind `before`. A text is a chain of pages: an object's first page is behind
 * its others, as it goes first. */
static void chain_object(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, uint32_t before) {
    uint64_t hash[2];
    uint32_t last = 0;
    for (bool more = has_object_pages(&pool->layout); more; last += more) {
        key_hash(keys, i, last + 1, hash);
        more = index_find(pool, hash) != NO_PAGE;
    }
    for (uint32_t k = last + 1; k-- > 0;) {
        key_hash(keys, i, k, hash);
        uint32_t page = index_find(pool, hash);
        if (page_is_ours(pool, page)) hotness_chained(pool, page, before);
        before = page;
    }
}

static int64_t chain_locked(cxlkv_pool *pool, uint32_t count, const uint8_t *keys) {
    int64_t found = 0;
    uint32_t before = NO_PAGE;
    if (pool->shared) peers_follow(pool);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash[2];
        key_hash(keys, i, 0, hash);
        uint32_t page = index_find(pool, hash);
        if (page != NO_PAGE && page != before && i && page_is_ours(pool, page))
            chain_object(pool, keys, i, before);
        /* Behind another host's object nothing is known: that host evicts it by itself. */
        before = page == NO_PAGE ? PARENT_LOST : page_is_ours(pool, page) ? page : NO_PAGE;
        found += page != NO_PAGE;
    }
    return found;
}

int64_t cxlkv_objects_chain(cxlkv_pool *pool, uint32_t count, const uint8_t *keys) {
    int64_t code = objects_check(pool);
    return code < 0 ? code : IN_POOL(pool, HOST_LOCKED(pool, chain_locked(pool, count, keys)));
}

/* ---- verifying ---- */

/* The CRC that the object was put with; false when its table is not whole. */
bool object_crc(const cxlkv_pool *pool, const object_place *place, uint32_t i, uint32_t *crc) {
    record_header header;
    uint32_t page = place_page(place, i);
    if (!record_header_read(pool, page, &header) ||
        header.tokens != place_bytes(pool, place, i) ||
        !record_table_is_whole(pool, page, &header))
        return false;
    *crc = *checksum_of(pool, page, 0, 0, PIECE_KEYS);
    return true;
}

typedef struct verify_job {
    cxlkv_pool *pool;
    object_place *places;
} verify_job;

static bool is_unseen(const cxlkv_pool *pool, const object_place *place) {
    return place->code == 0 && place->held &&
           atomic_load_explicit(&objects_of(pool)->seen[place->page], memory_order_relaxed) !=
               place->generation + 1;
}

/* It was right, in this process. */
static void object_set_seen(cxlkv_pool *pool, const object_place *place) {
    atomic_store_explicit(&objects_of(pool)->seen[place->page], place->generation + 1,
                          memory_order_relaxed);
}

void object_set_damaged(cxlkv_pool *pool, object_place *place) {
    count_add(pool, COUNT_CORRUPT_PIECES, 1);
    __atomic_store_n(&place->code, CXLKV_OBJECT_DAMAGED, __ATOMIC_RELAXED); /* by spans */
}

static bool is_right(const cxlkv_pool *pool, const object_place *place) {
    uint32_t crc;
    for (uint32_t i = 0; i < place_pages(pool, place); i++)
        if (!object_crc(pool, place, i, &crc) ||
            crc != crc32c(0, object_at(pool, place_page(place, i)), place_bytes(pool, place, i)))
            return false;
    return true;
}

static int verify_task(void *context, uint32_t item) {
    const verify_job *job = context;
    cxlkv_pool *pool = job->pool;
    object_place *place = &job->places[item];
    if (!is_unseen(pool, place)) return 0;
    bool right = GUARDED(is_right(pool, place), poison_error(pool, &fault) == 0);
    if (right) object_set_seen(pool, place);
    else object_set_damaged(pool, place);
    return 0;
}

int objects_verify(cxlkv_pool *pool, uint32_t count, object_place *places) {
    verify_job job = {.pool = pool, .places = places};
    uint32_t unseen = 0;
    if (!pool->layout.checksum) return 0;
    for (uint32_t i = 0; i < count; i++) unseen += is_unseen(pool, &places[i]);
    return unseen ? run_tasks(pool, count, verify_task, &job) : 0; /* wakes nobody for nothing */
}

/* ---- taking pages, and publishing them ---- */

/* Which keys stand here a second time: of those the first one's object is put. By a hash table of
 * `slots` zeros, a power of two above count. */
static void mark_repeats(uint32_t count, const uint8_t *keys, uint32_t *table, uint64_t slots,
                         bool *repeats) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash[2];
        key_hash(keys, i, 0, hash);
        uint64_t at = hash[0] & (slots - 1);
        while (table[at] && memcmp(keys + 16ull * (table[at] - 1), keys + 16ull * i, 16) != 0)
            at = (at + 1) & (slots - 1);
        repeats[i] = table[at] != 0;
        if (!table[at]) table[at] = i + 1;
    }
}

/* Under the host lock. */
static int take_places(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                       object_place *places, int32_t *codes, const bool *repeats,
                       uint32_t *pages, uint64_t *room) {
    uint64_t wanted = 0, used = 0;
    if (pool->shared) peers_follow(pool); /* what others forgot is not published any more */
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash[2];
        if (keys) key_hash(keys, i, 0, hash);
        bool present = keys && (repeats[i] || (!replaces && index_find(pool, hash) != NO_PAGE));
        codes[i] = present ? CXLKV_RECORD_PRESENT : 0;
        wanted += present ? 0 : place_pages(pool, &places[i]);
    }
    if (pool->host->free_pages < wanted && has_object_pages(&pool->layout)) whole_sweep(pool);
    /* No page follows another: they lie close together, so that whole extents stay empty. */
    *room = wanted;
    int code = pages_take(pool, (uint32_t)min_u64(wanted, UINT32_MAX), IN_A_GAP, pages);
    if (code < 0) return code;
    for (uint32_t i = 0; i < count; i++) {
        if (codes[i] != 0) continue;
        places[i].page = pages[used++];
        places[i].generation = pool->pages[places[i].page].generation;
        for (uint32_t k = 1; k < place_pages(pool, &places[i]); k++)
            places[i].rest[k - 1].page = pages[used++];
        places[i].held = true;
    }
    return 0;
}

int objects_take(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                 object_place *places, int32_t *codes) {
    uint64_t room = 0, slots = 4, most = 0;
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < count; i++) {
        code = place_make_rest(pool, &places[i]);
        most += place_pages(pool, &places[i]);
    }
    if (code < 0) return code;
    if (most > pool->geometry.page_count) most = pool->geometry.page_count; /* then none is taken */
    while (slots < 2ull * count || slots < most) slots *= 2;
    uint32_t *pages = calloc(slots, sizeof(*pages) + sizeof(bool)); /* a table of keys before */
    if (!pages) return fail(ENOMEM, "no memory for a list of %u objects", count);
    bool *repeats = (bool *)(pages + slots);
    if (keys) mark_repeats(count, keys, pages, slots, repeats);
    code = (int)TAKING_PAGES(pool, room, take_places(pool, count, keys, replaces, places, codes,
                                                     repeats, pages, &room));
    free(pages);
    return code;
}

static bool publish_place(cxlkv_pool *pool, const uint8_t *keys, uint32_t i,
                          const object_place *place) {
    page_key key = {.ordinal = 0};
    if (place->rest) return whole_publish(pool, keys, i, place);
    key_hash(keys, i, 0, key.hash);
    if (!publish_page(pool, place->page, 0, place->bytes, &key)) return false;
    hotness_published(pool, place->page, 0, NO_PAGE);
    return true;
}

/* What users have said of an object: of this host's. */
typedef struct object_marks {
    bool pinned;
    uint16_t priority;
} object_marks;

static object_marks marks_of(const cxlkv_pool *pool, const uint64_t hash[2]) {
    uint32_t page = index_find(pool, hash);
    if (page == NO_PAGE || !page_is_ours(pool, page)) return (object_marks){0};
    return (object_marks){pool->pages[page].pinned, pool->reuse[page].priority};
}

static void marks_set(cxlkv_pool *pool, const object_place *place, object_marks marks) {
    for (uint32_t i = 0; i < place_pages(pool, place); i++) {
        pool->pages[place_page(place, i)].pinned = marks.pinned;
        pool->reuse[place_page(place, i)].priority = marks.priority;
    }
}

static int64_t publish_places(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                              const object_place *places, int32_t *codes) {
    int64_t published = 0;
    if (pool->shared) peers_follow(pool);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash[2];
        if (codes[i] != 0) continue;
        key_hash(keys, i, 0, hash);
        object_marks marks = replaces ? marks_of(pool, hash) : (object_marks){0};
        if (replaces && places[i].held) whole_forget(pool, hash);
        if (places[i].held && publish_place(pool, keys, i, &places[i])) {
            object_set_seen(pool, &places[i]);
            if (replaces) marks_set(pool, &places[i], marks);
            published++;
        } else {
            codes[i] = CXLKV_RECORD_PRESENT; /* another came first, or it was given back */
        }
    }
    return published;
}

/* Not if this host may have been declared off while it wrote: the pages are others' then. */
int64_t objects_publish(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                        const object_place *places, int32_t *codes) {
    int64_t code = peers_verify(pool, 0);
    if (code < 0) return code;
    return HOST_LOCKED(pool, publish_places(pool, count, keys, replaces, places, codes));
}
