"""Pieces of pages of K or V that a pool keeps encoded: where their bytes lie, and in torch what
`encode_codes_triton.py` makes of rows (native/src/kernels/codes.h, code_planes.h, fp8.h)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from cxlkv.kernels.reference_codes import BLOCK_TOKENS, CodeForm, encode, packed
from cxlkv.kernels.reference_encode import butterflies, signs
from cxlkv.kernels.rotate import rotate

LINE_BYTES = 64
SCALE_BYTES = 2  # of a token
DIGEST_SCALE_BYTES = 4
STEP_LEAST = 2.0**-100  # of a digest
STEP_MARGIN = 1.000002
BOUND_MARGIN = 2.0**-14
FP8_MOST, FP8_NORMAL, FP8_BIAS = 0x43E00000, 0x3C800000, 0x3C000000  # bits of a float32
FP8_LARGEST = 0x7E


@dataclass(frozen=True)
class CodePiece:
    """encoding: int8, int4 or progressive. A piece of keys also has its digest's scale."""

    encoding: str
    dim: int
    values: bool
    page_tokens: int

    @cached_property
    def form(self) -> CodeForm:
        return CodeForm(4 if self.encoding == "int4" else 8, self.dim, self.values)

    @property
    def has_planes(self) -> bool:
        return self.encoding == "progressive"

    @cached_property
    def plane(self) -> CodeForm:
        """The form of a plane, or of all codes."""
        return CodeForm(4, self.dim, self.values) if self.has_planes else self.form

    @cached_property
    def scales_offset(self) -> int:
        return self.plane.scales_offset(self.page_tokens)

    @cached_property
    def digest_scale_offset(self) -> int:
        blocks = -(-self.page_tokens // BLOCK_TOKENS)
        return self.scales_offset + blocks * BLOCK_TOKENS * SCALE_BYTES

    @cached_property
    def lower_offset(self) -> int:
        """Of the lower plane, or of the piece's end."""
        end = self.digest_scale_offset + (0 if self.values else DIGEST_SCALE_BYTES)
        return -(-end // LINE_BYTES) * LINE_BYTES if self.has_planes else end

    @cached_property
    def bytes(self) -> int:
        return self.lower_offset + (self.scales_offset if self.has_planes else 0)


def write_codes(
    rows: torch.Tensor, piece: CodePiece, pieces: torch.Tensor, digests: torch.Tensor | None
) -> None:
    """Rows [pages, heads, page_tokens, dim] into pieces uint8 [pages, heads, bytes and more], whose
    other bytes are zeros, and digests likewise."""
    missing = -piece.page_tokens % BLOCK_TOKENS
    codes, scales = encode(torch.nn.functional.pad(rows.float(), (0, 0, 0, missing)), piece.form)
    upper = packed(codes >> 4 if piece.has_planes else codes, piece.plane)
    pieces[..., : piece.scales_offset] = upper
    scale_bytes = scales.contiguous().view(torch.uint8)
    pieces[..., piece.scales_offset : piece.digest_scale_offset] = scale_bytes
    if piece.has_planes:
        pieces[..., piece.lower_offset : piece.bytes] = packed(codes & 15, piece.plane)
    if digests is None:
        return
    seen = slice(piece.page_tokens)
    bounds, step = digest_of_codes(codes[..., seen, : piece.dim], scales[..., seen], piece.form)
    digests[..., : 2 * piece.dim] = bounds.flatten(-2).view(torch.uint8)
    at = slice(piece.digest_scale_offset, piece.digest_scale_offset + DIGEST_SCALE_BYTES)
    pieces[..., at] = step[..., None].contiguous().view(torch.uint8)


def digest_of_codes(
    codes: torch.Tensor, scales: torch.Tensor, form: CodeForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., 2, dim] and its step float32 [...], of [..., tokens, dim] and [..., tokens]:
    native/src/kernels/code_bounds.h says what they are to the bit."""
    changes = signs(form.dim).to(codes.device)
    whole, norm = butterflies((2 * codes.float() + (1 - (1 << form.bits))) * changes)
    found = whole * (scales.float() * 0.5)[..., None]
    low, high = found.amin(-2) * norm, found.amax(-2) * norm
    flipped = changes < 0
    low, high = torch.where(flipped, -high, low), torch.where(flipped, -low, high)
    largest = torch.maximum(low.abs(), high.abs()).amax(-1)
    step = (largest * STEP_MARGIN / 127).clamp(min=STEP_LEAST)
    inverse = (1 / step)[..., None]
    bounds = torch.stack(
        [(low * inverse - BOUND_MARGIN).floor(), -(-BOUND_MARGIN - high * inverse).floor()], -2
    )
    nan = scales.isnan().any(-1)
    bounds = torch.where(nan[..., None, None], 0, bounds).to(torch.int8)
    return bounds, step.masked_fill(nan, torch.nan)


def fp8_of(rows: torch.Tensor) -> torch.Tensor:
    """Numbers as bytes of float8_e4m3fn: native/src/kernels/fp8.h says which."""
    numbers = rows.float()
    bits = numbers.view(torch.int32)
    sign, magnitude = bits >> 24 & 0x80, bits & 0x7FFFFFFF
    small = (numbers.abs() * 2.0**29).clamp(max=2.0**23).round().to(torch.int32) >> 20
    found = torch.where(magnitude >= FP8_NORMAL, (magnitude - FP8_BIAS) >> 20, small)
    found = torch.where(magnitude >= FP8_MOST, FP8_LARGEST, found)
    found = torch.where(magnitude == 0, 0, sign | found)
    return torch.where(numbers.isnan(), FP8_LARGEST, found).to(torch.uint8)


def write_fp8(rows: torch.Tensor, pieces: torch.Tensor, digests: torch.Tensor | None) -> None:
    """As write_codes()."""
    made = fp8_of(rows)
    pieces[..., : made[0, 0].numel()] = made.flatten(2)
    if digests is None:
        return
    payload = (made & 0x7F).int()
    ordered = torch.where(made >= 0x80, -payload, payload)
    found = torch.stack([ordered.amin(2), ordered.amax(2)], 2)
    found = torch.where(found < 0, 0x80 - found, found).to(torch.uint8)
    digests[..., : found[0, 0].numel()] = found.flatten(2)


def as_kept(rows: torch.Tensor, encoding: str) -> torch.Tensor:
    """What a pool gives back of rows [..., dim], as the same dtype."""
    if encoding == "none":
        return rows
    if encoding == "fp8_e4m3":
        return fp8_of(rows).view(torch.float8_e4m3fn).to(rows.dtype)
    form = CodeForm(4 if encoding == "int4" else 8, rows.shape[-1], values=False)
    codes, scales = encode(rows, form)
    middles = codes[..., : form.dim].float() + (0.5 - (1 << form.bits - 1))
    return rotate((middles * scales.float()[..., None]).contiguous(), back=True).to(rows.dtype)
