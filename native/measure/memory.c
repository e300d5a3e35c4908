/* What `cxlkv bench memory` and foundation/gather time: loops over memory, each stream of
 * them on a thread of its own. What they read is summed and what they write can be foretold, so
 * that nothing is optimised away and a wrong loop is seen. */
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/flush.h"
#include "measure/measure.h"

enum { LINE = FLUSH_LINE_BYTES, PIECE_BYTES = 4096, STEPS = 1024, STREAMS_MAX = 1024 };

typedef uint64_t two_words __attribute__((vector_size(16), may_alias));
typedef uint64_t word_at __attribute__((may_alias));
typedef void *pointer_at __attribute__((may_alias));

/* ---- memory ---- */

int cxlkv_memory_take(uint64_t bytes, int32_t node, uint8_t **memory) {
    enum { NODES_MAX = 1024, WORD_BITS = 64 };
    unsigned long mask[NODES_MAX / WORD_BITS] = {0};
    if (!bytes || bytes % PIECE_BYTES || node >= NODES_MAX)
        return fail(CXLKV_E_ARGUMENT, "bytes is a multiple of %d, node below %d", PIECE_BYTES,
                    NODES_MAX);
    uint8_t *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return fail(errno, "no memory of %lu bytes for the benchmark", bytes);
    madvise(at, bytes, MADV_HUGEPAGE); /* may be refused: then it is measured as it is */
    if (node >= 0) {
        mask[node / WORD_BITS] = 1ul << node % WORD_BITS;
        if (syscall(SYS_mbind, at, bytes, MPOL_BIND, mask, (unsigned long)NODES_MAX, 0) != 0) {
            int code = errno;
            munmap(at, bytes);
            return fail(code, "cannot take memory of node %d: is it online, and may this process "
                        "use it (cpuset, seccomp)?", node);
        }
    }
    memset(at, 0, bytes);
    *memory = at;
    return 0;
}

int cxlkv_memory_give(uint8_t *memory, uint64_t bytes) {
    return munmap(memory, bytes) == 0 ? 0 : fail(errno, "cannot unmap the benchmark's memory");
}

static uint64_t next_random(uint64_t *state) { /* xorshift64* */
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1d;
}

/* Sattolo's shuffle makes one cycle of all lines. A line has the address of the next one, and how
 * many come before it: so the end of a chase tells whether it went the right way. */
int cxlkv_memory_ring(uint8_t *memory, uint64_t bytes, uint64_t seed) {
    uint64_t count = bytes / LINE, state = seed | 1;
    if (!count || count > UINT32_MAX || (uintptr_t)memory % LINE)
        return fail(CXLKV_E_ARGUMENT, "a ring is of one to 2^32 - 1 lines of %d bytes", LINE);
    uint32_t *next = malloc(count * sizeof(*next));
    if (!next) return fail(ENOMEM, "no memory to shuffle %lu lines", count);
    for (uint32_t i = 0; i < count; i++) next[i] = i;
    for (uint64_t i = count - 1; i > 0; i--) {
        uint64_t other = next_random(&state) % i;
        uint32_t moved = next[i];
        next[i] = next[other];
        next[other] = moved;
    }
    for (uint64_t i = 0, line = 0; i < count; i++, line = next[line]) {
        *(pointer_at *)(memory + line * LINE) = memory + (uint64_t)next[line] * LINE;
        ((word_at *)(memory + line * LINE))[1] = i;
    }
    free(next);
    return 0;
}

/* ---- the loops ---- */

static uint64_t read_lines(const uint8_t *from, uint64_t bytes) {
    two_words a = {0}, b = {0}, c = {0}, d = {0};
    for (uint64_t i = 0; i < bytes; i += LINE) {
        const two_words *line = (const two_words *)(from + i);
        a += line[0];
        b += line[1];
        c += line[2];
        d += line[3];
    }
    a += b + c + d;
    return a[0] + a[1];
}

#if defined(__x86_64__)

/* A core that loads half as often keeps more lines on their way: some 10 % more than above. */
__attribute__((target("avx2"))) static uint64_t read_lines_wide(const uint8_t *from,
                                                                uint64_t bytes) {
    __m256i a = _mm256_setzero_si256(), b = a;
    uint64_t words[4];
    for (uint64_t i = 0; i < bytes; i += LINE) {
        a = _mm256_add_epi64(a, _mm256_load_si256((const __m256i *)(from + i)));
        b = _mm256_add_epi64(b, _mm256_load_si256((const __m256i *)(from + i + LINE / 2)));
    }
    _mm256_storeu_si256((__m256i *)words, _mm256_add_epi64(a, b));
    return words[0] + words[1] + words[2] + words[3];
}

