/* Several dax devices, or files of a fixed size, as one region: stripes in turn, at consecutive
 * addresses.
 *
 * Each member begins with a label: which one of how many it is, and of which pool. The pool's own
 * bytes follow, so its format knows nothing of stripes, and a member that is opened alone, or by a
 * build that knows no stripes, is no pool. Names of devices change from boot to boot: the labels
 * tell when they are given in another order. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "base/guard.h"
#include "region/device.h"
#include "region/region.h"
#include "region/stripes.h"

enum {
    MEMBERS_MAX = 8,
    MEMBER_PATH_BYTES = 512,
    STRIPES_MAX = 16384, /* a mapping each; vm.max_map_count is 65530 by default, for all */
    LABEL_VERSION = 1,
};
#define STRIPE_BYTES_MAX (1ull << 40)

typedef struct stripe_label {
    uint8_t magic[8];
    uint32_t version;
    uint32_t index, count;
    uint32_t reserved;
    uint64_t stripe_bytes;
    uint64_t data_offset;        /* where the member's first stripe begins */
    uint8_t identity[16];        /* the pool's */
    uint32_t crc;                /* of all bytes before it */
} stripe_label;

typedef struct member {
    int fd;
    char path[MEMBER_PATH_BYTES];
    device_facts facts;          /* of a file: its size, and units of 4096 */
    bool is_device;
    dev_t device;
    ino_t inode;
} member;

struct members {
    const char *path;            /* as it was given */
    uint32_t count;
    uint64_t unit_bytes;         /* the largest of any */
    uint64_t stripe_bytes, data_offset;
    member of[MEMBERS_MAX];
};

bool stripes_path(const char *path) { return strncmp(path, "dax:", 4) == 0; }

static void members_close(members *all, uint32_t from) {
    for (uint32_t i = from; i < all->count; i++) close(all->of[i].fd);
}

static int member_open(members *all, const char *name, size_t length, int flags) {
    struct stat status;
    member *m = &all->of[all->count];
    if (length == 0 || length >= MEMBER_PATH_BYTES)
        return fail(CXLKV_E_ARGUMENT, "%s: part %u is no path", all->path, all->count);
    memcpy(m->path, name, length);
    m->path[length] = 0;
    m->fd = open(m->path, flags | O_CLOEXEC | O_NONBLOCK);
    if (m->fd < 0 && errno == ENXIO && stat(m->path, &status) == 0 && S_ISCHR(status.st_mode))
        return device_refused("/sys", m->path, status.st_rdev);
    if (m->fd < 0 || fstat(m->fd, &status) < 0)
        return fail(errno, "%s: cannot open: %s%s", m->path, strerror(errno), remedy_of(errno));
    all->count++; /* from here on it is closed with the others */
    int code = region_facts(m->fd, m->path, &m->facts);
    if (code < 0) return code;
    m->is_device = S_ISCHR(status.st_mode);
    m->device = m->is_device ? status.st_rdev : status.st_dev;
    m->inode = m->is_device ? 0 : status.st_ino;
    if (m->facts.unit_bytes > all->unit_bytes) all->unit_bytes = m->facts.unit_bytes;
    for (member *other = all->of; other < m; other++)
        if (other->device == m->device && other->inode == m->inode &&
            other->is_device == m->is_device)
            return fail(CXLKV_E_ARGUMENT, "%s: %s is named twice", all->path, m->path);
    return 0;
}

static int members_open_as(members *all, const char *path, int flags) {
    memset(all, 0, sizeof(*all));
    all->path = path;
    int code = 0;
    for (const char *at = path + 4; code == 0; ) {
        size_t length = strcspn(at, "+");
        if (all->count == MEMBERS_MAX)
            code = fail(CXLKV_E_ARGUMENT, "%s: %d at most", path, MEMBERS_MAX);
        else code = member_open(all, at, length, flags);
        if (at[length] == 0) break;
        at += length + 1;
    }
    if (code == 0 && all->count < 2)
        code = fail(CXLKV_E_ARGUMENT, "%s: several are wanted, with a + between", path);
    if (code < 0) members_close(all, 0);
    return code;
}

