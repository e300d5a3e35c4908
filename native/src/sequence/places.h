/* For a GPU, which reads pages past the core: that chosen ones are whole. */
#pragma once
#include "sequence/types.h"

/* Of a list of pages for each sequence, by their CRCs; counts as a use of them. */
int chosen_verify(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked);