#else

static uint64_t read_lines_wide(const uint8_t *from, uint64_t bytes) {
    return read_lines(from, bytes);
}

#endif

static inline void store_line(uint8_t *to, two_words value, bool past) {
    two_words *line = (two_words *)to;
    for (uint32_t i = 0; i < LINE / sizeof(value); i++, value += 2) {
#if defined(__x86_64__)
        if (past) {
            _mm_stream_si128((__m128i *)(line + i), (__m128i)value);
            continue;
        }
#else
        (void)past;
#endif
        line[i] = value;
    }
}

static inline void write_lines(uint8_t *to, uint64_t bytes, uint64_t first, bool past) {
    two_words value = {first, first + 1};
    for (uint64_t i = 0; i < bytes; i += LINE, value += LINE / 8) store_line(to + i, value, past);
}

/* Two lines read for each that is written. */
static inline uint64_t mix_lines(uint8_t *to, const uint8_t *from, uint64_t bytes, uint64_t first,
                                 bool past) {
    two_words value = {first, first + 1}, sum = {0};
    for (uint64_t i = 0; i < bytes; i += LINE, value += LINE / 8) {
        const two_words *lines = (const two_words *)(from + 2 * i);
        for (uint32_t j = 0; j < 2 * LINE / sizeof(sum); j++) sum += lines[j];
        store_line(to + i, value, past);
    }
    return sum[0] + sum[1];
}

static uint8_t *chase(uint8_t *at, uint64_t steps) {
    for (uint64_t i = 0; i < steps; i++) at = *(pointer_at *)at;
    return at;
}

static bool is_mixed(const cxlkv_memory_stream *s) {
    return s->kind == CXLKV_MEMORY_MIXED || s->kind == CXLKV_MEMORY_MIXED_PAST;
}

/* How far a stream walks before it begins again: what it reads lies before what it writes. */
static uint64_t span_of(const cxlkv_memory_stream *s) {
    uint64_t parts = is_mixed(s) ? 3 : s->kind >= CXLKV_MEMORY_COPY ? 2 : 1;
    return s->bytes / parts / LINE * LINE;
}

static void do_block(cxlkv_memory_stream *s, uint64_t span, uint64_t at, uint64_t bytes,
                     bool wide) {
    bool mixed = is_mixed(s);
    bool past = s->kind == CXLKV_MEMORY_WRITE_PAST || s->kind == CXLKV_MEMORY_MIXED_PAST;
    uint64_t to = mixed ? 2 * span + at : at, word = s->first_word + to / 8;
    switch (s->kind) {
    case CXLKV_MEMORY_READ:
        s->sum += wide ? read_lines_wide(s->memory + at, bytes) : read_lines(s->memory + at, bytes);
        break;
    case CXLKV_MEMORY_WRITE:
    case CXLKV_MEMORY_WRITE_PAST: write_lines(s->memory + to, bytes, word, past); break;
    case CXLKV_MEMORY_MIXED:
    case CXLKV_MEMORY_MIXED_PAST:
        s->sum += mix_lines(s->memory + to, s->memory + 2 * at, bytes, word, past);
        break;
    case CXLKV_MEMORY_COPY: memcpy(s->memory + span + at, s->memory + at, bytes); break;
    default: flush_copy_in(s->memory + span + at, s->memory + at, bytes); break;
    }
    s->moved_bytes += mixed ? 3 * bytes : bytes;
}

static void run_chase(cxlkv_memory_stream *s, uint64_t began_ns, uint64_t nanoseconds) {
    uint8_t *at = s->memory;
    do {
        at = chase(at, STEPS);
        s->steps += STEPS;
        s->elapsed_ns = monotonic_ns() - began_ns;
    } while (s->elapsed_ns < nanoseconds);
    s->sum = ((word_at *)at)[1];
}

static void run_blocks(cxlkv_memory_stream *s, uint64_t began_ns, uint64_t nanoseconds,
                       bool wide) {
    uint64_t span = span_of(s), at = 0;
    do {
        uint64_t left = span - at, bytes = left < s->block_bytes ? left : s->block_bytes;
        do_block(s, span, at, bytes, wide);
        at = at + bytes < span ? at + bytes : 0;
        s->steps++;
        do s->elapsed_ns = monotonic_ns() - began_ns;
        while (s->elapsed_ns < s->steps * s->pace_ns);
    } while (s->elapsed_ns < nanoseconds);
    flush_fence_stores(FLUSH_NONE);
    s->elapsed_ns = monotonic_ns() - began_ns;
}

/* ---- threads ---- */

enum { WAIT, GO, LEAVE };

