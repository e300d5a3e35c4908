/* What decode keeps of its choices: the pages that were best in an earlier step. */
#pragma once
#include "sequence/types.h"

/* Of a kv head. */
typedef struct kept_head {
    uint32_t interval; /* steps from one look at all pages to the next; 0: none was yet */
    uint32_t left; /* steps until the next */
    uint32_t looked; /* pages from here on were forced or not there at the last */
    uint32_t count, room;
    int32_t *pages; /* the best ones then, ascending; NULL before the first look */
    uint32_t first_task; /* of a select that runs now */
} kept_head;

/* Of a sequence's layer, by the arguments that it was chosen by. */
typedef struct kept_choice {
    cxlkv_budget budget;
    float scale;
    uint32_t q_heads, refresh;
    uint64_t tokens; /* that there were; 0: nothing is kept */
    bool estimates; /* they tell its pages apart */
    kept_head heads[]; /* [kv_heads] */
} kept_choice;

/* What a sequence keeps of a layer, for this caller alone; NULL: another one has it, or there is no
 * memory. Then until kept_give_back(). */
kept_choice *kept_take(cxlkv_sequence *sequence, uint32_t layer);
void kept_give_back(cxlkv_sequence *sequence);
void kept_free(cxlkv_sequence *sequence);
