/* Logs: what a host published, freed, and wants forgotten: others need not look at all. */
#pragma once
#include "coherence/types.h"

/* Fills in sequence (from `next` on), epoch and crc. Never waits for readers. A record whose line
 * is lost is not told: readers then find what it says by the descriptors, or later. */
void hosts_log(const hosts *h, uint64_t next, log_record *records, uint32_t count);
/* Up to LOG_BATCH records of a host from place->next on, which moves behind them. 0: the end.
 * -CXLKV_E_STALE: it has written past us; -CXLKV_E_CORRUPT: the record is damaged. Then:
 * hosts_skip_log(), and look at its descriptors instead. */
int hosts_read_log(const hosts *h, uint32_t host, log_place *place, log_record *records);
/* On to the end of the log. A damaged line there is no news until it, or what follows, changes. */
void hosts_skip_log(const hosts *h, uint32_t host, log_place *place);
/* A bit for each host whose log has news at places[host]. */
uint64_t hosts_logs_moved(const hosts *h, const log_place *const *places);
/* The sequence that the host writes next, or wrote just now. */
uint64_t hosts_log_end(const hosts *h, uint32_t host);
/* The records whose place is in the lines from `first` on, up to 16; what is no record has
 * operation 0. Returns how many lines were looked at. */
uint32_t hosts_read_lines(const hosts *h, uint32_t host, uint64_t first, log_record *records);
/* Of our own log: the wish to forget that the record `sequence` will overwrite, if it is one. */
bool hosts_own_forget(const hosts *h, uint64_t sequence, log_record *record);
/* Does a line of it say that it is a record which others may still read, and is not whole? An
 * append that its writer died over is no damage. */
bool hosts_log_is_damaged(const hosts *h, uint32_t host, uint64_t *sequence);
/* Lines of one append reach memory in any order. Where its writer died in between, an earlier one
 * may be missing, and readers would take that for the end: put there a record that says nothing. */
void hosts_mend_log(const hosts *h);
