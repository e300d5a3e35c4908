"""What both sides get, keys and queries, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
FORCED = 16
"""The first tokens, or the newest, that are in whatever is chosen, where their code has such."""


@dataclass(frozen=True)
class Asked:
    """keys, values [kv_heads, tokens, dim], queries [kv_heads, group, dim], float32; all keys are
    before the queries' token. seed: of what either side draws."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    scale: float
    seed: int = 1

    @property
    def alone(self) -> Asked:
        """The same with a kv head for each query head."""
        heads, group, dim = self.queries.shape
        keys, values = (all_.repeat_interleave(group, dim=0) for all_ in (self.keys, self.values))
        queries = self.queries.reshape(heads * group, 1, dim)
        return Asked(keys, values, queries, self.scale, self.seed)

    def head(self, index: int) -> Asked:
        """What one kv head is asked."""
        own = slice(index, index + 1)
        return replace(
            self, keys=self.keys[own], values=self.values[own], queries=self.queries[own]
        )

    @cached_property
    def rest(self) -> Asked:
        """The same without the first tokens, which are in whatever is chosen."""
        return replace(self, keys=self.keys[:, FORCED:], values=self.values[:, FORCED:])

    @property
    def rows(self) -> Tensor:
        """Queries as most code has them: [1, q_heads, 1, dim]."""
        return self.queries.flatten(0, 1)[None, :, None]

    @property
    def repeated(self) -> Tensor:
        """Keys as most code has them: [1, q_heads, tokens, dim]."""
        return self.keys.repeat_interleave(self.queries.shape[1], dim=0)[None]

    def pages(self, size: int) -> Tensor:
        """[kv_heads, pages, size, dim]"""
        return self.keys.reshape(len(self.keys), -1, size, self.keys.shape[-1])


@dataclass(frozen=True)
class Answer:
    """scores [lists, pages]; learned: what ours is given to score alike, [kv_heads, n], or None
    where it learns from the same keys; chosen [lists, pages]: by theirs for a budget of mass."""

    scores: Tensor
    learned: Floats | None = None
    chosen: Tensor | None = None

    def choice(self, count: int | None) -> npt.NDArray[np.bool_]:
        """The pages [lists, pages] that their code takes of so many."""
        if count is None:
            assert self.chosen is not None
            return self.chosen.numpy()
        best = self.scores.topk(count, dim=-1).indices
        return torch.zeros_like(self.scores, dtype=torch.bool).scatter(-1, best, True).numpy()
