/* What is provably nobody's: files of creations that were killed, host states without a pool, and
 * pools that nobody has used for a time. Whoever uses such a file has it locked, so that who gets
 * the lock alone may remove it; a name is only removed while it still means the locked file. */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "worker.h"

typedef struct leftover {
    const char *path;
    int fd;
    struct stat status;
    bool removes;                /* else it only looks, and takes no lock */
} leftover;

/* A regular file of this user, no link. */
static int leftover_open(leftover *file) {
    int mode = file->removes ? O_RDWR : O_RDONLY;
    file->fd = open(file->path, mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file->fd < 0) return fail(errno, "%s: cannot open: %s", file->path, strerror(errno));
    if (fstat(file->fd, &file->status) == 0 && S_ISREG(file->status.st_mode) &&
        file->status.st_uid == geteuid())
        return 0;
    close(file->fd);
    return fail(EPERM, "%s is not a file of this user: left alone", file->path);
}

static bool alone(const leftover *file, off_t byte) {
    return file->removes ? lock_byte(file->fd, byte, true, false) == 0
                         : byte_is_free(file->fd, byte);
}

/* 1 when it was, or would be, removed. */
static int leftover_remove(leftover *file) {
    struct stat now;
    if (lstat(file->path, &now) < 0 || now.st_dev != file->status.st_dev ||
        now.st_ino != file->status.st_ino)
        return 0;
    if (file->removes && unlink(file->path) < 0)
        return fail(errno, "%s: cannot remove: %s", file->path, strerror(errno));
    return 1;
}

static bool all_hex(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++)
        if (!isdigit((unsigned char)text[i]) && !(text[i] >= 'a' && text[i] <= 'f')) return false;
    return length > 0;
}

/* ---- PATH.<16 hex digits>.new, as region_create_file() names it ---- */

static size_t draft_stem(const char *path) {
    size_t length = strlen(path), suffix = 1 + 16 + strlen(".new");
    if (length <= suffix || strcmp(path + length - 4, ".new") != 0) return 0;
    size_t stem = length - suffix;
    return path[stem] == '.' && all_hex(path + stem + 1, 16) ? stem : 0;
}

/* Its creator writes the magic first of all; hugetlbfs has no write, and killed in between there is
 * nothing yet. */
static bool is_draft(const leftover *file) {
    char magic[8] = "";
    if (file->status.st_size == 0) return true;
    if (pread(file->fd, magic, sizeof(magic), 0) != (ssize_t)sizeof(magic)) return false;
    static const char nothing[sizeof(magic)];
    if (file->status.st_blksize >= AREA_ALIGNMENT && memcmp(magic, nothing, sizeof(magic)) == 0)
        return true;
    return memcmp(magic, "CXLKVPOL", sizeof(magic)) == 0;
}

static int draft(leftover *file) {
    char path[4096];
    struct stat finished;
    size_t stem = draft_stem(file->path);
    if (stem == 0 || stem >= sizeof(path) || !is_draft(file))
        return fail(CXLKV_E_NOT_A_POOL, "%s is no half-made pool", file->path);
    if (!alone(file, ATTACH_BYTE)) return 0;
    if (fstat(file->fd, &file->status) < 0 || file->status.st_nlink == 0) return 0;
    if (file->status.st_nlink == 1) return leftover_remove(file);
    /* Killed between its last two steps: this is the second name of a finished pool. */
    memcpy(path, file->path, stem);
    path[stem] = 0;
    bool second = lstat(path, &finished) == 0 && finished.st_ino == file->status.st_ino &&
                  finished.st_dev == file->status.st_dev;
    return second ? leftover_remove(file) : 0;
}

/* ---- host states ---- */

static bool pool_is_there(const host_state *host) {
    struct stat status;
    if (host->pool_path[0] == 0) return true; /* its name was too long to be kept: not known */
    return lstat(host->pool_path, &status) == 0 && status.st_ino == host->pool_inode &&
           status.st_dev == host->pool_device;
}

