/* Rows that objects keep encoded, a piece of some of them at a time. */
#include "kernels/kernels.h"
#include "objects/rows.h"

static code_form codes_of(const cxlkv_row_form *form) {
    return (code_form){.bits = form->encoding == CXLKV_ENCODING_INT4 ? 4 : 8, .dim = form->dim};
}

size_t object_piece_bytes(const cxlkv_row_form *form, uint32_t count) {
    const code_form codes = codes_of(form);
    const bool is_fp8 = form->encoding == CXLKV_ENCODING_FP8_E4M3;
    return align_up(is_fp8 ? (size_t)count * form->dim : code_bytes(&codes, count), LINE_BYTES);
}

int64_t cxlkv_row_form_bytes(const cxlkv_row_form *form, uint64_t bytes) {
    if (form->encoding == CXLKV_ENCODING_NONE) return (int64_t)bytes;
    if (form->encoding > CXLKV_ENCODING_FP8_E4M3)
        return fail(CXLKV_E_ARGUMENT, "objects keep rows as int8, int4 or fp8_e4m3");
    if (form->dtype > CXLKV_FLOAT32)
        return fail(CXLKV_E_ARGUMENT, "rows of an object are bfloat16, float16 or float32");
    if (form->dim < 1 || form->dim > CODE_DIM_MAX)
        return fail(CXLKV_E_ARGUMENT, "rows of %u channels: 1 to %d are encoded", form->dim,
                    CODE_DIM_MAX);
    const uint64_t row = row_form_row_bytes(form), rows = bytes / row;
    if (bytes % row)
        return fail(CXLKV_E_ARGUMENT, "a buffer of %lu bytes is no whole number of rows of %u "
                    "channels, %lu bytes each", bytes, form->dim, row);
    if (rows > INT64_MAX / OBJECT_PIECE_BYTES_MAX)
        return fail(CXLKV_E_ARGUMENT, "a buffer of %lu bytes", bytes);
    const uint32_t left = rows % OBJECT_PIECE_ROWS;
    return (int64_t)(rows / OBJECT_PIECE_ROWS * object_piece_bytes(form, OBJECT_PIECE_ROWS) +
                     object_piece_bytes(form, left));
}

void object_piece_encode(const cxlkv_row_form *form, const uint8_t *rows, uint32_t count,
                         uint8_t *piece) {
    const code_form codes = codes_of(form);
    memset(piece, 0, object_piece_bytes(form, count)); /* what no row is in */
    if (form->encoding == CXLKV_ENCODING_FP8_E4M3)
        kernels_current()->fp8_encode((int)form->dtype, rows, (size_t)count * form->dim, piece);
    else
        code_rows_encode(&codes, (int)form->dtype, rows, row_form_row_bytes(form), 0, count, piece,
                         (uint16_t *)(void *)(piece + code_scales_offset(&codes, count)));
}

static void decode_fp8(const cxlkv_row_form *form, const uint8_t *piece, size_t count,
                       uint8_t *rows) {
    enum { NUMBERS = 1024 };
    _Alignas(LINE_BYTES) uint16_t numbers[NUMBERS];
    _Alignas(LINE_BYTES) float wide[NUMBERS];
    const kernels *isa = kernels_current();
    for (size_t at = 0, here; at < count; at += here) {
        here = min_u64(NUMBERS, count - at);
        uint8_t *to = rows + at * dtype_bytes(form->dtype);
        isa->fp8_decode(piece + at, here, numbers, NULL);
        if (form->dtype == CXLKV_BFLOAT16) {
            memcpy(to, numbers, here * sizeof(*numbers));
            continue;
        }
        isa->to_float(CXLKV_BFLOAT16, numbers, here, wide);
        isa->from_float((int)form->dtype, wide, here, to);
    }
}

void object_piece_decode(const cxlkv_row_form *form, const uint8_t *piece, uint32_t count,
                         uint8_t *rows) {
    _Alignas(LINE_BYTES) float wide[CODE_TOKENS * CODE_DIM_MAX];
    const code_form codes = codes_of(form);
    const size_t scales = code_scales_offset(&codes, count);
    const code_piece its = {piece, (const uint16_t *)(const void *)(piece + scales)};
    const kernels *isa = kernels_current();
    if (form->encoding == CXLKV_ENCODING_FP8_E4M3) {
        decode_fp8(form, piece, (size_t)count * form->dim, rows);
        return;
    }
    for (uint32_t first = 0, here; first < count; first += here) {
        here = min_u32(CODE_TOKENS, count - first);
        isa->code_decode(&codes, its, first, here, wide);
        code_unrotate(wide, here, form->dim);
        isa->from_float((int)form->dtype, wide, (size_t)here * form->dim,
                        rows + first * row_form_row_bytes(form));
    }
}
