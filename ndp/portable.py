"""NDP compiled by numba, for CPUs that the C core has no kernels for, and for programs without it.

Three uses: a CPU for which the C core has plain C only (numba compiles these loops for whatever CPU
runs them); a program beside the memory that maps a pool and scans pages where they lie, with the
help of cxlkv.ndp.mapped and without the C core; and a second implementation for the tests, which
shares no line with the C core. It wants `pip install 'cxlkv[numba]'`. (The file is not called
numba.py, so that `import numba` means one thing wherever it is read.)

Same meaning as cxlkv.ndp.reference, on the pages of `Stored`; sums are float32. The kernels share
out pages over numba.get_num_threads() threads and run without the GIL. The first call compiles
them, which takes some seconds; later processes find the machine code in numba's cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError, UnsupportedError
from cxlkv.layout import DTYPE_BYTES, DTYPES, KVLayout
from cxlkv.ndp.engine import Budget, Selection, pages_of_share, uniform

try:
    import numba
    import numba.extending
    from llvmlite import ir
except ImportError as error:
    raise UnsupportedError(
        "cxlkv.ndp.portable compiles with numba, which is not installed: pip install 'cxlkv[numba]'"
    ) from error

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Bits = npt.NDArray[np.uint32]
Whole = npt.NDArray[np.int64]
Strides = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., object])

LANES = 4  # queries that share a loaded key
PARTS = 32  # pieces of work of an attend, however many threads there are: it decides the sums
EXACT, DIGEST, LOG_SUM = 0, 1, 2
# Sums may be reordered, which is what lets a compiler use vectors. NaN and infinity keep their
# meaning: a broken key must be chosen and seen.
REORDERED = {"reassoc", "contract", "nsz"}
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


def compiled(function: Function, **options: object) -> Function:
    """numba's decorator, with a type."""
    jit = cast(Callable[..., Callable[[Function], Function]], numba.njit)
    return jit(nogil=True, **options)(function)


def parallel(function: Function) -> Function:
    """The same for what Python calls: the machine code is kept for later processes, where numba
    finds a folder that it may write to."""
    try:
        return compiled(function, parallel=True, cache=True)
    except RuntimeError:
        return compiled(function, parallel=True)


reordered = partial(compiled, fastmath=REORDERED)
ranged = cast(Callable[[int], range], numba.prange)


# ---- kernels: one compiled form each, for all dtypes ----


