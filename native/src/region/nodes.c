/* Which NUMA nodes a pool's pages lie on: bound before they are there, and read back.
 *
 * The policy is the file's, in the kernel (tmpfs, memfd and hugetlbfs keep one for each inode), not
 * the mapping's and not the pool's format: all processes see it, and whoever brings a page back
 * from swap obeys it. So a process that opens the pool asks the kernel what was wanted. */
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/guard.h"
#include "region/nodes.h"

#ifndef MPOL_WEIGHTED_INTERLEAVE /* Linux 6.9 */
#define MPOL_WEIGHTED_INTERLEAVE 6
#endif

enum { MASK_WORDS = 16, LOOK_BATCH = 512 };
_Static_assert(sizeof(unsigned long) == sizeof(uint64_t), "a mask's word has all our nodes");

static const char *placing_remedy(int code) {
    if (code == EPERM)
        return ". A container forbids it: docker run --cap-add SYS_NICE";
    if (code == EINVAL)
        return ". One of them has no memory, or this process's cpuset leaves it out: see "
               "/sys/devices/system/node/has_memory, and Mems_allowed_list in /proc/self/status";
    if (code == ENOSYS) return ". This kernel has no NUMA support";
    return "";
}

static int bind_by(const region *to, int policy) {
    unsigned long mask[MASK_WORDS] = {to->nodes};
    long code = syscall(SYS_mbind, to->base, to->mapped_bytes, policy | MPOL_F_STATIC_NODES,
                        mask, (unsigned long)(MASK_WORDS * 64 + 1), MPOL_MF_MOVE);
    return code < 0 ? errno : 0;
}

int nodes_bind(const region *to) {
    bool several = (to->nodes & (to->nodes - 1)) != 0;
    int code = bind_by(to, several ? MPOL_WEIGHTED_INTERLEAVE : MPOL_BIND);
    if (code == EINVAL && several) code = bind_by(to, MPOL_INTERLEAVE);
    if (code == 0) return 0;
    return fail(code, "cannot bind memory to the nodes of mask 0x%lx: %s%s", to->nodes,
                strerror(code), placing_remedy(code));
}

/* ---- reading back ---- */

static int look_at_policy(const region *of, cxlkv_placed *out) {
    unsigned long mask[MASK_WORDS] = {0};
    int policy = 0;
    if (syscall(SYS_get_mempolicy, &policy, mask, (unsigned long)(MASK_WORDS * 64), of->base,
                MPOL_F_ADDR) < 0)
        return fail(errno, "cannot ask which nodes the pool is bound to: %s%s", strerror(errno),
                    placing_remedy(errno));
    out->policy = (uint32_t)policy & ~(uint32_t)MPOL_MODE_FLAGS;
    if (out->policy != MPOL_DEFAULT) out->wanted_nodes = mask[0];
    return 0;
}

/* In a function of its own: a jump out of it leaves no variable of its caller in doubt. */
__attribute__((noinline))
static bool touch_guarded(const uint8_t *at) {
    return GUARDED(((void)*(const volatile uint8_t *)at, true), false);
}

/* The kernel tells the node of what this process has mapped, so a page is touched first. One that
 * was never written stays away, as reading it would take memory, or read a disk; but a pool that
 * was bound, and one of huge pages, was reserved whole, and mincore() does not show that. */
static bool bring_in(bool reserved, uint8_t *at) {
    unsigned char there = 1;
    if (!reserved && mincore(at, 1, &there) < 0) return false;
    return (there & 1) && touch_guarded(at);
}

static int count_batch(void **pages, uint32_t count, cxlkv_placed *out) {
    int nodes[LOOK_BATCH];
    if (count == 0) return 0;
    if (syscall(SYS_move_pages, 0, (unsigned long)count, pages, NULL, nodes, 0) < 0)
        return fail(errno, "cannot ask on which nodes the pool's pages lie: %s%s", strerror(errno),
                    placing_remedy(errno));
    for (uint32_t i = 0; i < count; i++) {
        if (nodes[i] < 0 || nodes[i] >= CXLKV_NODES_MAX) {
            out->pages_unseen++;
            continue;
        }
        out->pages_seen++;
        out->pages_on[nodes[i]]++;
        if (out->wanted_nodes && !(out->wanted_nodes >> nodes[i] & 1)) out->pages_elsewhere++;
    }
    return 0;
}

/* One of each stretch of equal length, not at the same place of each: a stride could meet the same
 * node of an interleaving always. */
static uint64_t sample_at(uint64_t i, uint64_t samples, uint64_t count) {
    uint64_t first = (uint64_t)((__uint128_t)i * count / samples);
    uint64_t end = (uint64_t)((__uint128_t)(i + 1) * count / samples);
    uint64_t mixed = (i + 1) * 0x9e3779b97f4a7c15u;
    return first + (mixed ^ mixed >> 29) % (end - first);
}

int nodes_read(const region *of, uint64_t pages_max, cxlkv_placed *out) {
    memset(out, 0, sizeof(*out));
    out->page_bytes = of->unit_bytes;
    uint64_t count = of->mapped_bytes / of->unit_bytes;
    uint64_t samples = pages_max && pages_max < count ? pages_max : count;
    int code = look_at_policy(of, out);
    if (code == 0) code = guard_install();
    if (strstr(of->page_kind, "dax")) { /* no node has them: they are not RAM */
        out->pages_unseen = samples;
        return code;
    }
    bool reserved = out->wanted_nodes || of->unit_bytes != 4096;
    void *pages[LOOK_BATCH];
    uint32_t batch = 0;
    for (uint64_t i = 0; code == 0 && i < samples; i++) {
        uint8_t *at = of->base + sample_at(i, samples, count) * of->unit_bytes;
        if (bring_in(reserved, at)) pages[batch++] = at;
        else out->pages_unseen++;
        if (batch == LOOK_BATCH || i + 1 == samples) {
            code = count_batch(pages, batch, out);
            batch = 0;
        }
    }
    return code;
}

bool nodes_alternate(const region *of) {
    cxlkv_placed found = {0};
    return look_at_policy(of, &found) == 0 && (found.wanted_nodes & (found.wanted_nodes - 1));
}

int nodes_verify(const region *of) {
    cxlkv_placed found;
    int code = nodes_read(of, 0, &found);
    if (code < 0) return code;
    if (found.wanted_nodes != of->nodes || found.pages_seen == 0)
        return fail(ENOTSUP, "the kernel did not bind the pool: nodes 0x%lx wanted, 0x%lx bound, "
                    "%lu pages seen", of->nodes, found.wanted_nodes, found.pages_seen);
    if (found.pages_elsewhere == 0) return 0;
    return fail(ENOMEM, "%lu of %lu pages lie on other nodes than those of mask 0x%lx, which ran "
                "out of memory. Ask for less, or free memory there", found.pages_elsewhere,
                found.pages_seen, of->nodes);
}
