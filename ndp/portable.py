"""NDP compiled by numba, for CPUs that the C core has no kernels for, and for programs without it.

Three uses: a CPU for which the C core has plain C only (numba compiles for whatever CPU runs it); a
program beside the memory that maps a pool and scans pages where they lie, found by
cxlkv.ndp.mapped, without the C core; and a second implementation for the tests, which shares no
line with the C core. It wants `pip install 'cxlkv[numba]'`. (The file is not called numba.py, so
that `import numba` means one thing wherever it is read.)

Same meaning as cxlkv.ndp.reference, on the pages of `Stored`; sums are float32.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPE_BYTES, DTYPES, KVLayout
from cxlkv.ndp.compiled import (
    DIGEST,
    EXACT,
    LOG_SUM,
    Floats,
    Halves,
    Strides,
    Whole,
    attend_parts,
    score,
)
from cxlkv.ndp.engine import Budget, Selection, pages_of_share, uniform

PARTS = 32  # pieces of work of an attend, however many threads there are: it decides the sums
_turn = threading.Lock()  # numba's simplest threading layer ends the program on concurrent calls


@dataclass(frozen=True)
class Pieces:
    """Where the K, V or digests of a sequence's pages lie in a memory, counted in elements.

    starts [pages]: of each page's first head; -1 for a page that is not there any more. strides:
    from head to head, and from token to token (of a digest: from minima to maxima).
    """

    starts: Whole
    strides: Strides


@dataclass(frozen=True)
class Stored:
    """One layer of one sequence in memory that this process has mapped; nothing is copied.

    memory: one axis of elements: uint16 with the bits of bfloat16 or float16, or float32. The last
    page may be partly filled. digests: None where there are none; then method "digest" is refused.
    """

    memory: npt.NDArray[np.uint16] | npt.NDArray[np.float32]
    layout: KVLayout
    tokens: int
    keys: Pieces
    values: Pieces
    digests: Pieces | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        layout, tokens = self.layout, self.layout.page_tokens
        if self.memory.ndim != 1 or not self.memory.flags.c_contiguous:
            raise BadArgumentError("memory is one contiguous axis of elements")
        if self.memory.itemsize != DTYPE_BYTES[layout.dtype]:
            raise BadArgumentError(f"memory of {self.memory.dtype} holds no {layout.dtype}")
        self._check("keys", self.keys, self.pages, tokens, layout.head_dim)
        self._check("values", self.values, self.pages, tokens, layout.value_head_dim)
        if self.digests:
            self._check("digests", self.digests, self.tokens // tokens, 2, layout.head_dim)

    def _check(self, name: str, pieces: Pieces, pages: int, rows: int, dim: int) -> None:
        """That no page reaches outside the memory: the kernels do not look."""
        head, token = pieces.strides
        last = (self.layout.kv_heads - 1) * head + (rows - 1) * token + dim
        if len(pieces.starts) < pages or head < 0 or token < dim:
            raise BadArgumentError(f"{name}: {pages} starts, and strides of at least {dim} wanted")
        lowest, highest = pieces.starts.min(initial=0), pieces.starts.max(initial=-1)
        if lowest < -1 or (highest >= 0 and highest + last > len(self.memory)):
            raise BadArgumentError(f"{name}: pieces from {lowest} to {highest} leave the memory")

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.layout.page_tokens)

    @property
    def elements(self) -> tuple[Halves, Floats, int]:
        """(16-bit memory, 32-bit memory, dtype code), one of the two empty."""
        memory = self.memory.view()
        memory.flags.writeable = False  # writable or not would be two types, compiled twice
        halves, wholes = np.empty(0, np.uint16), np.empty(0, np.float32)
        halves.flags.writeable = wholes.flags.writeable = False
        code = DTYPES.index(self.layout.dtype)
        if DTYPES[code] == "float32":
            return halves, memory.view(np.float32), code
        return memory.view(np.uint16), wholes, code

    def low(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


# ---- select ----


def in_rows(stored: Stored, queries: Floats, position: int) -> tuple[Floats, Whole]:
    """Rows [rows, q_heads, dim] as [kv_heads, rows * group, dim], and the first and the last
    position that each of these sees; the first row's own one is `position`."""
    rows, q_heads, dim = queries.shape
    heads = stored.layout.kv_heads
    grouped = queries.reshape(rows, heads, q_heads // heads, dim).transpose(1, 0, 2, 3)
    own = range(position, position + rows)
    seen = np.array([(stored.low(p), p) for p in own], np.int64)
    return np.ascontiguousarray(grouped).reshape(heads, -1, dim), np.repeat(
        seen, q_heads // heads, axis=0
    )


def page_scores(stored: Stored, queries: Floats, seen: Whole, kind: int, scale: float) -> Floats:
    """[kv_heads, queries, pages]; -inf where a query does not see a page."""
    layout, pages = stored.layout, stored.pages
    out = np.full((layout.kv_heads, queries.shape[1], pages), -np.inf, np.float32)
    low = int(seen[0, 0]) // layout.page_tokens
    calls = [(stored.keys, kind, low, pages)]
    if kind == DIGEST:
        if stored.digests is None:
            raise BadArgumentError("method digest: these pages have no digests")
        complete = max(low, stored.tokens // layout.page_tokens)
        calls = [(stored.digests, DIGEST, low, complete), (stored.keys, EXACT, complete, pages)]
    for pieces, how, first, last in calls:
        if first < last and pieces.starts[first:last].min() < 0:
            raise BadArgumentError(f"pages {first} to {last} are in sight, but not all are there")
        with _turn:
            score(
                *stored.elements,
                pieces.starts[:last],
                pieces.strides,
                first,
                stored.tokens,
                layout.page_tokens,
                queries,
                seen,
                how,
                np.float32(scale),
                out,
            )
    return out


def lists_of(scores: Floats, rows: int, budget: Budget) -> Floats:
    """Scores by query [kv_heads, rows * group, pages] as scores by list [lists, kv_heads, pages].

    The best over the queries, or their mean share of the attention; one NaN makes it NaN.
    """
    heads, _, pages = scores.shape
    by_row = scores.reshape(heads, rows, -1, pages)
    axes: tuple[int, ...] = (2,) if budget.per == "query" else (1, 2)
    if budget.mass is not None:
        weights = np.exp(by_row - by_row.max(axis=3, keepdims=True))
        by_list = (weights / weights.sum(axis=3, keepdims=True, dtype=np.float64)).mean(axis=axes)
    else:
        by_list = by_row.max(axis=axes)
    lists: Floats = by_list.reshape(heads, -1, pages).swapaxes(0, 1).astype(np.float32, copy=False)
    if budget.union == "kv_head":
        return lists
    merged: Floats = lists.mean(axis=1) if budget.mass is not None else lists.max(axis=1)
    return merged[:, None].repeat(heads, axis=1)


def order_of(scores: Floats) -> Whole:
    """Numbers in the order of preference, no two of a list equal: a larger score, else the lower
    page; NaN above all; -0 equals 0."""
    bits = (scores + np.float32(0)).view(np.int32)
    ranks = np.where(np.isnan(scores), 0x7F800001, bits ^ (bits >> 31 & 0x7FFFFFFF))
    return (ranks.astype(np.int64) << 32) - np.arange(scores.shape[-1])


def choose(stored: Stored, scores: Floats, first_position: int, budget: Budget) -> list[Whole]:
    """The pages that a budget keeps of one list, scores [kv_heads, pages], by head."""
    page_tokens, pages = stored.layout.page_tokens, scores.shape[1]
    low = stored.low(first_position) // page_tokens
    sinks = max(low, min(budget.sinks, pages))
    recent = max(sinks, first_position // page_tokens + 1 - budget.recent)
    recent = pages if budget.recent == 0 else recent
    chosen = np.zeros(scores.shape, np.bool_)
    chosen[:, low:sinks] = chosen[:, recent:] = True
    order = order_of(scores)[:, sinks:recent]
    free = recent - sinks
    if budget.mass is not None:
        for head, row in enumerate(scores):
            best = sinks + np.argsort(order[head])[::-1]
            held = np.cumsum([row[chosen[head]].sum(dtype=np.float64), *row[best]])[:-1]
            enough = row[best] <= 0 if budget.mass >= 1 else held >= budget.mass
            count = int(np.argmax(enough)) if enough.any() else free
            chosen[head, best[:count]] = True
    else:
        wanted = budget.pages or pages_of_share(budget.share or 0, pages - low)
        wanted = min(free, wanted - (sinks - low + pages - recent))
        if wanted > 0:
            threshold = np.partition(order, free - wanted, axis=1)[:, free - wanted]
            chosen[:, sinks:recent] = order >= threshold[:, None]
    return [np.flatnonzero(row) for row in chosen]


def select(
    stored: Sequence[Stored],
    queries: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
    budgets: Sequence[Budget],
    *,
    method: str = "exact",
    scale: float | None = None,
) -> Selection:
    """As Batch.select, on stored pages: methods "exact" and "digest"; queries [rows, q_heads, dim].

    Takes memory for a score of each query and page.
    """
    given, layout = checked(stored, queries, starts), stored[0].layout
    budget = uniform(budgets)
    if len(budgets) not in (1, len(stored)):
        raise BadArgumentError(f"{len(budgets)} budgets for {len(stored)} sequences")
    if method not in ("exact", "digest"):
        raise BadArgumentError(f"method {method!r}: exact or digest")
    if method == "digest" and any(b.mass is not None for b in budgets):
        raise BadArgumentError("a budget of attention mass needs method exact")
    scale = layout.head_dim**-0.5 if scale is None else scale
    lists: list[tuple[list[Whole], Floats]] = []
    scored = fetched = 0
    for i, own in enumerate(stored):
        own_budget = budgets[0 if len(budgets) == 1 else i]
        rows = int(starts[i + 1] - starts[i])
        if rows == 0:
            nothing = [np.empty(0, np.int64)] * layout.kv_heads
            lists += [(nothing, np.empty((layout.kv_heads, 0), np.float32))] * (
                budget.per == "sequence"
            )
            continue
        kind = DIGEST if method == "digest" else LOG_SUM if own_budget.mass is not None else EXACT
        got, seen = in_rows(own, given[starts[i] : starts[i + 1]], own.tokens - rows)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and shows as such
            by_list = lists_of(page_scores(own, got, seen, kind, scale), rows, own_budget)
        for row, scores in enumerate(by_list):
            position = own.tokens - rows + row
            last = position if budget.per == "query" else own.tokens - 1
            scores = scores[:, : last // layout.page_tokens + 1]
            chosen = choose(own, scores, position, own_budget)
            lists.append((chosen, scores))
            fetched += sum(int(filled(own, pages).sum()) for pages in chosen)
        low, complete = int(seen[0, 0]) // layout.page_tokens, own.tokens // layout.page_tokens
        kept = max(0, complete - low) * (2 if kind == DIGEST else layout.page_tokens)
        scored += kept + own.tokens - max(low, complete) * layout.page_tokens
    element = DTYPE_BYTES[layout.dtype]
    return pack(
        *(lists, layout.kv_heads, budget.per, starts),
        scored * layout.kv_heads * layout.head_dim * element,
        fetched * layout.token_bytes // (layout.layers * layout.kv_heads),
    )


def checked(stored: Sequence[Stored], queries: Floats, starts: npt.NDArray[np.int32]) -> Floats:
    """The queries as float32; raises BadArgumentError for what the kernels could not read."""
    layout = stored[0].layout
    if any(own.layout != layout for own in stored):
        raise BadArgumentError("sequences of one call have one layout")
    if len(starts) != len(stored) + 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise BadArgumentError(f"starts {starts}: wanted 0 and {len(stored)} ends, ascending")
    shape = queries.shape
    if len(shape) != 3 or shape[0] != starts[-1] or shape[2] != layout.head_dim:
        raise BadArgumentError(f"queries {shape}: wanted [{starts[-1]}, q_heads, dim]")
    if shape[1] == 0 or shape[1] % layout.kv_heads:
        raise BadArgumentError(f"{shape[1]} query heads on {layout.kv_heads} kv heads")
    if any(own.tokens < rows for own, rows in zip(stored, np.diff(starts), strict=True)):
        raise BadArgumentError("a sequence has fewer tokens than query rows")
    return queries.astype(np.float32)


def filled(stored: Stored, pages: Whole) -> Whole:
    """Tokens that pages hold."""
    tokens = stored.layout.page_tokens
    return np.minimum(tokens, stored.tokens - pages * tokens)


def pack(
    lists: list[tuple[list[Whole], Floats]],
    heads: int,
    per: str,
    starts: npt.NDArray[np.int32],
    scored: int,
    fetched: int,
) -> Selection:
    k = max((len(pages) for chosen, _ in lists for pages in chosen), default=0)
    pages = np.full((len(lists), heads, k), -1, np.int32)
    scores = np.full((len(lists), heads, k), -np.inf, np.float32)
    counts = np.zeros((len(lists), heads), np.int32)
    for i, (chosen, values) in enumerate(lists):
        for head, own in enumerate(chosen):
            pages[i, head, : len(own)] = own
            scores[i, head, : len(own)] = values[head, own]
            counts[i, head] = len(own)
    return Selection(pages, scores, counts, scored, fetched, per, starts)


# ---- attend ----


def attend(
    stored: Sequence[Stored],
    queries: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
    *,
    picked: Selection | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Floats, Floats]:
    """As Batch.attend, on stored pages: out [rows, q_heads, value_dim] and lse, both float32."""
    given, layout = checked(stored, queries, starts), stored[0].layout
    scale = layout.head_dim**-0.5 if scale is None else scale
    if picked is not None:
        wanted = len(given) if picked.per == "query" else len(stored)
        if picked.pages.ndim != 3 or picked.pages.shape[:2] != (wanted, layout.kv_heads):
            raise BadArgumentError(
                f"picked.pages {picked.pages.shape}: wanted [{wanted}, {layout.kv_heads}, k]"
            )
    out = np.zeros((*given.shape[:2], layout.value_head_dim), np.float32)
    lse = np.full(given.shape[:2], -np.inf, np.float32)
    for i, own in enumerate(stored):
        rows = range(starts[i], starts[i + 1])
        every = np.broadcast_to(np.arange(own.pages, dtype=np.int32), (layout.kv_heads, own.pages))
        if picked is None:
            blocks = [(rows.start, rows.stop, every)]
        elif picked.per == "sequence":
            blocks = [(rows.start, rows.stop, picked.pages[i])]
        else:
            blocks = [(row, row + 1, picked.pages[row]) for row in rows]
        for first, last, pages in blocks if rows else ():
            got, seen = in_rows(own, given[first:last], own.tokens - (rows.stop - first))
            block, sums = attend_list(own, pages, got, seen, scale, softcap or 0.0)
            out[first:last] = out_rows(block, last - first)
            lse[first:last] = out_rows(sums, last - first)
    return out, lse


def out_rows(by_head: Floats, rows: int) -> Floats:
    """[kv_heads, rows * group, ...] as [rows, q_heads, ...]."""
    heads, rest = by_head.shape[0], by_head.shape[2:]
    return by_head.reshape(heads, rows, -1, *rest).swapaxes(0, 1).reshape(rows, -1, *rest)


def attend_list(
    stored: Stored,
    pages: npt.NDArray[np.int32],
    queries: Floats,
    seen: Whole,
    scale: float,
    softcap: float,
) -> tuple[Floats, Floats]:
    """(out [kv_heads, n, value_dim], lse [kv_heads, n]) over pages [kv_heads, k]."""
    if pages.max(initial=-1) >= stored.pages:
        raise BadArgumentError(f"page {pages.max()}: the sequence has {stored.pages}")
    heads, count, _ = queries.shape
    parts = max(1, min(PARTS // heads, pages.shape[1] // 8))
    state = np.zeros((heads, parts, count, 2), np.float32)
    state[..., 0] = -np.inf
    out = np.zeros((heads, parts, count, stored.layout.value_head_dim), np.float32)
    with _turn:
        attend_parts(
            *stored.elements,
            stored.keys.starts,
            stored.keys.strides,
            stored.values.starts,
            stored.values.strides,
            np.ascontiguousarray(pages, np.int32),
            stored.tokens,
            stored.layout.page_tokens,
            queries,
            seen,
            np.float32(scale),
            np.float32(softcap),
            state,
            out,
        )
    with np.errstate(all="ignore"):
        top = state[..., 0].max(axis=1)
        share = np.where(state[..., 0] == -np.inf, 0, np.exp(state[..., 0] - top[:, None]))
        total = (share * state[..., 1]).sum(axis=1)
        merged = (share[..., None] * out).sum(axis=1)
        merged = np.where(total[..., None] == 0, 0, merged / total[..., None])
        lse = np.where(total == 0, -np.inf, top + np.log(total))
    return merged.astype(np.float32), lse.astype(np.float32)
