"""Scores a page by a ball around its keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, product, to_bfloat16


class Ball(Scorer):
    """The most that q.k can be in a ball that has all keys of a page: q.centre + |q| radius. The
    centre is the middle between the least and the largest value of each channel. One of ArkVale's
    bounding volumes (NeurIPS 2024); its other one, the cuboid, is method "digest". The radius is
    rounded up."""

    name = "ball"

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim + 4 - shape.dim % 4,), np.uint16

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        for d in range(dim):
            least = keys[0, d]
            most = keys[0, d]
            for t in range(tokens):
                least = min(least, keys[t, d])
                most = max(most, keys[t, d])
            summary[d] = to_bfloat16((least + most) / 2)
        radius = np.float32(0)
        for t in range(tokens):
            square = np.float32(0)
            for d in range(dim):
                apart = keys[t, d] - from_bfloat16(summary[d])
                square += apart * apart
            radius = max(radius, square)
        summary[dim] = to_bfloat16(np.sqrt(radius) * np.float32(1.0079))

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        for i in range(queries.shape[0]):
            square = np.float32(0)
            for d in range(dim):
                square += queries[i, d] * queries[i, d]
            length = np.sqrt(square)
            for page in range(summaries.shape[0]):
                total = product(queries[i], summaries[page])
                scores[i, page] = scale * (total + length * from_bfloat16(summaries[page, dim]))
