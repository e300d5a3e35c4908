/* A pool that several hosts share: this host among the others, its extents, its log and theirs. */
#ifndef CXLKV_PEERS_H
#define CXLKV_PEERS_H

#include "pool/hotness.h"

/* claims_lock.c: dealing with other hosts, without the host lock. `turn` is how: it beats while it
 * waits, and has the epoch of the claims' holder. */
int claim_lock(cxlkv_pool *pool, hosts *turn);    /* 0, or -CXLKV_E_TIMEOUT */
int claim_trylock(cxlkv_pool *pool, hosts *turn); /* the same without a text */
void claim_unlock(cxlkv_pool *pool);
/* To look only: without the claims. */
hosts hosts_outside(cxlkv_pool *pool);
/* After a SIGBUS that interrupted their holder, perhaps with the host lock: an error. */
int claim_poisoned(cxlkv_pool *pool, const hosts *turn, const guard *fault);
/* For a wait without the host lock. */
void peers_pause(cxlkv_pool *pool);
/* peers.c */
enum { BEATS_A_LEASE = 10 };
int peers_prepare(cxlkv_pool *pool, const cxlkv_host *host); /* before the host state is joined */
uint64_t peers_nonce(const cxlkv_pool *pool);     /* of the host state that speaks for this host */
bool peers_is_off(cxlkv_pool *pool);      /* the epoch of the host state was ended for good */
void peers_sync(cxlkv_pool *pool);        /* after another process may have changed something */
void peers_beat(cxlkv_pool *pool, bool now);      /* when it is due; looks at the others' */
/* May this host go on? True: it was fenced, and is to return. Does not wait. */
int peers_look(cxlkv_pool *pool, bool *fenced);
int peers_check(cxlkv_pool *pool);        /* may this host go on? */
void peers_look_around(cxlkv_pool *pool); /* at the others' beats */
bool peers_is_silent(void *context, uint32_t host); /* the pool's context; under the host lock */
void peers_rest(uint32_t pauses);         /* a moment, longer after many */
void peers_set_safe(cxlkv_pool *pool, uint64_t beat_ns);
bool peers_number_is_taken(const cxlkv_pool *pool);
/* this_host.c: the first two under no lock */
int peers_arrive(cxlkv_pool *pool);       /* a new host state speaks for this host from now on */
void peers_leave(cxlkv_pool *pool);       /* the last process has left */
/* If this host was fenced: a new epoch. With the claims, without the host lock. */
int peers_return(cxlkv_pool *pool, hosts *turn);
/* After pages were read: `code`, or an error if this host may have been declared off meanwhile, and
 * others have written to what it had pinned. */
int64_t peers_verify(cxlkv_pool *pool, int64_t code);
/* The page is in no index any more; its entry is the caller's to erase. */
static inline void page_unpublish(cxlkv_pool *pool, uint32_t page) {
    pool->host->published_pages -= pool->pages[page].published;
    pool->pages[page].published = 0;
    pool->pages[page].pinned = 0;
    pool->reuse[page] = (reuse_record){0};
}
/* extent_owners.c */
static inline uint64_t extents_of(const cxlkv_pool *pool, uint64_t page_count) {
    uint64_t slots = pool->geometry.slab_slots;
    return page_count / slots + (page_count % slots != 0);
}
static inline bool page_is_ours(const cxlkv_pool *pool, uint32_t page) {
    return pool->runs[page / RUN_SLOTS].ours;
}
static inline uint32_t first_run_of(const cxlkv_pool *pool, uint32_t extent) {
    return extent * pool->geometry.slab_slots / RUN_SLOTS;
}
/* It is in doubt which are ours, until somebody with the claims has looked; the number is for who
 * clears the doubt itself. */
