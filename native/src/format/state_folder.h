/* Where host states, and the worker's slots, lie. */
#pragma once
#include "format/types.h"

/* Of the state of the pool in `fd`. host: NO_HOST where one host only uses the pool. 1: the folder
 * is there; 0: it is not, and was not to be made; an error: it is not fit to be used. */
int state_place_open(int fd, const uint8_t identity[16], uint32_t host, bool makes,
                     state_place *place);
/* Of a file in such a folder, by its path: the same; 0 also when the path is none. */
int state_place_at(const char *path, state_place *place);
void state_place_worker(state_place *place); /* from a state's to that of its worker's slots */
void state_place_close(state_place *place);
const char *state_name(const state_place *place);
/* A descriptor, -ENOENT without a text, or an error; flags: O_RDWR or O_RDONLY. */
int state_file_open(const state_place *place, int flags);
int state_file_make(const state_place *place);          /* a descriptor, of no name yet */
int state_file_show(const state_place *place, int fd);  /* gives it the name */
bool state_file_is(const state_place *place, int fd);   /* the name means this file */
void state_file_unlink(const state_place *place);
/* -CXLKV_E_BUSY when a build that had its states elsewhere uses the pool. */
int state_older_in_use(int pool_fd, const uint8_t identity[16], uint32_t host);
