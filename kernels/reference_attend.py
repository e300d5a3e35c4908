"""References for `attend.py` and `merge.py`: torch in float64, on host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from cxlkv.arrays import address_of
from cxlkv.kernels.attend_shape import Call, Shape
from cxlkv.kernels.reference_codes import CodeForm, decode


def attend(call: Call, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """kernels.attend.attend, list by list: float64 (out, lse)."""
    results = [_attend_one(call, shape, one) for one in range(len(call.q))]
    return torch.stack([out for out, _ in results]), torch.stack([lse for _, lse in results])


def _attend_one(call: Call, shape: Shape, one: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One list: out [rows, q_heads, value_dim], lse [rows, q_heads]."""
    pages = call.pages[one].long()
    there = (pages >= 0) & (call.keys_at[one] != 0)
    if call.values_at is not None:
        there &= call.values_at[one] != 0
    keys = _read(call.keys_at[one] * there, shape, False)
    values = keys[..., : shape.value_dim]
    if call.values_at is not None:
        values = _read(call.values_at[one] * there, shape, True)
    tokens = pages[..., None] * shape.page_tokens + torch.arange(shape.page_tokens)
    tokens = torch.where(there[..., None], tokens, -1).flatten(1)  # [kv_heads, tokens]
    last = call.positions[one][:, None, None]
    seen = (tokens >= 0) & (tokens <= last)  # [rows, kv_heads, tokens]
    if call.window is not None:
        seen &= tokens > last - call.window
    weights = None
    if call.log_weights is not None:
        weights = call.log_weights[one].double().flatten(1)  # [kv_heads, tokens]
        seen &= weights != -torch.inf
    q = call.q[one].double().unflatten(1, (-1, shape.group))  # [rows, kv_heads, group, dim]
    logits = torch.einsum("rhgd,htd->rhgt", q, keys.double()) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if weights is not None:
        logits = logits + weights[None, :, None]
    logits = torch.where(seen[:, :, None], logits, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    shares = torch.exp(logits - torch.where(top == -torch.inf, 0, top))
    total = shares.sum(-1)
    lse = top[..., 0] + torch.log(total)  # NaN, too, where a logit is infinite
    out = torch.stack(
        [
            # A value that the row does not see may be NaN, which its weight of 0 would not hide.
            torch.einsum("hgt,htd->hgd", shares[row], torch.where(seen[row, ..., None], values, 0))
            for row in range(shape.rows)
        ]
    )
    out = torch.where(total[..., None] == 0, 0, out / total[..., None])
    return out.flatten(1, 2), lse.flatten(1)


def _read(at: torch.Tensor, shape: Shape, values: bool) -> torch.Tensor:
    """Rows [heads, tokens, dim] of keys, or of values, as they are or as their codes say."""
    dim, bits = (shape.value_dim, shape.value_bits) if values else (shape.dim, shape.key_bits)
    if not bits:
        return read_pieces(at, shape.page_tokens, dim, shape.dtype)
    form = CodeForm(bits, dim, values)
    pieces = torch.zeros(*at.shape, form.piece_bytes(shape.page_tokens), dtype=torch.uint8)
    for piece, address in zip(pieces.flatten(0, 1), at.flatten().tolist(), strict=True):
        if address:
            ctypes.memmove(address_of(piece, "piece"), address, len(piece))
    return decode(pieces, form, shape.page_tokens).flatten(1, 2)


def read_pieces(at: torch.Tensor, tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Pieces at these host addresses, [heads, k] -> float64 [heads, k * tokens, dim]; 0: zeros."""
    pieces = torch.zeros(at.numel(), tokens, dim, dtype=dtype)
    piece_bytes = tokens * dim * dtype.itemsize
    for index, address in enumerate(at.flatten().tolist()):
        if address:
            ctypes.memmove(address_of(pieces[index], "piece"), address, piece_bytes)
    return pieces.double().view(at.shape[0], -1, dim)


def merge(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """kernels.merge.merge, into out and lse."""
    sums = torch.stack(list(lses)).double()
    parts = torch.stack([part.double() for part in outs])
    top = sums.amax(0)
    weights = torch.exp(sums - torch.where(top == -torch.inf, 0, top))
    total = weights.sum(0)
    parts = torch.where((sums == -torch.inf)[..., None], 0, parts)
    merged = (weights[..., None] * parts).sum(0) / total[..., None]
    out.copy_(torch.where(total[..., None] == 0, 0, merged))
    lse.copy_(top + torch.log(total))
