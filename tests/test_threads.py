"""Threads of one process on one pool: every read is checked against plain lists, counts are exact.

A token's numbers follow from its id, so that a list of ids says what a sequence holds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Batch, Budget, CXLPool, KVLayout, LayerGroup, PoolFullError, Sequence
from cxlkv.arrays import Floats
from cxlkv.errors import BadArgumentError, ClosedError

from .support import reference
from .support.lengths import matrix, nightly
from .support.texts import DIM, HEADS, SMALL, append, grown, numbers, verify
from .support.threads import run_all
from .support.walks import FAMILIES, TOKENS_MAX, WEIGHTS, TextWalk, keys_of

LAYERS, PAGE_TOKENS = SMALL.layers, SMALL.page_tokens
WINDOW = 14
WITH_WINDOW = KVLayout.of(
    [
        LayerGroup(layers=1, kv_heads=HEADS, head_dim=DIM, dtype="float32", window=window)
        for window in (None, WINDOW)
    ],
    page_tokens=PAGE_TOKENS,
)
USABLE_PAGES = 120  # full now and then
THREADS = 6


def padded(ids: list[int], layer: int, kind: int) -> Floats:
    """What fetch() gives: [HEADS, pages, PAGE_TOKENS, DIM], zero behind the last token."""
    pages = -(-len(ids) // PAGE_TOKENS)
    rows = np.zeros((pages * PAGE_TOKENS, HEADS, DIM), np.float32)
    rows[: len(ids)] = numbers(ids, layer, kind)
    return rows.transpose(1, 0, 2).reshape(HEADS, pages, PAGE_TOKENS, DIM)


def queries_of(random: Random) -> Floats:
    seed = random.getrandbits(32)
    return np.random.default_rng(seed).integers(-2, 3, (2 * HEADS, DIM)).astype(np.float32)


def check_scores(sequence: Sequence, ids: list[int], random: Random, layer: int) -> None:
    """select and attend over its choice, of the next token, against the reference."""
    sequence, ids = sequence.fork(), [*ids, 3]
    append(sequence, ids[-1:])
    q, top, window = queries_of(random), 1 + random.randrange(4), sequence._layout.windows[layer]
    keys, values = numbers(ids, layer, 0), numbers(ids, layer, 1)
    starts = np.array([0, 1], np.int32)
    got = sequence.select(layer, q, top_k=top, scale=1)
    budgets = [Budget(pages=top)]
    want = reference.select(
        [keys], q[None], starts, budgets, page_tokens=PAGE_TOKENS, scale=1, window=window
    )
    np.testing.assert_array_equal(got.pages, want.pages[0])
    np.testing.assert_array_equal(got.scores, want.scores[0])
    out, _ = sequence.attend(layer, q, got, scale=0.1)
    expected, _ = reference.attend(
        [keys],
        [values],
        q[None],
        starts,
        page_tokens=PAGE_TOKENS,
        picked=want,
        scale=0.1,
        window=window,
    )
    np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-4)
    sequence.release()


@pytest.fixture
def path(shm_path: Path) -> str:
    return str(shm_path)


@pytest.fixture(autouse=True)
def _quick_switches() -> Iterator[None]:
    """Python's threads take turns some hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


# Beside what any walk over texts does.
OWN_WEIGHTS = {"fork_common": 4, "score": 10, "hand_over": 6, "drop": 3, "stats": 3, "audit": 2}
OWN_WEIGHTS |= {"set_threads": 1}


class Walker(TextWalk):
    """One thread, on sequences of its own; common: forked by all threads, written by none."""

    LIVE_MAX = 6
    LEASES_S = (100, 100, 100, 1e-9)

    def __init__(
        self, pool: CXLPool, random: Random, common: list[tuple[Sequence, list[int]]]
    ) -> None:
        super().__init__(pool, random, **OWN_WEIGHTS)
        self.common = common

    def walk(self, operations: int) -> None:
        for _ in range(operations):
            self.step()
        self.finish()

    def check(self, sequence: Sequence, ids: list[int]) -> None:
        """Check what the next token sees in a layer with a window."""
        if self.pool.layout != WITH_WINDOW:
            verify(sequence, ids)
            return
        assert len(sequence) == len(ids)
        for layer in range(LAYERS):
            with contextlib.suppress(PoolFullError):  # to look into a window takes a page
                check_scores(sequence, ids, self.random, layer)

    def fork_common(self) -> None:
        sequence, ids = self.random.choice(self.common)
        self.live.append((sequence.fork(), list(ids)))

    def score(self) -> None:
        sequence, ids = self.random.choice([*self.live, *self.common])
        check_scores(sequence, ids, self.random, self.random.randrange(LAYERS))

    def truncate(self) -> None:
        try:
            super().truncate()
        except BadArgumentError:
            self.seen["behind the window"] += 1
            for sequence, ids in self.live:
                self.check(sequence, ids)

    def hand_over(self) -> None:
        sequence, ids = self.pick()
        self.live.append((self.pool.adopt(sequence.handle), list(ids)))

    def drop(self) -> None:
        """Without release(): the collector does it, in whichever thread it runs."""
        if self.live:
            self.live.pop(self.random.randrange(len(self.live)))

    def stats(self) -> None:
        assert_adds_up(self.pool)

    def audit(self) -> None:
        report = self.pool.admin.check(deep=self.random.random() < 0.5)
        assert report["clean"], report["problems"]

    def set_threads(self) -> None:
        self.pool.set_threads(self.random.randrange(1, 4))


