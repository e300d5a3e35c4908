/* Open files whose locks say that this process lives; none crosses a fork. */
#pragma once
#include "region/types.h"

typedef struct alive alive;
alive *alive_begin(int fd, off_t byte);   /* opens it again, byte locked; NULL: errno says why */
alive *alive_keep(int fd);                /* one that was made for this process; NULL: no memory */
void alive_end(alive *own);
void alive_fork_prepare(void);
void alive_fork_parent(void);
void alive_fork_child(void);
