/* Extents: which of them this host owns, taking more, giving some back. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/crc32c.h"
#include "coherence/host_lines.h"
#include "pool/peers.h"

static uint32_t first_run(const cxlkv_pool *pool, uint32_t extent) {
    return extent * pool->geometry.slab_slots / RUN_SLOTS;
}

static uint8_t *descriptors_of(const cxlkv_pool *pool, uint32_t extent) {
    const cxlkv_geometry *g = &pool->geometry;
    return pool->region.base + g->descriptors_offset + extent * g->descriptors_bytes;
}

static uint8_t *extent_of(const cxlkv_pool *pool, uint32_t extent) {
    return pool->region.base + pool->geometry.extents_offset + extent * pool->geometry.extent_bytes;
}

static void hand_over(const cxlkv_pool *pool, uint32_t extent, bool gives) {
    hosts_hand_over(descriptors_of(pool, extent), pool->geometry.descriptors_bytes, gives);
    hosts_hand_over(extent_of(pool, extent), pool->geometry.extent_bytes, gives);
}

static void set_ours(cxlkv_pool *pool, uint32_t extent, bool ours) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS;
    for (uint32_t i = 0; i < runs; i++) pool->runs[first_run(pool, extent) + i].ours = ours;
    pool->host->extents_version++;
}

/* What lies from `end` of the last one on, up to `first`, goes with it. */
typedef struct stretch {
    uint64_t first, end;
    bool writable;
} stretch;

/* In whole units, as nothing else can be protected (a huge page, 2 MiB of a device): one that has
 * anything of ours stays writable. Never first one and then the other: other threads write. */
static void protect(const cxlkv_pool *pool, const stretch *s) {
    uint64_t unit_bytes = pool->region.unit_bytes, first = s->first, end = s->end;
    if (s->writable) {
        first -= first % unit_bytes;
        end = min_u64(align_up(end, unit_bytes), pool->region.mapped_bytes);
    } else {
        first = align_up(first, unit_bytes);
        end -= end % unit_bytes;
    }
    if (first < end)
        (void)mprotect(pool->region.base + first, end - first, /* refused: it stays as it was */
                       s->writable ? PROT_READ | PROT_WRITE : PROT_READ);
}

static void add(const cxlkv_pool *pool, stretch *s, uint64_t first, uint64_t bytes,
                bool writable) {
    if (s->writable != writable) {
        protect(pool, s);
        *s = (stretch){.first = first, .writable = writable};
    }
    s->end = first + bytes;
}

static void add_extents(const cxlkv_pool *pool, stretch *s, uint64_t first, uint64_t bytes_each) {
    const cxlkv_geometry *g = &pool->geometry;
    for (uint32_t extent = 0; extent < g->extent_count; extent++)
        add(pool, s, first + extent * bytes_each, bytes_each,
            page_is_ours(pool, extent * g->slab_slots));
}

void extents_protect(cxlkv_pool *pool) {
    const cxlkv_geometry *g = &pool->geometry;
    uint64_t block = (uint64_t)(hosts_line(&pool->hosts, pool->hosts.self, 0) - pool->region.base);
    uint64_t end = block + g->host_block_bytes;
    stretch s = {.end = block};
    add(pool, &s, block, g->host_block_bytes, true);
    add(pool, &s, end, g->descriptors_offset - end, false);
    add_extents(pool, &s, g->descriptors_offset, g->descriptors_bytes);
    add_extents(pool, &s, g->extents_offset, g->extent_bytes);
    protect(pool, &s);
    pool->mapped_version = pool->host->extents_version;
}

void descriptors_hand_over(const cxlkv_pool *pool, bool gives) {
    const cxlkv_geometry *g = &pool->geometry;
    hosts_hand_over(pool->region.base + g->descriptors_offset,
                    g->extent_count * g->descriptors_bytes, gives);
}

