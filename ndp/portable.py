"""NDP compiled by numba, for CPUs that the C core has no kernels for, and for programs without it.

Three uses: a CPU for which the C core has plain C only (numba compiles for whatever CPU runs it); a
program beside the memory that maps a pool and scans pages where they lie, found by
cxlkv.ndp.mapped, without the C core; and a second implementation for the tests, which shares no
line with the C core. It wants `pip install 'cxlkv[numba]'`. (The file is not called numba.py, so
that `import numba` means one thing wherever it is read.)

Same meaning as cxlkv.ndp.reference, on the pages of `Stored`; sums are float32. Method "two_stage"
reads the sketches that the C core makes, as docs/decisions/0011-sketch.md says.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError
from cxlkv.layout import DTYPE_BYTES, DTYPES, KVLayout
from cxlkv.ndp.compiled import (
    DIGEST,
    EXACT,
    LANES,
    LOG_SUM,
    SKETCH_CHANNELS,
    SKETCH_TOKENS,
    Bits,
    Floats,
    Halves,
    Strides,
    Whole,
    attend_parts,
    estimate,
    score,
    score_tokens,
)
from cxlkv.ndp.engine import (
    RECALL,
    Budget,
    Selection,
    Stages,
    errors_of,
    pages_of_share,
    uniform,
)
from cxlkv.ndp.reference import hadamard

STAGED_PAGES = 1024  # sketches of fewer are not worth a sample
SAMPLE_PAGES = 16  # whose keys tell how far estimates are off
PARTS = 32  # pieces of work of an attend, however many threads there are: it decides the sums
_turn = threading.Lock()  # numba's simplest threading layer ends the program on concurrent calls


def _after_fork() -> None:
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Pieces:
    """Where K, V, digests or sketches of a sequence's pages lie in a memory, counted in elements.

    starts [pages]: of each page's first head; -1 for a page that is not there any more. strides:
    from head to head, and from token to token (of a digest: from minima to maxima; of a sketch:
    from 16 tokens to the next 16).
    """

    starts: Whole
    strides: Strides


@dataclass(frozen=True)
class Stored:
    """One layer of one sequence in memory that this process has mapped; nothing is copied.

    memory: one axis of elements: uint16 with the bits of bfloat16 or float16, or float32. The last
    page may be partly filled. digests, sketches: None where there are none; then method "digest" or
    "two_stage" is refused. Sketches are words of 4 bytes, also in a memory of 16 bits.
    """

    memory: npt.NDArray[np.uint16] | npt.NDArray[np.float32]
    layout: KVLayout
    tokens: int
    keys: Pieces
    values: Pieces
    digests: Pieces | None = None
    window: int | None = None
    sketches: Pieces | None = None

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
        if self.sketches:
            blocks, block = -(-tokens // SKETCH_TOKENS), sketch_elements(layout)
            self._check("sketches", self.sketches, self.tokens // tokens, blocks, block)
            starts = self.sketches.starts
            places = (*self.sketches.strides, *starts[starts >= 0])
            if np.any(np.mod(places, 4 // self.memory.itemsize)) or self.memory.ctypes.data % 4:
                raise BadArgumentError("sketches: pieces begin at multiples of 4 bytes")

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

    @property
    def words(self) -> tuple[Bits, Floats, Pieces]:
        """The memory as words of 4 bytes, whole numbers and floats, and its sketches in words."""
        if self.sketches is None:
            raise BadArgumentError(
                "method two_stage: these pages have no sketches (the pool was made with "
                "sketch=False): use method exact or digest"
            )
        memory = self.memory.view()
        memory.flags.writeable = False
        each = 4 // memory.itemsize
        words = memory[: len(memory) // each * each].view(np.uint32)
        head, block = self.sketches.strides
        starts = np.where(self.sketches.starts < 0, -1, self.sketches.starts // each)
        return words, words.view(np.float32), Pieces(starts, (head // each, block // each))

    @property
    def sketch_bytes(self) -> int:
        """Of a page and head."""
        blocks = -(-self.layout.page_tokens // SKETCH_TOKENS)
        return blocks * sketch_elements(self.layout) * DTYPE_BYTES[self.layout.dtype]

    def low(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


def sketch_elements(layout: KVLayout) -> int:
    """Of a memory, for the sketches of 16 tokens: lines of codes, and one of scales."""
    lines = -(-layout.head_dim // SKETCH_CHANNELS) + 1
    return lines * SKETCH_TOKENS * 4 // DTYPE_BYTES[layout.dtype]


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


def page_scores(
    stored: Stored, queries: Floats, seen: Whole, kind: int, scale: float, left_out: range
) -> Floats:
    """[kv_heads, queries, pages]; -inf where a query does not see a page, and for those left out
    of an exact one."""
    layout, pages = stored.layout, stored.pages
    out = np.full((layout.kv_heads, queries.shape[1], pages), -np.inf, np.float32)
    low = int(seen[0, 0]) // layout.page_tokens
    calls = [(stored.keys, kind, low, pages)]
    if left_out:
        calls = [
            (stored.keys, kind, low, left_out.start),
            (stored.keys, kind, left_out.stop, pages),
        ]
    if kind == DIGEST:
        if stored.digests is None:
            raise BadArgumentError("method digest: these pages have no digests")
        complete = max(low, stored.tokens // layout.page_tokens)
        calls = [(stored.digests, DIGEST, low, complete), (stored.keys, EXACT, complete, pages)]
    for pieces, how, first, last in calls:
        check_there(pieces, first, last)
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


def check_there(pieces: Pieces, first: int, last: int) -> None:
    if first < last and pieces.starts[first:last].min() < 0:
        raise BadArgumentError(f"pages {first} to {last} are in sight, but not all are there")


def lists_of(scores: Floats, rows: int, budget: Budget) -> Floats:
    """Scores by query [kv_heads, rows * group, pages] as scores by list [lists, kv_heads, pages],
    heads not yet merged.

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
    return lists


