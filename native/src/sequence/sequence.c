/* A sequence: page table in shared chunks, open tails, fork, truncate, release. */
#include "base/clock.h"
#include "format/records.h"
#include "host/hooks.h"
#include "host/locks.h"
#include "host/threads.h"
#include "pages/pages.h"
#include "pool/pool.h"
#include "sequence/deadlines.h"
#include "sequence/kept_choice.h"
#include "sequence/sequence.h"
#include "sharing/this_host.h"

/* Tails that nobody uses wait in a list, so that a fork's first append finds touched memory. */
enum { SPARE_TAIL_BYTES = 64 << 20 };

/* For any layer. */
static size_t tail_bytes(const cxlkv_pool *pool) {
    size_t most = 0;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        size_t bytes = tail_data_bytes(layout_of(pool, pool->layers.parts[part].first_layer));
        if (bytes > most) most = bytes;
    }
    return sizeof(tail) + most;
}

tail *tail_make(cxlkv_pool *pool) {
    pool_sequences *all = sequences_of(pool);
    pthread_mutex_lock(&pool->locks.spare);
    tail *made = all->spare_tails;
    if (made) {
        all->spare_tails = made->next_spare;
        all->spare_count--;
    }
    pthread_mutex_unlock(&pool->locks.spare);
    if (!made) made = aligned_alloc(LINE_BYTES, align_up(tail_bytes(pool), LINE_BYTES));
    if (made) atomic_init(&made->references, 1);
    return made;
}

void tail_drop(cxlkv_pool *pool, tail *dropped) {
    if (!dropped ||
        atomic_fetch_sub_explicit(&dropped->references, 1, memory_order_acq_rel) != 1)
        return;
    pool_sequences *all = sequences_of(pool);
    pthread_mutex_lock(&pool->locks.spare);
    bool kept = all->spare_count * tail_bytes(pool) < SPARE_TAIL_BYTES;
    if (kept) {
        dropped->next_spare = all->spare_tails;
        all->spare_tails = dropped;
        all->spare_count++;
    }
    pthread_mutex_unlock(&pool->locks.spare);
    if (!kept) free(dropped);
}

tail *tail_copy(cxlkv_pool *pool, uint32_t layer, tail *from, uint32_t filled) {
    tail *made = tail_make(pool);
    const cxlkv_layout *layout = layout_of(pool, layer);
    bool rows = !is_encoded(layout);
    size_t bytes = rows ? filled * tail_row_bytes(layout, PIECE_KEYS) : tail_data_bytes(layout);
    if (made) memcpy(made->data, from->data, bytes);
    return made;
}

int sequence_usable(const cxlkv_sequence *sequence) {
    if (sequence->released)
        return fail(CXLKV_E_RELEASED, "the sequence was released: begin or adopt another");
    uint64_t deadline = atomic_load_explicit(&sequence->lease_deadline_ns, memory_order_relaxed);
    if (sequence->expired || (deadline && boottime_ns() > deadline))
        return fail(CXLKV_E_STALE, "the lease of this hit has ended: match again");
    return 0;
}

uint64_t sequence_even_tokens(const cxlkv_sequence *sequence) {
    uint32_t layers = sequence->pool->layout.layers;
    /* Lengths never grow from layer to layer, so the ends decide. */
    return sequence->layer_tokens[0] == sequence->layer_tokens[layers - 1]
               ? sequence->layer_tokens[0]
               : UINT64_MAX;
}

static void sequence_unmake(cxlkv_sequence *sequence) {
    pthread_rwlock_destroy(&sequence->lock);
    for (uint32_t part = 0; sequence->tables && part < sequence->pool->geometry.part_count; part++)
        free(sequence->tables[part].chunks);
    free(sequence->tables);
    free(sequence->export_pages);
    free(sequence->states);
    free(sequence->layer_tokens);
    free(sequence->tails);
    free(sequence->worker_tables);
    free(sequence->worker_tails);
    kept_free(sequence);
    free(sequence);
}

