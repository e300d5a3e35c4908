"""The same of this project's methods, by select() of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv import Budget, CXLPool, KVLayout
from cxlkv.ndp import scorers
from cxlkv.ndp.engine import METHODS, Selection
from cxlkv.sequence import Sequence as Tokens
from tests.authors.asked import Asked, Floats

Doubles = npt.NDArray[np.float64]
CAPACITY = 1 << 28


@dataclass(frozen=True)
class Scores:
    """of [lists, pages]; shares of attention are logs. chosen: of each budget, [lists, pages]."""

    of: Doubles
    chosen: list[npt.NDArray[np.bool_]]


def scores(
    method: str,
    asked: Asked,
    page_tokens: int,
    budgets: Sequence[Budget],
    learned: Floats | None = None,
) -> Scores:
    """budgets: of one union. learned: [kv_heads, n], or None for what the method learns from these
    keys."""
    heads, tokens, dim = asked.keys.shape
    pages, union = tokens // page_tokens, budgets[0].union
    layout = KVLayout(
        layers=1, kv_heads=heads, head_dim=dim, page_tokens=page_tokens, dtype="float32"
    )
    keys, queries = asked.keys.transpose(0, 1).contiguous().numpy(), asked.rows[0, :, 0].numpy()
    with CXLPool.create("anonymous:", layout=layout, capacity=CAPACITY) as pool:
        sequence = pool.sequence()
        sequence.append(0, keys, keys)
        scorer = None if method in METHODS else scorers.of(method)
        if scorer and scorer.calibrated:
            learn(pool, method, sequence, keys, learned)
        all_pages = Budget(pages=pages, sinks=0, recent=0, union=union)
        every, *some = (
            sequence.select(0, queries, budget, method=method, scale=asked.scale)
            for budget in (all_pages, *budgets)
        )
        # Of a list for the layer all heads have the same.
        lists = 1 if union == "layer" else heads
        found = by_page(every, every.scores, pages)[:lists]
        chosen = [by_page(one, np.ones_like(one.scores), pages)[:lists] > 0 for one in some]
        if scorer.log_sums if scorer else method == "attention":
            found = np.log(np.maximum(found, 1e-300))
    return Scores(found, chosen)


def learn(
    pool: CXLPool, method: str, sequence: Tokens, keys: Floats, learned: Floats | None
) -> None:
    if learned is not None:
        pool.calibrate(method, learned[None])
        return
    fork = sequence.fork()  # with a token more: it learns from all pages but the last
    fork.append(0, keys[:1], keys[:1])
    pool.calibrate(method, fork)
    fork.release()


def by_page(picked: Selection, values: npt.NDArray[np.float32], pages: int) -> Doubles:
    """[lists, pages]: a value of each page that is chosen, 0 of others."""
    lists = picked.pages.reshape(-1, picked.pages.shape[-1])
    found = np.zeros((len(lists), pages))
    for row, named, own in zip(found, lists, values.reshape(lists.shape), strict=True):
        row[named[named >= 0]] = own[named >= 0]
    return found
