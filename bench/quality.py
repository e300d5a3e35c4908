"""What a selection reads and keeps: bytes, pages and attention mass, against the exact choice.

Queries come as they do when a model decodes: a token is appended, then its query selects. Which
share of the attention pages hold is computed by torch from the same keys, and not by the core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cxlkv.bench.sources import Taken
from cxlkv.errors import BadArgumentError
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import RECALL, Budget, Selection
from cxlkv.pool import CXLPool
from cxlkv.sequence import Sequence as Tokens

PAGE_TOKENS = 16
DECILE = 0.1


@dataclass(frozen=True)
class Way:
    """A way to choose pages: `method` and `recall` as in Batch.select."""

    method: str
    recall: float = RECALL

    def __str__(self) -> str:
        return f"two_stage_{self.recall:g}" if self.method == "two_stage" else self.method


EXACT = Way("exact")


@dataclass(frozen=True)
class Weighed:
    """What one way read and kept on one source with one budget; a sample is the mean of a head.

    share: of the pages that a query sees, the forced ones (the first, the last two) counted.
    bytes_share: read to choose, over the bytes of all keys; a sample a layer. The others leave the
    forced pages out. recall: of the pages of "exact", by kv head. mass: of the attention, by query
    head. mass_to_exact: that, over what the pages of "exact" hold.
    """

    share: float
    way: Way
    bytes_share: list[float]
    recall: list[float]
    mass: list[float]
    mass_to_exact: list[float]


def mean(samples: Sequence[float]) -> float:
    return float(np.mean(samples))


def worst_decile(samples: Sequence[float]) -> float:
    """What nine of ten heads reach at least."""
    return float(np.quantile(samples, DECILE))


def weigh(
    taken: Sequence[Taken], shares: Sequence[float], ways: Sequence[Way]
) -> tuple[list[Weighed], float]:
    """A row for each share and way; and which share of the pages of "exact" torch chooses, too."""
    layers = [_Layer(index, one) for index, one in enumerate(taken)]
    forced = Budget(pages=1).sinks + Budget(pages=1).recent
    first, last = int(taken[0].positions[0]), int(taken[0].positions[-1])
    if int(min(shares) * -(-(first + 1) // PAGE_TOKENS)) <= forced:
        raise BadArgumentError(
            f"{100 * min(shares):g} % of the pages of {first} tokens: more than the {forced} pages "
            "that are forced in are needed"
        )
    sums = {(share, way): _Sums(len(taken)) for share in shares for way in ways}
    agreements = []
    with _pool(layers) as pool:
        sequence = pool.sequence()
        for layer in layers:
            layer.append(sequence, 0, first)
        for position in range(first, last + 1):
            for layer in layers:
                layer.append(sequence, position, position + 1)
            for layer in layers:
                seen = layer.look(position)
                for share in shares:
                    budget = Budget(pages=max(1, int(share * seen.pages)))
                    exact = layer.select(sequence, position, budget, EXACT)
                    wanted = seen.chosen(exact, budget)
                    agreements.append(seen.agreement(wanted))
                    for way in ways:
                        got = exact
                        if way != EXACT:
                            got = layer.select(sequence, position, budget, way)
                        chosen = seen.chosen(got, budget)
                        read = got.bytes_scored / layer.key_bytes(position + 1)
                        sums[share, way].add(layer.index, seen, chosen, wanted, read)
    return [made.row(share, way) for (share, way), made in sums.items()], mean(agreements)


def _pool(layers: Sequence[_Layer]) -> CXLPool:
    tokens, heads, dim = layers[0].keys.shape
    layout = KVLayout(
        layers=len(layers),
        kv_heads=heads,
        head_dim=dim,
        page_tokens=PAGE_TOKENS,
        dtype=str(layers[0].keys.dtype).removeprefix("torch."),
    )
    capacity = tokens * layout.token_bytes * 5 // 4 + (16 << 20)
    return CXLPool.create("anonymous:", layout=layout, capacity=capacity, checksum=False)


class _Layer:
    """Keys and queries of one layer, as the pool holds them and as torch reads them."""

    def __init__(self, index: int, taken: Taken) -> None:
        self.index = index
        self.taken = taken
        half = taken.keys.dtype == torch.float16
        self.keys = taken.keys.to(torch.float16 if half else torch.bfloat16).contiguous()
        self._by_head = self.keys.float().permute(1, 0, 2).contiguous()  # [kv_heads, tokens, dim]
        self.queries = taken.queries.float()

    def append(self, sequence: Tokens, first: int, last: int) -> None:
        """The keys stand in for the values, which nobody reads here."""
        keys = self.keys[first:last]
        sequence.append(self.index, keys, keys)

    def select(self, sequence: Tokens, position: int, budget: Budget, way: Way) -> Selection:
        return sequence.select(
            self.index,
            self._query(position),
            budget,
            method=way.method,
            scale=self.taken.scale,
            recall=way.recall,
        )

    def key_bytes(self, tokens: int) -> int:
        return tokens * self.keys[0].numel() * self.keys.element_size()

    def look(self, position: int) -> _Seen:
        """Scores and attention of the query at `position` over all that it sees."""
        heads, _, dim = self._by_head.shape
        query = self._query(position).view(heads, -1, dim)
        logits = self.taken.scale * torch.einsum(
            "hgd,htd->hgt", query, self._by_head[:, : position + 1]
        )
        pages = -(-(position + 1) // PAGE_TOKENS)
        room = (0, pages * PAGE_TOKENS - position - 1)
        best = torch.nn.functional.pad(logits, room, value=-torch.inf)
        mass = torch.nn.functional.pad(torch.softmax(logits, -1), room)
        by_page = (heads, -1, pages, PAGE_TOKENS)
        return _Seen(
            best=best.view(by_page).amax((1, 3)), mass=mass.view(by_page).sum(3), pages=pages
        )

    def _query(self, position: int) -> Tensor:
        return self.queries[position - int(self.taken.positions[0])]


@dataclass(frozen=True)
class _Seen:
    """Pages as a query sees them: best scores [kv_heads, pages], mass [kv_heads, group, pages]."""

    best: Tensor
    mass: Tensor
    pages: int

    def chosen(self, picked: Selection, budget: Budget) -> Tensor:
        """Which pages that are not forced are in a selection: bool [kv_heads, pages]."""
        chosen = torch.zeros((len(self.best), self.pages + 1), dtype=torch.bool)
        at = torch.from_numpy(picked.pages).long()
        chosen.scatter_(1, torch.where(at < 0, self.pages, at), True)
        return chosen[:, : self.pages] & self.free(budget)

    def free(self, budget: Budget) -> Tensor:
        """The pages that are not forced."""
        free = torch.zeros(self.pages, dtype=torch.bool)
        free[budget.sinks : max(budget.sinks, self.pages - budget.recent)] = True
        return free

    def agreement(self, wanted: Tensor) -> float:
        """The share of `wanted` that has the best scores by torch's arithmetic, too."""
        free = self.free(Budget(pages=1))
        count = int(wanted[0].sum())
        if not count:
            return 1.0
        best = torch.where(free, self.best, -torch.inf).topk(count, -1).indices
        return float(wanted.gather(1, best).float().mean())


