/* Attach: whole pages that somebody else has written become the next pages of sequences.
 *
 * A device, or another program, writes the pieces of pages from cxlkv_pages_alloc(); this makes
 * records of them. Pages are claimed first: from then on they are neither the caller's nor a
 * sequence's, and whoever tries to free or attach them meanwhile is refused. All that reads or
 * writes the region comes next, and only then do page tables name them: all or nothing. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "format/mapping.h"
#include "format/records.h"
#include "host/locks.h"
#include "host/threads.h"
#include "pages/pages.h"
#include "pool/alloc.h"
#include "sequence/batch.h"
#include "sequence/sequence.h"

/* What becomes of one sequence. */
typedef struct plan {
    uint32_t first_item;         /* of its pages among the call's */
    uint32_t count;
    uint64_t before;             /* tokens */
} plan;

typedef struct attach_job {
    cxlkv_batch *batch;
    const cxlkv_attach_args *args;
    plan *plans;
    uint32_t items;              /* pages of a part */
    uint32_t *pages;             /* [parts][items], a copy: the caller's may change under us */
    uint32_t *claimed;           /* those of them that are pages, behind it */
    uint32_t claimed_count;
} attach_job;

static uint32_t page_at(const attach_job *job, uint32_t part, uint32_t item) {
    return job->pages[(uint64_t)part * job->items + item];
}

/* The first page of a part that is kept: what the tokens from (length - rewind) on see, or, without
 * a rewind, those of this call. */
static uint32_t first_kept(const attach_job *job, uint32_t i, uint32_t part) {
    const cxlkv_pool *pool = job->batch->pool;
    const plan *p = &job->plans[i];
    int64_t rewind = job->args->rewind;
    uint64_t length = p->before + (uint64_t)p->count * pool->layout.page_tokens;
    uint64_t back = rewind < 0 ? p->before : length - min_u64(length, (uint64_t)rewind);
    uint32_t first = job->batch->sequences[i]->tables[part].first;
    uint32_t kept = window_page(pool, part, back);
    return kept > first ? kept : first;
}

/* Index in the sequence of item 0 of sequence i. */
static uint32_t first_index(const attach_job *job, uint32_t i) {
    return (uint32_t)(job->plans[i].before / job->batch->pool->layout.page_tokens);
}

static bool is_kept(const attach_job *job, uint32_t i, uint32_t part, uint32_t place) {
    return first_index(job, i) + place >= first_kept(job, i, part);
}

/* ---- what must hold ---- */

static int make_plan(attach_job *job, uint32_t i) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_sequence *sequence = job->batch->sequences[i];
    const int32_t *starts = job->args->starts;
    uint32_t page_tokens = pool->layout.page_tokens;
    plan *p = &job->plans[i];
    p->first_item = (uint32_t)starts[i];
    p->count = (uint32_t)(starts[i + 1] - starts[i]);
    p->before = sequence_even_tokens(sequence);
    if (p->count == 0) return 0;
    if (p->before == UINT64_MAX)
        return fail(CXLKV_E_UNEVEN,
                    "sequence %u: its layers have different lengths (%lu to %lu tokens): append "
                    "the rest of the step, or truncate, before you attach",
                    i, sequence->layer_tokens[pool->layout.layers - 1], sequence->layer_tokens[0]);
    if (p->before % page_tokens)
        return fail(CXLKV_E_ARGUMENT,
                    "sequence %u has %lu tokens, no multiple of %u: pages are attached at the end "
                    "of a page. Append up to there, or truncate",
                    i, p->before, page_tokens);
    if (p->before / page_tokens + p->count >= INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "sequence %u: too many tokens", i);
    return 0;
}

