/* What the tests of hosts share: an area in memory of its own or of a simulation, and hosts on it;
 * an extent is claimed under the lock. */
#pragma once
#include "check.h"
#include "coherence/claims.h"
#include "coherence/fences.h"
#include "coherence/host_lines.h"
#include "coherence/host_log.h"
#include "coherence/hosts.h"
#include "coherence/hosts_lock.h"
#include "coherence/membership.h"

enum { HOSTS = 3, RECORDS = 8 };

/* Where HOSTS hosts lie, without a base yet. */
static inline hosts_area test_hosts_area(uint32_t extents, uint32_t pages) {
    hosts_area area = {.host_count = HOSTS, .extent_count = extents, .page_count = pages,
                       .log_records = RECORDS};
    hosts_area_make(&area);
    return area;
}

/* Zeros for the area. */
static inline uint8_t *test_hosts_memory(const hosts_area *area) {
    uint64_t bytes = HOSTS * area->block_bytes;
    uint8_t *memory = aligned_alloc(4096, bytes);
    CHECK(memory);
    return memset(memory, 0, bytes);
}

/* Claims extents, or gives them back; the error of the first step that fails. */
static inline int test_claim(hosts *h, uint32_t count, const uint32_t *extents, bool ours) {
    extent_owner owners[16];
    CHECK(h->area.extent_count <= 16);
    int code = hosts_lock(h);
    if (code < 0) return code;
    code = hosts_owners(h, owners);
    if (code == 0) code = hosts_claim(h, owners, count, extents, ours);
    if (code != -CXLKV_E_FENCED) hosts_unlock(h);
    return code;
}
