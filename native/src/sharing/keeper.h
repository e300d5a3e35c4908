/* A thread that beats and does what others wait for. */
#pragma once
#include "format/types.h"

int keeper_start(cxlkv_pool *pool);
void keeper_stop(cxlkv_pool *pool);
