/* Deadlines of leases: all under the pool's locks.list but the last. */
#pragma once
#include "sequence/types.h"

int deadlines_add(deadlines *all, cxlkv_sequence *sequence);
void deadlines_remove(deadlines *all, cxlkv_sequence *sequence); /* if it is there */
/* One whose lease has ended, taken out, the earliest first; NULL: none has. */
cxlkv_sequence *deadlines_ended(deadlines *all, uint64_t now_ns);
bool deadlines_any_ended(const deadlines *all, uint64_t now_ns);
