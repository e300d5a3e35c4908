/* What the store door's files share: an object's place in the pool, found, held and read. */
#ifndef CXLKV_OBJECTS_H
#define CXLKV_OBJECTS_H
#include "kernels/codes.h"
#include "pool/pool.h"

typedef struct object_place {
    uint64_t generation;
    uint32_t page;
    uint32_t bytes;
    int32_t code;                /* 0, CXLKV_OBJECT_ABSENT or CXLKV_OBJECT_DAMAGED */
    bool held;
    bool published;              /* of a reservation: it is an object by now */
} object_place;

int objects_check(const cxlkv_pool *pool); /* that it stores objects */
/* Finds the objects of these keys and holds each that is there. */
int objects_hold(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, object_place *places);
/* Gives back what is held of them; returns how many. */
uint32_t objects_drop(cxlkv_pool *pool, uint32_t count, object_place *places);
/* Verifies those that this process has not seen right, together; sets their codes. */
int objects_verify(cxlkv_pool *pool, uint32_t count, object_place *places);
uint8_t *object_at(const cxlkv_pool *pool, uint32_t page);
/* Pages for those of the keys that are not there, the others' code is CXLKV_RECORD_PRESENT; keys
 * NULL: for all. */
int objects_take(cxlkv_pool *pool, uint32_t count, const uint8_t *keys, object_place *places,
                 int32_t *codes);
/* Publishes the held places whose code is 0, unless somebody was faster; returns how many. */
int64_t objects_publish(cxlkv_pool *pool, uint32_t count, const uint8_t *keys,
                        const object_place *places, int32_t *codes);
/* The CRC that a held object was put with; false when its header or table is not whole. */
bool object_crc(const cxlkv_pool *pool, const object_place *place, uint32_t *crc);
void object_set_damaged(cxlkv_pool *pool, object_place *place);
/* ---- rows.c ---- */
/* An object has the rows of a buffer in pieces of so many, the last one of those that are left.
 * A piece is codes in the form of keys, or bytes of fp8 row by row, filled up to a line with
 * zeros. */
enum { OBJECT_PIECE_ROWS = 64,
       OBJECT_PIECE_BYTES_MAX = OBJECT_PIECE_ROWS * (CODE_DIM_MAX + sizeof(uint16_t)) };
static inline size_t row_form_row_bytes(const cxlkv_row_form *form) {
    return form->dim * dtype_bytes(form->dtype);
}
/* Of a piece, count <= OBJECT_PIECE_ROWS. The form is one that cxlkv_row_form_bytes() takes. */
size_t object_piece_bytes(const cxlkv_row_form *form, uint32_t count);
void object_piece_encode(const cxlkv_row_form *form, const uint8_t *rows, uint32_t count,
                         uint8_t *piece);
void object_piece_decode(const cxlkv_row_form *form, const uint8_t *piece, uint32_t count,
                         uint8_t *rows);
/* ---- objects.c ---- */
/* Its bytes, or why there are none. */
static inline int64_t object_size(const object_place *place) {
    return place->code < 0 ? place->code : (int64_t)place->bytes;
}
#endif
