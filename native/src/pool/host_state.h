/* The host state: made, joined, left, removed. */
#pragma once
#include "format/types.h"

int host_attach(cxlkv_pool *pool);        /* joins or makes the host state; registers us */
void host_detach(cxlkv_pool *pool);
/* Offsets for so many pages; returns the bytes of the whole. */
uint64_t host_state_layout(uint32_t page_count, host_state *host);
bool host_state_is_ours(const host_state *host);
bool host_state_fits(const host_state *host, uint32_t page_count, const uint8_t identity[16]);
/* Removes the state of each host of the pool in `fd`, unless a process has it open. Call it after
 * the pool itself was removed. */
void host_remove_states(const pool_facts *facts, int fd);
