/* What method "auto" comes to. */
#pragma once
#include "ndp/types.h"

/* CXLKV_METHOD_EXACT or _TWO_STAGE; where all pages may be attended to instead, also _ALL. */
uint32_t cheapest_method(cxlkv_batch *batch, const cxlkv_select_args *args, bool may_skip);
