"""How long a policy takes to choose a thousand of 100,000 published pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cxlkv.bench.measure import interleave
from cxlkv.bench.result import Result
from cxlkv.tiers.policy import DEFAULT, NONE, POLICIES, Policy, Published, choose

PAGES, WANTED, CHAIN = 100_000, 1_000, 24


class Day:
    """Pages in chains, of which some are found again between two choices."""

    def __init__(self, pages: int, policy: Policy):
        self.random = np.random.default_rng(5)
        self.policy, self.count, self.clock = policy, pages, 10 * pages
        ids = np.arange(pages, dtype=np.uint32)
        chains = self.random.integers(0, self.clock, pages // CHAIN + 1).astype(np.uint32)
        self.ids, self.names = ids, self.random.integers(0, 1 << 63, pages).astype(np.uint64)
        self.parents = np.where(ids % CHAIN == 0, NONE, ids - 1).astype(np.uint32)
        self.born = chains.repeat(CHAIN)[:pages]
        self.used, self.hits = self.born.copy(), np.zeros(pages, np.uint32)

    def choose(self) -> int:
        some = self.random.integers(0, self.count, self.count // 500)
        self.clock += len(some)
        self.used[some] = self.clock
        self.hits[some] += 1
        published = Published(
            clock=self.clock,
            pages=self.ids,
            names=self.names,
            used=self.used,
            born=self.born,
            hits=self.hits,
            parents=self.parents,
            kept=np.zeros(self.count, np.bool_),
        )
        return len(choose(self.policy, published, min(WANTED, self.count // 2)))


def run(result: Result, pages: int = PAGES, rounds: int = 25) -> None:
    """Metrics policy_100k_pages_ms (of the default) and policy_100k_pages_NAME_ms."""
    days = {name: Day(pages, make()) for name, make in POLICIES.items()}
    calls: dict[str, Callable[[], object]] = {name: day.choose for name, day in days.items()}
    samples = interleave(calls, rounds)
    result.times(samples, "ms", "policy_100k_pages_{}_ms")
    result.times({"": samples[DEFAULT]}, "ms", "policy_100k_pages_ms")
    for name, day in days.items():
        result.checks[f"{name}_chooses_as_many"] = day.choose() == min(WANTED, pages // 2)
