/* Whole records out of the pool and into it: what other tiers keep.
 * docs/reference/memory-layout.md has the bytes.
 *
 * A record outside of the pool has no gaps, and every byte of it is what a CRC says, or 0: equal
 * contents are equal bytes. Its table of CRCs is there for pools without checksums, too. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "host/hooks.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/processes.h"
#include "host/threads.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "pool/alloc.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

enum { STREAM_BYTES = 16 << 20, AHEAD_LINES = 8 };

typedef cxlkv_packed_header packed_header;
_Static_assert(sizeof(packed_header) == LINE_BYTES, "one line, no holes");

/* What a call works on; an item is one record. */
typedef struct record_job {
    cxlkv_pool *pool;
    uint64_t record_bytes;
    uint32_t layout_crc;
    uint8_t *bytes;
    const uint32_t *pages;
    const uint64_t *generations;
    int32_t *codes;
    bool stream;
} record_job;

static uint8_t *record_at(const record_job *job, uint32_t item) {
    return job->bytes + (uint64_t)item * job->record_bytes;
}

/* Which entry of a checksum table. */
static uint64_t entry_of(const record_job *job, uint32_t layer, uint32_t head, uint32_t kind) {
    uint64_t row = job->pool->layers.row_of[layer], heads = layout_of(job->pool, layer)->kv_heads;
    return (row * heads + head) * PIECE_KINDS + kind;
}

/* Of a row of a part; one more than it has: where its last one ends. */
static uint8_t *piece_at(const record_job *job, uint8_t *record, uint32_t part, uint32_t row,
                         uint32_t kind, uint32_t head) {
    const packing *p = packing_of(job->pool, part);
    return record + sizeof(packed_header) + job->pool->geometry.checksum_bytes +
           row * p->layer_bytes + p->offsets[kind] + head * p->sizes[kind];
}

/* The first lines of what is copied next: hardware does not ask ahead over the end of a page. */
static void expect(const uint8_t *next, size_t bytes) {
    for (size_t line = 0; line < AHEAD_LINES && line * LINE_BYTES < bytes; line++)
        __builtin_prefetch(next + line * LINE_BYTES);
}

/* ---- out of the pool ---- */

static int piece_out(const record_job *job, uint32_t page, uint32_t layer, uint32_t head,
                     uint32_t kind, uint8_t *to, uint32_t *crc) {
    cxlkv_pool *pool = job->pool;
    const layer_shape *shape = shape_of(pool, layer);
    size_t size = piece_data_bytes(&shape->layout, kind);
    size_t used = piece_used_bytes(pool, page, layer, kind);
    uint64_t stride = shape->strides[kind];
    const uint8_t *from = pieces_of(pool, page, layer, kind) + head * stride;
    if (head + 1 < shape->layout.kv_heads) expect(from + stride, size);
    copy_past(to, from, used, job->stream);
    memset(to + used, 0, size - used);
    if (pool->layout.checksum) {
        *crc = *checksum_of(pool, page, layer, head, kind);
        return piece_verify(pool, page, layer, head, kind, from);
    }
    *crc = crc32c(0, from, used);
    return 0;
}

static int pieces_out(const record_job *job, uint32_t page, uint32_t part, uint8_t *record) {
    cxlkv_pool *pool = job->pool;
    uint8_t *table = record + sizeof(packed_header);
    const uint64_t *sizes = packing_of(pool, part)->sizes;
    for (uint32_t row = 0; row < pool->layers.parts[part].layers; row++) {
        uint32_t layer = layer_at(pool, part, row);
        for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
            for (uint32_t head = 0; sizes[kind] && head < layout_of(pool, layer)->kv_heads;
                 head++) {
                uint32_t crc;
                int code = piece_out(job, page, layer, head, kind,
                                     piece_at(job, record, part, row, kind, head), &crc);
                if (code < 0) return code;
                memcpy(table + 4 * entry_of(job, layer, head, kind), &crc, 4);
            }
    }
    return 0;
}

/* The last page of a prompt may have fewer. */
static bool tokens_fit(const cxlkv_pool *pool, uint32_t tokens) {
    return tokens >= 1 && tokens <= pool->layout.page_tokens;
}

