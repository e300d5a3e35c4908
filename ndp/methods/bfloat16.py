"""bfloat16 in scorers: numba has no such numbers, so they are uint16. Sums that several take."""

from __future__ import annotations

import numba
import numpy as np

FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in any order, so that they are vectors; a NaN stays one."""


@numba.njit
def to_bfloat16(number):
    """The nearest one to a float32, ties to even."""
    bits = np.uint32(np.float32(number).view(np.uint32))
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + half) >> np.uint32(16))


@numba.njit
def from_bfloat16(number):
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


@numba.njit(fastmath=FASTMATH)
def means_of(keys, means):
    """Of keys [tokens, dim], rounded, to means[:dim]."""
    tokens, dim = keys.shape
    for d in range(dim):
        total = np.float32(0)
        for t in range(tokens):
            total += keys[t, d]
        means[d] = to_bfloat16(total / tokens)


@numba.njit(fastmath=FASTMATH)
def product(query, numbers):
    """The sum of float32 query [dim] times numbers[:dim]."""
    total = np.float32(0)
    for d in range(query.shape[0]):
        total += query[d] * from_bfloat16(numbers[d])
    return total
