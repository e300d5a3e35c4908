/* What the store door's files share: an object's place in the pool, found, held and read. */
#pragma once
#include "format/types.h"

/* What this process keeps with a pool of objects. */
typedef struct pool_objects {
    atomic_uint lent;            /* that are held by leases */
    atomic_ulong seen[];         /* by page: the generation whose CRC was right here, plus one */
} pool_objects;
static inline pool_objects *objects_of(const cxlkv_pool *pool) {
    return atomic_load_explicit(&pool->owner[OWNER_OBJECTS], memory_order_relaxed);
}

/* An object of several pages fills all but the last; each is one piece. */
typedef struct object_page {
    uint64_t generation;
    uint32_t page;
} object_page;

typedef struct object_place {
    uint64_t generation;
    object_page *rest;           /* the pages behind the first; NULL: there are none */
    uint32_t page;
    uint32_t bytes;
    int32_t code;                /* 0, CXLKV_OBJECT_ABSENT or CXLKV_OBJECT_DAMAGED */
    bool held;
    bool published;              /* of a reservation: it is an object by now */
} object_place;
static inline uint32_t place_pages(const cxlkv_pool *pool, const object_place *place) {
    return place->rest ? object_pages(&pool->layout, place->bytes) : 1;
}
static inline uint32_t place_page(const object_place *place, uint32_t i) {
    return i ? place->rest[i - 1].page : place->page;
}
/* The bytes of its page i. */
static inline uint32_t place_bytes(const cxlkv_pool *pool, const object_place *place, uint32_t i) {
    if (!place->rest) return place->bytes;
    return min_u32(place->bytes - i * pool->layout.page_tokens, pool->layout.page_tokens);
}
/* Its bytes, or why there are none. */
static inline int64_t object_size(const object_place *place) {
    return place->code < 0 ? place->code : (int64_t)place->bytes;
}
