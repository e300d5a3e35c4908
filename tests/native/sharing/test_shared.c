/* Goal: two hosts on one pool, several threads and a keeper on each: what one publishes or hands on
 * the other reads right, and at the end every page is free. Method: two handles of one process with
 * different host numbers; under ThreadSanitizer, what a handle's threads and its keeper share. */
#include "check.h"

enum { HOSTS = 2, THREADS = 2, TOKENS = 4 * TEST_PAGE_TOKENS, KEYS = 4, HANDLE_BYTES = 1024 };

/* A handle on its way to whoever takes it; its sender keeps the sequence until then. */
static struct letter {
    pthread_mutex_t lock;
    uint8_t bytes[HANDLE_BYTES];
    int64_t size;
    uint64_t mark;
    atomic_bool full;
} letter = {.lock = PTHREAD_MUTEX_INITIALIZER};

typedef struct worker {
    cxlkv_pool *pool;
    uint64_t seed;
    uint32_t rounds, hits, adopted;
} worker;

static cxlkv_sequence *written(cxlkv_pool *pool, uint64_t mark) {
    uint64_t marks[TOKENS];
    test_marks(marks, mark, TOKENS);
    cxlkv_sequence *sequence = test_empty(pool);
    int64_t code = test_append_all(sequence, marks, TOKENS);
    CHECK(code >= 0 || code == -CXLKV_E_POOL_FULL);
    if (code >= 0) return sequence;
    cxlkv_sequence_destroy(&sequence);
    return NULL;
}

static void compare(cxlkv_sequence *sequence, uint64_t mark, uint32_t tokens) {
    uint64_t marks[TOKENS];
    test_marks(marks, mark, TOKENS);
    CHECK(test_verify_all(sequence, marks, tokens) == 0);
}

static void publish(worker *w, uint64_t mark) {
    uint8_t hashes[KEYS * 16];
    cxlkv_sequence *sequence = written(w->pool, mark);
    test_hashes(hashes, mark, KEYS);
    if (!sequence) return;
    CHECK(cxlkv_publish(sequence, KEYS, TEST_PAGE_TOKENS, hashes, 0) >= 0);
    cxlkv_sequence_destroy(&sequence);
}

static void match(worker *w, uint64_t mark) {
    uint8_t hashes[KEYS * 16];
    cxlkv_sequence *hit;
    test_hashes(hashes, mark, KEYS);
    int64_t tokens = test_match(w->pool, KEYS, hashes, 60, &hit);
    CHECK(tokens >= 0);
    if (tokens) compare(hit, mark, (uint32_t)tokens);
    w->hits += tokens > 0;
    cxlkv_sequence_destroy(&hit);
}

static void forget(cxlkv_pool *pool, uint64_t mark) {
    uint8_t hashes[KEYS * 16];
    test_hashes(hashes, mark, KEYS);
    CHECK(cxlkv_forget(pool, KEYS, hashes, NULL) >= 0);
}

/* Each of the two may be in the other's way at that time. */
static void ask_for_room(worker *w) {
    static _Thread_local uint32_t pages[4096];
    CHECK(cxlkv_pages_want(w->pool, random_below(&w->seed, 100), random_below(&w->seed, 2)) == 0);
    CHECK(cxlkv_extents_due(w->pool, 0) >= 0 && cxlkv_extents_due(w->pool, 1) >= 0);
    CHECK(cxlkv_pages_wanted(w->pool, pages, 4096) >= 0);
}

static void send_or_receive(worker *w, uint64_t mark) {
    cxlkv_sequence *sequence = NULL;
    pthread_mutex_lock(&letter.lock);
    if (letter.full) {
        int code = cxlkv_sequence_adopt(w->pool, letter.bytes, (uint64_t)letter.size, &sequence);
        CHECK(code == 0);
        uint64_t sent = letter.mark;
        letter.full = false;
        pthread_mutex_unlock(&letter.lock);
        compare(sequence, sent, TOKENS);
        w->adopted++;
    } else {
        sequence = written(w->pool, mark);
        if (sequence) {
            letter.size = cxlkv_sequence_export(sequence, letter.bytes, HANDLE_BYTES);
            CHECK(letter.size > 0);
            letter.mark = mark;
            letter.full = true;
        }
        pthread_mutex_unlock(&letter.lock);
        for (uint32_t turn = 0; letter.full && turn < 100000; turn++) sched_yield();
        pthread_mutex_lock(&letter.lock); /* nobody took it: it is not taken after this */
        letter.full = false;
        pthread_mutex_unlock(&letter.lock);
    }
    if (sequence) cxlkv_sequence_destroy(&sequence);
}

static void *work(void *context) {
    worker *w = context;
    for (uint32_t round = 0; round < w->rounds; round++) {
        uint64_t text = 1 + random_below(&w->seed, 6);
        switch (random_below(&w->seed, 7)) {
        case 0: publish(w, text); break;
        case 1: forget(w->pool, text); break;
        case 2: send_or_receive(w, 100 + random_below(&w->seed, 1000)); break;
        case 3: ask_for_room(w); break;
        default: match(w, text);
        }
    }
    return NULL;
}

static void forget_all(cxlkv_pool *pool) {
    for (uint64_t text = 1; text <= 6; text++) forget(pool, text);
}

int main(void) {
    const char *path = test_path("shared");
    cxlkv_pool *pools[HOSTS];
    worker workers[HOSTS * THREADS];
    pthread_t threads[HOSTS * THREADS];
    uint64_t seed = test_seed();
    uint32_t hits = 0, adopted = 0;
    pools[0] = test_shared(path, test_layout(), (cxlkv_sharing){.hosts = HOSTS},
                           (2 << 20) + (500 << 10), 1);
    pools[1] = test_open_host(path, 1, 1);
    for (uint32_t i = 0; i < HOSTS * THREADS; i++) {
        workers[i] = (worker){.pool = pools[i % HOSTS], .seed = seed + i, .rounds = 400};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (uint32_t i = 0; i < HOSTS * THREADS; i++) {
        pthread_join(threads[i], NULL);
        hits += workers[i].hits;
        adopted += workers[i].adopted;
    }
    test_comes_back(pools, HOSTS, forget_all);
    printf("%u hits, %u adopted\n", hits, adopted);
    CHECK(hits > 0 && adopted > 0);
    for (uint32_t host = 0; host < HOSTS; host++) test_end(&pools[host], NULL);
    CHECK(cxlkv_pool_remove(path) == 0);
    return 0;
}
