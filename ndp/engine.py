"""Budgets and selections: what every NDP backend takes and returns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Array, BudgetRow, View
from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import format_bytes, no_share, parse_share
from cxlkv.numbers import is_real, is_whole

METHODS_TAKEN = (
    *("exact", "digest", "two_stage", "auto", "attention"),
    *("all", "kept", "scorer", "sketch"),
)  # by their numbers in the core
METHODS = tuple(name for name in METHODS_TAKEN if name not in ("all", "kept", "scorer"))
UNIONS = ("kv_head", "layer")
PERS = ("query", "sequence")
RECALL = 0.98
PAGES_MAX = 2**31 - 1  # page numbers are int32
AMOUNTS = ("pages", "share", "mass")
COUNTS = ("sinks", "recent", "dense_layers", "refresh")
REFRESH_MAX = 1024  # steps
SHARE = 0.15
"""Share of the pages, where a budget names none: docs/how-to/budgets.md says what it costs."""
SHARES = {"share": "a share of the pages", "mass": "a share of the attention"}
STAGED_TOKENS = 1024
"""Sketches are read of sequences from so many tokens on."""
ALL = 3  # in place of an amount, in the C core: all pages, of which no key is read


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many pages a selection may name: one of pages, share and mass; none is SHARE.

    pages: that many. share: this part of the pages that the query sees, rounded up. mass: the
    fewest pages that hold this part of the attention (methods "exact" and "attention" only). The
    first `sinks` and the last `recent` pages are always in and count; they are more than the budget
    only when it is smaller than they are. union: a list for each kv head, or one for the layer.
    per: a list for each query row, or one for all rows of a sequence.

    dense_layers: the first so many layers attend to all pages, and nothing is read to choose them.
    by_layer: these layers have that many pages, or that share or mass, instead: {5: 0.2}. Layers
    are numbered as the pool's, from 0.

    refresh: a step of one token more may choose among four times the pages of its budget, those
    that were best when all were looked at, and what is new; for so many steps at most. Methods
    "exact" and "two_stage", a list for each kv head. 1: each step looks at all pages. It takes the
    least of a call's budgets.

    error: of a pool in "progressive", how far outputs may be off, root mean square, relative to the
    values' length, because lower planes are not read where they matter little; 0 reads all bits.
    An estimate, by which roundings are independent: values that are nearly the same are off by
    more, up to 0.1 (docs/decisions/0035-progressive.md). It takes the least of a call's budgets.
    """

    pages: int | None = None
    share: float | None = None
    mass: float | None = None
    sinks: int = 1
    recent: int = 2
    union: str = "kv_head"
    per: str = "query"
    dense_layers: int = 0
    by_layer: Mapping[int, float] = field(default_factory=dict, hash=False)
    refresh: int = 1
    error: float = 0.0

    def __post_init__(self) -> None:
        given = [name for name in AMOUNTS if getattr(self, name) is not None]
        if not given:
            object.__setattr__(self, "share", SHARE)
            given = ["share"]
        if len(given) != 1:
            raise BadArgumentError("a budget is one of pages=, share= and mass=, not several")
        amount = self._amount(given[0], getattr(self, given[0]))
        object.__setattr__(self, given[0], amount)
        for word in COUNTS:
            value: object = getattr(self, word)
            if not is_whole(value):
                raise BadArgumentError(f"{word}={value!r}: a whole number, 0 or more, is wanted")
        if not 1 <= self.refresh <= REFRESH_MAX:
            raise BadArgumentError(f"refresh={self.refresh}: 1 to {REFRESH_MAX} steps")
        check_error(self.error)
        if self.union not in UNIONS or self.per not in PERS:
            raise BadArgumentError(f"union is one of {UNIONS}, per one of {PERS}")
        layers: object = self.by_layer
        if not isinstance(layers, Mapping):
            raise BadArgumentError(f"by_layer={layers!r}: a mapping of layers to amounts is wanted")
        for layer in layers:
            if not is_whole(layer):
                raise BadArgumentError(f"by_layer: {layer!r} is no number of a layer")
        # Copies, so that the budget stays as it was checked, and of Python's types.
        amounts = {int(n): self._amount(given[0], of) for n, of in layers.items()}
        object.__setattr__(self, "by_layer", amounts)
        object.__setattr__(self, "error", float(self.error))
        for word in COUNTS:
            object.__setattr__(self, word, int(getattr(self, word)))

    @staticmethod
    def _amount(name: str, given: float) -> float:
        """Number of pages, or a share. Raises BadArgumentError."""
        if name != "pages":
            return parse_share(given, SHARES[name])
        if not is_real(given, 1) or given != int(given):
            raise BadArgumentError(f"a budget of {given!r} pages: a whole number, at least 1")
        return int(given)

    def chooses(self, layer: int) -> bool:
        """Whether there is anything to choose in this layer, or all pages are attended to."""
        share = 0.0 if self.share is None else self.by_layer.get(layer, self.share)
        return layer >= self.dense_layers and share < 1

    def row(self, layer: int) -> BudgetRow:
        """For a layer, as the C core takes it."""
        # No sequence has more pages than PAGES_MAX, so that a larger number means the same.
        forced = (min(self.sinks, PAGES_MAX), min(self.recent, PAGES_MAX))
        if layer < self.dense_layers:
            return BudgetRow(ALL, 0, 0.0, *forced)
        own = self.by_layer.get(layer)
        if self.pages is not None:
            return BudgetRow(0, min(int(own or self.pages), PAGES_MAX), 0.0, *forced)
        if self.share is not None:
            return BudgetRow(1, 0, own or self.share, *forced)
        assert self.mass is not None
        return BudgetRow(2, 0, own or self.mass, *forced)

    def decode_row(self, layer: int) -> BudgetRow:
        """row() for decode, which needs no scores: no key is read where all pages are attended
        to."""
        row = self.row(layer)
        return row if self.chooses(layer) else BudgetRow(ALL, 0, 0.0, row.sinks, row.recent)

    def pages_at_most(self, visible_pages: int, layer: int | None = None) -> int:
        """The longest list that the budget gives when `visible_pages` are in sight; in one layer,
        or in any."""
        if not is_whole(visible_pages):
            raise BadArgumentError(f"{visible_pages!r:.40} pages: a whole number, 0 or more")
        if layer is None:
            other = max([self.dense_layers, *(one + 1 for one in self.by_layer)])
            layers = {0, other, *self.by_layer}
            return max(self.pages_at_most(visible_pages, one) for one in layers)
        if not is_whole(layer):
            raise BadArgumentError(f"layer {layer!r:.40}: layers are counted from 0")
        row = self.row(layer)
        of_share = pages_of_share(row.amount, visible_pages)
        wanted = (row.pages, of_share, visible_pages, visible_pages)[row.kind]
        return min(visible_pages, max(wanted, row.sinks + row.recent))


