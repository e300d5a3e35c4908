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


def check_generations(
    descriptor_at: torch.Tensor, expected: torch.Tensor, out: torch.Tensor
) -> None:
    """Counts the pages that are free or of another generation; address 0 is no page."""
    addresses = descriptor_at.tolist()
    versions = torch.tensor(
        [ctypes.c_int64.from_address(address).value if address else 0 for address in addresses],
        dtype=torch.int64,
    )
    state = versions & 0xFF
    generation = (versions >> 8) & ((1 << 56) - 1)
    valid = (generation == expected) & ((state == 1) | (state == 2))
    out.copy_(((descriptor_at != 0) & ~valid).sum(dtype=torch.int32).reshape(1))