static int record_out(const record_job *job, uint32_t item) {
    cxlkv_pool *pool = job->pool;
    record_header header;
    uint32_t page = job->pages[item];
    uint8_t *record = record_at(job, item), *table = record + sizeof(packed_header);
    if (!record_header_read(pool, page, &header) || header.part >= stored_parts(pool) ||
        !tokens_fit(pool, header.tokens) ||
        (pool->layout.checksum && !record_table_is_whole(pool, page, &header)))
        return fail(CXLKV_E_CORRUPT, "the header or the checksum table of page %u is damaged",
                    page);
    int code = record_check_unlocked(pool, page, job->generations[item], header.tokens);
    if (code < 0) return code;
    memset(table, 0, pool->geometry.checksum_bytes);
    code = pieces_out(job, page, header.part, record);
    if (code < 0) return code;
    /* Layers that the part does not have, and what fills the record up to a line. */
    uint8_t *rest = piece_at(job, record, header.part, pool->layers.parts[header.part].layers,
                             PIECE_DIGEST, 0);
    memset(rest, 0, (size_t)(record + job->record_bytes - rest));
    packed_header packed = {.magic = CXLKV_PACKED_MAGIC, .version = CXLKV_PACKED_VERSION,
                            .bytes = job->record_bytes, .tokens = header.tokens,
                            .ordinal = header.ordinal, .part = header.part,
                            .layout_crc = job->layout_crc,
                            .table_crc = crc32c(0, table, pool->geometry.checksum_bytes)};
    memcpy(packed.hash, header.hash, sizeof(packed.hash));
    memcpy(packed.object, header.object, sizeof(packed.object));
    packed.crc = crc32c(0, &packed, offsetof(packed_header, crc));
    memcpy(record, &packed, sizeof(packed));
    return 0;
}

/* A record that cannot be had is none: an error of it ends no other one. */
static int read_task(void *context, uint32_t item) {
    record_job *job = context;
    int code = job->codes[item];
    if (code == 0) {
        code = GUARDED(record_out(job, item), poison_error(job->pool, &fault));
        store_fence();
    }
    if (code == -EFAULT) return -EFAULT; /* the caller's own array */
    if (code < 0) memset(record_at(job, item), 0, sizeof(packed_header));
    job->codes[item] = code;
    return 0;
}

/* Published, of this generation and this host's to give away: such a page may be held. */
static int published_check(const cxlkv_pool *pool, uint32_t page, uint64_t generation) {
    if (page >= pool->host->page_count || !page_is_ours(pool, page)) return -CXLKV_E_STALE;
    const page_info *info = &pool->pages[page];
    if (info->retired) return -CXLKV_E_POISON;
    return info->published && info->generation == generation ? 0 : -CXLKV_E_STALE;
}

/* Takes the host lock before and after reading, not during it. Meanwhile a reference on each page
 * that is read keeps its record from being replaced. */
static int64_t read_locked_twice(record_job *job, uint32_t count) {
    cxlkv_pool *pool = job->pool;
    uint32_t *held = malloc((count + 1ull) * sizeof(*held)), held_count = 0;
    if (!held) return fail(ENOMEM, "no memory for a list of %u pages", count);
    int64_t code = host_lock(pool);
    if (code == 0) {
        for (uint32_t i = 0; i < count; i++) {
            job->codes[i] = published_check(pool, job->pages[i], job->generations[i]);
            if (job->codes[i] == 0) held[held_count++] = job->pages[i];
        }
        pages_hold(pool, held_count, held);
        host_unlock(pool);
        code = run_tasks(pool, count, read_task, job);
        code = peers_verify(pool, code);
        if (host_lock(pool) == 0) {
            pages_drop(pool, held_count, held);
            host_unlock(pool);
        } else {
            pages_drop_later(pool, held_count, held);
        }
    }
    free(held);
    for (uint32_t i = 0; code >= 0 && i < count; i++) code += job->codes[i] == 0;
    return code;
}

static record_job job_of(cxlkv_pool *pool, uint32_t count, uint8_t *bytes, int32_t *codes) {
    record_job job = {.pool = pool, .bytes = bytes, .codes = codes, .layout_crc = layout_crc(pool),
                      .record_bytes = record_packed_bytes(pool)};
    job.stream = count * job.record_bytes > STREAM_BYTES;
    return job;
}

int64_t cxlkv_records_read(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                           const uint64_t *generations, uint8_t *bytes, int32_t *codes) {
    int code = need(count, "pages", pages, "generations", generations, "bytes", bytes, "codes",
                    codes, NULL);
    if (code < 0) return code;
    record_job job = job_of(pool, count, bytes, codes);
    job.pages = pages;
    job.generations = generations;
    return IN_POOL(pool, read_locked_twice(&job, count));
}

