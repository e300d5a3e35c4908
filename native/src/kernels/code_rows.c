/* Rows into codes, whatever is in them. */
#include <math.h>

#include "kernels/kernels.h"

/* A row of numbers so large that their sums are none: of a smaller one, as all of its codes are at
 * their ends, and its scale the largest, in any case. One that has a NaN or an infinity stays. */
static void encode_huge(const code_form *form, int dtype, const uint8_t *row, uint32_t token,
                        uint8_t *blocks, uint16_t *scales) {
    const kernels *isa = kernels_current();
    float smaller[CODE_DIM_MAX];
    isa->to_float(dtype, row, form->dim, smaller);
    for (uint32_t d = 0; d < form->dim; d++) {
        if (!isfinite(smaller[d])) return;
        smaller[d] *= 0x1p-30f;
    }
    isa->code_encode(form, KERNEL_FLOAT32, smaller, 0, token, 1, blocks, scales, NULL);
}

static bool is_nan_half(uint16_t half) { return (half & 0x7fff) > 0x7c00; }

void code_rows_encode(const code_form *form, int dtype, const void *rows, size_t stride_bytes,
                      uint32_t at, uint32_t count, uint8_t *blocks, uint16_t *scales) {
    kernels_current()->code_encode(form, dtype, rows, stride_bytes, at, count, blocks, scales,
                                   NULL);
    for (uint32_t i = 0; i < count; i++)
        if (is_nan_half(scales[at + i]))
            encode_huge(form, dtype, (const uint8_t *)rows + i * stride_bytes, at + i, blocks,
                        scales);
}
