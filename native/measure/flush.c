/* What `cxlkv bench coherence` times: publish, acquire and calls as they are, with flushes really
 * executed, and the bare loops of instructions that they are compared with. */
#include <sched.h>
#include <sys/mman.h>

#include "base/cpu.h"
#include "base/crc32c.h"
#include "base/flush.h"
#include "coherence/rpc.h"
#include "measure/measure.h"

enum { LINE = FLUSH_LINE_BYTES, PIECE_BYTES = 4096, BATCH_MAX = 64, PIN_WORDS = 4096,
       SEALED = 1 /* a state of records, as pages have it */ };

/* ---- the bare loops ---- */

#if defined(__x86_64__)

__attribute__((target("avx2"))) static void stream_32(uint8_t *to, const uint8_t *from,
                                                      size_t bytes) {
    for (size_t i = 0; i < bytes; i += 32)
        _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
}

static void stream_16(uint8_t *to, const uint8_t *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 16)
        _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
}

static void bare_stream(uint8_t *to, const uint8_t *from, size_t bytes, bool wide) {
    if (wide) stream_32(to, from, bytes);
    else stream_16(to, from, bytes);
}

#else

static void bare_stream(uint8_t *to, const uint8_t *from, size_t bytes, bool wide) {
    (void)wide;
    flush_copy_in(to, from, bytes);
}

#endif

static bool is_write(uint32_t operation) { return operation <= CXLKV_COHERENCE_EVICT; }

static void bare_begin(uint32_t operation, uint8_t *record, const uint8_t *local, size_t bytes,
                       bool wide) {
    if (operation == CXLKV_COHERENCE_STREAM) bare_stream(record, local, bytes, wide);
    else if (is_write(operation)) memcpy(record, local, bytes);
    if (operation == CXLKV_COHERENCE_WRITE_BACK) flush_write_back(FLUSH_NONE, record, bytes);
    if (operation == CXLKV_COHERENCE_INVALIDATE || operation == CXLKV_COHERENCE_READ_INVALIDATED)
        flush_invalidate(FLUSH_NONE, record, bytes);
    if (operation == CXLKV_COHERENCE_EVICT || operation == CXLKV_COHERENCE_READ_EVICTED)
        flush_evict(FLUSH_NONE, record, bytes);
}

/* ---- records ---- */

static uint8_t *descriptor_at(const cxlkv_coherence_args *args, uint64_t record) {
    return args->memory + record % args->record_count * LINE;
}

static uint8_t *header_at(const cxlkv_coherence_args *args, uint64_t record) {
    uint64_t stride_bytes = LINE + align_up(args->record_bytes, LINE);
    return args->memory + args->record_count * LINE + record % args->record_count * stride_bytes;
}

static void bare(const cxlkv_coherence_args *args, uint64_t first, bool wide) {
    for (uint32_t i = 0; i < args->batch; i++)
        bare_begin(args->operation, header_at(args, first + i) + LINE, args->local,
                   args->record_bytes, wide);
    if (is_write(args->operation)) {
        flush_fence_stores(FLUSH_NONE);
        return;
    }
    if (args->operation != CXLKV_COHERENCE_READ) flush_fence_all(FLUSH_NONE);
    for (uint32_t i = 0; i < args->batch; i++)
        memcpy(args->local, header_at(args, first + i) + LINE, args->record_bytes);
}

static uint64_t version_of(const cxlkv_coherence_args *args) {
    return (uint64_t)args->generation << 8 | SEALED;
}

/* As in the pool, each piece has its CRC; here their sum stands in the header. */
static uint64_t copy_pieces(const cxlkv_coherence_args *args, uint8_t *payload) {
    uint64_t sum = 0;
    if (!args->checksum) {
        flush_copy_in(payload, args->local, args->record_bytes);
        return 0;
    }
    for (uint64_t at = 0; at < args->record_bytes; at += PIECE_BYTES) {
        uint64_t left = args->record_bytes - at, bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
        sum += crc32c(0, args->local + at, bytes);
        flush_copy_in(payload + at, args->local + at, bytes);
    }
    return sum;
}

static void publish(const cxlkv_coherence_args *args, uint64_t first) {
    publish_item items[BATCH_MAX];
    uint64_t headers[BATCH_MAX][LINE / 8], lines[BATCH_MAX][LINE / 8];
    for (uint32_t i = 0; i < args->batch; i++) {
        uint8_t *header = header_at(args, first + i);
        memset(lines[i], 0, LINE);
        memset(headers[i], 0, LINE);
        headers[i][0] = copy_pieces(args, header + LINE);
        lines[i][0] = version_of(args);
        uint32_t crc = crc32c(0, lines[i], LINE - sizeof(crc));
        memcpy((uint8_t *)lines[i] + LINE - sizeof(crc), &crc, sizeof(crc));
        items[i] = (publish_item){header, headers[i], descriptor_at(args, first + i), lines[i]};
    }
    visibility_publish(items, args->batch, (enum visibility_mode)args->mode);
}

