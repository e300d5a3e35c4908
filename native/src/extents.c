/* Extents: which of them this host owns, taking more, giving some back. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"
#include "host_lines.h"

static uint32_t first_run(const cxlkv_pool *pool, uint32_t extent) {
    return extent * pool->geometry.slab_slots / RUN_SLOTS;
}

static uint8_t *descriptors_of(const cxlkv_pool *pool, uint32_t extent) {
    const cxlkv_geometry *g = &pool->geometry;
    return pool->base + g->descriptors_offset + extent * g->descriptors_bytes;
}

static uint8_t *extent_of(const cxlkv_pool *pool, uint32_t extent) {
    return pool->base + pool->geometry.extents_offset + extent * pool->geometry.extent_bytes;
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
    uint64_t unit_bytes = pool->unit_bytes, first = s->first, end = s->end;
    if (s->writable) {
        first -= first % unit_bytes;
        end = min_u64(align_up(end, unit_bytes), pool->mapped_bytes);
    } else {
        first = align_up(first, unit_bytes);
        end -= end % unit_bytes;
    }
    if (first < end)
        (void)mprotect(pool->base + first, end - first, /* refused: it stays as it was */
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
    uint64_t block = (uint64_t)(hosts_line(&pool->hosts, pool->hosts.self, 0) - pool->base);
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
    hosts_hand_over(pool->base + g->descriptors_offset, g->extent_count * g->descriptors_bytes,
                    gives);
}

void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable) {
    uint64_t first = (uint64_t)(hosts_line(&pool->hosts, host, 0) - pool->base);
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

int extents_refresh(cxlkv_pool *pool) {
    uint32_t count = pool->geometry.extent_count;
    extent_owner *owners = malloc(count * sizeof(*owners));
    if (!owners) return fail(ENOMEM, "no memory for a table of %u extents", count);
    int code = hosts_owners(&pool->hosts, owners);
    if (code == -CXLKV_E_CORRUPT && is_known(owners, count)) code = 0; /* check() tells */
    /* Where this machine had them before, what it has cached of them is its own. */
    bool arrives = !pool->host->ready;
    uint64_t boot = arrives ? this_boot() : 0;
    bool settled = boot && get_settled(pool) == boot;
    for (uint32_t extent = 0; code == 0 && extent < count; extent++) {
        bool ours = owners[extent].host == pool->hosts.self;
        bool changes = !is_marked(pool, extent, ours);
        if (changes) change(pool, extent, ours, settled);
        owners[extent].takeable = changes && ours; /* from here on: it came */
    }
    extents_protect(pool);
    for (uint32_t extent = 0; code == 0 && extent < count; extent++)
        if (owners[extent].takeable) welcome(pool, extent);
    if (code == 0 && arrives) set_settled(pool, boot);
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

/* Takes what may be taken; -EAGAIN when there is nothing. */
static int take_some(cxlkv_pool *pool, uint64_t page_count) {
    uint32_t count = pool->geometry.extent_count, chosen = 0;
    extent_owner *owners = malloc(count * (sizeof(*owners) + sizeof(uint32_t)));
    if (!owners) return -ENOMEM;
    uint32_t *extents = (uint32_t *)(owners + count);
    uint64_t boot = get_settled(pool);
    int code = set_settled(pool, 0);
    if (code == 0) code = hosts_lock(&pool->hosts);
    if (code == 0) {
        code = hosts_owners(&pool->hosts, owners);
        if (code == -CXLKV_E_CORRUPT) code = 0;
        if (code == 0) chosen = choose(pool, owners, page_count, extents);
        if (code == 0 && chosen) code = hosts_claim(&pool->hosts, owners, chosen, extents, true);
        hosts_unlock(&pool->hosts);
    }
    for (uint32_t i = 0; code == 0 && i < chosen; i++) change(pool, extents[i], true, false);
    if (code != -CXLKV_E_TIMEOUT && code != -CXLKV_E_POISON) set_settled(pool, boot);
    else pool->host->owners_unsure = 1;
    if (code == 0 && chosen) extents_protect(pool);
    for (uint32_t i = 0; code == 0 && i < chosen; i++) welcome(pool, extents[i]);
    free(owners);
    return code == 0 && chosen == 0 ? -EAGAIN : code;
}

static bool somebody_offers(const cxlkv_pool *pool) {
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && hosts_offered(&pool->hosts, host) &&
            !pool->hosts.silent(pool->hosts.context, host))
            return true;
    return false;
}

/* When others have room and nobody's is left, they are asked, and waited for a quarter of a lease:
 * about two of their beats. */
void extents_take(cxlkv_pool *pool, uint64_t page_count) {
    uint64_t until_ns = boottime_ns() + pool->lease_ns / 4;
    for (;;) {
        int code = take_some(pool, page_count - min_u64(page_count, pool->host->free_pages));
        if (code == -CXLKV_E_FENCED && peers_return(pool) == 0) continue;
        if (pool->host->free_pages >= page_count || (code != 0 && code != -EAGAIN)) break;
        if (code == 0) continue; /* what others left behind may be full of published pages */
        peers_beat(pool, true);
        if (!somebody_offers(pool) || boottime_ns() > until_ns) break;
        uint64_t slots = pool->geometry.slab_slots;
        pool->host->wanted_extents =
            (page_count - pool->host->free_pages + slots - 1) / slots;
        peers_beat(pool, true);
        pool->hosts.pause(pool->hosts.context);
    }
    pool->host->wanted_extents = 0;
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

void extents_give(cxlkv_pool *pool) {
    uint32_t extents[GIVE_MAX], count;
    uint64_t wanted = 0;
    for (uint32_t host = 0; host < pool->sharing.hosts; host++)
        if (host != pool->hosts.self && !pool->hosts.silent(pool->hosts.context, host))
            wanted += min_u64(pool->host->views[host].wanted_extents, GIVE_MAX);
    if (wanted == 0) return;
    count = empty_extents(pool, extents, GIVE_MAX);
    count = min_u32(count ? count - 1 : 0, (uint32_t)wanted);
    if (count == 0) return;
    extent_owner *owners = malloc(pool->geometry.extent_count * sizeof(*owners));
    if (!owners) return; /* they ask again */
    for (uint32_t i = 0; i < count; i++) leave(pool, extents[i]);
    int code = hosts_lock(&pool->hosts);
    if (code == 0) {
        code = hosts_owners(&pool->hosts, owners);
        if (code == 0) code = hosts_claim(&pool->hosts, owners, count, extents, false);
        hosts_unlock(&pool->hosts);
    }
    free(owners);
    /* What was not given after all is ours again. */
    if (code < 0 && (code != -CXLKV_E_FENCED || peers_return(pool) < 0))
        pool->host->owners_unsure = extents_refresh(pool) < 0;
    extents_protect(pool);
}
