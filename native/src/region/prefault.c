/* All of a pool's memory brought into place before it is used: a page of memory that is touched for
 * the first time is zeroed then, and mapped, which takes longer than to copy it. */
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>

#include "region/nodes.h"
#include "region/prefault.h"

#ifndef MADV_POPULATE_READ /* Linux 5.14; older kernels refuse them */
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE /* Linux 6.1 */
#define MADV_COLLAPSE 25
#endif

/* Whether a page that is written to here stays in memory: on a disk all would be written out. */
static bool is_memory(const region *of) {
    struct statfs system;
    bool is_dax = strcmp(of->page_kind, "devdax") == 0 || strcmp(of->page_kind, "fsdax") == 0;
    if (is_dax) return true;
    if (fstatfs(of->fd, &system) < 0) return false;
    return system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC;
}

static int populate(const region *of, uint8_t *from, uint64_t bytes) {
    if (is_memory(of) && madvise(from, bytes, MADV_POPULATE_WRITE) == 0) return 0;
    /* Memory of other hosts is mapped for reading only. */
    if (madvise(from, bytes, MADV_POPULATE_READ) == 0) return 0;
    return -errno;
}

static bool is_collapsed(uint8_t *at) {
    return madvise(at, AREA_ALIGNMENT, MADV_COLLAPSE) == 0;
}

/* Whatever the kernel's setting for shared memory is; what was written stays. A huge page lies on
 * one node. Where none can be had the small ones stay; a hole must have a small one first. False:
 * there are none here. */
static bool collapse(const region *of, uint64_t from, uint64_t upto) {
    struct statfs system;
    if (fstatfs(of->fd, &system) < 0 || system.f_type != TMPFS_MAGIC || nodes_alternate(of))
        return false;
    from = from / AREA_ALIGNMENT * AREA_ALIGNMENT;
    upto = min_u64(align_up(upto, AREA_ALIGNMENT),
                   of->mapped_bytes / AREA_ALIGNMENT * AREA_ALIGNMENT);
    for (uint8_t *at = of->base + from; at < of->base + upto; at += AREA_ALIGNMENT)
        if (!is_collapsed(at) && errno == EINVAL)
            if (populate(of, at, of->unit_bytes) < 0 || (!is_collapsed(at) && errno == EINVAL))
                return false; /* this kernel makes none, or not here */
    return true;
}

int64_t region_prefault(const region *of, uint64_t offset, uint64_t bytes, uint64_t end,
                        uint32_t huge) {
    int64_t code = 0;
    uint64_t unit = of->unit_bytes, from = min_u64(offset, end) / unit * unit;
    uint64_t upto = min_u64(align_up(min_u64(from + min_u64(bytes, end), end), unit),
                            of->mapped_bytes);
    bool none = upto > from && huge && !collapse(of, from, upto);
    if (huge == PREFAULT_HUGE_ONLY) return (int64_t)(none ? end : min_u64(upto, end));
    if (upto > from) code = populate(of, of->base + from, upto - from);
    if (code == -EINVAL)
        return fail(ENOTSUP, "this kernel cannot bring memory into place ahead of its use: Linux "
                    "5.14 or later can");
    if (code < 0 && code != -EHWPOISON) /* the first use tells of bad memory */
        return fail((int)-code, "bytes %lu to %lu of the pool cannot be brought into memory: %s",
                    from, upto, strerror((int)-code));
    return (int64_t)min_u64(upto, end);
}
