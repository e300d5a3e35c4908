"""The small model answers about facts in a pool from chosen pages, and not from random ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cxlkv import Budget
from cxlkv.adapters.transformers import layout_of
from cxlkv.demo.facts import Examiner, Plan, load_model, pool_for
from cxlkv.demo.forms import best_pages

SMALL = replace(Plan.of(2048), questions=16, seeds=(101,), together=8)


def test_few_chosen_pages_keep_the_answers_and_contexts_stay_as_they_are() -> None:
    model = load_model()
    with pool_for(layout_of(model), SMALL) as pool:
        examiner = Examiner(model, pool, SMALL)
        examiner.prefill()
        held = pool.stats()["pages_held"]
        every = examiner.ask(Budget(share=1.0))
        assert every.right_share >= 0.95
        for method in ("auto", "exact"):
            first, again = (examiner.ask(examiner.budget(0.05), method) for _ in range(2))
            assert first.answers == again.answers
            assert first.right_share >= 0.95 * every.right_share
            # The keys of a context are read once for the eight questions of a step, at most.
            assert first.bytes_scored <= 2048 * 512 / 8 + 512
        assert pool.stats()["pages_held"] == held
        examiner.release()
        assert pool.stats()["pages_held"] == 0
        assert pool.admin.check(deep=True)["clean"]


def test_plans_of_other_lengths() -> None:
    assert Plan.of(Plan.tokens) == Plan()
    long = Plan.of(65_536)
    assert (long.seeds, long.questions, long.together) == ((101,), 128, 1)


def test_random_pages_count_as_the_budget_does_and_hold_the_forced_ones() -> None:
    rank = np.random.default_rng(1).random((50, 2, 101))
    counts = np.full(50, 101)
    for share, count in ((0.001, 3), (0.05, 6), (1.0, 101)):
        pages = best_pages(rank.copy(), counts, [Budget(share=share)] * 50, 0)
        assert pages.shape == (50, 2, count)
        assert (np.diff(pages, axis=-1) > 0).all()
        assert (pages[..., 0] == 0).all()
        assert (pages[..., -2:] == [99, 100]).all()
    drawn = best_pages(rank, counts, [Budget(share=0.05)] * 50, 0)[..., 1:-2]
    assert len(np.unique(drawn)) > 80
