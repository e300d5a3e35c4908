"""The kernels behind `mail.py`: one program each, that looks at words in host memory."""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.variants import Variant, variant

SUBJECTS = 1024
"""What a question can be about: 0 to SUBJECTS - 1. Its word is ticket * SUBJECTS + subject."""


# A layer's number is no reason to compile again, least of all while a graph is being captured.
@triton.jit(do_not_specialize=["subject"])
def _ask_kernel(ticket_at, words_at, subject, SUBJECTS: tl.constexpr):
    ticket = tl.load(ticket_at) + 1
    tl.store(ticket_at, ticket)
    word = tl.load(words_at).to(tl.pointer_type(tl.int64))
    tl.store(word, ticket * SUBJECTS + subject)


@triton.jit(do_not_specialize=["looks"])
def _await_kernel(ticket_at, words_at, answered_at, looks):
    ticket = tl.load(ticket_at)
    word = tl.load(words_at + 1).to(tl.pointer_type(tl.int64))
    found = tl.load(word, volatile=True)
    left = looks
    while (found != ticket) & (found != -ticket) & (left > 0):
        found = tl.load(word, volatile=True)
        left -= 1
    # 1: answered; 0: refused; -1: late
    answered = (found == ticket).to(tl.int32) - ((found != ticket) & (found != -ticket)).to(
        tl.int32
    )
    tl.store(answered_at, answered)
    # The worst of a step, which the host reads at its end.
    tl.store(answered_at + 1, tl.minimum(tl.load(answered_at + 1), answered))


def variants() -> list[Variant]:
    types = {"ticket_at words_at": "*i64", "answered_at": "*i32", "subject looks": "i32"}
    return [
        variant("ask", _ask_kernel, types, {"SUBJECTS": SUBJECTS}, num_warps=1),
        variant("await", _await_kernel, types, {}, num_warps=1),
    ]
