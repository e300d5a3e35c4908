"""Sequences and batches: fetch, arguments, few calls to the core; test_model has the rest."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import cast

import ml_dtypes
import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Sequence, _io_hooks
from cxlkv._native import lib
from cxlkv.errors import BadArgumentError, PoolFullError
from cxlkv.ndp import audit, simd

from .support.texts import DIM, HEADS, append, grown, verify

PAGE = 4  # tokens, of the pool fixture
ONE = np.ones((1, HEADS, DIM), np.float32)


# ---- append and fetch ----


def test_a_sequence_of_many_chunks_of_pages(pool: CXLPool) -> None:
    """More than 256 pages: the page table has several parts, some shared after a fork."""
    ids = range(600 * PAGE + 3)
    sequence = grown(pool, ids[:1025])
    child = sequence.fork()
    append(sequence, ids[1025:])
    verify(sequence, ids)
    verify(child, ids[:1025])
    other = sequence.fork()
    for tokens in (2399, 1026, 1024, 1023, 3):
        other.truncate(tokens)
        verify(other, ids[:tokens])
    append(other, ids[3:700])
    verify(other, ids[:700])
    verify(sequence, ids)


def test_unwritten_tokens_and_padding_are_zero(pool: CXLPool) -> None:
    grown(pool, range(9 * PAGE)).release()  # whatever memory comes next has been written before
    short, long = grown(pool, range(5)), grown(pool, range(11))
    k, v = (np.asarray(x) for x in pool.batch([short, long]).fetch(0))
    assert k.shape == v.shape == (2, HEADS, 3, PAGE, DIM)
    for array in (k, v):
        assert (array[0, :, 1, 1:] == 0).all()
        assert (array[0, :, 2] == 0).all()
        assert (array[1, :, 2, 3:] == 0).all()
        assert (array[1, :, :2] != 0).all()


def test_fetch_takes_picked_pages_in_their_order(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence = grown(pool, range(23))
    q = rng.standard_normal((HEADS, DIM), np.float32)
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
def test_fetch_into_given_arrays(pool: CXLPool, kind: str) -> None:
    sequence = grown(pool, range(10))
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


def test_out_must_fit(pool: CXLPool) -> None:
    sequence = grown(pool, range(10))
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


# ---- batches ----


def test_a_method_is_a_batch_of_one_without_its_axis(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    sequence = grown(pool, range(21))
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
    assert (sequence.select(0, q).pages == sequence.select(0, q, Budget()).pages).all()
    with pytest.raises(BadArgumentError, match=r"a budget or top_k=, not both"):
        sequence.select(0, q, Budget(pages=1), top_k=1)
    with pytest.raises(BadArgumentError, match="not both"):
        sequence.select(0, q, 0.5, top_k=1)
    for share in (0.5, cast(float, np.float32(0.5)), 1.0):
        wanted = sequence.select(0, q, Budget(share=float(share))).pages
        assert (sequence.select(0, q, share).pages == wanted).all()
        assert (pool.batch([sequence]).select(0, q, [0, 3], [share]).pages == wanted).all()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        *((wrong, "no.* a share of the pages.*None, where") for wrong in (0, -0.1, 1.5, True, "x")),
        *((wrong, r"Budget\(pages=64\)") for wrong in (math.nan, math.inf, 64, np.int64(64))),
        (3, r"Budget\(pages=3\)"),
    ],
)
def test_a_number_that_is_no_share_is_refused(pool: CXLPool, wrong: float, what: str) -> None:
    sequence = grown(pool, range(5))
    q = np.ones((1, 4, DIM), np.float32)
    k = np.ones((1, HEADS, DIM), np.float32)
    with pytest.raises(BadArgumentError, match=what):
        sequence.select(0, q, wrong)
    for budgets in (wrong, [wrong]):
        with pytest.raises(BadArgumentError, match=what):
            pool.batch([sequence]).decode(0, q, k, k, [0, 1], budgets)
    assert sequence.tokens(0) == 5


def test_wrong_queries_are_refused(pool: CXLPool) -> None:
    sequence = grown(pool, range(5))
    for shape in [(), (DIM,), (3, DIM), (2, DIM + 1), (6, 2, DIM), (1, 0, DIM), (1, 1, 2, DIM)]:
        with pytest.raises(BadArgumentError):
            sequence.attend(0, np.ones(shape, np.float32))
        with pytest.raises(BadArgumentError):
            sequence.select(0, np.ones(shape, np.float32), top_k=1)
    q = np.ones((2, DIM), np.float32)
    with pytest.raises(BadArgumentError, match="method 'best': use one of"):
        sequence.select(0, q, top_k=1, method="best")


# What float32 has not above 0, and what is no number.

ODD = (-1.0, math.nan, math.inf, -math.inf, 1e39, 1e-46, 10**400, True, "1", [1.0], np.ones(2))


@pytest.mark.parametrize("odd", [0.0, *ODD], ids=str)
def test_odd_scales_are_refused(pool: CXLPool, odd: float) -> None:
    sequence, q, k = grown(pool, range(5)), np.ones((4, DIM), np.float32), ONE
    refused = partial(pytest.raises, BadArgumentError, match="scale=.* must be positive")
    with refused():
        sequence.attend(0, q, scale=odd)
    with refused():
        sequence.select(0, q, top_k=1, scale=odd)
    with refused():
        pool.batch([sequence]).decode(0, q[None], k, k, [0, 1], scale=odd)
    assert sequence.tokens(0) == 5


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize("at_once", [True, False])
def test_odd_softcaps_are_refused(
    pool: CXLPool, odd: float, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite one made all outputs NaN, and one below what float32 has was left out."""
    if not at_once:  # append, select and attend
        monkeypatch.setattr(audit, "used", True)
        monkeypatch.setattr(audit, "share", lambda pool: 1.0)
    sequence, q, k = grown(pool, range(5)), np.ones((4, DIM), np.float32), ONE
    refused = partial(pytest.raises, BadArgumentError, match="softcap=.* must be positive")
    with refused():
        sequence.attend(0, q, softcap=odd)
    with refused():
        pool.batch([sequence]).decode(0, q[None], k, k, [0, 1], softcap=odd)
    assert sequence.tokens(0) == 5


