"""What the way to the worker and back costs: a small select, and decode by choosers, against the
same in this process."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cxlkv.bench.pools import Shape, pool_in_file
from cxlkv.bench.result import Result, short
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


@dataclass(frozen=True)
class ChooserSize:
    """Shapes of kv heads, channels and tokens, 4 query heads for each kv head; 5 % of the pages."""

    shapes: tuple[tuple[int, int, int], ...] = ((3, 64, 8192), (8, 128, 8192), (8, 128, 32768))
    steps: int = 40


def run(result: Result, size: Size = Size(), of_choosers: ChooserSize = ChooserSize()) -> None:
    """Metrics select_us and worker_us, in turn in one run, and the difference of each pair; and
    those of choosers()."""
    with served(size) as (pool, path):
        measure(result, pool, path, size)
    choosers(result, of_choosers)


@contextmanager
def served(size: Size, *methods: str) -> Iterator[tuple[CXLPool, Path]]:
    """A pool with a worker that has a CPU of its own, if there are two."""
    capacity = int(size.layout.token_bytes * (size.tokens + size.steps) * 3) + (8 << 20)
    cpus = sorted(os.sched_getaffinity(0))
    words = ["--methods", ",".join(methods)] if methods else []
    with pool_in_file(size.layout, capacity, threads=1) as (pool, path):
        pin((cpus[-1],))  # on one CPU the two would wait for each other's spinning
        process = subprocess.Popen(
            [*SERVE, str(path), "--threads", "1", *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            pin((cpus[0],))
            assert process.stdout is not None
            process.stdout.readline()  # it serves
            yield pool, path
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


def choosers(result: Result, sizes: ChooserSize) -> None:
    """Metrics NAME_SHAPE_here_ms and _worker_ms of a decode step, and _first_ms of the one that
    makes all states; ratios by the shapes."""
    try:
        from cxlkv.ndp.methods import CHOOSERS
    except ImportError:
        result.notes.append("choosers: not measured, numba is not installed")
        return
    names = tuple(each.name for each in CHOOSERS)
    equal = True
    for kv_heads, head_dim, tokens in sizes.shapes:
        shape = f"{kv_heads}x{head_dim}_{short(tokens)}"
        size = Size(kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, steps=sizes.steps)
        with served(size, *names) as (pool, path), CXLPool.open(path, threads=1) as here:
            pool.use_worker("only", deadline_s=60)
            for name in names:
                seconds, same = decoded(size, {"worker": pool, "here": here}, name)
                equal = equal and same
                first = {place: times[:1] for place, times in seconds.items()}
                steps = {place: times[1:] for place, times in seconds.items()}
                result.times(first, "ms", f"{name}_{shape}_{{}}_first_ms")
                medians = result.times(steps, "ms", f"{name}_{shape}_{{}}_ms")
                ratio = medians["worker"] / medians["here"]
                result.ratios[f"{name}_{shape}_worker_to_here"] = ratio
    result.checks["worker_decodes_the_same"] = equal


def decoded(
    size: Size, pools: dict[str, CXLPool], method: str
) -> tuple[dict[str, list[float]], bool]:
    """Seconds of steps in each pool, in turn, and whether the outputs are the same."""
    random, budget, starts = np.random.default_rng(7), Budget(share=0.05), [0, 1]
    batches = {place: pool.batch([pool.sequence()]) for place, pool in pools.items()}
    keys, values = size.noise(5), size.noise(6)
    for batch in batches.values():
        batch.append(0, keys, values, [0, size.tokens])
    seconds: dict[str, list[float]] = {place: [] for place in pools}
    equal = True
    for step in range(size.steps):
        key, value = size.noise(100 + step, 1), size.noise(200 + step, 1)
        query = random.standard_normal((1, size.kv_heads * size.group, size.head_dim), np.float32)
        outputs = []
        for place in sorted(batches, reverse=step % 2 == 0):
            began = time.perf_counter()
            found = batches[place].decode(0, query, key, value, starts, budget, method)
            seconds[place].append(time.perf_counter() - began)
            outputs.append(np.asarray(found.out))
        equal = equal and bool(np.array_equal(outputs[0], outputs[1]))
    for batch in batches.values():
        batch.sequences[0].release()
    return seconds, equal


def decile(samples: list[float]) -> float:
    """A tenth of the samples is below: what other programs on these CPUs disturb little."""
    return statistics.quantiles(samples, n=10)[0]
