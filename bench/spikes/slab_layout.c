/* Spike: how fast is one layer's keys or digests scanned from a pool, by slab layout and by how
 * slots were allocated? Prints the raw samples as JSON on stdout and a readable table on stderr.
 *
 * A layout is only address arithmetic, so all layouts share one mapping and one run. Each case is
 * a list of pieces in scan order, cut into 8 chunks; each chunk is timed next to a plain
 * sequential read of as many bytes of the same mapping. A sample is the median over the chunks.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define KIB 1024ull
#define MIB (1024ull * KIB)
#define LAYERS 8ull
#define HEADS 8ull
#define PAGES 8192ull
#define WRITTEN_PAGES 512ull
#define K_BYTES (32 * KIB)
#define TABLE_BYTES KIB /* header and piece CRCs of one record */
#define REFERENCE_BYTES (256 * MIB)
#define POOL_BYTES (4896 * MIB) /* the last REFERENCE_BYTES are the streaming reference */
#define HUGE_BYTES (2 * MIB)
#define CHUNKS 8
#define REPS_MAX 31
#define CASES_MAX 900
#define PAD 16 /* list entries past the end, so that a prefetch needs no bounds check */

enum kernel { SUM, DOT4, CRC };
enum prefetch { NONE, FIRST_8, FIRST_16, FIRST_64, WHOLE, WHOLE_T1, WHOLE_NTA };
static const char *const prefetch_names[] = {"none",  "first8",  "first16", "first64",
                                             "whole", "wholeT1", "wholeNTA"};

struct layout {
    const char *name;
    uint64_t slots;  /* per extent */
    uint64_t align;  /* of the extent stride; 0: all of a layer contiguous; 1: next power of two */
    uint64_t tokens_scale; /* page is 16 tokens times this */
    uint64_t d_bytes, d_pitch, head_pitch;
    uint64_t shift;  /* bytes added to the start of each slab, times its number */
};

struct allocation {
    const char *name;
    uint64_t sequences, run;
    bool random; /* runs in random order, as after a long life of the pool */
};

struct scan_case {
    char name[96];
    const uint64_t *list, *table; /* piece offsets; table lines of the pieces, for CRC */
    const char *base;
    uint64_t count, unit;
    enum kernel kernel;
    enum prefetch prefetch;
    uint64_t distance;
    bool writes, fence;
    uint64_t sum;
    double speed[REPS_MAX], reference[REPS_MAX], ratio[REPS_MAX];
};

static struct scan_case *cases;
static unsigned case_count, rep_count = 11;
static char *pool, *huge_buffer, *flush_buffer;
static bool ok_disjoint = true, ok_sums = true, ok_crc = true, first_case_printed;
static volatile uint64_t sink;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_RAW, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

/* ---- CRC32C of a piece: three crc32q streams, joined by carry-less multiplication ---- */

static uint32_t crc_shift_a, crc_shift_b;
#define CRC_THIRD 1360ull /* 3 x 1360 + 16 = 4096 */

static uint32_t crc_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        if (a & bit)
            product ^= b;
        b = (b >> 1) ^ (b & 1 ? 0x82F63B78u : 0);
    }
    return product;
}

static uint32_t crc_power_of_x(uint64_t n)
{
    uint32_t result = 1u << 31, square = 1u << 30;
    for (; n; n >>= 1) {
        if (n & 1)
            result = crc_multiply(result, square);
        square = crc_multiply(square, square);
    }
    return result;
}

static inline uint32_t crc_shift(uint64_t crc, uint32_t factor)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)crc),
                                           _mm_cvtsi64_si128((long long)factor), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

