/* The processes of a host: the living, the dead, and what the dead held. */
#pragma once
#include "format/types.h"

/* What procfs says of one. */
typedef struct process_view {
    char state;
    uint64_t thread_count, start_time;
} process_view;
bool process_look(int32_t pid, process_view *seen);
uint64_t process_shift_ticks(void); /* from the machine's clock to that of /proc as we see it */
void process_identify(process_slot *slot);
bool process_is_dead(const process_slot *slot);
bool slot_is_dead(int state_fd, uint32_t slot); /* one that is taken, in a host state's file */
int host_room_error(int code, uint64_t bytes, const char *what); /* none in /dev/shm */
uint64_t host_reap(cxlkv_pool *pool);     /* under the lock: gives back what dead processes held */
int host_register(cxlkv_pool *pool, uint32_t state, uint32_t *slot);
void host_unregister(cxlkv_pool *pool, uint32_t slot);
