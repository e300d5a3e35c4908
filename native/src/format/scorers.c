/* Scorers of a pool: which there are, and where their summaries lie. They are made and read in
 * ndp/select_scorer.c. */
#include "format/scorers.h"

#include <sys/mman.h>

static uint64_t records_of(const cxlkv_pool *pool) {
    return (uint64_t)pool->geometry.page_count * pool->geometry.record_layers;
}

static void scorer_free(pool_scorer *s) {
    if (s->summaries) munmap(s->summaries, s->bytes);
    free(s->made);
    pthread_mutex_destroy(&s->making);
    free(s);
}

static int scorer_make(const cxlkv_pool *pool, const cxlkv_scorer *scorer, pool_scorer **out) {
    pool_scorer *s = calloc(1, sizeof(*s));
    if (!s) return fail(ENOMEM, "no memory for a scorer");
    pthread_mutex_init(&s->making, NULL);
    s->scorer = *scorer;
    s->bytes = records_of(pool) * pool->layers.kv_heads * scorer->summary_bytes;
    s->made = calloc(records_of(pool) / 64 + 1, sizeof(*s->made));
    void *at = mmap(NULL, s->bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) s->summaries = at;
    if (!s->made || !s->summaries) {
        uint64_t bytes = s->bytes;
        scorer_free(s);
        return fail(ENOMEM, "no address space for the summaries of %u pages: %lu MiB",
                    pool->geometry.page_count, bytes >> 20);
    }
    *out = s;
    return 0;
}

pool_scorer *scorer_find(const cxlkv_pool *pool, uint32_t id) {
    pool_scorer *s = atomic_load_explicit(&pool->scorers, memory_order_acquire);
    while (s && s->scorer.id != id) s = s->next;
    return s;
}

int scorer_valid(const cxlkv_scorer *scorer) {
    uint32_t bytes = scorer->summary_bytes;
    bool sized = bytes > 0 && bytes % 8 == 0 && bytes <= CXLKV_SUMMARY_BYTES_MAX;
    bool reads = scorer->read_bytes <= bytes &&
                 scorer->parameter_bytes <= scorer->parameter_count * sizeof(float);
    if (!sized || !reads || scorer->log_sums > 1 || !scorer->id ||
        !scorer->summarise || !scorer->score)
        return fail(CXLKV_E_ARGUMENT,
                    "a scorer with summaries of %u bytes, %u of them read, and %u bytes of %lu "
                    "parameters: a multiple of 8, at most %u, no more than there are, an id that "
                    "is not 0 and two functions are wanted",
                    bytes, scorer->read_bytes, scorer->parameter_bytes, scorer->parameter_count,
                    CXLKV_SUMMARY_BYTES_MAX);
    return 0;
}

int scorer_add(cxlkv_pool *pool, const cxlkv_scorer *scorer) {
    uint32_t count = 0;
    if (scorer_find(pool, scorer->id))
        return fail(CXLKV_E_ARGUMENT, "this pool has a scorer %u already", scorer->id);
    for (pool_scorer *s = atomic_load(&pool->scorers); s; s = s->next) count++;
    if (count == CXLKV_SCORERS_MAX)
        return fail(CXLKV_E_ARGUMENT,
                    "this pool has %u scorers, each with what it learned: open it again for others",
                    count);
    pool_scorer *made;
    int code = scorer_make(pool, scorer, &made);
    if (code < 0) return code;
    made->next = atomic_load(&pool->scorers);
    atomic_store_explicit(&pool->scorers, made, memory_order_release);
    return 0;
}

static atomic_ulong *made_word(const cxlkv_pool *pool, const pool_scorer *s, uint32_t page,
                               uint32_t layer, uint64_t *bit) {
    uint64_t index = (uint64_t)page * pool->geometry.record_layers + pool->layers.row_of[layer];
    *bit = 1ull << index % 64;
    return &s->made[index / 64];
}

bool summary_is_made(const cxlkv_pool *pool, const pool_scorer *s, uint32_t page, uint32_t layer) {
    uint64_t bit;
    return atomic_load_explicit(made_word(pool, s, page, layer, &bit), memory_order_acquire) & bit;
}

void summary_set_made(const cxlkv_pool *pool, pool_scorer *s, uint32_t page, uint32_t layer) {
    uint64_t bit;
    atomic_ulong *word = made_word(pool, s, page, layer, &bit);
    atomic_fetch_or_explicit(word, bit, memory_order_release);
}

void summary_forget(cxlkv_pool *pool, uint32_t page, uint32_t layer) {
    for (pool_scorer *s = atomic_load_explicit(&pool->scorers, memory_order_acquire); s;
         s = s->next) {
        uint64_t bit;
        atomic_ulong *word = made_word(pool, s, page, layer, &bit);
        atomic_fetch_and_explicit(word, ~bit, memory_order_relaxed);
    }
}

void summaries_forget(cxlkv_pool *pool, uint32_t page) {
    for (pool_scorer *s = atomic_load_explicit(&pool->scorers, memory_order_acquire); s;
         s = s->next)
        bits_clear(s->made, (uint64_t)page * pool->geometry.record_layers,
                   pool->geometry.record_layers);
}

void scorers_forked(cxlkv_pool *pool) {
    for (pool_scorer *s = atomic_load(&pool->scorers); s; s = s->next)
        pthread_mutex_init(&s->making, NULL);
}

void scorers_free(cxlkv_pool *pool) {
    for (pool_scorer *s = atomic_exchange(&pool->scorers, NULL), *next; s; s = next) {
        next = s->next;
        scorer_free(s);
    }
}
