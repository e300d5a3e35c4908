"""One suite over the NDP backends: numpy's reference and the C core with each instruction set.

The reference is held by literal cases and by properties; the others by these and by the reference:
whole-number data must agree to the page, random data within what rounding allows.
"""

from __future__ import annotations

import itertools
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Selection, _core
from cxlkv import Sequence as PoolSequence
from cxlkv.arrays import Doubles, Floats
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.ndp.engine import unscored

from ..support import reference
from ..support.lengths import matrix, nightly
from ..support.one_layer import ISAS

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
OUT_STEP = {"bfloat16": 0.0, "float16": 2**-25, "float32": 0.0}  # half the smallest step near 0
OUT_ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 1e-5}  # of out, in the query's dtype
SCORE_ERROR = 2e-5  # relative to the largest score: keys are read exactly, sums are float32


@dataclass(frozen=True)
class Case:
    """Keys and values [tokens, kv_heads, dim] by sequence; queries [rows, q_heads, dim]; float32,
    holding only numbers that `dtype` holds. prefix: the values are the keys' first channels."""

    keys: list[Floats]
    values: list[Floats]
    queries: Floats
    starts: npt.NDArray[np.int32]
    page_tokens: int
    dtype: str
    window: int | None = None
    prefix: bool = False

    @property
    def layout(self) -> KVLayout:
        _, heads, dim = self.keys[0].shape
        group = LayerGroup(
            layers=1,
            kv_heads=heads,
            head_dim=dim,
            value_head_dim=self.values[0].shape[2],
            dtype=self.dtype,
            window=self.window,
            values="key_prefix" if self.prefix else "own",
        )
        return KVLayout.of([group], page_tokens=self.page_tokens)


