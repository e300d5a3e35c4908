"""Sequences and batches: append, select, fetch, attend, fork, truncate, handles, release."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Sequence
from cxlkv.errors import (
    BadArgumentError,
    OrderError,
    PoolFullError,
    ReleasedError,
    StaleError,
    UnevenError,
)

Floats = npt.NDArray[np.float32]
PAGE, HEADS, DIM, LAYERS = 4, 2, 8, 2  # of the pool fixture


def rows(rng: np.random.Generator, count: int) -> Floats:
    return rng.standard_normal((count, HEADS, DIM)).astype(np.float32)


def extend(sequence: Sequence, k: Floats, v: Floats) -> None:
    for layer in range(LAYERS):
        sequence.append(layer, k + layer, v - layer)


def read(sequence: Sequence, layer: int = 0) -> tuple[Floats, Floats]:
    """[tokens, heads, dim] of k and v."""
    tokens = sequence.tokens(layer)
    k, v = (np.asarray(x).reshape(HEADS, -1, DIM) for x in sequence.fetch(layer))
    return k.transpose(1, 0, 2)[:tokens], v.transpose(1, 0, 2)[:tokens]


def assert_holds(sequence: Sequence, k: Floats, v: Floats) -> None:
    assert len(sequence) == len(k)
    for layer in range(LAYERS):
        got = read(sequence, layer)
        np.testing.assert_array_equal(got[0], k + layer)
        np.testing.assert_array_equal(got[1], v - layer)


# ---- append and fetch ----


def test_chunks_of_all_sizes_add_up(pool: CXLPool, rng: np.random.Generator) -> None:
    for size in range(1, 3 * PAGE):
        k, v = rows(rng, 4 * PAGE + 1), rows(rng, 4 * PAGE + 1)
        sequence = pool.sequence()
        for first in range(0, len(k), size):
            extend(sequence, k[first : first + size], v[first : first + size])
        assert_holds(sequence, k, v)
        assert len(sequence.pages) == 4
        assert sequence.page_count(0) == 5
        sequence.release()


def test_a_sequence_of_many_chunks_of_pages(pool: CXLPool, rng: np.random.Generator) -> None:
    """More than 256 pages: the page table has several parts, some shared after a fork."""
    k, v = rows(rng, 600 * PAGE + 3), rows(rng, 600 * PAGE + 3)
    sequence = pool.sequence()
    extend(sequence, k[:1025], v[:1025])
    child = sequence.fork()
    extend(sequence, k[1025:], v[1025:])
    assert_holds(sequence, k, v)
    assert_holds(child, k[:1025], v[:1025])
    other = sequence.fork()
    for tokens in (2399, 1026, 1024, 1023, 3):
        other.truncate(tokens)
        assert_holds(other, k[:tokens], v[:tokens])
    extend(other, k[3:700], v[3:700])
    assert_holds(other, k[:700], v[:700])
    assert_holds(sequence, k, v)


def test_unwritten_tokens_and_padding_are_zero(pool: CXLPool, rng: np.random.Generator) -> None:
    dirty = pool.sequence()  # whatever memory comes next has been written before
    extend(dirty, rows(rng, 9 * PAGE), rows(rng, 9 * PAGE))
    dirty.release()
    short, long = pool.sequence(), pool.sequence()
    extend(short, rows(rng, 5), rows(rng, 5))
    extend(long, rows(rng, 11), rows(rng, 11))
    k, v = (np.asarray(x) for x in pool.batch([short, long]).fetch(0))
    assert k.shape == v.shape == (2, HEADS, 3, PAGE, DIM)
    for array in (k, v):
        assert (array[0, :, 1, 1:] == 0).all()
        assert (array[0, :, 2] == 0).all()
        assert (array[1, :, 2, 3:] == 0).all()
        assert (array[1, :, :2] != 0).all()


def test_fetch_takes_picked_pages_in_their_order(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    k, v = rows(rng, 23), rows(rng, 23)
    extend(sequence, k, v)
    q = rows(rng, 1)[0]
    picked = sequence.select(0, q, top_k=3)
    assert picked.pages.shape == (HEADS, 3)
    got_k, got_v = sequence.fetch(0, picked)
    every_k, every_v = sequence.fetch(0)
    for head in range(HEADS):
        chosen = picked.pages[head]
        np.testing.assert_array_equal(got_k[head], every_k[head][chosen])
        np.testing.assert_array_equal(got_v[head], every_v[head][chosen])
    many = sequence.select(0, np.stack([q, q, -q]), Budget(share=0.5))
    got_k, _ = sequence.fetch(0, many)
    assert got_k.shape == (3, HEADS, 3, PAGE, DIM)
    np.testing.assert_array_equal(got_k[2, 1], every_k[1][many.pages[2, 1]])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_fetch_into_given_arrays(pool: CXLPool, rng: np.random.Generator, kind: str) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 10), rows(rng, 10))
    want_k, want_v = sequence.fetch(0)
    shape = want_k.shape
    if kind == "torch":
        torch = pytest.importorskip("torch")
        out = torch.full(shape, 7.0), torch.full(shape, 7.0)
    else:
        out = np.full(shape, 7.0, np.float32), np.full(shape, 7.0, np.float32)
    got = sequence.fetch(0, out=out)
    for array, given, want in zip(got, out, (want_k, want_v), strict=True):
        assert type(array) is type(given)
        np.testing.assert_array_equal(np.asarray(given), want)
    picked = sequence.select(1, np.ones((4, DIM), np.float32), top_k=3)
    k, v = sequence.fetch(1, picked, out=out)
    assert k.shape == v.shape == shape


def test_out_must_fit(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 10), rows(rng, 10))
    shape = (HEADS, 3, PAGE, DIM)
    good = np.zeros(shape, np.float32)
    frozen = good.copy()
    frozen.flags.writeable = False
    wrong = [
        np.zeros((HEADS, 2, PAGE, DIM), np.float32),
        np.zeros((HEADS, 4, PAGE, DIM), np.float32),
        np.zeros(shape, ml_dtypes.bfloat16),
        np.zeros((HEADS, 3, PAGE, 2 * DIM), np.float32)[..., ::2],
        np.zeros((3, HEADS, PAGE, DIM), np.float32).transpose(1, 0, 2, 3),
        frozen,
    ]
    for array in wrong:
        for out in ((array, good), (good, array)):
            with pytest.raises(BadArgumentError, match="out"):
                sequence.fetch(0, out=out)
        assert not np.asarray(array).any()


def test_layers_come_in_order(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    k = rows(rng, 6)
    with pytest.raises(OrderError, match="layer 1"):
        sequence.append(1, k, k)
    sequence.append(0, k, k)
    sequence.append(1, k[:2], k[:2])
    assert [sequence.tokens(0), sequence.tokens(1), len(sequence)] == [6, 2, 2]
    with pytest.raises(OrderError):
        sequence.append(1, k[:5], k[:5])
    sequence.append(0, k, k)
    sequence.append(1, k[2:], k[2:])
    assert len(sequence) == 6
    sequence.append(1, k, k)
    np.testing.assert_array_equal(read(sequence, 1)[0], np.concatenate([k, k]))
    for layer in (-1, 2, 99):
        with pytest.raises(BadArgumentError, match="layer"):
            sequence.append(layer, k, k)


def test_a_batch_grows_whole_or_not_at_all(
    make_pool: Callable[[], CXLPool], rng: np.random.Generator
) -> None:
    pool = make_pool()
    total = pool.stats()["pages_total"]
    ballast = pool.pages.alloc(total - 3)
    first, second = pool.sequence(), pool.sequence()
    k = rows(rng, 11)
    first.append(0, k[:2], k[:2])
    batch = pool.batch([first, second])
    before = pool.stats()
    with pytest.raises(PoolFullError, match=r"4 pages wanted, 3 of"):
        batch.append(
            0, np.concatenate([k[2:10], k[:8]]), np.zeros((16, 2, 8), np.float32), [0, 8, 16]
        )
    assert pool.stats() == before
    assert (first.tokens(0), second.tokens(0)) == (2, 0)
    batch.append(0, np.concatenate([k[2:10], k[:4]]), np.zeros((12, 2, 8), np.float32), [0, 8, 12])
    np.testing.assert_array_equal(read(first)[0], k[:10])
    np.testing.assert_array_equal(read(second)[0], k[:4])
    assert pool.stats()["pages_free"] == 0
    second.append(0, k[:3], k[:3])  # tails need no page
    with pytest.raises(PoolFullError):
        second.append(0, k[:1], k[:1])
    np.testing.assert_array_equal(read(second)[0], np.concatenate([k[:4], k[:3]]))
    pool.pages.free(ballast)
    second.append(0, k[:1], k[:1])


# ---- batches ----


def test_starts_and_members_are_checked(pool: CXLPool, rng: np.random.Generator) -> None:
    a, b = pool.sequence(), pool.sequence()
    batch = pool.batch([a, b])
    assert len(batch) == 2
    k = rows(rng, 4)
    for starts in ([0, 4], [0, 2, 3], [1, 2, 4], [0, 5, 4], [0, -1, 4], [0, 2, 3, 4]):
        with pytest.raises(BadArgumentError):
            batch.append(0, k, k, starts)
    assert a.tokens(0) == b.tokens(0) == 0
    with pytest.raises(BadArgumentError, match="twice"):
        pool.batch([a, b, a])
    with pytest.raises(BadArgumentError, match="at least one"):
        pool.batch([])
    with pytest.raises(BadArgumentError, match="append their keys first"):
        batch.attend(0, np.ones((1, 2, DIM), np.float32), [0, 1, 1])
    with pytest.raises(BadArgumentError, match="3 budgets"):
        batch.select(0, np.ones((0, 2, DIM), np.float32), [0, 0, 0], [Budget(pages=1)] * 3)


def test_a_method_is_a_batch_of_one_without_its_axis(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 21), rows(rng, 21))
    batch = pool.batch([sequence.fork()])
    q = rng.standard_normal((3, 4, DIM)).astype(np.float32)
    for per in ("query", "sequence"):
        budget = Budget(pages=3, per=per)
        many, all_of = batch.select(0, q, [0, 3], budget), sequence.select(0, q, budget)
        np.testing.assert_array_equal(all_of.pages, many.pages if per == "query" else many.pages[0])
        for ours, theirs in zip(
            sequence.attend(0, q, all_of), batch.attend(0, q, [0, 3], many), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
        one = sequence.select(0, q[0], budget)
        assert one.pages.shape == (HEADS, 3)
        assert one.counts.shape == (HEADS,)
        out, lse = sequence.attend(0, q[0], one)
        assert (out.shape, lse.shape) == ((4, DIM), (4,))
    with pytest.raises(BadArgumentError, match="one of them"):
        sequence.select(0, q)
    with pytest.raises(BadArgumentError, match="one of them"):
        sequence.select(0, q, Budget(pages=1), top_k=1)


def test_wrong_queries_are_refused(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 5), rows(rng, 5))
    for shape in [(), (DIM,), (3, DIM), (2, DIM + 1), (6, 2, DIM), (1, 0, DIM), (1, 1, 2, DIM)]:
        with pytest.raises(BadArgumentError):
            sequence.attend(0, np.ones(shape, np.float32))
        with pytest.raises(BadArgumentError):
            sequence.select(0, np.ones(shape, np.float32), top_k=1)
    q = np.ones((2, DIM), np.float32)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadArgumentError, match="scale"):
            sequence.attend(0, q, scale=scale)
        with pytest.raises(BadArgumentError, match="scale"):
            sequence.select(0, q, top_k=1, scale=scale)
    with pytest.raises(BadArgumentError, match="softcap"):
        sequence.attend(0, q, softcap=-1.0)
    with pytest.raises(BadArgumentError, match="method"):
        sequence.select(0, q, top_k=1, method="best")


def test_a_selection_of_another_shape_is_refused(pool: CXLPool, rng: np.random.Generator) -> None:
    long, short = pool.sequence(), pool.sequence()
    extend(long, rows(rng, 40), rows(rng, 40))
    extend(short, rows(rng, 5), rows(rng, 5))
    q = np.ones((2, 2, DIM), np.float32)
    picked = long.select(0, q, Budget(pages=9))
    with pytest.raises(BadArgumentError, match="the sequence has 2"):
        short.fetch(0, picked)
    with pytest.raises(BadArgumentError, match="the sequence has 2"):
        short.attend(0, q, picked)
    with pytest.raises(BadArgumentError, match="2 lists of pages, 1 wanted"):
        long.attend(0, q[:1], picked)
    with pytest.raises(BadArgumentError):
        pool.batch([long, short]).fetch(0, picked)


def test_zero_or_one_budget_errors() -> None:
    for fields in (
        {},
        {"pages": 1, "share": 0.5},
        {"pages": 0},
        {"share": 0.0},
        {"share": 1.5},
        {"mass": float("nan")},
        {"pages": 1, "sinks": -1},
        {"pages": 1, "recent": -1},
        {"pages": 1, "union": "head"},
        {"pages": 1, "per": "row"},
    ):
        with pytest.raises(BadArgumentError):
            Budget(**fields)


# ---- fork, truncate, release ----


def test_forks_go_their_own_ways(pool: CXLPool, rng: np.random.Generator) -> None:
    k, v = rows(rng, 30), rows(rng, 30)
    parent = pool.sequence()
    extend(parent, k[:6], v[:6])
    held = pool.stats()["pages_held"]
    children = [parent.fork() for _ in range(3)]
    grandchild = children[0].fork()
    assert pool.stats()["pages_held"] == held == 1
    extend(children[0], k[10:13], v[10:13])
    extend(parent, k[20:29], v[20:29])
    extend(children[1], k[6:7], v[6:7])
    children[1].truncate(5)
    assert_holds(parent, np.concatenate([k[:6], k[20:29]]), np.concatenate([v[:6], v[20:29]]))
    assert_holds(children[0], np.concatenate([k[:6], k[10:13]]), np.concatenate([v[:6], v[10:13]]))
    assert_holds(children[1], k[:5], v[:5])
    parent.release()
    assert_holds(children[2], k[:6], v[:6])
    assert_holds(grandchild, k[:6], v[:6])


def test_a_shared_tail_is_copied_by_who_writes_first(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    k, v = rows(rng, 12), rows(rng, 12)
    parent = pool.sequence()
    extend(parent, k[:2], v[:2])
    child, other = parent.fork(), parent.fork()
    extend(parent, k[5:6], v[5:6])
    extend(child, k[6:7], v[6:7])
    extend(other, k[7:8], v[7:8])
    for sequence, last in ((parent, 5), (child, 6), (other, 7)):
        own = [0, 1, last]
        assert_holds(sequence, k[own], v[own])


def test_fork_and_handle_need_even_layers(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    k = rows(rng, 5)
    sequence.append(0, k, k)
    for use in (sequence.fork, lambda: sequence.handle):
        with pytest.raises(UnevenError):
            use()
    sequence.truncate(0)
    assert len(sequence.fork()) == 0


def test_truncate_in_the_middle_of_a_step(pool: CXLPool, rng: np.random.Generator) -> None:
    """Layer 0 has completed pages that layer 1 has not: each rewinds from where its tokens lie."""
    k, v = rows(rng, 14), rows(rng, 14)
    for finished in range(15):
        for cut in range(15):
            sequence = pool.sequence()
            sequence.append(0, k, v)
            sequence.append(1, k[:finished] + 1, v[:finished] - 1)
            sequence.truncate(cut)
            assert sequence.tokens(0) == cut
            assert sequence.tokens(1) == min(cut, finished)
            sequence.append(1, k[min(cut, finished) : cut] + 1, v[min(cut, finished) : cut] - 1)
            extend(sequence, k[cut:], v[cut:])
            assert_holds(sequence, k, v)
            sequence.release()


def test_truncate_checks_its_number(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 6), rows(rng, 6))
    for tokens in (-1, 7):
        with pytest.raises(BadArgumentError, match="truncate"):
            sequence.truncate(tokens)
    assert len(sequence) == 6


def test_a_released_sequence_says_so(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    k = rows(rng, 6)
    extend(sequence, k, k)
    batch = pool.batch([pool.sequence(), sequence])
    sequence.release()
    sequence.release()
    q = np.ones((2, DIM), np.float32)
    for use in (
        lambda: sequence.append(0, k, k),
        lambda: sequence.select(0, q, top_k=1),
        lambda: sequence.fetch(0),
        lambda: sequence.attend(0, q),
        sequence.fork,
        lambda: sequence.truncate(0),
        lambda: sequence.handle,
        lambda: len(sequence),
        lambda: sequence.pages,
        lambda: pool.publish(sequence, [b"k"], 4),
        lambda: batch.fetch(0),
        lambda: batch.append(0, k, k, [0, 6, 6]),
    ):
        with pytest.raises(ReleasedError):
            use()


def test_a_dropped_sequence_gives_its_pages_back(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 9), rows(rng, 9))
    sequence.fetch(0)  # has made its batch
    assert pool.stats()["pages_held"] == 2
    del sequence
    assert pool.stats()["pages_held"] == 0
    assert pool.stats()["sequences"] == 0


# ---- handles ----


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 11, 12])
def test_adopt_has_the_tokens_of_the_handle(
    pool: CXLPool, rng: np.random.Generator, tokens: int
) -> None:
    k, v = rows(rng, 20), rows(rng, 20)
    sequence = pool.sequence()
    extend(sequence, k[:tokens], v[:tokens])
    handle = sequence.handle
    assert sequence.handle == handle
    adopted = pool.adopt(handle)
    assert_holds(adopted, k[:tokens], v[:tokens])
    extend(adopted, k[15:], v[15:])
    extend(sequence, k[tokens:15], v[tokens:15])
    assert_holds(
        adopted, np.concatenate([k[:tokens], k[15:]]), np.concatenate([v[:tokens], v[15:]])
    )
    assert_holds(sequence, k[:15], v[:15])


def test_a_handle_names_the_tail_of_now(pool: CXLPool, rng: np.random.Generator) -> None:
    """Truncated and grown to the same length again: the first handle's tail is not this one's."""
    k, v = rows(rng, 8), rows(rng, 8)
    sequence = pool.sequence()
    extend(sequence, k[:6], v[:6])
    before = sequence.handle
    sequence.truncate(5)
    extend(sequence, k[7:], v[7:])
    assert sequence.handle != before
    assert_holds(
        pool.adopt(sequence.handle), np.concatenate([k[:5], k[7:]]), np.concatenate([v[:5], v[7:]])
    )


def test_stale_and_spoilt_handles(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = pool.sequence()
    extend(sequence, rows(rng, 9), rows(rng, 9))
    handle = sequence.handle
    for position in range(0, len(handle), 7):
        spoilt = bytearray(handle)
        spoilt[position] ^= 1
        with pytest.raises(StaleError, match="no handle"):
            pool.adopt(bytes(spoilt))
    for wrong in (b"", handle[:-1], handle + b"\0", b"\0" * 200):
        with pytest.raises(StaleError):
            pool.adopt(wrong)
    sequence.release()
    with pytest.raises(StaleError, match="was freed"):
        pool.adopt(handle)
    other = pool.sequence()
    extend(other, rows(rng, 9), rows(rng, 9))  # the same pages, of another generation
    with pytest.raises(StaleError, match="was freed"):
        pool.adopt(handle)
    assert pool.stats()["stale_handles"] >= 2


# ---- threads ----


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_with_their_own_sequences(pool: CXLPool, seed: int) -> None:
    pool.set_threads(3)

    def work(index: int) -> None:
        own = np.random.default_rng((seed, index))
        for _ in range(8):
            k, v = rows(own, 40), rows(own, 40)
            sequence = pool.sequence()
            extend(sequence, k[:17], v[:17])
            child = sequence.fork()
            extend(sequence, k[17:], v[17:])
            q = own.standard_normal((4, DIM)).astype(np.float32)
            picked = sequence.select(0, q, Budget(share=1.0))
            out, _ = sequence.attend(0, q, picked)
            np.testing.assert_allclose(out, sequence.attend(0, q)[0], rtol=1e-5, atol=1e-6)
            assert_holds(sequence, k, v)
            assert_holds(child, k[:17], v[:17])
            pool.publish(sequence, [bytes([index])], PAGE)
            pool.match([bytes([index])]).release()
            pool.forget([bytes([index])])

    in_threads(5, work)
    assert pool.stats()["pages_held"] == 0


def test_threads_reading_one_sequence_while_it_grows(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    """A reader sees whole appends: lengths only grow, and what was there stays as it was."""
    k, v = rows(rng, 400), rows(rng, 400)
    sequence = pool.sequence()
    extend(sequence, k[:5], v[:5])
    done = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            try:
                for first in range(5, 400, 3):
                    extend(sequence, k[first : first + 3], v[first : first + 3])
            finally:
                done.set()
            return
        seen = 0
        while not done.is_set():
            batch = pool.batch([sequence])
            tokens = len(sequence)
            got, _ = batch.fetch(1) if index == 1 else sequence.fetch(1)
            array = np.asarray(got).reshape(HEADS, -1, DIM).transpose(1, 0, 2)
            assert tokens >= seen
            seen = tokens
            np.testing.assert_array_equal(array[:tokens], k[:tokens] + 1)

    in_threads(4, work)
    assert_holds(sequence, k[:401], v[:401])


# ---- how far it is to the core ----


def python_calls(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of each Python call that a call makes when it is made again."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    for _ in range(2):
        call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen[1:]  # without the lambda


def test_append_and_select_are_few_calls_from_the_core() -> None:
    """Counts, where times would be noise; no more of them without a reason."""
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, dtype="float32")
    k, q, budget = np.ones((16, 2, 8), np.float32), np.ones((4, 8), np.float32), Budget(pages=2)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        append = python_calls(lambda: sequence.append(0, k, k))
        assert len(append) <= 6, append
        assert len({file for file, _ in append}) <= 5, append
        assert "<lambda>" not in {name for _, name in append}, "no closure on the way"
        select = python_calls(lambda: sequence.select(0, q, budget))
        assert len(select) <= 34, select
        picked = sequence.select(0, q, budget)
        attend = python_calls(lambda: sequence.attend(0, q, picked))
        assert len(attend) <= 30, attend


def test_a_sequence_that_met_a_full_pool_goes_with_its_last_name(pool: CXLPool) -> None:
    """No cycle of the error and a frame keeps it until the garbage collector comes."""
    taken = pool.pages.alloc(pool.stats()["pages_free"])
    gc.disable()
    try:
        sequence = pool.sequence()
        many = np.ones((20, 2, 8), np.float32)
        with contextlib.suppress(PoolFullError):
            sequence.append(0, many, many)
        del sequence
        assert pool.stats()["sequences"] == 0
    finally:
        gc.enable()
    pool.pages.free(taken)
