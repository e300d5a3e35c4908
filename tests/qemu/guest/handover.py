"""Prefill on one host, decode on another, the demo's model, on a dax device: python -m ... a|b.

Host a reads two contexts into the pool and hands them over as bytes. Host b goes on from the first
after a has let go of it and written over what was free, from the second after a's power has failed.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from cxlkv import CXLPool
from cxlkv.demo.task import FIRST_FILLER
from cxlkv.errors import PoolFullError, StaleError
from tests.qemu.guest.answering import MODEL, SEEDS, TOKENS, answers, prefilled
from tests.qemu.guest.llama import Llama
from tests.qemu.guest.steps import (
    DEVICE,
    SHARED,
    bind_device,
    check,
    refusal,
    say,
    wait_for,
)

A, B = 0, 1  # the numbers of the hosts
HOST_LEASE_S = 4.0
FILLER_TOKENS = 512


def overwrite(model: Llama, pool: CXLPool) -> int:
    """Pages of this host that are free get other numbers; how many."""
    taken, filler = [], np.full(FILLER_TOKENS, FIRST_FILLER)
    try:
        for _ in range(8):
            taken.append(pool.sequence())
            model.read(taken[-1], filler)
    except PoolFullError:
        pass
    pages = sum(len(sequence.pages) for sequence in taken)
    for sequence in taken:
        sequence.release()
    return pages


def reader(pool: CXLPool) -> None:
    model = Llama(MODEL)
    for number, seed in enumerate(SEEDS):
        began = time.monotonic()
        sequence = prefilled(model, pool, seed)
        read = time.monotonic()
        handle = sequence.handle
        handed = time.monotonic()
        print(
            f"read {TOKENS} tokens in {read - began:.1f} s, handed over {len(handle)} bytes in "
            f"{1e3 * (handed - read):.1f} ms (functional only)",
            flush=True,
        )
        (SHARED / f"handle-{number}").write_bytes(handle)
        say(f"a has handed over {number}")
        if number == 0:
            wait_for("b has taken over 0")
            sequence.release()
            print(f"wrote over {overwrite(model, pool)} pages", flush=True)
            say("a has let go")
    wait_for("the end of a")  # which is a power failure


def goes_on(pool: CXLPool, number: int, after: str) -> None:
    """Takes over, waits, and decodes; what it answers goes to the host outside."""
    model = Llama(MODEL)
    handle = (SHARED / f"handle-{number}").read_bytes()
    began = time.monotonic()
    sequence = pool.adopt(handle)
    taken_ms = 1e3 * (time.monotonic() - began)
    assert len(sequence) == TOKENS
    say(f"b has taken over {number}")
    wait_for(after)
    found = answers(model, sequence, SEEDS[number])
    print(f"took over in {taken_ms:.1f} ms (functional only), answered {found}", flush=True)
    (SHARED / f"answers-{number}").write_text(json.dumps(found))
    sequence.release()


def main(name: str) -> None:
    bind_device()
    if name == "a":
        pool = CXLPool.create(
            DEVICE,
            layout=Llama(MODEL).layout,
            capacity="all",
            sharing="software",
            host=A,
            lease_s=HOST_LEASE_S,
        )
        reader(pool)
    wait_for("a has handed over 0")
    with CXLPool.open(DEVICE, host=B, lease_s=HOST_LEASE_S) as pool:
        goes_on(pool, 0, after="a has let go")
        first = (SHARED / "handle-0").read_bytes()
        refusal(StaleError, lambda: pool.adopt(first))
        wait_for("a is dead")
        goes_on(pool, 1, after="a is dead")
        check(pool)


if __name__ == "__main__":
    main(sys.argv[1])
