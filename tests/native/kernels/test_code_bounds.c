/* Goal: digests of encoded keys in 8 bits bound what they are made of, by little more than a step,
 * and all instruction sets have the same. Method: bounds of all sizes, random and at the ends,
 * decoded and compared; digests of random keys against the keys that codes stand for. */
#include "kernel_tests.h"

enum { DIM_MAX = CODE_DIM_MAX, ROUNDS = 2 };

static uint64_t seed = 340034;

static float random_unit(void) { return (float)random_below(&seed, 1 << 24) / (1 << 23) - 1; }

/* In ascending order. */
static void place(float *bounds, uint32_t dim, uint32_t d, float a, float b) {
    bounds[d] = a < b ? a : b;
    bounds[dim + d] = a < b ? b : a;
}

static float largest_of(const float *bounds, uint32_t dim) {
    float largest = 0;
    for (uint32_t i = 0; i < 2 * dim; i++) largest = fmaxf(largest, fabsf(bounds[i]));
    return largest;
}

/* That what comes back is outside of them, by a step at most. */
static void check_outside(const float *bounds, uint32_t dim) {
    int8_t codes[2 * DIM_MAX];
    float back[2 * DIM_MAX], step = code_bounds_step(largest_of(bounds, dim));
    CHECK(isfinite(step) && step >= 0x1p-126f);
    code_bounds_encode(bounds, dim, step, codes);
    code_bounds_decode(codes, step, dim, back);
    for (uint32_t d = 0; d < dim; d++) {
        CHECK(back[d] <= bounds[d] && back[dim + d] >= bounds[dim + d]);
        CHECK((double)bounds[d] - (double)back[d] <= (double)step * 1.0001);
        CHECK((double)back[dim + d] - (double)bounds[dim + d] <= (double)step * 1.0001);
    }
}

static void all_sizes(void) {
    float bounds[2 * DIM_MAX];
    for (int exponent = -149; exponent <= 126; exponent++)
        for (uint32_t round = 0; round < 40; round++) {
            uint32_t dim = 1 + random_below(&seed, 256);
            for (uint32_t d = 0; d < dim; d++)
                place(bounds, dim, d, ldexpf(random_unit(), exponent),
                      ldexpf(random_unit(), exponent - (int)random_below(&seed, 12)));
            check_outside(bounds, dim);
        }
}

static void at_the_ends(void) {
    static const float ends[] = {0,      0x1p-126f, -0x1p-126f, 0x1p-149f, -0x1p-149f,
                                 1e38f,  -3.4e38f,  0x1p-100f,  127e-31f,  0x1.fcp-94f,
                                 1,      -1,        1e-30f,     127,       128};
    enum { ENDS = sizeof(ends) / sizeof(ends[0]) };
    float bounds[2 * DIM_MAX];
    for (uint32_t i = 0; i < ENDS; i++)
        for (uint32_t j = 0; j < ENDS; j++) {
            place(bounds, 1, 0, ends[i], ends[j]);
            check_outside(bounds, 1);
            place(bounds, 2, 0, ends[i], ends[i]);
            place(bounds, 2, 1, ends[j], ends[j]);
            check_outside(bounds, 2);
        }
}

/* A float and those next to it, as the largest: 127 steps reach it. */
static void the_largest_is_reached(void) {
    for (uint32_t round = 0; round < 200000; round++) {
        uint32_t bits = (uint32_t)random_next(&seed) & 0x7effffff;
        float bounds[2], value;
        memcpy(&value, &bits, sizeof(value));
        bounds[0] = round & 1 ? -value : value;
        bounds[1] = value;
        check_outside(bounds, 1);
    }
}

/* Keys of a piece, some of them zeros, or no numbers, of sizes that are more or less alike; returns
 * how many tokens. */
