/* The threads that an OpenMP runtime of this process keeps for the calling thread: its team. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

/* Runs member(context) on the caller and on each other thread of its team, at least `threads` in
 * all, and waits for all of them. False, and nothing was run: there is no OpenMP runtime, its teams
 * are smaller, or this process was forked from one that had it. */
bool team_run(uint32_t threads, void (*member)(void *), void *context);

/* So many more threads of this process are ours, which no team has. */
void team_count_own(int change);
