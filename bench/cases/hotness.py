"""What counting the uses of pages costs a select: the same selects, counted and not counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cxlkv.bench.pools import Shape, filled
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget

METHODS = ("exact", "two_stage")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """16,384 tokens, 8 kv heads of 128, bf16, 4 query heads each, 5 % of the pages."""

    layers: int = 1
    tokens: int = 16384
    pairs: int = 2000


def run(result: Result, size: Size = Size()) -> None:
    """Metrics METHOD_us (counted), METHOD_uncounted_us and hotness_cost_METHOD, one thread; ratio
    hotness_cost, the worse of them."""
    query = replace(size, kv_heads=size.kv_heads * size.group).noise(12, 1)[0]
    budget = Budget(pages=max(1, size.tokens // size.page_tokens // 20))
    costs = []
    with filled(size, size.noise(11)) as (pool, sequence):
        for method in METHODS:
            pool.hotness.enabled = True
            before = int(pool.hotness.counts().sum())
            picked = sequence.select(0, query, budget, method=method)
            used = int(pool.hotness.counts().sum()) - before
            chosen = int(np.count_nonzero(picked.pages >= 0))
            result.checks[f"{method}_is_counted"] = used == chosen

            def one(on: bool, method: str = method) -> None:
                pool.hotness.enabled = on
                sequence.select(0, query, budget, method=method)

            counted, uncounted = in_pairs(one, size.pairs)
            median = result.times({"": counted, "_uncounted": uncounted}, "us", f"{method}{{}}_us")
            cost = median[""] / median["_uncounted"]
            costs.append(result.measure(f"hotness_cost_{method}", [cost], "times").median)
    result.ratios["hotness_cost"] = max(costs)
    result.notes.append("hotness_cost: median of selects that are counted over that of the others")


def in_pairs(call: Callable[[bool], None], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of call(True) and call(False), one after the other; who is first changes each time.

    Single calls: a difference of some microseconds is less than what the machine changes by within
    a round of many.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for pair in range(-pairs // 10, pairs):  # the first ones go unmeasured
        for on in (True, False) if pair % 2 else (False, True):
            began = time.perf_counter()
            call(on)
            if pair >= 0:
                seconds[on].append(time.perf_counter() - began)
    return seconds[True], seconds[False]
