"""The kernel behind `encode.py` for rows that become codes, and for digests of these. Imported only
where Triton runs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cxlkv.kernels.code_pieces import BOUND_MARGIN, STEP_LEAST, STEP_MARGIN, CodePiece
from cxlkv.kernels.recent_codes_triton import encoded
from cxlkv.kernels.reference_codes import BLOCK_TOKENS
from cxlkv.kernels.rotate_triton import SHORT, factors, paired, shape_of
from cxlkv.kernels.variants import Variant, variant

LEAST, WIDER = tl.constexpr(STEP_LEAST), tl.constexpr(STEP_MARGIN)
OUTWARD = tl.constexpr(BOUND_MARGIN)


@triton.jit
def _store_codes(
    code,
    words,
    block,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """A block's codes [16, PADDED] to its words of 32 bits, of which the first is in `words`."""
    channels: tl.constexpr = (DIM + 15) // 16 * 16
    together: tl.constexpr = 32 // BITS
    words += block * (channels * BITS // 2)
    token, channel = tl.arange(0, 16), tl.arange(0, PADDED)
    if VALUES:
        shift = token % 4 * 8 + token % together // 4 * 4
        lines: tl.constexpr = 16 // together
        word = tl.sum(tl.reshape(code << shift[:, None], [lines, together, PADDED]), 1)
        to = words + tl.arange(0, lines)[:, None] * channels + channel[None, :]
        tl.store(to, word, mask=(channel < channels)[None, :])
    else:
        shift = channel % 4 * 8 + channel % together // 4 * 4
        groups: tl.constexpr = PADDED // together
        word = tl.sum(tl.reshape(code << shift[None, :], [16, groups, together]), 2)
        group = tl.arange(0, groups)[None, :]
        to = words + group * 16 + token[:, None]
        tl.store(to, word, mask=group * together < channels)


@triton.jit
def _store_digest(
    low,
    high,
    nan,
    factors,
    digest,
    scale_at,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Bounds that are not yet normed, in 8 bits, rounded outward; no product and sum here may be
    fused."""
    channel = tl.arange(0, PADDED)
    inside = channel < DIM
    norm = tl.load(factors + PADDED + channel)
    flipped = tl.load(factors + channel) < 0
    low = tl.where(inside, low * norm, 0.0)
    high = tl.where(inside, high * norm, 0.0)
    turned = tl.where(flipped, -high, low)
    high = tl.where(flipped, -low, high)
    largest = tl.maximum(tl.max(tl.abs(turned), 0), tl.max(tl.abs(high), 0))
    step = tl.maximum(tl.div_rn(largest * WIDER, 127.0), LEAST)
    inverse = tl.div_rn(1.0, step)
    least = tl.floor(turned * inverse - OUTWARD)
    most = -tl.floor(-(high * inverse) - OUTWARD)
    good = nan == 0
    tl.store(digest + channel, tl.where(good, least, 0.0).to(tl.int8), mask=inside)
    tl.store(digest + DIM + channel, tl.where(good, most, 0.0).to(tl.int8), mask=inside)
    bits = tl.where(good, step.to(tl.int32, bitcast=True), 0x7FC00000)
    tl.store(scale_at, bits)


@triton.jit
def _codes_kernel(
    rows,
    factors,
    pieces,  # int32
    digests,  # int8
    token_stride,
    head_stride,
    channel_stride,
    heads,
    page_tokens,
    piece_words,
    scales_word,
    digest_scale_word,
    lower_word,
    digest_bytes,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    PLANES: tl.constexpr,
):
    """One program a piece, block after block of 16 tokens; those that fill the last one are 0."""
    piece = tl.program_id(0).to(tl.int64)
    page, head = piece // heads, piece % heads
    channel = tl.arange(0, PADDED)
    columns = rows + head * head_stride + channel.to(tl.int64) * channel_stride
    words = pieces + piece * piece_words
    scales = (words + scales_word).to(tl.pointer_type(tl.float16))
    low = tl.full([PADDED], float("inf"), tl.float32)
    high = tl.full([PADDED], -float("inf"), tl.float32)
    nans = tl.zeros([16], tl.int32)
    for first in range(0, page_tokens, 16):
        token = first + tl.arange(0, 16)
        there = token < page_tokens
        row = (page * page_tokens + token) * token_stride
        seen = there[:, None] & (channel < DIM)[None, :]
        x = tl.load(columns[None, :] + row[:, None], mask=seen, other=0).to(tl.float32)
        code, scale = encoded(x, factors, DIM, PADDED, STEPS, BITS, 16)
        tl.store(scales + token, scale)
        if PLANES:
            _store_codes(code >> 4, words, first // 16, DIM, PADDED, 4, VALUES)
            _store_codes(code & 15, words + lower_word, first // 16, DIM, PADDED, 4, VALUES)
        else:
            _store_codes(code, words, first // 16, DIM, PADDED, BITS, VALUES)
        if not VALUES:
            whole = 2 * code + (1 - (1 << BITS))
            whole = tl.where((channel < DIM)[None, :], whole, 0).to(tl.float32)
            for step in tl.static_range(STEPS):
                whole = paired(whole, channel, DIM, PADDED, 16, 1 << step)
            wide = scale.to(tl.float32)
            nans |= (wide != wide).to(tl.int32)
            found = whole * (wide * 0.5)[:, None]
            low = tl.minimum(low, tl.min(tl.where(there[:, None], found, float("inf")), 0))
            high = tl.maximum(high, tl.max(tl.where(there[:, None], found, -float("inf")), 0))
    if not VALUES:
        digest, scale_at = digests + piece * digest_bytes, words + digest_scale_word
        nan = tl.max(nans, 0)
        _store_digest(low, high, nan, factors, digest, scale_at, DIM, PADDED)


def launch_codes(
    rows: torch.Tensor, piece: CodePiece, pieces: torch.Tensor, digests: torch.Tensor | None
) -> None:
    """As write_codes(), of rows [tokens, heads, dim] of any strides."""
    pages, heads, piece_bytes = pieces.shape
    constants, warps = _shape(piece)
    _codes_kernel[(pages * heads,)](
        rows,
        factors(piece.dim, shape_of(piece.dim)[0], rows.device),
        pieces.view(torch.int32),
        (pieces if digests is None else digests).view(torch.int8),
        *rows.stride(),
        heads,
        piece.page_tokens,
        piece_bytes // 4,
        piece.scales_offset // 4,
        piece.digest_scale_offset // 4,
        piece.lower_offset // 4,
        0 if digests is None else digests.shape[2],
        **constants,
        num_warps=warps,
        num_stages=1,
        enable_fp_fusion=False,
    )


def _shape(piece: CodePiece) -> tuple[dict[str, object], int]:
    """(constants, warps)."""
    padded, steps, _, _ = shape_of(piece.dim)
    constants: dict[str, object] = {
        "DIM": piece.dim,
        "PADDED": padded,
        "STEPS": steps,
        "BITS": piece.form.bits,
        "VALUES": piece.values,
        "PLANES": piece.has_planes,
    }
    return constants, max(1, min(16, BLOCK_TOKENS * padded // 512))


def variants() -> list[Variant]:
    """128 channels in all encodings, and others in some."""
    numbers = "token_stride head_stride heads page_tokens piece_words scales_word"
    numbers += " digest_scale_word lower_word digest_bytes"
    types = {"factors": "*fp32", "pieces": "*i32", "digests": "*i8", numbers: "i32"}
    found: list[Variant] = []
    for dim, encoding, dtype in (
        (128, "int8", torch.bfloat16),
        (128, "int4", torch.bfloat16),
        (128, "progressive", torch.bfloat16),
        (80, "int4", torch.float32),
        (256, "int8", torch.float16),
    ):
        for values in (False, True):
            constants, warps = _shape(CodePiece(encoding, dim, values, 16))
            name = f"{'values' if values else 'keys'} of {dim} {SHORT[dtype]} to {encoding}"
            given = {"rows": f"*{SHORT[dtype]}", **types}
            constants["channel_stride"] = 1
            found.append(variant(name, _codes_kernel, given, constants, warps))
    return found