/* ---- into the pool ---- */

/* A record that waits for its page, and the page. */
typedef struct arrival {
    packed_header header;        /* a copy: the caller's bytes may change under us */
    uint32_t page;
} arrival;

typedef struct write_job {
    record_job common;
    arrival *arrivals;
    const uint8_t *parents;      /* 16 bytes each, or NULL */
    uint32_t *pages;
    uint64_t room;               /* free pages that it wants to find */
    uint32_t taken;              /* of the pages: all have a reference of ours */
} write_job;

static int header_check(const record_job *job, uint32_t item, packed_header *header) {
    const cxlkv_pool *pool = job->pool;
    memcpy(header, record_at(job, item), sizeof(*header));
    if (header->magic != CXLKV_PACKED_MAGIC || header->version != CXLKV_PACKED_VERSION ||
        header->crc != crc32c(0, header, offsetof(packed_header, crc)) ||
        (header->part < pool->geometry.part_count && (header->object[0] || header->object[1])))
        return -CXLKV_E_CORRUPT;
    if (header->layout_crc != job->layout_crc || header->bytes != job->record_bytes)
        return -CXLKV_E_GEOMETRY;
    bool named = header->hash[0] != 0 || header->hash[1] != 0;
    bool right = tokens_fit(pool, header->tokens) && named &&
                 header->part < stored_parts(pool) && header->ordinal <= INT32_MAX;
    return right ? 0 : -CXLKV_E_CORRUPT;
}

static bool is_zero(const uint8_t *from, const uint8_t *end) {
    for (; from < end; from++)
        if (*from) return false;
    return true;
}

/* Its CRC, and, if it is the table's, the piece to its place past the caches. */
static bool piece_in(const record_job *job, const arrival *a, uint32_t layer, uint32_t head,
                     uint32_t kind, const uint8_t *from, uint32_t crc) {
    cxlkv_pool *pool = job->pool;
    const layer_shape *shape = shape_of(pool, layer);
    size_t size = piece_data_bytes(&shape->layout, kind);
    size_t used = stores_objects(&pool->layout) ? a->header.tokens : size;
    uint64_t stride = shape->strides[kind];
    uint8_t *to = pieces_of(pool, a->page, layer, kind) + head * stride;
    expect(from + size, size);
    if (crc32c(0, from, used) != crc || !is_zero(from + used, from + size)) return false;
    kernels_current()->store_rows(to, from, used, 1, used);
    if (pool->mode != VISIBILITY_COHERENT && !kernels_current()->streams)
        flush_write_back(FLUSH_PUBLISH_HEADER, to, used); /* V1 */
    if (pool->layout.checksum) *checksum_of(pool, a->page, layer, head, kind) = crc;
    return true;
}

static bool layer_in(const record_job *job, const arrival *a, uint32_t layer, uint8_t *record,
                     uint32_t *table) {
    cxlkv_pool *pool = job->pool;
    const uint32_t part = a->header.part, row = pool->layers.row_of[layer];
    const uint64_t *sizes = packing_of(pool, part)->sizes;
    const uint32_t heads = layout_of(pool, layer)->kv_heads;
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++)
        for (uint32_t head = 0; sizes[kind] && head < heads; head++) {
            uint32_t *entry = table + entry_of(job, layer, head, kind);
            if (!piece_in(job, a, layer, head, kind,
                          piece_at(job, record, part, row, kind, head), *entry))
                return false;
            *entry = 0; /* what is left of the table must be 0 */
        }
    verified_set(pool, a->page, layer);
    return true;
}

static int record_in(const write_job *write, uint32_t item, uint32_t *table) {
    const record_job *job = &write->common;
    cxlkv_pool *pool = job->pool;
    const arrival *a = &write->arrivals[item];
    uint64_t table_bytes = pool->geometry.checksum_bytes;
    uint8_t *record = record_at(job, item);
    const part *own = &pool->layers.parts[a->header.part];
    memcpy(table, record + sizeof(packed_header), table_bytes);
    if (crc32c(0, table, table_bytes) != a->header.table_crc) return -CXLKV_E_CORRUPT;
    for (uint32_t row = 0; row < own->layers; row++)
        if (!layer_in(job, a, layer_at(pool, a->header.part, row), record, table))
            return -CXLKV_E_CORRUPT;
    const uint8_t *rest = piece_at(job, record, a->header.part, own->layers, PIECE_DIGEST, 0);
    if (!is_zero((const uint8_t *)table, (const uint8_t *)table + table_bytes) ||
        !is_zero(rest, record + job->record_bytes))
        return -CXLKV_E_CORRUPT;
    store_fence(); /* of this thread's own non-temporal stores */
    record_seal(pool, a->page, a->header.part, a->header.tokens, NULL);
    return 0;
}

