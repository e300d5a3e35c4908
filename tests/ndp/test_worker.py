"""The worker near the memory selects and attends as this process would, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from cxlkv import CXLPool, KVLayout, Rotary, _core
from cxlkv.errors import (
    BadArgumentError,
    BusyError,
    PoolFullError,
    ReleasedError,
    WorkerError,
)
from cxlkv.layout import LayerGroup
from cxlkv.machine.topology import NumaNode, probe
from cxlkv.ndp.engine import Budget, Selection, VirtualRows
from cxlkv.ndp.worker import cpus_near, serve
from cxlkv.sequence import Sequence
from tests.support.stopping import stop

from ..support.lengths import matrix, nightly
from ..support.processes import Child
from ..support.states import host_states
from ..support.threads import run_all
from ..support.waiting import until

HEADS, DIM, PAGE = 2, 16, 4
WATCHDOG_S = 60
ENCODINGS = (
    ("int8", "int4"),
    ("int4", "none"),
    ("none", "int8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("progressive", "progressive"),
)

SERVE = """
import sys
from cxlkv import CXLPool
from cxlkv.ndp.worker import serve
with CXLPool.open(sys.argv[1], threads=1) as pool:
    serve(pool._handle, lambda line: print(line, flush=True), slots=int(sys.argv[2]),
          request_bytes=int(sys.argv[3]), response_bytes=int(sys.argv[4]))
