/* Fills the pool's tables of hooks and owners with functions of the folders above it. */
#include "host/hooks.h"
#include "objects/objects.h"
#include "sequence/sequence.h"
#include "tiers/local_tier.h"
#include "worker/client.h"

const pool_hooks hooks = {
    .sequences_expire = sequences_expire,
    .worker_give_back = worker_give_back,
    .worker_keep = worker_keep,
};

const owner_calls owners[OWNER_COUNT] = {
    [OWNER_SEQUENCES] = {.begin = sequences_begin, .forked = sequences_forked,
                         .closing = sequences_release, .free = sequences_free},
    [OWNER_WORKER] = {.forked = worker_forked, .closing = worker_leave, .free = worker_client_drop},
    [OWNER_TIERS] = {.forked = local_forked, .closing = local_drop_all},
    [OWNER_OBJECTS] = {.begin = objects_begin, .busy = objects_busy, .free = objects_free},
};
