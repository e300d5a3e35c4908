/* Logs: a ring of records for each host; it appends and never waits, others follow (V9).
 *
 * A record's sequence number is stored last, and its line goes to memory whole. So whoever dies
 * over an append leaves the number that stood there before, which is the end of the log for its
 * readers. A line that says more than that, and is not whole, is damage: it is given up once. */
#include "base/crc32c.h"
#include "base/guard.h"
#include "base/types.h"
#include "coherence/host_lines.h"
#include "coherence/host_log.h"
#include "coherence/lost_lines.h"

enum { ATTEMPTS = 64 };
#define SEQUENCE_MAX (1ull << 62) /* whatever a damaged line says: what follows is one more */

static void *record_at(const hosts *h, uint32_t host, uint64_t sequence) {
    return hosts_line(h, host, LOG_LINES + (sequence & (h->area.log_records - 1)));
}

static void put_record(const hosts *h, log_record *record, uint64_t sequence) {
    record->sequence = sequence;
    record->epoch = h->epoch;
    record->crc = crc32c(0, record, offsetof(log_record, crc));
    void *line = record_at(h, h->self, sequence);
    flush_store_line(line, record, 1);
    flush_store_word(line, sequence);
    line_send(FLUSH_LOG, line, h->mode);
}

void hosts_log(const hosts *h, uint64_t next, log_record *records, uint32_t count) {
    volatile uint32_t done = 0;
    while (done < count)
        GUARD_BEGIN(fault) {
            for (; done < count; done++) put_record(h, &records[done], next + done);
        } GUARD_END(fault, (done++, hosts_lost(h, &fault)))
    flush_fence_stores(FLUSH_LOG_FENCE);
}

/* One that cannot be read is as one whose every bit is wrong. */
static void load_line(const hosts *h, log_record *record, const void *line) {
    if (!line_try(h, record, line)) memset(record, 0xff, sizeof(*record));
}

/* Of the line where the record `sequence` has its place. */
static bool record_is_whole(const hosts *h, const log_record *record, uint64_t sequence) {
    return record->crc == crc32c(0, record, offsetof(log_record, crc)) &&
           record->page < h->area.page_count && record->operation >= LOG_PUBLISH &&
           record->operation <= LOG_FORGET && record->sequence <= SEQUENCE_MAX &&
           (record->sequence - sequence) % h->area.log_records == 0;
}

/* A line from memory, which was looked at: 1 when it is the record `sequence`, 0 when it is of an
 * earlier round or of none, the end; -CXLKV_E_STALE when it is of a later one. */
static int load_record(const hosts *h, uint32_t host, uint64_t sequence, log_record *record) {
    load_line(h, record, record_at(h, host, sequence));
    if (record->sequence < sequence) return 0;
    if (!record_is_whole(h, record, sequence)) return -CXLKV_E_CORRUPT;
    return record->sequence == sequence ? 1 : -CXLKV_E_STALE;
}

/* Records from `first` on, out of memory, as many as are whole and in turn. */
static int read_some(const hosts *h, uint32_t host, uint64_t first, log_record *records) {
    const void *lines[LOG_BATCH] = {0};
    uint32_t count = min_u32(LOG_BATCH, h->area.log_records);
    for (uint32_t i = 0; i < count; i++) lines[i] = record_at(h, host, first + i);
    line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, count, 1);
    for (uint32_t i = 0; i < count; i++) {
        int code = load_record(h, host, first + i, &records[i]);
        if (code <= 0) return i ? (int)i : code;
    }
    return (int)count;
}

static bool is_given_up(const log_place *place) { return place->damaged.sequence != 0; }

int hosts_read_log(const hosts *h, uint32_t host, log_place *place, log_record *records) {
    int count = read_some(h, host, place->next, records);
    /* Its writer may just be overwriting the line: the old number still, and another CRC. */
    for (int attempt = 0; count == -CXLKV_E_CORRUPT && attempt < ATTEMPTS; attempt++) {
        if (memcmp(records, &place->damaged, sizeof(*records)) == 0) break;
        h->pause(h->context);
        count = read_some(h, host, place->next, records);
    }
    if (count == -CXLKV_E_CORRUPT) place->damaged = records[0];
    if (count > 0) *place = (log_place){.next = place->next + (uint64_t)count};
    return count;
}

void hosts_skip_log(const hosts *h, uint32_t host, log_place *place) {
    uint64_t end = hosts_log_end(h, host);
    if (end > place->next) *place = (log_place){.next = end};
}

/* Of a place that was given up: is there anything new? */
static bool has_changed(const hosts *h, uint32_t host, const log_place *place) {
    log_record record;
    load_line(h, &record, record_at(h, host, place->next));
    if (memcmp(&record, &place->damaged, sizeof(record)) != 0) return true;
    /* The line stays as it is; its writer, who may not know, goes on behind it. */
    int code = load_record(h, host, place->next + 1, &record);
    return code > 0 || code == -CXLKV_E_STALE;
}