/* ---- labels ---- */

static uint32_t label_crc(const stripe_label *label) {
    return crc32c(0, label, offsetof(stripe_label, crc));
}

int stripes_label(const members *all, const uint8_t identity[16]) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < all->count; i++) {
        uint8_t page[SUPERBLOCK_BYTES] = {0};
        stripe_label label = {.magic = "CXLKVST", .version = LABEL_VERSION, .index = i,
                              .count = all->count, .stripe_bytes = all->stripe_bytes,
                              .data_offset = all->data_offset};
        label.magic[7] = 'R';
        memcpy(label.identity, identity, sizeof(label.identity));
        label.crc = label_crc(&label);
        memcpy(page, &label, sizeof(label));
        code = device_write(all->of[i].fd, &all->of[i].facts, all->of[i].path, page);
    }
    return code;
}

static int wipe_labels(const members *all) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < all->count; i++)
        code = device_wipe(all->of[i].fd, &all->of[i].facts, all->of[i].path);
    return code;
}

bool stripes_is_label(const uint8_t *bytes) { return memcmp(bytes, "CXLKVSTR", 8) == 0; }

/* The member's label, checked by itself. */
static int read_own_label(const member *m, stripe_label *label) {
    if (m->facts.bytes < sizeof(*label) ||
        !device_read(m->fd, &m->facts, 0, label, sizeof(*label)))
        return fail(CXLKV_E_NOT_A_POOL, "%s: its first bytes cannot be read", m->path);
    if (!stripes_is_label(label->magic))
        return fail(CXLKV_E_NOT_A_POOL, "%s: no part of a striped pool lies there", m->path);
    if (label->crc != label_crc(label))
        return fail(CXLKV_E_CORRUPT, "%s: the label of its part of a pool is damaged", m->path);
    if (label->version != LABEL_VERSION)
        return fail(CXLKV_E_VERSION, "%s: its label has version %u, this build reads %u: open the "
                    "pool with the release that made it", m->path, label->version, LABEL_VERSION);
    return 0;
}

/* And against the first one's. */
static int read_label(const members *all, uint32_t i, const stripe_label *first,
                      stripe_label *label) {
    const member *m = &all->of[i];
    int code = read_own_label(m, label);
    if (code < 0) return code;
    if (memcmp(label->identity, first->identity, 16) != 0)
        return fail(CXLKV_E_GEOMETRY, "%s is a part of another pool than %s", m->path,
                    all->of[0].path);
    if (label->count != all->count || label->index != i)
        return fail(CXLKV_E_GEOMETRY, "%s: is part %u of %u of its pool, and was given as part %u "
                    "of %u: name all, in their order", m->path, label->index, label->count, i,
                    all->count);
    uint64_t stripe = label->stripe_bytes, offset = label->data_offset;
    bool sound = stripe >= AREA_ALIGNMENT && stripe <= STRIPE_BYTES_MAX &&
                 (stripe & (stripe - 1)) == 0 && offset >= AREA_ALIGNMENT && offset <= stripe &&
                 offset % m->facts.unit_bytes == 0 && stripe % m->facts.unit_bytes == 0 &&
                 stripe == first->stripe_bytes && offset == first->data_offset;
    return sound ? 0 : fail(CXLKV_E_CORRUPT, "%s: its label has stripes of %lu bytes from %lu on",
                            m->path, stripe, offset);
}

