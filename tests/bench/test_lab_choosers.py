"""The lab measures what choosers choose: tokens with weights, and virtual rows."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cxlkv import Budget
from cxlkv.bench.lab import report
from cxlkv.bench.lab.heads import mass_of
from cxlkv.bench.lab.run import load_units, run
from cxlkv.demo.forms import Form, joined

from ..ndp.test_choosers import DIM, GROUP, HEADS, PAGE, Texts, kept, weights_of
from .test_lab import PLAN, model, texts

__all__ = ["model", "texts"]  # fixtures
ROOT = Path(__file__).parents[2]


def test_forms_side_by_side_attend_as_each_alone(seed: int) -> None:
    """Rows of pages, of weighed tokens and with virtual rows are one call, as in the lab."""
    of = Texts(seed)
    names = ("exact", "retro", "magicpig", "sparq_mean")
    sequences = [of.sequence.fork() for _ in names]
    q = of.drawn(len(names), HEADS * GROUP, DIM)
    each = [
        of.pool.batch([one]).select(0, q[at : at + 1], [0, 1], Budget(pages=6), name)
        for at, (one, name) in enumerate(zip(sequences, names, strict=True))
    ]
    starts = np.arange(len(names) + 1, dtype=np.int32)
    out, _ = of.pool.batch(sequences).attend(0, q, starts, joined(each, starts))
    for at, (one, picked) in enumerate(zip(sequences, each, strict=True)):
        alone, _ = of.pool.batch([one]).attend(0, q[at : at + 1], [0, 1], picked)
        np.testing.assert_allclose(np.asarray(out)[at], np.asarray(alone)[0], atol=1e-5)


def test_the_mass_of_a_choice_is_that_of_its_tokens(seed: int) -> None:
    of = Texts(seed, tokens=PAGE * 20)
    keys, _ = kept(of.sequence, 0)
    queries = of.queries.reshape(HEADS, GROUP, DIM)
    logits = np.einsum("hgd,htd->hgt", queries, keys) / math.sqrt(DIM)
    true = np.exp(logits - logits.max(-1, keepdims=True))
    true /= true.sum(-1, keepdims=True)
    for name in ("exact", "clusters"):
        picked = of.sequence.select(0, of.queries, Budget(pages=6), method=name)
        held = mass_of(picked.at(None), true.reshape(HEADS, GROUP, 20, PAGE))
        chosen = weights_of(picked, PAGE * 20) > -np.inf
        np.testing.assert_allclose(held, (true * chosen[:, None]).sum(-1).ravel(), atol=1e-5)


# ---- what holds of their figures ----


def test_tokens_are_no_list_of_pages() -> None:
    """A chooser's tokens lie in more pages than the oracle has: it is no bound of them."""
    oracle, exact, retro = (Form(name, 0.05) for name in ("oracle", "exact", "retro"))
    holds = report.keep_no_more_than_the_oracle
    assert holds([(oracle, 0.8), (exact, 0.79), (retro, 0.9)])
    assert not holds([(oracle, 0.8), (exact, 0.81), (retro, 0.7)])
    assert holds([(oracle, 0.8), (Form("exact", 0.15), 0.9)])


def test_choosers_are_held_against_the_best_of_their_pages(model: Path, tmp_path: Path) -> None:
    forms = (Form.full(), Form("exact", 0.1), Form("retro", 0.1), Form("oracle", 0.1))
    plan = replace(PLAN, forms=forms, variants=(), texts=("one",), steps=8, watched_every=4)
    run(tmp_path, model, plan, Console())
    found = report.find(plan, load_units(tmp_path, plan), "small")
    result = report.result_of(found)
    assert report.failed_checks(result) == []
    assert result.checks["no_form_keeps_more_than_the_best_pages"]
    most = {row.form.method: row.attained[1] for row in found.rows}
    assert 0.1 < most["retro"] <= 1
    worse = [replace(row, attained=(0, 1.01)) for row in found.rows]
    checks = report.result_of(replace(found, rows=worse)).checks
    assert not checks["no_form_keeps_more_than_the_best_pages"]


@pytest.mark.parametrize("name", ["methods-7000", "methods-2000"])
def test_the_results_of_the_page_of_methods_hold(name: str) -> None:
    """They said that a check did not, which was of choosers."""
    held = json.loads((ROOT / "docs/results" / f"{name}.json").read_text())
    kept = []
    for metric, values in held["metrics"].items():
        if (found := re.fullmatch(r"mass_(?!worst)(\w+)_(\d+)_percent", metric)) is not None:
            kept.append((Form(found[1], int(found[2]) / 100), values["samples"][0]))
    assert len(kept) > 40
    assert report.keep_no_more_than_the_oracle(kept)
    assert all(held["checks"].values())
