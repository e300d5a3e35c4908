"""Crossings into C in one decode step: 3 a layer, however many sequences there are."""

from __future__ import annotations

import numpy as np

from cxlkv import _core
from cxlkv.bench.report import Result
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool


class CountingLibrary:
    """Stands before the C library and counts what is called."""

    def __init__(self, library: object):
        self.library = library
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        self.calls += 1
        return getattr(self.library, name)


def run(result: Result, layers: int = 4, counts: tuple[int, ...] = (1, 64)) -> None:
    """Metric calls_per_layer_N_sequences: append, select and attend of one token each."""
    layout = KVLayout(layers=layers, kv_heads=2, head_dim=64, page_tokens=16, dtype="float32")
    rng = np.random.default_rng(17)
    with CXLPool.create("anonymous:", layout=layout, capacity="256MiB", threads=1) as pool:
        for count in counts:
            calls = count_calls(pool, rng, layers, count)
            result.measure(f"calls_per_layer_{count}_sequences", [calls / layers], "calls")
            result.checks[f"three_calls_per_layer_{count}_sequences"] = calls == 3 * layers


def count_calls(pool: CXLPool, rng: np.random.Generator, layers: int, count: int) -> int:
    """C functions called during the second of two decode steps of `count` sequences."""
    batch = pool.batch([pool.sequence() for _ in range(count)])
    context = rng.standard_normal((100 * count, 2, 64), np.float32)
    for layer in range(layers):
        batch.append(layer, context, context, np.arange(count + 1) * 100)
    counting = CountingLibrary(getattr(_core, "lib"))  # noqa: B009
    for step in range(2):
        token = rng.standard_normal((count, 2, 64), np.float32)
        query = rng.standard_normal((count, 8, 64), np.float32)
        starts = np.arange(count + 1, dtype=np.int32)
        if step == 1:
            setattr(_core, "lib", counting)  # noqa: B010
        try:
            for layer in range(layers):
                batch.append(layer, token, token, starts)
                picked = batch.select(layer, query, starts, Budget(pages=4))
                batch.attend(layer, query, starts, picked)
        finally:
            setattr(_core, "lib", counting.library)  # noqa: B010
    return counting.calls