class _Sums:
    """Sums over the queries, layer by layer, for one way and budget."""

    def __init__(self, layers: int) -> None:
        self.queries = 0
        self.bytes_share = [0.0] * layers
        self.recall: list[list[Tensor]] = [[] for _ in range(layers)]
        self.kept: list[list[Tensor]] = [[] for _ in range(layers)]
        self.exact: list[list[Tensor]] = [[] for _ in range(layers)]
        self.all: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, layer: int, seen: _Seen, chosen: Tensor, wanted: Tensor, read: float) -> None:
        self.queries += layer == 0
        self.bytes_share[layer] += read
        both = (chosen & wanted).sum(1).double()
        self.recall[layer].append(both / wanted.sum(1).clamp(min=1))
        mass, free = seen.mass.double(), seen.free(Budget(pages=1))
        self.kept[layer].append((mass * chosen[:, None]).sum(2).flatten())
        self.exact[layer].append((mass * wanted[:, None]).sum(2).flatten())
        self.all[layer].append((mass * free).sum(2).flatten())

    def row(self, share: float, way: Way) -> Weighed:
        def by_head(parts: list[list[Tensor]]) -> Tensor:
            return torch.cat([torch.stack(rows).mean(0) for rows in parts])

        # Of sums over the queries, so that one which looks at nothing far away weighs nothing.
        kept, exact, whole = by_head(self.kept), by_head(self.exact), by_head(self.all)
        tiny = torch.finfo(torch.float64).tiny
        return Weighed(
            share=share,
            way=way,
            bytes_share=[read / self.queries for read in self.bytes_share],
            recall=by_head(self.recall).tolist(),
            mass=(kept / whole.clamp(min=tiny)).tolist(),
            mass_to_exact=(kept / exact.clamp(min=tiny)).tolist(),
        )
