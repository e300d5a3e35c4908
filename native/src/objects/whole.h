/* Objects of several pages: found, published and forgotten as one. */
#pragma once
#include "objects/types.h"

void key_hash(const uint8_t *keys, uint64_t i, uint32_t page, uint64_t hash[2]); /* of a page */
/* The list of its other pages, for one that has any. */
int place_make_rest(const cxlkv_pool *pool, object_place *place);
void places_free(uint32_t count, object_place *places); /* their lists */
/* Finds the pages behind the first, whose descriptor is `line`; false: not all are there. */
bool whole_find(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const descriptor *line,
                object_place *place);
/* Forgets what there is of one that is not whole. */
void whole_drop(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const descriptor *line);
/* Publishes an object, its first page last; false: it cannot be, and nothing of it is found. */
bool whole_publish(cxlkv_pool *pool, const uint8_t *keys, uint64_t i, const object_place *place);
void whole_hash(const uint64_t first[2], uint32_t page, uint64_t hash[2]); /* of its page */
bool whole_forget(cxlkv_pool *pool, const uint64_t first[2]); /* all its pages */
/* Frees the pages that a death has left of objects. */
void whole_sweep(cxlkv_pool *pool);
