"""Scores tokens by one bit a channel, between the least and the largest value in a page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, to_bfloat16


class Fier(Scorer):
    """FIER (arXiv 2508.08256): of each channel the tokens of a group share two values, and have a
    bit each. Here a group is a page and the values are the means of the tokens below and above the
    middle. A page has its best token's score."""

    name = "fier"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (2 + -(-shape.tokens // 16), shape.dim + -shape.dim % 4), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        summary[:] = 0
        for d in range(dim):
            low = keys[0, d]
            high = keys[0, d]
            for t in range(tokens):
                low = min(low, keys[t, d])
                high = max(high, keys[t, d])
            middle = (low + high) / 2
            below = np.float32(0)
            above = np.float32(0)
            count = 0
            for t in range(tokens):
                if keys[t, d] > middle:
                    above += keys[t, d]
                    count += 1
                    summary[2 + t // 16, d] |= np.uint16(1 << t % 16)
                else:
                    below += keys[t, d]
            summary[0, d] = to_bfloat16(below / (tokens - count))
            summary[1, d] = to_bfloat16(above / max(count, 1))

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        pages, rows, _ = summaries.shape
        dim = queries.shape[1]
        steps = np.empty(dim, np.float32)
        for page in range(pages):
            for i in range(queries.shape[0]):
                base = np.float32(0)
                for d in range(dim):
                    low = from_bfloat16(summaries[page, 0, d])
                    steps[d] = queries[i, d] * (from_bfloat16(summaries[page, 1, d]) - low)
                    base += queries[i, d] * low
                best = np.float32(-np.inf)
                for block in range(2, rows):
                    for t in range(min(16, tokens - 16 * (block - 2))):
                        total = np.float32(0)
                        for d in range(dim):
                            is_high = summaries[page, block, d] & (1 << t)
                            total += steps[d] if is_high else np.float32(0)
                        best = max(best, total)
                scores[i, page] = scale * (base + best)
