/* Mapped memory for a pool: files, devices, stripes of them, NUMA nodes, and the locks on bytes of
 * files by which processes know of each other. */
#ifndef CXLKV_REGION_H
#define CXLKV_REGION_H

#include <sys/types.h>

#include "base/base.h"
#include "cxlkv.h"

enum { SUPERBLOCK_BYTES = 4096, AREA_ALIGNMENT = 2 << 20 };
/* On a line of its own behind the superblock's CRC: the pool's file is not its own, so nobody
 * removes it. */
#define IN_PLACE_OFFSET 2112
#define IN_PLACE_MARK "INPLACE" /* with its zero 8 bytes */

/* Memory that is mapped. */
typedef struct region {
    int fd;                      /* of its file or device, or of the first one of several; -1 */
    uint8_t *base;
    uint64_t mapped_bytes;       /* what was asked for, in whole units */
    uint64_t unit_bytes;         /* of the mapping: a page, a huge page, a unit of a device */
    const char *page_kind;
    uint64_t nodes;              /* asked for when it was made, bit by node; 0: none */
    bool small_pages;            /* asked for when it was made: no huge ones */
} region;

/* ---- region.c ---- */
/* What helps, as the end of a sentence, when a limit of this process is the cause; or "". */
const char *remedy_of(int code);
/* Private memory at a multiple of `alignment`, both in whole pages; NULL: errno says why. */
uint8_t *map_aligned(uint64_t bytes, uint64_t alignment, int protection);
/* The three map `bytes`, on the nodes that the region names, and set all else of it. */
int region_map_anonymous(region *to, uint64_t bytes);
int region_create_file(region *to, uint64_t bytes, const char *path, char *made,
                       size_t made_bytes);
int region_map_file(region *to, uint64_t bytes); /* its fd is open */
void region_unmap(region *to);
/* Bytes of a file or a dax device; an error when it is neither. */
int region_size(int fd, const char *path, uint64_t *bytes);
/* Of a file or a dax device; false when there are fewer, or they cannot be read. */
bool region_read(int fd, uint64_t offset, void *to, size_t bytes);
/* The end of a pool: a file's name goes; of a device, and of a file in which it was made in place
 * (as its mark says, or the caller), the superblock. */
int region_discard(int fd, const char *path, bool in_place);
bool region_is_in_place(int fd);
/* Takes from its file system what the first `bytes` of a file lack; its size stays. */
int region_fill_holes(int fd, uint64_t bytes, const char *path);
/* Byte 0 is held while a process joins or leaves, byte 1 (shared) while it uses the pool. */
enum { ATTACH_BYTE = 0, USE_BYTE = 1 };
/* And of a host state's file: held (shared) while it is open; LIVE_BYTE + i (shared) while the
 * process of slot i lives, or the child that is being forked for it. */
enum { STATE_BYTE = 0, LIVE_BYTE = 64 };
/* wait: for lock_wait_s at most, then -ETIMEDOUT; byte_lock_error() says what it means. */
extern double lock_wait_s;
int lock_byte(int fd, off_t offset, bool exclusive, bool wait);
int lock_byte_within(int fd, off_t offset, bool exclusive, double wait_s);
int byte_lock_error(int code, const char *path);
int busy_error(const char *path);         /* another process has the lock that says: in use */
int unlock_byte(int fd, off_t offset);
/* Another open file of the same file, with the byte locked (shared); -1 when that fails. */
int open_again(int fd, off_t offset);
bool byte_is_free(int fd, off_t offset);  /* nobody has it locked; takes no lock to find out */

/* ---- nodes.c: NUMA nodes ---- */
/* Of the mapping's file, from its nodes; before it has pages. */
int nodes_bind(const region *to);
int nodes_read(const region *of, uint64_t pages_max, cxlkv_placed *out);
/* Pages that follow each other lie on different nodes. */
bool nodes_alternate(const region *of);
/* All pages lie on its nodes. */
int nodes_verify(const region *of);

/* ---- prefault.c ---- */
/* Brings these bytes into memory, whole units of them; returns where it came to, or an error. huge:
 * as huge pages, as far as the kernel makes such of a file in memory. */
int64_t region_prefault(const region *of, uint64_t offset, uint64_t bytes, uint64_t end,
                        bool huge);

/* ---- stripes.c: several devices or files as one region, "dax:A+B" ---- */
bool stripes_path(const char *path);
/* The first bytes of a member. */
bool stripes_is_label(const uint8_t *bytes);
typedef struct members members;
/* Opens all members. To write: under the lock of the first, so nobody joins or makes a pool on them
 * meanwhile. */
int stripes_open(const char *path, bool writes, members **found);
/* Of the pool that all of them are parts of, as their labels say, which are checked. */
int stripes_identity(members *all, uint8_t identity[16]);
void stripes_close(members *all);
int stripes_fd(const members *all);       /* of the first member */
uint64_t stripes_bytes(const members *all); /* that all together hold */
int stripes_fit(const members *all, uint64_t bytes); /* in few enough stripes, or an error */
bool stripes_read(const members *all, uint64_t offset, void *to, size_t bytes);
/* Wipes what is there, if the flags allow that, and maps so many bytes in stripes of its choice. */
int stripes_make(members *all, uint64_t bytes, uint32_t flags, region *to);
/* Labels all members: what was made is there from now on. */
int stripes_label(const members *all, const uint8_t identity[16]);
int stripes_map(members *all, uint64_t bytes, region *to);
/* The region has the first member from now on; the mapping has the others. */
void stripes_keep(members *all, region *to);
int stripes_wipe(const members *all);     /* refuses while somebody uses it */

/* ---- device.c: a dax device (/dev/daxX.Y) in place of a file ---- */
enum { DEVICE_NAME_BYTES = 64 };
typedef struct device_facts {
    char name[DEVICE_NAME_BYTES];    /* "dax0.0" */
    char driver[DEVICE_NAME_BYTES];  /* "device_dax", "kmem" (system RAM), or "": none is bound */
    uint64_t bytes;
    uint64_t unit_bytes;         /* a mapping's address, offset and length are multiples of it */
    int64_t node;                /* the NUMA node that it is, or would be, as system RAM */
} device_facts;
/* False when it is no dax device. sysfs: "/sys", or a test's. */
bool device_look(const char *sysfs, dev_t number, device_facts *facts);
bool device_of(int fd, device_facts *facts);
/* Why open() said ENXIO, and what mends it. */
int device_refused(const char *sysfs, const char *path, dev_t number);
bool device_read(int fd, const device_facts *facts, uint64_t offset, void *to, size_t bytes);
/* Its first bytes, or those of a file; the first line of them before the others. */
int device_write(int fd, const device_facts *facts, const char *path,
                 const uint8_t page[SUPERBLOCK_BYTES]);
int device_wipe(int fd, const device_facts *facts, const char *path);
/* Of a device, or of a file as if it were one: its bytes, and the unit in which it is mapped. */
int region_facts(int fd, const char *path, device_facts *facts);

/* ---- alive.c: open files whose locks say that this process lives; none crosses a fork ---- */
typedef struct alive alive;
alive *alive_begin(int fd, off_t byte);   /* opens it again, byte locked; NULL: errno says why */
alive *alive_keep(int fd);                /* one that was made for this process; NULL: no memory */
void alive_end(alive *own);
void alive_fork_prepare(void);
void alive_fork_parent(void);
void alive_fork_child(void);

#endif
