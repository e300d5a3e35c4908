/* A pool is retained and dropped; its pages are counted. */
#pragma once
#include "format/types.h"

/* One page more, which others may be changing; free ones, which are most, count nowhere. */
static inline void page_count(cxlkv_page_counts *counts, const page_info *info, bool ours) {
    bool held = __atomic_load_n(&info->holders, __ATOMIC_RELAXED) != 0;
    bool published = __atomic_load_n(&info->published, __ATOMIC_RELAXED) != 0;
    bool retired = __atomic_load_n(&info->retired, __ATOMIC_RELAXED) != 0;
    bool quarantined = __atomic_load_n(&info->quarantined, __ATOMIC_RELAXED) != 0;
    if (ours && !(held | published | retired | quarantined | info->withdrawn)) return;
    counts->published += published;
    counts->pinned += info->pinned;
    if (!ours) {
        counts->elsewhere++;
        counts->borrowed += held;
        counts->published_elsewhere += published;
    } else if (info->withdrawn) counts->withdrawn++;
    else if (retired) counts->retired++;
    else if (quarantined) counts->quarantined++;
    else if (held) counts->held++;
    else counts->published_only++;
}
void pool_retain(cxlkv_pool *pool);
void pool_drop(cxlkv_pool *pool);
