"""The reference of select and attend: plain numpy, written to be obviously right.

Same meaning as the C core, on plain arrays: `keys` and `values` are lists of [tokens, kv_heads,
dim] float32 arrays, one for each sequence; everything is computed in float64. Under a `window` the
token at position p sees tokens p - window + 1 to p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Doubles
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Budget, Selection, pages_of_share, uniform

Keys = Sequence[npt.NDArray[np.float32]]


def logits(keys: npt.NDArray[np.float32], query: Doubles, scale: float) -> Doubles:
    """scale * q.k: keys [tokens, dim], query [dim] -> [tokens]."""
    return scale * (keys.astype(np.float64) @ query)


def page_score(
    keys: npt.NDArray[np.float32], query: Doubles, method: str, complete: bool, scale: float
) -> float:
    """Score of one page's visible keys [tokens, dim] for one query."""
    if method == "digest" and complete:
        low = keys.min(axis=0).astype(np.float64)
        high = keys.max(axis=0).astype(np.float64)
        # While low <= high the sign says which product is larger, also for infinite ones.
        return scale * float((query * np.where(np.signbit(query), low, high)).sum())
    return float(logits(keys, query, scale).max())


def best(*scores: float) -> float:
    """The largest; NaN if one is: a broken key is chosen and seen, never hidden."""
    return math.nan if any(map(math.isnan, scores)) else max(scores)


