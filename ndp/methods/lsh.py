"""Scores tokens by hash values that they share with the query."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Floats, Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import ONES, equal_bytes

TABLES, BITS = 32, 8
SEED = 1


class LSH(Scorer):
    """MagicPIG's hashing (arXiv 2410.16179): keys less their mean, in 32 tables by the signs of 8
    random projections, a byte each. A page has the largest number of tables in which a token's
    byte is the query's. The paper has 150 tables of 10 bits, samples by them and weighs what it
    samples; here they only rank pages."""

    name = "lsh"
    calibrated = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.tokens, TABLES), np.uint8

    def calibrate(self, keys: Floats) -> Floats:
        """The mean key, then [TABLES * BITS, dim]."""
        planes = np.random.default_rng(SEED).standard_normal((TABLES * BITS, keys.shape[1]))
        return np.concatenate([keys.mean(0), planes.ravel()]).astype(np.float32)

    def parameter_count(self, shape: Shape) -> int:
        return (1 + TABLES * BITS) * shape.dim

    def parameter_bytes(self, shape: Shape, count: int) -> int:
        return 4 * TABLES * BITS * shape.dim

    @staticmethod
    def summarise(keys, first, parameters, summary):
        dim = keys.shape[1]
        for t in range(keys.shape[0]):
            for table in range(TABLES):
                value = 0
                for bit in range(BITS):
                    plane = (1 + table * BITS + bit) * dim
                    total = np.float32(0)
                    for d in range(dim):
                        total += (keys[t, d] - parameters[d]) * parameters[plane + d]
                    value |= int(total > 0) << bit
                summary[t, table] = value

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        values = np.empty(TABLES, np.uint8)
        for i in range(queries.shape[0]):
            for table in range(TABLES):
                value = 0
                for bit in range(BITS):
                    plane = (1 + table * BITS + bit) * dim
                    total = np.float32(0)
                    for d in range(dim):
                        total += queries[i, d] * parameters[plane + d]
                    value |= int(total > 0) << bit
                values[table] = value
            asked = values.view(np.uint64)
            for page in range(summaries.shape[0]):
                words = summaries[page].view(np.uint64)
                best = np.uint64(0)
                for t in range(tokens):
                    equal = np.uint64(0)
                    for n in range(TABLES // 8):
                        equal += equal_bytes(words[t, n] ^ asked[n])
                    best = max(best, (equal * ONES) >> np.uint64(56))
                scores[i, page] = best
