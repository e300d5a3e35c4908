/* What the tests of objects share: a layout, known bytes, puts whose buffers begin anywhere, and
 * the three ways to read. Not a test itself. */
#pragma once
#include "check.h"

enum { BUFFERS_MAX = 16 };

static inline cxlkv_layout object_layout(uint32_t object_bytes, bool checksum) {
    return (cxlkv_layout){.layers = 1, .kv_heads = 1, .head_dim = 1, .value_head_dim = 1,
                          .page_tokens = object_bytes, .dtype = CXLKV_BYTES, .group_count = 1,
                          .values = CXLKV_VALUES_OBJECT, .checksum = checksum,
                          .shard = {0, 1, 0, 1}};
}

static inline cxlkv_pool *object_pool(const char *path, uint32_t object_bytes, bool checksum,
                                      uint64_t capacity, uint32_t threads) {
    cxlkv_layout layout = object_layout(object_bytes, checksum);
    cxlkv_pool *pool;
    CHECK(cxlkv_pool_create(path, &layout, NULL, capacity, 0, NULL, 0, &pool) == 0);
    CHECK(cxlkv_pool_set(pool, CXLKV_SET_THREADS, threads) == 0);
    return pool;
}

/* Eight bytes at a time: sanitizers are slow. */
static inline void fill(uint8_t *bytes, uint64_t mark, uint64_t count) {
    uint64_t state = mark * 7919 + 1;
    for (uint64_t i = 0; i < count; i += sizeof(state)) {
        uint64_t word = random_next(&state);
        memcpy(bytes + i, &word, min_u64(sizeof(word), count - i));
    }
}

static inline bool is_filled(const uint8_t *bytes, uint64_t mark, uint64_t count) {
    uint64_t state = mark * 7919 + 1;
    for (uint64_t i = 0; i < count; i += sizeof(state)) {
        uint64_t word = random_next(&state);
        if (memcmp(bytes + i, &word, min_u64(sizeof(word), count - i)) != 0) return false;
    }
    return true;
}

typedef struct object_key {
    uint8_t bytes[16];
} object_key;

static inline object_key key_of(uint64_t name) {
    object_key key;
    test_hashes(key.bytes, name, 1);
    return key;
}

/* Where an object lies. */
static inline uint32_t page_of(cxlkv_pool *pool, uint64_t name, uint64_t *generation) {
    uint8_t hash[16];
    uint32_t page;
    CHECK(cxlkv_names(pool, 1, key_of(name).bytes, 1, hash) == 0);
    CHECK(cxlkv_find_pages(pool, 1, hash, &page, generation) == 1);
    return page;
}

/* `count` bytes cut into buffers whose borders lie anywhere; some are empty. */
typedef struct pieces {
    uint64_t addresses[BUFFERS_MAX], sizes[BUFFERS_MAX], starts[2];
    cxlkv_buffers buffers;
} pieces;

static inline void cut_up(pieces *p, uint8_t *bytes, uint64_t count, uint64_t *seed) {
    uint64_t at = 0, used = 0;
    while (used < BUFFERS_MAX && (at < count || used == 0)) {
        uint64_t some = random_below(seed, (uint32_t)(count / 3 + 2));
        if (used == BUFFERS_MAX - 1 || some > count - at) some = count - at;
        p->addresses[used] = (uintptr_t)bytes + at;
        p->sizes[used++] = some;
        at += some;
    }
    p->starts[0] = 0;
    p->starts[1] = used;
    p->buffers = (cxlkv_buffers){.addresses = p->addresses, .sizes = p->sizes,
                                 .starts = p->starts};
}

/* How many are new, or the error. */
static inline int64_t put_as(cxlkv_pool *pool, uint64_t name, uint64_t mark, uint64_t count,
                             uint32_t replaces, uint64_t *seed) {
    uint64_t odd = random_below(seed, 64);
    uint8_t *bytes = malloc(count + odd + 1);
    pieces from;
    int32_t code;
    CHECK(bytes);
    fill(bytes + odd, mark, count);
    cut_up(&from, bytes + odd, count, seed);
    int64_t new = cxlkv_objects_put(pool, 1, key_of(name).bytes, &from.buffers, replaces,
                                    &code);
    CHECK(new < 0 || new == (code == 0));
    free(bytes);
    return new;
}

static inline int64_t put(cxlkv_pool *pool, uint64_t name, uint64_t mark, uint64_t count,
                          uint64_t *seed) {
    return put_as(pool, name, mark, count, 0, seed);
}

