/* The door: select, attend and decode of a process enter here, and a worker may answer in its
 * place. worker/ lies above this folder, and says so by a table of its functions. A chooser's
 * select does not: ndp/choosers.py makes it, or asks a worker by cxlkv_batch_choose(). */
#pragma once
#include "sequence/types.h"

enum { NOT_BY_WORKER = INT32_MIN }; /* no error: this process does it */

/* Arguments are checked before. Results are the interface's, or NOT_BY_WORKER. */
typedef struct door_worker {
    int64_t (*select)(cxlkv_batch *batch, cxlkv_select_args *args);
    int64_t (*attend)(cxlkv_batch *batch, cxlkv_attend_args *args);
} door_worker;

/* From now on pools of this process that use a worker ask it by these. */
void door_answers(const door_worker *worker);
