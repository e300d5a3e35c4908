/* Checking a pool: everything that must hold, from the superblock to the last piece; and repair. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "internal.h"

typedef struct report {
    char *text;
    size_t bytes, used;
    int64_t problems;
} report;

static void report_line(report *report, uint32_t page) {
    report->problems++;
    if (report->used + 1 >= report->bytes) return;
    int wrote = snprintf(report->text + report->used, report->bytes - report->used,
                         "page %u: %s\n", page, cxlkv_error_text());
    if (wrote > 0) report->used = min_u64(report->used + (size_t)wrote, report->bytes - 1);
}

/* A page's holder writes its descriptor without the lock, and may be preempted half way. */
static int descriptor_settled(cxlkv_pool *pool, uint32_t page, descriptor *line) {
    const struct timespec pause = {.tv_nsec = 1000000};
    int code = descriptor_read(pool, page, line);
    for (int tries = 0; code < 0 && pool->pages[page].holders && tries < 100; tries++) {
        nanosleep(&pause, NULL);
        code = descriptor_read(pool, page, line);
    }
    return code;
}

static void check_page(cxlkv_pool *pool, uint32_t page, bool deep, report *report) {
    descriptor line;
    const page_info *info = &pool->pages[page];
    if (info->retired || !page_is_ours(pool, page)) return;
    if (descriptor_settled(pool, page, &line) < 0) {
        report_line(report, page);
        return;
    }
    uint64_t state = line.version & 255;
    if (line.version >> 8 != info->generation) {
        fail(CXLKV_E_CORRUPT, "its descriptor says generation %lu, the host %lu",
             line.version >> 8, info->generation);
        report_line(report, page);
    }
    if ((state == PAGE_PUBLISHED) != (info->published != 0)) {
        fail(CXLKV_E_CORRUPT, "its descriptor says state %lu, the host %s", state,
             info->published ? "published" : "not published");
        report_line(report, page);
    }
    if (state == PAGE_FREE) return;
    if (record_check(pool, page, info->generation, line.tokens) < 0) {
        report_line(report, page);
        return;
    }
    if (!deep || !pool->layout.checksum) return;
    verified_clear(pool, page);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        if (pool->part_of[layer] == line.part && pieces_verify(pool, page, layer) < 0)
            report_line(report, page);
}

/* ---- repair: damaged descriptors, from the records' headers ---- */

static void report_repair(report *report, uint32_t page, const char *what) {
    if (report->used + 1 >= report->bytes) return;
    int wrote = snprintf(report->text + report->used, report->bytes - report->used,
                         "repaired: page %u %s\n", page, what);
    if (wrote > 0) report->used = min_u64(report->used + (size_t)wrote, report->bytes - 1);
}

/* Every byte is what its CRC says, and nobody else has its hash: so whatever the descriptor said,
 * it is right to find the record under that hash. */
static bool may_publish(cxlkv_pool *pool, uint32_t page, const record_header *header) {
    if (!pool->layout.checksum || (header->hash[0] == 0 && header->hash[1] == 0) ||
        header->tokens == 0 || header->tokens > pool->layout.page_tokens ||
        header->part >= pool->geometry.part_count ||
        index_find(pool, header->hash) != NO_PAGE || !record_table_is_whole(pool, page, header))
        return false;
    verified_clear(pool, page);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        if (pool->part_of[layer] == header->part && pieces_verify(pool, page, layer) < 0)
            return false;
    return true;
}

/* A generation above all that anybody can have seen: of the header, of our log, of the host state,
 * and more than one process could have used up since. */
enum { GENERATIONS_SKIPPED = 1 << 20 };

static void repair_page(cxlkv_pool *pool, uint32_t page, report *report) {
    page_info *info = &pool->pages[page];
    record_header header;
    bool whole = record_header_read(pool, page, &header) && header.page == page;
    if (whole && header.generation > info->generation) info->generation = header.generation;
    info->quarantined = 0;
    info->shown = 1;
    if (whole && may_publish(pool, page, &header)) {
        page_key key = {.ordinal = header.ordinal};
        memcpy(key.hash, header.hash, sizeof(key.hash));
        info->generation += GENERATIONS_SKIPPED; /* a handle to what it was before does not fit */
        record_seal(pool, page, header.part, header.tokens, &key);
        index_insert(pool, key.hash, page);
        info->published = 1;
        hotness_found(pool, page, header.part);
        pool->host->published_pages++;
        log_add(pool, LOG_PUBLISH, page, info->generation, key.hash);
        report_repair(report, page, "is published again, as its header and its CRCs say");
        return;
    }
    info->generation += GENERATIONS_SKIPPED;
    descriptor_write(pool, page, info->generation, PAGE_FREE, 0, NULL);
    pages_settle(pool, 1, &page);
    report_repair(report, page, "is free: its record cannot be trusted");
}