@pytest.mark.parametrize("none", [None, 0, 0.0])
def test_no_softcap(pool: CXLPool, none: float | None) -> None:
    sequence, q = grown(pool, range(5)), np.ones((2, DIM), np.float32)
    expected = sequence.attend(0, q)[0]
    assert np.array_equal(sequence.attend(0, q, softcap=none)[0], expected)
    assert np.allclose(sequence.attend(0, q, softcap=1e30)[0], expected)


def test_a_selection_of_another_shape_is_refused(pool: CXLPool) -> None:
    long, short = grown(pool, range(40)), grown(pool, range(5))
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


def test_a_budget_that_makes_no_sense() -> None:
    for fields in (
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


def test_a_dropped_sequence_gives_its_pages_back(pool: CXLPool) -> None:
    sequence = grown(pool, range(9))
    sequence.fetch(0)  # has made its batch
    assert pool.stats()["pages_held"] == 2
    del sequence
    assert pool.stats()["pages_held"] == 0
    assert pool.stats()["sequences"] == 0


# ---- how far it is to the core ----


def python_calls(call: Callable[[], object]) -> list[tuple[str, str]]:
    """(file, function) of each Python call that a call makes when it is made again."""
    seen: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    for _ in range(2):
        call()
    gc.disable()  # what it ends is not the call's
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return seen[1:]  # without the lambda


class Growing:
    """The core, whose `call` finds the sequence longer each time."""

    def __init__(self, core: object, call: str, sequence: Sequence, times: int):
        self._core, self._call, self._sequence, self._times = core, call, sequence, times

    def __getattr__(self, name: str) -> object:
        if name == self._call and self._times:
            self._times -= 1
            append(self._sequence, range(len(self._sequence), len(self._sequence) + 200))
        return getattr(self._core, name)


@pytest.mark.parametrize(("call", "times"), [("export", 4), ("pages", 3)])
def test_a_sequence_that_grows_while_it_is_read(
    pool: CXLPool, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    """How much there is to read is known only when it is read: another thread may append."""
    sequence = grown(pool, range(2000))
    core = Growing(lib, f"cxlkv_sequence_{call}", sequence, times)
    monkeypatch.setattr("cxlkv._core.sequence.lib", core)
    if call == "export":
        verify(pool.adopt(sequence.handle), range(len(sequence)))
    else:
        assert len(np.unique(sequence.pages)) == len(sequence) // PAGE


def test_append_and_select_are_few_calls_from_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, where times would be noise; no more of them without a reason."""
    monkeypatch.setattr(_io_hooks, "subscriber", None)  # an emulated link of an earlier test
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, dtype="float32")
    k, q, budget = np.ones((16, 2, 8), np.float32), np.ones((4, 8), np.float32), Budget(pages=2)
    with CXLPool.create("anonymous:", layout=layout, capacity="4MiB", threads=1) as pool:
        sequence = pool.sequence()
        append = python_calls(lambda: sequence.append(0, k, k))
        assert len(append) <= 6, str(append)
        assert len({file for file, _ in append}) <= 5, append
        assert "<lambda>" not in {name for _, name in append}, "no closure on the way"
        simd._criterion_of.cache_clear()  # an equal budget of an earlier test costs a comparison
        sequence.select(0, q, budget)  # what was measured of this machine is looked up once
        select = python_calls(lambda: sequence.select(0, q, budget))
        assert len(select) <= 14, str(select)  # two more where an earlier test has audited
        picked = sequence.select(0, q, budget)
        attend = python_calls(lambda: sequence.attend(0, q, picked))
        assert len(attend) <= 13, str(attend)


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
