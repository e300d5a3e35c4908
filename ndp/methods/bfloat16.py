"""bfloat16 in scorers: numba has no such numbers, so they are uint16. Sums that several take."""

from __future__ import annotations

import numba
import numpy as np

FASTMATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be taken in any order, so that they are vectors; a NaN stays one."""
ONES = np.uint64(0x0101010101010101)
LOW = np.uint64(0x7F7F7F7F7F7F7F7F)


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
    """Round the means of keys [tokens, dim] into means[:dim]."""
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


@numba.njit(fastmath=FASTMATH)
def exp_of(number):
    """exp of a float32 of 0 or less, to three units in its last place; some 1e-38 below -87.
    Unlike the C library's, compilers vectorize it. (Cephes' polynomial, S. Moshier.)
    """
    if number < np.float32(-87):
        number = np.float32(-87)
    power = np.floor(number * np.float32(1.4426950408889634) + np.float32(0.5))
    rest = number - power * np.float32(0.693359375)
    rest -= power * np.float32(-2.12194440e-4)
    total = np.float32(1.9875691500e-4)
    total = total * rest + np.float32(1.3981999507e-3)
    total = total * rest + np.float32(8.3334519073e-3)
    total = total * rest + np.float32(4.1665795894e-2)
    total = total * rest + np.float32(1.6666665459e-1)
    total = total * rest + np.float32(5.0000001201e-1)
    total = total * rest * rest + rest + np.float32(1)
    bits = np.uint32(np.int32(power) + np.int32(127)) << np.uint32(23)
    return total * np.uint32(bits).view(np.float32)


@numba.njit(fastmath=FASTMATH)
def log_sum(logits, tokens):
    """The log of the sum of exp(logit) of float32 logits [:tokens]."""
    top = logits[0]
    for t in range(1, tokens):
        top = max(top, logits[t])
    weights = np.float32(0)
    for t in range(tokens):
        weights += exp_of(logits[t] - top)
    return top + np.log(weights)


@numba.njit
def equal_bytes(differing):
    """For each of eight bytes: 1 where it is 0, else 0."""
    nonzero = ((differing & LOW) + LOW) | differing
    return (~nonzero >> np.uint64(7)) & ONES
