/* A thread that beats and does what others wait for. */
#ifndef CXLKV_SHARING_KEEPER_H
#define CXLKV_SHARING_KEEPER_H
#include "format/types.h"

int keeper_start(cxlkv_pool *pool);
void keeper_stop(cxlkv_pool *pool);
#endif
