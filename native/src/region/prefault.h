/* A region's pages are brought into memory ahead of their use. */
#pragma once
#include "region/types.h"

enum { PREFAULT_HUGE_ONLY = 2 }; /* nothing where the kernel makes none: returns the end then */

/* Brings these bytes into memory, whole units of them; returns where it came to, or an error. huge:
 * as huge pages, as far as the kernel makes such of a file in memory. */
int64_t region_prefault(const region *of, uint64_t offset, uint64_t bytes, uint64_t end,
                        uint32_t huge);
