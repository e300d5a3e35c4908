"""Scores tokens by the channels in which the query is largest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, log_sum, to_bfloat16

PART = 8
"""One channel of so many is read."""


class SparQ(Scorer):
    """SparQ (arXiv 2312.04985), its first step: logits of the channels of largest |q| alone, with a
    temperature for those that are left out. Each query has channels of its own, where the authors'
    code has the same for all of a kv head. Keys are kept a second time, channel by channel, as the
    paper has them. Its mean value in place of what is not attended to is left out."""

    name = "sparq"
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim, shape.tokens + -shape.tokens % 4), np.uint16

    def read_bytes(self, shape: Shape) -> None:
        """score() returns it: of the channels that some query has."""

    @staticmethod
    def summarise(keys, first, parameters, summary):
        for d in range(keys.shape[1]):
            for t in range(keys.shape[0]):
                summary[d, t] = to_bfloat16(keys[t, d])

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        count = -(-dim // PART)
        chosen = np.empty(count, np.int64)
        parts = np.empty(count, np.float32)
        sizes = np.empty(dim, np.float32)
        logits = np.empty(summaries.shape[2], np.float32)
        is_read = np.zeros(dim, np.int64)
        for i in range(queries.shape[0]):
            total = np.float32(1e-30)
            kept = np.float32(0)
            for d in range(dim):
                sizes[d] = abs(queries[i, d])
                total += sizes[d]
            for n in range(count):
                chosen[n] = np.argmax(sizes)
                is_read[chosen[n]] = 1
                kept += sizes[chosen[n]]
                sizes[chosen[n]] = -1
            factor = scale / np.sqrt(max(kept / total, np.float32(1e-6)))
            for n in range(count):
                parts[n] = factor * queries[i, chosen[n]]
            for page in range(summaries.shape[0]):
                for first in range(0, logits.shape[0], 4):  # four at once
                    a = b = c = e = np.float32(0)
                    for n in range(count):
                        part, d = parts[n], chosen[n]
                        a += part * from_bfloat16(summaries[page, d, first])
                        b += part * from_bfloat16(summaries[page, d, first + 1])
                        c += part * from_bfloat16(summaries[page, d, first + 2])
                        e += part * from_bfloat16(summaries[page, d, first + 3])
                    logits[first] = a
                    logits[first + 1] = b
                    logits[first + 2] = c
                    logits[first + 3] = e
                scores[i, page] = log_sum(logits, tokens)
        return int(is_read.sum()) * logits.size * 2
