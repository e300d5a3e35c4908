"""Scores pages by landmarks, but keeps those in sight whose landmark says little."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Floats, Sample, Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import from_bfloat16, means_of, product

OUTLIERS = 0.005
"""The share of pages that are outliers: 48 chunks of 8 tokens of 128,000 are 0.3 % in the paper."""


class Shadow(Scorer):
    """ShadowKV (arXiv 2410.21465): the mean key is a page's landmark, and pages in which a key is
    least like it (by the cosine) are always chosen. Which these are follows from a threshold that
    is learned from a text; the paper takes a fixed number of each prompt. Its keys of low rank are
    `low_rank`, to choose by."""

    name = "shadow"
    calibrated = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        return (shape.dim + 4 - shape.dim % 4,), np.uint16

    def learn(self, sample: Sample) -> Floats:
        """The least cosine below which a page is an outlier."""
        pages = sample.pages
        mean = pages.mean(1, keepdims=True)
        lengths = np.linalg.norm(pages, axis=2) * np.linalg.norm(mean, axis=2)
        cosines = ((pages * mean).sum(2) / np.maximum(lengths, 1e-30)).min(1)
        return np.array([np.quantile(cosines, OUTLIERS)], np.float32)

    def parameter_count(self, shape: Shape) -> int:
        return 1

    def parameter_bytes(self, shape: Shape, count: int) -> int:
        return 0

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        means_of(keys, summary)
        least = np.float32(1)
        for t in range(tokens):
            along = np.float32(0)
            ours = np.float32(1e-30)
            means = np.float32(1e-30)
            for d in range(dim):
                mean = from_bfloat16(summary[d])
                along += keys[t, d] * mean
                ours += keys[t, d] * keys[t, d]
                means += mean * mean
            least = min(least, along / np.sqrt(ours) / np.sqrt(means))
        summary[dim] = least < parameters[0]

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        dim = queries.shape[1]
        for page in range(summaries.shape[0]):
            for i in range(queries.shape[0]):
                total = product(queries[i], summaries[page])
                scores[i, page] = np.inf if summaries[page, dim] else scale * total
