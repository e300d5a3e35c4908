/* What is provably nobody's: files of creations that were killed, host states without a pool, and
 * pools that nobody has used for a time. Whoever uses such a file has it locked, so that who gets
 * the lock alone may remove it; a name is only removed while it still means the locked file. */
#include <ctype.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "format/state_folder.h"
#include "format/superblock.h"
#include "pool/host_state.h"
#include "region/region.h"

typedef struct candidate {
    const char *path;
    state_place place;           /* of a host state: it is reached by its folder */
    int folder;
    const char *name;            /* below it, or the path */
    int fd;
    struct stat status;
    bool removes;                /* else it only looks, and takes no lock */
} candidate;

/* A regular file of this user, no link. */
static int candidate_open(candidate *file) {
    int mode = file->removes ? O_RDWR : O_RDONLY;
    file->fd = openat(file->folder, file->name, mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file->fd < 0) return fail(errno, "%s: cannot open: %s", file->path, strerror(errno));
    if (fstat(file->fd, &file->status) == 0 && S_ISREG(file->status.st_mode) &&
        file->status.st_uid == geteuid())
        return 0;
    close(file->fd);
    return fail(EPERM, "%s is not a file of this user: left alone", file->path);
}

static bool alone(const candidate *file, off_t byte) {
    return file->removes ? lock_byte(file->fd, byte, true, false) == 0
                         : byte_is_free(file->fd, byte);
}