static inline uint64_t load64(const char *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static inline uint32_t crc_block(uint32_t seed, const char *at)
{
    uint64_t a = seed, b = 0, c = 0;
    for (uint64_t i = 0; i < CRC_THIRD; i += 8) {
        a = _mm_crc32_u64(a, load64(at + i));
        b = _mm_crc32_u64(b, load64(at + CRC_THIRD + i));
        c = _mm_crc32_u64(c, load64(at + 2 * CRC_THIRD + i));
    }
    c ^= crc_shift(a, crc_shift_a) ^ crc_shift(b, crc_shift_b);
    c = _mm_crc32_u64(c, load64(at + 3 * CRC_THIRD));
    return (uint32_t)_mm_crc32_u64(c, load64(at + 3 * CRC_THIRD + 8));
}

static void crc_prepare(void)
{
    crc_shift_a = crc_power_of_x(8 * 2 * CRC_THIRD - 33);
    crc_shift_b = crc_power_of_x(8 * CRC_THIRD - 33);
    uint32_t slow = 7;
    for (uint64_t i = 0; i < 4096; i++)
        slow = _mm_crc32_u8(slow, (unsigned char)huge_buffer[i]);
    ok_crc = slow == crc_block(7, huge_buffer);
}

/* ---- the scan kernels; `kernel` and `prefetch` are constants at each call ---- */

#define INLINE static inline __attribute__((always_inline))

INLINE void prefetch_lines(const char *at, uint64_t bytes, enum prefetch mode)
{
    for (uint64_t i = 0; i < bytes; i += 64) {
        if (mode == WHOLE_NTA)
            _mm_prefetch(at + i, _MM_HINT_NTA);
        else if (mode == WHOLE_T1)
            _mm_prefetch(at + i, _MM_HINT_T1);
        else
            _mm_prefetch(at + i, _MM_HINT_T0);
    }
}

INLINE uint64_t scan(const struct scan_case *c, uint64_t from, uint64_t to, enum kernel kernel,
                     enum prefetch mode)
{
    __m512i sum[4];
    __m512 best[4];
    __m512bh query[16];
    uint64_t mismatches = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = _mm512_setzero_si512();
        best[i] = _mm512_setzero_ps();
    }
    for (int i = 0; i < 16; i++)
        query[i] = (__m512bh)_mm512_set1_epi16((short)(0x3F00 + i));
    const uint64_t unit = c->unit, distance = c->distance;
    for (uint64_t p = from; p < to; p++) {
        const char *at = c->base + c->list[p], *ahead = c->base + c->list[p + distance];
        if (mode >= FIRST_8 && mode <= FIRST_64)
            prefetch_lines(ahead, mode == FIRST_8 ? 512 : mode == FIRST_16 ? 1024 : 4096, mode);
        if (kernel == CRC) {
            uint32_t crc = 0;
            for (uint64_t i = 0; i < unit; i += 4096) {
                if (mode >= WHOLE)
                    prefetch_lines(ahead + i, 4096, mode);
                crc = crc_block(crc, at + i);
            }
            uint32_t stored;
            memcpy(&stored, c->base + c->table[p], 4);
            mismatches += crc != stored;
            continue;
        }
        for (uint64_t i = 0; i < unit; i += 256) {
            if (mode >= WHOLE)
                prefetch_lines(ahead + i, 256, mode);
            __m512i line[4];
            for (int j = 0; j < 4; j++)
                line[j] = _mm512_loadu_si512(at + i + 64 * j);
            for (int j = 0; kernel == SUM && j < 4; j++)
                sum[j] = _mm512_add_epi64(sum[j], line[j]);
            for (int q = 0; kernel == DOT4 && q < 4; q++) {
                __m512 dot = _mm512_setzero_ps();
                for (int j = 0; j < 4; j++)
                    dot = _mm512_dpbf16_ps(dot, (__m512bh)line[j], query[4 * q + j]);
                best[q] = _mm512_max_ps(best[q], dot);
            }
        }
    }
    for (int i = 0; i < 4; i++)
        sum[i] = _mm512_add_epi64(sum[i], kernel == DOT4 ? _mm512_castps_si512(best[i]) :
                                                           _mm512_setzero_si512());
    sum[0] = _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]));
    return (uint64_t)_mm512_reduce_add_epi64(sum[0]) + mismatches;
}

#define SCAN_WITH(name, kernel)                                                                  \
    static uint64_t name(const struct scan_case *c, uint64_t from, uint64_t to)                  \
    {                                                                                            \
        switch (c->prefetch) {                                                                   \
        case NONE: return scan(c, from, to, kernel, NONE);                                       \
        case FIRST_8: return scan(c, from, to, kernel, FIRST_8);                                 \
        case FIRST_16: return scan(c, from, to, kernel, FIRST_16);                               \
        case FIRST_64: return scan(c, from, to, kernel, FIRST_64);                               \
        case WHOLE: return scan(c, from, to, kernel, WHOLE);                                     \
        case WHOLE_T1: return scan(c, from, to, kernel, WHOLE_T1);                               \
        default: return scan(c, from, to, kernel, WHOLE_NTA);                                    \
        }                                                                                        \
    }
SCAN_WITH(scan_sum, SUM)
SCAN_WITH(scan_dot4, DOT4)
SCAN_WITH(scan_crc, CRC)

static __attribute__((noinline)) uint64_t read_stream(const char *at, uint64_t bytes)
{
    __m512i sum[8];
    for (int j = 0; j < 8; j++)
        sum[j] = _mm512_setzero_si512();
    for (uint64_t i = 0; i < bytes; i += 512)
        for (int j = 0; j < 8; j++)
            sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(at + i + 64 * j));
    for (int j = 1; j < 8; j++)
        sum[0] = _mm512_add_epi64(sum[0], sum[j]);
    return (uint64_t)_mm512_reduce_add_epi64(sum[0]);
}

static void write_stream(char *to, const char *from, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i += 256)
        for (uint64_t j = 0; j < 256; j += 64)
            _mm512_stream_si512((__m512i *)(void *)(to + i + j),
                                _mm512_loadu_si512(from + (i + j) % (64 * KIB)));
}

/* ---- layouts and allocations ---- */

static uint64_t round_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) / align * align;
}

static uint64_t slot_count(const struct layout *l)
{
    return (l->align == 1 ? PAGES / 2 : PAGES) / l->tokens_scale;
}

