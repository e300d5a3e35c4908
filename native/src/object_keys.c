/* Keys of objects from their names, hashed as cxlkv/objects.py says, in terms of hashlib. */
#include <string.h>

#include "blake2s.h"
#include "internal.h"

enum { KEY_BYTES = 16 };

static const char NAME_PURPOSE[] = "cxlkvobj";

static void key_of(const uint8_t *name, uint64_t bytes, const uint8_t *root, uint8_t *key) {
    uint32_t block[BLAKE2S_BLOCK_WORDS] = {0};
    uint64_t used = KEY_BYTES;
    blake2s state;
    blake2s_begin(&state, KEY_BYTES, NAME_PURPOSE, 0);
    memcpy(block, root, KEY_BYTES);
    while (used + bytes > sizeof(block)) {
        memcpy((uint8_t *)block + used, name, sizeof(block) - used);
        name += sizeof(block) - used;
        bytes -= sizeof(block) - used;
        blake2s_block(&state, block);
        memset(block, 0, sizeof(block));
        used = 0;
    }
    if (bytes) memcpy((uint8_t *)block + used, name, bytes);
    blake2s_last(&state, block, (uint32_t)(used + bytes));
    memcpy(key, state.h, KEY_BYTES);
}

int64_t cxlkv_object_keys(const uint8_t *names, const uint64_t *ends, uint64_t count,
                          const uint8_t *root, uint8_t *keys) {
    for (uint64_t i = 0, begin = 0; i < count; begin = ends[i++]) {
        if (ends[i] < begin)
            return fail(CXLKV_E_ARGUMENT, "name %lu ends before it begins", i);
        key_of(names + begin, ends[i] - begin, root, keys + i * KEY_BYTES);
    }
    return (int64_t)count;
}
