"""What keys and values in few bits stand for: plain numpy, the arithmetic of each encoding.

`int8` and `int4` are those of native/src/kernels/codes.h, operation by operation in float32, so
that the codes are the same; docs/decisions/0034-encodings.md has why. The others are what they are
held against. Rows are [..., dim] arrays of one token and head each; nothing here knows of a model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.errors import BadArgumentError

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Codes = npt.NDArray[np.uint8]
Wholes = npt.NDArray[np.int32]

HALF_MAX = np.float32(65504)
FP8_MAX = np.float32(448)
KIVI_TOKENS = 32
"""A group of keys: so many tokens of one channel."""
KIVI_CHANNELS = 32
"""A group of values: so many channels of one token."""
KIVI_WINDOW = 128
"""So many of the newest tokens are kept as they are."""
Q4_CHANNELS = 32
"""A group of ggml's q4_0."""


class Encoded(NamedTuple):
    """codes: uint8 [..., dim]; scales: float16 [...], one for each row."""

    codes: Codes
    scales: Halves


class Grouped(NamedTuple):
    """codes: uint8, as the groups lie; scales, zeros: float16, a group each."""

    codes: Codes
    scales: Halves
    zeros: Halves


# ---- the rotation of native/src/kernels/sketch.h ----


def signs(dim: int) -> Floats:
    """-1 where a channel changes its sign, else 1: float32 [dim] (splitmix64 of the block of 64
    channels, a bit each from the low ones on)."""
    mask, found = (1 << 64) - 1, np.ones(dim, np.float32)
    for block in range(-(-dim // 64)):
        z = (block + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        for channel in range(64 * block, min(dim, 64 * block + 64)):
            if z >> channel - 64 * block & 1:
                found[channel] = -1
    return found


def blocks(dim: int) -> list[slice[int, int, None]]:
    """The channels that are transformed together: powers of two that make up dim, large first."""
    found: list[slice[int, int, None]] = []
    first = 0
    while first < dim:
        size = 1 << (dim - first).bit_length() - 1
        found.append(slice(first, first + size))
        first += size
    return found


def butterflies(rows: Floats) -> Floats:
    """Sums and differences of the last axis, a power of two: distance 1 first, then 2, 4 ..."""
    size, half, found = rows.shape[-1], 1, rows.astype(np.float32)
    while half < size:
        pairs = found.reshape(*rows.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.stack([a + b, a - b], axis=-2).reshape(rows.shape)
        half *= 2
    return found


def norms(dim: int) -> Floats:
    """What makes butterflies keep lengths: 1 / root of the block's size, float32 [dim]."""
    parts = [
        np.full(c.stop - c.start, 1 / np.sqrt(np.float32(c.stop - c.start))) for c in blocks(dim)
    ]
    return np.concatenate(parts).astype(np.float32)


def transformed(rows: Floats) -> Floats:
    """Butterflies in blocks that make up the channels."""
    return np.concatenate([butterflies(rows[..., c]) for c in blocks(rows.shape[-1])], axis=-1)


def turned(rows: Floats) -> Floats:
    """Signs and butterflies: rotate() before its norms."""
    return transformed(rows.astype(np.float32) * signs(rows.shape[-1]))


def rotate(rows: Floats) -> Floats:
    """Signs, then the transform, in float32. Keeps lengths and inner products."""
    return turned(rows) * norms(rows.shape[-1])


def unrotate(rows: Floats) -> Floats:
    """Back from rotate()."""
    return transformed(rows) * norms(rows.shape[-1]) * signs(rows.shape[-1])


# ---- codes of 8 and 4 bits: native/src/kernels/codes.h ----


def encode_rows(rows: Floats, bits: int) -> Encoded:
    """Rows as the model made them, [..., dim]: rotated, then coded, to the bit."""
    return encode(turned(rows), bits, norms(rows.shape[-1]))


def encode(rotated: Floats, bits: int, norm: Floats | None = None) -> Encoded:
    """Codes of rotated rows; norm: what they are still to be multiplied by. A row with an infinity
    or a NaN has the scale NaN and codes 0."""
    factor = np.ones(rotated.shape[-1], np.float32) if norm is None else norm
    half = np.float32(1 << bits - 1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        largest = np.abs(rotated * factor).max(axis=-1)
        wanted = np.minimum(largest / half, HALF_MAX)
        scales = np.where(np.isfinite(largest), wanted, np.float32(np.nan)).astype(np.float16)
        unit = scales.astype(np.float32)[..., None]
        steps = np.floor(rotated * (factor / unit)) + half
        inside = np.where(unit > 0, np.clip(steps, np.float32(0), 2 * half - 1), np.float32(0))
    return Encoded(inside.astype(np.uint8), scales)


def decode(encoded: Encoded, bits: int) -> Floats:
    """What the codes stand for, in the rotated space: float32 [..., dim]."""
    middle = encoded.codes.astype(np.float32) + (np.float32(0.5) - np.float32(1 << bits - 1))
    return middle * encoded.scales.astype(np.float32)[..., None]


def upper_half(encoded: Encoded) -> Encoded:
    """The same rows in 4 bits, of codes of 8: each code's upper nibble, and 16 times the scale."""
    with np.errstate(over="ignore"):
        scales = (encoded.scales.astype(np.float32) * 16).astype(np.float16)
    return Encoded((encoded.codes >> 4).astype(np.uint8), scales)


class Query(NamedTuple):
    """Rotated queries in whole numbers: wholes int32 [..., dim], factors float32 [...]."""

    wholes: Wholes
    factors: Floats


QUERY_MOST = {14: 8127, 8: 127}
"""The largest whole number by the bits of a query. 8127 is 63 * 128 + 63."""


def rounded_query(rotated: Floats, bits: int = 14, scale: float = 1.0) -> Query:
    """Rotated queries in 14 bits, as codes.h has them, or in 8, as sketch.h; whole numbers to the
    nearest, to the even of two. One of zeros, or below 1e-30, has wholes 0."""
    most = np.float32(QUERY_MOST[bits])
    largest = np.abs(rotated).max(axis=-1)
    some = np.isfinite(largest) & (largest > np.float32(1e-30))
    unit = np.where(some, most / np.where(some, largest, np.float32(1)), np.float32(0))
    with np.errstate(invalid="ignore"):
        wholes = np.where(some[..., None], np.rint(rotated * unit[..., None]), np.float32(0))
        factors = np.where(np.isfinite(largest), np.float32(scale) * largest / most, np.nan)
    return Query(wholes.astype(np.int32), factors.astype(np.float32))


# ---- fp8 ----


def fp8(rows: Floats, scale: Floats | float = 1.0, nearest: bool = False) -> Codes:
    """Bytes of float8_e4m3fn, uint8 like rows; scale broadcasts against them.

    As vLLM 0.32 stores them on CPUs with --kv-cache-dtype fp8: what is cut off is dropped, towards
    zero; above 448 is 448, a NaN too; -0 is 0. nearest: to the nearest, to the even of two, as its
    GPUs and torch have it.
    """
    inverse = np.float32(1) / np.asarray(scale, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = rows.astype(np.float32) * inverse
    scaled = np.clip(np.where(np.isnan(scaled), FP8_MAX, scaled), -FP8_MAX, FP8_MAX)
    if nearest:
        scaled = nearest_fp8(scaled)
    bits = (scaled.astype(np.float32) * np.float32(2.0**-120)).view(np.uint32)
    found = (bits >> 24 & 0x80) | np.minimum(bits >> 20 & 0x7F, 0x7E)
    return np.where(scaled == 0, 0, found).astype(np.uint8)


def nearest_fp8(numbers: Floats) -> Floats:
    """The nearest numbers of float8_e4m3fn, of ones within +-448."""
    _, exponent = np.frexp(numbers)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3).astype(np.float32)
    return np.asarray(np.rint(numbers / step) * step, np.float32)


def decode_fp8(codes: Codes, scale: Floats | float = 1.0) -> Floats:
    """What the bytes stand for: float32 like codes."""
    magnitude = (codes & 0x7F).astype(np.uint32) << 20
    numbers = magnitude.view(np.float32) * np.float32(2.0**120)
    numbers = np.where(codes & 0x7F == 0x7F, np.float32(np.nan), numbers)
    return (np.where(codes & 0x80, -numbers, numbers) * np.float32(scale)).astype(np.float32)


# ---- KIVI (Liu et al., arXiv 2402.02750): unsigned, a float16 scale and zero for each group ----


def kivi(groups: Floats, bits: int) -> Grouped:
    """Codes of groups, [..., size] each: (x - least) / step to the nearest, step being the range of
    the group / (2^bits - 1). Not finite: the scale is NaN, the codes are 0."""
    least, most = groups.min(axis=-1), groups.max(axis=-1)
    last = np.float32((1 << bits) - 1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        finite = np.isfinite(least) & np.isfinite(most)
        zeros = np.clip(least, -HALF_MAX, HALF_MAX).astype(np.float16)
        steps = np.minimum((most - least) / last, HALF_MAX)
        scales = np.where(finite, steps, np.nan).astype(np.float16)
        unit = scales.astype(np.float32)[..., None]
        codes = np.rint((groups - zeros.astype(np.float32)[..., None]) / unit)
        codes = np.where(unit > 0, np.clip(codes, 0, last), 0)
    return Grouped(codes.astype(np.uint8), scales, zeros)


def decode_kivi(grouped: Grouped) -> Floats:
    """float32, as the groups lie."""
    zeros, scales = (one.astype(np.float32)[..., None] for one in (grouped.zeros, grouped.scales))
    return (grouped.codes.astype(np.float32) * scales + zeros).astype(np.float32)


def kivi_keys(keys: Floats, bits: int) -> Floats:
    """Keys [..., tokens, dim] by channel over 32 tokens each, and back; the last tokens, fewer than
    32, stay as they are."""
    tokens, dim = keys.shape[-2:]
    whole = tokens // KIVI_TOKENS * KIVI_TOKENS
    groups = keys[..., :whole, :].reshape(*keys.shape[:-2], -1, KIVI_TOKENS, dim).swapaxes(-1, -2)
    found = decode_kivi(kivi(groups, bits)).swapaxes(-1, -2)
    found = found.reshape(*keys.shape[:-2], whole, dim)
    return np.concatenate([found, keys[..., whole:, :]], axis=-2)


def kivi_values(values: Floats, bits: int) -> Floats:
    """Values [..., dim] by token, in groups of 32 channels, and back."""
    return decode_kivi(kivi(in_groups(values, KIVI_CHANNELS), bits)).reshape(values.shape)


def in_groups(rows: Floats, size: int) -> Floats:
    """[..., dim] as [..., dim / size, size]; BadArgumentError where dim has no such groups."""
    if rows.shape[-1] % size:
        raise BadArgumentError(f"{rows.shape[-1]} channels are not groups of {size}")
    return rows.reshape(*rows.shape[:-1], -1, size)


# ---- ggml's q4_0 ----


def q4_0(rows: Floats) -> Floats:
    """Rows in q4_0 and back: groups of 32 channels, the scale is the channel that is largest by
    magnitude / -8, in float16; codes by the scale before it is rounded, as ggml has them."""
    groups = in_groups(rows.astype(np.float32), Q4_CHANNELS)
    at = np.abs(groups).argmax(axis=-1)[..., None]
    scales = np.take_along_axis(groups, at, axis=-1) / np.float32(-8)
    inverse = np.where(scales == 0, np.float32(0), 1 / np.where(scales == 0, 1, scales))
    codes = np.clip(np.floor(groups * inverse + np.float32(8.5)), 0, 15)
    found = (codes - np.float32(8)) * scales.astype(np.float16).astype(np.float32)
    return np.asarray(found, np.float32).reshape(rows.shape)
