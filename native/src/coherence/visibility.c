/* Publish, acquire and free over memory that hosts share without coherence.
 * docs/explanation/coherence.md explains it. */
#include "base/crc32c.h"
#include "coherence/lines.h"
#include "cxlkv.h"

#include <string.h>

enum { LINE = FLUSH_LINE_BYTES, ATTEMPTS = 8, EXPECTED_LINES = 257 };
/* Of an item on its way: to be looked at (again), and seen and being copied. */
enum { OPEN = -CXLKV_E_CORRUPT, COPYING = 1 };

/* The fields first, {generation, state} last: a copy of the line in between has a wrong CRC. */
static void store_descriptor(const publish_item *item) {
    uint64_t version;
    memcpy(&version, item->descriptor, sizeof(version));
    flush_store_line(item->descriptor_line, item->descriptor, 1);
    flush_store_word(item->descriptor_line, version);
}

void visibility_publish(const publish_item *items, uint32_t count, enum visibility_mode mode) {
    for (uint32_t i = 0; i < count; i++) { /* both were written back when they were used last */
        flush_expect(items[i].header_line);
        flush_expect(items[i].descriptor_line);
    }
    for (uint32_t i = 0; i < count; i++) {
        flush_store_line(items[i].header_line, items[i].header, 0);
        line_send(FLUSH_PUBLISH_HEADER, items[i].header_line, mode);
    }
    flush_fence_stores(FLUSH_PUBLISH_PAYLOAD_FENCE); /* V1 */
    for (uint32_t i = 0; i < count; i++) {
        store_descriptor(&items[i]);
        line_send(FLUSH_PUBLISH_DESCRIPTOR, items[i].descriptor_line, mode);
    }
    flush_fence_stores(FLUSH_PUBLISH_FENCE);
}

void visibility_free(const publish_item *items, uint32_t count, enum visibility_mode mode) {
    for (uint32_t i = 0; i < count; i++) {
        store_descriptor(&items[i]);
        line_send(FLUSH_FREE_DESCRIPTOR, items[i].descriptor_line, mode);
    }
    flush_fence_stores(FLUSH_FREE_FENCE); /* V5 */
}

/* ---- acquire ---- */

static int check_descriptor(const acquire_item *item) {
    uint64_t version;
    uint32_t crc;
    memcpy(&version, item->descriptor, sizeof(version));
    memcpy(&crc, item->descriptor + LINE - sizeof(crc), sizeof(crc));
    if (crc != crc32c(0, item->descriptor, LINE - sizeof(crc))) return -CXLKV_E_CORRUPT;
    return version == item->version ? COPYING : -CXLKV_E_STALE;
}

/* Descriptors of all items with `code`, from memory. */
static void look_at(acquire_item *items, uint32_t count, int code, enum visibility_mode mode) {
    bool first = code == OPEN;
    for (uint32_t i = 0; i < count; i++)
        if (items[i].code == code)
            line_drop(first ? FLUSH_ACQUIRE_DESCRIPTOR : FLUSH_ACQUIRE_RECHECK,
                      items[i].descriptor_line, mode);
    flush_fence_all(first ? FLUSH_ACQUIRE_DESCRIPTOR_FENCE : FLUSH_ACQUIRE_RECHECK_FENCE);
    for (uint32_t i = 0; i < count; i++)
        if (items[i].code == code) flush_expect(items[i].descriptor_line);
}

static void drop_payloads(const acquire_item *items, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; items[i].code == COPYING && r < items[i].range_count; r++)
            flush_invalidate(FLUSH_ACQUIRE_PAYLOAD, items[i].ranges[r].pool,
                             items[i].ranges[r].bytes);
}

/* A record alone finds nothing in the caches, and nothing yet that the processor could foresee: so
 * all of it is asked for together. The copies of a batch overlap by themselves. */
static void expect(const acquire_item *item) {
    uint32_t lines = 0;
    for (uint32_t r = 0; item->code == COPYING && r < item->range_count; r++)
        for (size_t at = 0; item->ranges[r].to && at < item->ranges[r].bytes; at += LINE)
            if (lines++ < EXPECTED_LINES)
                flush_expect((const uint8_t *)item->ranges[r].pool + at);
            else
                return;
}

