/* State checkpoints: what the recurrent and convolution layers of a model keep of a text up to one
 * of its tokens.
 *
 * A checkpoint's bytes fill the pieces of as many pages as they need, of a part of their own. Its
 * first page begins with the CRC of the layout, which says what the bytes are, and those of the
 * other pages' checksum tables, and is published last: a checkpoint is found when all of its pages
 * are there and are of one publication. It is found under the key of the text's last page, or tail,
 * together with those: prefix/boundary.c. */
#include "base/crc32c.h"
#include "base/flush.h"
#include "base/guard.h"
#include "format/poison.h"
#include "format/records.h"
#include "format/runs.h"
#include "host/hotness.h"
#include "host/locks.h"
#include "host/threads.h"
#include "pages/borrow.h"
#include "pages/pages.h"
#include "pages/published.h"
#include "pool/alloc.h"
#include "prefix/publish.h"
#include "prefix/states.h"
#include "sequence/sequence.h"
#include "sharing/log_reader.h"
#include "sharing/this_host.h"

/* A call's checkpoint. As its pages have it, it is a stream: the table, the states, zeros. */
typedef struct state_job {
    cxlkv_pool *pool;
    const packing *packing;
    uint32_t count, part, tokens; /* pages; their part; tokens in the text's last page */
    uint32_t ordinal;             /* of that page */
    uint64_t table_bytes;
    uint32_t *pages;
    uint32_t *table;             /* by page; the first one's is of the layout */
    uint8_t *bytes;              /* the caller's */
} state_job;

static int job_make(cxlkv_pool *pool, uint8_t *bytes, state_job *job) {
    uint32_t count = state_pages(pool);
    uint32_t part = pool->geometry.part_count;
    *job = (state_job){.pool = pool, .packing = packing_of(pool, part), .count = count,
                       .bytes = bytes, .part = part, .table_bytes = state_table_bytes(count)};
    job->table = calloc(1, job->table_bytes);
    job->pages = malloc(count * sizeof(*job->pages));
    if (!job->table || !job->pages)
        return fail(ENOMEM, "no memory for a list of %u pages", count);
    job->table[0] = layout_crc(pool);
    return 0;
}

static void job_free(state_job *job) {
    free(job->table);
    free(job->pages);
}

/* ---- the stream ---- */

/* A piece of a page, and where its bytes are in the stream. */
typedef struct state_piece {
    uint8_t *at;
    uint32_t layer, head, kind;
    uint64_t begin;
    size_t size;
} state_piece;

typedef int piece_function(const state_job *job, uint32_t page, const state_piece *piece);

static int each_piece(const state_job *job, uint32_t item, piece_function *each) {
    const cxlkv_pool *pool = job->pool;
    state_piece piece = {.begin = item * job->packing->payload_bytes};
    int code = 0;
    for (uint32_t row = 0; row < pool->layers.parts[job->part].layers; row++)
        for (piece.kind = 0; piece.kind < PIECE_KINDS; piece.kind++) {
            piece.size = job->packing->sizes[piece.kind];
            piece.layer = layer_at(pool, job->part, row);
            const layer_shape *shape = shape_of(pool, piece.layer);
            uint64_t stride = shape->strides[piece.kind];
            if (stride == 0) continue;
            piece.at = pieces_of(pool, job->pages[item], piece.layer, piece.kind);
            for (piece.head = 0; code == 0 && piece.head < shape->layout.kv_heads; piece.head++) {
                code = each(job, job->pages[item], &piece);
                piece.at += stride;
                piece.begin += piece.size;
            }
        }
    return code;
}

/* The bytes of a piece that are the caller's: from `*skip` on in the piece. */
static size_t own_bytes(const state_job *job, const state_piece *piece, size_t *skip,
                        uint8_t **from) {
    uint64_t first = piece->begin > job->table_bytes ? piece->begin : job->table_bytes;
    uint64_t end = min_u64(piece->begin + piece->size,
                           job->table_bytes + job->pool->layout.state_bytes);
    if (first >= end) return 0;
    *skip = first - piece->begin;
    *from = job->bytes + (first - job->table_bytes);
    return end - first;
}

static size_t table_part(const state_job *job, const state_piece *piece) {
    if (piece->begin >= job->table_bytes) return 0;
    return min_u64(piece->size, job->table_bytes - piece->begin);
}

/* ---- publish ---- */

