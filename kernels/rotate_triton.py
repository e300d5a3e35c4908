"""The kernel behind `rotate.py`, and the butterflies that others share."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from cxlkv.kernels.reference_encode import signs
from cxlkv.kernels.variants import Variant, variant

TILE = 2048  # elements of a program
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@triton.jit
def paired(
    x,
    channel,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    """A step of the transforms: sums and differences of channels HALF apart, in blocks of at least
    twice as many. Blocks fall in size, so those are the channels below a multiple of 2 * HALF."""
    end: tl.constexpr = DIM // (2 * HALF) * (2 * HALF)
    pairs = tl.reshape(x, [TOKENS, PADDED // (2 * HALF), 2, HALF])
    low, high = tl.split(tl.permute(pairs, [0, 1, 3, 2]))
    pairs = tl.permute(tl.join(low + high, low - high), [0, 1, 3, 2])
    return tl.where((channel < end)[None, :], tl.reshape(pairs, [TOKENS, PADDED]), x)


@triton.jit
def _rotate_kernel(
    rows,
    factors,
    out,
    count,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, PADDED)
    there = (row < count)[:, None] & (channel < DIM)[None, :]
    at = row[:, None] * DIM + channel[None, :]
    x = tl.load(rows + at, mask=there, other=0).to(tl.float32)
    change = tl.load(factors + channel)[None, :]
    if not BACK:
        x *= change
    for step in tl.static_range(STEPS):
        x = paired(x, channel, DIM, PADDED, ROWS, 1 << step)
    x *= tl.load(factors + PADDED + channel)[None, :]
    if BACK:
        x *= change
    tl.store(out + at, x, mask=there)


@cache
def factors(dim: int, padded: int, device: torch.device) -> torch.Tensor:
    """float32 [2, padded]: signs before the transforms, what they are divided by after them."""
    norms, first = [], 0
    while first < dim:
        size = 1 << (dim - first).bit_length() - 1
        norms.append(torch.full((size,), 1.0) / torch.tensor(float(size)).sqrt())
        first += size
    made = torch.zeros((2, padded))
    made[0, :dim], made[1, :dim] = signs(dim), torch.cat(norms)
    return made.to(device)


def shape_of(dim: int) -> tuple[int, int, int, int]:
    """(channels, steps, rows of a program, warps)."""
    padded = max(16, triton.next_power_of_2(dim))
    rows = max(1, min(16, TILE // padded))
    return padded, dim.bit_length() - 1, rows, 4 if padded * rows >= 1024 else 1


def launch(rows: torch.Tensor, out: torch.Tensor, back: bool) -> None:
    dim = rows.shape[-1]
    padded, steps, lines, warps = shape_of(dim)
    count = rows.numel() // dim
    _rotate_kernel[(triton.cdiv(count, lines),)](
        rows,
        factors(dim, padded, rows.device),
        out,
        count,
        DIM=dim,
        PADDED=padded,
        STEPS=steps,
        ROWS=lines,
        BACK=back,
        num_warps=warps,
        num_stages=1,
    )


def variants() -> list[Variant]:
    return [
        _variant(dim, dtype, back)
        for dim in (64, 80, 128, 256)
        for dtype, back in ((torch.bfloat16, False), (torch.float32, True))
    ]


def _variant(dim: int, dtype: torch.dtype, back: bool) -> Variant:
    padded, steps, rows, warps = shape_of(dim)
    constants: dict[str, object] = {
        "DIM": dim,
        "PADDED": padded,
        "STEPS": steps,
        "ROWS": rows,
        "BACK": back,
    }
    types = {"rows": f"*{SHORT[dtype]}", "factors out": "*fp32", "count": "i32"}
    name = f"rotate {dim} {SHORT[dtype]}{' back' if back else ''}"
    return variant(name, _rotate_kernel, types, constants, warps)