static uint64_t extent_stride(const struct layout *l)
{
    uint64_t s = l->slots, kv = HEADS * l->head_pitch * l->tokens_scale;
    uint64_t bytes = round_up(s * TABLE_BYTES, 4 * KIB) +
                     LAYERS * (round_up(s * l->d_pitch, 4 * KIB) + 2 * s * kv) +
                     3 * LAYERS * l->shift;
    if (l->align == 1) {
        uint64_t power = MIB;
        while (power < bytes)
            power *= 2;
        return power;
    }
    return round_up(bytes, l->align);
}

enum part { TABLE, DIGEST, KEYS, VALUES };

static uint64_t part_offset(const struct layout *l, enum part part, uint64_t layer, uint64_t slot)
{
    uint64_t s = l->align ? l->slots : slot_count(l), i = slot % s;
    uint64_t kv = HEADS * l->head_pitch * l->tokens_scale;
    uint64_t digests = round_up(s * l->d_pitch, 4 * KIB);
    uint64_t base = l->align ? slot / s * extent_stride(l) : 0;
    if (part == TABLE)
        return base + i * TABLE_BYTES;
    base += round_up(s * TABLE_BYTES, 4 * KIB) + layer * (digests + 2 * s * kv);
    base += (3 * layer + part) * l->shift;
    if (part == DIGEST)
        return base + i * l->d_pitch;
    return base + digests + (part == VALUES ? s * kv : 0) + i * kv +
           (l->head_pitch - 4 * KIB); /* a head's inline header precedes it */
}

static uint32_t *make_slots(const struct allocation *a, uint64_t pages)
{
    uint32_t *slots = malloc(pages * sizeof *slots);
    uint64_t runs = pages / a->run, state = 88172645463325252ull;
    uint32_t *order = malloc(runs * sizeof *order);
    if (!slots || !order)
        die("malloc");
    for (uint64_t r = 0; r < runs; r++)
        order[r] = (uint32_t)r;
    for (uint64_t r = runs; a->random && r-- > 1;) {
        uint64_t other = next_random(&state) % (r + 1);
        uint32_t keep = order[r];
        order[r] = order[other];
        order[other] = keep;
    }
    uint64_t each = pages / a->sequences;
    for (uint64_t n = 0; n < pages; n++) {
        uint64_t sequence = n / each, page = n % each;
        slots[n] = (uint32_t)(order[page / a->run * a->sequences + sequence] * a->run +
                              page % a->run);
    }
    free(order);
    return slots;
}