/* 1 when it was, or would be, removed. */
static int candidate_remove(candidate *file) {
    struct stat now;
    if (fstatat(file->folder, file->name, &now, AT_SYMLINK_NOFOLLOW) < 0 ||
        now.st_dev != file->status.st_dev || now.st_ino != file->status.st_ino)
        return 0;
    if (file->removes && unlinkat(file->folder, file->name, 0) < 0)
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
static bool is_draft(const candidate *file) {
    char magic[8] = "";
    if (file->status.st_size == 0) return true;
    if (pread(file->fd, magic, sizeof(magic), 0) != (ssize_t)sizeof(magic)) return false;
    static const char nothing[sizeof(magic)];
    if (file->status.st_blksize >= AREA_ALIGNMENT && memcmp(magic, nothing, sizeof(magic)) == 0)
        return true;
    return memcmp(magic, "CXLKVPOL", sizeof(magic)) == 0;
}

static int draft(candidate *file) {
    char path[4096];
    struct stat finished;
    size_t stem = draft_stem(file->path);
    if (stem == 0 || stem >= sizeof(path) || !is_draft(file))
        return fail(CXLKV_E_NOT_A_POOL, "%s is no half-made pool", file->path);
    if (!alone(file, ATTACH_BYTE)) return 0;
    if (fstat(file->fd, &file->status) < 0 || file->status.st_nlink == 0) return 0;
    if (file->status.st_nlink == 1) return candidate_remove(file);
    /* Killed between its last two steps: this is the second name of a finished pool. */
    memcpy(path, file->path, stem);
    path[stem] = 0;
    bool second = lstat(path, &finished) == 0 && finished.st_ino == file->status.st_ino &&
                  finished.st_dev == file->status.st_dev;
    return second ? candidate_remove(file) : 0;
}

/* ---- host states ---- */

static bool pool_is_there(const host_state *host) {
    struct stat status;
    if (host->pool_path[0] == 0) return true; /* its name was too long to be kept: not known */
    return lstat(host->pool_path, &status) == 0 && status.st_ino == host->pool_inode &&
           status.st_dev == host->pool_device;
}

/* IDENTITY-DEVICE-INODE.host, or with the number of a host behind. */
static bool is_state_name(const char *name) {
    static const char suffix[] = ".host";
    size_t length = strlen(name), tail = sizeof(suffix) - 1;
    if (length < 33 + tail || strcmp(name + length - tail, suffix) != 0 || !all_hex(name, 32))
        return false;
    for (const char *part = name + 32; part < name + length - tail;) {
        size_t digits = strcspn(part + 1, "-.");
        if (*part != '-' || !all_hex(part + 1, digits)) return false;
        part += 1 + digits;
    }
    return true;
}

/* Up to 0.1.0 states lay in /dev/shm itself, and no build with folders takes one over. */
static bool is_older_state(const char *path) {
    static const char prefix[] = "/dev/shm/cxlkv-";
    return strncmp(path, prefix, sizeof(prefix) - 1) == 0 &&
           is_state_name(path + sizeof(prefix) - 1);
}

/* CVKHST08 and later. */
static bool locks_its_state(const host_state *host) {
    const char *magic = (const char *)&host->magic;
    return memcmp(magic, "CVKHST", 6) == 0 && memcmp(magic + 6, "08", 2) >= 0;
}

static int orphan(candidate *file) {
    host_state host;
    bool older = file->place.folder < 0;
    if (older ? !is_older_state(file->path) : !is_state_name(file->name))
        return fail(CXLKV_E_NOT_A_POOL, "%s is no host state", file->path);
    if (!alone(file, STATE_BYTE)) return 0;
    if (fstat(file->fd, &file->status) < 0 || file->status.st_nlink == 0) return 0;
    memset(&host, 0, sizeof(host));
    if (pread(file->fd, &host, sizeof(host), 0) < 0)
        return fail(errno, "%s: cannot read: %s", file->path, strerror(errno));
    host.pool_path[sizeof(host.pool_path) - 1] = 0;
    /* Another build's: it may be in use without a lock. One of the older place without a magic was
     * never finished. */
    if (older ? host.magic != 0 && !locks_its_state(&host) : !host_state_is_ours(&host)) return 0;
    if (!older && pool_is_there(&host)) return 0; /* its next user takes it over */
    int code = candidate_remove(file);
    if (code == 1 && file->removes && !older) { /* its killed worker's slots go with it */
        state_place_worker(&file->place);
        state_file_unlink(&file->place);
    }
    return code;
}

/* ---- idle pools ---- */

static bool has_state(const candidate *file, const cxlkv_sharing *sharing,
                      const uint8_t identity[16]) {
    state_place place;
    bool shared = sharing->kind != CXLKV_SHARING_HOST, found = false;
    for (uint32_t host = 0; host < sharing->hosts && !found; host++) {
        found = state_place_open(file->fd, identity, shared ? host : NO_HOST, false, &place) == 1 &&
                faccessat(place.folder, state_name(&place), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
        state_place_close(&place);
    }
    return found;
}

/* The file's time says when the last process left. One that was killed left a host state instead,
 * and did not say when. */
static int idle(candidate *file, double idle_s) {
    uint8_t page[SUPERBLOCK_BYTES];
    pool_facts facts;
    struct timespec now;
    if (pread(file->fd, page, sizeof(page), 0) != (ssize_t)sizeof(page))
        return fail(CXLKV_E_NOT_A_POOL, "%s is not a cxlkv pool", file->path);
    int code = superblock_read(SUPERBLOCK_USE, page, (uint64_t)file->status.st_size, file->path,
                               &facts);
    if (code < 0) return code;
    if (region_is_in_place(file->fd)) return 0; /* its file was there before it: not ours to take */
    if (!alone(file, ATTACH_BYTE) || !alone(file, USE_BYTE)) return 0;
    if (has_state(file, &facts.sharing, facts.identity) || fstat(file->fd, &file->status) < 0)
        return 0;
    clock_gettime(CLOCK_REALTIME, &now);
    double since_s = (double)(now.tv_sec - file->status.st_mtim.tv_sec) +
                     (double)(now.tv_nsec - file->status.st_mtim.tv_nsec) * 1e-9;
    return since_s >= idle_s ? candidate_remove(file) : 0;
}

int cxlkv_gc(const char *path, uint32_t kind, double idle_s, uint32_t removes) {
    candidate file = {.path = path, .place = {.folder = -1}, .folder = AT_FDCWD, .name = path,
                     .removes = removes != 0};
    if (kind == CXLKV_GC_IDLE && !(idle_s >= 0))
        return fail(CXLKV_E_ARGUMENT, "idle for %g s: 0 or more", idle_s);
    int code = kind == CXLKV_GC_ORPHAN ? state_place_at(path, &file.place) : 0;
    if (code == 1) {
        file.folder = file.place.folder;
        file.name = state_name(&file.place);
    }
    if (code >= 0) code = candidate_open(&file);
    if (code == 0) {
        if (kind == CXLKV_GC_DRAFT) code = draft(&file);
        else if (kind == CXLKV_GC_ORPHAN) code = orphan(&file);
        else code = idle(&file, idle_s);
        close(file.fd);
    }
    state_place_close(&file.place);
    return code;
}
