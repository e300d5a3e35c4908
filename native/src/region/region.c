/* Mapped memory for a pool: anonymous (memfd), a file or a device; byte locks of processes. */
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/device.h"
#include "region/nodes.h"
#include "region/region.h"

const char *remedy_of(int code) {
    if (code == EMFILE) return ". This process may have no more open files: raise it, ulimit -n";
    if (code == EFBIG) return ". This process may not make files that large: raise it, ulimit -f";
    return "";
}

#ifndef MAP_SYNC /* Linux 4.15 */
#define MAP_SHARED_VALIDATE 0x03
#define MAP_SYNC 0x80000
#endif

/* With MAP_SYNC where the file lies in memory itself (fsdax, famfs): what is written back is in the
 * file then, not in a block that its file system has not noted yet. Others refuse the flag. */
static void *map_file_at(uint8_t *at, uint64_t bytes, int fd, bool *is_dax) {
    int protection = PROT_READ | PROT_WRITE;
    void *mapped = mmap(at, bytes, protection, MAP_SHARED_VALIDATE | MAP_SYNC | MAP_FIXED, fd, 0);
    *is_dax = mapped != MAP_FAILED;
    return *is_dax ? mapped : mmap(at, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
}

uint8_t *map_aligned(uint64_t bytes, uint64_t alignment, int protection) {
    uint8_t *mapped = mmap(NULL, bytes + alignment, protection,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    uint8_t *base = (uint8_t *)align_up((uintptr_t)mapped, alignment);
    size_t before = (size_t)(base - mapped);
    if (before) munmap(mapped, before);
    munmap(base + bytes, alignment - before);
    return base;
}

/* A shared mapping aligned to 2 MiB, so that huge pages can back it where there are any; to the
 * unit of what it maps, when that is larger. */
static int map_file(int fd, uint64_t bytes, uint64_t unit_bytes, uint8_t **base,
                    bool *is_dax) {
    uint64_t alignment = unit_bytes > AREA_ALIGNMENT ? unit_bytes : AREA_ALIGNMENT;
    *base = map_aligned(bytes, alignment, PROT_NONE);
    if (!*base)
        return fail(errno, "no address space for %lu MiB. This process may have less: raise it, "
                    "ulimit -v, or ask for a smaller pool", bytes >> 20);
    if (map_file_at(*base, bytes, fd, is_dax) != MAP_FAILED) return 0;
    int code = errno;
    munmap(*base, bytes);
    *base = NULL;
    return fail(code, "cannot map %lu MiB: %s", bytes >> 20, strerror(code));
}

void region_unmap(region *to) {
    munmap(to->base, to->mapped_bytes);
    to->base = NULL;
}

/* What the kernel backs the mapping with, which is unmapped in whole units. Which small pages are
 * huge ones now, it says elsewhere (machine/huge_pages.py). */
static const char *kind_of(int fd, uint64_t *unit_bytes) {
    struct stat status;
    device_facts device;
    *unit_bytes = AREA_ALIGNMENT;
    if (fstat(fd, &status) == 0 && status.st_blksize >= AREA_ALIGNMENT) return "hugetlb";
    if (device_of(fd, &device)) {
        *unit_bytes = device.unit_bytes;
        return "devdax";
    }
    *unit_bytes = 4096;
    return "4KiB";
}

int region_map_file(region *to, uint64_t bytes) {
    uint64_t unit_bytes;
    const char *kind = kind_of(to->fd, &unit_bytes);
    bytes = align_up(bytes, unit_bytes);
    bool is_dax;
    int code = map_file(to->fd, bytes, unit_bytes, &to->base, &is_dax);
    if (code < 0) return code;
    if (is_dax && strcmp(kind, "devdax") != 0) kind = "fsdax"; /* a device takes the flag, too */
    to->mapped_bytes = bytes;
    to->unit_bytes = unit_bytes;
    to->page_kind = kind;
    if (!to->small_pages) madvise(to->base, bytes, MADV_HUGEPAGE); /* refused: there are none */
    return 0;
}

static int no_room(int code, int fd, uint64_t bytes, const char *path) {
    if (code != ENOSPC) { /* ENOSPC all the same: a limit, not the disk, is short */
        int shown = code == EFBIG || code == EDQUOT ? ENOSPC : code;
        return fail(shown, "%s: cannot reserve %lu MiB: %s%s", path, bytes >> 20, strerror(code),
                    remedy_of(code));
    }
    struct statvfs space;
    uint64_t free_bytes = 0;
    if (fstatvfs(fd, &space) == 0) free_bytes = (uint64_t)space.f_bavail * space.f_frsize;
    return fail(ENOSPC, "%s: cannot reserve %lu MiB; its file system has %lu MiB free. Ask for "
                "less, make it larger (/dev/shm in Docker: --shm-size), or use another",
                path, bytes >> 20, free_bytes >> 20);
}

static int reserve_file(int fd, uint64_t bytes, const char *path) {
    int code = posix_fallocate(fd, 0, (off_t)bytes);
    if (code == EINVAL || code == EOPNOTSUPP) code = ftruncate(fd, (off_t)bytes) < 0 ? errno : 0;
    return code == 0 ? 0 : no_room(code, fd, bytes, path);
}

/* A file that keeps its size may have holes. On famfs, which has no holes and no call to fill them,
 * all is there: so a file system that cannot is believed. */
int region_fill_holes(int fd, uint64_t bytes, const char *path) {
    if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes) == 0) return 0;
    if (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL) return 0;
    return no_room(errno, fd, bytes, path);
}

