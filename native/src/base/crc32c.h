/* CRC32C (Castagnoli, reflected, as in iSCSI and ext4): the check on every piece and every line. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* The CRC of `bytes` bytes that follow data whose CRC is `crc` (0 for none):
 * crc32c(0, "123456789", 9) == 0xe3069283, crc32c(crc32c(0, a), b) == crc32c(0, a followed by b).
 * Any alignment; the fastest way that this CPU has, chosen at first use. Thread safe. */
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);

/* Of `count` rows, row_bytes each and stride_bytes apart: as if they lay one behind another. */
uint32_t crc32c_rows(const void *rows, size_t stride_bytes, size_t count, size_t row_bytes);

/* A byte at a time through a table: the reference. */
uint32_t crc32c_serial(uint32_t crc, const void *data, size_t bytes);

/* By the CPU's CRC instruction. Precondition: crc32c_force("hardware") would return 0. */
uint32_t crc32c_hardware(uint32_t crc, const void *data, size_t bytes);

/* By carry-less products of 512 bits. Precondition: crc32c_force("avx512") would return 0. */
uint32_t crc32c_avx512(uint32_t crc, const void *data, size_t bytes);
/* Its folding, of rows of 64 bytes or more that are whole lines of 64 together, at least 4: `left`
 * has their remainder, for the CRC instruction to go on from. */
void crc32c_fold(uint32_t crc, const uint8_t *rows, size_t stride_bytes, size_t count,
                 size_t row_bytes, uint8_t left[16]);

/* "serial", "hardware", "avx512", or "auto" for the best. Returns 0, -ENOTSUP when this CPU or this
 * build lacks the instruction, -EINVAL for an unknown name. */
int crc32c_force(const char *name);