def assert_adds_up(pool: CXLPool) -> dict[str, int]:
    stats = pool.stats()
    parts = ("free", "held", "published_only", "quarantined", "retired")
    assert sum(stats[f"pages_{part}"] for part in parts) == stats["pages_total"], stats
    return stats


def walkers(pool: CXLPool, seed: int, threads: int = THREADS) -> list[Walker]:
    """With a whole number of pages, and one with a tail that all forks share at first."""
    texts = [[1 << 50 | i for i in range(tokens)] for tokens in (8, 10)]
    common = [(grown(pool, ids), ids) for ids in texts]
    return [Walker(pool, Random(f"{seed}-{i}"), common) for i in range(threads)]


@pytest.mark.parametrize("operations", [1600, nightly(9600)])
@pytest.mark.parametrize(
    ("layout", "checksum"),
    [(SMALL, True), (SMALL, False), (WITH_WINDOW, True)],
    ids=["checksums", "none", "a window"],
)
def test_random_work_agrees_with_plain_lists(
    seed: int, path: str, layout: KVLayout, checksum: bool, operations: int
) -> None:
    with CXLPool.create(path, layout=layout, capacity="3MiB", checksum=checksum) as pool:
        ballast = pool.pages.alloc(pool.stats()["pages_total"] - USABLE_PAGES)
        crew = walkers(pool, seed)
        run_all([partial(one.walk, operations // THREADS) for one in crew])
        seen = sum((one.seen for one in crew), Counter[str]())
        print(dict(seen))
        for what in (
            *WEIGHTS,
            *OWN_WEIGHTS,
            "full",
            "hit",
            "published",
            "forgotten",
            "lease ended",
        ):
            assert seen[what], what
        assert bool(seen["behind the window"]) == (layout is WITH_WINDOW)
        for sequence, ids in crew[0].common:
            crew[0].check(sequence, ids)
            sequence.release()
        for family in range(1, FAMILIES + 1):
            pool.forget(keys_of(family))
        stats = assert_adds_up(pool)
        assert stats["sequences"] == sum(1 for _ in crew[0].common)
        assert (stats["pages_free"], stats["pages_held"]) == (USABLE_PAGES, len(ballast))
        assert pool.admin.check(deep=True)["clean"]
    CXLPool.remove(path)


def test_closing_under_threads_that_work(seed: int, path: str) -> None:
    """Each of them gets ClosedError from whatever it does then; nothing of the pool is lost."""
    pool = CXLPool.create(path, layout=SMALL, capacity="3MiB")
    ballast = pool.pages.alloc(pool.stats()["pages_total"] - USABLE_PAGES)
    del ballast  # ids only: the close gives them back
    crew = walkers(pool, seed, THREADS - 1)
    ended: Counter[str] = Counter()
    under_way = threading.Barrier(THREADS)

    def work(walker: Walker) -> None:
        walker.walk(100)
        under_way.wait()
        with pytest.raises(ClosedError, match="the pool is closed: open it again"):
            walker.walk(1_000_000)
        ended["closed"] += 1

    def close() -> None:
        under_way.wait()
        pool.close()

    run_all([*(partial(work, one) for one in crew), close])
    assert ended["closed"] == len(crew)
    pool.close()
    with CXLPool.open(path) as again:
        assert again.admin.check(deep=True)["clean"]
        stats = assert_adds_up(again)
        assert stats["pages_free"] + stats["pages_published_only"] == stats["pages_total"]
    CXLPool.remove(path)


# ---- one sequence: many readers, one writer ----


State = list[list[int]]  # the ids of each sequence of a batch, in one layer


class Writer:
    """Changes the sequences of a batch, and writes down each state of each layer.

    A state is noted before it is made, and counted as done after it: a read that begins when state
    i is the last one done, and ends when state j is the last one noted, saw one of i to j.
    """

    def __init__(self, batch: Batch, random: Random) -> None:
        self.batch = batch
        self.random = random
        self.states: list[list[State]] = [[[[] for _ in batch.sequences]] for _ in range(LAYERS)]
        self.done = [0] * LAYERS
        self.readers = threading.Semaphore(0)  # released by each reader that has seen enough
        self.ended = threading.Event()

    def change(self, layers: range, state: State, operation: Callable[[], None]) -> None:
        for layer in layers:
            self.states[layer].append(state)
        operation()
        for layer in layers:
            self.done[layer] = len(self.states[layer]) - 1

    def truncate(self, index: int, tokens: int) -> None:
        state = list(self.states[0][-1])
        state[index] = state[index][:tokens]
        cut = partial(self.batch.sequences[index].truncate, tokens)
        self.change(range(LAYERS), state, cut)

    def append(self, more: State) -> None:
        before = self.states[0][-1]
        state = [old + new for old, new in zip(before, more, strict=True)]
        starts = np.cumsum([0, *map(len, more)]).astype(np.int32)
        flat = [token for new in more for token in new]
        for layer in range(LAYERS):
            k, v = numbers(flat, layer, 0), numbers(flat, layer, 1)
            add = partial(self.batch.append, layer, k, v, starts)
            self.change(range(layer, layer + 1), state, add)

    def run(self, readers: int) -> None:
        """Until that many readers have seen enough."""
        try:
            while readers:
                readers -= self.readers.acquire(blocking=False)
                self.step()
        finally:
            self.ended.set()

    def step(self) -> None:
        for index, ids in enumerate(self.states[0][-1]):
            if len(ids) > TOKENS_MAX or self.random.random() < 0.1:
                self.truncate(index, self.random.randrange(len(ids) + 1))
        lengths = [self.random.randrange(8) for _ in range(len(self.batch))]
        self.append([[self.random.getrandbits(60) for _ in range(n)] for n in lengths])


@dataclass
class Reader:
    """Reads the writer's sequences all the time, through `batch`."""

    writer: Writer
    batch: Batch
    random: Random
    seen: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        try:
            while self.seen["reads"] < 200 or self.seen["changed meanwhile"] < 20:
                self.read()
                if self.writer.ended.is_set():
                    break  # it failed
        finally:
            self.writer.readers.release()

    def read(self) -> None:
        layer = self.random.randrange(LAYERS)
        read = self.random.choice((self.fetch, self.select, self.attend))
        first = self.writer.done[layer]
        fits = read(layer)
        possible = self.writer.states[layer][first:]
        self.seen["reads"] += 1
        self.seen["changed meanwhile"] += len(possible) > 1
        assert any(map(fits, possible)), (read.__name__, layer, possible)

    def fetch(self, layer: int) -> Callable[[State], bool]:
        got = self.batch.fetch(layer)

        def fits(state: State) -> bool:
            pages = max(-(-len(ids) // PAGE_TOKENS) for ids in state)
            for kind, array in enumerate(got):
                expected = np.zeros((len(state), HEADS, pages, PAGE_TOKENS, DIM), np.float32)
                for index, ids in enumerate(state):
                    rows = padded(ids, layer, kind)
                    expected[index, :, : rows.shape[1]] = rows
                if not np.array_equal(np.asarray(array), expected):
                    return False
            return True

        return fits

    def asked(self) -> tuple[Floats, npt.NDArray[np.int32]]:
        count = len(self.batch)
        q = np.stack([queries_of(self.random) for _ in range(count)])
        return q, np.arange(count + 1, dtype=np.int32)

    def select(self, layer: int) -> Callable[[State], bool]:
        q, starts = self.asked()
        budget = Budget(pages=3, sinks=1)
        try:
            got = self.batch.select(layer, q, starts, budget, scale=1)
        except BadArgumentError as error:
            return self.has_an_empty_one(error)

        def fits(state: State) -> bool:
            if not all(state):
                return False
            keys = [numbers(ids, layer, 0) for ids in state]
            want = reference.select(keys, q, starts, [budget], page_tokens=PAGE_TOKENS, scale=1)
            return np.array_equal(got.pages, want.pages) and np.array_equal(got.scores, want.scores)

        return fits

    def attend(self, layer: int) -> Callable[[State], bool]:
        q, starts = self.asked()
        try:
            out, _ = self.batch.attend(layer, q, starts, scale=0.1)
        except BadArgumentError as error:
            return self.has_an_empty_one(error)

        def fits(state: State) -> bool:
            if not all(state):
                return False
            keys, values = ([numbers(ids, layer, kind) for ids in state] for kind in (0, 1))
            want, _ = reference.attend(keys, values, q, starts, page_tokens=PAGE_TOKENS, scale=0.1)
            return np.allclose(np.asarray(out), want, rtol=1e-4, atol=1e-4)

        return fits

    def has_an_empty_one(self, error: BadArgumentError) -> Callable[[State], bool]:
        assert "append their keys first" in str(error)
        return lambda state: not all(state)


@matrix(sharing=["sequences", "batch"], threads=[1, 3])
def test_readers_see_what_was_before_or_after_a_write(
    pool: CXLPool, seed: int, sharing: str, threads: int
) -> None:
    """Through batches of their own over the writer's sequences, or through the writer's batch."""
    pool.set_threads(threads)
    sequences = [pool.sequence() for _ in range(2)]
    writer = Writer(pool.batch(sequences), Random(f"{seed}-writer"))
    readers = [
        Reader(
            writer,
            writer.batch if sharing == "batch" else pool.batch(sequences),
            Random(f"{seed}-{i}"),
        )
        for i in range(3)
    ]
    run_all([partial(writer.run, len(readers)), *(reader.run for reader in readers)])
    print([dict(reader.seen) for reader in readers], len(writer.states[0]))
    for sequence, ids in zip(sequences, writer.states[-1][-1], strict=True):
        verify(sequence, ids)


def test_one_batch_of_two_writers(pool: CXLPool, seed: int) -> None:
    """Appends to layer 0 through one batch from several threads: each call whole, in some order."""
    batch = pool.batch([pool.sequence() for _ in range(2)])
    counts = (3, 2)
    starts = np.array([0, 3, 5], np.int32)

    def work(thread: int) -> None:
        for call in range(60):
            ids = [thread << 40 | call << 20 | i for i in range(5)]
            batch.append(0, numbers(ids, 0, 0), numbers(ids, 0, 1), starts)

    run_all([partial(work, thread) for thread in range(1, 4)])
    keys, _ = batch.fetch(0)
    order: list[list[int]] = []
    for index, count in enumerate(counts):
        rows = np.asarray(keys)[index].transpose(1, 2, 0, 3).reshape(-1, HEADS, DIM)
        known = {}
        for thread in range(1, 4):
            for call in range(60):
                ids = [thread << 40 | call << 20 | i for i in range(5)]
                part = numbers(ids, 0, 0)[starts[index] : starts[index + 1]]
                known[part.tobytes()] = thread << 20 | call
        found = [rows[i : i + count].tobytes() for i in range(0, 180 * count, count)]
        order.append([known[part] for part in found])
    assert order[0] == order[1]
    assert len(set(order[0])) == 180
    for thread in range(1, 4):
        mine = [call for call in order[0] if call >> 20 == thread]
        assert mine == sorted(mine)


def test_the_threads_of_a_pool_change_under_work(pool: CXLPool, seed: int) -> None:
    """Scans over enough pages to be shared out, while another thread replaces the threads."""
    ids = [Random(seed).getrandbits(60) for _ in range(3000)]
    sequence = pool.sequence()
    sequence.append(0, numbers(ids, 0, 0), numbers(ids, 0, 1))
    q = queries_of(Random(seed))
    expected = sequence.select(0, q, top_k=20, scale=1)
    out, _ = sequence.attend(0, q, scale=0.1)
    finished = threading.Event()

    def scan() -> None:
        try:
            for _ in range(150):
                again = sequence.select(0, q, top_k=20, scale=1)
                np.testing.assert_array_equal(again.pages, expected.pages)
                got, _ = sequence.attend(0, q, scale=0.1)
                np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
        finally:
            finished.set()

    def replace() -> None:
        count = 0
        while not finished.is_set():
            count += 1
            pool.set_threads(1 + count % 4)

    run_all([scan, scan, replace])


IN_A_PROCESS_WITH_TORCH = """
import os, numpy, torch
from cxlkv import Budget, CXLPool, KVLayout
torch.set_num_threads(2)
torch.ones(1 << 20).sum()
layout = KVLayout(layers=1, kv_heads=2, head_dim=64, dtype="float32", page_tokens=16)
with CXLPool.create("anonymous:", layout=layout, capacity="16MiB", threads=2) as pool:
    before = len(os.listdir("/proc/self/task"))
    text = pool.sequence()
    k = torch.randn(4096, 2, 64)
    text.append(0, k, k)
    picked = text.select(0, k[-1], Budget(share=0.1))
    text.attend(0, k[-1], picked)
    print(len(os.listdir("/proc/self/task")) - before)
    torch.set_num_threads(1)  # a smaller team than the pool was given threads
    again = text.select(0, k[-1], Budget(share=0.1))
    assert numpy.array_equal(again.pages, picked.pages)
    print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_step_runs_on_the_threads_of_torch() -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", IN_A_PROCESS_WITH_TORCH]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert made == ["0", "1"], "threads that the pool began beside those of torch, and without them"