@numba.extending.intrinsic
def prefetch(typing_context, array, index):
    """Asks for the line of array[index], which may lie outside."""

    def emit(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], form)
        builder.call(function, [at, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return numba.types.void(array, index), emit


@compiled
def widen(halves: Halves, wholes: Floats, code: int, at: int, count: int, bits: Bits) -> None:
    """`count` elements from `at` on, as the bits of float32."""
    # Slices, here and below: an index that is a loop's own variable is known not to be negative.
    if code < 2:
        for i in range(0, count, 32):
            prefetch(halves, at + i + 4096)
    floats, source, full = bits.view(np.float32), halves[at : at + count], wholes[at : at + count]
    if code == 0:
        for i in range(count):
            bits[i] = np.uint32(source[i]) << np.uint32(16)
    elif code == 1:
        for i in range(count):
            half = np.uint32(source[i])
            size = half & np.uint32(0x7FFF)
            special = np.uint32(0x7F800000) if size >= 0x7C00 else np.uint32(0)
            bits[i] = (half & np.uint32(0x8000)) << np.uint32(16) | size << np.uint32(13) | special
        for i in range(count):
            floats[i] *= np.float32(2.0**112)  # what the biases of the exponents differ by
    else:
        for i in range(count):
            floats[i] = full[i]


@reordered
def dot(key: Floats, query: Floats, dim: int) -> np.float32:
    total = np.float32(0)
    for d in range(dim):
        total += key[d] * query[d]
    return total


@reordered
def dots(
    keys: Floats, stride: int, tokens: int, queries: Floats, dim: int, out: Floats
) -> np.float32:
    """out[j, t] = q.k of 4 queries and all tokens, in blocks of 2 tokens that share the queries.

    Returns the sum of all: where it is a number, all are.
    """
    q0, q1, q2, q3 = queries[0], queries[1], queries[2], queries[3]
    out0, out1, out2, out3 = out[0], out[1], out[2], out[3]
    total = np.float32(0)
    for t in range(0, tokens, 2):
        u = min(t + 1, tokens - 1)
        a, b = keys[t * stride : t * stride + dim], keys[u * stride : u * stride + dim]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for d in range(dim):
            a0 += a[d] * q0[d]
            a1 += a[d] * q1[d]
            a2 += a[d] * q2[d]
            a3 += a[d] * q3[d]
            b0 += b[d] * q0[d]
            b1 += b[d] * q1[d]
            b2 += b[d] * q2[d]
            b3 += b[d] * q3[d]
        out0[t], out1[t], out2[t], out3[t] = a0, a1, a2, a3
        out0[u], out1[u], out2[u], out3[u] = b0, b1, b2, b3
        total += a0 + a1 + a2 + a3 + b0 + b1 + b2 + b3
    return total


@compiled
def logits_of(
    keys: Floats, stride: int, tokens: int, queries: Floats, dim: int, out: Floats
) -> np.float32:
    """out[j, t] = q.k for `LANES` queries or fewer. Returns the sum of all."""
    if len(queries) == LANES:
        return dots(keys, stride, tokens, queries, dim, out)
    total = np.float32(0)
    for t in range(tokens):
        key = keys[t * stride : t * stride + dim]
        for j in range(len(queries)):
            out[j, t] = dot(key, queries[j], dim)
            total += out[j, t]
    return total


@reordered
def bound(minima: Floats, maxima: Floats, query: Floats, dim: int) -> np.float32:
    """The largest q.k of any key between the minima and the maxima."""
    total = np.float32(0)
    for d in range(dim):
        total += query[d] * (minima[d] if query[d] < 0 else maxima[d])
    return total


@compiled
def largest(row: Floats, numbers: bool) -> np.float32:
    """NaN if one is; numbers: none is."""
    found = row[0]
    if numbers:
        for i in range(len(row)):
            found = row[i] if row[i] > found else found
        return found
    for i in range(len(row)):
        if row[i] > found or row[i] != row[i]:
            found = row[i]
    return found


@compiled
def score_head(
    keys: Floats,
    stride: int,
    first: int,
    count: int,
    queries: Floats,
    seen: Whole,
    kind: int,
    scale: np.float32,
    logits: Floats,
    out: Floats,
    page: int,
) -> None:
    """out[:, page]: scores of one head's page for queries [n, dim].

    Its `count` tokens begin at position `first`; seen [n, 2]: first and last position in sight.
    """
    dim, total = queries.shape[1], np.float32(0)
    for q in range(0, len(queries), LANES):
        here = min(LANES, len(queries) - q)
        if kind != DIGEST:
            total = logits_of(keys, stride, count, queries[q : q + here], dim, logits)
        for j in range(here):
            low = max(seen[q + j, 0] - first, 0)
            high = min(seen[q + j, 1] - first + 1, count)
            if low >= high:
                continue
            if kind == DIGEST:
                out[q + j, page] = scale * bound(keys, keys[stride:], queries[q + j], dim)
                continue
            row = logits[j, low:high]
            best = scale * largest(row, total == total)
            if kind == LOG_SUM:
                weights = np.float32(0)
                for t in range(len(row)):
                    weights += np.exp(scale * row[t] - best)
                best += np.log(weights)
            out[q + j, page] = best


@parallel
def score(
    halves: Halves,
    wholes: Floats,
    code: int,
    starts: Whole,
    strides: Strides,
    first_page: int,
    tokens: int,
    page_tokens: int,
    queries: Floats,
    seen: Whole,
    kind: int,
    scale: np.float32,
    out: Floats,
) -> None:
    """out [kv_heads, n, pages] from `first_page` to where starts end; queries [kv_heads, n, dim].

    A page that a query does not see keeps what is there.
    """
    heads, dim = queries.shape[0], queries.shape[2]
    for page in ranged(first_page, len(starts)):
        first = page * page_tokens
        count = min(page_tokens, tokens - first)
        rows = 2 if kind == DIGEST else count
        bits = np.empty(rows * strides[1], np.uint32)
        logits = np.empty((LANES, rows), np.float32)
        for head in range(heads):
            at = starts[page] + head * strides[0]
            widen(halves, wholes, code, at, (rows - 1) * strides[1] + dim, bits)
            keys = bits.view(np.float32)
            score_head(
                *(keys, strides[1], first, count, queries[head], seen),
                *(kind, scale, logits, out[head], page),
            )


@reordered
def add_weighted(total: Floats, row: Floats, weight: np.float32) -> None:
    for d in range(len(total)):
        total[d] += weight * row[d]


@compiled
def soften(row: Floats, scale: np.float32, softcap: np.float32, state: Floats) -> np.float32:
    """Logits to weights; state is (largest logit, sum of weights). Returns by what older weights
    shrink."""
    for t in range(len(row)):
        row[t] *= scale
        if softcap > 0:
            row[t] = softcap * np.tanh(row[t] / softcap)
    top = largest(row, False)
    if top != top:
        state[1] = top  # as full attention would: a NaN key spoils its query's output, visibly
        row[:] = top
        return np.float32(1)
    if top == -np.inf:
        row[:] = 0
        return np.float32(1)
    shrink = np.float32(1)
    if top > state[0]:
        shrink = np.exp(state[0] - top)
        state[0] = top
    total = np.float32(0)
    for t in range(len(row)):
        row[t] = np.exp(row[t] - state[0])
        total += row[t]
    state[1] = state[1] * shrink + total
    return shrink


@compiled
def attend_head(
    keys: Floats,
    key_stride: int,
    values: Floats,
    value_stride: int,
    first: int,
    count: int,
    queries: Floats,
    seen: Whole,
    scale: np.float32,
    softcap: np.float32,
    logits: Floats,
    state: Floats,
    out: Floats,
) -> None:
    """Adds one head's page to out [n, value_dim] and state [n, 2]."""
    dim, value_dim = queries.shape[1], out.shape[1]
    for q in range(0, len(queries), LANES):
        here = min(LANES, len(queries) - q)
        logits_of(keys, key_stride, count, queries[q : q + here], dim, logits)
        for j in range(here):
            low = max(seen[q + j, 0] - first, 0)
            high = min(seen[q + j, 1] - first + 1, count)
            if low >= high:
                continue
            shrink = soften(logits[j, low:high], scale, softcap, state[q + j])
            if shrink != 1:
                for d in range(value_dim):
                    out[q + j, d] *= shrink
            for t in range(low, high):
                row = values[t * value_stride : t * value_stride + value_dim]
                add_weighted(out[q + j], row, logits[j, t])


@parallel
def attend_parts(
    halves: Halves,
    wholes: Floats,
    code: int,
    keys: Whole,
    key_strides: Strides,
    values: Whole,
    value_strides: Strides,
    chosen: npt.NDArray[np.int32],
    tokens: int,
    page_tokens: int,
    queries: Floats,
    seen: Whole,
    scale: np.float32,
    softcap: np.float32,
    state: Floats,
    out: Floats,
) -> None:
    """Partial results: state [kv_heads, parts, n, 2] and out [kv_heads, parts, n, value_dim].

    chosen [kv_heads, k]: pages, negative ones are padding. queries [kv_heads, n, dim].
    """
    heads, parts, dim, value_dim = out.shape[0], out.shape[1], queries.shape[2], out.shape[3]
    k = chosen.shape[1]
    for item in ranged(heads * parts):
        head, part = item // parts, item % parts
        key_bits = np.empty(page_tokens * key_strides[1], np.uint32)
        value_bits = np.empty(page_tokens * value_strides[1], np.uint32)
        logits = np.empty((LANES, page_tokens), np.float32)
        for i in range(k * part // parts, k * (part + 1) // parts):
            page = chosen[head, i]
            if page < 0 or keys[page] < 0:
                continue
            first = page * page_tokens
            count = min(page_tokens, tokens - first)
            at = keys[page] + head * key_strides[0]
            widen(halves, wholes, code, at, (count - 1) * key_strides[1] + dim, key_bits)
            at = values[page] + head * value_strides[0]
            widen(halves, wholes, code, at, (count - 1) * value_strides[1] + value_dim, value_bits)
            attend_head(
                *(key_bits.view(np.float32), key_strides[1]),
                *(value_bits.view(np.float32), value_strides[1]),
                *(first, count, queries[head], seen, scale, softcap, logits),
                *(state[head, part], out[head, part]),
            )


# ---- select ----


def in_rows(stored: Stored, queries: Floats, first: int, last: int) -> tuple[Floats, Whole]:
    """Rows [first, last) of a sequence as ([kv_heads, rows * group, dim], what each one sees)."""
    heads, rows = stored.layout.kv_heads, last - first
    group = queries.shape[1] // heads
    own = queries[first:last].reshape(rows, heads, group, -1).transpose(1, 0, 2, 3)
    positions = stored.tokens - rows + np.arange(rows)
    seen = np.array([(stored.low(int(p)), int(p)) for p in positions], np.int64).reshape(-1, 2)
    flat = np.ascontiguousarray(own).reshape(heads, rows * group, queries.shape[2])
    return flat, np.repeat(seen, group, axis=0)


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
                *(*stored.elements, pieces.starts[:last], pieces.strides, first),
                *(stored.tokens, layout.page_tokens, queries, seen, how, np.float32(scale), out),
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
        lists = (weights / weights.sum(axis=3, keepdims=True, dtype=np.float64)).mean(axis=axes)
    else:
        lists = by_row.max(axis=axes)
    lists = lists.reshape(heads, -1, pages).transpose(1, 0, 2).astype(np.float32)
    if budget.union == "layer":
        lists = lists.mean(axis=1) if budget.mass is not None else lists.max(axis=1)
        lists = np.repeat(lists[:, None], heads, axis=1)
    return lists


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
    first, layout = checked(stored, queries, starts), stored[0].layout
    budget = uniform(budgets)
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
        got, seen = in_rows(own, first, int(starts[i]), int(starts[i + 1]))
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


def filled(stored: Stored, pages: npt.NDArray[np.integer]) -> Whole:
    """Tokens that pages hold."""
    tokens = stored.layout.page_tokens
    return np.minimum(tokens, stored.tokens - pages.astype(np.int64) * tokens)


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
    out = np.zeros((*given.shape[:2], layout.value_head_dim), np.float32)
    lse = np.full(given.shape[:2], -np.inf, np.float32)
    for i, own in enumerate(stored):
        first, last = int(starts[i]), int(starts[i + 1])
        every = np.arange(own.pages, dtype=np.int32)
        chosen = [np.repeat(every[None], layout.kv_heads, axis=0)]
        if picked is not None:
            chosen = list(picked.pages[[i]] if picked.per == "sequence" else picked.pages[first:last])
        lists = len(chosen) if picked is not None and picked.per == "query" else 1
        got, seen = in_rows(own, given, first, last)
        group = given.shape[1] // layout.kv_heads
        each = (last - first) // lists if lists else 0
        for row, pages in enumerate(chosen):
            at, rows = row * each, slice(row * each * group, (row + 1) * each * group)
            if each == 0:
                continue
            result, sums = attend_list(
                own, pages, np.ascontiguousarray(got[:, rows]), seen[rows], scale, softcap or 0.0
            )
            shape = (layout.kv_heads, each, group, -1)
            for to, part in ((out, result), (lse[:, :, None], sums)):
                to[first + at : first + at + each] = (
                    part.reshape(shape).transpose(1, 0, 2, 3).reshape(each, given.shape[1], -1)
                )
    return out, lse


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
            *(*stored.elements, *(stored.keys.starts, stored.keys.strides)),
            *(stored.values.starts, stored.values.strides),
            *(np.ascontiguousarray(pages), stored.tokens, stored.layout.page_tokens),
            *(queries, seen, np.float32(scale), np.float32(softcap), state, out),
        )
    with np.errstate(all="ignore"):
        top = state[..., 0].max(axis=1)
        share = np.where(state[..., 0] == -np.inf, 0, np.exp(state[..., 0] - top[:, None]))
        total = (share * state[..., 1]).sum(axis=1)
        merged = (share[..., None] * out).sum(axis=1)
        merged = np.where(total[..., None] == 0, 0, merged / total[..., None])
        lse = np.where(total == 0, -np.inf, top + np.log(total))
    return merged.astype(np.float32), lse.astype(np.float32)
