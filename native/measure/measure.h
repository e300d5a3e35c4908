/* What the measuring loops include, and C programs that call them. */
#pragma once
#include "base/clock.h"
#include "base/types.h"
#include "measure/measure_abi.h"
