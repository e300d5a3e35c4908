"""Paired statistics: bounds by bootstrap over texts, and McNemar's exact test over items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 7
Samples = Sequence[float] | npt.NDArray[np.float64]


class Bounded(NamedTuple):
    """A mean, and bounds below and above it."""

    mean: float
    low: float
    high: float

    def below(self, digits: int = 1) -> str:
        """The bound above a share, in words."""
        return f"{100 * self.high:+.{digits}f} %" if math.isfinite(self.high) else "no bound"


def bootstrap(samples: Samples) -> Bounded:
    """samples: one a text, the mean of its steps; what is resampled are texts, since the steps of
    one text are alike. Each bound alone holds with 95 %. (Efron, Tibshirani, An Introduction to
    the Bootstrap, 1993, 13.) One text says nothing of others: its bounds are infinite."""
    values = np.asarray(samples, np.float64)
    if len(values) == 1:
        return Bounded(float(values[0]), -math.inf, math.inf)
    random = np.random.default_rng(SEED)
    drawn = values[random.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(drawn, [1 - CONFIDENCE, CONFIDENCE])
    return Bounded(float(values.mean()), float(low), float(high))


def bootstrap_blocks(samples: Samples, block: int = 8) -> Bounded:
    """samples: one a step of one text; neighbours are alike, so that runs of `block` steps are
    drawn. Bounds that hold together with 95 %. (Kuensch, Annals of Statistics 17, 1989.)"""
    values = np.asarray(samples, np.float64)
    random, count = np.random.default_rng(SEED), -(-len(values) // block)
    first = random.integers(max(1, len(values) - block + 1), size=(RESAMPLES, count))
    at = (first[..., None] + np.arange(min(block, len(values)))).reshape(RESAMPLES, -1)
    drawn = values[at[:, : len(values)]].mean(axis=1)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Bounded(float(values.mean()), float(low), float(high))


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided probability of so uneven a split of the items that one form alone
    answers, if both were equally good. (McNemar, Psychometrika 12, 1947.)"""
    count, fewer = only_first + only_second, min(only_first, only_second)
    if count == 0:
        return 1.0
    tail: int = sum(comb(count, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << count))
