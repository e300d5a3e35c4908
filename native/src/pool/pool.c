/* A pool: created, opened, closed; what it is. */
#include <unistd.h>

#include "base/guard.h"
#include "format/geometry.h"
#include "format/records.h"
#include "format/scorers.h"
#include "host/counters.h"
#include "host/hooks.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/processes.h"
#include "host/threads.h"
#include "pages/peers.h"
#include "pool/create.h"
#include "pool/fork.h"
#include "pool/host_state.h"
#include "pool/pool.h"
#include "region/nodes.h"
#include "region/prefault.h"
#include "region/region.h"
#include "sharing/keeper.h"

void pool_retain(cxlkv_pool *pool) {
    atomic_fetch_add_explicit(&pool->handle.references, 1, memory_order_relaxed);
}

/* Under no lock of the pool: a fork may be waiting for that, with the list locked. */
void pool_drop(cxlkv_pool *pool) {
    if (atomic_fetch_sub_explicit(&pool->handle.references, 1, memory_order_acq_rel) != 1) return;
    pools_remove(pool);
    pthread_rwlock_destroy(&pool->locks.operations);
    pthread_mutex_destroy(&pool->locks.list);
    pthread_mutex_destroy(&pool->locks.spare);
    for (uint32_t i = 0; i < OWNER_COUNT; i++)
        if (owners[i].free && pool->owner[i]) owners[i].free(pool);
    free(pool->path);
    parts_free(pool);
    free(pool);
}

/* ---- making ---- */

static cxlkv_pool *pool_make(const char *path) {
    /* Before any lock is taken that a fork by another thread could copy. */
    static pthread_once_t registered = PTHREAD_ONCE_INIT;
    pthread_once(&registered, fork_register);
    cxlkv_pool *pool = calloc(1, sizeof(*pool));
    if (!pool) return NULL;
    pool->region.fd = pool->host_fd = pool->fork.state_fd = pool->fork.region_fd = -1;
    pool->state.folder = -1;
    pool->slot = pool->fork.slot = UINT32_MAX;
    pool->threads.count = 1;
    pool->waits.lock_ns = 30000000000u;
    atomic_store(&pool->handle.references, 1);
    rwlock_init(&pool->locks.operations);
    pthread_mutex_init(&pool->locks.list, NULL);
    pthread_mutex_init(&pool->locks.spare, NULL);
    counters_unbind(pool);
    pool->path = path ? strdup(path) : NULL;
    if (path && !pool->path) {
        pool_drop(pool);
        return NULL;
    }
    return pool;
}

static void pool_unmake(cxlkv_pool *pool) {
    keeper_stop(pool);
    host_detach(pool);
    if (pool->region.base) region_unmap(&pool->region);
    if (pool->region.fd >= 0) close(pool->region.fd);
    pool->region.fd = -1;
    scorers_free(pool);
    free(pool->verified);
    free(pool->loose);
    free(pool->late.references);
    pool->verified = NULL;
    pool->loose = NULL;
    pool->late.references = NULL;
}

static int pool_ready(cxlkv_pool *pool) {
    uint64_t bits = (uint64_t)pool->geometry.page_count * pool->geometry.record_layers;
    pool->verified = calloc((bits + 63) / 64, sizeof(*pool->verified));
    pool->loose = calloc(pool->geometry.page_count / 64 + 1, sizeof(*pool->loose));
    pool->late.references = calloc(pool->geometry.page_count, sizeof(*pool->late.references));
    if (!pool->verified || !pool->loose || !pool->late.references)
        return fail(ENOMEM, "no memory for %lu verification bits", bits);
    int code = parts_make(pool);
    for (uint32_t i = 0; code == 0 && i < OWNER_COUNT; i++)
        if (owners[i].begin) code = owners[i].begin(pool);
    if (code == 0) code = guard_install();
    if (code == 0) code = host_attach(pool);
    if (code == 0 && pool->shared) code = keeper_start(pool);
    return code;
}

static int finish(cxlkv_pool *pool, int code, const cxlkv_host *host, cxlkv_pool **out) {
    if (code == 0) code = peers_prepare(pool, host);
    if (code == 0) code = pool_ready(pool);
    if (code < 0) {
        pool_unmake(pool);
        pool_drop(pool);
        return code;
    }
    pools_add(pool);
    *out = pool;
    return 0;
}

static const cxlkv_sharing one_host = {.kind = CXLKV_SHARING_HOST, .hosts = 1};

static void layer_place(const cxlkv_pool *pool, uint32_t layer, cxlkv_layer_place *place) {
    const layer_shape *shape = shape_of(pool, layer);
    *place = (cxlkv_layer_place){.part = pool->layers.part_of[layer],
                                 .row = pool->layers.row_of[layer]};
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        place->piece_bytes[kind] = shape->strides[kind];
        place->offsets[kind] = shape->offsets[kind] + place->row * shape->row_bytes;
        place->slot_bytes[kind] = shape->slot_bytes[kind];
    }
}

