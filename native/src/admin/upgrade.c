/* The format's version: what a pool says of it, and a pool of the version before made the present
 * one, where it lies.
 *
 * All that version 5 has stays where it was, but the nonce of its host state, which nobody uses.
 * What is new lies on a line that version 5 does not look at, so it is written first; then the
 * version, in one store. Before that store the pool is a whole version 5, after it a whole version
 * 6: whoever is stopped in between begins again. */
#include "base/flush.h"
#include "base/guard.h"
#include "coherence/fences.h"
#include "coherence/hosts.h"
#include "format/geometry.h"
#include "format/superblock.h"
#include "host/locks.h"
#include "pool/create.h"
#include "region/region.h"

/* ---- has everybody left? ---- */

static void no_pause(void *context) { (void)context; }

static bool nobody_beats(void *context, uint32_t host) {
    (void)context;
    (void)host;
    return true; /* a fence that is half made stays so: nobody is waited for */
}

static int host_has_left(const hosts *h, uint32_t host, const char *path) {
    host_name name;
    host_fence fence = {0};
    if (!hosts_name(h, host, &name))
        return fail(CXLKV_E_CORRUPT, "%s: the name line of host %u is damaged: mend it with the "
                    "release that made the pool, `CXLKV_HOST=M cxlkv pool fence %s %u "
                    "--confirmed-off`", path, host, path, host);
    if (name.status != HOST_LIVE) return 0;
    int code = hosts_fence_of(h, host, name.epoch, &fence);
    if (code < 0 || fence.off) return code;
    return fail(CXLKV_E_BUSY, "%s: host %u uses it, or died so. Close it there; if it died, open "
                "and close it there with the release that made the pool; if that machine is surely "
                "off: `CXLKV_HOST=M cxlkv pool fence %s %u --confirmed-off`, with that release",
                path, host, path, host);
}

static int hosts_have_left(const cxlkv_pool *pool) {
    hosts h = {.area = hosts_area_of(pool->region.base, &pool->sharing, &pool->geometry),
               .self = NO_HOST, .pause = no_pause, .silent = nobody_beats,
               .mode = flush_supported() ? VISIBILITY_STRICT : VISIBILITY_COHERENT};
    int code = 0;
    for (uint32_t host = 0; code == 0 && host < h.area.host_count; host++)
        code = host_has_left(&h, host, pool->path);
    return code;
}

/* ---- the upgrade ---- */

static int upgrade_mapped(cxlkv_pool *pool) {
    const superblock *block = (const superblock *)pool->region.base;
    int version = (int)block->version;
    int code = version == FORMAT_VERSION ? 0 : hosts_have_left(pool);
    if (code < 0) return code;
    if (version != FORMAT_VERSION) superblock_upgrade(pool->region.base);
    return version;
}

static int open_unused(cxlkv_pool *pool, const char *path) {
    int code = open_mapped(pool, path, SUPERBLOCK_UPGRADE);
    if (code < 0) return code;
    code = lock_byte(pool->region.fd, ATTACH_BYTE, true, true);
    if (code < 0) return byte_lock_error(code, path);
    return lock_byte(pool->region.fd, USE_BYTE, true, false) < 0 ? busy_error(path) : 0;
}

int cxlkv_pool_upgrade(const char *path) {
    cxlkv_pool *pool = calloc(1, sizeof(*pool)); /* no pool that is open: only where one lies */
    if (!pool) return fail(ENOMEM, "no memory to upgrade %s", path);
    pool->region.fd = -1;
    pool->path = strdup(path);
    int code = pool->path ? guard_install() : fail(ENOMEM, "no memory to upgrade %s", path);
    if (code == 0) code = open_unused(pool, path);
    if (code == 0)
        code = GUARDED(upgrade_mapped(pool),
                       fail(CXLKV_E_POISON, "%s: bus error at its first bytes", path));
    if (pool->region.base) region_unmap(&pool->region);
    if (pool->region.fd >= 0) close_region(pool->region.fd);
    free(pool->path);
    free(pool);
    return code;
}
