/* NUMA nodes of a region's pages. */
#pragma once
#include "region/types.h"

/* Of the mapping's file, from its nodes; before it has pages. */
int nodes_bind(const region *to);
int nodes_read(const region *of, uint64_t pages_max, cxlkv_placed *out);
/* Pages that follow each other lie on different nodes. */
bool nodes_alternate(const region *of);
/* All pages lie on its nodes. */
int nodes_verify(const region *of);
