"""Digests, sketches, kept choices and special numbers of pools with an encoding; the rest of what
is scored and attended to is in tests/test_encodings.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, Selection, Sequence
from cxlkv.arrays import Doubles, Floats

from ..support import kept, reference
from ..support.lengths import matrix
from ..test_encodings import (
    BOTH,
    ENCODED,
    FP8,
    PAIRS,
    STEP,
    Case,
    case_of,
    drawn,
    layout_of,
    pool_of,
    rows_of,
)
from .test_refresh import DIM, HEADS, PAGE_TOKENS, Decoding, Model


def check_as_ever(got: Floats, want: Floats) -> None:
    """Rows that are summed side by side may differ in their last bits, where one is a NaN."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def scored(picked: Selection, pages: int) -> Floats:
    """[..., heads, pages]; minus infinity where a page was not chosen."""
    out = np.full((*picked.pages.shape[:-1], pages), -np.inf, np.float32)
    for place in np.ndindex(*picked.pages.shape[:-1]):
        count = int(picked.counts[place])
        out[place][picked.pages[place][:count]] = picked.scores[place][:count]
    return out


# ---- digests ----


def rows_to_bound(rng: np.random.Generator, tokens: int, dim: int) -> Floats:
    """Rows of all sizes, with zeros, equal rows, and channels that stand alone."""
    rows = rng.standard_normal((tokens, 2, dim)) * np.exp(3 * rng.standard_normal((tokens, 1, 1)))
    rows[::5] = 0
    rows[1::7] = rows[1]
    rows[2::9] *= 1e-6
    rows[3::11, :, dim // 2] = 1e4
    rows[4::13] = 0
    rows[4::13, :, 0] = -3
    return rows.astype(np.float32)


@matrix(
    k_encoding=["int8", "int4", FP8, "progressive"],
    sizes=[(16, 1), (80, 7), (128, 16), (100, 20), (30, 64)],
    times=2,
)
def test_a_digest_is_never_below_a_score(
    k_encoding: str, sizes: tuple[int, int], rng: np.random.Generator
) -> None:
    dim, page_tokens = sizes
    layout = layout_of((k_encoding, "none"), dim=dim, page_tokens=page_tokens)
    pages = 12
    tokens = pages * page_tokens
    keys = rows_to_bound(rng, tokens, dim)
    kept_keys = kept.kept(keys, k_encoding)
    with pool_of(layout, tokens) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, keys)
        for size in (1, 1e-3, 1e3):
            q = (size * rng.standard_normal((2, dim))).astype(np.float32)
            off = max(
                kept.score_error(kept_keys[:, head], q[head].astype(np.float64), 1.0, k_encoding)
                for head in range(2)
            )
            budget = Budget(pages=pages - 1, sinks=0, recent=0)
            bounds, exact = (
                scored(sequence.select(0, q, budget, method=method, scale=1.0), pages)
                for method in ("digest", "exact")
            )
            both = np.isfinite(bounds) & np.isfinite(exact)
            assert both.sum() >= both.size - 4
            assert (bounds[both] >= exact[both] - off).all()


def test_digests_choose_what_stands_out(rng: np.random.Generator) -> None:
    layout = layout_of(("int8", "int4"), dim=64, page_tokens=16)
    keys, values = drawn(rng, layout, 1600)
    q = rng.standard_normal((2, 64), np.float32)
    for page in (7, 23, 50, 71):
        keys[16 * page + 3] = 5 * q
    with pool_of(layout, 1600) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        picked = sequence.select(0, q, Budget(pages=8, sinks=0, recent=0), method="digest")
        for head in range(2):
            assert {7, 23, 50, 71} <= set(picked.pages[head].tolist())


@pytest.mark.parametrize("method", ["digest", "exact", "two_stage"])
def test_an_audit_is_of_what_is_kept(method: str, rng: np.random.Generator) -> None:
    layout = layout_of(("int8", "int8"), dim=32, page_tokens=8)
    case = case_of(rng, layout, (300,), (1,), 3)
    with pool_of(layout, 300) as pool:
        sequence = pool.sequence()
        sequence.append(0, case.keys[0], case.values[0])
        pool.admin.audit = 1
        picked = sequence.select(0, case.queries[0], Budget(pages=5), method=method)
        totals = pool.admin.overview().totals
        assert totals["audited_selects"] == 1
        mass = share_of(case, picked)
        assert totals.mass == pytest.approx(mass, abs=2 * case.logit_error() + 1e-4)
        assert 0 < mass < 1
        assert method != "exact" or totals.recall == 1