/* As a pool's pins lie: a bit for each record, 64 of them in a word. */
static uint32_t pins_of(const cxlkv_coherence_args *args, uint64_t first, pin_item *pins) {
    static _Alignas(LINE) uint64_t words[PIN_WORDS];
    for (uint32_t i = 0; i < args->batch; i++) {
        uint64_t record = (first + i) % args->record_count;
        pins[i] = (pin_item){.word = words + record / 64 % PIN_WORDS, .bits = 1ull << record % 64};
    }
    return args->batch;
}

/* How many of the batch were there, whole. */
static uint32_t acquire(const cxlkv_coherence_args *args, uint64_t first, bool pinned) {
    enum visibility_mode mode = (enum visibility_mode)args->mode;
    pin_item pins[BATCH_MAX];
    if (pinned) visibility_pin(pins, pins_of(args, first, pins), mode);
    acquire_item items[BATCH_MAX];
    visible_range ranges[BATCH_MAX][2];
    uint64_t headers[BATCH_MAX][LINE / 8], sum = 0;
    for (uint32_t i = 0; i < args->batch; i++) {
        uint8_t *header = header_at(args, first + i);
        ranges[i][0] = (visible_range){header, headers[i], LINE};
        ranges[i][1] = (visible_range){header + LINE, args->local, args->record_bytes};
        items[i] = (acquire_item){.descriptor_line = descriptor_at(args, first + i),
                                  .version = version_of(args), .ranges = ranges[i],
                                  .range_count = 2};
    }
    uint32_t accepted = pinned ? visibility_take(items, args->batch, mode)
                               : visibility_acquire(items, args->batch, mode);
    if (!args->checksum || accepted != args->batch) return accepted;
    for (uint64_t at = 0; at < args->record_bytes; at += PIECE_BYTES) {
        uint64_t left = args->record_bytes - at;
        sum += crc32c(0, args->local + at, left < PIECE_BYTES ? left : PIECE_BYTES);
    }
    return sum == headers[args->batch - 1][0] ? accepted : 0;
}

int64_t cxlkv_coherence_time(const cxlkv_coherence_args *args) {
    if (!args->batch || args->batch > BATCH_MAX || args->record_count < args->batch ||
        !args->record_bytes || args->record_bytes % LINE || (uintptr_t)args->memory % LINE ||
        args->operation > CXLKV_COHERENCE_UNPIN || args->mode > VISIBILITY_STRICT)
        return fail(CXLKV_E_ARGUMENT, "batch is 1 to %d and at most record_count, record_bytes and "
                    "memory are multiples of %d", BATCH_MAX, LINE);
    if (!flush_supported())
        return fail(ENOTSUP, "this CPU's cache lines cannot be written back from here");
    bool wide = cpu_has_avx2(); /* asked before: in a virtual machine that takes long */
    pin_item pins[BATCH_MAX];
    uint64_t began_ns = monotonic_ns();
    for (uint64_t done = 0; done < args->repeat; done++) {
        uint64_t first = args->first + done * args->batch;
        bool pinned = args->operation == CXLKV_COHERENCE_ACQUIRE;
        if (args->operation == CXLKV_COHERENCE_PUBLISH) publish(args, first);
        else if (args->operation == CXLKV_COHERENCE_UNPIN)
            visibility_unpin(pins, pins_of(args, first, pins), (enum visibility_mode)args->mode);
        else if (args->operation < CXLKV_COHERENCE_PUBLISH) bare(args, first, wide);
        else if (acquire(args, first, pinned) != args->batch)
            return fail(CXLKV_E_STALE, "record %lu is not there: publish it first", first);
    }
    flush_fence_all(FLUSH_NONE);
    return (int64_t)(monotonic_ns() - began_ns);
}

/* ---- two threads ---- */

/* Two threads that wait for each other must not share a core: it would be the scheduler that is
 * measured. Nothing is done where there is only one. */
static void pin(const cpu_set_t *allowed, int which) {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, allowed) && which-- == 0) CPU_SET(cpu, &one);
    if (CPU_COUNT(&one)) pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
}

typedef struct pair {
    uint8_t *memory;
    size_t bytes;
    cpu_set_t allowed;
    cxlkv_coherence_args args;
    uint32_t count, slot_bytes;
    atomic_uint_fast64_t acquired;   /* how many the other thread has */
    bool stops;
} pair;

static int64_t echo(void *context, uint32_t operation, const void *request, uint32_t bytes,
                    void *response) {
    pair *p = context;
    p->stops = operation != 0;
    memcpy(response, request, bytes);
    return bytes;
}

static void *serve(void *context) {
    pair *p = context;
    uint8_t local[2 * PIECE_BYTES];
    rpc_slot slot = {.mode = (enum visibility_mode)p->args.mode};
    pin(&p->allowed, 1);
    if (rpc_server(&slot, p->memory, p->slot_bytes, p->slot_bytes, local) < 0) return NULL;
    while (!p->stops && rpc_serve(&slot, 1, echo, p, 60)) {}
    return NULL;
}

