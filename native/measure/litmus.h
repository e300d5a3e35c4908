/* The litmus run: small programs of two hosts that tell whether memory keeps what mode fast rests
 * on. They use the seam as the protocol does; the two roles find and await each other by mode
 * strict, in lines of the first region. On emulated memory the same code must find each flush and
 * fence that is left out. docs/explanation/coherence.md has the tests. */
#pragma once
#include "base/flush.h"
#include "measure/measure.h"

enum {
    LITMUS_LABEL_LINE = 0,     /* of each region: whose run it is, which region */
    LITMUS_CONTROL_LINES = 1,  /* of the first region: one of each role */
    LITMUS_SCRATCH_LINES = 3,  /* each role's own, then those that change hands: a third each */
    LITMUS_PAYLOAD_LINES_MAX = 64,
};

struct cxlkv_litmus {
    uint8_t *regions[CXLKV_LITMUS_REGIONS_MAX];
    uint32_t region_count;
    uint32_t role;
    uint32_t part_lines;       /* a third of the scratch lines; at least 3 */
    uint64_t nonce, peer_nonce;
    uint64_t step;             /* of the rendezvous: how often we arrived */
    int (*wait)(cxlkv_litmus *litmus); /* between two looks; negative ends the waiting */
    uint64_t wait_ns, deadline_ns, looks; /* of the wait on real memory */
    uint8_t *pressure;         /* lines of this role alone */
    uint64_t pressure_bytes, pressure_stride_bytes;
    uint64_t delay_dice;       /* of this role alone; what both must know comes from the round */
};

/* Before the first meet(). */
void litmus_begin(cxlkv_litmus *litmus, uint64_t nonce);
