/* What is counted is seen by all processes of the host. */
#pragma once
#include "format/types.h"

/* For a thread outside of any operation: the pool may be closing. */
void count_outside(cxlkv_pool *pool, enum counter which, uint64_t amount);
void counters_begin(host_state *host, uint32_t slot);  /* under the lock, before the slot is live */
void counters_bind(cxlkv_pool *pool, uint32_t slot);
void counters_unbind(cxlkv_pool *pool);                /* before the host state is unmapped */
/* Those of a slot's process since it came; of all processes ever. */
void counters_of_slot(host_state *host, uint32_t slot, cxlkv_counters *counters);
void counters_total(host_state *host, cxlkv_counters *counters);
void counters_save(cxlkv_pool *pool);                  /* in the region */
/* False, and zeros, where nobody has saved any, or died over it. */
bool counters_load(const uint8_t *from, cxlkv_counters *counters);
void counters_restore(cxlkv_pool *pool);               /* into a new host state */
