"""Scores tokens by keys of low rank, from before the rotary embedding."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from cxlkv.ndp.methods.bfloat16 import FASTMATH, log_sum
from cxlkv.ndp.methods.rotary import unrotate
from cxlkv.ndp.scorers import Floats, Sample, Scorer, Shape

PART = 8
"""One component of so many channels is kept."""
FIRST_BYTES = 4
"""Of a page's first position, behind its codes."""
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

    @staticmethod
    def summarise(
        keys: Floats, first: int, parameters: Floats, summary: npt.NDArray[np.int8]
    ) -> None:
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
    def score(
        queries: Floats,
        scale: float,
        tokens: int,
        summaries: npt.NDArray[np.int8],
        parameters: Floats,
        scores: Floats,
    ) -> None:
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


@numba.njit
def paired(parameters, dim):
    """The channels of pairs [2, half], and the radians by which they turn [half]. Those that are
    not turned are pairs, too, by the angle 0; of an odd number one is alone, beside -1."""
    half = (dim + 1) // 2
    places = np.full((2, half), -1, np.int64)
    angles = np.zeros(half, np.float64)
    found = 0
    for d in range(dim):
        other = int(parameters[d])
        if other > d:
            places[0, found], places[1, found] = d, other
            angles[found] = parameters[dim + other]
            found += 1
    alone = 0
    for d in range(dim):
        if int(parameters[d]) == d:
            places[alone % 2, found + alone // 2] = d
            alone += 1
    return places, angles


@numba.njit
def by_pair(queries, scale, parameters, places, rank):
    """What keys are made of codes by [2, half, rank], and queries times scale [2, n, half]."""
    count, dim = queries.shape
    half, base = places.shape[1], 2 * dim + rank * dim
    up = np.zeros((2, half, rank), np.float32)
    own = np.zeros((2, count, half), np.float32)
    for side in range(2):
        for i in range(half):
            d = places[side, i]
            if d < 0:
                continue
            for n in range(rank):
                up[side, i, n] = parameters[base + n * dim + d]
            for j in range(count):
                own[side, j, i] = np.float32(scale) * queries[j, d]
    return up, own


@numba.njit
def turns_of(angles, tokens):
    """cos and sin [half, tokens] of token t behind a first one."""
    half = angles.shape[0]
    cos, sin = np.empty((half, tokens), np.float32), np.empty((half, tokens), np.float32)
    for i in range(half):
        step_cos, step_sin = math.cos(angles[i]), math.sin(angles[i])
        c, s = 1.0, 0.0
        for t in range(tokens):
            cos[i, t], sin[i, t] = c, s
            c, s = c * step_cos - s * step_sin, s * step_cos + c * step_sin
    return cos, sin


@numba.njit
def position(summary, begin):
    """Of a page's first token, from behind its codes."""
    found = 0
    for i in range(FIRST_BYTES):
        found |= (int(summary[begin + i]) & 255) << (8 * i)
    return found


@numba.njit(fastmath=FASTMATH)
def turn_back(own, first, expected, angles, at, turned):
    """Queries as a key at position `first` meets them that was not turned. at [4, half]: cos and
    sin at the position before, and of the step from there to `expected`."""
    for i in range(own.shape[2]):
        if first == expected:
            c, s = at[0, i], at[1, i]
            at[0, i], at[1, i] = c * at[2, i] - s * at[3, i], s * at[2, i] + c * at[3, i]
        else:
            at[0, i], at[1, i] = math.cos(first * angles[i]), math.sin(first * angles[i])
        cos, sin = np.float32(at[0, i]), np.float32(at[1, i])
        for j in range(own.shape[1]):
            turned[0, j, i] = own[0, j, i] * cos + own[1, j, i] * sin
            turned[1, j, i] = own[1, j, i] * cos - own[0, j, i] * sin


@numba.njit(fastmath=FASTMATH)
def products(codes, up, cos, sin, turned, tokens, both, logits):
    """logits[:, :tokens], by keys that are made of codes and turned, pair by pair of channels;
    both: a pair's."""
    logits[:, :tokens] = 0
    for i in range(up.shape[1]):
        for side in range(2):
            both[side, :tokens] = 0
            for n in range(0, up.shape[2], 4):  # sums stay in registers for four components
                a, b = up[side, i, n], up[side, i, n + 1]
                c, d = up[side, i, n + 2], up[side, i, n + 3]
                for t in range(tokens):
                    both[side, t] += (
                        a * codes[n, t]
                        + b * codes[n + 1, t]
                        + c * codes[n + 2, t]
                        + d * codes[n + 3, t]
                    )
        for t in range(tokens):
            one, two = both[0, t], both[1, t]
            both[0, t] = one * cos[i, t] - two * sin[i, t]
            both[1, t] = two * cos[i, t] + one * sin[i, t]
        for j in range(turned.shape[1]):
            one, two = turned[0, j, i], turned[1, j, i]
            for t in range(tokens):
                logits[j, t] += one * both[0, t] + two * both[1, t]


def components(dim: int) -> int:
    """A multiple of 4."""
    return -(-dim // (4 * PART)) * 4
