"""CRC32C on a GPU: the numbers by which its shifts are made, and the checksum of many pieces.

A CRC is linear over GF(2): xor of messages is xor of their CRCs, if the register begins with 0. So
a piece is cut into rows of words, a lane goes down a column, and each step shifts its register by a
row (four tables of 256, one for each byte of the register) and adds a word. In the end lane j is
multiplied by the power of x that its place needs, and all are added. A last row that is not full is
as good as one filled with zeros: x has an inverse, and the powers are smaller by so much.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from cxlkv.arrays import address_of
from cxlkv.errors import BadArgumentError
from cxlkv.kernels.reference_encode import checksums_of
from cxlkv.kernels.runtime import one_device, runs_triton

POLYNOMIAL = 0x82F63B78  # of CRC32C, the bit of x^0 highest
ONE = 0x80000000
KINDS_MAX = 4
ORDER = 2**31 - 1  # x to this power is 1: the polynomial is x + 1 times a primitive one


def multiplied(left: int, right: int) -> int:
    """The product of two polynomials, modulo CRC32C's."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return product


@cache
def power(bits: int) -> int:
    """x to the power of `bits`, which may be negative."""
    result, base, exponent = ONE, ONE >> 1, bits % ORDER
    while exponent:
        if exponent & 1:
            result = multiplied(result, base)
        base = multiplied(base, base)
        exponent >>= 1
    return result


def of_zeros(size: int) -> int:
    """The CRC32C of so many zero bytes: what the register's first and last inversion add to the
    CRC of any message of this length."""
    return multiplied(0xFFFFFFFF, power(8 * size)) ^ 0xFFFFFFFF


def signed(words: list[int]) -> torch.Tensor:
    """As int32, which is what kernels load."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


class Shifts(NamedTuple):
    """What a checksum of pieces of up to `kinds` lengths needs on a device."""

    tables: torch.Tensor  # int32 [4 * 256]: a register shifted by a row
    factors: torch.Tensor  # int32 [kinds, lanes]: what each lane is multiplied by in the end
    constants: torch.Tensor  # int32 [kinds]: the CRC of as many zeros


@cache
def shifts(sizes: tuple[int, ...], lanes: int, device: torch.device) -> Shifts:
    """For pieces of these bytes (0: there are none), in rows of `lanes` words."""
    step = power(32 * lanes)
    tables = [multiplied(byte << 8 * place, step) for place in range(4) for byte in range(256)]
    factors, constants = [], []
    for size in sizes:
        filled = 8 * (-size % (4 * lanes))
        factors += [power(32 * (lanes - lane) - filled) for lane in range(lanes)]
        constants.append(of_zeros(size))
    return Shifts(
        tables=signed(tables).to(device),
        factors=signed(factors).view(len(sizes), lanes).to(device),
        constants=signed(constants).to(device),
    )


def lanes_for(largest_bytes: int) -> int:
    """Words in a row: a warp with four each, or four warps where pieces are long."""
    return 128 if largest_bytes <= 16384 else 512


def checksums(
    kinds: Sequence[torch.Tensor | None], sizes: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The CRC32C of every piece, int32 [..., kinds], 0 where a kind has none.

    kinds: up to four contiguous uint8 tensors [..., piece_bytes], the same number of pieces in
    each, each beginning at a multiple of 64 bytes; sizes: how many bytes of a piece count. The
    others are zero.
    """
    given = [pieces for pieces in kinds if pieces is not None]
    device = one_device(**{f"kind {i}": pieces for i, pieces in enumerate(given)}, out=out)
    shape = given[0].shape[:-1]
    for pieces, size in zip(kinds, sizes, strict=True):
        if pieces is not None and not (
            pieces.dtype == torch.uint8
            and pieces.is_contiguous()
            and pieces.shape[:-1] == shape
            and pieces.shape[-1] == -(-size // 64) * 64
            and address_of(pieces, "pieces") % 16 == 0
        ):
            raise BadArgumentError(
                f"pieces of {size} bytes: wanted contiguous uint8, whole lines of 64 bytes each, "
                f"got {pieces.dtype} {tuple(pieces.shape)}"
            )
    if out is None:
        out = torch.zeros((*shape, len(kinds)), dtype=torch.int32, device=device)
    if not runs_triton(device):
        for kind, (pieces, size) in enumerate(zip(kinds, sizes, strict=True)):
            if pieces is not None:
                out[..., kind] = checksums_of(pieces, size)
        return out
    if out.numel():
        from cxlkv.kernels.crc32c_triton import launch

        launch(kinds, sizes, out)
    return out