/* All pages that were given, and that none is missing but behind a window. */
static int list_pages(attach_job *job) {
    uint32_t parts = job->batch->pool->geometry.part_count;
    uint64_t count = (uint64_t)parts * job->items;
    job->pages = malloc(2 * count * sizeof(*job->pages));
    if (!job->pages) return fail(ENOMEM, "no memory for a list of pages");
    memcpy(job->pages, job->args->pages, count * sizeof(*job->pages));
    job->claimed = job->pages + count;
    for (uint32_t part = 0; part < parts; part++)
        for (uint32_t i = 0; i < job->batch->count; i++)
            for (uint32_t place = 0; place < job->plans[i].count; place++) {
                uint32_t page = page_at(job, part, job->plans[i].first_item + place);
                if (page != NO_PAGE)
                    job->claimed[job->claimed_count++] = page;
                else if (is_kept(job, i, part, place))
                    return fail(CXLKV_E_ARGUMENT,
                                "sequence %u: page %u of part %u is not given, and no window has "
                                "passed it",
                                i, first_index(job, i) + place, part);
            }
    return 0;
}

/* ---- records ---- */

/* CRC32C of one layer's pieces of an item, [kv_heads, the most of any][PIECE_KINDS]. */
static const uint32_t *checksums_at(const attach_job *job, uint32_t layer, uint32_t item) {
    uint64_t heads = job->batch->pool->layers.kv_heads;
    return job->args->checksums + ((uint64_t)layer * job->items + item) * heads * PIECE_KINDS;
}

static int verify_layer(const attach_job *job, uint32_t page, uint32_t layer, uint32_t item) {
    static const char *const names[PIECE_KINDS] = {"digest", "sketch", "K", "V"};
    cxlkv_pool *pool = job->batch->pool;
    const layer_shape *shape = shape_of(pool, layer);
    const uint32_t *wanted = checksums_at(job, layer, item);
    for (uint32_t kind = 0; kind < PIECE_KINDS; kind++) {
        uint64_t stride = shape->strides[kind];
        if (stride == 0) continue;
        const uint8_t *pieces = pieces_of(pool, page, layer, kind);
        for (uint32_t head = 0; head < shape->layout.kv_heads; head++) {
            uint32_t crc =
                crc32c(0, pieces + head * stride, piece_data_bytes(&shape->layout, kind));
            if (crc == wanted[head * PIECE_KINDS + kind]) continue;
            count_add(pool, COUNT_CORRUPT_PIECES, 1);
            return fail(CXLKV_E_CORRUPT,
                        "page %u, layer %u, kv head %u: its %s is not what its checksum says: it "
                        "was not written whole, or not yet. Nothing was attached",
                        page, layer, head, names[kind]);
        }
    }
    return 0;
}

/* The page that becomes a record in a task; NO_PAGE: none was given, or a window has passed it. */
static uint32_t page_of(const attach_job *job, uint32_t task, uint32_t *part, uint32_t *item) {
    *part = task / job->items;
    *item = task % job->items;
    uint32_t i = entry_at(&job->plans->first_item, sizeof(plan), job->batch->count, *item);
    uint32_t place = *item - job->plans[i].first_item;
    return is_kept(job, i, *part, place) ? page_at(job, *part, *item) : NO_PAGE;
}

/* A record's pieces are what they should be, or nobody asked. */
static int verify_record(void *context, uint32_t task) {
    const attach_job *job = context;
    cxlkv_pool *pool = job->batch->pool;
    uint32_t part, item, page = page_of(job, task, &part, &item);
    if (page == NO_PAGE) return 0;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        if (pool->layers.part_of[layer] != part) continue;
        int code = verify_layer(job, page, layer, item);
        if (code < 0) return code;
    }
    return 0;
}

/* Checksum table, header and descriptor. Where hosts share the pool, the pieces leave the caches,
 * which may hold what a device wrote, before the descriptor says that they are there. */
static int seal_record(void *context, uint32_t task) {
    const attach_job *job = context;
    cxlkv_pool *pool = job->batch->pool;
    uint32_t part, item, page = page_of(job, task, &part, &item);
    int code = page == NO_PAGE ? 0 : page_stays_ours(pool, page);
    if (code < 0 || page == NO_PAGE) return code;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        if (pool->layers.part_of[layer] != part) continue;
        for (uint32_t kind = 0; pool->layout.checksum && kind < PIECE_KINDS; kind++)
            for (uint32_t head = 0; head < layout_of(pool, layer)->kv_heads; head++)
                if (shape_of(pool, layer)->strides[kind])
                    *checksum_of(pool, page, layer, head, kind) =
                        checksums_at(job, layer, item)[head * PIECE_KINDS + kind];
        if (pool->mode != VISIBILITY_COHERENT) pieces_write_back(pool, page, layer);
        /* Else the first reading verifies them, as it does another process's. */
        if (job->args->verify) verified_set(pool, page, layer);
    }
    store_fence();
    record_seal(pool, page, part, pool->layout.page_tokens, NULL);
    return 0;
}

