/* All pools of this process, which a fork goes through. */
#pragma once
#include "format/types.h"

void fork_register(void);
void pools_add(cxlkv_pool *pool);
void pools_remove(const cxlkv_pool *pool);
void pools_lock(void);                    /* no fork until pools_unlock() */
void pools_unlock(void);
