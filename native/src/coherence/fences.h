/* Fences: which commits of a silent host count (V10). */
#pragma once
#include "coherence/types.h"

/* Fences that we began and did not finish. */
void hosts_open_fences(const hosts *h);
/* As it is now, without waiting: 1 while somebody makes one, who has not said yet what counts. */
int hosts_fence_now(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence);
/* Waits while a fence is being made; -CXLKV_E_TIMEOUT when its maker went silent over it,
 * -CXLKV_E_POISON when a host that may have fenced it cannot be read. */
int hosts_fence_of(const hosts *h, uint32_t host, uint32_t epoch, host_fence *fence);
/* Ends an epoch of a host; off: its machine was switched off, as its operator says. -EAGAIN:
 * somebody is fencing us meanwhile, nothing was done. */
int hosts_fence(const hosts *h, uint32_t host, uint32_t epoch, bool off);
