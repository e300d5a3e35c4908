/* Words by which a device and this process tell each other something: loads, stores, waiting. */
#include <time.h>

#include "base/clock.h"
#include "base/types.h"

enum { SPINS = 65536, CLOCK_LOOKS = 256, NAP_NS = 20000 };

static int word_check(const int64_t *word) {
    if (!word || (uintptr_t)word % sizeof(*word))
        return fail(CXLKV_E_ARGUMENT, "a word lies on a border of 8 bytes, not at %p",
                    (const void *)word);
    return 0;
}

static double now_s(void) { return 1e-9 * (double)monotonic_ns(); }

int cxlkv_word_wait(const int64_t *word, int64_t old, double timeout_s, int64_t *found) {
    int code = word_check(word);
    if (code == 0) code = need(1, "found", found, NULL);
    if (code < 0) return code;
    const double ends = now_s() + timeout_s;
    const struct timespec nap = {.tv_nsec = NAP_NS};
    for (uint64_t looks = 1;; looks++) {
        *found = __atomic_load_n(word, __ATOMIC_ACQUIRE); /* pairs with a device's last store */
        if (*found != old) return 1;
        /* An answer that is on its way comes while this spins; else the CPU is others'. */
        if (looks > SPINS) nanosleep(&nap, NULL);
        else cpu_relax();
        if ((looks > SPINS || looks % CLOCK_LOOKS == 0) && now_s() >= ends) return 0;
    }
}

int cxlkv_word_store(int64_t *word, int64_t value) {
    int code = word_check(word);
    if (code == 0) __atomic_store_n(word, value, __ATOMIC_RELEASE);
    return code;
}