"""


class WorkerProcess(Child):
    """A worker of its own for one test."""

    def __init__(
        self,
        path: Path,
        slots: int = 4,
        request_bytes: int = 1 << 20,
        response_bytes: int = 1 << 20,
    ):
        super().__init__("-c", SERVE, path, slots, request_bytes, response_bytes)
        self.first_line = self.hear()
        assert "serves up to" in self.first_line, self.first_line

    def stop(self) -> str:
        """Ends it by SIGTERM; returns what it said."""
        return self.end(signal.SIGTERM)


class MakeWorker(Protocol):
    def __call__(self, **sizes: int) -> WorkerProcess: ...


@pytest.fixture
def make_worker(path: Path) -> Iterator[MakeWorker]:
    with contextlib.ExitStack() as stack:
        yield lambda **sizes: stack.enter_context(WorkerProcess(path, **sizes))


def make_pool(
    path: Path,
    dtype: str = "float32",
    capacity: str = "32MiB",
    window: int | None = None,
    *,
    page_tokens: int = PAGE,
    value_dim: int = DIM,
    values: str = "own",
    encodings: tuple[str, str] = ("none", "none"),
    sketch: bool = True,
) -> CXLPool:
    full = LayerGroup(
        layers=2,
        kv_heads=HEADS,
        head_dim=DIM,
        value_head_dim=value_dim,
        dtype=dtype,
        values=values,
        k_encoding=encodings[0],
        v_encoding=encodings[1],
        rotary=Rotary.of(10_000, DIM) if values == "own" else None,
    )
    layout = KVLayout.of([full], [0, 0], page_tokens=page_tokens)
    if window is not None:
        layout = KVLayout.of(
            [full, replace(full, layers=1, window=window)], [0, 0, 1], page_tokens=page_tokens
        )
    return CXLPool.create(path, layout=layout, capacity=capacity, sketch=sketch, threads=1)


class Twins:
    """A batch for which a worker works, and one of the same tokens that has none."""

    def __init__(self, path: Path, pool: CXLPool, rng: np.random.Generator, count: int):
        self.rng, self.pool = rng, pool
        self.here = CXLPool.open(path, threads=1)
        self.pools = (pool, self.here)
        self.batches = tuple(p.batch([p.sequence() for _ in range(count)]) for p in self.pools)

    def append(self, tokens: list[int], layers: Sequences[int] | None = None) -> None:
        starts = np.cumsum([0, *tokens]).astype(np.int32)
        for layer in range(self.pool.layout.layers) if layers is None else layers:
            keys = self.drawn(int(starts[-1]), HEADS, DIM)
            values = None
            if self.pool.layout.shape.values == "own":
                values = self.drawn(int(starts[-1]), HEADS, self.pool.layout.value_head_dim)
            for batch in self.batches:
                batch.append(layer, keys, values, starts)

    def drawn(self, *shape: int, dtype: str | None = None) -> object:
        """Random numbers of the pool's dtype, or another one."""
        values = self.rng.standard_normal(shape, np.float32)
        if (dtype or self.pool.layout.shape.dtype) == "float32":
            return values
        torch = pytest.importorskip("torch", reason="numpy has no bfloat16")
        return torch.from_numpy(values).bfloat16()

    def select(
        self,
        rows: list[int],
        budget: Budget | list[Budget],
        layer: int = 0,
        method: str = "exact",
        queries_in: str = "float32",
        scale: float | None = None,
    ) -> list[Selection]:
        """By the worker, if there is one, and here: they are equal."""
        starts = np.cumsum([0, *rows]).astype(np.int32)
        queries = self.drawn(int(starts[-1]), 2 * HEADS, DIM, dtype=queries_in)
        asked = (layer, queries, starts, budget, method, scale)
        got = [batch.select(*asked) for batch in self.batches]
        same(*got)
        return got

    def attend(
        self,
        rows: list[int],
        layer: int = 0,
        budget: Budget | None = None,
        queries_in: str = "float32",
        scale: float | None = None,
        softcap: float | None = None,
        error: float = 0.0,
        virtual_rows: int | None = None,
    ) -> None:
        """By the worker, if there is one, and here, to pages that were chosen here or to all: they
        are equal to the last bit. virtual_rows: of each list, and weights by tokens or by pages."""
        starts = np.cumsum([0, *rows]).astype(np.int32)
        queries = self.drawn(int(starts[-1]), 2 * HEADS, DIM, dtype=queries_in)
        picked = self.batches[1].select(layer, queries, starts, budget) if budget else None
        if picked is not None and virtual_rows is not None:
            picked = self.weighed(picked, virtual_rows)
        weighs = bool(self.rng.integers(2))
        asked = (layer, queries, starts, picked, scale, softcap, error)
        one, other = (
            batch.attend(*asked, page_mass=True) if weighs else batch.attend(*asked)
            for batch in self.batches
        )
        for got, wanted in zip(one, other, strict=True):
            assert bits(got) == bits(wanted)

    def weighed(self, picked: Selection, count: int) -> Selection:
        layout, lists = self.pool.layout, picked.counts.shape
        tokens = int(self.rng.choice([1, layout.page_tokens]))
        weights = self.rng.standard_normal((*picked.pages.shape, tokens), np.float32)
        weights[weights > 1] = -np.inf
        k = self.rng.standard_normal((*lists, count, DIM), np.float32)
        v = self.rng.standard_normal((*lists, count, layout.value_head_dim), np.float32)
        rows = VirtualRows(k, v, self.rng.standard_normal((*lists, count), np.float32))
        if self.rng.integers(3) == 0:
            return replace(picked, rows=rows)
        return replace(picked, log_weights=weights, rows=rows if count else None)

    def truncate(self, index: int, tokens: int) -> None:
        for batch in self.batches:
            batch.sequences[index].truncate(tokens)

    def release(self) -> None:
        for batch in self.batches:
            for sequence in batch.sequences:
                sequence.release()

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
        self.here.close()


class Serve(Protocol):
    def __call__(
        self, count: int, *, use: str = "only", worker: dict[str, int] | None = None, **pool: object
    ) -> tuple[CXLPool, Twins, WorkerProcess]: ...


@pytest.fixture
def serve_twins(path: Path, make_worker: MakeWorker, rng: np.random.Generator) -> Iterator[Serve]:
    """Makes a pool whose selects and attends a worker does, and twins of so many sequences."""
    with contextlib.ExitStack() as stack:

        def make(
            count: int, *, use: str = "only", worker: dict[str, int] | None = None, **pool: object
        ) -> tuple[CXLPool, Twins, WorkerProcess]:
            made = stack.enter_context(make_pool(path, **pool))  # type: ignore[arg-type]
            twins = stack.enter_context(Twins(path, made, rng, count))
            process = make_worker(**(worker or {}))
            made.use_worker(use, deadline_s=WATCHDOG_S)
            return made, twins, process

        yield make


def bits(array: object) -> bytes:
    if isinstance(array, np.ndarray):
        return array.tobytes()
    torch = pytest.importorskip("torch", reason="numpy has no bfloat16")
    assert isinstance(array, torch.Tensor)
    return np.asarray(array.view(torch.uint8)).tobytes()


