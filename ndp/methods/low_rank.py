"""Scores tokens by keys of low rank, from before the rotary embedding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cxlkv.ndp.kinds import Floats, Sample, Scorer, Shape
from cxlkv.ndp.methods.bfloat16 import log_sum
from cxlkv.ndp.methods.rotary import (
    FIRST_BYTES,
    by_pair,
    paired,
    position,
    products,
    turn_back,
    turns_of,
    unrotate,
)

PART = 8
"""One component of so many channels is kept."""
SPAN = 4
"""Pages that are scored together, so that a vector of tokens is long."""
LARGEST, MARGIN = 0.9995, 1.5
"""127 is this quantile of a component, times the margin."""


class LowRank(Scorer):
    """Keys before the rotary embedding have a lower rank than behind it (ShadowKV, arXiv
    2410.21465, which keeps such keys in place of the rotated ones). Here the components, learned
    from a text and kept in a byte each, are only chosen by: the keys that they give are turned to
    their positions, and a logit is their product with the query. Components are of keys whose
    channels are weighed by the length that queries have there, so that what is left out is small
    in the logits and not in the keys; without queries all channels weigh alike."""

    name = "low_rank"
    calibrated = True
    log_sums = True
    rotary = True

    def summary(self, shape: Shape) -> tuple[tuple[int, ...], npt.DTypeLike]:
        size = components(shape.dim) * shape.tokens + FIRST_BYTES
        return (size + -size % 8,), np.int8

    def learn(self, sample: Sample) -> Floats:
        """[2, components, dim]: what codes are made by, and keys of codes."""
        keys = sample.pages.reshape(-1, sample.pages.shape[2]).astype(np.float64)
        weights = np.ones(keys.shape[1])
        if sample.queries is not None and sample.rotary is not None:
            squares = (sample.queries.astype(np.float64) ** 2).mean(0)
            first, second = sample.rotary.pairs
            squares[first] = squares[second] = (squares[first] + squares[second]) / 2
            weights = np.sqrt(np.maximum(squares, 1e-6 * squares.max(initial=1e-30)))
        weighed = keys * weights
        vectors = np.linalg.eigh(weighed.T @ weighed)[1][:, ::-1][:, : components(keys.shape[1])]
        size = np.quantile(np.abs(weighed @ vectors), LARGEST, axis=0) * MARGIN / 127
        size = np.maximum(size, 1e-30)
        made = np.stack([(weights[:, None] * vectors / size).T, (vectors * size).T / weights])
        return made.astype(np.float32).ravel()

    def parameter_count(self, shape: Shape) -> int:
        return 2 * components(shape.dim) * shape.dim

    def parameter_bytes(self, shape: Shape, count: int) -> int:
        return 4 * (2 + components(shape.dim)) * shape.dim

    @staticmethod
    def summarise(keys, first, parameters, summary):
        tokens, dim = keys.shape
        rank = (dim + 4 * PART - 1) // (4 * PART) * 4
        unrotate(keys, first, parameters)
        down = parameters[2 * dim :]
        for n in range(rank):
            for t in range(tokens):
                total = np.float32(0)
                for d in range(dim):
                    total += keys[t, d] * down[n * dim + d]
                code = np.rint(max(np.float32(-127), min(np.float32(127), total)))
                summary[n * tokens + t] = np.int8(code)
        for i in range(FIRST_BYTES):
            byte = (first >> (8 * i)) & 255
            summary[rank * tokens + i] = np.int8(byte - 256 * (byte > 127))

    @staticmethod
    def score(queries, scale, tokens, summaries, parameters, scores):
        count, dim = queries.shape
        pages, rank = summaries.shape[0], (dim + 4 * PART - 1) // (4 * PART) * 4
        places, angles = paired(parameters, dim)
        up, own = by_pair(queries, scale, parameters, places, rank)
        most = min(SPAN, pages) * tokens
        cos, sin = turns_of(angles, most)
        turned = np.empty(own.shape, np.float32)
        codes = np.empty((rank, most), np.float32)
        both = np.empty((2, most), np.float32)
        logits = np.empty((count, most), np.float32)
        at, page, expected = np.empty((4, angles.shape[0])), 0, -1
        at[2], at[3] = np.cos(SPAN * tokens * angles), np.sin(SPAN * tokens * angles)
        while page < pages:
            first = position(summaries[page], rank * tokens)
            span = 1  # pages that follow one another are scored together
            while span < SPAN and page + span < pages:
                if position(summaries[page + span], rank * tokens) != first + span * tokens:
                    break
                span += 1
            for m in range(span):
                for n in range(rank):
                    for t in range(tokens):
                        codes[n, m * tokens + t] = summaries[page + m, n * tokens + t]
            turn_back(own, first, expected, angles, at, turned)
            expected = first + SPAN * tokens
            products(codes, up, cos, sin, turned, span * tokens, both, logits)
            for j in range(count):
                for m in range(span):
                    scores[j, page + m] = log_sum(logits[j, m * tokens :], tokens)
            page += span


def components(dim: int) -> int:
    """A multiple of 4."""
    return -(-dim // (4 * PART)) * 4
