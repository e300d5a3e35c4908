"""Core calls under pytest-benchmark: `make regress` times this file with two builds in turn.

Only what the releases of both builds offer is called, by its public name. Shapes are those of a
Llama of 8 B: 8 heads of 128 channels in bfloat16, pages of 16 tokens; two layers stand for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import cxlkv
from cxlkv import Budget, CXLPool, KVLayout, Sequence
from cxlkv.arrays import Halves
from cxlkv.objects import object_keys
from cxlkv.prefix import prefix_keys

LAYERS, HEADS, Q_HEADS, DIM, PAGE_TOKENS = 2, 8, 32, 128, 16
TOKENS, DECODES = 8192, 8
OBJECT_BYTES, OBJECTS = 256 << 10, 64
if TYPE_CHECKING:
    from cxlkv import ObjectPool
else:
    ObjectPool = getattr(cxlkv, "ObjectPool", CXLPool)  # up to 0.2 one class was both


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[CXLPool]:
    layout = KVLayout(
        layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float16", page_tokens=PAGE_TOKENS
    )
    with CXLPool.create("anonymous:", layout=layout, capacity="1GiB", threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def rows(rng: np.random.Generator) -> Halves:
    return rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float16)


@pytest.fixture(scope="module")
def queries(rng: np.random.Generator) -> Halves:
    return rng.standard_normal((Q_HEADS, DIM)).astype(np.float16)


@pytest.fixture(scope="module")
def text(pool: CXLPool, rows: Halves) -> Iterator[Sequence]:
    sequence = pool.sequence()
    for layer in range(LAYERS):
        sequence.append(layer, rows, rows)
    yield sequence
    sequence.release()


@pytest.fixture(scope="module")
def objects() -> Iterator[ObjectPool]:
    layout = KVLayout.objects(OBJECT_BYTES)
    with ObjectPool.create("anonymous:", layout=layout, capacity="256MiB", threads=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def stored(objects: ObjectPool) -> npt.NDArray[np.uint8]:
    """The bytes of each of OBJECTS objects that are there."""
    data = np.full((OBJECTS, OBJECT_BYTES), 7, np.uint8)
    objects.put_batch(names(OBJECTS), list(data))
    return data


def names(count: int, first: int = 0) -> list[str]:
    return [f"object {i}" for i in range(first, first + count)]


# ---- sequences ----


def test_append_prefill(benchmark: BenchmarkFixture, pool: CXLPool, rows: Halves) -> None:
    def call() -> None:
        sequence = pool.sequence()
        sequence.append(0, rows[:512], rows[:512])
        sequence.release()

    benchmark(call)


def test_append_decode(benchmark: BenchmarkFixture, pool: CXLPool, rows: Halves) -> None:
    """One token of one layer; the sequence begins anew before it is full."""
    sequence = pool.sequence()
    steps = itertools.count()

    def call() -> None:
        if next(steps) % TOKENS == TOKENS - 1:
            sequence.truncate(0)
        sequence.append(0, rows[:1], rows[:1])

    benchmark(call)
    sequence.release()


def test_append_batch(benchmark: BenchmarkFixture, pool: CXLPool, rows: Halves) -> None:
    sequences = [pool.sequence() for _ in range(DECODES)]
    batch, starts, steps = pool.batch(sequences), np.arange(DECODES + 1), itertools.count()

    def call() -> None:
        if next(steps) % TOKENS == TOKENS - 1:
            for sequence in sequences:
                sequence.truncate(0)
        batch.append(0, rows[:DECODES], rows[:DECODES], starts)

    benchmark(call)
    for sequence in sequences:
        sequence.release()


def test_sequence(benchmark: BenchmarkFixture, pool: CXLPool) -> None:
    benchmark(lambda: pool.sequence().release())


def test_fork(benchmark: BenchmarkFixture, text: Sequence) -> None:
    benchmark(lambda: text.fork().release())


def test_truncate(benchmark: BenchmarkFixture, text: Sequence) -> None:
    def call() -> None:
        forked = text.fork()
        forked.truncate(TOKENS // 2)
        forked.release()

    benchmark(call)


@pytest.mark.parametrize("method", ["exact", "digest", "two_stage"])
def test_select(benchmark: BenchmarkFixture, text: Sequence, queries: Halves, method: str) -> None:
    benchmark(lambda: text.select(0, queries, Budget(share=0.05), method=method))


def test_fetch(benchmark: BenchmarkFixture, text: Sequence, queries: Halves) -> None:
    picked = text.select(0, queries, Budget(share=0.05))
    benchmark(lambda: text.fetch(0, picked))


@pytest.mark.parametrize("share", [0.05, None])
def test_attend(
    benchmark: BenchmarkFixture, text: Sequence, queries: Halves, share: float | None
) -> None:
    picked = None if share is None else text.select(0, queries, Budget(share=share))
    benchmark(lambda: text.attend(0, queries, picked))


# ---- prefixes ----


def test_prefix_keys(benchmark: BenchmarkFixture) -> None:
    ids = np.arange(TOKENS)
    benchmark(lambda: prefix_keys(ids, PAGE_TOKENS))


def test_publish(benchmark: BenchmarkFixture, pool: CXLPool, text: Sequence) -> None:
    """And forgets again what it has published."""
    keys = prefix_keys(np.arange(TOKENS), PAGE_TOKENS)

    def call() -> None:
        pool.publish(text, keys, PAGE_TOKENS)
        pool.forget(keys)

    benchmark(call)


def test_match(benchmark: BenchmarkFixture, pool: CXLPool, text: Sequence) -> None:
    keys = prefix_keys(np.arange(1, TOKENS + 1), PAGE_TOKENS)
    pool.publish(text, keys, PAGE_TOKENS)
    benchmark(lambda: pool.match(keys).release())
    pool.forget(keys)


def test_adopt(benchmark: BenchmarkFixture, pool: CXLPool, text: Sequence) -> None:
    handle = text.handle
    benchmark(lambda: pool.adopt(handle).release())


# ---- objects ----


def test_put(
    benchmark: BenchmarkFixture, objects: ObjectPool, stored: npt.NDArray[np.uint8]
) -> None:
    """OBJECTS of them, and forgets them again."""
    keys, data = names(OBJECTS, OBJECTS), list(stored)
    hashed = object_keys(keys)

    def call() -> None:
        objects.put_batch(keys, data)
        objects.forget(hashed)

    benchmark(call)


def test_get(
    benchmark: BenchmarkFixture, objects: ObjectPool, stored: npt.NDArray[np.uint8]
) -> None:
    keys, out = names(OBJECTS), list(np.empty_like(stored))
    benchmark(lambda: objects.get_batch_into(keys, out))


def test_get_one(
    benchmark: BenchmarkFixture, objects: ObjectPool, stored: npt.NDArray[np.uint8]
) -> None:
    out = np.empty(OBJECT_BYTES, np.uint8)
    benchmark(lambda: objects.get_into("object 0", out))


@pytest.mark.usefixtures("stored")
def test_lease(benchmark: BenchmarkFixture, objects: ObjectPool) -> None:
    keys = names(OBJECTS)
    benchmark(lambda: objects.lease(keys).release())


def test_reserve(benchmark: BenchmarkFixture, objects: ObjectPool) -> None:
    benchmark(lambda: objects.reserve([OBJECT_BYTES] * 8).release())


# ---- statistics ----


@pytest.mark.parametrize("what", ["stats", "overview"])
def test_look(benchmark: BenchmarkFixture, pool: CXLPool, what: str) -> None:
    of = getattr(pool, "admin", pool) if what == "overview" else pool  # it moved after 0.2
    call: Callable[[], object] = getattr(of, what)
    benchmark(call)
