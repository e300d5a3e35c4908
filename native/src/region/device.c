/* A dax device (/dev/daxX.Y) in place of a pool's file: what sysfs says of it, its bytes, its end.
 *
 * It is memory and nothing else: it has no size for stat(), no read() and no write(), it is mapped
 * in whole units, and a mapping that is longer than the device succeeds and faults later. So sizes
 * come from sysfs, and bytes through a mapping under the guard. `make test-drivers` holds all this
 * against the true driver. */
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/flush.h"
#include "base/guard.h"
#include "region/device.h"

enum { FOLDER_BYTES = 1024 };    /* the name of a device's folder in sysfs */

/* The last part of where the link `name` of the device leads, "" without such a link. */
static void link_name(const char folder[FOLDER_BYTES], const char *name, char *out) {
    char path[FOLDER_BYTES + 32], target[PATH_MAX];
    out[0] = 0;
    snprintf(path, sizeof(path), "%s%s", folder, name);
    ssize_t length = readlink(path, target, sizeof(target) - 1);
    if (length <= 0) return;
    target[length] = 0;
    snprintf(out, DEVICE_NAME_BYTES, "%.*s", DEVICE_NAME_BYTES - 1, basename(target));
}

static int64_t number_in(const char folder[FOLDER_BYTES], const char *name) {
    char path[FOLDER_BYTES + 32], line[32] = "";
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    if (!fgets(line, sizeof(line), file)) line[0] = 0;
    fclose(file);
    return line[0] ? strtoll(line, NULL, 10) : -1;
}

bool device_look(const char *sysfs, dev_t number, device_facts *facts) {
    char folder[FOLDER_BYTES], subsystem[DEVICE_NAME_BYTES];
    snprintf(folder, sizeof(folder), "%s/dev/char/%u:%u", sysfs, major(number), minor(number));
    link_name(folder, "/subsystem", subsystem);
    if (strcmp(subsystem, "dax") != 0) return false;
    link_name(folder, "", facts->name);
    link_name(folder, "/driver", facts->driver);
    int64_t bytes = number_in(folder, "size"), unit_bytes = number_in(folder, "align");
    facts->bytes = bytes > 0 ? (uint64_t)bytes : 0;
    facts->unit_bytes = unit_bytes >= 4096 ? (uint64_t)unit_bytes : AREA_ALIGNMENT;
    facts->node = number_in(folder, "target_node");
    return true;
}

int device_refused(const char *sysfs, const char *path, dev_t number) {
    device_facts facts;
    if (!device_look(sysfs, number, &facts))
        return fail(ENXIO, "%s: cannot open: no driver serves this device", path);
    if (strcmp(facts.driver, "kmem") == 0)
        return fail(ENXIO,
                    "%s is system RAM now (driver kmem, NUMA node %ld), so no pool can lie on it. "
                    "Make it a device again: daxctl reconfigure-device --mode=devdax --force %s",
                    path, facts.node, facts.name);
    return fail(ENXIO,
                "%s: no driver is bound to it, so it cannot be mapped. Bind the one for devices: "
                "daxctl reconfigure-device --mode=devdax %s", path, facts.name);
}

bool device_of(int fd, device_facts *facts) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISCHR(status.st_mode) &&
           device_look("/sys", status.st_rdev, facts);
}

/* Functions of their own: a jump out of one leaves no variable of its caller in doubt. */
__attribute__((noinline))
static bool copy_guarded(void *to, const uint8_t *from, size_t bytes) {
    return GUARDED((memcpy(to, from, bytes), true), false);
}

/* The first line before the others: a wipe that is cut short leaves no pool. Written back, so that
 * the other hosts of the device see it as well. */
__attribute__((noinline))
static bool write_guarded(uint8_t *to, const uint8_t page[SUPERBLOCK_BYTES]) {
    GUARD_BEGIN(fault) {
        memcpy(to, page, LINE_BYTES);
        flush_write_back(FLUSH_NONE, to, LINE_BYTES);
        flush_fence_stores(FLUSH_NONE);
        memcpy(to + LINE_BYTES, page + LINE_BYTES, SUPERBLOCK_BYTES - LINE_BYTES);
        flush_write_back(FLUSH_NONE, to, SUPERBLOCK_BYTES);
        flush_fence_stores(FLUSH_NONE);
    } GUARD_END(fault, return false)
    return true;
}

bool device_read(int fd, const device_facts *facts, uint64_t offset, void *to, size_t bytes) {
    uint64_t first = offset / facts->unit_bytes * facts->unit_bytes;
    uint64_t mapped_bytes = align_up(offset + bytes, facts->unit_bytes) - first;
    if (first + mapped_bytes > facts->bytes || guard_install() < 0) return false;
    uint8_t *at = mmap(NULL, mapped_bytes, PROT_READ, MAP_SHARED, fd, (off_t)first);
    if (at == MAP_FAILED) return false;
    bool done = copy_guarded(to, at + (offset - first), bytes);
    munmap(at, mapped_bytes);
    return done;
}

int device_write(int fd, const device_facts *facts, const char *path,
                 const uint8_t page[SUPERBLOCK_BYTES]) {
    int code = guard_install();
    if (code < 0) return code;
    uint8_t *at = mmap(NULL, facts->unit_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return fail(errno, "%s: cannot map: %s", path, strerror(errno));
    bool done = write_guarded(at, page);
    munmap(at, facts->unit_bytes);
    return done ? 0 : fail(CXLKV_E_POISON, "%s: bus error at its first bytes: poisoned", path);
}

int device_wipe(int fd, const device_facts *facts, const char *path) {
    static const uint8_t nothing[SUPERBLOCK_BYTES];
    return device_write(fd, facts, path, nothing);
}