/* Its size, or why there is none; its bytes are compared, what lies behind them is not touched.
 * A call that lost memory of the pool ends, by an error, has copied nothing but what is right. */
static inline int64_t get(cxlkv_pool *pool, uint64_t name, uint64_t mark, uint64_t room,
                          uint64_t *seed) {
    enum { BEHIND = 9, UNTOUCHED = 0x5a };
    uint64_t odd = random_below(seed, 64);
    uint8_t *out = malloc(room + odd + BEHIND), untouched[BEHIND];
    pieces to;
    int64_t size;
    CHECK(out);
    memset(out, UNTOUCHED, room + odd + BEHIND);
    memset(untouched, UNTOUCHED, BEHIND);
    cut_up(&to, out + odd, room, seed);
    int64_t code = cxlkv_objects_get(pool, 1, key_of(name).bytes, &to.buffers, &size);
    if (code >= 0) CHECK(code == (size < 0 ? 0 : size));
    if (code >= 0 && size >= 0) CHECK(is_filled(out + odd, mark, (uint64_t)size));
    for (uint64_t i = 0; code >= 0 && size == CXLKV_OBJECT_DAMAGED && i < room; i++)
        CHECK(out[odd + i] == 0);
    uint64_t first = code < 0 || size == CXLKV_OBJECT_ABSENT ? 0
                     : size < 0                              ? room
                                                             : (uint64_t)size;
    uint8_t *right = malloc(room + 1);
    CHECK(right);
    fill(right, mark, room);
    for (uint64_t i = first; i < room; i++) {
        uint8_t byte = out[odd + i];
        bool copied = code == -CXLKV_E_POISON && (byte == right[i] || byte == 0);
        CHECK(byte == UNTOUCHED || copied);
    }
    free(right);
    CHECK(memcmp(out + odd + room, untouched, BEHIND) == 0);
    free(out);
    return code < 0 ? code : size;
}

/* In place: the lease is the caller's. */
static inline cxlkv_lease *lease_of(cxlkv_pool *pool, uint64_t name, int64_t *size,
                                    const uint8_t **at) {
    cxlkv_lease *lease;
    uint64_t address;
    int64_t code = cxlkv_lease_take(pool, 1, key_of(name).bytes, &address, size, &lease);
    CHECK(code == 1 && (address != 0) == (*size >= 0 && *size <= pool->layout.page_tokens));
    *at = (const uint8_t *)(uintptr_t)address;
    return lease;
}

static inline int64_t size_of(cxlkv_pool *pool, uint64_t name) {
    int64_t size, code = cxlkv_objects_get(pool, 1, key_of(name).bytes, NULL, &size);
    CHECK(code == (size >= 0));
    return size;
}

static inline int64_t forget(cxlkv_pool *pool, uint64_t name) {
    return cxlkv_forget(pool, 1, key_of(name).bytes, NULL);
}

/* By each way of reading. count: its size, or why it has none. */
static inline void expect(cxlkv_pool *pool, uint64_t name, uint64_t mark, int64_t count,
                          uint64_t *seed) {
    uint64_t room = object_bytes_max(&pool->layout), bytes = count < 0 ? 1 : (uint64_t)count;
    uint8_t *out = malloc(room);
    const uint8_t *at;
    int64_t size;
    CHECK(out);
    CHECK(get(pool, name, mark, room, seed) == count);
    uint64_t from = random_below(seed, (uint32_t)bytes);
    cxlkv_range halves[2] = {{.bytes = from, .target = 3},
                             {.offset = from, .bytes = bytes - from, .target = 3 + from}};
    if (count == CXLKV_OBJECT_ABSENT || bytes + 3 <= room) {
        int64_t sizes[2];
        CHECK(cxlkv_objects_ranges(pool, 1, key_of(name).bytes, 2, halves, out, room, sizes) >= 0);
        CHECK(sizes[0] == (count < 0 ? count : (int64_t)from));
        CHECK(sizes[1] == (count < 0 ? count : (int64_t)(bytes - from)));
        CHECK(count < 0 || is_filled(out + 3, mark, bytes));
    }
    cxlkv_lease *lease = lease_of(pool, name, &size, &at);
    CHECK(size == count && (!at || is_filled(at, mark, bytes))); /* one of several pages has none */
    cxlkv_lease_destroy(&lease);
    free(out);
}