int64_t cxlkv_pool_plan_layers(const cxlkv_layout *layout, const cxlkv_geometry *geometry,
                               cxlkv_layer_place *places) {
    int code = need(layout->layers, "places", places, NULL);
    if (code == 0) code = layout_check(layout);
    if (code < 0) return code;
    cxlkv_pool *planned = calloc(1, sizeof(*planned));
    if (!planned) return fail(ENOMEM, "no memory for a plan");
    planned->layout = *layout;
    planned->geometry = *geometry;
    int64_t pages = parts_make(planned);
    for (uint32_t layer = 0; pages == 0 && layer < layout->layers; layer++)
        layer_place(planned, layer, &places[layer]);
    if (pages == 0 && has_states(layout)) pages = state_pages(planned);
    parts_free(planned);
    free(planned);
    return pages;
}

int cxlkv_pool_plan(const cxlkv_layout *layout, const cxlkv_sharing *sharing,
                    uint64_t capacity_bytes, cxlkv_geometry *geometry) {
    cxlkv_sharing shared = sharing ? *sharing : one_host;
    return geometry_make(layout, &shared, capacity_bytes, geometry);
}

int cxlkv_pool_create(const char *path, const cxlkv_layout *layout, const cxlkv_sharing *sharing,
                      uint64_t capacity_bytes, uint32_t flags, const cxlkv_host *host,
                      uint64_t nodes, cxlkv_pool **out) {
    cxlkv_geometry geometry;
    cxlkv_sharing shared = sharing ? *sharing : one_host;
    int code = geometry_make(layout, &shared, capacity_bytes, &geometry);
    if (code < 0) return code;
    cxlkv_pool *pool = pool_make(path);
    if (!pool) return fail(ENOMEM, "no memory for the pool's handle");
    pool->layout = *layout;
    pool->sharing = shared;
    pool->geometry = geometry;
    pool->region.nodes = nodes;
    pool->region.small_pages = flags & CXLKV_CREATE_SMALL_PAGES;
    pool->in_place = flags & CXLKV_CREATE_IN_PLACE;
    code = peers_prepare(pool, host); /* what it has to say about the host, before a file is made */
    if (code == 0) code = create_region(pool, path, flags);
    bool placed = code == 0 && path;
    code = finish(pool, code, host, out);
    if (code < 0 && placed) { /* the file is whole, but it was not what the caller asked for */
        char why[512];
        snprintf(why, sizeof(why), "%s", cxlkv_error_text());
        cxlkv_pool_remove(path);
        fail(-code, "%s", why);
    }
    return code;
}

int cxlkv_pool_open(const char *path, const cxlkv_host *host, cxlkv_pool **out) {
    cxlkv_pool *pool = pool_make(path);
    if (!pool) return fail(ENOMEM, "no memory for the pool's handle");
    return finish(pool, open_mapped(pool, path, SUPERBLOCK_USE), host, out);
}

/* ---- closing ---- */

static void pool_end(cxlkv_pool *pool) {
    for (uint32_t i = 0; i < OWNER_COUNT; i++)
        if (owners[i].closing) owners[i].closing(pool);
    pthread_mutex_lock(&pool->locks.list);
    helpers *threads = pool->threads.helpers;
    pool->threads.helpers = NULL;
    pthread_mutex_unlock(&pool->locks.list);
    helpers_destroy(threads);
    pool_unmake(pool); /* gives all our pages back at once */
    pool->handle.closed = true;
}

/* Under the lock of operations. */
static int busy_check(const cxlkv_pool *pool) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && !pool->handle.closed && i < OWNER_COUNT; i++)
        if (owners[i].busy) code = owners[i].busy(pool);
    return code;
}

/* even_lent: nobody is left who could read what was lent. */
static int pool_close(cxlkv_pool *pool, bool even_lent) {
    int code = 0;
    /* Fork takes the two in this order; between them it would copy a pool that it does not see. */
    pools_lock();
    pthread_rwlock_wrlock(&pool->locks.operations);
    if (!even_lent) code = busy_check(pool);
    if (!pool->handle.closed && code == 0) pool_end(pool);
    pthread_rwlock_unlock(&pool->locks.operations);
    pools_unlock();
    return code;
}

int cxlkv_pool_close(cxlkv_pool *pool, uint32_t asks) {
    if (!asks) return pool_close(pool, false);
    pthread_rwlock_rdlock(&pool->locks.operations);
    int code = busy_check(pool);
    pthread_rwlock_unlock(&pool->locks.operations);
    return code;
}

void cxlkv_pool_destroy(cxlkv_pool **at) {
    if (!*at) return;
    pool_close(*at, true);
    pool_drop(*at);
}

/* ---- looking ---- */

