/* Names and beats of the hosts, the blocks of their lines. */
#pragma once
#include "coherence/types.h"

void hosts_area_make(hosts_area *area);
/* From memory; false when it is damaged or cannot be read. A line never written is HOST_UNUSED. */
bool hosts_name(const hosts *h, uint32_t host, host_name *name);
/* A beat, and how many extents we would like to have from others. False: others do not see it. */
bool hosts_beat(const hosts *h, uint64_t beats, uint64_t wanted_extents);
/* With the next beat: how many extents we could spare, and after how long a silence others may
 * suspect us. What another said when its beats were looked at. */
void hosts_offer(const hosts *h, uint64_t extents);
uint64_t hosts_offered(const hosts *h, uint32_t host);
void hosts_promise(const hosts *h, uint64_t lease_ns);
/* 0: it has said nothing, or that line is damaged. */
uint64_t hosts_promised(const hosts *h, uint32_t host);
/* Of all hosts, from memory. Returns a bit for each whose line cannot be read: it says nothing. */
uint64_t hosts_look_beats(const hosts *h, uint64_t *beats, uint64_t *wanted_extents);
/* Writes our own name line. */
void hosts_keep_name(const hosts *h, uint64_t nonce, uint32_t epoch, uint32_t status);
/* Writes the name line of a host that is off, and whose own is damaged. */
int hosts_name_again(const hosts *h, uint32_t host, host_name *name);
/* Commits of a host, over all its epochs. */
uint64_t hosts_commits(const hosts *h, uint32_t host);
void hosts_set_commits(const hosts *h, uint64_t commits);
