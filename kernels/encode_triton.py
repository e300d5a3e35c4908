"""The kernels behind `encode.py`. Imported only where Triton runs them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cxlkv.kernels.reference_encode import BITS, SKETCH_CHANNELS, SKETCH_TOKENS
from cxlkv.kernels.rotate_triton import factors, paired
from cxlkv.kernels.variants import Variant, variant

CHANNELS = 128  # of a program that gathers rows
TILE = 2048  # elements, likewise, and of a program that turns keys
FRACTION_BITS = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


# ---- rows to pieces, and their digests ----


@triton.jit
def _ordered(bits, LARGEST: tl.constexpr):
    """Bits of a float as a number that is ordered as floats are, -0 below +0; and back."""
    return tl.where(bits < 0, bits ^ LARGEST, bits)


@triton.jit
def _gather_kernel(
    rows,
    pieces,
    digests,
    token_stride,
    head_stride,
    channel_stride,
    heads,
    page_tokens,
    piece_elements,
    digest_elements,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    LARGEST: tl.constexpr,
    DIGEST: tl.constexpr,
):
    """One program a piece and some channels. All of it by bits: no rounding, and the interpreter
    has no bfloat16."""
    piece, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, head = piece // heads, piece % heads
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < DIM
    columns = rows + head * head_stride + channel.to(tl.int64) * channel_stride
    nan: tl.constexpr = (LARGEST >> FRACTION_BITS) << FRACTION_BITS  # infinity; above it are NaNs
    lowest = tl.full([CHANNELS], LARGEST, tl.int32)
    highest = tl.full([CHANNELS], -LARGEST - 1, tl.int32)
    is_nan = tl.zeros([CHANNELS], tl.int32)
    for first in range(0, page_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        seen = (token < page_tokens)[:, None] & inside[None, :]
        row = (page * page_tokens + token) * token_stride
        bits = tl.load(columns[None, :] + row[:, None], mask=seen, other=0)
        at = piece * piece_elements + token[:, None].to(tl.int64) * DIM + channel[None, :]
        tl.store(pieces + at, bits, mask=seen)
        if DIGEST:
            wide = bits.to(tl.int32)
            ordered = _ordered(wide, LARGEST)
            lowest = tl.minimum(lowest, tl.min(tl.where(seen, ordered, LARGEST), 0))
            highest = tl.maximum(highest, tl.max(tl.where(seen, ordered, -LARGEST - 1), 0))
            nans = (wide & LARGEST) > nan
            is_nan = tl.maximum(is_nan, tl.max((nans & seen).to(tl.int32), 0))
    if DIGEST:
        quiet: tl.constexpr = nan | 1 << (FRACTION_BITS - 1)
        low = tl.where(is_nan != 0, quiet, _ordered(lowest, LARGEST))
        high = tl.where(is_nan != 0, quiet, _ordered(highest, LARGEST))
        at = digests + piece * digest_elements + channel
        tl.store(at, low.to(digests.dtype.element_ty), mask=inside)
        tl.store(at + DIM, high.to(digests.dtype.element_ty), mask=inside)


def _gather_shape(page_tokens: int, dim: int) -> tuple[int, int, int]:
    """(channels of a program, tokens of a step, warps)."""
    channels = min(CHANNELS, triton.next_power_of_2(dim))
    tokens = min(triton.next_power_of_2(page_tokens), TILE // channels, 64)
    return channels, tokens, 4 if channels * tokens >= 1024 else 1


def launch_rows(
    rows: torch.Tensor, pieces: torch.Tensor, digests: torch.Tensor | None, page_tokens: int
) -> None:
    pages, heads, piece_bytes = pieces.shape
    dim, size, kind = rows.shape[2], rows.element_size(), BITS[rows.element_size()]
    channels, tokens, warps = _gather_shape(page_tokens, dim)
    digest_bytes = digests.shape[2] if digests is not None else 0
    _gather_kernel[(pages * heads, triton.cdiv(dim, channels))](
        rows.view(kind),
        pieces.view(kind),
        (pieces if digests is None else digests).view(kind),
        *rows.stride(),
        heads,
        page_tokens,
        piece_bytes // size,
        digest_bytes // size,
        DIM=dim,
        TOKENS=tokens,
        CHANNELS=channels,
        FRACTION_BITS=FRACTION_BITS[rows.dtype],
        LARGEST=torch.iinfo(kind).max,
        DIGEST=digests is not None,
        num_warps=warps,
        num_stages=1,
    )


# ---- sketches ----


@triton.jit
def _sketch_kernel(
    keys,
    factors,
    sketches,
    token_stride,
    head_stride,
    channel_stride,
    heads,
    page_tokens,
    page_tokens_filled,
    piece_words,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program for TOKENS tokens of a piece, those that fill the last block of 16 included."""
    tiles = page_tokens_filled // TOKENS
    program = tl.program_id(0).to(tl.int64)
    piece = program // tiles
    page, head = piece // heads, piece % heads
    token = (program % tiles).to(tl.int32) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, PADDED)
    row = (page * page_tokens + token) * token_stride
    at = keys + head * head_stride + channel.to(tl.int64)[None, :] * channel_stride + row[:, None]
    there = token < page_tokens
    x = tl.load(at, mask=there[:, None] & (channel < DIM)[None, :], other=0).to(tl.float32)
    x *= tl.load(factors + channel)[None, :]
    for step in tl.static_range(STEPS):
        x = paired(x, channel, DIM, PADDED, TOKENS, 1 << step)
    x *= tl.load(factors + PADDED + channel)[None, :]
    squares = tl.sum(x * x, 1)
    step = tl.sqrt_rn(tl.div_rn(squares, DIM * 1.0))[:, None]
    codes = (x >= -step).to(tl.int32) + (x >= 0).to(tl.int32) + (x >= step).to(tl.int32)
    codes = tl.where((channel < DIM)[None, :] & there[:, None], codes, 0)
    products = tl.sum(x * (codes.to(tl.float32) - 1.5), 1)
    scale = tl.where(squares > 0, tl.div_rn(squares, tl.where(squares > 0, products, 1.0)), 0.0)
    scale = tl.where(squares < float("inf"), scale, float("nan"))  # of a NaN, too
    groups: tl.constexpr = PADDED // 16
    shifted = tl.reshape(codes << (channel % 16 * 2)[None, :], [TOKENS, groups, 16])
    words = tl.sum(shifted, 2)
    group = tl.arange(0, groups)
    lines: tl.constexpr = (DIM + 15) // 16 + 1
    to = sketches + piece * piece_words + token // 16 * (lines * 16) + token % 16
    tl.store(to[:, None] + group[None, :] * 16, words, mask=(group < lines - 1)[None, :])
    bits = scale.to(tl.int32, bitcast=True)
    tl.store(to + (lines - 1) * 16, tl.where(there, bits, 0))


