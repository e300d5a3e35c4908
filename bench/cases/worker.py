"""A small select by the worker, against the same here: what the way there and back costs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result
from cxlkv.ndp.engine import Budget
from cxlkv.ndp.worker import pin
from cxlkv.pool import CXLPool

SERVE = (sys.executable, "-m", "cxlkv.ops.cli", "ndp-worker")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """64 pages of 16 tokens at first, 8 kv heads of 128, bf16, 4 query heads each."""

    layers: int = 1
    tokens: int = 1024
    steps: int = 1000


def run(result: Result, size: Size = Size()) -> None:
    """Metrics select_us and worker_us, in turn in one run, and the difference of each pair."""
    capacity = int(size.layout.token_bytes * (size.tokens + size.steps) * 3) + (8 << 20)
    cpus = sorted(os.sched_getaffinity(0))
    with pool_in_file(size.layout, capacity, threads=1) as (pool, path):
        pin((cpus[-1],))  # on one CPU the two would wait for each other's spinning
        process = subprocess.Popen(
            [*SERVE, "--pool", str(path), "--threads", "1"], stdout=subprocess.PIPE, text=True
        )
        try:
            pin((cpus[0],))
            assert process.stdout is not None
            process.stdout.readline()  # it serves
            measure(result, pool, path, size)
        finally:
            process.terminate()
            process.communicate(timeout=60)
            pin(tuple(cpus))


def measure(result: Result, pool: CXLPool, path: Path, size: Size) -> None:
    """Decode steps: a token is appended, then both select; the worker's turn is first or last."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    budget = Budget(pages=8)
    with CXLPool.open(path, threads=1) as here:
        pool.use_worker("only", deadline_s=10)
        asks = {"worker": pool.sequence(), "here": here.sequence()}
        keys = numbers(size.tokens, size.kv_heads, size.head_dim)
        for sequence in asks.values():
            sequence.append(0, keys, keys)
        seconds: dict[str, list[float]] = {name: [] for name in asks}
        equal = True
        for step in range(size.steps):
            key = numbers(1, size.kv_heads, size.head_dim)
            query = numbers(size.kv_heads * size.group, size.head_dim)
            chosen = []
            for name in sorted(asks, reverse=step % 2 == 0):
                asks[name].append(0, key, key)
                began = time.perf_counter()
                chosen.append(asks[name].select(0, query, budget, method="exact").pages)
                seconds[name].append(time.perf_counter() - began)
            equal = equal and bool(np.array_equal(chosen[0], chosen[1]))
    result.checks["worker_selects_the_same_pages"] = equal
    figures = {"select": seconds["here"], "worker": seconds["worker"]}
    for name, low in (("worker_extra", statistics.median), ("worker_extra_undisturbed", decile)):
        figures[name] = [low(seconds["worker"]) - low(seconds["here"])]
    result.times(figures, "us", "{}_us")
    result.notes.append("worker_extra_us: the median by the worker less the median in this process")
    result.notes.append("worker_extra_undisturbed_us: the same of the lowest deciles")
    result.notes.append("the worker has a CPU of its own, if there are two")


def decile(samples: list[float]) -> float:
    """A tenth of the samples is below: what other programs on these CPUs disturb little."""
    return statistics.quantiles(samples, n=10)[0]