static int write_task(void *context, uint32_t item) {
    const write_job *write = context;
    cxlkv_pool *pool = write->common.pool;
    if (write->common.codes[item] != 0) return 0;
    uint32_t *table = malloc(pool->geometry.checksum_bytes);
    if (!table) return fail(ENOMEM, "no memory for a checksum table");
    int code = GUARDED(record_in(write, item, table), poison_error(pool, &fault));
    free(table);
    if (code == -EFAULT) return -EFAULT;
    write->common.codes[item] = code;
    return 0;
}

/* Which of the records may be what they say, by their headers. */
static void check_headers(write_job *write, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        write->common.codes[i] = header_check(&write->common, i, &write->arrivals[i].header);
}

/* Under the host lock: which of the records are wanted, and a page for each of those. */
static int take_arrivals(write_job *write, uint32_t count) {
    cxlkv_pool *pool = write->common.pool;
    uint32_t wanted = 0, used = 0;
    if (pool->shared) peers_follow(pool); /* what others forgot is not published any more */
    for (uint32_t i = 0; i < count; i++) {
        if (write->common.codes[i] != 0) continue;
        if (index_find(pool, write->arrivals[i].header.hash) != NO_PAGE)
            write->common.codes[i] = CXLKV_RECORD_PRESENT;
        else
            wanted++;
    }
    write->room = wanted;
    int code = pages_take(pool, wanted, NO_PAGE, write->pages);
    if (code < 0) return code;
    write->taken = wanted;
    for (uint32_t i = 0; i < count; i++)
        if (write->common.codes[i] == 0) write->arrivals[i].page = write->pages[used++];
    return 0;
}

static int prepare(write_job *write, uint32_t count) {
    cxlkv_pool *pool = write->common.pool;
    int code = GUARDED((check_headers(write, count), 0), poison_error(pool, &fault));
    if (code < 0) return code;
    return TAKING_PAGES(pool, write->room, take_arrivals(write, count));
}

static uint32_t parent_of(const write_job *write, uint32_t item) {
    uint64_t hash[2] = {0};
    if (write->parents) memcpy(hash, write->parents + 16ull * item, sizeof(hash));
    return hash[0] || hash[1] ? index_find(write->common.pool, hash) : NO_PAGE;
}

/* Under the host lock: those that were written whole are found from now on. */
static int64_t publish_arrivals(write_job *write, uint32_t count) {
    cxlkv_pool *pool = write->common.pool;
    int64_t published = 0;
    if (pool->shared) peers_follow(pool);
    for (uint32_t i = 0; i < count; i++) {
        const packed_header *header = &write->arrivals[i].header;
        page_key key = {.ordinal = header->ordinal};
        memcpy(key.hash, header->hash, sizeof(key.hash));
        memcpy(key.object, header->object, sizeof(key.object));
        if (write->common.codes[i] != 0) continue;
        uint32_t page = write->arrivals[i].page;
        if (publish_page(pool, page, header->part, header->tokens, &key)) {
            hotness_published(pool, page,
                              listed_part(&pool->layout, header->part, header->ordinal),
                              parent_of(write, i));
            published++;
        } else {
            write->common.codes[i] = CXLKV_RECORD_PRESENT; /* another came first */
        }
    }
    return published;
}

/* Publishes, and drops every reference that was taken: pages that are not published are free. */
static int64_t settle_arrivals(write_job *write, uint32_t count, int64_t code) {
    cxlkv_pool *pool = write->common.pool;
    int64_t published = host_lock(pool);
    if (published < 0) {
        pages_drop_later(pool, write->taken, write->pages);
        return published;
    }
    if (code == 0)
        published = GUARDED(publish_arrivals(write, count), poison_error_locked(pool, &fault));
    pages_drop(pool, write->taken, write->pages);
    host_unlock(pool);
    return code < 0 ? code : published;
}

