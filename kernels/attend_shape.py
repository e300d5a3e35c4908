"""Chooses what `attend` is compiled for, by shape: a program's tiles, and the number of splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from cxlkv.errors import UnsupportedError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """The shape of one call: what decides how the kernel is compiled."""

    dtype: torch.dtype  # of keys and values
    query_dtype: torch.dtype
    dim: int
    value_dim: int
    own_values: bool  # False: values are the first channels of the keys
    group: int  # query heads of a kv head
    rows: int  # of a list
    page_tokens: int
    softcap: bool
    key_bits: int = 0  # of codes; 0: there are none
    value_bits: int = 0
    weighed: bool = False  # with log-weights

    @property
    def encoded(self) -> bool:
        return self.key_bits + self.value_bits > 0

    @property
    def page_room(self) -> int:
        """Tokens of a page, and of its blocks where there are codes."""
        return -(-self.page_tokens // 16) * 16 if self.encoded else self.page_tokens

    @property
    def compute(self) -> torch.dtype:
        """What products are taken in; sums are float32 always."""
        return self.dtype if self.dtype == self.query_dtype else torch.float32

    @property
    def token_bytes(self) -> int:
        bits = self.dtype.itemsize * 8
        keys = self.dim * (self.key_bits or bits)
        return (keys + self.own_values * self.value_dim * (self.value_bits or bits)) // 8

    def mixes_rows(self, lines: int) -> bool:
        """Whether tiles of so many lines have lines of several rows, which see other tokens."""
        return self.rows > 1 and self.group % lines != 0


@dataclass(frozen=True)
class Call:
    """The arguments of one call, as attend() has them."""

    q: torch.Tensor
    keys_at: torch.Tensor
    values_at: torch.Tensor | None
    pages: torch.Tensor
    positions: torch.Tensor
    scale: float
    softcap: float | None
    window: int | None
    log_weights: torch.Tensor | None = None


@dataclass(frozen=True)
class Tiles:
    """How a program works; `resident` is how many of them an SM of an H100 or H200 holds."""

    lines: int  # query rows x heads of a tile
    tokens: int
    warps: int
    stages: int  # of the pipeline: tiles in shared memory
    resident: int


@lru_cache(maxsize=256)
def tiles_of(shape: Shape) -> Tiles:
    """Tiles for which ptxas reports no spilled registers, for attend_triton.variants().

    A few bytes do for some odd ones (96 channels with several rows). Reckoned, not measured: about
    32 KiB of keys and values a stage, two of them on their way, so some 128 KiB an SM.
    """
    widest = max(shape.dim, shape.value_dim)
    if shape.encoded:
        return _tiles_of_codes(shape, widest)
    if shape.compute == torch.float32:  # no tensor cores: sums of products in registers
        mixes = shape.mixes_rows(16)
        tokens = 32 if shape.token_bytes <= 1024 and not mixes else 16
        if shape.dtype != torch.float32 or (mixes and widest > 128):
            return Tiles(16, 16, warps=8, stages=1, resident=1)
        return Tiles(16, tokens, warps=8, stages=3, resident=1 if mixes else 2)
    most = 64 if widest <= 128 else 32
    lines = min(most, max(16, power_of_two(shape.group * shape.rows)))
    if widest > 256:
        tokens = 32 if shape.token_bytes <= 1536 else 16
        few = lines == 16 and not shape.weighed
        return Tiles(lines, tokens, warps=4 if few else 8, stages=3, resident=2 if few else 1)
    if lines > 16 or shape.token_bytes > 768 or shape.mixes_rows(lines):
        return Tiles(lines, 32, warps=4, stages=3, resident=2)
    stages = 4 if shape.token_bytes <= 256 else 3
    return Tiles(lines, 64, 4, stages, resident=3 if shape.token_bytes <= 512 else 2)


MIXED_BYTES_MAX = 160 << 10
"""Most bytes of a tile's plain rows and codes: with queries, 194 KiB of shared memory where it is
full."""


def _tiles_of_codes(shape: Shape, widest: int) -> Tiles:
    """A dot takes 16 tokens or more of each place in a word: 64 of 8 bits, 128 of 4.

    128 tokens fit into the registers of two warps where keys are of 4 bits, too, and queries are
    one float16 each. Other shapes take more warps: with two, ptxas reports spilled registers.
    """
    if not (shape.key_bits and shape.value_bits):
        stages = 1 if widest > 512 and shape.key_bits else 2
        return Tiles(16, _mixed_tokens(shape), warps=8, stages=stages, resident=1)
    tokens = 128 if shape.value_bits == 4 else 64
    lines = min(32 if widest <= 256 else 16, max(16, power_of_two(shape.group * shape.rows)))
    precise = shape.query_dtype == torch.float32
    if widest > 128 or (lines == 32 and (precise or tokens == 128)):
        return Tiles(lines, tokens, warps=8, stages=3 if widest <= 512 else 2, resident=1)
    if lines == 32:
        return Tiles(lines, tokens, warps=4, stages=3, resident=2)
    if tokens == 128:
        many = shape.weighed or precise or shape.key_bits == 8
        warps, resident = (4, 2) if many else (2, 4)
        return Tiles(lines, 128, warps, stages=3, resident=resident)
    return Tiles(lines, 64, warps=2, stages=3, resident=4)


def _mixed_tokens(shape: Shape) -> int:
    """Tokens of a tile where only keys have an encoding, or only values."""
    keys, values = power_of_two(shape.dim), power_of_two(shape.value_dim)
    number_bytes = max(shape.dtype.itemsize, shape.compute.itemsize)
    if shape.key_bits:
        return 32 if max(keys, values) <= 256 else 16
    tokens = 128 if shape.value_bits == 4 else 64
    tile_bytes = tokens * (keys * number_bytes + values * shape.value_bits // 8)
    if tile_bytes > MIXED_BYTES_MAX:
        raise UnsupportedError(
            f"keys of {shape.dtype} with {shape.dim} channels, queries of {shape.query_dtype}, "
            f"values of {shape.value_dim} as codes: {tokens} tokens take {tile_bytes >> 10} KiB of "
            f"shared memory, where {MIXED_BYTES_MAX >> 10} are free: encode keys, too, or neither"
        )
    return tokens


START_TILES = 4
"""What a program costs before and after its loop, in tiles: a guess until it is measured."""

SPLITS_MAX = 256
"""Most splits that are chosen; more cost the merge more than they win."""


@lru_cache(maxsize=4096)
def splits_of(work: int, tiles: int, programs: int) -> int:
    """Into how many splits each of `work` independent parts of `tiles` tiles is cut.

    The number for which the last of the programs, `programs` at a time, is done first.
    """

    def cost(splits: int) -> float:
        waves = -(-work * splits // programs)
        return waves * (-(-tiles // splits) + START_TILES) + splits / 32  # and the merge

    return min(range(1, max(1, min(tiles, SPLITS_MAX)) + 1), key=cost)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()


def blocks_of(dim: int) -> tuple[int, int]:
    """Channels in two blocks of powers of two, 16 or more each; the second is 0 if not needed."""
    if dim <= 16 or power_of_two(dim) == dim:
        return max(16, dim), 0
    first = power_of_two(dim) // 2
    return first, max(16, power_of_two(dim - first))
