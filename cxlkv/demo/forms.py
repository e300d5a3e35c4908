"""Forms of attention side by side: the rows of one batch, each with its own method and budget.

All rows read the same tokens behind the same context, of which each is a fork, so that what the
model's matrices cost is paid once for all forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cxlkv.adapters.transformers import CXLCache, LayerStep
from cxlkv.errors import BadArgumentError
from cxlkv.ndp import scorers
from cxlkv.ndp.choosers import joined_rows
from cxlkv.ndp.engine import METHODS, Budget, Selection, unscored
from cxlkv.pool import CXLPool
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

Pages = npt.NDArray[np.int32]
Ranks = npt.NDArray[np.float64]
Number = TypeVar("Number", np.int32, np.float32)
CONTROLS = ("random", "newest", "oracle", "largest", "union")
"""Random pages, drawn anew in each step, layer and head; the newest ones; those to which
the row's own query would give the most attention, over all pages and on average over the query
heads of a kv head. largest and union take the attention of one head in place of the average: each
page's largest, or each head's best pages in turn until the list is full."""
COUNTED_EVERY = 16


class Form(NamedTuple):
    """A way to choose pages, and how many: a method of Batch.select, a control, or "full"."""

    method: str
    share: float
    sinks: int = Budget.sinks
    recent: int = Budget.recent
    first_layers: int = 0
    first_share: float = 1.0
    refresh: int = 1

    @classmethod
    def full(cls) -> Form:
        """All pages, from the pool."""
        return cls("full", 1.0)

    @property
    def name(self) -> str:
        if self.method == "full":
            return "full"
        words = [f"{self.method} {100 * self.share:g} %"]
        words += [f"sinks {self.sinks}"] * (self.sinks != Budget.sinks)
        words += [f"recent {self.recent}"] * (self.recent != Budget.recent)
        first = "dense" if self.first_share == 1 else f"at {100 * self.first_share:g} %"
        words += [f"first {self.first_layers} {first}"] * (self.first_layers > 0)
        words += [f"refresh {self.refresh}"] * (self.refresh > 1)
        return ", ".join(words)

    def budget(self) -> Budget:
        dense = self.first_share == 1
        return Budget(
            share=self.share,
            sinks=self.sinks,
            recent=self.recent,
            dense_layers=self.first_layers if dense else 0,
            by_layer={} if dense else dict.fromkeys(range(self.first_layers), self.first_share),
            refresh=self.refresh,
        )


class Outside(Protocol):
    """A way to rank pages that is neither the core's nor a scorer's, made for one context."""

    def rank(
        self, layer: int, sequences: Sequence[Tokens], queries: Tensor, wanted: int
    ) -> tuple[Ranks, int]:
        """Ranks [rows, kv_heads, pages] of pages for forks of the context and their queries [rows,
        q_heads, dim], the higher the better, of which the best `wanted` matter; and the bytes
        read.
        """
        ...

    def release(self) -> None: ...


@dataclass
class Read:
    """What a form reads on its own, of the steps that were counted: bytes over all layers that
    choose, and how many lists were chosen by sketches. kept: of the selects, one a layer and step,
    how many chose among pages that were best in an earlier step (Budget.refresh)."""

    steps: int = 0
    scored: int = 0
    fetched: int = 0
    sketched: int = 0
    selects: int = 0
    kept: int = 0

    def add(self, picked: Selection, is_new_step: bool) -> None:
        self.steps += is_new_step
        self.scored += picked.bytes_scored
        self.fetched += picked.bytes_fetched
        self.sketched += picked.stages.lists if picked.stages else 0
        self.selects += 1
        self.kept += picked.method == "kept"


@dataclass(frozen=True)
class Group:
    """Neighbouring rows from `first` on, with one method; a row with refresh is a group alone."""

    method: str
    first: int
    forms: tuple[Form, ...]
    batch: Batch

    @property
    def refreshes(self) -> bool:
        return self.forms[0].refresh > 1


class FormsCache(CXLCache):
    """A cache in which row i attends as forms[i] says; rows of one method stand side by side.

    Forks of one context share what a scan of keys reads. So that `read` has what a form reads on
    its own, its pages are chosen apart from the others' in one step of sixteen. One with refresh
    is alone in every step, and each is counted: a call has one refresh for all of its rows, and
    one step of sixteen would always meet, or always miss, the looks at all pages. seed: of the
    random pages. others: by their names, ways to choose of the context that the rows are forks of.
    """

    def __init__(
        self,
        pool: CXLPool,
        model: object,
        forms: Sequence[Form],
        sequences: Sequence[Tokens],
        seed: int = 0,
        others: Mapping[str, Outside] | None = None,
    ) -> None:
        if len(forms) != len(sequences):
            raise BadArgumentError(f"{len(forms)} forms for {len(sequences)} rows: one for each")
        self.others = dict(others or {})
        for method in {form.method for form in forms} - {*METHODS, *CONTROLS, "full", *self.others}:
            scorers.check(method)
        super().__init__(pool, model, sequences=sequences)
        self.seed = seed
        self.read: dict[Form, Read] = {form: Read() for form in forms}
        windows = pool.layout.windows
        self.first_chosen = next((at for at, window in enumerate(windows) if window is None), -1)
        self.chosen_steps = 0
        self.apart = [
            Group(form.method, at, (form,), pool.batch([sequences[at]]))
            for at, form in enumerate(forms)
        ]
        self.groups: list[Group] = []
        # Scorers take one row of forks after the other faster than all in one call.
        together = {*METHODS, *CONTROLS, "full", *self.others}
        for (method, _), rows in groupby(self.apart, key=neighbours):
            ones = list(rows)
            if method not in together:
                self.groups += ones
                continue
            first, of = ones[0].first, tuple(one.forms[0] for one in ones)
            batch = pool.batch(sequences[first : first + len(of)])
            self.groups.append(Group(method, first, of, batch))

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        if part.index == self.first_chosen:
            self.chosen_steps += 1
        counted = len(self.apart) == 1 or self.chosen_steps % COUNTED_EVERY == 1
        chosen = []
        for group in self.apart if counted else self.groups:
            last = group.first + len(group.forms)
            rows, lengths = queries[group.first : last], part.step.lengths[group.first : last]
            picked = self.choose_of(group.method, group.forms, group.batch, part, rows, lengths)
            chosen.append(picked)
            if counted or group.refreshes:
                self.read[group.forms[0]].add(picked, part.index == self.first_chosen)
        return joined(chosen, part.step.starts)

    def choose_of(
        self,
        method: str,
        forms: Sequence[Form],
        batch: Batch,
        part: LayerStep,
        queries: Tensor,
        lengths: npt.NDArray[np.int64],
    ) -> Selection:
        """The pages of rows that have one method; queries [rows, q_heads, dim]."""
        starts = np.arange(len(forms) + 1, dtype=np.int32)
        budgets = [form.budget() for form in forms]
        if method == "oracle":
            method = "attention"
        if method not in (*CONTROLS, "full", *self.others):
            rows = queries.contiguous()
            return batch.select(part.index, rows, starts, budgets, method, part.scale)
        heads, page_tokens = self.pool.layout.kv_heads, self.pool.layout.page_tokens
        counts = -(-lengths // page_tokens)
        rank, scored = np.zeros((len(forms), heads, int(counts.max()))), 0
        if method == "random":
            for drawn, form, length in zip(rank, forms, lengths.tolist(), strict=True):
                key = [self.seed, part.index, length, round(1e6 * form.share)]
                drawn[:] = np.random.default_rng(key).random(drawn.shape)
        elif method in self.others:
            most = int(counts.max())
            wanted = max(budget.pages_at_most(most, part.index) for budget in budgets)
            other = self.others[method]
            rank, scored = other.rank(part.index, batch.sequences, queries, wanted)
        elif method in ("largest", "union"):
            by_head = self.attention_of_heads(batch, part, queries, rank.shape[2])
            places = np.argsort(np.argsort(-by_head, axis=-1), axis=-1)
            rank[:] = by_head.max(axis=0) if method == "largest" else -places.min(axis=0)
        else:
            rank[:] = np.arange(rank.shape[2])
        pages = best_pages(rank, counts, budgets, part.index)
        tokens = int((pages >= 0).sum()) * page_tokens
        tokens -= int((-lengths % page_tokens).sum()) * heads  # of each last page
        a_token = self.pool.layout.stored_token_bytes // (self.pool.layout.layers * heads)
        return replace(unscored(pages, starts, "query", tokens * a_token), bytes_scored=scored)

    def attention_of_heads(
        self, batch: Batch, part: LayerStep, queries: Tensor, pages: int
    ) -> npt.NDArray[np.float32]:
        """The share of its attention that a query head gives to each page, [group, rows, kv_heads,
        pages]; queries [rows, q_heads, dim]."""
        rows, heads = len(queries), self.pool.layout.kv_heads
        members = queries.reshape(rows, heads, -1, queries.shape[-1]).unbind(2)
        found = np.zeros((len(members), rows, heads, pages), np.float32)
        starts, every = np.arange(rows + 1, dtype=np.int32), Budget(share=1.0)
        for shares, member in zip(found, members, strict=True):
            asked = (part.index, member.contiguous(), starts, every, "attention", part.scale)
            whole = batch.select(*asked)
            row, head, at = np.nonzero(whole.pages >= 0)
            shares[row, head, whole.pages[row, head, at]] = whole.scores[row, head, at]
        return found


def neighbours(group: Group) -> tuple[str, int]:
    """The same for rows that are chosen for together, where they stand side by side."""
    return group.method, group.first if group.refreshes else -1


def best_pages(
    rank: npt.NDArray[np.float64],
    counts: npt.NDArray[np.int64],
    budgets: Sequence[Budget],
    layer: int,
) -> Pages:
    """Lists of the pages of highest rank [rows, kv_heads, pages], as long as the budgets allow,
    the forced ones in; ascending, -1 padded. counts: the pages of each row."""
    lists = []
    for row, count, budget in zip(rank, counts.tolist(), budgets, strict=True):
        row[:, : budget.sinks] = np.inf
        row[:, count - budget.recent : count] = np.inf
        best = np.argsort(-row[:, :count], axis=1, kind="stable")
        best = np.sort(best[:, : budget.pages_at_most(count, layer)], axis=1)
        lists.append(best.astype(np.int32))
    return padded(lists, -1)


def joined(selections: Sequence[Selection], starts: Pages) -> Selection:
    """Selections of neighbouring rows as one."""
    return Selection(
        pages=padded([row for selection in selections for row in selection.pages], -1),
        scores=padded([row for selection in selections for row in selection.scores], -np.inf),
        counts=np.concatenate([selection.counts for selection in selections]),
        bytes_scored=sum(selection.bytes_scored for selection in selections),
        bytes_fetched=sum(selection.bytes_fetched for selection in selections),
        per="query",
        starts=starts,
        log_weights=joined_weights(selections),
        rows=joined_rows([one.rows for one in selections], [len(one.pages) for one in selections]),
    )


def joined_weights(selections: Sequence[Selection]) -> npt.NDArray[np.float32] | None:
    """0 where a selection has none."""
    given = [one.log_weights for one in selections]
    tokens = next((weights.shape[3] for weights in given if weights is not None), 0)
    if not tokens:
        return None
    every = [
        np.zeros((*one.pages.shape, tokens), np.float32) if weights is None else weights
        for one, weights in zip(selections, given, strict=True)
    ]
    return padded([row for weights in every for row in weights], 0)


def padded(rows: Sequence[npt.NDArray[Number]], empty: float) -> npt.NDArray[Number]:
    """Rows [kv_heads, k, ...] with k of their own as one array [rows, kv_heads, the largest k,
    ...]."""
    heads, _, *more = rows[0].shape
    most = max(row.shape[1] for row in rows)
    found = np.full((len(rows), heads, most, *more), empty, rows[0].dtype)
    for whole, row in zip(found, rows, strict=True):
        whole[:, : row.shape[1]] = row
    return found
