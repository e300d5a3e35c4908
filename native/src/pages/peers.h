/* This host among the others: its beats, and whether it may go on. */
#pragma once
#include "format/types.h"

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