int sequence_make(cxlkv_pool *pool, cxlkv_sequence **out) {
    if (stores_objects(&pool->layout))
        return fail(CXLKV_E_ARGUMENT, "this pool stores objects, which are put and got by their "
                    "keys: sequences need a pool of K and V");
    cxlkv_sequence *made = calloc(1, sizeof(*made));
    if (!made) return fail(ENOMEM, "no memory for a sequence");
    rwlock_init(&made->lock);
    made->pool = pool;
    made->tables = calloc(pool->geometry.part_count, sizeof(*made->tables));
    made->export_pages = calloc(pool->geometry.part_count, sizeof(*made->export_pages));
    made->layer_tokens = calloc(pool->layout.layers, sizeof(*made->layer_tokens));
    made->tails = calloc(pool->layout.layers, sizeof(*made->tails));
    if (!made->tables || !made->export_pages || !made->layer_tokens || !made->tails) {
        sequence_unmake(made);
        return fail(ENOMEM, "no memory for a sequence");
    }
    pool_retain(pool);
    pthread_mutex_lock(&pool->locks.list);
    made->next = sequences_of(pool)->first;
    if (made->next) made->next->previous = made;
    sequences_of(pool)->first = made;
    count_sequences(pool, 1);
    pthread_mutex_unlock(&pool->locks.list);
    *out = made;
    return 0;
}

/* ---- the page tables ---- */

/* What becomes of pages that a table does not name any more. */
enum giving {
    GIVE_NOW,                    /* under the host lock */
    GIVE_LATER,                  /* without it: pages_drop_later() */
    GIVEN,                       /* a closed pool has given all back already */
};

static void give(cxlkv_pool *pool, uint32_t count, const uint32_t *pages, enum giving how) {
    if (how == GIVE_NOW) pages_drop(pool, count, pages);
    if (how == GIVE_LATER) pages_drop_later(pool, count, pages);
}

static void chunk_drop(cxlkv_pool *pool, chunk *dropped, enum giving how) {
    if (!dropped ||
        atomic_fetch_sub_explicit(&dropped->references, 1, memory_order_acq_rel) != 1)
        return;
    give(pool, dropped->count - dropped->first, dropped->pages + dropped->first, how);
    free(dropped);
}

static chunk *chunk_make(void) {
    chunk *made = malloc(sizeof(*made));
    if (!made) return NULL;
    atomic_init(&made->references, 1);
    made->first = made->count = 0;
    return made;
}

static bool chunk_is_shared(chunk *c) {
    return atomic_load_explicit(&c->references, memory_order_acquire) > 1;
}

/* A private copy of pages [first, count), each held once more; under the host lock. */
static chunk *chunk_clone(cxlkv_pool *pool, const chunk *from, uint32_t first, uint32_t count) {
    chunk *made = chunk_make();
    if (!made) return NULL;
    if (first < from->first) first = from->first;
    if (count > from->count) count = from->count;
    if (count < first) count = first;
    memcpy(made->pages + first, from->pages + first, (count - first) * sizeof(uint32_t));
    made->first = (uint16_t)first;
    made->count = (uint16_t)count;
    pages_hold(pool, count - first, made->pages + first);
    return made;
}

/* Keeps pages [first, count) of a chunk that nobody shares. */
static void chunk_trim(cxlkv_pool *pool, chunk *own, uint32_t first, uint32_t count,
                       enum giving how) {
    if (first < own->first) first = own->first;
    if (count > own->count) count = own->count;
    if (count < first) count = first; /* none is left; the next page comes at `first` or behind */
    uint32_t low = min_u32(first, own->count), high = count < low ? low : count;
    if (low > own->first) give(pool, low - own->first, own->pages + own->first, how);
    if (high < own->count) give(pool, own->count - high, own->pages + high, how);
    own->first = (uint16_t)first;
    own->count = (uint16_t)count;
}

