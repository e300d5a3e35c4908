/* Operations of a pool, and the host lock.
 *
 * Writers of operations (close, fork) go first: steady traffic must not keep them out. So a thread
 * never takes the lock for reading twice. */
#pragma once
#include "base/guard.h"
#include "format/poison.h"

int host_trylock(cxlkv_pool *pool);       /* 0, or -CXLKV_E_TIMEOUT without a text */
int host_lock(cxlkv_pool *pool);          /* 0, or -CXLKV_E_TIMEOUT; repairs after a death inside */
void host_unlock(cxlkv_pool *pool);
int mutex_lock_until(pthread_mutex_t *mutex, uint64_t until_ns);  /* by monotonic_ns() */
void rwlock_init(pthread_rwlock_t *lock);
int pool_enter(cxlkv_pool *pool);         /* read lock; -CXLKV_E_CLOSED */
/* The same for calls that give something back: also on a host that may not go on, which could not
 * be closed otherwise. */
int pool_enter_to_release(cxlkv_pool *pool);
void pool_leave(cxlkv_pool *pool);
/* The value of `work` between the two, or the error of the first. */
#define IN_POOL(pool, work)                    \
    __extension__({                            \
        int64_t entered = pool_enter(pool);    \
        if (entered == 0) {                    \
            entered = (work);                  \
            pool_leave(pool);                  \
        }                                      \
        entered;                               \
    })
/* record_check() for a held page, by a thread that does not have the host lock. */
int record_check_unlocked(cxlkv_pool *pool, uint32_t page, uint64_t generation, uint32_t tokens);
/* After a SIGBUS: retires what was hit. */
int poison_error(cxlkv_pool *pool, const guard *fault);

/* The value of `work` under the host lock, or the error of that, or of a SIGBUS in it. */
#define HOST_LOCKED(pool, work) HOST_LOCKED_BY(host_lock(pool), pool, work)
/* The same where `lock` takes it, as host_lock_with_room() does. */
#define HOST_LOCKED_BY(lock, pool, work)                                     \
    __extension__({                                                          \
        int64_t locked = (lock);                                             \
        if (locked == 0) {                                                   \
            locked = GUARDED(work, poison_error_locked(pool, &fault));       \
            host_unlock(pool);                                               \
        }                                                                    \
        locked;                                                              \
    })
