/* The bytes of an object that holds the rows of a buffer. */
#pragma once
#include "format/layout.h"

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