def merged(scores: Floats, budget: Budget) -> Floats:
    """Scores of a list [kv_heads, pages], the same for all heads if they have one list together."""
    if budget.union == "kv_head":
        return scores
    one: Floats = scores.mean(axis=0) if budget.mass is not None else scores.max(axis=0)
    return one[None].repeat(len(scores), axis=0)


def order_of(scores: Floats) -> Whole:
    """Numbers in the order of preference, no two of a list equal: a larger score, else the lower
    page; NaN above all; -0 equals 0."""
    bits = (scores + np.float32(0)).view(np.int32)
    ranks = np.where(np.isnan(scores), 0x7F800001, bits ^ (bits >> 31 & 0x7FFFFFFF))
    return (ranks.astype(np.int64) << 32) - np.arange(scores.shape[-1])


@dataclass(frozen=True)
class Window:
    """The pages of a list: those before `low` are out of sight, from there to `sinks` and from
    `recent` on they are forced in; `wanted` of the others are to be chosen."""

    low: int
    sinks: int
    recent: int
    pages: int
    wanted: int


def window_of(stored: Stored, first_position: int, pages: int, budget: Budget) -> Window:
    """For a list of `pages` pages whose first query is at `first_position`."""
    page_tokens = stored.layout.page_tokens
    low = stored.low(first_position) // page_tokens
    sinks = max(low, min(budget.sinks, pages))
    recent = max(sinks, first_position // page_tokens + 1 - budget.recent)
    recent = pages if budget.recent == 0 else recent
    wanted = budget.pages or pages_of_share(budget.share or 0, pages - low)
    wanted = min(recent - sinks, wanted - (sinks - low + pages - recent))
    return Window(low, sinks, recent, pages, max(0, wanted))


def choose(scores: Floats, window: Window, budget: Budget) -> list[Whole]:
    """The pages that a budget keeps of one list, scores [kv_heads, pages], by head."""
    sinks, recent, wanted = window.sinks, window.recent, window.wanted
    chosen = np.zeros(scores.shape, np.bool_)
    chosen[:, window.low : sinks] = chosen[:, recent:] = True
    order = order_of(scores)[:, sinks:recent]
    free = recent - sinks
    if budget.mass is not None:
        for head, row in enumerate(scores):
            best = sinks + np.argsort(order[head])[::-1]
            held = np.cumsum([row[chosen[head]].sum(dtype=np.float64), *row[best]])[:-1]
            enough = row[best] <= 0 if budget.mass >= 1 else held >= budget.mass
            count = int(np.argmax(enough)) if enough.any() else free
            chosen[head, best[:count]] = True
    elif wanted > 0:
        threshold = np.partition(order, free - wanted, axis=1)[:, free - wanted]
        chosen[:, sinks:recent] = order >= threshold[:, None]
    return [np.flatnonzero(row) for row in chosen]


# ---- two stages: docs/decisions/0011-sketch.md ----


def sketched_pages(stored: Stored, rows: int, budget: Budget) -> range:
    """The pages whose logits are estimated: complete, free and in whole sight of all rows; none
    when they are too few for that to pay."""
    layout, position = stored.layout, stored.tokens - rows
    _, _, pieces = stored.words
    last = position if budget.per == "query" else stored.tokens - 1
    window = window_of(stored, position, last // layout.page_tokens + 1, budget)
    hidden = -(-stored.low(stored.tokens - 1) // layout.page_tokens)
    end = min(window.recent, (position + 1) // layout.page_tokens)
    pages = range(max(window.sinks, hidden), end)
    forced = window.sinks - window.low + window.pages - window.recent
    key_bytes = layout.page_tokens * layout.head_dim * DTYPE_BYTES[layout.dtype]
    dear = 2 * stored.sketch_bytes > key_bytes
    if dear or len(pages) < STAGED_PAGES or forced + window.wanted > len(pages) // 2:
        return range(0)
    check_there(pieces, pages.start, pages.stop)
    return pages


def estimates_of(
    stored: Stored, queries: Floats, pages: range, scale: float
) -> tuple[Floats, Floats]:
    """Estimated logits [kv_heads, pages, page_tokens], the best over the queries, and scales."""
    words, numbers, pieces = stored.words
    heads, count, dim = queries.shape
    shape = (heads, -(-count // LANES) * LANES, -(-dim // SKETCH_CHANNELS) * SKETCH_CHANNELS)
    prepared = np.zeros(shape, np.float32)
    prepared[:, :count, :dim] = scale * hadamard(queries.astype(np.float64))
    prepared[:, count:] = prepared[:, :1]  # the kernel takes LANES at a time
    prepared[~np.isfinite(prepared).all(axis=2)] = np.nan
    offsets = np.float32(-1.5) * prepared.sum(axis=2)
    out = np.empty((heads, len(pages), stored.layout.page_tokens), np.float32)
    scales = np.empty_like(out)
    with _turn:
        first = pages.start
        estimate(
            *(words, numbers, pieces.starts, pieces.strides, first, prepared, offsets, out, scales)
        )
    return out, scales


def token_scores(
    stored: Stored, queries: Floats, places: tuple[Whole, Whole, Whole], scale: float
) -> Floats:
    """Logits of tokens by their keys, the best over the queries; places: heads, pages, tokens."""
    out = np.empty(len(places[0]), np.float32)
    keys = stored.keys
    with _turn:
        score_tokens(
            *(*stored.elements, keys.starts, keys.strides, *places),
            *(queries, np.float32(scale), out),
        )
    return out


def cuts_of(scores: Floats, window: Window, budget: Budget) -> Floats:
    """The worst score by head [kv_heads] that a list's chosen pages have."""
    free, wanted = window.recent - window.sinks, window.wanted
    if wanted == 0 or wanted == free:
        return np.full(len(scores), np.inf if wanted == 0 else -np.inf, np.float32)
    own = merged(scores, budget)[:, window.sinks : window.recent]
    at = np.argpartition(order_of(own), free - wanted, axis=1)[:, free - wanted]
    return own[np.arange(len(own)), at]


def two_stage(
    stored: Stored,
    queries: Floats,
    pages: range,
    scores: Floats,
    window: Window,
    budget: Budget,
    scale: float,
    errors: float,
) -> tuple[int, int, Floats]:
    """Fills in scores [kv_heads, pages] of `pages` for one list with queries [kv_heads, n, dim].

    Returns how many tokens were read by their keys because they may matter, how many for the
    sample, and the root mean square error of estimates by head.
    """
    estimates, scales = estimates_of(stored, queries, pages, scale)
    heads, _, page_tokens = estimates.shape
    sample = (2 * np.arange(SAMPLE_PAGES) + 1) * len(pages) // (2 * SAMPLE_PAGES)
    shape = (heads, SAMPLE_PAGES, page_tokens)
    head, page, token = (axis.ravel() for axis in np.indices(shape))
    places = (head, pages.start + sample[page], token)
    off = estimates[:, sample] - token_scores(stored, queries, places, scale).reshape(shape)
    own = scales[:, sample]
    over = np.divide(off, own, out=np.zeros_like(off), where=own != 0)
    slack = errors * np.sqrt(np.square(over).mean(axis=(1, 2)))
    scores[:, pages.start : pages.stop] = estimates.max(axis=2)
    cuts = np.where(np.isfinite(slack), cuts_of(scores, window, budget), -np.inf)
    # Not below, where a number: what is none is never trusted.
    may_pass = ~(estimates + slack[:, None, None] * scales < cuts[:, None, None])
    row, token = np.divmod(np.flatnonzero(may_pass), page_tokens)
    if len(row):
        head, page = np.divmod(row, len(pages))
        best = token_scores(stored, queries, (head, pages.start + page, token), scale)
        first = np.flatnonzero(np.diff(row, prepend=-1))
        scores[head[first], pages.start + page[first]] = np.maximum.reduceat(best, first)
    return len(row), off.size, np.sqrt(np.square(off).mean(axis=(1, 2)))


@dataclass
class Read:
    """What a call has read, by rows of keys' channels, and how its second stages went."""

    rows: int = 0
    fetched: int = 0
    sketched: int = 0
    lists: int = 0
    tokens: int = 0
    error: float = 0.0


def select_one(
    stored: Stored,
    queries: Floats,
    kind: int,
    scale: float,
    budget: Budget,
    errors: float | None,
    read: Read,
) -> list[tuple[list[Whole], Floats]]:
    """(pages by head, all scores) of each list of one sequence; errors: None without sketches."""
    layout, rows = stored.layout, len(queries)
    page_tokens, heads = layout.page_tokens, layout.kv_heads
    grouped, seen = in_rows(stored, queries, stored.tokens - rows)
    sketched = range(0) if errors is None else sketched_pages(stored, rows, budget)
    exact = page_scores(stored, grouped, seen, kind, scale, sketched)
    low, complete = int(seen[0, 0]) // page_tokens, stored.tokens // page_tokens
    kept = max(0, complete - low) * (2 if kind == DIGEST else page_tokens)
    kept += stored.tokens - max(low, complete) * page_tokens
    read.rows += heads * (kept - len(sketched) * page_tokens)
    lists = []
    for row, scores in enumerate(lists_of(exact, rows, budget)):
        position = stored.tokens - rows + row
        last = position if budget.per == "query" else stored.tokens - 1
        window = window_of(stored, position, last // page_tokens + 1, budget)
        scores = scores[:, : window.pages]
        if sketched and errors is not None:
            group = grouped.shape[1] // (rows if budget.per == "query" else 1)
            own = np.ascontiguousarray(grouped[:, row * group : (row + 1) * group])
            tokens, sample, error = two_stage(
                *(stored, own, sketched, scores, window, budget, scale, errors)
            )
            read.rows += tokens + sample
            read.sketched += heads * len(sketched) * stored.sketch_bytes
            read.tokens += tokens
            read.lists += heads
            read.error += float(error.sum())
        scores = merged(scores, budget)
        chosen = choose(scores, window, budget)
        lists.append((chosen, scores))
        read.fetched += sum(int(filled(stored, pages).sum()) for pages in chosen)
    return lists


def select(
    stored: Sequence[Stored],
    queries: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
    budgets: Sequence[Budget],
    *,
    method: str = "exact",
    scale: float | None = None,
    recall: float = RECALL,
) -> Selection:
    """As Batch.select, on stored pages: methods "exact", "digest" and "two_stage"; queries [rows,
    q_heads, dim].

    Takes memory for a score of each query and page; in two stages for an estimate of each token
    and head, too. Sketches are read list by list.
    """
    given, layout = checked(stored, queries, starts), stored[0].layout
    budget = uniform(budgets)
    if len(budgets) not in (1, len(stored)):
        raise BadArgumentError(f"{len(budgets)} budgets for {len(stored)} sequences")
    if method not in ("exact", "digest", "two_stage"):
        raise BadArgumentError(f"method {method!r}: exact, digest or two_stage")
    if method != "exact" and any(b.mass is not None for b in budgets):
        raise BadArgumentError("a budget of attention mass needs method exact")
    errors = errors_of(recall) if method == "two_stage" else None
    scale = layout.head_dim**-0.5 if scale is None else scale
    lists: list[tuple[list[Whole], Floats]] = []
    read = Read()
    for i, own in enumerate(stored):
        own_budget = budgets[0 if len(budgets) == 1 else i]
        rows = given[starts[i] : starts[i + 1]]
        kind = DIGEST if method == "digest" else LOG_SUM if own_budget.mass is not None else EXACT
        if len(rows):
            with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, shows as such
                lists += select_one(own, rows, kind, scale, own_budget, errors, read)
        elif budget.per == "sequence":
            nothing = [np.empty(0, np.int64)] * layout.kv_heads
            lists.append((nothing, np.empty((layout.kv_heads, 0), np.float32)))
    key_bytes = read.rows * layout.head_dim * DTYPE_BYTES[layout.dtype]
    stages = None
    if method == "two_stage":
        error = read.error / max(1, read.lists)
        stages = Stages(read.lists, error, read.tokens, read.sketched, key_bytes)
    picked = pack(
        *(lists, layout.kv_heads, budget.per, starts),
        read.sketched + key_bytes,
        read.fetched * layout.token_bytes // (layout.layers * layout.kv_heads),
    )
    return replace(picked, stages=stages)


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