void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable) {
    uint64_t first = (uint64_t)(hosts_line(&pool->hosts, host, 0) - pool->region.base);
    stretch s = {.first = first, .end = first + pool->geometry.host_block_bytes, .writable = true};
    if (writable) protect(pool, &s);
    else extents_protect(pool);
}

/* What two hosts claim is nobody's; where a name is damaged, nothing is known at all. */
static bool is_known(const extent_owner *owners, uint32_t count) {
    for (uint32_t extent = 0; extent < count; extent++)
        if (owners[extent].version || owners[extent].takeable) return true;
    return false;
}

int page_stays_ours(const cxlkv_pool *pool, uint32_t page) {
    if (page_is_ours(pool, page)) return 0;
    return fail(CXLKV_E_CORRUPT,
                "page %u is not this host's any more: its claim of that extent was lost in the "
                "pool's memory, or damaged. Nothing was written. Release what holds the page and "
                "recompute it", page);
}

static void unlist(cxlkv_pool *pool, uint32_t extent) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS;
    for (uint32_t i = 0; i < runs; i++) pages_unlist(pool, first_run(pool, extent) + i);
}

/* Which boot of which machine has dropped what its caches held of all our extents; 0 while some are
 * on their way to us, or it is not known whether they came. */
static uint64_t *settled_word(const cxlkv_pool *pool) {
    return (uint64_t *)hosts_line(&pool->hosts, pool->hosts.self, COMMIT_LINE) + 1;
}

static int set_settled(const cxlkv_pool *pool, uint64_t boot) {
    guard fault;
    volatile int code = 0;
    GUARD_BEGIN(fault) {
        flush_store_word(settled_word(pool), boot);
        line_keep(&pool->hosts, FLUSH_COMMIT, settled_word(pool), sizeof(boot));
    } GUARD_END(fault, code = hosts_lost(&pool->hosts, &fault))
    return code;
}

static uint64_t get_settled(const cxlkv_pool *pool) {
    uint64_t boot;
    return word_try(&pool->hosts, settled_word(pool), &boot) ? boot : 0;
}

/* 0 when it cannot be told. */
static uint64_t this_boot(void) {
    uint64_t words[4] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t got = read(fd, words, sizeof(words));
    close(fd);
    return got == sizeof(words) ? crc32c(0, words, sizeof(words)) + 1ull : 0;
}

/* One that comes or goes. Then extents_protect(), and welcome() those that came. */
static void change(cxlkv_pool *pool, uint32_t extent, bool ours, bool settled) {
    uint32_t slots = pool->geometry.slab_slots;
    if (pool->host->ready && !ours) unlist(pool, extent);
    for (uint32_t page = extent * slots; ours && page < (extent + 1) * slots; page++) {
        page_info *info = &pool->pages[page];
        page_unpublish(pool, page); /* what its former owner published is found again */
        info->shown = 1;
    }
    if (ours && !settled) hand_over(pool, extent, false); /* V8 */
    set_ours(pool, extent, ours);
}

/* While the allocator is at work; an arriving host builds all of it afterwards. */
static void welcome(cxlkv_pool *pool, uint32_t extent) {
    uint32_t slots = pool->geometry.slab_slots;
    borrow_own(pool, extent * slots, slots);
    if (pool->host->ready) host_rebuild_runs(pool, first_run(pool, extent), slots / RUN_SLOTS);
}

/* Whoever died while an extent changed hands may have marked some of its runs only. */
static bool is_marked(const cxlkv_pool *pool, uint32_t extent, bool ours) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS, first = first_run(pool, extent);
    for (uint32_t i = 0; i < runs; i++)
        if (pool->runs[first + i].ours != ours) return false;
    return true;
}

