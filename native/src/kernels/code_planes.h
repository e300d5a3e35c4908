/* Codes of 8 bits in two planes of 4: what pages of progressive pools hold.
 *
 * The upper plane has the upper 4 bits of each code, and lies as codes of 4 bits do; the lower
 * plane has the others, and lies likewise. A piece is the upper planes of its blocks, the scales,
 * and from the next line on the lower planes. So the front of a piece is one of 4 bits, but for its
 * scales, which are those of 8: what 4 bits stand for is 16 times as much by them. */
#pragma once
#include <string.h>

#include "kernels/codes.h"

#define CODE_UPPER_STEP 16.0f    /* a step of the upper plane, in those of 8 bits */

static inline code_form code_upper(const code_form *form) {
    return (code_form){.bits = 4, .dim = form->dim, .values = form->values};
}

/* Between a block of 8 bits (form's) and its two planes, all of which begin on a line. A line of a
 * plane is two of 8 bits: its low nibbles, then its high ones. */
enum { CODE_LINE_BYTES = 64 };
typedef struct code_line_pair {
    size_t first, second;
} code_line_pair;
static inline code_line_pair code_lines_of(const code_form *form, size_t line) {
    const size_t apart = form->values ? code_channels(form->dim) / CODE_CHANNELS : 1;
    const size_t first = line + line / apart * apart;
    return (code_line_pair){first * CODE_LINE_BYTES, (first + apart) * CODE_LINE_BYTES};
}

static inline __attribute__((always_inline)) void
code_planes_split(const code_form *form, const uint8_t *restrict block, uint8_t *restrict upper,
                  uint8_t *restrict lower) {
    const size_t lines = code_block_bytes(form) / (2 * CODE_LINE_BYTES);
    for (size_t line = 0; line < lines; line++) {
        const code_line_pair at = code_lines_of(form, line);
        const uint8_t *first = block + at.first, *second = block + at.second;
        for (size_t i = 0; i < CODE_LINE_BYTES; i++) {
            const uint8_t a = first[i], b = second[i];
            upper[line * CODE_LINE_BYTES + i] = (uint8_t)(a >> 4 | (b & 0xf0));
            lower[line * CODE_LINE_BYTES + i] = (uint8_t)((a & 0x0f) | (uint8_t)(b << 4));
        }
    }
}

static inline __attribute__((always_inline)) void
code_planes_join(const code_form *form, const uint8_t *restrict upper,
                 const uint8_t *restrict lower, uint8_t *restrict block) {
    const size_t lines = code_block_bytes(form) / (2 * CODE_LINE_BYTES);
    for (size_t line = 0; line < lines; line++) {
        const code_line_pair at = code_lines_of(form, line);
        uint8_t *first = block + at.first, *second = block + at.second;
        for (size_t i = 0; i < CODE_LINE_BYTES; i++) {
            const uint8_t a = upper[line * CODE_LINE_BYTES + i];
            const uint8_t b = lower[line * CODE_LINE_BYTES + i];
            first[i] = (uint8_t)((uint8_t)(a << 4) | (b & 0x0f));
            second[i] = (uint8_t)((a & 0xf0) | b >> 4);
        }
    }
}

/* The largest of each column of [rows][16], and of what it was, to `most`; a NaN stays. */
static inline __attribute__((always_inline)) void code_raise(const float *restrict rows,
                                                             uint32_t count,
                                                             float *restrict most) {
    typedef float sixteen __attribute__((vector_size(CODE_TOKENS * sizeof(float))));
    typedef int32_t mask __attribute__((vector_size(CODE_TOKENS * sizeof(int32_t))));
    sixteen best, row;
    memcpy(&best, most, sizeof(best));
    for (uint32_t j = 0; j < count; j++) {
        memcpy(&row, rows + j * CODE_TOKENS, sizeof(row));
        const mask larger = (mask)(row > best) | (mask)(row != row);
        best = (sixteen)(((mask)row & larger) | ((mask)best & ~larger));
    }
    memcpy(most, &best, sizeof(best));
}

#define CODE_PLANES_FUNCTIONS(isa)                                                               \
    void code_split_##isa(const code_form *form, const uint8_t *block, uint8_t *upper,           \
                          uint8_t *lower);                                                       \
    void code_join_##isa(const code_form *form, const uint8_t *upper, const uint8_t *lower,      \
                         uint8_t *block);                                                        \
    void code_raise_##isa(const float *rows, uint32_t count, float *most)
#define CODE_PLANES_OF(isa)                                                                      \
    void code_split_##isa(const code_form *form, const uint8_t *block, uint8_t *upper,           \
                          uint8_t *lower) {                                                      \
        code_planes_split(form, block, upper, lower);                                            \
    }                                                                                            \
    void code_join_##isa(const code_form *form, const uint8_t *upper, const uint8_t *lower,      \
                         uint8_t *block) {                                                       \
        code_planes_join(form, upper, lower, block);                                             \
    }                                                                                            \
    void code_raise_##isa(const float *rows, uint32_t count, float *most) {                      \
        code_raise(rows, count, most);                                                           \
    }
CODE_PLANES_FUNCTIONS(serial);
#if defined(__x86_64__)
CODE_PLANES_FUNCTIONS(avx2);
CODE_PLANES_FUNCTIONS(avx512);
#elif defined(__aarch64__)
CODE_PLANES_FUNCTIONS(neon);
#endif
