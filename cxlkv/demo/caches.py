"""Caches that the demo compares with: one draws random pages, one measures the attention kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cxlkv.adapters.transformers import CXLCache, LayerStep
from cxlkv.demo.forms import best_pages
from cxlkv.errors import BadArgumentError
from cxlkv.ndp.engine import Budget, Selection, unscored
from cxlkv.sequence import Batch


class RandomPages(CXLCache):
    """Draws as many pages as the budget allows, anew at each length, without looking at the keys.

    The first and the last pages that the budget forces are in, as in a selection.
    """

    seed = 20

    def choose(self, part: LayerStep, queries: Tensor) -> Selection | None:
        if not isinstance(self.budget, Budget):
            raise BadArgumentError("random pages need a budget, the same for all rows")
        layout = self.pool.layout
        tokens = int(part.step.lengths[0])
        if (part.step.lengths != tokens).any():
            raise BadArgumentError("random pages are drawn for sequences of one length")
        counts = -(-part.step.lengths // layout.page_tokens)
        random = np.random.default_rng([self.seed, part.index, tokens])
        rank = random.random((len(counts), layout.kv_heads, int(counts[0])))
        pages = best_pages(rank, counts, [self.budget] * len(counts), part.index)
        # All but the last page, which is forced, are full.
        read = pages.size * layout.page_tokens - pages[..., 0].size * (-tokens % layout.page_tokens)
        read_bytes = read * layout.stored_token_bytes // (layout.layers * layout.kv_heads)
        return unscored(pages, part.step.starts, "query", read_bytes)


class Weighed(CXLCache):
    """Measures the share of attention mass that the chosen pages hold; it attends twice."""

    masses: list[Tensor]
    """For each layer of each step: float32 [rows], the mean over the query heads."""

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        starts = part.step.starts
        out, kept = batch.attend(part.index, queries, starts, picked, part.scale, part.softcap)
        _, whole = batch.attend(part.index, queries, starts, None, part.scale, part.softcap)
        assert isinstance(out, Tensor)
        assert isinstance(kept, Tensor)
        assert isinstance(whole, Tensor)
        self.masses = [*getattr(self, "masses", []), torch.exp(kept - whole).mean(dim=1)]
        return out


class WeighedRandomPages(Weighed, RandomPages):
    """Measures the attention that randomly drawn pages hold."""