/* ---- page tables ---- */

/* Under the host lock: all that can fail. */
static int make_room(attach_job *job) {
    cxlkv_batch *batch = job->batch;
    int code = 0;
    for (uint32_t i = 0; i < batch->count; i++)
        for (uint32_t part = 0; code == 0 && part < batch->pool->geometry.part_count; part++) {
            if (job->plans[i].count == 0) continue;
            code = sequence_advance(batch->sequences[i], part, first_kept(job, i, part));
            if (code == 0) code = sequence_reserve(batch->sequences[i], part, job->plans[i].count);
        }
    return code;
}

static void push_pages(attach_job *job, uint32_t i) {
    cxlkv_pool *pool = job->batch->pool;
    cxlkv_sequence *sequence = job->batch->sequences[i];
    const plan *p = &job->plans[i];
    for (uint32_t part = 0; part < pool->geometry.part_count; part++)
        for (uint32_t place = 0; place < p->count; place++) {
            uint32_t page = page_at(job, part, p->first_item + place);
            if (is_kept(job, i, part, place))
                sequence_push(sequence, part, sequence->page_count + place, page);
            else if (page != NO_PAGE)
                pages_drop(pool, 1, &page);
            else
                count_add(pool, COUNT_WINDOW_PAGES_SKIPPED, 1);
        }
    sequence->page_count += p->count;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        sequence->layer_tokens[layer] += (uint64_t)p->count * pool->layout.page_tokens;
}

static int add_pages(attach_job *job) {
    int code = make_room(job);
    for (uint32_t i = 0; code == 0 && i < job->batch->count; i++) push_pages(job, i);
    return code;
}

static int64_t attach_locked(attach_job *job) {
    cxlkv_pool *pool = job->batch->pool;
    const cxlkv_layout *layout = &pool->layout;
    int code = batch_starts(job->batch, job->args->starts, &job->items);
    if (code < 0 || job->items == 0) return code;
    if ((uint64_t)job->items * pool->geometry.part_count > INT32_MAX)
        return fail(CXLKV_E_ARGUMENT, "%u pages: attach fewer at once", job->items);
    if (!job->args->pages || (layout->checksum && !job->args->checksums))
        return fail(CXLKV_E_ARGUMENT, "%s: the pool needs them of every page",
                    job->args->pages ? "no checksums" : "no pages");
    if (job->args->verify && !layout->checksum)
        return fail(CXLKV_E_ARGUMENT, "verify: a pool without checksums has nothing to verify by");
    for (uint32_t i = 0; code == 0 && i < job->batch->count; i++) code = make_plan(job, i);
    if (code == 0) code = list_pages(job);
    if (code == 0)
        code = HOST_LOCKED(pool, pages_claim(pool, job->claimed_count, job->claimed));
    if (code < 0) return code;
    uint32_t tasks = job->items * pool->geometry.part_count;
    if (job->args->verify) code = run_tasks(pool, tasks, verify_record, job);
    if (code == 0) code = run_tasks(pool, tasks, seal_record, job);
    if (code == 0) code = HOST_LOCKED(pool, add_pages(job));
    if (code < 0) { /* they are the caller's again */
        pages_unclaim(pool, job->claimed_count, job->claimed);
        return code;
    }
    count_add(pool, COUNT_APPENDED_BYTES,
              (uint64_t)job->items * layout->page_tokens * layout->layers * layout->kv_heads *
                  token_bytes(layout));
    return job->items;
}

int64_t cxlkv_batch_attach(cxlkv_batch *batch, const cxlkv_attach_args *args) {
    attach_job job = {.batch = batch, .args = args};
    job.plans = calloc(batch->count, sizeof(*job.plans));
    if (!job.plans) return fail(ENOMEM, "no memory to plan an attach");
    int64_t code = IN_BATCH(batch, true, attach_locked(&job));
    free(job.pages);
    free(job.plans);
    return code;
}
