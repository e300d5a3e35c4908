/* This host arrives, returns after a fence, and leaves. */
#pragma once
#include "format/types.h"

int peers_arrive(cxlkv_pool *pool);       /* a new host state speaks for this host from now on */
void peers_leave(cxlkv_pool *pool);       /* the last process has left */
/* If this host was fenced: a new epoch. With the claims, without the host lock. */
int peers_return(cxlkv_pool *pool, hosts *turn);
/* After pages were read: `code`, or an error if this host may have been declared off meanwhile, and
 * others have written to what it had pinned. */
int64_t peers_verify(cxlkv_pool *pool, int64_t code);
