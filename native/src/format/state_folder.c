/* The folder of the host states: where they lie, and whom they may belong to.
 *
 * /dev/shm is everybody's, and the name of a pool's state is no secret: whoever makes a file there
 * first would be believed. So host states, and the worker's slots beside them, lie in a folder that
 * belongs to the owner of the pool's file, whoever opens the pool, and that nobody else may enter.
 * A folder of somebody else in its place is an error and never a reason for another place: two
 * states of one pool would be two allocators over it. Files below are opened by the folder's
 * descriptor, through no link, and must be regular, the owner's, and have one name. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "format/state_folder.h"
#include "region/region.h"

#define SHARED_MEMORY "/dev/shm"
enum { FOLDER_MODE = 0700 };

static size_t folder_path(uid_t owner, char path[STATE_PATH_BYTES]) {
    return (size_t)snprintf(path, STATE_PATH_BYTES, SHARED_MEMORY "/cxlkv.%u", owner);
}

/* Under another name until it is its owner's: nobody finds a folder that is still ours. */
static int folder_make(const char *path, uid_t owner) {
    char made[STATE_PATH_BYTES + 32];
    snprintf(made, sizeof(made), "%s.%016lx.new", path, random_u64());
    if (mkdir(made, FOLDER_MODE) < 0)
        return fail(errno, "%s: cannot make the folder of the host states: %s", path,
                    strerror(errno));
    int folder = open(made, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int code = folder < 0 || fchmod(folder, FOLDER_MODE) < 0 ? errno : 0;
    if (code == 0 && owner != geteuid() && fchown(folder, owner, (gid_t)-1) < 0) code = errno;
    if (code == 0 && renameat2(AT_FDCWD, made, AT_FDCWD, path, RENAME_NOREPLACE) < 0) code = errno;
    if (folder >= 0) close(folder);
    if (code == 0) return 0;
    rmdir(made);
    if (code == EEXIST) return 0; /* somebody was faster: whoever it was is looked at next */
    if (code == EPERM)
        return fail(code, "the pool's file belongs to user %u, and so do its host states: open it "
                    "as that user", owner);
    return fail(code, "%s: cannot make the folder of the host states: %s", path, strerror(code));
}

static int folder_refused(int code, const char *path, uid_t owner) {
    if (code == EACCES)
        return fail(code, "the pool's file belongs to user %u, and so do its host states, in %s, "
                    "which no other user may enter: open the pool as that user", owner, path);
    if (code == ENOTDIR || code == ELOOP)
        return fail(EPERM, "%s is no folder, and host states of user %u lie there and nowhere "
                    "else: somebody took the name. As its owner or root: rm %s", path, owner, path);
    return fail(code, "%s: cannot open: %s%s", path, strerror(code), remedy_of(code));
}

static int folder_check(int folder, const char *path, uid_t owner) {
    struct stat status;
    if (fstat(folder, &status) < 0) return folder_refused(errno, path, owner);
    if (status.st_uid != owner)
        return fail(EPERM, "%s belongs to user %u, and host states of user %u lie there and "
                    "nowhere else: it is not used. As root, when nothing in it is needed: "
                    "rm -r %s", path, status.st_uid, owner, path);
    if ((status.st_mode & 07777) != FOLDER_MODE)
        return fail(EPERM, "%s has mode %o, and others might have put files there: look at them, "
                    "then chmod %o %s", path, status.st_mode & 07777, FOLDER_MODE, path);
    return 0;
}

/* 1: it is open; 0: there is none, and it was not to be made. */
static int folder_open(const char *path, uid_t owner, bool makes, int *folder) {
    for (int attempt = 0;; attempt++) {
        *folder = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (*folder >= 0 || errno != ENOENT || !makes || attempt > 0) break;
        int code = folder_make(path, owner);
        if (code < 0) return code;
    }
    if (*folder < 0) return errno == ENOENT && !makes ? 0 : folder_refused(errno, path, owner);
    int code = folder_check(*folder, path, owner);
    if (code == 0) return 1;
    close(*folder);
    *folder = -1;
    return code;
}

int cxlkv_state_folder(void) {
    char path[STATE_PATH_BYTES];
    int folder;
    folder_path(geteuid(), path);
    int code = folder_open(path, geteuid(), true, &folder);
    return code < 0 ? code : folder;
}

void state_place_close(state_place *place) {
    if (place->folder >= 0) close(place->folder);
    place->folder = -1;
}

int state_place_open(int fd, const uint8_t identity[16], uint32_t host, bool makes,
                     state_place *place) {
    struct stat status;
    place->folder = -1;
    if (fstat(fd, &status) < 0) return fail(errno, "the pool's file: %s", strerror(errno));
    place->owner = status.st_uid;
    size_t at = folder_path(place->owner, place->path);
    int code = folder_open(place->path, place->owner, makes, &place->folder);
    place->name_at = (uint32_t)at + 1;
    place->path[at++] = '/';
    for (int i = 0; i < 16; i++)
        at += (size_t)snprintf(place->path + at, STATE_PATH_BYTES - at, "%02x", identity[i]);
    /* Of the file as well: a copy of a pool has its identity, and is another pool. Two file systems
     * give their files the same numbers. */
    at += (size_t)snprintf(place->path + at, STATE_PATH_BYTES - at, "-%lx-%lx", status.st_dev,
                           status.st_ino);
    if (host != NO_HOST) /* several may be tried on one machine */
        at += (size_t)snprintf(place->path + at, STATE_PATH_BYTES - at, "-%02x", host);
    snprintf(place->path + at, STATE_PATH_BYTES - at, ".host");
    return code;
}

int state_place_at(const char *path, state_place *place) {
    char folder[STATE_PATH_BYTES];
    unsigned owner;
    const char *name = strrchr(path, '/');
    place->folder = -1;
    if (!name || strlen(path) >= STATE_PATH_BYTES ||
        sscanf(path, SHARED_MEMORY "/cxlkv.%u/", &owner) != 1 ||
        folder_path(owner, folder) != (size_t)(name - path) ||
        strncmp(path, folder, (size_t)(name - path)) != 0)
        return 0;
    strcpy(place->path, path);
    place->name_at = (uint32_t)(name + 1 - path);
    place->owner = owner;
    return folder_open(folder, owner, false, &place->folder);
}

void state_place_worker(state_place *place) {
    char *suffix = strrchr(place->path, '.');
    snprintf(suffix, STATE_PATH_BYTES - (size_t)(suffix - place->path), ".worker");
}

const char *state_name(const state_place *place) { return place->path + place->name_at; }

static int file_check(const state_place *place, int fd) {
    struct stat status;
    if (fstat(fd, &status) < 0)
        return fail(errno, "%s: %s", place->path, strerror(errno));
    if (S_ISREG(status.st_mode) && status.st_uid == place->owner && status.st_nlink <= 1) return 0;
    return fail(EPERM, "%s is no file of user %u with one name: it is not used. Remove it: rm %s",
                place->path, place->owner, place->path);
}

int state_file_open(const state_place *place, int flags) {
    if (place->folder < 0) return -ENOENT;
    int fd = openat(place->folder, state_name(place),
                    flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return -ENOENT;
    if (fd < 0 && errno == ELOOP)
        return fail(EPERM, "%s is a link: it is not followed. Remove it: rm %s", place->path,
                    place->path);
    if (fd < 0)
        return fail(errno, "%s: cannot open: %s%s", place->path, strerror(errno),
                    remedy_of(errno));
    int code = file_check(place, fd);
    if (code == 0) return fd;
    close(fd);
    return code;
}

/* It has no name until it is whole: a death before that leaves nothing behind. */
int state_file_make(const state_place *place) {
    int fd = openat(place->folder, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd >= 0 && place->owner != geteuid() && fchown(fd, place->owner, (gid_t)-1) < 0) {
        int code = errno;
        close(fd);
        fd = -1;
        errno = code;
    }
    if (fd >= 0) return fd;
    return fail(errno, "%s: cannot create: %s%s", place->path, strerror(errno), remedy_of(errno));
}

int state_file_show(const state_place *place, int fd) {
    char made[32];
    snprintf(made, sizeof(made), "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, made, place->folder, state_name(place), AT_SYMLINK_FOLLOW) == 0 ||
        (errno == ENOENT && linkat(fd, "", place->folder, state_name(place), AT_EMPTY_PATH) == 0))
        return 0;
    return fail(errno, "%s: cannot be put in place: %s", place->path, strerror(errno));
}

bool state_file_is(const state_place *place, int fd) {
    struct stat own, there;
    return fd >= 0 && fstat(fd, &own) == 0 &&
           fstatat(place->folder, state_name(place), &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           own.st_ino == there.st_ino && own.st_dev == there.st_dev;
}

void state_file_unlink(const state_place *place) { unlinkat(place->folder, state_name(place), 0); }

/* Up to 0.1.0 states lay in /dev/shm itself. Whose file it is must be looked at: anybody could
 * hold up our pool with one. */
int state_older_in_use(int pool_fd, const uint8_t identity[16], uint32_t host) {
    char path[STATE_PATH_BYTES];
    struct stat pool, status;
    if (fstat(pool_fd, &pool) < 0) return fail(errno, "the pool's file: %s", strerror(errno));
    uint64_t number = host == NO_HOST ? pool.st_ino : pool.st_ino << 8 | host;
    size_t at = (size_t)snprintf(path, sizeof(path), SHARED_MEMORY "/cxlkv-");
    for (int i = 0; i < 16; i++)
        at += (size_t)snprintf(path + at, sizeof(path) - at, "%02x", identity[i]);
    snprintf(path + at, sizeof(path) - at, "-%lx.host", number);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return 0;
    bool used = fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
                (status.st_uid == pool.st_uid || status.st_uid == 0) &&
                !byte_is_free(fd, STATE_BYTE);
    close(fd);
    if (!used) return 0;
    return fail(CXLKV_E_BUSY, "processes with an older build of cxlkv use the pool, by %s: close "
                "it there first, or use one build for all", path);
}