/* The same of what *at holds, which stays as it is for others who share it; under the host lock. */
static int chunk_keep(cxlkv_pool *pool, chunk **at, uint32_t first, uint32_t count) {
    if (chunk_is_shared(*at)) {
        chunk *own = chunk_clone(pool, *at, first, count);
        if (!own) return fail(ENOMEM, "no memory for a page table");
        chunk_drop(pool, *at, GIVE_NOW);
        *at = own;
    }
    chunk_trim(pool, *at, first, count, GIVE_NOW);
    return 0;
}

/* Under the host lock, or on a sequence that nobody else knows and that shares nothing. */
int sequence_reserve(cxlkv_sequence *sequence, uint32_t part, uint32_t count) {
    page_table *table = &sequence->tables[part];
    uint32_t pages = sequence->page_count, last = pages / CHUNK_PAGES;
    uint32_t wanted = (uint32_t)(((uint64_t)pages + count + CHUNK_PAGES - 1) / CHUNK_PAGES);
    if (wanted > table->chunk_capacity) {
        uint32_t capacity = wanted + wanted / 2;
        chunk **grown = realloc(table->chunks, capacity * sizeof(*grown));
        if (!grown) return fail(ENOMEM, "no memory for a page table of %u chunks", capacity);
        memset(grown + table->chunk_capacity, 0,
               (capacity - table->chunk_capacity) * sizeof(*grown));
        table->chunks = grown;
        table->chunk_capacity = capacity;
    }
    if (pages % CHUNK_PAGES && table->chunks[last] && chunk_is_shared(table->chunks[last])) {
        int code = chunk_keep(sequence->pool, &table->chunks[last], 0, pages % CHUNK_PAGES);
        if (code < 0) return code;
    }
    for (uint32_t i = last; i < wanted; i++)
        if (!table->chunks[i] && !(table->chunks[i] = chunk_make()))
            return fail(ENOMEM, "no memory for a page table");
    return 0;
}

void sequence_push(cxlkv_sequence *sequence, uint32_t part, uint32_t index, uint32_t page) {
    chunk *last = sequence->tables[part].chunks[index / CHUNK_PAGES];
    if (last->first == last->count) last->first = last->count = (uint16_t)(index % CHUNK_PAGES);
    last->pages[last->count++] = page;
}

uint32_t window_page(const cxlkv_pool *pool, uint32_t part, uint64_t position) {
    uint64_t window = pool->layers.parts[part].window;
    if (window == 0 || position < window) return 0;
    return (uint32_t)((position - window + 1) / pool->layout.page_tokens);
}

int sequence_advance(cxlkv_sequence *sequence, uint32_t part, uint32_t first) {
    page_table *table = &sequence->tables[part];
    uint32_t edge = first / CHUNK_PAGES, old = table->first;
    if (first <= old) return 0;
    if (edge < table->chunk_capacity && table->chunks[edge] && first % CHUNK_PAGES) {
        int code = chunk_keep(sequence->pool, &table->chunks[edge], first % CHUNK_PAGES,
                              CHUNK_PAGES);
        if (code < 0) return code;
    }
    for (uint32_t i = old / CHUNK_PAGES; i < edge && i < table->chunk_capacity; i++) {
        chunk_drop(sequence->pool, table->chunks[i], GIVE_NOW);
        table->chunks[i] = NULL;
    }
    table->first = first;
    uint32_t end = min_u32(first, sequence->page_count);
    if (end > old) count_add(sequence->pool, COUNT_WINDOW_PAGES_FREED, end - old);
    return 0;
}

/* The chunk that page_count cuts in two, if there is one. */
static chunk **cut_edge(page_table *table, uint32_t page_count) {
    uint32_t edge = page_count / CHUNK_PAGES;
    if (page_count % CHUNK_PAGES == 0 || edge >= table->chunk_capacity) return NULL;
    return table->chunks[edge] ? &table->chunks[edge] : NULL;
}

/* Drops the chunks behind page_count. */
static void table_end(cxlkv_pool *pool, page_table *table, uint32_t page_count, enum giving how) {
    uint32_t gone = (page_count + CHUNK_PAGES - 1) / CHUNK_PAGES;
    for (uint32_t i = gone; i < table->chunk_capacity; i++) {
        chunk_drop(pool, table->chunks[i], how);
        table->chunks[i] = NULL;
    }
    if (table->first > page_count) table->first = page_count;
}

