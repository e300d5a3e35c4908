"""The rotary embedding in scorers: turns keys as parameters of a scorer with `rotary` say."""

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
