/* The superblock: written, read, upgraded; the host line in its page. */
#pragma once
#include "format/types.h"

/* Writes an empty pool into the mapping: its superblock last. */
int pool_format(cxlkv_pool *pool);
void superblock_write(cxlkv_pool *pool);
/* Reads and checks a superblock of a file of file_bytes. */
int superblock_read(enum superblock_purpose purpose, const uint8_t *bytes, uint64_t file_bytes,
                    const char *path, pool_facts *facts);
void pool_learn(cxlkv_pool *pool, const pool_facts *facts); /* it has what that says */
/* Of FORMAT_BEFORE, in place: a whole pool of the one version or the other after each store. */
void superblock_upgrade(uint8_t *base);
/* The incompatible features that this build knows, as it tells other hosts. */
uint32_t features_told(void);
int host_line_write(cxlkv_pool *pool, uint64_t nonce);
uint64_t host_line_read(const cxlkv_pool *pool);   /* 0: none */
uint64_t host_line_nonce(const uint8_t *superblock_page);
