/* After a SIGBUS: what was hit is retired. */
#ifndef CXLKV_FORMAT_POISON_H
#define CXLKV_FORMAT_POISON_H
#include "base/guard.h"
#include "format/types.h"

int poison_error_locked(cxlkv_pool *pool, const guard *fault);
/* descriptor_read() where nothing else catches a bus error: -CXLKV_E_POISON. */
int descriptor_try(cxlkv_pool *pool, uint32_t page, descriptor *copy);
#endif