def share_of(case: Case, picked: Selection) -> float:
    """The mean share of the attention that chosen pages hold."""
    keys = [own.astype(np.float32) for own in case.kept(0)]
    page_tokens, heads = case.layout.page_tokens, case.layout.kv_heads
    group = case.queries.shape[1] // heads
    shares = []
    for q_head in range(case.queries.shape[1]):
        query = case.queries[0, q_head].astype(np.float64)
        head = q_head // group
        mass = reference.page_mass(keys[0][:, head], query, page_tokens, case.scale, 0)
        chosen = picked.pages.reshape(heads, -1)[head]
        shares.append(sum(mass[page] for page in chosen[chosen >= 0]))
    return float(np.mean(shares))


# ---- sketches ----


@pytest.fixture(
    params=[(16, "int8"), (20, "int8"), (20, "int4"), (16, FP8), (20, "progressive")], ids=str
)
def long_text(
    request: pytest.FixtureRequest, rng: np.random.Generator
) -> Iterator[tuple[CXLPool, Sequence, int]]:
    """A pool, a sequence of 1,100 pages and a half, how many pages."""
    page_tokens, encoding = request.param
    layout = layout_of((encoding, "int4"), dim=64, value_dim=16, page_tokens=page_tokens)
    tokens = 1100 * page_tokens + page_tokens // 2
    keys, values = drawn(rng, layout, tokens)
    with pool_of(layout, tokens, checksum=False) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        yield pool, sequence, 1101


def test_two_stages_choose_what_exact_does(
    long_text: tuple[CXLPool, Sequence, int], rng: np.random.Generator
) -> None:
    _, sequence, _ = long_text
    budgets = (Budget(pages=40), Budget(pages=25, sinks=0, recent=0, per="sequence"))
    hits, same = list[float](), list[bool]()
    for budget in budgets * 4:
        q = rng.standard_normal((2, 6, 64), np.float32)
        exact = sequence.select(0, q, budget, method="exact")
        every = sequence.select(0, q, budget, method="two_stage", recall=1)
        np.testing.assert_array_equal(every.pages, exact.pages)
        np.testing.assert_array_equal(every.scores, exact.scores)
        nearly = sequence.select(0, q, budget, method="two_stage")
        assert nearly.stages is not None
        if sequence._layout.k_encoding != "int4":  # keys in 4 bits are no more than twice a sketch
            assert nearly.stages.lists > 0
        k = exact.pages.shape[-1]
        hits += [
            np.isin(want, got).mean()
            for want, got in zip(
                exact.pages.reshape(-1, k), nearly.pages.reshape(-1, k), strict=True
            )
        ]
        same += [
            want[page] == score
            for want, got in zip(by_page(exact), by_page(nearly), strict=True)
            for page, score in got.items()
            if page in want
        ]
    assert np.mean(hits) > 0.85, hits
    assert np.mean(same) > 0.98  # a page of which no key was scored has its estimate


def by_page(picked: Selection) -> list[dict[int, float]]:
    k = picked.pages.shape[-1]
    pages, scores = picked.pages.reshape(-1, k), np.asarray(picked.scores).reshape(-1, k)
    return [
        dict(zip(p.tolist(), s.tolist(), strict=True)) for p, s in zip(pages, scores, strict=True)
    ]


# ---- kept choices ----


class Encoded(Decoding):
    """Whose scores are the pool's own: those of all pages but the worst."""

    def scores(self, i: int, q: Floats) -> Floats:
        pages = self.sequences[i].page_count(0)
        budget = Budget(pages=pages - 1, sinks=0, recent=0)
        picked = self.sequences[i].select(0, q[i : i + 1], budget, method="exact")
        first: Floats = scored(picked, pages)[0]
        return first


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_choices_are_kept_as_the_rules_say(pair: tuple[str, str], rng: np.random.Generator) -> None:
    budget = Budget(pages=9, refresh=8)
    layout = layout_of(pair, dim=DIM, page_tokens=PAGE_TOKENS, kv_heads=HEADS)
    with pool_of(layout, 3000) as pool:
        decoding = Encoded(pool, rng, (640, 901))
        models = [Model(budget, place) for place in range(2)]
        q, methods = decoding.queries(), set[str]()
        for _ in range(30):
            q = decoding.walk(q, 0.05)
            got = decoding.step(q, budget)
            methods.add(got.method)
            for i, model in enumerate(models):
                out = decoding.attended(i, q, model.step(decoding.scores(i, q)))
                np.testing.assert_allclose(np.asarray(got.out)[i], out, rtol=1e-5, atol=1e-5)
        assert methods == {"kept", "exact"}


# ---- special numbers ----


def outputs(sequence: Sequence, q: Floats) -> Iterator[Floats]:
    for method in ("exact", "digest", "attention", "two_stage"):
        picked = sequence.select(0, q, Budget(pages=3, sinks=0, recent=0), method=method)
        yield np.asarray(picked.scores)
    yield from (np.asarray(a) for a in sequence.attend(0, q))
    yield from (np.asarray(a) for a in sequence.fetch(0))


