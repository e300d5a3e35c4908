/* A file or a device is mapped, read and given up; locks on its bytes. */
#pragma once
#include "region/device.h"

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
/* Of a device, or of a file as if it were one: its bytes, and the unit in which it is mapped. */
int region_facts(int fd, const char *path, device_facts *facts);