static int compare_offsets(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static const uint64_t *seal_list(uint64_t *list, uint64_t count, uint64_t unit)
{
    uint64_t *sorted = malloc(count * sizeof *sorted);
    if (!sorted)
        die("malloc");
    memcpy(sorted, list, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_offsets);
    for (uint64_t i = 1; i < count; i++)
        ok_disjoint &= sorted[i] - sorted[i - 1] >= unit;
    ok_disjoint &= sorted[count - 1] + unit <= POOL_BYTES - REFERENCE_BYTES;
    free(sorted);
    for (uint64_t i = 0; i < PAD; i++)
        list[count + i] = list[count - 1];
    return list;
}

/* A page's keys as `unit` pieces; `head_outer` scans all pages of head 0, then of head 1, ... */
static const uint64_t *key_list(const struct layout *l, const struct allocation *a, uint64_t unit,
                                bool head_outer, uint64_t layer)
{
    uint64_t pages = slot_count(l), kv = K_BYTES * l->tokens_scale, per = kv / unit;
    uint64_t *list = malloc((pages * per + PAD) * sizeof *list);
    uint32_t *slots = make_slots(a, pages);
    if (!list)
        die("malloc");
    for (uint64_t n = 0; n < pages; n++)
        for (uint64_t h = 0; h < per; h++)
            list[head_outer ? h * pages + n : n * per + h] =
                part_offset(l, KEYS, layer, slots[n]) + h * (unit * l->head_pitch / (4 * KIB));
    free(slots);
    return seal_list(list, pages * per, unit);
}

static const uint64_t *digest_list(const struct layout *l, const struct allocation *a)
{
    uint64_t pages = slot_count(l);
    uint64_t *list = malloc((pages * LAYERS + PAD) * sizeof *list);
    uint32_t *slots = make_slots(a, pages);
    if (!list)
        die("malloc");
    for (uint64_t layer = 0; layer < LAYERS; layer++)
        for (uint64_t n = 0; n < pages; n++)
            list[layer * pages + n] = part_offset(l, DIGEST, layer, slots[n]);
    free(slots);
    return seal_list(list, pages * LAYERS, l->d_bytes);
}

/* One layer-page: K and V of a layer, for all layers of 64 pages before the next 64 (prefill). */
static const uint64_t *write_list(const struct layout *l, const struct allocation *a)
{
    uint64_t pages = slot_count(l), kept = WRITTEN_PAGES, n = 0;
    uint64_t *list = malloc((kept * LAYERS * 2 + PAD) * sizeof *list);
    uint32_t *slots = make_slots(a, pages);
    if (!list)
        die("malloc");
    for (uint64_t start = 0; start < kept; start += 64)
        for (uint64_t layer = 0; layer < LAYERS; layer++)
            for (uint64_t i = 0; i < 64; i++) {
                uint32_t slot = slots[start * (pages / kept) + i];
                list[n++] = part_offset(l, KEYS, layer, slot);
                list[n++] = part_offset(l, VALUES, layer, slot);
            }
    free(slots);
    for (uint64_t i = 0; i < PAD; i++)
        list[n + i] = list[n - 1];
    return list;
}

/* ---- cases ---- */

static struct scan_case *add(const char *name, const uint64_t *list, uint64_t count, uint64_t unit,
                             enum prefetch prefetch, uint64_t distance)
{
    struct scan_case *c = &cases[case_count++];
    if (case_count > CASES_MAX || distance > PAD) {
        fprintf(stderr, "too many cases\n");
        exit(1);
    }
    *c = (struct scan_case){.list = list, .base = pool, .count = count, .unit = unit,
                            .prefetch = prefetch, .distance = distance};
    if (prefetch == NONE)
        snprintf(c->name, sizeof c->name, "%s.none", name);
    else
        snprintf(c->name, sizeof c->name, "%s.%s.d%u", name, prefetch_names[prefetch],
                 (unsigned)distance);
    return c;
}

#define STANDARD .tokens_scale = 1, .d_bytes = 4096, .d_pitch = 4096, .head_pitch = 4096
static const struct layout layouts[] = {
    {.name = "a", .slots = 1, .align = 4096, STANDARD},
    {.name = "a_pow2", .slots = 1, .align = 1, STANDARD},
    {.name = "b16", .slots = 16, .align = 4096, STANDARD},
    {.name = "b64", .slots = 64, .align = 4096, STANDARD},
    {.name = "b64_2m", .slots = 64, .align = HUGE_BYTES, STANDARD},
    {.name = "b64_pow2", .slots = 64, .align = 1, STANDARD},
    {.name = "b256", .slots = 256, .align = 4096, STANDARD},
    {.name = "c", .slots = 1, .align = 0, STANDARD},
};
#define LAYOUT_COUNT (sizeof layouts / sizeof *layouts)
static const struct allocation allocations[] = {
    {"one", 1, 1, false},    {"4x1", 4, 1, false},     {"16x1", 16, 1, false},
    {"16x8", 16, 8, false},  {"16x16", 16, 16, false}, {"16x64", 16, 64, false},
    {"aged1", 16, 1, true},  {"aged4", 16, 4, true},   {"aged8", 16, 8, true},
    {"aged16", 16, 16, true}, {"aged64", 16, 64, true},
};
#define ALLOCATION_COUNT (sizeof allocations / sizeof *allocations)

static const struct layout *layout_named(const char *name)
{
    for (unsigned i = 0; i < LAYOUT_COUNT; i++)
        if (!strcmp(layouts[i].name, name))
            return &layouts[i];
    return NULL;
}

static const struct allocation *allocation_named(const char *name)
{
    for (unsigned i = 0; i < ALLOCATION_COUNT; i++)
        if (!strcmp(allocations[i].name, name))
            return &allocations[i];
    return NULL;
}

static void add_main_grid(void)
{
    for (unsigned i = 0; i < LAYOUT_COUNT; i++)
        for (unsigned j = 0; j < ALLOCATION_COUNT; j++) {
            const struct layout *l = &layouts[i];
            const struct allocation *a = &allocations[j];
            char name[64];
            if (l->align == 0 && j > 0)
                break;
            const uint64_t *keys = key_list(l, a, K_BYTES, false, 3);
            const uint64_t *digests = digest_list(l, a);
            snprintf(name, sizeof name, "K.%s.%s", l->name, a->name);
            add(name, keys, slot_count(l), K_BYTES, NONE, 0);
            add(name, key_list(l, a, 4096, false, 3), slot_count(l) * 8, 4096, WHOLE, 1);
            snprintf(name, sizeof name, "D.%s.%s", l->name, a->name);
            add(name, digests, slot_count(l) * LAYERS, 4096, NONE, 0);
            add(name, digests, slot_count(l) * LAYERS, 4096, WHOLE, 1);
        }
}

static void add_prefetch_sweep(const char *layout, const char *allocation)
{
    static const uint64_t distances[] = {1, 2, 4, 8};
    const struct layout *l = layout_named(layout);
    const struct allocation *a = allocation_named(allocation);
    const uint64_t *keys = key_list(l, a, K_BYTES, false, 3);
    const uint64_t *blocks = key_list(l, a, 4096, false, 3), *digests = digest_list(l, a);
    char name[64];
    for (enum prefetch mode = FIRST_8; mode <= WHOLE_NTA; mode++)
        for (unsigned i = 0; i < 4; i++) {
            if (mode > WHOLE && i != 1)
                continue;
            snprintf(name, sizeof name, "sweepK32.%s.%s", layout, allocation);
            add(name, keys, PAGES, K_BYTES, mode, distances[i]);
            snprintf(name, sizeof name, "sweepD.%s.%s", layout, allocation);
            add(name, digests, PAGES * LAYERS, 4096, mode, distances[i]);
            if (mode >= WHOLE) {
                snprintf(name, sizeof name, "sweepK4.%s.%s", layout, allocation);
                add(name, blocks, PAGES * HEADS, 4096, mode, distances[i]);
            }
        }
}

static void add_kernel_cases(const char *layout, const char *allocation)
{
    const struct layout *l = layout_named(layout);
    const struct allocation *a = allocation_named(allocation);
    const uint64_t *keys = key_list(l, a, K_BYTES, false, 3);
    const uint64_t *heads = key_list(l, a, 4096, false, 3), *digests = digest_list(l, a);
    const uint64_t *outer = key_list(l, a, 4096, true, 3);
    char name[64];
    static const struct { enum prefetch mode; uint64_t distance; } ways[] = {
        {NONE, 0}, {FIRST_8, 1}, {FIRST_8, 2}, {WHOLE, 1}, {WHOLE, 2}, {WHOLE, 4}, {WHOLE, 8}};
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        enum prefetch mode = ways[i].mode;
        uint64_t ahead = ways[i].distance;
        snprintf(name, sizeof name, "dot4.K.%s.%s", layout, allocation);
        add(name, heads, PAGES * HEADS, 4096, mode, ahead)->kernel = DOT4;
        snprintf(name, sizeof name, "dot4.D.%s.%s", layout, allocation);
        add(name, digests, PAGES * LAYERS, 4096, mode, ahead)->kernel = DOT4;
        if (ahead < 2) {
            snprintf(name, sizeof name, "headouter.K.%s.%s", layout, allocation);
            add(name, outer, PAGES * HEADS, 4096, mode, ahead);
        }
    }
    /* A CRC per page and layer against one per head, its table by record or by layer. */
    uint64_t *record = malloc((PAGES * HEADS + PAD) * sizeof *record);
    uint64_t *layer = malloc((PAGES * HEADS + PAD) * sizeof *layer);
    uint64_t *page = malloc((PAGES + PAD) * sizeof *page);
    uint32_t *slots = make_slots(a, PAGES);
    if (!record || !layer || !page)
        die("malloc");
    for (uint64_t n = 0; n < PAGES; n++) {
        page[n] = part_offset(l, TABLE, 0, slots[n]) + 64 + 3 * 12;
        for (uint64_t h = 0; h < HEADS; h++) {
            record[n * HEADS + h] = part_offset(l, TABLE, 0, slots[n]) + 64 + 3 * 96 + 4 * h;
            layer[n * HEADS + h] = part_offset(l, TABLE, 0, slots[n] / 64 * 64) + 3 * 8 * KIB +
                                   slots[n] % 64 * 96 + 4 * h;
        }
    }
    free(slots);
    /* All look 32 KiB ahead. In the last the "table" is the piece itself: no table is read. */
    const struct { const char *name; const uint64_t *list, *table; uint64_t unit; } sums[] = {
        {"crc.page", keys, page, K_BYTES}, {"crc.head_by_record", heads, record, 4096},
        {"crc.head_by_layer", heads, layer, 4096}, {"crc.head_no_table", heads, heads, 4096}};
    for (unsigned i = 0; i < 4; i++) {
        uint64_t count = PAGES * K_BYTES / sums[i].unit;
        snprintf(name, sizeof name, "%s.%s.%s", sums[i].name, layout, allocation);
        struct scan_case *c = add(name, sums[i].list, count, sums[i].unit, WHOLE,
                                  K_BYTES / sums[i].unit);
        c->kernel = CRC;
        c->table = sums[i].table;
    }
}

