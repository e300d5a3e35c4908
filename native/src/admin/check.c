/* Checking a pool: everything that must hold, from the superblock to the last piece; and repair.
 * What raises SIGBUS is one problem more; the check goes on behind it. */
#include <stdarg.h>
#include <time.h>

#include "base/guard.h"
#include "coherence/host_log.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/scorers.h"
#include "format/superblock.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/processes.h"
#include "host/rebuild.h"
#include "pages/log_writer.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "sequence/sequence.h"

typedef struct report {
    char *text;
    size_t bytes, used;
    int64_t problems;
    bool deep;
} report;

/* As much as there is room for. */
__attribute__((format(printf, 2, 3)))
static void report_text(report *report, const char *format, ...) {
    va_list values;
    if (report->used + 1 >= report->bytes) return;
    va_start(values, format);
    int wrote = vsnprintf(report->text + report->used, report->bytes - report->used, format,
                          values);
    va_end(values);
    if (wrote > 0) report->used = min_u64(report->used + (size_t)wrote, report->bytes - 1);
}

static void report_line(report *report, const char *what, uint32_t number) {
    report->problems++;
    report_text(report, "%s %u: %s\n", what, number, cxlkv_error_text());
}

static void report_page(report *report, uint32_t page) { report_line(report, "page", page); }

typedef void page_check(cxlkv_pool *pool, uint32_t page, report *report);

static void check_guarded(cxlkv_pool *pool, uint32_t page, page_check *check, report *report) {
    GUARD_BEGIN(fault) {
        check(pool, page, report);
    } GUARD_END(fault, (poison_error_locked(pool, &fault), report_page(report, page)))
}

