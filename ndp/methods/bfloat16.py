"""bfloat16 in scorers: numba has no such numbers, so they are uint16."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit
def to_bfloat16(number):
    """The nearest one to a float32, ties to even."""
    bits = np.uint32(np.float32(number).view(np.uint32))
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16((bits + half) >> np.uint32(16))


@numba.njit
def from_bfloat16(number):
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
