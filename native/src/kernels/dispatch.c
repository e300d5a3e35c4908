/* Which instruction set runs: asked of the CPU once, or forced by a test. */
#include "kernels/kernels.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/types.h"
#include "base/cpu.h"

/* NULL until first use. The tables are constants, so a relaxed load of the pointer is enough: no
 * store to them has to be seen. */
static _Atomic(const kernels *) current;

#if defined(__x86_64__)
static bool has_avx2(void) { return cpu_has_avx2() && cpu_has(bit_FMA | bit_F16C); }
static bool has_amx(void) { return cpu_has_amx() && amx_is_permitted(); }
#endif

static bool has_serial(void) { return true; }

/* From the worst to the best. */
static const struct {
    const kernels *table;
    bool (*is_here)(void);
} choices[] = {
    {&kernels_serial, has_serial},
#if defined(__x86_64__)
    {&kernels_avx2, has_avx2},
    {&kernels_avx512, cpu_has_avx512},
    {&kernels_avx512_bf16, cpu_has_avx512_bf16},
    {&kernels_amx, has_amx},
#elif defined(__aarch64__)
    {&kernels_neon, has_serial},
    {&kernels_neon_bf16, cpu_has_bf16},
#endif
};
enum { CHOICES = sizeof choices / sizeof *choices };

/* An instruction set that another build has. */
static bool is_elsewhere(const char *name) {
    static const char *const names[] = {"avx2", "avx512", "avx512_bf16", "amx", "neon",
                                        "neon_bf16"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}

atomic_bool kernels_ask_second_cache;

static const kernels *best(void) {
#if defined(__x86_64__)
    atomic_store_explicit(&kernels_ask_second_cache, cpu_is_amd(), memory_order_relaxed);
#endif
    int i = CHOICES - 1;
    while (!choices[i].is_here())
        i--;
    return choices[i].table;
}

const kernels *kernels_current(void) {
    const kernels *table = atomic_load_explicit(&current, memory_order_relaxed);
    if (table)
        return table;
    /* Only from NULL, so that a choice forced by another thread meanwhile is kept. */
    const kernels *found = best();
    if (atomic_compare_exchange_strong(&current, &table, found))
        return found;
    return table;
}

/* Nothing is greater than a NaN, which stays. In a form that compilers make vectors of. */
static inline float larger_of(float value, float best) {
    float larger = value > best ? value : best;
    return value != value ? value : larger;
}

float kernels_largest(const float *values, uint32_t count) {
    enum { TOGETHER = 4 };
    float best[TOGETHER] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    uint32_t i = 0;
    for (; i + TOGETHER <= count; i += TOGETHER)
        for (uint32_t lane = 0; lane < TOGETHER; lane++)
            best[lane] = larger_of(values[i + lane], best[lane]);
    for (; i < count; i++)
        best[0] = larger_of(values[i], best[0]);
    return larger_of(larger_of(best[0], best[1]), larger_of(best[2], best[3]));
}

enum { EACH_KEYS = 16, EACH_QUERIES = 64, EACH_BYTES = 32768 };

/* Of each key the largest of its column of logits, NaN if one is. */
static void raise_best(float (*logits)[EACH_KEYS], uint32_t rows, float best[EACH_KEYS]) {
    for (uint32_t j = 0; j < rows; j++)
        for (uint32_t t = 0; t < EACH_KEYS; t++)
            best[t] = larger_of(logits[j][t], best[t]);
}

/* Short, and mostly whole lines. */
static inline void copy_row(char *to, const char *from, size_t bytes) {
    enum { LINE = 64 };
    size_t at = 0;
    for (; at + LINE <= bytes; at += LINE)
        memcpy(to + at, from + at, LINE);
    if (at < bytes)
        memcpy(to + at, from + at, bytes - at);
}

/* Side by side they are scored like those of a page. */
void kernels_score_each(const kernels *table, int dtype, const void *const *keys, uint32_t count,
                        uint32_t dim, const kernel_queries *queries, float scale, float *best) {
    _Alignas(64) char rows[EACH_BYTES];
    float logits[EACH_QUERIES][EACH_KEYS];
    size_t row_bytes = dim * (dtype == KERNEL_FLOAT32 ? sizeof(float) : 2);
    uint32_t room = row_bytes * EACH_KEYS <= sizeof rows ? EACH_KEYS : 1, here;
    for (uint32_t i = 0; i < count; i += here) {
        float largest[EACH_KEYS];
        const void *first = room == 1 ? keys[i] : rows;
        here = count - i < room ? count - i : room;
        for (uint32_t t = 0; room > 1 && t < here; t++)
            copy_row(rows + t * row_bytes, keys[i + t], row_bytes);
        for (uint32_t t = 0; t < EACH_KEYS; t++)
            largest[t] = -INFINITY;
        for (uint32_t j = 0; j < queries->count; j += EACH_QUERIES) {
            kernel_queries part = *queries;
            part.first += j;
            part.count = queries->count - j < EACH_QUERIES ? queries->count - j : EACH_QUERIES;
            if (here < EACH_KEYS) /* what nobody writes is read all the same */
                memset(logits, 0, part.count * sizeof logits[0]);
            table->score(dtype, first, row_bytes, here, dim, &part, scale, logits[0], EACH_KEYS,
                         NULL);
            raise_best(logits, part.count, largest);
        }
        memcpy(best + i, largest, here * sizeof *best);
    }
}

int kernels_force(const char *name) {
    const kernels *table = NULL;
    if (!strcmp(name, "auto"))
        table = best();
    for (int i = 0; i < CHOICES && !table; i++) {
        if (strcmp(name, choices[i].table->name))
            continue;
        if (!choices[i].is_here())
            return -ENOTSUP;
        table = choices[i].table;
    }
    if (!table)
        return is_elsewhere(name) ? -ENOTSUP : -EINVAL;
    atomic_store_explicit(&current, table, memory_order_relaxed);
    return 0;
}

int cxlkv_isa(const char *force, const char **name) {
    int code = force ? kernels_force(force) : 0;
    if (code == -ENOTSUP) return fail(ENOTSUP, "this CPU, or this build, has no %s", force);
    if (code < 0)
        return fail(CXLKV_E_ARGUMENT, "no instruction set is called %s: serial, avx2, avx512, "
                    "avx512_bf16, amx, neon, neon_bf16 or auto", force);
    if (name) *name = kernels_current()->name;
    return 0;
}
