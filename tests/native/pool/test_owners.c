/* Goal: the folders that keep state of their own with a pool hear of a fork, of its closing and of
 * its end in a fixed order. Method: the linker sends their functions here, which note a letter. */
#include "check.h"

static char heard[16];

#define NOTED(name, letter)                            \
    void __real_##name(cxlkv_pool *pool);              \
    void __wrap_##name(cxlkv_pool *pool);              \
    void __wrap_##name(cxlkv_pool *pool) {             \
        heard[strlen(heard)] = (letter);               \
        __real_##name(pool);                           \
    }
NOTED(sequences_forked, 's')
NOTED(worker_forked, 'w')
NOTED(local_forked, 't')
NOTED(sequences_release, 'S')
NOTED(worker_leave, 'W')
NOTED(local_drop_all, 'T')
NOTED(sequences_free, 'F')
NOTED(worker_client_drop, 'D')

int main(void) {
    cxlkv_pool *pool = test_pool(NULL, 64);
    cxlkv_sequence *sequence = test_empty(pool);
    pid_t child = test_fork();
    if (child == 0) {
        CHECK(strcmp(heard, "tws") == 0);
        cxlkv_pool_destroy(&pool);
        CHECK(strcmp(heard, "twsSWT") == 0);
        _exit(0);
    }
    test_ended(child, 0);
    cxlkv_pool_destroy(&pool);
    CHECK(strcmp(heard, "SWT") == 0); /* a sequence still has the handle */
    cxlkv_sequence_destroy(&sequence);
    CHECK(strcmp(heard, "SWTF") == 0); /* no worker was ever asked for */
    return 0;
}
