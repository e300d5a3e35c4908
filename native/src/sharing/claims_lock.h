/* Dealing with other hosts, without the host lock. `turn` is how: it beats while it waits, and has
 * the epoch of the claims' holder. */
#pragma once
#include "base/guard.h"
#include "format/types.h"

int claim_lock(cxlkv_pool *pool, hosts *turn);    /* 0, or -CXLKV_E_TIMEOUT */
int claim_trylock(cxlkv_pool *pool, hosts *turn); /* the same without a text */
void claim_unlock(cxlkv_pool *pool);
/* To look only: without the claims. */
hosts hosts_outside(cxlkv_pool *pool);
/* After a SIGBUS that interrupted their holder, perhaps with the host lock: an error. */
int claim_poisoned(cxlkv_pool *pool, const hosts *turn, const guard *fault);
/* For a wait without the host lock. */
void peers_pause(cxlkv_pool *pool);
