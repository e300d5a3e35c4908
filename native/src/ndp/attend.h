/* A layer is attended to in this process, by arguments that were checked. */
#pragma once
#include "ndp/types.h"

/* What is to be said of the numbers of an attend, whoever asks: a caller of this process, or a
 * request to the worker. Pages and weights themselves are looked at when they are used. */
int attend_bounds(const cxlkv_layout *layout, const cxlkv_attend_args *args, uint32_t rows,
                  uint32_t sequences);
int attend_check(const cxlkv_batch *batch, const cxlkv_attend_args *args);
/* cxlkv_batch_attend in this process, by arguments that were checked; parts 0: chosen. */
int64_t attend_here(cxlkv_batch *batch, cxlkv_attend_args *args, uint32_t parts);
