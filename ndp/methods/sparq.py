"""Scores tokens by the channels in which the query is largest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.methods.bfloat16 import from_bfloat16, to_bfloat16
from cxlkv.ndp.scorers import Floats, Scorer, Shape, Words

PART = 8
"""One channel of so many is read."""


class SparQ(Scorer):
    """SparQ (arXiv 2312.04985), its first step: logits of the channels of largest |q| alone, with a
    temperature for those that are left out. Keys are kept a second time, channel by channel, as the
    paper has them. Its mean value in place of what is not attended to is left out."""

    name = "sparq"
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim, shape.tokens + -shape.tokens % 4), np.uint16

    def read_bytes(self, shape: Shape) -> int:
        return -(-shape.dim // PART) * (shape.tokens + -shape.tokens % 4) * 2

    @staticmethod
    def summarise(keys: Floats, first: int, parameters: Floats, summary: Words) -> None:
        for d in range(keys.shape[1]):
            for t in range(keys.shape[0]):
                summary[d, t] = to_bfloat16(keys[t, d])

    @staticmethod
    def score(
        queries: Floats,
        scale: float,
        tokens: int,
        summaries: Words,
        parameters: Floats,
        scores: Floats,
    ) -> None:
        dim = queries.shape[1]
        count = -(-dim // PART)
        chosen = np.empty(count, np.int64)
        sizes = np.empty(dim, np.float32)
        sums = np.empty(summaries.shape[2], np.float32)
        for i in range(queries.shape[0]):
            total = np.float32(1e-30)
            kept = np.float32(0)
            for d in range(dim):
                sizes[d] = abs(queries[i, d])
                total += sizes[d]
            for n in range(count):
                chosen[n] = np.argmax(sizes)
                kept += sizes[chosen[n]]
                sizes[chosen[n]] = -1
            factor = scale / np.sqrt(max(kept / total, np.float32(1e-6)))
            for page in range(summaries.shape[0]):
                sums[:] = 0
                for n in range(count):
                    q = factor * queries[i, chosen[n]]
                    for t in range(sums.shape[0]):
                        sums[t] += q * from_bfloat16(summaries[page, chosen[n], t])
                top = np.max(sums[:tokens])
                weights = np.float32(0)
                for t in range(tokens):
                    weights += np.exp(sums[t] - top)
                scores[i, page] = top + np.log(weights)
