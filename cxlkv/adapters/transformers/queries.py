"""Keeps the queries of the last tokens that a model reads, from which methods learn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.adapters.transformers.cache import CXLCache
from cxlkv.errors import BadArgumentError
from cxlkv.numbers import is_whole


class LastQueries:
    """Keeps a cache's last queries of each layer and sequence while the model reads.

        with LastQueries(cache) as last:
            model(ids, past_key_values=cache)
        pool.calibrate("low_rank", cache.sequences[0], last.of(0))

    rows: how many of each sequence, at most; copies in CPU memory. Queries are as attention has
    them, behind the rotation, and in MLA of the latents' heads before the absorption. One at a time
    to a cache.
    """

    def __init__(self, cache: CXLCache, rows: int = 64) -> None:
        if not is_whole(rows, 1):
            raise BadArgumentError(f"rows={rows!r:.40}: a whole number, 1 or more")
        cache.pool.layout.shape  # noqa: B018  raises where layers are unlike: no method learns
        self._cache, self._rows = cache, rows
        self._kept: dict[tuple[int, int], Tensor] = {}

    def __enter__(self) -> LastQueries:
        if self._cache.on_query is not None:
            raise BadArgumentError("another LastQueries hears this cache: leave that one first")
        self._cache.on_query = self._heard
        return self

    def __exit__(self, *error: object) -> None:
        self._cache.on_query = None

    def of(self, sequence: int) -> npt.NDArray[np.float32]:
        """Queries of a row of the batch, [layers, rows, q_heads, dim]; `rows` are fewer where it
        read fewer. Raises BadArgumentError where it read nothing."""
        if not is_whole(sequence):
            raise BadArgumentError(f"sequence {sequence!r:.40}: rows are counted from 0")
        layers = self._cache.pool.layout.layers
        try:
            kept = [self._kept[layer, sequence] for layer in range(layers)]
        except KeyError:
            raise BadArgumentError(
                f"no queries of row {sequence}: the model read nothing for it in the `with` block"
            ) from None
        return torch.stack(kept).numpy()

    def _heard(self, layer: int, queries: Tensor, starts: npt.NDArray[np.int32]) -> None:
        for row in range(len(starts) - 1):
            new = queries[starts[row] : starts[row + 1]][-self._rows :]
            if not len(new):
                continue
            new = new.detach().to("cpu", torch.float32, copy=True)
            before = self._kept.get((layer, row))
            if before is not None:
                new = torch.cat([before, new])[-self._rows :]
            self._kept[layer, row] = new