static int orphan(leftover *file) {
    static const char prefix[] = "/dev/shm/cxlkv-", suffix[] = ".host";
    host_state host;
    size_t length = strlen(file->path), head = sizeof(prefix) - 1, tail = sizeof(suffix) - 1;
    if (length < head + 33 + tail || strncmp(file->path, prefix, head) != 0 ||
        strcmp(file->path + length - tail, suffix) != 0 || !all_hex(file->path + head, 32) ||
        file->path[head + 32] != '-' ||
        !all_hex(file->path + head + 33, length - tail - head - 33))
        return fail(CXLKV_E_NOT_A_POOL, "%s is no host state", file->path);
    if (!alone(file, STATE_BYTE)) return 0;
    if (fstat(file->fd, &file->status) < 0 || file->status.st_nlink == 0) return 0;
    memset(&host, 0, sizeof(host));
    if (pread(file->fd, &host, sizeof(host), 0) < 0)
        return fail(errno, "%s: cannot read: %s", file->path, strerror(errno));
    host.pool_path[sizeof(host.pool_path) - 1] = 0;
    /* No magic: killed while it was made. Another build's: it may be in use without a lock. */
    if (host.magic != 0 && !host_state_is_ours(&host)) return 0;
    if (host.magic != 0 && pool_is_there(&host)) return 0; /* its next user takes it over */
    int code = leftover_remove(file);
    if (code == 1 && file->removes) { /* its killed worker's slots go with it */
        char path[STATE_PATH_BYTES];
        snprintf(path, sizeof(path), "%s", file->path);
        worker_path_of_state(path);
        unlink(path);
    }
    return code;
}

/* ---- idle pools ---- */

static bool has_state(const leftover *file, const cxlkv_sharing *sharing,
                      const uint8_t identity[16]) {
    char path[STATE_PATH_BYTES];
    bool shared = sharing->kind != CXLKV_SHARING_HOST;
    for (uint32_t host = 0; host < sharing->hosts; host++) {
        host_state_path(identity, file->fd, shared ? host : NO_HOST, path);
        if (access(path, F_OK) == 0) return true;
    }
    return false;
}

/* The file's time says when the last process left. One that was killed left a host state instead,
 * and did not say when. */
static int idle(leftover *file, double idle_s) {
    uint8_t page[SUPERBLOCK_BYTES], identity[16];
    cxlkv_layout layout;
    cxlkv_sharing sharing;
    cxlkv_geometry geometry;
    struct timespec now;
    if (pread(file->fd, page, sizeof(page), 0) != (ssize_t)sizeof(page))
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool", file->path);
    int code = superblock_read(SUPERBLOCK_USE, page, (uint64_t)file->status.st_size, file->path,
                               &layout, &sharing, &geometry, identity);
    if (code < 0) return code;
    if (region_is_in_place(file->fd)) return 0; /* its file was there before it: not ours to take */
    if (!alone(file, ATTACH_BYTE) || !alone(file, USE_BYTE)) return 0;
    if (has_state(file, &sharing, identity) || fstat(file->fd, &file->status) < 0) return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    double since_s = (double)(now.tv_sec - file->status.st_mtim.tv_sec) +
                     (double)(now.tv_nsec - file->status.st_mtim.tv_nsec) * 1e-9;
    return since_s >= idle_s ? leftover_remove(file) : 0;
}

int cxlkv_leftover(const char *path, uint32_t kind, double idle_s, uint32_t removes) {
    leftover file = {.path = path, .removes = removes != 0};
    if (kind == CXLKV_LEFTOVER_IDLE && !(idle_s >= 0))
        return fail(CXLKV_E_ARGUMENT, "idle for %g s: 0 or more", idle_s);
    int code = leftover_open(&file);
    if (code < 0) return code;
    if (kind == CXLKV_LEFTOVER_DRAFT) code = draft(&file);
    else if (kind == CXLKV_LEFTOVER_ORPHAN) code = orphan(&file);
    else code = idle(&file, idle_s);
    close(file.fd);
    return code;
}