def first_seen(position: int, window: int | None) -> int:
    """The first token that the one at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def page_mass(
    keys: npt.NDArray[np.float32], query: Doubles, page_tokens: int, scale: float, low: int
) -> list[float]:
    """Share of the attention of one query by page of its visible keys, those from `low` on."""
    row = logits(keys, query, scale)
    row[:low] = -np.inf
    weights = np.exp(row - row.max())
    weights /= weights.sum()
    return [float(weights[i : i + page_tokens].sum()) for i in range(0, len(row), page_tokens)]


def list_scores(
    keys: npt.NDArray[np.float32],
    queries: list[tuple[int, Doubles]],
    budget: Budget,
    method: str,
    page_tokens: int,
    scale: float,
    window: int | None,
) -> list[float]:
    """Scores by page of one kv head for the queries of one list: (position, query) each.

    The best over the queries; by attention and for a mass budget their mean share; 0 where no page
    is left out.
    """
    last = max(position for position, _ in queries)
    pages = last // page_tokens + 1
    scores = [-math.inf] * pages
    mass = [0.0] * pages
    if budget.dense_layers:
        return mass
    for position, query in queries:
        seen = keys[: position + 1]
        low = first_seen(position, window)
        if is_by_mass(budget, method):
            for page, share in enumerate(page_mass(seen, query, page_tokens, scale, low)):
                mass[page] += share / len(queries)
            continue
        for page in range(low // page_tokens, position // page_tokens + 1):
            first = page * page_tokens
            complete = first + page_tokens <= len(keys)
            # A digest covers the whole page, also the tokens that the query does not see.
            held = keys[first : first + page_tokens]
            visible = seen[max(first, low) : first + page_tokens]
            if method == "digest" and complete:
                visible = held
            score = page_score(visible, query, method, complete, scale)
            scores[page] = best(scores[page], score)
    return mass if is_by_mass(budget, method) else scores


def is_by_mass(budget: Budget, method: str) -> bool:
    return budget.mass is not None or method == "attention"


def choose(
    scores: list[float], first_position: int, budget: Budget, page_tokens: int, window: int | None
) -> list[int]:
    """The pages that a budget keeps: forced ones, then by score; equal scores: the lower page."""
    pages = len(scores)
    low = first_seen(first_position, window) // page_tokens
    sinks = max(low, min(budget.sinks, pages))
    recent = max(sinks, first_position // page_tokens + 1 - budget.recent)
    if budget.recent == 0:
        recent = pages
    forced = {*range(low, sinks), *range(recent, pages)}
    rank = [-math.inf if math.isnan(s) else -s for s in scores]
    order = sorted(
        (p for p in range(low, pages) if p not in forced),
        key=lambda p: (not math.isnan(scores[p]), rank[p], p),
    )
    if budget.dense_layers:
        return [*range(low, pages)]
    if budget.mass is not None:
        total = sum(scores[p] for p in forced)
        for page in order:
            enough = scores[page] <= 0 if budget.mass >= 1 else total >= budget.mass
            if enough:
                break
            forced.add(page)
            total += scores[page]
        return sorted(forced)
    wanted = budget.pages or pages_of_share(budget.share or 0, pages - low)
    return sorted(forced | set(order[: max(0, wanted - len(forced))]))


def select(
    keys: Keys,
    queries: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
    budgets: Sequence[Budget],
    *,
    page_tokens: int,
    method: str = "exact",
    scale: float | None = None,
    window: int | None = None,
) -> Selection:
    """Batch.select, on plain arrays; queries [rows, q_heads, dim] float32."""
    first = uniform(budgets)
    if method == "digest" and any(b.mass is not None for b in budgets):
        raise BadArgumentError("a budget of attention mass needs method exact")
    kv_heads, dim = keys[0].shape[1:]
    scale = dim**-0.5 if scale is None else scale
    group = queries.shape[1] // kv_heads
    lists: list[list[tuple[list[int], list[float]]]] = []
    for i, own in enumerate(keys):
        budget = budgets[0 if len(budgets) == 1 else i]
        rows = [*range(int(starts[i]), int(starts[i + 1]))]
        for block in [[row] for row in rows] if first.per == "query" else [rows]:
            if not block:
                lists.append([([], [])] * kv_heads)
                continue
            positions = {row: len(own) - (int(starts[i + 1]) - row) for row in block}
            by_head = [
                list_scores(
                    own[:, head],
                    [
                        (positions[row], queries[row, head * group + g].astype(np.float64))
                        for row in block
                        for g in range(group)
                    ],
                    budget,
                    method,
                    page_tokens,
                    scale,
                    window,
                )
                for head in range(kv_heads)
            ]
            if first.union == "layer":
                columns = zip(*by_head, strict=True)
                merged = [
                    sum(c) / kv_heads if is_by_mass(budget, method) else best(*c) for c in columns
                ]
                by_head = [merged] * kv_heads
            chosen = [choose(s, positions[block[0]], budget, page_tokens, window) for s in by_head]
            lists.append([(c, [s[p] for p in c]) for c, s in zip(chosen, by_head, strict=True)])
    return _pack(lists, kv_heads, first.per, starts)


def _pack(
    lists: list[list[tuple[list[int], list[float]]]],
    kv_heads: int,
    per: str,
    starts: npt.NDArray[np.int32],
) -> Selection:
    k = max((len(pages) for heads in lists for pages, _ in heads), default=0)
    pages = np.full((len(lists), kv_heads, k), -1, np.int32)
    scores = np.full((len(lists), kv_heads, k), -np.inf, np.float32)
    counts = np.zeros((len(lists), kv_heads), np.int32)
    for i, heads in enumerate(lists):
        for head, (chosen, values) in enumerate(heads):
            pages[i, head, : len(chosen)] = chosen
            scores[i, head, : len(chosen)] = values
            counts[i, head] = len(chosen)
    return Selection(pages, scores, counts, 0, 0, per, starts)


def attend(
    keys: Keys,
    values: Keys,
    queries: npt.NDArray[np.float32],
    starts: npt.NDArray[np.int32],
    *,
    page_tokens: int,
    picked: Selection | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[Doubles, Doubles]:
    """Batch.attend, on plain arrays: (out [rows, q_heads, value_dim], lse [rows, q_heads])."""
    kv_heads, dim = keys[0].shape[1:]
    scale = dim**-0.5 if scale is None else scale
    group = queries.shape[1] // kv_heads
    out = np.zeros((*queries.shape[:2], values[0].shape[2]))
    lse = np.full(queries.shape[:2], -np.inf)
    for i, own in enumerate(keys):
        for row in range(int(starts[i]), int(starts[i + 1])):
            position = len(own) - (int(starts[i + 1]) - row)
            for q_head in range(queries.shape[1]):
                head = q_head // group
                tokens = np.arange(first_seen(position, window), position + 1)
                if picked is not None:
                    chosen = picked.pages[row if picked.per == "query" else i, head]
                    tokens = tokens[np.isin(tokens // page_tokens, chosen[chosen >= 0])]
                if len(tokens) == 0:
                    continue
                query = queries[row, q_head].astype(np.float64)
                line = logits(own[tokens, head], query, scale)
                if softcap is not None:
                    line = softcap * np.tanh(line / softcap)
                if line.max() == -math.inf:
                    continue
                weights = np.exp(line - line.max())
                lse[row, q_head] = line.max() + math.log(weights.sum())
                out[row, q_head] = weights @ values[i][tokens, head] / weights.sum()
    return out, lse


# ---- sketches: native/src/kernels/sketch.h has the words ----


def hadamard(rows: Doubles) -> Doubles:
    """Signs by channel, then Walsh-Hadamard transforms of blocks of powers of two; [..., dim]."""
    out = rows * (1 - 2 * sign_bits(rows.shape[-1]))
    first = 0
    while first < out.shape[-1]:
        size = 1 << (out.shape[-1] - first).bit_length() - 1
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        out[..., first : first + size] = out[..., first : first + size] @ matrix / math.sqrt(size)
        first += size
    return out


def sign_bits(dim: int) -> Doubles:
    """1 where a channel changes its sign: splitmix64 of channel // 64, bit by bit."""
    ones = (1 << 64) - 1
    bits = []
    for block in range(-(-dim // 64)):
        z = (block + 1) * 0x9E3779B97F4A7C15 & ones
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ones
        z = (z ^ z >> 27) * 0x94D049BB133111EB & ones
        z ^= z >> 31
        bits += [z >> i & 1 for i in range(64)]
    return np.array(bits[:dim], np.float64)


def sketched(keys: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int64], Doubles]:
    """Codes [tokens, dim] and scales [tokens] of keys [tokens, dim]."""
    rows = hadamard(keys.astype(np.float64))
    step = np.sqrt((rows**2).mean(-1, keepdims=True))
    codes = (rows >= -step).astype(np.int64) + (rows >= 0) + (rows >= step)
    products = (rows * (codes - 1.5)).sum(-1)
    scales = np.divide((rows**2).sum(-1), products, where=products > 0, out=np.zeros(len(rows)))
    return codes, scales


def estimates(
    codes: npt.NDArray[np.int64], scales: Doubles, query: Doubles, scale: float
) -> Doubles:
    """Logits [tokens] of one query [dim], as sketches tell them (queries not rounded)."""
    return scale * scales * ((codes - 1.5) @ hadamard(query))