ERROR_MAX = 1e30  # float32 has it, and its square need not be one


def check_error(error: object) -> None:
    if not is_real(error, 0, ERROR_MAX):
        raise BadArgumentError(f"error={error!r}: a number, 0 or more, and at most {ERROR_MAX:g}")


def least_error(budgets: Sequence[Budget]) -> float:
    """What attention to all of them together may take; 0 where there is none."""
    return min((budget.error for budget in budgets), default=0.0)


def pages_of_share(share: float, pages: int) -> int:
    """`share` of the pages, rounded up; 0.07 of 100 is 7, though no binary fraction."""
    return math.ceil(share * pages * (1 - 1e-12))


class Asked(NamedTuple):
    """What a select is asked for: arguments of Batch.select, checked or not.

    recall: what share of the pages that "exact" would choose is wanted of "two_stage". read_rate:
    GB/s at which the pool's memory is read; 0: what this machine was measured or assumed to do.
    scorer: the number of a method that is not in METHODS (scorers.number_of).
    """

    layer: int
    queries: View
    starts: npt.NDArray[np.int32]
    budgets: tuple[Budget, ...]
    method: str
    scale: float
    recall: float = RECALL
    read_rate: float = 0.0
    scorer: int = 0


def errors_of(recall: float) -> float:
    """By how many of its root mean square errors an estimate may be short of the threshold: as
    many as a normal one is but for half of the misses. The other half are pages near the
    threshold, which is of estimates, and so a bit high."""
    if not is_real(recall, 0.5, 1):
        raise BadArgumentError(f"recall={recall!r:.40}: 0.5 to 1")
    return _errors_of(float(recall))


