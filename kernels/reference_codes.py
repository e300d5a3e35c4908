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
    scales = pieces[..., form.scales_offset(page_tokens) :].contiguous().view(torch.float16)
    codes = codes_of(pieces, form, page_tokens)[..., :page_tokens, :]
    return decode_codes(codes, scales[..., :page_tokens], form)


def decode_codes(codes: torch.Tensor, scales: torch.Tensor, form: CodeForm) -> torch.Tensor:
    """The same of codes [..., channels] and scales [...]."""
    middles = codes[..., : form.dim].double() + 0.5 - (1 << form.bits - 1)
    change = signs(form.dim).double().to(codes.device)
    return hadamard(middles * scales[..., None].double() * change) * change


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


def place(
    pieces: torch.Tensor,
    form: CodeForm,
    page_tokens: int,
    token: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """One token's codes [heads, channels] and scales [heads] into pieces uint8 [heads,
    piece_bytes]."""
    block, token = divmod(token, BLOCK_TOKENS)
    channel = torch.arange(form.channels, device=pieces.device)
    begin = block * BLOCK_TOKENS * form.channels * form.bits // 8
    in_word = 32 // form.bits
    if form.values:
        at = token // in_word * form.channels * 4 + channel * 4 + token % 4
        shift = torch.full_like(channel, token % in_word // 4 * 4)
    else:
        at = channel // in_word * 64 + token * 4 + channel % 4
        shift = channel % in_word // 4 * 4
    mask = ((1 << form.bits) - 1) << shift
    for low in shift.unique():  # a byte has at most one code of each
        some = shift == low
        old = pieces[:, begin + at[some]].int() & ~mask[some]
        pieces[:, begin + at[some]] = (old | codes[:, some].int() << low).to(torch.uint8)
    places = pieces[:, form.scales_offset(page_tokens) :].view(torch.float16)
    places[:, block * BLOCK_TOKENS + token] = scales.half()
