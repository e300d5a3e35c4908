/* Keys of pages that are not full. */
#pragma once
#include <stdint.h>

/* Keys of the first 1, 2 ... `count` of the ids behind the page of key `root`. */
int64_t tail_keys(const int64_t *ids, uint64_t count, const uint8_t *root, uint8_t *keys);