/* Anonymous, of reserved huge pages, where there are enough (on the nodes that were asked for). */
static bool map_huge(region *to, uint64_t bytes) {
    bytes = align_up(bytes, AREA_ALIGNMENT);
    int made = memfd_create("cxlkv-pool", MFD_CLOEXEC | MFD_HUGETLB);
    bool is_dax;
    if (made < 0) return false;
    if (ftruncate(made, (off_t)bytes) == 0 &&
        map_file(made, bytes, AREA_ALIGNMENT, &to->base, &is_dax) == 0) {
        to->mapped_bytes = bytes;
        to->unit_bytes = AREA_ALIGNMENT;
        to->page_kind = "hugetlb";
        if ((!to->nodes || nodes_bind(to) == 0) &&
            posix_fallocate(made, 0, (off_t)bytes) == 0 &&
            (!to->nodes || nodes_verify(to) == 0)) {
            to->fd = made;
            return true;
        }
        region_unmap(to);
    }
    close(made);
    return false;
}

/* Bound before it has pages, but for those that are mapped already: they are moved. */
static int reserve_placed(const region *to, uint64_t bytes, const char *path) {
    int code = nodes_bind(to);
    if (code == 0) code = reserve_file(to->fd, bytes, path);
    return code == 0 ? nodes_verify(to) : code;
}

int region_map_anonymous(region *to, uint64_t bytes) {
    if (!to->small_pages && map_huge(to, bytes)) return 0;
    int made = memfd_create("cxlkv-pool", MFD_CLOEXEC);
    if (made < 0) return fail(errno, "memfd_create: %s%s", strerror(errno), remedy_of(errno));
    to->fd = made;  /* closed with the pool */
    if (ftruncate(made, (off_t)bytes) < 0)
        return fail(errno == EFBIG ? ENOSPC : errno, "no anonymous pool of %lu MiB: %s%s",
                    bytes >> 20, strerror(errno), remedy_of(errno));
    int code = region_map_file(to, bytes);
    return code == 0 && to->nodes ? reserve_placed(to, bytes, "anonymous memory") : code;
}

/* Locked from its first moment on, so that `cxlkv pool gc` can tell it from the file of a creation
 * that was killed; should that have been faster than the lock, the name is gone: another one. The
 * magic says whose file it is, also when we die before it is formatted. */
