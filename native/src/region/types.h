/* Mapped memory for a pool: files, devices, stripes of them, NUMA nodes, and the locks on bytes of
 * files by which processes know of each other. */
#pragma once
#include <sys/types.h>

#include "base/types.h"

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
