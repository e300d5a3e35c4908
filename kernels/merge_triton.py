"""The kernels behind `merge.py`. Imported only where Triton runs them.

A program has one row and some of its channels: rows are few after a decode step, and so the parts
of one row are read by several SMs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cxlkv.kernels.attend_shape import power_of_two
from cxlkv.kernels.variants import Variant, variant

FEW = 4  # tensors that one launch takes each for itself
PARTS_A_TURN, CHANNELS, WARPS = 64, 32, 4
FEW_CHANNELS, FEW_WARPS = 128, 1


@triton.jit
def _finish(out, lse, row, block, channel, top, total, part, DIM: tl.constexpr):
    """Writes a row's channels; its log-sum-exp is written by the first of its programs."""
    empty = total == 0
    safe = tl.where(empty, 1.0, total)
    part = tl.where(empty, 0.0, part / safe)
    tl.store(out + row * DIM + channel, part.to(out.dtype.element_ty), mask=channel < DIM)
    tl.store(lse + row, tl.where(empty, float("-inf"), top + tl.log(safe)), mask=block == 0)


@triton.jit(do_not_specialize=["count", "row_stride", "part_stride"])
def _merge_kernel(
    outs,  # count parts of each row: row_stride and part_stride in rows of DIM channels
    lses,  # float32, of the same strides
    out,  # [rows, DIM]
    lse,  # float32 [rows]
    count,
    row_stride,
    part_stride,
    DIM: tl.constexpr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    blocks: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    merged = tl.zeros([CHANNELS], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        at = row * row_stride + part.to(tl.int64) * part_stride
        there = part < count
        own = tl.load(lses + at, mask=there, other=float("-inf"))
        mask = there[:, None] & (channel < DIM)[None, :]
        rows = tl.load(outs + at[:, None] * DIM + channel[None, :], mask=mask, other=0.0)
        rows = tl.where((own == float("-inf"))[:, None], 0.0, rows.to(tl.float32))
        new_top = tl.maximum(top, tl.max(own, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp(top - base)
        weights = tl.exp(own - base)
        total = total * fade + tl.sum(weights, 0)
        merged = merged * fade + tl.sum(weights[:, None] * rows, 0)
        top = new_top
    _finish(out, lse, row, block, channel, top, total, merged, DIM)


@triton.jit
def _add(outs, lses, row, channel, top, total, merged, DIM: tl.constexpr):
    """One more part of a row."""
    own = tl.load(lses + row)
    part = tl.load(outs + row * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    part = tl.where(own == float("-inf"), 0.0, part)
    new_top = tl.maximum(top, own)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp(top - base)
    weight = tl.exp(own - base)
    return new_top, total * fade + weight, merged * fade + part * weight


@triton.jit
def _merge_few_kernel(
    outs0,  # [rows, DIM] each, of any float type
    outs1,
    outs2,
    outs3,
    lses0,  # float32 [rows] each
    lses1,
    lses2,
    lses3,
    out,
    lse,
    COUNT: tl.constexpr,  # of the four, those that are there
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    blocks: tl.constexpr = (DIM + CHANNELS - 1) // CHANNELS
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    merged = tl.zeros([CHANNELS], tl.float32)
    top, total, merged = _add(outs0, lses0, row, channel, top, total, merged, DIM)
    if COUNT > 1:
        top, total, merged = _add(outs1, lses1, row, channel, top, total, merged, DIM)
    if COUNT > 2:
        top, total, merged = _add(outs2, lses2, row, channel, top, total, merged, DIM)
    if COUNT > 3:
        top, total, merged = _add(outs3, lses3, row, channel, top, total, merged, DIM)
    _finish(out, lse, row, block, channel, top, total, merged, DIM)


def merge_strided(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    count: int,
    row_stride: int,
    part_stride: int,
) -> None:
    """Parts that lie in one tensor, at these strides in rows."""
    dim = out.shape[-1]
    _merge_kernel[(lse.numel() * triton.cdiv(dim, CHANNELS),)](
        outs,
        lses,
        out,
        lse,
        count,
        row_stride,
        part_stride,
        DIM=dim,
        PARTS=min(PARTS_A_TURN, power_of_two(count)),
        CHANNELS=CHANNELS,
        num_warps=WARPS,
        num_stages=1,
    )


def merge_few(
    outs: list[torch.Tensor], lses: list[torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> None:
    """One to FEW parts, each in a tensor of its own."""
    dim = out.shape[-1]
    channels = min(FEW_CHANNELS, power_of_two(dim))
    missing = FEW - len(outs)
    _merge_few_kernel[(lse.numel() * triton.cdiv(dim, channels),)](
        *outs,
        *[outs[0]] * missing,
        *lses,
        *[lses[0]] * missing,
        out,
        lse,
        COUNT=len(outs),
        DIM=dim,
        CHANNELS=channels,
        num_warps=FEW_WARPS,
        num_stages=1,
    )


def variants() -> list[Variant]:
    """The splits of an attend, and its result with that of the near-data engine."""
    strided = {"outs lses out lse": "*fp32", "count row_stride part_stride": "i32"}
    few = {"outs0 lses0 lses1 lses2 lses3 lse": "*fp32", "outs1 outs2 outs3 out": "*bf16"}
    found = []
    for dim in (128, 512):
        fixed: dict[str, object] = {"DIM": dim, "PARTS": PARTS_A_TURN, "CHANNELS": CHANNELS}
        found.append(variant(f"merge_{dim}", _merge_kernel, strided, fixed, WARPS))
        fixed = {"COUNT": 2, "DIM": dim, "CHANNELS": FEW_CHANNELS}
        found.append(variant(f"merge_few_{dim}", _merge_few_kernel, few, fixed, FEW_WARPS))
    return found
