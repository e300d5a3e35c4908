/* A host comes, returns, recovers and leaves. */
#pragma once
#include "coherence/types.h"

/* Becomes host h->self again, or for the first time: nobody else may use that number (callers have
 * watched its beats). What an earlier epoch left undone is cleaned up; h->epoch is set. With the
 * nonce of before (a fenced host returns, its processes live on) pins stay. */
int hosts_attach(hosts *h, uint64_t nonce);
/* The same for a host whose epoch was ended, as hosts_fence_of() said: does not wait. */
int hosts_return(hosts *h, uint64_t nonce, const host_fence *fence);
/* After a process of ours died at any step of what follows below. With the one lock: its claims and
 * its place in the queue never were. With the other: nor was its fence, and its append has no gaps.
 * While nobody has that lock, what they take away is damage, and would keep all others waiting. */
void hosts_recover_claims(const hosts *h);
void hosts_recover(const hosts *h);
/* Orderly: whatever we own may be taken by others afterwards (V8: write it back before). */
void hosts_leave(hosts *h, uint64_t nonce);