def same(one: Selection, other: Selection) -> None:
    np.testing.assert_array_equal(one.pages, other.pages)
    np.testing.assert_array_equal(one.scores, other.scores)
    np.testing.assert_array_equal(one.counts, other.counts)
    assert (one.bytes_scored, one.bytes_fetched) == (other.bytes_scored, other.bytes_fetched)
    assert (one.per, one.stages, one.method) == (other.per, other.stages, other.method)
    for array, wanted in zip(beside_pages(one), beside_pages(other), strict=True):
        assert (array is None) == (wanted is None)
        np.testing.assert_array_equal(array, wanted)


def beside_pages(of: Selection) -> tuple[object, ...]:
    rows = of.rows
    return (of.log_weights, *((None,) * 3 if rows is None else (rows.k, rows.v, rows.log_counts)))


BUDGETS = {
    "pages": Budget(pages=5),
    "no_forced": Budget(pages=3, sinks=0, recent=0),
    "share": Budget(share=0.3, union="layer"),
    "mass": Budget(mass=0.7),
    "by_sequence": Budget(pages=6, per="sequence"),
    "layers": Budget(share=0.3, dense_layers=1, by_layer={1: 0.6}),
}


@matrix(budget=BUDGETS, dtype=["float32", "bf16"])
def test_a_worker_selects_what_this_process_would(
    serve_twins: Serve, budget: str, dtype: str
) -> None:
    pool, twins, _ = serve_twins(3, dtype=dtype)
    twins.append([50, 8, 131])
    for _ in range(6):  # across the borders of pages
        for layer in range(2):
            wanted = BUDGETS[budget]
            twins.select([1, 2, 3], wanted, layer)
            twins.select([1, 2, 3], [wanted] * 3, layer, queries_in=dtype)
            twins.select([1, 0, 3], wanted, layer, "attention")
            if budget != "mass":
                twins.select([1, 2, 3], wanted, layer, "digest")
                twins.select([0, 1, 0], wanted, layer, "auto")
        twins.append([1, 3, 2])
    assert (pool.worker.connections, pool.worker.selects_here) == (1, 0)


@matrix(budget=[*BUDGETS, None], dtype=["float32", "bf16"])
def test_a_worker_attends_as_this_process_would(
    serve_twins: Serve, budget: str | None, dtype: str
) -> None:
    picked = BUDGETS[budget] if budget else None
    pool, twins, _ = serve_twins(4, dtype=dtype)
    twins.append([50, 8, 1031, 0])  # the last one is empty
    for step in range(6):  # across the borders of pages
        for layer in range(2):
            twins.attend([1, 2, 3, 0], layer, picked)
            twins.attend([0, 1, 0, 0], layer, picked, dtype, scale=0.1, softcap=2.5)
            if step % 2:
                twins.select([1, 2, 3, 0], Budget(pages=3), layer)
        twins.append([1, 3, 2, 0])
    assert (pool.worker.connections, pool.worker.attends_here) == (1, 0)
    assert pool.worker.attends == 24


@matrix(dtype=["float32", "bf16"], per=["query", "sequence"])
def test_weights_and_virtual_rows_go_along(serve_twins: Serve, dtype: str, per: str) -> None:
    """More rows than a part has tokens, too; what is wrong in them the worker says."""
    pool, twins, _ = serve_twins(3, dtype=dtype)
    twins.append([50, 8, 1031])
    budget = Budget(share=0.5, per=per)
    for count in (0, 1, 3, 700):
        twins.attend([1, 0, 3], count % 2, budget, virtual_rows=count)
        twins.attend([1, 2, 3], 1, budget, softcap=2.5, virtual_rows=count)
    assert (pool.worker.attends, pool.worker.attends_here) == (8, 0)
    sequence, q = twins.batches[0].sequences[2], twins.drawn(2 * HEADS, DIM)
    picked = sequence.select(0, q, 0.1)
    wrong = np.full((*picked.pages.shape, 1), np.nan, np.float32)
    with pytest.raises(BadArgumentError, match="log_weights have NaN or infinity"):
        sequence.attend(0, q, replace(picked, log_weights=wrong))
    assert pool.worker.attends == 8


