/* The log: what this host tells the others, and what hosts wish to be forgotten of pages that are
 * not their own.
 *
 * The owner carries such a wish out when it reads of it; for one that does not run,
 * every host does for itself, whenever it finds the page by its descriptor. So the wish has to
 * stand in its writer's log for as long as it matters: until the descriptor says something else.
 * Before a line of the log is overwritten whose wish still matters, it is written once more. Half a
 * log holds such wishes; what is more than that is given up, the oldest first, and counted. */
#include "base/guard.h"
#include "coherence/host_log.h"
#include "format/records.h"
#include "pages/log_writer.h"

/* The page's descriptor, from memory; false when it cannot be read, or is damaged. */
static bool descriptor_look(cxlkv_pool *pool, uint32_t page, descriptor *line) {
    return GUARDED((descriptor_drop(pool, page), descriptor_read(pool, page, line) == 0), false);
}

static bool is_about(const log_record *record, const descriptor *line) {
    return record->page == line->page &&
           line->version == (record->generation << 8 | PAGE_PUBLISHED) &&
           line->publication == record->publication &&
           memcmp(line->hash, record->hash, sizeof(line->hash)) == 0;
}

bool forget_matters(cxlkv_pool *pool, const log_record *record) {
    descriptor line;
    return record->operation == LOG_FORGET && record->generation &&
           descriptor_look(pool, record->page, &line) && is_about(record, &line);
}

uint32_t publication_of(cxlkv_pool *pool, uint32_t page) {
    descriptor line;
    return descriptor_look(pool, page, &line) ? line.publication : 0;
}

/* ---- a list of wishes, while somebody needs it ---- */

void forgotten_add(cxlkv_pool *pool, const log_record *record) {
    if (pool->forgotten.count == pool->forgotten.capacity) {
        uint32_t room = pool->forgotten.capacity ? 2 * pool->forgotten.capacity : 64;
        log_record *more = realloc(pool->forgotten.records, room * sizeof(*more));
        if (!more) return; /* found again here: until the next look */
        pool->forgotten.records = more;
        pool->forgotten.capacity = room;
    }
    pool->forgotten.records[pool->forgotten.count++] = *record;
}

static int by_page(const void *left, const void *right) {
    uint32_t a = ((const log_record *)left)->page, b = ((const log_record *)right)->page;
    return a < b ? -1 : a > b;
}

void forgotten_drop(cxlkv_pool *pool) {
    free(pool->forgotten.records);
    pool->forgotten.records = NULL;
    pool->forgotten.count = pool->forgotten.capacity = 0;
}

bool is_forgotten(const cxlkv_pool *pool, const descriptor *line) {
    uint32_t first = 0, end = pool->forgotten.count;
    while (first < end) { /* the first of this page */
        uint32_t middle = first + (end - first) / 2;
        if (pool->forgotten.records[middle].page < line->page) first = middle + 1;
        else end = middle;
    }
    const log_record *records = pool->forgotten.records;
    for (; first < pool->forgotten.count && records[first].page == line->page; first++)
        if (is_about(&records[first], line)) return true;
    return false;
}

/* ---- in our log they stand for as long as they matter ---- */

/* Those that the records from `first` on will overwrite. */
static uint32_t collect(cxlkv_pool *pool, uint64_t first, uint32_t count, log_record *wishes) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        log_record record;
        if (!hosts_own_forget(&pool->hosts, first + i, &record)) continue;
        if (!page_is_ours(pool, record.page) && forget_matters(pool, &record))
            wishes[used++] = record;
    }
    return used;
}

/* Always a batch ahead: a process that dies over it has not overwritten what it had to repeat. */
static void forgotten_carry(cxlkv_pool *pool, uint32_t count) {
    uint32_t records = pool->hosts.area.log_records, left = records / 2;
    uint64_t first = pool->host->log_next + LOG_BATCH - count;
    if (records < 4 * LOG_BATCH) return;
    while (count) {
        log_record wishes[LOG_BATCH];
        uint32_t used = collect(pool, first, count, wishes);
        if (used > left) { /* no room: they would push each other round for ever */
            for (uint32_t i = 0; i < used; i++) host_count(pool->host, COUNT_LOST_FORGETS);
            return;
        }
        hosts_log(&pool->hosts, pool->host->log_next, wishes, used);
        pool->host->log_next += used;
        first += count;
        count = used;
        left -= used;
    }
}

/* ---- writing ---- */

void log_write(cxlkv_pool *pool) {
    uint32_t count = pool->log.count;
    if (pool->host->stopped) pool->log.count = 0; /* it is not our log any more */
    if (count == 0 || pool->log.count == 0) return;
    hosts_log(&pool->hosts, pool->host->log_next, pool->log.waiting, count);
    pool->host->log_next += count;
    pool->log.count = 0;
    forgotten_carry(pool, count);
}

log_record *log_add(cxlkv_pool *pool, uint32_t operation, uint32_t page, uint64_t generation,
                    const uint64_t hash[2]) {
    if (!pool->shared) return NULL;
    if (pool->log.count == LOG_BATCH) log_write(pool);
    log_record *record = &pool->log.waiting[pool->log.count++];
    *record = (log_record){.operation = operation, .page = page, .generation = generation};
    memcpy(record->hash, hash, sizeof(record->hash));
    return record;
}

/* ---- all wishes, of all logs ---- */

void forgotten_read(cxlkv_pool *pool) {
    log_record records[LOG_BATCH];
    if (!pool->shared) return;
    log_write(pool);
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        for (uint64_t first = 0; first < pool->hosts.area.log_records; first += LOG_BATCH) {
            uint32_t count = hosts_read_lines(&pool->hosts, host, first, records);
            for (uint32_t i = 0; i < count; i++)
                if (records[i].operation == LOG_FORGET && records[i].generation)
                    forgotten_add(pool, &records[i]);
        }
    if (pool->forgotten.count)
        qsort(pool->forgotten.records, pool->forgotten.count, sizeof(log_record), by_page);
}
