"""Codes of keys and values in torch: native/src/kernels/codes.h has their form."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cxlkv.kernels.reference_encode import butterflies, hadamard, signs

BLOCK_TOKENS = 16
BLOCK_CHANNELS = 16


@dataclass(frozen=True)
class CodeForm:
    """bits: 8 or 4."""

    bits: int
    dim: int
    values: bool  # else keys

    @property
    def channels(self) -> int:
        return -(-self.dim // BLOCK_CHANNELS) * BLOCK_CHANNELS

    def scales_offset(self, page_tokens: int) -> int:
        return -(-page_tokens // BLOCK_TOKENS) * BLOCK_TOKENS * self.channels * self.bits // 8

    def piece_bytes(self, page_tokens: int) -> int:
        blocks = -(-page_tokens // BLOCK_TOKENS)
        return self.scales_offset(page_tokens) + blocks * BLOCK_TOKENS * 2


def codes_of(pieces: torch.Tensor, form: CodeForm, page_tokens: int) -> torch.Tensor:
    """uint8 [..., piece_bytes] as codes uint8 [..., tokens of whole blocks, channels]."""
    blocks = -(-page_tokens // BLOCK_TOKENS)
    data = pieces[..., : form.scales_offset(page_tokens)]
    halves = 8 // form.bits  # of a byte, the low one first
    data = torch.stack([data >> 4 * half & (1 << form.bits) - 1 for half in range(halves)], dim=-1)
    if not form.values:
        # block, line, token, byte of a word, half: channel = line, half, byte
        data = data.reshape(*pieces.shape[:-1], blocks, -1, BLOCK_TOKENS, 4, halves)
        data = data.movedim(-3, -4).transpose(-1, -2)
    else:
        # block, group of tokens, channel, byte, half: token = group, half, byte
        groups = BLOCK_TOKENS // (4 * halves)
        data = data.reshape(*pieces.shape[:-1], blocks, groups, form.channels, 4, halves)
        data = data.movedim(-3, -1).transpose(-2, -3)
    return data.reshape(*pieces.shape[:-1], blocks * BLOCK_TOKENS, form.channels)


def decode(pieces: torch.Tensor, form: CodeForm, page_tokens: int) -> torch.Tensor:
    """What uint8 [..., piece_bytes] stand for, rotated back: float64 [..., page_tokens, dim]."""
    codes = codes_of(pieces, form, page_tokens)[..., :page_tokens, : form.dim].double()
    scales = pieces[..., form.scales_offset(page_tokens) :].contiguous().view(torch.float16)
    rows = (codes + 0.5 - (1 << form.bits - 1)) * scales[..., :page_tokens, None].double()
    change = signs(form.dim).double().to(pieces.device)
    return hadamard(rows * change) * change


def encode(rows: torch.Tensor, form: CodeForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [..., channels] and scales float16 [...] of rows [..., dim]."""
    half = 1 << form.bits - 1
    rows = rows.float()
    most = rows.abs().amax(-1, keepdim=True)
    # Of a row so large that its sums are none, the codes are at their ends in any case.
    rows = torch.where((most > 1e31) & most.isfinite(), rows * 2.0**-30, rows)
    x, norm = butterflies(rows)
    y = x * norm
    finite = y.isfinite().all(-1, keepdim=True)
    largest = torch.where(finite, y.abs(), 0).amax(-1, keepdim=True)
    scales = (largest / half).clamp(max=65504).half()
    steps = (x * (norm / scales.float())).floor().clamp(-half, half - 1) + half
    codes = torch.where(finite & (scales > 0), steps, 0).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, form.channels - form.dim))
    return codes, torch.where(finite, scales, torch.nan)[..., 0]


def packed(codes: torch.Tensor, form: CodeForm) -> torch.Tensor:
    """Codes [..., tokens of whole blocks, channels] as uint8 [..., bytes]."""
    together = 32 // form.bits  # in a word
    index = torch.arange(max(BLOCK_TOKENS, form.channels), device=codes.device)
    shift = index % 4 * 8 + index % together // 4 * 4
    blocks = codes.long().unflatten(-2, (-1, BLOCK_TOKENS))
    if form.values:
        words = blocks << shift[:BLOCK_TOKENS, None]
        words = words.unflatten(-2, (-1, together)).sum(-2)
    else:
        words = blocks << shift[: form.channels]
        words = words.unflatten(-1, (-1, together)).sum(-1).transpose(-1, -2)
    found: torch.Tensor = words.flatten(-3).to(torch.int32).contiguous().view(torch.uint8)
    return found
