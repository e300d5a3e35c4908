"""The lab measures what choosers choose: tokens with weights, and virtual rows."""

from __future__ import annotations

import math

import numpy as np

from cxlkv import Budget
from cxlkv.bench.lab.heads import mass_of
from cxlkv.demo.forms import joined

from ..ndp.test_choosers import DIM, GROUP, HEADS, PAGE, Texts, kept, weights_of


def test_forms_side_by_side_attend_as_each_alone(seed: int) -> None:
    """As the lab has them: rows of pages, of weighed tokens and with virtual rows are one call."""
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
