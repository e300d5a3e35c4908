/* Which instruction set runs: asked of the CPU once, or forced by a test or an operator. */
#include "kernels.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"

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

static const kernels *best(void) {
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
