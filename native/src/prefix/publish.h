/* Sequences are published under the keys of their pages. */
#ifndef CXLKV_PREFIX_PUBLISH_H
#define CXLKV_PREFIX_PUBLISH_H
#include "sequence/types.h"

/* Refuses one whose pages are approximate. */
int publish_check(const cxlkv_sequence *sequence);
#endif
