/* Sequences are published under the keys of their pages. */
#pragma once
#include "sequence/types.h"

/* Refuses one whose pages are approximate. */
int publish_check(const cxlkv_sequence *sequence);
