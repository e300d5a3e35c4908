"""What the pool's encodings are held against: other ways to keep rows in few bits, in torch.

Rows are [..., dim] of one token and head each, float32; each function returns what they stand for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cxlkv.errors import BadArgumentError
from cxlkv.kernels.rotate import rotate_reference

FP8_MAX = 448.0
KIVI_TOKENS = 32
"""A group of keys: so many tokens of one channel."""
KIVI_CHANNELS = 32
"""A group of values: so many channels of one token."""
KIVI_WINDOW = 128
"""So many of the newest tokens are kept as they are."""
QUERY_MOST = {14: 8127, 8: 127}
"""The largest whole number by the bits of a query."""


def in_groups(rows: Tensor, size: int) -> Tensor:
    """[..., dim] as [..., dim / size, size]; BadArgumentError where dim has no such groups."""
    if rows.shape[-1] % size:
        raise BadArgumentError(f"{rows.shape[-1]} channels are not groups of {size}")
    return rows.reshape(*rows.shape[:-1], -1, size)


def nearest_fp8(rows: Tensor) -> Tensor:
    """float8_e4m3 with scale 1, rounded to the nearest, as on GPUs."""
    return rows.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def int4_by_groups(rows: Tensor, size: int) -> Tensor:
    """Codes as the pool's `int4` has them, but a scale for so many channels in place of all."""
    groups = in_groups(rotate_reference(rows), size)
    unit = (groups.abs().amax(-1, keepdim=True) / 8).half().float()
    steps = (groups / unit).floor().clamp(-8, 7) + 0.5
    found = torch.where(unit > 0, steps * unit, 0).flatten(-2)
    return rotate_reference(found, back=True)


def kivi(groups: Tensor, bits: int) -> Tensor:
    """Unsigned codes of groups [..., size], a float16 scale and zero each (Liu et al., arXiv
    2402.02750): (x - least) / step to the nearest, step being the range / (2^bits - 1)."""
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    last = (1 << bits) - 1
    zero, step = least.half().float(), ((most - least) / last).half().float()
    steps = ((groups - zero) / step).round().clamp(0, last)
    return torch.where(step > 0, steps, 0) * step + zero


def kivi_keys(keys: Tensor, bits: int) -> Tensor:
    """Keys [..., tokens, dim] by channel over 32 tokens each; the last tokens, fewer than 32, stay
    as they are."""
    whole = keys.shape[-2] // KIVI_TOKENS * KIVI_TOKENS
    shape = (*keys.shape[:-2], -1, KIVI_TOKENS, keys.shape[-1])
    groups = keys[..., :whole, :].reshape(shape).mT
    found = kivi(groups, bits).mT.flatten(-3, -2)
    return torch.cat([found, keys[..., whole:, :]], dim=-2)


def kivi_values(values: Tensor, bits: int) -> Tensor:
    """Values [..., dim] by token, in groups of 32 channels."""
    return kivi(in_groups(values, KIVI_CHANNELS), bits).flatten(-2)


def q4_0(rows: Tensor) -> Tensor:
    """ggml's: groups of 32 channels, the scale is the channel that is largest by magnitude / -8, in
    float16; codes by the scale before it is rounded."""
    groups = in_groups(rows, 32)
    at = groups.abs().argmax(-1, keepdim=True)
    scales = groups.gather(-1, at) / -8
    inverse = torch.where(scales == 0, 0, 1 / scales)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * scales.half().float()).flatten(-2)


def rotated_q4_0(rows: Tensor) -> Tensor:
    return rotate_reference(q4_0(rotate_reference(rows)), back=True)


def rounded_query(query: Tensor, bits: int) -> Tensor:
    """Rotated queries [..., dim] rounded to so many bits, as a pool's kernels take them."""
    turned = rotate_reference(query)
    unit = turned.abs().amax(-1, keepdim=True).clamp_min(1e-30) / QUERY_MOST[bits]
    return rotate_reference((turned / unit).round() * unit, back=True)
