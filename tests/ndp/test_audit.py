"""Audits measure: recall and mass are those that the numpy reference finds, no more and no less."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from cxlkv import Budget, CXLPool, KVLayout, Sequence
from cxlkv.arrays import Floats
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Selection

from ..support import reference

TOKENS, HEADS, DIM, GROUP, PAGE_TOKENS = 90, 2, 8, 3, 4
LAYOUT = KVLayout(layers=1, kv_heads=HEADS, head_dim=DIM, page_tokens=PAGE_TOKENS, dtype="float32")


@pytest.fixture
def pool() -> Iterator[CXLPool]:
    with CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1) as made:
        yield made


def fill(pool: CXLPool, rng: np.random.Generator, tokens: int = TOKENS) -> tuple[Sequence, Floats]:
    sequence = pool.sequence()
    keys = rng.standard_normal((tokens, HEADS, DIM)).astype(np.float32) * 2
    sequence.append(0, keys, keys)
    return sequence, keys


def expected(
    all_keys: list[Floats], q: Floats, starts: list[int], budget: Budget, picked: Selection
) -> tuple[float, float]:
    """(recall, mass) of `picked` by the reference, list by list."""
    offsets = np.array(starts, np.int32)
    exact = reference.select(all_keys, q, offsets, [budget], page_tokens=PAGE_TOKENS)
    shares = [
        len(set(ours.tolist()) & set(theirs[theirs >= 0].tolist())) / (theirs >= 0).sum()
        for ours, theirs in zip(
            picked.pages.reshape(-1, picked.pages.shape[2]),
            exact.pages.reshape(-1, exact.pages.shape[2]),
            strict=True,
        )
    ]
    _, part = reference.attend(
        all_keys, all_keys, q, offsets, page_tokens=PAGE_TOKENS, picked=picked
    )
    _, whole = reference.attend(all_keys, all_keys, q, offsets, page_tokens=PAGE_TOKENS)
    return float(np.mean(shares)), float(np.exp(part - whole).mean())


@pytest.mark.parametrize("per", ["query", "sequence"])
@pytest.mark.parametrize("union", ["kv_head", "layer"])
@pytest.mark.parametrize("method", ["digest", "exact", "auto", "mean"])
def test_an_audit_is_what_the_reference_measures(
    pool: CXLPool, rng: np.random.Generator, method: str, union: str, per: str
) -> None:
    if method == "mean":
        pytest.importorskip("numba", reason="numba compiles scorers")
    sequences, keys = zip(*(fill(pool, rng, tokens) for tokens in (TOKENS, 61)), strict=True)
    q = rng.standard_normal((5, HEADS * GROUP, DIM)).astype(np.float32)
    budget = Budget(pages=5, union=union, per=per)
    pool.admin.audit = 1
    picked = pool.batch(sequences).select(0, q, [0, 2, 5], budget, method=method)
    totals = pool.admin.overview().totals
    recall, mass = expected(list(keys), q, [0, 2, 5], budget, picked)
    assert totals["audited_selects"] == 1
    assert totals.recall == pytest.approx(recall, abs=1e-9)
    assert totals.mass == pytest.approx(mass, abs=1e-5)
    assert 0 < mass < 1
    assert method in ("digest", "mean") or recall == 1


def test_every_nth_select_is_audited_and_none_by_default(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    sequence, _ = fill(pool, rng)
    q = rng.standard_normal((HEADS, DIM)).astype(np.float32)

    def audited(selects: int) -> int:
        before = pool.admin.overview().totals["audited_selects"]
        for _ in range(selects):
            sequence.fork().select(0, q, top_k=4, method="digest")
        return pool.admin.overview().totals["audited_selects"] - before

    assert pool.admin.audit == 0
    assert audited(10) == 0
    pool.admin.audit = 0.25
    assert pool.admin.audit == 0.25
    assert audited(20) == 5
    pool.admin.audit = 0.01
    assert audited(99) == 0
    assert audited(1) == 1
    pool.admin.audit = 0
    assert audited(10) == 0


def test_the_mean_of_several_audits(pool: CXLPool, rng: np.random.Generator) -> None:
    sequence, keys = fill(pool, rng)
    pool.admin.audit = 1
    measured = []
    budget = Budget(pages=6)
    for _ in range(8):
        q = rng.standard_normal((1, HEADS * GROUP, DIM)).astype(np.float32)
        picked = sequence.select(0, q, budget, method="digest")
        measured.append(expected([keys], q, [0, 1], budget, picked))
    totals = pool.admin.overview().totals
    recall, mass = np.mean(measured, axis=0)
    assert totals["audited_selects"] == 8
    assert totals.recall == pytest.approx(recall, abs=1e-9)
    assert totals.mass == pytest.approx(mass, abs=1e-5)


def test_the_cost_is_counted_and_another_pool_is_not_audited(
    pool: CXLPool, rng: np.random.Generator
) -> None:
    other = CXLPool.create("anonymous:", layout=LAYOUT, capacity="4MiB", threads=1)
    pool.admin.audit = 1
    q = rng.standard_normal((HEADS, DIM)).astype(np.float32)
    for each in (pool, other):
        sequence, keys = fill(each, rng)
        picked = sequence.select(0, q, top_k=4, method="digest")
        stats = each.stats()
        if each is other:
            assert each.admin.overview().totals["audited_selects"] == stats["attended_bytes"] == 0
            continue
        assert stats["scored_bytes"] == picked.bytes_scored + keys.nbytes
        assert stats["attended_bytes"] == picked.bytes_fetched + 2 * keys.nbytes


@pytest.mark.parametrize("rows", [0, 1])
def test_queries_that_see_nothing_count_for_nothing(
    pool: CXLPool, rng: np.random.Generator, rows: int
) -> None:
    """An empty batch of queries, and keys that are no numbers."""
    sequence, keys = fill(pool, rng)
    if rows:
        sequence.append(0, np.full_like(keys[:1], math.nan), keys[:1])
    pool.admin.audit = 1
    q = rng.standard_normal((rows, HEADS, DIM)).astype(np.float32)
    pool.batch([sequence]).select(0, q, [0, rows], Budget(pages=3))
    assert pool.admin.overview().totals["audited_selects"] == 0


def test_a_share_that_is_none_is_refused(pool: CXLPool) -> None:
    for wrong in (-0.1, 1.5, math.nan):
        with pytest.raises(BadArgumentError, match="a share of the selects"):
            pool.admin.audit = wrong
    assert pool.admin.audit == 0
