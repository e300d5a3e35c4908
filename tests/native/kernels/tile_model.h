/* A model of AMX tiles in software: the operations that kernels_amx.c uses, as Intel's manual has
 * them (Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS ...). What would be
 * an invalid instruction ends the program. */
#pragma once
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TILE_COUNT = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

typedef struct model_tile {
    uint32_t rows, row_bytes; /* 0: not configured */
    uint8_t bytes[TILE_ROWS][TILE_ROW_BYTES];
} model_tile;

static _Thread_local model_tile model_tiles[TILE_COUNT];
static _Thread_local bool model_is_configured;

/* Not assert(), which a release build leaves out: nothing else would see these mistakes. */
static inline void model_demand(bool holds, const char *what) {
    if (holds)
        return;
    printf("tiles: %s\n", what);
    abort();
}
#define MODEL_DEMAND(condition) model_demand(condition, #condition)

static inline void model_load_config(const void *memory) {
    uint8_t config[64];
    memcpy(config, memory, sizeof config);
    MODEL_DEMAND(config[0] == 1); /* palette; 0 would be a release */
    MODEL_DEMAND(config[1] == 0); /* start row: of an interrupted load only */
    for (int i = 2; i < 16; i++)
        MODEL_DEMAND(config[i] == 0);
    memset(model_tiles, 0, sizeof model_tiles);
    for (int i = 0; i < TILE_ROWS; i++) {
        uint16_t row_bytes;
        memcpy(&row_bytes, config + 16 + 2 * i, sizeof row_bytes);
        uint8_t rows = config[48 + i];
        MODEL_DEMAND(i < TILE_COUNT || (rows == 0 && row_bytes == 0));
        MODEL_DEMAND(rows <= TILE_ROWS && row_bytes <= TILE_ROW_BYTES);
        MODEL_DEMAND((rows == 0) == (row_bytes == 0));
        if (i < TILE_COUNT) {
            model_tiles[i].rows = rows;
            model_tiles[i].row_bytes = row_bytes;
        }
    }
    model_is_configured = true;
}

static inline model_tile *model_tile_at(int index) {
    MODEL_DEMAND(model_is_configured);
    MODEL_DEMAND(index >= 0 && index < TILE_COUNT && model_tiles[index].rows > 0);
    return &model_tiles[index];
}

static inline void model_load(int index, const void *memory, size_t stride_bytes) {
    model_tile *tile = model_tile_at(index);
    memset(tile->bytes, 0, sizeof tile->bytes);
    for (uint32_t row = 0; row < tile->rows; row++)
        memcpy(tile->bytes[row], (const char *)memory + row * stride_bytes, tile->row_bytes);
}

static inline void model_store(int index, void *memory, size_t stride_bytes) {
    const model_tile *tile = model_tile_at(index);
    for (uint32_t row = 0; row < tile->rows; row++)
        memcpy((char *)memory + row * stride_bytes, tile->bytes[row], tile->row_bytes);
}

static inline void model_zero(int index) {
    model_tile *tile = model_tile_at(index);
    memset(tile->bytes, 0, sizeof tile->bytes);
}

/* Denormals are zeros, as operands (DAZ) and as results (FTZ); their sign stays. */
static inline float model_flush(float value) {
    return fpclassify(value) == FP_SUBNORMAL ? copysignf(0, value) : value;
}

static inline float model_element(const model_tile *tile, uint32_t row, uint32_t index) {
    uint16_t half;
    memcpy(&half, tile->bytes[row] + 2 * index, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return model_flush(value);
}

/* TDPBF16PS: the even and the odd products have a sum of their own, to the nearest even. */
static inline void model_dot(int to, int left, int right) {
    model_tile *sum = model_tile_at(to);
    const model_tile *a = model_tile_at(left), *b = model_tile_at(right);
    MODEL_DEMAND(to != left && to != right && left != right);
    MODEL_DEMAND(a->rows == sum->rows && b->row_bytes == sum->row_bytes);
    MODEL_DEMAND(a->row_bytes % 4 == 0 && b->row_bytes % 4 == 0 && a->row_bytes / 4 == b->rows);
    for (uint32_t row = 0; row < sum->rows; row++)
        for (uint32_t column = 0; column < sum->row_bytes / 4; column++) {
            float parts[2] = {0, 0}, old;
            for (uint32_t pair = 0; pair < a->row_bytes / 4; pair++)
                for (uint32_t i = 0; i < 2; i++)
                    parts[i] = model_flush(fmaf(model_element(a, row, 2 * pair + i),
                                                model_element(b, pair, 2 * column + i), parts[i]));
            memcpy(&old, sum->bytes[row] + 4 * column, sizeof old);
            float part = model_flush(parts[0] + parts[1]);
            float result = model_flush(model_flush(old) + part);
            memcpy(sum->bytes[row] + 4 * column, &result, sizeof result);
        }
    for (uint32_t row = sum->rows; row < TILE_ROWS; row++)
        memset(sum->bytes[row], 0, TILE_ROW_BYTES);
}

static inline void model_release(void) {
    memset(model_tiles, 0, sizeof model_tiles);
    model_is_configured = false;
}
