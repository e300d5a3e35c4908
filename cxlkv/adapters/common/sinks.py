"""Attention sinks: a learned logit of each head that takes weight and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention as if there were one more key of logit `sinks` [q_heads] and of no value.

    out [.., q_heads, dim] and its lse [.., q_heads], the natural log of the sum of exponentials.
    """
    if sinks is None:
        return out
    kept = torch.sigmoid(lse - sinks.to(lse.device, torch.float32))
    return out * kept[..., None].to(out.dtype)
