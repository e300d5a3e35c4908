"""A cache of pages, simulated: prefix trees of a trace against a policy, without a byte of them.

A request asks for the pages of its prompt in order: the leading ones that are there are hits; the
others are computed, and published. Then the policy chooses who goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv.bench.replay.traces import Request
from cxlkv.tiers.policy import NONE, Policy, Published, choose

SLACK_SHARE = 0.01
"""So many pages more go than must, so that a choice serves several requests."""
HALF_PAGES = 27_805 / 512
"""Pages before a page that takes twice as long to compute as the first: a model of 8B parameters
(Qwen3-8B, by its FLOPs: cxlkv.machine.costs), pages of 512 tokens."""


@dataclass
class Replayed:
    """What came of it, in pages."""

    asked: int = 0
    hits: int = 0
    evicted: int = 0


class Simulation:
    """A pool of `capacity` pages, as the policies see it."""

    def __init__(self, capacity: int, policy: Policy, widest: int):
        size = capacity + widest
        self._capacity, self._policy = capacity, policy
        self._row_of: dict[int, int] = {}
        self._free = np.arange(size, dtype=np.uint32)
        self._free_count = size
        self._names = np.zeros(size, np.uint64)
        self._used, self._born, self._hits = (np.zeros(size, np.uint32) for _ in range(3))
        self._parents = np.full(size, NONE, np.uint32)
        self._depths = np.zeros(size, np.float32)
        self._there = np.zeros(size, np.bool_)
        self._clock = 0
        self.seen = Replayed()

    def request(self, pages: Sequence[int]) -> int:
        """Returns how many leading pages were there."""
        row_of = self._row_of
        rows = []
        for name in pages:
            row = row_of.get(name)
            if row is None:
                break
            rows.append(row)
        found = np.array(rows, np.intp)
        self._clock += len(rows)
        self._used[found] = self._clock
        self._hits[found] += 1
        self._publish(pages[len(rows) :], rows[-1] if rows else NONE, len(rows))
        self.seen.asked += len(pages)
        self.seen.hits += len(rows)
        excess = len(row_of) - self._capacity
        if excess > 0:
            self._evict(excess + int(SLACK_SHARE * self._capacity))
        return len(rows)

    def _publish(self, names: Sequence[int], parent: int, depth: int) -> None:
        """Leaves go first: behind a page that is missing there is none."""
        count = len(names)
        self._clock += count
        rows = self._free[self._free_count - count : self._free_count]
        self._free_count -= count
        self._names[rows], self._there[rows] = names, True
        self._used[rows] = self._born[rows] = self._clock
        self._hits[rows] = 0
        self._depths[rows] = np.arange(depth, depth + count)
        if count:
            self._parents[rows] = np.concatenate(([parent], rows[:-1]))
        self._row_of.update(zip(names, rows.tolist(), strict=True))

    def _evict(self, count: int) -> None:
        there = np.flatnonzero(self._there).astype(np.uint32)
        place = np.full(len(self._there) + 1, NONE, np.uint32)
        place[there] = np.arange(len(there), dtype=np.uint32)
        parents = place[np.minimum(self._parents[there], len(self._there))]
        published = Published(
            clock=self._clock,
            pages=there,
            names=mixed(self._names[there]),
            used=self._used[there],
            born=self._born[there],
            hits=self._hits[there],
            parents=parents,
            kept=np.zeros(len(there), np.bool_),
            saved_s=1 + self._depths[there] / np.float32(HALF_PAGES),
        )
        rows = there[choose(self._policy, published, count)]
        for name in self._names[rows].tolist():
            del self._row_of[name]
        self._there[rows] = False
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
        self.seen.evicted += len(rows)


def mixed(names: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spread over 64 bits, as hashes are."""
    word = names * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return word ^ (word >> np.uint64(32))


def replay(requests: Sequence[Request], capacity: int, policy: Policy) -> Replayed:
    """The policy alone."""
    widest = max((len(request.pages) for request in requests), default=0)
    simulation = Simulation(capacity, policy, widest)
    for request in requests:
        simulation.request(request.pages)
    return simulation.seen
