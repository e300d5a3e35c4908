"""What a pool with an encoding keeps: plain numpy, written to be obviously right.

Codes are made in float32, in the order of native/src/kernels/codes.h, so that they are those of the
core to the bit; what they stand for, and how far results may be off, is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from cxlkv.arrays import Doubles, Floats

from . import reference

BITS = {"int8": 8, "int4": 4, "progressive": 8}
QUERY_MOST = 8127
WEIGHT_MOST = 16383
BLOCK = 16
"""Tokens whose weights are rounded together."""


def _blocks(dim: int) -> Iterator[tuple[int, int]]:
    """(first channel, size) of each power of two that a row is cut into."""
    first = 0
    while first < dim:
        size = 1 << (dim - first).bit_length() - 1
        yield first, size
        first += size


def _signs(dim: int) -> Floats:
    return (1 - 2 * reference.sign_bits(dim)).astype(np.float32)


def _butterflies(rows: Floats) -> Floats:
    """[..., size], the last axis a power of two; distance 1 first."""
    size, half = rows.shape[-1], 1
    while half < size:
        pairs = rows.reshape(*rows.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        rows = np.stack([a + b, a - b], axis=-2).reshape(rows.shape)
        half *= 2
    return rows


def codes(rows: Floats, encoding: str) -> tuple[Floats, Floats]:
    """Codes and float16 scales, both as float32, of rows [..., dim]: [..., dim] and [...]."""
    half = np.float32(1 << BITS[encoding] - 1)
    huge = np.isfinite(rows).all(axis=-1) & (np.abs(rows).max(axis=-1) > 1e31)
    x = np.where(huge[..., None], rows * np.float32(2**-30), rows).astype(np.float32)
    x *= _signs(rows.shape[-1])
    norm = np.empty(rows.shape[-1], np.float32)
    with np.errstate(all="ignore"):
        for first, size in _blocks(rows.shape[-1]):
            x[..., first : first + size] = _butterflies(x[..., first : first + size])
            norm[first : first + size] = np.float32(1) / np.sqrt(np.float32(size))
        largest = np.abs(x * norm).max(axis=-1)
        scales = np.minimum(largest / half, np.float32(65504)).astype(np.float16)
        scales = np.where(np.isfinite(largest), scales.astype(np.float32), np.nan)
        steps = x * (norm / scales[..., None])
        made = np.clip(np.floor(steps), -half, half - 1) + half
    return np.where(scales[..., None] > 0, made, 0), scales


def unrotated(rows: Doubles) -> Doubles:
    """From the rotated space back, [..., dim]: the transform is its own inverse, then the signs."""
    signs = _signs(rows.shape[-1]).astype(np.float64)
    return reference.hadamard(rows * signs) * signs


def in_rotated_space(rows: Floats, encoding: str) -> Doubles:
    """What codes of rows [..., dim] stand for, rotated."""
    made, scales = codes(rows, encoding)
    half = 1 << BITS[encoding] - 1
    return (made.astype(np.float64) + 0.5 - half) * scales.astype(np.float64)[..., None]


def in_fp8(numbers: Floats) -> Doubles:
    """What the bytes of float8_e4m3fn stand for that numbers become: the steps from 2^e to 2^(e+1)
    are 2^(e-3), those below 2^-6 are 2^-9; what is between two of them goes toward zero."""
    with np.errstate(invalid="ignore"):
        magnitude = np.where(np.isnan(numbers), 448, np.minimum(np.abs(numbers), 448))
    magnitude = magnitude.astype(np.float64)
    magnitude = np.where(magnitude < 2**-6, np.rint(magnitude * 2**29) / 2**29, magnitude)
    exponent = np.floor(np.log2(np.maximum(magnitude, 2**-6)))
    step = 2 ** (exponent - 3)
    kept_sign = np.where(np.isnan(numbers) | (numbers >= 0), 1, -1)
    return np.asarray(kept_sign * np.floor(magnitude / step) * step, np.float64)


def kept(rows: Floats, encoding: str) -> Doubles:
    """What rows [..., dim] are once they were kept; NaN where a row of codes has no scale."""
    if encoding == "none":
        return rows.astype(np.float64)
    if encoding == "fp8_e4m3":
        return in_fp8(rows)
    return unrotated(in_rotated_space(rows, encoding))


def score_error(keys: Doubles, query: Doubles, scale: float, encoding: str) -> float:
    """How far a logit of kept keys [tokens, dim] may be off: by the rounding of the query to 14
    bits, where keys are codes, and float32's."""
    sums = np.abs(keys) @ np.abs(query)
    most = 2e-6 * float(sums.max(initial=0)) * math.sqrt(len(query))
    if encoding in BITS:
        step = 0.5 * float(np.abs(reference.hadamard(query)).max(initial=0)) / QUERY_MOST
        most += step * float(np.abs(reference.hadamard(keys)).sum(axis=-1).max(initial=0))
        most += 1e-6 * float(np.linalg.norm(keys, axis=-1).max(initial=0) * np.linalg.norm(query))
    return scale * most


def out_error(values: Doubles, logit_error: float, encoding: str) -> float:
    """How long the difference of attention over kept values [tokens, dim] may be, whose logits are
    off by so much. A weight is off by a factor of exp(2 * logit_error) at most; where values are
    codes, weights are rounded to 14 bits of the largest of each block."""
    longest = float(np.linalg.norm(values, axis=-1).max(initial=0))
    most = math.expm1(2 * logit_error) * longest + 1e-5 * longest
    if encoding in BITS:
        channel = float(np.abs(reference.hadamard(values)).max(initial=0))
        by_block = BLOCK / (2 * WEIGHT_MOST)
        most += by_block * 1.1 * channel * math.sqrt(values.shape[-1])
    return most
