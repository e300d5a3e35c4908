/* What lies at a path: a pool is made there, opened, replaced or removed. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "format/superblock.h"
#include "pool/create.h"
#include "pool/host_state.h"
#include "region/device.h"
#include "region/region.h"
#include "region/stripes.h"

/* ---- on several devices: the superblock lies behind the label of the first ---- */

static int striped_create(cxlkv_pool *pool, const char *path, uint32_t flags) {
    members *all;
    if (pool->region.nodes)
        return fail(ENOTSUP, "%s: devices keep their memory where it is: leave out the nodes",
                    path);
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

static int striped_open(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose) {
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

static int striped_remove(const char *path) {
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

/* ---- at one path ---- */

/* Whether a superblock may be written there while we look: on a device, and in a file that begins
 * as before that, or as after. Of other files no byte is ours to lock. */
static bool is_written_in_place(int fd) {
    static const uint8_t nothing[8];
    uint8_t magic[sizeof(nothing)];
    struct stat status;
    if (fstat(fd, &status) < 0) return false;
    if (!S_ISREG(status.st_mode)) return S_ISCHR(status.st_mode);
    return pread(fd, magic, sizeof(magic), 0) == (ssize_t)sizeof(magic) &&
           (memcmp(magic, nothing, sizeof(magic)) == 0 || memcmp(magic, "CXLKVPOL", 8) == 0);
}

/* Who opens such a region waits until nobody joins or makes a pool on it. */
static int open_region(const char *path, int flags, int *fd) {
    struct stat status;
    *fd = open(path, flags | O_CLOEXEC);
    if (*fd < 0 && errno == ENXIO && stat(path, &status) == 0 && S_ISCHR(status.st_mode))
        return device_refused("/sys", path, status.st_rdev);
    if (*fd < 0)
        return fail(errno, "%s: cannot open: %s%s", path, strerror(errno), remedy_of(errno));
    if (flags != O_RDWR || !is_written_in_place(*fd)) return 0;
    int code = lock_byte(*fd, ATTACH_BYTE, true, true);
    if (code == 0) return 0;
    close(*fd);
    *fd = -1;
    return byte_lock_error(code, path);
}

static int refuse_place(const char *path) {
    return fail(CXLKV_E_POOL_EXISTS, "%s is neither a regular file nor a dax device", path);
}

/* As what_lies_at(). A device that was never used holds zeros, as does one whose pool was removed,
 * and a file that is given to be a pool's; any other file is somebody's, whatever it holds. */
static int what_lies_in(int fd, const char *path, bool in_place) {
    static const uint8_t nothing[SUPERBLOCK_BYTES];
    uint8_t bytes[SUPERBLOCK_BYTES] = "";
    struct stat status;
    device_facts device;
    bool is_file = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    if (!is_file && !device_of(fd, &device)) return refuse_place(path);
    if (is_file && in_place && status.st_size < SUPERBLOCK_BYTES)
        return fail(ENOSPC, "%s has %ld bytes: a pool in place takes the size that its file has, "
                    "so give it one before (fallocate -l)", path, (long)status.st_size);
    bool in_page = in_place || !is_file;
    bool whole = region_read(fd, 0, bytes, in_page ? sizeof(bytes) : 8);
    if (in_page && !whole)
        return fail(CXLKV_E_POISON, "%s: its first bytes cannot be read", path);
    if (whole && (memcmp(bytes, "CXLKVPOL", 8) == 0 || stripes_is_label(bytes))) return 1;
    return in_page && memcmp(bytes, nothing, sizeof(bytes)) == 0 ? 0 : 2;
}

/* What lies at path, if anything: 0 nothing, 1 a pool or a part of one, 2 something else, or an
 * error. */
static int what_lies_at(const char *path, bool in_place) {
    struct stat status;
    int fd;
    if (stat(path, &status) < 0)
        return errno == ENOENT ? 0 : fail(errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode) && !S_ISCHR(status.st_mode)) return refuse_place(path);
    int code = open_region(path, O_RDONLY | O_NONBLOCK, &fd);
    if (code < 0) return code;
    code = what_lies_in(fd, path, in_place);
    close(fd);
    return code;
}

static int refuse_existing(const char *path, int what) {
    if (what == 1)
        return fail(CXLKV_E_POOL_EXISTS,
                    "%s is a pool already, or a part of one, and stays as it is: open it, remove "
                    "it first (cxlkv pool remove %s), or have it replaced with all that it holds "
                    "(replace=True, cxlkv pool create --replace)", path, path);
    return fail(CXLKV_E_POOL_EXISTS,
                "%s exists and is not a pool: it is not overwritten unless force=True (cxlkv pool "
                "create --force)", path);
}

/* A pool goes by a word of its own: whoever forces over something that is in the way may not know
 * that prefixes are published there. */
static bool may_overwrite(int what, uint32_t flags) {
    return what == 0 || flags & (what == 1 ? CXLKV_CREATE_REPLACE : CXLKV_CREATE_FORCE);
}

/* Unlocked by name: a child that was forked meanwhile has the file open, too. */
void close_region(int fd) {
    unlock_byte(fd, ATTACH_BYTE);
    unlock_byte(fd, USE_BYTE);
    close(fd);
}

/* Reads the superblock through the file, not the mapping: a short file is an error, no SIGBUS. */
static int open_checked(enum superblock_purpose purpose, const char *path, int *fd,
                        pool_facts *facts) {
    uint8_t bytes[SUPERBLOCK_BYTES];
    uint64_t region_bytes;
    int code = open_region(path, O_RDWR, fd);
    if (code < 0) return code;
    code = region_size(*fd, path, &region_bytes);
    if (code == 0 && !region_read(*fd, 0, bytes, sizeof(bytes)))
        code = fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool: %lu bytes, and its first %d "
                    "cannot be read", path, region_bytes, SUPERBLOCK_BYTES);
    if (code == 0) code = superblock_read(purpose, bytes, region_bytes, path, facts);
    if (code < 0) {
        close_region(*fd);
        *fd = -1;
    }
    return code;
}

int open_mapped(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose) {
    pool_facts facts;
    if (stripes_path(path)) return striped_open(pool, path, purpose);
    int code = open_checked(purpose, path, &pool->region.fd, &facts);
    if (code < 0) return code;
    pool_learn(pool, &facts);
    return region_map_file(&pool->region, pool->geometry.region_bytes);
}

/* Its host state stays, as the identity cannot be trusted: `cxlkv pool gc` finds that. */
static int remove_damaged(const char *path, bool in_place) {
    int fd, code = open_region(path, O_RDWR, &fd);
    if (code < 0) return code;
    code = byte_is_free(fd, USE_BYTE) ? region_discard(fd, path, in_place) : busy_error(path);
    close_region(fd);
    return code;
}

static int remove_at(const char *path, bool in_place) {
    pool_facts facts;
    int fd, code = open_checked(SUPERBLOCK_USE, path, &fd, &facts);
    /* A damaged pool may go as well; something that never was one may not. */
    if (code == -CXLKV_E_CORRUPT || code == -CXLKV_E_TRUNCATED || code == -CXLKV_E_VERSION ||
        code == -CXLKV_E_GEOMETRY)
        return remove_damaged(path, in_place);
    if (code < 0) return code;
    code = lock_byte(fd, ATTACH_BYTE, true, true);
    if (code < 0) code = byte_lock_error(code, path);
    if (code == 0 && lock_byte(fd, USE_BYTE, true, false) < 0) code = busy_error(path);
    if (code == 0) code = region_discard(fd, path, in_place);
    if (code == 0) host_remove_states(&facts, fd);
    close_region(fd);
    return code;
}

/* link() fails where a file is, rename() replaces it: both show the finished pool at once. */
static int file_into_place(const char *made, const char *path, bool over) {
    if (over) {
        if (rename(made, path) == 0) return 0;
    } else if (link(made, path) == 0) {
        unlink(made);
        return 0;
    }
    int code = errno;
    unlink(made);
    if (code == EEXIST) return refuse_existing(path, what_lies_at(path, false));
    return fail(code, "%s: cannot be put in place: %s", path, strerror(code));
}

/* On a device, or in a file that keeps its size: what was there is wiped first, and the superblock
 * comes last, so that a creation that is cut short leaves no pool. */
static int create_in_place(cxlkv_pool *pool, const char *path, uint32_t flags) {
    device_facts facts;
    uint64_t bytes = pool->geometry.region_bytes;
    int code = open_region(path, O_RDWR, &pool->region.fd);
    if (code == 0) code = region_facts(pool->region.fd, path, &facts);
    if (code < 0) return code;
    if (bytes > facts.bytes)
        return fail(ENOSPC, "%s has %lu MiB, %lu MiB wanted: ask for less", path,
                    facts.bytes >> 20, bytes >> 20);
    /* Held already, but where a file held something else when it was opened. */
    if (lock_byte(pool->region.fd, ATTACH_BYTE, true, false) < 0) return busy_error(path);
    int what = what_lies_in(pool->region.fd, path, true);
    if (what < 0) return what;
    if (!may_overwrite(what, flags)) return refuse_existing(path, what);
    if (!byte_is_free(pool->region.fd, USE_BYTE)) return busy_error(path);
    if (!device_of(pool->region.fd, &facts)) code = region_fill_holes(pool->region.fd, bytes, path);
    if (code == 0 && what != 0) code = device_wipe(pool->region.fd, &facts, path);
    if (code == 0) code = region_map_file(&pool->region, pool->geometry.region_bytes);
    return code < 0 ? code : pool_format(pool);
}

/* Refuses while somebody uses it. A part of a striped pool is none that could be removed. */
static int remove_old(const char *path, bool in_place) {
    int fd, code = remove_at(path, in_place);
    if (code != -CXLKV_E_NOT_A_POOL) return code == -CXLKV_E_BUSY ? code : 0;
    code = open_region(path, O_RDONLY | O_NONBLOCK, &fd);
    if (code < 0) return code;
    code = byte_is_free(fd, USE_BYTE) ? 0 : busy_error(path);
    close(fd);
    return code;
}

int create_region(cxlkv_pool *pool, const char *path, uint32_t flags) {
    if (!path) {
        int code = region_map_anonymous(&pool->region, pool->geometry.region_bytes);
        return code < 0 ? code : pool_format(pool);
    }
    if (stripes_path(path)) return striped_create(pool, path, flags);
    struct stat status;
    pool->in_place |= stat(path, &status) == 0 && S_ISCHR(status.st_mode);
    int what = what_lies_at(path, pool->in_place);
    if (what < 0) return what;
    if (!may_overwrite(what, flags)) return refuse_existing(path, what);
    if (pool->in_place && pool->region.nodes)
        return fail(ENOTSUP, "%s: a device, or a file that exists, keeps its memory where it is: "
                    "leave out the nodes", path);
    int code = what == 1 ? remove_old(path, pool->in_place) : 0;
    if (code < 0) return code;
    if (pool->in_place) return create_in_place(pool, path, flags);
    char made[4096];
    code = region_create_file(&pool->region, pool->geometry.region_bytes, path, made,
                              sizeof(made));
    if (code < 0) return code;
    code = pool_format(pool);
    if (code == 0) return file_into_place(made, path, what != 0);
    unlink(made);
    return code;
}

int cxlkv_pool_remove(const char *path) {
    return stripes_path(path) ? striped_remove(path) : remove_at(path, false);
}
