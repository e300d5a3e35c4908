/* Three hosts that have written names, claims and logs, then any lines changed: each host reads
 * what the others say now, and goes on. Its own lines but its fences are as it left them: a host
 * that finds them otherwise attaches anew, which the last part does. The bytes are changes {line:
 * 2, at: 1, count: 1, bytes}; the highest bit of `at` sets the CRCs of the line right, as a fuzzer
 * cannot guess them. */
#include "base/crc32c.h"
#include "fuzz.h"
#include "host_tests.h"

enum { EXTENTS = 10, PAGES = 640, PATIENCE = 40, PAUSES_MAX = 100000 };

static hosts at[HOSTS];
static uint8_t *memory, *template, *hostile;
static uint64_t memory_bytes;
static int pauses;

static void pause_(void *context) {
    (void)context;
    demand(++pauses < PAUSES_MAX, "lock: a host waits for ever");
}

/* Whoever is waited for long is taken for dead. */
static bool silent(void *context, uint32_t host) {
    (void)context, (void)host;
    return pauses > PATIENCE;
}

static void claim_two(hosts *h) {
    const uint32_t extents[] = {2 * h->self, 2 * h->self + 1};
    test_claim(h, 2, extents, true);
}

static void make(void) {
    hosts_area area = test_hosts_area(EXTENTS, PAGES);
    memory_bytes = HOSTS * area.block_bytes;
    area.base = memory = test_hosts_memory(&area);
    template = malloc(memory_bytes);
    hostile = malloc(memory_bytes);
    CHECK(template && hostile);
    for (uint32_t i = 0; i < HOSTS; i++)
        at[i] = (hosts){.area = area, .self = i, .mode = VISIBILITY_COHERENT, .pause = pause_,
                        .silent = silent};
    for (uint32_t i = 0; i < HOSTS; i++) {
        log_record record = {.generation = 7, .operation = LOG_PUBLISH, .page = i};
        CHECK(hosts_attach(&at[i], 100 + i) == 0);
        claim_two(&at[i]);
        hosts_beat(&at[i], 5, 1);
        hosts_log(&at[i], 1, &record, 1);
    }
    memcpy(template, memory, memory_bytes);
}

static void seal(uint8_t *line) {
    host_name *names = (host_name *)line;
    log_record *record = (log_record *)line;
    uint64_t offset = (uint64_t)(line - memory) % at[0].area.block_bytes;
    if (offset == NAME_LINE * 64)
        for (int i = 0; i < 2; i++) names[i].crc = crc32c(0, &names[i], offsetof(host_name, crc));
    else if (offset >= at[0].area.claims_offset && offset < at[0].area.pins_offset) {
        claim *claims = (claim *)line;
        uint32_t extent = (uint32_t)((offset - at[0].area.claims_offset) / sizeof(claim_pair));
        for (uint32_t i = 0; i < 64 / sizeof(claim); i++) {
            uint32_t number = extent + i / 2;
            claims[i].crc = crc32c(crc32c(0, &number, sizeof(number)), &claims[i],
                                   offsetof(claim, crc));
        }
    } else {
        record->crc = crc32c(0, record, offsetof(log_record, crc));
    }
}

static void change(const uint8_t *bytes, size_t length) {
    while (length > 4) {
        uint64_t line = (bytes[0] | (uint32_t)bytes[1] << 8) % (memory_bytes / 64);
        uint32_t first = bytes[2] & 63, count = bytes[3] & 63;
        if (count > 64 - first) count = 64 - first;
        if (count > length - 4) count = (uint32_t)length - 4;
        memcpy(memory + line * 64 + first, bytes + 4, count);
        if (bytes[2] & 128) seal(memory + line * 64);
        bytes += 4 + count;
        length -= 4 + count;
    }
}

static void read_logs(const hosts *h, uint32_t host) {
    log_record records[LOG_BATCH];
    log_place place = {.next = 1};
    uint64_t damaged;
    for (int round = 0; round < 4; round++) {
        int count = hosts_read_log(h, host, &place, records);
        demand(count <= LOG_BATCH, "number of records");
        if (count < 0) hosts_skip_log(h, host, &place);
        if (count <= 0) break;
    }
    demand(hosts_read_lines(h, host, 0, records) <= RECORDS, "number of lines");
    hosts_log_is_damaged(h, host, &damaged);
    hosts_log_end(h, host);
}

static void read_all(hosts *h) {
    uint64_t beats[HOSTS], wanted[HOSTS];
    extent_owner owners[EXTENTS];
    hosts_look_beats(h, beats, wanted);
    if (hosts_owners(h, owners) == 0) accepted++;
    for (uint32_t i = 0; i < EXTENTS; i++)
        demand(owners[i].host < HOSTS || owners[i].host == NO_HOST, "owner");
    for (uint32_t host = 0; host < HOSTS; host++) {
        host_name name;
        host_fence fence;
        if (hosts_name(h, host, &name)) demand(name.status <= HOST_LEFT, "status");
        hosts_fence_now(h, host, at[host].epoch, &fence);
        hosts_offered(h, host);
        hosts_promised(h, host);
        read_logs(h, host);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t length) {
    if (!memory) make();
    memcpy(memory, template, memory_bytes);
    accepted = pauses = 0;
    change(bytes, length);
    memcpy(hostile, memory, memory_bytes);
    for (uint32_t i = 0; i < HOSTS; i++) {
        hosts own = at[i];
        uint64_t block = i * own.area.block_bytes;
        memcpy(memory, hostile, memory_bytes);
        memcpy(memory + block, template + block, own.area.block_bytes);
        for (uint32_t host = 0; host < HOSTS; host++) {
            uint64_t *word = fence_word(&own, i, host);
            memcpy(word, hostile + ((uint8_t *)word - memory), sizeof(*word));
        }
        pauses = 0;
        read_all(&own);
        claim_two(&own);
        hosts_recover(&own);
        hosts_leave(&own, 100 + i);
    }
    hosts again = at[0];
    memcpy(memory, hostile, memory_bytes);
    pauses = 0;
    if (hosts_attach(&again, 200) == 0) read_all(&again);
    return 0;
}
