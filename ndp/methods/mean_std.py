"""Score pages by the mean and the spread of their keys."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import FASTMATH, from_bfloat16, means_of, to_bfloat16


@numba.njit(fastmath=FASTMATH)
def scored(query, means, deviations):
    total = np.float32(0)
    for d in range(query.shape[0]):
        total += query[d] * from_bfloat16(means[d])
        total += np.abs(query[d]) * from_bfloat16(deviations[d])
    return total


class MeanStd(Scorer):
    """q.mean + |q|.std of a page's keys, mean and standard deviation of each channel, in as many
    bytes as a digest (arXiv 2605.27740; imp, github.com/kekzl/imp)."""

    name = "mean_std"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (2, shape.dim + shape.dim % 2), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        means_of(keys, summary[0])
        for d in range(dim):
            total = np.float32(0)
            for t in range(tokens):
                total += keys[t, d]
            square = np.float32(0)
            for t in range(tokens):
                square += (keys[t, d] - total / tokens) ** 2
            summary[1, d] = to_bfloat16(np.sqrt(square / tokens))

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                scores[i, page] = scale * scored(queries[i], summaries[page, 0], summaries[page, 1])
