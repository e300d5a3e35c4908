"""Scores a page by the mean of its keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import means_of, product


class Mean(Scorer):
    """q times the mean key of a page: the block score of MoBA (arXiv 2502.13189), UCM's block means
    and ShadowKV's landmarks (arXiv 2410.21465)."""

    name = "mean"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim + -shape.dim % 4,), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        means_of(keys, summary)

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                total = product(queries[i], summaries[page])
                scores[i, page] = scale * total
