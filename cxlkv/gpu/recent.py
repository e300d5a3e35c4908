"""A ring on the device keeps the newest pages of each request, open tail included, by layer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cxlkv.arrays import memory_of
from cxlkv.gpu.pieces import Piece, pieces_of
from cxlkv.kernels.recent import append_codes, append_rows
from cxlkv.layout import KVLayout
from cxlkv.ndp.engine import same_pages
from cxlkv.sequence import Sequence


class Recent:
    """keys[layer], values[layer]: [requests, kv_heads, slots, page_tokens, dim], or uint8 [...,
    slots, piece_bytes] of what the pool keeps as codes, which rows become here, too; page p lies in
    slot p % slots. keys_at, values_at [layer]: int64 [requests, kv_heads, slots], the addresses of
    the slots; None for values that are a prefix of the keys."""

    def __init__(self, layout: KVLayout, requests: int, slots: int, device: torch.device):
        self.slots = slots
        self._layout = layout
        own = layout.values == "own"
        self._pieces = pieces_of(layout)
        shape = (layout.layers, requests, layout.kv_heads, slots)
        made = [
            torch.zeros((*shape, *piece.shape), dtype=piece.dtype, device=device)
            for piece in self._pieces[: 1 + own]
        ]
        self.keys, self.values = made[0], made[1] if own else None
        self.keys_at = _addresses(self.keys)
        self.values_at = None if self.values is None else _addresses(self.values)

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor | None, positions: torch.Tensor
    ) -> None:
        """k, v [requests, rows, kv_heads, dim]; positions int64 [requests, rows], -1: no row."""
        self._append(k, self.keys[layer], positions, self._pieces[0])
        if self.values is not None and v is not None:
            self._append(v, self.values[layer], positions, self._pieces[1])

    def _append(
        self, rows: torch.Tensor, ring: torch.Tensor, positions: torch.Tensor, piece: Piece
    ) -> None:
        if piece.code is None:
            append_rows(rows, ring, positions)
        else:
            append_codes(rows, ring, positions, piece.code, self._layout.page_tokens)

    def load(self, request: int, sequence: Sequence) -> None:
        """Bring a sequence's newest pages, from far memory and from its open tail."""
        for layer in range(self._layout.layers):
            pages = self.newest(sequence, layer)
            if len(pages) == 0:
                continue
            slots = torch.from_numpy(pages % self.slots)
            found = self._fetch(sequence, layer, pages)
            for ring, pieces in zip((self.keys, self.values), found, strict=True):
                if ring is not None:
                    ring[layer, request, :, slots] = pieces.to(ring.device)

    def newest(self, sequence: Sequence, layer: int) -> npt.NDArray[np.int64]:
        """The pages of a request's sequence that lie here, between steps."""
        tokens, page_tokens = sequence.tokens(layer), self._layout.page_tokens
        window = self._layout.windows[layer]
        last = -(-tokens // page_tokens)
        first = max(0, last - self.slots)
        if window is not None:  # what lies behind it was given back
            first = max(first, (tokens - window + 1) // page_tokens)
        return np.arange(first, last)

    def _fetch(
        self, sequence: Sequence, layer: int, pages: npt.NDArray[np.int64]
    ) -> list[torch.Tensor]:
        heads = self._layout.kv_heads
        keys, values = (
            torch.empty((1, heads, len(pages), *piece.shape), dtype=piece.dtype)
            for piece in self._pieces
        )
        sequence.fetch(layer, same_pages(pages, heads), (keys, values), decoded=False)
        return [keys[0], values[0]]


def _addresses(rings: torch.Tensor) -> torch.Tensor:
    """Addresses of each piece of [layers, requests, heads, slots, ...]."""
    shape = rings.shape[:4]
    piece = rings[0, 0, 0, 0].numel() * rings.element_size()
    numbers = torch.arange(shape.numel(), dtype=torch.int64, device=rings.device)
    return (memory_of(rings, "rings") + numbers * piece).reshape(shape)
