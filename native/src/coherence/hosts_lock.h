/* The lock between hosts (V12). */
#pragma once
#include "coherence/types.h"

/* Passes over silent hosts, fencing them. 0, or -CXLKV_E_FENCED when that happened to us;
 * -CXLKV_E_POISON when nobody can tell whether another one is inside. */
int hosts_lock(const hosts *h);
void hosts_unlock(const hosts *h);
