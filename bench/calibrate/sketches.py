"""`cxlkv tune`: from how many pages on sketches pay on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cxlkv.bench.measure import interleave
from cxlkv.bench.pools import Shape
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget
from cxlkv.ndp.tuning import PAGES_MIN, Tuning, this_machine
from cxlkv.pool import CXLPool

NEVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """Pages of 16 tokens, 8 kv heads of 128 in bf16, 4 query heads each; 5 % of the pages."""

    layers: int = 1
    pages: tuple[int, ...] = (1024, 2048, 4096, 8192)
    rounds: int = 9


def run(result: Result, size: Size = Size(), threads: int | None = None) -> Tuning:
    """Times of "exact" and "two_stage" at each number of pages, and what "auto" should do.

    "auto" takes sketches from the smallest number on from which they are faster at all larger
    ones that were tried; never, if they are slower at the largest. i.i.d. keys: the hardest case.
    """
    tokens = 16 * max(size.pages)
    random = np.random.default_rng(11)
    faster = {}
    with CXLPool.create(
        "anonymous:",
        layout=size.layout,
        capacity=size.layout.token_bytes * tokens * 3 // 2 + (64 << 20),
        checksum=False,
        threads=threads,
    ) as pool:
        sequence = pool.sequence()
        step = 16 * 256
        for first in range(0, tokens, step):
            rows = size.noise(first, step)
            sequence.append(0, rows, rows)
        q = random.standard_normal((size.kv_heads * size.group, size.head_dim), np.float32)
        for pages in sorted(size.pages, reverse=True):
            sequence.truncate(pages * 16)
            budget = Budget(pages=max(4, pages // 20))
            times = interleave(
                {
                    method: partial(sequence.select, 0, q, budget, method=method)
                    for method in ("exact", "two_stage")
                },
                size.rounds,
            )
            median = result.times(times, "us", f"{{}}_{pages}_pages")
            faster[pages] = median["two_stage"] < median["exact"]
    result.checks["measured"] = True
    tuning = Tuning(two_stage_from(faster), this_machine())
    result.measure("two_stage_pages", [tuning.two_stage_pages], "pages")
    return tuning


def two_stage_from(faster: dict[int, bool]) -> int:
    """The smallest number of pages from which on all are True; NEVER without one."""
    found = NEVER
    for pages in sorted(faster, reverse=True):
        if not faster[pages]:
            break
        found = max(pages, PAGES_MIN)
    return found
