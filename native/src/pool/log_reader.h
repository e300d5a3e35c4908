/* What the others' logs say. */
#ifndef CXLKV_POOL_LOG_READER_H
#define CXLKV_POOL_LOG_READER_H
#include "pool/types.h"

void peers_follow(cxlkv_pool *pool);
#endif
