/* Fair shares of the extents: policy only, of numbers that were read before. */
#include "sharing/shares.h"

void shares_look(cxlkv_pool *pool, const extent_owner *owners, shares *found) {
    const uint32_t count = pool->sharing.hosts, self = pool->hosts.self;
    uint64_t reached = 0, users = 0;
    *found = (shares){.host_count = count, .self = self};
    for (uint32_t e = 0; e < pool->geometry.extent_count; e++) {
        if (owners[e].takeable) found->takeable++;
        else if (owners[e].host < count) found->owned[owners[e].host]++;
    }
    for (uint32_t host = 0; host < count; host++) {
        uint64_t wanted = pool->host->views[host].wanted_extents;
        if (host == self) wanted = pool->host->wanted_extents;
        else if (pool->hosts.silent(pool->hosts.context, host)) wanted = found->owned[host] = 0;
        found->wanted[host] = (uint32_t)min_u64(wanted, GIVE_MAX);
        reached += found->owned[host];
        users += host == self || found->owned[host] || wanted;
    }
    found->share = (uint32_t)((reached + found->takeable) / users);
    if (found->share == 0) found->share = 1;
}

/* Whose turn is first. */
static bool is_before(const shares *s, uint32_t host, uint32_t other) {
    return s->owned[host] < s->owned[other] ||
           (s->owned[host] == s->owned[other] && host < other);
}

uint32_t shares_takeable(const shares *s) {
    uint32_t own = s->owned[s->self], left = s->takeable;
    for (uint32_t host = 0; host < s->host_count; host++)
        if (host != s->self && is_before(s, host, s->self)) left -= min_u32(left, s->wanted[host]);
    uint32_t lacking = s->share - min_u32(own, s->share);
    return min_u32(s->takeable, left > lacking ? left : lacking);
}

/* Nobody but `host` has more than we. */
static bool has_most(const shares *s, uint32_t host) {
    for (uint32_t other = 0; other < s->host_count; other++)
        if (other != host && s->owned[other] > s->owned[s->self]) return false;
    return true;
}

uint32_t shares_owed(const shares *s) {
    const uint32_t own = s->owned[s->self], more = own - min_u32(own, s->share);
    uint32_t fair = 0, beyond = 0;
    for (uint32_t host = 0; host < s->host_count; host++) {
        uint32_t lacking = s->share - min_u32(s->owned[host], s->share);
        uint32_t its_share = min_u32(s->wanted[host], lacking), rest = s->wanted[host] - its_share;
        if (host == s->self) continue;
        fair += its_share;
        bool waits = s->wanted[s->self] && is_before(s, s->self, host);
        if (rest && !waits && has_most(s, host)) beyond += rest;
    }
    beyond -= min_u32(beyond, s->takeable - min_u32(s->takeable, fair));
    fair -= min_u32(fair, s->takeable);
    fair = min_u32(fair, more);
    return fair + min_u32(beyond, own - fair - (own > fair));
}