@pytest.mark.parametrize(("value_dim", "values"), [(8, "own"), (24, "own"), (8, "key_prefix")])
def test_values_of_other_shapes(serve_twins: Serve, value_dim: int, values: str) -> None:
    pool, twins, _ = serve_twins(2, value_dim=value_dim, values=values)
    twins.append([43, 2])
    for _ in range(6):
        twins.attend([1, 2], 1)
        twins.attend([1, 2], 1, Budget(pages=3))
        twins.attend([1, 2], 1, Budget(pages=3), virtual_rows=5)
        twins.select([1, 2], Budget(pages=3), 1)
        twins.append([1, 1])
    assert pool.worker.attends_here == 0


@matrix(encodings=ENCODINGS, window=[None, 20])
def test_codes_are_scored_and_summed_as_here(
    serve_twins: Serve,
    encodings: tuple[str, str],
    window: int | None,
    rng: np.random.Generator,
) -> None:
    """Tails that grow, are cut and are filled again go along as pieces."""
    pool, twins, _ = serve_twins(
        3, encodings=encodings, value_dim=24, page_tokens=20, window=window
    )
    twins.append([50, 8, 131])
    for step in range(12):
        for layer in range(pool.layout.layers):
            for method in ("exact", "digest", "attention"):
                twins.select([1, 2, 3], Budget(pages=3), layer, method)
            twins.select([1, 0, 3], Budget(mass=0.7), layer)
            twins.attend([1, 2, 3], layer, Budget(pages=3) if rng.integers(2) else None)
            twins.attend([0, 1, 0], layer, softcap=2.5)
            twins.attend([1, 2, 1], layer, error=0.03)
            twins.attend([1, 0, 2], layer, Budget(pages=3), error=0.03, virtual_rows=2)
        if window is None and step % 5 == 4:
            twins.truncate(step % 3, len(twins.batches[0].sequences[step % 3]) - step % 7)
        twins.append([1, 2, 3])
    assert (pool.worker.connections, pool.worker.selects_here) == (1, 0)
    assert pool.worker.attends_here == 0


@pytest.mark.parametrize(
    ("k_encoding", "sketch"),
    [*((one, True) for one in ("int8", "int4", "fp8_e4m3")), *(("progressive", x) for x in (0, 1))],
)
def test_estimates_of_codes_are_the_same(serve_twins: Serve, k_encoding: str, sketch: bool) -> None:
    _, twins, _ = serve_twins(1, encodings=(k_encoding, "int8"), page_tokens=16, sketch=sketch)
    twins.append([8005])
    for recall in (Budget(pages=20), Budget(pages=30, per="sequence")):
        twins.select([2], recall, 1, "two_stage")


def test_no_token_of_a_tail_is_sent_twice(serve_twins: Serve) -> None:
    """A tail that is full has four times the keys, or values, that a slot has room for: it would
    take more requests than one."""
    pool, twins, _ = serve_twins(1, worker={"request_bytes": 4096}, page_tokens=64)
    twins.append([64 * PAGE + 20])
    twins.select([1], Budget(pages=3))
    twins.attend([1])
    before, calls = requests_of(pool), 0
    for step in range(80):
        twins.append([1])
        twins.select([1], Budget(pages=3))
        if step % 10 == 0:
            twins.attend([1], 0, Budget(pages=3))
        calls += 1 + (step % 10 == 0)
    assert (pool.worker.selects_here, pool.worker.attends_here) == (0, 0)
    assert requests_of(pool) - before == calls + 1, "the other one told of a page"


def requests_of(pool: CXLPool) -> int:
    return _core.pool_worker_state(pool._handle)[0]["requests"]


def test_estimates_are_the_same(serve_twins: Serve) -> None:
    _, twins, _ = serve_twins(1)
    twins.append([5001])
    picked = twins.select([2], Budget(pages=20), 1, "two_stage")
    assert picked[0].stages is not None
    assert picked[0].stages.lists > 0
    picked = twins.select([1], Budget(pages=20), 1, "auto")
    assert picked[0].stages is not None
    assert picked[0].stages.lists > 0


@pytest.mark.parametrize("window", [None, 20])
def test_a_step_that_is_half_done_and_windows(
    serve_twins: Serve, rng: np.random.Generator, window: int | None
) -> None:
    """Layer 0 is read when its page is not complete in the others yet; windows move on."""
    pool, twins, _ = serve_twins(2, window=window)
    twins.append([43, 9])
    for _ in range(15):
        for layer in range(pool.layout.layers):
            twins.append([3, 2], [layer])
            twins.select([1, 2], Budget(pages=3), layer)
            twins.attend([1, 2], layer, Budget(pages=3) if rng.integers(2) else None)
    assert (pool.worker.connections, pool.worker.selects_here) == (1, 0)
    assert pool.worker.attends_here == 0