int stripes_identity(members *all, uint8_t identity[16]) {
    stripe_label first = {0}, label;
    int code = guard_install();
    if (code == 0 && all->of[0].facts.bytes >= sizeof(first) &&
        !device_read(all->of[0].fd, &all->of[0].facts, 0, &first, sizeof(first)))
        code = fail(CXLKV_E_NOT_A_POOL, "%s: its first bytes cannot be read", all->of[0].path);
    for (uint32_t i = 0; code == 0 && i < all->count; i++)
        code = read_label(all, i, &first, &label);
    if (code < 0) return code;
    all->stripe_bytes = first.stripe_bytes;
    all->data_offset = first.data_offset;
    memcpy(identity, first.identity, 16);
    return 0;
}

/* ---- the mapping ---- */

/* What all members together hold in such stripes. */
uint64_t stripes_bytes(const members *all) {
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < all->count; i++) {
        uint64_t bytes = all->of[i].facts.bytes;
        uint64_t stripes =
            bytes > all->data_offset ? (bytes - all->data_offset) / all->stripe_bytes : 0;
        least = min_u64(least, stripes);
    }
    return least * all->count * all->stripe_bytes;
}

static int map_members(const members *all, uint64_t bytes, region *to) {
    bytes = align_up(bytes, all->unit_bytes);
    uint8_t *base = map_aligned(bytes, all->data_offset, PROT_NONE);
    if (!base) return fail(errno, "no address space for %lu MiB", bytes >> 20);
    for (uint64_t at = 0, i = 0; at < bytes; at += all->stripe_bytes, i++) {
        uint64_t offset = all->data_offset + i / all->count * all->stripe_bytes;
        if (mmap(base + at, min_u64(all->stripe_bytes, bytes - at), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, all->of[i % all->count].fd, (off_t)offset) == MAP_FAILED) {
            int code = errno;
            munmap(base, bytes);
            return fail(code, "%s: cannot map stripe %lu: %s%s", all->path, i, strerror(code),
                        code == ENOMEM ? ". Raise the limit: sysctl vm.max_map_count" : "");
        }
    }
    to->base = base;
    to->mapped_bytes = bytes;
    to->unit_bytes = all->unit_bytes;
    to->page_kind = "devdax";
    for (uint32_t i = 0; i < all->count; i++)
        if (!all->of[i].is_device) to->page_kind = "4KiB";
    madvise(base, bytes, MADV_HUGEPAGE); /* advice: refused where there are none */
    return 0;
}

/* ---- what the pool asks for ---- */

static int check_free(const members *all, uint32_t flags) {
    static const uint8_t nothing[SUPERBLOCK_BYTES];
    for (uint32_t i = 0; i < all->count; i++) {
        const member *m = &all->of[i];
        uint8_t bytes[SUPERBLOCK_BYTES];
        if (!byte_is_free(m->fd, USE_BYTE)) return busy_error(m->path);
        if (m->facts.bytes < sizeof(bytes) ||
            !device_read(m->fd, &m->facts, 0, bytes, sizeof(bytes)))
            return fail(CXLKV_E_POISON, "%s: its first bytes cannot be read", m->path);
        bool part = stripes_is_label(bytes), pool = memcmp(bytes, "CXLKVPOL", 8) == 0;
        uint32_t wanted = part || pool ? CXLKV_CREATE_REPLACE : CXLKV_CREATE_FORCE;
        if (!(flags & wanted) && memcmp(bytes, nothing, sizeof(bytes)) != 0)
            return fail(CXLKV_E_POOL_EXISTS, "%s holds something (%s): it is not overwritten "
                        "unless %s=True", m->path,
                        part ? "a part of a pool, maybe this one: open it" :
                        pool ? "a pool" : "no pool", part || pool ? "replace" : "force");
    }
    return 0;
}

/* A part may be in use in another pool's name: each is locked as the first one is by its opener.
 * The mapping holds the open file, and so the lock, when the descriptor is closed. */
static int use_members(const members *all) {
    for (uint32_t i = 1; i < all->count; i++)
        if (lock_byte(all->of[i].fd, USE_BYTE, false, false) < 0)
            return busy_error(all->of[i].path);
    return 0;
}