/* Drops the pages from page_count on. */
int sequence_cut(cxlkv_sequence *sequence, uint32_t page_count) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t parts = pool->geometry.part_count;
    if (page_count >= sequence->page_count) return 0;
    int code = host_lock(pool);
    if (code < 0) return code;
    /* First all that can fail: chunks that others share are copied. */
    for (uint32_t part = 0; code == 0 && part < parts; part++) {
        chunk **edge = cut_edge(&sequence->tables[part], page_count);
        if (edge && chunk_is_shared(*edge)) code = chunk_keep(pool, edge, 0, CHUNK_PAGES);
    }
    for (uint32_t part = 0; code == 0 && part < parts; part++) {
        page_table *table = &sequence->tables[part];
        chunk **edge = cut_edge(table, page_count);
        if (edge) code = chunk_keep(pool, edge, 0, page_count % CHUNK_PAGES);
        table_end(pool, table, page_count, GIVE_NOW);
    }
    host_unlock(pool);
    if (code == 0) sequence->page_count = page_count;
    if (code == 0) hooks.worker_keep(sequence, page_count);
    return code;
}

void sequence_pull(cxlkv_sequence *sequence, uint32_t page_count) {
    cxlkv_pool *pool = sequence->pool;
    if (page_count >= sequence->page_count) return;
    enum giving how = host_lock(pool) == 0 ? GIVE_NOW : GIVE_LATER;
    for (uint32_t part = 0; part < pool->geometry.part_count; part++) {
        page_table *table = &sequence->tables[part];
        chunk **edge = cut_edge(table, page_count);
        /* A shared one has none of these pages: it is copied before any is pushed. */
        if (edge && !chunk_is_shared(*edge))
            chunk_trim(pool, *edge, 0, page_count % CHUNK_PAGES, how);
        table_end(pool, table, page_count, how);
    }
    if (how == GIVE_NOW) host_unlock(pool);
    sequence->page_count = page_count;
    hooks.worker_keep(sequence, page_count);
}

static void tables_drop(cxlkv_sequence *sequence, enum giving how) {
    for (uint32_t part = 0; part < sequence->pool->geometry.part_count; part++)
        table_end(sequence->pool, &sequence->tables[part], 0, how);
}

static void sequence_drop_states(cxlkv_sequence *sequence) {
    cxlkv_pool *pool = sequence->pool;
    if (!sequence->states) return;
    enum giving how = host_lock(pool) == 0 ? GIVE_NOW : GIVE_LATER;
    give(pool, state_pages(pool), sequence->states, how);
    if (how == GIVE_NOW) host_unlock(pool);
    free(sequence->states);
    sequence->states = NULL;
}

/* Under the sequence's write lock, with the pool open. */
static void sequence_drop_pages(cxlkv_sequence *sequence) {
    cxlkv_pool *pool = sequence->pool;
    hooks.worker_keep(sequence, 0);
    enum giving how = host_lock(pool) == 0 ? GIVE_NOW : GIVE_LATER;
    tables_drop(sequence, how);
    if (sequence->exported) give(pool, pool->geometry.part_count, sequence->export_pages, how);
    if (how == GIVE_NOW) host_unlock(pool);
    sequence_drop_states(sequence);
    sequence->exported = false;
    sequence->page_count = 0;
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++) {
        tail_drop(pool, sequence->tails[layer]);
        sequence->tails[layer] = NULL;
        sequence->layer_tokens[layer] = 0;
    }
}

/* Takes it off the pool's list and frees it; its pages were given back, or others have them. */
static void sequence_discard(cxlkv_sequence *sequence) {
    cxlkv_pool *pool = sequence->pool;
    pthread_mutex_lock(&pool->locks.list);
    if (sequence->previous) sequence->previous->next = sequence->next;
    else sequences_of(pool)->first = sequence->next;
    if (sequence->next) sequence->next->previous = sequence->previous;
    deadlines_remove(&sequences_of(pool)->deadlines, sequence);
    count_sequences(pool, -1);
    pthread_mutex_unlock(&pool->locks.list);
    tables_drop(sequence, GIVEN);
    for (uint32_t layer = 0; layer < pool->layout.layers; layer++)
        tail_drop(pool, sequence->tails[layer]);
    sequence_unmake(sequence);
    pool_drop(pool);
}

