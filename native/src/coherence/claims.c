/* Claims: who owns which extent. The highest version that counts says it; each host keeps its own.
 *
 * A claim is made under the lock, in the one of the host's two entries that does not count now, and
 * counts from the host's next commit on, unless that host's epoch was cut before it (V10). */
#include "base/crc32c.h"
#include "base/guard.h"
#include "base/types.h"
#include "coherence/claims.h"
#include "coherence/fences.h"
#include "coherence/host_lines.h"
#include "coherence/hosts.h"
#include "coherence/lost_lines.h"

static uint32_t claim_crc(const claim *c, uint32_t extent) {
    return crc32c(crc32c(0, &extent, sizeof(extent)), c, offsetof(claim, crc));
}

/* One more; -CXLKV_E_FENCED when it does not count. */
static int commit(const hosts *h) {
    host_fence fence;
    uint64_t commits = hosts_commits(h, h->self) + 1;
    hosts_set_commits(h, commits);
    int code = hosts_fence_of(h, h->self, h->epoch, &fence);
    if (code == 0 && fence.fenced && commits > fence.cut) code = -CXLKV_E_FENCED;
    return code;
}

/* ---- reading ---- */

typedef struct claimant {
    host_name name;
    host_fence fence;
    uint64_t commits;
} claimant;

static bool claim_counts(const claim *c, uint32_t extent, const claimant *by) {
    uint32_t epoch = c->epoch_ours >> 1;
    if (c->version == 0 || c->crc != claim_crc(c, extent) || c->commit > by->commits) return false;
    if (epoch == 0 || epoch > by->name.epoch) return false; /* it has not come to that one yet */
    return !(epoch == by->name.epoch && by->fence.fenced && c->commit > by->fence.cut);
}

/* Entries lie 16 bytes apart: read by lines, as one writer wrote them. */
static void load_pair(const hosts *h, uint32_t host, uint32_t extent, claim_pair *pair) {
    claim_pair line[LINE_BYTES / sizeof(claim_pair)];
    uint32_t each = LINE_BYTES / sizeof(claim_pair);
    flush_load_line(line, claims_of(h, host) + extent / each * LINE_BYTES);
    *pair = line[extent % each];
}

static int consider(const claim *c, uint32_t extent, uint32_t host, const claimant *by,
                    extent_owner *owner) {
    if (!claim_counts(c, extent, by) || c->version < owner->version) return 0;
    if (c->version == owner->version)
        return fail(CXLKV_E_CORRUPT,
                    "extent %u: hosts %u and %u both claim it at version %u. It is left alone; "
                    "`cxlkv pool check` says more", extent, owner->host, host, c->version);
    bool ours = c->epoch_ours & 1;
    *owner = (extent_owner){.version = c->version, .host = ours ? (uint8_t)host : NO_HOST};
    owner->takeable = !ours || by->name.status == HOST_LEFT || by->fence.off;
    return 0;
}

static int fail_by_name(uint32_t host) {
    return fail(CXLKV_E_CORRUPT,
                "the name line of host %u is damaged: what it owns is not known, so "
                "no extent changes hands. `cxlkv pool check` says more", host);
}

/* First the commits, then the fences: V10. A host that came back meanwhile may be fenced anew, in
 * the very word that said of the earlier epoch what counts: then once more. */
static int look_at_claimant(const hosts *h, uint32_t host, claimant *by) {
    const void *first = claims_of(h, host);
    uint32_t epoch;
    do {
        host_name again;
        if (!hosts_name(h, host, &by->name)) return fail_by_name(host);
        if (by->name.status == HOST_UNUSED) return 0;
        epoch = by->name.epoch;
        by->commits = hosts_commits(h, host);
        line_look(h, FLUSH_CLAIM_LOOK_BEGIN, &first, 1,
                  (h->area.pins_offset - h->area.claims_offset) / LINE_BYTES);
        int code = hosts_fence_of(h, host, epoch, &by->fence);
        if (code < 0) return code;
        if (!hosts_name(h, host, &again)) return fail_by_name(host);
        by->name = again;
    } while (by->name.epoch != epoch);
    return 1;
}

static int read_claimant(const hosts *h, uint32_t host, claimant *by) {
    return GUARDED(look_at_claimant(h, host, by), hosts_lost(h, &fault));
}

