"""What methods cost beside quality: the time to choose, and to summarise a context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cxlkv.adapters.transformers import LayerStep
from cxlkv.bench.lab.reading import Reader
from cxlkv.demo.forms import Form, FormsCache
from cxlkv.ndp.engine import Budget, Selection
from cxlkv.sequence import Batch
from cxlkv.sequence import Sequence as Tokens

COSTS = "costs.npz"
SHARE = 0.05
ROUNDS = 21
Seconds = npt.NDArray[np.float64]


class Queries(FormsCache):
    """One row of full attention, whose queries are kept: of each layer, [1, q_heads, dim]."""

    def attend(
        self, batch: Batch, part: LayerStep, queries: Tensor, picked: Selection | None
    ) -> Tensor:
        self.seen: dict[int, Tensor] = getattr(self, "seen", {})
        self.seen[part.index] = queries.clone()
        return super().attend(batch, part, queries, picked)


@torch.inference_mode()
def costs(
    reader: Reader, context: Tokens, token: Tensor, names: Sequence[str]
) -> dict[str, Seconds]:
    """Of each method, seconds of [summaries of the context, a step's choices, ...]: of all layers,
    one sequence, at 5 % of the pages; methods take turns."""
    pool, starts = reader.pool, np.array([0, 1], np.int32)
    cache = Queries(pool, reader.model, [Form.full()], [context.fork()])
    reader.step(cache, token[None])
    batch, seen = cache.apart[0].batch, cache.seen

    def choose(name: str) -> float:
        begin = time.perf_counter()
        for layer, queries in seen.items():
            batch.select(layer, queries.contiguous(), starts, Budget(share=SHARE), name)
        return time.perf_counter() - begin

    found = {name: [choose(name)] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            found[name].append(choose(name))
    cache.release()
    return {name: np.array(seconds) for name, seconds in found.items()}


def read(path: Path) -> dict[str, Seconds]:
    """What costs() found, as it was saved."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: np.asarray(arrays[name], np.float64) for name in arrays.files}
