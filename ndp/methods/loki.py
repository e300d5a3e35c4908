"""Scores tokens in the space of the keys' principal components."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Floats, Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, log_sum, to_bfloat16

PART = 8
"""One component of so many channels is kept."""


class Loki(Scorer):
    """Loki (arXiv 2406.02542): logits of the first principal components of keys, which are learned
    from a text, of keys behind the rotary embedding. The paper keeps keys in that space in place of
    their own; here the components are kept beside them. Those of its code are of the covariance,
    these of the keys as they are, which hold more of SmolLM2's attention (docs/methods.md)."""

    name = "loki"
    calibrated = True
    log_sums = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.tokens + -shape.tokens % 4, -(-shape.dim // PART)), np.uint16

    def calibrate(self, keys: Floats) -> Floats:
        """[components, dim]"""
        values, vectors = np.linalg.eigh(keys.astype(np.float64).T @ keys)
        order = np.argsort(-values)[: -(-keys.shape[1] // PART)]
        return vectors[:, order].T.astype(np.float32).ravel()

    def parameter_count(self, shape: Shape) -> int:
        return -(-shape.dim // PART) * shape.dim

    @staticmethod
    def summarise(keys, first, parameters, summary):
        dim = keys.shape[1]
        for t in range(keys.shape[0]):
            for n in range(summary.shape[1]):
                total = np.float32(0)
                for d in range(dim):
                    total += keys[t, d] * parameters[n * dim + d]
                summary[t, n] = to_bfloat16(total)

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim, components = queries.shape[1], summaries.shape[2]
        query = np.empty(components, np.float32)
        logits = np.empty(tokens, np.float32)
        for i in range(queries.shape[0]):
            for n in range(components):
                query[n] = 0
                for d in range(dim):
                    query[n] += scale * queries[i, d] * parameters[n * dim + d]
            for page in range(summaries.shape[0]):
                for t in range(tokens):
                    total = np.float32(0)
                    for n in range(components):
                        total += query[n] * from_bfloat16(summaries[page, t, n])
                    logits[t] = total
                scores[i, page] = log_sum(logits, tokens)
