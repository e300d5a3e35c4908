/* Digests of encoded keys: the minimum and maximum of each channel in 8 bits, rounded outward. */
#pragma once
#include <stdint.h>

#include "kernels/codes.h"

/* Of steps: bounds are taken for so much wider than they were found. */
#define CODE_BOUNDS_MARGIN 0x1p-14f

/* code_digest: of what the first `tokens` tokens of keys stand for, out of the rotated space: codes
 * [2][dim], minima first. Returns their scale: code * scale is at or outside of each bound. NaN: a
 * key is none of numbers, and so is what is decoded. All instruction sets have the same bits.
 *
 * To the bit: 2 * code + 1 - 2^bits, transformed, is whole and exact; times half the token's scale,
 * rounded once; the least and the largest of all tokens; times the norm of the channel's block (1 /
 * root of its size), and the sign. Then code_bounds_step(), code_bounds_encode(). */
float code_digest_serial(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes);
#if defined(__x86_64__)
float code_digest_avx2(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes);
float code_digest_avx512(const code_form *form, code_piece piece, uint32_t tokens, int8_t *codes);
#endif
/* The step of codes of bounds up to `largest`, which is finite. */
float code_bounds_step(float largest);
/* bounds [2][dim] by codes, as kernels.h has them. */
void code_bounds_encode(const float *bounds, uint32_t dim, float step, int8_t *codes);
void code_bounds_decode(const int8_t *codes, float scale, uint32_t dim, float *bounds);