static uint32_t draw_piece(const code_form *form, uint32_t page_tokens, uint8_t *piece, bool bad) {
    uint16_t *scales = (uint16_t *)(void *)(piece + code_scales_offset(form, page_tokens));
    memset(piece, 0, code_bytes(form, page_tokens));
    const int apart = 2 + (int)random_below(&seed, 2) * (int)random_below(&seed, 40);
    for (uint32_t t = 0; t < page_tokens; t++) {
        float row[DIM_MAX], size = ldexpf(1, (int)random_below(&seed, apart) - apart / 2);
        if (random_below(&seed, 20) == 0) size = 0;
        for (uint32_t d = 0; d < form->dim; d++) row[d] = size * random_unit();
        if (bad && t == page_tokens / 2) row[form->dim / 2] = t % 2 ? NAN : INFINITY;
        kernels_serial.code_encode(form, CXLKV_FLOAT32, row, 0, t, 1, piece, scales, NULL);
    }
    return bad ? page_tokens : 1 + random_below(&seed, page_tokens);
}

/* Out of the rotated space, in double precision. */
static void turn_back(double *row, uint32_t dim) {
    model_transform(row, dim);
    for (uint32_t d = 0; d < dim; d++)
        if (sketch_signs(d / 64) >> d % 64 & 1) row[d] = -row[d];
}

/* Digests lie outside of all their tokens, by little more than a step. */
static void check_digest(const code_form *form, code_piece piece, uint32_t tokens, float scale,
                         const int8_t *codes) {
    float bounds[2 * DIM_MAX], decoded[DIM_MAX];
    double row[DIM_MAX], least[DIM_MAX], largest[DIM_MAX];
    code_bounds_decode(codes, scale, form->dim, bounds);
    for (uint32_t t = 0; t < tokens; t++) {
        kernels_serial.code_decode(form, piece, t, 1, decoded);
        for (uint32_t d = 0; d < form->dim; d++) row[d] = decoded[d]; /* exact */
        turn_back(row, form->dim);
        for (uint32_t d = 0; d < form->dim; d++) {
            CHECK(bounds[d] <= row[d] && row[d] <= bounds[form->dim + d]);
            least[d] = t ? fmin(row[d], least[d]) : row[d];
            largest[d] = t ? fmax(row[d], largest[d]) : row[d];
        }
    }
    for (uint32_t d = 0; d < form->dim; d++) {
        CHECK(least[d] - bounds[d] <= 1.0002 * scale);
        CHECK(bounds[form->dim + d] - largest[d] <= 1.0002 * scale);
    }
}

static void digests(const kernels *isa, uint64_t *unused) {
    (void)unused;
    _Alignas(64) static uint8_t piece[DIM_MAX * 80 + 512];
    static const uint32_t dims[] = {1,  16,  30,  48,  64,  80,   96,  112,
                                    128, 144, 256, 512, 768, 1008, 1024};
    static const uint32_t pages[] = {1, 7, 16, 20, 64};
    int8_t codes[2 * DIM_MAX], other[2 * DIM_MAX];
    for (uint32_t i = 0; i < 15 * 5 * 4 * ROUNDS; i++) {
        code_form form = {.bits = i % 2 ? 4 : 8, .dim = dims[i / 4 % 15]};
        uint32_t page_tokens = pages[i / 60 % 5];
        bool bad = i % 4 == 3;
        uint32_t tokens = draw_piece(&form, page_tokens, piece, bad);
        code_piece at = {piece, (const uint16_t *)(const void *)(
                                    piece + code_scales_offset(&form, page_tokens))};
        float scale = kernels_serial.code_digest(&form, at, tokens, codes);
        CHECK(isnan(scale) == bad);
        if (!bad) check_digest(&form, at, tokens, scale, codes);
        float same = isa->code_digest(&form, at, tokens, other);
        CHECK((isnan(scale) && isnan(same)) || scale == same);
        CHECK(memcmp(codes, other, 2 * form.dim) == 0);
    }
    printf("digests by %s\n", isa->name);
}

int main(void) {
    static const char *const isas[] = {"serial",      "avx2", "avx512",
                                       "avx512_bf16", "amx",  "neon", NULL};
    all_sizes();
    at_the_ends();
    the_largest_is_reached();
    test_each_isa(digests, seed, isas);
    return 0;
}
