/* A damaged name line, written again by another host: its own is off, an operator says so (V7). */
#include <string.h>

#include "base/base.h"
#include "base/crc32c.h"
#include "coherence/host_lines.h"

static void raise_to(uint32_t *epoch, uint32_t seen) {
    if (seen > *epoch && seen < EPOCH_MAX) *epoch = seen;
}

/* The latest epoch of a host that anything in the pool speaks of: its place in the queue, its log,
 * its claims, and what others said of it. */
static uint32_t latest_epoch(const hosts *h, uint32_t host) {
    uint32_t epoch = 1;
    hosts_hand_over(hosts_line(h, host, 0), h->area.block_bytes, false);
    raise_to(&epoch, SLOT_EPOCH(flush_load_word(hosts_line(h, host, LOCK_LINE))));
    for (uint32_t i = 0; i < h->area.log_records; i++) {
        log_record record;
        flush_load_line(&record, hosts_line(h, host, LOG_LINES + i));
        if (record.crc == crc32c(0, &record, offsetof(log_record, crc)))
            raise_to(&epoch, record.epoch);
    }
    for (uint64_t at = 0; at < h->area.extent_count * sizeof(claim_pair); at += LINE_BYTES) {
        claim claims[LINE_BYTES / sizeof(claim)];
        flush_load_line(claims, claims_of(h, host) + at);
        for (uint32_t i = 0; i < LINE_BYTES / sizeof(claim); i++)
            if (claims[i].version) raise_to(&epoch, claims[i].epoch_ours >> 1);
    }
    for (uint32_t by = 0; by < h->area.host_count; by++)
        raise_to(&epoch, FENCE_EPOCH(flush_load_word(fence_word(h, by, host))));
    return epoch;
}

static void write_name(const hosts *h, uint32_t host, host_name *name) {
    host_name names[2];
    *name = (host_name){.nonce = random_u64(), .epoch = latest_epoch(h, host),
                        .status = HOST_LIVE, .host = host};
    name->crc = crc32c(0, name, offsetof(host_name, crc));
    names[0] = names[1] = *name;
    void *line = hosts_line(h, host, NAME_LINE);
    flush_store_line(line, names, 0);
    line_keep(h, FLUSH_NAME, line, LINE_BYTES);
}

int hosts_name_again(const hosts *h, uint32_t host, host_name *name) {
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        write_name(h, host, name);
    } GUARD_END(fault, code = hosts_lost(h, &fault))
    return code;
}
