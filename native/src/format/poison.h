/* After a SIGBUS: what was hit is retired. */
#pragma once
#include "base/guard.h"
#include "format/types.h"

int poison_error_locked(cxlkv_pool *pool, const guard *fault);
/* descriptor_read() where nothing else catches a bus error: -CXLKV_E_POISON. */
int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy);