static void add_variants(void)
{
    static const struct layout variants[] = {
        {.name = "b64_shift64", .slots = 64, .align = 4096, STANDARD, .shift = 64},
        {.name = "b64_shift1088", .slots = 64, .align = 4096, STANDARD, .shift = 1088},
        {.name = "b64_skew4k", .slots = 64, .align = 4096, STANDARD, .shift = 4096},
        {.name = "b64_inline64", .slots = 64, .align = 4096, .tokens_scale = 1, .d_bytes = 4096,
         .d_pitch = 4160, .head_pitch = 4160},
        {.name = "b64_d2304packed", .slots = 64, .align = 4096, .tokens_scale = 1,
         .d_bytes = 2304, .d_pitch = 2304, .head_pitch = 4096},
        {.name = "b64_d2304in4k", .slots = 64, .align = 4096, .tokens_scale = 1, .d_bytes = 2304,
         .d_pitch = 4096, .head_pitch = 4096},
        {.name = "b64_d1024packed", .slots = 64, .align = 4096, .tokens_scale = 1,
         .d_bytes = 1024, .d_pitch = 1024, .head_pitch = 4096},
        {.name = "b64_d1024in4k", .slots = 64, .align = 4096, .tokens_scale = 1, .d_bytes = 1024,
         .d_pitch = 4096, .head_pitch = 4096},
        {.name = "t64_a", .slots = 1, .align = 4096, .tokens_scale = 4, .d_bytes = 4096,
         .d_pitch = 4096, .head_pitch = 4096},
        {.name = "t64_b16", .slots = 16, .align = 4096, .tokens_scale = 4, .d_bytes = 4096,
         .d_pitch = 4096, .head_pitch = 4096},
        {.name = "t64_b64", .slots = 64, .align = 4096, .tokens_scale = 4, .d_bytes = 4096,
         .d_pitch = 4096, .head_pitch = 4096},
        {.name = "t64_c", .slots = 1, .align = 0, .tokens_scale = 4, .d_bytes = 4096,
         .d_pitch = 4096, .head_pitch = 4096},
    };
    static const char *const plans[] = {"one", "16x1", "16x16", "aged1", "aged16"};
    for (unsigned i = 0; i < sizeof variants / sizeof *variants; i++)
        for (unsigned j = 0; j < sizeof plans / sizeof *plans; j++) {
            const struct layout *l = &variants[i];
            const struct allocation *a = allocation_named(plans[j]);
            char name[64];
            const uint64_t *digests = digest_list(l, a), *keys = key_list(l, a, 4096, false, 3);
            uint64_t pages = slot_count(l), pieces = pages * LAYERS;
            snprintf(name, sizeof name, "D.%s.%s", l->name, a->name);
            add(name, digests, pieces, l->d_bytes, NONE, 0);
            add(name, digests, pieces, l->d_bytes, WHOLE, 4096 / l->d_bytes);
            if (l->d_bytes < 4096)
                continue;
            snprintf(name, sizeof name, "K.%s.%s", l->name, a->name);
            add(name, keys, PAGES * HEADS, 4096, NONE, 0);
            add(name, keys, PAGES * HEADS, 4096, WHOLE, 1);
        }
}

