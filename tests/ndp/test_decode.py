"""Batch.decode is append, select and attend in one call: the same bits, errors and tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import pytest
import torch

from cxlkv import Batch, Budget, CXLPool, KVLayout, LayerGroup, PoolFullError
from cxlkv.arrays import Floats
from cxlkv.emulation.link import emulate
from cxlkv.errors import BadArgumentError, CorruptError, CXLKVError
from cxlkv.ndp.engine import METHODS, Decoded

from ..support.damaging import damage_piece
from ..support.lengths import matrix

HEADS, GROUP, DIM, LAYERS, PAGE_TOKENS = 2, 3, 32, 3, 4
LENGTHS = (150, 3, 90, 61)
ROWS = (1, 1, 3, 0)
"""Rows of the step: a token, a text that has hardly begun, drafted tokens, a waiting request."""
STARTS = np.cumsum([0, *ROWS]).astype(np.int32)
WINDOW = 24


def layout_of(prefix: bool = False) -> KVLayout:
    groups = [
        LayerGroup(
            layers=layers,
            kv_heads=HEADS,
            head_dim=DIM,
            value_head_dim=DIM // 2,
            dtype="float32",
            window=window,
            values="key_prefix" if prefix else "own",
        )
        for layers, window in ((LAYERS - 1, None), (1, WINDOW))
    ]
    return KVLayout.of(groups, page_tokens=PAGE_TOKENS)


class Step:
    """The new rows of a step, and a batch; `twin` is of forks of its sequences."""

    def __init__(self, pool: CXLPool, rng: np.random.Generator):
        self.pool, self.rng = pool, rng
        self.values = pool.layout.values == "own"
        self.sequences = [pool.sequence() for _ in LENGTHS]
        self.batch = pool.batch(self.sequences)
        starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
        for layer in range(LAYERS):
            k, v = self.rows(int(starts[-1]))
            self.batch.append(layer, k, v, starts)

    def rows(self, count: int) -> tuple[Floats, Floats | None]:
        k = self.rng.standard_normal((count, HEADS, DIM), np.float32)
        v = self.rng.standard_normal((count, HEADS, DIM // 2), np.float32)
        return k, v if self.values else None

    def queries(self, count: int = STARTS[-1]) -> Floats:
        return self.rng.standard_normal((count, HEADS * GROUP, DIM), np.float32)

    def twin(self) -> Batch:
        return self.pool.batch([sequence.fork() for sequence in self.sequences])

    def tokens(self, layer: int = 0) -> list[int]:
        return [sequence.tokens(layer) for sequence in self.sequences]


@pytest.fixture(params=[False, True], ids=["values", "key_prefix"])
def step(request: pytest.FixtureRequest, rng: np.random.Generator) -> Iterator[Step]:
    layout = layout_of(request.param)
    with CXLPool.create("anonymous:", layout=layout, capacity="32MiB", threads=2) as pool:
        yield Step(pool, rng)


def check(got: Decoded, out: object, lse: object) -> None:
    assert isinstance(got.out, np.ndarray)
    assert isinstance(got.lse, np.ndarray)
    assert np.array_equal(got.out, np.asarray(out))
    assert np.array_equal(got.lse, np.asarray(lse))


BUDGETS: dict[str, Budget | list[Budget]] = {
    "one": Budget(share=0.2),
    "several": [Budget(pages=n) for n in (3, 1, 5, 2)],
    "some_all": [Budget(pages=3), Budget(share=1.0), Budget(share=1.0), Budget(pages=2)],
    "sequence": Budget(share=0.3, per="sequence", union="layer"),
    "mass": Budget(mass=0.6),
    "more_than_there_are": Budget(pages=10_000),
}


PAIRS = [
    (name, method)
    for name in BUDGETS
    for method in METHODS
    if name != "mass" or method in ("auto", "exact", "attention")
]


@matrix(step=[False, True], layer=[0, LAYERS - 1], pair=PAIRS, indirect=["step"])
def test_one_call_does_what_three_do(step: Step, pair: tuple[str, str], layer: int) -> None:
    name, method = pair
    budget = BUDGETS[name]
    twin, q = step.twin(), step.queries()
    for at in range(layer + 1):
        k, v = step.rows(int(STARTS[-1]))
        if at < layer:
            for batch in (step.batch, twin):
                batch.append(at, k, v, STARTS)
            continue
        got = step.batch.decode(at, q, k, v, STARTS, budget, method, 0.2, 30.0)
        twin.append(at, k, v, STARTS)
    taken = got.method if method == "auto" else method
    if taken == "all":
        check(got, *twin.attend(layer, q, STARTS, None, 0.2, 30.0))
        assert got.bytes_scored == 0
        return
    picked = twin.select(layer, q, STARTS, budget, taken, 0.2)
    check(got, *twin.attend(layer, q, STARTS, picked, 0.2, 30.0))
    assert got.method == picked.method
    assert got.bytes_read == pytest.approx(picked.bytes_fetched, rel=0.5)  # rows share what is read
    if name not in ("some_all", "more_than_there_are"):
        assert got.bytes_scored == picked.bytes_scored > 0


@pytest.mark.parametrize(
    "budget", [None, Budget(share=1.0), Budget(share=0.1, dense_layers=1)], ids=str
)
def test_without_a_choice_nothing_is_scored(step: Step, budget: Budget | None) -> None:
    twin, q, (k, v) = step.twin(), step.queries(), step.rows(int(STARTS[-1]))
    got = step.batch.decode(0, q, k, v, STARTS, budget)
    twin.append(0, k, v, STARTS)
    check(got, *twin.attend(0, q, STARTS))
    assert (got.method, got.bytes_scored) == ("all", 0)


def test_a_link_and_an_audit_hear_of_each_part(step: Step) -> None:
    twin, q, (k, v) = step.twin(), step.queries(), step.rows(int(STARTS[-1]))
    with emulate(step.pool, "astera-a1000", mode="virtual") as link:
        got = step.batch.decode(0, q, k, v, STARTS, Budget(pages=3), "exact")
        assert {k: n for k, n in link.operations.items() if n} == {
            "append": 1,
            "select": 1,
            "attend": 1,
        }
        assert link.bytes["select"] == got.bytes_scored
    step.pool.admin.audit = 1.0
    again = twin.decode(0, q, k, v, STARTS, Budget(pages=3), "exact")
    check(got, again.out, again.lse)
    assert step.pool.admin.overview().totals["audited_selects"] == 1


def test_into_the_callers_memory(step: Step) -> None:
    q, (k, v) = step.queries(), step.rows(int(STARTS[-1]))
    out = np.full((STARTS[-1], HEADS * GROUP, DIM // 2), 7, np.float32)
    got = step.twin().decode(0, q, k, v, STARTS, Budget(pages=2), out=out)
    assert got.out is out
    check(got, step.twin().decode(0, q, k, v, STARTS, Budget(pages=2)).out, got.lse)
    before = step.tokens()
    for wrong in (out[:, :1], out.astype(np.float64), out.transpose(1, 0, 2)):
        with pytest.raises(BadArgumentError, match="out"):
            step.batch.decode(0, q, k, v, STARTS, Budget(pages=2), out=wrong)
    assert step.tokens() == before


class Asked(TypedDict):
    """What a decode is asked beside its layer and tensors."""

    starts: list[int]
    budgets: Budget | list[Budget] | None
    method: str
    scale: float | None
    softcap: float | None
    rewind: int | None


def test_a_decode_like_the_last_one_is_that_of_a_fresh_batch(step: Step, seed: int) -> None:
    """Tensors of the same forms are not looked at again: what else changes between two calls is."""
    choose = random.Random(seed).choice
    fresh = step.twin().sequences
    forms: dict[str, list[object]] = {
        "starts": [STARTS, np.array([0, 2, 3, 4, 5], np.int32), [0, 0, 2, 5, 5]],
        "budgets": [None, Budget(pages=2), Budget(pages=2, by_layer={1: 3}), BUDGETS["several"]],
        "method": ["exact", "digest", "attention", "auto"],
        "scale": [None, 0.3],
        "softcap": [None, 20.0],
        "rewind": [None, 3],
    }
    given = {name: choose(values) for name, values in forms.items()}
    for _ in range(40):
        name = choose([*forms, "starts", "budgets", "nothing"])
        given |= {name: choose(forms[name])} if name in forms else {}
        asked = cast(Asked, given)
        rows = int(np.asarray(given["starts"])[-1])
        spread = choose([1, 1, 2])
        into = choose([False, False, True])
        for layer in range(LAYERS):
            q = torch.from_numpy(step.queries(rows * spread))[::spread]
            keys, values = step.rows(rows)
            k, v = torch.from_numpy(keys), None if values is None else torch.from_numpy(values)
            out = torch.full((rows, HEADS * GROUP, DIM // 2), 7.0) if into else None
            got = step.batch.decode(layer, q, k, v, out=out, **asked)
            wanted = step.pool.batch(fresh).decode(layer, q, k, v, **asked)
            assert torch.equal(torch.as_tensor(got.out), torch.as_tensor(wanted.out))
            assert torch.equal(torch.as_tensor(got.lse), torch.as_tensor(wanted.lse))
            assert (got.method, got.bytes_scored) == (wanted.method, wanted.bytes_scored)
            assert out is None or got.out is out
            if choose([False] * 5 + [True]):
                with pytest.raises(BadArgumentError):
                    step.batch.decode(layer, q, k[:, :, 1:], v, **asked)


Wrong = Callable[[Batch, Floats, Floats, Floats | None], object]
WRONG: dict[str, Wrong] = {
    "method": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, Budget(pages=2), "best"),
    "scale": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, None, scale=-1.0),
    "softcap": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, None, softcap=-1.0),
    "budgets": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, [Budget()] * 3),
    "mass": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, Budget(mass=0.5), "digest"),
    "union": lambda b, q, k, v: b.decode(
        0, q, k, v, STARTS, [Budget(), Budget(), Budget(), Budget(union="layer")]
    ),
    "heads": lambda b, q, k, v: b.decode(0, q[:, :5], k, v, STARTS),
    "rows": lambda b, q, k, v: b.decode(0, q[:2], k, v, STARTS),
    "keys": lambda b, q, k, v: b.decode(0, q, k[:, :, 1:], v, STARTS),
    "recall": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, Budget(), recall=2.0),
    "rewind": lambda b, q, k, v: b.decode(0, q, k, v, STARTS, rewind=-3),
    "layer": lambda b, q, k, v: b.decode(LAYERS, q, k, v, STARTS),
    "starts": lambda b, q, k, v: b.decode(0, q, k, v, [0, 3, 2, 5, 5]),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_arguments_append_nothing(step: Step, name: str) -> None:
    before, (k, v) = step.tokens(), step.rows(int(STARTS[-1]))
    with pytest.raises(BadArgumentError) as error:
        WRONG[name](step.batch, step.queries(), k, v)
    assert not error.value.appended
    assert step.tokens() == before


def test_a_full_pool_appends_nothing(step: Step) -> None:
    more = 60 * PAGE_TOKENS  # pages that a window gives back are not enough for them
    q, (k, v) = step.queries(more), step.rows(more)
    starts = np.array([0, more, more, more, more], np.int32)
    taken = step.pool.pages.alloc(step.pool.stats()["pages_free"])
    before = step.tokens()
    with pytest.raises(PoolFullError) as error:
        step.batch.decode(0, q, k, v, starts, Budget(pages=2))
    assert not error.value.appended
    assert step.tokens() == before
    step.pool.pages.free(taken)
    step.batch.decode(0, q, k, v, starts, Budget(pages=2))
    assert step.tokens()[0] == before[0] + more


@pytest.mark.parametrize("budget", [None, Budget(pages=60)], ids=["all", "chosen"])
def test_a_damaged_page_is_told_after_the_append(
    path: Path, rng: np.random.Generator, budget: Budget | None
) -> None:
    with CXLPool.create(path, layout=layout_of(), capacity="32MiB", threads=1) as pool:
        step = Step(pool, rng)
        damage_piece(pool, int(step.sequences[0].pages[1]), 0, "keys")
        handles = [sequence.handle for sequence in step.sequences]
        with CXLPool.open(path, threads=1) as other:
            batch = other.batch([other.adopt(handle) for handle in handles])
            before = [sequence.tokens(0) for sequence in batch.sequences]
            q, (k, v) = step.queries(), step.rows(int(STARTS[-1]))
            with pytest.raises(CorruptError) as error:
                batch.decode(0, q, k, v, STARTS, budget)
            assert error.value.appended
            after = [sequence.tokens(0) for sequence in batch.sequences]
            assert after == [n + rows for n, rows in zip(before, ROWS, strict=True)]
            for place in (1, 2):  # the others' rows can still be had
                alone = other.batch([batch.sequences[place]])
                rows = slice(int(STARTS[place]), int(STARTS[place + 1]))
                out, _ = alone.attend(0, q[rows], [0, ROWS[place]])
                assert np.isfinite(np.asarray(out)).all()


def test_errors_of_other_calls_say_nothing_of_tokens() -> None:
    assert not CXLKVError().appended


# ---- choices that are kept ----
