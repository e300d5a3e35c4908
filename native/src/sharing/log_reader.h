/* What the others' logs say. */
#ifndef CXLKV_SHARING_LOG_READER_H
#define CXLKV_SHARING_LOG_READER_H
#include "format/types.h"

void peers_follow(cxlkv_pool *pool);
#endif