void sequences_expire(cxlkv_pool *pool) {
    uint64_t now = boottime_ns();
    deadlines *all = &sequences_of(pool)->deadlines;
    if (!deadlines_any_ended(all, now)) return;
    cxlkv_sequence *busy = NULL;
    pthread_mutex_lock(&pool->locks.list);
    for (cxlkv_sequence *s; (s = deadlines_ended(all, now)) != NULL;) {
        if (pthread_rwlock_trywrlock(&s->lock) != 0) { /* a call works on it: next time */
            s->next_busy = busy;
            busy = s;
            continue;
        }
        if (!s->expired && !s->released) sequence_drop_pages(s);
        s->expired = true;
        pthread_rwlock_unlock(&s->lock);
    }
    for (; busy; busy = busy->next_busy)
        deadlines_add(all, busy); /* it has just been there: there is room */
    pthread_mutex_unlock(&pool->locks.list);
}

/* ---- all of a pool ---- */

int sequences_begin(cxlkv_pool *pool) {
    pool_sequences *made = calloc(1, sizeof(*made));
    if (!made) return fail(ENOMEM, "no memory for the pool's list of sequences");
    atomic_store(&made->deadlines.first_ns, UINT64_MAX);
    atomic_store(&pool->owner[OWNER_SEQUENCES], made);
    return 0;
}

void sequences_forked(cxlkv_pool *pool) {
    for (cxlkv_sequence *s = sequences_of(pool)->first; s; s = s->next) rwlock_init(&s->lock);
}

void sequences_release(cxlkv_pool *pool) {
    pthread_mutex_lock(&pool->locks.list);
    for (cxlkv_sequence *s = sequences_of(pool)->first; s; s = s->next) s->released = true;
    pthread_mutex_unlock(&pool->locks.list);
}

void sequences_free(cxlkv_pool *pool) {
    pool_sequences *all = sequences_of(pool);
    while (all->spare_tails) {
        tail *next = all->spare_tails->next_spare;
        free(all->spare_tails);
        all->spare_tails = next;
    }
    free(all->deadlines.heap);
    free(all->room);
    free(all);
}

/* ---- the interface ---- */

int sequence_enter(cxlkv_sequence *sequence, bool write) {
    int code = pool_enter(sequence->pool);
    if (code < 0) return code;
    if (write) pthread_rwlock_wrlock(&sequence->lock);
    else pthread_rwlock_rdlock(&sequence->lock);
    code = sequence_usable(sequence);
    if (code < 0) sequence_leave(sequence);
    return code;
}

void sequence_leave(cxlkv_sequence *sequence) {
    pthread_rwlock_unlock(&sequence->lock);
    pool_leave(sequence->pool);
}

int cxlkv_sequence_create(cxlkv_pool *pool, cxlkv_sequence **out) {
    return IN_POOL(pool, sequence_make(pool, out));
}

static int fork_tables(const cxlkv_sequence *sequence, cxlkv_sequence *made) {
    uint32_t chunks = (sequence->page_count + CHUNK_PAGES - 1) / CHUNK_PAGES;
    for (uint32_t part = 0; chunks && part < sequence->pool->geometry.part_count; part++) {
        const page_table *from = &sequence->tables[part];
        page_table *to = &made->tables[part];
        to->chunks = malloc(chunks * sizeof(*to->chunks));
        if (!to->chunks) return fail(ENOMEM, "no memory for a page table");
        to->chunk_capacity = chunks;
        to->first = from->first;
        for (uint32_t i = 0; i < chunks; i++) {
            to->chunks[i] = from->chunks[i];
            if (to->chunks[i])
                atomic_fetch_add_explicit(&to->chunks[i]->references, 1, memory_order_relaxed);
        }
    }
    return 0;
}

