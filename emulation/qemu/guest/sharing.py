"""Two hosts in one pool on a dax device, sharing="software": python -m ... a|b.

Host a publishes, and is killed while it writes more; b goes on with what it holds and publishes;
a boots again, as the same host, and finds both its own pages and those of b.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import count
from typing import Protocol, cast

from cxlkv import CXLPool, KVLayout, Sequence
from cxlkv.emulation.qemu.guest.steps import (
    DEVICE,
    LAYOUT,
    SHARED,
    append,
    assert_holds,
    bind_device,
    say,
    token_ids,
    wait_for,
)
from cxlkv.errors import PoolFullError

TOKENS = 40 * LAYOUT.page_tokens
OF_A, OF_B, OF_A_BACK = (1, 2), 3, 4  # seeds of published texts
FIRST_OF_MANY = 100  # seeds from here on: what a writes until it is killed
MANY_BEFORE_THE_KILL = 20
LEASE_S = 600.0


class Create(Protocol):
    """CXLPool.create as it will be: `host` comes with sharing="software"."""

    def __call__(
        self, where: str, *, layout: KVLayout, capacity: str, sharing: str, host: str
    ) -> CXLPool: ...


class Open(Protocol):
    def __call__(self, path: str, *, host: str) -> CXLPool: ...


create = cast(Create, CXLPool.create)
join = cast(Open, CXLPool.open)


def publish(pool: CXLPool, seed: int) -> Sequence:
    sequence = pool.sequence()
    append(sequence, seed, TOKENS)
    pool.publish_prefix(sequence, token_ids(seed, TOKENS))
    return sequence


def found(pool: CXLPool, seed: int) -> Sequence:
    """The whole text, matched and compared."""
    with pool.match_prefix(token_ids(seed, TOKENS), lease_s=LEASE_S) as hit:
        sequence = hit.sequence()
    assert_holds(sequence, seed, TOKENS)
    return sequence


def first_life(pool: CXLPool) -> None:
    for seed in OF_A:
        publish(pool, seed).release()
    say("a has published")
    wait_for("b holds what a published")
    for seed in count(FIRST_OF_MANY):  # until the power fails
        with suppress(PoolFullError):
            publish(pool, seed).release()
        if seed == FIRST_OF_MANY + MANY_BEFORE_THE_KILL:
            say("a keeps writing")


def second_life(pool: CXLPool) -> None:
    for seed in (*OF_A, OF_B):
        found(pool, seed).release()
    print(f"found whole: {texts_left(pool)} of what was written until the kill", flush=True)
    publish(pool, OF_A_BACK).release()
    say("a is back")


def texts_left(pool: CXLPool) -> int:
    """Of each text that a was writing there may be less, or nothing, but nothing wrong."""
    whole = 0
    for seed in range(FIRST_OF_MANY, FIRST_OF_MANY + 2 * MANY_BEFORE_THE_KILL):
        with pool.match_prefix(token_ids(seed, TOKENS)) as hit:
            if hit:
                assert_holds(hit.sequence(), seed, hit.tokens)
            whole += hit.tokens == TOKENS
    return whole


def survivor(pool: CXLPool) -> None:
    held = {seed: found(pool, seed) for seed in OF_A}
    say("b holds what a published")
    wait_for("a is dead")
    for seed, sequence in held.items():
        assert_holds(sequence, seed, TOKENS)
        found(pool, seed).release()
    texts_left(pool)
    publish(pool, OF_B).release()
    found(pool, OF_B).release()
    say("b has published")
    wait_for("a is back")
    for seed, sequence in held.items():
        assert_holds(sequence, seed, TOKENS)
    found(pool, OF_A_BACK).release()
    assert pool.check(deep=True)["clean"]


def main(name: str) -> None:
    bind_device()
    if name == "b":
        wait_for("a has published")
        with join(DEVICE, host="b") as pool:
            survivor(pool)
    elif (SHARED / "a is dead").exists():
        with join(DEVICE, host="a") as pool:
            second_life(pool)
    else:
        pool = create(DEVICE, layout=LAYOUT, capacity="all", sharing="software", host="a")
        first_life(pool)


if __name__ == "__main__":
    main(sys.argv[1])
