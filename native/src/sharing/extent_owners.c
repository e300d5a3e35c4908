/* Which extents are this host's: read from what all hosts claim, and marked in the host state. */
#include <fcntl.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/guard.h"
#include "coherence/claims.h"
#include "coherence/host_lines.h"
#include "coherence/lost_lines.h"
#include "format/mapping.h"
#include "format/poison.h"
#include "format/runs.h"
#include "host/locks.h"
#include "host/rebuild.h"
#include "pages/borrow.h"
#include "pages/log_writer.h"
#include "sharing/extent_owners.h"

static void hand_over(const cxlkv_pool *pool, uint32_t extent, bool gives) {
    const cxlkv_geometry *g = &pool->geometry;
    hosts_hand_over(pool->region.base + g->descriptors_offset + extent * g->descriptors_bytes,
                    g->descriptors_bytes, gives);
    hosts_hand_over(pool->region.base + g->extents_offset + extent * g->extent_bytes,
                    g->extent_bytes, gives);
}

static void set_ours(cxlkv_pool *pool, uint32_t extent, bool ours) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS;
    for (uint32_t i = 0; i < runs; i++) pool->runs[first_run_of(pool, extent) + i].ours = ours;
    pool->host->extents_version++;
}

/* What two hosts claim is nobody's; where a name is damaged, nothing is known at all. */
static bool is_known(const extent_owner *owners, uint32_t count) {
    for (uint32_t extent = 0; extent < count; extent++)
        if (owners[extent].version || owners[extent].takeable) return true;
    return false;
}

static void unlist(cxlkv_pool *pool, uint32_t extent) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS;
    for (uint32_t i = 0; i < runs; i++) run_unlist(pool, first_run_of(pool, extent) + i);
}

static uint64_t *settled_word(const cxlkv_pool *pool) {
    return (uint64_t *)hosts_line(&pool->hosts, pool->hosts.self, COMMIT_LINE) + 1;
}

int settled_set(const cxlkv_pool *pool, uint64_t boot) {
    GUARD_BEGIN(fault) {
        flush_store_word(settled_word(pool), boot);
        line_keep(&pool->hosts, FLUSH_COMMIT, settled_word(pool), sizeof(boot));
    } GUARD_END(fault, return hosts_lost(&pool->hosts, &fault))
    return 0;
}

uint64_t settled_get(const cxlkv_pool *pool) {
    uint64_t boot;
    return word_try(&pool->hosts, settled_word(pool), &boot) ? boot : 0;
}

/* 0 when it cannot be told. */
static uint64_t this_boot(void) {
    uint64_t words[4] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, words, sizeof(words));
    close(fd);
    return got == sizeof(words) ? crc32c(0, words, sizeof(words)) + 1ull : 0;
}

/* One that comes or goes. Then extents_protect(), and welcome() those that came. */
static void change(cxlkv_pool *pool, uint32_t extent, bool ours, bool settled) {
    uint32_t slots = pool->geometry.slab_slots;
    if (pool->host->ready && !ours) unlist(pool, extent);
    for (uint32_t page = extent * slots; ours && page < (extent + 1) * slots; page++) {
        page_info *info = &pool->pages[page];
        page_unpublish(pool, page); /* what its former owner published is found again */
        info->shown = 1;
    }
    if (ours && !settled) hand_over(pool, extent, false); /* V8 */
    set_ours(pool, extent, ours);
}

/* While the allocator is at work; an arriving host builds all of it afterwards. */
static void welcome(cxlkv_pool *pool, uint32_t extent) {
    uint32_t slots = pool->geometry.slab_slots;
    borrow_own(pool, extent * slots, slots);
    if (pool->host->ready) host_rebuild_runs(pool, first_run_of(pool, extent), slots / RUN_SLOTS);
}

/* Whoever died while an extent changed hands may have marked some of its runs only. */
static bool is_marked(const cxlkv_pool *pool, uint32_t extent, bool ours) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS, first = first_run_of(pool, extent);
    for (uint32_t i = 0; i < runs; i++)
        if (pool->runs[first + i].ours != ours) return false;
    return true;
}

/* Under the host lock, or while no other process has the state. */
static void refresh(cxlkv_pool *pool, extent_owner *owners, bool settled) {
    uint32_t count = pool->geometry.extent_count;
    for (uint32_t extent = 0; extent < count; extent++) {
        bool ours = owners[extent].host == pool->hosts.self;
        bool changes = !is_marked(pool, extent, ours);
        if (changes) change(pool, extent, ours, settled);
        owners[extent].takeable = changes && ours; /* from here on: it came */
    }
    extents_protect(pool);
    if (pool->host->ready) forgotten_read(pool);
    for (uint32_t extent = 0; extent < count; extent++)
        if (owners[extent].takeable) welcome(pool, extent);
    forgotten_drop(pool);
}

int extents_refresh(cxlkv_pool *pool, const hosts *turn) {
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * sizeof(*owners));
    if (!owners) return fail(ENOMEM, "no memory for a table of %u extents", count);
    uint32_t doubted = __atomic_load_n(&pool->host->owners_doubted, __ATOMIC_SEQ_CST);
    int code = hosts_owners(turn, owners);
    if (code == -CXLKV_E_CORRUPT && is_known(owners, count)) code = 0; /* check() tells */
    /* Where this machine had them before, what it has cached of them is its own. */
    bool arrives = !pool->host->ready;
    uint64_t boot = code == 0 ? this_boot() : 0;
    if (code == 0 && !arrives) code = host_lock(pool);
    if (code == 0) {
        GUARD_BEGIN(fault) {
            refresh(pool, owners,
                    arrives && boot && settled_get(pool) == boot);
            settled_set(pool, boot);
            __atomic_store_n(&pool->host->owners_sure, doubted, __ATOMIC_RELAXED);
        } GUARD_END(fault, code = poison_error_locked(pool, &fault))
        if (!arrives) host_unlock(pool);
    }
    free(owners);
    return code;
}

static int take_in(cxlkv_pool *pool, const uint32_t *extents, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) change(pool, extents[i], true, false);
    extents_protect(pool);
    forgotten_read(pool);
    for (uint32_t i = 0; i < count; i++) welcome(pool, extents[i]);
    forgotten_drop(pool);
    return 0;
}

int extents_take_in(cxlkv_pool *pool, const uint32_t *extents, uint32_t count) {
    return HOST_LOCKED(pool, take_in(pool, extents, count));
}

void extent_leave(cxlkv_pool *pool, uint32_t extent) {
    unlist(pool, extent);
    set_ours(pool, extent, false);
    hand_over(pool, extent, true); /* V8 */
}
