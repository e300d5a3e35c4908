"""Two hosts in one pool on a dax device, sharing="software": python -m ... a|b.

Host a publishes, and is killed while it writes more. Host b goes on with what it holds, publishes,
and takes all memory that it may have. Then a boots again, as the same host, and both go on.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np

from cxlkv import CXLPool, Sequence
from cxlkv.arrays import PageIds
from cxlkv.errors import BadArgumentError, HostError, PoolFullError
from cxlkv.prefix import prefix_keys
from cxlkv.stats import find
from tests.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    SHARED,
    assert_holds,
    bind_device,
    check,
    refusal,
    say,
    token_ids,
    wait_for,
)
from tests.qemu.guest.steps import found as find_text
from tests.qemu.guest.steps import publish as publish_text

A, B = 0, 1  # the numbers of the hosts
TOKENS = 40 * LAYOUT.page_tokens
OF_A, OF_B, OF_A_BACK, OF_B_LAST = (1, 2), 3, 4, 5  # seeds of published texts
MANY = range(100, 200)  # what a writes until it is killed, over and over
MANY_BEFORE_THE_KILL = 20
HOST_LEASE_S = 4.0
HIT_LEASE_S = 600.0
SOME = 64  # pages
GARBAGE_BYTES = 8 << 20
# In a process of its own, on the same host: it reads what the other host published.
OTHER_PROCESS = f"""
from cxlkv import CXLPool
from tests.qemu.guest.sharing import B, HOST_LEASE_S, found, OF_A
with CXLPool.open("{DEVICE}", host=B, lease_s=HOST_LEASE_S) as pool:
    for seed in OF_A:
        found(pool, seed).release()
"""


def publish(pool: CXLPool, seed: int) -> Sequence:
    return publish_text(pool, seed, TOKENS)


def found(pool: CXLPool, seed: int) -> Sequence:
    return find_text(pool, seed, TOKENS, HIT_LEASE_S)


def texts_left(pool: CXLPool) -> int:
    """Each text that a was writing may have fewer tokens, or none, but nothing wrong."""
    whole = 0
    for seed in MANY:
        with pool.match_prefix(token_ids(seed, TOKENS)) as hit:
            if hit:
                sequence = hit.sequence()
                assert_holds(sequence, seed, hit.tokens)
                sequence.release()
            whole += hit.tokens == TOKENS
    return whole


def geometry(pool: CXLPool) -> dict[str, int]:
    return cast("dict[str, int]", pool.describe()["geometry"])


def extents_of(pool: CXLPool, pages: PageIds) -> set[int]:
    return set((pages // geometry(pool)["slab_slots"]).tolist())


def own_pages(pool: CXLPool) -> int:
    stats = pool.stats()
    return stats["pages_total"] - stats["pages_elsewhere"]


def take_all(pool: CXLPool) -> PageIds:
    """All pages that this host can get."""
    taken: list[PageIds] = []
    for wanted in (SOME, 1):
        with suppress(PoolFullError):
            while True:
                taken.append(pool.pages.alloc(wanted))
    return np.concatenate(taken)


def check_protected(pool: CXLPool) -> None:
    """What another host writes cannot be written here, as far as units of 2 MiB allow."""
    modes = {
        line.split()[1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(DEVICE)
    }
    assert modes == {"rw-s", "r--s"}, modes


def fill_with_garbage() -> None:
    """Where the hosts' blocks and the descriptors will lie, as if something else had been there."""
    fd = os.open(DEVICE, os.O_RDWR)
    with mmap.mmap(fd, GARBAGE_BYTES) as memory:
        memory[:] = os.urandom(GARBAGE_BYTES)
    os.close(fd)


