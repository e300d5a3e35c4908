/* What the others' logs say. */
#pragma once
#include "format/types.h"

void peers_follow(cxlkv_pool *pool);
