"""The reference of `copies.py`, in torch and ctypes, on addresses that this process can read."""

from __future__ import annotations

import ctypes

import torch


def copy_fragments(source_at: torch.Tensor, target_at: torch.Tensor, fragment_bytes: int) -> None:
    """Each fragment from its source to its target; none where either address is 0."""
    pairs = zip(source_at.flatten().tolist(), target_at.flatten().tolist(), strict=True)
    for source, target in pairs:
        if source and target:
            ctypes.memmove(target, source, fragment_bytes)
