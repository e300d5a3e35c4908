"""Fingerprints of a model's parameters and buffers as they are in memory, by samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

SAMPLE_BYTES = 1024


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> bytes:
    """16 bytes of each tensor's name, shape, dtype, and of its beginning, middle and end.

    One copy per device, however many tensors there are. A change that leaves these samples as they
    were is not seen.
    """
    found = hashlib.blake2b(digest_size=16, person=b"cxlkv.loaded")
    pieces: dict[torch.device, list[Tensor]] = {}
    for name, tensor in named:
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        pieces.setdefault(tensor.device, []).extend(_sampled(tensor.detach()))
    for device in sorted(pieces, key=str):
        found.update(torch.cat(pieces[device]).cpu().numpy().data)
    return found.digest()


def _sampled(tensor: Tensor) -> Iterator[Tensor]:
    """Bytes of its beginning, middle and end, uint8 [SAMPLE_BYTES] each or less."""
    flat = _flat(tensor)
    count = max(1, SAMPLE_BYTES // flat.element_size())
    last = max(0, len(flat) - count)
    for first in sorted({0, last // 2, last}):
        yield flat[first : first + count].view(torch.uint8)


def _flat(tensor: Tensor) -> Tensor:
    """A tensor's numbers in the order of memory where that is one piece, as of a transposed matrix;
    else those of its first, middle and last row."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    dense = tensor.permute(order)
    if dense.is_contiguous():
        return dense.reshape(-1)
    rows = [tensor[row] for row in sorted({0, len(tensor) // 2, len(tensor) - 1})]
    return torch.cat([row.reshape(-1)[:SAMPLE_BYTES].contiguous() for row in rows])