static int piece_in(const state_job *job, uint32_t page, const state_piece *piece) {
    cxlkv_pool *pool = job->pool;
    uint8_t *from = NULL;
    size_t skip = 0, own = own_bytes(job, piece, &skip, &from), table = table_part(job, piece);
    uint32_t crc;
    if (own == piece->size) {
        crc = crc32c(0, from, own);
        kernels_current()->store_rows(piece->at, from, own, 1, own);
    } else {
        memset(piece->at, 0, piece->size);
        if (table) memcpy(piece->at, (const uint8_t *)job->table + piece->begin, table);
        if (own) memcpy(piece->at + skip, from, own);
        crc = crc32c(0, piece->at, piece->size);
    }
    if (pool->mode != VISIBILITY_COHERENT &&
        (own != piece->size || !kernels_current()->streams))
        flush_write_back(FLUSH_PUBLISH_HEADER, piece->at, piece->size); /* V1 */
    *checksum_of(pool, page, piece->layer, piece->head, piece->kind) = crc;
    return 0;
}

static int page_in(state_job *job, uint32_t item) {
    record_header header;
    uint32_t page = job->pages[item];
    each_piece(job, item, piece_in);
    store_fence();
    record_seal(job->pool, page, job->part, job->tokens, NULL);
    if (!record_header_read(job->pool, page, &header))
        return fail(CXLKV_E_CORRUPT, "page %u was changed while it was written", page);
    if (item) job->table[item] = header.table_crc;
    for (uint32_t row = 0; row < job->pool->layers.parts[job->part].layers; row++)
        verified_set(job->pool, page, layer_at(job->pool, job->part, row));
    return 0;
}

/* All but the first page, whose table has the others' CRCs. */
static int write_task(void *context, uint32_t item) {
    state_job *job = context;
    return GUARDED(page_in(job, item + 1), poison_error(job->pool, &fault));
}

static int write_pages(state_job *job) {
    int code = run_tasks(job->pool, job->count - 1, write_task, job);
    if (code == 0) code = GUARDED(page_in(job, 0), poison_error(job->pool, &fault));
    return (int)peers_verify(job->pool, code);
}

static bool is_whole(cxlkv_pool *pool, const uint8_t *key, uint32_t *pages) {
    uint64_t tokens;
    bool whole = states_find(pool, key, pages, &tokens);
    if (whole) states_let_go(pool, pages);
    return whole;
}

/* Under the host lock. 1; 0: such a checkpoint is there. Pages that are left of one go. */
static int take_pages(state_job *job, const uint8_t *key) {
    cxlkv_pool *pool = job->pool;
    if (pool->shared) peers_follow(pool);
    if (is_whole(pool, key, job->pages)) return 0;
    int code = pages_take(pool, job->count, IN_A_GAP, job->pages);
    return code < 0 ? code : 1;
}

static int64_t publish_pages(state_job *job, const uint8_t *key, uint32_t *found) {
    cxlkv_pool *pool = job->pool;
    int64_t published = 0;
    uint64_t hash[2];
    if (pool->shared) peers_follow(pool);
    if (is_whole(pool, key, found)) return 0; /* another came first */
    page_hash(key, 0, 0, 0, hash);
    uint32_t parent = index_find(pool, hash);
    unfinished_begin(pool, key, job->count);
    for (uint32_t i = job->count; i-- > 0;) { /* the first one last, a leaf: it goes first */
        page_key made = {.ordinal = job->ordinal};
        page_hash(key, 0, i, job->part, made.hash);
        page_displace(pool, made.hash); /* what is left of one that is not whole */
        if (!publish_page(pool, job->pages[i], job->part, job->tokens, &made)) break;
        hotness_published(pool, job->pages[i], job->part, parent);
        parent = job->pages[i];
        published++;
    }
    if (published == job->count) unfinished_end(pool);
    return published;
}

/* The pages are held while they are written: a process that dies leaves some without a holder. */
static int64_t publish_states(state_job *job, const uint8_t *key) {
    cxlkv_pool *pool = job->pool;
    int64_t code = TAKING_PAGES(pool, job->count, take_pages(job, key));
    if (code <= 0) return code;
    uint32_t *found = malloc(job->count * sizeof(*found));
    code = found ? write_pages(job) : fail(ENOMEM, "no memory for a list of %u pages", job->count);
    int locked = host_lock(pool);
    if (locked < 0) {
        pages_drop_later(pool, job->count, job->pages);
        free(found);
        return locked;
    }
    if (code == 0)
        code = GUARDED(publish_pages(job, key, found), poison_error_locked(pool, &fault));
    unfinished_forget(pool);
    pages_drop(pool, job->count, job->pages);
    host_unlock(pool);
    free(found);
    return code;
}

