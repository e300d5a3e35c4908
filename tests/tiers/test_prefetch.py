"""Prefetchers: what they guess, what they move, when they stop and try again.

One kv head, pages of 4 tokens. In the stories a page's id is its place in the one sequence, and a
unit is page * layers + layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from cxlkv import Batch, CXLPool
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.tiers.local import LocalTier
from cxlkv.tiers.prefetch import FLOOR, REST, TRIAL, Hinted, LastStep, LayerAhead, Prefetcher

from ..conftest import MakePool

STARTS = np.array([0, 1], np.int32)
LAYERS, PAGES = 2, 40


def chosen(*pages: int) -> Selection:
    lists = np.array(pages, np.int32)[None, None]
    counts = np.full((1, 1), len(pages), np.int32)
    return Selection(lists, np.zeros(lists.shape, np.float32), counts, 0, 0, "query", STARTS)


@pytest.fixture
def far(make_pool: MakePool) -> CXLPool:
    return make_pool(layers=LAYERS, kv_heads=1)


@pytest.fixture
def batch(far: CXLPool, rng: np.random.Generator) -> Batch:
    sequence = far.sequence()
    for layer in range(LAYERS):
        rows = rng.standard_normal((2, 4 * PAGES + 2, 1, 8), np.float32)
        sequence.append(layer, *rows)
    assert sequence.pages.tolist() == list(range(PAGES))
    return far.batch([sequence])


@pytest.fixture
def tier(far: CXLPool) -> LocalTier:
    return LocalTier(far, 20 * 256)


def near(tier: LocalTier) -> list[int]:
    units, _, resident = tier.hotness()
    return [int(unit) for unit in units[resident]]


def test_the_last_step_is_near_before_the_next(batch: Batch, tier: LocalTier) -> None:
    prefetcher = LastStep(tier, batch)
    assert prefetcher.accuracy == 1
    assert prefetcher.observe(0, chosen(1, 5, 9)) == 3
    assert prefetcher.observe(1, chosen(1, 2)) == 2
    assert near(tier) == [2, 3, 5, 10, 18]  # units: 2 * page + layer
    batch.fetch(0, chosen(1, 5, 7))
    assert tier.stats()["reads_local"] == 2
    assert prefetcher.observe(0, chosen(1, 5, 7)) == 1
    assert prefetcher.accuracy == 2 / 3
    assert prefetcher.stats() == {"state": "on", "accuracy": 2 / 3, "promoted": 6}


def test_the_next_layer_gets_the_pages_of_this_one(batch: Batch, tier: LocalTier) -> None:
    prefetcher = LayerAhead(tier, batch)
    assert prefetcher.observe(0, chosen(3, 4)) == 2
    assert near(tier) == [7, 9]
    assert prefetcher.observe(1, chosen(3, 6)) == 0  # the last layer has no next one
    assert prefetcher.accuracy == 1 / 2


def test_the_open_tail_and_padding_are_no_guess(batch: Batch, tier: LocalTier) -> None:
    assert LastStep(tier, batch).observe(0, chosen(-1, 0, PAGES)) == 1
    assert near(tier) == [0]


def test_a_full_tier_takes_no_more(batch: Batch, tier: LocalTier) -> None:
    prefetcher = LastStep(tier, batch)
    assert prefetcher.observe(0, chosen(*range(25))) == 20
    assert tier.stats()["refused_no_room"] == 5
    assert prefetcher.observe(0, chosen(*range(25))) == 0


def wander(prefetcher: Prefetcher, steps: int, first: int = 0) -> int:
    """Selections of which no two neighbours share a page; returns what was moved."""
    return sum(prefetcher.observe(0, chosen((first + i) % PAGES)) for i in range(steps))


def test_who_is_wrong_rests_looks_again_and_comes_back(batch: Batch, tier: LocalTier) -> None:
    prefetcher = LastStep(tier, batch)
    assert wander(prefetcher, TRIAL) > 0
    assert prefetcher.state == "on"
    assert wander(prefetcher, 1, first=TRIAL) == 0
    assert (prefetcher.state, prefetcher.accuracy) == ("resting", 0)
    assert wander(prefetcher, REST - 1) == 0
    assert prefetcher.state == "resting"
    assert wander(prefetcher, 1) == 0
    assert prefetcher.state == "shadow"
    promoted = tier.stats()["promoted"]
    assert wander(prefetcher, TRIAL) == 0  # guesses, moves nothing, and is wrong again
    assert prefetcher.state == "resting"
    for _ in range(REST + TRIAL - 1):
        assert prefetcher.observe(0, chosen(30, 31)) == 0
    assert tier.stats()["promoted"] == promoted
    assert prefetcher.state == "shadow"
    assert prefetcher.observe(0, chosen(30, 31)) == 2  # its guesses were right TRIAL times
    assert prefetcher.state == "on"
    assert prefetcher.accuracy == 1


def test_half_right_is_enough(batch: Batch, tier: LocalTier) -> None:
    prefetcher = LastStep(tier, batch)
    for i in range(3 * TRIAL):
        prefetcher.observe(0, chosen(0, 1 + i % (PAGES - 1)))
    assert prefetcher.accuracy == pytest.approx(FLOOR)
    assert prefetcher.state == "on"


def test_it_may_go_on_with_a_fork(batch: Batch, tier: LocalTier) -> None:
    """Forks share pages, and so units: what was learned and moved stays."""
    prefetcher = LastStep(tier, batch)
    prefetcher.observe(0, chosen(1, 5))
    child = batch.sequences[0].fork()
    prefetcher.batch = Batch(child._pool, child._layout, [child])
    assert prefetcher.observe(0, chosen(1, 5)) == 0
    assert prefetcher.accuracy == 1


# ---- hints: a query is guessed for a layer before it has its own ----


def best_pages(batch: Batch, layer: int, q: npt.NDArray[np.float32], count: int) -> list[int]:
    """By the largest product of any query head with any key; the open tail, which cannot be near,
    takes its place among them."""
    keys = np.asarray(batch.sequences[0].fetch(layer)[0], np.float64)[0].reshape(-1, 8)
    scores = (keys @ q[0].T.astype(np.float64)).max(1)
    scores[4 * PAGES + 2 :] = -np.inf  # not written
    best = np.argsort(-scores.reshape(-1, 4).max(1), kind="stable")[:count]
    return sorted(page for page in best.tolist() if page < PAGES)


def guess(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    return rng.standard_normal((1, 2, 8), np.float32)


ONLY_BEST = Budget(pages=6, sinks=0, recent=0)


def test_a_hint_brings_what_its_query_chooses(
    batch: Batch, tier: LocalTier, rng: np.random.Generator
) -> None:
    prefetcher, q = Hinted(tier, batch), guess(rng)
    wanted = best_pages(batch, 1, q, 6)
    moved = prefetcher.hint(1, q, STARTS, ONLY_BEST, "exact")
    assert moved == len(wanted) > 0
    assert near(tier) == [LAYERS * page + 1 for page in wanted]
    assert prefetcher.observe(1, chosen(*wanted)) == 0
    assert prefetcher.accuracy == 1
    assert prefetcher.stats() == {"state": "on", "accuracy": 1, "promoted": moved}


def test_a_hint_is_united_with_the_last_choice(
    batch: Batch, tier: LocalTier, rng: np.random.Generator
) -> None:
    prefetcher, q = Hinted(tier, batch), guess(rng)
    prefetcher.observe(0, chosen(1, 2, 3))
    prefetcher.hint(0, q, STARTS, ONLY_BEST, "exact")
    wanted = {*best_pages(batch, 0, q, 6), 1, 2, 3}
    assert near(tier) == [LAYERS * page for page in sorted(wanted)]


def test_what_was_guessed_last_stays(batch: Batch, tier: LocalTier) -> None:
    """20 slots for 2 layers: a layer keeps 10 units, those it named last."""
    prefetcher = Hinted(tier, batch)

    def name(*pages: int) -> None:
        prefetcher.observe(0, chosen(*pages))
        prefetcher.hint(0, None, STARTS, ONLY_BEST)

    name(0, 1, 2, 3)
    name(4, 5, 6, 7)
    assert near(tier) == [LAYERS * page for page in range(8)]
    name(0, 8, 9, 10)
    assert near(tier) == [LAYERS * page for page in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10)]
    name(11, 12, 13)
    assert near(tier) == [LAYERS * page for page in (0, 4, 5, 6, 8, 9, 10, 11, 12, 13)]
    assert tier.stats()["promoted"] == 4 + 4 + 3 + 3


def test_without_a_guess_it_is_the_last_choice(batch: Batch, tier: LocalTier) -> None:
    prefetcher = Hinted(tier, batch)
    assert prefetcher.hint(0, None, STARTS, ONLY_BEST) == 0
    prefetcher.observe(0, chosen(4, 7))
    assert near(tier) == []
    assert prefetcher.hint(0, None, STARTS, ONLY_BEST) == 2
    assert near(tier) == [8, 14]


def test_each_layer_has_its_part_of_the_slots(
    batch: Batch, tier: LocalTier, rng: np.random.Generator
) -> None:
    """20 slots, 2 layers: what is in guess and last choice goes first, then the guess."""
    prefetcher, q = Hinted(tier, batch), guess(rng)
    best = best_pages(batch, 0, q, 8)
    others = sorted(set(range(PAGES)) - set(best))[:8]
    prefetcher.observe(0, chosen(*sorted([best[-1], *others])))
    prefetcher.hint(0, q, STARTS, Budget(pages=8, sinks=0, recent=0), "exact")
    others = others[: 10 - len(best)]
    assert near(tier) == [LAYERS * page for page in sorted([*best, *others])]


def test_a_layer_that_has_no_tokens_yet_has_no_guess(far: CXLPool, tier: LocalTier) -> None:
    prefetcher = Hinted(tier, far.batch([far.sequence()]))
    assert prefetcher.hint(1, np.zeros((1, 2, 8), np.float32), STARTS, ONLY_BEST) == 0


def test_hints_of_another_batch_are_refused(batch: Batch, tier: LocalTier) -> None:
    with pytest.raises(BadArgumentError, match="2 sequences"):
        Hinted(tier, batch).hint(0, np.zeros((2, 2, 8), np.float32), [0, 1, 2], ONLY_BEST)


def test_wrong_hints_rest_and_try_again(
    batch: Batch, tier: LocalTier, rng: np.random.Generator
) -> None:
    prefetcher = Hinted(tier, batch)

    def step(page: int) -> int:
        moved = prefetcher.hint(0, guess(rng), STARTS, ONLY_BEST, "exact")
        prefetcher.observe(0, chosen(page))
        return moved

    for turn in range(TRIAL):
        step(turn % PAGES)
    assert prefetcher.state == "resting"
    promoted = tier.stats()["promoted"]
    for turn in range(REST):
        assert step(turn % PAGES) == 0
    assert prefetcher.state == "shadow"
    assert tier.stats()["promoted"] == promoted
