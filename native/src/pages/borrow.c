/* Pages of other hosts, read in place: pinned (V6), taken into view (V4), and given up again. */
#include "base/guard.h"
#include "coherence/fences.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"
#include "format/poison.h"
#include "format/records.h"
#include "pages/borrow.h"

enum { BORROW_BATCH = 16 };

static uint32_t range_count(const cxlkv_pool *pool) {
    return 2 + (has_shapes(&pool->layout) ? 1 : PIECE_KINDS * pool->geometry.record_layers);
}

/* Header, checksums, and the pieces of all heads, layer by layer. */
static void record_ranges(const cxlkv_pool *pool, uint32_t page, visible_range *ranges) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t slot = page % g->slab_slots, heads = pool->layout.kv_heads;
    const uint8_t *extent =
        pool->region.base + g->extents_offset + page / g->slab_slots * g->extent_bytes;
    *ranges++ = (visible_range){.pool = extent + slot * sizeof(record_header),
                                .bytes = sizeof(record_header)};
    *ranges++ = (visible_range){.pool = extent + g->checksums_offset + slot * g->checksum_bytes,
                                .bytes = g->checksum_bytes};
    if (has_shapes(&pool->layout)) { /* page behind page */
        *ranges = (visible_range){.pool = extent + g->layers_offset + slot * g->layer_bytes,
                                  .bytes = g->layer_bytes};
        return;
    }
    for (uint32_t row = 0; row < g->record_layers; row++) {
        const uint8_t *layer = extent + g->layers_offset + row * g->layer_bytes;
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
            uint64_t bytes = heads * piece_stride(g, kind);
            *ranges++ = (visible_range){.pool = layer + slab_offset(g, kind) + slot * bytes,
                                        .bytes = bytes};
        }
    }
}

/* Own lines, which may be lost like any other: then nothing is pinned, or stays so. */
static int change_pins(cxlkv_pool *pool, const pin_item *pins, uint32_t count, bool wanted) {
    GUARD_BEGIN(fault) {
        if (wanted) visibility_pin(pins, count, pool->mode);
        else visibility_unpin(pins, count, pool->mode);
    } GUARD_END(fault, return hosts_lost(&pool->hosts, &fault))
    return 0;
}

static int set_pins(cxlkv_pool *pool, const borrowing *items, uint32_t count, bool wanted) {
    pin_item pins[BORROW_BATCH];
    uint32_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bit = 1ull << items[i].page % 64;
        if (pool->pages[items[i].page].holders) continue; /* another holder's: it stays */
        if (!wanted && items[i].code == 0) continue;
        pins[used++] = (pin_item){
            .word = hosts_pin_word(&pool->hosts, pool->hosts.self, items[i].page), .bits = bit};
    }
    return used ? change_pins(pool, pins, used, wanted) : 0;
}

/* Somebody on this host has it already: in view, pinned, and what it was. */
static bool is_here(const cxlkv_pool *pool, const borrowing *item) {
    const page_info *info = &pool->pages[item->page];
    return info->holders && info->generation == item->generation;
}

static int settle_item(cxlkv_pool *pool, borrowing *item, const acquire_item *got) {
    descriptor line;
    if (got->code < 0) return got->code;
    memcpy(&line, got->descriptor, sizeof(line));
    if (line.page != item->page || line.part >= stored_parts(pool) ||
        line.tokens > pool->layout.page_tokens)
        return -CXLKV_E_STALE;
    pool->pages[item->page].generation = item->generation;
    verified_clear(pool, item->page);
    return 0;
}

static bool take_into_view(cxlkv_pool *pool, acquire_item *items, uint32_t count) {
    return GUARDED((visibility_take(items, count, pool->mode), true),
                   poison_error_locked(pool, &fault) == 0);
}

/* Where the memory of one of them is lost, each is looked at for itself. */
static void take(cxlkv_pool *pool, acquire_item *items, uint32_t count) {
    if (count == 0 || take_into_view(pool, items, count)) return;
    for (uint32_t i = 0; i < count; i++)
        if (!take_into_view(pool, &items[i], 1)) items[i].code = -CXLKV_E_POISON;
}