def first_life(pool: CXLPool) -> None:
    (SHARED / "geometry").write_text(json.dumps(geometry(pool)))
    refusal(BadArgumentError, lambda: CXLPool.open(DEVICE))  # which host?
    for seed in OF_A:
        publish(pool, seed).release()
    check_protected(pool)
    say("a has published")
    wait_for("b holds what a published")
    for number in count():  # until the power fails
        seed = MANY[number % len(MANY)]
        pool.forget(prefix_keys(token_ids(seed, TOKENS), LAYOUT.page_tokens, b""))
        publish(pool, seed).release()
        if number == MANY_BEFORE_THE_KILL:
            say("a keeps writing")


def second_life(pool: CXLPool) -> None:
    own = own_pages(pool)
    for seed in (*OF_A, OF_B):
        found(pool, seed).release()
    print(f"found whole: {texts_left(pool)} of what was written until the kill", flush=True)
    of_b = int((SHARED / "b owns").read_text())
    total = pool.stats()["pages_total"]
    print(f"own pages: {own} of a, {of_b} of b, {total} of the pool", flush=True)
    assert own + of_b == total, "b took all but what is a's"
    publish(pool, OF_A_BACK).release()
    more = pool.pages.alloc(pool.stats()["pages_free"] + SOME)  # b is asked for some
    print(f"b gave {own_pages(pool) - own} pages", flush=True)
    assert own_pages(pool) > own
    pool.pages.free(more)
    say("a is back")
    wait_for("b has published again")
    found(pool, OF_B_LAST).release()
    check(pool)


def survivor(pool: CXLPool) -> None:
    held = {seed: found(pool, seed) for seed in OF_A}
    of_a = set().union(*(extents_of(pool, sequence.pages) for sequence in held.values()))
    check_protected(pool)
    subprocess.run([sys.executable, "-c", OTHER_PROCESS], check=True)
    say("b holds what a published")
    wait_for("a is dead")
    for seed, sequence in held.items():
        assert_holds(sequence, seed, TOKENS)
        found(pool, seed).release()
    print(f"found whole: {texts_left(pool)} of what a wrote", flush=True)
    publish(pool, OF_B).release()
    found(pool, OF_B).release()
    taken = take_all(pool)
    assert not extents_of(pool, taken) & of_a, "b got an extent of a host that may come back"
    for seed, sequence in held.items():
        assert_holds(sequence, seed, TOKENS)
    (SHARED / "b owns").write_text(str(own_pages(pool)))
    pool.pages.free(taken)
    check(pool)
    say("b has published")
    wait_for("a is back")
    for seed, sequence in held.items():
        assert_holds(sequence, seed, TOKENS)
        sequence.release()
    found(pool, OF_A_BACK).release()
    publish(pool, OF_B_LAST).release()
    check(pool)
    say("b has published again")
    wait_for("a has left")
    for seed in (*OF_A, OF_B, OF_A_BACK, OF_B_LAST):
        found(pool, seed).release()
    taken = take_all(pool)
    assert own_pages(pool) == pool.stats()["pages_total"], "a has left: all may be b's"
    pool.pages.free(taken)
    check(pool)


def main(name: str) -> None:
    bind_device()
    if name == "b":
        wait_for("a has published")
        refusal(HostError, lambda: CXLPool.open(DEVICE, host=A, lease_s=HOST_LEASE_S))  # a beats
        with CXLPool.open(DEVICE, host=B, lease_s=HOST_LEASE_S) as pool:
            survivor(pool)
        CXLPool.remove(DEVICE)
        assert find([DEVICE]) == []
    elif (SHARED / "a is dead").exists():
        with CXLPool.open(DEVICE, layout=LAYOUT, host=A, lease_s=HOST_LEASE_S) as pool:
            second_life(pool)
        say("a has left")
    else:
        fill_with_garbage()
        pool = CXLPool.create(
            DEVICE,
            layout=LAYOUT,
            capacity="all",
            sharing="software",
            host=A,
            lease_s=HOST_LEASE_S,
            force=True,
            replace=True,
        )
        assert geometry(pool)["extents_offset"] <= GARBAGE_BYTES
        first_life(pool)


if __name__ == "__main__":
    main(sys.argv[1])