def test_truncated_tokens_are_not_taken_for_those_that_follow(
    serve_twins: Serve, rng: np.random.Generator
) -> None:
    pool, twins, _ = serve_twins(1)
    twins.append([6])
    for _ in range(150):
        tokens = len(twins.batches[0].sequences[0])
        back = max(1, tokens - int(rng.integers(0, 7)))
        if rng.integers(3) == 0:
            twins.truncate(0, back)
        else:
            twins.append([int(rng.integers(1, 6))])
        if rng.integers(2):
            twins.select([1], Budget(pages=2), int(rng.integers(2)))
        if rng.integers(2):
            twins.attend([1], int(rng.integers(2)))
    assert (pool.worker.selects_here, pool.worker.attends_here) == (0, 0)


def test_forks_have_tables_of_their_own(
    path: Path, make_worker: MakeWorker, rng: np.random.Generator
) -> None:
    with make_pool(path) as pool:
        make_worker()
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        parent = pool.sequence()
        keys = rng.standard_normal((30, HEADS, DIM), np.float32)
        query = rng.standard_normal((HEADS, DIM), np.float32)
        for layer in range(2):
            parent.append(layer, keys, keys)
        parent.select(0, query, top_k=3)
        child = parent.fork()
        for layer in range(2):
            child.append(layer, keys[:5], keys[:5])
        twice = pool.batch([parent, child])
        queries = np.stack([query, query])
        picked = twice.select(0, queries, [0, 1, 2], Budget(pages=4), "exact")
        attended = twice.attend(0, queries, [0, 1, 2])
        assert (pool.worker.selects, pool.worker.attends) == (2, 1)
        pool.use_worker("none")
        same(twice.select(0, queries, [0, 1, 2], Budget(pages=4), "exact"), picked)
        np.testing.assert_array_equal(twice.attend(0, queries, [0, 1, 2])[0], attended[0])


def test_what_is_released_or_truncated_is_free_at_once(serve_twins: Serve) -> None:
    pool, twins, _ = serve_twins(2)
    twins.append([80, 40])
    twins.select([1, 1], Budget(pages=3), 0)
    assert pool.stats()["pages_held"] == 2 * 30
    twins.truncate(0, 40)
    assert pool.stats()["pages_held"] == 2 * 20
    twins.release()
    assert pool.stats()["pages_held"] == 0


def test_a_full_pool_gets_back_what_the_worker_kept_longer(
    path: Path, make_worker: MakeWorker, rng: np.random.Generator
) -> None:
    """Behind a window pages go in append(), of which the worker hears at the next select."""
    with make_pool(path, window=8, capacity="4MiB") as pool:
        make_worker()
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        sequence = pool.sequence()
        query = rng.standard_normal((HEADS, DIM), np.float32)

        def step(count: int) -> None:
            keys = rng.standard_normal((count, HEADS, DIM), np.float32)
            for layer in range(pool.layout.layers):
                sequence.append(layer, keys, keys, rewind=0)

        step(400)
        sequence.select(0, query, top_k=2)
        sequence.select(2, query, top_k=2)
        rest = pool.pages.alloc(pool.stats()["pages_free"] - 10)
        step(8)  # takes 6 pages, and gives back 2
        assert pool.stats()["pages_free"] == 4
        step(8)
        assert pool.stats()["pages_free"] == 2
        with pytest.raises(PoolFullError):
            step(8)
        pool.pages.free(rest)