static int format_read(const superblock *block, cxlkv_format *format) {
    *format = (cxlkv_format){.version = block->version, .build = block->build,
                             .compatible = block->features[FEATURES_COMPATIBLE],
                             .readers = block->features[FEATURES_READERS],
                             .incompatible = block->features[FEATURES_INCOMPATIBLE]};
    return 0;
}

void cxlkv_pool_describe(cxlkv_pool *pool, cxlkv_description *d) {
    *d = (cxlkv_description){.layout = pool->layout, .sharing = pool->sharing,
                             .geometry = pool->geometry,
                             .packed_bytes = record_packed_bytes(pool),
                             .layout_crc = layout_crc(pool),
                             .state_pages = has_states(&pool->layout) ? state_pages(pool) : 0};
    memcpy(d->identity, pool->identity, sizeof(d->identity));
    snprintf(d->page_kind, sizeof(d->page_kind), "%s", pool->region.page_kind);
    if (pool_enter(pool) < 0) return;
    GUARDED(format_read((const superblock *)pool->region.base, &d->format), 0);
    pool_leave(pool);
}

static int set_threads(cxlkv_pool *pool, uint32_t threads) {
    if (threads == 0 || threads > 1024)
        return fail(CXLKV_E_ARGUMENT, "%u threads: outside 1 to 1024", threads);
    /* The write lock: no task runs while its threads are replaced. */
    pthread_rwlock_wrlock(&pool->locks.operations);
    bool closed = pool->handle.closed;
    helpers *old = pool->threads.helpers;
    pool->threads.helpers = NULL;
    pool->threads.count = threads;
    pthread_rwlock_unlock(&pool->locks.operations);
    helpers_destroy(old);
    return closed ? fail(CXLKV_E_CLOSED, "the pool is closed: open it again") : 0;
}

int64_t cxlkv_pool_set(cxlkv_pool *pool, uint32_t what, uint32_t value) {
    switch (what) {
    case CXLKV_SET_THREADS: return set_threads(pool, value);
    case CXLKV_SET_EPOCH: return hotness_advance(pool);
    case CXLKV_SET_COUNTED:
    case CXLKV_SET_BY_MASS: hotness_set(pool, what == CXLKV_SET_BY_MASS, value != 0); return 0;
    default: return fail(CXLKV_E_ARGUMENT, "set: no setting has the number %u", what);
    }
}

/* ---- where its memory lies ---- */

int cxlkv_pool_placed(cxlkv_pool *pool, uint64_t pages_max, cxlkv_placed *placed) {
    return IN_POOL(pool, nodes_read(&pool->region, pages_max, placed));
}

int64_t cxlkv_pool_prefault(cxlkv_pool *pool, uint64_t offset, uint64_t bytes,
                            uint32_t huge) {
    return IN_POOL(pool, region_prefault(&pool->region, offset, bytes,
                                         pool->geometry.region_bytes, huge));
}

/* ---- what is counted ---- */

/* Under the host lock. */
static int stats_of(cxlkv_pool *pool, cxlkv_stats *stats) {
    host_reap(pool);
    cxlkv_page_counts counts = {.total = pool->host->page_count}; /* in registers */
    for (uint32_t page = 0; page < counts.total; page++)
        page_count(&counts, &pool->pages[page], page_is_ours(pool, page));
    counts.free = pool->host->free_pages;
    stats->pages = counts;
    for (uint32_t slot = 0; slot < PROCESS_MAX; slot++)
        stats->processes += pool->host->processes[slot].state != 0;
    counters_total(pool->host, &stats->all);
    counters_of_slot(pool->host, pool->slot, &stats->own);
    return 0;
}

int cxlkv_pool_stats(cxlkv_pool *pool, cxlkv_stats *stats) {
    int code = pool_enter(pool);
    if (code < 0) return code;
    hooks.sequences_expire(pool);
    memset(stats, 0, sizeof(*stats));
    code = HOST_LOCKED(pool, stats_of(pool, stats));
    pthread_mutex_lock(&pool->locks.list);
    stats->sequences = pool->sequence_count;
    pthread_mutex_unlock(&pool->locks.list);
    pool_leave(pool);
    return code;
}

/* A share of 1 is 2^32: four thousand million audits fit, and threads can add without a lock. */
int cxlkv_pool_count_audit(cxlkv_pool *pool, double recall, double mass) {
    if (!(recall >= 0 && recall <= 1) || !(mass >= 0 && mass <= 1))
        return fail(CXLKV_E_ARGUMENT, "an audit's recall %g and mass %g must lie in 0 to 1", recall,
                    mass);
    int code = pool_enter(pool);
    if (code < 0) return code;
    count_add(pool, COUNT_AUDITED_RECALL, (uint64_t)(recall * 4294967296.0));
    count_add(pool, COUNT_AUDITED_MASS, (uint64_t)(mass * 4294967296.0));
    count_add(pool, COUNT_AUDITED_SELECTS, 1);
    pool_leave(pool);
    return 0;
}
