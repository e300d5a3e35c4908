/* Pages that a call used count as used. */
#pragma once
#include "sequence/types.h"

/* Pages of a call that succeeded, under the locks of its batch: those of its lists, or all that it
 * read. starts may be NULL where picked->pages are of whole sequences, or NULL. */
void hotness_count(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts);
/* Whether an attend has to say what its pages weigh, though its caller did not ask. */
bool hotness_weighs(const cxlkv_batch *batch);
/* As many uses as an attend has read pages, dealt out by mass [rows, kv_heads, mass_k]. */
void hotness_weigh(cxlkv_batch *batch, uint32_t layer, const cxlkv_picked *picked,
                   const int32_t *starts, const float *mass, uint64_t mass_k);
