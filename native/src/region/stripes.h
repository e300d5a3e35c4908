/* Several devices or files as one region, "dax:A+B". */
#pragma once
#include "region/types.h"

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
