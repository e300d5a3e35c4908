/* Logs: a ring of records for each host; it appends and never waits, others follow (V9). */
#include <string.h>

#include "host_lines.h"
#include "internal.h"

static void *record_at(const hosts *h, uint32_t host, uint64_t sequence) {
    return hosts_line(h, host, LOG_LINES + (sequence & (h->area.log_records - 1)));
}

static void put_record(const hosts *h, log_record *record, uint64_t sequence) {
    record->sequence = sequence;
    record->epoch = h->epoch;
    record->crc = crc32c(0, record, offsetof(log_record, crc));
    void *line = record_at(h, h->self, sequence);
    flush_store_line(line, record, 0);
    line_send(FLUSH_LOG, line, h->mode);
}

void hosts_log(const hosts *h, uint64_t next, log_record *records, uint32_t count) {
    guard fault;
    volatile uint32_t done = 0;
    while (done < count) {
        GUARD_BEGIN(fault) {
            for (; done < count; done++) put_record(h, &records[done], next + done);
        } GUARD_END(fault, (done++, hosts_lost(h, &fault)))
    }
    flush_fence_stores(FLUSH_LOG_FENCE);
}

/* One that cannot be read is as one whose every bit is wrong. */
static void load_record(const hosts *h, log_record *record, const void *line) {
    if (!line_try(h, record, line)) memset(record, 0xff, sizeof(*record));
}

static bool record_is_whole(const hosts *h, const log_record *record) {
    return record->crc == crc32c(0, record, offsetof(log_record, crc)) &&
           record->page < h->area.page_count && record->operation >= LOG_PUBLISH &&
           record->operation <= LOG_FORGET;
}

/* Records from `first` on, out of memory, as many as are whole and in turn. */
static int read_some(const hosts *h, uint32_t host, uint64_t first, log_record *records) {
    const void *lines[LOG_BATCH] = {0};
    uint32_t count = min_u32(LOG_BATCH, h->area.log_records);
    for (uint32_t i = 0; i < count; i++) lines[i] = record_at(h, host, first + i);
    line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, count, 1);
    for (uint32_t i = 0; i < count; i++) {
        load_record(h, &records[i], lines[i]);
        if (records[i].sequence < first + i) return (int)i; /* of the last round: the end */
        if (records[i].sequence > first + i) return i ? (int)i : -CXLKV_E_STALE;
        if (!record_is_whole(h, &records[i])) return i ? (int)i : -CXLKV_E_CORRUPT;
    }
    return (int)count;
}

int hosts_read_log(const hosts *h, uint32_t host, uint64_t *next, log_record *records) {
    int count = read_some(h, host, *next, records);
    /* Its writer may be in the middle of the line: the same number again, and another CRC. */
    for (int attempt = 0; count == -CXLKV_E_CORRUPT && attempt < 64; attempt++) {
        h->pause(h->context);
        count = read_some(h, host, *next, records);
    }
    if (count > 0) *next += (uint64_t)count;
    return count;
}

uint64_t hosts_logs_moved(const hosts *h, const uint64_t *next) {
    const void *lines[HOSTS_MAX];
    uint64_t words[HOSTS_MAX], moved = 0;
    for (uint32_t host = 0; host < h->area.host_count; host++)
        lines[host] = record_at(h, host, next[host]);
    line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, h->area.host_count, 1);
    words_try(h, lines, h->area.host_count, words); /* no news of who cannot be read */
    for (uint32_t host = 0; host < h->area.host_count; host++)
        if (words[host] >= next[host]) moved |= 1ull << host;
    return moved;
}

uint64_t hosts_log_end(const hosts *h, uint32_t host) {
    uint64_t end = 1;
    for (uint64_t first = 0; first < h->area.log_records; first += LOG_BATCH) {
        const void *lines[LOG_BATCH] = {0};
        uint32_t count = min_u32(LOG_BATCH, h->area.log_records);
        for (uint32_t i = 0; i < count; i++) lines[i] = record_at(h, host, first + i);
        line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, count, 1);
        for (uint32_t i = 0; i < count; i++) {
            log_record record;
            load_record(h, &record, lines[i]);
            if (record_is_whole(h, &record) && record.sequence >= end) end = record.sequence + 1;
        }
    }
    return end;
}

void hosts_mend_log(const hosts *h) {
    uint64_t end = hosts_log_end(h, h->self);
    for (uint64_t s = end > h->area.log_records ? end - h->area.log_records : 1; s < end; s++) {
        log_record record, nothing = {.operation = LOG_FORGET};
        load_record(h, &record, record_at(h, h->self, s));
        if (record.sequence != s || !record_is_whole(h, &record)) hosts_log(h, s, &nothing, 1);
    }
}
