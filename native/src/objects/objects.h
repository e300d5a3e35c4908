/* Objects are found, held, verified, taken and published. */
#pragma once
#include "objects/types.h"

/* What a pool of objects keeps for this folder: made before its use, freed with its handle. */
int objects_begin(cxlkv_pool *pool);
void objects_free(cxlkv_pool *pool);
int objects_busy(const cxlkv_pool *pool); /* an error when some are held by leases */
int objects_check(const cxlkv_pool *pool); /* that it stores objects */
/* Of each its size, or why there is none; returns how many there are. */
int64_t objects_sizes(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, int64_t *sizes);
/* Finds the objects of these keys and holds each that is there. */
int objects_hold(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, object_place *places);
/* Gives back what is held of them; returns how many. */
uint32_t objects_drop(cxlkv_pool *pool, uint32_t count, object_place *places);
/* Verifies those that this process has not seen right, together; sets their codes. */
int objects_verify(cxlkv_pool *pool, uint32_t count, object_place *places);
uint8_t *object_at(const cxlkv_pool *pool, uint32_t page);
/* Pages for those of the keys that are not there, the others' code is CXLKV_RECORD_PRESENT; keys
 * NULL: for all. replaces: for those that are there, too. */
int objects_take(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                 object_place *places, int32_t *codes);
/* Publishes the held places whose code is 0, unless somebody was faster, or in place of what is
 * there; returns how many. */
int64_t objects_publish(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, bool replaces,
                        const object_place *places, int32_t *codes);
/* The CRC that page i of a held object was put with; false: its header or table is not whole. */
bool object_crc(const cxlkv_pool *pool, const object_place *place, uint32_t i, uint32_t *crc);
void object_set_damaged(cxlkv_pool *pool, object_place *place);
