"""Scores a page by the mean of its keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.scorers import Floats, Scorer, Shape


class Mean(Scorer):
    """The best q.mean(keys) of the queries, as InfLLM (arXiv 2402.04617) and MoBA (arXiv
    2502.13189) score blocks, and ShadowKV's landmarks (arXiv 2410.21465)."""

    name = "mean"
    paper = "arXiv 2502.13189"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim,), np.float32

    @staticmethod
    def summarise(keys: Floats, first: int, parameters: Floats, summary: Floats) -> None:
        summary[:] = 0
        for t in range(keys.shape[0]):
            for d in range(keys.shape[1]):
                summary[d] += keys[t, d]
        for d in range(keys.shape[1]):
            summary[d] /= keys.shape[0]

    @staticmethod
    def score(
        queries: Floats, scale: float, summaries: Floats, parameters: Floats, scores: Floats
    ) -> None:
        for page in range(summaries.shape[0]):
            best = np.float32(-np.inf)
            for i in range(queries.shape[0]):
                total = np.float32(0)
                for d in range(queries.shape[1]):
                    total += queries[i, d] * summaries[page, d]
                best = max(best, total)
            scores[page] = scale * best
