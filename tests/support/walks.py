"""Random walks over a pool: operations by their weights, each checked against what it must find."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from random import Random

from cxlkv import CXLPool, PoolFullError, Sequence
from cxlkv.errors import StaleError
from cxlkv.prefix import PageKeys, prefix_keys

from . import texts

PAGE_TOKENS = texts.SMALL.page_tokens
FAMILIES = 24  # texts that all walks know, for publish and match
FAMILY_TOKENS = 5 * PAGE_TOKENS
TAIL_END = 3 * PAGE_TOKENS + 2  # where some of them are published up to, with a tail
TOKENS_MAX = 60
WEIGHTS = {"append": 24, "fork": 12, "read": 14, "free": 14, "truncate": 6}
WEIGHTS |= {"publish": 6, "match": 12, "forget": 3}


class Walk:
    """weights: how often a step is which method. seen: what was done, and what it met."""

    def __init__(self, random: Random, weights: dict[str, int]) -> None:
        self.random = random
        self.weights = weights
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        """One operation; where the pool is full, what makes room instead."""
        name = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        try:
            getattr(self, name)()
            self.seen[name] += 1
        except PoolFullError:
            self.seen["full"] += 1
            self.make_room()

    def make_room(self) -> None:
        raise NotImplementedError


def token_ids(seed: int) -> list[int]:
    """Token ids of a published text."""
    return [seed * 1000 + i for i in range(FAMILY_TOKENS)]


def keys_of(seed: int) -> list[bytes]:
    """All under which that text may be published."""
    ids = token_ids(seed)
    tail: PageKeys = prefix_keys(ids[:TAIL_END], PAGE_TOKENS, tail=True)
    return [*prefix_keys(ids, PAGE_TOKENS), tail[-1]]


class TextWalk(Walk):
    """Sequences, each with the ids that it must hold; LIVE_MAX: how many at one time."""

    LIVE_MAX = 8
    LEASES_S: tuple[float, ...] = (100.0,)

    def __init__(self, pool: CXLPool, random: Random, **weights: int) -> None:
        super().__init__(random, WEIGHTS | weights)
        self.pool = pool
        self.live: list[tuple[Sequence, list[int]]] = []

    def step(self) -> None:
        super().step()
        while len(self.live) > self.LIVE_MAX:
            self.free()

    def make_room(self) -> None:
        """Lets one go, and now and then a text that is published: else a host whose neighbours have
        a page of one in each extent gets none."""
        self.free()
        if self.random.random() < 0.25:
            self.forget()

    def check(self, sequence: Sequence, ids: list[int]) -> None:
        texts.verify(sequence, ids)

    def pick(self) -> tuple[Sequence, list[int]]:
        if not self.live:
            self.live.append((self.pool.sequence(), []))
        return self.random.choice(self.live)

    def write(self, sequence: Sequence, ids: list[int], more: list[int]) -> None:
        try:
            texts.append(sequence, more)
        except PoolFullError:
            assert sequence.tokens(0) == len(ids), "a full pool left half an append behind"
            raise
        ids += more

    def append(self) -> None:
        few = len(self.live) < self.LIVE_MAX // 2
        if few:
            self.live.append((self.pool.sequence(), []))
        sequence, ids = self.live[-1] if few else self.pick()
        more = [self.random.getrandbits(60) for _ in range(self.random.randrange(1, 12))]
        if len(ids) + len(more) <= TOKENS_MAX:
            self.write(sequence, ids, more)

    def fork(self) -> None:
        sequence, ids = self.pick()
        self.live.append((sequence.fork(), list(ids)))
        if len(ids) < TOKENS_MAX:
            self.write(*self.live[-1], [self.random.getrandbits(60)])

    def read(self) -> None:
        self.check(*self.pick())

    def free(self) -> None:
        if self.live:
            sequence, ids = self.live.pop(self.random.randrange(len(self.live)))
            self.check(sequence, ids)
            sequence.release()

    def truncate(self) -> None:
        sequence, ids = self.pick()
        kept = self.random.randrange(len(ids) + 1)
        sequence.truncate(kept)
        del ids[kept:]

    def family(self) -> int:
        return 1 + self.random.randrange(FAMILIES)

    def publish(self) -> None:
        """One in three of a text that ends within a page: with its tail."""
        ids = token_ids(self.family())
        sequence = self.pool.sequence()
        self.write(sequence, [], ids)
        tail = self.random.random() < 0.34
        shown = ids[: TAIL_END if tail else FAMILY_TOKENS]
        self.seen["published"] += self.pool.publish_prefix(sequence, shown, tail=tail)
        self.seen["tails"] += tail
        sequence.release()

    def match(self) -> None:
        ids = token_ids(self.family())
        with self.pool.match_prefix(ids, lease_s=self.random.choice(self.LEASES_S)) as hit:
            found = ids[: hit.tokens]
            try:
                sequence = hit.sequence()
            except StaleError:
                self.seen["lease ended"] += 1
                return
        self.seen["tail_hits"] += len(found) % PAGE_TOKENS > 0
        self.seen["hit"] += bool(found)
        self.live.append((sequence, found))
        self.check(sequence, found)

    def forget(self) -> None:
        keys = keys_of(self.family())
        if self.random.random() < 0.5:
            self.pool.admin.pin(keys)
        self.seen["forgotten"] += self.pool.forget(keys)

    def finish(self) -> None:
        while self.live:
            self.free()


def kill_one(
    act: Callable[[int], object], steps: int, random: Random, most_s: float, what: str
) -> None:
    """Forks a child that acts, and writes a byte for each step; kills it when it has done so many,
    up to most_s later."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        act(theirs)
    os.close(theirs)
    while steps > 0 and (got := os.read(ours, steps)):  # none if it failed: its exit status says so
        steps -= len(got)
    until = time.perf_counter() + random.uniform(0, most_s)
    while time.perf_counter() < until:
        pass
    os.kill(child, signal.SIGKILL)
    os.close(ours)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit(f"{what} ended by itself: status {status}")