/* One attempt for the items that are open, all of them under the same fences. */
static void take_round(acquire_item *items, uint32_t count, enum visibility_mode mode) {
    look_at(items, count, OPEN, mode);
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].code != OPEN) continue;
        flush_load_line(items[i].descriptor, items[i].descriptor_line);
        items[i].code = check_descriptor(&items[i]);
    }
    flush_fence_all(FLUSH_ACQUIRE_SEEN_FENCE);
    if (mode != VISIBILITY_COHERENT) drop_payloads(items, count); /* V4 */
    flush_fence_all(FLUSH_ACQUIRE_PAYLOAD_FENCE);
    if (count == 1) expect(items);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t r = 0; items[i].code == COPYING && r < items[i].range_count; r++)
            if (items[i].ranges[r].to)
                flush_copy_out(items[i].ranges[r].to, items[i].ranges[r].pool,
                               items[i].ranges[r].bytes);
}

/* After it, what was copied is what was seen: nothing changed in between (V3). */
static void look_again(acquire_item *items, uint32_t count, enum visibility_mode mode) {
    flush_fence_all(FLUSH_ACQUIRE_COPIED_FENCE);
    look_at(items, count, COPYING, mode);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t again[LINE];
        if (items[i].code != COPYING) continue;
        flush_load_line(again, items[i].descriptor_line);
        items[i].code = memcmp(again, items[i].descriptor, LINE) == 0 ? 0 : OPEN;
    }
}

static uint32_t acquire(acquire_item *items, uint32_t count, bool pinned,
                        enum visibility_mode mode) {
    uint32_t accepted = 0, open = count;
    for (uint32_t i = 0; i < count; i++) items[i].code = OPEN;
    /* Nothing else orders an invalidation after the load by which we learned of the record. */
    flush_fence_all(FLUSH_ACQUIRE_BEGIN_FENCE);
    for (int attempt = 0; open > 0 && attempt < ATTEMPTS; attempt++) {
        take_round(items, count, mode);
        if (!pinned) look_again(items, count, mode);
        open = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (items[i].code == COPYING) items[i].code = 0; /* V6 holds it as it was seen */
            open += items[i].code == OPEN;
        }
    }
    for (uint32_t i = 0; i < count; i++) accepted += items[i].code == 0;
    return accepted;
}

uint32_t visibility_acquire(acquire_item *items, uint32_t count, enum visibility_mode mode) {
    return acquire(items, count, false, mode);
}

uint32_t visibility_take(acquire_item *items, uint32_t count, enum visibility_mode mode) {
    return acquire(items, count, true, mode);
}

/* ---- pins ---- */

static const void *line_of(const void *word) {
    return (const uint8_t *)word - (uintptr_t)word % LINE;
}

static void send_words(enum flush_site site, const pin_item *items, uint32_t count,
                       enum visibility_mode mode) {
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || line_of(items[i].word) != line_of(items[i - 1].word))
            line_send(site, line_of(items[i].word), mode);
}

/* The word's only writer is this host, whose turn is the caller's: what it loads is what stands. */
void visibility_pin(const pin_item *items, uint32_t count, enum visibility_mode mode) {
    for (uint32_t i = 0; i < count; i++)
        flush_store_word(items[i].word, flush_load_word(items[i].word) | items[i].bits);
    send_words(FLUSH_PIN, items, count, mode);
    flush_fence_all(FLUSH_PIN_FENCE);
}

void visibility_unpin(const pin_item *items, uint32_t count, enum visibility_mode mode) {
    /* A release would order the loads for this host; others see the word in memory. */
    flush_fence_all(FLUSH_UNPIN_BEGIN_FENCE);
    for (uint32_t i = 0; i < count; i++)
        flush_store_word(items[i].word, flush_load_word(items[i].word) & ~items[i].bits);
    send_words(FLUSH_UNPIN, items, count, mode);
    flush_fence_stores(FLUSH_UNPIN_FENCE);
}

void visibility_look(const void *const *words, uint32_t count, uint64_t *values,
                     enum visibility_mode mode) {
    /* Another process of this host may have freed, and fenced: that orders nothing of ours. */
    flush_fence_all(FLUSH_OWNER_LOOK_BEGIN_FENCE);
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || line_of(words[i]) != line_of(words[i - 1]))
            line_drop(FLUSH_OWNER_LOOK, line_of(words[i]), mode);
    flush_fence_all(FLUSH_OWNER_LOOK_FENCE);
    for (uint32_t i = 0; i < count; i++) values[i] = flush_load_word(words[i]);
}
