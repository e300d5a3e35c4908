"""The reference of encoded pieces: plain numpy, written to be obviously right.

What rows stand for is in cxlkv.bench.lab.codes; here is how codes lie in a piece, as
native/src/kernels/codes.h says, and scores and attention over what they stand for, in float64, with
bounds on what a kernel's float32 may be off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Doubles
from cxlkv.bench.lab import codes
from cxlkv.bench.lab.codes import Codes, Encoded, Floats, Halves

TOKENS = 16
"""Of a block."""
CHANNELS = 16
"""Channels are filled up to a multiple of it."""
LINE_BYTES = 64
WEIGHT_MOST = 16256
"""Weights of a block are rounded to whole numbers up to it."""
EPSILON = float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Form:
    """code_form: bits 8 or 4, dim channels, of values or of keys."""

    bits: int
    dim: int
    values: bool

    @property
    def channels(self) -> int:
        return -(-self.dim // CHANNELS) * CHANNELS

    @property
    def block_bytes(self) -> int:
        return self.channels * TOKENS * self.bits // 8

    def scales_offset(self, tokens: int) -> int:
        return -(-tokens // TOKENS) * self.block_bytes

    def piece_bytes(self, tokens: int) -> int:
        return self.scales_offset(tokens) + -(-tokens // TOKENS) * TOKENS * 2

    def place(self, token: int, channel: int) -> tuple[int, int]:
        """The byte of a code, from the piece's start, and the bit in it that it begins at."""
        block, token = divmod(token, TOKENS)
        low = 8 // self.bits * 4  # what one line holds of the axis that is summed within a lane
        across, along = (token, channel) if self.values else (channel, token)
        line_group, within = divmod(across, low)
        if self.values:
            line_group = line_group * (self.channels // CHANNELS) + along // CHANNELS
            along %= CHANNELS
        byte = block * self.block_bytes + line_group * LINE_BYTES + 4 * along + within % 4
        return byte, within // 4 * self.bits


def pack(form: Form, encoded: Encoded) -> Codes:
    """A piece of rows [tokens, dim]: uint8 [piece_bytes]. Channels and tokens that are not there
    have codes 0, these tokens the scale 0."""
    tokens = len(encoded.scales)
    piece = np.zeros(form.piece_bytes(tokens), np.uint8)
    for token in range(tokens):
        for channel in range(form.dim):
            byte, bit = form.place(token, channel)
            piece[byte] |= encoded.codes[token, channel] << bit
    scales = np.zeros((len(piece) - form.scales_offset(tokens)) // 2, np.float16)
    scales[:tokens] = encoded.scales
    piece[form.scales_offset(tokens) :] = scales.view(np.uint8)
    return piece


def unpack(form: Form, piece: Codes, tokens: int) -> Encoded:
    """The codes [tokens, dim] and scales [tokens] of a piece."""
    found = np.empty((tokens, form.dim), np.uint8)
    for token in range(tokens):
        for channel in range(form.dim):
            byte, bit = form.place(token, channel)
            found[token, channel] = piece[byte] >> bit & (1 << form.bits) - 1
    scales: Halves = piece[form.scales_offset(tokens) :].view(np.float16)[:tokens]
    return Encoded(found, scales)


def stand_for(rows: Floats, bits: int) -> Floats:
    """What raw rows [tokens, dim] are after their encoding, in their own space."""
    return codes.unrotate(codes.decode(codes.encode_rows(rows, bits), bits))


def errors(rows: Floats, encoded: Encoded, bits: int) -> Doubles:
    """code_encode's errors, but in float64 and in no order: the length of what each row stands for
    less the row, 0 where the scale is NaN; [tokens]."""
    off = codes.decode(encoded, bits).astype(np.float64) - codes.rotate(rows)
    return np.where(np.isnan(encoded.scales), 0, np.sqrt((off**2).sum(axis=-1)))


def halves_by_sums(encoded: Encoded, bits: int) -> npt.NDArray[np.float64]:
    """Codes as they count in sums, whole numbers and a half: float64 like codes."""
    return encoded.codes.astype(np.float64) + 0.5 - (1 << bits - 1)


def scores(encoded: Encoded, bits: int, query: Floats, scale: float = 1.0) -> Floats:
    """code_score of one raw query [dim], bit for bit: the sum is exact, rounded to float32 once,
    then times the token's scale, then times the query's factor; [tokens]."""
    prepared = codes.rounded_query(codes.rotate(query), 14, scale)
    sums = (halves_by_sums(encoded, bits) @ prepared.wholes.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(sums * encoded.scales.astype(np.float32) * prepared.factors, np.float32)


def score_bound(rows: Floats, bits: int, query: Floats, scale: float = 1.0) -> Doubles:
    """How far scores() may be from scale * q.k of the raw keys, float64 [tokens]: what the codes
    are off, what the query's rounding to 14 bits is, and float32."""
    turned, asked = codes.rotate(rows), codes.rotate(query)
    encoded = codes.encode_rows(rows, bits)
    by_code = codes.bound_of(turned, encoded, bits).astype(np.float64)
    step = 0.5 * np.abs(asked).max() / codes.QUERY_MOST[14]
    held = np.abs(codes.decode(encoded, bits)).astype(np.float64)
    by_keys = by_code * np.abs(asked).sum()
    by_query = step * held.sum(axis=-1)
    by_float = 8 * len(query) ** 0.5 * EPSILON * np.abs(held @ np.abs(asked).astype(np.float64))
    return np.asarray(scale * (by_keys + by_query + by_float), np.float64)


def accumulate(encoded: Encoded, bits: int, weights: Floats) -> Floats:
    """code_accumulate of one query's weights [tokens] from the first token of a piece on, into
    zeros, bit for bit: float32 [dim], in the rotated space."""
    out = np.zeros(encoded.codes.shape[-1], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        products = weights.astype(np.float32) * encoded.scales.astype(np.float32)
    if not np.isfinite(products).all():
        return np.full_like(out, np.nan)
    for first in range(0, len(products), TOKENS):
        some = products[first : first + TOKENS]
        largest = np.abs(some).max()
        if largest < np.float32(1e-30):
            continue
        wholes = np.rint(some * (np.float32(WEIGHT_MOST) / largest)).astype(np.float64)
        part = Encoded(encoded.codes[first : first + TOKENS], encoded.scales)
        sums = (wholes @ halves_by_sums(part, bits)).astype(np.float32)
        # Fused: a product of two float32 is exact in float64, and rounded once with the sum.
        unit = float(np.float32(largest / np.float32(WEIGHT_MOST)))
        out = (out + sums.astype(np.float64) * unit).astype(np.float32)
    return out


def attend(keys: Floats, values: Floats, query: Floats, scale: float) -> Doubles:
    """Attention over rows [tokens, dim] as they are, in float64: give it what stand_for() gives."""
    scored = scale * keys.astype(np.float64) @ query.astype(np.float64)
    weights = np.exp(scored - scored.max())
    return np.asarray(weights @ values.astype(np.float64) / weights.sum(), np.float64)


def attend_bound(
    keys: Floats, values: Floats, query: Floats, scale: float, bits: tuple[int, int]
) -> float:
    """How far, in length, attention over the encoded rows may be from attend() of the raw ones.

    bits: of keys and of values. If no score is off by more than s, no weight is off by more than a
    factor of exp(2 s), so that the output moves by at most (exp(2 s) - 1) times the largest value;
    the values' own codes add what the worst of them is off, and the rounding of weights to 14 bits
    of the largest product of each block 16 / 32766 of the largest value.
    """
    s = float(score_bound(keys, bits[0], query, scale).max())
    turned = codes.rotate(values)
    encoded = codes.encode_rows(values, bits[1])
    by_value = codes.bound_of(turned, encoded, bits[1]).astype(np.float64) * values.shape[-1] ** 0.5
    longest = float(np.linalg.norm(values.astype(np.float64), axis=-1).max() + by_value.max())
    return float(np.expm1(2 * s) + 16 / (2 * WEIGHT_MOST) + 1e-5) * longest + float(by_value.max())