/* Under the host lock, or by who alone has the state. */
static void refresh(cxlkv_pool *pool, extent_owner *owners, bool settled) {
    uint32_t count = pool->geometry.extent_count;
    for (uint32_t extent = 0; extent < count; extent++) {
        bool ours = owners[extent].host == pool->hosts.self;
        bool changes = !is_marked(pool, extent, ours);
        if (changes) change(pool, extent, ours, settled);
        owners[extent].takeable = changes && ours; /* from here on: it came */
    }
    extents_protect(pool);
    if (pool->host->ready) forgotten_read(pool);
    for (uint32_t extent = 0; extent < count; extent++)
        if (owners[extent].takeable) welcome(pool, extent);
    forgotten_drop(pool);
}

int extents_refresh(cxlkv_pool *pool, const hosts *turn) {
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * sizeof(*owners));
    if (!owners) return fail(ENOMEM, "no memory for a table of %u extents", count);
    uint32_t doubted = __atomic_load_n(&pool->host->owners_doubted, __ATOMIC_SEQ_CST);
    int code = hosts_owners(turn, owners);
    if (code == -CXLKV_E_CORRUPT && is_known(owners, count)) code = 0; /* check() tells */
    /* Where this machine had them before, what it has cached of them is its own. */
    bool arrives = !pool->host->ready;
    uint64_t boot = code == 0 ? this_boot() : 0;
    if (code == 0 && !arrives) code = host_lock(pool);
    if (code == 0) {
        guard fault;
        GUARD_BEGIN(fault) {
            refresh(pool, owners,
                    arrives && boot && get_settled(pool) == boot);
            set_settled(pool, boot);
            __atomic_store_n(&pool->host->owners_sure, doubted, __ATOMIC_RELAXED);
        } GUARD_END(fault, code = poison_error_locked(pool, &fault))
        if (!arrives) host_unlock(pool);
    }
    free(owners);
    return code;
}

/* How many extents to take for so many pages: some more than that, so that hosts which grow do not
 * come one by one. */
static uint32_t choose(const cxlkv_pool *pool, const extent_owner *owners, uint64_t page_count,
                       uint32_t *extents) {
    const cxlkv_geometry *g = &pool->geometry;
    uint32_t chosen = 0, most = g->extent_count / (8 * pool->sharing.hosts);
    uint64_t wanted = (page_count + g->slab_slots - 1) / g->slab_slots;
    if (wanted < most) wanted = most;
    /* First those that nobody used, then what others left behind with their published pages. */
    for (int left_behind = 0; left_behind < 2; left_behind++)
        for (uint32_t e = 0; e < g->extent_count && chosen < wanted; e++)
            if (owners[e].takeable && (owners[e].host != NO_HOST) == left_behind &&
                !page_is_ours(pool, e * g->slab_slots))
                extents[chosen++] = e;
    return chosen;
}

/* Whoever brought a doubt into the world has seen to it, and there was no other. */
static void clear_doubt(cxlkv_pool *pool, uint32_t own) {
    if (__atomic_load_n(&pool->host->owners_sure, __ATOMIC_RELAXED) == own - 1)
        __atomic_store_n(&pool->host->owners_sure, own, __ATOMIC_RELAXED);
}

/* They are claimed: under the host lock they become ours to use. */
static int take_in(cxlkv_pool *pool, const uint32_t *extents, uint32_t count) {
    guard fault;
    volatile int code = host_lock(pool);
    if (code < 0) return code;
    GUARD_BEGIN(fault) {
        for (uint32_t i = 0; i < count; i++) change(pool, extents[i], true, false);
        extents_protect(pool);
        forgotten_read(pool);
        for (uint32_t i = 0; i < count; i++) welcome(pool, extents[i]);
        forgotten_drop(pool);
    } GUARD_END(fault, code = poison_error_locked(pool, &fault))
    host_unlock(pool);
    return code;
}

/* With the claims. The owners are read when our turn has come: anything may have changed before. */
static int claim_some(cxlkv_pool *pool, hosts *turn, uint64_t page_count, extent_owner *owners,
                      uint32_t *extents) {
    uint32_t chosen = 0;
    int code = hosts_lock(turn);
    if (code < 0) return code;
    code = hosts_owners(turn, owners);
    if (code == -CXLKV_E_CORRUPT) code = 0;
    if (code == 0) chosen = choose(pool, owners, page_count, extents);
    if (code == 0 && chosen) code = hosts_claim(turn, owners, chosen, extents, true);
    hosts_unlock(turn);
    return code < 0 ? code : (int)chosen;
}

