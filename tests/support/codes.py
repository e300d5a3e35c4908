"""Keys and values in 8 and 4 bits, as native/src/kernels/codes.h says, in a few lines of NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reference import hadamard

BITS = {"int8": 8, "int4": 4}


def kept(rows: npt.NDArray[np.float32], encoding: str) -> npt.NDArray[np.float32]:
    """What rows [..., dim] stand for once they are encoded: of finite, ordinary numbers."""
    if encoding == "none":
        return rows
    half = 1 << BITS[encoding] - 1
    rotated = hadamard(rows.astype(np.float64))
    largest = np.abs(rotated).max(-1, keepdims=True)
    scale = (largest / half).astype(np.float16).astype(np.float64)
    codes = np.clip(np.floor(rotated / np.where(scale == 0, 1, scale)), -half, half - 1)
    return unrotated((codes + 0.5) * scale).astype(np.float32)


def unrotated(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """hadamard()'s inverse, its transpose."""
    matrix = hadamard(np.eye(rows.shape[-1]))
    return rows @ matrix.T