def _sketch_shape(dim: int) -> tuple[int, int, int, int]:
    """(channels, steps, tokens of a program, warps)."""
    padded = max(triton.next_power_of_2(dim), SKETCH_CHANNELS)
    tokens = max(1, min(SKETCH_TOKENS, TILE // padded))
    return padded, dim.bit_length() - 1, tokens, 4 if padded * tokens >= 1024 else 1


def launch_sketch(k: torch.Tensor, sketches: torch.Tensor, page_tokens: int) -> None:
    pages, heads, piece_bytes = sketches.shape
    dim = k.shape[2]
    padded, steps, tokens, warps = _sketch_shape(dim)
    filled = -(-page_tokens // SKETCH_TOKENS) * SKETCH_TOKENS
    _sketch_kernel[(pages * heads * (filled // tokens),)](
        k,
        factors(dim, padded, k.device),
        sketches.view(torch.int32),
        *k.stride(),
        heads,
        page_tokens,
        filled,
        piece_bytes // 4,
        DIM=dim,
        PADDED=padded,
        STEPS=steps,
        TOKENS=tokens,
        num_warps=warps,
        num_stages=1,
    )


def variants() -> list[Variant]:
    """Variants for usual models: 128 channels, MLA's 576, small heads and float32, contiguous
    channels."""
    found: list[Variant] = []
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16), (576, torch.bfloat16)):
        found += [_gather_variant(dim, dtype, digest=True), _sketch_variant(dim, dtype)]
    found.append(_gather_variant(128, torch.bfloat16, digest=False))
    found += [_gather_variant(96, torch.float32, digest=True), _sketch_variant(96, torch.float32)]
    return found


def _gather_variant(dim: int, dtype: torch.dtype, *, digest: bool) -> Variant:
    channels, tokens, warps = _gather_shape(16, dim)
    constants: dict[str, object] = {
        "channel_stride": 1,
        "DIM": dim,
        "TOKENS": tokens,
        "CHANNELS": channels,
        "FRACTION_BITS": FRACTION_BITS[dtype],
        "LARGEST": torch.iinfo(BITS[dtype.itemsize]).max,
        "DIGEST": digest,
    }
    types = {
        "rows pieces digests": f"*i{dtype.itemsize * 8}",
        "token_stride head_stride heads page_tokens piece_elements digest_elements": "i32",
    }
    name = f"rows of {dim} {SHORT[dtype]} to pieces{' and digests' if digest else ''}"
    return variant(name, _gather_kernel, types, constants, warps)


def _sketch_variant(dim: int, dtype: torch.dtype) -> Variant:
    padded, steps, tokens, warps = _sketch_shape(dim)
    constants: dict[str, object] = {
        "channel_stride": 1,
        "DIM": dim,
        "PADDED": padded,
        "STEPS": steps,
        "TOKENS": tokens,
    }
    types = {
        "keys": f"*{SHORT[dtype]}",
        "factors": "*fp32",
        "sketches": "*i32",
        "token_stride head_stride heads page_tokens page_tokens_filled piece_words": "i32",
    }
    return variant(f"sketches of {dim} {SHORT[dtype]}", _sketch_kernel, types, constants, warps)