static int open_draft(const char *path, char *made, size_t made_bytes, int *fd) {
    struct stat status;
    for (int attempt = 0; attempt < 16; attempt++) {
        int written = snprintf(made, made_bytes, "%s.%016lx.new", path, random_u64());
        if (written < 0 || (size_t)written >= made_bytes)
            return fail(ENAMETOOLONG, "%s: the path is too long", path);
        *fd = open(made, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (*fd < 0)
            return fail(errno, "%s: cannot create: %s%s", path, strerror(errno), remedy_of(errno));
        int code = lock_byte(*fd, ATTACH_BYTE, true, true);
        if (code < 0) {
            unlink(made);
            close(*fd);
            return byte_lock_error(code, path);
        }
        if (fstat(*fd, &status) == 0 && status.st_nlink > 0) {
            /* hugetlbfs has no write; want of room is told by what reserves it next. */
            ssize_t written_bytes = pwrite(*fd, "CXLKVPOL", 8, 0);
            (void)written_bytes;
            return 0;
        }
        close(*fd);
    }
    return fail(EAGAIN, "%s: its file is removed as soon as it is made", path);
}

static int create_placed(region *to, uint64_t bytes, const char *path) {
    struct statfs system;
    struct stat status;
    if (fstatfs(to->fd, &system) < 0 || fstat(to->fd, &status) < 0)
        return fail(errno, "%s: %s", path, strerror(errno));
    if (system.f_type != TMPFS_MAGIC && system.f_type != HUGETLBFS_MAGIC)
        return fail(ENOTSUP, "%s: the pages of a file on this file system have no NUMA policy: "
                    "choose a path on tmpfs (/dev/shm) or hugetlbfs", path);
    uint64_t unit_bytes = system.f_type == HUGETLBFS_MAGIC ? (uint64_t)status.st_blksize : 4096;
    if (ftruncate(to->fd, (off_t)align_up(bytes, unit_bytes)) < 0)
        return fail(errno == EFBIG ? ENOSPC : errno, "%s: cannot make a file of %lu MiB: %s%s",
                    path, bytes >> 20, strerror(errno), remedy_of(errno));
    int code = region_map_file(to, bytes);
    if (code < 0) return code;
    /* The magic of the draft has taken a page already, on any node. Binding moves mapped ones. */
    if (system.f_type == TMPFS_MAGIC) (void)*(const volatile uint8_t *)to->base;
    return reserve_placed(to, bytes, path);
}

/* The file is made under a name beside its own; linking it there is the caller's last step. */
int region_create_file(region *to, uint64_t bytes, const char *path, char *made,
                       size_t made_bytes) {
    int code = open_draft(path, made, made_bytes, &to->fd);
    if (code < 0) {
        to->fd = -1;
        return code;
    }
    if (to->nodes) {
        code = create_placed(to, bytes, path);
    } else {
        code = reserve_file(to->fd, bytes, path);
        if (code == 0) code = region_map_file(to, bytes);
    }
    if (code < 0) unlink(made);
    return code;
}

int region_size(int fd, const char *path, uint64_t *bytes) {
    struct stat status;
    device_facts device;
    *bytes = 0;
    if (fstat(fd, &status) < 0) return fail(errno, "%s: %s", path, strerror(errno));
    if (S_ISREG(status.st_mode)) *bytes = (uint64_t)status.st_size;
    else if (device_of(fd, &device)) *bytes = device.bytes;
    else
        return fail(CXLKV_E_NOT_A_POOL,
                    "%s is not a cxlkv pool: neither a regular file nor a dax device", path);
    return 0;
}

bool region_read(int fd, uint64_t offset, void *to, size_t bytes) {
    device_facts device;
    if (device_of(fd, &device)) return device_read(fd, &device, offset, to, bytes);
    return pread(fd, to, bytes, (off_t)offset) == (ssize_t)bytes;
}

int region_facts(int fd, const char *path, device_facts *facts) {
    struct stat status;
    memset(facts, 0, sizeof(*facts));
    if (device_of(fd, facts)) return 0;
    int code = region_size(fd, path, &facts->bytes);
    bool huge = fstat(fd, &status) == 0 && status.st_blksize >= AREA_ALIGNMENT;
    facts->unit_bytes = huge ? AREA_ALIGNMENT : 4096; /* huge: hugetlbfs */
    return code;
}

bool region_is_in_place(int fd) {
    uint8_t mark[sizeof(IN_PLACE_MARK)];
    return region_read(fd, IN_PLACE_OFFSET, mark, sizeof(mark)) &&
           memcmp(mark, IN_PLACE_MARK, sizeof(mark)) == 0;
}

int region_discard(int fd, const char *path, bool in_place) {
    device_facts facts;
    int code = region_facts(fd, path, &facts);
    if (code < 0) return code;
    in_place |= device_of(fd, &facts) || region_is_in_place(fd);
    if (in_place) return device_wipe(fd, &facts, path);
    return unlink(path) < 0 ? fail(errno, "%s: cannot remove: %s", path, strerror(errno)) : 0;
}

/* Open-file-description locks: they outlive threads, and the kernel drops them with the process. */
static int set_lock(int fd, off_t offset, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1};
    return fcntl(fd, F_OFD_SETLK, &lock) < 0 ? -errno : 0;
}

double lock_wait_s = 30;

/* Whoever may read a file may keep a lock on it for ever, so no wait is without an end; and as the
 * kernel has none that ends by itself, we ask again and again. */
int lock_byte_within(int fd, off_t offset, bool exclusive, double wait_s) {
    uint64_t until_ns = boottime_ns() + (uint64_t)(wait_s * 1e9);
    struct timespec nap = {.tv_nsec = 20000};
    for (;;) {
        int code = set_lock(fd, offset, exclusive ? F_WRLCK : F_RDLCK);
        bool taken = code == -EAGAIN || code == -EACCES;
        if (!taken || wait_s == 0) return code;
        if (boottime_ns() > until_ns) return -ETIMEDOUT;
        nanosleep(&nap, NULL);
        if (nap.tv_nsec < 5000000) nap.tv_nsec += nap.tv_nsec / 4;
    }
}

int lock_byte(int fd, off_t offset, bool exclusive, bool wait) {
    return lock_byte_within(fd, offset, exclusive, wait ? lock_wait_s : 0);
}

int byte_lock_error(int code, const char *path) {
    if (code != -ETIMEDOUT) return fail(-code, "%s: cannot lock: %s", path, strerror(-code));
    return fail(CXLKV_E_TIMEOUT,
                "%s: another process has had its lock for %g s. It makes, opens or closes the "
                "pool, or was stopped while it did, or keeps the lock to keep us out: end it "
                "(`fuser -v %s` names who has the file open)", path, lock_wait_s, path);
}

int busy_error(const char *path) {
    return fail(CXLKV_E_BUSY, "%s is in use: close it in the other processes first", path);
}

int unlock_byte(int fd, off_t offset) { return set_lock(fd, offset, F_UNLCK); }

int open_again(int fd, off_t offset) {
    char path[32];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int again = open(path, O_RDWR | O_CLOEXEC);
    if (again < 0 || lock_byte(again, offset, false, false) == 0) return again;
    close(again);
    return -1;
}

bool byte_is_free(int fd, off_t offset) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}
