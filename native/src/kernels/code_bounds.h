/* Digests of encoded keys: the minimum and maximum of each channel in 8 bits, rounded outward. */
#ifndef CXLKV_CODE_BOUNDS_H
#define CXLKV_CODE_BOUNDS_H
#include <stdint.h>

/* Bounds are [2][dim], minima first, as kernels.h has them: a NaN in both where one was seen. */

/* Widens `bounds` to those of more tokens. */
void code_bounds_merge(float *bounds, const float *more, uint32_t dim);
/* codes [2][dim]; returns the scale: code * scale is at or outside of each bound. NaN: a bound is
 * no number, or infinite, and so are all when they are decoded. */
float code_bounds_encode(const float *bounds, uint32_t dim, int8_t *codes);
void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds);
#endif