static int fork_locked(cxlkv_sequence *sequence, cxlkv_sequence **child) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t layers = pool->layout.layers;
    if (sequence_even_tokens(sequence) == UINT64_MAX)
        return fail(CXLKV_E_UNEVEN,
                    "layers have different lengths (%lu to %lu tokens): append the rest of the "
                    "step, or truncate, before you fork",
                    sequence->layer_tokens[layers - 1], sequence->layer_tokens[0]);
    cxlkv_sequence *made;
    int code = sequence_make(pool, &made);
    if (code < 0) return code;
    code = fork_tables(sequence, made);
    if (code < 0) {
        sequence_discard(made); /* its chunks are still the parent's: no page is dropped */
        return code;
    }
    made->page_count = sequence->page_count;
    made->approximate = sequence->approximate;
    memcpy(made->layer_tokens, sequence->layer_tokens, layers * sizeof(uint64_t));
    if (sequence->layer_tokens[0] % pool->layout.page_tokens)
        for (uint32_t layer = 0; layer < layers; layer++) {
            made->tails[layer] = sequence->tails[layer];
            atomic_fetch_add_explicit(&made->tails[layer]->references, 1, memory_order_relaxed);
        }
    *child = made;
    return 0;
}

int cxlkv_sequence_fork(cxlkv_sequence *sequence, cxlkv_sequence **child) {
    return IN_SEQUENCE(sequence, false, fork_locked(sequence, child));
}

/* A tail becomes a page with CRCs of its own, so what is copied is verified each time: bytes that
 * changed since this process verified the page would be right ones from then on. */
int tail_from_page(cxlkv_pool *pool, uint32_t page, uint32_t layer, uint32_t filled, tail **out) {
    const cxlkv_layout *layout = layout_of(pool, layer);
    size_t element = dtype_bytes(layout->dtype);
    tail *made = tail_make(pool);
    if (!made) return fail(ENOMEM, "no memory for a tail");
    *out = made; /* before the copy: a bus error in it must not lose the tail */
    for (uint32_t kind = PIECE_KEYS; kind <= PIECE_VALUES; kind++) {
        uint64_t stride = shape_of(pool, layer)->strides[kind];
        size_t row = element * kind_dim(layout, kind);
        for (uint32_t head = 0; head < layout->kv_heads; head++) {
            const uint8_t *from = pieces_of(pool, page, layer, kind) + head * stride;
            uint8_t *to = tail_at(layout, made, kind, head);
            if (kind == PIECE_VALUES && values_are_keys(layout)) continue;
            int code = layout->checksum
                           ? piece_verify(pool, page, layer, head, kind, from) : 0;
            if (code < 0) return code;
            if (is_encoded(layout)) memcpy(to, from, piece_data_bytes(layout, kind));
            for (uint32_t t = 0; !is_encoded(layout) && t < filled; t++)
                memcpy(to + t * tail_row_bytes(layout, kind), from + t * row, row);
        }
    }
    return 0;
}

typedef struct rewind_task {
    cxlkv_sequence *sequence;
    uint64_t tokens;
    tail **made;
} rewind_task;

static int rewind_layer(void *context, uint32_t layer) {
    rewind_task *task = context;
    cxlkv_sequence *sequence = task->sequence;
    uint32_t page_tokens = sequence->pool->layout.page_tokens;
    uint32_t filled = (uint32_t)(task->tokens % page_tokens);
    uint64_t page = task->tokens / page_tokens;
    /* Tokens of an incomplete page are in the layer's tail already. */
    if (filled == 0 || sequence->layer_tokens[layer] < (page + 1) * page_tokens) return 0;
    uint32_t id = sequence_page(sequence, sequence->pool->layers.part_of[layer], (uint32_t)page);
    return tail_from_page(sequence->pool, id, layer, filled, &task->made[layer]);
}