class Reference:
    name = "reference"

    def select(
        self,
        case: Case,
        budgets: Sequence[Budget],
        method: str = "exact",
        scale: float | None = None,
    ) -> Selection:
        return reference.select(
            case.keys,
            case.queries,
            case.starts,
            budgets,
            page_tokens=case.page_tokens,
            method=method,
            scale=scale,
            window=case.window,
        )

    def attend(
        self,
        case: Case,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[Doubles, Doubles]:
        return reference.attend(
            case.keys,
            case.values,
            case.queries,
            case.starts,
            page_tokens=case.page_tokens,
            picked=picked,
            scale=scale,
            softcap=softcap,
            window=case.window,
        )


class Simd:
    """The C core: each call on a fresh pool, its tokens appended in chunks of odd sizes."""

    def __init__(self, name: str, threads: int = 1):
        self.name = name
        self.threads = threads

    def open(self, case: Case) -> tuple[CXLPool, list[PoolSequence]]:
        tokens = sum(len(k) + case.page_tokens for k in case.keys)
        capacity = 2 * (tokens * case.layout.token_bytes * 2) + (5 << 20)
        pool = CXLPool.create(
            "anonymous:", layout=case.layout, capacity=capacity, threads=self.threads
        )
        sequences: list[PoolSequence] = []
        kind = DTYPES[case.dtype]
        rows = np.diff(case.starts)
        for keys, values, count in zip(case.keys, case.values, rows, strict=True):
            sequence = pool.sequence()
            sequences.append(sequence)
            # The queries' own tokens come in one step: what they see is kept until the next.
            before = len(keys) - int(count)
            edges = [0, *range(1, before, case.page_tokens * 2 + 1), before, len(keys)]
            for first, last in itertools.pairwise(edges):
                v = None if case.prefix else values[first:last].astype(kind)
                sequence.append(0, keys[first:last].astype(kind), v)
        return pool, sequences

    def select(
        self,
        case: Case,
        budgets: Sequence[Budget],
        method: str = "exact",
        scale: float | None = None,
    ) -> Selection:
        pool, sequences = self.open(case)
        with pool:
            batch = pool.batch(sequences)
            picked = batch.select(0, case.queries, case.starts, budgets, method, scale)
            assert pool.stats()["scored_bytes"] == picked.bytes_scored
        return picked

    def attend(
        self,
        case: Case,
        picked: Selection | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> tuple[Doubles, Doubles]:
        pool, sequences = self.open(case)
        with pool:
            batch = pool.batch(sequences)
            kind = DTYPES[case.dtype]
            queries = case.queries.astype(kind)  # out comes in this dtype
            out, lse = batch.attend(0, queries, case.starts, picked, scale, softcap)
            if picked is not None:
                assert pool.stats()["attended_bytes"] == attended_bytes(case, picked)
        assert isinstance(out, np.ndarray)
        assert isinstance(lse, np.ndarray)
        assert out.dtype == kind
        assert lse.dtype == np.float32
        return out.astype(np.float64), lse.astype(np.float64)


Backend = Reference | Simd


def attended_bytes(case: Case, picked: Selection) -> int:
    """K and V that attend reads: a per-sequence list is read once for a block of its rows."""
    group = case.queries.shape[1] // case.keys[0].shape[1]
    block = max(1, 64 // group)
    total = 0
    for index, chosen in chosen_tokens(case, picked):
        rows = int(case.starts[index + 1] - case.starts[index])
        blocks = 1 if picked.per == "query" else -(-rows // block)
        total += chosen * blocks
    return total * token_bytes(case)


def token_bytes(case: Case) -> int:
    """K and V of one token and kv head."""
    return case.layout.token_bytes // case.layout.kv_heads


def chosen_tokens(case: Case, picked: Selection) -> Iterator[tuple[int, int]]:
    """(sequence, tokens that the chosen pages hold) of each list and kv head."""
    for row, heads in enumerate(picked.pages):
        index = row
        if picked.per == "query":
            index = int(np.searchsorted(case.starts, row, side="right")) - 1
        for pages in heads:
            first = pages[pages >= 0].astype(np.int64) * case.page_tokens
            filled = np.minimum(case.page_tokens, len(case.keys[index]) - first)
            yield index, int(filled.sum())


@pytest.fixture(params=["reference", *ISAS])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Reference() if request.param == "reference" else made(request, request.param)


def made(request: pytest.FixtureRequest, name: str) -> Simd:
    """The C core with one instruction set; skips the test where this machine lacks it."""
    return Simd(request.getfixturevalue("force_isa")(name))


# ---- making cases ----


def make_case(
    rng: np.random.Generator,
    *,
    lengths: Sequence[int] = (20,),
    rows: Sequence[int] = (1,),
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 16,
    value_dim: int | None = None,
    page_tokens: int = 4,
    dtype: str = "float32",
    whole: bool = False,
    size: float = 1.0,
    window: int | None = None,
    prefix: bool = False,
) -> Case:
    """Random data; whole=True draws small whole numbers, whose sums are exact and often tie."""
    kind = DTYPES[dtype]

    def draw(*shape: int) -> Floats:
        if whole:
            return rng.integers(-3, 4, shape).astype(np.float32)
        return (size * rng.standard_normal(shape)).astype(kind).astype(np.float32)

    keys = [draw(n, kv_heads, dim) for n in lengths]
    values = [draw(n, kv_heads, value_dim or dim) for n in lengths]
    if prefix:
        values = [own[:, :, :value_dim] for own in keys]
    return Case(
        keys=keys,
        values=values,
        queries=draw(sum(rows), kv_heads * group, dim),
        starts=np.concatenate([[0], np.cumsum(rows)]).astype(np.int32),
        page_tokens=page_tokens,
        dtype=dtype,
        window=window,
        prefix=prefix,
    )


def column(scores: Sequence[float], page_tokens: int = 1, dtype: str = "float32") -> Case:
    """One head of one channel, a query of 1: page i's keys all score scores[i] (at scale 1)."""
    keys = np.repeat(np.array(scores, np.float32), page_tokens).reshape(-1, 1, 1)
    query = np.ones((1, 1, 1), np.float32)
    return Case([keys], [keys.copy()], query, np.array([0, 1], np.int32), page_tokens, dtype)


def pages_of(picked: Selection, row: int = 0, head: int = 0) -> list[int]:
    line = picked.pages[row, head]
    count = int(picked.counts[row, head])
    assert (line[:count] >= 0).all()
    assert (line[count:] == -1).all()
    assert (picked.scores[row, head, count:] == -np.inf).all()
    return [int(page) for page in line[:count]]


def best(count: int, **options: object) -> Budget:
    return Budget(pages=count, sinks=0, recent=0, **options)  # type: ignore[arg-type]


# ---- literal cases ----


def test_the_best_pages_ascending_and_forced_ones_always(backend: Backend) -> None:
    case = column([1, 9, 3, 8, 2, 7, 0])
    assert pages_of(backend.select(case, [best(3)], scale=1)) == [1, 3, 5]
    assert pages_of(backend.select(case, [Budget(pages=4)], scale=1)) == [0, 1, 5, 6]
    assert pages_of(backend.select(case, [Budget(pages=1)], scale=1)) == [0, 5, 6]  # more: forced
    assert pages_of(backend.select(case, [Budget(pages=99)], scale=1)) == [*range(7)]
    assert pages_of(backend.select(case, [best(1)], scale=1)) == [1]
    scores = backend.select(case, [best(3)], scale=2).scores
    assert scores.tolist() == [[[18, 16, 14]]]


@pytest.mark.parametrize(
    ("sinks", "recent", "expected"),
    [
        (0, 0, [1, 3]),
        (0, 1, [1, 6]),
        (1, 0, [0, 1]),
        (0, 9, [0, 1, 2, 3, 4, 5, 6]),
        (9, 0, [0, 1, 2, 3, 4, 5, 6]),
        (4, 4, [0, 1, 2, 3, 4, 5, 6]),
        (2, 2, [0, 1, 5, 6]),
        (2**40, 2**40, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_sinks_and_recent(backend: Backend, sinks: int, recent: int, expected: list[int]) -> None:
    case = column([1, 9, 3, 8, 2, 7, 0])
    picked = backend.select(case, [Budget(pages=2, sinks=sinks, recent=recent)], scale=1)
    assert pages_of(picked) == expected


def test_equal_scores_the_lower_page(backend: Backend) -> None:
    assert pages_of(backend.select(column([5] * 9), [best(4)], scale=1)) == [0, 1, 2, 3]
    case = column([1, 5, 5, 1, 5, 5, 9, 5])
    assert pages_of(backend.select(case, [best(4)], scale=1)) == [1, 2, 4, 6]
    assert pages_of(backend.select(column([0.0, -0.0, 0.0]), [best(1)], scale=1)) == [0]
    assert pages_of(backend.select(column([-0.0, 0.0, 0.0]), [best(2)], scale=1)) == [0, 1]
    assert pages_of(backend.select(column([-2, -1, -1]), [best(1)], scale=1)) == [1]


@pytest.mark.parametrize(
    ("share", "pages", "count"),
    [(0.01, 7, 1), (0.5, 7, 4), (0.07, 100, 7), (0.29, 100, 29), (1.0, 7, 7), (0.05, 20, 1)],
)
def test_a_share_is_rounded_up(backend: Backend, share: float, pages: int, count: int) -> None:
    picked = backend.select(column([1.0] * pages), [Budget(share=share, sinks=0, recent=0)])
    assert pages_of(picked) == [*range(count)]


def test_a_budget_of_each_layer() -> None:
    budget = Budget(share=0.1, dense_layers=2, by_layer={1: 0.3, 4: 0.5, 5: 1.0})
    assert [budget.pages_at_most(100, layer) for layer in range(6)] == [100, 100, 10, 10, 50, 100]
    assert [budget.chooses(layer) for layer in range(6)] == [False, False, True, True, True, False]
    assert budget.pages_at_most(100) == 100
    assert Budget(pages=4, by_layer={0: 9, 7: 12}).pages_at_most(100) == 12
    assert Budget(pages=4, by_layer={0: 1, 1: 1}).pages_at_most(100) == 4
    assert {budget: 1}[replace(budget, by_layer=dict(budget.by_layer))] == 1
    assert Budget() == Budget(share=0.15)
    for wrong, said in (
        ({"pages": 3, "share": 0.1}, "one of pages=, share= and mass=, not several"),
        ({"pages": 3, "by_layer": {0: 0.5}}, "0.5 pages: a whole number"),
        ({"share": 0.1, "by_layer": {0: 2}}, "2 is not a share of the pages"),
        ({"share": 0.1, "by_layer": {0: "all"}}, "'all' is not a share of the pages"),
        ({"pages": 3, "by_layer": {0: math.inf}}, "a budget of inf pages"),
        ({"pages": 3, "by_layer": {0: math.nan}}, "a budget of nan pages"),
        ({"share": 0.1, "by_layer": [0.5]}, "a mapping of layers to amounts is wanted"),
        ({"share": 0.1, "by_layer": {0.5: 0.5}}, "0.5 is no number of a layer"),
        ({"share": 0.1, "by_layer": {-1: 0.5}}, "-1 is no number of a layer"),
        ({"share": 0.1, "dense_layers": -1}, "dense_layers=-1: a whole number, 0 or more"),
    ):
        with pytest.raises(BadArgumentError, match=said):
            Budget(**wrong)


def test_mass_takes_the_fewest_pages(backend: Backend) -> None:
    case = column(np.log([1, 8, 2, 16, 4, 1]).tolist())
    for mass, expected in [(0.4, [3]), (0.7, [1, 3]), (0.85, [1, 3, 4]), (1.0, [*range(6)])]:
        picked = backend.select(case, [Budget(mass=mass, sinks=0, recent=0)], scale=1)
        assert pages_of(picked) == expected
    picked = backend.select(case, [Budget(mass=0.1, sinks=1, recent=1)], scale=1)
    assert pages_of(picked) == [0, 3, 5]  # 2/32 forced is not enough
    assert picked.scores[0, 0].tolist() == pytest.approx([1 / 32, 16 / 32, 1 / 32], rel=1e-6)
    with pytest.raises(BadArgumentError):
        backend.select(case, [Budget(mass=0.5)], "digest")


def test_rows_see_nothing_later(backend: Backend) -> None:
    """Three rows over pages of 2: the first reaches back into a complete page."""
    keys = np.array([0, 0, 1, 50, 2, 90], np.float32).reshape(-1, 1, 1)
    starts = np.array([0, 3], np.int32)
    case = Case([keys], [keys], np.ones((3, 1, 1), np.float32), starts, 2, "float32")
    picked = backend.select(case, [best(1)], scale=1)
    assert [pages_of(picked, row) for row in range(3)] == [[1], [1], [2]]
    assert picked.scores[:, 0, 0].tolist() == [50, 50, 90]
    early = replace(case, queries=np.ones((4, 1, 1), np.float32), starts=np.array([0, 4], np.int32))
    assert backend.select(early, [best(1)], scale=1).scores[0, 0, 0] == 1  # row 0 is token 2
    out, lse = backend.attend(case, scale=1)
    assert out[:, 0, 0].tolist() == pytest.approx([50, 50, 90], abs=1e-6)
    assert lse[:, 0].tolist() == pytest.approx([50, 50, 90], abs=1e-6)
    # One list for all rows: recent counts from the first row's page on.
    both = backend.select(case, [Budget(pages=1, sinks=0, recent=1, per="sequence")], scale=1)
    assert both.pages.shape == (1, 1, 2)
    assert pages_of(both) == [1, 2]


def test_union_over_the_layer_is_one_list(backend: Backend) -> None:
    keys = np.zeros((6, 2, 1), np.float32)
    keys[2, 0], keys[4, 1], keys[5, 1] = 5, 7, 6
    case = Case([keys], [keys], np.ones((1, 2, 1), np.float32), np.array([0, 1]), 1, "float32")
    case = replace(case, starts=np.array([0, 1], np.int32))
    apart = backend.select(case, [best(2)], scale=1)
    assert [pages_of(apart, head=h) for h in (0, 1)] == [[0, 2], [4, 5]]
    union = backend.select(case, [best(2, union="layer")], scale=1)
    assert [pages_of(union, head=h) for h in (0, 1)] == [[4, 5], [4, 5]]
    mass = backend.select(case, [Budget(mass=1.0, union="layer")], scale=1)
    assert mass.scores[0, 0].sum() == pytest.approx(1, rel=1e-5)
    assert (mass.scores[0, 0] == mass.scores[0, 1]).all()


def test_a_budget_for_each_sequence(backend: Backend, rng: np.random.Generator) -> None:
    case = make_case(rng, lengths=(9, 0, 33, 6), rows=(1, 0, 2, 1), whole=True)
    budgets = [best(1), best(1), Budget(share=0.5), Budget(mass=1.0)]
    picked = backend.select(case, budgets, scale=1)
    assert picked.counts[:, 0].tolist() == [1, 4, 5, 2]
    assert picked.pages.shape == (4, 2, 5)
    with pytest.raises(BadArgumentError, match="share union"):
        backend.select(case, [best(1), best(1), best(1), best(1, per="sequence")])


def test_sequences_without_rows(backend: Backend, rng: np.random.Generator) -> None:
    case = make_case(rng, lengths=(9, 7, 3), rows=(0, 2, 0), whole=True)
    assert backend.select(case, [best(2)], scale=1).pages.shape == (2, 2, 2)
    picked = backend.select(case, [best(2, per="sequence")], scale=1)
    assert picked.counts.tolist() == [[0, 0], [2, 2], [0, 0]]
    assert (picked.pages[[0, 2]] == -1).all()
    out, _ = backend.attend(case, picked)
    assert out.shape == (2, 4, 16)
    none = replace(case, queries=case.queries[:0], starts=np.zeros(4, np.int32))
    assert backend.select(none, [best(2)]).pages.shape == (0, 2, 0)
    assert backend.attend(none)[0].shape == (0, 4, 16)


# ---- what is broken stays visible ----


@matrix(dtype=DTYPES, method=["exact", "digest"], page_tokens=[1, 3])
def test_nan_keys_are_chosen(backend: Backend, dtype: str, method: str, page_tokens: int) -> None:
    case = column([1, 9, np.nan, 8, 2, np.nan, 7], page_tokens, dtype)
    assert pages_of(backend.select(case, [best(1)], method, 1)) == [2]
    assert pages_of(backend.select(case, [best(3)], method, 1)) == [1, 2, 5]
    assert np.isnan(backend.select(case, [best(1)], method, 1).scores).all()
    if method == "exact":
        picked = backend.select(case, [Budget(mass=0.1, sinks=0, recent=0)], method, 1)
        assert pages_of(picked) == [*range(7)]  # no share is known: nothing is enough


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nan_among_a_page_and_a_group(
    backend: Backend, dtype: str, rng: np.random.Generator
) -> None:
    case = make_case(rng, lengths=(23,), rows=(3,), dtype=dtype, dim=17)
    case.keys[0][9, 1, 16] = np.nan
    for budget in (best(1), best(1, union="layer"), best(1, per="sequence")):
        picked = backend.select(case, [budget])
        for row in range(len(picked.pages)):
            assert pages_of(picked, row, 1) == [2]
        if budget.union == "kv_head":
            assert np.isfinite(picked.scores[:, 0]).all()
    out, lse = backend.attend(case)
    assert np.isnan(out[:, 2:]).all()
    assert np.isnan(lse[:, 2:]).all()
    assert np.isfinite(out[:, :2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_values_and_queries_show(
    backend: Backend, dtype: str, rng: np.random.Generator
) -> None:
    case = make_case(rng, lengths=(11,), rows=(2,), dtype=dtype)
    case.values[0][1, 0, 5] = np.nan
    out, lse = backend.attend(case)
    assert np.isnan(out[:, :2, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=2)).all()
    assert np.isfinite(lse).all()
    case.queries[1, 3, 0] = np.nan
    out, lse = backend.attend(case)
    assert np.isnan(lse[1, 3])
    assert np.isnan(out[1, 3]).all()
    assert np.isfinite(lse[0]).all()


def test_infinite_scores(backend: Backend) -> None:
    inf = np.inf
    case = column([1, inf, 3, -inf, inf, -inf])
    assert pages_of(backend.select(case, [best(2)], scale=1)) == [1, 4]
    assert pages_of(backend.select(case, [best(4)], scale=1)) == [0, 1, 2, 4]
    assert pages_of(backend.select(case, [best(5)], scale=1)) == [0, 1, 2, 3, 4]
    assert pages_of(backend.select(case, [best(2)], "digest", 1)) == [1, 4]
    masked = column([1, -inf, 3])
    masked.values[0][:] = np.array([2, 7, 4]).reshape(3, 1, 1)
    out, lse = backend.attend(masked, scale=1)
    weights = np.exp([1.0, 3.0])
    assert out[0, 0, 0] == pytest.approx((weights @ [2, 4]) / weights.sum(), rel=1e-6)
    assert lse[0, 0] == pytest.approx(np.log(weights.sum()), rel=1e-6)
    picked = backend.select(masked, [Budget(mass=1.0, sinks=0, recent=0)], scale=1)
    assert pages_of(picked) == [0, 2]


def test_nothing_seen_gives_zero_and_minus_infinity(backend: Backend) -> None:
    masked = column([-np.inf] * 5)
    masked.values[0][:] = 1
    out, lse = backend.attend(masked, scale=1)
    assert out.tolist() == [[[0]]]
    assert lse.tolist() == [[-np.inf]]
    case = column([1, 2, 3])
    nothing = unscored(np.full((1, 1, 2), -1, np.int32), case.starts, "query")
    out, lse = backend.attend(case, nothing)
    assert out.tolist() == [[[0]]]
    assert lse.tolist() == [[-np.inf]]
    # A page that lies behind the first of two rows.
    two = replace(case, queries=np.ones((2, 1, 1), np.float32), starts=np.array([0, 2], np.int32))
    last = replace(nothing, pages=np.array([[[2]]], np.int32), per="sequence", starts=two.starts)
    out, lse = backend.attend(two, last, scale=1)
    assert lse.tolist() == [[-np.inf], [3]]
    assert out[:, 0, 0].tolist() == [0, 3]


def test_large_scores_are_safe(backend: Backend, rng: np.random.Generator) -> None:
    case = make_case(rng, lengths=(50,), rows=(2,), size=100)
    out, lse = backend.attend(case, scale=1)
    want, want_lse = reference.attend(
        case.keys, case.values, case.queries, case.starts, page_tokens=4, scale=1
    )
    assert np.abs(lse).max() > 1e4
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
    np.testing.assert_allclose(out, want, rtol=1e-2, atol=0.5)  # exp of a difference of 1e4s
    picked = backend.select(case, [Budget(mass=0.5)], scale=1)
    assert np.isfinite(picked.scores[picked.pages >= 0]).all()


def test_softcap_and_scale(backend: Backend) -> None:
    case = column([10, 0])
    case.values[0][:] = np.array([1, 0]).reshape(2, 1, 1)
    weight = np.exp(3 * np.tanh(5 / 3))
    out, lse = backend.attend(case, scale=0.5, softcap=3)
    assert out[0, 0, 0] == pytest.approx(weight / (weight + 1), rel=1e-6)
    assert lse[0, 0] == pytest.approx(np.log(weight + 1), rel=1e-6)
    plain, _ = backend.attend(column([10, 0]), scale=0.5)
    assert plain[0, 0, 0] == pytest.approx(10 / (1 + np.exp(-5)), rel=1e-6)


def test_attend_is_what_torch_computes(backend: Backend, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    case = make_case(rng, lengths=(29,), rows=(1,), kv_heads=2, group=3, dim=24)
    out, _ = backend.attend(case)
    q, k, v = (
        torch.from_numpy(x).transpose(0, 1)[None] for x in (case.queries, *case.keys, *case.values)
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    np.testing.assert_allclose(out[0], want[0, :, 0].numpy(), rtol=1e-5, atol=1e-6)


# ---- the C core against the reference ----


def all_scores(case: Case, budget: Budget, method: str, scale: float | None) -> Selection:
    share = replace(budget, pages=None, share=1.0, mass=None)
    budgets = [share if budget.mass is None else replace(share, share=None, mass=1.0)]
    return Reference().select(case, budgets, method, scale)


def assert_agrees(
    case: Case, got: Selection, budget: Budget, method: str = "exact", scale: float | None = None
) -> None:
    """Same pages as the reference's but for near ties, and the right scores for those chosen."""
    want = Reference().select(case, [budget], method, scale)
    every = all_scores(case, budget, method, scale)
    # Where the terms of a lone small score cancel, their rounding is more than a part of it.
    terms = np.abs(case.queries).max(initial=0) * max(np.abs(k).max(initial=0) for k in case.keys)
    rounding = 2**-24 * case.layout.head_dim * terms * (scale or case.layout.head_dim**-0.5)
    assert got.per == want.per
    for row, head in np.ndindex(*want.counts.shape):
        pages, expected = pages_of(got, row, head), pages_of(want, row, head)
        known = dict(zip(pages_of(every, row, head), every.scores[row, head], strict=False))
        room = max(rounding, SCORE_ERROR * max([1e-30, *np.abs(list(known.values()))]) * 8)
        scores = got.scores[row, head, : len(pages)]
        np.testing.assert_allclose(scores, [known.get(p, 0) for p in pages], rtol=0, atol=room)
        if budget.mass is not None:
            held = sum(known.get(p, 0) for p in pages)
            wanted = sum(known.get(p, 0) for p in expected)
            assert abs(len(pages) - len(expected)) <= 1
            assert held >= min(budget.mass, wanted) - 1e-4
        else:
            assert len(pages) == len(expected)
            ours, theirs = (sorted(known[p] for p in x) for x in (pages, expected))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=room)


SHAPES = [
    # dim, value_dim, group, page_tokens
    (64, None, 1, 16),
    (80, None, 2, 8),
    (96, 64, 3, 16),
    (128, None, 4, 16),
    (192, 128, 5, 5),
    (256, None, 6, 16),
    (3, 5, 7, 3),
    (17, 3, 8, 1),
    (1, 1, 2, 32),
    (33, 40, 70, 2),  # more query heads in a group than a block of them
]


def check_budgets(subject: Simd, case: Case, *chosen: tuple[Budget, str]) -> None:
    """By each budget and method it selects and attends as the reference, and counts its bytes."""
    for budget, method in chosen:
        picked = subject.select(case, [budget], method)
        assert_agrees(case, picked, budget, method)
        check_bytes(case, picked, method, [budget])
        assert_attends(subject, case, picked, 0.0)


@pytest.mark.parametrize("name", ISAS)
@matrix(shape=SHAPES, dtype=DTYPES)
def test_shapes(
    request: pytest.FixtureRequest,
    rng: np.random.Generator,
    name: str,
    dtype: str,
    shape: tuple[int, int | None, int, int],
) -> None:
    dim, value_dim, group, page_tokens = shape
    subject = made(request, name)
    lengths = (5 * page_tokens + 1, 1, 3 * page_tokens)  # a tail of one token, one, none
    case = make_case(
        rng,
        lengths=lengths,
        rows=(min(3, lengths[0]), 1, 1),
        group=group,
        dim=dim,
        value_dim=value_dim,
        page_tokens=page_tokens,
        dtype=dtype,
    )
    check_budgets(
        subject,
        case,
        (Budget(pages=3, sinks=1, recent=1), "exact"),
        (Budget(pages=3, sinks=0, recent=1), "digest"),
        (Budget(share=0.4, sinks=0, recent=0, union="layer", per="sequence"), "exact"),
        (Budget(mass=0.6, sinks=0, recent=0), "exact"),
        (Budget(mass=0.6, union="layer", per="sequence"), "exact"),
        (Budget(pages=3, sinks=1, recent=0), "attention"),
        (Budget(share=0.4, sinks=0, recent=0, union="layer", per="sequence"), "attention"),
    )
    assert_attends(subject, case, None, 5.0)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_latent_attention(
    request: pytest.FixtureRequest, rng: np.random.Generator, name: str, dtype: str
) -> None:
    """DeepSeek's shape: one head of 576 for 128 query heads, whose first 512 are the values."""
    subject = made(request, name)
    shape = {"kv_heads": 1, "group": 128, "dim": 576, "value_dim": 512, "prefix": True}
    case = make_case(
        rng,
        lengths=(53, 16),
        rows=(2, 1),
        page_tokens=16,
        dtype=dtype,
        size=0.3,
        **shape,  # type: ignore[arg-type]
    )
    for budget in (Budget(pages=2, sinks=0, recent=1), Budget(mass=0.7, sinks=0, recent=0)):
        check_budgets(subject, case, (budget, "exact"))
    assert_attends(subject, case, None, 0.0)


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_windows(
    request: pytest.FixtureRequest, rng: np.random.Generator, name: str, window: int
) -> None:
    """Many rows over many pages: a row sees its window, and budgets count the pages of it."""
    subject = made(request, name)
    case = make_case(rng, lengths=(150, 30, 4), rows=(40, 1, 4), page_tokens=8, window=window)
    check_budgets(
        subject,
        case,
        (Budget(share=0.5, sinks=2, recent=1), "exact"),
        (Budget(pages=2, sinks=0, recent=1), "digest"),
        (Budget(mass=0.6, sinks=0, recent=0), "exact"),
        (Budget(mass=0.6, union="layer", per="sequence"), "exact"),
        (Budget(share=0.4, sinks=0, recent=0, per="sequence"), "exact"),
    )
    assert_attends(subject, case, None, 0.0)
    assert_attends(Simd(name, threads=3), case, None, 0.0)


def assert_attends(subject: Backend, case: Case, picked: Selection | None, softcap: float) -> None:
    cap = softcap or None
    out, lse = subject.attend(case, picked, softcap=cap)
    want, want_lse = Reference().attend(case, picked, softcap=cap)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-5, atol=2e-5)
    error = OUT_ERROR[case.dtype]
    # Values may cancel out; a subnormal float16 is rounded by a step, not by a part of itself.
    largest = max(np.abs(values).max(initial=1e-6) for values in case.values)
    floor = max(error * float(largest), OUT_STEP[case.dtype])
    np.testing.assert_allclose(out, want, rtol=error, atol=floor)


def check_bytes(case: Case, picked: Selection, method: str, budgets: Sequence[Budget]) -> None:
    """bytes_scored: each key or digest of the sequences that have rows and leave out pages, once;
    bytes_fetched: K and V of the chosen pages' tokens."""
    heads, dim = case.layout.kv_heads, case.layout.head_dim
    element = int(np.dtype(DTYPES[case.dtype]).itemsize)
    rows = np.diff(case.starts)
    tokens = 0
    if len(budgets) == 1:
        budgets = [*budgets] * len(rows)
    for keys, count, budget in zip(case.keys, rows, budgets, strict=True):
        low = reference.first_seen(len(keys) - int(count), case.window) // case.page_tokens
        complete, rest = divmod(len(keys) - low * case.page_tokens, case.page_tokens)
        if count and not budget.dense_layers:
            tokens += (2 if method == "digest" else case.page_tokens) * complete + rest
    assert picked.bytes_scored == tokens * heads * dim * element
    chosen = sum(tokens for _, tokens in chosen_tokens(case, picked))
    assert picked.bytes_fetched == chosen * token_bytes(case)


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Case, list[Budget], str, float]:
    """Whole-number cases of any shape, budgets, method, and a scale that keeps them exact."""
    count = draw(st.integers(1, 3))
    page_tokens = draw(st.sampled_from([1, 2, 3, 4, 7, 16]))
    lengths = [draw(st.integers(0, 5 * page_tokens)) for _ in range(count)]
    rows = [draw(st.integers(0, min(n, 2 * page_tokens + 1))) for n in lengths]
    dim = draw(st.sampled_from([1, 2, 3, 8, 15, 16, 17, 24, 33]))
    prefix = draw(st.booleans())
    case = make_case(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        lengths=lengths,
        rows=rows,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 8)),
        dim=dim,
        value_dim=draw(st.integers(1, dim) if prefix else st.sampled_from([None, 1, 7, 16, 40])),
        page_tokens=page_tokens,
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        whole=True,
        window=draw(st.one_of(st.none(), st.integers(1, 4 * page_tokens))),
        prefix=prefix,
    )
    union = draw(st.sampled_from(["kv_head", "layer"]))
    per = draw(st.sampled_from(["query", "sequence"]))
    forced_pages = st.integers(0, 7)
    budgets = [
        Budget(
            **draw(
                st.one_of(
                    st.fixed_dictionaries({"pages": st.integers(1, 9)}),
                    st.fixed_dictionaries({"share": st.floats(0.01, 1)}),
                )
            ),
            dense_layers=draw(st.sampled_from([0, 0, 0, 1])),
            sinks=draw(forced_pages),
            recent=draw(forced_pages),
            union=union,
            per=per,
        )
        for _ in range(draw(st.sampled_from([1, count])))
    ]
    return (
        case,
        budgets,
        draw(st.sampled_from(["exact", "digest"])),
        draw(st.sampled_from([1, 0.25])),
    )


@pytest.mark.parametrize("examples", [40, nightly(1500)])
@pytest.mark.parametrize("name", ISAS)
def test_whole_numbers_agree_exactly(
    request: pytest.FixtureRequest, name: str, examples: int
) -> None:
    subject = made(request, name)

    @settings(max_examples=examples)
    @given(drawn=drawn_cases())
    def check(drawn: tuple[Case, list[Budget], str, float]) -> None:
        case, budgets, method, scale = drawn
        got = subject.select(case, budgets, method, scale)
        want = Reference().select(case, budgets, method, scale)
        np.testing.assert_array_equal(got.counts, want.counts)
        np.testing.assert_array_equal(got.pages, want.pages)
        np.testing.assert_array_equal(got.scores, want.scores)
        check_bytes(case, got, method, budgets)
        assert_attends(subject, case, got, 0.0)
        assert_attends(subject, case, None, 0.0)

    check()


# ---- properties ----


def test_the_digest_is_an_upper_bound(backend: Backend, rng: np.random.Generator) -> None:
    for dtype, dim in itertools.product(DTYPES, (3, 17, 64)):
        case = make_case(rng, lengths=(40, 3), rows=(5, 1), dim=dim, dtype=dtype)
        every = Budget(share=1.0)
        exact = backend.select(case, [every], "exact").scores
        bound = backend.select(case, [every], "digest").scores
        chosen = exact > -np.inf
        assert (bound[chosen] >= exact[chosen] - SCORE_ERROR * np.abs(exact[chosen]).max()).all()


def split(picked: Selection, keep: npt.NDArray[np.bool_]) -> Selection:
    """The pages of a selection where keep is true."""
    pages = np.where(keep, picked.pages, -1).astype(np.int32)
    order = np.argsort(np.where(pages < 0, 2**31 - 1, pages), axis=2, kind="stable")
    return replace(picked, pages=np.ascontiguousarray(np.take_along_axis(pages, order, axis=2)))


def test_partial_results_merge_by_lse(backend: Backend, rng: np.random.Generator) -> None:
    case = make_case(rng, lengths=(41, 5), rows=(3, 1), group=3)
    whole, whole_lse = backend.attend(case)
    every = backend.select(case, [Budget(share=1.0)])
    keep = rng.random(every.pages.shape) < 0.5
    (a, a_lse), (b, b_lse) = (backend.attend(case, split(every, k)) for k in (keep, ~keep))
    lse = np.logaddexp(a_lse, b_lse)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)
    weights = np.exp(a_lse - lse)[..., None], np.exp(b_lse - lse)[..., None]
    np.testing.assert_allclose(weights[0] * a + weights[1] * b, whole, rtol=1e-4, atol=1e-5)


def test_an_instruction_set_that_is_not_here() -> None:
    with pytest.raises(BadArgumentError, match="no instruction set is called sse9: serial, avx2"):
        _core.isa_force("sse9")
    elsewhere = "avx2" if platform.machine() == "aarch64" else "neon"
    with pytest.raises(UnsupportedError, match=f"this CPU, or this build, has no {elsewhere}"):
        _core.isa_force(elsewhere)


@pytest.mark.parametrize("name", ["auto", *map(nightly, ISAS)])
def test_threads_change_nothing(
    force_isa: Callable[[str], str], rng: np.random.Generator, name: str
) -> None:
    """Long enough to be cut into parts, whose sums meet in the same order for any threads."""
    force_isa(name)
    case = make_case(rng, lengths=(901, 2, 300), rows=(3, 1, 0), page_tokens=2, dim=8)
    budgets = [Budget(pages=20), Budget(mass=0.7, per="query"), Budget(share=0.3)]
    results = []
    for threads in (1, 2, 5):
        simd = Simd(name, threads)
        picked = simd.select(case, budgets)
        digest = simd.select(case, [budgets[0]], "digest")
        results.append(
            (
                *(picked.pages, picked.scores, digest.pages, digest.scores),
                *simd.attend(case),
                *simd.attend(case, picked),
            )
        )
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