int stripes_open(const char *path, bool writes, members **found) {
    members *all = malloc(sizeof(*all));
    if (!all) return fail(ENOMEM, "%s: no memory to open its parts", path);
    int code = members_open_as(all, path, writes ? O_RDWR : O_RDONLY);
    if (code < 0) {
        free(all);
        return code;
    }
    if (writes) code = lock_byte(all->of[0].fd, ATTACH_BYTE, true, true);
    if (code < 0) {
        stripes_close(all);
        return byte_lock_error(code, path);
    }
    *found = all;
    return 0;
}

void stripes_close(members *all) {
    members_close(all, 0);
    free(all);
}

int stripes_fd(const members *all) { return all->of[0].fd; }

int stripes_fit(const members *all, uint64_t bytes) {
    if (bytes / all->stripe_bytes <= STRIPES_MAX) return 0;
    return fail(CXLKV_E_CORRUPT, "%s: more than %d stripes", all->path, STRIPES_MAX);
}

int stripes_map(members *all, uint64_t bytes, region *to) {
    int code = use_members(all);
    return code < 0 ? code : map_members(all, bytes, to);
}

int stripes_make(members *all, uint64_t bytes, uint32_t flags, region *to) {
    /* 2 MiB while that makes few mappings: neighbours of the address space are parts of two files,
     * so the kernel joins none. 32 GiB have stripes of 2 MiB, 1 TiB of 64 MiB. */
    all->data_offset = all->unit_bytes > AREA_ALIGNMENT ? all->unit_bytes : AREA_ALIGNMENT;
    all->stripe_bytes = all->data_offset;
    while (bytes / all->stripe_bytes >= STRIPES_MAX) all->stripe_bytes *= 2;
    int code = check_free(all, flags);
    if (code == 0 && bytes > stripes_bytes(all))
        code = fail(ENOSPC, "%s: %lu MiB wanted, all together hold %lu MiB in stripes of %lu MiB "
                    "(each as much as the smallest): ask for less", all->path, bytes >> 20,
                    stripes_bytes(all) >> 20, all->stripe_bytes >> 20);
    if (code == 0) code = use_members(all);
    if (code == 0) code = wipe_labels(all);
    return code < 0 ? code : map_members(all, bytes, to);
}

void stripes_keep(members *all, region *to) {
    to->fd = all->of[0].fd;
    members_close(all, 1); /* the mapping holds them */
    free(all);
}

int stripes_wipe(const members *all) {
    return lock_byte(all->of[0].fd, USE_BYTE, true, false) < 0 ? busy_error(all->path)
                                                               : wipe_labels(all);
}

bool stripes_read(const members *all, uint64_t offset, void *to, size_t bytes) {
    for (uint8_t *at = to; bytes > 0;) {
        uint64_t stripe = offset / all->stripe_bytes, within = offset % all->stripe_bytes;
        size_t some = (size_t)min_u64(bytes, all->stripe_bytes - within);
        const member *m = &all->of[stripe % all->count];
        uint64_t from = all->data_offset + stripe / all->count * all->stripe_bytes + within;
        if (!device_read(m->fd, &m->facts, from, at, some)) return false;
        at += some;
        offset += some;
        bytes -= some;
    }
    return true;
}

int cxlkv_stripe_inspect(const char *path, cxlkv_stripe *part) {
    members one = {.path = path};
    stripe_label label;
    int code = member_open(&one, path, strlen(path), O_RDONLY);
    if (code == 0) code = guard_install();
    if (code == 0) code = read_own_label(&one.of[0], &label);
    members_close(&one, 0);
    if (code < 0) return code;
    if (label.count < 2 || label.count > MEMBERS_MAX || label.index >= label.count)
        return fail(CXLKV_E_CORRUPT, "%s: its label says part %u of %u", path, label.index,
                    label.count);
    part->index = label.index;
    part->count = label.count;
    memcpy(part->identity, label.identity, sizeof(part->identity));
    return 0;
}