static int64_t call_all(pair *p, uint64_t *nanoseconds) {
    uint8_t request[PIECE_BYTES] = {1, 2, 3}, response[PIECE_BYTES];
    rpc_slot slot = {.mode = (enum visibility_mode)p->args.mode};
    int64_t code = rpc_client(&slot, p->memory, p->slot_bytes, p->slot_bytes);
    for (uint32_t i = 0; i < p->count && code >= 0; i++) {
        uint64_t began_ns = monotonic_ns();
        code = rpc_call(&slot, 0, request, p->slot_bytes, response, 10);
        nanoseconds[i] = monotonic_ns() - began_ns;
        if (code >= 0 && memcmp(request, response, p->slot_bytes) != 0)
            code = fail(CXLKV_E_CORRUPT, "call %u: the answer is another one's", i);
    }
    int64_t stopped = rpc_call(&slot, 1, request, 0, response, 10);
    return code < 0 ? code : stopped;
}

/* Behind the records: when each publish began, and what is copied from and to. */
static uint64_t *began_at(const pair *p) {
    return (uint64_t *)(p->memory + p->bytes - align_up(p->count * 8ull, LINE));
}

static uint8_t *copy_at(const pair *p, uint32_t index) {
    return (uint8_t *)began_at(p) - (index + 1) * p->args.record_bytes;
}

static void *publish_all(void *context) {
    pair *p = context;
    cxlkv_coherence_args args = p->args;
    args.local = copy_at(p, 0);
    pin(&p->allowed, 1);
    for (uint64_t i = 0; i < p->count; i++) {
        while (atomic_load_explicit(&p->acquired, memory_order_acquire) < i) sched_yield();
        began_at(p)[i] = monotonic_ns();
        publish(&args, i);
    }
    return NULL;
}

/* Each record's descriptor is looked at until it is sealed. */
static int64_t acquire_all(pair *p, uint64_t *nanoseconds) {
    uint64_t until_ns = monotonic_ns() + 60000000000u;
    cxlkv_coherence_args args = p->args;
    args.local = copy_at(p, 1);
    for (uint64_t i = 0; i < p->count; i++) {
        while (acquire(&args, i, false) != 1)
            if (monotonic_ns() > until_ns) {
                atomic_store_explicit(&p->acquired, UINT64_MAX, memory_order_release);
                return fail(CXLKV_E_TIMEOUT, "record %lu was not seen within 60 s", i);
            }
        nanoseconds[i] = monotonic_ns() - began_at(p)[i];
        atomic_store_explicit(&p->acquired, i + 1, memory_order_release);
    }
    return 0;
}

static int64_t run_pair(pair *p, void *(*other)(void *), int64_t (*self)(pair *, uint64_t *),
                        uint64_t *nanoseconds) {
    pthread_t thread;
    p->memory = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p->memory == MAP_FAILED) return fail(errno, "no memory for the benchmark");
    p->args.memory = p->memory;
    if (pthread_getaffinity_np(pthread_self(), sizeof(p->allowed), &p->allowed) != 0)
        CPU_ZERO(&p->allowed);
    int64_t code = pthread_create(&thread, NULL, other, p);
    if (code) {
        code = fail((int)code, "cannot start a thread: a limit of processes or of memory?");
    } else {
        pin(&p->allowed, 0);
        code = self(p, nanoseconds);
        pthread_join(thread, NULL);
        pthread_setaffinity_np(pthread_self(), sizeof(p->allowed), &p->allowed);
    }
    munmap(p->memory, p->bytes);
    return code;
}

int64_t cxlkv_coherence_calls(uint32_t mode, uint32_t bytes, uint32_t count,
                              uint64_t *nanoseconds) {
    if (mode > VISIBILITY_STRICT || bytes > PIECE_BYTES)
        return fail(CXLKV_E_ARGUMENT, "mode is 0 to 2, bytes at most %d", PIECE_BYTES);
    pair p = {.count = count, .slot_bytes = bytes, .args.mode = mode,
              .bytes = align_up(rpc_slot_bytes(bytes, bytes), PIECE_BYTES)};
    return run_pair(&p, serve, call_all, nanoseconds);
}

int64_t cxlkv_coherence_visible(uint32_t mode, uint64_t record_bytes, uint32_t count,
                                uint64_t *nanoseconds) {
    if (mode > VISIBILITY_STRICT || !record_bytes || record_bytes % LINE || !count)
        return fail(CXLKV_E_ARGUMENT, "mode is 0 to 2, record_bytes a multiple of %d", LINE);
    uint64_t record_stride = 2 * LINE + record_bytes, times_bytes = align_up(count * 8ull, LINE);
    pair p = {.count = count, .args = {.mode = mode, .batch = 1, .record_bytes = record_bytes,
                                       .record_count = count, .generation = 1}};
    p.bytes = count * record_stride + 2 * record_bytes + times_bytes;
    return run_pair(&p, publish_all, acquire_all, nanoseconds);
}

const char *cxlkv_flush_name(void) { return flush_name(); }
