/* Lines of hosts whose memory is lost: poisoned, or the file was cut. Each load that may meet one
 * goes through here, and its caller decides what is safe when nothing is known. What changes hands
 * (V8) passes over such lines. */
#include "base/flush.h"
#include "base/guard.h"
#include "base/types.h"
#include "coherence/lost_lines.h"

/* Of what lies before the blocks, or behind them, nobody can be told. */
static uint32_t host_of(const hosts *h, uintptr_t address) {
    uint64_t offset = address - (uintptr_t)h->area.base;
    return offset < h->area.host_count * h->area.block_bytes
               ? (uint32_t)(offset / h->area.block_bytes) : NO_HOST;
}

static void tell(const hosts *h, uint32_t host) {
    if (h->lost) h->lost(h->context, host);
}

int hosts_lost(const hosts *h, const guard *fault) {
    uint32_t host = host_of(h, fault->address);
    tell(h, host);
    if (host == h->self)
        return fail(CXLKV_E_POISON,
                    "bus error in this host's own lines, those of host %u: others cannot be told "
                    "anything. Close the pool here and open it as another host=, and fence this "
                    "one there; or create the pool anew", host);
    if (host == NO_HOST)
        return fail(CXLKV_E_POISON, "bus error in the pool's memory (poisoned, or the file was "
                    "cut), outside of the hosts' lines. `cxlkv pool check` says more");
    return fail(CXLKV_E_POISON,
                "bus error in the lines of host %u (poisoned, or the file was cut): what it says "
                "is not known. Pages that are here already stay readable; when that memory cannot "
                "be brought back, create the pool anew. `cxlkv pool check` says more", host);
}

bool line_try(const hosts *h, void *to, const void *line) {
    if (GUARDED((flush_load_line(to, line), true), false)) return true;
    memset(to, 0, LINE_BYTES);
    tell(h, host_of(h, (uintptr_t)line));
    return false;
}

bool word_try(const hosts *h, const void *word, uint64_t *value) {
    if (GUARDED((*value = flush_load_word(word), true), false)) return true;
    *value = 0;
    tell(h, host_of(h, (uintptr_t)word));
    return false;
}

static uint64_t try_each(const hosts *h, const void *const *words, uint32_t count,
                         uint64_t *values) {
    uint64_t lost = 0;
    for (uint32_t i = 0; i < count; i++)
        lost |= (uint64_t)!word_try(h, words[i], &values[i]) << i;
    return lost;
}

uint64_t words_try(const hosts *h, const void *const *words, uint32_t count, uint64_t *values) {
    GUARD_BEGIN(fault) {
        for (uint32_t i = 0; i < count; i++) values[i] = flush_load_word(words[i]);
    } GUARD_END(fault, return try_each(h, words, count, values))
    return 0;
}

uint64_t hosts_hand_over(const void *first, uint64_t bytes, bool gives) {
    uintptr_t end = (uintptr_t)first + bytes;
    volatile uintptr_t at = (uintptr_t)first;
    volatile uint64_t lost = 0;
    while (at < end)
        GUARD_BEGIN(fault) {
            flush_invalidate(gives ? FLUSH_GIVE : FLUSH_TAKE, (void *)at, end - at);
            at = end;
        } GUARD_END(fault, (lost++, at = fault.address / fault.granularity_bytes *
                                         fault.granularity_bytes + fault.granularity_bytes))
    flush_fence_all(gives ? FLUSH_GIVE_FENCE : FLUSH_TAKE_FENCE);
    return lost;
}
