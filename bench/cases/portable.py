"""The exact select that numba compiles, against the C core's on the same pages."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numba
import numpy as np
import torch

from cxlkv.bench.cases.selecting import Size, fill_interleaved
from cxlkv.bench.measure import interleave
from cxlkv.bench.report import Result
from cxlkv.layout import KVLayout
from cxlkv.ndp import portable
from cxlkv.ndp.engine import Budget
from cxlkv.ndp.mapped import MappedPool
from cxlkv.pool import CXLPool

SIZE = Size()


def run(result: Result, size: Size = SIZE, threads: tuple[int, ...] = (1, 2)) -> None:
    """Metrics core_select_* and numba_select_* in GB/s of one layer's keys, ratio numba_cost_*:
    numba's time over the core's. The pool is a file, which numba's side maps once more."""
    layout = KVLayout(
        layers=size.layers,
        kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        page_tokens=size.page_tokens,
    )
    capacity = int(layout.token_bytes * size.tokens * 2 * 1.1) + (256 << 20)
    generator = torch.Generator().manual_seed(11)
    shape = (size.tokens, size.kv_heads, size.head_dim)
    k = torch.randn(shape, generator=generator).bfloat16()
    query = torch.randn(1, size.kv_heads * size.group, size.head_dim, generator=generator)
    layer, starts = size.layers // 2, np.array([0, 1], np.int32)
    budget = Budget(pages=max(1, size.tokens // size.page_tokens // 20), sinks=0, recent=0)
    before = numba.get_num_threads()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "bench.pool"
        with CXLPool.create(
            path, layout=layout, capacity=capacity, checksum=False, sketch=False, threads=1
        ) as pool:
            sequence = fill_interleaved(pool, size, k)
            stored = MappedPool(path).layer(sequence.handle, layer)
            rows = query.numpy()
            for count in (n for n in threads if n <= before):
                pool.set_threads(count)
                numba.set_num_threads(count)
                core = sequence.select(layer, rows, budget, method="exact").pages
                ours = portable.select([stored], rows, starts, [budget]).pages
                # Sums in another order may swap pages whose scores differ in the last bits.
                same = float((core == ours).mean())
                result.checks[f"numba_selects_as_the_core_{count}_threads"] = same > 0.999
                samples = interleave(
                    {
                        "core": lambda: sequence.select(layer, rows, budget, method="exact"),
                        "numba": lambda: portable.select([stored], rows, starts, [budget]),
                    },
                    size.rounds,
                    settle_s=size.settle_s,
                )
                report(result, samples, size, count)
    numba.set_num_threads(before)


def report(result: Result, samples: dict[str, list[float]], size: Size, count: int) -> None:
    key_bytes = size.tokens * size.kv_heads * size.head_dim * 2
    speed = {
        name: result.measure(
            f"{name}_select_{count}_threads", [key_bytes / s / 1e9 for s in seconds], "GB/s"
        ).median
        for name, seconds in samples.items()
    }
    result.ratios[f"numba_cost_{count}_threads"] = speed["core"] / speed["numba"]
