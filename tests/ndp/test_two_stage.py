"""Two-stage selection: sketches are what they are said to be, and choices nearly those of "exact".

With recall=1 every token is scored by its key, and the choice must be that of "exact"; at the
default the recall is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Budget, CXLPool, KVLayout, LayerGroup, Selection, Sequence, _core
from cxlkv.arrays import Floats
from cxlkv.errors import BadArgumentError

from ..support import reference
from ..support.lengths import matrix

ISAS = ("serial", "avx2", "avx512_bf16", "neon")  # those that differ in sketches
PAGES = 1100


@contextmanager
def filled(
    keys: Floats,
    *,
    page_tokens: int = 8,
    dtype: str = "float32",
    window: int | None = None,
    threads: int = 1,
    sketch: bool = True,
    path: str = "anonymous:",
) -> Iterator[tuple[CXLPool, Sequence]]:
    """A pool of one layer with keys [tokens, kv_heads, dim], which are the values, too."""
    _, heads, dim = keys.shape
    group = LayerGroup(layers=1, kv_heads=heads, head_dim=dim, dtype=dtype, window=window)
    layout = KVLayout.of([group], page_tokens=page_tokens)
    held = keys.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    capacity = 2 * held.nbytes * 3 + (8 << 20)
    made = CXLPool.create(
        path, layout=layout, capacity=capacity, threads=threads, sketch=sketch, checksum=False
    )
    with made as pool:
        sequence = pool.sequence()
        sequence.append(0, held, held, rewind=len(held))
        yield pool, sequence


def recall_of(chosen: Selection, exact: Selection) -> float:
    lists = exact.pages.shape[-1]
    pairs = zip(exact.pages.reshape(-1, lists), chosen.pages.reshape(-1, lists), strict=True)
    return float(np.mean([np.isin(want[want >= 0], got).mean() for want, got in pairs]))


def scores_by_page(chosen: Selection) -> list[dict[int, float]]:
    k = chosen.pages.shape[-1]
    rows = zip(chosen.pages.reshape(-1, k), chosen.scores.reshape(-1, k), strict=True)
    return [dict(zip(pages.tolist(), scores.tolist(), strict=True)) for pages, scores in rows]


# ---- what a sketch is ----


@pytest.mark.parametrize(("dim", "page_tokens"), [(128, 16), (40, 20), (100, 1)])
def test_sketches_lie_in_the_pool_as_documented(
    rng: np.random.Generator, tmp_path: Path, dim: int, page_tokens: int
) -> None:
    keys = rng.standard_normal((3 * page_tokens, 2, dim)).astype(np.float32)
    path = tmp_path / "pool"
    with filled(keys, page_tokens=page_tokens, path=str(path)) as (pool, sequence):
        geometry = _core.pool_geometry(pool._handle)
        codes, scales = sketches_of(path, geometry, page_tokens, dim, 3)
        for head in range(2):
            want_codes, want_scales = reference.sketched(keys[:, head])
            differ = (codes[:, head] != want_codes).mean()
            assert differ < 2e-3, "a channel on a border may differ by rounding"
            np.testing.assert_allclose(scales[:, head], want_scales, rtol=2e-3)
        assert sequence.tokens(0) == len(keys)


def sketches_of(
    path: Path, geometry: dict[str, int], page_tokens: int, dim: int, pages: int
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Codes [tokens, 2, dim], scales [tokens, 2] of the first pages (memory-layout.md)."""
    raw = np.fromfile(path, np.uint8)
    lines, blocks = -(-dim // 16), -(-page_tokens // 16)
    first = geometry["extents_offset"] + geometry["layers_offset"] + geometry["sketches_offset"]
    piece = geometry["sketch_piece_bytes"]
    assert piece == blocks * (lines + 1) * 64
    size = pages * 2 * piece
    block = raw[first : first + size].reshape(pages, 2, blocks, lines + 1, 64)
    scales = block[..., lines, :].copy().view(np.float32)  # [pages, 2, blocks, 16]
    words = block[..., :lines, :].copy().view("<u4")  # [pages, 2, blocks, lines, 16 tokens]
    codes = np.stack([words >> 2 * i & 3 for i in range(16)], axis=-1).astype(np.int64)
    codes = codes.transpose(0, 2, 4, 1, 3, 5).reshape(pages, blocks * 16, 2, lines * 16)
    codes = codes[:, :page_tokens, :, :dim].reshape(-1, 2, dim)
    scales = scales.transpose(0, 2, 3, 1).reshape(pages, blocks * 16, 2)[:, :page_tokens]
    return codes, scales.reshape(-1, 2)


def test_an_estimate_is_right_along_the_key_itself(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((50, 96)).astype(np.float32)
    codes, scales = reference.sketched(keys)
    for token in range(50):
        own = float((keys[token].astype(np.float64) ** 2).sum())
        got = reference.estimates(codes, scales, keys[token].astype(np.float64), 1.0)[token]
        assert got == pytest.approx(own, rel=1e-9)


# ---- recall=1: the choice of "exact" ----

BUDGETS = (
    Budget(pages=40, sinks=1, recent=2),
    Budget(pages=25, sinks=0, recent=0),
    Budget(share=0.05, union="layer"),
    Budget(pages=30, per="sequence"),
    Budget(pages=30, per="sequence", union="layer", sinks=3, recent=0),
)


@matrix(
    name=ISAS,
    case=[
        (32, 8, 4, "float32", None),
        (20, 10, 1, "float32", None),
        (64, 20, 2, "bfloat16", None),
        (16, 16, 3, "float16", None),
        (32, 16, 2, "bfloat16", 18_000),
        (100, 16, 8, "bfloat16", None),
    ],
    times=2,
)
def test_all_tokens_scored_by_their_keys_are_exact(
    rng: np.random.Generator,
    force_isa: Callable[[str], str],
    name: str,
    case: tuple[int, int, int, str, int | None],
) -> None:
    """On whole numbers, whose sums are the same in any order; ties are many."""
    dim, page_tokens, group, dtype, window = case
    tokens = (PAGES + (200 if window else 0)) * page_tokens + page_tokens // 2
    keys = rng.integers(-3, 4, (tokens, 2, dim)).astype(np.float32)
    q = rng.integers(-3, 4, (3, 2 * group, dim)).astype(np.float32)
    force_isa(name)
    with filled(keys, page_tokens=page_tokens, dtype=dtype, window=window) as (_, sequence):
        for budget in BUDGETS:
            exact = sequence.select(0, q, budget, method="exact", scale=1.0)
            got = sequence.select(0, q, budget, method="two_stage", recall=1, scale=1.0)
            assert got.stages is not None
            assert got.stages.lists > 0
            np.testing.assert_array_equal(got.pages, exact.pages)
            np.testing.assert_array_equal(got.scores, exact.scores)
            assert got.bytes_fetched == exact.bytes_fetched


def test_a_batch_of_long_and_short_sequences(rng: np.random.Generator) -> None:
    """Forks that differ at the end, and one that is too short for estimates."""
    keys = rng.integers(-3, 4, (PAGES * 8, 2, 32)).astype(np.float32)
    with filled(keys) as (pool, sequence):
        fork, short = sequence.fork(), pool.sequence()
        more = rng.integers(-3, 4, (9, 2, 32)).astype(np.float32)
        fork.append(0, more, more, rewind=9)
        short.append(0, more, more, rewind=9)
        batch = pool.batch([sequence, short, fork])
        q = rng.integers(-3, 4, (4, 4, 32)).astype(np.float32)
        starts = np.array([0, 1, 2, 4], np.int32)
        budgets = [Budget(pages=n) for n in (30, 2, 50)]
        exact = batch.select(0, q, starts, budgets, "exact", 1.0)
        got = batch.select(0, q, starts, budgets, "two_stage", 1.0, recall=1)
        np.testing.assert_array_equal(got.pages, exact.pages)
        assert got.stages is not None
        assert got.stages.lists == 3 * 2, "those of the short one are exact"


# ---- less than all ----


@matrix(name=ISAS, recall=[(0.9, 0.85), (0.98, 0.96), (0.999, 0.99)])
def test_recall_is_about_what_was_asked_for(
    rng: np.random.Generator,
    force_isa: Callable[[str], str],
    name: str,
    recall: tuple[float, float],
) -> None:
    wanted, least = recall
    keys = rng.standard_normal((4096 * 16, 2, 64)).astype(np.float32)
    force_isa(name)
    with filled(keys, page_tokens=16, dtype="bfloat16") as (_, sequence):
        budget = Budget(pages=4096 // 20)
        recalls = []
        for q in rng.standard_normal((4, 8, 64)).astype(np.float32):  # one alone is short at times
            exact = sequence.select(0, q, budget, method="exact")
            got = sequence.select(0, q, budget, method="two_stage", recall=wanted)
            recalls.append(recall_of(got, exact))
            assert got.bytes_scored < 0.3 * exact.bytes_scored
        assert np.mean(recalls) >= least
        for head in range(2):
            both, ours, theirs = np.intersect1d(got.pages[head], exact.pages[head], False, True)
            difference = exact.scores[head][theirs] - got.scores[head][ours]
            assert len(both) > 100
            assert difference.min() > -1e-5, "scores are true ones"
            assert (difference < 1e-5).mean() > 0.9, "and mostly of a page's best token"


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_sketches_are_read_from_a_thousand_tokens_on(
    rng: np.random.Generator, page_tokens: int
) -> None:
    keys = rng.standard_normal((2048, 2, 64)).astype(np.float32)
    q = rng.standard_normal((1, 4, 64)).astype(np.float32)
    for tokens, lists in (({16: 1100, 64: 2048}[page_tokens], 2), (1000, 0)):
        with filled(keys[:tokens], page_tokens=page_tokens, dtype="bfloat16") as (_, sequence):
            exact = sequence.select(0, q, Budget(share=0.2), method="exact")
            got = sequence.select(0, q, Budget(share=0.2), method="two_stage")
            assert got.stages is not None
            assert got.stages.lists == lists
            assert recall_of(got, exact) > (0.8 if lists else 0.999)


def test_auto_reads_sketches_where_there_are_some(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((PAGES * 8, 1, 16)).astype(np.float32)
    q = rng.standard_normal((1, 16)).astype(np.float32)
    with filled(keys) as (_, sequence):
        stages = sequence.select(0, q, top_k=20).stages
        assert stages is not None
        assert "two_stage: 1 lists by sketches" in str(stages)
        assert sequence.select(0, q, Budget(mass=0.5)).stages is None
        assert sequence.select(0, q, Budget(share=0.9)).method == "exact"
        few = sequence.select(0, q, Budget(share=0.9), method="two_stage").stages
        assert str(few).startswith("exact: too few pages for estimates to pay")
    with filled(keys, sketch=False) as (_, sequence):
        assert sequence.select(0, q, top_k=20).stages is None
        with pytest.raises(BadArgumentError, match=r"no sketches .*use method exact or digest"):
            sequence.select(0, q, top_k=20, method="two_stage")


# ---- "sketch": the estimates alone ----


@matrix(
    name=ISAS,
    case=[
        (32, 8, 4, "float32", 70),
        (100, 16, 1, "bfloat16", 300),
        (64, 20, 2, "float16", 40),
        (128, 16, 6, "bfloat16", 90),
    ],
)
def test_sketch_chooses_by_estimates(
    rng: np.random.Generator,
    force_isa: Callable[[str], str],
    name: str,
    case: tuple[int, int, int, str, int],
) -> None:
    """Of few pages, too: nothing of a complete page is read but its sketch."""
    dim, page_tokens, group, dtype, pages = case
    tokens = pages * page_tokens + 3
    keys = rng.standard_normal((tokens, 2, dim)).astype(np.float32)
    q = rng.standard_normal((1, 2 * group, dim)).astype(np.float32)
    force_isa(name)
    with filled(keys, page_tokens=page_tokens, dtype=dtype) as (pool, sequence):
        budget = Budget(pages=pages // 5, sinks=1, recent=2)
        got = sequence.select(0, q, budget, method="sketch", scale=0.25)
        assert got.method == "sketch"
        assert got.stages is None
        forced = 2 * (page_tokens * 2 + 3) * dim * (4 if dtype == "float32" else 2)
        sketches = 2 * (pages - 2) * _core.pool_geometry(pool._handle)["sketch_piece_bytes"]
        assert got.bytes_scored == sketches + forced
        held = keys.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).astype(np.float32)
        for head in range(2):
            codes, scales = reference.sketched(held[: pages * page_tokens, head])
            logits, slack = np.full(len(codes), -np.inf), 0.0
            for query in q[0, head * group : (head + 1) * group].astype(np.float64):
                logits = np.maximum(logits, reference.estimates(codes, scales, query, 0.25))
                rounding = np.abs(reference.hadamard(query)).max() / 254  # a query has 8 bits
                reach = np.abs(codes - 1.5).sum(-1) * scales * 0.25
                slack = max(slack, float((reach * rounding).max()) + 0.01)  # and codes at borders
            best = logits.reshape(pages, page_tokens).max(1)
            free = [page for page in got.pages[0, head].tolist() if 1 <= page < pages - 1]
            assert len(free) == pages // 5 - 3
            scores = dict(zip(got.pages[0, head].tolist(), got.scores[0, head], strict=True))
            np.testing.assert_allclose([scores[page] for page in free], best[free], atol=slack)
            left_out = np.setdiff1d(np.arange(1, pages - 1), free)
            assert best[left_out].max() <= best[free].min() + 2 * slack


def test_sketch_needs_sketches(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((160, 1, 16)).astype(np.float32)
    for sketch, budget, match in (
        (False, Budget(pages=5), "no sketches"),
        (True, Budget(mass=0.5), "mass"),
    ):
        with (
            filled(keys, sketch=sketch) as (_, sequence),
            pytest.raises(BadArgumentError, match=match),
        ):
            sequence.select(0, keys[:1, 0], budget, method="sketch")


@pytest.mark.parametrize("recall", [0.49, 1.01, float("nan"), -1])
def test_a_recall_that_is_none(rng: np.random.Generator, recall: float) -> None:
    keys = rng.standard_normal((8, 1, 16)).astype(np.float32)
    with filled(keys) as (_, sequence), pytest.raises(BadArgumentError, match=r"0\.5 to 1"):
        sequence.select(0, keys[0], top_k=1, recall=recall)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 0.0, 1e-42])
def test_keys_that_are_no_numbers(rng: np.random.Generator, odd: float) -> None:
    """Like "exact": NaN is chosen and seen; infinities, zeros and denormals are scored."""
    keys = rng.standard_normal((PAGES * 8, 1, 16)).astype(np.float32)
    keys[777, 0, 3] = odd
    keys[2001, 0, :] = odd
    q = rng.standard_normal((2, 16)).astype(np.float32)
    with filled(keys) as (_, sequence):
        exact = sequence.select(0, q, top_k=30, method="exact")
        got = sequence.select(0, q, top_k=30, method="two_stage", recall=0.999)
        assert recall_of(got, exact) >= 0.9
        broken = exact.pages[~np.isfinite(exact.scores)]
        assert np.isin(broken, got.pages).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, 0.0])
def test_queries_that_are_no_numbers(rng: np.random.Generator, odd: float) -> None:
    keys = rng.standard_normal((PAGES * 8, 1, 16)).astype(np.float32)
    q = np.full((1, 16), odd, np.float32)
    with filled(keys) as (_, sequence):
        exact = sequence.select(0, q, top_k=30, method="exact")
        got = sequence.select(0, q, top_k=30, method="two_stage")
        np.testing.assert_array_equal(got.pages, exact.pages)


def test_equal_keys_are_chosen_as_exact_does() -> None:
    """A sample in which nearly all pages may be chosen: then exactly, without the sketches."""
    keys = np.ones((PAGES * 8, 1, 16), np.float32)
    with filled(keys) as (_, sequence):
        exact = sequence.select(0, keys[0], top_k=30, method="exact")
        got = sequence.select(0, keys[0], top_k=30, method="two_stage")
        np.testing.assert_array_equal(got.pages, exact.pages)
        assert got.stages is not None
        assert got.stages.lists == 0
        assert got.bytes_scored < 1.2 * exact.bytes_scored


def test_threads_change_nothing(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((PAGES * 8, 2, 32)).astype(np.float32)
    q = rng.standard_normal((4, 32)).astype(np.float32)
    with filled(keys) as (pool, sequence):
        got = []
        for threads in (1, 3):
            pool.set_threads(threads)
            got.append(sequence.select(0, q, top_k=40, method="two_stage", recall=0.9))
        np.testing.assert_array_equal(got[0].pages, got[1].pages)
        np.testing.assert_array_equal(got[0].scores, got[1].scores)
        assert got[0].stages == got[1].stages


def test_more_tokens_pass_in_one_place_than_are_kept(rng: np.random.Generator) -> None:
    """There sketches are read a second time: the same tokens are scored, once."""
    q = rng.standard_normal((4, 32)).astype(np.float32)
    keys = rng.standard_normal((PAGES * 8, 2, 32)).astype(np.float32)
    keys[800:1040] += 2 * np.stack([q[:2].mean(axis=0), q[2:].mean(axis=0)])
    with filled(keys) as (pool, sequence):
        exact = sequence.select(0, q, top_k=40, method="exact")
        got = []
        for threads in (1, 3):
            pool.set_threads(threads)
            got.append(sequence.select(0, q, top_k=40, method="two_stage"))
    for each in got:
        assert each.stages is not None
        assert each.stages.lists == 2
        assert 2 * 240 < each.stages.tokens < PAGES * 8
        assert recall_of(each, exact) > 0.95
        # Who is chosen was scored by its keys.
        both = np.isin(each.pages, exact.pages)
        assert np.isin(each.scores[both], exact.scores).mean() > 0.95
    np.testing.assert_array_equal(got[0].pages, got[1].pages)
    assert got[0].stages == got[1].stages


def test_audits_measure_the_recall(rng: np.random.Generator) -> None:
    keys = rng.standard_normal((PAGES * 8, 2, 32)).astype(np.float32)
    with filled(keys) as (pool, sequence):
        pool.admin.audit = 1.0
        for _ in range(3):
            sequence.select(0, rng.standard_normal((4, 32)).astype(np.float32), top_k=40)
        totals = pool.admin.overview().totals
        assert totals["audited_selects"] == 3
        assert totals.recall is not None
        assert 0.8 < totals.recall <= 1


# ---- sequences that share pages ----


@matrix(
    method=["exact", "digest", "two_stage", "attention"],
    window=[None, 12_000],
    dense=[None, 0, 3],
    times=2,
)
def test_forks_in_one_batch_are_as_each_alone(
    rng: np.random.Generator, method: str, window: int | None, dense: int | None
) -> None:
    """Shared pages are scored in one pass; nobody's choice changes, and fewer bytes are read. The
    row `dense` attends to all pages."""
    every = [Budget(pages=30 + i, dense_layers=int(i == dense)) for i in range(4)]
    keys = rng.integers(-3, 4, ((PAGES + 600) * 8 + 5, 2, 16)).astype(np.float32)
    with filled(keys, window=window) as (pool, sequence):
        forks = [sequence, sequence.fork(), sequence.fork(), sequence.fork()]
        forks[2].truncate((PAGES + 100) * 8)
        for fork, tokens in zip(forks, (0, 900, 700, 30), strict=True):
            more = rng.integers(-3, 4, (tokens, 2, 16)).astype(np.float32)
            fork.append(0, more, more, rewind=tokens)
        q = rng.integers(-3, 4, (4, 4, 16)).astype(np.float32)
        alone = [
            f.select(0, q[i], every[i], method=method, recall=1, scale=1.0)
            for i, f in enumerate(forks)
        ]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
            budgets = [every[i] for i in order]
            batch = pool.batch([forks[i] for i in order])
            got = batch.select(0, q[order], np.arange(5), budgets, method, 1.0, recall=1)
            for row, i in enumerate(order):
                counts = got.counts[row, 0]
                np.testing.assert_array_equal(got.pages[row, :, :counts], alone[i].pages)
                np.testing.assert_array_equal(got.scores[row, :, :counts], alone[i].scores)
            if method != "two_stage":  # each reads the keys of its own tokens
                assert got.bytes_scored < 0.8 * sum(a.bytes_scored for a in alone)


# ---- audits ----


@pytest.mark.parametrize("short", [False, True])
def test_an_alarm_when_recall_falls_short(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture, short: bool
) -> None:
    """The right keys are all in one channel once they are turned: 2 bits say little of such ones,
    and the sample, which hardly meets them, does not know."""
    keys = rng.standard_normal((PAGES * 8, 1, 32)).astype(np.float32)
    back = reference.hadamard(np.eye(32)).T
    q = (np.array([[4.0] + [-1.0] * 31]) @ back).astype(np.float32)
    if short:
        keys[:: 8 * 61] = 30 * back[0]
    with filled(keys) as (pool, sequence):
        pool.admin.audit = 1
        for _ in range(16):
            assert not caplog.records, "one is not enough"
            # Of few pages one that is missed by chance is much.
            sequence.select(0, q, top_k=20 if short else 400, method="two_stage", recall=0.95)
    assert len(caplog.records) == short
    assert not short or "0.95 is asked for: ask for more recall, or use" in caplog.text
