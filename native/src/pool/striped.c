/* A pool on several devices: its superblock lies behind the label of the first. */
#include <string.h>

#include "pool/pool.h"

int striped_create(cxlkv_pool *pool, const char *path, uint32_t flags) {
    members *all;
    if (pool->region.nodes)
        return fail(ENOTSUP, "%s: devices lie where they lie: leave the nodes away", path);
    int code = stripes_open(path, true, &all);
    if (code < 0) return code;
    code = stripes_make(all, pool->geometry.region_bytes, flags, &pool->region);
    if (code == 0) code = pool_format(pool);
    if (code == 0) code = stripes_label(all, pool->identity); /* until here there is no pool */
    if (code < 0) stripes_close(all); /* the caller unmaps */
    else stripes_keep(all, &pool->region);
    return code;
}

/* Of the pool that the labels name. */
static int read_superblock(enum superblock_purpose purpose, const char *path, members *all,
                           pool_facts *facts) {
    uint8_t bytes[SUPERBLOCK_BYTES], named[16];
    int code = stripes_identity(all, named);
    if (code < 0) return code;
    if (!stripes_read(all, 0, bytes, sizeof(bytes)))
        return fail(CXLKV_E_NOT_A_POOL, "%s: its superblock cannot be read", path);
    code = superblock_read(purpose, bytes, stripes_bytes(all), path, facts);
    if (code == 0 && memcmp(facts->identity, named, 16) != 0)
        code = fail(CXLKV_E_CORRUPT, "%s: labels and superblock are of two pools", path);
    return code < 0 ? code : stripes_fit(all, facts->geometry.region_bytes);
}

int striped_open(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose) {
    members *all;
    pool_facts facts;
    int code = stripes_open(path, true, &all);
    if (code < 0) return code;
    code = read_superblock(purpose, path, all, &facts);
    if (code == 0) pool_learn(pool, &facts);
    if (code == 0) code = stripes_map(all, pool->geometry.region_bytes, &pool->region);
    if (code < 0) stripes_close(all);
    else stripes_keep(all, &pool->region);
    return code;
}

int striped_remove(const char *path) {
    members *all;
    pool_facts facts;
    int code = stripes_open(path, true, &all);
    if (code < 0) return code;
    code = read_superblock(SUPERBLOCK_USE, path, all, &facts);
    /* They may go as well; the host state stays for gc. */
    bool damaged = code == -CXLKV_E_CORRUPT || code == -CXLKV_E_VERSION;
    if (code == 0 || damaged) code = stripes_wipe(all);
    if (code == 0 && !damaged) host_remove_states(&facts, stripes_fd(all));
    stripes_close(all);
    return code;
}

int striped_inspect(const char *path, members **found) {
    pool_facts facts;
    int code = stripes_open(path, false, found);
    if (code < 0) return code;
    code = read_superblock(SUPERBLOCK_INSPECT, path, *found, &facts);
    if (code < 0) stripes_close(*found);
    return code;
}