static void borrow_some(cxlkv_pool *pool, borrowing *items, uint32_t count,
                        visible_range *ranges) {
    acquire_item wanted[BORROW_BATCH];
    uint32_t places[BORROW_BATCH], used = 0;
    int pinned = set_pins(pool, items, count, true);
    for (uint32_t i = 0; i < count; i++) {
        items[i].code = pinned;
        if (pinned < 0) continue;
        if (is_here(pool, &items[i])) continue;
        if (pool->pages[items[i].page].holders) { /* pinned: it has the generation that it has */
            items[i].code = -CXLKV_E_STALE;
            continue;
        }
        visible_range *own = ranges + used * range_count(pool);
        record_ranges(pool, items[i].page, own);
        places[used] = i;
        wanted[used++] = (acquire_item){.descriptor_line = descriptor_of(pool, items[i].page),
                                        .version = items[i].generation << 8 | items[i].state,
                                        .ranges = own, .range_count = range_count(pool)};
    }
    take(pool, wanted, used);
    for (uint32_t i = 0; i < used; i++)
        items[places[i]].code = settle_item(pool, &items[places[i]], &wanted[i]);
    set_pins(pool, items, count, false);
}

void borrow(cxlkv_pool *pool, borrowing *items, uint32_t count) {
    visible_range *ranges = malloc(BORROW_BATCH * range_count(pool) * sizeof(*ranges));
    for (uint32_t i = 0; i < count; i += BORROW_BATCH) {
        uint32_t some = min_u32(BORROW_BATCH, count - i);
        if (ranges) borrow_some(pool, items + i, some, ranges);
        for (uint32_t j = 0; !ranges && j < some; j++) items[i + j].code = -ENOMEM;
    }
    free(ranges);
}

void borrow_end(cxlkv_pool *pool, uint32_t first, uint64_t pages) {
    pin_item pin = {.word = hosts_pin_word(&pool->hosts, pool->hosts.self, first),
                    .bits = pages << first % 64};
    change_pins(pool, &pin, 1, false);
}

/* Whoever dies while it borrows leaves pins that nobody takes away; and what was borrowed before
 * its extent became ours is pinned for nothing, until its next owner waits for us. */
static void drop_pins(cxlkv_pool *pool, uint32_t page, uint64_t wanted) {
    pin_item pin = {.word = hosts_pin_word(&pool->hosts, pool->hosts.self, page)};
    if (!word_try(&pool->hosts, pin.word, &pin.bits)) return;
    pin.bits &= ~wanted;
    if (pin.bits) change_pins(pool, &pin, 1, false);
}

void borrow_recover(cxlkv_pool *pool) {
    uint64_t wanted = 0;
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        bool borrowed = pool->pages[page].holders && !page_is_ours(pool, page);
        wanted |= (uint64_t)borrowed << page % 64;
        if (page % 64 < 63 && page + 1 < pool->host->page_count) continue;
        drop_pins(pool, page, wanted);
        wanted = 0;
    }
}

void borrow_own(cxlkv_pool *pool, uint32_t first, uint32_t count) {
    for (uint32_t page = first; page < first + count; page++)
        drop_pins(pool, page, ~(1ull << page % 64));
}

/* ---- the owner's side ---- */

/* Pins of a host that left, or is off, hold nothing. Those of one that was only silent do: it may
 * go on at any time, and reads in place. */
static bool pins_hold(const cxlkv_pool *pool, uint32_t host) {
    host_name name;
    host_fence fence;
    if (!hosts_name(&pool->hosts, host, &name)) return true;
    if (name.status != HOST_LIVE) return false;
    /* What is not decided yet does not say that it is off. */
    return hosts_fence_now(&pool->hosts, host, name.epoch, &fence) < 0 || !fence.off;
}

static bool look_at_pins(const cxlkv_pool *pool, const void *const *words, uint32_t count,
                         uint64_t *values) {
    return GUARDED((visibility_look(words, count, values, pool->mode), true), false);
}

/* What cannot be read may be pinned: its pages wait until its host left, or is off. */
static void look_one_by_one(const cxlkv_pool *pool, const void *const *words, uint32_t count,
                            uint64_t *values) {
    for (uint32_t host = 0; host < count; host++) {
        if (look_at_pins(pool, &words[host], 1, &values[host])) continue;
        values[host] = UINT64_MAX;
        if (pool->hosts.lost) pool->hosts.lost(pool->hosts.context, host);
    }
}

uint64_t pinned_elsewhere(const cxlkv_pool *pool, uint32_t page) {
    const void *words[HOSTS_MAX] = {0};
    uint64_t values[HOSTS_MAX] = {0}, pinned = 0;
    uint32_t hosts_count = pool->sharing.hosts;
    for (uint32_t host = 0; host < hosts_count; host++)
        words[host] = hosts_pin_word(&pool->hosts, host, page);
    if (!look_at_pins(pool, words, hosts_count, values))
        look_one_by_one(pool, words, hosts_count, values);
    for (uint32_t host = 0; host < hosts_count; host++)
        if (host != pool->hosts.self && values[host] && pins_hold(pool, host))
            pinned |= values[host];
    return pinned;
}