static int take_with(cxlkv_pool *pool, hosts *turn, uint64_t page_count, extent_owner *owners) {
    /* A process that died over a claim may have left an extent that is ours: use that one first. */
    if (extents_in_doubt(pool)) return extents_refresh(pool, turn);
    uint32_t *extents = (uint32_t *)(owners + pool->geometry.extent_count);
    uint64_t boot = get_settled(pool);
    int code = set_settled(pool, 0);
    if (code < 0) return code;
    uint32_t doubt = extents_doubt(pool);
    int chosen = claim_some(pool, turn, page_count, owners, extents);
    if (chosen == -CXLKV_E_FENCED) return peers_return(pool, turn);
    /* Whether it counts is not decided. */
    if (chosen == -CXLKV_E_TIMEOUT || chosen == -CXLKV_E_POISON) return chosen;
    code = chosen > 0 ? take_in(pool, extents, (uint32_t)chosen) : chosen;
    if (code < 0 && chosen > 0) return code;
    set_settled(pool, boot);
    clear_doubt(pool, doubt);
    return chosen == 0 ? -EAGAIN : code;
}

/* Takes what may be taken: 0, or -EAGAIN when there is nothing. Under no lock. */
static int take_some(cxlkv_pool *pool, uint64_t page_count) {
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * (sizeof(*owners) + sizeof(uint32_t)));
    if (!owners) return -ENOMEM;
    guard fault;
    hosts turn;
    volatile int code = claim_lock(pool, &turn);
    if (code == 0) {
        GUARD_BEGIN(fault) {
            code = take_with(pool, &turn, page_count, owners);
        } GUARD_END(fault, code = claim_poisoned(pool, &turn, &fault))
        claim_unlock(pool);
    }
    free(owners);
    return code;
}

static bool somebody_offers(const cxlkv_pool *pool) {
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && hosts_offered(&pool->hosts, host) &&
            !pool->hosts.silent(pool->hosts.context, host))
            return true;
    return false;
}

/* How many pages are still missing. With `asks` the other hosts are told so in a beat, if one of
 * them offers some; if none does, *ends. */
static uint64_t look_for_room(cxlkv_pool *pool, uint64_t page_count, bool asks, bool *ends) {
    uint64_t slots = pool->geometry.slab_slots;
    guard fault;
    *ends = host_lock(pool) < 0;
    if (*ends) return page_count;
    const uint64_t missing = page_count - min_u64(page_count, pool->host->free_pages);
    if (asks && missing) {
        GUARD_BEGIN(fault) {
            peers_beat(pool, true);
            *ends = !somebody_offers(pool);
            pool->host->wanted_extents = *ends ? 0 : (missing + slots - 1) / slots;
            if (!*ends) peers_beat(pool, true);
        } GUARD_END(fault, (*ends = true, poison_error_locked(pool, &fault)))
    }
    host_unlock(pool);
    return missing;
}

static void ask_no_more(cxlkv_pool *pool) {
    if (host_lock(pool) < 0) return;
    pool->host->wanted_extents = 0;
    host_unlock(pool);
}

/* Why this thread's last extents_take() failed, for who then finds the pool full; or "". */
static _Thread_local char why[256];

const char *extents_why(void) { return why; }

/* When others have room and nobody's is left, they are asked, and waited for a quarter of a lease:
 * about two of their beats. */
