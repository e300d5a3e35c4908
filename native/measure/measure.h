/* What the measuring loops include, and C programs that call them. */
#ifndef CXLKV_MEASURE_H
#define CXLKV_MEASURE_H
#include "base/clock.h"
#include "base/types.h"
#include "measure/measure_abi.h"
#endif
