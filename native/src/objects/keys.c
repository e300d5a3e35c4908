/* Keys of objects from their names, hashed as cxlkv/objects.py says, in terms of hashlib. */
#include "base/types.h"
#include "kernels/blake2s.h"

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

/* Whether this and the next names are as many as there are lanes, each of which fits into a block
 * behind the root, as most do. */
static bool are_short(const uint64_t *ends, uint64_t first, uint64_t count) {
    enum { ROOM = 4 * BLAKE2S_BLOCK_WORDS - KEY_BYTES };
    if (count - first < BLAKE2S_LANES) return false;
    for (uint64_t i = first; i < first + BLAKE2S_LANES; i++) {
        uint64_t begin = i ? ends[i - 1] : 0;
        if (ends[i] < begin || ends[i] - begin > ROOM) return false;
    }
    return true;
}

static void keys_of(const uint8_t *names, const uint64_t *ends, uint64_t first, const uint8_t *root,
                    uint8_t *keys) {
    uint32_t blocks[BLAKE2S_LANES][BLAKE2S_BLOCK_WORDS] = {{0}};
    uint32_t bytes[BLAKE2S_LANES], h[BLAKE2S_LANES][8];
    blake2s start;
    blake2s_begin(&start, KEY_BYTES, NAME_PURPOSE, 0);
    for (uint64_t lane = 0; lane < BLAKE2S_LANES; lane++) {
        uint64_t begin = first + lane ? ends[first + lane - 1] : 0, end = ends[first + lane];
        memcpy(blocks[lane], root, KEY_BYTES);
        if (end > begin) memcpy((uint8_t *)blocks[lane] + KEY_BYTES, names + begin, end - begin);
        bytes[lane] = KEY_BYTES + (uint32_t)(end - begin);
    }
    blake2s_last_lanes(&start, blocks, bytes, h);
    for (uint64_t lane = 0; lane < BLAKE2S_LANES; lane++)
        memcpy(keys + (first + lane) * KEY_BYTES, h[lane], KEY_BYTES);
}

int64_t cxlkv_object_keys(const uint8_t *names, const uint64_t *ends, uint64_t count,
                          const uint8_t *root, uint8_t *keys) {
    int code = need(count, "ends", ends, "root", root, "keys", keys, NULL);
    if (code == 0) code = need(count ? ends[count - 1] : 0, "names", names, NULL);
    if (code < 0) return code;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t begin = i ? ends[i - 1] : 0;
        if (ends[i] < begin)
            return fail(CXLKV_E_ARGUMENT, "name %lu ends before it begins", i);
        if (are_short(ends, i, count)) {
            keys_of(names, ends, i, root, keys);
            i += BLAKE2S_LANES - 1;
        } else {
            key_of(names + begin, ends[i] - begin, root, keys + i * KEY_BYTES);
        }
    }
    return (int64_t)count;
}
