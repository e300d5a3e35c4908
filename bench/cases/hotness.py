"""What counting the uses of pages costs a select, and what page_mass costs an attend: the same
calls with it and without, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cxlkv.bench.pools import Shape, filled
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool

METHODS = ("exact", "two_stage")
ENCODINGS = ("none", "int8", "int4")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """16,384 tokens, 8 kv heads of 128, bf16, 4 query heads each, 5 % of the pages."""

    layers: int = 1
    tokens: int = 16384
    pairs: int = 2000
    mass_pairs: int = 300
    weighed: tuple[tuple[str, Shape], ...] = (
        ("d128", Shape(layers=1, kv_heads=1, tokens=131072)),
        ("smollm2", Shape(layers=1, kv_heads=3, head_dim=64, group=3, tokens=28000)),
    )


def run(result: Result, size: Size = Size()) -> None:
    """Metrics METHOD_us (counted), METHOD_uncounted_us and hotness_cost_METHOD, one thread; ratio
    hotness_cost, the worse of them. Of attention to all pages, mass_SHAPE_ENCODING_us,
    attend_SHAPE_ENCODING_us and ratio mass_cost_SHAPE_ENCODING."""
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
    for name, shape in size.weighed:
        for encoding in ENCODINGS:
            weigh(result, f"{name}_{encoding}", shape, encoding, size.mass_pairs)
    result.notes.append("mass_cost: median of attends that say page_mass over that of the others")


def weigh(result: Result, name: str, shape: Shape, encoding: str, pairs: int) -> None:
    """One sequence, one query row, by one thread."""
    layout = shape.layout if encoding == "none" else shape.layout.encoded(encoding)
    query = replace(shape, kv_heads=shape.kv_heads * shape.group).noise(12, 1)[0]
    capacity = layout.token_bytes * shape.tokens * 2 + (64 << 20)
    with CXLPool.create("anonymous:", layout=layout, capacity=capacity, threads=1) as pool:
        sequence = pool.sequence()
        sequence.append(0, shape.noise(13), shape.noise(14))

        def one(weighs: bool) -> None:
            if weighs:
                sequence.attend(0, query, page_mass=True)
            else:
                sequence.attend(0, query)

        weighed, plain = in_pairs(one, pairs)
        times = {f"mass_{name}": weighed, f"attend_{name}": plain}
        median = result.times(times, "us", "{}_us")
        result.ratios[f"mass_cost_{name}"] = median[f"mass_{name}"] / median[f"attend_{name}"]


def in_pairs(call: Callable[[bool], None], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of call(True) and call(False), in turn; the first one changes each time.

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
