/* This host's log: what it published, freed, and wants forgotten. */
#pragma once
#include "format/types.h"

/* Queues a record and returns it; NULL when no other host would read it. */
log_record *log_add(cxlkv_pool *pool, uint32_t operation, uint32_t page, uint64_t generation,
                    const uint64_t hash[2]);
uint32_t publication_of(cxlkv_pool *pool, uint32_t page); /* as its descriptor says, or 0 */
void log_write(cxlkv_pool *pool);
/* Wishes to forget, of all logs, as a list, for a reader of descriptors. */
void forgotten_read(cxlkv_pool *pool);
bool is_forgotten(const cxlkv_pool *pool, const descriptor *line);
void forgotten_add(cxlkv_pool *pool, const log_record *record);
void forgotten_drop(cxlkv_pool *pool);
/* Is the page still what is to be forgotten? By its descriptor, from memory. */
bool forget_matters(cxlkv_pool *pool, const log_record *record);
