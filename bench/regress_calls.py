"""Core calls under pytest-benchmark: `make regress` times this file with two builds in turn.

Only what the releases of both builds offer is called, by its public name. Shapes are those of a
Llama of 8 B: 8 heads of 128 channels in bfloat16, pages of 16 tokens; two layers stand for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cxlkv
from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.objects import object_keys
from cxlkv.prefix import prefix_keys

LAYERS, HEADS, Q_HEADS, DIM, PAGE_TOKENS = 2, 8, 32, 128, 16
TOKENS, DECODES = 8192, 8
OBJECT_BYTES, OBJECTS = 256 << 10, 64
if TYPE_CHECKING:
    from cxlkv import ObjectPool
    from cxlkv.arrays import Halves
else:
    ObjectPool = getattr(cxlkv, "ObjectPool", CXLPool)  # up to 0.2 one class was both


class Stage:
    """What is called: a pool with a text in all layers, and one with OBJECTS objects."""

    def __init__(self, stack: ExitStack) -> None:
        rng = np.random.default_rng(1)
        layout = KVLayout(
            layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float16", page_tokens=PAGE_TOKENS
        )
        pool = CXLPool.create("anonymous:", layout=layout, capacity="1GiB", threads=1)
        self.pool = stack.enter_context(pool)
        self.rows: Halves = rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float16)
        self.queries: Halves = rng.standard_normal((Q_HEADS, DIM)).astype(np.float16)
        self.text = self.pool.sequence()
        for layer in range(LAYERS):
            self.text.append(layer, self.rows, self.rows)
        layout = KVLayout.objects(OBJECT_BYTES)
        objects = ObjectPool.create("anonymous:", layout=layout, capacity="256MiB", threads=1)
        self.objects = stack.enter_context(objects)
        self.stored = np.full((OBJECTS, OBJECT_BYTES), 7, np.uint8)
        self.objects.put_batch(names(OBJECTS), list(self.stored))


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack)


def names(count: int, first: int = 0) -> list[str]:
    return [f"object {i}" for i in range(first, first + count)]


# ---- sequences ----


def test_append_prefill(benchmark: BenchmarkFixture, stage: Stage) -> None:
    def call() -> None:
        sequence = stage.pool.sequence()
        sequence.append(0, stage.rows[:512], stage.rows[:512])
        sequence.release()

    benchmark(call)


def test_append_decode(benchmark: BenchmarkFixture, stage: Stage) -> None:
    """One token of one layer; the sequence begins anew before it is full."""
    sequence = stage.pool.sequence()
    steps = itertools.count()

    def call() -> None:
        if next(steps) % TOKENS == TOKENS - 1:
            sequence.truncate(0)
        sequence.append(0, stage.rows[:1], stage.rows[:1])

    benchmark(call)
    sequence.release()


def test_append_batch(benchmark: BenchmarkFixture, stage: Stage) -> None:
    sequences = [stage.pool.sequence() for _ in range(DECODES)]
    batch, starts, steps = stage.pool.batch(sequences), np.arange(DECODES + 1), itertools.count()

    def call() -> None:
        if next(steps) % TOKENS == TOKENS - 1:
            for sequence in sequences:
                sequence.truncate(0)
        batch.append(0, stage.rows[:DECODES], stage.rows[:DECODES], starts)

    benchmark(call)
    for sequence in sequences:
        sequence.release()


def test_sequence(benchmark: BenchmarkFixture, stage: Stage) -> None:
    benchmark(lambda: stage.pool.sequence().release())


def test_fork(benchmark: BenchmarkFixture, stage: Stage) -> None:
    benchmark(lambda: stage.text.fork().release())


def test_truncate(benchmark: BenchmarkFixture, stage: Stage) -> None:
    def call() -> None:
        forked = stage.text.fork()
        forked.truncate(TOKENS // 2)
        forked.release()

    benchmark(call)


@pytest.mark.parametrize("method", ["exact", "digest", "two_stage"])
def test_select(benchmark: BenchmarkFixture, stage: Stage, method: str) -> None:
    benchmark(lambda: stage.text.select(0, stage.queries, Budget(share=0.05), method=method))


def test_fetch(benchmark: BenchmarkFixture, stage: Stage) -> None:
    picked = stage.text.select(0, stage.queries, Budget(share=0.05))
    benchmark(lambda: stage.text.fetch(0, picked))


@pytest.mark.parametrize("share", [0.05, None])
def test_attend(benchmark: BenchmarkFixture, stage: Stage, share: float | None) -> None:
    picked = None if share is None else stage.text.select(0, stage.queries, Budget(share=share))
    benchmark(lambda: stage.text.attend(0, stage.queries, picked))


# ---- prefixes ----


def test_prefix_keys(benchmark: BenchmarkFixture) -> None:
    ids = np.arange(TOKENS)
    benchmark(lambda: prefix_keys(ids, PAGE_TOKENS))


def test_publish(benchmark: BenchmarkFixture, stage: Stage) -> None:
    """And forgets again what it has published."""
    keys = prefix_keys(np.arange(TOKENS), PAGE_TOKENS)

    def call() -> None:
        stage.pool.publish(stage.text, keys, PAGE_TOKENS)
        stage.pool.forget(keys)

    benchmark(call)


def test_match(benchmark: BenchmarkFixture, stage: Stage) -> None:
    keys = prefix_keys(np.arange(1, TOKENS + 1), PAGE_TOKENS)
    stage.pool.publish(stage.text, keys, PAGE_TOKENS)
    benchmark(lambda: stage.pool.match(keys).release())
    stage.pool.forget(keys)


def test_adopt(benchmark: BenchmarkFixture, stage: Stage) -> None:
    handle = stage.text.handle
    benchmark(lambda: stage.pool.adopt(handle).release())


# ---- objects ----


def test_put(benchmark: BenchmarkFixture, stage: Stage) -> None:
    """OBJECTS of them, and forgets them again."""
    keys, data = names(OBJECTS, OBJECTS), list(stage.stored)
    hashed = object_keys(keys)

    def call() -> None:
        stage.objects.put_batch(keys, data)
        stage.objects.forget(hashed)

    benchmark(call)


def test_get(benchmark: BenchmarkFixture, stage: Stage) -> None:
    keys, out = names(OBJECTS), list(np.empty_like(stage.stored))
    benchmark(lambda: stage.objects.get_batch_into(keys, out))


def test_get_one(benchmark: BenchmarkFixture, stage: Stage) -> None:
    out = np.empty(OBJECT_BYTES, np.uint8)
    benchmark(lambda: stage.objects.get_into("object 0", out))


def test_lease(benchmark: BenchmarkFixture, stage: Stage) -> None:
    keys = names(OBJECTS)
    benchmark(lambda: stage.objects.lease(keys).release())


def test_reserve(benchmark: BenchmarkFixture, stage: Stage) -> None:
    benchmark(lambda: stage.objects.reserve([OBJECT_BYTES] * 8).release())


# ---- statistics ----


@pytest.mark.parametrize("what", ["stats", "overview"])
def test_look(benchmark: BenchmarkFixture, stage: Stage, what: str) -> None:
    pool = stage.pool
    of = getattr(pool, "admin", pool) if what == "overview" else pool  # it moved after 0.2
    call: Callable[[], object] = getattr(of, what)
    benchmark(call)
