/* SIGBUS from poisoned or truncated memory becomes an error of the operation that touched it. */
#include <signal.h>

#include "base/guard.h"
#include "base/types.h"

static _Thread_local guard *current;
static _Thread_local volatile sig_atomic_t passing_on;
static struct sigaction previous_action;

guard **guard_current(void) { return &current; }

/* Calls the previous handler. One that raises the signal again, as Python's faulthandler does, may
 * come back here: then, and when there was none, the default action ends the process. */
static void pass_on(int number, siginfo_t *information, void *context) {
    bool is_default = previous_action.sa_handler == SIG_DFL && !passing_on;
    if (passing_on || is_default) {
        signal(number, SIG_DFL);
        if (information->si_code <= 0) raise(number); /* a fault comes again by itself */
        return;
    }
    passing_on = 1;
    if (previous_action.sa_flags & SA_SIGINFO)
        previous_action.sa_sigaction(number, information, context);
    else if (previous_action.sa_handler != SIG_IGN)
        previous_action.sa_handler(number);
    passing_on = 0;
}

/* Only synchronous faults inside a guarded stretch are ours; the previous handler gets others. */
static void on_sigbus(int number, siginfo_t *information, void *context) {
    guard *active = current;
    if (active && information->si_code > 0) {
        active->address = (uintptr_t)information->si_addr;
        /* Kernel-chosen granule of the loss; only machine checks (codes 4, 5) report it. */
        bool machine_check = information->si_code == BUS_MCEERR_AR ||
                             information->si_code == BUS_MCEERR_AO;
        active->granularity_bytes =
            machine_check && information->si_addr_lsb > 0 && information->si_addr_lsb < 40
                ? (size_t)1 << information->si_addr_lsb
                : 4096;
        siglongjmp(active->jump, 1);
    }
    pass_on(number, information, context);
}

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;

void guard_forked(void) { pthread_mutex_init(&install_lock, NULL); }

/* Idempotent, and renewed by each pool: another library may have replaced the handler since. */
int guard_install(void) {
    struct sigaction action, found;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = on_sigbus;
    /* NODEFER: the jump leaves the handler without restoring the mask. */
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    pthread_mutex_lock(&install_lock);
    int code = sigaction(SIGBUS, NULL, &found);
    bool ours = code == 0 && (found.sa_flags & SA_SIGINFO) && found.sa_sigaction == on_sigbus;
    if (code == 0 && !ours) {
        previous_action = found;
        code = sigaction(SIGBUS, &action, NULL);
    }
    pthread_mutex_unlock(&install_lock);
    return code == 0 ? 0 : fail(EINVAL, "cannot install the SIGBUS handler");
}