bool extents_take(cxlkv_pool *pool, uint64_t page_count) {
    uint64_t until_ns = 0, missing;
    bool ends = false;
    why[0] = 0;
    while ((missing = look_for_room(pool, page_count, false, &ends)) && !ends) {
        int code = take_some(pool, missing);
        if (code == 0) continue; /* what others left behind may be full of published pages */
        if (code != -EAGAIN) snprintf(why, sizeof(why), "%s", cxlkv_error_text());
        if (code != -EAGAIN || (until_ns && boottime_ns() > until_ns)) break;
        missing = look_for_room(pool, page_count, true, &ends);
        if (missing == 0 || ends) break;
        if (!until_ns) until_ns = boottime_ns() + pool->lease_ns / 4;
        peers_pause(pool);
    }
    if (until_ns) ask_no_more(pool);
    return missing == 0;
}

/* ---- giving ---- */

static bool is_empty(const cxlkv_pool *pool, uint32_t extent) {
    uint32_t runs = pool->geometry.slab_slots / RUN_SLOTS, first = first_run(pool, extent);
    if (!pool->runs[first].ours) return false;
    for (uint32_t i = 0; i < runs; i++)
        if (pool->runs[first + i].free_mask != (1u << RUN_SLOTS) - 1) return false;
    return true;
}

static uint32_t empty_extents(const cxlkv_pool *pool, uint32_t *extents, uint32_t most) {
    uint32_t count = 0;
    for (uint32_t e = 0; e < pool->geometry.extent_count && count < most; e++)
        if (is_empty(pool, e)) extents[count++] = e;
    return count;
}

enum { GIVE_MAX = 64 };

/* One stays with us: a host that just became idle would ask for it back at once. */
void extents_offer(cxlkv_pool *pool) {
    uint32_t extents[GIVE_MAX], count = empty_extents(pool, extents, GIVE_MAX);
    hosts_offer(&pool->hosts, count ? count - 1 : 0);
}

static void leave(cxlkv_pool *pool, uint32_t extent) {
    unlist(pool, extent);
    set_ours(pool, extent, false);
    hand_over(pool, extent, true); /* V8 */
}

uint64_t extents_wanted(const cxlkv_pool *pool) {
    uint64_t wanted = 0;
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && !pool->hosts.silent(pool->hosts.context, host))
            wanted += min_u64(pool->host->views[host].wanted_extents, GIVE_MAX);
    return wanted;
}

/* Under the host lock: what is marked as no more ours before it is claimed away. */
static uint32_t leave_some(cxlkv_pool *pool, uint32_t *extents) {
    guard fault;
    volatile uint32_t left = 0;
    if (host_lock(pool) < 0) return 0;
    GUARD_BEGIN(fault) {
        uint32_t count = empty_extents(pool, extents, GIVE_MAX);
        count = min_u32(count ? count - 1 : 0,
                        (uint32_t)min_u64(extents_wanted(pool), GIVE_MAX));
        while (left < count) leave(pool, extents[left++]);
        if (count) extents_protect(pool);
    } GUARD_END(fault, (left = 0, extents_doubt(pool), poison_error_locked(pool, &fault)))
    host_unlock(pool);
    return left;
}

static int claim_away(hosts *turn, extent_owner *owners, const uint32_t *extents, uint32_t count) {
    int code = hosts_lock(turn);
    if (code < 0) return code;
    code = hosts_owners(turn, owners);
    if (code == 0) code = hosts_claim(turn, owners, count, extents, false);
    hosts_unlock(turn);
    return code;
}

/* What was not given after all is ours again: the doubt is there before it is marked, for whoever
 * has the claims next, whatever becomes of us. */
void extents_give(cxlkv_pool *pool, hosts *turn) {
    uint32_t extents[GIVE_MAX], count;
    extent_owner *owners = malloc(pool->geometry.extent_count * sizeof(*owners));
    if (!owners) return; /* they ask again */
    uint32_t doubt = extents_doubt(pool);
    count = leave_some(pool, extents);
    int code = count ? claim_away(turn, owners, extents, count) : 0;
    free(owners);
    if (code == 0) clear_doubt(pool, doubt);
    if (code == -CXLKV_E_FENCED) peers_return(pool, turn);
    else if (code < 0) extents_refresh(pool, turn);
}
