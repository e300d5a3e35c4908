/* What lies at a path: made, opened, closed. */
#pragma once
#include "format/types.h"
#include "region/stripes.h"

int create_region(cxlkv_pool *pool, const char *path, uint32_t flags);
/* Maps what lies there; the pool is what its superblock says. */
int open_mapped(cxlkv_pool *pool, const char *path, enum superblock_purpose purpose);
void close_region(int fd);                /* and its locks */
/* For inspection: labels and superblock are checked. */
int striped_inspect(const char *path, members **found);