static void add_writes(void)
{
    static const char *const plans[] = {"one", "16x1", "16x16", "aged1", "aged16"};
    for (unsigned i = 0; i < LAYOUT_COUNT; i++)
        for (unsigned j = 0; j < sizeof plans / sizeof *plans; j++)
            for (int fence = 0; fence < 2; fence++) {
                const struct layout *l = &layouts[i];
                char name[64];
                if (l->align == 0 && j > 0)
                    break;
                const uint64_t *list = write_list(l, allocation_named(plans[j]));
                snprintf(name, sizeof name, "write%s.%s.%s", fence ? "_fence" : "", l->name,
                         plans[j]);
                struct scan_case *c = add(name, list, WRITTEN_PAGES * LAYERS * 2, K_BYTES, NONE, 0);
                c->writes = true;
                c->fence = fence;
            }
}

/* The same bytes in private memory with 2 MiB pages, read in the same run: what huge pages give. */
static void add_huge_comparison(void)
{
    uint64_t count = REFERENCE_BYTES / 4096;
    uint64_t *list = malloc((count + PAD) * sizeof *list);
    if (!list)
        die("malloc");
    for (uint64_t i = 0; i < count; i++)
        list[i] = i * 4096;
    seal_list(list, count, 4096);
    add("stream_in_private_huge", list, count, 4096, NONE, 0)->base = huge_buffer;
    add("stream_in_private_huge", list, count, 4096, WHOLE, 1)->base = huge_buffer;
    add("stream_in_pool", list, count, 4096, NONE, 0);
    add("stream_in_pool", list, count, 4096, WHOLE, 1);
    add("stream_in_pool", list, count, 4096, WHOLE, 2);
}

/* ---- running ---- */

static void write_pieces(const struct scan_case *c, uint64_t from, uint64_t to)
{
    for (uint64_t p = from; p < to; p += 2) {
        write_stream(pool + c->list[p], flush_buffer, K_BYTES);
        write_stream(pool + c->list[p + 1], flush_buffer + K_BYTES, K_BYTES);
        if (c->fence)
            _mm_sfence();
    }
    _mm_sfence();
}

static uint64_t run_chunk(const struct scan_case *c, uint64_t from, uint64_t to)
{
    if (c->writes) {
        write_pieces(c, from, to);
        return 0;
    }
    if (c->kernel == DOT4)
        return scan_dot4(c, from, to);
    return c->kernel == CRC ? scan_crc(c, from, to) : scan_sum(c, from, to);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *samples, unsigned count)
{
    qsort(samples, count, sizeof *samples, compare_doubles);
    return (samples[(count - 1) / 2] + samples[count / 2]) / 2;
}

/* Chunk and reference lie about a millisecond apart; the median over the chunks drops a burst. */
static void run_once(struct scan_case *c, unsigned rep)
{
    char *reference = pool + POOL_BYTES - REFERENCE_BYTES;
    double speeds[CHUNKS], references[CHUNKS], ratios[CHUNKS];
    uint64_t each = c->count / CHUNKS, bytes = each * c->unit, sum = 0;
    sink += read_stream(flush_buffer, 64 * MIB);
    for (uint64_t k = 0; k < CHUNKS; k++) {
        char *at = reference + k * (REFERENCE_BYTES / CHUNKS);
        double t0 = now_s();
        if (c->writes)
            write_stream(at, flush_buffer, bytes);
        else
            sink += read_stream(at, bytes);
        _mm_sfence();
        double t1 = now_s();
        sum += run_chunk(c, k * each, (k + 1) * each);
        double t2 = now_s();
        speeds[k] = (double)bytes / (t2 - t1) / 1e9;
        references[k] = (double)bytes / (t1 - t0) / 1e9;
        ratios[k] = (t1 - t0) / (t2 - t1);
    }
    if (rep == 0)
        c->sum = sum;
    ok_sums &= c->sum == sum;
    c->speed[rep] = median_of(speeds, CHUNKS);
    c->reference[rep] = median_of(references, CHUNKS);
    c->ratio[rep] = median_of(ratios, CHUNKS);
}

