/* Which instruction set runs: asked of the CPU once, or forced by a test or an operator. */
#include "kernels.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"

/* NULL until first use. The tables are constants, so a relaxed load of the pointer is enough: no
 * store to them has to be seen. */
static _Atomic(const kernels *) current;

static bool has_avx2(void) {
#if defined(__x86_64__)
    return cpu_has_avx2() && cpu_has(bit_FMA | bit_F16C);
#else
    return false;
#endif
}

static const kernels *best(void) {
#if defined(__x86_64__)
    if (has_avx2())
        return &kernels_avx2;
#endif
    return &kernels_serial;
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
    const kernels *table;
    if (!strcmp(name, "auto")) {
        table = best();
    } else if (!strcmp(name, "serial")) {
        table = &kernels_serial;
    } else if (!strcmp(name, "avx2")) {
        if (!has_avx2())
            return -ENOTSUP;
        table = best();
    } else {
        return -EINVAL;
    }
    atomic_store_explicit(&current, table, memory_order_relaxed);
    return 0;
}