static void repair_all(cxlkv_pool *pool, report *report) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        const page_info *info = &pool->pages[page];
        descriptor line;
        if (!page_is_ours(pool, page) || info->retired || info->holders) continue;
        if (info->published && descriptor_read(pool, page, &line) < 0) {
            index_erase_page(pool, page); /* its hash is known to the index only */
            page_unpublish(pool, page);
        } else if (!info->quarantined) {
            continue;
        }
        repair_page(pool, page, report);
    }
}

/* Published pages whose bytes were changed are not found any more. */
static void repair_deep(cxlkv_pool *pool, report *report) {
    for (uint32_t page = 0; page < pool->host->page_count; page++) {
        descriptor line;
        if (!page_is_ours(pool, page) || !pool->pages[page].published ||
            pool->pages[page].retired || descriptor_read(pool, page, &line) < 0)
            continue;
        int code = record_check(pool, page, pool->pages[page].generation, line.tokens);
        verified_clear(pool, page);
        for (uint32_t layer = 0; code == 0 && layer < pool->layout.layers; layer++)
            if (pool->part_of[layer] == line.part) code = pieces_verify(pool, page, layer);
        if (code == 0) continue;
        page_forget(pool, line.hash);
        report_repair(report, page, "is not published any more: its bytes were changed");
    }
}

/* ---- all of it ---- */

static int check_superblock(cxlkv_pool *pool) {
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    uint8_t identity[16];
    memset(identity, 0, sizeof(identity));
    int code = superblock_read(pool->base, pool->geometry.region_bytes,
                               pool->path ? pool->path : "the pool", &layout, &sharing, &geometry,
                               identity);
    if (code == 0 && memcmp(identity, pool->identity, sizeof(identity)) != 0)
        code = fail(CXLKV_E_CORRUPT, "the superblock names another pool");
    return code;
}

/* Ours were given back when this call took the lock. */
static void check_late(cxlkv_pool *pool, report *report) {
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++) {
        const process_slot *process = &pool->host->processes[slot];
        uint64_t late = atomic_load(&pool->host->counters[slot].late_drops);
        if (process->state == 0 || late == 0) continue;
        report->problems++;
        if (report->used + 1 >= report->bytes) continue;
        int wrote = snprintf(report->text + report->used, report->bytes - report->used,
                             "process %d: %lu page references could not be given back, and wait "
                             "for its next call\n", process->pid, late);
        if (wrote > 0) report->used = min_u64(report->used + (size_t)wrote, report->bytes - 1);
    }
}

static void check_all(cxlkv_pool *pool, bool deep, report *report) {
    if (check_superblock(pool) < 0) report_line(report, 0);
    char counts[512];
    int wrong = host_recount(pool, counts, sizeof(counts));
    if (wrong > 0) {
        report->problems += wrong;
        size_t length = min_u64(strlen(counts), report->bytes - 1 - report->used);
        memcpy(report->text + report->used, counts, length);
        report->used += length;
    }
    for (uint32_t page = 0; page < pool->host->page_count; page++)
        check_page(pool, page, deep, report);
    check_late(pool, report);
}

int64_t cxlkv_pool_check(cxlkv_pool *pool, uint32_t flags, char *text, uint64_t text_bytes) {
    if (text_bytes < 2) return fail(CXLKV_E_ARGUMENT, "a check needs room for its report");
    int code = pool_enter(pool);
    if (code < 0) return code;
    guard fault;
    report report = {.text = text, .bytes = text_bytes};
    memset(text, 0, text_bytes);
    sequences_expire(pool);
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        volatile int outcome = 0;
        GUARD_BEGIN(fault) {
            if (flags & CXLKV_CHECK_REPAIR) repair_all(pool, &report);
            if (flags & CXLKV_CHECK_REPAIR && flags & CXLKV_CHECK_DEEP)
                repair_deep(pool, &report);
            check_all(pool, flags & CXLKV_CHECK_DEEP, &report);
        } GUARD_END(fault, outcome = poison_error_locked(pool, &fault))
        code = outcome;
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : report.problems;
}
