"""Crossings into C in one decode step: 3 a layer, however many sequences there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np

from cxlkv import _core
from cxlkv.bench.result import Result
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import Budget
from cxlkv.pool import CXLPool


class CountingLibrary:
    """Stands before the C library and counts the calls of its functions by name."""

    def __init__(self, library: object):
        self.library = library
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> object:
        found = getattr(self.library, name)
        if not callable(found):
            return found

        def call(*arguments: object) -> object:
            self.calls[name] += 1
            return found(*arguments)

        return call


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls into C while the block lasts: it stands before the library in the whole binding."""
    lib = getattr(_core.base, "lib")  # noqa: B009
    counting = CountingLibrary(lib)
    sections = [part for part in vars(_core).values() if getattr(part, "lib", None) is lib]
    try:
        for section in sections:
            setattr(section, "lib", counting)  # noqa: B010
        yield counting.calls
    finally:
        for section in sections:
            setattr(section, "lib", lib)  # noqa: B010


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
    for step in range(2):
        token = rng.standard_normal((count, 2, 64), np.float32)
        query = rng.standard_normal((count, 8, 64), np.float32)
        starts = np.arange(count + 1, dtype=np.int32)
        with counted_calls() if step == 1 else nullcontext(Counter[str]()) as calls:
            for layer in range(layers):
                batch.append(layer, token, token, starts)
                picked = batch.select(layer, query, starts, Budget(pages=4))
                batch.attend(layer, query, starts, picked)
    return calls.total()