static inline uint32_t extents_doubt(cxlkv_pool *pool) {
    return __atomic_add_fetch(&pool->host->owners_doubted, 1, __ATOMIC_SEQ_CST);
}
static inline bool extents_in_doubt(const cxlkv_pool *pool) {
    return __atomic_load_n(&pool->host->owners_doubted, __ATOMIC_RELAXED) !=
           __atomic_load_n(&pool->host->owners_sure, __ATOMIC_RELAXED);
}
/* Which are ours, from what all hosts claim: with the claims, without the host lock. */
int extents_refresh(cxlkv_pool *pool, const hosts *turn);
/* Claimed ones become ours to use; one is ours no more, under the host lock. */
int extents_take_in(cxlkv_pool *pool, const uint32_t *extents, uint32_t count);
void extent_leave(cxlkv_pool *pool, uint32_t extent);
/* Which boot of which machine has dropped what its caches held of all our extents; 0 while some are
 * on their way to us, or it is not known whether they came. */
int settled_set(const cxlkv_pool *pool, uint64_t boot);
uint64_t settled_get(const cxlkv_pool *pool);
/* mapping.c */
/* Before a page that was taken in an earlier call is written: 0, or an error when its extent is not
 * ours any more, for then its memory can only be read. */
int page_stays_ours(const cxlkv_pool *pool, uint32_t page);
void extents_protect(cxlkv_pool *pool);   /* this process's mapping: what is not ours, read-only */
/* V8 for all descriptors: written back, if any was stored here, and dropped from the caches. */
void descriptors_hand_over(const cxlkv_pool *pool, bool gives);
void extents_open_block(cxlkv_pool *pool, uint32_t host, bool writable); /* another host's */
/* extents.c */
bool extents_take(cxlkv_pool *pool, uint64_t page_count); /* under no lock; there was room */
const char *extents_why(void);            /* if not, and if that is an error: its text */
/* So many are wanted for so long; or asked for, for half a lease, unless more is wanted for longer;
 * as many of those came. The first two under the host lock, the third under none. */
void extents_want(cxlkv_pool *pool, uint64_t extents, uint64_t lasts_ns);
void extents_ask(cxlkv_pool *pool, uint64_t extents);
void extents_came(cxlkv_pool *pool, uint32_t count);
uint64_t extents_wanted(const cxlkv_pool *pool);  /* by others */
/* As many as others want and we can spare: with the claims, without the host lock. */
void extents_give(cxlkv_pool *pool, hosts *turn);
void extents_offer(cxlkv_pool *pool);
enum { GIVE_MAX = 64 };
uint32_t extents_empty(const cxlkv_pool *pool, uint32_t *extents, uint32_t most);
/* borrow.c: pages of other hosts */
typedef struct borrowing {
    uint32_t page;
    uint32_t state;              /* that is wanted: sealed or published */
    uint64_t generation;
    int code;                    /* out */
} borrowing;
/* Pins them and takes them into view, to be read in place until the last holder drops them. */
void borrow(cxlkv_pool *pool, borrowing *items, uint32_t count);
void borrow_end(cxlkv_pool *pool, uint32_t first, uint64_t pages);  /* bit i: page first + i */
void borrow_own(cxlkv_pool *pool, uint32_t first, uint32_t count); /* that are ours from now on */
void borrow_recover(cxlkv_pool *pool);    /* no pins but of what is held, after a death */
/* Which of the 64 pages of a word other hosts have pinned. */
uint64_t pinned_elsewhere(const cxlkv_pool *pool, uint32_t page);
/* log_writer.c */
/* Queues a record and returns it; NULL when no other host would read it. */
log_record *log_add(cxlkv_pool *pool, uint32_t operation, uint32_t page, uint64_t generation,
                    const uint64_t hash[2]);
uint32_t publication_of(cxlkv_pool *pool, uint32_t page); /* as its descriptor says, or 0 */
void log_write(cxlkv_pool *pool);
/* Wishes to forget. As a list: of all logs, for who reads descriptors. */
void forgotten_read(cxlkv_pool *pool);
bool is_forgotten(const cxlkv_pool *pool, const descriptor *line);
void forgotten_add(cxlkv_pool *pool, const log_record *record);
void forgotten_drop(cxlkv_pool *pool);
/* Is the page still what is to be forgotten? By its descriptor, from memory. */
bool forget_matters(cxlkv_pool *pool, const log_record *record);
/* log_reader.c: what the others' logs say */
void peers_follow(cxlkv_pool *pool);
/* keeper.c: a thread that beats and does what others wait for */
int keeper_start(cxlkv_pool *pool);
void keeper_stop(cxlkv_pool *pool);

#endif
