/* Choices of pages that decode keeps for the steps that follow. */
#ifndef CXLKV_KEPT_CHOICE_H
#define CXLKV_KEPT_CHOICE_H
#include "sequence/sequence.h"

/* The lists of a decode. */
typedef struct chosen_lists {
    uint64_t lists; /* and heads */
    uint32_t k; /* pages of the longest */
    int32_t *pages; /* [lists][k], -1 padded */
    float *scores; /* NULL of lists that are kept */
    int32_t *counts;
} chosen_lists;

void choices_free(cxlkv_batch *batch);

int chosen_reserve(chosen_lists *chosen, uint64_t pages);
void chosen_free(chosen_lists *chosen);

/* 1: `chosen` has the lists of an earlier step of this layer, with the pages that are new; 0: there
 * are none for these arguments, or it is time to choose anew. */
int choice_take(cxlkv_batch *batch, const cxlkv_decode_args *args, chosen_lists *chosen);
/* After a choice by these arguments, which it takes over for the steps that follow. */
int choice_keep(cxlkv_batch *batch, const cxlkv_decode_args *asked, chosen_lists *chosen);
#endif
