/* One metadata line on its way to memory, or out of this host's caches, as the mode wants it. */
#pragma once
#include "base/flush.h"
#include "coherence/visibility.h"

static inline void line_send(enum flush_site site, const void *line, enum visibility_mode mode) {
    if (mode == VISIBILITY_FAST) flush_write_back(site, line, FLUSH_LINE_BYTES);
    if (mode == VISIBILITY_STRICT) flush_evict(site, line, FLUSH_LINE_BYTES);
}

static inline void line_drop(enum flush_site site, const void *line, enum visibility_mode mode) {
    if (mode == VISIBILITY_FAST) flush_invalidate(site, line, FLUSH_LINE_BYTES);
    if (mode == VISIBILITY_STRICT) flush_evict(site, line, FLUSH_LINE_BYTES);
}
