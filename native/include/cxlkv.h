/* What C programs include: the interface with its types. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cxlkv_abi.h"
