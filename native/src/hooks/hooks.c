/* Fills the pool's table of hooks with functions of the folders above it. */
#include "host/hooks.h"
#include "sequence/sequence.h"
#include "tiers/local_tier.h"
#include "worker/worker.h"

const pool_hooks hooks = {
    .sequences_expire = sequences_expire,
    .sequences_forked = sequences_forked,
    .sequences_release = sequences_release,
    .tails_discard = tails_discard,
    .local_drop_all = local_drop_all,
    .local_forked = local_forked,
    .worker_give_back = worker_give_back,
    .worker_keep = worker_keep,
    .worker_forked = worker_forked,
    .worker_leave = worker_leave,
    .worker_client_drop = worker_client_drop,
};
