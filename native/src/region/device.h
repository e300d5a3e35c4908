/* A dax device (/dev/daxX.Y) in place of a file. */
#pragma once
#include "region/types.h"

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
