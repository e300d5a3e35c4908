"""The reference of encoded pieces: how codes lie in one, as native/src/kernels/codes.h says. What
rows stand for is in kept.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlkv.arrays import Bytes

TOKENS = 16
"""Tokens of a block."""
CHANNELS = 16
"""Channels are filled up to a multiple of it."""
LINE_BYTES = 64


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


class Unpacked(NamedTuple):
    """Codes [tokens, dim] and scales [tokens]."""

    codes: Bytes
    scales: npt.NDArray[np.float16]


def unpack(form: Form, piece: Bytes, tokens: int) -> Unpacked:
    found = np.empty((tokens, form.dim), np.uint8)
    for token in range(tokens):
        for channel in range(form.dim):
            byte, bit = form.place(token, channel)
            found[token, channel] = piece[byte] >> bit & (1 << form.bits) - 1
    return Unpacked(found, piece[form.scales_offset(tokens) :].view(np.float16)[:tokens])
