/* All of a pool's memory brought into place before it is used: a page of memory that is touched for
 * the first time is zeroed then, and mapped, which takes longer than to copy it. */
#include <errno.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statfs.h>

#include "pool/pool.h"

#ifndef MADV_POPULATE_READ /* Linux 5.14; older kernels refuse them */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

/* Whether a page that is written to here stays in memory: on a disk all would be written out. */
static bool is_memory(const cxlkv_pool *pool) {
    struct statfs system;
    bool is_dax = strcmp(pool->page_kind, "devdax") == 0 || strcmp(pool->page_kind, "fsdax") == 0;
    if (is_dax) return true;
    if (fstatfs(pool->fd, &system) < 0) return false;
    return system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC;
}

static int populate(const cxlkv_pool *pool, uint8_t *from, uint64_t bytes) {
    if (is_memory(pool) && madvise(from, bytes, MADV_POPULATE_WRITE) == 0) return 0;
    /* Memory of other hosts is mapped for reading only. */
    if (madvise(from, bytes, MADV_POPULATE_READ) == 0) return 0;
    return -errno;
}

int64_t cxlkv_pool_prefault(cxlkv_pool *pool, uint64_t offset, uint64_t bytes) {
    int64_t code = pool_enter(pool);
    if (code < 0) return code;
    uint64_t end = pool->geometry.region_bytes, unit = pool->unit_bytes;
    uint64_t from = min_u64(offset, end) / unit * unit;
    uint64_t upto = min_u64(align_up(min_u64(from + min_u64(bytes, end), end), unit),
                            pool->mapped_bytes);
    if (upto > from) code = populate(pool, pool->base + from, upto - from);
    if (code == -EINVAL) code = fail(ENOTSUP, "this kernel cannot bring memory into place ahead of "
                                     "its use: Linux 5.14 or later can");
    else if (code < 0 && code != -EHWPOISON) /* bad memory is told by who uses it */
        code = fail((int)-code, "bytes %lu to %lu of the pool cannot be brought into memory: %s",
                    from, upto, strerror((int)-code));
    pool_leave(pool);
    return code < 0 && code != -EHWPOISON ? code : (int64_t)min_u64(upto, end);
}
