/* Claims: who owns which extent; changed under the lock between hosts. */
#pragma once
#include "coherence/types.h"

/* Of all extents: 0, or -CXLKV_E_CORRUPT when two claims contradict each other. */
int hosts_owners(const hosts *h, extent_owner *owners);
/* Makes `count` extents ours, or nobody's, all or nothing; owners is what hosts_owners() said under
 * this lock. -CXLKV_E_FENCED: our epoch has ended, nothing changed. -CXLKV_E_TIMEOUT: whether it
 * counts is not decided yet; what hosts_owners() says under a later lock is. -CXLKV_E_POISON: the
 * same, as lines cannot be read or written. */
int hosts_claim(const hosts *h, const extent_owner *owners, uint32_t count,
                const uint32_t *extents, bool ours);
/* Own claims that were never committed, or do not count: as if never made. */
void hosts_forget_claims(const hosts *h, uint64_t commits);
