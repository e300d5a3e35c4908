/* What C programs include: the interface with its types. */
#ifndef CXLKV_H
#define CXLKV_H
#include <stddef.h>
#include <stdint.h>

#include "cxlkv_abi.h"
#endif