/* What one host claims. 0, or -CXLKV_E_CORRUPT: another claims some of it, too. */
static int consider_all(const hosts *h, uint32_t host, const claimant *by, extent_owner *owners) {
    int result = 0;
    for (uint32_t extent = 0; extent < h->area.extent_count; extent++) {
        claim_pair pair;
        load_pair(h, host, extent, &pair);
        for (int i = 0; i < 2; i++)
            if (consider(&pair.claims[i], extent, host, by, &owners[extent]) < 0) {
                owners[extent] = (extent_owner){.version = owners[extent].version,
                                                .host = NO_HOST, .takeable = false};
                result = -CXLKV_E_CORRUPT;
            }
    }
    return result;
}

static int add_claims(const hosts *h, uint32_t host, const claimant *by, extent_owner *owners) {
    return GUARDED(consider_all(h, host, by, owners), hosts_lost(h, &fault));
}

int hosts_owners(const hosts *h, extent_owner *owners) {
    int result = 0;
    for (uint32_t extent = 0; extent < h->area.extent_count; extent++)
        owners[extent] = (extent_owner){.host = NO_HOST, .takeable = true};
    for (uint32_t host = 0; host < h->area.host_count; host++) {
        claimant by;
        int code = read_claimant(h, host, &by);
        if (code > 0) {
            code = add_claims(h, host, &by, owners);
            if (code == -CXLKV_E_CORRUPT) result = code; /* those extents are nobody's */
            if (code == -CXLKV_E_CORRUPT) code = 0;
        }
        if (code == 0) continue;
        for (uint32_t extent = 0; extent < h->area.extent_count; extent++)
            owners[extent] = (extent_owner){.host = NO_HOST};
        return code;
    }
    return result;
}

/* ---- writing ---- */

static void store_claim(const hosts *h, uint32_t extent, int which, const claim *c) {
    uint64_t words[2];
    memcpy(words, c, sizeof(words));
    uint64_t *at = (uint64_t *)(claims_of(h, h->self) + extent * sizeof(claim_pair)) + 2 * which;
    flush_store_word(at, words[0]);
    flush_store_word(at + 1, words[1]);
    line_send(FLUSH_CLAIM, at, h->mode);
}

/* The entry that a new claim may take: not the one that counts, if one does. */
static int free_entry(const claim_pair *pair, uint32_t extent, uint64_t commits) {
    for (int i = 0; i < 2; i++)
        if (pair->claims[i].commit > commits ||
            pair->claims[i].crc != claim_crc(&pair->claims[i], extent))
            return i;
    return pair->claims[0].version < pair->claims[1].version ? 0 : 1;
}

static int make_claims(const hosts *h, const extent_owner *owners, uint32_t count,
                       const uint32_t *extents, bool ours) {
    host_fence fence;
    /* Of an ended epoch the last commit may not count, and the entry that it left is in use. */
    int code = hosts_fence_of(h, h->self, h->epoch, &fence);
    if (code < 0 || fence.fenced) return code < 0 ? code : -CXLKV_E_FENCED;
    uint64_t commits = hosts_commits(h, h->self);
    /* A claim has room for 32 bits of its commit's number: one that began again at 0 would count
     * before it is committed. */
    if (commits >= UINT32_MAX)
        return fail(CXLKV_E_CORRUPT, "host %u has used up its %u commits: it can take no more "
                    "extents and give none. Open the pool there as another host=, or create it "
                    "anew", h->self, UINT32_MAX);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t extent = extents[i];
        claim_pair pair;
        load_pair(h, h->self, extent, &pair); /* our own lines: what we stored */
        claim made = {.version = owners[extent].version + 1, .commit = (uint32_t)commits + 1,
                      .epoch_ours = h->epoch << 1 | ours};
        made.crc = claim_crc(&made, extent);
        store_claim(h, extent, free_entry(&pair, extent, commits), &made);
    }
    flush_fence_all(FLUSH_CLAIM_FENCE);
    return commit(h);
}

int hosts_claim(const hosts *h, const extent_owner *owners, uint32_t count,
                const uint32_t *extents, bool ours) {
    return GUARDED(make_claims(h, owners, count, extents, ours), hosts_lost(h, &fault));
}

static void forget_pair(const hosts *h, uint32_t extent, uint64_t commits) {
    static const claim none;
    claim_pair pair;
    load_pair(h, h->self, extent, &pair);
    for (int i = 0; i < 2; i++)
        if (pair.claims[i].version && pair.claims[i].commit > commits)
            store_claim(h, extent, i, &none);
}

static void forget_claim(const hosts *h, uint32_t extent, uint64_t commits) {
    GUARDED((forget_pair(h, extent, commits), 0), hosts_lost(h, &fault));
}

void hosts_forget_claims(const hosts *h, uint64_t commits) {
    for (uint32_t extent = 0; extent < h->area.extent_count; extent++)
        forget_claim(h, extent, commits);
    flush_fence_all(FLUSH_CLAIM_FENCE);
}
