"""The numbers by which a CRC32C shifts its register from row to row; see `crc32c.py`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

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
    """The words as int32, which is what kernels load."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


class Shifts(NamedTuple):
    """What a checksum of pieces of up to `kinds` lengths needs on a device."""

    tables: torch.Tensor  # int32 [4 * 256]: a register shifted by a row
    factors: torch.Tensor  # int32 [kinds, lanes]: what each lane is multiplied by in the end
    constants: torch.Tensor  # int32 [kinds]: the CRC of as many zeros


@cache
def shifts(sizes: tuple[int, ...], lanes: int, device: torch.device) -> Shifts:
    """The shifts for pieces of these bytes (0: there are none), in rows of `lanes` words."""
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