/* Everything that can fail comes before the first change. */
static int truncate_locked(cxlkv_sequence *sequence, uint64_t tokens) {
    cxlkv_pool *pool = sequence->pool;
    uint32_t layers = pool->layout.layers;
    if (tokens > sequence->layer_tokens[0])
        return fail(CXLKV_E_ARGUMENT, "truncate to %lu tokens: the sequence has %lu", tokens,
                    sequence->layer_tokens[0]);
    for (uint32_t part = 0; tokens && part < pool->geometry.part_count; part++)
        if (window_page(pool, part, tokens) < sequence->tables[part].first)
            return fail(CXLKV_E_ARGUMENT,
                        "truncate to %lu tokens: the layers with a window of %u have given back "
                        "what token %lu would see (all before token %lu). Append with a larger "
                        "rewind=, or compute the sequence anew",
                        tokens, pool->layers.parts[part].window, tokens,
                        (uint64_t)sequence->tables[part].first * pool->layout.page_tokens);
    tail **made = calloc(layers, sizeof(*made));
    if (!made) return fail(ENOMEM, "no memory for truncate");
    rewind_task task = {.sequence = sequence, .tokens = tokens, .made = made};
    int code = run_tasks(pool, layers, rewind_layer, &task);
    if (code == 0 || code == -CXLKV_E_CORRUPT) code = (int)peers_verify(pool, code);
    uint64_t first = min_u64(sequence->layer_tokens[0], tokens);
    if (code == 0) code = sequence_cut(sequence, (uint32_t)(first / pool->layout.page_tokens));
    for (uint32_t layer = 0; layer < layers; layer++) {
        if (code < 0) {
            tail_drop(pool, made[layer]);
            continue;
        }
        if (made[layer]) {
            tail_drop(pool, sequence->tails[layer]);
            sequence->tails[layer] = made[layer];
        }
        sequence->layer_tokens[layer] = min_u64(sequence->layer_tokens[layer], tokens);
        if (sequence->worker_tails) worker_tail_cut(&sequence->worker_tails[layer], tokens);
    }
    /* Another tail may grow to the same length: the exported copy does not stand for it. */
    if (code == 0) sequence->export_tokens = UINT64_MAX;
    free(made);
    return code;
}

int cxlkv_sequence_truncate(cxlkv_sequence *sequence, uint64_t tokens) {
    return IN_SEQUENCE(sequence, true, truncate_locked(sequence, tokens));
}

int cxlkv_sequence_release(cxlkv_sequence *sequence) {
    cxlkv_pool *pool = sequence->pool;
    if (pool_enter_to_release(pool) < 0) return 0; /* closing the pool has released it */
    pthread_rwlock_wrlock(&sequence->lock);
    if (!sequence->released) sequence_drop_pages(sequence);
    sequence->released = true;
    sequence_leave(sequence);
    return 0;
}

void cxlkv_sequence_destroy(cxlkv_sequence **at) {
    if (!*at) return;
    cxlkv_sequence_release(*at);
    /* After a close the tables are still here; the pages they name are not ours any more. */
    sequence_discard(*at);
}

int64_t cxlkv_sequence_tokens(cxlkv_sequence *sequence, uint32_t layer) {
    cxlkv_pool *pool = sequence->pool;
    if (layer == CXLKV_LAYER_LAST) layer = pool->layout.layers - 1;
    if (layer >= pool->layout.layers)
        return fail(CXLKV_E_ARGUMENT, "layer %u: the pool has %u", layer, pool->layout.layers);
    return IN_SEQUENCE(sequence, false, (int64_t)sequence->layer_tokens[layer]);
}

int64_t cxlkv_sequence_pages(cxlkv_sequence *sequence, uint32_t *pages, uint64_t capacity) {
    int64_t count = need(capacity, "pages", pages, NULL);
    if (count == 0) count = sequence_enter(sequence, false);
    if (count < 0) return count;
    for (uint32_t part = 0; part < sequence->pool->geometry.part_count; part++)
        for (uint32_t i = sequence->tables[part].first; i < sequence->page_count; i++, count++)
            if ((uint64_t)count < capacity) pages[count] = sequence_page(sequence, part, i);
    sequence_leave(sequence);
    return count;
}
