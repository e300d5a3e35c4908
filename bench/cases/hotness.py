"""What counting the uses of pages costs a select: the same selects, counted and not counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cxlkv.bench.cases import selection
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget

METHODS = ("exact", "two_stage")


@dataclass(frozen=True)
class Size:
    """16,384 tokens, 8 kv heads of 128, bf16, 4 query heads each, 5 % of the pages."""

    tokens: int = 16384
    kv_heads: int = 8
    head_dim: int = 128
    group: int = 4
    pairs: int = 2000


def run(result: Result, size: Size = Size()) -> None:
    """Metrics METHOD_us (counted), METHOD_uncounted_us and hotness_cost_METHOD, one thread; ratio
    hotness_cost, the worse of them."""
    generator = torch.Generator().manual_seed(11)
    shape = (size.tokens, size.kv_heads, size.head_dim)
    keys = torch.randn(shape, generator=generator).bfloat16()
    query = torch.randn(size.kv_heads * size.group, size.head_dim, generator=generator).bfloat16()
    filled = selection.Size(
        tokens=size.tokens,
        layers=1,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        group=size.group,
    )
    budget = Budget(pages=max(1, size.tokens // filled.page_tokens // 20))
    costs = []
    with selection.filled(filled, keys) as (pool, sequence):
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
            result.measure(f"{method}_us", [s * 1e6 for s in counted], "us")
            result.measure(f"{method}_uncounted_us", [s * 1e6 for s in uncounted], "us")
            cost = statistics.median(counted) / statistics.median(uncounted)
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
