/* Pages of a layer are chosen in this process, by arguments that were checked. */
#pragma once
#include "ndp/types.h"

/* As attend_bounds(), of numbers and budgets. */
int select_bounds(const cxlkv_layout *layout, const cxlkv_select_args *args, uint32_t rows,
                  uint32_t sequences);
int select_check(const cxlkv_batch *batch, const cxlkv_select_args *args);
/* In this process, by arguments that were checked and a method that is not AUTO. */
int64_t select_here(cxlkv_batch *batch, cxlkv_select_args *args);
/* What a select chose, as fetch and attend take it. */
static inline cxlkv_picked select_chosen(const cxlkv_select_args *args) {
    return (cxlkv_picked){.pages = args->pages, .k = args->k, .per = args->by.per};
}