@matrix(encodings=ENCODED, outlier=[1e4, 1e30, 3e38, 1e-30, 1e-42, 0.0])
def test_finite_numbers_give_no_nan(
    outlier: float, encodings: tuple[str, str], rng: np.random.Generator
) -> None:
    layout = layout_of(encodings, dim=40, page_tokens=7)
    keys, values = drawn(rng, layout, 40)
    for rows in (keys, values):
        rows[5, 0, 3] = outlier
        rows[11] = outlier
        rows[12:19] = outlier * np.sign(rows[12:19])
        rows[39, 1] = -outlier
    with pool_of(layout, 100) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys[:33], values[:33])
        sequence.append(0, keys[33:], values[33:])
        for size in (1.0, 0.0, 1e-40):
            q = np.float32(size) * rng.standard_normal((2, 40), np.float32)
            if outlier < 1e30 or encodings[0] != "none":
                assert all(not np.isnan(made).any() for made in outputs(sequence, q)), size
        for kind, pages in enumerate(sequence.fetch(0)):
            want = kept.kept((keys, values)[kind], encodings[kind])
            check_kept(rows_of(pages, 40), want)
        if encodings[1] in kept.BITS and outlier <= 1e4:
            got = rows_of(sequence.fetch(0)[1], 40)
            longest = np.linalg.norm(values, axis=-1)
            assert (np.linalg.norm(got - values, axis=-1) <= 0.3 * longest + 1e-6).all()


def check_kept(got: Doubles, want: Doubles) -> None:
    largest = np.abs(want).max(axis=-1, keepdims=True)
    assert (np.abs(got - want) <= STEP["float32"] * largest + 1e-12).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pair", [*BOTH, ("int8", "none"), ("none", "int4")], ids="-".join)
def test_a_row_that_is_no_number_is_seen_and_hurts_no_other(
    bad: float, pair: tuple[str, str], rng: np.random.Generator
) -> None:
    """A key of head 0 that is no number: its page is chosen first, its score and what attends to it
    are NaN. Head 1, and rows that do not see it, are as ever."""
    layout = layout_of(pair, dim=40, page_tokens=8)
    keys, values = drawn(rng, layout, 44)
    q = rng.standard_normal((3, 2, 40), np.float32)
    found = []
    for there in (False, True):
        with pool_of(layout, 100) as pool:
            sequence = pool.sequence()
            k, v = keys.copy(), values.copy()
            if there:  # the last row sees it, those before it do not
                k[43, 0, 5] = bad
                v[43, 0, 6] = bad
            sequence.append(0, k, v)
            out, lse = (np.asarray(a) for a in sequence.attend(0, q))
            picked = sequence.select(0, q, Budget(pages=2, sinks=0, recent=0), method="exact")
            found.append((out, lse, np.asarray(picked.scores), picked.pages))
    for clean, hurt in zip(*found, strict=True):
        check_as_ever(hurt[:2], clean[:2])
        check_as_ever(hurt[2, 1], clean[2, 1])
    out, _, scores, pages = found[1]
    assert not np.isfinite(out[2, 0]).all()
    if pair[0] != "none":
        assert np.isnan(scores[2, 0]).any()
        assert 5 in pages[2, 0]


def test_a_page_with_a_row_that_is_no_number_is_chosen_by_its_digest(
    rng: np.random.Generator,
) -> None:
    layout = layout_of(("int8", "int8"), dim=40, page_tokens=8)
    keys, values = drawn(rng, layout, 80)
    keys[19, 0, 5] = np.nan
    with pool_of(layout, 100) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        q = rng.standard_normal((2, 40), np.float32)
        for method in ("digest", "exact", "two_stage"):
            picked = sequence.select(0, q, Budget(pages=2, sinks=0, recent=0), method=method)
            assert 2 in picked.pages[0]
            assert np.isnan(np.asarray(picked.scores)[0]).sum() == 1
            assert not np.isnan(np.asarray(picked.scores)[1]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_that_is_no_number_hurts_itself_only(bad: float, rng: np.random.Generator) -> None:
    layout = layout_of(("int8", "int4"), dim=40, page_tokens=8)
    keys, values = drawn(rng, layout, 80)
    q = rng.standard_normal((4, 40), np.float32)
    with pool_of(layout, 100) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, values)
        clean = np.asarray(sequence.attend(0, q)[0])
        q[1, 7] = bad
        out = np.asarray(sequence.attend(0, q)[0])
    check_as_ever(out[[0, 2, 3]], clean[[0, 2, 3]])
    assert not np.isfinite(out[1]).any()
    assert math.isnan(float(out[1, 0]))