def test_large_requests_are_split_and_large_results_come_in_parts(serve_twins: Serve) -> None:
    pool, twins, _ = serve_twins(9, worker={"request_bytes": 4096, "response_bytes": 4096})
    twins.append([401, 5, 2011, 33, 64, 7, 90, 1, 3])
    for budget in (Budget(pages=7), Budget(share=0.9), Budget(mass=0.9)):
        twins.select([1] * 9, budget)
        twins.select([3, 0, 2, 4, 1, 0, 0, 1, 2], budget, 1)
        twins.append([1] * 9)
    for picked in (None, Budget(pages=7), Budget(pages=9, per="sequence")):
        twins.attend([1] * 9, 0, picked)
        twins.attend([3, 0, 2, 4, 1, 0, 0, 1, 2], 1, picked)
        for count in (0, 1, 2):
            twins.attend([1, 0, 2, 1, 1, 0, 0, 1, 2], 1, picked, virtual_rows=count)
    # A row of a query has 256 bytes: those of one sequence have no room in a slot.
    for first in (20, 100, 400):
        rows = [first, 1, 1, 1, 1, 1, 1, 1, 1]
        twins.select(rows, Budget(pages=3), first // 20 % 2)
        twins.attend(rows, first // 20 % 2)
        twins.attend(rows, 1, Budget(pages=3), virtual_rows=7)
    assert (pool.worker.selects_here, pool.worker.attends_here) == (0, 0)
    few = [1, 0, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(BadArgumentError, match="the worker takes 16777216: ask with fewer rows"):
        twins.attend(few, 0, Budget(pages=3), virtual_rows=64_000)
    pool.use_worker("if_there", deadline_s=WATCHDOG_S)
    twins.attend(few, 0, Budget(pages=3), virtual_rows=64_000)
    assert "ask with fewer rows" in pool.worker.why
    assert (pool.worker.selects_here, pool.worker.attends_here) == (0, 1)


def test_an_output_of_many_rows_comes_in_parts(serve_twins: Serve) -> None:
    pool, twins, _ = serve_twins(2, worker={"response_bytes": 4096}, value_dim=64)
    twins.append([200, 300])
    twins.attend([100, 257])
    twins.attend([100, 257], 1, Budget(pages=20))
    assert pool.worker.attends_here == 0


def test_who_has_no_worker_selects_alone_and_finds_one_that_comes(
    path: Path, make_worker: MakeWorker, rng: np.random.Generator
) -> None:
    with make_pool(path) as pool, Twins(path, pool, rng, 2) as twins:
        twins.append([30, 41])
        assert not pool.use_worker().connected
        twins.select([1, 1], Budget(pages=3))
        assert "start one with `cxlkv ndp-worker /" in pool.worker.why
        with pytest.raises(WorkerError, match="this pool has no worker"):
            pool.use_worker("only")
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        for _ in range(2):
            worker, before = make_worker(), pool.worker.selects

            def comes(before: int = before) -> bool:
                twins.select([1, 1], Budget(pages=3))
                return pool.worker.selects > before

            until(comes)
            assert pool.worker.pid == worker.pid
            worker.kill()
            twins.append([1, 2])
            twins.select([1, 1], Budget(pages=3))
        assert not pool.worker.connected


def test_a_worker_that_ends_takes_its_file_along(
    path: Path, make_worker: MakeWorker, rng: np.random.Generator
) -> None:
    with make_pool(path) as pool, Twins(path, pool, rng, 1) as twins:
        identity = pool.describe()["identity"]
        worker = make_worker()
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([30])
        twins.select([1], Budget(pages=3))
        with pytest.raises(BusyError, match=f"has a worker already: process {worker.pid}"):
            serve(pool._handle, print)
        said = worker.stop()
        assert "1 of 4 slots taken" in said
        assert " 0 of them refused: ends" in said
        with pytest.raises(WorkerError):
            twins.select([1], Budget(pages=3))
        pool.use_worker("if_there")
        twins.select([1], Budget(pages=3))
        assert [file.suffix for file in host_states(identity, "")] == [".host"]
        killed = make_worker()
        killed.kill()
        files = host_states(identity, "")
        assert [file.suffix for file in files] == [".host", ".worker"]
        assert files[1].stat().st_mode & 0o777 == 0o600
    assert host_states(identity, "") == []  # the last one to close the pool takes all


def test_a_stopped_worker_costs_one_deadline(serve_twins: Serve) -> None:
    pool, twins, worker = serve_twins(1)
    twins.append([30])
    twins.select([1], Budget(pages=3))
    pool.use_worker("only", deadline_s=0.05)
    stop(worker.popen)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="lives and did not answer in time"):
        twins.select([1], Budget(pages=3))
    with pytest.raises(WorkerError, match="is left alone for"):
        twins.select([1], Budget(pages=3))
    pool.use_worker("if_there", deadline_s=0.05)
    twins.attend([1])
    assert pool.worker.attends_here == 1
    twins.select([1], Budget(pages=3))
    assert time.monotonic() - began < WATCHDOG_S
    worker.popen.send_signal(signal.SIGCONT)
    pool.use_worker("only", deadline_s=WATCHDOG_S)
    twins.select([1], Budget(pages=3))


def test_a_worker_that_is_killed_in_an_attend_costs_no_answer(
    serve_twins: Serve, make_worker: MakeWorker
) -> None:
    pool, twins, worker = serve_twins(2, use="if_there")
    twins.append([30, 7])
    twins.attend([1, 2])
    (slots,) = host_states(pool.describe()["identity"], ".worker")

    def requests() -> int:
        with slots.open("rb") as file:
            file.seek(8192)  # the sequence number in the request line of the only client's slot
            return int.from_bytes(file.read(8), "little")

    for budget in (None, Budget(pages=3)):
        sent = requests()
        stop(worker.popen)
        attending = threading.Thread(target=twins.attend, args=([1, 2], 1, budget))
        attending.start()
        while requests() == sent:
            assert attending.is_alive()
        worker.kill()
        attending.join()
        worker = make_worker()
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
    assert "is dead: start it anew" in pool.worker.why  # it was looked for once more
    assert (pool.worker.attends, pool.worker.attends_here) == (1, 2)


CLIENT = """
import sys
import numpy as np
from cxlkv import CXLPool
with CXLPool.open(sys.argv[1], threads=1) as pool:
    pool.use_worker("only", deadline_s=60)
    sequence = pool.sequence()
    keys = np.ones((400, 2, 16), np.float32)
    for layer in range(2):
        sequence.append(layer, keys, keys)
    query = np.ones((2, 16), np.float32)
    sequence.select(0, query, top_k=3)
    print("selected", flush=True)
    while True:
        sequence.select(0, query, top_k=3)
"""


def test_a_killed_client_leaves_neither_pages_nor_its_slot(
    path: Path, make_worker: MakeWorker
) -> None:
    with make_pool(path) as pool:
        make_worker(slots=1)
        for _ in range(3):
            with Child("-c", CLIENT, path) as client:
                assert client.hear() == "selected"
                with pytest.raises(WorkerError, match="all 1 slots of the worker"):
                    pool.use_worker("only")
                assert pool.stats()["pages_held"] == 100
            until(lambda: pool.stats()["pages_held"] == 0)


def test_a_forked_child_has_a_slot_of_its_own(serve_twins: Serve) -> None:
    pool, twins, _ = serve_twins(1)
    twins.append([30])
    twins.select([1], Budget(pages=3))
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            for _ in range(50):
                twins.select([1], Budget(pages=3))
            code = 0 if pool.worker.connections == 2 else 2
        os._exit(code)
    for _ in range(50):
        twins.select([1], Budget(pages=3))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.worker.connections == 1


@pytest.mark.parametrize("kills", [5, nightly(100)])
def test_answers_are_right_while_workers_are_killed(
    path: Path, make_worker: MakeWorker, rng: np.random.Generator, kills: int
) -> None:
    """Each select and attend is right, whoever is killed under it, and by the worker in between."""
    with make_pool(path, window=20) as pool, Twins(path, pool, rng, 3) as twins:
        twins.append([400, 41, 7])
        pool.use_worker("if_there", deadline_s=WATCHDOG_S)
        for _ in range(kills):
            worker, before = make_worker(), pool.worker
            while pool.worker.selects == before.selects or pool.worker.attends == before.attends:
                twins.select([1, 1, 1], Budget(pages=6))
                twins.attend([1, 1, 1])
            left = int(rng.integers(1, 30))
            killer = threading.Timer(float(rng.random()) * 0.01, worker.popen.kill)
            killer.start()
            while pool.worker.connected or left > 0:
                left -= 1
                if rng.integers(4) == 0:
                    twins.append([1, 1, 1])
                layer, picked = int(rng.integers(3)), Budget(pages=6) if rng.integers(2) else None
                twins.select([1, 1, 1], Budget(pages=6), layer)
                twins.attend([1, 1, 1], layer, picked)
            killer.join()
            worker.kill()
        assert pool.worker.connections == kills
        assert min(pool.worker.selects, pool.worker.attends) >= kills
        twins.release()
        assert pool.admin.check(deep=True)["clean"]
        assert pool.stats()["pages_held"] == 0


def test_threads_share_a_slot(serve_twins: Serve, rng: np.random.Generator) -> None:
    pool, twins, _ = serve_twins(1)
    twins.append([200])
    twins.select([1], Budget(pages=9))
    query = rng.standard_normal((2 * HEADS, DIM), np.float32)
    forks = [twins.batches[0].sequences[0].fork() for _ in range(3)]
    alone = forks[0].select(0, query, top_k=9, method="exact")
    wanted = bits(forks[0].attend(0, query, alone)[0])

    def work(sequence: Sequence) -> None:
        for _ in range(50):
            got = sequence.select(0, query, top_k=9, method="exact")
            np.testing.assert_array_equal(got.scores, alone.scores)
            assert bits(sequence.attend(0, query, got)[0]) == wanted

    run_all(partial(work, fork) for fork in forks)
    assert min(pool.worker.selects, pool.worker.attends) >= 151


def test_what_cannot_have_a_worker_says_so(path: Path) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB") as pool:
        with pytest.raises(BadArgumentError, match="no worker can open it"):
            pool.use_worker()
        with pytest.raises(BadArgumentError, match="a worker needs one in a file"):
            serve(pool._handle, print)
        with pytest.raises(BadArgumentError, match="use 'always': one of none, if_there, only"):
            pool.use_worker("always")
        with pytest.raises(BadArgumentError, match="deadline_s=0"):
            pool.use_worker(deadline_s=0)
    with make_pool(path) as pool, pytest.raises(BadArgumentError, match="0 slots"):
        serve(pool._handle, print, slots=0)


def test_errors_of_a_select_are_its_own(serve_twins: Serve, rng: np.random.Generator) -> None:
    pool, twins, _ = serve_twins(1)
    twins.append([30])
    with pytest.raises(BadArgumentError, match="layer 7: the pool has 2"):
        twins.select([1], Budget(pages=3), 7)
    with pytest.raises(BadArgumentError, match="fewer than its 31 query rows"):
        twins.select([31], Budget(pages=3))
    with pytest.raises(BadArgumentError, match="fewer than its 31 query rows"):
        twins.attend([31])
    with pytest.raises(BadArgumentError, match="softcap=-1 must be positive"):
        twins.attend([1], softcap=-1)
    sequence, query = twins.batches[0].sequences[0], rng.standard_normal((HEADS, DIM))
    picked = sequence.select(0, query.astype(np.float32), top_k=3)
    twice = np.stack([query, query]).astype(np.float32)
    with pytest.raises(BadArgumentError, match="1 lists of pages, 2 wanted"):
        sequence.attend(0, twice, replace(picked, pages=picked.pages[None]))
    picked.pages[:] = 8
    for use, text in (
        ("only", "page 8 of sequence 0, which has 8"),
        ("if_there", "page 8, the"),
    ):
        pool.use_worker(use, deadline_s=WATCHDOG_S)
        with pytest.raises(BadArgumentError, match=text):
            sequence.attend(0, query.astype(np.float32), picked)
    twins.batches[0].sequences[0].release()
    with pytest.raises(ReleasedError):
        twins.select([1], Budget(pages=3))


def test_the_command_serves_until_it_is_told_to_end(path: Path, rng: np.random.Generator) -> None:
    with make_pool(path) as pool, Twins(path, pool, rng, 1) as twins:
        command = ["-m", "cxlkv.ops.cli", "ndp-worker", path, "--threads", 1]
        worker = Child(*command)
        assert worker.hear() == f"worker {worker.pid}: serves up to 8 processes"
        pool.use_worker("only", deadline_s=WATCHDOG_S)
        twins.append([30])
        twins.select([1], Budget(pages=3))
        with CXLPool.open(path, worker=True) as other:
            assert other.worker.connected
        assert worker.end(signal.SIGINT).endswith("of them refused: ends\n")


def test_the_cpus_near_a_node() -> None:
    machine = probe()
    cpu = machine.cpu.cores_allowed[0]
    nodes = (
        NumaNode(0, (cpu + 1000,), None, None, (10, 20, 14)),
        NumaNode(1, (cpu,), None, None, (20, 10, 24)),
        NumaNode(2, (), None, None, (14, 24, 10)),
    )
    odd = replace(machine, nodes=nodes)
    assert cpus_near(odd, 1) == (cpu,)
    assert cpus_near(odd, 2) == (cpu,)  # node 0 is nearer, but its CPU is not allowed
    with pytest.raises(BadArgumentError, match="no memory node 7 here: 0, 1, 2"):
        cpus_near(odd, 7)