static int states_check(const cxlkv_pool *pool, uint64_t size) {
    if (!has_states(&pool->layout))
        return fail(CXLKV_E_ARGUMENT, "the pool's layout has no states: KVLayout(states=)");
    if (size != pool->layout.state_bytes)
        return fail(CXLKV_E_ARGUMENT, "a state checkpoint of %lu bytes: the pool's layout says %lu",
                    size, pool->layout.state_bytes);
    return 0;
}

int64_t cxlkv_publish_states(cxlkv_sequence *sequence, uint64_t tokens, const uint8_t *key,
                             const uint8_t *bytes, uint64_t size) {
    cxlkv_pool *pool = sequence->pool;
    state_job job;
    int64_t code = need(1, "key", key, "bytes", bytes, NULL);
    if (code == 0) code = states_check(pool, size);
    if (code == 0) code = publish_check(sequence);
    if (code == 0) code = sequence_enter(sequence, false);
    if (code < 0) return code;
    if (tokens == 0 || tokens > sequence->layer_tokens[pool->layout.layers - 1])
        code = fail(CXLKV_E_ARGUMENT, "a state checkpoint after %lu tokens: the sequence has %lu "
                    "in all layers", tokens, sequence->layer_tokens[pool->layout.layers - 1]);
    if (code == 0) code = job_make(pool, (uint8_t *)(uintptr_t)bytes, &job);
    if (code == 0) {
        job.ordinal = (uint32_t)((tokens - 1) / pool->layout.page_tokens);
        job.tokens = (uint32_t)((tokens - 1) % pool->layout.page_tokens) + 1;
        code = publish_states(&job, key);
        job_free(&job);
    }
    sequence_leave(sequence);
    return code;
}

/* ---- find ---- */

bool states_expected(const cxlkv_pool *pool, const uint8_t *key) {
    uint64_t hash[2];
    page_hash(key, 0, 0, pool->geometry.part_count, hash);
    return index_find(pool, hash) != NO_PAGE;
}

static int table_out(const state_job *job, uint32_t page, const state_piece *piece) {
    size_t table = table_part(job, piece);
    if (table == 0) return 0;
    memcpy((uint8_t *)job->table + piece->begin, piece->at, table);
    return piece_verify(job->pool, page, piece->layer, piece->head, piece->kind, piece->at);
}

/* Are the bytes, and the pages, what the first one's table says? */
static int table_check(state_job *job, uint32_t *table_crcs) {
    table_crcs[0] = job->table[0];
    int code = each_piece(job, 0, table_out);
    for (uint32_t i = 0; code == 0 && i < job->count; i++)
        if (job->table[i] != table_crcs[i]) code = -CXLKV_E_STALE;
    return code;
}

/* Its descriptor, of this part and with the first one's place in the text. */
static bool find_page(cxlkv_pool *pool, const uint8_t *key, uint32_t i, descriptor *first,
                      uint32_t *page, uint32_t *table_crc) {
    uint32_t part = pool->geometry.part_count, ordinal;
    descriptor line;
    uint64_t hash[2];
    page_hash(key, 0, i, part, hash);
    *page = index_find(pool, hash);
    if (*page == NO_PAGE) return false;
    if (!page_is_ours(pool, *page)) descriptor_drop(pool, *page);
    if (pool->pages[*page].retired || descriptor_read(pool, *page, &line) < 0) return false;
    if (i == 0) *first = line;
    *table_crc = line.table_crc;
    return match_page(pool, hash, part, first->tokens, page, &ordinal) &&
           ordinal == first->ordinal;
}

/* Other hosts' pages among them into view, or none of them. */
static bool borrow_pages(cxlkv_pool *pool, uint32_t count, const uint32_t *pages,
                         uint32_t tokens) {
    borrowing *items = malloc(count * sizeof(*items));
    uint32_t used = 0;
    bool all = items != NULL;
    for (uint32_t i = 0; all && i < count; i++)
        if (!page_is_ours(pool, pages[i]))
            items[used++] = (borrowing){.page = pages[i], .state = PAGE_PUBLISHED,
                                        .generation = pool->pages[pages[i]].generation};
    if (used) borrow(pool, items, used);
    for (uint32_t i = 0; i < used; i++)
        all &= items[i].code == 0 &&
               record_check(pool, items[i].page, items[i].generation, tokens) == 0;
    for (uint32_t i = 0; !all && i < used; i++)
        if (items[i].code == 0 && pool->pages[items[i].page].holders == 0)
            borrow_end(pool, items[i].page, 1);
    free(items);
    return all;
}