@lru_cache(maxsize=64)
def _errors_of(recall: float) -> float:
    return NormalDist().inv_cdf((1 + recall) / 2) if recall < 1 else math.inf


@dataclass(frozen=True)
class Stages:
    """How a two-stage select went: lists (and heads) in which sketches were read, the root mean
    square error of their estimates in logits, tokens whose keys were read after that, bytes."""

    lists: int
    error: float
    tokens: int
    bytes_sketched: int
    bytes_keys: int

    def __str__(self) -> str:
        if not self.lists:
            return "exact: too few pages for estimates to pay, or keys too much alike"
        return (
            f"two_stage: {self.lists} lists by sketches ({self.bytes_sketched} bytes), which are "
            f"off by {self.error:.3g} (rms, logits); then the keys of {self.tokens} tokens, the "
            f"sample and the forced pages ({self.bytes_keys} bytes)"
        )


@dataclass(frozen=True, eq=False)
class VirtualRows:
    """Tokens that no page has and attention is to see, such as means of what was not chosen.

    k: float32 [lists, kv_heads, n, head_dim]; v: [lists, kv_heads, n, value_head_dim], the same n
    for all lists; log_counts: [lists, kv_heads, n], the log of how many tokens a row stands for: it
    is added to the row's logit, scale * q.k under the softcap. -inf: there is no such row, whatever
    k and v are. Each query of a list sees all of its rows, wherever the query is.
    """

    k: npt.NDArray[np.float32]
    v: npt.NDArray[np.float32]
    log_counts: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Selection:
    """The pages that a select chose.

    pages: int32 [rows or n, kv_heads, k], indices in the sequence, ascending, -1 padded;
    scores: float32, the same shape, -inf padded: scaled logits, or shares of the attention under a
    mass budget; counts: int32 [rows or n, kv_heads]. stages: of a two-stage select, how it went;
    str() of it says why. Where no token of a page was scored by its key, the page's score is an
    estimate. bytes_scored were read to choose; bytes_fetched are K and V of the chosen pages'
    tokens, as fetch and attend read them. method: what "auto" came to, or "kept" (Budget.refresh).

    A choice may have more, which attend takes and all else ignores. log_weights: float32 [rows or
    n, kv_heads, k, page_tokens], or [.., 1] for a number a page, added to the tokens' logits behind
    scale and softcap: the log of 1 / p for a token that was drawn with probability p. -inf leaves a
    token out, and a page of which nothing else is left is not read; a NaN among the values of a
    token that was left out still shows. NaN and +inf among the weights of tokens are refused. rows:
    tokens beside the pages'.
    """

    pages: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    bytes_scored: int
    bytes_fetched: int
    per: str
    starts: npt.NDArray[np.int32] = field(repr=False)
    stages: Stages | None = None
    method: str = ""
    log_weights: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    rows: VirtualRows | None = field(default=None, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether it is pages and nothing else."""
        return self.log_weights is None and self.rows is None

    def plain(self, what: str) -> Selection:
        """Itself; raises UnsupportedError where it is more than pages, for what ignores that."""
        if self.is_plain:
            return self
        raise UnsupportedError(
            f"{what} takes pages only, and this choice has log_weights or virtual rows: attend to "
            "it in the pool, by Batch.attend or Sequence.attend"
        )

    def at(self, place: int | None) -> Selection:
        """The same of each array's [place]: 0 is the first list without its axis, None puts an axis
        in front."""
        weights, rows = self.log_weights, self.rows
        return replace(
            self,
            pages=self.pages[place],
            scores=self.scores[place],
            counts=self.counts[place],
            log_weights=None if weights is None else weights[place],
            rows=None
            if rows is None
            else VirtualRows(rows.k[place], rows.v[place], rows.log_counts[place]),
        )

    def __repr__(self) -> str:
        *rows, heads = self.counts.shape
        low, high = int(self.counts.min(initial=PAGES_MAX)), int(self.counts.max(initial=0))
        pages = f"{high:,}" if low >= high else f"{low:,} to {high:,}"
        lists = f"{heads} kv heads" + "".join(f" of {n:,} {self._rows}" for n in rows)
        read, fetched = format_bytes(self.bytes_scored), format_bytes(self.bytes_fetched)
        by = f", chosen by {self.method}" if self.method else ""
        more = "" if self.log_weights is None else ", weighed"
        if self.rows is not None:
            more += f", {self.rows.log_counts.shape[-1]:,} virtual rows each"
        return f"<Selection: {pages} pages for {lists}{by}{more}; {read} read, {fetched} to fetch>"

    @property
    def _rows(self) -> str:
        return "queries" if self.per == "query" else "sequences"


@dataclass(frozen=True)
class Decoded:
    """A layer of a step, from Batch.decode.

    out: [rows, q_heads, value_head_dim], in the queries' dtype; lse: float32 [rows, q_heads].
    bytes_scored were read to choose pages, bytes_read are K and V that were attended to. method:
    how pages were chosen; "all" when all were attended to; "kept" among what was best in an earlier
    step (Budget.refresh). stages: as of a Selection.
    """

    out: Array
    lse: Array
    bytes_scored: int
    bytes_read: int
    method: str
    stages: Stages | None = None


def with_axis(picked: Selection) -> Selection:
    """Lists with their axis in front, also where a single list came without it."""
    return picked if picked.pages.ndim == 3 else picked.at(None)


BudgetLike = Budget | float | str
"""What stands for a budget: 0.05 and "5%" are Budget(share=0.05)."""


def budget_of(given: BudgetLike) -> Budget:
    """The Budget that was given, or that of a share of the pages. Raises BadArgumentError."""
    if isinstance(given, Budget):
        return given
    try:
        if is_whole(given):  # 1: all, or one page?
            raise no_share(given, SHARES["share"])
        return _of_share(parse_share(given, SHARES["share"]))
    except BadArgumentError as error:
        pages = given if is_whole(given, 1) else 64
        raise BadArgumentError(
            f'{error}. A number of pages is Budget(pages={pages}), in settings {{"pages": '
            f"{pages}}}; None, where it is allowed, is all"
        ) from None


@lru_cache(maxsize=64)  # decode steps ask for it in each layer
def _of_share(share: float) -> Budget:
    return Budget(share=share)


def same_pages(pages: npt.ArrayLike, kv_heads: int) -> Selection:
    """These pages of one sequence, for every head, as a select of per="sequence" names them."""
    chosen = np.asarray(pages, np.int32)
    lists = np.broadcast_to(chosen, (1, kv_heads, len(chosen)))
    return unscored(lists, np.array([0, 1], np.int32), "sequence")


def unscored(
    pages: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], per: str, bytes_fetched: int = 0
) -> Selection:
    """Lists [.., kv_heads, k] that were made without a look at the keys, as a Selection."""
    counts, scores = (pages >= 0).sum(-1, dtype=np.int32), np.zeros(pages.shape, np.float32)
    return Selection(np.ascontiguousarray(pages), scores, counts, 0, bytes_fetched, per, starts)


def uniform(budgets: Sequence[Budget]) -> Budget:
    """The first budget; raises when others differ in union or per, which hold for a whole call."""
    first = budgets[0]
    if len(budgets) > 1 and any((b.union, b.per) != (first.union, first.per) for b in budgets):
        raise BadArgumentError("budgets of one call share union= and per=")
    return first
