"""The kernel behind `recent.py` for rings of codes: rows as a pool with an encoding keeps them
(native/src/kernels/codes.h). Imported only where Triton runs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cxlkv.kernels.reference_codes import CodeForm
from cxlkv.kernels.rotate_triton import SHORT, factors, paired, shape_of
from cxlkv.kernels.variants import Variant, variant


@triton.jit
def encoded(
    rows,
    factors,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Codes int32 [ROWS, PADDED] and scales float16 [ROWS] of rows; to the bit those of the C
    core."""
    channel = tl.arange(0, PADDED)
    half: tl.constexpr = 1 << BITS - 1
    # Of a row so large that its sums are none, the codes are at their ends in any case.
    most = tl.max(tl.abs(rows), 1)[:, None]
    rows = tl.where((most > 1e31) & (most < float("inf")), rows * 2.0**-30, rows)
    x = rows * tl.load(factors + channel)[None, :]
    for step in tl.static_range(STEPS):
        x = paired(x, channel, DIM, PADDED, ROWS, 1 << step)
    norm = tl.load(factors + PADDED + channel)[None, :]
    y = tl.abs(x * norm)
    finite = tl.min((y < float("inf")).to(tl.int32), 1) != 0
    largest = tl.max(tl.where(y < float("inf"), y, 0.0), 1)
    scale = tl.minimum(largest * (1.0 / half), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    some = (finite & (wide > 0))[:, None]
    divisor = tl.where(some, wide[:, None], 1.0) + tl.zeros([ROWS, PADDED], tl.float32)
    steps = x * tl.div_rn(norm + tl.zeros([ROWS, PADDED], tl.float32), divisor)
    steps = tl.where(some & (channel < DIM)[None, :], steps, -half * 1.0)
    steps = tl.minimum(tl.maximum(steps, -half), half - 1)
    whole = steps.to(tl.int32)  # not tl.floor: on a GPU that takes the smallest numbers for 0
    code = whole - (whole.to(tl.float32) > steps).to(tl.int32) + half
    nan = tl.full([], 0x7E00, tl.int16).to(tl.float16, bitcast=True)
    return code, tl.where(finite, scale, nan)


@triton.jit
def _append_codes_kernel(
    rows,
    factors,
    ring,  # uint8 [requests, heads, slots, piece_bytes]
    positions,
    steps,
    heads,
    slots,
    page_tokens,
    piece_bytes,
    scales_offset,
    stride_request,
    stride_step,
    stride_head,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """A program has one head of a request, and all its rows: two may share bytes."""
    program = tl.program_id(0).to(tl.int64)
    request = program // heads
    head = program % heads
    channel = tl.arange(0, PADDED)
    channels: tl.constexpr = (DIM + 15) // 16 * 16
    for step in range(steps):
        position = tl.load(positions + request * steps + step)
        there = position >= 0
        position = tl.maximum(position, 0)
        at = request * stride_request + tl.cast(step, tl.int64) * stride_step + head * stride_head
        row = tl.load(rows + at + channel, mask=there & (channel < DIM), other=0).to(tl.float32)
        codes, scales = encoded(row[None, :], factors, DIM, PADDED, STEPS, BITS, 1)
        code, scale = tl.reshape(codes, [PADDED]), tl.max(scales, 0)
        token = position % page_tokens
        piece = ring + (program * slots + position // page_tokens % slots) * piece_bytes
        scale_at = (piece + scales_offset).to(tl.pointer_type(tl.float16)) + token
        tl.store(scale_at, scale, mask=there)
        block = piece + token // 16 * (channels * 2 * BITS)
        token = token % 16
        if VALUES:
            in_word: tl.constexpr = 32 // BITS
            to = block + token // in_word * (channels * 4) + channel * 4 + token % 4
            fits = there & (channel < channels)
            if BITS == 4:
                shift = (token % 8 // 4 * 4).to(tl.int32)
                tl.debug_barrier()  # what an earlier row has left there is seen by all
                other = tl.load(to, mask=fits, other=0).to(tl.int32) & (240 >> shift)
                code = code << shift | other
            tl.store(to, code.to(tl.uint8), mask=fits)
        elif BITS == 8:
            to = block + channel // 4 * 64 + token * 4 + channel % 4
            tl.store(to, code.to(tl.uint8), mask=there & (channel < channels))
        else:
            pairs = tl.permute(tl.reshape(code, [PADDED // 8, 2, 4]), [0, 2, 1])
            low, high = tl.split(pairs)
            line = tl.arange(0, PADDED // 8)
            to = block + (line * 64)[:, None] + token * 4 + tl.arange(0, 4)[None, :]
            fits = there & (line * 8 < channels)[:, None]
            tl.store(to, (low | high << 4).to(tl.uint8), mask=fits)


def launch(
    rows: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    form: CodeForm,
    page_tokens: int,
) -> None:
    requests, steps, heads, dim = rows.shape
    padded = shape_of(dim)[0]
    _append_codes_kernel[(requests * heads,)](
        rows,
        factors(dim, padded, rows.device),
        ring,
        positions,
        steps,
        heads,
        ring.shape[2],
        page_tokens,
        ring.shape[3],
        form.scales_offset(page_tokens),
        *rows.stride()[:3],
        **_constants(form),
        num_warps=1 if padded <= 256 else 4,
    )


def _constants(form: CodeForm) -> dict[str, object]:
    return {
        "DIM": form.dim,
        "PADDED": shape_of(form.dim)[0],
        "STEPS": shape_of(form.dim)[1],
        "BITS": form.bits,
        "VALUES": form.values,
    }


def variants() -> list[Variant]:
    whole = "steps heads slots page_tokens piece_bytes scales_offset"
    strides = "stride_request stride_step stride_head"
    return [
        variant(
            f"{'values' if form.values else 'keys'} of {form.bits} bits, {dim} {SHORT[dtype]}",
            _append_codes_kernel,
            {
                "rows": f"*{SHORT[dtype]}",
                "factors": "*fp32",
                "ring": "*u8",
                "positions": "*i64",
                f"{whole} {strides}": "i32",
            },
            _constants(form),
            num_warps=1,
        )
        for dtype, dim in ((torch.bfloat16, 128), (torch.float32, 80))
        for form in (CodeForm(bits, dim, values) for bits in (8, 4) for values in (False, True))
    ]
