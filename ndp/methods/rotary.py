"""The rotary embedding in scorers: turns keys as parameters of a scorer with `rotary` say, and
scores keys that are made of codes and turned."""

from __future__ import annotations

import math

import numba
import numpy as np

from cxlkv.ndp.methods.bfloat16 import FASTMATH

# parameters[:dim] has the other channel of each channel's pair, its own where it is not turned;
# parameters[dim : 2 * dim] by how many radians a token it turns towards that: below 0 of a pair's
# first channel.


@numba.njit(fastmath=FASTMATH)
def rotate(keys, first, parameters):
    """Turn keys [tokens, dim], the first of which is at position `first`, in place."""
    turn(keys, first, 1, parameters)


@numba.njit(fastmath=FASTMATH)
def unrotate(keys, first, parameters):
    """The keys as they were before the rotation, in place."""
    turn(keys, first, -1, parameters)


@numba.njit(fastmath=FASTMATH)
def turn(keys, first, sign, parameters):
    tokens, dim = keys.shape
    for d in range(dim):
        other = int(parameters[d])
        if other <= d:
            continue
        step = sign * np.float64(parameters[dim + other])
        cos, sin = math.cos(first * step), math.sin(first * step)
        step_cos, step_sin = math.cos(step), math.sin(step)
        for t in range(tokens):
            one, two = keys[t, d], keys[t, other]
            keys[t, d] = np.float32(one * cos - two * sin)
            keys[t, other] = np.float32(two * cos + one * sin)
            cos, sin = cos * step_cos - sin * step_sin, sin * step_cos + cos * step_sin


# ---- keys of codes ----

FIRST_BYTES = 4
"""Bytes of a page's first position, after its codes."""


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
    """Position of a page's first token, stored after its codes."""
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
