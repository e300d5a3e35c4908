"""The kernel behind `recent.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from cxlkv.kernels.variants import Variant, variant


@triton.jit
def _append_rows_kernel(
    rows,
    ring,
    positions,
    steps,
    heads,
    slots,
    page_tokens,
    stride_request,
    stride_step,
    stride_head,
    dim,
    BLOCK: tl.constexpr,
):
    """A program is one row of one head: request, step and head from the program's number."""
    program = tl.program_id(0).to(tl.int64)
    head = program % heads
    step = program // heads % steps
    request = program // heads // steps
    position = tl.load(positions + request * steps + step)
    channel = tl.arange(0, BLOCK)
    fits = (channel < dim) & (position >= 0)
    row = tl.load(
        rows + request * stride_request + step * stride_step + head * stride_head + channel,
        mask=fits,
    )
    position = tl.maximum(position, 0)
    slot = position // page_tokens % slots
    piece = (request * heads + head) * slots + slot
    at = (piece * page_tokens + position % page_tokens) * dim
    tl.store(ring + at + channel, row, mask=fits)


def variants() -> list[Variant]:
    whole = "steps heads slots page_tokens stride_request stride_step stride_head dim"
    return [
        variant(
            f"append_rows_{dtype}_{dim}",
            _append_rows_kernel,
            {"rows ring": f"*{dtype}", "positions": "*i64", whole: "i32"},
            {"BLOCK": triton.next_power_of_2(dim)},
            num_warps=1,
        )
        for dtype, dim in (("bf16", 128), ("fp16", 128), ("fp32", 128), ("bf16", 576))
    ]