int64_t cxlkv_records_write(cxlkv_pool *pool, uint32_t count, const uint8_t *bytes,
                            const uint8_t *parents, int32_t *codes) {
    int64_t code = need(count, "bytes", bytes, "codes", codes, NULL);
    if (code == 0) code = pool_enter(pool);
    if (code < 0) return code;
    /* Nothing below writes to the records: reading and writing share their functions. */
    write_job write = {.common = job_of(pool, count, (uint8_t *)(uintptr_t)bytes, codes)};
    write.parents = parents;
    write.arrivals = calloc(count + 1ull, sizeof(*write.arrivals));
    write.pages = malloc((count + 1ull) * sizeof(*write.pages));
    if (!write.arrivals || !write.pages)
        code = fail(ENOMEM, "no memory for a list of %u records", count);
    if (code == 0) code = prepare(&write, count);
    if (code == 0) {
        code = run_tasks(pool, count, write_task, &write);
        code = peers_verify(pool, code); /* the pages may be others' since they were taken */
        code = settle_arrivals(&write, count, code);
    }
    free(write.arrivals);
    free(write.pages);
    pool_leave(pool);
    return code;
}

/* ---- which records there are, and which may go ---- */

int cxlkv_names(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t places,
                uint8_t *names) {
    int code = need((uint64_t)count * places, "hashes", hashes, "names", names, NULL);
    if (code < 0) return code;
    for (uint64_t key = 0; key < count; key++)
        for (uint32_t place = 0; place < places; place++)
            for (uint32_t part = 0; part < pool->geometry.part_count; part++, names += 16) {
                uint64_t hash[2];
                page_hash(hashes, key, place, part, hash);
                memcpy(names, hash, sizeof(hash));
            }
    return 0;
}

static int64_t find_pages(const cxlkv_pool *pool, uint32_t count, const uint8_t *names,
                          uint32_t *pages, uint64_t *generations) {
    int64_t found = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t hash[2];
        memcpy(hash, names + i * 16, sizeof(hash));
        pages[i] = index_find(pool, hash);
        generations[i] = pages[i] == NO_PAGE ? 0 : pool->pages[pages[i]].generation;
        found += pages[i] != NO_PAGE;
    }
    return found;
}

int64_t cxlkv_find_pages(cxlkv_pool *pool, uint32_t count, const uint8_t *names, uint32_t *pages,
                         uint64_t *generations) {
    int code = need(count, "names", names, "pages", pages, "generations", generations, NULL);
    if (code < 0) return code;
    return IN_POOL(pool, HOST_LOCKED(pool, find_pages(pool, count, names, pages, generations)));
}

static int forget_page(cxlkv_pool *pool, uint32_t page, uint64_t generation, bool only_unheld) {
    descriptor line;
    int code = published_check(pool, page, generation);
    if (code < 0) return code;
    if (only_unheld && (pool->pages[page].holders || pool->pages[page].pinned))
        return -CXLKV_E_BUSY;
    code = descriptor_read(pool, page, &line);
    if (code < 0) return code;
    if (index_find(pool, line.hash) != page) return -CXLKV_E_STALE;
    page_forget(pool, line.hash, false);
    return pool->pages[page].generation == generation ? CXLKV_PAGE_HELD : 0;
}

static int64_t forget_pages(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                            const uint64_t *generations, bool only_unheld, int32_t *codes) {
    int64_t freed = 0;
    bool reaped = false;
    if (pool->shared) peers_follow(pool);
    for (uint32_t i = 0; i < count; i++) {
        codes[i] = forget_page(pool, pages[i], generations[i], only_unheld);
        if (codes[i] == -CXLKV_E_BUSY && !reaped) { /* its holder may be dead */
            host_reap(pool);
            reaped = true;
            codes[i] = forget_page(pool, pages[i], generations[i], only_unheld);
        }
        freed += codes[i] == 0;
    }
    return freed;
}

int64_t cxlkv_forget_pages(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                           const uint64_t *generations, uint32_t only_unheld, int32_t *codes) {
    int code = need(count, "pages", pages, "generations", generations, "codes", codes, NULL);
    if (code < 0) return code;
    /* The worker may hold what our tables do not have any more. */
    return IN_POOL(pool, (sequences_expire(pool), hooks.worker_give_back(pool),
                          HOST_LOCKED(pool, forget_pages(pool, count, pages, generations,
                                                         only_unheld != 0, codes))));
}