typedef struct runner {
    cxlkv_memory_stream *stream;
    uint64_t nanoseconds;
    atomic_uint *ready, *state;
    pthread_t thread;
    bool wide;                   /* the CPU has AVX2 */
    int code;
} runner;

static int pin_to(int32_t cpu) {
    cpu_set_t one;
    if (cpu < 0) return 0;
    CPU_ZERO(&one);
    CPU_SET((size_t)cpu, &one);
    return pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
}

static void *run_stream(void *context) {
    runner *r = context;
    r->code = pin_to(r->stream->cpu);
    atomic_fetch_add_explicit(r->ready, 1, memory_order_release);
    unsigned state;
    while ((state = atomic_load_explicit(r->state, memory_order_acquire)) == WAIT) sched_yield();
    if (state == LEAVE) return NULL;
    uint64_t began_ns = monotonic_ns();
    if (r->stream->kind == CXLKV_MEMORY_CHASE) run_chase(r->stream, began_ns, r->nanoseconds);
    else run_blocks(r->stream, began_ns, r->nanoseconds, r->wide);
    return NULL;
}

static int check_stream(cxlkv_memory_stream *s) {
    if (s->kind > CXLKV_MEMORY_COPY_PAST || s->cpu >= CPU_SETSIZE ||
        (uintptr_t)s->memory % LINE || s->bytes < 3 * LINE || s->bytes % LINE || !s->block_bytes ||
        s->block_bytes % LINE)
        return fail(CXLKV_E_ARGUMENT, "kind is 0 to %d, memory, bytes (3 lines at least) and "
                    "block_bytes are multiples of %d", CXLKV_MEMORY_COPY_PAST, LINE);
#if !defined(__x86_64__)
    if (s->kind == CXLKV_MEMORY_WRITE_PAST || s->kind == CXLKV_MEMORY_MIXED_PAST)
        return fail(ENOTSUP, "this CPU has no stores past the cache");
#endif
    s->moved_bytes = s->steps = s->elapsed_ns = s->sum = 0;
    return 0;
}

static int64_t run_all(runner *runners, uint32_t count) {
    uint32_t begun = 0;
    int code = 0;
    for (; begun < count && !code; begun += !code)
        code = pthread_create(&runners[begun].thread, NULL, run_stream, &runners[begun]);
    if (code) code = fail(code, "cannot start a thread: a limit of processes or of memory?");
    while (atomic_load_explicit(runners->ready, memory_order_acquire) < begun) sched_yield();
    for (uint32_t i = 0; i < begun && !code; i++)
        if (runners[i].code)
            code = fail(runners[i].code, "cannot run on CPU %d: not one of those that this process "
                        "may use (taskset -p, cgroup)", runners[i].stream->cpu);
    atomic_store_explicit(runners->state, code ? LEAVE : GO, memory_order_release);
    for (uint32_t i = 0; i < begun; i++) pthread_join(runners[i].thread, NULL);
    return code;
}

int64_t cxlkv_memory_run(cxlkv_memory_stream *streams, uint32_t count, uint64_t nanoseconds) {
    atomic_uint ready = 0, state = WAIT;
    if (!count || count > STREAMS_MAX)
        return fail(CXLKV_E_ARGUMENT, "one to %d streams, not %u", STREAMS_MAX, count);
    for (uint32_t i = 0; i < count; i++) {
        int code = check_stream(&streams[i]);
        if (code < 0) return code;
    }
    runner *runners = calloc(count, sizeof(*runners));
    if (!runners) return fail(ENOMEM, "no memory for %u streams", count);
    bool wide = cpu_has_avx2(); /* asked before: in a virtual machine that takes long */
    for (uint32_t i = 0; i < count; i++)
        runners[i] = (runner){.stream = &streams[i], .nanoseconds = nanoseconds, .ready = &ready,
                              .state = &state, .wide = wide};
    int64_t code = run_all(runners, count);
    free(runners);
    return code;
}

int64_t cxlkv_memory_gather(uint8_t *to, const uint8_t *from, uint64_t from_bytes,
                            const uint64_t *offsets, uint32_t count, uint64_t piece_bytes) {
    for (uint32_t i = 0; i < count; i++)
        if (piece_bytes > from_bytes || offsets[i] > from_bytes - piece_bytes)
            return fail(CXLKV_E_ARGUMENT, "piece %u lies outside of %lu bytes", i, from_bytes);
    uint64_t began_ns = monotonic_ns();
    for (uint32_t i = 0; i < count; i++)
        memcpy(to + i * piece_bytes, from + offsets[i], piece_bytes);
    return (int64_t)(monotonic_ns() - began_ns);
}