uint64_t hosts_logs_moved(const hosts *h, const log_place *const *places) {
    const void *lines[2 * HOSTS_MAX] = {0};
    uint64_t words[HOSTS_MAX], moved = 0;
    uint32_t count = h->area.host_count;
    for (uint32_t host = 0; host < h->area.host_count; host++) {
        lines[host] = record_at(h, host, places[host]->next);
        if (is_given_up(places[host])) lines[count++] = record_at(h, host, places[host]->next + 1);
    }
    line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, count, 1);
    words_try(h, lines, h->area.host_count, words); /* a host that cannot be read has no news */
    for (uint32_t host = 0; host < h->area.host_count; host++)
        if (words[host] >= places[host]->next &&
            (!is_given_up(places[host]) || has_changed(h, host, places[host])))
            moved |= 1ull << host;
    return moved;
}

/* All lines of a log, some at a time, in the order of the ring. */
static uint32_t look_at_lines(const hosts *h, uint32_t host, uint64_t first, log_record *records) {
    const void *lines[LOG_BATCH] = {0};
    uint32_t count = min_u32(LOG_BATCH, h->area.log_records);
    for (uint32_t i = 0; i < count; i++) lines[i] = record_at(h, host, first + i);
    line_look(h, FLUSH_LOG_LOOK_BEGIN, lines, count, 1);
    for (uint32_t i = 0; i < count; i++) load_line(h, &records[i], lines[i]);
    return count;
}

uint64_t hosts_log_end(const hosts *h, uint32_t host) {
    uint64_t end = 1;
    log_record records[LOG_BATCH];
    for (uint64_t first = 0; first < h->area.log_records; first += LOG_BATCH) {
        uint32_t count = look_at_lines(h, host, first, records);
        for (uint32_t i = 0; i < count; i++)
            if (record_is_whole(h, &records[i], first + i) && records[i].sequence >= end)
                end = records[i].sequence + 1;
    }
    return end;
}

uint32_t hosts_read_lines(const hosts *h, uint32_t host, uint64_t first, log_record *records) {
    uint32_t count = look_at_lines(h, host, first, records);
    for (uint32_t i = 0; i < count; i++)
        if (!record_is_whole(h, &records[i], first + i)) records[i] = (log_record){0};
    return count;
}

bool hosts_own_forget(const hosts *h, uint64_t sequence, log_record *record) {
    load_line(h, record, record_at(h, h->self, sequence));
    return record->operation == LOG_FORGET && record_is_whole(h, record, sequence);
}

static bool line_is_damaged(const hosts *h, const log_record *record, uint64_t place,
                            uint64_t oldest) {
    return record->sequence > oldest && !record_is_whole(h, record, place);
}

bool hosts_log_is_damaged(const hosts *h, uint32_t host, uint64_t *sequence) {
    uint64_t records_each = h->area.log_records, end = hosts_log_end(h, host), oldest = 0;
    /* What an append of one batch may be overwriting just now, or was when its writer died. */
    if (end + LOG_BATCH > records_each) oldest = min_u64(end, end + LOG_BATCH - records_each) - 1;
    for (uint64_t first = 0; first < records_each; first += LOG_BATCH) {
        log_record records[LOG_BATCH];
        uint32_t count = look_at_lines(h, host, first, records);
        for (uint32_t i = 0; i < count; i++) {
            for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
                if (!line_is_damaged(h, &records[i], first + i, oldest)) break;
                h->pause(h->context);
                look_at_lines(h, host, first, records);
            }
            *sequence = records[i].sequence;
            if (line_is_damaged(h, &records[i], first + i, oldest)) return true;
        }
    }
    return false;
}

/* Nothing was ever written there. */
static bool is_blank(const log_record *record) {
    static const log_record blank;
    return memcmp(record, &blank, sizeof(blank)) == 0;
}

static void fill_log(const hosts *h, uint64_t sequence) {
    log_record nothing = {.operation = LOG_FORGET};
    hosts_log(h, sequence, &nothing, 1);
}

void hosts_mend_log(const hosts *h) {
    uint64_t end = hosts_log_end(h, h->self), records = h->area.log_records;
    log_record record;
    for (uint64_t s = end > records ? end - records + 1 : 1; s < end; s++) {
        load_line(h, &record, record_at(h, h->self, s));
        if (record.sequence != s || !record_is_whole(h, &record, s)) fill_log(h, s);
    }
    /* What is half written behind the end, or damaged: others may have given it up. */
    for (uint64_t s = end; s < end + records; s++) {
        load_line(h, &record, record_at(h, h->self, s));
        if (is_blank(&record) || record_is_whole(h, &record, s)) break;
        fill_log(h, s);
    }
}