static void each_page(cxlkv_pool *pool, page_check *check, report *report) {
    for (uint32_t page = 0; page < pool->host->page_count; page++)
        check_guarded(pool, page, check, report);
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

/* Of a page that keeps what it holds, and so its summaries: another thread may select by them. */
static void verify_again(cxlkv_pool *pool, uint32_t page) {
    uint64_t rows = pool->geometry.record_layers;
    bits_clear(pool->verified, page * rows, rows);
}

static void check_page(cxlkv_pool *pool, uint32_t page, report *report) {
    descriptor line;
    const page_info *info = &pool->pages[page];
    if (info->retired || !page_is_ours(pool, page)) return;
    if (descriptor_settled(pool, page, &line) < 0) {
        report_page(report, page);
        return;
    }
    uint64_t state = line.version & 255;
    if (line.version >> 8 != info->generation) {
        fail(CXLKV_E_CORRUPT, "its descriptor says generation %lu, the host %lu",
             line.version >> 8, info->generation);
        report_page(report, page);
    }
    if ((state == PAGE_PUBLISHED) != (info->published != 0)) {
        fail(CXLKV_E_CORRUPT, "its descriptor says state %lu, the host %s", state,
             info->published ? "published" : "not published");
        report_page(report, page);
    }
    if (state == PAGE_FREE) return;
    if (record_check(pool, page, info->generation, line.tokens) < 0) {
        report_page(report, page);
        return;
    }
    if (!report->deep || !pool->layout.checksum) return;
    verify_again(pool, page);
    for (uint32_t row = 0; row < pool->layers.parts[line.part].layers; row++)
        if (pieces_verify(pool, page, layer_at(pool, line.part, row)) < 0)
            report_page(report, page);
}

/* ---- repair: damaged descriptors, from the records' headers ---- */

static void report_repair(report *report, uint32_t page, const char *what) {
    report_text(report, "repaired: page %u %s\n", page, what);
}

/* Are all bytes what their CRCs say, now? */
static int read_again(cxlkv_pool *pool, uint32_t page, uint32_t part) {
    int code = 0;
    verify_again(pool, page);
    for (uint32_t row = 0; code == 0 && row < pool->layers.parts[part].layers; row++)
        code = pieces_verify(pool, page, layer_at(pool, part, row));
    return code;
}

/* Every byte is what its CRC says, and nobody else has its hash: so whatever the descriptor said,
 * it is right to find the record under that hash. */
static bool may_publish(cxlkv_pool *pool, uint32_t page, const record_header *header) {
    if (!pool->layout.checksum || (header->hash[0] == 0 && header->hash[1] == 0) ||
        header->tokens == 0 || header->tokens > pool->layout.page_tokens ||
        header->part >= stored_parts(pool) ||
        index_find(pool, header->hash) != NO_PAGE || !record_table_is_whole(pool, page, header))
        return false;
    return read_again(pool, page, header->part) == 0;
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
        memcpy(key.object, header.object, sizeof(key.object));
        info->generation += GENERATIONS_SKIPPED; /* a handle to what it was before does not fit */
        record_seal(pool, page, header.part, header.tokens, &key);
        index_insert(pool, key.hash, page);
        info->published = 1;
        hotness_found(pool, page, listed_part(&pool->layout, header.part, header.ordinal));
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

static void repair_descriptor(cxlkv_pool *pool, uint32_t page, report *report) {
    const page_info *info = &pool->pages[page];
    descriptor line;
    if (!page_is_ours(pool, page) || info->retired || info->holders) return;
    if (info->published && descriptor_read(pool, page, &line) < 0) {
        index_erase_page(pool, page); /* its hash is known to the index only */
        page_unpublish(pool, page);
    } else if (!info->quarantined) {
        return;
    }
    repair_page(pool, page, report);
}

/* Published pages whose bytes were changed are not found any more. */
static void repair_deep(cxlkv_pool *pool, uint32_t page, report *report) {
    descriptor line;
    if (!page_is_ours(pool, page) || !pool->pages[page].published || pool->pages[page].retired ||
        descriptor_read(pool, page, &line) < 0)
        return;
    if (read_again(pool, page, line.part) == 0 &&
        record_check(pool, page, pool->pages[page].generation, line.tokens) == 0)
        return;
    page_forget(pool, line.hash, false);
    report_repair(report, page, "is not published any more: its bytes were changed");
}

/* ---- logs: each host mends its own ---- */

static void repair_log(cxlkv_pool *pool, report *report) {
    uint64_t sequence;
    uint32_t self = pool->hosts.self;
    if (!pool->shared || !hosts_log_is_damaged(&pool->hosts, self, &sequence)) return;
    log_write(pool);
    hosts_mend_log(&pool->hosts);
    pool->host->log_next = hosts_log_end(&pool->hosts, self);
    log_again(pool); /* whoever had not read what is lost */
    report_text(report, "repaired: host %u says anew in its log what it has published\n", self);
}

static void check_log(cxlkv_pool *pool, uint32_t host, report *report) {
    uint64_t sequence;
    if (!hosts_log_is_damaged(&pool->hosts, host, &sequence)) return;
    fail(CXLKV_E_CORRUPT, "the line of record %lu in its log is damaged: others read its "
         "descriptors instead. Opening the pool as that host, or `cxlkv pool check --repair` "
         "there, mends it", sequence);
    report_line(report, "host", host);
}

/* ---- all of it ---- */

static int check_superblock(cxlkv_pool *pool) {
    pool_facts facts;
    int code = superblock_read(SUPERBLOCK_USE, pool->region.base, pool->geometry.region_bytes,
                               pool->path ? pool->path : "the pool", &facts);
    if (code == 0 && memcmp(facts.identity, pool->identity, sizeof(facts.identity)) != 0)
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
        report_text(report, "process %d: %lu page references could not be given back, and wait "
                    "for its next call\n", process->pid, late);
    }
}

/* Lines of a host that cannot be read: those before its log, and one of each 4 KiB of the rest, or
 * all. */
static uint64_t lost_lines(const cxlkv_pool *pool, uint32_t host, bool all) {
    uint64_t lost = 0, step = all ? LINE_BYTES : 4096;
    for (uint64_t at = 0; at < pool->geometry.host_block_bytes;
         at += at / LINE_BYTES < LOG_LINES ? LINE_BYTES : step) {
        uint64_t word;
        lost += !word_try(&pool->hosts, hosts_line(&pool->hosts, host, 0) + at, &word);
    }
    return lost;
}

static void check_host(cxlkv_pool *pool, uint32_t host, report *report) {
    host_name name;
    bool known = hosts_name(&pool->hosts, host, &name);
    uint64_t lost = lost_lines(pool, host, report->deep);
    if (!known && !lost)
        fail(CXLKV_E_CORRUPT, "its name line is damaged: what it owns is not known");
    if (lost)
        fail(CXLKV_E_POISON, "%lu of its lines cannot be read (poisoned, or the file was cut): "
             "what it says is not known to others, nor what they said to it. Bring that memory "
             "back, or create the pool anew", lost);
    if (lost || !known) report_line(report, "host", host);
    if (!lost) check_log(pool, host, report);
}

static void check_all(cxlkv_pool *pool, report *report) {
    if (GUARDED(check_superblock(pool), poison_error_locked(pool, &fault)) < 0)
        report_page(report, 0);
    for (uint32_t host = 0; pool->shared && host < pool->sharing.hosts; host++)
        check_host(pool, host, report);
    char counts[512];
    int wrong = host_recount(pool, counts, sizeof(counts));
    if (wrong > 0) {
        report->problems += wrong;
        report_text(report, "%s", counts);
    }
    each_page(pool, check_page, report);
    check_late(pool, report);
}

int64_t cxlkv_pool_check(cxlkv_pool *pool, uint32_t flags, char *text, uint64_t text_bytes) {
    if (!text || text_bytes < 2) return fail(CXLKV_E_ARGUMENT, "a check needs room for its report");
    int code = pool_enter(pool);
    if (code < 0) return code;
    report report = {.text = text, .bytes = text_bytes, .deep = flags & CXLKV_CHECK_DEEP};
    memset(text, 0, text_bytes);
    sequences_expire(pool);
    code = host_lock(pool);
    if (code == 0) {
        host_reap(pool);
        if (flags & CXLKV_CHECK_REPAIR) repair_log(pool, &report);
        if (flags & CXLKV_CHECK_REPAIR) each_page(pool, repair_descriptor, &report);
        if (flags & CXLKV_CHECK_REPAIR && report.deep) each_page(pool, repair_deep, &report);
        check_all(pool, &report);
        host_unlock(pool);
    }
    pool_leave(pool);
    return code < 0 ? code : report.problems;
}
