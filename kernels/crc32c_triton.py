"""The kernel behind `crc32c.py`, which says how it goes. Imported only where Triton runs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cxlkv.kernels.crc32c_shifts import KINDS_MAX, POLYNOMIAL, lanes_for, shifts
from cxlkv.kernels.runtime import current
from cxlkv.kernels.variants import Variant, variant


@triton.jit
def _shifted(register, tables):
    """A register times x to the power of a row's bits."""
    low = tl.load(tables + (register & 255)) ^ tl.load(tables + 256 + (register >> 8 & 255))
    high = tl.load(tables + 512 + (register >> 16 & 255)) ^ tl.load(tables + 768 + (register >> 24))
    return (low ^ high).to(tl.uint32, bitcast=True)


@triton.jit
def _multiplied(left, right, POLYNOMIAL: tl.constexpr):
    product = left ^ left
    for bit in range(32):
        product = tl.where((left >> (31 - bit)) & 1 != 0, product ^ right, product)
        right = tl.where(right & 1 != 0, (right >> 1) ^ POLYNOMIAL, right >> 1)
    return product


@triton.jit
def _checksum_kernel(
    first,
    second,
    third,
    fourth,
    first_words,
    second_words,
    third_words,
    fourth_words,
    tables,
    factors,
    constants,
    out,
    POLYNOMIAL: tl.constexpr,
    LANES: tl.constexpr,
    KINDS: tl.constexpr,
):
    """One program a piece and kind. `_words`: from a piece to the next one; what it has behind its
    data is zero, so that no load needs a mask of its own length; 0: there are none."""
    piece, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words, base = first_words, first
    if kind == 1:
        words, base = second_words, second
    if kind == 2:
        words, base = third_words, third
    if kind == 3:
        words, base = fourth_words, fourth
    words = tl.multiple_of(words, 16)
    lane = tl.arange(0, LANES)
    register = tl.zeros([LANES], tl.uint32)
    for row in range(0, words, LANES):
        at = base + piece * words + row + lane
        at = tl.multiple_of(tl.max_contiguous(at, LANES), 16)
        word = tl.load(at, mask=row + lane < words, other=0)
        register = _shifted(register, tables) ^ word.to(tl.uint32, bitcast=True)
    factor = tl.load(factors + kind * LANES + lane).to(tl.uint32, bitcast=True)
    total = tl.xor_sum(_multiplied(register, factor, POLYNOMIAL), 0)
    total = total.to(tl.int32, bitcast=True) ^ tl.load(constants + kind)
    if words != 0:
        tl.store(out + piece * KINDS + kind, total)


def launch(
    kinds: Sequence[torch.Tensor | None],
    sizes: Sequence[int],
    out: torch.Tensor,
) -> None:
    """checksums() of pieces that were checked, into `out`."""
    count, device = out.shape[-1], out.device
    given = [pieces for pieces in kinds if pieces is not None]
    lanes = lanes_for(max(pieces.shape[-1] for pieces in given))
    made = shifts(tuple(sizes), lanes, device)
    padded = [*kinds, *[None] * (KINDS_MAX - count)]
    words = [(given[0] if pieces is None else pieces).view(torch.int32) for pieces in padded]
    lengths = [0 if pieces is None else pieces.shape[-1] // 4 for pieces in padded]
    with current(device):
        _checksum_kernel[(out.numel() // count, count)](
            *words,
            *lengths,
            *made,
            out,
            POLYNOMIAL=POLYNOMIAL,
            LANES=lanes,
            KINDS=count,
            num_warps=lanes // 128,
            num_stages=1,
        )


def variants() -> list[Variant]:
    """Pieces of a usual model, and long ones: [page_tokens 64, MLA's 576 channels]."""
    words = "first_words second_words third_words fourth_words"
    types = {"first second third fourth tables factors constants out": "*i32", words: "i32"}
    return [
        variant(
            f"checksums of pieces up to {largest} bytes",
            _checksum_kernel,
            types,
            {"POLYNOMIAL": POLYNOMIAL, "LANES": lanes_for(largest), "KINDS": KINDS_MAX},
            num_warps=lanes_for(largest) // 128,
        )
        for largest in (4096, 64 * 576 * 2)
    ]
