/* Open files whose locks say that this process lives: the kernel drops a lock with its file,
 * however the process ends and in whatever PID namespace it was.
 *
 * A lock belongs to the open file, and a forked child has that, too: kept there, it would hide its
 * parent's death for as long as the child lives. So a child closes all of them before anything
 * else, whether it ever touches a pool or not; who runs another program closes them by O_CLOEXEC.
 * (The classic locks of a process are no way out: they go with any close of the same file, as when
 * one of two handles of a pool is closed.) */
#include <unistd.h>

#include "region/alive.h"
#include "region/region.h"

struct alive {
    int fd;                      /* -1: it was the parent's */
    struct alive *next;
};

static pthread_mutex_t alive_lock = PTHREAD_MUTEX_INITIALIZER;
static alive *all;

static alive *add(alive *own) {
    own->next = all;
    all = own;
    return own;
}

/* Opened under the lock: a fork in between would copy a file that it does not know of. */
alive *alive_begin(int fd, off_t byte) {
    alive *own = malloc(sizeof(*own));
    if (!own) {
        errno = ENOMEM;
        return NULL;
    }
    pthread_mutex_lock(&alive_lock);
    own->fd = open_again(fd, byte);
    int code = errno;
    if (own->fd >= 0) add(own);
    pthread_mutex_unlock(&alive_lock);
    if (own->fd >= 0) return own;
    free(own);
    errno = code;
    return NULL;
}

alive *alive_keep(int fd) {
    alive *own = malloc(sizeof(*own));
    if (!own) return NULL;
    own->fd = fd;
    pthread_mutex_lock(&alive_lock);
    add(own);
    pthread_mutex_unlock(&alive_lock);
    return own;
}

void alive_end(alive *own) {
    if (!own) return;
    pthread_mutex_lock(&alive_lock);
    alive **at = &all;
    while (*at && *at != own) at = &(*at)->next;
    if (*at) *at = own->next;
    if (own->fd >= 0) close(own->fd);
    pthread_mutex_unlock(&alive_lock);
    free(own);
}

void alive_fork_prepare(void) { pthread_mutex_lock(&alive_lock); }

void alive_fork_parent(void) { pthread_mutex_unlock(&alive_lock); }

void alive_fork_child(void) {
    for (alive *own = all; own; own = own->next) {
        close(own->fd);
        own->fd = -1;
    }
    all = NULL;
    pthread_mutex_init(&alive_lock, NULL);
}