void states_let_go(cxlkv_pool *pool, const uint32_t *pages) {
    for (uint32_t i = 0; i < state_pages(pool); i++)
        if (!page_is_ours(pool, pages[i]) && pool->pages[pages[i]].holders == 0)
            borrow_end(pool, pages[i], 1);
}

bool states_find(cxlkv_pool *pool, const uint8_t *key, uint32_t *pages, uint64_t *tokens) {
    descriptor first = {.version = 0};
    state_job job;
    if (!states_expected(pool, key)) return false;
    bool found = job_make(pool, NULL, &job) == 0;
    uint32_t *table_crcs = malloc(job.count * sizeof(*table_crcs));
    found &= table_crcs != NULL;
    for (uint32_t i = 0; found && i < job.count; i++)
        found = find_page(pool, key, i, &first, &job.pages[i], &table_crcs[i]);
    if (found) found = borrow_pages(pool, job.count, job.pages, first.tokens);
    if (found && GUARDED(table_check(&job, table_crcs), poison_error_locked(pool, &fault)) < 0) {
        states_let_go(pool, job.pages);
        found = false;
    }
    if (found) {
        memcpy(pages, job.pages, job.count * sizeof(*pages));
        *tokens = (uint64_t)first.ordinal * pool->layout.page_tokens + first.tokens;
    }
    free(table_crcs);
    job_free(&job);
    return found;
}

int cxlkv_state_names(cxlkv_pool *pool, uint32_t count, const uint8_t *hashes, uint32_t pages,
                      uint8_t *names) {
    int code = need((uint64_t)count * pages, "hashes", hashes, "names", names, NULL);
    for (uint64_t key = 0; code == 0 && key < count; key++)
        for (uint32_t page = 0; page < pages; page++, names += 16) {
            uint64_t hash[2];
            page_hash(hashes, key, page, pool->geometry.part_count, hash);
            memcpy(names, hash, sizeof(hash));
        }
    return code;
}

/* ---- read ---- */

static int piece_out(const state_job *job, uint32_t page, const state_piece *piece) {
    uint8_t *to = NULL;
    size_t skip = 0, own = own_bytes(job, piece, &skip, &to);
    if (own == 0) return 0;
    memcpy(to, piece->at + skip, own);
    const uint8_t *read = own == piece->size ? to : piece->at;
    return piece_verify(job->pool, page, piece->layer, piece->head, piece->kind, read);
}

static int read_task(void *context, uint32_t item) {
    const state_job *job = context;
    return GUARDED(each_piece(job, item, piece_out), poison_error(job->pool, &fault));
}

static int read_states(cxlkv_sequence *sequence, uint8_t *bytes) {
    cxlkv_pool *pool = sequence->pool;
    state_job job;
    if (!sequence->states)
        return fail(CXLKV_E_ARGUMENT, "there is no state checkpoint: only a hit of "
                    "match_prefix() has one");
    int code = job_make(pool, bytes, &job);
    if (code == 0) {
        memcpy(job.pages, sequence->states, job.count * sizeof(*job.pages));
        code = (int)peers_verify(pool, run_tasks(pool, job.count, read_task, &job));
        count_add(pool, COUNT_FETCHED_BYTES, code == 0 ? pool->layout.state_bytes : 0);
    }
    job_free(&job);
    return code;
}

int cxlkv_read_states(cxlkv_sequence *sequence, uint8_t *bytes, uint64_t size) {
    int code = need(size, "bytes", bytes, NULL);
    if (code == 0) code = states_check(sequence->pool, size);
    return code < 0 ? code : (int)IN_SEQUENCE(sequence, false, read_states(sequence, bytes));
}

static int64_t state_places(const cxlkv_sequence *sequence, uint32_t *pages,
                            uint64_t *generations, uint64_t capacity) {
    const cxlkv_pool *pool = sequence->pool;
    uint64_t count = sequence->states ? state_pages(pool) : 0;
    for (uint64_t i = 0; i < min_u64(count, capacity); i++) {
        pages[i] = sequence->states[i];
        generations[i] = pool->pages[pages[i]].generation;
    }
    return (int64_t)count;
}

int64_t cxlkv_state_places(cxlkv_sequence *sequence, uint32_t *pages, uint64_t *generations,
                           uint64_t capacity) {
    int code = need(capacity, "pages", pages, "generations", generations, NULL);
    if (code < 0) return code;
    return IN_SEQUENCE(sequence, false, state_places(sequence, pages, generations, capacity));
}