static double print_metric(const char *kind, const char *name, const char *what, const char *unit,
                           const double *samples)
{
    double sorted[REPS_MAX];
    memcpy(sorted, samples, rep_count * sizeof *sorted);
    qsort(sorted, rep_count, sizeof *sorted, compare_doubles);
    double median = sorted[rep_count / 2];
    if (!what)
        return median;
    printf("%s\n\"%s.%s.%s\": {\"median\": %.3f, \"low\": %.3f, \"high\": %.3f, "
           "\"unit\": \"%s\", \"samples\": [", first_case_printed ? "," : "", kind, name, what,
           median, sorted[0], sorted[rep_count - 1], unit);
    for (unsigned i = 0; i < rep_count; i++)
        printf("%s%.3g", i ? ", " : "", samples[i]);
    printf("]}");
    first_case_printed = true;
    return median;
}

static void report(const char *kind)
{
    for (unsigned i = 0; i < case_count; i++) {
        struct scan_case *c = &cases[i];
        double speed = print_metric(kind, c->name, "speed", "GB/s", c->speed);
        double reference = print_metric(kind, c->name, NULL, NULL, c->reference);
        double ratio = print_metric(kind, c->name, "ratio", "1", c->ratio);
        fprintf(stderr, "%-9s %-40s %6.2f GB/s  of %6.2f  ratio %.3f\n", kind, c->name, speed,
                reference, ratio);
    }
}

/* ---- memory ---- */

static void fill(char *at, uint64_t bytes)
{
    uint64_t state = 2463534242ull;
    __m512i keep = _mm512_set1_epi16(0x007F), exponent = _mm512_set1_epi16(0x3F00);
    for (uint64_t i = 0; i < bytes; i += 64) {
        __m512i v = _mm512_set1_epi64((long long)next_random(&state));
        v = _mm512_or_si512(_mm512_and_si512(v, keep), exponent);
        _mm512_stream_si512((__m512i *)(void *)(at + i), v);
    }
    _mm_sfence();
}

static char *map_aligned(uint64_t bytes, int fd, int flags)
{
    char *hold = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (hold == MAP_FAILED)
        die("mmap");
    char *at = hold + (HUGE_BYTES - (uintptr_t)hold % HUGE_BYTES) % HUGE_BYTES;
    char *got = mmap(at, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0);
    return got == MAP_FAILED ? NULL : got;
}

static void smaps_of(const char *at, unsigned long *huge_kib, unsigned long *rss_kib)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    bool here = false;
    unsigned long low, high, kib;
    *huge_kib = *rss_kib = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &low, &high) == 2 && strchr(line, '-') < strchr(line, ' '))
            here = low <= (uintptr_t)at && (uintptr_t)at < high;
        else if (here && sscanf(line, "Rss: %lu", &kib) == 1)
            *rss_kib += kib;
        else if (here && (sscanf(line, "AnonHugePages: %lu", &kib) == 1 ||
                          sscanf(line, "ShmemPmdMapped: %lu", &kib) == 1 ||
                          sscanf(line, "Shared_Hugetlb: %lu", &kib) == 1))
            *huge_kib += kib;
    }
    if (file)
        fclose(file);
}

static char *map_pool(const char *kind)
{
    int shared = MAP_SHARED, fd = -1;
    if (!strcmp(kind, "memfd_hugetlb") || !strcmp(kind, "memfd")) {
        bool tlb = strcmp(kind, "memfd");
        fd = memfd_create("slab_layout", tlb ? MFD_HUGETLB : 0);
        if (fd < 0 || ftruncate(fd, (off_t)POOL_BYTES)) {
            fprintf(stderr, "%s: %s\n", kind, strerror(errno));
            return NULL;
        }
    } else {
        shared = MAP_PRIVATE | MAP_ANONYMOUS;
    }
    char *at = map_aligned(POOL_BYTES, fd, shared);
    if (fd >= 0)
        close(fd);
    if (!at)
        return NULL;
    if (!strcmp(kind, "anon4k"))
        madvise(at, POOL_BYTES, MADV_NOHUGEPAGE);
    else if (strcmp(kind, "memfd_hugetlb") && madvise(at, POOL_BYTES, MADV_HUGEPAGE))
        fprintf(stderr, "%s: MADV_HUGEPAGE: %s\n", kind, strerror(errno));
    fill(at, POOL_BYTES);
    return at;
}

/* A random walk over the lines of the reference: latency, from which a distance follows. */
static double chase_ns(char *at)
{
    uint64_t lines = REFERENCE_BYTES / 64, state = 362436069ull, hops = 200000, p = 0;
    uint32_t *order = malloc(lines * sizeof *order);
    if (!order)
        die("malloc");
    for (uint64_t i = 0; i < lines; i++)
        order[i] = (uint32_t)i;
    for (uint64_t i = lines - 1; i > 0; i--) {
        uint64_t j = next_random(&state) % i;
        uint32_t keep = order[i];
        order[i] = order[j];
        order[j] = keep;
    }
    for (uint64_t i = 0; i < lines; i++) {
        uint64_t next = (uint64_t)order[(i + 1) % lines] * 64;
        memcpy(at + (uint64_t)order[i] * 64, &next, 8);
    }
    free(order);
    double best = 1e9;
    for (int part = 0; part < 10; part++) {
        double start = now_s();
        for (uint64_t i = 0; i < hops; i++)
            p = load64(at + p);
        double elapsed = (now_s() - start) / (double)hops * 1e9;
        best = elapsed < best ? elapsed : best;
    }
    sink += p;
    return best;
}

static void free_lists(void)
{
    const uint64_t **lists = calloc(2ull * CASES_MAX, sizeof *lists);
    unsigned count = 0;
    for (unsigned i = 0; lists && i < 2 * case_count; i++) {
        const uint64_t *list = i % 2 ? cases[i / 2].table : cases[i / 2].list;
        unsigned j = 0;
        while (j < count && lists[j] != list)
            j++;
        if (list && j == count)
            lists[count++] = list;
    }
    for (unsigned i = 0; lists && i < count; i++)
        free((void *)(uintptr_t)lists[i]);
    free(lists);
}

static void run_kind(const char *kind, char *notes, size_t notes_bytes)
{
    unsigned long huge_kib, rss_kib;
    size_t used = strlen(notes);
    pool = map_pool(kind);
    if (!pool) {
        snprintf(notes + used, notes_bytes - used, ", \"%s: not to be had (%s)\"", kind,
                 strerror(errno));
        return;
    }
    smaps_of(pool, &huge_kib, &rss_kib);
    case_count = 0;
    add_huge_comparison();
    unsigned reads = case_count;
    if (strcmp(kind, "anon4k")) {
        add_main_grid();
        add_prefetch_sweep("b64", "aged16");
        add_prefetch_sweep("b64", "aged1");
        add_prefetch_sweep("a", "one");
        add_kernel_cases("a", "one"); /* its table by layer is no real layout */
        add_kernel_cases("b64", "one");
        add_kernel_cases("b64", "aged16");
        add_variants();
        reads = case_count;
        add_writes();
    }
    for (unsigned rep = 0; rep < rep_count; rep++)
        for (unsigned i = 0; i < reads; i++)
            run_once(&cases[i], rep);
    for (unsigned rep = 0; rep < rep_count; rep++)
        for (unsigned i = reads; i < case_count; i++)
            run_once(&cases[i], rep);
    report(kind);
    double chase = chase_ns(pool + POOL_BYTES - REFERENCE_BYTES);
    snprintf(notes + used, notes_bytes - used,
             ", \"%s: resident %lu MiB, of it on 2 MiB pages %lu MiB; "
             "random line %.0f ns at best\"", kind, rss_kib / 1024, huge_kib / 1024, chase);
    free_lists();
    munmap(pool, POOL_BYTES);
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"memfd", "memfd_hugetlb", "anon4k", "anon_huge"};
    static char notes[4096] = "\"one thread, 8 layers, 8 kv heads, head_dim 128, bf16\"";
    if (argc > 1 && atoi(argv[1]) > 0 && atoi(argv[1]) <= REPS_MAX)
        rep_count = (unsigned)atoi(argv[1]);
    cases = calloc(CASES_MAX, sizeof *cases);
    huge_buffer = map_aligned(REFERENCE_BYTES, -1, MAP_PRIVATE | MAP_ANONYMOUS);
    flush_buffer = map_aligned(64 * MIB, -1, MAP_PRIVATE | MAP_ANONYMOUS);
    if (!cases || !huge_buffer || !flush_buffer)
        die("memory");
    madvise(huge_buffer, REFERENCE_BYTES, MADV_HUGEPAGE);
    madvise(flush_buffer, 64 * MIB, MADV_HUGEPAGE);
    fill(huge_buffer, REFERENCE_BYTES);
    fill(flush_buffer, 64 * MIB);
    crc_prepare();
    printf("{\"case\": \"slab_layout\", \"machine\": {\"cpu\": \"AMD EPYC (Zen 5), KVM\", "
           "\"cores\": 2, \"memory_gib\": 24}, \"commit\": \"that of this file\", "
           "\"emulated\": null, \"metrics\": {");
    for (unsigned i = 0; i < 4; i++)
        if (argc < 3 || strstr(argv[2], kinds[i]))
            run_kind(kinds[i], notes, sizeof notes);
    printf("},\n\"checks\": {\"offsets_disjoint_and_inside\": %s, \"sums_repeat\": %s, "
           "\"crc_equals_bytewise\": %s},\n\"ratios\": {},\n\"notes\": [%s]}\n",
           ok_disjoint ? "true" : "false", ok_sums ? "true" : "false", ok_crc ? "true" : "false",
           notes);
    fprintf(stderr, "checks %d %d %d; %s\n", ok_disjoint, ok_sums, ok_crc, notes);
    return !(ok_disjoint && ok_sums && ok_crc);
}
